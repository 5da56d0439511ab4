"""Packed weights: copies that the step makes of its weights in the form in which some tiles read them (`pack.cuh`).

They are rounded to tf32, rows padded with zeros to a multiple of 16 numbers, the numbers of every 16 in the order in
which the tensor cores meet them. A program makes each copy once, before its first use, and again after the weight was
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor

_TILE = (32, 128)  # rows and columns of w of a block
_GRAIN = 16


def _tiles(fields: Mapping[str, Any]) -> int:
    columns = _padded(fields["k"]) + _padded(fields["k2"])
    return -(-fields["n"] // _TILE[0]) * -(-columns // _TILE[1])


PACK = Family("pack", "pack.cu", "fx_pack", "Pack", tiles=_tiles)


def packed(program: Program, w: Tensor, *, k2: int = 0) -> Tensor:
    """The packed copy of w, float32 [n, k], any row stride. With `k2` its last k2 columns are a part of their own.

    Returns [n, padded], padded a multiple of 16: the parts begin at multiples of 16.
    """
    k = w.shape[1] - k2
    return _copy(program, w, (w.shape[0], _padded(k) + _padded(k2)), k=k, k2=k2, transposed=False)


def packed_transpose(program: Program, w: Tensor) -> Tensor:
    """The packed copy of the transpose of w, float32 [n, k], any row stride. Returns [k, padded]."""
    return _copy(program, w, (w.shape[1], _padded(w.shape[0])), k=w.shape[1], k2=0, transposed=True)


def reference(w: ArrayLike) -> NDArray[np.float32]:
    """The packed copy of the float32 matrix w, before it is rounded."""
    values = np.asarray(w, np.float32)
    rows, columns = values.shape
    wide = np.zeros((rows, _padded(columns)), np.float32)
    wide[:, :columns] = values
    # number 4 t + 2 s + h of 16 goes to place 8 s + 4 h + t
    return wide.reshape(rows, -1, 4, 2, 2).transpose(0, 1, 3, 4, 2).reshape(rows, -1)


def _copy(program: Program, w: Tensor, shape: tuple[int, int], *, k: int, k2: int, transposed: bool) -> Tensor:
    def make() -> Tensor:
        kind = "transposed" if transposed else "packed"
        out = program.tensor(f"{kind}#{len(program.launches)}.{w.name}", shape)
        fields = {
            "w": w,
            "out": out,
            "ldw": w.ld,
            "ldo": out.ld,
            "n": w.shape[0],
            "k": k,
            "k2": k2,
            "transposed": int(transposed),
        }
        program.launch(PACK, fields, reads=[w], writes=[out], label=f"{w.name}.{kind}")
        return out

    return program.derived(w, ("pack", k2, transposed), make)


def _padded(columns: int) -> int:
    return -(-columns // _GRAIN) * _GRAIN
