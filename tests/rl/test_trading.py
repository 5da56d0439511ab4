"""Walks out of sample, agents on markets whose best policy is known, and trading over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxengine.data import Dataset, demo_bars, make_dataset
from fxengine.driver import Device
from fxengine.ops.market import TRACE
from fxengine.ops.policy import reference_greedy
from fxengine.rl import backtest as figures
from fxengine.rl.agents import Agent, C51Agent, DqnAgent, FullAgent
from fxengine.rl.backtest import Performance
from fxengine.rl.market import MarketCosts, MarketData, MarketSpec, market_data
from fxengine.rl.trading import Account, Spread, TradePlan, TradeResult, TradeSettings, baselines, trade
from fxengine.rl.walker import Walk
from tests.nets.whole import BARE, step_config
from tests.rl.engines import Forward
from tests.rl.loops import AGENTS, COSTS, DATA, SPEC, loop
from tests.rl.markets import Bar, market_of, random_market
from tools import market_bench

# -- walks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dqn", "full"])
def test_a_walk_is_the_twins(device: Device, name: str) -> None:
    """The device's values on the twin's observations, and the twin's accounts: the same trace, bit for bit."""
    agent, held = AGENTS[name], random_market(70, 9)
    with loop(device, agent, guard=True) as (engine, collector):
        collector.run(6)
        with Walk(engine, agent, held, SPEC, environments=2) as walk, Forward(engine, agent, 2, {}) as forward:
            trace = walk.run()

            def policy(observation: np.ndarray) -> np.ndarray:
                return reference_greedy(forward(state0=observation)[0], agent.branches)

            expected = figures.walk(held, SPEC, policy, 2, costs=MarketCosts(*COSTS.values()))
            np.testing.assert_array_equal(trace, expected)
            assert trace[-1, TRACE.index("trades"), 0] > 3
            np.testing.assert_array_equal(walk.run(), trace)
            engine.signals.update({"market_fee": 0.01})
            assert walk.run()[-1, 0, 0] < trace[-1, 0, 0], "costs are those of the signals"
            collector.run(2)
            before = engine.state_hash()
            walk.run()
            assert engine.state_hash() == before, "a walk trains nothing"


def test_a_ruined_walk_stops(device: Device) -> None:
    """Every way of falling: the account that is long at a crash is gone, and its rows behind it are NaN."""
    bars: list[Bar] = [(100.0, 100.0, 100.0, 100.0)] * 4 + [(30.0, 30.0, 30.0, 30.0)] * 30
    crash = market_of(*bars)
    agent, spec = DqnAgent(9, (3,), hidden=(), batch=2), MarketSpec((3,), episode_bars=3)
    with loop(device, agent, data=crash, spec=spec, train_every=0) as (engine, _):
        engine.params["b_out"] = np.array([0, 0, 5], np.float32)
        engine.params["w_out"] = np.zeros((3, 9), np.float32)
        with Walk(engine, agent, crash, spec) as walk:
            trace = walk.run()
    assert np.isnan(trace[5:]).all() and np.isfinite(trace[:5]).all()
    assert trace[4, 0, 0] == pytest.approx(0.3, abs=0.01)


def test_accounts_of_a_walk_differ_where_the_agent_draws(device: Device) -> None:
    agent = AGENTS["iqn"]
    with loop(device, agent, train_every=0) as (engine, _):
        engine.params["b_iq2"] = np.zeros(6, np.float32)  # so that the draws decide
        with Walk(engine, agent, DATA, SPEC, environments=3) as walk, Walk(engine, agent, DATA, SPEC, seed=9) as other:
            trace = walk.run()
            np.testing.assert_array_equal(walk.run(), trace)
            assert not np.array_equal(trace[:, :, 0], trace[:, :, 1])
            assert not np.array_equal(other.run()[:, :, 0], trace[:, :, 0])


# -- markets with a best policy ----------------------------------------------------------------------------------------


def rising(count: int) -> MarketData:
    """One per cent up with every bar; an order fills at the close that it was placed at."""
    close = 100.0 * 1.01 ** np.arange(count)
    return _of(close, np.zeros(count))


def alternating(count: int, first: int = 0) -> MarketData:
    """Two per cent up, the same down; the feature tells which comes next."""
    up = (np.arange(count) + first) % 2 == 0
    close = 100.0 * np.where(up, 1.0, 1.02)
    return _of(close, np.where(up, 1.0, -1.0))


