"""Steps into a replay (`replay.cu`): from tensors of the device, or from rows that the host fills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import MAPPED, Family, Program, ProgramError, Tensor
from fxengine.ops.checks import require
from fxengine.ops.replay import Column, Ring, row_stride

_TILE = 256


def _insert_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["envs"]) * (-(-int(fields["width"]) // 4)) // _TILE)


INSERT = Family("replay_insert", "replay.cu", "fx_replay_insert", "ReplayInsert", tiles=_insert_tiles)
ADVANCE = Family("replay_advance", "replay.cu", "fx_replay_advance", "ReplayAdvance", tiles=lambda fields: 1)


@dataclass(frozen=True)
class Staging:
    """A ring of mapped-pinned rows that the host fills, one for every step to insert.

    Attributes:
        turn: uint64 [1], rows read so far; the next one to read is turn % rows.
        head: uint64 [1] in mapped memory, `turn` as the host sees it.
        rows: length of the ring.
    """

    turn: Tensor
    head: Tensor
    rows: int


def insert(
    program: Program, ring: Ring, field: Column, source: Tensor, *, staging: Staging | None = None, label: str
) -> None:
    """Append: the next slot of a field = one step of all environments.

    Args:
        program: program to append to.
        ring: the replay.
        field: the field.
        source: [envs, ...] of the format's given dtype; with `staging` [rows, envs, ld], rows padded like the field's.
        staging: the ring that `source` is, read at its turn; None: `source` is a tensor of the device.
        label: shown in tables.

    Raises:
        ProgramError: a shape or dtype does not match.
    """
    if source.dtype != field.format.given:
        raise ProgramError(f"'{label}': the field takes {field.format.given}, source is {source.dtype}")
    envs, width = ring.envs, field.width
    if staging is None:
        if source.shape[0] != envs:
            raise ProgramError(f"'{label}': source must have {envs} rows, one per environment, got {source.shape}")
        stride = row_stride(source, width, "source", label)
    else:
        if source.shape != (staging.rows, *field.data.shape[1:]):
            raise ProgramError(f"'{label}': source must be {(staging.rows, *field.data.shape[1:])}, got {source.shape}")
        stride = width = field.ld
    if envs * -(-width // 4) >= 2**31:
        raise ProgramError(f"'{label}': {envs} rows of {width} elements are more than one record inserts")
    program.launch(
        INSERT,
        {
            "source": source,
            "data": field.data,
            "ring": ring.counters,
            "turn": staging.turn if staging else 0,
            "source_stride": stride,
            "turn_stride": envs * field.ld if staging else 0,
            "ld": field.ld,
            "turns": staging.rows if staging else 1,
            "kind": field.format.kind,
            "width": width,
            "envs": envs,
        },
        reads=[source, ring.counters, staging.turn if staging else None],
        writes=[field.data],
        label=label,
    )


def advance(program: Program, ring: Ring, *, staging: Staging | None = None, label: str) -> None:
    """Append: the step is inserted, the next one goes to the next slot. Comes behind everything else of the insertion.

    Raises:
        ProgramError: the staging ring's counters are not what they must be.
    """
    if staging is not None:
        require(staging.turn, np.uint64, (1,), "turn", label)
        require(staging.head, np.uint64, (1,), "head", label)
        if staging.head.storage.arena != MAPPED:
            raise ProgramError(f"'{label}': head must be mapped memory, got arena {staging.head.storage.arena}")
    program.launch(
        ADVANCE,
        {
            "ring": ring.counters,
            "turn": staging.turn if staging else 0,
            "head": staging.head if staging else 0,
            "slots": ring.slots,
        },
        reads=[ring.counters, staging.turn if staging else None],
        writes=[ring.counters, *((staging.turn, staging.head) if staging else ())],
        label=label,
    )


def reference_bfloat16(x: ArrayLike) -> NDArray[np.uint16]:
    """bf16 bits of the nearest number to each float32, ties to even; NaN stays NaN, made quiet."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    quiet = (bits | np.uint64(0x400000)) >> np.uint64(16)
    return np.where((bits & np.uint64(0x7FFFFFFF)) > 0x7F800000, quiet, rounded).astype(np.uint16)
