"""The simulated device refuses what a GPU's driver refuses, with the same results."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from fxengine.driver.sim import build_shared_object
from tests.driver.test_sim_support import ADD, Result, Sim, make_sim, source

TEXT = (
    ADD
    + """
constexpr int bound = 32;
extern "C" __global__ void __launch_bounds__(bound * 2, 1) bounded(float* x) { x[0] = blockDim.x; }
extern "C" __global__ void free_size(float* x) { x[0] = blockDim.x; }
template <int N> __device__ float helper(float v) {
    __shared__ float s[N];
    s[threadIdx.x] = v;
    __syncthreads();
    return s[0];
}
extern "C" __global__ void static_shared(float* x) { x[0] = helper<10000>(1.0f); }
extern "C" __global__ void more_shared(float* x) { x[0] = helper<100>(1.0f) + helper<200>(1.0f) + helper<100>(2.0f); }
extern "C" __global__ void dynamic_shared(float* x, int n) {
    FX_DYN_SHARED(float, s);
    s[n - 1] = 5.0f;
    x[0] = s[n - 1];
}
extern "C" __global__ void nothing() {}
"""
)
MAX_DYNAMIC = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
INVALID = (Result.CUDA_ERROR_INVALID_VALUE,)


@pytest.fixture
def sim() -> Iterator[Sim]:
    yield from make_sim(TEXT)


# --- launches ---


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0, 1, 1), 1),
        ((1, 0, 1), 1),
        (1, 0),
        (1, (1, 1, 0)),
        (1, 1025),
        (1, (33, 32, 1)),
        (1, (1, 1, 65)),
        ((1, 65536, 1), 1),
        ((1, 1, 65536), 1),
        ((2**31, 1, 1), 1),
    ],
)
def test_impossible_shapes(sim: Sim, grid: Any, block: Any):
    x = sim.zeros(1)
    assert sim.try_launch("free_size", grid, block, x) == INVALID
    assert "expected 1 to" in sim.driver.last_detail or "1024" in sim.driver.last_detail
    sim.launch("free_size", 1, 1, x)


def test_launch_bounds(sim: Sim):
    x = sim.zeros(1)
    sim.launch("bounded", 1, 64, x)
    assert sim.try_launch("bounded", 1, 65, x) == INVALID
    sim.launch("free_size", 1, 1024, x)
    assert sim.read(x, 1)[0] == 1024
    function = sim.function("bounded")
    limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    assert sim.ok(sim.driver.cuFuncGetAttribute(limit, function)) == 64
    assert sim.ok(sim.driver.cuFuncGetName(function)) == b"bounded"
    sim.ok(sim.driver.cuFuncLoad(function))


def test_static_shared_memory_is_what_a_kernel_reaches(sim: Sim):
    attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    expected = {"static_shared": 40000, "more_shared": 1200, "dynamic_shared": 0, "nothing": 0}
    for name, size in expected.items():
        assert sim.ok(sim.driver.cuFuncGetAttribute(attribute, sim.function(name))) == size, name


def test_dynamic_shared_memory_needs_an_opt_in(sim: Sim):
    driver, x, function = sim.driver, sim.zeros(1), sim.function("dynamic_shared")
    sim.launch("dynamic_shared", 1, 1, x, np.int32(12288), shared=49152)
    assert sim.try_launch("dynamic_shared", 1, 1, x, np.int32(1), shared=49156) == INVALID
    assert "49156 bytes of dynamic shared memory; allowed are 49152" in driver.last_detail
    assert driver.cuFuncSetAttribute(function, MAX_DYNAMIC, 232449) == INVALID
    sim.ok(driver.cuFuncSetAttribute(function, MAX_DYNAMIC, 232448))
    assert sim.ok(driver.cuFuncGetAttribute(MAX_DYNAMIC, function)) == 232448
    sim.launch("dynamic_shared", 1, 1, x, np.int32(58112), shared=232448)
    assert sim.read(x, 1)[0] == 5


def test_static_and_dynamic_shared_memory_count_together(sim: Sim):
    x, function = sim.zeros(1), sim.function("static_shared")
    sim.launch("static_shared", 1, 1, x, shared=9152)
    assert sim.try_launch("static_shared", 1, 1, x, shared=9153) == INVALID
    assert sim.driver.cuFuncSetAttribute(function, MAX_DYNAMIC, 232448) == INVALID
    sim.ok(sim.driver.cuFuncSetAttribute(function, MAX_DYNAMIC, 192448))


def test_too_much_static_shared_memory_does_not_load(sim: Sim):
    text = 'extern "C" __global__ void big(float* x) { __shared__ float s[12289]; s[threadIdx.x] = x[0]; x[0] = s[0]; }'
    path = build_shared_object(source(text))
    assert sim.driver.cuModuleLoad(str(path).encode()) == (Result.CUDA_ERROR_INVALID_IMAGE, None)
    assert "kernel big uses 49156 bytes" in sim.driver.last_detail


def test_missing_arguments(sim: Sim):
    driver, function = sim.driver, sim.function("free_size")
    shape = (1, 1, 1, 1, 1, 1, 0, sim.stream)
    assert driver.cuLaunchKernel(function, *shape, 0, 0) == INVALID
    assert driver.cuLaunchKernel(function, *shape, None, 0) == INVALID
    sim.ok(driver.cuLaunchKernel(sim.function("nothing"), *shape, 0, 0))
    assert driver.cuLaunchKernel(12345, *shape, 0, 0) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    assert driver.cuLaunchKernel(function, *shape[:-1], 12345, 0, 0) == (Result.CUDA_ERROR_INVALID_HANDLE,)


def test_the_ways_to_pass_arguments(sim: Sim):
    driver, x, function = sim.driver, sim.zeros(1), sim.function("add")
    shape = (1, 1, 1, 1, 1, 1, 0, sim.stream)
    values = (x, 2.0, 1), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int)
    sim.ok(driver.cuLaunchKernel(function, *shape, values, 0))
    boxes = [np.array(x, np.uint64), np.array(3.0, np.float32), np.array(1, np.int32)]
    pointers = np.array([box.ctypes.data for box in boxes], np.uint64)
    sim.ok(driver.cuLaunchKernel(function, *shape, pointers, 0))
    assert sim.read(x, 1)[0] == 5
    assert driver.cuLaunchKernel(function, *shape, (values[0][:2], values[1][:2]), 0) == INVALID
    short = (x, 2.0, 1), (ctypes.c_void_p, ctypes.c_double, ctypes.c_int)
    assert driver.cuLaunchKernel(function, *shape, short, 0) == INVALID


# --- memory ---


def test_allocations(sim: Sim):
    driver = sim.driver
    assert driver.cuMemAlloc(0) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    assert driver.cuMemAlloc(1 << 50) == (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
    for size in (1, 255, 256, 4096, 4097, 100_000):
        address = int(sim.ok(driver.cuMemAlloc(size)))
        assert address % 256 == 0
        sim.ok(driver.cuMemFree(address))
        assert driver.cuMemFree(address) == INVALID
    free, total = sim.ok(driver.cuMemGetInfo())
    assert free == total == sim.ok(driver.cuDeviceTotalMem(0))
    sim.ok(driver.cuMemFree(0))


def test_copies_outside_of_allocations(sim: Sim):
    driver, x = sim.driver, sim.zeros(10)
    host = np.zeros(11, np.float32)
    for count, start in ((44, 0), (40, 4), (4, 40), (4, -4)):
        assert driver.cuMemcpyHtoD(x + start, host, count) == INVALID
        assert driver.cuMemcpyDtoH(host, x + start, count) == INVALID
        assert driver.cuMemcpyDtoD(x, x + start, count) == INVALID
        assert driver.cuMemcpyHtoDAsync(x + start, host, count, sim.stream) == INVALID
        assert driver.cuMemsetD32(x + start, 0, count // 4) == INVALID
        assert driver.cuMemsetD32Async(x + start, 0, count // 4, sim.stream) == INVALID
    assert driver.cuMemcpyHtoD(x, 0, 4) == INVALID
    assert driver.cuMemsetD32(x + 2, 0, 1) == INVALID
    assert driver.cuMemcpyHtoD(x, host[::2], 4) == INVALID  # not contiguous
    sim.ok(driver.cuMemFree(x))
    assert driver.cuMemcpyHtoD(x, host, 4) == INVALID
    assert f"{x:#x} lies in memory that was freed (40 bytes" in driver.last_detail


@pytest.mark.parametrize("guard_pages", [True, False])
def test_host_memory(guard_pages: bool):
    for sim in make_sim(TEXT, guard_pages=guard_pages):
        driver = sim.driver
        host = sim.ok(driver.cuMemHostAlloc(64, cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_PORTABLE))
        device = int(sim.ok(driver.cuMemHostGetDevicePointer(host, 0)))
        ctypes.memset(host, 0, 64)
        sim.launch("add", 1, 16, device, np.float32(2), np.int32(16))
        assert ctypes.c_float.from_address(host + 60).value == 2
        assert driver.cuMemHostGetDevicePointer(sim.zeros(1), 0) == (Result.CUDA_ERROR_INVALID_VALUE, None)
        assert driver.cuMemFree(host) == INVALID
        sim.ok(driver.cuMemFreeHost(host))
        assert driver.cuMemFreeHost(host) == INVALID


# --- modules and contexts ---


def test_modules_that_cannot_be_loaded(sim: Sim, tmp_path: Path):
    driver = sim.driver
    assert driver.cuModuleLoad(b"/nowhere.so") == (Result.CUDA_ERROR_FILE_NOT_FOUND, None)
    for content in (b"", b"not an object"):
        (tmp_path / "bad.so").write_bytes(content)
        assert driver.cuModuleLoad(str(tmp_path / "bad.so").encode()) == (Result.CUDA_ERROR_INVALID_IMAGE, None)
    assert driver.cuModuleGetFunction(sim.module, b"subtract") == (Result.CUDA_ERROR_NOT_FOUND, None)
    assert "it has add, bounded" in driver.last_detail


def test_handles_of_an_unloaded_module(sim: Sim):
    driver, function = sim.driver, sim.function("nothing")
    again = sim.load(TEXT)
    sim.ok(driver.cuModuleUnload(sim.module))
    assert driver.cuModuleUnload(sim.module) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    assert driver.cuModuleGetFunction(sim.module, b"nothing") == (Result.CUDA_ERROR_INVALID_HANDLE, None)
    assert driver.cuFuncGetName(function) == (Result.CUDA_ERROR_INVALID_HANDLE, None)
    sim.module = again
    sim.launch("nothing", 1, 1)


def test_no_current_context(sim: Sim):
    driver, x = sim.driver, sim.zeros(1)
    got = []

    def other() -> None:
        got.append(sim.ok(driver.cuCtxGetCurrent()))
        got.append(driver.cuMemAlloc(4))
        got.append(driver.cuStreamSynchronize(sim.stream))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert [int(got[0]), *got[1:]] == [
        0,
        (Result.CUDA_ERROR_INVALID_CONTEXT, None),
        (Result.CUDA_ERROR_INVALID_CONTEXT,),
    ]
    assert driver.cuCtxSetCurrent(99) == (Result.CUDA_ERROR_INVALID_CONTEXT,)
    assert driver.cuCtxGetCurrent() == (Result.CUDA_SUCCESS, sim.context)
    sim.ok(driver.cuDevicePrimaryCtxRelease(0))
    assert driver.cuMemFree(x) == (Result.CUDA_ERROR_CONTEXT_IS_DESTROYED,)
    assert driver.cuDevicePrimaryCtxRelease(0) == (Result.CUDA_ERROR_INVALID_CONTEXT,)


SCRIPT = r"""
import os
import numpy as np
from tests.driver.test_sim_support import ADD, Result, Sim

def work(sim):
    x = sim.zeros(1 << 20)
    sim.launch("add", 8192, 128, x, np.float32(1), np.int32(1 << 20))
    assert (sim.read(x, 1 << 20) == 1).all()

fresh = Sim.__new__(Sim)
from fxengine.driver.sim import SimDriver
assert SimDriver().cuDeviceGetCount() == (Result.CUDA_ERROR_NOT_INITIALIZED, None)
sim = Sim(ADD)
work(sim)
child = os.fork()
if child == 0:
    ok = sim.driver.cuMemAlloc(4) == (Result.CUDA_ERROR_NOT_INITIALIZED, None)
    work(Sim(ADD))  # a device of its own: the pool starts anew
    os._exit(0 if ok else 1)
work(sim)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_needs_a_device_of_its_own():
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
