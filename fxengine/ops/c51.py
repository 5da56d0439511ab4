"""Losses of C51 heads, dueling or plain, and their gradient, all branches in one pass (`c51.cu`, `c51_many.cu`).

Three losses share the pass, since they share what they read: the distributional Bellman error with its categorical
projection, the conservative term, and the distillation from an IQN. Each has a weight on the device; a loss without a
weight tensor sends no gradient, and one whose weight is 0 sends an exact 0.

Sources: projection and loss: Bellemare, Dabney & Munos 2017, "A distributional perspective on reinforcement learning",
algorithm 1, with the action taken from the online network as in van Hasselt, Guez & Silver 2016, "Deep reinforcement
learning with double Q-learning"; conservative term: Kumar et al. 2020, "Conservative Q-learning for offline
reinforcement learning", equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import matrix, require
from fxengine.ops.dueling import Heads, atom_spacing, reference_dueling
from fxengine.ops.reduce import sum_partials

if TYPE_CHECKING:
    from fxengine.driver import Target

#: Most branches that a record describes.
MAX_BRANCHES = 8


def _tiles(fields: Mapping[str, Any], groups: int = 8) -> int:
    """`groups`: branches of rows that a block works on."""
    return -(-int(fields["rows"]) // (groups // int(fields["branches"])))


C51 = Family("c51", "c51.cu", "fx_c51", "C51", tiles=_tiles)
#: For more atoms than `_ATOMS`.
C51_WIDE = Family("c51_wide", "c51.cu", "fx_c51_wide", "C51", tiles=_tiles)
# Two atoms per lane.
_ATOMS = 64

# Where there are more branches of rows than this many per multiprocessor, one is given to so many lanes (c51_many.cu),
# of which each holds at most so many numbers of a head, and a few for each of at most so many actions.
_MANY = 4
_LANES = 16
_HELD = 32
_ACTIONS = 8


@cache
def _many(branches: int, atoms: int, most: int, fewest: int, dueling: bool) -> Family:
    """With its sizes compiled in; `most` and `fewest`: actions of the largest branch, and of the smallest.

    It works for so many rows that it shares a launch with nobody: its registers would be taken from the others.
    """
    sizes = f"{branches}, {atoms}, {most}, {fewest}, {str(dueling).lower()}"
    return Family(
        "c51_many",
        "c51_many.cu",
        "fx_c51_many",
        "C51",
        tiles=partial(_tiles, groups=256 // _LANES),
        alone=True,
        defines=(("C51_SIZES", sizes),),
    )


def _family(target: Target, rows: int, sizes: Sequence[int], atoms: int, dueling: bool) -> Family:
    fits = atoms <= _ATOMS and max(sizes) <= _ACTIONS and max(sizes) * -(-atoms // _LANES) <= _HELD
    if fits and rows * len(sizes) > _MANY * target.sm_count:
        return _many(len(sizes), atoms, max(sizes), min(sizes), dueling)
    return C51 if atoms <= _ATOMS else C51_WIDE


@dataclass(frozen=True)
class Transition:
    """The batch as the losses see it.

    Attributes:
        actions: int32 [B, D], the actions taken. One outside [0, n_d) makes its row's results NaN.
        best: int32 [B, D], greedy actions of the online networks at s', from `dueling.forward`.
        reward: float32 [B].
        discount: float32 [B]; 0 where the episode ended: the row then ignores what the target networks say.
        weight: float32 [B], importance weights.
    """

    actions: Tensor
    best: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor


def losses(
    program: Program,
    online: Heads,
    target: Heads,
    batch: Transition,
    *,
    v_min: float,
    v_max: float,
    theta: Tensor | None = None,
    w_c51: Tensor | None = None,
    w_cql: Tensor | None = None,
    w_distill: Tensor | None = None,
    dv: Tensor | None = None,
    dadv: Sequence[Tensor] = (),
    td: Tensor | None = None,
    loss_c51: Tensor | None = None,
    loss_cql: Tensor | None = None,
    loss_distill: Tensor | None = None,
    name: str,
) -> None:
    """Append the losses of all branches and their weighted gradient; everything is overwritten.

    Args:
        program: program to append to.
        online: heads of the online networks at s.
        target: heads of the target networks at s' (its q is not read).
        batch: actions, rewards and weights.
        v_min: value of the first atom.
        v_max: value of the last one.
        theta: float32 [B, N, sum n_d] or [B * N, sum n_d], quantiles of the online IQN at s; needed by distillation.
        w_c51: float32 [1], weight of the distributional loss in the gradient, or None to leave the loss out of it.
        w_cql: float32 [1] or None, weight of logsumexp_a q_d - q_d[action].
        w_distill: float32 [1] or None, weight of (q_d[action] - mean theta[action])^2 / 2.
        dv: float32 [B, K], gradient of `online.v`; None for no gradient at all, or for plain heads, which have no v.
        dadv: per branch float32 [B, n_d * K], gradients of `online.adv`; empty for no gradient.
        td: float32 [B], mean over the branches of the cross-entropy: the replay priority.
        loss_c51: float32 [1] = mean_b weight_b td_b.
        loss_cql: float32 [1], mean over rows and branches.
        loss_distill: float32 [1], mean over rows and branches.
        name: begins the labels and the names of the tensors declared here: `<name>.c51_partials`, `.cql_partials`,
            `.distill_partials`.

    Raises:
        ProgramError: a shape or dtype does not match, or an output lacks an input that it needs.
    """
    atoms, sizes = online.atoms, online.sizes
    rows, total = matrix(online.q, "online.q", name)[0], sum(sizes)
    spacing = atom_spacing(atoms, v_min, v_max, name)
    if not 1 <= len(sizes) <= MAX_BRANCHES:
        raise ProgramError(f"'{name}': {len(sizes)} branches; the kernel takes 1 to {MAX_BRANCHES}")
    if len(target.adv) != len(sizes):
        raise ProgramError(f"'{name}': {len(sizes)} online branches, but {len(target.adv)} target branches")
    if (online.v is None) != (target.v is None):
        raise ProgramError(f"'{name}': online and target heads must both be dueling or both plain (v None)")
    for side, heads in (("online", online), ("target", target)):
        require(heads.v, np.float32, (rows, atoms), f"{side}.v", name)
        require(heads.lse, np.float32, (rows, total), f"{side}.lse", name)
        for d, (adv, n) in enumerate(zip(heads.adv, sizes, strict=True)):
            require(adv, np.float32, (rows, n * atoms), f"{side}.adv[{d}]", name)
    require(online.q, np.float32, (rows, total), "online.q", name)
    for role in ("actions", "best"):
        require(getattr(batch, role), np.int32, (rows, len(sizes)), role, name)
    for role in ("reward", "discount", "weight"):
        require(getattr(batch, role), np.float32, (rows,), role, name)
    signals = {"w_c51": w_c51, "w_cql": w_cql, "w_distill": w_distill}
    outputs = {"loss_c51": loss_c51, "loss_cql": loss_cql, "loss_distill": loss_distill}
    for role, scalar in (signals | outputs).items():
        require(scalar, np.float32, (1,), role, name)
    require(td, np.float32, (rows,), "td", name)
    quantiles = _quantiles(theta, rows, total, name)
    if (w_distill or loss_distill) and theta is None:
        raise ProgramError(f"'{name}': w_distill and loss_distill need theta")
    _check_gradients(online, dv, dadv, list(signals.values()), name)

    family = _family(program.target, rows, sizes, atoms, online.v is not None)
    tiles = family.tiles({"rows": rows, "branches": len(sizes)})
    partials = {
        kind: program.tensor(f"{name}.{kind}_partials", (tiles,), np.float64) if outputs[f"loss_{kind}"] else None
        for kind in ("c51", "cql", "distill")
    }
    program.launch(
        family,
        {
            "v": online.v or 0,
            "adv": online.adv,
            "q": online.q,
            "lse": online.lse,
            "v_target": target.v or 0,
            "adv_target": target.adv,
            "lse_target": target.lse,
            "theta": theta or 0,
            "actions": batch.actions,
            "best": batch.best,
            "reward": batch.reward,
            "discount": batch.discount,
            "weight": batch.weight,
            **{role: signal or 0 for role, signal in signals.items()},
            "dadv": tuple(dadv),
            "dv": dv or 0,
            "td": td or 0,
            "partials": tuple(tensor or 0 for tensor in partials.values()),
            "ld_adv": tuple(t.ld for t in online.adv),
            "ld_adv_target": tuple(t.ld for t in target.adv),
            "ld_dadv": tuple(t.ld for t in dadv),
            "ld_v": online.v.ld if online.v else 0,
            "ld_q": online.q.ld,
            "ld_lse": online.lse.ld,
            "ld_v_target": target.v.ld if target.v else 0,
            "ld_lse_target": target.lse.ld,
            "ld_theta": theta.ld if theta else 0,
            "ld_actions": batch.actions.ld,
            "ld_best": batch.best.ld,
            "ld_dv": dv.ld if dv else 0,
            "offset": online.offsets,
            "sizes": sizes,
            "branches": len(sizes),
            "rows": rows,
            "atoms": atoms,
            "quantiles": quantiles,
            "v_min": v_min,
            "spacing": spacing,
            "atoms_per_unit": (atoms - 1) / (float(np.float32(v_max)) - float(np.float32(v_min))),
            "branch_share": 1 / len(sizes),
        },
        reads=[
            *(online.v, *online.adv, online.q, online.lse, target.v, *target.adv, target.lse, theta),
            *(batch.actions, batch.best, batch.reward, batch.discount, batch.weight, w_c51, w_cql, w_distill),
        ],
        writes=[*dadv, dv, td, *partials.values()],
        label=name,
    )
    for kind, tensor in partials.items():
        loss = outputs[f"loss_{kind}"]
        if tensor is not None and loss is not None:
            sum_partials(program, tensor, loss, divisor=float(rows), label=f"{name}.loss_{kind}")


def _quantiles(theta: Tensor | None, rows: int, total: int, name: str) -> int:
    if theta is None:
        return 0
    count = theta.size // (rows * total)
    if theta.dtype != np.float32 or count < 1 or theta.shape not in ((rows, count, total), (rows * count, total)):
        raise ProgramError(
            f"'{name}': theta must be float32 ({rows}, N, {total}) or ({rows} * N, {total}), "
            f"got {theta.dtype} {theta.shape}"
        )
    return count


def _check_gradients(
    online: Heads,
    dv: Tensor | None,
    dadv: Sequence[Tensor],
    signals: Sequence[Tensor | None],
    name: str,
) -> None:
    if dv is None and not dadv:
        if any(signal is not None for signal in signals):
            raise ProgramError(f"'{name}': a weight is given, but neither dv nor dadv to put the gradient in")
        return
    if (dv is None) != (online.v is None) or len(dadv) != len(online.adv):
        wanted = "one dadv per branch go together" if online.v else "only dadv go with plain heads, one per branch"
        raise ProgramError(
            f"'{name}': dv and {wanted}; got dv={dv} and {len(dadv)} dadv for {len(online.adv)} branches"
        )
    if all(signal is None for signal in signals):
        raise ProgramError(f"'{name}': dv and dadv need at least one of w_c51, w_cql, w_distill")
    if online.v is not None:
        require(dv, np.float32, online.v.shape, "dv", name)
    for d, (gradient, adv) in enumerate(zip(dadv, online.adv, strict=True)):
        require(gradient, np.float32, adv.shape, f"dadv[{d}]", name)


# -- reference ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Float64 results of `reference_losses`."""

    td: NDArray[np.float64]
    loss_c51: float
    loss_cql: float
    loss_distill: float
    dv: NDArray[np.float64] | None
    dadv: list[NDArray[np.float64]]


