"""Check a device against golden files: two consecutive steps that an independent float64 implementation computed.

    from fxengine.verify import verify
    outcome = verify("golden_aux_closed.npz", device="sim")
    outcome.failed, outcome.worst, outcome.missing

What the engine can compute is compared array by array; everything else is named with the reason why it was not. A
later part of the step joins by being declared in `_declare`: its inputs are taken from the file by name, its results
found by name, and what the file had to lend until then (`_LENT_INPUTS`, `_LENT_SLOTS`) or kept from being judged
(`_RULES`) is struck off the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fxengine.config import StepConfig
from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.golden import Array, GoldenFile, GoldenFileError, array_error, update_error
from fxengine.nets import aux
from fxengine.nets.builder import COUNTERS, StepBuilder


@dataclass(frozen=True)
class Limits:
    """Largest errors a precision may show.

    Attributes:
        error: max|x - ref| / max(max|ref|, 1e-6) of any array.
        update: the same of what a step changed in params, m, v and targets, less the rounding of storing them.
    """

    error: float
    update: float


LIMITS = {"fp32": Limits(error=5e-5, update=1e-3)}

#: Result kinds whose update is judged too, and the smallest reference update that counts as one.
_UPDATED = {"param": 1e-6, "m": 1e-6, "v": 1e-12, "target": 1e-6}
#: Inputs of the step that the file's own results stand in for, because what computes them is not built.
_LENT_INPUTS = frozenset({"h1"})
#: Device-owned slots that no kernel moves yet: each step starts from where the file's step left them.
_LENT_SLOTS = ("bound.", "state.")

NOT_BUILT = "not built in this version"
NO_AUX = "the file's step has no auxiliary nets, the part that this version builds"
GATE_OPEN = "Q's gradient reaches the auxiliary nets through the open gate, and Q is not built in this version"
SKIPPED = "the file skips the step because of a part that is not built in this version"
NOT_IN_FILE = "computed, but the file has no such array"


# -- outcome -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One array that was compared.

    Attributes:
        name: as in the file.
        error: error of the values; inf where a NaN or an infinity stands in the wrong place.
        update: error of what the step changed; None for arrays that are not state.
        limits: what it was judged by.
    """

    name: str
    error: float
    update: float | None
    limits: Limits

    @property
    def failed(self) -> bool:
        """Whether a limit is exceeded."""
        return self.ratio > 1.0

    @property
    def ratio(self) -> float:
        """The larger of error and update error, in units of its limit."""
        return max(self.error / self.limits.error, (self.update or 0.0) / self.limits.update)

    @property
    def binding(self) -> tuple[str, float, float]:
        """Measure nearest to its limit: its name ("error" or "update"), value and limit."""
        if (self.update or 0.0) / self.limits.update > self.error / self.limits.error:
            return "update", self.update or 0.0, self.limits.update
        return "error", self.error, self.limits.error


