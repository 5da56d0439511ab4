"""How to train: what `TrainingSession` and `fxengine train` can be asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxengine.signals import SignalMap

#: What can be trained: the auxiliary nets alone, or the whole specified step.
MODELS = ("aux", "full")
#: Sizes of the full model: as specified, or small; auto takes the small ones on the simulated device.
SIZES = ("auto", "spec", "small")
#: What the small sizes change: with their batch a step takes a seventh of the time, and every component is still there.
SMALL: Mapping[str, Any] = {
    "h1": 128, "h2": 128, "value_h": 64, "adv_h": 64, "iqn_quantiles": 16, "iqn_target_quantiles": 16, "iqn_cos": 32,
    "iqn_h": 64,
}  # fmt: skip
#: Training steps by model and kind of device where none are asked for. Simulated, they take half a minute on two cores.
#: On the demo bars more than 1,000 of the auxiliary nets only learn the training part by heart.
DEFAULT_STEPS = {"aux": {"sim": 600, "cuda": 1000}, "full": {"sim": 200, "cuda": 2000}}
#: Rows per step where none are asked for, by sizes.
DEFAULT_BATCH = {"spec": 256, "small": 64}
#: Health reports over a run where no interval is asked for.
_HEALTH_REPORTS = 10


@dataclass(frozen=True)
class TrainSettings:
    """How to train.

    Attributes:
        model: `aux`: the auxiliary nets alone; `full`: the whole specified step, on transitions of a logged policy.
        sizes: of the full model: `spec` (the defaults of StepConfig), `small`, or `auto`: small on the simulated
            device.
        steps: training steps; 0: of the auxiliary nets 600 on the simulated device (half a minute on two cores) and
            1,000 on a GPU, of the full model 200 and 2,000.
        batch: rows per step, drawn at random from the training part; 0: 256, or 64 with the small sizes.
        seed: seed of the initial parameters, of the batches and of the logged policy.
        lr: highest learning rate; it rises to it over the first 5 % of the steps, then falls along a cosine.
        lr_end: share of the highest learning rate that is left at the last step.
        validate_every: steps between validations; 0: ten over the run.
        health_every: steps between health reports of the full model, besides the first and the last step; 0: ten over
            the run.
        gamma: discount per bar of the full model's transitions; the nearer to 1, the less ready IQN gets.
        signals: first values of further host-owned signals by name (clip, w_nb, weight_decay, ...).
    """

    model: str = "aux"
    sizes: str = "auto"
    steps: int = 0
    batch: int = 0
    seed: int = 0
    lr: float = 2e-3
    lr_end: float = 0.05
    validate_every: int = 0
    health_every: int = 0
    gamma: float = 0.5
    signals: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in (("model", MODELS), ("sizes", SIZES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {' or '.join(known)}")
        for name in ("steps", "batch", "seed", "validate_every", "health_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 0")
        if not (math.isfinite(self.lr) and self.lr > 0.0):
            raise ValueError(f"lr is {self.lr}, expected a positive number")
        if not 0.0 <= self.lr_end <= 1.0:
            raise ValueError(f"lr_end is {self.lr_end}, expected a share between 0 and 1")
        if not 0.0 < self.gamma < 1.0:
            raise ValueError(f"gamma is {self.gamma}, expected a number between 0 and 1, both excluded")
        if self.model == "aux":
            for name in ("sizes", "health_every", "gamma"):
                if getattr(self, name) != getattr(TrainSettings, name):
                    raise ValueError(f"{name} is a setting of the full model; train it with model='full'")
        _check_signals(self.signals)

    def step_count(self, kind: str) -> int:
        """Steps of a run on that kind of device (`sim` or `cuda`)."""
        return self.steps or DEFAULT_STEPS[self.model][kind]

    def chosen_sizes(self, kind: str) -> str:
        """`spec` or `small`, on that kind of device. The auxiliary nets have no small sizes."""
        if self.model == "aux":
            return "spec"
        if self.sizes == "auto":
            return "small" if kind == "sim" else "spec"
        return self.sizes

    def rows(self, kind: str) -> int:
        """Rows per step on that kind of device."""
        return self.batch or DEFAULT_BATCH[self.chosen_sizes(kind)]

    def health_interval(self, steps: int) -> int:
        """Steps between health reports in a run of so many steps."""
        return self.health_every or max(1, steps // _HEALTH_REPORTS)


def _check_signals(signals: Mapping[str, float]) -> None:
    slots = SignalMap()
    for name in signals:
        try:
            owned = [slot.device_owned for slot in slots.expand(name)]
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        if any(owned):
            raise ValueError(f"signal '{name}' is owned by the device and cannot be set")
        if name == "lr" or name.startswith("lr."):
            raise ValueError(f"signal '{name}' follows the schedule of the learning rate; set lr and lr_end")
