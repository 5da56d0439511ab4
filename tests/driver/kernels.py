"""A kernel file and a recording driver for the driver layer's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda.bindings import driver as bindings

from fxengine.driver import Device, Driver, Module

KERNELS = """
#include "fx.cuh"

struct Scale {
    int first_tile;  // filled by the planner
    int tiles;
    const float* x;  // [n] in
    float* y;        // [n] out
    float factor;
    int n;
};

extern "C" __global__ void __launch_bounds__(64) fx_scale(const Scale* table, int count) {
    fx_wait();
    fx_trigger();
    int tile;
    const Scale& r = fx_record(table, count, tile);
    const int i = tile * 64 + static_cast<int>(threadIdx.x);
    if (i < r.n) r.y[i] = r.x[i] * r.factor;
}

extern "C" __global__ void __launch_bounds__(64) fx_add(float* y, float value, int n) {
    fx_wait();
    fx_trigger();
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] += value;
}

extern "C" __global__ void __launch_bounds__(1) fx_types(double* out, int a, float b, double c, long long d, unsigned e,
                                                         unsigned long long f) {
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = static_cast<double>(d);
    out[4] = e;
    out[5] = static_cast<double>(f);
}
"""


def load(device: Device, folder: Path, text: str = KERNELS, name: str = "probe.cu") -> Module:
    """Write `text` to a file and load it."""
    path = folder / name
    path.write_text(text)
    return device.module(str(path))


class RecordingDriver:
    """A raw driver that notes every call, answers with fresh handles, and fails where it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fail: dict[str, str] = {}
        self.current = 0
        self._next = 0x1000

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return bindings.CUresult.CUDA_SUCCESS, self.current

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        self.calls.append(("cuCtxSetCurrent", (context,)))
        self.current = int(context)
        return (bindings.CUresult.CUDA_SUCCESS,)

    def cuDeviceGetName(self, *_: Any) -> tuple[Any, ...]:
        return bindings.CUresult.CUDA_SUCCESS, b"Recorder\0\0"

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            if name in self.fail:
                return getattr(bindings.CUresult, self.fail[name]), None
            success = bindings.CUresult.CUDA_SUCCESS
            silent = ("Destroy", "Free", "Release", "Synchronize", "Launch", "Record", "BeginCapture", "Unload")
            if any(word in name for word in silent) and name != "cuMemFreeAsync":
                return (success,)
            self._next += 0x1000
            return success, self._next

        return call


def recorded(kind: str = "cuda") -> tuple[Device, RecordingDriver]:
    """A device on a recording driver."""
    raw = RecordingDriver()
    device = Device(Driver(raw), 0, kind)
    raw.calls.clear()
    return device, raw
