"""Implicit quantile networks: cosine features, the product with the state's features, the loss (`iqn.cu`).

    iqn.cosines(program, tau, cosines)                          # tau [B, N] -> [B*N, M]
    linear.forward(program, cosines, w_phi, b_phi, phi, activation="relu")
    iqn.mix(program, phi, h2, x)                                # phi * h2, the rows of h2 repeated N times
    ...                                                         # two linear layers -> theta [B*N, all actions]
    iqn.loss(program, theta, theta_target, tau, ..., dtheta=dtheta, loss=value)
    iqn.mix_backward(program, dx, phi, h2, dphi, dh2=dh2, weight=w_iqn, readiness=iqn_readiness)

The layers between are those of `linear` on B*N rows, row b*N + i for quantile i of sample b. The quantile network
learns at full scale; what flows on into h2 is multiplied by weight * readiness, and is an exact 0 where that is 0.

Source: Dabney, Ostrovski, Silver, Munos 2018, "Implicit quantile networks for distributional RL". Here the cosines
begin at i = 0, and the loss sums over the online quantiles and takes the mean over the target's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops import linear
from fxengine.ops.checks import require_as
from fxengine.ops.reduce import sum_partials

#: Most branches that the loss works on.
MAX_BRANCHES = 8

# With more rows than this many per multiprocessor, the loss gives all branches of a row to one warp.
_MANY = 16

_COSINE_TILE = 2048
_MIX_COLUMNS = 128


def _cosine_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // int(fields["tile_rows"]))


def _mix_tiles(fields: Mapping[str, Any]) -> int:
    return int(fields["rows"]) * -(-int(fields["cols"]) // _MIX_COLUMNS)


def _loss_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // (8 // int(fields["warps"])))


COSINES = Family("iqn_cosines", "iqn.cu", "fx_iqn_cosines", "IqnCosines", tiles=_cosine_tiles)
MIX = Family("iqn_mix", "iqn.cu", "fx_iqn_mix", "IqnMix", tiles=_mix_tiles)
MIX_BACKWARD = Family("iqn_mix_backward", "iqn.cu", "fx_iqn_mix_backward", "IqnMixBackward", tiles=_mix_tiles)
LOSS = Family("iqn_loss", "iqn.cu", "fx_iqn_loss", "IqnLoss", tiles=_loss_tiles)


def cosines(program: Program, tau: Tensor, out: Tensor, *, label: str | None = None) -> None:
    """Append: out[r, i] = cos(pi i tau[r]) for i = 0 .. M-1.

    Args:
        program: program to append to.
        tau: float32 quantile fractions, [B, N] or [B*N] without gaps.
        out: float32 [B*N, M], overwritten.
        label: shown in tables (default: the name of `out`).

    Raises:
        ValueError: shapes or dtypes do not fit; the message shows both sides.
    """
    label = label or out.name
    if tau.dtype != np.float32 or not tau.contiguous:
        raise ValueError(f"'{label}': tau must be float32 without gaps, got {tau.dtype} {tau.shape}, stride {tau.ld}")
    cols = _columns(out, "out", label)
    require_as(out, (tau.size, cols), "out", f"tau is {tau.shape}", label)
    program.launch(
        COSINES,
        {
            "tau": tau,
            "out": out,
            "ld_out": out.ld,
            "rows": tau.size,
            "cols": cols,
            "tile_rows": max(1, _COSINE_TILE // cols),
        },
        reads=[tau],
        writes=[out],
        label=label,
    )


def mix(program: Program, phi: Tensor, h2: Tensor, x: Tensor, *, label: str | None = None) -> None:
    """Append: x[b*N + i] = phi[b*N + i] * h2[b].

    Args:
        program: program to append to.
        phi: float32 [B*N, H].
        h2: float32 [B, H].
        x: float32 [B*N, H], overwritten; may be `phi` itself if no backward needs it.
        label: shown in tables (default: the name of `x`).

    Raises:
        ValueError: shapes or dtypes do not fit; the message shows both sides.
    """
    label = label or x.name
    rows, quantiles, cols = _mixed(phi, h2, label)
    require_as(x, phi.shape, "x", f"phi is {phi.shape}", label)
    program.launch(
        MIX,
        {
            "phi": phi,
            "h2": h2,
            "x": x,
            "ld_phi": phi.ld,
            "ld_h2": h2.ld,
            "ld_x": x.ld,
            "rows": rows,
            "quantiles": quantiles,
            "cols": cols,
        },
        reads=[phi, h2],
        writes=[x],
        label=label,
    )


def mix_backward(
    program: Program,
    dx: Tensor,
    phi: Tensor,
    h2: Tensor,
    dphi: Tensor,
    *,
    dh2: Tensor | None = None,
    weight: Tensor | None = None,
    readiness: Tensor | None = None,
    activation: linear.Activation = "none",
    accumulate: bool = False,
    label: str | None = None,
) -> None:
    """Append the gradients of `mix`: of the pre-activations of phi, which is a relu's output, and of h2.

    Args:
        program: program to append to.
        dx: float32 [B*N, H], gradient of x.
        phi: float32 [B*N, H].
        h2: float32 [B, H].
        dphi: float32 [B*N, H] = dx * h2 where phi > 0, else an exact 0; may be `dx` itself.
        dh2: float32 [B, H] = (or += with `accumulate`) weight * readiness * sum over i of dx * phi, times the slope of
            the activation that made h2; None: not wanted.
        weight: float32 [1], usually the signal w_iqn; needed by dh2.
        readiness: float32 [1], usually the state iqn_readiness; needed by dh2. Where weight * readiness is 0, dh2
            becomes an exact 0, or with `accumulate` keeps its bits.
        activation: the one that made h2.
        accumulate: add to dh2 instead of overwriting it.
        label: shown in tables (default: the name of `dphi`).

    Raises:
        ValueError: shapes or dtypes do not fit, or dh2 lacks weight or readiness.
    """
    label = label or dphi.name
    rows, quantiles, cols = _mixed(phi, h2, label)
    require_as(dx, phi.shape, "dx", f"phi is {phi.shape}", label)
    require_as(dphi, phi.shape, "dphi", f"phi is {phi.shape}", label)
    require_as(dh2, h2.shape, "dh2", f"h2 is {h2.shape}", label)
    require_as(weight, (1,), "weight", "it is read as one number", label)
    require_as(readiness, (1,), "readiness", "it is read as one number", label)
    if dh2 is not None and (weight is None or readiness is None):
        raise ValueError(f"'{label}': dh2 needs weight and readiness")
    program.launch(
        MIX_BACKWARD,
        {
            "dx": dx,
            "phi": phi,
            "h2": h2,
            "weight": weight or 0,
            "readiness": readiness or 0,
            "dphi": dphi,
            "dh2": dh2 or 0,
            "ld_dx": dx.ld,
            "ld_phi": phi.ld,
            "ld_h2": h2.ld,
            "ld_dphi": dphi.ld,
            "ld_dh2": dh2.ld if dh2 else 0,
            "rows": rows,
            "quantiles": quantiles,
            "cols": cols,
            "activation": linear.ACTIVATION_CODES[activation],
            "accumulate": int(accumulate),
        },
        reads=[dx, phi, h2, weight, readiness, dh2 if accumulate else None],
        writes=[dphi, dh2],
        label=label,
    )


def loss(
    program: Program,
    theta: Tensor,
    theta_target: Tensor,
    tau: Tensor,
    *,
    actions: Tensor,
    best: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    branches: Sequence[int],
    kappa: float,
    dtheta: Tensor | None = None,
    loss: Tensor | None = None,
    theta_mean: Tensor | None = None,
    name: str = "iqn",
) -> None:
    """Append the quantile-Huber loss over all pairs and its gradient; every output is optional, none accumulates.

    delta_ij = reward + discount * theta_target_j[best_d] - theta_i[action_d]; a discount of 0 ignores theta_target.

    Args:
        program: program to append to.
        theta: float32 [B*N, A], online networks at s; A = sum of `branches`.
        theta_target: float32 [B*N', A], target networks at s'.
        tau: float32 [B, N], quantile fractions of theta.
        actions: int32 [B, D]; one outside [0, n_d) makes what it touches NaN.
        best: int32 [B, D], greedy actions at s'.
        reward: float32 [B].
        discount: float32 [B], gamma^n (1 - done).
        weight: float32 [B], importance weights.
        branches: n_d of each of the D branches, at most `MAX_BRANCHES`.
        kappa: threshold of the Huber loss, above 0.
        dtheta: float32 [B*N, A], exact zeros at the actions that were not taken.
        loss: float32 [1] = mean_b weight_b mean_d sum_i mean_j |tau_i - [delta_ij < 0]| huber(delta_ij) / kappa.
        theta_mean: float32 [B, D] = mean over the quantiles of theta at the actions taken.
        name: label, and beginning of the tensor declared here, `<name>.loss_partials`.

    Raises:
        ValueError: shapes or dtypes do not fit, there are too many branches, or kappa is not above 0.
    """
    count, actions_total = len(branches), sum(branches)
    if not 1 <= count <= MAX_BRANCHES or min(branches) < 1:
        raise ValueError(f"'{name}': branches must be 1 to {MAX_BRANCHES} sizes of at least 1, got {tuple(branches)}")
    if not 0 < kappa < math.inf:
        raise ValueError(f"'{name}': kappa must be above 0 and finite, got {kappa}")
    if len(tau.shape) != 2:
        raise ValueError(f"'{name}': tau must be float32 [B, N], got {tau.dtype} {tau.shape}")
    rows, quantiles = tau.shape
    targets = theta_target.shape[0] // rows
    because = f"tau is {tau.shape} and branches are {tuple(branches)}"
    require_as(tau, (rows, quantiles), "tau", because, name)
    require_as(theta, (rows * quantiles, actions_total), "theta", because, name)
    require_as(theta_target, (rows * max(1, targets), actions_total), "theta_target", because, name)
    for role, tensor in (("actions", actions), ("best", best)):
        require_as(tensor, (rows, count), role, because, name, np.int32)
    for role, tensor in (("reward", reward), ("discount", discount), ("weight", weight)):
        require_as(tensor, (rows,), role, because, name)
    require_as(dtheta, theta.shape, "dtheta", f"theta is {theta.shape}", name)
    require_as(loss, (1,), "loss", "it is one number", name)
    require_as(theta_mean, (rows, count), "theta_mean", because, name)

    divisor = rows * count * targets * kappa
    warps = 1 if rows > _MANY * program.target.sm_count else count
    partials = None
    if loss is not None:
        tiles = _loss_tiles({"rows": rows, "warps": warps})
        partials = program.tensor(f"{name}.loss_partials", (tiles,), np.float64)
    program.launch(
        LOSS,
        {
            "theta": theta,
            "theta_target": theta_target,
            "tau": tau,
            "actions": actions,
            "best": best,
            "reward": reward,
            "discount": discount,
            "weight": weight,
            "dtheta": dtheta or 0,
            "theta_mean": theta_mean or 0,
            "partials": partials or 0,
            "ld_theta": theta.ld,
            "ld_theta_target": theta_target.ld,
            "ld_tau": tau.ld,
            "ld_actions": actions.ld,
            "ld_best": best.ld,
            "ld_dtheta": dtheta.ld if dtheta else 0,
            "ld_mean": theta_mean.ld if theta_mean else 0,
            "columns": actions_total,
            "warps": warps,
            "offset": tuple(sum(branches[:d]) for d in range(count)),
            "sizes": tuple(branches),
            "branches": count,
            "rows": rows,
            "quantiles": quantiles,
            "targets": targets,
            "kappa": kappa,
            "share": 1.0 / divisor,
        },
        reads=[theta, theta_target, tau, actions, best, reward, discount, weight],
        writes=[dtheta, theta_mean, partials],
        label=name,
    )
    if loss is not None and partials is not None:
        sum_partials(program, partials, loss, divisor=divisor, label=f"{name}.loss")


# -- references ---------------------------------------------------------------------------------------------


def reference_cosines(tau: ArrayLike, count: int) -> NDArray[np.float64]:
    """cos(pi i tau) for i = 0 .. count-1, in float64: [number of taus, count]."""
    return np.cos(np.pi * np.arange(count) * _wide(tau).reshape(-1, 1))


def reference_mix(phi: ArrayLike, h2: ArrayLike) -> NDArray[np.float64]:
    """Phi times the repeated rows of h2, in float64."""
    wide, state = _wide(phi), _wide(h2)
    return wide * np.repeat(state, len(wide) // len(state), axis=0)


def reference_mix_backward(
    dx: ArrayLike, phi: ArrayLike, h2: ArrayLike, scale: float = 1.0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(dphi, dh2) of `mix_backward` in float64; dh2 is an exact 0 where the scale is 0."""
    gradient, features, state = _wide(dx), _wide(phi), _wide(h2)
    with np.errstate(invalid="ignore"):
        dphi = np.where(features <= 0, 0.0, reference_mix(gradient, state))
        sums = (gradient * features).reshape(len(state), -1, state.shape[1]).sum(axis=1)
        return dphi, scale * sums if scale else np.zeros_like(state)


@dataclass(frozen=True)
class Reference:
    """Float64 results of `reference_loss`."""

    loss: float
    dtheta: NDArray[np.float64]
    theta_mean: NDArray[np.float64]


def reference_loss(
    theta: ArrayLike,
    theta_target: ArrayLike,
    tau: ArrayLike,
    *,
    actions: ArrayLike,
    best: ArrayLike,
    reward: ArrayLike,
    discount: ArrayLike,
    weight: ArrayLike,
    branches: Sequence[int],
    kappa: float,
) -> Reference:
    """What `loss` computes, in float64, for actions that exist; arguments as there."""
    fractions, taken, greedy = _wide(tau), np.asarray(actions), np.asarray(best)
    rows, quantiles = fractions.shape
    online = _wide(theta).reshape(rows, quantiles, -1)
    target = _wide(theta_target).reshape(rows, -1, online.shape[2])
    disc, r, importance = _wide(discount), _wide(reward), _wide(weight)
    dtheta, means, total = np.zeros_like(online), np.zeros(taken.shape), 0.0
    with np.errstate(invalid="ignore"):
        for b in range(rows):
            for d, start in enumerate(np.cumsum([0, *branches])[:-1]):
                column = start + taken[b, d]
                own = online[b, :, column]
                means[b, d] = own.mean()
                goals = r[b] + (disc[b] * target[b, :, start + greedy[b, d]] if disc[b] else np.zeros(target.shape[1]))
                delta = goals[None, :] - own[:, None]
                tilt = np.abs(fractions[b][:, None] - (delta < 0))
                size = np.abs(delta)
                huber = np.where(size <= kappa, 0.5 * size * size, kappa * (size - 0.5 * kappa)) / kappa
                share = importance[b] / (rows * len(branches))
                total += share * (tilt * huber).mean(axis=1).sum()
                dtheta[b, :, column] = -share * (tilt * np.clip(delta, -kappa, kappa) / kappa).mean(axis=1)
    return Reference(float(total), dtheta.reshape(rows * quantiles, -1), means)


def _wide(a: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(a, dtype=np.float64)


# -- checks -------------------------------------------------------------------------------------------------


def _columns(tensor: Tensor, role: str, label: str) -> int:
    if len(tensor.shape) != 2:
        raise ValueError(f"'{label}': {role} must be a matrix, got {tensor.dtype} {tensor.shape}; reshape it")
    return tensor.shape[1]


def _mixed(phi: Tensor, h2: Tensor, label: str) -> tuple[int, int, int]:
    """B, N and H of phi [B*N, H] and h2 [B, H]."""
    cols = _columns(h2, "h2", label)
    rows = h2.shape[0]
    quantiles = max(1, phi.shape[0] // rows)
    require_as(h2, (rows, cols), "h2", "it is the state's features", label)
    require_as(phi, (rows * quantiles, cols), "phi", f"h2 is {h2.shape}", label)
    return rows, quantiles, cols