def _of(close: np.ndarray, feature: np.ndarray) -> MarketData:
    opened = np.append(close[:1], close[:-1])
    bars = np.stack([opened, np.maximum(opened, close), np.minimum(opened, close), close], axis=1)
    return market_of(*map(tuple, bars), features=feature[:, None].astype(np.float32))


def held_through(held: MarketData) -> float:
    """Long from the first close to the last."""
    return held.prices[-1, 3] / held.prices[0, 3] - 1.0


def right_every_time(held: MarketData) -> float:
    """Long before a rise, short before a fall: every bar earns its move."""
    moves = np.diff(held.prices[:, 3]) / held.prices[:-1, 3]
    return float(np.prod(1.0 + np.abs(moves))) - 1.0


_SIZES = {"state": 9, "branches": (3,), "batch": 16}
TOYS: dict[str, Agent] = {
    "dqn": DqnAgent(**_SIZES, hidden=()),
    "c51": C51Agent(**_SIZES, hidden=(16,), atoms=9, v_min=-4.0, v_max=4.0),
    "full": FullAgent(
        step_config(replace(BARE, batch=16, state=9, branches=(3,), h1=16, h2=16, aux_h=8, aux_out=8, aux_head=8))
    ),
}


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(
    ("train", "held", "best"),
    [(rising(30), rising(50), held_through), (alternating(30), alternating(45, 1), right_every_time)],
    ids=["rising", "alternating"],
)
def test_the_best_policy_is_found(
    device: Device, name: str, train: MarketData, held: MarketData, best: Callable[[MarketData], float]
) -> None:
    agent, spec = TOYS[name], MarketSpec((3,), episode_bars=8)
    signals = {"lr": 0.03, "clip": 1e9, "gamma": 0.0, "epsilon": 1.0}
    options: dict[str, Any] = {"environments": 8, "slots": 128, "warmup": 4, "signals": signals}
    with loop(device, agent, data=train, spec=spec, **options) as (engine, collector):
        collector.run(70, chain=5)
        engine.signals.update({"epsilon": 0.2, "lr": 0.005})
        collector.run(50, chain=5)
        with Walk(engine, agent, held, spec) as walk:
            trace = walk.run()
    (found,) = figures.performance(trace, held.bars.time)
    assert found.total_return == pytest.approx(best(held), rel=1e-9)


# -- seeds -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return make_dataset(demo_bars()[:480])


TINY = TradeSettings(agent="dqn", environments=2, updates=4, batch=4, episode_bars=20)


def test_trading_over_seeds(device: Device, dataset: Dataset) -> None:
    seen: list[int] = []
    result = trade(dataset, TINY, device=device, watch=lambda seed, account: seen.append(seed))
    again = trade(dataset, TINY, device=device)
    _, held = market_data(dataset)
    assert seen == [0, 1, 2, 3, 4] and len(result.seeds) == 5
    for account, other in zip(result.seeds, again.seeds, strict=True):
        np.testing.assert_array_equal(account.trace, other.trace)
        assert account.trace.shape == (len(held), 4) and account.trace[0].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert len({account.trace.tobytes() for account in result.seeds}) > 1
    expected = figures.baselines(held, result.plan.spec, costs=TINY.costs)
    for name in ("buy and hold", "flat"):
        assert [account.performance for account in result.baselines[name]] == expected[name]
    assert len(result.baselines["random"]) == 8
    assert result.device == device.label and result.steps_per_s > 0


