"""Spectral norm of single matrices, by one power iteration per step (`spectral.cu`).

Miyato, Kataoka, Koyama, Yoshida, "Spectral normalization for generative adversarial networks" (ICLR 2018), as a limit:
a matrix is scaled back only when its largest singular value exceeds `sn_max`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor

if TYPE_CHECKING:
    from fxengine.train.optimizer import Guard, SignalLookup


def _family(cluster: int) -> Family:
    return Family("spectral", "spectral.cu", "fx_spectral", "Spectral", tiles=lambda fields: cluster)


#: By the blocks of a cluster of the device.
_FAMILIES = {cluster: _family(cluster) for cluster in (1, 8)}


def spectral_norm(
    program: Program,
    w: Tensor,
    v: Tensor,
    sigma: Tensor,
    *,
    signal: SignalLookup,
    guard: Guard,
    label: str,
) -> None:
    """Append, in place: v moves on by one power iteration, and w is scaled to `sn_max` where sigma exceeds it.

    To come after `optimize`; the records of all matrices then share one launch. Nothing is written, bit for bit, while
    the guard's flag is set. A zero w or v leaves v zero and sigma 0 for good: v must not start as zeros. A w that is
    not finite gives a NaN sigma and NaN in v, and is not scaled.

    Args:
        program: program to append to.
        w: float32 [rows, cols], any row stride.
        v: float32 [cols], kept from step to step (state of a run, like the moments).
        sigma: float32 [1], receives u·w·v of w before it is scaled.
        signal: must know `sn_max`.
        guard: what `optimize` returned.
        label: shown in tables.

    Raises:
        ValueError: a shape or dtype is not one of these.
    """
    if w.dtype != np.float32 or len(w.shape) != 2:
        raise ValueError(f"'{label}': w must be float32 [rows, cols], got {w.dtype} {w.shape}")
    rows, cols = w.shape
    if v.dtype != np.float32 or v.shape != (cols,):
        raise ValueError(f"'{label}': v must be float32 ({cols},) for w {w.shape}, got {v.dtype} {v.shape}")
    if sigma.dtype != np.float32 or sigma.size != 1:
        raise ValueError(f"'{label}': sigma must be float32 (1,), got {sigma.dtype} {sigma.shape}")
    u = program.tensor(f"{label}.u", (rows,))
    limit = signal("sn_max")
    program.launch(
        _FAMILIES[program.target.cluster],
        {
            "w": w,
            "v": v,
            "u": u,
            "sigma": sigma,
            "sn_max": limit,
            "skip": guard.skip,
            "rows": rows,
            "cols": cols,
            "ld": w.ld,
        },
        reads=[w, v, limit, guard.skip],
        writes=[w, v, u, sigma],
        label=label,
    )


def reference_spectral_norm(
    w: ArrayLike, v: ArrayLike, sn_max: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """New w, new v, and sigma before scaling, in float64.

    Args:
        w: [rows, cols].
        v: [cols].
        sn_max: largest sigma that is left alone.
    """
    matrix, right = np.asarray(w, np.float64), np.asarray(v, np.float64)
    left = _normalized(matrix @ right)
    right = _normalized(matrix.T @ left)
    sigma = float(left @ matrix @ right)
    if math.isfinite(sigma) and sigma > sn_max:
        matrix = matrix * (sn_max / sigma)
    return matrix, right, sigma


def _normalized(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / np.maximum(np.sqrt((x * x).sum()), 1e-12)
