"""Planted bugs: each must be found, and the message must lead to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.driver.test_sim_support import Result, Sim, make_sim

TEXT = r"""
// 64 threads; `barrier` 0 leaves the barrier out.
extern "C" __global__ void neighbour(const float* x, float* y, int barrier) {
    __shared__ float s[64];
    const int t = threadIdx.x;
    s[t] = x[t];
    if (barrier) __syncthreads();
    y[t] = s[(t + 1) % 64] + s[(t + 63) % 64];
}

// A reduction whose scratch is used again; `barrier` 0 leaves out the barrier between.
extern "C" __global__ void twice(float* y, int barrier) {
    __shared__ float s[64];
    const int t = threadIdx.x;
    float total = 0.0f;
    for (int round = 0; round < 3; ++round) {
        s[t] = t * (round + 1);
        __syncthreads();
        for (int i = 0; i < 64; ++i) total += s[i];
        if (barrier) __syncthreads();
    }
    y[t] = total;
}

extern "C" __global__ void unsynchronized_warp(float* y, int barrier) {
    __shared__ float s[32];
    const int t = threadIdx.x;
    s[t] = t;
    if (barrier) __syncwarp();
    y[t] = s[31 - t];
}

// A chain of asynchronous copies, two groups ahead; waits until `newest` groups are left, `all` also at the end.
extern "C" __global__ void copied(const float* x, float* y, int newest, int all) {
    __shared__ float s[4][32];
    const int t = threadIdx.x;
    for (int i = 0; i < 2; ++i) {
        fx_sim::fx_sim_copy(&s[i][t], x + 32 * i + t, sizeof(float));
        fx_sim::fx_sim_copy_commit();
    }
    fx_sim::fx_sim_copy_wait(newest);
    y[t] = s[0][t];
    if (all) fx_sim::fx_sim_copy_wait(0);
}

extern "C" __global__ void uninitialized(float* y) {
    __shared__ float s[64];
    if (threadIdx.x < 60) s[threadIdx.x] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}

// Blocks read what other blocks of the same launch write.
extern "C" __global__ void racing_blocks(int* x) {
    if (threadIdx.x == 0) x[blockIdx.x + 1] = x[blockIdx.x] + 1;
}

extern "C" __global__ void write_at(float* x, int i) {
    if (threadIdx.x == 3 && blockIdx.x == 1)
        x[i] = 1.0f;  // out of bounds
}
extern "C" __global__ void read_at(const float* x, int i, float* y) { y[0] = x[i]; }

extern "C" __global__ void static_index(float* y, int i) {
    __shared__ float s[8][16];
    s[threadIdx.x][i] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x][0];
}
extern "C" __global__ void dynamic_index(float* y, int i) {
    FX_DYN_SHARED(float, s);
    s[i] = 1.0f;
    y[0] = s[i];
}

