"""Rows that are replaced by zeros (`rows.cu`): a dead row may hold anything, and nothing behind here may see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.graphs.program import Launch, ProgramError, Value

_TILE = 2048


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // int(fields["tile_rows"]))


MASK_ROWS = Family("mask_rows", "rows.cu", "fx_mask_rows", "MaskRows", tiles=_tiles)


def mask_rows(program: Program, x: Tensor, mask: Tensor, y: Tensor, *, label: str | None = None) -> Launch:
    """Append y[b] = 0 where mask[b] = 0, else x[b] bit for bit.

    Args:
        program: where the record goes.
        x: float32 [B, C], any row stride. A masked row is not read.
        mask: float32 [B], such as the discount; anything but 0 (NaN included) lets the row through.
        y: float32 [B, C], any row stride: x itself (then only the masked rows are written) or memory of its own. In
            place, what x held is lost: a replay without new data finds zeros even if the mask has changed.
        label: name of the record (default: y's name).

    Raises:
        ProgramError: shapes, dtypes or overlaps that do not fit; both sides are named.
    """
    label = label or y.name
    if len(x.shape) != 2 or x.dtype != np.float32 or y.shape != x.shape or y.dtype != np.float32:
        raise ProgramError(
            f"mask_rows '{label}': x and y must be float32 matrices of one shape, got {_describe(x)} and {_describe(y)}"
        )
    rows, cols = x.shape
    if mask.shape != (rows,) or mask.dtype != np.float32:
        raise ProgramError(f"mask_rows '{label}': mask is {_describe(mask)}, expected float32 [{rows}]: x is {x.shape}")
    in_place = (x.storage, x.offset, x.ld) == (y.storage, y.offset, y.ld)
    if (not in_place and x.region().overlaps(y.region())) or y.region().overlaps(mask.region()):
        raise ProgramError(
            f"mask_rows '{label}': y {_describe(y)} overlaps x {_describe(x)} or the mask {_describe(mask)}; "
            "it must be x itself or have memory of its own"
        )
    fields: dict[str, Value] = {
        "x": x,
        "mask": mask,
        "y": y,
        "ldx": x.ld,
        "ldy": y.ld,
        "rows": rows,
        "cols": cols,
        "tile_rows": max(1, _TILE // cols),
    }
    return program.launch(MASK_ROWS, fields, reads=[x, mask], writes=[y], label=label)


def reference_mask_rows(x: ArrayLike, mask: ArrayLike) -> NDArray[np.float64]:
    """What `mask_rows` computes, in float64."""
    return np.where(np.asarray(mask)[:, None] == 0, 0.0, np.asarray(x, dtype=np.float64))


def _describe(t: Tensor) -> str:
    return f"'{t.name}' {t.dtype} {list(t.shape)}"
