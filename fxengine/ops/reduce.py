"""Partial results to one number, in fixed order (`reduce.cu`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fxengine.graphs import Family, Program, Tensor

SUM = Family("sum", "reduce.cu", "fx_sum", "Sum", tiles=lambda fields: 1)


def sum_partials(
    program: Program,
    partials: Tensor,
    out: Tensor,
    *,
    denominator: Tensor | None = None,
    divisor: float = 1.0,
    label: str,
) -> None:
    """Append: out = sum(partials) / (divisor * max(1, denominator)).

    Args:
        program: program to append to.
        partials: float64 or int32 [n].
        out: float32 [1], overwritten.
        denominator: int32 [1], such as the number of valid rows, or None for 1.
        divisor: constant part of the denominator, such as a batch size.
        label: shown in tables.

    Raises:
        ValueError: a dtype or shape is not one of these.
    """
    if partials.dtype not in (np.float64, np.int32) or len(partials.shape) != 1:
        raise ValueError(f"'{label}': partials must be float64 or int32 [n], got {partials.dtype} {partials.shape}")
    if out.dtype != np.float32 or out.size != 1:
        raise ValueError(f"'{label}': out must be float32 (1,), got {out.dtype} {out.shape}")
    if denominator is not None and (denominator.dtype != np.int32 or denominator.size != 1):
        raise ValueError(f"'{label}': denominator must be int32 (1,), got {denominator.dtype} {denominator.shape}")
    wide = partials.dtype == np.float64
    program.launch(
        SUM,
        {
            "values": partials if wide else 0,
            "counts": 0 if wide else partials,
            "denominator": 0 if denominator is None else denominator,
            "out": out,
            "divisor": divisor,
            "n": partials.shape[0],
        },
        reads=[partials, denominator],
        writes=[out],
        label=label,
    )


def reference_sum(partials: ArrayLike, denominator: int | None = None, divisor: float = 1.0) -> float:
    """What `sum_partials` computes, in float64."""
    total = float(np.asarray(partials, dtype=np.float64).sum())
    return total / (divisor * max(1, 1 if denominator is None else denominator))