def reference_project(
    reward: ArrayLike, discount: ArrayLike, p: ArrayLike, v_min: float, v_max: float
) -> NDArray[np.float64]:
    """Categorical projection of p [B, K] in float64; a discount of 0 ignores what p holds."""
    r, disc, prob = (np.asarray(x, dtype=np.float64) for x in (reward, discount, p))
    k = np.arange(prob.shape[1])
    z = np.linspace(v_min, v_max, len(k))
    spacing = (v_max - v_min) / (len(k) - 1)
    u = (np.clip(r[:, None] + disc[:, None] * z, v_min, v_max) - v_min) / spacing
    hat = np.maximum(0.0, 1.0 - np.abs(u[:, :, None] - k))
    spread = np.einsum("bj,bjk->bk", prob, hat)
    return np.where(disc[:, None] == 0.0, hat[:, 0, :], spread)


def reference_losses(
    online: tuple[ArrayLike | None, Sequence[ArrayLike]],
    target: tuple[ArrayLike | None, Sequence[ArrayLike]],
    actions: ArrayLike,
    best: ArrayLike,
    reward: ArrayLike,
    discount: ArrayLike,
    weight: ArrayLike,
    *,
    v_min: float,
    v_max: float,
    theta: ArrayLike | None = None,
    w_c51: float = 0.0,
    w_cql: float = 0.0,
    w_distill: float = 0.0,
    atoms: int | None = None,
) -> Reference:
    """What `losses` computes, in float64; `online` and `target` are (v, adv per branch), theta [B, N, sum n_d].

    Plain heads have None for v and need `atoms`.
    """
    v, advs = online
    rows, atoms = len(np.asarray(advs[0])), np.shape(v)[1] if v is not None else atoms
    assert atoms is not None, "plain heads do not say how many atoms there are"
    z, count = np.linspace(v_min, v_max, atoms), rows * len(advs)
    index, taken, greedy = np.arange(rows), np.asarray(actions), np.asarray(best)
    importance = np.asarray(weight, dtype=np.float64)
    td, cql, distill = np.zeros(rows), 0.0, 0.0
    dv, dadv, offset = np.zeros((rows, atoms)), [], 0
    with np.errstate(invalid="ignore"):
        for d, adv in enumerate(advs):
            heads = reference_dueling(v, adv, v_min, v_max, atoms)
            a, q, n = taken[:, d], heads.q, heads.q.shape[1]
            goal = reference_dueling(target[0], target[1][d], v_min, v_max, atoms)
            p_target = np.exp(goal.log_p[index, greedy[:, d]])
            m = reference_project(reward, discount, p_target, v_min, v_max)
            td += -(m * heads.log_p[index, a]).sum(axis=1) / len(advs)
            cql += float(-np.log(heads.policy[index, a]).sum()) / count
            p, onehot = np.exp(heads.log_p), np.arange(n) == a[:, None]
            dq = np.zeros_like(q)
            if w_cql != 0.0:
                dq += w_cql / count * (heads.policy - onehot)
            if theta is not None:
                mean = np.asarray(theta, dtype=np.float64)[index, :, offset + a].mean(axis=1)
                distill += float((0.5 * (q[index, a] - mean) ** 2).sum()) / count
                if w_distill != 0.0:
                    dq[index, a] += w_distill / count * (q[index, a] - mean)
            g = np.zeros_like(p)
            if w_cql != 0.0 or w_distill != 0.0:
                g += dq[:, :, None] * p * (z - q[:, :, None])
            if w_c51 != 0.0:
                cross = p[index, a] * m.sum(axis=1, keepdims=True) - m
                g[index, a] += w_c51 / count * importance[:, None] * cross
            dv += g.sum(axis=1)
            dadv.append((g if v is None else g - g.mean(axis=1, keepdims=True)).reshape(rows, -1))
            offset += n
    return Reference(td, float((importance * td).mean()), cql, distill, None if v is None else dv, dadv)
