"""Engines with a collector, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fxengine import Engine
from fxengine.driver import Device
from fxengine.rl.agents import Agent, C51Agent, DqnAgent, FullAgent, IqnAgent
from fxengine.rl.collector import Collector, market_replay, training_step
from fxengine.rl.market import MarketData, MarketSpec
from tests.nets.whole import EVERYTHING, step_config
from tests.rl.markets import random_market

DATA = random_market(60, 3)
SPEC = MarketSpec(branches=(3, 3), episode_bars=7)
COSTS = {"market_fee": 1e-4, "market_spread": 2e-3, "market_urgency_cost": 1e-3}
#: Of an observation of `DATA`: five features of a bar, eight of the account.
STATE = 13
SIGNALS = {"lr": 1e-2, "epsilon": 0.5, **COSTS}

DQN = DqnAgent(STATE, (3, 3), hidden=(9,), batch=6)
C51 = C51Agent(STATE, (3, 3), hidden=(9,), batch=6, atoms=7, v_min=-2.0, v_max=2.0)
IQN = IqnAgent(
    STATE, (3, 3), hidden=(9,), batch=6, cosines=6, quantiles=4, target_quantiles=3, act_quantiles=4, width=8
)
#: The specified step with all of its components; its oracles run in every third replay.
FULL = FullAgent(
    step_config(replace(EVERYTHING, batch=6, state=STATE, tokens=1, ofi=0, branches=(3, 3), regimes=4, oracle_every=3))
)
AGENTS: dict[str, Agent] = {"dqn": DQN, "c51": C51, "iqn": IQN, "full": FULL}


@contextmanager
def loop(
    device: Device,
    agent: Agent = DQN,
    *,
    environments: int = 5,
    slots: int = 16,
    n_step: int = 1,
    prioritized: bool = False,
    data: MarketData = DATA,
    spec: MarketSpec = SPEC,
    signals: dict[str, float] | None = None,
    precision: str = "fp32",
    guard: bool = False,
    seed: int = 3,
    **options: Any,
) -> Iterator[tuple[Engine, Collector]]:
    """An engine and its collector."""
    replay = market_replay(agent, environments=environments, slots=slots, n_step=n_step, prioritized=prioritized)
    with (
        Engine(
            training_step(agent),
            device=device,
            groups=agent.groups,
            replay=replay,
            seed=seed,
            signals=signals or SIGNALS,
            precision=precision,
            guard=guard,
        ) as engine,
        Collector(engine, agent, data, spec, **options) as collector,
    ):
        yield engine, collector


def state_of(engine: Engine, collector: Collector) -> dict[str, bytes]:
    """Every bit that a run leaves behind."""
    return {name: array.tobytes() for name, array in (engine.state() | collector.state()).items()}
