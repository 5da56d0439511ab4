"""What the tests of the simulated device share: a driver with short names for what tests do, and its smoke test."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu
from numpy.typing import DTypeLike, NDArray

from fxengine.driver.sim import SimDriver, build_shared_object

Result = cu.CUresult
THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
SCHEDULES = ["greedy", "reverse", "random:1", "random:2"]


def source(text: str, name: str = "inline.cu") -> Any:
    """A kernel source that exists only as text; the name is what messages show."""
    return SimpleNamespace(path=Path("/nowhere") / name, name=name, text=text)


class Sim:
    """A SimDriver with its context current on this thread."""

    def __init__(self, text: str = "", **options: Any) -> None:
        self.driver = SimDriver(**options)
        self.ok(self.driver.cuInit(0))
        self.context = self.ok(self.driver.cuDevicePrimaryCtxRetain(0))
        self.ok(self.driver.cuCtxSetCurrent(self.context))
        self.stream = self.ok(self.driver.cuStreamCreate(1))
        self.module = self.load(text) if text else None

    def ok(self, returned: tuple[Any, ...]) -> Any:
        """The values of a call that must succeed."""
        assert returned[0] == Result.CUDA_SUCCESS, (returned[0], self.driver.last_detail)
        return returned[1] if len(returned) == 2 else returned[1:] or None

    def load(self, text: str) -> Any:
        path = build_shared_object(source(text))
        return self.ok(self.driver.cuModuleLoad(str(path).encode()))

    def function(self, name: str) -> Any:
        return self.ok(self.driver.cuModuleGetFunction(self.module, name.encode()))

    def upload(self, array: NDArray[Any]) -> int:
        address = int(self.ok(self.driver.cuMemAlloc(array.nbytes)))
        self.ok(self.driver.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return address

    def zeros(self, count: int, dtype: DTypeLike = np.float32) -> int:
        return self.upload(np.zeros(count, dtype))

    def read(self, address: int, count: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        array = np.empty(count, dtype)
        self.ok(self.driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return array

    def try_launch(
        self, name: str, grid: Any, block: Any, *values: Any, shared: int = 0, stream: Any = None
    ) -> tuple[Any, ...]:
        """Launch; Python ints are 64-bit addresses, NumPy scalars are what they are."""
        grid = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
        block = (*(block if isinstance(block, tuple) else (block,)), 1, 1)[:3]
        arguments = Arguments(*values)
        on = self.stream if stream is None else stream
        function = self.function(name)
        return self.driver.cuLaunchKernel(function, *grid, *block, shared, on, arguments.address, 0)

    def launch(self, *what: Any, **named: Any) -> None:
        self.ok(self.try_launch(*what, **named))

    def capture(self, stream: Any = None) -> None:
        self.ok(self.driver.cuStreamBeginCapture(self.stream if stream is None else stream, THREAD_LOCAL))

    def end(self, stream: Any = None) -> Any:
        return self.ok(self.driver.cuStreamEndCapture(self.stream if stream is None else stream))

    def close(self) -> None:
        self.driver.cuCtxSetCurrent(0)
        self.driver.cuDevicePrimaryCtxRelease(0)


class Arguments:
    """Kernel arguments behind an array of pointers."""

    def __init__(self, *values: Any) -> None:
        self.boxes = [np.array(value, np.uint64 if isinstance(value, int) else None) for value in values]
        self.pointers = (ctypes.c_void_p * max(len(values), 1))(*(box.ctypes.data for box in self.boxes))
        self.address = ctypes.addressof(self.pointers)


def make_sim(text: str, **options: Any) -> Iterator[Sim]:
    """A fixture's body."""
    opened = Sim(text, **options)
    yield opened
    opened.close()


ADD = """
extern "C" __global__ void __launch_bounds__(128) add(float* x, float value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += value;
}
"""


@pytest.fixture
def sim() -> Iterator[Sim]:
    yield from make_sim(ADD)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_kernel_runs(sim: Sim, schedule: str):
    sim.driver.set_schedule(schedule, poison="ff")
    x = sim.upload(np.arange(1000, dtype=np.float32))
    sim.launch("add", 8, 128, x, np.float32(0.5), np.int32(1000))
    assert (sim.read(x, 1000) == np.arange(1000) + 0.5).all()


def test_what_the_device_says_of_itself(sim: Sim):
    driver, attribute = sim.driver, cu.CUdevice_attribute
    assert sim.ok(driver.cuDeviceGetCount()) == 1
    assert sim.ok(driver.cuDeviceGetName(64, 0)).rstrip(b"\0") == b"fxengine simulated device"
    assert len(sim.ok(driver.cuDeviceGetName(5, 0))) == 5
    expected = {
        "COMPUTE_CAPABILITY_MAJOR": 0,
        "MULTIPROCESSOR_COUNT": 4,
        "WARP_SIZE": 32,
        "MAX_THREADS_PER_BLOCK": 1024,
        "MAX_SHARED_MEMORY_PER_BLOCK": 49152,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    }
    for name, value in expected.items():
        assert sim.ok(driver.cuDeviceGetAttribute(getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), 0)) == value
    assert sim.ok(driver.cuDriverGetVersion()) == 13000
    assert driver.cuDeviceGet(1) == (Result.CUDA_ERROR_INVALID_DEVICE, None)
    assert sim.ok(driver.cuGetErrorName(Result.CUDA_ERROR_INVALID_VALUE)) == b"CUDA_ERROR_INVALID_VALUE"
    assert sim.ok(driver.cuGetErrorString(Result.CUDA_ERROR_INVALID_VALUE)) == b"invalid value"


def test_every_call_has_the_names_of_the_bindings():
    own = [name for name in dir(SimDriver) if name.startswith("cu")]
    assert len(own) > 60
    for name in own:
        assert callable(getattr(cu, name)), name


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "backwards"},
        {"schedule": "random"},
        {"schedule": "greedy:3"},
        {"poison": "aa"},
        {"streams": "lazy"},
        {"streams": "eager"},
        {"alignment": 8},
        {"alignment": 100},
    ],
)
def test_unknown_options_are_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match=r"expected"):
        SimDriver(**options)
