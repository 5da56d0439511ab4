"""Random batches of device-resident data, drawn on the device (`gather.cu`), and the generator's NumPy twin.

Random numbers: Philox4x32-10 of Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Key = seed; counter = (row, stream, replay low, replay high). An index is a pure function of these, so it does not
depend on what ran before, and all records of one stream pick the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.graphs import Family, Program, Tensor

_TILE_WORDS = 2048
_TILE_CODES = 256
_TILE_ROWS = 256


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // int(fields["tile_rows"]))


GATHER = Family("gather", "gather.cu", "fx_gather", "Gather", tiles=_tiles)


def gather(
    program: Program,
    source: Tensor,
    target: Tensor,
    *,
    counters: Tensor,
    stream: int,
    indices: Tensor | None = None,
    mask: Tensor | None = None,
    label: str,
) -> None:
    """Append: target[b] = source[random index of b], the same indices for every record of one stream.

    With a mask: zeros where mask[random index of b] is 0, whatever the row holds.

    Args:
        program: program to append to.
        source: [population, width] or [population], elements of 4 or 8 bytes; copied bit for bit.
        target: [batch, width] or [batch], of the same dtype.
        counters: uint64 [4] (replays finished, t, skipped, seed).
        stream: number of the random stream, 32 bits.
        indices: int32 [batch] that receives the rows picked, or None.
        mask: float32 [population], such as the discount, or None; anything but 0 (NaN included) lets the row through.
        label: shown in tables.

    Raises:
        ValueError: shapes or dtypes do not match; the message shows both sides.
    """
    if source.dtype != target.dtype or source.shape[1:] != target.shape[1:] or len(source.shape) > 2:
        raise ValueError(
            f"'{label}': source and target must have equal rows of one dtype, "
            f"got {source.dtype} {source.shape} and {target.dtype} {target.shape}"
        )
    if source.dtype.itemsize % 4:
        raise ValueError(f"'{label}': elements must have 4 or 8 bytes, got {source.dtype}")
    batch, population = target.shape[0], source.shape[0]
    if indices is not None and (indices.dtype != np.int32 or indices.shape != (batch,) or population >= 2**31):
        raise ValueError(
            f"'{label}': indices must be int32 ({batch},) and the population below 2**31, "
            f"got {indices.dtype} {indices.shape} and {population}"
        )
    if mask is not None and (mask.dtype != np.float32 or mask.shape != (population,)):
        raise ValueError(
            f"'{label}': mask must be float32 ({population},), as the source has rows, got {mask.dtype} {mask.shape}"
        )
    _launch(program, source, target, counters, stream, label, indices=indices, mask=mask)


def gather_onehots(
    program: Program,
    source: Tensor,
    target: Tensor,
    *,
    sizes: Sequence[int],
    counters: Tensor,
    stream: int,
    label: str,
) -> None:
    """Append: target[b] = one-hot codes, side by side, of source[random index of b], by the indices of `gather`.

    Args:
        program: program to append to: one record per branch.
        source: int32 [population, D]; a number outside [0, n_d) has no 1.
        target: float32 [batch, sum n_d].
        sizes: n_d per branch.
        counters: uint64 [4] (replays finished, t, skipped, seed).
        stream: number of the random stream, 32 bits.
        label: shown in tables, with the number of the branch.

    Raises:
        ValueError: shapes or dtypes do not match; the message shows both sides.
    """
    if source.dtype != np.int32 or len(source.shape) != 2 or source.shape[1] != len(sizes) or min(sizes) < 1:
        raise ValueError(
            f"'{label}': source must be int32 [population, {len(sizes)}] for sizes {tuple(sizes)} of at least 1, "
            f"got {source.dtype} {source.shape}"
        )
    if target.dtype != np.float32 or len(target.shape) != 2 or target.shape[1] != sum(sizes):
        raise ValueError(f"'{label}': target must be float32 [batch, {sum(sizes)}], got {target.dtype} {target.shape}")
    for d, (n, start) in enumerate(zip(sizes, accumulate(sizes, initial=0), strict=False)):
        numbers, codes = source.columns(d, d + 1), target.columns(start, start + n)
        _launch(program, numbers, codes, counters, stream, f"{label}{d}", codes=True)


def _launch(
    program: Program,
    source: Tensor,
    target: Tensor,
    counters: Tensor,
    stream: int,
    label: str,
    *,
    indices: Tensor | None = None,
    mask: Tensor | None = None,
    codes: bool = False,
) -> None:
    """Append a record; raises ValueError if the stream does not fit."""
    if not 0 <= stream < 2**32:
        raise ValueError(f"'{label}': stream {stream} does not fit 32 bits without sign")
    scale = source.dtype.itemsize // 4
    words = math.prod(target.shape[1:]) * scale
    program.launch(
        GATHER,
        {
            "source": source,
            "target": target,
            "counters": counters,
            "index_out": 0 if indices is None else indices,
            "mask": 0 if mask is None else mask,
            "source_stride": source.ld * scale,
            "target_stride": target.ld * scale,
            "population": source.shape[0],
            "words": words,
            "rows": target.shape[0],
            "tile_rows": max(1, min(_TILE_ROWS, (_TILE_CODES if codes else _TILE_WORDS) // words)),
            "stream": stream,
            "codes": int(codes),
        },
        reads=[source, counters, mask],
        writes=[target, indices],
        label=label,
    )


def philox4x32(key: NDArray[np.uint32], counter: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Philox4x32-10, bit for bit as the kernels compute it.

    Args:
        key: uint32 [2].
        counter: uint32 [..., 4].

    Returns:
        uint32 [..., 4], 128 random bits per counter.
    """
    mask = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * c0
        product1 = np.uint64(0xCD9E8D57) * c2
        c0 = (product1 >> shift) ^ c1 ^ np.uint64(k0)
        c1 = product1 & mask
        c2 = (product0 >> shift) ^ c3 ^ np.uint64(k1)
        c3 = product0 & mask
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def random_bits(seed: int, replay: int, stream: int, items: NDArray[np.integer[Any]]) -> NDArray[np.uint32]:
    """The random numbers of some items, as every kernel draws them: uint32 [n, 4], bit for bit.

    Args:
        seed: 64-bit seed.
        replay: replays, or calls, finished before this one.
        stream: number of the random stream.
        items: [n], each of 32 bits.
    """
    counter = np.empty((len(items), 4), np.uint32)
    counter[:, 0] = items
    counter[:, 1] = stream
    counter[:, 2] = replay & 0xFFFFFFFF
    counter[:, 3] = replay >> 32
    return philox4x32(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), counter)


def reference_indices(seed: int, replay: int, stream: int, batch: int, population: int) -> NDArray[np.int64]:
    """The rows that `gather` picks: int64 [batch], each in [0, population).

    Args:
        seed: 64-bit seed.
        replay: replays finished before this one.
        stream: number of the random stream.
        batch: rows to pick.
        population: rows to pick from.
    """
    bits = random_bits(seed, replay, stream, np.arange(batch)).astype(np.uint64)
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    low, high = np.uint64(population & 0xFFFFFFFF), np.uint64(population >> 32)
    x, y = bits[:, 0], bits[:, 1]
    # high half of the 128-bit product (y:x) * (high:low)
    middle = y * low + (x * low >> shift)
    carry = x * high + (middle & mask)
    return (y * high + (middle >> shift) + (carry >> shift)).astype(np.int64)
