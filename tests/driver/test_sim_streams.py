"""Streams and events of the simulated device, immediate and lazy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.driver.test_sim_support import ADD, Result, Sim, make_sim

TEXT = (
    ADD
    + """
extern "C" __global__ void copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void meet(float* x) { __syncthreads(); if (threadIdx.x == 0) x[0] += 1.0f; }
extern "C" __global__ void spin(float* x, int n) { for (int i = 0; i < n; ++i) x[0] = x[0] * 0.5f + 1.0f; }
"""
)


@pytest.fixture
def sim() -> Iterator[Sim]:
    yield from make_sim(TEXT)


def producer_and_consumer(seed: int, *, wait: bool) -> float:
    """Two streams: one writes x, the other copies x to y, with or without waiting for it."""
    for sim in make_sim(TEXT, streams=f"lazy:{seed}"):
        other = sim.ok(sim.driver.cuStreamCreate(1))
        x, y = sim.zeros(1), sim.zeros(1)
        written = sim.ok(sim.driver.cuEventCreate(2))
        for _ in range(3):
            sim.launch("add", 1, 1, x, np.float32(1), np.int32(1))
        sim.ok(sim.driver.cuEventRecord(written, sim.stream))
        if wait:
            sim.ok(sim.driver.cuStreamWaitEvent(other, written, 0))
        sim.launch("copy", 1, 1, x, y, stream=other)
        sim.ok(sim.driver.cuCtxSynchronize())
        value = float(sim.read(y, 1)[0])
    return value


def test_lazy_streams_show_a_missing_event_wait():
    assert {producer_and_consumer(seed, wait=True) for seed in range(12)} == {3.0}
    assert len({producer_and_consumer(seed, wait=False) for seed in range(12)}) > 1


def test_lazy_work_waits_until_somebody_waits_for_it():
    for sim in make_sim(TEXT, streams="lazy:1"):
        x = sim.zeros(1)
        sim.launch("add", 1, 1, x, np.float32(1), np.int32(1))
        # A copy on the legacy stream does not wait for a non-blocking stream.
        assert sim.read(x, 1)[0] == 0
        sim.ok(sim.driver.cuStreamSynchronize(sim.stream))
        assert sim.read(x, 1)[0] == 1


def test_lazy_blocking_streams_are_ordered_with_the_legacy_stream():
    for sim in make_sim(TEXT, streams="lazy:1"):
        x = sim.zeros(1)
        blocking = sim.ok(sim.driver.cuStreamCreate(0))
        sim.launch("add", 1, 1, x, np.float32(1), np.int32(1), stream=blocking)
        assert sim.read(x, 1)[0] == 1


def test_lazy_launches_keep_their_argument_values():
    for sim in make_sim(TEXT, streams="lazy:1"):
        x = sim.zeros(1)
        for value in (1, 2, 4):
            sim.launch("add", 1, 1, x, np.float32(value), np.int32(1))
        sim.ok(sim.driver.cuStreamSynchronize(sim.stream))
        assert sim.read(x, 1)[0] == 7


@pytest.mark.parametrize("waiter", ["query", "event query", "event"])
def test_lazy_work_gets_on_while_the_host_polls(waiter: str):
    for sim in make_sim(TEXT, streams="lazy:1"):
        driver, x = sim.driver, sim.zeros(1)
        event = sim.ok(driver.cuEventCreate(0))
        for _ in range(3):
            sim.launch("add", 1, 1, x, np.float32(1), np.int32(1))
        sim.ok(driver.cuEventRecord(event, sim.stream))
        polls = 0
        if waiter == "event":
            sim.ok(driver.cuEventSynchronize(event))
        else:
            ask = driver.cuStreamQuery if waiter == "query" else driver.cuEventQuery
            handle = sim.stream if waiter == "query" else event
            while ask(handle) == (Result.CUDA_ERROR_NOT_READY,):
                polls += 1
            assert polls == 4
        assert sim.read(x, 1)[0] == 3


def test_lazy_copies():
    for sim in make_sim(TEXT, streams="lazy:1"):
        driver, n = sim.driver, 16
        x = sim.zeros(4)
        host = np.arange(4, dtype=np.float32)
        sim.ok(driver.cuMemcpyHtoDAsync(x, host.ctypes.data, n, sim.stream))
        host[:] = -1  # pageable memory was staged before the call returned
        pinned = sim.ok(driver.cuMemHostAlloc(n, 0))
        view = np.frombuffer((np.ctypeslib.ctypes.c_float * 4).from_address(pinned), np.float32)
        sim.ok(driver.cuMemcpyDtoHAsync(pinned, x, n, sim.stream))
        assert np.isnan(view).all()  # not copied yet
        back = np.zeros(4, np.float32)
        sim.ok(driver.cuMemcpyDtoHAsync(back.ctypes.data, x, n, sim.stream))  # pageable: returns when done
        assert back.tolist() == view.tolist() == [0, 1, 2, 3]
        y = sim.zeros(4)
        sim.ok(driver.cuMemcpyDtoDAsync(y, x, n, sim.stream))
        sim.ok(driver.cuMemsetD32Async(x, 0x3F800000, 4, sim.stream))
        sim.ok(driver.cuStreamDestroy(sim.stream))
        assert sim.read(y, 4).tolist() == [0, 1, 2, 3]
        assert sim.read(x, 4).tolist() == [1, 1, 1, 1]
        sim.ok(driver.cuMemFreeHost(pinned))


def test_a_lazy_failure_comes_from_the_synchronization():
    for sim in make_sim(TEXT, streams="lazy:1"):
        x = sim.zeros(64)
        sim.launch("add", 2, 64, x, np.float32(1), np.int32(128))
        assert sim.driver.cuStreamSynchronize(sim.stream) == (Result.CUDA_ERROR_ILLEGAL_ADDRESS,)
        assert "in kernel add, block (1,0,0) thread (0,0,0)" in sim.driver.last_detail


def test_event_times(sim: Sim):
    driver, x = sim.driver, sim.zeros(1)
    start, end, quiet = (sim.ok(driver.cuEventCreate(flags)) for flags in (0, 0, 2))
    assert driver.cuEventElapsedTime(start, end) == (Result.CUDA_ERROR_INVALID_HANDLE, None)
    sim.ok(driver.cuEventRecord(start, sim.stream))
    sim.launch("spin", 1, 1, x, np.int32(2_000_000))
    for event in (end, quiet):
        sim.ok(driver.cuEventRecord(event, sim.stream))
    assert 1.0 < sim.ok(driver.cuEventElapsedTime(start, end)) < 1000.0
    assert driver.cuEventElapsedTime(start, quiet) == (Result.CUDA_ERROR_INVALID_HANDLE, None)
    sim.ok(driver.cuEventQuery(quiet))


def test_an_event_that_was_never_recorded_is_no_wait(sim: Sim):
    event = sim.ok(sim.driver.cuEventCreate(0))
    sim.ok(sim.driver.cuStreamWaitEvent(sim.stream, event, 0))
    sim.ok(sim.driver.cuEventSynchronize(event))
    sim.ok(sim.driver.cuEventQuery(event))


def test_destroyed_streams_and_events_are_refused(sim: Sim):
    driver = sim.driver
    stream, event = sim.ok(driver.cuStreamCreate(0)), sim.ok(driver.cuEventCreate(0))
    sim.ok(driver.cuStreamDestroy(stream))
    sim.ok(driver.cuEventDestroy(event))
    refused = (Result.CUDA_ERROR_INVALID_HANDLE,)
    assert driver.cuStreamSynchronize(stream) == refused
    assert driver.cuStreamDestroy(stream) == refused
    assert driver.cuEventRecord(event, sim.stream) == refused
    assert driver.cuStreamWaitEvent(sim.stream, event, 0) == refused
    assert driver.cuEventDestroy(event) == refused
    assert driver.cuStreamDestroy(0) == refused
    # A stream is no event, whatever its number.
    assert driver.cuEventQuery(sim.stream) == refused
    assert driver.cuStreamCreate(8) == (Result.CUDA_ERROR_INVALID_VALUE, None)


def test_several_host_threads(sim: Sim):
    x = sim.zeros(4)

    def work(slot: int) -> None:
        sim.ok(sim.driver.cuCtxSetCurrent(sim.context))
        stream = sim.ok(sim.driver.cuStreamCreate(1))
        for _ in range(200):
            sim.launch("add", 1, 1, x + 4 * slot, np.float32(1), np.int32(1), stream=stream)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sim.read(x, 4).tolist() == [200, 200, 200, 200]


def test_short_lived_host_threads_leave_nothing_behind(sim: Sim):
    """A host thread that launches gets fiber stacks; they go when it ends, which may be a moment after its join."""
    x = sim.zeros(1)

    def work() -> None:
        sim.ok(sim.driver.cuCtxSetCurrent(sim.context))
        sim.launch("meet", 1, 1024, x)

    def mapped() -> int:
        """Mappings of this process once they are as many as 50 ms before."""
        last, count = -1, 0
        while count != last:
            last, count = count, Path("/proc/self/maps").read_text().count("\n")
            time.sleep(0.05)
        return count

    before = 0
    for i in range(24):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if i == 3:
            before = mapped()
    assert mapped() < before + 20