extern "C" __global__ void stuck(int* x) {
    if (threadIdx.x < 100) {
        __syncthreads();  // 100 threads
    } else {
        __syncwarp(0xffffffffu);  // 28 threads
        while (__any_sync(0xffffffffu, x[0] == 0)) __syncwarp(0x0000000fu << 4);
    }
}
extern "C" __global__ void half_barrier(int* x) {
    if (threadIdx.x % 2 == 0) __syncthreads();
    if (__any_sync(0xffffffffu, threadIdx.x == 1)) x[0] = 1;
    __syncthreads();
}
extern "C" __global__ void two_lines() {
    if (threadIdx.x < 32) {
        __syncthreads();  // one line
    } else {
        __syncthreads();  // another line
    }
}
extern "C" __global__ void foreign_mask() { __syncwarp(0xfffffffeu); }
extern "C" __global__ void mixed_operations(int* x) {
    if (threadIdx.x < 16) x[0] = __shfl_sync(0xffffffffu, 1, 0);
    else x[0] = __ballot_sync(0xffffffffu, 1);
}
extern "C" __global__ void divide(int* x, int by) { x[0] = x[0] / by; }
__device__ __noinline__ float recurse(const float* x, int n) {
    float local[512];
    for (int i = 0; i < 512; ++i) local[i] = x[0] + n;
    return n == 0 ? local[7] : recurse(local, n - 1) + local[n % 512];
}
extern "C" __global__ void deep(float* x, int n) { x[0] = recurse(x, n); }
"""


def line(text: str) -> str:
    """Where a text stands in the source, as messages show it."""
    return f"inline.cu:{TEXT[: TEXT.index(text)].count(chr(10)) + 1}"


@pytest.fixture
def sim() -> Iterator[Sim]:
    yield from make_sim(TEXT)


def results(sim: Sim, schedules: list[str], poison: str, kernel: str, block: int, *arguments: object) -> set[bytes]:
    found = set()
    for schedule in schedules:
        sim.driver.set_schedule(schedule, poison=poison)
        y = sim.zeros(block)
        sim.launch(kernel, 1, block, *arguments[:-1], y, arguments[-1])
        found.add(sim.read(y, block).tobytes())
    return found


ORDERS = ["greedy", "reverse", *(f"random:{seed}" for seed in range(4))]


@pytest.mark.parametrize("order", ["reverse", *ORDERS[2:]])
@pytest.mark.parametrize("kernel", ["neighbour", "unsynchronized_warp"])
def test_a_missing_barrier_shows_in_every_other_order(sim: Sim, kernel: str, order: str):
    block = 64 if kernel == "neighbour" else 32
    x = [sim.upload(np.arange(1, 65, dtype=np.float32))] if kernel == "neighbour" else []
    orders = ["greedy", order]
    assert len(results(sim, orders, "00", kernel, block, *x, np.int32(1))) == 1
    assert len(results(sim, orders, "00", kernel, block, *x, np.int32(0))) == 2


def test_scratch_used_too_early_shows_in_other_orders(sim: Sim):
    assert len(results(sim, ORDERS, "00", "twice", 64, np.int32(1))) == 1
    assert len(results(sim, ORDERS, "00", "twice", 64, np.int32(0))) > 1


def test_poison_shows_uninitialized_shared_memory(sim: Sim):
    got = []
    for poison in ("00", "ff"):
        sim.driver.set_schedule(poison=poison)
        y = sim.zeros(64)
        sim.launch("uninitialized", 1, 64, y)
        got.append(sim.read(y, 64))
    assert (got[0][:60] == 1).all()
    assert (got[0][60:] == 0).all()
    assert np.isnan(got[1][60:]).all()


def test_a_copy_arrives_when_its_group_is_waited_for(sim: Sim):
    sim.driver.set_schedule(poison="ff")
    x, y = sim.upload(np.arange(64, dtype=np.float32)), sim.zeros(32)
    sim.launch("copied", 1, 32, x, y, np.int32(1), np.int32(1))
    assert (sim.read(y, 32) == np.arange(32)).all()
    sim.launch("copied", 1, 32, x, y, np.int32(2), np.int32(1))
    assert np.isnan(sim.read(y, 32)).all(), "read before its copy arrived"


def test_a_thread_that_leaves_its_copies_behind(sim: Sim):
    x, y = sim.upload(np.arange(64, dtype=np.float32)), sim.zeros(32)
    detail = failure(sim, Result.CUDA_ERROR_LAUNCH_FAILED, "copied", 1, 32, x, y, np.int32(1), np.int32(0))
    assert "returns while 1 of its asynchronous copies" in detail


def test_the_order_of_blocks_shows_races_between_them(sim: Sim):
    got = set()
    for order in ORDERS:
        sim.driver.set_schedule(order)
        x = sim.zeros(33, np.int32)
        sim.launch("racing_blocks", 32, 32, x)
        got.add(sim.read(x, 33, np.int32).tobytes())
    assert len(got) > 1


def test_new_memory_is_not_zero(sim: Sim):
    address = int(sim.ok(sim.driver.cuMemAlloc(64)))
    assert np.isnan(sim.read(address, 16)).all()


# --- faults ---


def failure(sim: Sim, result: Result, kernel: str, *what: object, **named: int) -> str:
    """The detail of a launch that must fail with `result`."""
    returned = sim.try_launch(kernel, *what, **named)
    assert returned == (result,)
    return sim.driver.last_detail


@pytest.mark.parametrize("workers", [1, 2])
def test_a_write_past_the_end_names_kernel_thread_and_line(workers: int):
    for sim in make_sim(TEXT, workers=workers):
        x = sim.zeros(64)
        sim.launch("write_at", 2, 32, x, np.int32(63))
        detail = failure(sim, Result.CUDA_ERROR_ILLEGAL_ADDRESS, "write_at", 2, 32, x, np.int32(64))
        assert f"illegal address {x + 256:#x} in kernel write_at, block (1,0,0) thread (3,0,0)" in detail
        if shutil.which("addr2line"):
            assert line("// out of bounds") in detail


def test_a_read_past_the_end_and_after_free(sim: Sim):
    x, y = sim.zeros(64), sim.zeros(1)
    failure(sim, Result.CUDA_ERROR_ILLEGAL_ADDRESS, "read_at", 1, 1, x, np.int32(64), y)
    sim.close()
    for again in make_sim(TEXT):
        x, y = again.zeros(64), again.zeros(1)
        again.ok(again.driver.cuMemFree(x))
        detail = failure(again, Result.CUDA_ERROR_ILLEGAL_ADDRESS, "read_at", 1, 1, x, np.int32(0), y)
        assert f"illegal address {x:#x}" in detail


@pytest.mark.parametrize("index", [10, 63, -1])
def test_a_write_into_the_rest_of_the_page_is_found_at_the_next_synchronization(sim: Sim, index: int):
    address = sim.zeros(10)  # 40 bytes of a place of 256
    if index == -1:
        address = sim.zeros(64 * 5)
    sim.launch("write_at", 2, 32, address, np.int32(index))
    assert sim.driver.cuCtxSynchronize() == (Result.CUDA_ERROR_ILLEGAL_ADDRESS,)
    side = "before the beginning" if index < 0 else "behind the end"
    assert side in sim.driver.last_detail
    assert sim.driver.cuMemAlloc(16) == (Result.CUDA_ERROR_ILLEGAL_ADDRESS, None)


def test_small_alignment_leaves_no_rest():
    for sim in make_sim(TEXT, alignment=16):
        x = sim.zeros(12)
        failure(sim, Result.CUDA_ERROR_ILLEGAL_ADDRESS, "write_at", 2, 32, x, np.int32(12))


def test_an_index_outside_a_shared_array(sim: Sim):
    y = sim.zeros(8)
    sim.launch("static_index", 1, 8, y, np.int32(15))
    detail = failure(sim, Result.CUDA_ERROR_ILLEGAL_ADDRESS, "static_index", 1, 8, y, np.int32(16))
    assert "outside its array (bounds trap) in kernel static_index, block (0,0,0) thread (0,0,0)" in detail


def test_an_index_outside_dynamic_shared_memory(sim: Sim):
    y = sim.zeros(1)
    sim.launch("dynamic_index", 1, 1, y, np.int32(99), shared=400)
    detail = failure(sim, Result.CUDA_ERROR_ILLEGAL_ADDRESS, "dynamic_index", 1, 1, y, np.int32(100), shared=400)
    assert "access 0 bytes past the end of 400 bytes of dynamic shared memory" in detail


def test_a_deadlock_names_every_place_where_threads_wait(sim: Sim):
    x = sim.zeros(1, np.int32)
    detail = failure(sim, Result.CUDA_ERROR_LAUNCH_FAILED, "stuck", 1, 128, x)
    assert "deadlock in kernel stuck, block (0,0,0): 128 of 128 threads have not returned" in detail
    assert f"100, first (0,0,0), wait at __syncthreads, {line('// 100 threads')}" in detail
    assert f"28, first (100,0,0), wait at __syncwarp, {line('// 28 threads')}" in detail


def test_a_barrier_in_a_branch(sim: Sim):
    x = sim.zeros(1, np.int32)
    detail = failure(sim, Result.CUDA_ERROR_LAUNCH_FAILED, "half_barrier", 1, 32, x)
    assert "deadlock" in detail
    assert "__any_sync" in detail


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("two_lines", f"barrier is reached at two lines, {line('// one line')} and {line('// another line')}"),
        ("foreign_mask", "lane 0 is not in its own mask 0xfffffffe"),
        ("mixed_operations", f"__shfl_sync at {line('__shfl_sync')} and __ballot_sync at {line('__ballot_sync')}"),
        ("divide", "integer division by zero in kernel divide"),
        ("deep", "stack overflow"),
    ],
)
def test_other_failures_of_a_kernel(sim: Sim, kernel: str, words: str):
    x = sim.zeros(1)
    block = {"divide": 1, "deep": 1}.get(kernel, 64)
    arguments = {"two_lines": (), "foreign_mask": (), "mixed_operations": (x,)}
    values = arguments.get(kernel, (x, np.int32(0 if kernel == "divide" else 1000)))
    assert words in failure(sim, Result.CUDA_ERROR_LAUNCH_FAILED, kernel, 1, block, *values)


def test_a_lost_context_stays_lost_until_it_is_released(sim: Sim):
    driver = sim.driver
    failure(sim, Result.CUDA_ERROR_LAUNCH_FAILED, "two_lines", 1, 64)
    for _ in range(2):
        assert driver.cuStreamSynchronize(sim.stream) == (Result.CUDA_ERROR_LAUNCH_FAILED,)
        assert "two lines" in driver.last_detail
        assert driver.cuMemAlloc(4) == (Result.CUDA_ERROR_LAUNCH_FAILED, None)
    sim.ok(driver.cuDevicePrimaryCtxRelease(0))
    sim.ok(driver.cuDevicePrimaryCtxRetain(0))
    sim.stream, sim.module = sim.ok(driver.cuStreamCreate(1)), sim.load(TEXT)
    y = sim.zeros(64)
    sim.launch("twice", 1, 64, y, np.int32(1))
    assert (sim.read(y, 64) == 64 * 63 / 2 * 6).all()


def test_kernels_run_on_after_many_failures():
    for _ in range(20):
        for sim in make_sim(TEXT):
            failure(sim, Result.CUDA_ERROR_LAUNCH_FAILED, "stuck", 3, 128, sim.zeros(1, np.int32))
    for sim in make_sim(TEXT):
        y = sim.zeros(64)
        sim.launch("twice", 1, 64, y, np.int32(1))
        assert (sim.read(y, 64) == 64 * 63 / 2 * 6).all()


# --- AddressSanitizer ---

SCRIPT = r"""
import sys
import numpy as np
from tests.driver import test_sim_bugs as bugs
from tests.driver.test_sim_support import Sim

