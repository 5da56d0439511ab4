"""Devices, streams, events, and the lifetime of what they own."""

from __future__ import annotations

import gc
import threading
import warnings
from pathlib import Path

import pytest

from fxengine.driver import (
    Arena,
    ClosedError,
    CudaError,
    Device,
    DeviceNotFound,
    FxError,
    SimulatedDeviceWarning,
    Target,
    capture,
)
from fxengine.driver import (
    device as device_module,
)
from tests.driver.kernels import load, recorded

_ORDER = [
    "cuCtxSynchronize",
    "cuGraphDestroy",
    "cuEventDestroy",
    "cuStreamDestroy",
    "cuMemFree",
    "cuMemFreeHost",
    "cuDevicePrimaryCtxRelease",
]


def test_properties(device: Device):
    limits = device.properties
    assert device.name and limits.sm_count >= 1 and limits.total_memory > 0
    assert limits.shared_memory_per_block <= limits.shared_memory_per_block_optin
    assert limits.max_threads_per_block >= 256
    assert device.kind in ("sim", "cuda") and device.label in ("sim", "cuda:0")
    assert device.arch == "sim" if device.kind == "sim" else device.arch.startswith("sm_")
    target = device.target
    assert (target.kind, target.arch, target.sm_count) == (device.kind, device.arch, limits.sm_count)
    assert target.shared_memory_optin == limits.shared_memory_per_block_optin


@pytest.mark.sim
def test_target_of_the_simulated_device():
    with Device.open("sim") as device:
        assert Target.of("sim") == device.target


def test_target_without_hardware():
    assert Target.of("sm_90") == Target("cuda", "sm_90", 132, 232_448)
    assert Target.of("sm_90a").arch == "sm_90a"
    archs = ("sm_80", "sm_90a", "sm_120", "sim")
    assert [Target.of(arch).arch_number for arch in archs] == [80, 90, 120, None]
    assert [Target.of(arch).cluster for arch in archs] == [1, 8, 8, 1]
    with pytest.raises(FxError, match="known are sim, sm_75"):
        Target.of("sm_42")


@pytest.mark.parametrize("spec", ["gpu", "cuda:", "cuda:x", "CUDA", ""])
def test_unknown_spec(spec: str):
    with pytest.raises(FxError, match="expected 'auto', 'sim', 'cuda' or 'cuda:N'"):
        Device.open(spec)


