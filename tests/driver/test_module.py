"""Loaded kernels, bound arguments, launches."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver as bindings

from fxengine.driver import Arena, ClosedError, CompileError, CudaError, Device, FxError, Module, Stream, capture
from tests.driver.kernels import load, recorded


@pytest.fixture
def module(device: Device, tmp_path: Path) -> Module:
    return load(device, tmp_path)


@pytest.fixture
def stream(device: Device):
    with device.stream() as opened:
        yield opened


def test_module_tells_what_it_has(module: Module, device: Device):
    assert module.kernel_names == ("fx_scale", "fx_add", "fx_types")
    kernel = module.kernel("fx_scale")
    assert kernel is module.kernel("fx_scale") and device.module(module.name) is module
    assert kernel.threads == 64 and [p.name for p in kernel.params] == ["table", "count"]
    assert kernel.attributes.max_threads >= 64 and kernel.attributes.static_shared == 0
    assert module.struct("Scale").itemsize == 32
    assert module.layout("Scale").fields[2].comment == "[n] in"
    with pytest.raises(FxError, match="no kernel 'fx_none'; it has fx_scale"):
        module.kernel("fx_none")
    with pytest.raises(FxError, match="no struct Nothing"):
        module.struct("Nothing")


def test_records_launch(module: Module, device: Device, stream: Stream):
    kernel, n = module.kernel("fx_scale"), (100, 200)
    with Arena(device, "a", Arena.required([400, 400, 800, 800, 64])) as arena:
        x = [arena.place(f"x{i}", (n[i],), np.float32) for i in range(2)]
        y = [arena.place(f"y{i}", (n[i],), np.float32) for i in range(2)]
        table = np.zeros(2, module.struct("Scale"))
        first = 0
        for i in range(2):
            x[i].write(np.arange(n[i], dtype=np.float32))
            tiles = -(-n[i] // 64)
            table[i] = (first, tiles, x[i].address, y[i].address, 2.0 + i, n[i])
            first += tiles
        place = arena.place("table", (table.nbytes,), np.uint8)
        place.write(table.view(np.uint8))
        kernel.launch(first, kernel.threads, kernel.bind(place, 2), stream=stream)
        for i in range(2):
            np.testing.assert_array_equal(y[i].read(stream=stream), np.arange(n[i], dtype=np.float32) * (2.0 + i))


@pytest.mark.parametrize("pdl", [False, True])
def test_launch_forms(module: Module, device: Device, stream: Stream, pdl: bool):
    kernel = module.kernel("fx_add")
    with Arena(device, "a", 1024) as arena:
        y = arena.place("y", (150,), np.float32)
        y.fill_u32(0)
        arguments = kernel.bind(y, 1.5, 150)
        kernel.launch(3, 64, arguments, stream=stream, pdl=pdl)
        kernel.launch((3, 1, 1), (64, 1, 1), arguments, stream=stream, pdl=pdl)
        assert (y.read(stream=stream) == 3.0).all()


def test_every_parameter_type(module: Module, device: Device, stream: Stream):
    kernel = module.kernel("fx_types")
    values = (-7, 0.5, 1e300, -(1 << 40), 4_000_000_000, 1 << 53)
    with Arena(device, "a", 256) as arena:
        out = arena.place("out", (6,), np.float64)
        bound = kernel.bind(out.address, np.int32(-7), np.float32(0.5), *values[2:])
        kernel.launch(1, 1, bound, stream=stream)
        np.testing.assert_array_equal(out.read(stream=stream), np.array(values, np.float64))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 1.0), r"fx_add takes 3 arguments \(float\* y, float value, int n\), got 2"),
        ((0, 1.0, 1.0), r"fx_add, parameter 'int n': expected an integer, got float"),
        ((0, 1.0, True), r"'int n': expected an integer, got bool"),
        ((0, 1.0, 1 << 31), r"'int n': 2147483648 is outside"),
        ((0, "1", 1), r"'float value': expected a number, got str"),
        ((1.0, 1.0, 1), r"'float\* y': expected a buffer or an address, got float"),
        ((-1, 1.0, 1), r"'float\* y': -1 is outside"),
        ((None, 1.0, 1), r"'float\* y': expected a buffer or an address, got NoneType"),
    ],
)
def test_bind_checks(module: Module, values: tuple, message: str):
    with pytest.raises(FxError, match=message):
        module.kernel("fx_add").bind(*values)


def test_bind_of_a_closed_buffer(module: Module, device: Device):
    arena = Arena(device, "gone", 256)
    y = arena.place("y", (1,), np.float32)
    arena.close()
    with pytest.raises(ClosedError, match="arena 'gone' is closed"):
        module.kernel("fx_add").bind(y, 1.0, 1)


def test_arguments_belong_to_their_kernel(module: Module, stream: Stream):
    with pytest.raises(FxError, match="fx_scale was given arguments bound to fx_add"):
        module.kernel("fx_scale").launch(1, 64, module.kernel("fx_add").bind(0, 0.0, 0), stream=stream)


def test_argument_block_layout(module: Module):
    arguments = module.kernel("fx_add").bind(0x1234_5678_9ABC, 2.5, -3)
    pointers = (ctypes.c_void_p * 3).from_address(arguments.address)
    assert ctypes.c_uint64.from_address(pointers[0]).value == 0x1234_5678_9ABC
    assert ctypes.c_float.from_address(pointers[1]).value == 2.5
    assert ctypes.c_int32.from_address(pointers[2]).value == -3
    assert [p - pointers[0] for p in pointers] == [0, 8, 12]


def test_dynamic_shared_memory_limits(module: Module, device: Device, stream: Stream):
    kernel = module.kernel("fx_add")
    limit = device.properties.shared_memory_per_block_optin
    with pytest.raises(FxError, match=f"can have {limit} together"):
        kernel.set_dynamic_shared(limit + 1)
    kernel.set_dynamic_shared(limit)
    assert kernel.dynamic_shared == limit
    kernel.launch(1, 64, kernel.bind(0, 0.0, 0), stream=stream, shared=limit)
    stream.synchronize()
    other = module.kernel("fx_scale")
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        other.launch(1, 64, other.bind(0, 0), stream=stream, shared=limit)


def test_launch_that_the_driver_refuses(module: Module, stream: Stream):
    kernel = module.kernel("fx_add")
    with pytest.raises(CudaError, match=r"cuLaunchKernel.*CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(0, 64, kernel.bind(0, 0.0, 0), stream=stream)


def test_source_that_does_not_compile(device: Device, tmp_path: Path):
    text = 'extern "C" __global__ void __launch_bounds__(32) fx_bad(int n) {\n    n = nothing;\n}\n'
    with pytest.raises(CompileError, match="nothing"):
        load(device, tmp_path, text, "bad.cu")


def test_no_loading_inside_a_capture(device: Device, stream: Stream, tmp_path: Path):
    with pytest.raises(FxError, match="cannot be loaded inside a capture"), capture(stream):
        load(device, tmp_path, name="late.cu")


def test_kernel_without_bounds(device: Device, tmp_path: Path):
    module = load(device, tmp_path, 'extern "C" __global__ void fx_free(int n) { (void)n; }\n', "free.cu")
    with pytest.raises(FxError, match="fx_free has no __launch_bounds__"):
        _ = module.kernel("fx_free").threads


@pytest.mark.sim
def test_kernels_end_with_their_device(tmp_path: Path):
    with Device.open("sim") as device:
        kernel = load(device, tmp_path).kernel("fx_add")
        stream, arguments = device.stream(), kernel.bind(0, 0.0, 0)
    with pytest.raises(ClosedError, match="kernel fx_add is closed"):
        kernel.launch(1, 1, arguments, stream=stream)


def _fake_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: list[tuple[int, int]]):
    device, raw = recorded()
    ok, bad = bindings.CUresult.CUDA_SUCCESS, bindings.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(
        raw,
        "cuFuncGetParamInfo",
        lambda f, i: (ok, *sizes[i]) if i < len(sizes) else (bad, 0, 0),
        raising=False,
    )
    monkeypatch.setattr("fxengine.driver.module.compiled", lambda *_: tmp_path / "x.cubin")
    text = 'extern "C" __global__ void __launch_bounds__(32) fx_k(float* x, int n) { }\n'
    return device, raw, load(device, tmp_path, text).kernel("fx_k")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(0, 8), (8, 8)], "parameter n was read as 4 bytes at 8, compiled it has 8 at 8"),
        ([(0, 8), (8, 4), (12, 4)], "more parameters than the 2"),
    ],
)
def test_signature_is_checked_against_the_compiled_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: list[tuple[int, int]], message: str
):
    with pytest.raises(FxError, match=message):
        _fake_kernel(monkeypatch, tmp_path, sizes)


def test_kernels_are_loaded_with_the_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _, raw, kernel = _fake_kernel(monkeypatch, tmp_path, [(0, 8), (8, 4)])
    assert raw.names().index("cuModuleLoad") < raw.names().index("cuFuncLoad")
    assert dict(raw.calls)["cuFuncLoad"] == (kernel.handle,)


def test_launch_without_a_context_is_repeated_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    device, raw, kernel = _fake_kernel(monkeypatch, tmp_path, [(0, 8), (8, 4)])
    contexts = []

    def launch(*_):
        contexts.append(raw.current)
        return (
            bindings.CUresult.CUDA_SUCCESS
            if raw.current == device.core.context_value
            else bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT,
        )

    monkeypatch.setattr(kernel, "_launch", launch)
    monkeypatch.setattr(device.driver, "cuLaunchKernel", lambda *a: launch(*a) and None, raising=False)
    kernel.launch(1, 1, kernel.bind(0, 0), stream=device.stream())
    assert contexts == [0, device.core.context_value] and raw.current == 0
