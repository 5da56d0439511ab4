"""Layers finished by the kernel that makes the last columns of their input (`finish.cuh`).

    linear.forward(program, x, w.columns(0, k), b, y)                          # x is there early
    dueling.forward(..., policy=z, finishes=Unfinished(y, w.columns(k, k + n)))  # y = relu(y + z wᵀ), in place

The long product leaves the path that leads to z; what is left of the layer rides on z's own launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import ProgramError, Tensor
from fxengine.ops.checks import describe, expect, separate

#: Rows of a tile: one for each warp.
ROWS = 8
#: Floats of shared memory for all layers of a record: FINISH_FLOATS of finish.cuh.
FLOATS = 4608


@dataclass(frozen=True)
class Unfinished:
    """A ReLU layer that lacks the last columns of its input.

    Attributes:
        y: float32 [B, N], the product of the other columns with the bias; becomes the layer's output.
        w: float32 [N, C], the weights of the last columns.
    """

    y: Tensor
    w: Tensor


def fits(hidden: int, columns: int, layers: int = 1) -> bool:
    """Whether one record can finish so many layers of `hidden` outputs and as many last columns."""
    return layers * (columns + ROWS) * hidden + ROWS * columns <= FLOATS


def check(layers: Sequence[Unfinished], rows: int, columns: int, most: int, label: str) -> int:
    """Outputs N of the layers that a record is to finish from [rows, columns]; 0 if there are none.

    Raises:
        ProgramError: shapes do not fit each other, a layer overlaps its weights, or they are too many or too large.
    """
    if not layers:
        return 0
    record = f"'{label}'"
    hidden = layers[0].w.shape[0]
    for layer in layers:
        expect(record, "w of a layer to finish", layer.w, (hidden, columns), f"it reads {columns} more columns")
        expect(record, "a layer to finish", layer.y, (rows, hidden), f"w is {describe(layer.w)}")
        separate(record, "a layer to finish", layer.y, w=layer.w)
    if len(layers) > most or not fits(hidden, columns, len(layers)):
        raise ProgramError(
            f"{record}: {len(layers)} layers to finish, {hidden} outputs and {columns} columns each, are more than "
            f"{most} or than {FLOATS} floats of shared memory"
        )
    return hidden


def reference_finish(y: ArrayLike, z: ArrayLike, w: ArrayLike) -> NDArray[np.float64]:
    """relu(y + z wᵀ) in float64."""
    y, z, w = (np.asarray(a, np.float64) for a in (y, z, w))
    return np.maximum(y + z @ w.T, 0.0)
