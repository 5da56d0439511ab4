"""Reinforcement learning on the engine: replay, agents, trading environments, training. Names resolve on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Agent": "fxengine.rl.agents",
    "C51Agent": "fxengine.rl.agents",
    "Collector": "fxengine.rl.collector",
    "DqnAgent": "fxengine.rl.agents",
    "Evaluation": "fxengine.rl.outcome",
    "Field": "fxengine.rl.replay",
    "FullAgent": "fxengine.rl.agents",
    "IqnAgent": "fxengine.rl.agents",
    "Market": "fxengine.rl.twin",
    "MarketCosts": "fxengine.rl.market",
    "MarketData": "fxengine.rl.market",
    "MarketSpec": "fxengine.rl.market",
    "Memory": "fxengine.rl.replay",
    "Performance": "fxengine.rl.backtest",
    "Progress": "fxengine.rl.outcome",
    "Replay": "fxengine.rl.replay",
    "TradeSettings": "fxengine.rl.trading",
    "TrainConfig": "fxengine.rl.settings",
    "TrainResult": "fxengine.rl.outcome",
    "Trainer": "fxengine.rl.trainer",
    "Walk": "fxengine.rl.walker",
    "baselines": "fxengine.rl.backtest",
    "evaluate": "fxengine.rl.playing",
    "market_data": "fxengine.rl.market",
    "market_replay": "fxengine.rl.collector",
    "performance": "fxengine.rl.backtest",
    "trade": "fxengine.rl.trading",
    "train": "fxengine.rl.training",
    "training_step": "fxengine.rl.collector",
    "walk": "fxengine.rl.backtest",
}
__all__ = [
    "Agent",
    "C51Agent",
    "Collector",
    "DqnAgent",
    "Evaluation",
    "Field",
    "FullAgent",
    "IqnAgent",
    "Market",
    "MarketCosts",
    "MarketData",
    "MarketSpec",
    "Memory",
    "Performance",
    "Progress",
    "Replay",
    "TradeSettings",
    "TrainConfig",
    "TrainResult",
    "Trainer",
    "Walk",
    "baselines",
    "evaluate",
    "market_data",
    "market_replay",
    "performance",
    "trade",
    "train",
    "training_step",
    "walk",
]

if TYPE_CHECKING:
    from fxengine.rl.agents import Agent, C51Agent, DqnAgent, FullAgent, IqnAgent
    from fxengine.rl.backtest import Performance, baselines, performance, walk
    from fxengine.rl.collector import Collector, market_replay, training_step
    from fxengine.rl.market import MarketCosts, MarketData, MarketSpec, market_data
    from fxengine.rl.outcome import Evaluation, Progress, TrainResult
    from fxengine.rl.playing import evaluate
    from fxengine.rl.replay import Field, Memory, Replay
    from fxengine.rl.settings import TrainConfig
    from fxengine.rl.trading import TradeSettings, trade
    from fxengine.rl.trainer import Trainer
    from fxengine.rl.training import train
    from fxengine.rl.twin import Market
    from fxengine.rl.walker import Walk


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'fxengine.rl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
