"""Windowed sums, moments and extremes over 1-D float64 arrays, in O(n log w).

Every result at position t is computed from entries t-w+1..t alone, by a fixed tree of additions: windows of
1, 2, 4, ... entries are joined to the window asked for. So a value has the same bits wherever the array begins,
which running sums cannot give, and no error builds up along the array. Positions before w-1 are NaN, and NaN in
the window gives NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def shift(values: Array, by: int) -> Array:
    """values[t - by] at t, NaN where that lies before the array; by >= 0."""
    if by == 0:
        return values
    result = np.full_like(values, np.nan)
    result[by:] = values[: max(0, len(values) - by)]
    return result


def rolling_sum(values: Array, window: int, decay: float = 1.0) -> Array:
    """Sum of decay**j * values[t - j] over j = 0..window-1."""
    total: Array | None = None
    covered = 0
    block, size = values, 1
    for wanted in _bits(window):
        if wanted:
            part = shift(block, covered)
            total = part if total is None else total + (part if decay == 1.0 else decay**covered * part)
            covered += size
        if covered < window:
            block = block + (1.0 if decay == 1.0 else decay**size) * shift(block, size)
            size *= 2
    assert total is not None
    return total


def rolling_moments(values: Array, window: int) -> tuple[Array, Array]:
    """Mean and sum of squared deviations from it; equal entries give exactly that entry and exactly 0."""
    mean: Array | None = None
    spread = values
    covered = 0
    block_mean, block_spread, size = values, np.where(np.isnan(values), np.nan, 0.0), 1
    for wanted in _bits(window):
        if wanted:
            part_mean, part_spread = shift(block_mean, covered), shift(block_spread, covered)
            if mean is None:
                mean, spread = part_mean, part_spread
            else:
                mean, spread = _join(mean, spread, covered, part_mean, part_spread, size)
            covered += size
        if covered < window:
            older_mean, older_spread = shift(block_mean, size), shift(block_spread, size)
            block_mean, block_spread = _join(block_mean, block_spread, size, older_mean, older_spread, size)
            size *= 2
    assert mean is not None
    return mean, spread


def rolling_max(values: Array, window: int) -> Array:
    """Largest of the window's entries."""
    block, size = values, 1
    while 2 * size <= window:
        block = np.maximum(block, shift(block, size))
        size *= 2
    return np.maximum(block, shift(block, window - size))  # the two blocks may overlap: a maximum does not mind


def rolling_min(values: Array, window: int) -> Array:
    """Smallest of the window's entries."""
    return -rolling_max(-values, window)


def _bits(window: int) -> Iterator[bool]:
    """Binary digits of the window, lowest first."""
    if window < 1:
        raise ValueError(f"window is {window}, expected at least 1")
    while window:
        yield bool(window & 1)
        window >>= 1


def _join(
    mean: Array, spread: Array, count: int, older_mean: Array, older_spread: Array, older_count: int
) -> tuple[Array, Array]:
    """Moments of two adjacent windows as one (Chan, Golub, LeVeque 1979): free of cancellation."""
    delta = older_mean - mean
    share = older_count / (count + older_count)
    return mean + delta * share, spread + older_spread + delta * delta * (count * share)
