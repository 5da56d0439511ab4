"""Stream capture, graphs and their executables."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fxengine.driver.api import SUCCESS, bindings_version
from fxengine.driver.errors import FxError
from fxengine.driver.resource import Resource, drain, release_call, thread_state

if TYPE_CHECKING:
    from fxengine.driver.device import Device
    from fxengine.driver.stream import Stream

__all__ = ["Capture", "Graph", "GraphExec", "capture"]


class Capture:
    """An open capture: lets a program state the exact dependencies of what it enqueues next."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._device = stream.device
        self._graph: Graph | None = None

    def set_dependencies(self, nodes: Sequence[Any], programmatic: bool | Sequence[Any] = ()) -> None:
        """Make the next captured operation depend on exactly these nodes, each from an earlier `last_node()`.

        Args:
            nodes: the nodes; none makes the next operation a root of the graph.
            programmatic: those of the nodes, or True for all, that the next operation, a kernel launched with
                pdl=True, may overlap with. They must be kernels. Devices before sm_90 take them as ordinary edges.
        """
        driver = self._device.driver
        early = {int(node) for node in (nodes if programmatic is True else programmatic or ())}
        unknown = early - {int(node) for node in nodes}
        if unknown:
            raise FxError(f"{len(unknown)} programmatic node(s) are not among the {len(nodes)} dependencies")
        if not self._device.programmatic_launch:
            early.clear()
        edges = [self._edge(int(node) in early) for node in nodes]
        mode = driver.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
        driver.cuStreamUpdateCaptureDependencies(self._stream.handle, list(nodes), edges, len(nodes), int(mode))

    def last_node(self) -> Any:
        """The node captured last: the one that the next operation would depend on."""
        status, _, _, nodes, _, count = self._device.driver.cuStreamGetCaptureInfo(self._stream.handle)
        active = self._device.driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        if status != active:
            raise FxError(f"the capture is {getattr(status, 'name', status)}: an earlier call in it has failed")
        if count != 1:
            raise FxError(
                f"the last node is not known: the next operation depends on {count} nodes. Ask right after an "
                "operation was captured."
            )
        return nodes[0]

    @property
    def graph(self) -> Graph:
        """The captured graph, owned by the caller; FxError before the capture has ended."""
        if self._graph is None:
            raise FxError("the graph exists once the `with capture(...)` block has ended without an error")
        return self._graph

    def _edge(self, programmatic: bool) -> Any:
        driver = self._device.driver
        edge = driver.CUgraphEdgeData()
        if programmatic:
            edge.type = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
            edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        return edge


