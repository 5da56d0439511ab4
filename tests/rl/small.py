"""Small settings to train with in the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fxengine.driver import Device
from fxengine.rl import TrainConfig, TrainResult, train

#: Small and quick; what a test does not say otherwise.
CONFIG = TrainConfig.quick(
    hidden=(16, 16), batch=16, buffer=240, learning_starts=40, train_every=4, target_every=20, quantiles=4,
    target_quantiles=4, act_quantiles=4, cosines=4, iqn_width=8, atoms=11,
)  # fmt: skip


def config(**changes: Any) -> TrainConfig:
    return replace(CONFIG, **changes)


def learn(env: Any, device: Device, **options: Any) -> TrainResult:
    given = {"total_steps": 200, "config": CONFIG, "evaluation_episodes": 0, **options}
    return train(env, device=device, **given)
