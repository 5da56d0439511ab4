"""What a training session tells while it runs and when it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fxengine.health import Health
from fxengine.telemetry import Report


@dataclass(frozen=True)
class Validation:
    """Losses and accuracies on rows that were not trained on.

    Attributes:
        step: steps trained before.
        loss: the quantity that training lowers: w_nb·L_nb + w_regime·L_regime, and for the full model the C51, CQL and
            distillation losses with their weights besides.
        next_bar_loss: cross-entropy over the rows with a next-bar label.
        regime_loss: cross-entropy over the rows with a regime label.
        next_bar_accuracy: share of right directions.
        regime_accuracy: share of right regimes.
        rows: number of rows.
        c51_loss: L_c51 of the full model; None for the auxiliary nets alone.
    """

    step: int
    loss: float
    next_bar_loss: float
    regime_loss: float
    next_bar_accuracy: float
    regime_accuracy: float
    rows: int
    c51_loss: float | None = None


@dataclass(frozen=True)
class Progress:
    """What a watcher of `TrainingSession.run` is told.

    Attributes:
        step: steps that have finished.
        steps: steps of the run.
        steps_per_s: speed of training so far, validations not counted.
        reports: telemetry of the steps finished since the last call, in order, none left out.
        losses: the total loss of each of them.
        health: health of the full model at those of them that were decomposed.
        validation: set when a validation was just made.
    """

    step: int
    steps: int
    steps_per_s: float
    reports: Sequence[Report] = ()
    losses: Sequence[float] = ()
    health: Sequence[Health] = ()
    validation: Validation | None = None


@dataclass(frozen=True)
class FullResult:
    """What a run of the full model says beyond the auxiliary nets.

    Attributes:
        loss_c51_first: mean L_c51 over the first 5 % of the steps; NaN without a step.
        loss_c51_last: the same over the last 5 %.
        gate_open_share: share of the steps with an open gate; NaN without a step.
        gate_changes: how often the gate opened or closed.
        iqn_readiness: after the last step.
        iqn_share_first: IQN's share of the trunk gradient at the first health report; NaN if there is none.
        iqn_share_last: the same at the last one.
    """

    loss_c51_first: float
    loss_c51_last: float
    gate_open_share: float
    gate_changes: int
    iqn_readiness: float
    iqn_share_first: float
    iqn_share_last: float


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
        full: further results of the full model; None for the auxiliary nets alone.
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
    full: FullResult | None = None

    @property
    def next_bar_error(self) -> float:
        """Standard error of the next-bar accuracy, as of that many independent rows."""
        p = self.validation.next_bar_accuracy
        return math.sqrt(max(p * (1.0 - p), 0.0) / max(1, self.next_bar_rows))
