"""A small kernel family for tests of the program layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fxengine.graphs import Family, Launch, Program, Tensor


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-fields["n"] // 256)


CHAIN = Family("chain", str(Path(__file__).with_name("chain.cu")), "fx_chain", "Chain", _tiles)
OTHER = replace(CHAIN, name="other", kernel="fx_other")
OVERRUN = replace(CHAIN, name="overrun", kernel="fx_overrun")
LATE = replace(CHAIN, name="late", late=True)
EARLY = replace(CHAIN, name="early", early=("a",))
WHOLE = replace(CHAIN, name="whole", whole=True)


def chain(
    program: Program,
    x: Tensor,
    y: Tensor,
    a: Tensor,
    b: float = 0.0,
    *,
    accumulate: bool = False,
    family: Family = CHAIN,
    label: str = "",
) -> Launch:
    """Append y (= or +=) a·x + b."""
    fields = {"x": x, "y": y, "a": a, "b": b, "n": x.size, "accumulate": int(accumulate)}
    reads = [x, a, y] if accumulate else [x, a]
    return program.launch(family, fields, reads=reads, writes=[y], label=label or f"{x.name}->{y.name}")
