"""Which loss moves which part of the network: the gradient, loss by loss (docs/step.md §7, `decomposition.cu`).

Each loss gets a set of gradient buffers of its own and a backward of its own; training's buffers are only read, so a
step with the decomposition trains to the same bits as one without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fxengine.graphs import Family, Program, Tensor

#: Rows of the decomposition.
COMPONENTS = ("iqn", "ens", "c51", "cql", "distill", "rec", "pred", "cql_sx", "c51_bs")
#: Columns: the magnitude branch, the direction branch, the trunk.
SLICES = ("magnitude", "direction", "trunk")

_TILE = 4096


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["length"]) // _TILE)


SQUARES = Family("slice_squares", "decomposition.cu", "fx_slice_squares", "SliceSquares", tiles=_tiles)
SLICE_NORM = Family("slice_norm", "decomposition.cu", "fx_slice_norm", "SliceNorm", tiles=lambda fields: 1)


def value_name(component: str, part: str) -> str:
    """Telemetry name of one entry."""
    return f"split.{component}.{part}"


def slice_partials(program: Program, tensors: Sequence[Tensor], *, label: str) -> Tensor:
    """Append the partial sums of squares of several float32 tensors without gaps; returns them, float64 [n]."""
    counts = [_tiles({"length": t.size}) for t in tensors]
    partials = program.tensor(f"{label}.squares", (sum(counts),), np.float64)
    first = 0
    for tensor, count in zip(tensors, counts, strict=True):
        part = partials.rows(first, first + count)
        program.launch(
            SQUARES,
            {"x": tensor, "partials": part, "length": tensor.size},
            reads=[tensor],
            writes=[part],
            label=f"{label}.{tensor.name}",
        )
        first += count
    return partials


def slice_norm(program: Program, partials: Tensor, out: Tensor, *, scale: Tensor | None = None, label: str) -> None:
    """Append out = scale·√Σ partials, with out and scale float32 [1]; a scale of 0 gives an exact 0."""
    program.launch(
        SLICE_NORM,
        {"partials": partials, "scale": scale or 0, "out": out, "n": partials.size},
        reads=[partials, scale],
        writes=[out],
        label=label,
    )
