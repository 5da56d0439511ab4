"""From reads and writes to nodes: dependencies, levels, batched launches, exact edges. Pure functions of a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fxengine.graphs.program import ZEROED, Family, Launch, Program, Region


@dataclass(frozen=True)
class Node:
    """One node of the graph to be: the memset, or one launch over the records of one family.

    Attributes:
        family: the kernel family; None for the memset that clears the zeroed arena.
        records: the records of the launch, in program order.
        level: longest path from a root, in nodes; roots are level 0.
        after: indices of the nodes it directly depends on (transitively reduced).
    """

    family: Family | None
    records: tuple[Launch, ...]
    level: int
    after: tuple[int, ...]

    @property
    def name(self) -> str:
        """Family name, or `memset`."""
        return self.family.name if self.family else "memset"

    @property
    def label(self) -> str:
        """Labels of its records."""
        return ", ".join(r.label for r in self.records) if self.records else "clear the zeroed arena"


def schedule(program: Program) -> tuple[Node, ...]:
    """Nodes of a program in a valid order of execution.

    Two records depend on each other when one writes what the other reads or writes; the earlier one in the program
    goes first. Records of one family and level share a launch. Records of a `late` family wait until just before
    their first reader, which brings all weight gradients into one launch.
    """
    records = program.launches
    before = _dependencies(records)
    levels = _levels(records, before)
    clears = any(s.arena == ZEROED for s in program.storages.values())

    groups: dict[tuple[int, Family], list[int]] = defaultdict(list)
    for i, record in enumerate(records):
        groups[levels[i], record.family].append(i)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], item[1][0]))

    first = 1 if clears else 0
    node_of = {i: first + n for n, (_, members) in enumerate(ordered) for i in members}
    after: list[set[int]] = [set()] if clears else []
    for _, members in ordered:
        deps = {node_of[j] for i in members for j in before[i]}
        if clears and any(_touches_zeroed(records[i]) for i in members):
            deps.add(0)
        after.append(deps)
    reduced = _transitive_reduction(after)

    nodes = [Node(None, (), 0, ())] if clears else []
    for n, ((_, family), members) in enumerate(ordered, start=first):
        level = 1 + max((nodes[d].level for d in reduced[n]), default=-1)
        nodes.append(Node(family, tuple(records[i] for i in members), level, tuple(sorted(reduced[n]))))
    return tuple(nodes)


def depth(nodes: Sequence[Node]) -> int:
    """Number of nodes on the longest path."""
    return 1 + max((n.level for n in nodes), default=-1)


def _touches_zeroed(record: Launch) -> bool:
    return any(t.storage.arena == ZEROED for t in (*record.reads, *record.writes))


def _dependencies(records: Sequence[Launch]) -> list[set[int]]:
    """For each record, the earlier ones that it must follow (read after write, write after read, write after write)."""
    touched: dict[int, list[tuple[int, Region, bool]]] = defaultdict(list)
    before: list[set[int]] = []
    for i, record in enumerate(records):
        accesses = [(t.region(), False) for t in record.reads] + [(t.region(), True) for t in record.writes]
        deps = {
            j
            for region, writes in accesses
            for j, other, wrote in touched[id(region.storage)]
            if (writes or wrote) and region.overlaps(other)
        }
        before.append(deps)
        for region, writes in accesses:
            touched[id(region.storage)].append((i, region, writes))
    return before


def _levels(records: Sequence[Launch], before: Sequence[set[int]]) -> list[int]:
    """As soon as possible for every record; late families as late as their followers allow."""
    levels: list[int] = []
    for deps in before:
        levels.append(1 + max((levels[j] for j in deps), default=-1))
    followers: list[list[int]] = [[] for _ in records]
    for i, deps in enumerate(before):
        for j in deps:
            followers[j].append(i)
    last = max(levels, default=0)
    for i in reversed(range(len(records))):
        if records[i].family.late:
            levels[i] = min((levels[j] for j in followers[i]), default=last + 1) - 1
    return levels


def _transitive_reduction(after: Sequence[set[int]]) -> list[set[int]]:
    """Drop every edge that a longer path already implies. Indices are in topological order."""
    reach: list[set[int]] = []
    reduced: list[set[int]] = []
    for deps in after:
        implied = set().union(*(reach[d] for d in deps)) if deps else set()
        reduced.append(deps - implied)
        reach.append(implied | deps)
    return reduced
