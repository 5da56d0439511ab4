"""The end of a replay: reported sums, telemetry row out, counters on (`step.cu`).

Counters are four uint64 on the device: replays finished, Adam step t, steps skipped, seed. Nothing but `end` writes
them during a replay, so every kernel of one replay sees the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fxengine.graphs import CONSTANTS, Family, Program, Tensor

#: Words of the device-side counters, uint64 each: replays finished, Adam step t, skipped steps, RNG seed.
COUNTERS = ("replays", "step", "skipped", "seed")
#: Sums that one closing record can finish.
MAX_SUMS = 32
#: Words before the values of a telemetry row: t, skipped and group mask, two words each.
HEADER_WORDS = 6


class Guard(Protocol):
    """What the closing record must know of the optimizer."""

    @property
    def skip(self) -> Tensor:
        """uint32 [1], nonzero when the optimizer skipped this step."""

    @property
    def group_mask(self) -> Tensor:
        """uint64 [1], bit g set when the gradient norm of group g was not finite."""


@dataclass(frozen=True)
class Sum:
    """A reported value that the closing record adds up: target = sum(partials) / (divisor * max(1, denominator)).

    Attributes:
        target: one float of the telemetry values.
        partials: float64 or int32 [n].
        denominator: int32 [1], such as the number of valid rows; None for 1.
        divisor: constant part of the denominator, such as a batch size.
    """

    target: Tensor
    partials: Tensor
    denominator: Tensor | None = None
    divisor: float = 1.0


END = Family("end", "step.cu", "fx_end", "End", tiles=lambda fields: 1)


def declare_counters(program: Program, *, seed: int = 0, arena: str = "state") -> Tensor:
    """Declare the counters (uint64 [4]): no replay finished, t = 0, nothing skipped, the given seed (64 bits)."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} does not fit 64 bits without sign; give 0 <= seed < 2**64")
    return program.tensor(
        "counters", (len(COUNTERS),), np.uint64, arena=arena, data=np.array([0, 0, 0, seed], np.uint64)
    )


def end(
    program: Program,
    *,
    values: Tensor,
    counters: Tensor,
    ring: Tensor,
    head: Tensor,
    guard: Guard | None = None,
    sums: Sequence[Sum] = (),
    signals: Tensor | None = None,
    mirrored: Sequence[int] = (),
    label: str = "end",
) -> None:
    """Write this replay's telemetry row, then advance the counters.

    Args:
        program: program to append to; this should be its last record.
        values: float32 [n], copied behind the row's header.
        counters: uint64 [4].
        ring: [rows, row bytes] in mapped memory, uint8 or uint64; row bytes a multiple of 8. Replay number s, counted
            from 1, writes row (s - 1) % rows, a uint64 word for each of: t low, t high, skipped low, skipped high,
            group mask low, group mask high, the values, the mirrored slots. The high half of every word is the low
            half of s: a row whose words do not all carry it is not complete, or belongs to another replay.
        head: uint64 [1] in mapped memory: number of the newest replay; it may be seen shortly before its row.
        guard: what the optimizer's non-finite guard wrote. None: the program has no optimizer, and t stands.
        sums: values that are added up here; at most 32.
        signals: float32 [slots], the snapshot; needed by `mirrored`.
        mirrored: slots of the snapshot that the row ends with.
        label: shown in tables.

    Raises:
        ValueError: a dtype is wrong, or a row of the ring is too short for the header and the values.
    """
    _check_counters(counters, label)
    if len(sums) > MAX_SUMS:
        raise ValueError(f"'{label}': at most {MAX_SUMS} sums can be reported, got {len(sums)}")
    for item in sums:
        if item.partials.dtype not in (np.float64, np.int32) or len(item.partials.shape) != 1:
            raise ValueError(
                f"'{label}': partials must be float64 or int32 [n], got {item.partials.dtype} {item.partials.shape}"
            )
        if item.target.storage is not values.storage or not 0 <= _place(item, values) < values.size:
            raise ValueError(f"'{label}': {item.target} is none of the values that are reported")
    if mirrored and (signals is None or not 0 <= min(mirrored) <= max(mirrored) < signals.size):
        raise ValueError(f"'{label}': slots {list(mirrored)} cannot be mirrored from {signals}")
    total = values.size + len(mirrored)
    needed = 8 * (HEADER_WORDS + total)
    row_bytes = ring.ld * ring.dtype.itemsize
    if values.dtype != np.float32 or not values.contiguous or head.dtype != np.uint64:
        raise ValueError(
            f"'{label}': values must be contiguous float32 and head uint64, got {values.dtype} and {head.dtype}"
        )
    if len(ring.shape) != 2 or row_bytes % 8 or row_bytes < needed:
        raise ValueError(
            f"'{label}': a row of {total} values needs {needed} bytes, in a multiple of 8 per row; "
            f"ring is {ring.dtype} {ring.shape} with {row_bytes}"
        )
    slots = None
    if mirrored:
        chosen = np.array(mirrored, np.int32)
        slots = program.tensor(f"{label}.slots", chosen.shape, np.int32, arena=CONSTANTS, data=chosen)
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
            "values_of": [s.partials if s.partials.dtype == np.float64 else 0 for s in sums],
            "counts_of": [s.partials if s.partials.dtype == np.int32 else 0 for s in sums],
            "denominators": [s.denominator or 0 for s in sums],
            "divisors": [s.divisor for s in sums],
            "lengths": [s.partials.size for s in sums],
            "targets": [_place(s, values) for s in sums],
            "sums": len(sums),
            "signals": signals or 0,
            "slots": slots or 0,
            "mirrored": len(mirrored),
            "n": values.size,
            "row_words": row_bytes // 8,
            "rows": ring.shape[0],
        },
        reads=[
            *(values, counters, skip, group_mask, signals, slots),
            *(t for item in sums for t in (item.partials, item.denominator)),
        ],
        writes=[counters, ring, head, *(s.target for s in sums)],
        label=label,
    )


def _place(item: Sum, values: Tensor) -> int:
    return item.target.offset - values.offset


def _check_counters(counters: Tensor, label: str) -> None:
    if counters.dtype != np.uint64 or counters.shape != (4,):
        raise ValueError(f"'{label}': counters must be uint64 (4,), got {counters.dtype} {counters.shape}")
