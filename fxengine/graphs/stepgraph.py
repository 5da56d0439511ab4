"""A captured program: replay, counts, tables, drawing, time per node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fxengine.driver import Graph, Stream

if TYPE_CHECKING:
    from fxengine.graphs.plan import Plan, Step


@dataclass(frozen=True)
class Census:
    """What a captured graph consists of.

    Attributes:
        depth: nodes on the longest path, over the captured edges.
        nodes: number of nodes by type (`kernel`, `memset`, ...), as the driver reports them.
        launches: number of kernel nodes by kernel family.
        records: number of records by kernel family (several share a launch).
        edges: number of dependency edges.
        bytes: bytes of device memory by arena.
        instantiations: how often the graph was instantiated; 1, whatever signals change.
    """

    depth: int
    nodes: dict[str, int]
    launches: dict[str, int]
    records: dict[str, int]
    edges: int
    bytes: dict[str, int]
    instantiations: int

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class StepGraph:
    """One instantiated CUDA graph. Keeps alive all that it captured: plan, arenas, kernels, argument blocks.

    Made by `Plan.capture`. `launch` replays it; nothing about it changes between replays.
    """

    def __init__(self, plan: Plan, graph: Graph, steps: tuple[Step, ...]) -> None:
        self.plan = plan
        self._graph = graph
        self._steps = steps
        self._exec = graph.instantiate()
        self.instantiations = 1
        self.launch = self._exec.launch
        """`launch(*, stream)`: enqueue one replay."""
        self.bind = self._exec.bind
        """`bind(stream)`: a function without arguments that does so, for the hot path of who closes the graph."""

    def census(self) -> Census:
        """Counts read back from the driver's graph, not from the plan."""
        nodes = self._graph.nodes()
        edges = self._graph.edges()
        launches = Counter(step.node.name for step in self._steps if step.kernel is not None)
        records: Counter[str] = Counter()
        for step in self._steps:
            if step.kernel is not None:
                for part in step.node.parts:
                    records[part.family.name] += len(part.records)
        return Census(
            depth=_depth(nodes, edges),
            nodes=dict(Counter(self._graph.node_type(n) for n in nodes)),
            launches=dict(launches),
            records=dict(records),
            edges=len(edges),
            bytes=self.plan.arena_bytes(),
            instantiations=self.instantiations,
        )

    def table(self) -> str:
        """One line per node in order of execution: level, kernel family, blocks, records, what they are for."""
        lines = [f"{'node':>4} {'level':>5} {'family':<22} {'blocks':>6} {'records':>7}  after       for"]
        for i, step in enumerate(self._steps):
            after = ",".join(map(str, step.node.after)) or "-"
            lines.append(
                f"{i:>4} {step.node.level:>5} {step.node.name:<22} {step.blocks or '-':>6} "
                f"{len(step.node.records) or '-':>7}  {after:<10}  {step.node.label}"
            )
        return "\n".join(lines)

    def dot(self) -> str:
        """The graph in Graphviz DOT, one rank per level."""
        lines = ["digraph step {", '  node [shape=box, fontname="Helvetica"];']
        for i, step in enumerate(self._steps):
            text = step.node.name + "\\n" + "\\n".join(r.label for r in step.node.records)
            lines.append(f'  n{i} [label="{text}"];')
        levels: dict[int, list[int]] = {}
        for i, step in enumerate(self._steps):
            levels.setdefault(step.node.level, []).append(i)
        for members in levels.values():
            lines.append("  { rank=same; " + " ".join(f"n{i};" for i in members) + " }")
        for i, step in enumerate(self._steps):
            lines.extend(f"  n{d} -> n{i};" for d in step.node.after)
        return "\n".join([*lines, "}"])

    def close(self) -> None:
        """Destroy the graph and its executable. Idempotent."""
        self._exec.close()
        self._graph.close()

    def __enter__(self) -> StepGraph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def node_times(plan: Plan, *, stream: Stream, chain: int = 20, repeats: int = 5) -> list[float]:
    """Microseconds per node of a plan, each measured by itself: a graph of `chain` copies, median of `repeats`.

    The kernels really run, so the plan's tensors hold meaningless values afterwards: use a plan made for this.
    Caches are warm, so the sum is somewhat below the time of the whole step.
    """
    device = plan.device
    times = []
    with device.event(timing=True) as start, device.event(timing=True) as stop:
        for index in range(len(plan.nodes)):
            with plan.capture_nodes([index], stream=stream, chain=chain) as graph:
                samples = []
                for _ in range(repeats + 1):
                    start.record(stream=stream)
                    graph.launch(stream=stream)
                    stop.record(stream=stream)
                    stop.synchronize()
                    samples.append(stop.elapsed_ms(start) * 1e3 / chain)
                times.append(sorted(samples[1:])[repeats // 2])
    return times


def _depth(nodes: Sequence[Any], edges: Sequence[tuple[Any, Any]]) -> int:
    """Nodes on the longest path of a graph given by handles."""
    index = {int(n): i for i, n in enumerate(nodes)}
    followers: list[list[int]] = [[] for _ in nodes]
    pending = [0] * len(nodes)
    for source, target in edges:
        followers[index[int(source)]].append(index[int(target)])
        pending[index[int(target)]] += 1
    level = [0] * len(nodes)
    ready = [i for i, n in enumerate(pending) if n == 0]
    while ready:
        i = ready.pop()
        for j in followers[i]:
            level[j] = max(level[j], level[i] + 1)
            pending[j] -= 1
            if pending[j] == 0:
                ready.append(j)
    return 1 + max(level, default=-1)
