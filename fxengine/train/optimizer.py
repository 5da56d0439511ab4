"""Gradient norms, the non-finite guard, clipping and Adam (`optimizer.cu`).

Adam: Kingma and Ba, "Adam: a method for stochastic optimization" (ICLR 2015), with decoupled weight decay
(Loshchilov and Hutter, ICLR 2019) on matrices only, and with the clamps of the per-group oracles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import CONSTANTS, Family, Launch, Program, Tensor
from fxengine.graphs.program import Value, tensors_of
from fxengine.train.groups import ParamGroup

if TYPE_CHECKING:
    from fxengine.train.targets import TargetGroup

_NORM_TILE = 4096
_ADAM_TILE = 2048
# Elements that two words of `Adam.kinds` describe: 32 quads.
_KIND_SPAN = 128


def _norm_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["length"]) // _NORM_TILE)


def _adam_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["length"]) // _ADAM_TILE)


NORM = Family("norm", "optimizer.cu", "fx_norm", "Norm", tiles=_norm_tiles)
ADAM = Family("adam", "optimizer.cu", "fx_adam", "Adam", tiles=_adam_tiles, early=("params", "m", "v", "targets"))


#: Gives the device view (float32 [1]) of a signal by name.
SignalLookup: TypeAlias = Callable[[str], Tensor]


@dataclass(frozen=True)
class Guard:
    """Results of the optimizer on the device, for what comes behind it.

    Attributes:
        scales: float32 [groups], factor that clips the group's gradient.
        skip: uint32 [1], 1 when some norm is not finite and nothing may be updated.
        group_mask: uint64 [1], bit `group.index` of every group whose norm is not finite.
    """

    scales: Tensor
    skip: Tensor
    group_mask: Tensor


def optimize(
    program: Program,
    groups: Iterable[ParamGroup],
    *,
    signal: SignalLookup,
    counters: Tensor,
    norms: Mapping[str, Tensor],
    targets: Iterable[TargetGroup] = (),
    later: Collection[str] = (),
) -> Guard:
    """Append gradient norms, clip factors, the guard, Adam, and what follows the parameters in the same pass.

    The gradients must be complete in the program by then, made by it or by the host; once per program. Nothing changes,
    bit for bit, but the norms and the guard, while a norm is not finite.

    Args:
        program: program to append to.
        groups: every group that the optimizer updates.
        signal: must know `beta1`, `beta2`, `adam_eps`, `weight_decay`, `eps_clamp_floor`, for every group
            `clip.<group>`, `lr.<group>` and `bound.<family>.<group>` for the families weight, adam_m, adam_v, grad
            (0 = no bound known), and with targets `polyak_tau`.
        counters: uint64 [4]; this step's t is counters[1] + 1.
        norms: float32 [1] by group name, receives the gradient norm before clipping.
        targets: target copies, moved by polyak_tau towards the new parameters.
        later: names of parameters whose targets stay where they are: something will change the parameters again, and
            `polyak` comes behind it.

    Raises:
        ValueError: no group, an index that two groups share or that is outside 0..63, targets of a group that is not
            updated, or a name of `later` without a target.
    """
    members = tuple(groups)
    indices = [g.index for g in members]
    if not members or len(set(indices)) != len(indices) or not all(0 <= i < 64 for i in indices):
        raise ValueError(f"the optimizer needs groups with distinct indices in 0..63, got {indices}")
    copies = {t.name: t for t in targets}
    known = {name for copy in copies.values() for name in copy}
    if strays := [*(set(copies) - {g.name for g in members}), *(set(later) - known)]:
        raise ValueError(f"no updated group or target {sorted(strays)}; targets are those of {sorted(copies)}")
    guard = Guard(
        scales=program.tensor("optimizer.scales", (len(members),)),
        skip=program.tensor("optimizer.skip", (1,), np.uint32),
        group_mask=program.tensor("optimizer.group_mask", (1,), np.uint64),
    )
    partials = _norm(program, members)
    _adam(
        program,
        members,
        partials,
        signal=signal,
        counters=counters,
        guard=guard,
        norms=norms,
        targets=copies,
        later=later,
    )
    return guard


def _norm(program: Program, groups: Sequence[ParamGroup]) -> list[Tensor]:
    """Have the squares of all gradients summed; returns the partial sums by group.

    By the records that write the gradients, where they can; else by records of their own, which are appended.
    """
    reporters = [_reporters(program, group) for group in groups]
    counts = [
        sum(map(_reported, own)) if own else -(-group.size // _NORM_TILE)
        for group, own in zip(groups, reporters, strict=True)
    ]
    ends = np.cumsum(counts)
    whole = program.tensor("optimizer.partials", (int(ends[-1]),), np.float64)
    partials = [whole.rows(int(end) - n, int(end)) for n, end in zip(counts, ends, strict=True)]
    # Every record reads what all of them read, so that all become ready together and share one launch.
    reads = [group.grads for group, own in zip(groups, reporters, strict=True) if not own]
    for group, own, part in zip(groups, reporters, partials, strict=True):
        first = 0
        for record in own:
            count = _reported(record)
            squares = part.rows(first, first + count)
            program.amend(record, {"squares": squares}, writes=[squares])
            first += count
        if not own:
            fields: dict[str, Value] = {"grads": group.grads, "partials": part, "length": group.size}
            program.launch(NORM, fields, reads=reads, writes=[part], label=f"norm.{group.name}")
    return partials


def _reported(record: Launch) -> int:
    """Number of partial sums of squares that a record can report."""
    return record.family.squares(record.fields) if record.family.squares else 0


def _reporters(program: Program, group: ParamGroup) -> list[Launch]:
    """The records that write the gradients of a group last, in order, if these can report the squares of all of them
    and of nothing else; else none."""
    found: dict[Launch, set[tuple[int, ...]]] = {}
    for parameter in group.parameters:
        parts = _last_parts(program, parameter.grad)
        if not parts:
            return []
        for record, part in parts:
            found.setdefault(record, set()).add(_extent(part))
    for record, due in found.items():
        gradients = _gradients(record)
        if any(t.storage is not group.grads.storage for t in gradients) or {_extent(t) for t in gradients} != due:
            return []
    return [record for record in program.launches if record in found]


def _last_parts(program: Program, gradient: Tensor) -> list[tuple[Launch, Tensor]]:
    """What records write last of a gradient as theirs; nothing if it is not made up of that."""
    region = gradient.region()
    parts: list[tuple[Launch, Tensor]] = []
    missing = gradient.size
    for record in reversed(program.launches):
        if missing <= 0:
            break
        writes = [t for t in record.writes if region.overlaps(t.region())]
        own = [t for t in _gradients(record) if region.overlaps(t.region())]
        if {_extent(t) for t in writes} != {_extent(t) for t in own}:
            return []
        if any(t.region().overlaps(part.region()) for t in own for _, part in parts):
            return []  # numbers that are written again count once
        parts += ((record, t) for t in own)
        missing -= sum(t.size for t in own)
    return parts if missing == 0 else []


def _gradients(record: Launch) -> list[Tensor]:
    return [t for name in record.family.gradients for t in tensors_of(record.fields[name])]


def _extent(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.offset, tensor.ld, *tensor.shape)


def _adam(
    program: Program,
    groups: Sequence[ParamGroup],
    partials: Sequence[Tensor],
    *,
    signal: SignalLookup,
    counters: Tensor,
    guard: Guard,
    norms: Mapping[str, Tensor],
    targets: Mapping[str, TargetGroup],
    later: Collection[str],
) -> None:
    """Append Adam on all groups, which first finishes their norms and the guard."""
    whole = replace(partials[0], offset=0, shape=(sum(p.size for p in partials),))
    for i, group in enumerate(groups):
        copy = targets.get(group.name)
        # In the order of AdamScalar in optimizer.cu.
        scalars = (
            signal(f"clip.{group.name}"),
            signal(f"lr.{group.name}"),
            *(signal(name) for name in ("beta1", "beta2", "adam_eps", "weight_decay", "eps_clamp_floor")),
            *(signal(f"bound.{family}.{group.name}") for family in ("weight", "adam_m", "adam_v", "grad")),
            signal("polyak_tau") if copy else 0,
            signal("beta1"),
            signal("beta2"),
        )
        tensors = {
            "params": group.params,
            "grads": group.grads,
            "m": group.m,
            "v": group.v,
            "targets": copy.values if copy else 0,
            "kinds": _kinds(program, group, later if copy else None),
            "partials": whole,
            "counters": counters,
        }
        results = {
            "norm": norms[group.name],
            "scale": guard.scales.rows(i, i + 1),
            "skip": guard.skip if i == 0 else 0,
            "group_mask": guard.group_mask if i == 0 else 0,
        }
        program.launch(
            ADAM,
            {
                **tensors,
                "scalars": scalars,
                **results,
                "length": group.size,
                "all_partials": whole.size,
                "first_partial": partials[i].offset,
                "partial_count": partials[i].size,
                "group": group.index,
            },
            reads=[t for t in (*tensors.values(), *scalars) if isinstance(t, Tensor)],
            writes=[
                *(group.params, group.m, group.v, copy.values if copy else None),
                *(t for t in results.values() if isinstance(t, Tensor)),
            ],
            label=f"adam.{group.name}",
        )


def _kinds(program: Program, group: ParamGroup, later: Collection[str] | None) -> Tensor:
    """Which quads of a group's buffers are part of a matrix, and which have targets that move with them.

    `later`: parameters whose targets stay; None: all of them.
    """
    span = -(-group.size // _KIND_SPAN) * _KIND_SPAN
    bits = np.zeros((2, span // 4), np.uint8)
    bits[1] = later is not None
    for p in group.parameters:
        quads = slice(p.offset // 4, -(-p.end // 4))
        bits[0, quads] = p.is_matrix
        if later is not None and p.name in later:
            bits[1, quads] = 0
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4").T
    name = f"optimizer.kinds.{group.name}"
    return program.tensor(name, words.shape, np.uint32, arena=CONSTANTS, data=np.ascontiguousarray(words, np.uint32))


def reference_norms(
    grads: Sequence[ArrayLike], clips: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Norm and clip factor of each group, in float64.

    Args:
        grads: gradient of each group, any shape.
        clips: clip of each group.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.array([np.sqrt((np.asarray(g, np.float64) ** 2).sum()) for g in grads])
        return norms, np.minimum(1.0, np.asarray(clips, np.float64) / (norms + 1e-6))


@dataclass(frozen=True)
class Hyper:
    """Scalars of one Adam step on one tensor.

    Attributes:
        lr: learning rate.
        scale: clip factor of the group.
        beta1, beta2, eps: Adam's constants.
        weight_decay: decoupled decay, matrices only.
        floor: lowest effective bound.
        weight, m, v, grad: bound slots of the group; 0 = no bound.
    """

    lr: float = 3e-4
    scale: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    floor: float = 1.0
    weight: float = 0.0
    m: float = 0.0
    v: float = 0.0
    grad: float = 0.0

    def bound(self, family: str) -> float:
        """Effective bound of a family; infinite when its slot is 0."""
        slot = float(getattr(self, family))
        return np.inf if slot == 0 else max(slot, self.floor)


def reference_adam(
    w: ArrayLike, grad: ArrayLike, m: ArrayLike, v: ArrayLike, *, t: int, hyper: Hyper
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """New (w, m, v) after Adam step number t (from 1), in float64. w with two dimensions or more is a matrix."""
    old = np.asarray(w, np.float64)
    limit_g, limit_m = hyper.bound("grad"), hyper.bound("m")
    g = np.clip(hyper.scale * np.asarray(grad, np.float64), -limit_g, limit_g)
    new_m = np.clip(hyper.beta1 * np.asarray(m, np.float64) + (1 - hyper.beta1) * g, -limit_m, limit_m)
    new_v = np.minimum(hyper.beta2 * np.asarray(v, np.float64) + (1 - hyper.beta2) * g**2, hyper.bound("v"))
    step = (new_m / (1 - hyper.beta1**t)) / (np.sqrt(new_v / (1 - hyper.beta2**t)) + hyper.eps)
    if old.ndim < 2:
        return old - hyper.lr * step, new_m, new_v
    limit_w = hyper.bound("weight")
    return np.clip(old - hyper.lr * (step + hyper.weight_decay * old), -limit_w, limit_w), new_m, new_v
