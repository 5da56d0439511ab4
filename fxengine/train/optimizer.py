"""Gradient norms, the non-finite guard, clipping and Adam (`optimizer.cu`).

Adam: Kingma and Ba, "Adam: a method for stochastic optimization" (ICLR 2015), with decoupled weight decay
(Loshchilov and Hutter, ICLR 2019) on matrices only, and with the clamps of the per-group oracles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.train.groups import ParamGroup

_NORM_TILE = 4096
_ADAM_TILE = 1024


def _norm_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["length"]) // _NORM_TILE)


def _adam_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["length"]) // _ADAM_TILE)


NORM = Family("norm", "optimizer.cu", "fx_norm", "Norm", tiles=_norm_tiles)
ADAM = Family("adam", "optimizer.cu", "fx_adam", "Adam", tiles=_adam_tiles)


#: Gives the device view (float32 [1]) of a signal by name.
SignalLookup: TypeAlias = Callable[[str], Tensor]


@dataclass(frozen=True)
class Guard:
    """Results of `norm` on the device.

    Attributes:
        scales: float32 [groups], factor that clips the group's gradient.
        skip: uint32 [1], 1 when some norm is not finite and nothing may be updated.
        group_mask: uint64 [1], bit `group.index` of every group whose norm is not finite.
        corrections: float32 [2], 1 - beta1^t and 1 - beta2^t.
    """

    scales: Tensor
    skip: Tensor
    group_mask: Tensor
    corrections: Tensor


def optimize(
    program: Program,
    groups: Iterable[ParamGroup],
    *,
    signal: SignalLookup,
    counters: Tensor,
    norms: Mapping[str, Tensor],
) -> Guard:
    """Append `norm`, then `adam`. The gradients must be complete in the program by then; once per program."""
    members = tuple(groups)
    guard = norm(program, members, signal=signal, counters=counters, norms=norms)
    adam(program, members, signal=signal, guard=guard)
    return guard


def norm(
    program: Program,
    groups: Sequence[ParamGroup],
    *,
    signal: SignalLookup,
    counters: Tensor,
    norms: Mapping[str, Tensor],
) -> Guard:
    """Append the gradient norms of all groups, clip factors, the guard's flag and Adam's bias corrections.

    All groups must be given at once, since the last block of the launch looks at all of them.

    Args:
        program: program to append to.
        groups: every group that the optimizer updates.
        signal: must know `clip.<group>`, `beta1`, `beta2`.
        counters: uint64 [4]; this step's t is counters[1] + 1.
        norms: float32 [1] by group name, receives the gradient norm before clipping.

    Raises:
        ValueError: no group, or an index that two groups share or that is outside 0..63.
    """
    indices = [g.index for g in groups]
    if not groups or len(set(indices)) != len(indices) or not all(0 <= i < 64 for i in indices):
        raise ValueError(f"the optimizer needs groups with distinct indices in 0..63, got {indices}")
    guard = Guard(
        scales=program.tensor("optimizer.scales", (len(groups),)),
        skip=program.tensor("optimizer.skip", (1,), np.uint32),
        group_mask=program.tensor("optimizer.group_mask", (1,), np.uint64),
        corrections=program.tensor("optimizer.corrections", (2,)),
    )
    beta1, beta2 = signal("beta1"), signal("beta2")
    clips = [signal(f"clip.{g.name}") for g in groups]
    # Every record reads what all of them read, so that all become ready together and share one launch. What one block
    # does for all of them stands in the first record alone: two writers of one tensor would wait for each other.
    reads = [*(g.grads for g in groups), *clips, counters, beta1, beta2]
    ticket = program.tensor("optimizer.ticket", (1,), np.uint32, arena="optimizer", data=np.zeros(1, np.uint32))
    shared: dict[str, Tensor] = {
        "ticket": ticket,
        "skip": guard.skip,
        "group_mask": guard.group_mask,
        "corrections": guard.corrections,
    }
    for i, group in enumerate(groups):
        length = group.grads.size
        partials = program.tensor(f"optimizer.partials.{group.name}", (-(-length // _NORM_TILE),), np.float64)
        scale = guard.scales.rows(i, i + 1)
        program.launch(
            NORM,
            {
                "grads": group.grads,
                "partials": partials,
                "clip": clips[i],
                "norm": norms[group.name],
                "scale": scale,
                "counters": counters,
                "beta1": beta1,
                "beta2": beta2,
                "length": length,
                "group": group.index,
                **(shared if i == 0 else dict.fromkeys(shared, 0)),
            },
            reads=reads,
            writes=[partials, norms[group.name], scale, *(shared.values() if i == 0 else ())],
            label=f"norm.{group.name}",
        )
    return guard


def adam(program: Program, groups: Sequence[ParamGroup], *, signal: SignalLookup, guard: Guard) -> None:
    """Append Adam on every tensor of the groups. Nothing changes, bit for bit, while the guard's flag is set.

    Args:
        program: program to append to.
        groups: the groups given to `norm`, in the same order.
        signal: must know `lr.<group>`, `beta1`, `beta2`, `adam_eps`, `weight_decay`, `eps_clamp_floor` and
            `bound.<family>.<group>` for the families weight, adam_m, adam_v, grad (0 = no bound known).
        guard: what `norm` returned.
    """
    common = {
        "skip": guard.skip,
        "corrections": guard.corrections,
        "beta1": signal("beta1"),
        "beta2": signal("beta2"),
        "eps": signal("adam_eps"),
        "weight_decay": signal("weight_decay"),
        "bound_floor": signal("eps_clamp_floor"),
    }
    for i, group in enumerate(groups):
        scalars = {
            **common,
            "scale": guard.scales.rows(i, i + 1),
            "lr": signal(f"lr.{group.name}"),
            "weight_bound": signal(f"bound.weight.{group.name}"),
            "m_bound": signal(f"bound.adam_m.{group.name}"),
            "v_bound": signal(f"bound.adam_v.{group.name}"),
            "grad_bound": signal(f"bound.grad.{group.name}"),
        }
        for p in group.parameters:
            tensors = {"params": p.value, "grads": p.grad, "m": p.m, "v": p.v}
            program.launch(
                ADAM,
                {**tensors, **scalars, "length": p.value.size, "is_matrix": int(p.is_matrix)},
                reads=[*tensors.values(), *scalars.values()],
                writes=[p.value, p.m, p.v],
                label=f"adam.{p.name}",
            )


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
