"""One branch of C51 heads, forward (`dueling.cu`): from the logits of its atoms to q, policy and greedy action.

    dueling.forward(program, v, adv0, q.columns(0, 3), lse=lse.columns(0, 3), v_min=-10, v_max=10, label="q0")

The logits are those of a dueling head, made of value and advantage, or without a value those of a plain head, as they
are. The backward is part of the losses in `fxengine.ops.c51`, which start from `Heads`, the outputs of all branches.

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


_ROWS = 8  # of a tile


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // _ROWS)


DUELING = Family("dueling", "dueling.cu", "fx_dueling", "Dueling", tiles=_tiles)


@dataclass(frozen=True)
class Heads:
    """What the heads of one network say about one batch.

    Attributes:
        v: float32 [B, K], the value head's output; None: plain heads.
        adv: per branch, float32 [B, n_d * K], the advantage head's output, or a plain head's logits.
        q: float32 [B, sum n_d], branches side by side; written by `forward`.
        lse: float32 [B, sum n_d], log normalisers: log p = logits - lse; written by `forward`.
    """

    v: Tensor | None
    adv: tuple[Tensor, ...]
    q: Tensor
    lse: Tensor

    @property
    def atoms(self) -> int:
        """Atoms K of a distribution."""
        if self.v is not None:
            return self.v.shape[1]
        return sum(adv.shape[1] for adv in self.adv) // self.q.shape[1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Actions n_d per branch."""
        return tuple(adv.shape[1] // self.atoms for adv in self.adv)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First column of each branch in q and lse."""
        sizes = self.sizes
        return tuple(sum(sizes[:d]) for d in range(len(sizes)))


def forward(
    program: Program,
    v: Tensor | None,
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
    """Append: logits = v + adv - mean_a adv, p = softmax over atoms, q = sum_k z_k p. Results overwrite.

    Args:
        program: program to append to.
        v: float32 [B, K], 2 <= K <= `MAX_ATOMS`; None: adv holds the logits, and K is its columns over those of q.
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
    rows, columns = matrix(adv, "adv", label)
    if v is None:
        n = matrix(q, "q", label)[1]
        atoms = columns // n
        if columns % n:
            raise ProgramError(f"'{label}': adv must have {n} x atoms columns for q {q.shape}, got {adv.shape}")
    else:
        rows, atoms = matrix(v, "v", label)
        n = columns // atoms
        if columns % atoms:
            raise ProgramError(f"'{label}': adv must have actions x {atoms} columns for v {v.shape}, got {adv.shape}")
    size = atom_spacing(atoms, v_min, v_max, label)
    require(adv, np.float32, (rows, columns), "adv", label)
    require(q, np.float32, (rows, n), "q", label)
    require(lse, np.float32, (rows, n), "lse", label)
    require(policy, np.float32, (rows, n), "policy", label)
    require(best, np.int32, (rows, 1) if best and len(best.shape) == 2 else (rows,), "best", label)
    program.launch(
        DUELING,
        {
            "v": v or 0,
            "adv": adv,
            "q": q,
            "lse": lse or 0,
            "policy": policy or 0,
            "best": best or 0,
            "ld_v": v.ld if v else 0,
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


def reference_dueling(
    v: ArrayLike | None, adv: ArrayLike, v_min: float, v_max: float, atoms: int | None = None
) -> Reference:
    """What `forward` computes, in float64.

    Args:
        v: [B, K], or None: adv holds the logits.
        adv: [B, n * K].
        v_min: value of the first atom.
        v_max: value of the last one.
        atoms: K, if v does not say it.
    """
    value = None if v is None else np.asarray(v, dtype=np.float64)
    count = atoms if value is None else value.shape[1]
    assert count is not None, "plain heads do not say how many atoms there are"
    advantage = np.asarray(adv, dtype=np.float64)
    logits = advantage.reshape(len(advantage), -1, count)
    with np.errstate(invalid="ignore"):
        if value is not None:
            logits = value[:, None, :] + logits - logits.mean(axis=1, keepdims=True)
        lse = _lse(logits)
        log_p = logits - lse[..., None]
        q = np.exp(log_p) @ np.linspace(v_min, v_max, logits.shape[2])
        policy = np.exp(q - _lse(q)[:, None])
    best = np.argmax(np.where(np.isnan(q), -np.inf, q), axis=1).astype(np.int32)
    return Reference(log_p, q, lse, policy, best)


def _lse(x: NDArray[np.float64]) -> NDArray[np.float64]:
    peak = x.max(axis=-1, keepdims=True)
    return np.log(np.exp(x - peak).sum(axis=-1)) + peak[..., 0]