sim = Sim(bugs.TEXT)
assert sim.driver.library.sanitized
x, y = sim.zeros(10), sim.zeros(64)
sim.launch("twice", 1, 64, y, np.int32(1))
assert (sim.read(y, 64) == 64 * 63 / 2 * 6).all()
print("sound", flush=True)
fault = sys.argv[1]
if fault == "global":
    sim.launch("write_at", 2, 32, x, np.int32(10))
elif fault == "freed":
    sim.ok(sim.driver.cuMemFree(x))
    sim.launch("read_at", 1, 1, x, np.int32(0), y)
elif fault == "static":
    sim.launch("static_index", 1, 8, y, np.int32(16 * 8))
elif fault == "dynamic":
    sim.launch("dynamic_index", 1, 1, y, np.int32(25), shared=100)
print("not found", flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "kind", "place"),
    [
        ("global", "heap-buffer-overflow", line("// out of bounds")),
        ("freed", "heap-use-after-free", line("y[0] = x[i]")),
        ("static", "global-buffer-overflow", line("s[threadIdx.x][i] = 1.0f")),
        ("dynamic", "heap-buffer-overflow", line("s[i] = 1.0f")),
    ],
)
def test_address_sanitizer(fault: str, kind: str, place: str, tmp_path: Path):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True)
    library = Path(found.stdout.strip())
    if not library.is_absolute():
        pytest.skip("g++ has no libasan")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {
        **os.environ,
        "CXX": compiler,
        "LD_PRELOAD": str(library),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "FXENGINE_SIM_SANITIZE": "address",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    # The interpreter itself: a preload would break a launcher script.
    run = subprocess.run(
        [
            os.path.realpath(sys.executable),
            "-S",
            "-c",
            f"import sys; sys.path[:0] = {sys.path!r}; sys.argv = ['', {fault!r}]; exec(open({str(script)!r}).read())",
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert "sound" in run.stdout, run.stderr[-3000:]
    assert run.returncode != 0
    assert kind in run.stderr
    assert place in run.stderr
