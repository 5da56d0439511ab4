"""Transitions of the demonstration policy: against plain loops, and nothing of them looks ahead."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxengine.config import StepConfig
from fxengine.data import Bars, DataError, Dataset, FeatureSpec, demo_bars, make_dataset
from fxengine.data.transitions import (
    BRANCHES,
    FEE_SHARES,
    FLAT,
    LONG,
    ORDER_FLOW,
    SHORT,
    SIZES,
    SPREAD_SHARES,
    WARM_UP,
    Transitions,
    TransitionSet,
    TransitionSettings,
    make_transitions,
)
from tests.data.makers import random_bars, spliced

SHAPE = FeatureSpec(("return_1", "body", "volatility_6", "hour_sin"))


def _dataset(bars: Bars, lookahead: int = 1, validation: float = 0.3) -> Dataset:
    return make_dataset(bars, lookahead, 3, validation, features=SHAPE)


def _hourly(close: np.ndarray, gaps: tuple[int, ...] = ()) -> Bars:
    """Bars an hour apart, two days apart behind the positions in `gaps`."""
    wait = np.ones(len(close), np.int64)
    wait[[at + 1 for at in gaps]] = 48
    time = np.datetime64("2017-01-02T00:00", "ns") + np.cumsum(wait) * np.timedelta64(1, "h")
    volume = 100.0 + np.arange(len(close)) % 7
    return Bars.from_arrays(time, close, close * 1.001, close * 0.999, close, volume)


def test_what_the_step_reads() -> None:
    dataset = make_dataset(demo_bars())
    transitions = make_transitions(dataset)
    config = StepConfig()
    for part, source in ((transitions.train, dataset.train), (transitions.validation, dataset.validation)):
        inputs = part.inputs()
        shapes = {
            "state": (48,), "next_state": (48,), "reward": (), "discount": (), "weight": (), "actions": (4,),
            "nb_label": (), "regime_label": (), "ofi": (config.ofi,), "next_ofi": (config.ofi,),
        }  # fmt: skip
        assert {name: array.shape for name, array in inputs.items()} == {
            name: (len(part), *shape) for name, shape in shapes.items()
        }
        for name, array in inputs.items():
            assert array.dtype == (np.int32 if name in ("actions", "nb_label", "regime_label") else np.float32), name
            assert np.isfinite(array).all(), name
        assert 0.9 * len(source) < len(part) < len(source)
        assert (np.diff(part.rows) > 0).all()
        assert (part.weight == 1.0).all()
        assert set(np.unique(part.discount)) == {np.float32(0.0), np.float32(0.5)}
        assert np.abs(part.reward).max() <= 10.0
        for branch, count in enumerate(BRANCHES):
            assert set(np.unique(part.actions[:, branch])) == set(range(count))
        np.testing.assert_array_equal(part.nb_label, source.next_bar[part.rows])
        np.testing.assert_array_equal(part.regime_label, source.regime[part.rows])
        chosen = part.inputs(np.array([3, 1]))
        np.testing.assert_array_equal(chosen["reward"], part.reward[[3, 1]])
    assert transitions.train.rows[0] == WARM_UP
    assert transitions.validation.rows[0] == 0
    assert len(ORDER_FLOW) == config.ofi
    assert np.abs(transitions.train.ofi.std(axis=0) - 1.0).max() < 0.1
    weekends = np.count_nonzero(transitions.train.discount == 0.0)
    assert 38 <= weekends <= 42, "a year's first forty weeks"


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(120, 300),
    steps=st.integers(1, 9),
    gamma=st.floats(0.5, 0.99),
    episode=st.integers(2, 40),
)
def test_against_plain_loops(seed: int, count: int, steps: int, gamma: float, episode: int) -> None:
    bars = random_bars(count, seed, flat=0.05)
    try:
        dataset = _dataset(bars)
    except DataError:
        assume(False)
    wanted = TransitionSettings(steps=steps, gamma=gamma, episode=episode, seed=seed % 7)
    made = make_transitions(dataset, wanted)
    split = len(dataset.train)
    close = np.concatenate([dataset.train.bars.close, dataset.validation.bars.close])
    hours = np.concatenate([dataset.train.bars.time, dataset.validation.bars.time]).astype(np.int64) / 3.6e12
    states = np.concatenate([dataset.train.states, dataset.validation.states])
    usual = float(np.median(np.diff(hours[:split])))

    ends, age = [], 0
    for t in range(len(close)):
        age += 1
        over = t + 1 == len(close) or t + 1 == split or age == episode or hours[t + 1] - hours[t] > 3.0 * usual
        ends.append(over)
        age = 0 if over else age

    parts = {True: made.train, False: made.validation}
    rows = {True: iter(range(len(made.train))), False: iter(range(len(made.validation)))}
    for t in range(WARM_UP, len(close)):
        if ends[t]:
            continue
        part, at = parts[t < split], next(rows[t < split])
        then, earned = t, 0.0
        while then < t + steps and not ends[then]:
            earned += gamma ** (then - t) * 1e4 * math.log(close[then + 1] / close[then])
            then += 1
        direction, magnitude, order, urgency = part.actions[at]
        held = (direction - FLAT) * SIZES[magnitude]
        cost = wanted.spread * SPREAD_SHARES[order] + wanted.fee * FEE_SHARES[urgency]
        reward = (held * earned - abs(held) * cost) / made.scale
        assert part.rows[at] == t - (0 if t < split else split)
        assert part.reward[at] == pytest.approx(min(max(reward, -10.0), 10.0), rel=1e-4, abs=1e-5)
        assert part.discount[at] == pytest.approx(0.0 if ends[then] else gamma**steps)
        np.testing.assert_array_equal(part.state[at], states[t])
        np.testing.assert_array_equal(part.next_state[at], states[then])
    assert all(next(left, None) is None for left in rows.values()), "no transition too many"


def _same(a: Transitions, b: Transitions, rows: np.ndarray, names: tuple[str, ...]) -> None:
    for name in names:
        np.testing.assert_array_equal(getattr(a, name)[rows], getattr(b, name)[rows], err_msg=name)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), cut=st.integers(5, 80), steps=st.integers(1, 5))
def test_nothing_looks_ahead(seed: int, cut: int, steps: int) -> None:
    """Other prices behind a bar of the validation part leave all that was known at it as it was."""
    past, future = random_bars(400, seed), random_bars(400, seed + 1)
    try:
        first = _dataset(past)
        at = first.validation.start + cut
        second = _dataset(spliced(past, future, at))
    except DataError:
        assume(False)
    # The same hours: waits differ behind the cut only, episodes of both end where they did before it.
    a, b = (make_transitions(d, TransitionSettings(steps=steps, episode=10**6, gap=1e9)) for d in (first, second))
    assert a.scale == b.scale
    _same(a.train, b.train, np.arange(len(a.train)), tuple(vars(a.train)))
    known = np.flatnonzero(a.validation.rows <= cut)
    _same(a.validation, b.validation, known, ("rows", "state", "actions", "regime_label", "ofi", "weight"))
    over = np.flatnonzero(a.validation.rows + steps <= cut)
    _same(a.validation, b.validation, over, ("next_state", "next_ofi", "reward", "discount"))


def test_training_reads_no_bar_of_validation() -> None:
    """With every price of the validation part another one, the training part is the same to the bit."""
    past, future = random_bars(400, 3), random_bars(400, 4)
    first = _dataset(past, lookahead=4)
    second = _dataset(spliced(past, future, first.validation.start - 1), lookahead=4)
    a, b = make_transitions(first), make_transitions(second)
    assert a.settings.steps == 4, "s' is as far ahead as the label"
    assert not np.array_equal(a.validation.state, b.validation.state)
    _same(a.train, b.train, np.arange(len(a.train)), tuple(vars(a.train)))


def test_gaps_and_length_end_episodes() -> None:
    close = 1.1 * np.exp(np.cumsum(np.random.default_rng(0).normal(0.0, 1e-3, 200)))
    dataset = _dataset(_hourly(close, gaps=(99,)), validation=0.2)
    made = make_transitions(dataset, TransitionSettings(steps=3))
    rows = made.train.rows + dataset.train.start
    ended = rows[made.train.discount == 0.0]
    assert 99 not in rows, "the last bar before the gap starts no transition"
    assert {96, 97, 98} <= set(ended.tolist()), "three bars ahead: these three reach the gap"
    assert 95 not in ended and 100 not in ended
    short = make_transitions(_dataset(_hourly(close), validation=0.2), TransitionSettings(steps=1, episode=20))
    assert (np.diff(short.train.rows[short.train.discount == 0.0]) == 20).all()


@pytest.mark.parametrize(("drift", "direction"), [(1e-3, LONG), (-1e-3, SHORT), (0.0, FLAT)])
def test_the_policy_follows_the_momentum(drift: float, direction: int) -> None:
    # After six bars the price is nearly where it was, and the volatility rises slowly, so that there are regimes.
    wiggle = 1e-5 * np.resize([1.0, -1.0, 2.0, -2.0, 3.0, -3.0], 150) * (1.0 + np.arange(150) / 1000.0)
    dataset = _dataset(_hourly(1.1 * np.exp(np.arange(150) * drift + wiggle)))
    made = make_transitions(dataset, TransitionSettings(explore=0.0))
    assert (made.train.actions[:, 0] == direction).all()
    if direction != FLAT:
        assert (made.train.reward > 0.0).all(), "the trend pays more than it costs"
    else:
        assert (made.train.reward == 0.0).all(), "no position, no cost"


def test_exploration_is_seeded_and_uniform() -> None:
    dataset = make_dataset(demo_bars())

    def made(**values: float) -> TransitionSet:
        return make_transitions(dataset, TransitionSettings(**values))  # type: ignore[arg-type]

    np.testing.assert_array_equal(made(seed=1).train.actions, made(seed=1).train.actions)
    assert (made(seed=1).train.actions != made(seed=2).train.actions).any()
    np.testing.assert_array_equal(made(seed=1, explore=0.0).train.actions, made(seed=2, explore=0.0).train.actions)
    ruled = made(explore=0.0).train.actions
    changed = np.mean(made(explore=0.3).train.actions != ruled, axis=0)
    np.testing.assert_allclose(changed, 0.3 * 2.0 / 3.0, atol=0.03)
    drawn = made(explore=1.0).train.actions
    for branch in range(4):
        np.testing.assert_allclose(np.bincount(drawn[:, branch]) / len(drawn), 1.0 / 3.0, atol=0.03)


def test_rewards_fit_the_atoms() -> None:
    """One unit held for ever: its discounted returns have a quarter of the atoms' half width as deviation."""
    dataset = make_dataset(demo_bars())
    for v_max, gamma in ((10.0, 0.95), (1.0, 0.5)):
        made = make_transitions(dataset, TransitionSettings(v_min=-v_max, v_max=v_max, gamma=gamma))
        returns = np.diff(np.log(dataset.train.bars.close)) * 1e4 / made.scale
        held = np.array([np.sum(returns[t : t + 400] * gamma ** np.arange(400)) for t in range(len(returns) - 400)])
        assert held.std() == pytest.approx(0.25 * v_max, rel=0.15)
        assert np.abs(made.train.reward).max() <= np.float32(v_max)


def test_describe() -> None:
    text = make_transitions(make_dataset(demo_bars(), lookahead=3)).describe()
    for words in ("demonstration policy", "3 bars ahead", "gamma 0.5", "basis points", "train: ", "validation: "):
        assert words in text, text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"gamma": 1.0}, "gamma is 1.0"),
        ({"explore": 1.5}, "explore is 1.5"),
        ({"spread": -0.1}, "spread is -0.1"),
        ({"fee": math.nan}, "fee is nan"),
        ({"episode": 1}, "episode is 1"),
        ({"gap": 1.0}, "gap is 1.0"),
        ({"v_min": 0.0}, "v_min is 0.0"),
        ({"v_max": -1.0}, "v_max is -1.0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_settings(values: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        TransitionSettings(**values)  # type: ignore[arg-type]


def test_too_few_rows() -> None:
    with pytest.raises(DataError, match="training part needs more than 31 rows"):
        make_transitions(_dataset(random_bars(60, 0)))
