"""Uniform random numbers drawn on the device (`random.cu`), and their NumPy twin.

Philox4x32-10 as in `ops/gather.py`: key = seed, counter = (item, stream, replay low, replay high), four values to an
item. A value is a pure function of (seed, replay, stream, place), so a step that draws its own quantile fractions is
as repeatable as one that is fed them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops.gather import random_bits

_TILE = 1024
_MOST = 2**34


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["n"]) // _TILE)


UNIFORM = Family("uniform", "random.cu", "fx_uniform", "Uniform", tiles=_tiles)


def uniform(program: Program, out: Tensor, *, counters: Tensor, stream: int, label: str | None = None) -> None:
    """Append: every element of `out` = a uniform random number in [0, 1), a multiple of 2**-24.

    Args:
        program: program to append to.
        out: float32 of any shape without gaps, overwritten; at most 2**34 elements.
        counters: uint64 [4] (replays finished, t, skipped, seed).
        stream: number of the random stream, 32 bits; one that no other record uses.
        label: shown in tables (default: the name of `out`).

    Raises:
        ValueError: `out` or `counters` is not like this, or the stream does not fit 32 bits.
    """
    label = label or out.name
    if out.dtype != np.float32 or not out.contiguous or out.size > _MOST:
        raise ValueError(
            f"'{label}': out must be float32 without gaps between its rows and have at most 2**34 elements, "
            f"got {out.dtype} {out.shape} with row stride {out.ld}"
        )
    if counters.dtype != np.uint64 or counters.shape != (4,):
        raise ValueError(f"'{label}': counters must be uint64 (4,), got {counters.dtype} {counters.shape}")
    if not 0 <= stream < 2**32:
        raise ValueError(f"'{label}': stream {stream} does not fit 32 bits without sign")
    program.launch(
        UNIFORM,
        {"out": out, "counters": counters, "n": out.size, "stream": stream},
        reads=[counters],
        writes=[out],
        label=label,
    )


def reference_uniform(seed: int, replay: int, stream: int, n: int) -> NDArray[np.float32]:
    """What `uniform` draws, bit for bit: float32 [n], each in [0, 1).

    Args:
        seed: 64-bit seed.
        replay: replays finished before this one.
        stream: number of the random stream.
        n: how many.
    """
    bits = random_bits(seed, replay, stream, np.arange(-(-n // 4)))
    return (bits.reshape(-1)[:n] >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
