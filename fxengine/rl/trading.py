"""An agent that learns to trade bars on the device, over several seeds, judged on the bars that follow.

    from fxengine.data import demo_bars, make_dataset
    from fxengine.rl.trading import TradeSettings, trade
    print(trade(make_dataset(demo_bars()), TradeSettings(agent="dqn"), device="sim").verdicts())

Each seed trains an agent of its own on the training part and then walks greedily through the validation part, once.
Buy and hold, doing nothing, and random actions are accounted for in the same way. What the seeds spread over is luck
of initialisation, exploration and batches; all of them see the same bars, so nothing follows for other years.

The agents read the features of a bar and of the account (`fxengine.rl.market`). The specified step reads no order flow
of its own here (`StepConfig(ofi=0)`): what the bars tell of volume is among their features.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.config import StepConfig
from fxengine.data.dataset import Dataset
from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.rl.agents import Agent, C51Agent, DqnAgent, FullAgent, IqnAgent
from fxengine.rl.backtest import Performance, bars_per_year, performance, walk
from fxengine.rl.collector import Collector, market_replay, training_step
from fxengine.rl.market import FLAT, LONG, MARKET, NORMAL, MarketCosts, MarketData, MarketSpec, market_data
from fxengine.rl.walker import Walk
from fxengine.settings import SMALL

AGENTS = ("full", "c51", "dqn", "iqn")
#: Fewest seeds whose spread says anything.
LEAST_SEEDS = 5
#: What 0 in the settings stands for, by kind of device. Simulated, any agent takes about a minute on two cores.
ENVIRONMENTS = {"sim": 16, "cuda": 1024}
BATCH = {"sim": 32, "cuda": 256}
UPDATES: Mapping[str, Mapping[str, int]] = {
    "sim": {"full": 160, "c51": 800, "dqn": 3000, "iqn": 1200},
    "cuda": dict.fromkeys(AGENTS, 20_000),
}

# Batches that the replay holds before the first update, at least, and most transitions that it keeps.
_WARMUP_BATCHES, _CAPACITY = 4, 2**20
# How often exploration and learning rate change over a run, and steps of one launch.
_STAGES, _CHAIN = 25, 8
# Atoms lie within so many typical ranges of a bar.
_RANGE = 10.0
# Features of an attention token.
_TOKEN = 8


@dataclass(frozen=True)
class TradeSettings:
    """How to train and what trading costs.

    Attributes:
        agent: `full`: the whole specified step; `c51`, `dqn`, `iqn`: these heads on a perceptron.
        seeds: how many agents are trained, at least 5.
        environments: accounts that collect side by side; 0: 16 on the simulated device, 1,024 on a GPU.
        updates: training steps of an agent; every one follows a step of all environments. 0: about a minute in all on
            the simulated device, 20,000 on a GPU.
        batch: transitions of a training step; 0: 32 on the simulated device, 256 on a GPU.
        lr: learning rate at first; it falls linearly to a tenth.
        gamma: discount per bar.
        polyak_tau: share that the target copy moves per training step.
        epsilon: share of random actions at the end; it falls to this from 1 over the first half of the training.
        episode_bars: bars of an episode of training.
        fee: share of the traded value.
        spread: share of the price between buying and selling.
        urgency_cost: share of the price that completing an urgent order costs on top.
    """

    agent: str = "full"
    seeds: int = LEAST_SEEDS
    environments: int = 0
    updates: int = 0
    batch: int = 0
    lr: float = 1e-3
    gamma: float = 0.9
    polyak_tau: float = 0.02
    epsilon: float = 0.05
    episode_bars: int = 256
    fee: float = 0.0
    spread: float = 1e-4
    urgency_cost: float = 5e-5

    def __post_init__(self) -> None:
        rules = {
            "agent": (self.agent in AGENTS, " or ".join(AGENTS)),
            "seeds": (self.seeds >= LEAST_SEEDS, f"at least {LEAST_SEEDS}: fewer say nothing about their spread"),
            "environments": (self.environments >= 0, "at least 0"),
            "updates": (self.updates >= 0, "at least 0"),
            "batch": (self.batch >= 0, "at least 0"),
            "lr": (0.0 < self.lr < math.inf, "a positive number"),
            "gamma": (0.0 <= self.gamma < 1.0, "in [0, 1)"),
            "polyak_tau": (0.0 < self.polyak_tau <= 1.0, "in (0, 1]"),
            "epsilon": (0.0 <= self.epsilon <= 1.0, "in [0, 1]"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {allowed}")
        self.costs  # noqa: B018 - checks them

    @property
    def costs(self) -> MarketCosts:
        """What trading costs."""
        return MarketCosts(self.fee, self.spread, self.urgency_cost)


@dataclass(frozen=True)
class TradePlan:
    """What is trained on a device: settings without zeros.

    Attributes:
        agent: the agent.
        spec: the rules of the market; a reward of 1 is a typical range of a bar.
        environments: accounts that collect side by side.
        updates: training steps.
        warmup: steps of the environments before them.
        slots: steps that the replay keeps.
        demonstration: whether sizes are cut down to what the simulated device can do.
    """

    agent: Agent
    spec: MarketSpec
    environments: int
    updates: int
    warmup: int
    slots: int
    demonstration: bool

    @classmethod
    def of(cls, settings: TradeSettings, data: MarketData, kind: str, regimes: int) -> TradePlan:
        """The plan for a kind of device (`sim` or `cuda`) and the training part."""
        environments = settings.environments or ENVIRONMENTS[kind]
        updates = settings.updates or UPDATES[kind][settings.agent]
        batch = settings.batch or BATCH[kind]
        spec = MarketSpec(episode_bars=settings.episode_bars, reward_scale=1.0 / data.bar_range)
        warmup = -(-_WARMUP_BATCHES * batch // environments)
        return cls(
            make_agent(settings.agent, spec.observation_size(data.features.shape[1]), batch, regimes, kind),
            spec,
            environments,
            updates,
            warmup,
            slots=min(warmup + updates, max(1, _CAPACITY // environments)),
            demonstration=kind == "sim",
        )


def make_agent(name: str, state: int, batch: int, regimes: int, kind: str) -> Agent:
    """An agent for market states of so many features, with small networks on the simulated device."""
    branches, small = MarketSpec().branches, kind == "sim"
    shape: dict[str, Any] = {"hidden": (64, 64) if small else (256, 256), "batch": batch}
    if name == "full":
        tokens = state // _TOKEN if state % _TOKEN == 0 else 0
        sizes: dict[str, Any] = {"state": state, "batch": batch, "regimes": regimes, "tokens": tokens, "ofi": 0}
        return FullAgent(
            StepConfig(branches=branches, v_min=-_RANGE, v_max=_RANGE, **sizes, **(SMALL if small else {}))
        )
    if name == "c51":
        return C51Agent(state, branches, **shape, atoms=51, v_min=-_RANGE, v_max=_RANGE, double=True)
    if name == "dqn":
        return DqnAgent(state, branches, **shape, loss="huber", double=True)
    shape |= dict.fromkeys(("quantiles", "target_quantiles", "act_quantiles"), 16 if small else 32)
    return IqnAgent(state, branches, **shape, cosines=32, width=64 if small else 128)


@dataclass(frozen=True, eq=False)
class Account:
    """One walk through the validation part.

    Attributes:
        performance: its figures.
        trace: float64 [n, 4], rows of `fxengine.ops.market.TRACE`; NaN after a ruin.
    """

    performance: Performance
    trace: NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Several values of one figure.

    Attributes:
        mean: their mean.
        deviation: their standard deviation (n - 1); 0 of a single value.
        error: standard error of the mean.
    """

    mean: float
    deviation: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Mean and spread of at least one value."""
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        return cls(float(np.mean(values)), deviation, deviation / math.sqrt(len(values)))


#: Figures that are reported, in order, and those that are compared with the baselines.
FIGURES = ("total_return", "sharpe", "max_drawdown", "turnover", "trades", "exposure")
COMPARED = {"total_return": "total return", "sharpe": "Sharpe ratio"}


@dataclass(frozen=True, eq=False)
class TradeResult:
    """What the seeds and the baselines made of the validation part.

    Attributes:
        plan: what was trained.
        settings: as given.
        device: label of the device.
        seeds: an account for each seed, 0, 1, ...
        baselines: accounts of `buy and hold`, `flat` and `random`.
        bar_times: datetime64 [n], of the validation bars.
        steps_per_s: steps of environments per second while training, all of them together.
    """

    plan: TradePlan
    settings: TradeSettings
    device: str
    seeds: Sequence[Account]
    baselines: Mapping[str, Sequence[Account]]
    bar_times: NDArray[np.datetime64]
    steps_per_s: float

    def spread(self, figure: str, of: str = "") -> Spread:
        """Mean and spread of a figure over the seeds, or over the accounts of a baseline."""
        accounts = self.baselines[of] if of else self.seeds
        return Spread.of([float(getattr(account.performance, figure)) for account in accounts])

    @property
    def luck(self) -> float:
        """About the standard error of an annualised Sharpe ratio by the luck of these bars alone: 1/sqrt(years)."""
        return math.sqrt(bars_per_year(self.bar_times) / (len(self.bar_times) - 1))

    def lead(self, figure: str, baseline: str) -> tuple[float, float]:
        """Mean of the seeds minus that of a baseline, and the standard error of the difference."""
        ours, theirs = self.spread(figure), self.spread(figure, baseline)
        return ours.mean - theirs.mean, math.hypot(ours.error, theirs.error)

    def beats(self, figure: str, baseline: str) -> bool:
        """Whether the seeds are above a baseline by more than two standard errors."""
        difference, error = self.lead(figure, baseline)
        return difference > 2.0 * error

    def conclusion(self) -> str:
        """One sentence: which baselines the seeds beat in both compared figures, and what that shows."""
        missed = [name for name in self.baselines if not all(self.beats(figure, name) for figure in COMPARED)]
        if missed:
            return (
                f"the agents do NOT beat {', '.join(missed)} in return and Sharpe ratio by more than two standard "
                "errors: no evidence of skill"
            )
        if self.spread("sharpe").mean <= 2.0 * self.luck:
            return (
                "the agents beat every baseline on these bars, but their Sharpe ratio is within the luck of so few "
                "bars: no evidence of skill"
            )
        return "the agents beat every baseline on these bars, by more than the luck of the seeds and of the bars"

    def verdicts(self) -> dict[str, str]:
        """In plain words, for each baseline."""
        return {name: "; ".join(self._verdict(figure, name) for figure in COMPARED) for name in self.baselines}

    def _verdict(self, figure: str, baseline: str) -> str:
        difference, error = self.lead(figure, baseline)
        scale, unit = (100.0, " points") if figure == "total_return" else (1.0, "")
        said = f"{COMPARED[figure]} {scale * difference:+.2f}{unit} (standard error {scale * error:.2f})"
        if difference <= 0.0:
            return f"{said}: does NOT beat it"
        if not self.beats(figure, baseline):
            return f"{said}: within two standard errors: does NOT beat it reliably"
        return f"{said}: above it by more than two standard errors"


def trade(
    dataset: Dataset,
    settings: TradeSettings | None = None,
    *,
    device: str | Device = "auto",
    watch: Callable[[int, Account], None] | None = None,
) -> TradeResult:
    """Train an agent per seed on the training part and let each walk through the validation part.

    Args:
        dataset: training and validation part.
        settings: how to train and what trading costs.
        device: `auto`, `cuda:N`, `sim` or an open Device, which stays open.
        watch: called after each seed with its number and account.

    Raises:
        ValueError: a part has too few bars.
        CudaError: the device failed.
    """
    settings = settings or TradeSettings()
    train, held = market_data(dataset)
    opened = device if isinstance(device, Device) else Device.open(device)
    try:
        plan = TradePlan.of(settings, train, opened.kind, dataset.regimes)
        accounts, seconds = [], 0.0
        for seed in range(settings.seeds):
            account, took = _train(plan, settings, train, held, opened, seed)
            accounts.append(account)
            seconds += took
            if watch is not None:
                watch(seed, account)
    finally:
        if opened is not device:
            opened.close()
    steps = settings.seeds * (plan.warmup + plan.updates) * plan.environments
    return TradeResult(
        plan,
        settings,
        opened.label,
        accounts,
        baselines(held, plan.spec, settings.costs, draws=max(8, settings.seeds)),
        held.bars.time,
        steps / seconds,
    )


def _train(
    plan: TradePlan, settings: TradeSettings, train: MarketData, held: MarketData, device: Device, seed: int
) -> tuple[Account, float]:
    """The account of one seed, and the seconds that its training took."""
    agent, costs = plan.agent, settings.costs
    signals = {"gamma": settings.gamma, "polyak_tau": settings.polyak_tau, "epsilon": 1.0}
    signals |= {f"market_{name}": value for name, value in vars(costs).items()}
    options: dict[str, Any] = {
        "groups": agent.groups,
        "replay": market_replay(agent, environments=plan.environments, slots=plan.slots),
        "seed": seed,
        "signals": signals,
    }
    with (
        Engine(training_step(agent), device=device, **options) as engine,
        Collector(engine, agent, train, plan.spec, warmup=plan.warmup + 1) as collector,
        Walk(engine, agent, held, plan.spec) as walked,
    ):
        started = time.perf_counter()
        collector.run(plan.warmup, chain=_CHAIN)
        done = 0
        for stage in range(_STAGES):
            share = stage / _STAGES
            epsilon = max(settings.epsilon, 1.0 - 2.0 * share * (1.0 - settings.epsilon))
            engine.signals.update({"epsilon": epsilon, "lr": settings.lr * (1.0 - 0.9 * share)})
            goal = plan.updates * (stage + 1) // _STAGES
            collector.run(goal - done, chain=_CHAIN)
            done = goal
        engine.synchronize()
        took = time.perf_counter() - started
        (account,) = _accounts(walked.run(), held)
    return account, took


def baselines(data: MarketData, spec: MarketSpec, costs: MarketCosts, *, draws: int) -> dict[str, list[Account]]:
    """Accounts of what needs no learning: long from the first bar on, never in the market, random actions."""
    rng, branches = np.random.default_rng(0), len(spec.branches)
    fixed = np.array([(LONG, 2, MARKET, NORMAL), (FLAT, 0, MARKET, NORMAL)], np.int64)[:, :branches]

    def policy(observation: NDArray[np.float32]) -> NDArray[np.int64]:
        return np.concatenate([fixed, rng.integers(0, 3, (draws, branches))])

    held, flat, *drawn = _accounts(walk(data, spec, policy, 2 + draws, costs=costs), data)
    return {"buy and hold": [held], "flat": [flat], "random": drawn}


def _accounts(trace: NDArray[np.float64], data: MarketData) -> list[Account]:
    figures = performance(trace, data.bars.time)
    return [Account(found, trace[:, :, i]) for i, found in enumerate(figures)]
