"""The two ends of a replay: signal row in, telemetry row out, counters on (`step.cu`).

Counters are four uint64 on the device: replays finished, Adam step t, steps skipped, seed. Nothing but `end` writes
them during a replay, so every kernel of one replay sees the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from fxengine.graphs import Family, Program, Tensor

#: Places of the counters.
REPLAYS, ADAM_STEP, SKIPPED, SEED = range(4)
#: Bytes before the values of a telemetry row: sequence, t, skipped, group mask, each uint64.
HEADER_BYTES = 32


class Guard(Protocol):
    """What the closing record must know of the optimizer."""

    @property
    def skip(self) -> Tensor:
        """uint32 [1], nonzero when the optimizer skipped this step."""

    @property
    def group_mask(self) -> Tensor:
        """uint64 [1], bit g set when the gradient norm of group g was not finite."""


BEGIN = Family("begin", "step.cu", "fx_begin", "Begin", tiles=lambda fields: 1)
END = Family("end", "step.cu", "fx_end", "End", tiles=lambda fields: 1)


def declare_counters(program: Program, *, seed: int = 0, arena: str = "state") -> Tensor:
    """Declare the counters (uint64 [4]): no replay finished, t = 0, nothing skipped, the given seed (64 bits)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} does not fit 64 bits without sign; give 0 <= seed < 2**64")
    return program.tensor("counters", (4,), np.uint64, arena=arena, data=np.array([0, 0, 0, seed], np.uint64))


def begin(program: Program, *, ring: Tensor, counters: Tensor, signals: Tensor, label: str = "begin") -> None:
    """Copy this replay's row of the signal ring to the device snapshot.

    Args:
        program: program to append to; this should be its first record.
        ring: float32 [rows, stride] in mapped memory. A row holds one float per slot, then one bit per slot
            (uint32 words, lowest bit first): slots whose bit is clear keep their value. Replay r reads row r % rows.
        counters: uint64 [4].
        signals: float32 [slots], the snapshot; slots must be a multiple of 32.
        label: shown in tables.

    Raises:
        ValueError: a dtype is wrong, or a row of the ring is too short for the slots and their mask.
    """
    _check_counters(counters, label)
    slots = signals.size
    if signals.dtype != np.float32 or ring.dtype != np.float32 or len(ring.shape) != 2 or not signals.contiguous:
        raise ValueError(
            f"'{label}': signals must be float32 [slots] and ring float32 [rows, stride], "
            f"got {signals.dtype} {signals.shape} and {ring.dtype} {ring.shape}"
        )
    if slots % 32 or ring.shape[1] < slots + slots // 32:
        raise ValueError(
            f"'{label}': {slots} slots must be a multiple of 32 and a ring row must hold them and their mask "
            f"({slots + slots // 32} words), got rows of {ring.shape[1]}"
        )
    program.launch(
        BEGIN,
        {
            "ring": ring,
            "counters": counters,
            "signals": signals,
            "row_stride": ring.ld,
            "rows": ring.shape[0],
            "slots": slots,
        },
        reads=[ring, counters],
        writes=[signals],
        label=label,
    )


def end(
    program: Program,
    *,
    values: Tensor,
    counters: Tensor,
    ring: Tensor,
    head: Tensor,
    guard: Guard | None = None,
    after: Sequence[Tensor] = (),
    label: str = "end",
) -> None:
    """Write this replay's telemetry row, then advance the counters.

    Args:
        program: program to append to; this should be its last record.
        values: float32 [n], copied behind the row's header.
        counters: uint64 [4].
        ring: [rows, row bytes] in mapped memory, uint8 or uint64; row bytes a multiple of 8. Replay number s, counted
            from 1, writes row (s - 1) % rows: sequence s, t, skipped, group mask (uint64 each), then the values. The
            sequence is 0 while the row is being written.
        head: uint64 [1] in mapped memory: sequence of the newest complete row.
        guard: what the optimizer's non-finite guard wrote. None: the program has no optimizer, and t stands.
        after: tensors that must be complete before the row says that the replay has finished.
        label: shown in tables.

    Raises:
        ValueError: a dtype is wrong, or a row of the ring is too short for the header and the values.
    """
    _check_counters(counters, label)
    needed = HEADER_BYTES + 4 * values.size
    row_bytes = ring.ld * ring.dtype.itemsize
    if values.dtype != np.float32 or not values.contiguous or head.dtype != np.uint64:
        raise ValueError(
            f"'{label}': values must be contiguous float32 and head uint64, got {values.dtype} and {head.dtype}"
        )
    if len(ring.shape) != 2 or row_bytes % 8 or row_bytes < needed:
        raise ValueError(
            f"'{label}': a row of {values.size} values needs {needed} bytes, a multiple of 8 from row to row; "
            f"ring is {ring.dtype} {ring.shape} with {row_bytes}"
        )
    skip, group_mask = (None, None) if guard is None else (guard.skip, guard.group_mask)
    program.launch(
        END,
        {
            "values": values,
            "counters": counters,
            "skip": skip or 0,
            "group_mask": group_mask or 0,
            "ring": ring,
            "head": head,
            "n": values.size,
            "row_words": row_bytes // 8,
            "rows": ring.shape[0],
        },
        reads=[values, counters, skip, group_mask, *after],
        writes=[counters, ring, head],
        label=label,
    )


def _check_counters(counters: Tensor, label: str) -> None:
    if counters.dtype != np.uint64 or counters.shape != (4,):
        raise ValueError(f"'{label}': counters must be uint64 (4,), got {counters.dtype} {counters.shape}")
