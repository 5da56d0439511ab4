"""Driver calls of the simulated device about graphs: inspection, instantiation, replay."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cu

from fxengine.driver.sim.capture_calls import edge_data
from fxengine.driver.sim.core import CONTEXT, Refused, Result, call
from fxengine.driver.sim.module_calls import ModuleCalls
from fxengine.driver.sim.runtime import Operation
from fxengine.driver.sim.state import Edge, GraphExec, Node

__all__ = ["GraphCalls"]

_Type = cu.CUgraphNodeType


class GraphCalls(ModuleCalls):
    """Graphs. A list call gives no items when asked for none, as the bindings do: ask for the count first.

    Looking at a graph and destroying one needs no current context.
    """

    @call(2, context=False)
    def cuGraphGetNodes(self, graph: Any, numNodes: int = 0) -> tuple[list[Any], int]:  # noqa: N803
        """Nodes in creation order."""
        nodes = self.find(self.graphs, graph, "graph").nodes
        if numNodes == 0:
            return [], len(nodes)
        return [cu.CUgraphNode(node.handle) for node in nodes[:numNodes]], min(numNodes, len(nodes))

    @call(4, context=False)
    def cuGraphGetEdges(self, graph: Any, numEdges: int = 0) -> tuple[list[Any], ...]:  # noqa: N803
        """Edges: from, to, data."""
        nodes = self.find(self.graphs, graph, "graph").nodes
        edges = [(edge, node) for node in nodes for edge in node.edges]
        shown = edges[:numEdges]
        return (
            [cu.CUgraphNode(edge.node.handle) for edge, _ in shown],
            [cu.CUgraphNode(node.handle) for _, node in shown],
            [edge_data(edge) for edge, _ in shown],
            len(shown) if numEdges else len(edges),  # type: ignore[return-value]
        )

    @call(1, context=False)
    def cuGraphNodeGetType(self, node: Any) -> cu.CUgraphNodeType:
        """Kernel, memset or memcpy."""
        return self._node(node).kind

    @call(3, context=False)
    def cuGraphNodeGetDependencies(
        self,
        node: Any,
        numDependencies: int = 0,  # noqa: N803
    ) -> tuple[list[Any], list[Any], int]:
        """What a node depends on, and how."""
        edges = self._node(node).edges
        shown: list[Edge] = edges[:numDependencies]
        return (
            [cu.CUgraphNode(edge.node.handle) for edge in shown],
            [edge_data(edge) for edge in shown],
            len(shown) if numDependencies else len(edges),
        )

    @call(1, context=False)
    def cuGraphKernelNodeGetParams(self, node: Any) -> cu.CUDA_KERNEL_NODE_PARAMS:
        """Function, shape and the address of the captured arguments, alive as long as the graph."""
        found = self._node(node, _Type.CU_GRAPH_NODE_TYPE_KERNEL)
        assert found.function is not None
        operation = found.operation
        params = cu.CUDA_KERNEL_NODE_PARAMS()
        params.func = cu.CUfunction(found.function.handle)
        params.gridDimX, params.gridDimY, params.gridDimZ = operation.grid
        params.blockDimX, params.blockDimY, params.blockDimZ = operation.size
        params.sharedMemBytes = operation.dynamic_shared
        params.kernelParams = operation.arguments or 0
        params.ctx = cu.CUcontext(CONTEXT)
        return params

    @call(1, context=False)
    def cuGraphMemsetNodeGetParams(self, node: Any) -> cu.CUDA_MEMSET_NODE_PARAMS:
        """Destination, value and size."""
        target, value, count = self._node(node, _Type.CU_GRAPH_NODE_TYPE_MEMSET).fill
        params = cu.CUDA_MEMSET_NODE_PARAMS()
        params.dst = cu.CUdeviceptr(target)
        params.value = value
        params.elementSize = 4
        params.width = count
        params.height = 1
        params.pitch = 0
        return params

    @call(1)
    def cuGraphInstantiate(self, graph: Any, flags: int) -> cu.CUgraphExec:
        """An executable copy of the graph, independent of it from now on."""
        found = self.find(self.graphs, graph, "graph")
        if any(s.graph is found for s in self.sequences):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "the graph is still being captured")
        if flags & ~0xF:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        nodes = list(found.nodes)
        place = {node.handle: i for i, node in enumerate(nodes)}
        successors: list[list[int]] = [[] for _ in nodes]
        for i, node in enumerate(nodes):
            for edge in node.edges:
                successors[place[edge.node.handle]].append(i)
        executable = GraphExec(self.new_handle(), nodes, successors, [len(node.edges) for node in nodes])
        executable.operations = _array(nodes)
        executable.address = ctypes.addressof(executable.operations)
        executable.modules = {node.function.module.handle for node in nodes if node.function is not None}
        self.execs[executable.handle] = executable
        return cu.CUgraphExec(executable.handle)

    @call()
    def cuGraphUpload(self, executable: Any, stream: Any) -> None:
        """Nothing needs to be uploaded."""
        self.find(self.execs, executable, "executable graph")
        found = self.find_stream(stream)
        if found.sequence is not None:
            found.sequence.invalidated = True
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)

    @call()
    def cuGraphLaunch(self, executable: Any, stream: Any) -> None:
        """Replay: all nodes, in an order that respects the edges."""
        found = self.execs.get(int(executable))
        if found is None:
            found = self.find(self.execs, executable, "executable graph")
        on = self.find_stream(stream)
        if self.sequences:
            self.check_legacy(on)
            if on.sequence is not None:
                on.sequence.invalidated = True
                raise Refused(
                    Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a graph launch inside a capture is not simulated"
                )
        for module in found.modules:
            if module not in self.modules:
                raise Refused(Result.CUDA_ERROR_INVALID_HANDLE, "a module of the graph was unloaded")
        if self.lazy or on is self.legacy:
            self.submit(on, lambda: self._replay(found))
        else:
            self._replay(found)

    def _replay(self, executable: GraphExec) -> None:
        if self.kind == 0 and not self.lazy:
            self.run_operations(executable.address, len(executable.nodes))
            return
        order = self._order(executable)
        operations = _array([executable.nodes[i] for i in order])
        self.run_operations(ctypes.addressof(operations), len(order))

    def _order(self, executable: GraphExec) -> list[int]:
        """A topological order: the latest ready node first, or a random one where order or streams are random."""
        waiting = list(executable.waiting)
        ready = [i for i, count in enumerate(waiting) if count == 0]
        order = []
        while ready:
            at = len(ready) - 1 if self.kind == 1 else self.random.randrange(len(ready))
            node = ready.pop(at)
            order.append(node)
            for successor in executable.successors[node]:
                waiting[successor] -= 1
                if waiting[successor] == 0:
                    ready.append(successor)
            ready.sort()
        return order

    @call(context=False)
    def cuGraphDestroy(self, graph: Any) -> None:
        """Destroy a graph and its nodes; executable graphs made from it live on."""
        found = self.find(self.graphs, graph, "graph")
        if any(s.graph is found for s in self.sequences):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "the graph is still being captured")
        del self.graphs[found.handle]
        for node in found.nodes:
            del self.nodes[node.handle]

    @call(context=False)
    def cuGraphExecDestroy(self, executable: Any) -> None:
        """Destroy an executable graph; replays that are queued still run."""
        del self.execs[self.find(self.execs, executable, "executable graph").handle]

    def _node(self, handle: Any, kind: cu.CUgraphNodeType | None = None) -> Node:
        node = self.nodes.get(int(handle))
        if node is None or (kind is not None and node.kind != kind):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"{int(handle):#x} is no graph node of this kind")
        return node


def _array(nodes: list[Node]) -> Any:
    """Operations of the nodes, one behind the other."""
    array = (Operation * max(len(nodes), 1))()
    for i, node in enumerate(nodes):
        array[i] = node.operation
    return array
