"""One branch of the dueling C51 heads, forward (`dueling.cu`): from value and advantage to q, policy and greedy action.

    dueling.forward(program, v, adv0, q.columns(0, 3), lse=lse.columns(0, 3), v_min=-10, v_max=10, label="q0")

Its backward is part of the losses in `fxengine.ops.c51`, which start from `Heads`, the outputs of all branches.

Sources: Wang et al. 2016, "Dueling network architectures for deep reinforcement learning"; Bellemare, Dabney & Munos
2017, "A distributional perspective on reinforcement learning"; one head per action dimension: Tavakoli, Pardo &
Kormushev 2018, "Action branching architectures for deep reinforcement learning".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import matrix, require

#: Most atoms that the kernels hold in the registers of a warp.
MAX_ATOMS = 256


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // 8)


DUELING = Family("dueling", "dueling.cu", "fx_dueling", "Dueling", tiles=_tiles)


@dataclass(frozen=True)
class Heads:
    """What the dueling heads of one network say about one batch.

    Attributes:
        v: float32 [B, K], the value head's output.
        adv: per branch, float32 [B, n_d * K], the advantage head's output.
        q: float32 [B, sum n_d], branches side by side; written by `forward`.
        lse: float32 [B, sum n_d], log normalisers: log p = v + adv - mean_a adv - lse; written by `forward`.
    """

    v: Tensor
    adv: tuple[Tensor, ...]
    q: Tensor
    lse: Tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        """Actions n_d per branch."""
        return tuple(adv.shape[1] // self.v.shape[1] for adv in self.adv)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First column of each branch in q and lse."""
        sizes = self.sizes
        return tuple(sum(sizes[:d]) for d in range(len(sizes)))


def forward(
    program: Program,
    v: Tensor,
    adv: Tensor,
    q: Tensor,
    *,
    v_min: float,
    v_max: float,
    lse: Tensor | None = None,
    policy: Tensor | None = None,
    best: Tensor | None = None,
    label: str,
) -> None:
    """Append: logits = v + adv - mean_a adv, p = softmax over atoms, q = sum_k z_k p. Everything is overwritten.

    Args:
        program: program to append to.
        v: float32 [B, K], 2 <= K <= `MAX_ATOMS`.
        adv: float32 [B, n * K], action by action.
        q: float32 [B, n], with any row stride: usually columns of the matrix over all branches.
        v_min: value of the first atom.
        v_max: value of the last one.
        lse: float32 [B, n], the logarithm of each softmax's denominator: log p = logits - lse. The losses need it.
        policy: float32 [B, n] = softmax of q over the actions.
        best: int32 [B] or a column [B, 1], argmax of q: the lowest index on ties, NaN never wins, all NaN gives 0.
        label: shown in tables.

    Raises:
        ProgramError: a shape or dtype does not match, or v_min and v_max are no range.
    """
    rows, atoms = matrix(v, "v", label)
    size = atom_spacing(atoms, v_min, v_max, label)
    columns = matrix(adv, "adv", label)[1]
    if columns % atoms:
        raise ProgramError(f"'{label}': adv must have actions x {atoms} columns for v {v.shape}, got {adv.shape}")
    n = columns // atoms
    require(adv, np.float32, (rows, columns), "adv", label)
    require(q, np.float32, (rows, n), "q", label)
    require(lse, np.float32, (rows, n), "lse", label)
    require(policy, np.float32, (rows, n), "policy", label)
    require(best, np.int32, (rows, 1) if best and len(best.shape) == 2 else (rows,), "best", label)
    program.launch(
        DUELING,
        {
            "v": v,
            "adv": adv,
            "q": q,
            "lse": lse or 0,
            "policy": policy or 0,
            "best": best or 0,
            "ld_v": v.ld,
            "ld_adv": adv.ld,
            "ld_q": q.ld,
            "ld_lse": lse.ld if lse else 0,
            "ld_policy": policy.ld if policy else 0,
            "best_stride": best.ld if best else 0,
            "rows": rows,
            "actions": n,
            "atoms": atoms,
            "v_min": v_min,
            "spacing": size,
        },
        reads=[v, adv],
        writes=[q, lse, policy, best],
        label=label,
    )


def atom_spacing(atoms: int, v_min: float, v_max: float, label: str) -> float:
    """Distance of two atoms. Raises ProgramError if the count or the range cannot be had."""
    if not 2 <= atoms <= MAX_ATOMS:
        raise ProgramError(f"'{label}': {atoms} atoms; the kernels take 2 to {MAX_ATOMS}")
    if not (math.isfinite(v_min) and math.isfinite(v_max) and v_min < v_max):
        raise ProgramError(f"'{label}': v_min {v_min} must be finite and below v_max {v_max}")
    return (v_max - v_min) / (atoms - 1)


@dataclass(frozen=True)
class Reference:
    """Float64 results of `reference_dueling`."""

    log_p: NDArray[np.float64]
    q: NDArray[np.float64]
    lse: NDArray[np.float64]
    policy: NDArray[np.float64]
    best: NDArray[np.int32]


def reference_dueling(v: ArrayLike, adv: ArrayLike, v_min: float, v_max: float) -> Reference:
    """What `forward` computes, in float64.

    Args:
        v: [B, K].
        adv: [B, n * K].
        v_min: value of the first atom.
        v_max: value of the last one.
    """
    value = np.asarray(v, dtype=np.float64)
    rows, atoms = value.shape
    advantage = np.asarray(adv, dtype=np.float64).reshape(rows, -1, atoms)
    with np.errstate(invalid="ignore"):
        logits = value[:, None, :] + advantage - advantage.mean(axis=1, keepdims=True)
        lse = _lse(logits)
        log_p = logits - lse[..., None]
        q = np.exp(log_p) @ np.linspace(v_min, v_max, atoms)
        policy = np.exp(q - _lse(q)[:, None])
    best = np.argmax(np.where(np.isnan(q), -np.inf, q), axis=1).astype(np.int32)
    return Reference(log_p, q, lse, policy, best)


def _lse(x: NDArray[np.float64]) -> NDArray[np.float64]:
    peak = x.max(axis=-1, keepdims=True)
    return np.log(np.exp(x - peak).sum(axis=-1)) + peak[..., 0]
