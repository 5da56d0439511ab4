"""Check a device against golden files: two consecutive steps that an independent float64 implementation computed.

    from fxengine.verify import verify
    outcome = verify("golden_full.npz", device="sim")
    outcome.failed, outcome.worst, outcome.missing

The file's start is loaded, its batches are fed, and every array it holds is compared with what the specified step of
its configuration left behind. Nothing is handed from the file to the device between the two steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.golden import LIMITS, Array, GoldenFile, GoldenFileError, Limits, clear_choices, update_error
from fxengine.ops.step import COUNTERS
from fxengine.signals import BOUND_FAMILIES, OPTIONAL

#: Result kinds whose update is measured too, and the smallest reference update that counts as one.
_UPDATED = {"param": 1e-6, "m": 1e-6, "v": 1e-12, "target": 1e-6}
#: Named outputs that a file holds.
_OUTPUTS = ("td", "h1", "h2", "wire", "q", "theta", "q_target", "q_next", "best")
#: What a skipped step must leave alone, bit for bit.
_KEPT = ("param.", "m.", "v.", "target.", "sn_v_", "bound.")
#: Results that do not depend on the actions chosen at s'.
_BEFORE_CHOICE = ("h1", "h2", "wire", "q", "theta", "q_target", "best")
#: Number of arrays whose bits a decomposed step changed.
_CHANGED = "decomposition[changed arrays]"

NOT_IN_STEP = "the file has it, the step of the file's configuration does not"
NOT_IN_FILE = "the step has it, the file does not"


# -- outcome -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        name: the array's name in the file, or what is judged of several arrays together: `step{n}.out.grad[median]`,
            `step{n}.out.grad[{group}]`, `step{n}.out.decomposition[changed arrays]`.
        error: error of the values; inf where a NaN or an infinity stands in the wrong place.
        limit: largest error allowed; None: reported, not judged.
        update: error of what the step changed; None for arrays that are not state.
        update_limit: largest error of the update allowed; None: reported, not judged.
    """

    name: str
    error: float
    limit: float | None
    update: float | None = None
    update_limit: float | None = None

    @property
    def judged(self) -> bool:
        """Whether there is a limit to exceed."""
        return self.limit is not None or (self.update is not None and self.update_limit is not None)

    @property
    def failed(self) -> bool:
        """Whether a limit is exceeded."""
        return self.ratio > 1.0

    @property
    def ratio(self) -> float:
        """The larger of error and update error in units of its limit; 0 if nothing is judged."""
        return max(_ratio(self.error, self.limit), _ratio(self.update, self.update_limit))

    @property
    def binding(self) -> tuple[str, float, float | None]:
        """Measure nearest to its limit: its name ("error" or "update"), value and limit."""
        if self.update is not None and _ratio(self.update, self.update_limit) > _ratio(self.error, self.limit):
            return "update", self.update, self.update_limit
        return "error", self.error, self.limit


def _ratio(value: float | None, limit: float | None) -> float:
    if not value or limit is None:
        return 0.0
    return value / limit if limit else float("inf")