@dataclass(frozen=True)
class Outcome:
    """What one file said about a device.

    Attributes:
        path: the file.
        device: label of the device.
        precision: the precision it ran in.
        results: every array compared, in the order of the steps.
        missing: reason by name for every array that was not.
    """

    path: Path
    device: str
    precision: str
    results: tuple[Result, ...]
    missing: dict[str, str]

    @property
    def checked(self) -> list[str]:
        """Names of the arrays compared."""
        return [r.name for r in self.results]

    @property
    def failed(self) -> list[str]:
        """Names of the arrays that exceed a limit."""
        return [r.name for r in self.results if r.failed]

    @property
    def worst(self) -> Result | None:
        """The array nearest to (or furthest beyond) its limit; None if none was compared."""
        return max(self.results, key=lambda r: r.ratio, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: lists of names `checked`, `failed`, `missing`, and `worst` {name, error, ...}."""
        return {
            "file": str(self.path),
            "checked": self.checked,
            "failed": self.failed,
            "missing": list(self.missing),
            "reasons": {reason: len(names) for reason, names in self.by_reason().items()},
            "worst": worst_as_dict(self.worst),
        }

    def by_reason(self) -> dict[str, list[str]]:
        """Names of the arrays that were not compared, by reason."""
        grouped: dict[str, list[str]] = {}
        for name, reason in self.missing.items():
            grouped.setdefault(reason, []).append(name)
        return grouped


def worst_as_dict(worst: Result | None, name: str | None = None) -> dict[str, Any] | None:
    """{name, error, measure, limit} of a result; an infinite error is the largest float, which JSON can hold."""
    if worst is None:
        return None
    measure, value, limit = worst.binding
    return {
        "name": name or worst.name,
        "error": min(value, sys.float_info.max),
        "measure": measure,
        "limit": limit,
    }


# -- what may be judged ------------------------------------------------------------------------------------------


def _influence(file: GoldenFile, steps: range) -> str | None:
    """Why the auxiliary nets see more than their own losses in some of these steps, or None if they do not."""
    for step in steps:
        if float(file[f"step{step}.out.skipped"]) != 0.0:
            return SKIPPED
        if float(file[f"step{step}.out.state.alpha_grad"]) != 0.0:
            return GATE_OPEN
    return None


#: Patterns of result names, and the first and last step (relative to the result's) whose gradients they depend on.
#: The forward of a step depends on the updates before it; its gradients, and all that follows, on that step's too.
_RULES: tuple[tuple[tuple[str, ...], Callable[[int], range]], ...] = (
    (("wire", "L_*"), lambda step: range(step)),
    (("grad*", "param.*", "m.*", "v.*", "skipped", "step"), lambda step: range(step + 1)),
)


def _reason(file: GoldenFile, step: int, name: str, computed: bool) -> str | None:
    """Why a result is not judged; None if it is."""
    if not computed:
        return NOT_BUILT
    for patterns, depends in _RULES:
        if any(fnmatchcase(name, p) for p in patterns):
            return _influence(file, depends(step))
    return None


# -- running -----------------------------------------------------------------------------------------------------


def verify(path: str | Path, *, device: str | Device = "auto", precision: str = "fp32") -> Outcome:
    """Run the steps of a golden file on a device and compare every result that this version computes.

    Raises:
        GoldenFileError: the file is missing, unreadable or not a golden file.
        ValueError: no such precision.
        DeviceNotFound: no such device.
    """
    if precision not in LIMITS:
        raise ValueError(f"precision {precision!r} is not built in this version; there is {', '.join(LIMITS)}")
    file = GoldenFile(path)
    with _opened(device) as opened:
        if not file.config.aux_h:
            missing = {f"step{s}.out.{n}": NO_AUX for s in range(file.steps) for n in file.results(s)}
            return Outcome(file.path, opened.label, precision, (), missing)
        with Engine(partial(_declare, config=file.config), device=opened, precision=precision) as engine:
            results, missing = _compare(engine, file, LIMITS[precision])
            return Outcome(file.path, opened.label, precision, tuple(results), missing)


def _compare(engine: Engine, file: GoldenFile, limits: Limits) -> tuple[list[Result], dict[str, str]]:
    """Every result compared, and the reason by name for every one that was not."""
    _start(engine, file)
    results: list[Result] = []
    missing: dict[str, str] = {}
    state = _state_names(engine)
    reference_before = {n: file[f"in.{n}"] for n in state}
    for step in range(file.steps):
        before = engine.state()
        computed = _run(engine, file, step)
        for name in dict.fromkeys([*file.results(step), *computed]):
            full = f"step{step}.out.{name}"
            reason = _reason(file, step, name, name in computed)
            if full not in file:
                if reason is None:
                    missing[full] = NOT_IN_FILE
                continue
            if reason is not None:
                missing[full] = reason
                continue
            update = None
            if name in reference_before:
                floor = _UPDATED[name.split(".", 1)[0]]
                update = update_error(before[name], computed[name], reference_before[name], file[full], floor)
            results.append(Result(full, array_error(computed[name], file[full]), update, limits))
        reference_before = {n: file[f"step{step}.out.{n}"] for n in state}
    return results, missing


def _declare(step: StepBuilder, config: StepConfig) -> None:
    """The parts of the specified step that this version builds, with h1 as an input."""
    aux.declare(step, config)
    h1 = step.input("h1", (config.batch, config.h1))
    next_bar = step.input("nb_label", (config.batch,), np.int32)
    regime = step.input("regime_label", (config.batch,), np.int32)
    heads = aux.forward(step, h1)
    step.output("wire", aux.losses(step, heads, next_bar, regime))


def _start(engine: Engine, file: GoldenFile) -> None:
    """Parameters, moments, step counter and signals as the file starts."""
    state = engine.state()
    for name in _state_names(engine):
        state[name] = file.like(f"in.{name}", state[name])
    state["counters"][COUNTERS.index("step")] = int(file["in.step"])
    engine.load_state(state)
    _known(engine, file.scalars("in.signal."), file)
    engine.signals.update(file.scalars("in.signal."))
    _lend_slots(engine, file, "in.")


def _run(engine: Engine, file: GoldenFile, step: int) -> dict[str, Array]:
    """Feed and run one step; its results under the names of the file."""
    if step > 0:
        _lend_slots(engine, file, f"step{step - 1}.out.")
    builder = engine.builder
    inputs = {}
    for name, tensor in builder.inputs.items():
        side = "out" if name in _LENT_INPUTS else "in"
        inputs[name] = file.like(f"step{step}.{side}.{name}", np.empty(tensor.shape, tensor.dtype))
    earlier = engine.telemetry()
    engine.write(**inputs)
    engine.step()
    engine.synchronize()
    report = engine.telemetry()
    assert report is not None, "a finished step has a report"
    state = engine.state()
    computed: dict[str, Array] = {name: state[name] for name in _state_names(engine)}
    computed.update((f"grad.{p.name}", engine.plan.buffer(p.grad).read()) for p in builder.groups.parameters)
    computed.update((name, engine.output(name)) for name in builder.outputs)
    computed.update((n, np.float64(v)) for n, v in report.items() if n.startswith(("L_", "grad_norm.")))
    computed["step"] = np.int64(report.step)
    computed["skipped"] = np.int64(report.skipped - (earlier.skipped if earlier else 0))
    return computed


def _lend_slots(engine: Engine, file: GoldenFile, prefix: str) -> None:
    """Set the device-owned slots that no kernel moves yet, for the next launch. The file names bounds by their slot."""
    by_index = {str(slot.index): slot.name for slot in engine.signals.map.slots.values()}
    values = {
        by_index.get(name, name): value
        for kind in _LENT_SLOTS
        for name, value in file.scalars(f"{prefix}{kind}").items()
    }
    _known(engine, values, file)
    for name, value in values.items():
        engine.signals.override(name, value)


def _known(engine: Engine, values: Mapping[str, float], file: GoldenFile) -> None:
    unknown = sorted(set(values) - set(engine.signals.map.slots))
    if unknown:
        raise GoldenFileError(f"{file.path}: signals {unknown} are unknown to this version")


def _state_names(engine: Engine) -> list[str]:
    parameters = engine.builder.groups.parameters
    return [f"{kind}.{p.name}" for p in parameters for kind in ("param", "m", "v")]


@contextmanager
def _opened(device: str | Device) -> Iterator[Device]:
    """A device given as text, closed again afterwards, or one that is open and stays so."""
    if isinstance(device, Device):
        yield device
    else:
        with Device.open(device) as opened:
            yield opened
