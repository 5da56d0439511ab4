"""The rules of the trading environments, on the NumPy twin; tests/ops/test_market.py holds the kernel to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.data import make_dataset
from fxengine.ops.market import ACCOUNT, ACCOUNT_FEATURES, CLOCK
from fxengine.rl.backtest import walk
from fxengine.rl.market import MarketCosts, MarketSpec, market_data
from fxengine.rl.twin import Market
from tests.data.makers import random_bars, spliced
from tests.rl.markets import Bar, account, market_of, random_market

# Costs that float32 holds exactly.
HALF, FEE, LATE = 2.0**-7, 2.0**-10, 2.0**-8
COSTS = MarketCosts(fee=FEE, spread=2 * HALF, urgency_cost=LATE)
FIRST: Bar = (100.0, 100.0, 100.0, 100.0)
MARKET, LIMIT, MID = 0, 1, 2
PATIENT, NORMAL, URGENT = 0, 1, 2
BUY, SELL = 2, 0

# The close is 100, a typical range 1 %: limit orders lie at 0.5, 0.25 and 0.1 below or above.
# (order, urgency, direction, the next bar, price of the fill or None)
FILLS = [
    (MARKET, NORMAL, BUY, (101.0, 103.0, 99.0, 102.0), 101.7890625),  # 101·(1 + 1/128)
    (MARKET, NORMAL, SELL, (101.0, 103.0, 99.0, 102.0), 100.2109375),  # 101·(1 - 1/128)
    (MARKET, URGENT, BUY, (101.0, 103.0, 99.0, 102.0), 101.7890625),
    (MARKET, PATIENT, SELL, (101.0, 103.0, 99.0, 102.0), 100.2109375),
    (LIMIT, NORMAL, BUY, (100.5, 101.0, 99.0, 100.0), 99.75),
    (LIMIT, NORMAL, BUY, (100.5, 101.0, 99.8, 100.0), None),
    (LIMIT, NORMAL, BUY, (99.5, 101.0, 99.0, 100.0), 99.5),  # opens below: better
    (LIMIT, NORMAL, SELL, (99.5, 101.0, 99.0, 100.0), 100.25),
    (LIMIT, NORMAL, SELL, (99.5, 100.2, 99.0, 100.0), None),
    (LIMIT, NORMAL, SELL, (100.5, 101.0, 99.0, 100.0), 100.5),  # opens above: better
    (LIMIT, PATIENT, BUY, (100.0, 101.0, 99.4, 100.0), 99.5),
    (LIMIT, PATIENT, BUY, (100.0, 101.0, 99.6, 100.0), None),
    (LIMIT, PATIENT, SELL, (100.0, 100.6, 99.0, 100.0), 100.5),
    (LIMIT, PATIENT, SELL, (100.0, 100.4, 99.0, 100.0), None),
    (LIMIT, URGENT, BUY, (100.0, 101.0, 99.85, 100.0), 99.9),
    (LIMIT, URGENT, SELL, (100.0, 100.15, 99.0, 100.0), 100.1),
    (LIMIT, URGENT, BUY, (100.5, 103.0, 100.0, 102.4), 103.6),  # 102.4·(1 + 3/256): completed at the close
    (LIMIT, URGENT, SELL, (99.5, 100.0, 97.0, 97.28), 96.14),  # 97.28·(1 - 3/256)
    (MID, NORMAL, BUY, (100.5, 101.0, 99.0, 101.0), 100.0),
    (MID, NORMAL, SELL, (100.5, 101.0, 99.0, 101.0), 100.0),
    (MID, NORMAL, BUY, (100.5, 101.0, 100.25, 101.0), None),  # all of the bar is above
    (MID, NORMAL, SELL, (100.5, 101.0, 100.25, 101.0), None),
    (MID, NORMAL, BUY, (99.5, 99.75, 99.0, 99.0), None),  # all of the bar is below
    (MID, PATIENT, SELL, (99.5, 100.0, 99.0, 99.0), 100.0),  # touched
    (MID, PATIENT, SELL, (99.5, 99.75, 99.0, 99.0), None),
    (MID, URGENT, BUY, (100.5, 103.0, 100.25, 102.4), 103.6),
    (MID, URGENT, SELL, (100.5, 103.0, 100.25, 102.4), 101.2),  # 102.4·(1 - 3/256)
]


@pytest.mark.parametrize(("order", "urgency", "direction", "bar", "price"), FILLS)
def test_fills(order: int, urgency: int, direction: int, bar: Bar, price: float | None) -> None:
    """A position of the whole equity: 0.01 units at a close of 100."""
    market = Market(market_of(FIRST, bar, bar_range=0.01), MarketSpec(episode_bars=1), 1, costs=COSTS)
    market.reset()
    transition, (trace,) = _traced(market, [direction, 2, order, urgency])
    equity, position, turnover, trades = trace
    if price is None:
        assert (equity, position, turnover, trades) == (1.0, 0.0, 0.0, 0.0)
        assert transition.reward[0] == 0.0
        return
    side = direction - 1
    units, value = 0.01 * side, 0.01 * price
    assert equity == pytest.approx(1.0 + units * (bar[3] - price) - FEE * value, rel=1e-14)
    assert transition.reward[0] == pytest.approx(100.0 * (equity - 1.0), rel=1e-6)
    assert (position, trades) == (side, 1.0)
    assert turnover == pytest.approx(value, rel=1e-14)


def _traced(market: Market, *actions: list[int]) -> tuple[Any, np.ndarray]:
    """Steps of the first environment: the last transition, and the rows of the trace [steps, 4]."""
    rows = []
    for action in actions:
        transition, row = market.step_traced([action])
        rows.append(row[:, 0])
    return transition, np.array(rows)


def test_a_patient_order_rests_until_it_is_filled_or_another_is_asked_for() -> None:
    quiet: Bar = (101.0, 101.0, 100.75, 101.0)
    deep: Bar = (101.0, 101.0, 99.0, 101.0)
    data = market_of(FIRST, quiet, quiet, deep, bar_range=0.01)
    patient, hold = [BUY, 2, LIMIT, PATIENT], [1, 0, MARKET, NORMAL]

    def run(*actions: list[int]) -> tuple[Market, np.ndarray]:
        market = Market(data, MarketSpec(episode_bars=3), 1)
        market.reset(stagger=False)
        return market, _traced(market, *actions)[1]

    market, _ = run(patient, patient)
    np.testing.assert_allclose((account(market, "order_price"), account(market, "order_units")), (99.5, 0.01))
    observed = dict(zip(ACCOUNT_FEATURES, market.observe()[0, 1:], strict=True))
    assert (observed["order_side"], observed["order_target"]) == (1.0, 1.0)
    assert observed["order_distance"] == pytest.approx((99.5 / 101.0 - 1.0) / 0.01, rel=1e-6)

    kept = run(patient, patient, patient)[1]  # the order of the first bar: 0.01 units at 99.5
    assert kept[2, 0] == pytest.approx(1.0 + 0.01 * (101.0 - 99.5), rel=1e-14)
    moved = run(patient, [BUY, 1, LIMIT, PATIENT], patient)[1]  # replaced at a close of 101: p = 100.495
    assert moved[2, 0] == pytest.approx(1.0 + (101.0 - 100.495) / 101.0, rel=1e-12)
    withdrawn = run(patient, hold, hold)[1]  # flat is asked for, and flat it is
    assert withdrawn[2].tolist() == [1.0, 0.0, 0.0, 0.0]
    expired = run([BUY, 2, LIMIT, NORMAL], hold, hold)[1]
    assert expired[2].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_entry_price_and_holding_time() -> None:
    """Open, hold, add, reduce, turn, close; the entry price is the mean of what was paid."""
    bars: list[Bar] = [(p, p, p, p) for p in (100.0, 100.0, 100.0, 110.0, 110.0, 120.0, 120.0)]
    market = Market(market_of(*bars, bar_range=0.01), MarketSpec(episode_bars=6), 1)
    market.reset(stagger=False)
    steps = [  # action, level, entry, held
        ([BUY, 0, MARKET, NORMAL], 1, 100.0, 0),
        ([BUY, 0, MARKET, NORMAL], 1, 100.0, 1),
        ([BUY, 2, MARKET, NORMAL], 3, (100.0 * 1 + 110.0 * 2) / 3, 2),  # sized at the close of 100: 0.01 units
        ([BUY, 1, MARKET, NORMAL], 2, (100.0 * 1 + 110.0 * 2) / 3, 3),
        ([SELL, 2, MARKET, NORMAL], -3, 120.0, 0),
        ([1, 2, MARKET, NORMAL], 0, 0.0, 0),
    ]
    for number, (action, level, entry, held) in enumerate(steps):
        transition = market.step([action])
        row = transition.next_state[0]
        side = float(np.sign(level))
        profit = side * (bars[number + 1][3] / entry - 1.0) / 0.01 if level else 0.0
        expected = [number + 1, side, abs(level) / 3, profit, held / (held + 24.0), 0, 0, 0, 0]
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-12, err_msg=f"step {number}")
    # 1/300 units earn 10 until 110, and what is added there nothing yet; the equity is 31/30 then, and two thirds of it
    # are held from 110 to 120.
    assert account(market, "final_equity") == pytest.approx(31.0 / 30.0 * (1.0 + 2.0 / 3.0 * 10.0 / 110.0), rel=1e-12)
    assert account(market, "final_trades") == 5


def test_closing_leaves_no_units() -> None:
    data = random_market(60, 2)
    market = Market(data, MarketSpec(episode_bars=59), 40)
    market.reset(stagger=False)
    rng = np.random.default_rng(0)
    for _ in range(20):
        market.step(rng.integers(0, 3, (40, 4)))
        market.step(np.tile([1, 0, MARKET, NORMAL], (40, 1)))
        np.testing.assert_array_equal(market.account[2], 0.0)
        np.testing.assert_array_equal(market.account[0], market.account[1])


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), leverage=st.sampled_from([0.5, 1.0, 3.0]))
def test_without_costs_equity_is_the_sum_of_positions_times_moves(seed: int, leverage: float) -> None:
    """Market orders fill at the open: what is held from open to open earns its moves, and nothing else does."""
    data = random_market(80, seed, volatility=0.003)
    market = Market(data, MarketSpec((3, 3), 79, max_position=leverage), 16, seed=seed)
    market.reset(stagger=False)
    rng = np.random.default_rng(seed)
    earned = np.zeros(16)
    for bar in range(78):
        before = market.account[2].copy()
        market.step(rng.integers(0, 3, (16, 2)))
        opened, close = data.prices[bar + 1, 0], data.prices[bar + 1, 3]
        earned += before * (opened - data.prices[bar, 3]) + market.account[2] * (close - opened)
        np.testing.assert_allclose(market.account[0], 1.0 + earned, rtol=0.0, atol=1e-12)


def test_long_for_ever_is_buy_and_hold() -> None:
    """Units bought at the first open by the first close's equity: the trades of the account are the market's."""
    data = random_market(2000, 4)
    trace = walk(data, MarketSpec((3,)), lambda o: np.full((len(o), 1), BUY))
    held = 1.0 + (data.bars.close[1:] - data.bars.open[1]) / data.bars.close[0]
    np.testing.assert_allclose(trace[1:, 0, 0], held, rtol=1e-12)
    assert (trace[1:, 3, 0] == 1.0).all()


def test_rewards_compound_to_the_equity() -> None:
    data = random_market(200, 8)
    market = Market(data, MarketSpec(episode_bars=199, reward_scale=1.0), 8, costs=COSTS)
    market.reset(stagger=False)
    rng, growth = np.random.default_rng(3), np.ones(8)
    for _ in range(150):
        before = market.account[0].copy()
        reward = market.step(rng.integers(0, 3, (8, 4))).reward
        np.testing.assert_allclose(market.account[0], before * (1.0 + reward), rtol=1e-7)
        growth *= 1.0 + reward.astype(np.float64)
    np.testing.assert_allclose(market.account[0], growth, rtol=1e-5)


# -- episodes ----------------------------------------------------------------------------------------------------


def test_an_episode_ends_by_time_and_begins_anew() -> None:
    data = random_market(200, 1)
    market = Market(data, MarketSpec(episode_bars=7), 300, seed=5)
    observation = market.reset(stagger=False)
    np.testing.assert_array_equal(observation[:, 5:], 0.0)
    rng = np.random.default_rng(1)
    for step in range(1, 22):
        bar = market.clock[CLOCK.index("bar")].copy()
        transition = market.step(rng.integers(0, 3, (300, 4)))
        np.testing.assert_array_equal(transition.next_state[:, :5], data.features[bar + 1])
        np.testing.assert_array_equal(transition.done, 2 if step % 7 == 0 else 0)
        if step % 7:
            np.testing.assert_array_equal(transition.observation, transition.next_state)
        else:
            start = market.clock[CLOCK.index("bar")]
            np.testing.assert_array_equal(transition.observation[:, :5], data.features[start])
            np.testing.assert_array_equal(transition.observation[:, 5:], 0.0)
            assert len(np.unique(start)) > 100 and start.min() >= 0 and start.max() <= 200 - 8


def test_ruin_terminates() -> None:
    """Three times the equity short: a rise by a fifth leaves 0.4 of it. A state that is at ruin is no truncation."""
    data = market_of(FIRST, (100.0, 120.0, 100.0, 120.0), (120.0, 120.0, 120.0, 120.0), bar_range=0.01)
    for episode in (1, 2):
        market = Market(data, MarketSpec(episode_bars=episode, max_position=3.0), 50)
        market.reset(stagger=False)
        first = market.clock[CLOCK.index("bar")] == 0
        transition = market.step(np.tile([SELL, 2, MARKET, NORMAL], (50, 1)))
        assert first.any()
        np.testing.assert_array_equal(transition.done[first], 1)
        np.testing.assert_allclose(transition.reward[first], -60.0, rtol=1e-6)
    np.testing.assert_allclose(market.account[ACCOUNT.index("final_equity")], 0.4, rtol=1e-12)


def test_staggered_starts_spread_the_ends() -> None:
    data, spec = random_market(400, 1), MarketSpec(episode_bars=50)
    market = Market(data, spec, 4000, seed=1)
    market.reset()
    bar, _, end = market.clock[:3]
    length = end - bar
    counts = np.bincount(length, minlength=51)
    assert counts[0] == 0 and length.max() == 50
    # chi-squared with 49 degrees of freedom: below 85.4 with probability 0.999
    assert ((counts[1:] - 80) ** 2 / 80).sum() < 85.4
    starts = np.bincount(bar, minlength=350)
    assert len(starts) == 350
    # 349 degrees of freedom: below 437
    assert ((starts - 4000 / 350) ** 2 / (4000 / 350)).sum() < 437


def test_labels_do_not_look_past_the_episode() -> None:
    data = random_market(30, 2, lookahead=3)
    market = Market(data, MarketSpec(episode_bars=8), 20, seed=2)
    market.reset(stagger=False)
    for step in range(8):
        bar = market.clock[0].copy()
        transition = market.step(np.ones((20, 4), int))
        expected = data.next_bar[bar] if step + 3 <= 8 else np.full(20, -1)
        np.testing.assert_array_equal(transition.nb_label, expected)
        np.testing.assert_array_equal(transition.regime_label, data.regime[bar])


def test_the_run_depends_on_seed_and_actions_alone() -> None:
    data, spec = random_market(100, 2), MarketSpec(episode_bars=9)

    def run(seed: int) -> np.ndarray:
        market, rng = Market(data, spec, 20, seed=seed), np.random.default_rng(0)
        market.reset()
        return np.stack([market.step(rng.integers(0, 3, (20, 4))).observation for _ in range(30)])

    np.testing.assert_array_equal(run(4), run(4))
    assert (run(4) != run(5)).any()


# -- no look-ahead -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 50, 117, 198])
def test_what_comes_later_changes_nothing_before(at: int) -> None:
    """Other prices and features after bar `at`: observations, fills and equity up to it have the same bits."""
    data, other = random_market(200, 3), random_market(200, 99)
    features = np.concatenate([data.features[: at + 1], other.features[at + 1 :]])
    prices = np.concatenate([data.prices[: at + 1], 3.0 * other.prices[at + 1 :]])
    changed = market_of(*map(tuple, prices), features=features, bar_range=data.bar_range, lookahead=3)
    seen, traces = [], []
    for one in (data, changed):
        rng, observations = np.random.default_rng(7), []

        def policy(observation: np.ndarray, rng: Any = rng, observations: Any = observations) -> np.ndarray:
            observations.append(observation)
            return rng.integers(0, 3, (16, 4))

        traces.append(walk(one, MarketSpec(), policy, 16, costs=COSTS))
        seen.append(np.stack(observations))
    np.testing.assert_array_equal(seen[0][: at + 1], seen[1][: at + 1])
    np.testing.assert_array_equal(traces[0][: at + 1], traces[1][: at + 1])
    assert (traces[0][at + 1] != traces[1][at + 1]).any()


def test_no_look_ahead_from_bars_to_observations() -> None:
    """The whole way from a file's bars: features, normaliser and typical range come from the past as well."""
    past, future = random_bars(1200, 1), random_bars(1200, 2)
    at = 1100
    markets = [
        market_data(make_dataset(bars, lookahead=2, validation=0.3))[1] for bars in (past, spliced(past, future, at))
    ]
    row = at - (1200 - len(markets[0]))
    traces = []
    for data in markets:
        rng = np.random.default_rng(5)
        traces.append(walk(data, MarketSpec(), lambda o, rng=rng: rng.integers(0, 3, (len(o), 4)), 4, costs=COSTS))
    assert 0 < row < len(markets[0]) - 1 and markets[0].bar_range == markets[1].bar_range
    np.testing.assert_array_equal(markets[0].features[: row + 1], markets[1].features[: row + 1])
    np.testing.assert_array_equal(traces[0][: row + 1], traces[1][: row + 1])


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"branches": ()}, "branches"),
        ({"branches": (3, 2)}, "branches"),
        ({"branches": (3,) * 5}, "branches"),
        ({"episode_bars": 0}, "episode_bars is 0"),
        ({"max_position": 0.0}, "max_position"),
        ({"max_position": float("nan")}, "max_position"),
        ({"limit_offsets": (0.1, 0.2)}, "limit_offsets"),
        ({"limit_offsets": (0.1, 0.2, -0.1)}, "limit_offsets"),
        ({"ruin": 1.0}, "ruin"),
        ({"reward_scale": float("inf")}, "reward_scale"),
        ({"held_half": -1.0}, "held_half"),
    ],
)
def test_bad_specs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MarketSpec(**change)


