"""Driver calls of the simulated device about stream capture."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as cu

from fxengine.driver.sim.core import Refused, Result, call
from fxengine.driver.sim.state import Edge, Graph, Node, Sequence
from fxengine.driver.sim.stream_calls import StreamCalls, merged

__all__ = ["CaptureCalls", "edge_data"]

_Status = cu.CUstreamCaptureStatus
_SET = int(cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)


class CaptureCalls(StreamCalls):
    """Captures: what is submitted to a capturing stream becomes nodes of a graph."""

    @call()
    def cuStreamBeginCapture(self, handle: Any, mode: cu.CUstreamCaptureMode) -> None:
        """Begin a capture."""
        stream = self.find_stream(handle)
        if stream is self.legacy:
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy stream cannot be captured")
        if stream.sequence is not None:
            raise Refused(Result.CUDA_ERROR_ILLEGAL_STATE, "the stream is capturing already")
        graph = Graph(self.new_handle())
        sequence = Sequence(
            self.new_handle(), graph, stream, cu.CUstreamCaptureMode(mode), threading.get_ident(), [stream]
        )
        stream.sequence, stream.edges = sequence, []
        self.sequences.append(sequence)
        self.graphs[graph.handle] = graph

    @call(1)
    def cuStreamEndCapture(self, handle: Any) -> cu.CUgraph:
        """End a capture; the graph, or why there is none. The stream is usable again in any case but UNMATCHED."""
        stream = self.find_stream(handle)
        sequence = stream.sequence
        if sequence is None:
            raise Refused(Result.CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing")
        if stream is not sequence.origin:
            sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "the capture began on another stream")
        if self.wrong_thread(sequence):
            sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD)
        unjoined = _unjoined(sequence)
        for member in sequence.streams:
            member.sequence, member.edges = None, []
        sequence.ended = True
        self.sequences.remove(sequence)
        if sequence.invalidated or unjoined:
            del self.graphs[sequence.graph.handle]
            for node in sequence.graph.nodes:
                del self.nodes[node.handle]
            raise Refused(
                Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                if sequence.invalidated
                else Result.CUDA_ERROR_STREAM_CAPTURE_UNJOINED
            )
        return cu.CUgraph(sequence.graph.handle)

    @call(1, context=False)
    def cuStreamIsCapturing(self, handle: Any) -> cu.CUstreamCaptureStatus:
        """Whether a stream is capturing."""
        stream = self.find_stream(handle)
        self.check_legacy(stream)
        return _status(stream.sequence)

    @call(6, context=False)
    def cuStreamGetCaptureInfo(self, handle: Any) -> tuple[Any, ...]:
        """Status, number, graph, and what the next node will depend on."""
        stream = self.find_stream(handle)
        self.check_legacy(stream)
        sequence = stream.sequence
        if sequence is None or sequence.invalidated:
            return (_status(sequence), cu.cuuint64_t(0), cu.CUgraph(0), [], [], 0)
        return (
            _status(sequence),
            cu.cuuint64_t(sequence.number),
            cu.CUgraph(sequence.graph.handle),
            [cu.CUgraphNode(edge.node.handle) for edge in stream.edges],
            [edge_data(edge) for edge in stream.edges],
            len(stream.edges),
        )

    @call()
    def cuStreamUpdateCaptureDependencies(
        self, handle: Any, dependencies: Any, data: Any, count: int, flags: int
    ) -> None:
        """Replace (SET) or extend (ADD) what the next captured node depends on."""
        stream = self.find_stream(handle)
        sequence = stream.sequence
        if sequence is None:
            raise Refused(Result.CUDA_ERROR_ILLEGAL_STATE, "the stream is not capturing")
        if sequence.invalidated:
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        given = list(dependencies or ())
        described = list(data or ())
        if len(given) < count or (described and len(described) < count) or int(flags) not in (0, _SET):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        edges = []
        for i in range(count):
            node = self.nodes.get(int(given[i]))
            if node is None or node.graph is not sequence.graph:
                raise Refused(
                    Result.CUDA_ERROR_INVALID_VALUE, f"{int(given[i]):#x} is no node of the graph being captured"
                )
            edges.append(_edge(node, described[i] if described else None))
        stream.edges = merged([], edges) if int(flags) == _SET else merged(stream.edges, edges)

    @call(1, context=False)
    def cuThreadExchangeStreamCaptureMode(self, mode: cu.CUstreamCaptureMode) -> cu.CUstreamCaptureMode:
        """Set this thread's mode and give the one before."""
        before = self.local.capture_mode
        self.local.capture_mode = cu.CUstreamCaptureMode(mode)
        return before


def edge_data(edge: Edge) -> cu.CUgraphEdgeData:
    """An edge as the driver shows it."""
    data = cu.CUgraphEdgeData()
    data.type = cu.CUgraphDependencyType(edge.kind)
    data.from_port = edge.from_port
    data.to_port = edge.to_port
    return data


def _edge(node: Node, data: Any) -> Edge:
    if data is None:
        return Edge(node)
    kind, from_port, to_port = int(data.type), int(data.from_port), int(data.to_port)
    if kind == 0 and (from_port or to_port):
        raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"a full dependency through port {from_port}")
    if kind == 1 and (from_port not in (1, 2) or to_port):
        raise Refused(
            Result.CUDA_ERROR_INVALID_VALUE,
            f"a programmatic dependency from port {from_port}: expected 1 (programmatic) or 2 (launch order)",
        )
    if kind == 1 and node.kind != cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "a programmatic dependency on a node that is no kernel")
    return Edge(node, kind, from_port, to_port)


def _status(sequence: Sequence | None) -> cu.CUstreamCaptureStatus:
    if sequence is None:
        return _Status.CU_STREAM_CAPTURE_STATUS_NONE
    if sequence.invalidated:
        return _Status.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    return _Status.CU_STREAM_CAPTURE_STATUS_ACTIVE


def _unjoined(sequence: Sequence) -> bool:
    """Whether another stream of the capture has work that the origin does not come after."""
    reached = set()
    pending = [edge.node for edge in sequence.origin.edges]
    while pending:
        node = pending.pop()
        if node.handle not in reached:
            reached.add(node.handle)
            pending += [edge.node for edge in node.edges]
    others = (stream for stream in sequence.streams if stream is not sequence.origin)
    return any(edge.node.handle not in reached for stream in others for edge in stream.edges)