@contextmanager
def capture(stream: Stream) -> Iterator[Capture]:
    """Record what is enqueued on `stream` within the `with` block as a graph, instead of running it.

    Everything used must be allocated and loaded before. Other threads may go on allocating. If the block raises,
    or the driver finds the capture invalid (CudaError), nothing is left behind and the stream can be used again.
    """
    device = stream.device
    driver = device.driver
    handle = stream.handle
    captured = Capture(stream)
    # The lock keeps other threads from synchronizing the device, which would invalidate this capture.
    with device.capture_lock, device.activate(), _collector_off():
        driver.cuStreamBeginCapture(handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        thread_state.captures += 1  # from here on nobody's finaliser may call the driver on this thread
        try:
            yield captured
        except BaseException:
            _abandon(device, handle)
            raise
        finally:
            thread_state.captures -= 1
        # A capture made invalid on the way is ended by this call too; it then raises.
        captured._graph = Graph(device, driver.cuStreamEndCapture(handle))
    drain()


def _abandon(device: Device, handle: Any) -> None:
    """End a failed capture and destroy what it made; the error on its way out is the one to report."""
    returned = device.driver.raw.cuStreamEndCapture(handle)
    if len(returned) > 1 and returned[1] is not None and int(returned[1]):
        device.driver.raw.cuGraphDestroy(returned[1])


class _CollectorOff:
    """Python's cyclic collector is off while any thread captures: it would run finalisers of other libraries."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._was_enabled = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if self._depth == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0 and self._was_enabled:
                    gc.enable()


_collector_off = _CollectorOff()


class Graph(Resource):
    """A captured graph: to be looked at, and instantiated. Nodes are the driver's handles."""

    rank = 1
    handle: Any
    """The CUgraph."""

    def __init__(self, device: Device, handle: Any) -> None:
        """Takes over the CUgraph `handle`."""
        super().__init__(device, f"graph of {device.label}", release_call(device.driver, "cuGraphDestroy", handle))
        self.handle = handle

    def nodes(self) -> list[Any]:
        """Every node."""
        driver = self._device.driver
        count = driver.cuGraphGetNodes(self.handle)[1]
        return list(driver.cuGraphGetNodes(self.handle, count)[0])[:count] if count else []

    def edges(self) -> list[tuple[Any, Any]]:
        """Every dependency as (earlier node, later node)."""
        return [(source, target) for source, target, _ in self._edges()]

    def programmatic_edges(self) -> list[tuple[Any, Any]]:
        """The edges whose later kernel may begin before the earlier one ends; needs cuda-bindings 13.3."""
        if self._device.kind == "cuda" and bindings_version() < (13, 3):
            # Issue 1804 of cuda-python: older ones return edge data that lies in freed memory.
            found = ".".join(map(str, bindings_version()))
            raise FxError(f"edge data cannot be read with cuda-bindings {found}; 13.3 or newer is needed")
        kind = int(self._device.driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        return [(source, target) for source, target, data in self._edges() if int(data.type) == kind]

    def node_type(self, node: Any) -> str:
        """ "kernel", "memset", "memcpy", ... in the driver's words."""
        found = self._device.driver.cuGraphNodeGetType(node)
        return found.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()

    def instantiate(self) -> GraphExec:
        """Make it executable. The graph may be closed afterwards; the memory and modules it uses must stay."""
        driver = self._device.driver
        with self._device.activate():
            return GraphExec(self._device, driver.cuGraphInstantiate(self.handle, 0))

    def _edges(self) -> list[tuple[Any, Any, Any]]:
        driver = self._device.driver
        count = driver.cuGraphGetEdges(self.handle)[3]
        if not count:
            return []
        sources, targets, data, _ = driver.cuGraphGetEdges(self.handle, count)
        return list(zip(sources, targets, data, strict=True))[:count]


class GraphExec(Resource):
    """An executable graph. `launch` replays it."""

    rank = 0
    handle: Any
    """The CUgraphExec."""

    def __init__(self, device: Device, handle: Any) -> None:
        """Takes over the CUgraphExec `handle`."""
        super().__init__(
            device, f"executable graph of {device.label}", release_call(device.driver, "cuGraphExecDestroy", handle)
        )
        self.handle = handle
        self._launch = device.driver.raw.cuGraphLaunch

    def launch(self, stream: Stream) -> None:
        """Enqueue one replay on `stream`; replays of one executable never overlap."""
        status = self._launch(self.handle, stream.handle)[0]
        if status != SUCCESS:
            self._device.launch_failed("cuGraphLaunch", (self.handle, stream.handle), status)

    def bind(self, stream: Stream) -> Callable[[], None]:
        """A function that enqueues one replay on `stream`, with everything it needs looked up once.

        It is for the hot path of an owner that closes the executable: once that is closed it must not be called.
        """
        launch, handle, queue, failed = self._launch, self.handle, stream.handle, self._device.launch_failed

        def replay() -> None:
            status = launch(handle, queue)[0]
            if status:  # CUDA_SUCCESS is 0
                failed("cuGraphLaunch", (handle, queue), status)

        return replay

    def upload(self, stream: Stream) -> None:
        """Move the graph's own data to the device now, so that the first launch is as fast as the others."""
        with self._device.activate():
            self._device.driver.cuGraphUpload(self.handle, stream.handle)
