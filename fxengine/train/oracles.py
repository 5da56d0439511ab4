"""Oracles: bounds per parameter group and family, learnt from an exact 99th percentile (`oracles.cu`).

Every `every` steps, for every group and each of the families weight (params), adam_m, adam_v and grad (the gradient as
Adam took it, scaled and clamped): p99 = the value at index (99 n + 99) // 100 - 1 of the sorted magnitudes of the n
elements, raw = oracle_headroom p99, and the bound slot moves by oracle_beta towards raw (a slot of 0 takes it whole).

The selection is a radix select (Alabi, Blanchard, Gordon, Steinbach, "Fast k-selection algorithms for graphics
processing units", 2012): three launches, whatever the number of groups and elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import CONSTANTS, Family, Program, Tensor
from fxengine.signals import BOUND_FAMILIES
from fxengine.train.groups import ParamGroup

if TYPE_CHECKING:
    from fxengine.train.optimizer import Guard, SignalLookup

_BINS = 2048
_TILE = 8192
_PASSES = 3


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["length"]) // _TILE)


ORACLE = Family("oracle", "oracles.cu", "fx_oracle", "Oracle", tiles=_tiles)


def oracles(
    program: Program,
    groups: Iterable[ParamGroup],
    *,
    signal: SignalLookup,
    counters: Tensor,
    guard: Guard,
    every: int,
    known: Iterable[str] = (),
) -> tuple[str, ...]:
    """Append the oracles of all groups: three launches, in which a step that is not their turn does nothing.

    To come after everything that changes the parameters (Adam, spectral norm). They run in the steps whose t, that is
    counters[1] + 1, is a multiple of `every`, unless the guard's flag is set. NaN ranks above infinity; a raw value
    that is not finite leaves its slot as it is.

    Args:
        program: program to append to.
        groups: the groups given to `norm`, in the same order.
        signal: must know `oracle_headroom`, `oracle_beta`, `eps_clamp_floor` and `bound.<family>.<group>`; the bound
            slots are written in place.
        counters: uint64 [4]; this step's t is counters[1] + 1.
        guard: what `norm` returned.
        every: steps from one run to the next, at least 1.
        known: names of the groups that could exist.

    Returns:
        The names of `known` that no group has: their slots are never written.

    Raises:
        ValueError: no group, not as many as the guard knows, or `every` below 1.
        KeyError: the signals have no bound slots for a group.
    """
    members = tuple(groups)
    if not members or len(members) != guard.scales.size:
        raise ValueError(
            f"the oracles need the {guard.scales.size} groups that were given to norm, in the same order; "
            f"got {[g.name for g in members]}"
        )
    if not 1 <= every < 2**31:
        raise ValueError(f"the oracles run every n steps, n at least 1 and below 2**31; got {every}")
    count = len(members) * len(BOUND_FAMILIES)
    histograms = program.tensor(
        "oracles.histograms", (count, _BINS), np.uint64, arena="oracles", data=np.zeros((count, _BINS), np.uint64)
    )
    tickets = program.tensor("oracles.tickets", (count,), np.uint32, arena="oracles", data=np.zeros(count, np.uint32))
    chosen = program.tensor("oracles.chosen", (count, 2), np.uint64)
    common = {"skip": guard.skip, "counters": counters, "every": every}
    # The first pass waits for all parameters, those that the spectral norm changes included: so the records of all
    # groups share the three launches.
    after = [g.params for g in members]
    for i, group in enumerate(members):
        pads = _pads(program, group)
        n_pads = pads.size if pads else 0
        elements = {
            "pads": pads or 0,
            "n_pads": n_pads,
            "length": group.size,
            "rank": rank(group.size - n_pads),
        }
        buffers = (group.params, group.m, group.v, group.grads)
        for f, (family, values) in enumerate(zip(BOUND_FAMILIES, buffers, strict=True)):
            row = len(BOUND_FAMILIES) * i + f
            state = {
                "histogram": histograms.rows(row, row + 1),
                "chosen": chosen.rows(row, row + 1),
                "ticket": tickets.rows(row, row + 1),
            }
            bound = {
                "scale": guard.scales.rows(i, i + 1) if family == "grad" else 0,
                "bound_floor": signal("eps_clamp_floor"),
                "headroom": signal("oracle_headroom"),
                "beta": signal("oracle_beta"),
                "slot": signal(f"bound.{family}.{group.name}"),
            }
            fields: dict[str, Any] = {"values": values, **elements, **state, **common}
            for step in range(_PASSES):
                finish = bound if step == _PASSES - 1 else dict.fromkeys(bound, 0)
                record = {**fields, **finish, "pass": step}
                program.launch(
                    ORACLE,
                    record,
                    reads=[*(t for t in record.values() if isinstance(t, Tensor)), *(after if step == 0 else ())],
                    writes=[*state.values(), *(t for t in (finish["slot"],) if isinstance(t, Tensor))],
                    label=f"oracle.{family}.{group.name}.{step}",
                )
    present = {g.name for g in members}
    return tuple(name for name in known if name not in present)


def rank(n: int) -> int:
    """Index of the 99th percentile among n sorted values."""
    return (99 * n + 99) // 100 - 1


def _pads(program: Program, group: ParamGroup) -> Tensor | None:
    """Elements of a group's buffers that belong to no tensor."""
    where = group.padding()
    if not where.size:
        return None
    return program.tensor(f"oracles.pads.{group.name}", where.shape, np.int64, arena=CONSTANTS, data=where)


def reference_p99(x: ArrayLike) -> float:
    """Exact 99th percentile of |x|, by sorting; any shape."""
    magnitudes = np.sort(np.abs(np.asarray(x, np.float64)).ravel())
    return float(magnitudes[rank(magnitudes.size)])


def reference_oracle(x: ArrayLike, slot: float, *, headroom: float, beta: float) -> float:
    """What a bound slot becomes, in float64; x holds a whole group in one family, gradients as Adam took them."""
    raw = headroom * reference_p99(x)
    if not np.isfinite(raw):
        return slot
    return raw if slot == 0 else slot + beta * (raw - slot)


def reference_taken(grad: ArrayLike, *, scale: float, slot: float, floor: float) -> NDArray[np.float64]:
    """The gradient as Adam takes it: scaled, and clamped to max(slot, floor) unless the slot is 0."""
    bound = np.inf if slot == 0 else max(slot, floor)
    return np.clip(scale * np.asarray(grad, np.float64), -bound, bound)