@dataclass(frozen=True)
class Outcome:
    """What one file said about a device.

    Attributes:
        path: the file.
        device: label of the device.
        precision: the precision it ran in.
        results: every array compared, in the order of the steps.
        summaries: what is judged of several arrays together: in reduced precision the median of the gradients' errors
            and every group's gradient as one; how many arrays came out with other bits when the step was decomposed.
        missing: reason by name for every array that was not compared.
    """

    path: Path
    device: str
    precision: str
    results: tuple[Result, ...]
    summaries: tuple[Result, ...]
    missing: dict[str, str]

    @property
    def checked(self) -> list[str]:
        """Names of the arrays compared."""
        return [r.name for r in self.results]

    @property
    def unjudged(self) -> list[str]:
        """Names of the arrays compared whose error has no limit here."""
        return [r.name for r in self.results if not r.judged]

    @property
    def failed(self) -> list[str]:
        """Names of what exceeds a limit."""
        return [r.name for r in (*self.results, *self.summaries) if r.failed]

    @property
    def worst(self) -> Result | None:
        """What is nearest to (or furthest beyond) its limit; None if nothing was compared."""
        return max((*self.results, *self.summaries), key=lambda r: r.ratio, default=None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: lists of names, and `worst` {name, error, measure, limit}."""
        return {
            "file": str(self.path),
            "checked": self.checked,
            "unjudged": self.unjudged,
            "failed": self.failed,
            "missing": list(self.missing),
            "worst": worst_as_dict(self.worst),
        }


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


# -- comparing ---------------------------------------------------------------------------------------------------


def verify(path: str | Path, *, device: str | Device = "auto", precision: str = "fp32") -> Outcome:
    """Run the steps of a golden file on a device and compare every result.

    Raises:
        GoldenFileError: the file is missing, unreadable, not a golden file, or does not fit its own configuration.
        ConfigError: its configuration cannot be built.
        ValueError: no such precision.
        DeviceNotFound: no such device.
    """
    if precision not in LIMITS:
        raise ValueError(f"precision must be one of {', '.join(LIMITS)}, got {precision!r}")
    file = GoldenFile(path)
    with (
        _opened(device) as opened,
        Engine(file.config, device=opened, precision=precision, feed=("tau", "tau_target")) as engine,
    ):
        groups = {group.name: [p.name for p in group.parameters] for group in engine.builder.groups}
        comparison = Comparison(file, LIMITS[precision], groups)
        before, *steps = _steps(engine, file)
        for step, computed in enumerate(_with_decomposition(engine, file, steps)):
            comparison.add(step, before, computed)
            before = computed
        return Outcome(
            file.path,
            opened.label,
            precision,
            tuple(comparison.results),
            tuple(comparison.summaries),
            comparison.missing,
        )


class Comparison:
    """Compares the steps of a file one after the other; the attributes are those of an Outcome.

    Args:
        file: the reference.
        limits: of the precision.
        groups: names of the parameters of every group.
    """

    def __init__(self, file: GoldenFile, limits: Limits, groups: Mapping[str, Sequence[str]]) -> None:
        self.results: list[Result] = []
        self.summaries: list[Result] = []
        self.missing: dict[str, str] = {}
        self._file, self._limits, self._groups = file, limits, groups
        self._reduced = limits.update is None
        self._same_choice = True  # a reduced precision may choose another action at s': nothing after it is judged

    def add(self, step: int, before: Mapping[str, Array], computed: Mapping[str, Array]) -> None:
        """Compare a step.

        Args:
            step: its number.
            before: at least the state that the device started it from, by the names of the file.
            computed: everything it computed and left behind, by the names of the file.
        """
        reference = self._file.results(step)
        where = f"step{step}.out."
        for name in dict.fromkeys([*reference, *(n for n in computed if n != _CHANGED)]):
            if name not in computed:
                self.missing[where + name] = NOT_IN_STEP
            elif name not in reference:
                self.missing[where + name] = NOT_IN_FILE
        names = [name for name in reference if name in computed]

        earlier_steps_judged = self._same_choice
        if self._reduced and "best" in names:
            self._same_choice &= np.array_equal(computed["best"], reference["best"])
        skipped = bool(reference.get("skipped", 0.0))
        for name in names:
            judged = earlier_steps_judged if name in _BEFORE_CHOICE else self._same_choice
            update = limit = None
            if skipped and name.startswith(_KEPT):
                update = 0.0 if computed[name].tobytes() == before[name].tobytes() else float("inf")
                limit = 0.0
            elif (kind := name.split(".", 1)[0]) in _UPDATED and name in before:
                previous = self._file[f"step{step - 1}.out.{name}" if step else f"in.{name}"]
                update = update_error(before[name], computed[name], previous, reference[name], _UPDATED[kind])
                limit = self._limits.update
            self.results.append(
                Result(
                    where + name,
                    self._error(name, computed, reference),
                    self._limits.of(name) if judged else None,
                    update,
                    limit if judged else None,
                )
            )
        if _CHANGED in computed:
            self.summaries.append(Result(where + _CHANGED, float(computed[_CHANGED]), 0.0))
        if self._same_choice and self._limits.median is not None:
            self._summarise(where, computed, reference)

    def _error(self, name: str, computed: Mapping[str, Array], reference: Mapping[str, Array]) -> float:
        """Error of one array. A choice of a reduced precision counts only where the reference has no close call."""
        x, ref = computed[name], reference[name]
        if name != "best" or not self._reduced or "q_next" not in reference or x.shape != ref.shape:
            return self._limits.measure(x, ref)
        return float(np.sum((x != ref) & clear_choices(reference["q_next"], self._file.config.branches)))

    def _summarise(self, where: str, computed: Mapping[str, Array], reference: Mapping[str, Array]) -> None:
        """Median of the errors of all gradient arrays, and the error of every group's arrays as one."""
        errors: list[float] = []
        for group, parameters in self._groups.items():
            names = [n for n in (f"grad.{p}" for p in parameters) if n in reference and n in computed]
            errors += [self._limits.measure(computed[n], reference[n]) for n in names]
            if names:
                both = [np.concatenate([side[n].ravel() for n in names]) for side in (computed, reference)]
                error = self._limits.measure(*both)
                self.summaries.append(Result(f"{where}grad[{group}]", error, self._limits.group))
        if errors:
            self.summaries.append(Result(f"{where}grad[median]", float(np.median(errors)), self._limits.median))


# -- running -----------------------------------------------------------------------------------------------------


def _start(engine: Engine, file: GoldenFile) -> None:
    """Parameters, moments, targets, step counter, signals, bounds and gate as the file starts."""
    state = engine.state()
    for name in _state_names(engine):
        state[name] = file.like(f"in.{name}", state[name])
    for name, slot in _slots(engine).items():
        state["signals.device"][slot] = file.like(f"in.{name}", np.empty((), np.float32))
    state["counters"][COUNTERS.index("step")] = int(file["in.step"])
    engine.load_state(state)
    values = file.scalars("in.signal.")
    if unknown := sorted(set(values) - set(engine.signals.map.host_names)):
        raise GoldenFileError(f"{file.path}: signals {unknown} are unknown to this version")
    groups = {group.name for group in engine.builder.groups}
    known = set(engine.signals.map.host_names) - OPTIONAL
    needed = {n for n in known if "." not in n or n.split(".")[1] in groups}
    if lacking := sorted(needed - set(values)):
        raise GoldenFileError(f"{file.path}: array 'in.signal.{lacking[0]}' is missing")
    engine.signals.update(values)


def _steps(engine: Engine, file: GoldenFile, *, decompose: bool = False) -> list[dict[str, Array]]:
    """Run the file from its start: the state there, then everything that each step computed and left behind."""
    _start(engine, file)
    found = [_state(engine)]
    for step in range(file.steps):
        found.append({**_run(engine, file, step, decompose), **_state(engine)})
    return found


def _with_decomposition(engine: Engine, file: GoldenFile, steps: list[dict[str, Array]]) -> list[dict[str, Array]]:
    """The steps with the decomposition of a second, decomposed run, and how many arrays that run changed: none may."""
    if not file.config.branches:
        return steps
    found = []
    for plain, decomposed in zip(steps, _steps(engine, file, decompose=True)[1:], strict=True):
        changed = sum(n not in decomposed or decomposed[n].tobytes() != a.tobytes() for n, a in plain.items())
        found.append({**decomposed, **plain, _CHANGED: np.asarray(changed)})
    return found


def _run(engine: Engine, file: GoldenFile, step: int, decompose: bool) -> dict[str, Array]:
    """Feed and run one step; what it computed, its state apart, under the names and in the shapes of the file."""
    builder, config = engine.builder, file.config
    earlier = engine.telemetry()
    engine.write(**{n: file.like(f"step{step}.in.{n}", np.empty(t.shape, t.dtype)) for n, t in builder.inputs.items()})
    engine.step(decompose=decompose)
    engine.synchronize()
    report = engine.telemetry()
    assert report is not None, "a finished step has a report"
    skipped = report.skipped - (earlier.skipped if earlier else 0)
    computed: dict[str, Array] = {n: engine.output(n) for n in _OUTPUTS if n in builder.outputs}
    for name, shape in (("wire", (-1,)), ("theta", (config.batch, -1, sum(config.branches)))):
        if name in computed:
            computed[name] = computed[name].reshape(shape)
    computed.update((f"grad.{p.name}", engine.plan.buffer(p.grad).read()) for p in builder.groups.parameters)
    reported = ("L_",) if skipped else ("L_", "grad_norm.", "sigma_")
    computed.update((n, np.asarray(v)) for n, v in report.items() if n.startswith(reported))
    computed["step"] = np.asarray(report.step)
    computed["skipped"] = np.asarray(skipped)
    if report.decomposition is not None:
        computed["decomposition"] = report.decomposition
    return computed


def _state(engine: Engine) -> dict[str, Array]:
    """What a step changes, under the names of the file."""
    state = engine.state()
    slots = {name: state["signals.device"][slot] for name, slot in _slots(engine).items()}
    return {**{name: state[name] for name in _state_names(engine)}, **slots}


def _state_names(engine: Engine) -> list[str]:
    parameters = engine.builder.groups.parameters
    return [*(f"{kind}.{p.name}" for p in parameters for kind in ("param", "m", "v")), *engine.builder.persistent]


def _slots(engine: Engine) -> dict[str, int]:
    """Slots of the device-owned signals that a file of the engine's configuration holds, by their name in it."""
    config, slots = engine.config, engine.signals.map.slots
    assert config is not None, "the engine runs a StepConfig"
    bounds = [slots[f"bound.{family}.{g.name}"].index for g in engine.builder.groups for family in BOUND_FAMILIES]
    found = {f"bound.{slot}": slot for slot in bounds}
    for name, slot in slots.items():
        if slot.device_owned and not name.startswith("bound."):
            component = config.iqn_quantiles if name.startswith("iqn_") else config.aux_h
            if component:
                found[f"state.{name}"] = slot.index
    return found


@contextmanager
def _opened(device: str | Device) -> Iterator[Device]:
    """A device given as text, closed again afterwards, or one that is open and stays so."""
    if isinstance(device, Device):
        yield device
    else:
        with Device.open(device) as opened:
            yield opened
