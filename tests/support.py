"""Comparison and naming helpers of the tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def assert_close(
    actual: ArrayLike, reference: ArrayLike, *, factor: float = 32.0, atol: float = 1e-6, name: str = "array"
) -> None:
    """Assert |actual - reference| <= atol + |reference| * eps(dtype of actual) * factor, elementwise.

    Infinities and NaN must stand where the reference has them. The worst index is part of the message.
    """
    actual = np.asarray(actual)
    reference = np.asarray(reference, dtype=np.float64)
    assert actual.shape == reference.shape, f"{name}: shape {actual.shape}, reference {reference.shape}"
    if actual.size == 0:
        return
    eps = float(np.finfo(actual.dtype).eps) if actual.dtype.kind == "f" else 0.0
    wide = actual.astype(np.float64)
    same = (wide == reference) | (np.isnan(wide) & np.isnan(reference))
    with np.errstate(invalid="ignore"):
        excess = np.where(same, -1.0, np.abs(wide - reference) - (atol + np.abs(reference) * eps * factor))
    excess = np.where(np.isnan(excess), np.inf, excess)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    assert excess[worst] <= 0.0, (
        f"{name}: worst at {tuple(int(i) for i in worst)}: got {wide[worst]!r}, expected {reference[worst]!r}, "
        f"{int((excess > 0).sum())} of {excess.size} beyond atol={atol} + |ref|*eps*{factor}"
    )
