"""Driver calls of the simulated device about streams and events."""

from __future__ import annotations

import threading
import time
from typing import Any

from cuda.bindings import driver as cu

from fxengine.driver.sim.core import Core, Refused, Result, call
from fxengine.driver.sim.state import Edge, Event, Node, Record, Sequence, Stream

__all__ = ["StreamCalls"]

_NON_BLOCKING = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
_EVENT_FLAGS = 7
_NO_TIMING = int(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING)


class StreamCalls(Core):
    """Streams and events."""

    # --- streams ---

    @call(1)
    def cuStreamCreate(self, flags: int) -> cu.CUstream:
        """A new stream."""
        if flags not in (0, _NON_BLOCKING):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        stream = Stream(self.new_handle(), blocking=flags == 0)
        self.streams[stream.handle] = stream
        return cu.CUstream(stream.handle)

    @call()
    def cuStreamDestroy(self, handle: Any) -> None:
        """Destroy a stream; its queued work still runs. A capture it takes part in becomes invalid."""
        stream = self.find_stream(handle)
        if stream is self.legacy:
            raise Refused(Result.CUDA_ERROR_INVALID_HANDLE)
        if stream.sequence is not None:
            stream.sequence.invalidated = True
        self.advance(lambda: not stream.queue)
        del self.streams[stream.handle]

    @call()
    def cuStreamSynchronize(self, handle: Any) -> None:
        """Wait for a stream."""
        stream = self.find_stream(handle)
        self.forbid_on_capturing(stream)
        if stream is self.legacy:
            self.advance(lambda: not any(s.queue for s in self.streams.values() if s.blocking))
        else:
            self.advance(lambda: not stream.queue)

    @call()
    def cuStreamQuery(self, handle: Any) -> None:
        """Whether a stream has finished; while work is queued, each query runs one piece of it."""
        stream = self.find_stream(handle)
        self.forbid_on_capturing(stream)
        if stream.queue:
            self.advance(lambda: False, steps=1)
            raise Refused(Result.CUDA_ERROR_NOT_READY)

    @call()
    def cuStreamWaitEvent(self, handle: Any, event: Any, flags: int) -> None:
        """Let later work on a stream wait for an event; an event of a capture takes the stream into it."""
        stream, found = self.find_stream(handle), self.find(self.events, event, "event")
        if flags not in (0, 1):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        if found.sequence is not None:
            self._join(stream, found, found.sequence)
            return
        if found.record is None:
            return
        self.check_legacy(stream)
        if stream.sequence is not None:
            stream.sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "the event was recorded outside of this capture")
        if stream is self.legacy:
            record = found.record
            self.advance(lambda: record.done)
        elif not found.record.done:
            stream.queue.append(found.record)

    def _join(self, stream: Stream, event: Event, sequence: Sequence) -> None:
        if sequence.ended:
            raise Refused(Result.CUDA_ERROR_CAPTURED_EVENT, "the event was recorded in a capture that has ended since")
        if stream is self.legacy:
            sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        if stream.sequence is not None and stream.sequence is not sequence:
            stream.sequence.invalidated = sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_MERGE)
        if stream.sequence is None:
            stream.sequence = sequence
            stream.edges = []
            sequence.streams.append(stream)
        stream.edges = merged(stream.edges, event.edges)

    # --- events ---

    @call(1)
    def cuEventCreate(self, flags: int) -> cu.CUevent:
        """A new event."""
        if flags & ~_EVENT_FLAGS:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        event = Event(self.new_handle(), timing=not flags & _NO_TIMING)
        self.events[event.handle] = event
        return cu.CUevent(event.handle)

    @call()
    def cuEventDestroy(self, handle: Any) -> None:
        """Destroy an event; waits that were enqueued keep its recording."""
        event = self.find(self.events, handle, "event")
        del self.events[event.handle]

    @call()
    def cuEventRecord(self, handle: Any, on: Any) -> None:
        """Record an event on a stream, or in the capture of that stream."""
        event, stream = self.find(self.events, handle, "event"), self.find_stream(on)
        self.check_legacy(stream)
        if stream.sequence is not None:
            if stream.sequence.invalidated:
                raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
            event.sequence, event.edges, event.record = stream.sequence, list(stream.edges), None
            return
        record = Record()
        event.sequence, event.edges, event.record = None, [], record

        def work() -> None:
            record.time_ns = time.perf_counter_ns()
            record.done = True

        self.submit(stream, work)

    @call()
    def cuEventSynchronize(self, handle: Any) -> None:
        """Wait for the latest recording."""
        record = self._recording(handle)
        if record is not None:
            self.advance(lambda: record.done)

    @call()
    def cuEventQuery(self, handle: Any) -> None:
        """Whether the latest recording was reached; while it was not, each query runs one piece of work.

        The driver counts it among the calls that a capture forbids.
        """
        record = self._recording(handle)
        self.forbid_in_capture()
        if record is not None and not record.done:
            self.advance(lambda: False, steps=1)
            raise Refused(Result.CUDA_ERROR_NOT_READY)

    @call(1)
    def cuEventElapsedTime(self, start: Any, end: Any) -> float:
        """Milliseconds of wall clock between two recordings."""
        first, last = self.find(self.events, start, "event"), self.find(self.events, end, "event")
        if not (first.timing and last.timing):
            raise Refused(Result.CUDA_ERROR_INVALID_HANDLE, "an event was made without timing")
        if first.record is None or last.record is None:
            raise Refused(Result.CUDA_ERROR_INVALID_HANDLE, "an event was never recorded outside of captures")
        if not (first.record.done and last.record.done):
            raise Refused(Result.CUDA_ERROR_NOT_READY)
        return (last.record.time_ns - first.record.time_ns) / 1e6

    def _recording(self, handle: Any) -> Record | None:
        event = self.find(self.events, handle, "event")
        if event.sequence is not None:
            event.sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_CAPTURED_EVENT)
        return event.record

    # --- captured work ---

    def add_node(
        self,
        stream: Stream,
        kind: cu.CUgraphNodeType,
        operation: Any,
        keep: Any,
        *,
        programmatic: bool = False,
    ) -> Node:
        """Append a node to the graph that the stream is captured into."""
        sequence = stream.sequence
        assert sequence is not None
        if sequence.invalidated:
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        kernel = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
        edges = stream.edges
        if programmatic:
            edges = [Edge(e.node, 1, 1) if e.node.kind == kernel and e.kind == 0 else e for e in edges]
        if any(e.kind == 1 and (e.node.kind != kernel or kind != kernel) for e in edges):
            sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "a programmatic dependency needs a kernel node at both ends")
        node = Node(self.new_handle(), sequence.graph, kind, operation, edges, keep=keep)
        sequence.graph.nodes.append(node)
        self.nodes[node.handle] = node
        stream.edges = [Edge(node)]
        return node

    def wrong_thread(self, sequence: Sequence) -> bool:
        """Whether only another thread may end this capture."""
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        return sequence.mode != relaxed and sequence.thread != threading.get_ident()


def merged(first: list[Edge], second: list[Edge]) -> list[Edge]:
    """Both lists of dependencies, each node once."""
    known = {edge.node.handle for edge in first}
    return [*first, *(edge for edge in second if edge.node.handle not in known)]
