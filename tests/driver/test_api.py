"""Checked calls, errors and the probe."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver as bindings

from fxengine.driver import CudaError, DeviceNotFound, Driver, api, errors, probe
from fxengine.driver.errors import ClosedError

OK = bindings.CUresult.CUDA_SUCCESS
FULL = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def test_call_returns_none_value_or_tuple():
    driver = Driver(SimpleNamespace(cuNone=lambda: (OK,), cuOne=lambda x: (OK, x), cuTwo=lambda x, y: (OK, y, x)))
    assert driver.cuNone() is None
    assert driver.cuOne(7) == 7
    assert driver.cuTwo(1, 2) == (2, 1)


def test_failed_call_carries_everything():
    driver = Driver(SimpleNamespace(cuMemAlloc=lambda n: (FULL, None)))
    with pytest.raises(CudaError, match=r"cuMemAlloc\(0x10000000000\) returned CUDA_ERROR_OUT_OF_MEMORY") as caught:
        driver.cuMemAlloc(1 << 40)
    error = caught.value
    assert (error.call, error.arguments, error.result) == ("cuMemAlloc", (1 << 40,), "CUDA_ERROR_OUT_OF_MEMORY")
    assert "smaller batch" in error.hint and error.hint in str(error)
    assert isinstance(error, RuntimeError)


def test_detail_of_the_simulated_device_is_shown():
    raw = SimpleNamespace(
        cuX=lambda: (bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,), last_detail="block (0,0,0) thread (5,0,0)"
    )
    with pytest.raises(CudaError, match=r"thread \(5,0,0\)") as caught:
        Driver(raw).cuX()
    assert caught.value.detail == "block (0,0,0) thread (5,0,0)"
    assert "context is lost" in caught.value.hint


def test_enums_and_structs_come_from_the_bindings():
    driver = Driver(SimpleNamespace())
    assert driver.CUresult is bindings.CUresult
    assert driver.CUlaunchConfig is bindings.CUlaunchConfig
    with pytest.raises(AttributeError, match="cuNotThere"):
        _ = driver.cuNotThere


def test_every_hint_belongs_to_a_result():
    # CUDA_ERROR_INSUFFICIENT_DRIVER is a name of the runtime API only
    known = set(bindings.CUresult.__members__) | {"CUDA_ERROR_INSUFFICIENT_DRIVER"}
    assert set(errors._HINTS) <= known


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (0x7F0000000000, "0x7f0000000000"),
        (True, "True"),
        (None, "None"),
        (b"fx_a", "'fx_a'"),
        (bindings.CUstream(0x5000), "CUstream(0x5000)"),
        (FULL, "CUDA_ERROR_OUT_OF_MEMORY"),
        ([1, 2, 3, 4, 5], "[1, 2, 3, 4, ...]"),
    ],
)
def test_arguments_are_readable(value: Any, text: str):
    assert errors.readable(value) == text


def test_cuda_error_survives_pickling():
    error = CudaError("cuMemFree", (bindings.CUdeviceptr(0x2000),), "CUDA_ERROR_INVALID_VALUE", detail="freed twice")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.call, copy.result, copy.hint, copy.detail) == (error.call, error.result, error.hint, "freed twice")


def test_closed_error_names_the_object():
    assert str(ClosedError("arena 'params'")) == "arena 'params' is closed"
    assert str(ClosedError("the plan is closed")) == "the plan is closed"


def _bindings_that(init: Any, version: int = 13000, count: int = 1) -> SimpleNamespace:
    return SimpleNamespace(cuInit=init, cuDriverGetVersion=lambda: (OK, version), cuDeviceGetCount=lambda: (OK, count))


def _no_library(_: int) -> tuple[Any]:
    raise RuntimeError("libcuda.so.1 not found")


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (_bindings_that(_no_library), "libcuda cannot be loaded"),
        (_bindings_that(lambda _: (bindings.CUresult.CUDA_ERROR_NO_DEVICE,)), "CUDA_VISIBLE_DEVICES"),
        (_bindings_that(lambda _: (bindings.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,)), "Reboot"),
        (_bindings_that(lambda _: (OK,), version=12080), r"supports CUDA 12\.8; CUDA 13\.0"),
        (_bindings_that(lambda _: (OK,), count=0), "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, fake: Any, message: str):
    monkeypatch.setattr(api, "bindings", fake)
    with pytest.raises(DeviceNotFound, match=message):
        probe()


def test_probe_lets_other_errors_through(monkeypatch: pytest.MonkeyPatch):
    def broken(_: int) -> tuple[Any]:
        raise TypeError("a bug")

    monkeypatch.setattr(api, "bindings", _bindings_that(broken))
    with pytest.raises(TypeError, match="a bug"):
        probe()


def test_probe_gives_the_raw_module(monkeypatch: pytest.MonkeyPatch):
    fake = _bindings_that(lambda _: (OK,))
    monkeypatch.setattr(api, "bindings", fake)
    assert probe() is fake


def test_versions_never_fail(monkeypatch: pytest.MonkeyPatch):
    from fxengine.driver import versions

    found = versions()
    assert set(found) == {
        "fxengine",
        "python",
        "numpy",
        "cuda-bindings",
        "driver-cuda",
        "driver",
        "gpu",
        "nvrtc",
        "compiler",
    }
    assert found["python"] and found["numpy"] and found["cuda-bindings"] and found["fxengine"]
    monkeypatch.setenv("CXX", "/nowhere/no-compiler")
    monkeypatch.setenv("PATH", "")
    assert isinstance(versions()["compiler"], str | None)
