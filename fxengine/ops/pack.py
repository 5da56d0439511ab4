"""Packed weights: copies that the step makes of its weights in the form in which some tiles read them (`pack.cuh`).

They are rounded to tf32, cut into blocks of 32 columns, and their numbers lie in the order in which the tensor cores
meet them. A program makes each copy once, before its first use, and again after the weight was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.graphs.program import Value

_TILE = (32, 128)  # rows and columns of w of a thread block
_ROWS, _DEPTH = 16, 32


def _tiles(fields: Mapping[str, Any]) -> int:
    columns = _DEPTH * (-(-fields["k"] // _DEPTH) + -(-fields["k2"] // _DEPTH))
    return -(-fields["n"] // _TILE[0]) * -(-columns // _TILE[1])


PACK = Family("pack", "pack.cu", "fx_pack", "Pack", tiles=_tiles)


def packed(program: Program, w: Tensor, *, k2: int = 0) -> Tensor:
    """The packed copy of w, float32 [n, k], any row stride. With `k2` its last k2 columns have blocks of their own.

    Returns [blocks, rows, 32].
    """
    k = w.shape[1] - k2
    return _copy(program, w, w.shape[0], (k, k2), transposed=False)


def packed_transpose(program: Program, w: Tensor) -> Tensor:
    """The packed copy of the transpose of w, float32 [n, k], any row stride. Returns [blocks, rows, 32]."""
    return _copy(program, w, w.shape[1], (w.shape[0],), transposed=True)


def reference(w: ArrayLike) -> NDArray[np.float32]:
    """The packed copy of the float32 matrix w, before it is rounded."""
    values = np.asarray(w, np.float32)
    rows, k = values.shape
    wide = np.zeros((-(-rows // _ROWS) * _ROWS, -(-k // _DEPTH) * _DEPTH), np.float32)
    wide[:rows, :k] = values
    # row 2 g + h of 16 to place 8 h + g, number 4 t + 2 s + h of 16 to place 8 s + 4 h + t
    rows_of_16, k_of_16 = wide.shape[0] // 16, wide.shape[1] // 16
    parts = wide.reshape(rows_of_16, 8, 2, k_of_16, 4, 2, 2).transpose(3, 0, 2, 1, 5, 6, 4)
    blocks = parts.reshape(k_of_16 // 2, 2, rows_of_16 * 16, 16).transpose(0, 2, 1, 3)
    chunks = blocks.reshape(k_of_16 // 2, rows_of_16 * 16, 8, 4)
    places = np.arange(chunks.shape[1])
    out = np.empty_like(chunks)
    for chunk in range(8):
        out[:, places, chunk ^ (places & 7)] = chunks[:, :, chunk]
    return out.reshape(-1, chunks.shape[1], _DEPTH)


def _copy(program: Program, w: Tensor, rows: int, parts: tuple[int, ...], *, transposed: bool) -> Tensor:
    def make() -> Tensor:
        kind = "transposed" if transposed else "packed"
        blocks = sum(-(-k // _DEPTH) for k in parts)
        shape = (blocks, -(-rows // _ROWS) * _ROWS, _DEPTH)
        out = program.tensor(f"{kind}#{len(program.launches)}.{w.name}", shape)
        fields: dict[str, Value] = {
            "w": w,
            "out": out,
            "ldw": w.ld,
            "n": w.shape[0],
            "k": w.shape[1] if transposed else parts[0],
            "k2": 0 if transposed else parts[1],
            "transposed": int(transposed),
        }
        program.launch(PACK, fields, reads=[w], writes=[out], label=f"{w.name}.{kind}")
        return out

    return program.derived(w, ("pack", parts, transposed), make)
