"""Golden files and their limits (docs/step.md, section 10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .config import Array, Config, Tree
from .step import State

DIRECTORY = Path(__file__).parents[1] / "golden"
FP32_LIMIT = 5e-5
FP32_UPDATE_LIMIT = 1e-3
FP32_ROUNDING = 2.0**-24
UPDATED = ("param.", "m.", "v.", "target.")


@dataclass(frozen=True)
class Golden:
    """A golden file: configuration, start, batches and reference outputs of its steps."""

    name: str
    config: Config
    state: State
    batches: list[Tree]
    outputs: list[Tree]


@dataclass(frozen=True)
class Difference:
    """Error of one array and, for params, moments and targets, of its update."""

    name: str
    error: float
    update: float = 0.0


def names() -> list[str]:
    """The golden files: aux_closed, bare, cold_odd, edges, full, skip."""
    return sorted(path.stem.removeprefix("golden_") for path in DIRECTORY.glob("golden_*.npz"))


def under(arrays: Mapping[str, Array], prefix: str) -> Tree:
    """Arrays whose name starts with the prefix, without it."""
    return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}


def start(arrays: Tree) -> State:
    """The state that `in.*` sets."""
    state: State = {part: under(arrays, f"in.{part}.") for part in ("m", "v", "target")}
    state["params"] = under(arrays, "in.param.")
    state["sn_v"] = under(arrays, "in.sn_v_")
    state["state"] = {name: float(x) for name, x in under(arrays, "in.state.").items()}
    state["signals"] = {name: float(x) for name, x in under(arrays, "in.signal.").items()}
    state["bounds"] = {int(slot): float(x) for slot, x in under(arrays, "in.bound.").items()}
    state["step"] = int(arrays["in.step"])
    return state


def load(name: str) -> Golden:
    """Read tests/golden/golden_{name}.npz."""
    with np.load(DIRECTORY / f"golden_{name}.npz") as stored:
        arrays = {key: stored[key] for key in stored.files}
    config = Config.from_json(str(arrays.pop("config")))
    batches = [under(arrays, f"step{i}.in.") for i in range(2)]
    outputs = [under(arrays, f"step{i}.out.") for i in range(2)]
    return Golden(name, config, start(arrays), batches, outputs)


def same_specials(x: Array, ref: Array) -> bool:
    """Whether infinities and NaN stand where the reference has them."""
    if not np.array_equal(np.isnan(x), np.isnan(ref)):
        return False
    inf = np.isinf(ref)
    return np.array_equal(np.isinf(x), inf) and np.array_equal(x[inf], ref[inf])


def error(actual: Any, reference: Any, floor: float = 1e-6) -> float:
    """max|x − ref| / max(max|ref|, floor) over the finite entries; inf where shapes or specials differ."""
    x, ref = np.asarray(actual, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if x.shape != ref.shape or not same_specials(x, ref):
        return np.inf
    finite = np.isfinite(ref)
    if not finite.any():
        return 0.0
    return float(np.max(np.abs(x[finite] - ref[finite])) / max(np.max(np.abs(ref[finite])), floor))


def update_error(
    after: Any, before: Any, ref_after: Any, ref_before: Any, floor: float, rounding: float = FP32_ROUNDING
) -> float:
    """max(0, |Δx − Δref| − rounding·(|x_before| + |x_after|)) / max(max|Δref|, floor), each side's own Δ."""
    x1, x0, r1, r0 = (np.asarray(x, dtype=np.float64) for x in (after, before, ref_after, ref_before))
    moved = r1 - r0
    excess = np.abs((x1 - x0) - moved) - rounding * (np.abs(x0) + np.abs(x1))
    return float(max(0.0, np.max(excess)) / max(np.max(np.abs(moved)), floor))


def compare(
    outputs: Mapping[str, Any],
    reference: Mapping[str, Any],
    before: Mapping[str, Any],
    ref_before: Mapping[str, Any],
    rounding: float = FP32_ROUNDING,
) -> list[Difference]:
    """Every reference array against the outputs; `before` holds each side's param.*, m.*, v.*, target.*.

    An absent output has an infinite error; outputs that the reference has not are ignored.
    """
    found = []
    for name, ref in reference.items():
        if name not in outputs:
            found.append(Difference(name, np.inf))
            continue
        update = 0.0
        if name.startswith(UPDATED):
            floor = 1e-12 if name.startswith("v.") else 1e-6
            update = update_error(outputs[name], before[name], ref, ref_before[name], floor, rounding)
        found.append(Difference(name, error(outputs[name], ref), update))
    return found


def worst(found: list[Difference]) -> Difference:
    """The largest error and the largest update error, under the name of the larger."""
    by_error, by_update = max(found, key=lambda f: f.error), max(found, key=lambda f: f.update)
    name = by_error.name if by_error.error >= by_update.update else by_update.name
    return Difference(name, by_error.error, by_update.update)


def assert_fp32(found: list[Difference]) -> None:
    """The fp32 limits: 5e-5 for every array, 1e-3 for updates, `best` exact."""
    beyond = [f for f in found if f.error > FP32_LIMIT or f.update > FP32_UPDATE_LIMIT]
    beyond += [f for f in found if f.name == "best" and f.error != 0.0]
    assert not beyond, f"{len(beyond)} arrays beyond the fp32 limits, first {beyond[:5]}"
