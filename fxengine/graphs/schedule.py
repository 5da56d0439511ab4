"""From reads and writes to nodes: dependencies, levels, batched launches, exact edges. Pure functions of a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from fxengine.graphs.program import ZEROED, Family, Launch, Program, Region

#: Levels by which a path must be shorter than the longest one for its nodes to have time.
_TIME = 2
#: From so many nodes that one waits for on, one more does not matter.
_MANY = 4


@dataclass(frozen=True)
class Part:
    """Records of one family in a launch."""

    family: Family
    records: tuple[Launch, ...]

    @property
    def blocks(self) -> int:
        """Blocks that the records need together."""
        return sum(self.family.tiles(record.fields) for record in self.records)


@dataclass(frozen=True)
class Node:
    """One node of the graph to be: the memset, or one launch over the records of one or several families.

    Attributes:
        parts: the records of the launch, by family; none for the memset that clears the zeroed arena.
        level: longest path from a root, in nodes; roots are level 0.
        after: indices of the nodes that it begins behind (transitively reduced): those that it depends on, and some
            that the planner holds it back for.
        overlaps: whether it may begin while those still run.
    """

    parts: tuple[Part, ...]
    level: int
    after: tuple[int, ...]
    overlaps: bool = False

    @property
    def records(self) -> tuple[Launch, ...]:
        """All records of the launch."""
        return tuple(record for part in self.parts for record in part.records)

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return sum(part.blocks for part in self.parts)

    @property
    def whole(self) -> bool:
        """Whether it has blocks that need a whole multiprocessor."""
        return any(part.family.whole for part in self.parts)

    @property
    def name(self) -> str:
        """Names of its families, or `memset`."""
        return "+".join(part.family.name for part in self.parts) if self.parts else "memset"

    @property
    def label(self) -> str:
        """Labels of its records."""
        return ", ".join(r.label for r in self.records) if self.parts else "clear the zeroed arena"


def schedule(program: Program, *, fuses: Callable[[Part], bool] | None = None) -> tuple[Node, ...]:
    """Nodes of a program in a valid order of execution.

    Two records depend on each other when one writes what the other reads or writes; the earlier one in the program
    goes first. Records of one family and level share a launch, but for those that would let others wait. Records of a
    `late` family wait until just before their first reader, which brings all weight gradients into one launch; those of
    another launch, if all have time, wait for the next launch of their family.

    Args:
        program: the program.
        fuses: says which parts may share a launch with parts of other families at the same level; None for none.
    """
    records = program.launches
    before = _dependencies(records)
    levels = _together(records, before, _levels(records, before))
    clears = any(s.arena == ZEROED for s in program.storages.values())

    aside = _aside(records, before, levels)
    groups: dict[tuple[int, Family, bool], list[int]] = defaultdict(list)
    for i, record in enumerate(records):
        groups[levels[i], record.family, i in aside].append(i)
    launches: list[list[tuple[Part, list[int]]]] = []
    shared: dict[int, list[tuple[Part, list[int]]]] = {}
    for (level, family, _), members in sorted(groups.items(), key=lambda item: (item[0][0], item[1][0])):
        part = Part(family, tuple(records[i] for i in members))
        if fuses is not None and fuses(part):
            if level not in shared:
                launches.append(shared.setdefault(level, []))
            shared[level].append((part, members))
        else:
            launches.append([(part, members)])

    if clears:
        launches.insert(0, [])  # the memset
    node_of = {i: n for n, launch in enumerate(launches) for _, members in launch for i in members}
    after: list[set[int]] = []
    for n, launch in enumerate(launches):
        indices = [i for _, members in launch for i in members]
        after.append({node_of[j] for i in indices for j in before[i]})
        if clears and any(_touches_zeroed(records[i]) for i in indices):
            after[n].add(0)
    order, after = _one_root(after, clears)
    reduced = _transitive_reduction(after)

    nodes: list[Node] = []
    for n, deps in zip(order, reduced, strict=True):
        level = 1 + max((nodes[d].level for d in deps), default=-1)
        nodes.append(Node(tuple(part for part, _ in launches[n]), level, tuple(sorted(deps))))
    if clears:
        nodes = _cleared_sooner(nodes, order.index(0), program.target.sm_count)
    overlap = _overlap(nodes, program.target.sm_count)
    nodes = [replace(node, overlaps=early) for node, early in zip(nodes, overlap, strict=True)]
    return tuple(_joined_sooner(nodes))


def _overlap(nodes: Sequence[Node], sm_count: int) -> list[bool]:
    """Which nodes may begin while those that they follow still run: they prepare what they can, then wait for them.

    A kernel lets its followers begin only after it has waited itself; so whatever comes further before them has
    finished by then, and only what a direct predecessor writes must not be read early. The other conditions are about
    places on the multiprocessors, which a waiting block holds as a running one does:

    - Nodes that have time (longest paths through them are at least `_TIME` nodes shorter than the longest of all) leave
      the places to those that have not.
    - A node whose blocks need a whole multiprocessor does not wait in the way of a predecessor that fills the device.
    """
    height = _heights([node.after for node in nodes])
    longest = depth(nodes) - 1

    def overlaps(i: int) -> bool:
        node, behind = nodes[i], [nodes[d] for d in nodes[i].after]
        if not node.parts or not all(other.parts and _may_precede(node, other) for other in behind):
            return False
        if longest - node.level - height[i] >= _TIME:
            return False
        return not node.whole or all(other.blocks <= sm_count for other in behind)

    return [overlaps(i) for i in range(len(nodes))]


def _heights(after: Sequence[Collection[int]]) -> list[int]:
    """Nodes on the longest path behind each node, of what each follows."""
    height = [0] * len(after)
    for i in reversed(range(len(after))):
        for d in after[i]:
            height[d] = max(height[d], height[i] + 1)
    return height


def _one_root(after: Sequence[set[int]], clears: bool) -> tuple[list[int], list[set[int]]]:
    """Order of the nodes, and what each follows then: the first node of the longest path leads, and the others that
    follow nothing come behind it if they have time.

    A graph starts its roots one after another, in an order of its own: the first node of a step was seen to start
    microseconds behind others that nobody waited for. Where one of them is needed at once, an order does not help, and
    only the memset comes behind (node 0, if the program `clears`).
    """
    aside = {0} if clears else set()
    height = _heights(after)
    roots = [i for i, deps in enumerate(after) if not deps]
    first = max((i for i in roots if i not in aside), key=lambda i: height[i], default=-1)
    rest = [i for i in roots if i != first]
    late = [i for i in rest if first >= 0 and height[first] - height[i] >= _TIME]
    if not all(i in late or i in aside for i in rest):
        late = [i for i in late if i in aside]
    order = [first, *(i for i in range(len(after)) if i != first)] if late else list(range(len(after)))
    place = {i: n for n, i in enumerate(order)}
    return order, [{place[d] for d in ({first} if i in late else after[i])} for i in order]


def _joined_sooner(nodes: Sequence[Node]) -> list[Node]:
    """Where a node waits for another one besides that of the level before it, let a node further before, which waits
    for many anyway, wait for it instead: a hand-off along a chain is faster than a join.

    Not if that comes less than two levels behind the other one, which might still run then. Who begins early is settled
    before: a node that had time has it still, whoever waits for it now.
    """
    after = [set(node.after) for node in nodes]
    for i in range(len(nodes)):
        j = i
        while len(after[i]) > 1 and after[j]:
            j = max(after[j], key=lambda d: (nodes[d].level, d))
            if len(after[j]) < _MANY:
                continue
            for d in sorted(after[i]):
                if nodes[d].parts and d < j and nodes[d].level + 1 < nodes[j].level:
                    after[i].discard(d)
                    after[j].add(d)
    reduced = _transitive_reduction(after)
    return [replace(node, after=tuple(sorted(deps))) for node, deps in zip(nodes, reduced, strict=True)]


def _cleared_sooner(nodes: Sequence[Node], clear: int, sm_count: int) -> list[Node]:
    """Where nothing but the memset, node `clear`, keeps a node from beginning early, a node before it that cannot do so
    waits for the memset instead."""
    after = [set(node.after) for node in nodes]
    apart = _overlap([replace(node, after=tuple(set(node.after) - {clear})) for node in nodes], sm_count)
    for i, node in enumerate(nodes):
        if not apart[i] or clear not in node.after or len(node.after) < 2:
            continue
        behind, rest = set[int](), set(node.after)
        while rest:
            behind.add(d := rest.pop())
            rest |= set(nodes[d].after) - behind
        waiting = [d for d in behind if nodes[d].level > nodes[clear].level and nodes[d].after and not apart[d]]
        if waiting:
            after[i].discard(clear)
            after[max(waiting)].add(clear)
    reduced = _transitive_reduction(after)
    return [replace(node, after=tuple(sorted(deps))) for node, deps in zip(nodes, reduced, strict=True)]


def _may_precede(node: Node, behind: Node) -> bool:
    """Whether a node reads nothing early that one behind which it comes writes."""
    early = [tensor.region() for record in node.records for tensor in record.early]
    written = [tensor.region() for record in behind.records for tensor in record.writes]
    return not any(region.overlaps(other) for region in early for other in written)


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


def _groups(records: Sequence[Launch], levels: Sequence[int]) -> dict[tuple[int, Family], list[int]]:
    """The records of each family that are ready at each level."""
    groups: dict[tuple[int, Family], list[int]] = defaultdict(list)
    for i, record in enumerate(records):
        groups[levels[i], record.family].append(i)
    return groups


def _together(records: Sequence[Launch], before: Sequence[set[int]], levels: Sequence[int]) -> list[int]:
    """Levels where the records of a launch, if all of them have time, go to the next launch of their family."""
    levels, latest = list(levels), [max(levels, default=0)] * len(records)
    groups = _groups(records, levels)
    for level, family in sorted(groups, key=lambda key: -key[0]):
        members = groups[level, family]
        room = min(latest[i] for i in members)
        later = min((other for other, shared in groups if shared == family and level < other <= room), default=level)
        if later > level and not family.late:
            groups[later, family] += groups.pop((level, family))
            for i in members:
                levels[i] = later
        for i in members:
            for j in before[i]:
                latest[j] = min(latest[j], levels[i] - 1)
    return levels


def _aside(records: Sequence[Launch], before: Sequence[set[int]], levels: Sequence[int]) -> set[int]:
    """Records that can wait a level, and for which the others of their launch, some of which are on a longest path,
    would have to wait for one launch more: they get a launch of their own."""
    height = _heights(before)
    longest = max((level + above for level, above in zip(levels, height, strict=True)), default=0)
    behind: list[set[tuple[int, Family]]] = []  # of each record, the groups that come before it, directly or not
    for deps in before:
        behind.append({(levels[j], records[j].family) for j in deps}.union(*(behind[j] for j in deps)))
    aside = set[int]()
    for (level, family), members in _groups(records, levels).items():
        hurried = [i for i in members if level + height[i] == longest]
        if family.late or not hurried:
            continue
        known = set[tuple[int, Family]]().union(*(behind[i] for i in hurried))
        aside |= {i for i in members if level + height[i] < longest and not behind[i] <= known}
    return aside


def _transitive_reduction(after: Sequence[set[int]]) -> list[set[int]]:
    """Drop every edge that a longer path already implies. Indices are in topological order."""
    reach: list[set[int]] = []
    reduced: list[set[int]] = []
    for deps in after:
        implied = set().union(*(reach[d] for d in deps)) if deps else set()
        reduced.append(deps - implied)
        reach.append(implied | deps)
    return reduced
