"""Copies that the step makes of its weights in the form in which warpgroups read them.

Packed ones (`pack.cuh`), for the fused quantile networks, are rounded to tf32, cut into blocks of 32 columns, and their
numbers lie in the order in which the tensor cores meet them. Transposes are for input gradients: the tensor cores want
an operand along k. A program makes each copy once, before its first use, and again after the weight was written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.graphs.program import LINE, Value, row_stride

_TILE = (32, 128)  # rows and columns of w of a thread block
_ROWS, _DEPTH = 16, 32


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-fields["n"] // _TILE[0]) * -(-fields["k"] // _TILE[1])


PACK = Family("pack", "pack.cu", "fx_pack", "Pack", tiles=_tiles)


def packed(program: Program, w: Tensor) -> Tensor:
    """The packed copy of w, float32 [n, k], any row stride. Returns [blocks, rows, 32]."""
    return _packed(program, w, *w.shape, transposed=False)


def packed_transpose(program: Program, w: Tensor) -> Tensor:
    """The packed copy of the transpose of w, float32 [n, k], any row stride. Returns [blocks, rows, 32]."""
    return _packed(program, w, *reversed(w.shape), transposed=True)


def transpose(program: Program, w: Tensor, scale: Tensor | None = None) -> Tensor:
    """The transpose of w, float32 [n, k], any row stride, multiplied by the one float of `scale`, if any.

    Returns [k, n] with rows that start at lines of the cache. Not rounded.
    """

    def make() -> Tensor:
        n, k = w.shape
        name = f"transpose#{len(program.launches)}.{w.name}"
        out = program.tensor(name, (k, row_stride(n, LINE))).columns(0, n)
        _launch(program, w, out, scale, transposed=True, label=f"{w.name}.transpose")
        return out

    return program.derived([w] if scale is None else [w, scale], "transpose", make)


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


def _packed(program: Program, w: Tensor, rows: int, k: int, *, transposed: bool) -> Tensor:
    kind = "packed_transpose" if transposed else "packed"

    def make() -> Tensor:
        shape = (-(-k // _DEPTH), -(-rows // _ROWS) * _ROWS, _DEPTH)
        out = program.tensor(f"{kind}#{len(program.launches)}.{w.name}", shape)
        _launch(program, w, out, None, transposed=transposed, label=f"{w.name}.{kind}")
        return out

    return program.derived([w], kind, make)


def _launch(program: Program, w: Tensor, out: Tensor, scale: Tensor | None, *, transposed: bool, label: str) -> None:
    fields: dict[str, Value] = {
        "w": w,
        "scale": 0 if scale is None else scale,
        "out": out,
        "ldw": w.ld,
        "ldout": out.ld if len(out.shape) == 2 else 0,
        "n": w.shape[0],
        "k": w.shape[1],
        "transposed": int(transposed),
    }
    program.launch(PACK, fields, reads=[w, scale], writes=[out], label=label)