def test_bad_data() -> None:
    data = random_market(20, 1)
    for change, message in (
        ({"features": data.features[:19]}, r"float32 \[20, F\].*\(19, 5\)"),
        ({"features": data.features.astype(np.float64)}, "float64"),
        ({"regime": data.regime[1:]}, r"regime must be int32 \(20,\)"),
        ({"next_bar": data.next_bar.astype(np.int64)}, "next_bar must be int32"),
        ({"lookahead": 0}, "lookahead"),
        ({"bar_range": 0.0}, "bar_range"),
        ({"bars": data.bars[:1]}, "at least 2 bars, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(data, **change)
    features = data.features.copy()
    features[3, 2] = features[9, 0] = np.nan
    with pytest.raises(ValueError, match="feature 2 of bar 3 is nan and 1 more"):
        replace(data, features=features)
    with pytest.raises(ValueError, match="21 bars, got 20"):
        Market(data, MarketSpec(episode_bars=20), 1)
    with pytest.raises(ValueError, match="at or below 0"):
        Market(replace(data, bar_range=2.0), MarketSpec(episode_bars=5), 1)
    with pytest.raises(ValueError, match="environments"):
        Market(data, MarketSpec(episode_bars=5), 0)
    with pytest.raises(ValueError, match="fee must be in"):
        MarketCosts(fee=-0.1)


def test_bad_actions() -> None:
    market = Market(random_market(20, 1), MarketSpec(episode_bars=5), 2)
    market.reset()
    with pytest.raises(ValueError, match=r"integers \(2, 4\), got int64 \(2, 3\)"):
        market.step(np.ones((2, 3), int))
    with pytest.raises(ValueError, match="float64"):
        market.step(np.ones((2, 4)))
    with pytest.raises(ValueError, match="action 3 of environment 1, branch order type"):
        market.step([[1, 1, 1, 1], [1, 1, 3, 1]])
