"""A whole acting program folded into one launch (`act_net.cu`), for few rows of a network of moderate size.

`fold` reads the records of a program (inputs from the host, layers, a policy) and puts one record in their place, in
which they are operations of a cluster of blocks. It declines what it does not know: the program then stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.graphs import Family, Launch, Program, Tensor
from fxengine.graphs.program import Storage, Value
from fxengine.ops.act_schedule import (
    DUELING,
    GATE,
    LINEAR,
    MIX,
    NORM,
    SMALL,
    SOFTMAX,
    WIRE,
    Op,
    overlap,
    plan_steps,
    task_lists,
    unit_lists,
)

#: Rows of a cluster that kernels exist for.
ROWS = (1, 2, 4, 8)
# Clusters that run side by side. More rows than they take, 64, are faster in a launch per layer.
_CLUSTERS = 8
# Floats of weights that a cluster reads in a few microseconds, and that one block does.
_CLUSTER_WEIGHTS, _BLOCK_WEIGHTS = 1 << 20, 1 << 16
# Limits of struct ActNet and of its operations.
_OPS, _STEPS, _INPUTS, _LANES, _MAX_ATOMS, _UNITS, _TASKS = 48, 31, 4, 32, 64, 2048, 1024
_SMALL_COLUMNS, _SMALL_WEIGHTS = 64, 4096
# Bytes of shared memory beside staged parameters and rows: the record, mailboxes and the header of the input.
_RECORD_BYTES, _BOXES_BYTES = 16_512, 32 * 8 + 16 * 4


class Declined(Exception):  # noqa: N818
    """The program is not for one launch; the message says why."""


def fold(program: Program) -> str:
    """Put one launch in the place of an acting program's records, if it can take them all.

    Args:
        program: as `fxengine.actgraph` declares it, in float32.

    Returns:
        "" if it did; else why not, and the program is unchanged.
    """
    try:
        record = _Folding(program).record()
    except Declined as reason:
        return str(reason)
    program.launches.clear()
    program.launch(record.family, record.fields, reads=record.reads, writes=record.writes, label=record.label)
    touched = {t.storage for t in (*record.reads, *record.writes)}
    for name in [n for n, storage in program.storages.items() if storage not in touched]:
        del program.storages[name]
    return ""


class _Folding:
    """One attempt to fold a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._columns: dict[Storage, range] = {}
        self._ops: list[Op] = []
        self._inputs: list[tuple[int, Tensor]] = []
        self._block: Tensor | None = None
        self._policy: Launch | None = None
        self._end = 0
        policies = [r for r in program.launches if r.family.struct == "Policy"]
        if len(policies) != 1:
            raise Declined("it has not one policy")
        self._rows = int(_number(policies[0], "items")) // int(_number(policies[0], "branches"))
        takers: dict[str, Callable[[Launch], None]] = {
            "ActRead": self._input,
            "LinearForward": self._linear,
            "AttentionForward": self._attention,
            "GluNormForward": self._glunorm,
            "CrossEntropy": self._wire,
            "Dueling": self._dueling,
            "Policy": self._take_policy,
        }
        for record in program.launches:
            taker = takers.get(record.family.struct)
            if taker is None:
                raise Declined(f"it has a {record.family.name} launch")
            taker(record)

    # -- the records of the program --------------------------------------------------------------------------------

    def _input(self, record: Launch) -> None:
        source, target = _tensor(record, "source"), record.writes[0]
        self._block = source
        if record.fields["slots"] != 0 or target.dtype == np.uint64:
            return  # the header: counters, and the one signal that the policy reads
        self._inputs.append((source.offset, target))
        self._place(target)

    def _linear(self, record: Launch) -> None:
        f = record.fields
        x, x2 = _tensor(record, "x"), f["x2"]
        w, b, y = _tensor(record, "w"), f["b"], self._place(_tensor(record, "y"))
        if f["accumulate"] != 0:
            raise Declined(f"'{record.label}' accumulates")
        if isinstance(x2, Tensor):
            k = x.shape[1]
            self._layer(LINEAR, self._at(x), w.columns(0, k), b, y, activation=0)
            self._layer(SMALL, self._at(x2), w.columns(k, w.shape[1]), 0, y, activation=f["activation"], add=y)
            return
        small = w.shape[1] <= 32 and w.size <= 1024
        self._layer(SMALL if small else LINEAR, self._at(x), w, b, y, activation=f["activation"])

    def _attention(self, record: Launch) -> None:
        f = record.fields
        if any(f[name] != 0 for name in ("live", "q", "k", "v", "p", "o")):
            raise Declined(f"'{record.label}' keeps what a backward needs, or leaves rows out")
        tokens, attn = int(_number(record, "tokens")), int(_number(record, "attn"))
        if tokens > _LANES:
            raise Declined(f"'{record.label}' has {tokens} tokens, more than {_LANES}")
        state, x = self._at(_tensor(record, "state")), self._place(_tensor(record, "x"))
        q, k, v, o = (self._scratch(tokens * attn) for _ in range(4))
        for name, part in (("w_q", q), ("w_k", k), ("w_v", v)):
            self._layer(SMALL, state, _tensor(record, name), 0, part, groups=tokens)
        fields: dict[str, Value] = {"x": q.start, "x2": k.start, "x3": v.start, "y": o.start}
        self._add(MIX, {**fields, "groups": tokens, "k": attn, "scale": f["scale"]}, [q, k, v], o)
        features = len(state) // tokens
        self._layer(SMALL, o, _tensor(record, "w_o"), 0, x, groups=tokens, add=state, chunk=min(features, _LANES))

    def _glunorm(self, record: Launch) -> None:
        if record.fields["stats"] != 0:
            raise Declined(f"'{record.label}' keeps what a backward needs")
        g, skip = self._at(_tensor(record, "g")), self._at(_tensor(record, "skip"))
        h = self._place(_tensor(record, "h"))
        gain, bias = _tensor(record, "gain"), _tensor(record, "bias")
        y = self._scratch(len(h))
        gate: dict[str, Value] = {"x": g.start, "add": skip.start, "y": y.start, "n": len(h), "chunk": _LANES}
        self._add(GATE, gate, [g, skip], y)
        norm: dict[str, Value] = {"x": y.start, "y": h.start, "n": len(h), "chunk": 2 * _LANES, "w": gain, "b": bias}
        norm |= {"scale": record.fields["eps"], "inverse": _inverse(len(h), 2 * len(h))}
        self._add(NORM, norm, [y], h)

    def _wire(self, record: Launch) -> None:
        f = record.fields
        if f["classes"] != 2 or any(f[name] != 0 for name in ("labels", "dlogits", "probabilities")):
            raise Declined(f"'{record.label}' is more than a wire")
        x, y = self._at(_tensor(record, "logits")), self._place(_tensor(record, "wire"))
        self._add(WIRE, {"x": x.start, "y": y.start}, [x], y)

    def _dueling(self, record: Launch) -> None:
        f = record.fields
        n, atoms = int(_number(record, "actions")), int(_number(record, "atoms"))
        if f["best"] != 0 or atoms > _MAX_ATOMS:
            raise Declined(f"'{record.label}' gives greedy actions, or has more than {_MAX_ATOMS} atoms")
        adv = self._at(_tensor(record, "adv"))
        v = self._at(f["v"]) if isinstance(f["v"], Tensor) else None
        q = self._place(_tensor(record, "q"))
        fields: dict[str, Value] = {"x": adv.start, "x2": v.start if v else -1, "y": q.start, "n": n, "k": atoms}
        reads = [adv, v] if v else [adv]
        self._add(DUELING, {**fields, "low": f["v_min"], "scale": f["spacing"]}, reads, q)
        if isinstance(f["policy"], Tensor):
            if n > _LANES:
                raise Declined(f"'{record.label}' has a policy over {n} actions, more than {_LANES}")
            policy = self._place(f["policy"])
            self._add(SOFTMAX, {"x": q.start, "y": policy.start, "n": n}, [q], policy)

    def _take_policy(self, record: Launch) -> None:
        if record.fields["report"] == 0:
            raise Declined("its policy does not report to the host")
        self._policy = record

    # -- operations ------------------------------------------------------------------------------------------------

    def _layer(
        self,
        kind: int,
        x: range,
        w: Tensor,
        b: Value,
        y: range,
        *,
        activation: Value = 0,
        groups: int = 1,
        add: range | None = None,
        chunk: int = _LANES,
    ) -> None:
        n, k = w.shape
        if w.storage in self._columns:
            raise Declined(f"{w}, weights of a layer, is itself computed from the observations")
        if kind == SMALL and (k > _SMALL_COLUMNS or n * k > _SMALL_WEIGHTS):
            raise Declined(f"a small layer has {n} x {k} weights")
        fields: dict[str, Value] = {"x": x.start, "y": y.start, "add": add.start if add else -1, "w": w, "b": b}
        fields |= {"n": n, "k": k, "groups": groups, "chunk": chunk, "ld": w.ld, "activation": activation}
        if kind == SMALL:
            fields["inverse"] = _inverse(n, max(groups * n, n * (k + 1)))
        self._add(kind, fields, [x, add] if add else [x], y)

    def _add(self, kind: int, fields: dict[str, Value], reads: list[range], writes: range) -> None:
        after = [
            earlier
            for earlier in self._ops
            if any(overlap(earlier.writes, r) for r in (*reads, writes))
            or any(overlap(r, writes) for r in earlier.reads)
        ]
        self._ops.append(Op(kind, fields, reads, writes, after))

    def _scratch(self, width: int) -> range:
        self._end += width
        return range(self._end - width, self._end)

    def _place(self, t: Tensor) -> range:
        """Columns of a tensor that is about to be written."""
        if t.storage not in self._columns:
            floats = t.storage.nbytes // 4
            if t.dtype != np.float32 or floats % self._rows:
                raise Declined(f"{t} is not a float32 row for each of the {self._rows} observations")
            self._columns[t.storage] = self._scratch(floats // self._rows)
        return self._at(t)

    def _at(self, t: Tensor) -> range:
        """Columns of a tensor that has been written."""
        columns = self._columns.get(t.storage)
        if columns is None or t.dtype != np.float32 or t.shape[0] != self._rows or len(t.shape) > 2:
            raise Declined(f"{t} {t.shape} is not computed for each of the {self._rows} observations")
        width = t.shape[1] if len(t.shape) == 2 else 1
        if t.offset + width > len(columns) or (self._rows > 1 and t.ld != len(columns)):
            raise Declined(f"{t} {t.shape} is not columns of its rows")
        return range(columns.start + t.offset, columns.start + t.offset + width)

    # -- the record ------------------------------------------------------------------------------------------------

    def record(self) -> Launch:
        """The one launch."""
        steps = plan_steps(self._ops)
        ops = [op for step in steps for op in step]
        if len(ops) > _OPS or len(steps) > _STEPS or not 1 <= len(self._inputs) <= _INPUTS:
            raise Declined(f"it has {len(ops)} operations in {len(steps)} steps and {len(self._inputs)} inputs")
        target = self._program.target
        cluster = target.cluster
        weights = sum(w.size for op in ops if op.shared and isinstance(w := op.fields["w"], Tensor))
        most = _BLOCK_WEIGHTS if cluster == 1 and target.kind == "cuda" else _CLUSTER_WEIGHTS
        if weights > most:
            raise Declined(f"its layers have {weights} weights, more than {most}")

        numbers = {id(op): i for i, op in enumerate(ops)}
        units = unit_lists(steps, numbers, cluster)
        staged = sum(op.staged for op in ops)
        for rows in _candidates(self._rows):
            tasks = task_lists(steps, numbers, rows)
            shared = _RECORD_BYTES + _BOXES_BYTES + 4 * (staged + rows * self._end)
            if shared <= target.shared_memory_optin and tasks.size <= _TASKS:
                break
        else:
            raise Declined(f"{self._rows} rows of {self._end} floats are too much for {_CLUSTERS} clusters")
        if units.size > _UNITS:
            raise Declined(f"its layers have {units.size} parts for the warps of a cluster, more than {_UNITS}")
        sizes: dict[str, Value] = {
            "steps": len(steps) + 1,
            "sent": [sum(map(len, self._spans())), *(_sent(members) for members in steps)],
            "units": _slices(units, cluster, _UNITS),
            "unit_length": units.shape[-1],
            "tasks": _slices(tasks[None], 1, _TASKS),
            "task_length": tasks.shape[-1],
            "staged_floats": staged,
            "row_floats": self._end,
            "rows": self._rows,
        }
        family = Family(
            f"act_net_{rows}",
            "act_net.cu",
            f"fx_act_net_{rows}",
            "ActNet",
            tiles=lambda fields: cluster * -(-self._rows // rows),
            shared=shared,
            alone=True,
        )
        assert self._policy is not None and self._block is not None
        block = replace(self._block, offset=0, shape=(1,))
        policy = self._policy_fields(self._policy)
        fields = {**_op_fields(ops), **sizes, **self._input_fields(), **policy, "input": block}
        read = [block, *(op.fields.get(name) for op in ops for name in ("w", "b"))]
        return Launch(family, fields, _tensors(read), _tensors([policy["report"], policy["report_q"]]), "act")

    def _spans(self) -> list[range]:
        """Columns of the inputs."""
        return [self._at(t) for _, t in self._inputs]

    def _input_fields(self) -> dict[str, Value]:
        spans = self._spans()
        return {
            "source": [source for source, _ in self._inputs],
            "width": [len(span) for span in spans],
            "column": [span.start for span in spans],
            "inputs": len(spans),
        }

    def _policy_fields(self, record: Launch) -> dict[str, Value]:
        f = record.fields
        kept = ("report", "report_q", "columns", "branches", "sizes", "offsets", "stream")
        return {name: f[name] for name in kept} | {"policy": f["kind"], "q": self._at(_tensor(record, "q")).start}


def _candidates(rows: int) -> list[int]:
    """Rows of a cluster with which all clusters run side by side, fewest first; none if there are too many rows."""
    return [r for r in ROWS if -(-rows // r) <= _CLUSTERS]


def _inverse(n: int, most: int) -> int:
    """What makes at * inverse >> 20 the quotient at / n for every at below `most`."""
    inverse = -(-(1 << 20) // n)
    numbers = np.arange(most, dtype=np.int64)
    if most * inverse >= 1 << 31 or (numbers * inverse >> 20 != numbers // n).any():
        raise Declined(f"a layer has {most} results of groups of {n}")
    return inverse


def _op_fields(ops: Sequence[Op]) -> dict[str, Value]:
    """The parallel arrays of struct ActNet."""
    names = ("w", "b", "x", "x2", "x3", "y", "n", "k", "groups", "chunk", "inverse", "ld", "activation")
    unused: dict[str, Value] = {**dict.fromkeys(names, 0), "add": -1, "low": 0.0, "scale": 0.0}
    rows = [{**unused, **op.fields, "kind": op.kind} for op in ops]
    arrays: dict[str, Any] = {name: [row[name] for row in rows] for name in (*unused, "kind")}
    arrays["staged"] = np.cumsum([0, *(op.staged for op in ops)])[:-1].tolist()
    return arrays


def _tensors(values: Iterable[Value | None]) -> tuple[Tensor, ...]:
    return tuple(value for value in values if isinstance(value, Tensor))


def _sent(members: Sequence[Op]) -> int:
    """Floats per row that a step sends to each block."""
    return sum(len(op.writes) for op in members if op.shared)


def _slices(lists: NDArray[np.int32], blocks: int, length: int) -> list[int]:
    """The lists [blocks, warps, length] as an array of struct ActNet: an equal part of it for each block."""
    array = np.full((blocks, length // blocks), -1, np.int32)
    array[:, : lists[0].size] = lists.reshape(blocks, -1)
    return [int(entry) for entry in array.ravel()]


def _tensor(record: Launch, name: str) -> Tensor:
    value = record.fields.get(name)
    if not isinstance(value, Tensor):
        raise Declined(f"'{record.label}' has no tensor {name}")
    return value


def _number(record: Launch, name: str) -> int | float:
    value = record.fields[name]
    assert isinstance(value, int | float)
    return value
