"""Captures, graphs, replays."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver as bindings

from fxengine.driver import Arena, ClosedError, CudaError, Device, FxError, Kernel, Stream, capture
from fxengine.driver.resource import capturing
from tests.driver.kernels import load, recorded


@pytest.fixture
def add(device: Device, tmp_path: Path) -> Kernel:
    return load(device, tmp_path).kernel("fx_add")


@pytest.fixture
def stream(device: Device):
    with device.stream() as opened:
        yield opened


@pytest.fixture
def arena(device: Device):
    with Arena(device, "a", 4096) as opened:
        yield opened


def _chain(edges: list) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in edges}


def test_capture_runs_nothing_and_replays(device: Device, add: Kernel, stream: Stream, arena: Arena):
    y = arena.place("y", (64,), np.float32)
    y.fill_u32(0)
    with capture(stream) as recording:
        assert capturing()
        with pytest.raises(FxError, match="graph exists once"):
            _ = recording.graph
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
    assert not capturing()
    stream.synchronize()
    assert (y.read() == 0.0).all()
    with recording.graph as graph, graph.instantiate() as executable:
        graph.close()  # the executable does not need it
        executable.upload(stream)
        for _ in range(3):
            executable.launch(stream)
        assert (y.read(stream=stream) == 3.0).all()
    with pytest.raises(ClosedError, match="executable graph of"):
        executable.launch(stream)
    with pytest.raises(ClosedError, match="graph of"):
        graph.nodes()


def test_arguments_are_copied_at_capture(add: Kernel, stream: Stream, arena: Arena):
    y = arena.place("y", (64,), np.float32)
    y.fill_u32(0)
    with capture(stream) as recording:
        bound = add.bind(y, 2.0, 64)
        add.launch(1, 64, bound, stream=stream)
        del bound
    gc.collect()
    with recording.graph as graph, graph.instantiate() as executable:
        executable.launch(stream)
        assert (y.read(stream=stream) == 2.0).all()


def test_a_stream_orders_its_nodes(add: Kernel, stream: Stream, arena: Arena):
    y = arena.place("y", (64,), np.float32)
    with capture(stream) as recording:
        y.fill_u32(0, stream=stream)
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
    with recording.graph as graph:
        nodes = graph.nodes()
        assert sorted(graph.node_type(node) for node in nodes) == ["kernel", "memset"]
        (edge,) = graph.edges()
        assert [graph.node_type(node) for node in edge] == ["memset", "kernel"]
        assert graph.programmatic_edges() == []


@pytest.mark.parametrize("early", [False, True])
def test_exact_dependencies(device: Device, add: Kernel, stream: Stream, arena: Arena, early: bool):
    """a -> b, a -> c, (b, c) -> d: a diamond, which one stream alone would make a chain."""
    y = [arena.place(f"y{i}", (64,), np.float32) for i in range(2)]
    for buffer in y:
        buffer.fill_u32(0)
    bound = [add.bind(buffer, 1.0, 64) for buffer in y]
    with capture(stream) as recording:

        def node(after: list, which: int):
            recording.set_dependencies(after, programmatic=early)
            add.launch(1, 64, bound[which], stream=stream, pdl=early and bool(after))
            return recording.last_node()

        a = node([], 0)
        b, c = node([a], 0), node([a], 1)
        d = node([b, c], 1)
        recording.set_dependencies([d])
    with recording.graph as graph, graph.instantiate() as executable:
        expected = {(int(x), int(y)) for x, y in ((a, b), (a, c), (b, d), (c, d))}
        assert _chain(graph.edges()) == expected
        overlapping = expected if early and device.programmatic_launch else set()
        assert _chain(graph.programmatic_edges()) == overlapping
        executable.launch(stream)
        executable.launch(stream)
        stream.synchronize()
        assert (y[0].read() == 4.0).all() and (y[1].read() == 4.0).all()


def test_some_edges_programmatic(device: Device, add: Kernel, stream: Stream, arena: Arena):
    y = arena.place("y", (64,), np.float32)
    bound = add.bind(y, 1.0, 64)
    with capture(stream) as recording:
        recording.set_dependencies([])
        y.fill_u32(0, stream=stream)
        memset = recording.last_node()
        recording.set_dependencies([])
        add.launch(1, 64, bound, stream=stream)
        kernel = recording.last_node()
        with pytest.raises(FxError, match="not among the 1 dependencies"):
            recording.set_dependencies([memset], programmatic=[kernel])
        recording.set_dependencies([memset, kernel], programmatic=[kernel])
        add.launch(1, 64, bound, stream=stream)
    with recording.graph as graph:
        assert len(graph.edges()) == 2
        early = graph.programmatic_edges()
        assert [int(a) for a, _ in early] == ([int(kernel)] if device.programmatic_launch else [])


def test_last_node_must_be_one(add: Kernel, stream: Stream, arena: Arena):
    y = arena.place("y", (64,), np.float32)
    with capture(stream) as recording:
        with pytest.raises(FxError, match="depends on 0 nodes"):
            recording.last_node()
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
    with pytest.raises(FxError, match="an earlier call"):
        recording.last_node()
    recording.graph.close()


def _works(stream: Stream, add: Kernel, arena: Arena) -> None:
    y = arena.place(f"y{len(arena.buffers)}", (64,), np.float32)
    y.fill_u32(0)
    with capture(stream) as recording:
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
    with recording.graph as graph, graph.instantiate() as executable:
        executable.launch(stream)
        assert (y.read(stream=stream) == 1.0).all()


def test_exception_inside_a_capture(add: Kernel, stream: Stream, arena: Arena):
    y = arena.place("y", (64,), np.float32)
    with pytest.raises(ValueError, match="mine"), capture(stream) as recording:
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
        raise ValueError("mine")
    assert gc.isenabled() and not capturing()
    with pytest.raises(FxError, match="graph exists once"):
        _ = recording.graph
    _works(stream, add, arena)


@pytest.mark.parametrize("what", ["allocate", "synchronize the device", "synchronize the stream", "read"])
def test_what_a_capture_forbids(device: Device, add: Kernel, stream: Stream, arena: Arena, what: str):
    y = arena.place("y", (64,), np.float32)
    with pytest.raises(CudaError, match="STREAM_CAPTURE") as caught, capture(stream):
        if what == "allocate":
            Arena(device, "late", 256)
        elif what == "synchronize the device":
            device.synchronize()
        elif what == "synchronize the stream":
            stream.synchronize()
        else:
            y.read()
    assert caught.value.hint
    _works(stream, add, arena)


def test_error_swallowed_inside_a_capture_comes_back_at_its_end(
    device: Device, add: Kernel, stream: Stream, arena: Arena
):
    invalid = pytest.raises(CudaError, match=r"cuStreamEndCapture.*CUDA_ERROR_STREAM_CAPTURE_INVALIDATED")
    with invalid as caught, capture(stream), suppress(CudaError):
        stream.synchronize()
    assert "first error" in caught.value.hint
    assert gc.isenabled()
    _works(stream, add, arena)


def test_capture_of_a_capturing_stream(add: Kernel, stream: Stream, arena: Arena):
    with pytest.raises(ValueError, match="outer"), capture(stream):
        with pytest.raises(CudaError, match="cuStreamBeginCapture"), capture(stream):
            pass
        assert capturing()
        raise ValueError("outer")
    _works(stream, add, arena)


def test_collector_is_off_inside(device: Device):
    assert gc.isenabled()
    with device.stream() as a, device.stream() as b:
        with capture(a) as first:
            assert not gc.isenabled()
            with capture(b) as second:
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled()
        first.graph.close()
        second.graph.close()


def test_collector_stays_off_if_it_was(stream: Stream):
    gc.disable()
    try:
        with capture(stream) as recording:
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    recording.graph.close()


def test_objects_dying_inside_a_capture_do_not_disturb_it(device: Device, add: Kernel, stream: Stream, arena: Arena):
    y = arena.place("y", (64,), np.float32)
    y.fill_u32(0)
    doomed: list = [Arena(device, "doomed", 256), device.stream(), device.event()]
    with capture(stream) as recording:
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
        doomed.clear()
        gc.collect()
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
    with recording.graph as graph, graph.instantiate() as executable:
        assert len(graph.nodes()) == 2
        executable.launch(stream)
        assert (y.read(stream=stream) == 2.0).all()


def test_other_threads_go_on_meanwhile(device: Device, add: Kernel, stream: Stream, arena: Arena):
    """They may allocate and launch; what would invalidate the capture waits for its end."""
    y = arena.place("y", (64,), np.float32)
    other = arena.place("other", (64,), np.float32)
    events: list[str] = []
    allocated, failures = threading.Event(), []

    def work() -> None:
        try:
            with device.stream() as own, Arena(device, "own", 1024):
                other.fill_u32(0, stream=own)
                add.launch(1, 64, add.bind(other, 3.0, 64), stream=own)
                allocated.set()
                device.synchronize()
                events.append("synchronized")
        except BaseException as error:
            failures.append(error)
            allocated.set()

    thread = threading.Thread(target=work)
    with capture(stream) as recording:
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
        thread.start()
        assert allocated.wait(60)
        add.launch(1, 64, add.bind(y, 1.0, 64), stream=stream)
        events.append("captured")
    thread.join(60)
    assert failures == [] and events == ["captured", "synchronized"]
    assert len(recording.graph.nodes()) == 2
    assert (other.read() == 3.0).all()
    recording.graph.close()


def test_failed_capture_destroys_its_graph():
    device, raw = recorded()
    stream = device.stream()
    with pytest.raises(ValueError), capture(stream):
        raw.calls.clear()
        raise ValueError
    assert raw.names()[:2] == ["cuStreamEndCapture", "cuGraphDestroy"]
    raw.fail = {"cuStreamEndCapture": "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}
    with pytest.raises(ValueError), capture(stream):
        raw.calls.clear()
        raise ValueError
    assert raw.names()[0] == "cuStreamEndCapture" and "cuGraphDestroy" not in raw.names()
    assert not capturing() and gc.isenabled()


def test_capture_that_does_not_begin():
    device, raw = recorded()
    stream = device.stream()
    raw.fail = {"cuStreamBeginCapture": "CUDA_ERROR_ILLEGAL_STATE"}
    with pytest.raises(CudaError, match="cuStreamBeginCapture"), capture(stream):
        raise AssertionError
    assert not capturing() and gc.isenabled() and "cuStreamEndCapture" not in raw.names()


def test_capture_is_thread_local_on_the_given_stream():
    device, raw = recorded()
    stream = device.stream()
    with capture(stream) as recording:
        pass
    mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert dict(raw.calls)["cuStreamBeginCapture"] == (stream.handle, mode)
    recording.graph.close()


def test_replay_is_one_driver_call():
    device, raw = recorded()
    stream = device.stream()
    with capture(stream) as recording:
        pass
    executable = recording.graph.instantiate()
    raw.calls.clear()
    executable.launch(stream)
    assert raw.calls == [("cuGraphLaunch", (executable.handle, stream.handle))]
    raw.fail = {"cuGraphLaunch": "CUDA_ERROR_ILLEGAL_ADDRESS"}
    with pytest.raises(CudaError, match=r"cuGraphLaunch.*CUDA_ERROR_ILLEGAL_ADDRESS"):
        executable.launch(stream=stream)
