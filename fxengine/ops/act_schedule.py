"""Who does what in a folded acting program (`act_net.cu`): operations in steps, and a list of work for every warp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fxengine.graphs.program import Value

# NetKind, NET_WARPS and NET_OUTPUTS of act_net.cu, and actions of a task of NET_DUELING.
LINEAR, SMALL, MIX, GATE, NORM, WIRE, DUELING, SOFTMAX = range(8)
WARPS, OUTPUTS, ACTIONS = 16, 4, 4
# Words of parameters that a task of step 0 copies.
_COPIED = 128
# Tasks that a warp computes again, beside its own one, rather than wait for another warp.
_MOST_REPEATED = 3
# What a step costs at least, in like units: a barrier of the cluster and a way through its network, or of the block.
_SHARED_COST, _OWN_COST = 5, 2


@dataclass(eq=False)
class Op:
    """One operation.

    Attributes:
        kind: NetKind.
        fields: its entries of the arrays of struct ActNet; what it lacks is 0.
        reads: columns of a row that it reads.
        writes: columns of a row that it writes.
        after: earlier operations that it must follow.
    """

    kind: int
    fields: dict[str, Value]
    reads: list[range]
    writes: range
    after: list[Op] = field(default_factory=list)

    def size(self, name: str) -> int:
        """A field that is a whole number."""
        value = self.fields[name]
        assert isinstance(value, int)
        return value

    @property
    def shared(self) -> bool:
        """Whether the cluster computes it together."""
        return self.kind == LINEAR

    @property
    def staged(self) -> int:
        """Floats of shared memory that its parameters take."""
        if self.kind == SMALL:
            return self.size("n") * (self.size("k") + 1)
        return 2 * self.size("n") if self.kind == NORM else 0

    @property
    def parts(self) -> int:
        """Tasks that a row of it is, for one warp each."""
        if self.kind in (SMALL, GATE, NORM):
            return -(-len(self.writes) // self.size("chunk"))
        if self.kind == MIX:
            return self.size("groups")
        return -(-self.size("n") // ACTIONS) if self.kind == DUELING else 1

    def touched(self, part: int) -> tuple[list[range], range]:
        """Columns that a part of it reads and writes."""
        if self.kind not in (SMALL, MIX, GATE, NORM, DUELING):
            return self.reads, self.writes
        size = {MIX: "k", DUELING: ""}.get(self.kind, "chunk")
        width = self.size(size) if size else ACTIONS
        first = part * width
        last = min(first + width, len(self.writes))
        own = self.writes[first:last]
        if self.kind != SMALL:
            return self.reads, own
        n, k = self.size("n"), self.size("k")
        groups = self.reads[0].start + first // n * k, self.reads[0].start + ((last - 1) // n + 1) * k
        return [range(*groups), *(added[first:last] for added in self.reads[1:])], own


@dataclass(frozen=True)
class Task:
    """A part of an operation, for one row."""

    op: Op
    row: int
    part: int

    @property
    def repeatable(self) -> bool:
        """Whether it may be computed twice: not if it adds to what it writes."""
        return not any(overlap(r, self.op.writes) for r in self.op.reads)

    def needs(self, earlier: Task) -> bool:
        """Whether it reads what the other writes."""
        written = earlier.op.touched(earlier.part)[1]
        return self.row == earlier.row and any(overlap(r, written) for r in self.op.touched(self.part)[0])


def overlap(a: range, b: range) -> bool:
    """Whether two ranges of columns have one in common."""
    return a.start < b.stop and b.start < a.stop


def plan_steps(ops: Sequence[Op]) -> list[list[Op]]:
    """Operations by steps of one sort each, so that the steps cost least together.

    A step takes every operation of its sort that is ready: what is left to decide is the order of the sorts.
    """
    index = {id(op): i for i, op in enumerate(ops)}
    after = [frozenset(index[id(e)] for e in op.after) for op in ops]

    def ready(done: frozenset[int], shared: bool) -> frozenset[int]:
        return frozenset(i for i, op in enumerate(ops) if i not in done and op.shared == shared and after[i] <= done)

    @cache
    def best(done: frozenset[int]) -> tuple[int, tuple[frozenset[int], ...]]:
        if len(done) == len(ops):
            return 0, ()
        found = []
        for shared, cost in ((True, _SHARED_COST), (False, _OWN_COST)):
            if step := ready(done, shared):
                rest, steps = best(done | step)
                found.append((cost + rest, (step, *steps)))
        return min(found, key=lambda option: option[0])

    return _merged([[ops[i] for i in sorted(step)] for step in best(frozenset())[1]])


def _merged(steps: Sequence[list[Op]]) -> list[list[Op]]:
    """Neighbouring own steps as one, where a warp can repeat the few tasks that its own ones wait for."""
    merged: list[list[Op]] = []
    for step in steps:
        if merged and not step[0].shared and not merged[-1][0].shared and _chains([*merged[-1], *step], 1):
            merged[-1] = [*merged[-1], *step]
        else:
            merged.append(step)
    return merged


def _chains(ops: Sequence[Op], rows: int) -> list[list[Task]]:
    """What the warps do in an own step: tasks that nothing in it waits for, each behind those that it needs.

    Empty if it would take a barrier: too much, or something that must not be done twice, would be repeated.
    """
    chains = []
    needed: set[Task] = set()
    before: dict[Task, list[Task]] = {}
    for task in (Task(op, row, part) for op in ops for row in range(rows) for part in range(op.parts)):
        direct = [earlier for earlier in before if task.needs(earlier)]
        behind = [t for earlier in direct for t in (*before[earlier], earlier)]
        before[task] = list(dict.fromkeys(behind))
        needed.update(before[task])
        if len(before[task]) > _MOST_REPEATED or not all(t.repeatable for t in before[task]):
            return []
    for task, earlier in before.items():
        if task not in needed:
            chains.append([*earlier, task])
    return chains


def unit_lists(steps: Sequence[Sequence[Op]], numbers: dict[int, int], cluster: int) -> NDArray[np.int32]:
    """What the warps of a cluster do in shared steps: int32 [cluster, WARPS, length], -1 behind the last.

    Args:
        steps: the steps behind step 0.
        numbers: number of each operation, by its id.
        cluster: blocks of the cluster.
    """
    lists: list[list[int]] = [[] for _ in range(cluster * WARPS)]
    for step, members in enumerate(steps, start=1):
        units = [
            _entry(step, numbers[id(op)], first)
            for op in members
            if op.shared
            for first in range(0, op.size("n"), OUTPUTS)
        ]
        for i, unit in enumerate(units):  # round the blocks first: each has its own way to the weights
            lists[i % cluster * WARPS + i // cluster % WARPS].append(unit)
    return _padded(lists).reshape(cluster, WARPS, -1)


def task_lists(steps: Sequence[Sequence[Op]], numbers: dict[int, int], rows: int) -> NDArray[np.int32]:
    """What the warps of every block do in own steps, for so many rows: int32 [WARPS, length], -1 behind the last.

    Step 0 copies the parameters of own operations to shared memory.
    """
    lists: list[list[int]] = [[] for _ in range(WARPS)]
    ops = [op for members in steps for op in members if op.staged]
    copies = [_entry(0, numbers[id(op)], part) for op in ops for part in range(-(-op.staged // _COPIED))]
    for i, copy in enumerate(copies):
        lists[i % WARPS].append(copy)
    for step, members in enumerate(steps, start=1):
        if members[0].shared:
            continue
        chains = _chains(members, rows)
        for i, chain in enumerate(chains):
            own = lists[i * WARPS // max(WARPS, len(chains))]  # neighbours to one warp: they repeat the same tasks
            entries = [_entry(step, numbers[id(t.op)], t.row << 14 | t.part) for t in chain]
            own += [entry for entry in entries if entry not in own]
    return _padded(lists)


def _entry(step: int, op: int, argument: int) -> int:
    assert step < 128 and op < 64 and argument < 1 << 18
    return step << 24 | op << 18 | argument


def _padded(lists: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    array = np.full((len(lists), 1 + max(map(len, lists))), -1, np.int32)
    for row, entries in zip(array, lists, strict=True):
        row[: len(entries)] = entries
    return array
