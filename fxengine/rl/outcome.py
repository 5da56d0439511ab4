"""What a run in environments tells while it goes on and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fxengine.graphs import Census

#: Episodes whose mean return is told.
RECENT = 20


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Evaluation:
    """Greedy episodes after so many environment steps of training.

    Attributes:
        step: environment steps taken before.
        returns: sum of rewards of each episode.
    """

    step: int
    returns: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean return."""
        return mean(self.returns)

    @property
    def std(self) -> float:
        """Standard deviation of the returns, of the sample itself (divided by their number)."""
        return float(np.std(self.returns)) if self.returns else math.nan


@dataclass(frozen=True)
class Progress:
    """What a callback is told.

    Attributes:
        step: environment steps taken, of all environments together.
        total_steps: those of the whole run.
        episodes: episodes finished.
        recent_return: mean return of the last 20 of them; NaN before the first.
        loss: mean loss of the newest updates, at most 64; NaN without any since the last call.
        epsilon: probability of a random action.
        steps_per_s: environment steps per second of this run, evaluations not counted.
        evaluation: set when one was just made.
    """

    step: int
    total_steps: int
    episodes: int
    recent_return: float
    loss: float
    epsilon: float
    steps_per_s: float
    evaluation: Evaluation | None = None

    def sentence(self) -> str:
        """The numbers in a line."""
        return (
            f"return {self.recent_return:.1f}  loss {self.loss:.4f}  epsilon {self.epsilon:.2f}  "
            f"{self.steps_per_s:,.0f} steps/s"
        )


@dataclass(frozen=True)
class TrainResult:
    """What a run came to. Of a resumed run the histories cover the whole of it, the speeds its last part.

    Attributes:
        env: name of the environment.
        algorithm: name of the algorithm, or of the function that made the agent.
        steps: environment steps taken, of all environments together.
        updates: training steps launched.
        skipped: those of them that changed nothing, because a gradient was not finite.
        returns: sum of rewards of every finished episode, in order, actions at random included.
        lengths: number of steps of each of them.
        ends: environment steps taken when each of them ended.
        evaluations: greedy episodes, in order.
        losses: (environment steps, mean loss of the updates shortly before), in order.
        seconds: time of training, evaluations and checkpoints not counted.
        steps_per_s: environment steps per second.
        updates_per_s: training steps per second.
        interrupted: whether it ended early.
        checkpoint: file that `train(..., resume=...)` and `evaluate` read; None if the run kept none.
        exact_resume: whether that file goes on in the middle of the episodes; else they start anew.
        params: trained parameters by name.
        census: of the captured training step.
        device: such as `cuda:0` or `sim`.
        device_name: the device in words.
    """

    env: str
    algorithm: str
    steps: int
    updates: int
    skipped: int
    returns: Sequence[float]
    lengths: Sequence[int]
    ends: Sequence[int]
    evaluations: Sequence[Evaluation]
    losses: Sequence[tuple[int, float]]
    seconds: float
    steps_per_s: float
    updates_per_s: float
    interrupted: bool
    checkpoint: Path | None
    exact_resume: bool
    params: Mapping[str, NDArray[np.float32]]
    census: Census
    device: str
    device_name: str

    @property
    def first_return(self) -> float:
        """Mean return of the first 20 episodes."""
        return mean(self.returns[:RECENT])

    @property
    def last_return(self) -> float:
        """Mean return of the last 20 episodes."""
        return mean(self.returns[-RECENT:])
