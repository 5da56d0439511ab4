"""Training on market bars: the loop, validation, results, checkpoint.

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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine import telemetry
from fxengine.data import Dataset
from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.health import DETAILS, Health
from fxengine.models import make_model
from fxengine.results import FullResult, Progress, TrainResult, Validation
from fxengine.settings import TrainSettings

__all__ = ["FullResult", "Progress", "TrainResult", "TrainSettings", "TrainingSession", "Validation"]

#: Share of the steps over which the learning rate rises from 0, and most steps that it may take.
_WARMUP, _WARMUP_STEPS = 0.05, 100
#: Steps, or seconds if they pass sooner, between two reads of the telemetry.
_READ_STEPS, _READ_SECONDS = telemetry.RING_ROWS // 2, 0.1
#: Share of the steps that the first and the last loss are means over.
_LOSS_SHARE = 0.05


class TrainingSession:
    """An engine that trains the auxiliary nets, or the whole specified step, on a dataset.

    The training part lies on the device; each captured step gathers its own batch, and draws its own quantile
    fractions. The learning rate is a signal that changes with every step: nothing is captured again.

    Args:
        dataset: training and validation part.
        settings: how to train.
        device: `auto`, `cuda:N`, `sim` or an open Device, which stays open.

    Attributes:
        engine: the engine; a host app may set its signals between and during runs.
        model: what is trained: its step, its data, its losses.
        steps: steps that `run` makes.
        curves: per finished step `step`, `lr`, `loss` and every telemetry value, as arrays that grow; bounds and the
            gradient decomposition are in `health` instead.
        validations: every validation so far, in order.
        health: every health report of the full model so far, in order.
    """

    def __init__(
        self, dataset: Dataset, settings: TrainSettings | None = None, *, device: str | Device = "auto"
    ) -> None:
        self.dataset = dataset
        self.settings = settings or TrainSettings()
        self.validations: list[Validation] = []
        self.health: list[Health] = []
        self.curves: dict[str, array[float]] = {}
        opened = device if isinstance(device, Device) else Device.open(device)
        self._owned = None if isinstance(device, Device) else opened
        try:
            self.model = make_model(dataset, self.settings, opened.kind)
            self.engine = Engine(
                self.model.config,
                device=opened,
                seed=self.settings.seed,
                signals={**self.settings.signals, "lr": self.settings.lr},
                data=self.model.data,
            )
        except BaseException:
            if self._owned is not None:
                self._owned.close()
            raise
        self.steps = self.settings.step_count(opened.kind)
        self._health_every = self.settings.health_interval(self.steps)
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
            self.engine.signals.update(dict.fromkeys(self.model.rates, rate))
            self.engine.step(decompose=self._health_is_due())
            self._submitted += 1
            if self._read_is_due():
                self._read(watch)
            if self._submitted % every == 0 and self._submitted < self.steps:
                self._finish_queue(watch)
                self._validated(self.validate(self.model.interim), watch)
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
        model = self.model
        chosen = np.arange(len(model.next_bar))
        if rows is not None and rows < len(chosen):
            chosen = np.linspace(0, len(chosen) - 1, rows).astype(np.int64)
        totals: dict[str, float] = {}
        counts: dict[str, int] = {}
        for start in range(0, len(chosen), model.chunk):
            at = chosen[start : start + model.chunk]
            values = self.engine.evaluate(model.held_out(at))
            valid = {
                "nb": int(np.count_nonzero(model.next_bar[at] >= 0)),
                "regime": int(np.count_nonzero(model.regime[at] >= 0)),
            }
            for name in (*model.losses.values(), "accuracy_nb", "accuracy_regime"):
                count = valid.get(name.split("_", 1)[1], len(at))  # the heads' losses are means over their valid rows
                counts[name] = counts.get(name, 0) + count
                totals[name] = totals.get(name, 0.0) + count * values[name]
        mean = {name: total / max(1, counts[name]) for name, total in totals.items()}
        return Validation(
            self._submitted,
            self._loss(mean),
            mean["L_nb"],
            mean["L_regime"],
            mean["accuracy_nb"],
            mean["accuracy_regime"],
            len(chosen),
            mean.get("L_c51"),
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint. Its extra arrays tell how to make states and labels of new bars.

        They are `normalizer.*` (`Normalizer.from_dict`), `regime_edges`, `lookahead` and `volatility_window`; of the
        full model also `order_flow.*` (a normaliser too) and `reward_scale`, the basis points of a reward of 1.
        """
        extra: dict[str, NDArray[Any]] = {
            f"normalizer.{name}": values for name, values in self.dataset.normalizer.to_dict().items()
        }
        extra["regime_edges"] = self.dataset.edges
        extra["lookahead"] = np.array([self.dataset.lookahead])
        extra["volatility_window"] = np.array([self.dataset.volatility_window])
        transitions = self.model.transitions
        if transitions is not None:
            extra.update((f"order_flow.{name}", values) for name, values in transitions.order_flow.to_dict().items())
            extra["reward_scale"] = np.array([transitions.scale])
        self.engine.save(path, extra)

    def close(self) -> None:
        """Free the engine, and the device unless it was given open. Idempotent."""
        self.engine.close()
        if self._owned is not None:
            self._owned.close()

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

    def _health_is_due(self) -> bool:
        """Whether the next step reports its health: every so many steps, and the first and the last one."""
        number = self._submitted + 1
        return self.model.is_full and (number % self._health_every == 0 or number in (1, self.steps))

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
                if not name.startswith(DETAILS):
                    self.curves.setdefault(name, array("d")).append(value)
        health = [Health.of(r) for r in reports if self.model.is_full and r.decomposition is not None]
        self.health += health
        if watch is not None:
            watch(Progress(self._seen, self.steps, self._speed(running=True), reports, losses, health))

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
        return sum(signals[weight] * values[loss] for weight, loss in self.model.losses.items())

    def _result(self) -> TrainResult:
        first, last = self._ends("loss")
        baseline = self.dataset.majority_baseline()
        return TrainResult(
            steps=self._seen,
            interrupted=self._seen < self.steps,
            skipped=self._skipped,
            loss_first=first,
            loss_last=last,
            validation=self.validations[-1],
            next_bar_baseline=baseline.next_bar,
            regime_baseline=baseline.regime,
            next_bar_rows=int(np.count_nonzero(self.model.next_bar >= 0)),
            steps_per_s=self._speed(),
            full=self._full_result() if self.model.is_full else None,
        )

    def _full_result(self) -> FullResult:
        first, last = self._ends("L_c51")
        gate = np.asarray(self.curves.get("gate_open", ()), np.float64)
        readiness: Sequence[float] = self.curves.get("iqn_readiness", array("d"))
        shares = [h.shares["iqn"] for h in self.health]
        return FullResult(
            loss_c51_first=first,
            loss_c51_last=last,
            gate_open_share=float(gate.mean()) if len(gate) else math.nan,
            gate_changes=int(np.count_nonzero(np.diff(gate, prepend=0.0))),  # closed before the first step
            iqn_readiness=readiness[-1] if readiness else 0.0,
            iqn_share_first=shares[0] if shares else math.nan,
            iqn_share_last=shares[-1] if shares else math.nan,
        )

    def _ends(self, name: str) -> tuple[float, float]:
        """Mean of a curve over the first and over the last 5 % of the steps."""
        values = np.asarray(self.curves.get(name, ()), np.float64)
        share = max(1, round(_LOSS_SHARE * len(values)))
        return (float(values[:share].mean()), float(values[-share:].mean())) if len(values) else (math.nan, math.nan)