@pytest.mark.sim
def test_auto_says_once_that_it_is_simulated(monkeypatch: pytest.MonkeyPatch):
    def none() -> None:
        raise DeviceNotFound("no NVIDIA driver")

    monkeypatch.setattr(device_module, "probe", none)
    monkeypatch.setattr(device_module, "_warned", False)
    with pytest.warns(SimulatedDeviceWarning, match=r"slower than a GPU: no NVIDIA driver"):
        first = Device.open("auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = Device.open()
    for device in (first, second):
        assert device.kind == "sim"
        device.close()


@pytest.mark.sim
def test_use_after_close():
    device = Device.open("sim")
    stream, event, arena = device.stream(), device.event(), Arena(device, "params", 1024)
    buffer = arena.place("w", (4,), "f4")
    device.close()
    device.close()
    assert device.closed and stream.closed
    with pytest.raises(ClosedError, match="device sim is closed"):
        device.stream()
    with pytest.raises(ClosedError, match="stream of sim is closed"):
        _ = stream.handle
    with pytest.raises(ClosedError, match="event of sim is closed"):
        _ = event.handle
    with pytest.raises(ClosedError, match="arena 'params' is closed"):
        buffer.read()
    with pytest.raises(ClosedError, match="device sim is closed"), device:
        pass
    stream.close()


def test_stream_and_events(device: Device):
    with (
        device.stream() as first,
        device.stream() as second,
        device.event(timing=True) as start,
        device.event(timing=True) as stop,
    ):
        start.record(stream=first)
        stop.record(stream=first)
        second.wait(stop)
        stop.synchronize()
        assert stop.query() and stop.elapsed_ms(start) >= 0.0
        second.synchronize()
        assert first.query() and second.query()
    with pytest.raises(ClosedError, match="stream of"):
        first.synchronize()


def test_elapsed_needs_timing(device: Device):
    with device.event() as plain, device.event(timing=True) as timed, pytest.raises(FxError, match="timing=True"):
        timed.elapsed_ms(plain)


def test_usable_from_several_threads(device: Device, tmp_path: Path):
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(10):
                with device.stream() as stream, Arena(device, f"arena {number}", 4096) as arena:
                    buffer = arena.place("x", (1024,), "u4")
                    buffer.fill_u32(number, stream=stream)
                    assert (buffer.read(stream=stream) == number).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# -- on a recording driver: which calls are made, and when ---------------------------------------------------------


def test_context_is_restored_for_the_caller():
    device, raw = recorded()
    raw.current = 0x77
    with device.activate():
        assert raw.current == device.core.context_value
        raw.calls.clear()
        with device.activate():
            pass
        assert raw.calls == []
    assert raw.current == 0x77
    with pytest.raises(ValueError), device.activate():
        raise ValueError
    assert raw.current == 0x77


def test_close_order():
    device, raw = recorded()
    kept = [Arena(device, "a", 16), device.stream(), device.event()]
    with device.stream() as stream, capture(stream) as recording:
        pass
    kept.append(recording.graph)
    raw.calls.clear()
    device.close()
    assert [name for name in raw.names() if name in _ORDER] == [n for n in _ORDER if n != "cuMemFreeHost"]
    assert raw.current == 0


def test_close_tries_everything_and_raises_the_first_error():
    device, raw = recorded()
    arena, stream = Arena(device, "a", 16), device.stream()
    raw.fail = {"cuCtxSynchronize": "CUDA_ERROR_ILLEGAL_ADDRESS", "cuMemFree": "CUDA_ERROR_ILLEGAL_ADDRESS"}
    with pytest.raises(CudaError, match="cuCtxSynchronize") as caught:
        device.close()
    assert "process has to be restarted" in caught.value.hint
    assert {"cuStreamDestroy", "cuMemFree", "cuDevicePrimaryCtxRelease"} <= set(raw.names())
    assert arena.closed and stream.closed and device.closed
    device.close()


def test_the_first_error_is_not_masked_by_the_close():
    device, raw = recorded()
    raw.fail = {"cuCtxSynchronize": "CUDA_ERROR_ILLEGAL_ADDRESS"}
    with pytest.raises(ValueError, match="first"), device:
        raise ValueError("first")


def test_finalisers_wait_for_the_next_call():
    device, raw = recorded()
    arena = Arena(device, "a", 16)
    raw.calls.clear()
    del arena
    gc.collect()
    assert raw.calls == []
    with device.activate():
        assert "cuMemFree" in raw.names()


def test_finalisers_and_closes_wait_for_the_end_of_a_capture():
    device, raw = recorded()
    dropped, closed = Arena(device, "dropped", 16), Arena(device, "closed", 16)
    with device.stream() as stream:
        with capture(stream) as recording:
            raw.calls.clear()
            del dropped
            closed.close()
            device.defer(lambda: raw.calls.append(("deferred", ())))
            with device.activate():
                pass
            assert closed.closed and raw.calls == []
            with pytest.raises(FxError, match="inside a capture"):
                device.close()
        recording.graph.close()
        assert raw.names().count("cuMemFree") == 2 and "deferred" in raw.names()


def test_forgotten_device_gives_its_context_back_last():
    device, raw = recorded()
    other, _ = recorded()
    device.stream(), Arena(device, "a", 16)
    cycle = {"device": device}
    cycle["self"] = cycle
    raw.calls.clear()
    del device, cycle
    gc.collect()
    assert raw.calls == []
    with other.activate():
        pass
    order = [name for name in raw.names() if name in _ORDER]
    assert order[-1] == "cuDevicePrimaryCtxRelease" and "cuMemFree" in order and "cuStreamDestroy" in order


def test_failed_deferred_release_is_a_warning():
    device, raw = recorded()
    arena = Arena(device, "a", 16)
    raw.fail = {"cuMemFree": "CUDA_ERROR_ILLEGAL_ADDRESS"}
    del arena
    with pytest.warns(ResourceWarning, match="deferred release failed"), device.activate():
        pass


def test_missing_gpu_number(monkeypatch: pytest.MonkeyPatch):
    _, raw = recorded()
    raw._next = 0  # cuDeviceGetCount answers 0x1000
    monkeypatch.setattr(device_module, "probe", lambda: raw)
    with pytest.raises(DeviceNotFound, match="cuda:9999 does not exist; this process sees 4096"):
        Device.open("cuda:9999")


@pytest.mark.sim
def test_illegal_address_is_explained_and_final(tmp_path: Path):
    device = Device.open("sim")
    kernel = load(device, tmp_path).kernel("fx_add")
    stream, arena = device.stream(), Arena(device, "a", 1024)
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as caught:
        kernel.launch(1, 64, kernel.bind(arena.address + (1 << 40), 1.0, 64), stream=stream)
        stream.synchronize()
    assert "fx_add" in caught.value.detail and "process has to be restarted" in str(caught.value)
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        Arena(device, "b", 16)
    with pytest.raises(CudaError):
        device.close()
    assert device.closed and arena.closed


@pytest.mark.sim
def test_options_of_the_simulated_device():
    with Device.open_sim(schedule="reverse") as device:
        assert device.driver.raw.schedule == "reverse"
    with pytest.raises(TypeError):
        Device.open_sim(no_such_option=1)