@pytest.mark.parametrize("name", ["full", "c51", "iqn"])
def test_every_agent_trades(device: Device, dataset: Dataset, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = trade(dataset, replace(TINY, agent=name, updates=2), device=device)
    assert result.plan.agent.state == 56 and result.plan.updates == 2
    assert all(np.isfinite(account.trace).all() for account in result.seeds)
    json.dumps([vars(account.performance) for account in result.seeds])


def test_costs_are_paid_by_all(dataset: Dataset) -> None:
    _, held = market_data(dataset)
    free, dear = (baselines(held, MarketSpec(), MarketCosts(spread=spread), draws=3) for spread in (0.0, 1e-2))
    for name in ("buy and hold", "random"):
        for one, other in zip(free[name], dear[name], strict=True):
            assert other.performance.total_return < one.performance.total_return
    assert dear["flat"][0].performance.total_return == 0.0


def test_what_zeros_stand_for(dataset: Dataset) -> None:
    train, _ = market_data(dataset)
    plan = TradePlan.of(TradeSettings(agent="dqn"), train, "cuda", 4)
    assert (plan.environments, plan.agent.batch, plan.updates, plan.demonstration) == (1024, 256, 20_000, False)
    assert (plan.warmup, plan.slots) == (1, 1024)
    small = TradePlan.of(replace(TINY, batch=9), train, "sim", 4)
    assert (small.warmup, small.slots, small.demonstration) == (18, 22, True)
    assert small.spec.reward_scale * train.bar_range == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 4}, "seeds is 4, expected at least 5: fewer say nothing about their spread"),
        ({"agent": "ppo"}, "agent is 'ppo', expected full or c51 or dqn or iqn"),
        ({"updates": -1}, "updates is -1"),
        ({"gamma": 1.0}, "gamma is 1.0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"fee": -0.1}, r"fee must be in \[0, 1\], got -0.1"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TradeSettings(**change)


# -- verdicts ----------------------------------------------------------------------------------------------------------


def result_of(dataset: Dataset, ours: list[float], theirs: list[float]) -> TradeResult:
    """A result with these total returns and Sharpe ratios."""

    def accounts(values: list[float]) -> list[Account]:
        return [Account(Performance(x, x, 0.0, 0.0, 0, 0.0), np.zeros((2, 4))) for x in values]

    train, held = market_data(dataset)
    plan = TradePlan.of(TINY, train, "sim", 4)
    return TradeResult(plan, TINY, "sim", accounts(ours), {"random": accounts(theirs)}, held.bars.time[:2], 1.0)


def test_spreads() -> None:
    assert Spread.of([2.0]) == Spread(2.0, 0.0, 0.0)
    found = Spread.of([1.0, 2.0, 3.0, 6.0])
    assert (found.mean, found.deviation) == (3.0, pytest.approx(np.sqrt(14 / 3)))
    assert found.error == pytest.approx(np.sqrt(14 / 3) / 2)


@pytest.mark.parametrize(
    ("ours", "theirs", "beats", "words"),
    [
        ([0.1, 0.2, 0.3], [0.4], False, "-20.00 points (standard error 5.77): does NOT beat it"),
        ([0.1, 0.2, 0.3], [0.1], False, "within two standard errors: does NOT beat it reliably"),
        ([0.1, 0.2, 0.3], [0.0, 0.02], True, "above it by more than two standard errors"),
        ([0.1, 0.2, 0.3], [-0.6, 0.6], False, "does NOT beat it reliably"),
        ([0.1, 0.1, 0.1], [0.1], False, "does NOT beat it"),
    ],
)
def test_verdicts(dataset: Dataset, ours: list[float], theirs: list[float], beats: bool, words: str) -> None:
    """The spread of both sides counts."""
    result = result_of(dataset, ours, theirs)
    assert result.beats("total_return", "random") is beats
    assert words in result.verdicts()["random"]


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([0.1, 0.2, 0.3], "do NOT beat random in return and Sharpe ratio"),
        ([0.7, 0.8, 0.9], "within the luck of so few bars: no evidence of skill"),
        ([3e3, 3e3, 3e3], "more than the luck of the seeds and of the bars"),
    ],
)
def test_conclusions(dataset: Dataset, ours: list[float], words: str) -> None:
    """Two bars, an hour apart: a Sharpe ratio is within 94 of 0 or so by luck."""
    result = result_of(dataset, ours, [0.2, 0.3])
    assert words in result.conclusion()
    assert result.luck == pytest.approx(np.sqrt(365.25 * 24))


# -- the benchmark -----------------------------------------------------------------------------------------------------


def test_the_benchmark_runs_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "market.json"
    arguments = ["--device", "sim", "--environments", "1", "6", "--batch", "4", "--train-every", "2"]
    assert market_bench.main([*arguments, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert [row["environments"] for row in written["market"]] == [1, 6]
    assert all(row[name] > 0 for row in written["market"] for name in ("environment", "acting", "learning"))
    assert written["options"]["train_every"] == 2 and "simulated" in written["note"]
    assert "us_per_step" in capsys.readouterr().out
