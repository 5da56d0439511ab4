"""Stream capture and graphs of the simulated device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cu

from tests.driver.test_sim_support import ADD, THREAD_LOCAL, Arguments, Result, Sim, make_sim

TEXT = (
    ADD
    + """
extern "C" __global__ void twice(float* x) { *x = *x * 2.0f; }
extern "C" __global__ void plus(float* x, float v) { *x = *x + v; }
"""
)
Type = cu.CUgraphNodeType
Status = cu.CUstreamCaptureStatus
SET = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
ADD_FLAG = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_ADD_CAPTURE_DEPENDENCIES


@pytest.fixture
def sim() -> Iterator[Sim]:
    yield from make_sim(TEXT)


def nodes_of(sim: Sim, graph: Any) -> list[Any]:
    count = sim.ok(sim.driver.cuGraphGetNodes(graph))[1]
    return sim.ok(sim.driver.cuGraphGetNodes(graph, count))[0]


def edges_of(sim: Sim, graph: Any) -> set[tuple[int, int, int]]:
    """(from, to, kind), nodes by their place in the list of nodes."""
    place = {int(node): i for i, node in enumerate(nodes_of(sim, graph))}
    count = sim.ok(sim.driver.cuGraphGetEdges(graph))[3]
    from_, to, data, _ = sim.ok(sim.driver.cuGraphGetEdges(graph, count))
    return {(place[int(a)], place[int(b)], int(e.type)) for a, b, e in zip(from_, to, data, strict=True)}


def programmatic_launch(sim: Sim, name: str, *values: Any, attributes: int = 1) -> tuple[Any, ...]:
    config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream, config.attrs, config.numAttrs = sim.stream, [attribute], attributes
    arguments = Arguments(*values)
    return sim.driver.cuLaunchKernelEx(config, sim.function(name), arguments.address, 0)


def test_a_graph_replays_what_was_captured(sim: Sim):
    driver = sim.driver
    x = sim.zeros(300)
    sim.capture()
    assert sim.ok(driver.cuStreamIsCapturing(sim.stream)) == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    sim.ok(driver.cuMemsetD32Async(x, 0x40000000, 300, sim.stream))
    sim.launch("add", (3, 1, 1), 128, x, np.float32(0.5), np.int32(299), shared=64)
    graph = sim.end()
    assert sim.ok(driver.cuStreamIsCapturing(sim.stream)) == Status.CU_STREAM_CAPTURE_STATUS_NONE
    assert (sim.read(x, 300) == 0).all()  # captured, not run

    memset, kernel = nodes_of(sim, graph)
    assert sim.ok(driver.cuGraphNodeGetType(memset)) == Type.CU_GRAPH_NODE_TYPE_MEMSET
    assert sim.ok(driver.cuGraphNodeGetType(kernel)) == Type.CU_GRAPH_NODE_TYPE_KERNEL
    assert edges_of(sim, graph) == {(0, 1, 0)}
    assert sim.ok(driver.cuGraphNodeGetDependencies(kernel))[2] == 1
    assert sim.ok(driver.cuGraphNodeGetDependencies(kernel, 1))[0] == [memset]
    fill = sim.ok(driver.cuGraphMemsetNodeGetParams(memset))
    assert (int(fill.dst), fill.value, fill.elementSize, fill.width, fill.height) == (x, 0x40000000, 4, 300, 1)
    params = sim.ok(driver.cuGraphKernelNodeGetParams(kernel))
    assert params.func == sim.function("add")
    assert (params.gridDimX, params.blockDimX, params.sharedMemBytes) == (3, 128, 64)
    pointers = (ctypes.c_size_t * 3).from_address(params.kernelParams)
    assert ctypes.c_uint64.from_address(pointers[0]).value == x
    assert ctypes.c_float.from_address(pointers[1]).value == 0.5
    assert ctypes.c_int.from_address(pointers[2]).value == 299
    assert driver.cuGraphMemsetNodeGetParams(kernel)[0] == Result.CUDA_ERROR_INVALID_VALUE

    executable = sim.ok(driver.cuGraphInstantiate(graph, 0))
    sim.ok(driver.cuGraphUpload(executable, sim.stream))
    for _ in range(2):
        sim.ok(driver.cuGraphLaunch(executable, sim.stream))
        assert sim.read(x, 300).tolist() == [2.5] * 299 + [2.0]


def test_argument_values_are_copied_when_the_launch_is_captured(sim: Sim):
    x, arguments = sim.zeros(1), Arguments(0, np.float32(3))
    arguments.boxes[0][...] = x
    sim.capture()
    sim.ok(sim.driver.cuLaunchKernel(sim.function("plus"), 1, 1, 1, 1, 1, 1, 0, sim.stream, arguments.address, 0))
    arguments.boxes[1][...] = 100
    executable = sim.ok(sim.driver.cuGraphInstantiate(sim.end(), 0))
    del arguments
    sim.ok(sim.driver.cuGraphLaunch(executable, sim.stream))
    assert sim.read(x, 1)[0] == 3


def test_the_executable_outlives_its_graph(sim: Sim):
    driver, x = sim.driver, sim.zeros(1)
    sim.capture()
    sim.launch("plus", 1, 1, x, np.float32(1))
    graph = sim.end()
    node = nodes_of(sim, graph)[0]
    executable = sim.ok(driver.cuGraphInstantiate(graph, 0))
    sim.ok(driver.cuGraphDestroy(graph))
    assert driver.cuGraphGetNodes(graph)[0] == Result.CUDA_ERROR_INVALID_HANDLE
    assert driver.cuGraphInstantiate(graph, 0) == (Result.CUDA_ERROR_INVALID_HANDLE, None)
    assert driver.cuGraphDestroy(graph) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    assert driver.cuGraphNodeGetType(node) == (Result.CUDA_ERROR_INVALID_VALUE, None)
    sim.ok(driver.cuGraphLaunch(executable, sim.stream))
    assert sim.read(x, 1)[0] == 1
    sim.ok(driver.cuGraphExecDestroy(executable))
    assert driver.cuGraphLaunch(executable, sim.stream) == (Result.CUDA_ERROR_INVALID_HANDLE,)
    assert driver.cuGraphExecDestroy(executable) == (Result.CUDA_ERROR_INVALID_HANDLE,)


def test_exact_dependencies(sim: Sim):
    driver, x = sim.driver, sim.zeros(4)
    sim.capture()
    nodes = []
    for i in range(3):
        sim.ok(driver.cuStreamUpdateCaptureDependencies(sim.stream, None, None, 0, SET))
        sim.launch("plus", 1, 1, x + 4 * i, np.float32(1))
        status, number, graph, dependencies, data, count = sim.ok(driver.cuStreamGetCaptureInfo(sim.stream))
        assert status == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
        assert int(number) > 0
        assert count == len(dependencies) == len(data) == 1
        nodes.append(dependencies[0])
    sim.ok(driver.cuStreamUpdateCaptureDependencies(sim.stream, nodes[:1], None, 1, SET))
    sim.ok(driver.cuStreamUpdateCaptureDependencies(sim.stream, nodes[:2], None, 2, ADD_FLAG))
    assert sim.ok(driver.cuStreamGetCaptureInfo(sim.stream))[3] == nodes[:2]
    sim.launch("plus", 1, 1, x, np.float32(1))
    ended = sim.end()
    assert ended == graph
    assert edges_of(sim, graph) == {(0, 3, 0), (1, 3, 0)}
    assert sim.ok(driver.cuStreamGetCaptureInfo(sim.stream))[0] == Status.CU_STREAM_CAPTURE_STATUS_NONE
    refused = driver.cuStreamUpdateCaptureDependencies(sim.stream, nodes[:1], None, 1, SET)
    assert refused == (Result.CUDA_ERROR_ILLEGAL_STATE,)


def test_foreign_nodes_are_refused_as_dependencies(sim: Sim):
    x = sim.zeros(1)
    sim.capture()
    sim.launch("plus", 1, 1, x, np.float32(1))
    old = nodes_of(sim, sim.end())
    sim.capture()
    refused = sim.driver.cuStreamUpdateCaptureDependencies(sim.stream, old, None, 1, SET)
    assert refused == (Result.CUDA_ERROR_INVALID_VALUE,)
    sim.end()


def test_programmatic_edges(sim: Sim):
    driver, x = sim.driver, sim.zeros(2)
    sim.capture()
    sim.ok(driver.cuMemsetD32Async(x, 0, 1, sim.stream))
    sim.ok(programmatic_launch(sim, "plus", x, np.float32(1)))  # after a memset: a full edge
    sim.ok(programmatic_launch(sim, "twice", x))
    sim.launch("twice", 1, 1, x)
    dependencies = sim.ok(driver.cuStreamGetCaptureInfo(sim.stream))[3]
    edge = cu.CUgraphEdgeData()
    edge.type, edge.from_port = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, 1
    sim.ok(driver.cuStreamUpdateCaptureDependencies(sim.stream, dependencies, [edge], 1, SET))
    assert sim.ok(driver.cuStreamGetCaptureInfo(sim.stream))[4][0].from_port == 1
    sim.launch("plus", 1, 1, x, np.float32(1))
    graph = sim.end()
    assert edges_of(sim, graph) == {(0, 1, 0), (1, 2, 1), (2, 3, 0), (3, 4, 1)}
    executable = sim.ok(driver.cuGraphInstantiate(graph, 0))
    sim.ok(driver.cuGraphLaunch(executable, sim.stream))
    assert sim.read(x, 1)[0] == 5


def test_launch_attributes_are_checked(sim: Sim):
    x = sim.zeros(1)
    sim.ok(programmatic_launch(sim, "plus", x, np.float32(1)))
    assert sim.read(x, 1)[0] == 1
    assert programmatic_launch(sim, "twice", x, attributes=2) == (Result.CUDA_ERROR_INVALID_VALUE,)
    config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream, config.attrs, config.numAttrs = sim.stream, [attribute], 1
    arguments = Arguments(x)
    returned = sim.driver.cuLaunchKernelEx(config, sim.function("twice"), arguments.address, 0)
    assert returned == (Result.CUDA_ERROR_NOT_SUPPORTED,)


def test_a_programmatic_edge_into_a_memset_is_refused(sim: Sim):
    driver, x = sim.driver, sim.zeros(1)
    sim.capture()
    sim.launch("twice", 1, 1, x)
    dependencies = sim.ok(driver.cuStreamGetCaptureInfo(sim.stream))[3]
    edge = cu.CUgraphEdgeData()
    edge.type, edge.from_port = cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC, 1
    sim.ok(driver.cuStreamUpdateCaptureDependencies(sim.stream, dependencies, [edge], 1, SET))
    assert driver.cuMemsetD32Async(x, 0, 1, sim.stream) == (Result.CUDA_ERROR_INVALID_VALUE,)
    assert driver.cuStreamEndCapture(sim.stream) == (Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None)


# --- several streams ---


def fork_and_join(sim: Sim, *, join: bool) -> tuple[Any, ...]:
    driver, x = sim.driver, sim.zeros(2)
    other = sim.ok(driver.cuStreamCreate(1))
    forked, joined = (sim.ok(driver.cuEventCreate(2)) for _ in range(2))
    sim.capture()
    sim.launch("plus", 1, 1, x, np.float32(1))
    sim.ok(driver.cuEventRecord(forked, sim.stream))
    sim.ok(driver.cuStreamWaitEvent(other, forked, 0))
    assert sim.ok(driver.cuStreamIsCapturing(other)) == Status.CU_STREAM_CAPTURE_STATUS_ACTIVE
    sim.launch("plus", 1, 1, x + 4, np.float32(1), stream=other)
    sim.launch("twice", 1, 1, x)
    if join:
        sim.ok(driver.cuEventRecord(joined, other))
        sim.ok(driver.cuStreamWaitEvent(sim.stream, joined, 0))
        sim.launch("twice", 1, 1, x)
    return sim.driver.cuStreamEndCapture(sim.stream)


def test_fork_and_join_through_events(sim: Sim):
    result, graph = fork_and_join(sim, join=True)
    assert result == Result.CUDA_SUCCESS
    assert edges_of(sim, graph) == {(0, 1, 0), (0, 2, 0), (2, 3, 0), (1, 3, 0)}


def test_an_unjoined_fork_is_refused(sim: Sim):
    assert fork_and_join(sim, join=False) == (Result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, None)
    sim.launch("twice", 1, 1, sim.zeros(1))  # the stream is usable again


def test_a_capture_ends_where_it_began(sim: Sim):
    driver = sim.driver
    other, event = sim.ok(driver.cuStreamCreate(1)), sim.ok(driver.cuEventCreate(2))
    sim.capture()
    sim.ok(driver.cuEventRecord(event, sim.stream))
    sim.ok(driver.cuStreamWaitEvent(other, event, 0))
    assert driver.cuStreamEndCapture(other) == (Result.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, None)
    assert driver.cuStreamEndCapture(sim.stream) == (Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None)
    assert driver.cuStreamEndCapture(sim.stream) == (Result.CUDA_ERROR_ILLEGAL_STATE, None)


def test_captures_do_not_mix(sim: Sim):
    driver = sim.driver
    other = sim.ok(driver.cuStreamCreate(1))
    inside, outside = sim.ok(driver.cuEventCreate(2)), sim.ok(driver.cuEventCreate(2))
    sim.ok(driver.cuEventRecord(outside, sim.stream))
    sim.capture()
    sim.capture(other)
    sim.ok(driver.cuEventRecord(inside, sim.stream))
    assert driver.cuStreamWaitEvent(other, inside, 0) == (Result.CUDA_ERROR_STREAM_CAPTURE_MERGE,)
    for stream in (sim.stream, other):
        assert driver.cuStreamEndCapture(stream)[0] == Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    sim.capture()
    assert driver.cuStreamWaitEvent(sim.stream, outside, 0) == (Result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,)
    assert driver.cuStreamEndCapture(sim.stream)[0] == Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_a_capture_ends_on_its_thread(sim: Sim):
    sim.capture()
    got = []

    def other() -> None:
        sim.ok(sim.driver.cuCtxSetCurrent(sim.context))
        got.append(sim.driver.cuStreamEndCapture(sim.stream))
        got.append(sim.driver.cuMemAlloc(16))  # thread-local: other threads are free

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert got[0] == (Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, None)
    assert got[1][0] == Result.CUDA_SUCCESS


# --- what a capture forbids ---

CALLS = {
    "alloc": lambda sim, x: sim.driver.cuMemAlloc(16),
    "free": lambda sim, x: sim.driver.cuMemFree(x),
    "host alloc": lambda sim, x: sim.driver.cuMemHostAlloc(16, 0),
    "copy to": lambda sim, x: sim.driver.cuMemcpyHtoD(x, np.zeros(1, np.float32), 4),
    "copy from": lambda sim, x: sim.driver.cuMemcpyDtoH(np.zeros(1, np.float32), x, 4),
    "copy": lambda sim, x: sim.driver.cuMemcpyDtoD(x, x, 4),
    "memset": lambda sim, x: sim.driver.cuMemsetD32(x, 0, 1),
    "context": lambda sim, x: sim.driver.cuCtxSynchronize(),
    "stream": lambda sim, x: sim.driver.cuStreamSynchronize(sim.stream),
    "query": lambda sim, x: sim.driver.cuStreamQuery(sim.stream),
    "event": lambda sim, x: sim.driver.cuEventQuery(sim.ok(sim.driver.cuEventCreate(0))),
    "unload": lambda sim, x: sim.driver.cuModuleUnload(sim.module),
    "load": lambda sim, x: sim.driver.cuModuleLoad(b"/nowhere.so"),
    "pageable to": lambda sim, x: sim.driver.cuMemcpyHtoDAsync(x, np.zeros(1, np.float32), 4, sim.stream),
    "pageable from": lambda sim, x: sim.driver.cuMemcpyDtoHAsync(np.zeros(1, np.float32), x, 4, sim.stream),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_cannot_be_captured_invalidates_the_capture(sim: Sim, name: str):
    driver, x = sim.driver, sim.zeros(1)
    sim.capture()
    sim.launch("twice", 1, 1, x)
    assert CALLS[name](sim, x)[0] == Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert sim.ok(driver.cuStreamIsCapturing(sim.stream)) == Status.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    assert sim.try_launch("twice", 1, 1, x) == (Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,)
    assert driver.cuStreamEndCapture(sim.stream) == (Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, None)
    sim.launch("twice", 1, 1, x)
    assert sim.read(x, 1)[0] == 0


def test_captured_events_cannot_be_waited_for_by_the_host(sim: Sim):
    event = sim.ok(sim.driver.cuEventCreate(0))
    for wait in (sim.driver.cuEventQuery, sim.driver.cuEventSynchronize):
        sim.capture()
        sim.ok(sim.driver.cuEventRecord(event, sim.stream))
        assert wait(event) == (Result.CUDA_ERROR_CAPTURED_EVENT,)
        assert sim.driver.cuStreamEndCapture(sim.stream)[0] == Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_other_work_goes_on_beside_a_capture(sim: Sim):
    driver, x = sim.driver, sim.zeros(1)
    pinned = sim.ok(driver.cuMemHostAlloc(64, 0))
    other, event = sim.ok(driver.cuStreamCreate(1)), sim.ok(driver.cuEventCreate(0))
    sim.capture()
    sim.launch("plus", 1, 1, x, np.float32(1), stream=other)
    sim.ok(driver.cuEventRecord(event, other))
    sim.ok(driver.cuEventSynchronize(event))
    sim.ok(driver.cuStreamSynchronize(other))
    sim.ok(driver.cuMemcpyDtoHAsync(pinned, x, 4, sim.stream))  # page-locked: captured
    graph = sim.end()
    assert [int(sim.ok(driver.cuGraphNodeGetType(n))) for n in nodes_of(sim, graph)] == [1]
    executable = sim.ok(driver.cuGraphInstantiate(graph, 0))
    sim.ok(driver.cuGraphLaunch(executable, sim.stream))
    assert ctypes.c_float.from_address(pinned).value == 1


def test_the_legacy_stream_and_a_blocking_capture(sim: Sim):
    driver, x = sim.driver, sim.zeros(1)
    assert driver.cuStreamBeginCapture(0, THREAD_LOCAL) == (Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
    blocking = sim.ok(driver.cuStreamCreate(0))
    sim.capture(blocking)
    assert driver.cuStreamBeginCapture(blocking, THREAD_LOCAL) == (Result.CUDA_ERROR_ILLEGAL_STATE,)
    assert sim.try_launch("twice", 1, 1, x, stream=0) == (Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,)
    assert driver.cuStreamEndCapture(blocking)[0] == Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


def test_relaxed_threads_may_allocate(sim: Sim):
    driver = sim.driver
    modes = cu.CUstreamCaptureMode
    sim.capture()
    before = sim.ok(driver.cuThreadExchangeStreamCaptureMode(modes.CU_STREAM_CAPTURE_MODE_RELAXED))
    assert before == modes.CU_STREAM_CAPTURE_MODE_GLOBAL
    sim.ok(driver.cuMemAlloc(16))
    assert sim.ok(driver.cuThreadExchangeStreamCaptureMode(before)) == modes.CU_STREAM_CAPTURE_MODE_RELAXED
    sim.end()


# --- replay ---


def independent_nodes(sim: Sim, *, ordered: bool) -> list[float]:
    """x = (0 + 3) * 2 if the edge is there; what several replays give."""
    driver, x = sim.driver, sim.zeros(1)
    sim.capture()
    sim.launch("plus", 1, 1, x, np.float32(3))
    if not ordered:
        sim.ok(driver.cuStreamUpdateCaptureDependencies(sim.stream, None, None, 0, SET))
    sim.launch("twice", 1, 1, x)
    executable = sim.ok(driver.cuGraphInstantiate(sim.end(), 0))
    values = []
    for _ in range(8):
        sim.ok(driver.cuMemsetD32Async(x, 0, 1, sim.stream))
        sim.ok(driver.cuGraphLaunch(executable, sim.stream))
        sim.ok(driver.cuStreamSynchronize(sim.stream))
        values.append(float(sim.read(x, 1)[0]))
    return values


@pytest.mark.parametrize(
    ("schedule", "streams"), [("reverse", "immediate"), ("random:1", "immediate"), ("greedy", "lazy:1")]
)
def test_other_orders_show_a_missing_edge(sim: Sim, schedule: str, streams: str):
    assert set(independent_nodes(sim, ordered=False)) == {6.0}  # luck
    sim.driver.set_schedule(schedule, streams=streams)
    assert set(independent_nodes(sim, ordered=True)) == {6.0}
    assert 3.0 in independent_nodes(sim, ordered=False)


def test_a_replay_that_touches_freed_memory_fails(sim: Sim):
    driver, x = sim.driver, sim.zeros(8)
    sim.capture()
    sim.ok(driver.cuMemsetD32Async(x, 0, 8, sim.stream))
    executable = sim.ok(driver.cuGraphInstantiate(sim.end(), 0))
    sim.ok(driver.cuMemFree(x))
    assert driver.cuGraphLaunch(executable, sim.stream) == (Result.CUDA_ERROR_ILLEGAL_ADDRESS,)
    assert "in kernel memset" in driver.last_detail


def test_a_replay_after_its_module_was_unloaded_fails(sim: Sim):
    x = sim.zeros(1)
    sim.capture()
    sim.launch("twice", 1, 1, x)
    executable = sim.ok(sim.driver.cuGraphInstantiate(sim.end(), 0))
    sim.ok(sim.driver.cuModuleUnload(sim.module))
    assert sim.driver.cuGraphLaunch(executable, sim.stream) == (Result.CUDA_ERROR_INVALID_HANDLE,)


def test_an_empty_graph(sim: Sim):
    sim.capture()
    graph = sim.end()
    assert sim.ok(sim.driver.cuGraphGetNodes(graph)) == ([], 0)
    assert sim.ok(sim.driver.cuGraphGetEdges(graph)) == ([], [], [], 0)
    sim.ok(sim.driver.cuGraphLaunch(sim.ok(sim.driver.cuGraphInstantiate(graph, 0)), sim.stream))
