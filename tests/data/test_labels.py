"""Labels of direction and of volatility."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.data import DataError, next_bar_labels, regime_edges, regime_labels, trailing_volatility
from tests.data.makers import random_bars
from tests.support import assert_close


def test_100_bars_with_lookahead_60_give_60_masked_and_40_valid() -> None:
    labels = next_bar_labels(np.linspace(1.0, 2.0, 100), 60)
    assert labels.dtype == np.int32 and labels.shape == (100,)
    assert (labels[:40] == 1).all() and (labels[40:] == -1).all()
    assert (next_bar_labels(np.linspace(2.0, 1.0, 100), 60)[:40] == 0).all()


def test_equal_closes_are_masked() -> None:
    np.testing.assert_array_equal(next_bar_labels([1.0, 2.0, 2.0, 1.0], 1), [1, -1, 0, -1])


def test_lookahead_past_all_data_masks_all() -> None:
    for lookahead in (3, 4, 100):
        np.testing.assert_array_equal(next_bar_labels([1.0, 2.0, 3.0], lookahead), [-1, -1, -1])
    assert next_bar_labels([], 1).shape == (0,)


def test_labels_stop_at_the_end_of_the_episode() -> None:
    close = np.arange(1.0, 11.0)
    expected = [1, 1, -1, -1, 1, 1, 1, 1, -1, -1]
    for ends in ([3], [3, 9], [9, 3], np.arange(10) == 3, np.array([3], np.uint8)):
        np.testing.assert_array_equal(next_bar_labels(close, 2, ends), expected)
    np.testing.assert_array_equal(next_bar_labels(close, 2, []), [1] * 8 + [-1] * 2)
    np.testing.assert_array_equal(next_bar_labels(close, 1, np.ones(10, bool)), [-1] * 10)


@settings(max_examples=60)
@given(
    close=st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=1, max_size=40),
    lookahead=st.integers(1, 45),
    data=st.data(),
)
def test_labels_against_a_plain_loop(close: list[float], lookahead: int, data: st.DataObject) -> None:
    ends = data.draw(st.none() | st.lists(st.integers(0, len(close) - 1), max_size=5))
    labels = next_bar_labels(close, lookahead, ends)
    for t, now in enumerate(close):
        last = min([end for end in ends or [] if end >= t], default=len(close) - 1)
        expected = -1
        if t + lookahead <= last and close[t + lookahead] != now:
            expected = int(close[t + lookahead] > now)
        assert labels[t] == expected, t


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (([1.0, 2.0], 0), "lookahead is 0, expected a whole number, at least 1"),
        (([1.0, 2.0], 1.5), "lookahead is 1.5"),
        (([[1.0, 2.0]], 1), r"close has shape \(1, 2\)"),
        (([1.0, np.nan, 2.0], 1), "bar 1, column 'close': nan is not finite"),
        (([1.0, 2.0], 1, [2]), "position 2 lies outside the 2 bars"),
        (([1.0, 2.0], 1, [-1]), "position -1 lies outside"),
        (([1.0, 2.0], 1, [True]), r"episode_ends is bool \(1,\), close has 2 bars"),
        (([1.0, 2.0], 1, [0.5]), "episode_ends is float64"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        next_bar_labels(*arguments)


def test_trailing_volatility_is_the_root_mean_square_of_the_last_returns() -> None:
    close = random_bars(60, seed=2).close
    volatility = trailing_volatility(close, 7)
    assert np.isnan(volatility[:7]).all()
    returns = np.diff(np.log(close))
    assert_close(volatility[7:], [np.sqrt((returns[t - 7 : t] ** 2).mean()) for t in range(7, 60)], atol=1e-15)
    with pytest.raises(DataError, match="bar 1, column 'close': price -2 is not positive"):
        trailing_volatility([1.0, -2.0], 1)
    with pytest.raises(DataError, match="volatility window is 0"):
        trailing_volatility(close, 0)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), count=st.integers(20, 200), regimes=st.integers(2, 6))
def test_regimes_are_equally_filled_on_the_rows_that_made_the_edges(seed: int, count: int, regimes: int) -> None:
    volatility = np.random.default_rng(seed).lognormal(size=count)
    edges = regime_edges(volatility, regimes)
    labels = regime_labels(volatility, edges)
    assert edges.shape == (regimes - 1,) and labels.dtype == np.int32
    filled = np.bincount(labels, minlength=regimes)
    assert len(filled) == regimes and filled.max() - filled.min() <= 2
    order = np.argsort(volatility)
    assert (np.diff(labels[order]) >= 0).all()


def test_a_value_on_an_edge_belongs_to_the_upper_regime_and_nan_is_masked() -> None:
    labels = regime_labels([0.5, 1.0, 1.5, 2.0, np.inf, np.nan, -1.0], [1.0, 2.0])
    np.testing.assert_array_equal(labels, [0, 1, 1, 2, 2, -1, 0])


@pytest.mark.parametrize("volatility", [[0.0] * 10, [0.0] * 6 + [1.0, 2.0, 3.0, 4.0], [1.0] * 4 + list(range(2, 11))])
def test_ties_that_leave_a_regime_empty_are_refused(volatility: list[float]) -> None:
    with pytest.raises(DataError, match=r"cannot be cut into 4 regimes.*Ask for fewer regimes"):
        regime_edges(volatility, 4)


def test_bad_regimes_are_named() -> None:
    with pytest.raises(DataError, match="regimes is 1, expected a whole number, at least 2"):
        regime_edges([1.0, 2.0], 1)
    with pytest.raises(DataError, match="3 values of volatility given, 4 regimes need at least 4"):
        regime_edges([1.0, 2.0, 3.0], 4)
    with pytest.raises(DataError, match="bar 0, column 'volatility': nan"):
        regime_edges([np.nan, 2.0, 3.0], 2)
    for edges in ([2.0, 1.0], [1.0, 1.0], []):
        with pytest.raises(DataError, match="strictly increasing"):
            regime_labels([1.0], edges)
