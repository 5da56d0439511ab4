"""Training the auxiliary network on market bars: the loop, validation, results, checkpoint.

    from fxengine.data import demo_bars, make_dataset
    from fxengine.session import TrainSettings, TrainingSession

    with TrainingSession(make_dataset(demo_bars()), TrainSettings(steps=500), device="auto") as session:
        result = session.run()
        session.save("checkpoint.safetensors")

The loop enqueues steps and reads what has been reported meanwhile; it never waits for a step to finish, except where
the telemetry ring is full: then it lets half of the queue run off, so that no report is lost and the device stays busy.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine import telemetry
from fxengine.config import StepConfig
from fxengine.data import Dataset
from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.signals import SignalMap
from fxengine.telemetry import Report

#: Training steps by kind of device where none are asked for: simulated, half a minute on two cores. On the demo bars
#: more than the 1,000 of a GPU only learn the training part by heart.
DEFAULT_STEPS = {"sim": 600, "cuda": 1000}
#: Share of the steps over which the learning rate rises from 0, and most steps that it may take.
_WARMUP, _WARMUP_STEPS = 0.05, 100
#: Steps, or seconds if they pass sooner, between two reads of the telemetry.
_READ_STEPS, _READ_SECONDS = telemetry.RING_ROWS // 2, 0.1
#: Signals of the schedule: those of the groups that are trained, because setting every group's takes ten times as long.
_RATES = ("lr.aux_trunk", "lr.aux_heads")
#: Share of the steps that the first and the last loss are means over.
_LOSS_SHARE = 0.05
#: Validation rows used while training runs (evenly spaced; the final validation uses all), and rows evaluated at once.
_INTERIM_ROWS, _CHUNK_ROWS = 4096, 8192


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        steps: training steps; 0: 600 on the simulated device (half a minute on two cores), 1,000 on a GPU.
        batch: rows per step, drawn at random from the training part.
        seed: seed of the initial parameters and of the batches.
        lr: highest learning rate; it rises to it over the first 5 % of the steps, then falls along a cosine.
        lr_end: share of the highest learning rate that is left at the last step.
        validate_every: steps between validations; 0: ten over the run.
        signals: first values of further host-owned signals by name (clip, w_nb, weight_decay, ...).
    """

    steps: int = 0
    batch: int = 256
    seed: int = 0
    lr: float = 2e-3
    lr_end: float = 0.05
    validate_every: int = 0
    signals: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, lowest in (("steps", 0), ("batch", 1), ("seed", 0), ("validate_every", 0)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {lowest}")
        if not (math.isfinite(self.lr) and self.lr > 0.0):
            raise ValueError(f"lr is {self.lr}, expected a positive number")
        if not 0.0 <= self.lr_end <= 1.0:
            raise ValueError(f"lr_end is {self.lr_end}, expected a share between 0 and 1")
        slots = SignalMap()
        for name in self.signals:
            try:
                owned = [slot.device_owned for slot in slots.expand(name)]
            except KeyError as error:
                raise ValueError(error.args[0]) from None
            if any(owned):
                raise ValueError(f"signal '{name}' is owned by the device and cannot be set")
            if name == "lr" or name.startswith("lr."):
                raise ValueError(f"signal '{name}' follows the schedule of the learning rate; set lr and lr_end")


@dataclass(frozen=True)
class Validation:
    """Losses and accuracies on rows that were not trained on.

    Attributes:
        step: steps trained before.
        loss: w_nb·L_nb + w_regime·L_regime, the quantity that training lowers.
        next_bar_loss: cross-entropy over the rows with a next-bar label.
        regime_loss: cross-entropy over the rows with a regime label.
        next_bar_accuracy: share of right directions.
        regime_accuracy: share of right regimes.
        rows: number of rows.
    """

    step: int
    loss: float
    next_bar_loss: float
    regime_loss: float
    next_bar_accuracy: float
    regime_accuracy: float
    rows: int


@dataclass(frozen=True)
class Progress:
    """What a watcher of `TrainingSession.run` is told.

    Attributes:
        step: steps that have finished.
        steps: steps of the run.
        steps_per_s: speed of training so far, validations not counted.
        reports: telemetry of the steps finished since the last call, in order, none left out.
        losses: the total loss of each of them.
        validation: set when a validation was just made.
    """

    step: int
    steps: int
    steps_per_s: float
    reports: Sequence[Report] = ()
    losses: Sequence[float] = ()
    validation: Validation | None = None


@dataclass(frozen=True)
class TrainResult:
    """Outcome of a run.

    Attributes:
        steps: steps trained.
        interrupted: whether `stop` ended the run early.
        skipped: steps whose update was skipped because a gradient was not finite.
        loss_first: mean total loss over the first 5 % of the steps; NaN without a step.
        loss_last: the same over the last 5 %.
        validation: the final validation, over the whole validation part.
        next_bar_baseline: accuracy of always naming the training part's most frequent direction.
        regime_baseline: the same for the regime.
        next_bar_rows: validation rows with a next-bar label.
        steps_per_s: speed of training, validations not counted; 0 without a step.
    """

    steps: int
    interrupted: bool
    skipped: int
    loss_first: float
    loss_last: float
    validation: Validation
    next_bar_baseline: float
    regime_baseline: float
    next_bar_rows: int
    steps_per_s: float

    @property
    def next_bar_error(self) -> float:
        """Standard error of the next-bar accuracy, as of that many independent rows."""
        p = self.validation.next_bar_accuracy
        return math.sqrt(max(p * (1.0 - p), 0.0) / max(1, self.next_bar_rows))


class TrainingSession:
    """An engine that trains the auxiliary network on a dataset.

    The training part lies on the device; each captured step gathers its own batch. The learning rate is a signal that
    changes with every step: nothing is captured again.

    Args:
        dataset: training and validation part.
        settings: how to train.
        device: `auto`, `cuda:N`, `sim` or an open Device, which stays open.

    Attributes:
        engine: the engine; a host app may set its signals between and during runs.
        steps: steps that `run` makes.
        curves: per finished step `step`, `lr`, `loss` and every telemetry value, as arrays that grow.
        validations: every validation so far, in order.
    """

    def __init__(
        self, dataset: Dataset, settings: TrainSettings | None = None, *, device: str | Device = "auto"
    ) -> None:
        self.dataset = dataset
        self.settings = settings or TrainSettings()
        self.validations: list[Validation] = []
        self.curves: dict[str, array[float]] = {}
        config = StepConfig.aux_only(batch=self.settings.batch, state=dataset.state_size, regimes=dataset.regimes)
        self.engine = Engine(
            config,
            device=device,
            seed=self.settings.seed,
            signals={**self.settings.signals, "lr": self.settings.lr},
            data=_inputs(dataset.train.states, dataset.train.next_bar, dataset.train.regime),
        )
        self.steps = self.settings.steps or DEFAULT_STEPS[self.engine.device.kind]
        self._stop = False
        self._submitted = 0
        self._seen = 0
        self._skipped = 0
        self._read_at = (0, 0.0)
        self._trained_s = 0.0
        self._resumed_at = 0.0

    def learning_rate(self, step: int) -> float:
        """Learning rate of step number `step` of a run, counted from 0."""
        warmup = min(max(1, round(_WARMUP * self.steps)), _WARMUP_STEPS)
        rise = min(1.0, (step + 1) / warmup)
        fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / max(1, self.steps - 1))))
        end = self.settings.lr_end
        return self.settings.lr * rise * (end + (1.0 - end) * fall)

    def run(self, watch: Callable[[Progress], None] | None = None) -> TrainResult:
        """Train the remaining steps, validate, and say how it went.

        Args:
            watch: called on this thread with the reports read since the last call, and after each validation.

        Raises:
            CudaError: the device failed.
        """
        every = self.settings.validate_every or max(1, self.steps // 10)
        self._resumed_at = time.perf_counter()
        while self._submitted < self.steps and not self._stop:
            self._make_room(watch)
            rate = self.learning_rate(self._submitted)
            self.engine.signals.update(dict.fromkeys(_RATES, rate))
            self.engine.step()
            self._submitted += 1
            if self._read_is_due():
                self._read(watch)
            if self._submitted % every == 0 and self._submitted < self.steps:
                self._finish_queue(watch)
                self._validated(self.validate(_INTERIM_ROWS), watch)
                self._resumed_at = time.perf_counter()
        self._finish_queue(watch)
        self._validated(self.validate(), watch)
        self._stop = False
        return self._result()

    def stop(self) -> None:
        """End `run` after the step it is at; it still validates and returns its result. Callable from anywhere."""
        self._stop = True

    def validate(self, rows: int | None = None) -> Validation:
        """Evaluate the present parameters on the validation part, or on so many evenly spaced rows of it."""
        part = self.dataset.validation
        chosen = np.arange(len(part))
        if rows is not None and rows < len(part):
            chosen = np.linspace(0, len(part) - 1, rows).astype(np.int64)
        totals = {"L_nb": 0.0, "accuracy_nb": 0.0, "L_regime": 0.0, "accuracy_regime": 0.0}
        counts = {"nb": 0, "regime": 0}
        for start in range(0, len(chosen), _CHUNK_ROWS):
            at = chosen[start : start + _CHUNK_ROWS]
            values = self.engine.evaluate(_inputs(part.states[at], part.next_bar[at], part.regime[at]))
            valid = {
                "nb": int(np.count_nonzero(part.next_bar[at] >= 0)),
                "regime": int(np.count_nonzero(part.regime[at] >= 0)),
            }
            for head, count in valid.items():
                counts[head] += count
                for name in (f"L_{head}", f"accuracy_{head}"):
                    totals[name] += count * values[name]
        mean = {name: total / max(1, counts[name.split("_", 1)[1]]) for name, total in totals.items()}
        return Validation(
            self._submitted,
            self._loss(mean),
            mean["L_nb"],
            mean["L_regime"],
            mean["accuracy_nb"],
            mean["accuracy_regime"],
            len(chosen),
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint. Its extra arrays tell how to make states and labels of new bars.

        They are `normalizer.*` (`Normalizer.from_dict`), `regime_edges`, `lookahead` and `volatility_window`.
        """
        extra: dict[str, NDArray[Any]] = {
            f"normalizer.{name}": values for name, values in self.dataset.normalizer.to_dict().items()
        }
        extra["regime_edges"] = self.dataset.edges
        extra["lookahead"] = np.array([self.dataset.lookahead])
        extra["volatility_window"] = np.array([self.dataset.volatility_window])
        self.engine.save(path, extra)

    def close(self) -> None:
        """Free the engine. Idempotent."""
        self.engine.close()

    def __enter__(self) -> TrainingSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the loop's parts ----------------------------------------------------------------------------------------

    def _make_room(self, watch: Callable[[Progress], None] | None) -> None:
        """Before a step would overwrite a report not yet read: read until half of the ring is free."""
        if self._submitted - self._seen < telemetry.RING_ROWS:
            return
        self._read(watch)
        while self._submitted - self._seen > telemetry.RING_ROWS // 2:
            time.sleep(1e-4)
            self._read(watch)

    def _read_is_due(self) -> bool:
        steps, seconds = self._read_at
        return self._submitted - steps >= _READ_STEPS or time.perf_counter() - seconds >= _READ_SECONDS

    def _read(self, watch: Callable[[Progress], None] | None) -> None:
        self._read_at = (self._submitted, time.perf_counter())
        reports = self.engine.telemetry_since(self._seen)
        if not reports:
            return
        self._seen = reports[-1].replay
        self._skipped = reports[-1].skipped
        losses = [self._loss(r) for r in reports]
        for report, loss in zip(reports, losses, strict=True):
            row = {"step": report.replay, "lr": self.learning_rate(report.replay - 1), "loss": loss, **report}
            for name, value in row.items():
                self.curves.setdefault(name, array("d")).append(value)
        if watch is not None:
            watch(Progress(self._seen, self.steps, self._speed(running=True), reports, losses))

    def _finish_queue(self, watch: Callable[[Progress], None] | None) -> None:
        """Let the queue run off, read what it reported, and stop the clock."""
        self.engine.synchronize()
        self._trained_s += time.perf_counter() - self._resumed_at
        self._resumed_at = time.perf_counter()
        self._read(watch)

    def _validated(self, validation: Validation, watch: Callable[[Progress], None] | None) -> None:
        self.validations.append(validation)
        if watch is not None:
            watch(Progress(self._seen, self.steps, self._speed(), validation=validation))

    def _speed(self, *, running: bool = False) -> float:
        seconds = self._trained_s + (time.perf_counter() - self._resumed_at if running else 0.0)
        return self._seen / seconds if seconds > 0.0 else 0.0

    def _loss(self, values: Mapping[str, float]) -> float:
        signals = self.engine.signals
        return signals["w_nb"] * values["L_nb"] + signals["w_regime"] * values["L_regime"]

    def _result(self) -> TrainResult:
        losses = np.asarray(self.curves.get("loss", ()), np.float64)
        share = max(1, round(_LOSS_SHARE * len(losses)))
        baseline = self.dataset.majority_baseline()
        return TrainResult(
            steps=self._seen,
            interrupted=self._seen < self.steps,
            skipped=self._skipped,
            loss_first=float(losses[:share].mean()) if len(losses) else math.nan,
            loss_last=float(losses[-share:].mean()) if len(losses) else math.nan,
            validation=self.validations[-1],
            next_bar_baseline=baseline.next_bar,
            regime_baseline=baseline.regime,
            next_bar_rows=baseline.next_bar_rows,
            steps_per_s=self._speed(),
        )


def _inputs(
    states: NDArray[np.float32], next_bar: NDArray[np.int32], regime: NDArray[np.int32]
) -> dict[str, NDArray[Any]]:
    return {"state": states, "nb_label": next_bar, "regime_label": regime}
