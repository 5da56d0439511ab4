"""Windowed sums, moments and extremes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.data.rolling import rolling_max, rolling_min, rolling_moments, rolling_sum
from tests.support import assert_close


@given(seed=st.integers(0, 2**31), window=st.integers(1, 70), count=st.integers(1, 100))
@settings(max_examples=60)
def test_rolling_windows_against_plain_loops(seed: int, window: int, count: int) -> None:
    values = np.random.default_rng(seed).normal(3.0, 1.0, count)
    mean, spread = rolling_moments(values, window)
    rows = {
        "sum": (rolling_sum(values, window), lambda part: part.sum()),
        "decayed": (rolling_sum(values, window, 0.9), lambda part: (part[::-1] * 0.9 ** np.arange(window)).sum()),
        "max": (rolling_max(values, window), np.max),
        "min": (rolling_min(values, window), np.min),
        "mean": (mean, np.mean),
        "spread": (spread, lambda part: ((part - part.mean()) ** 2).sum()),
    }
    for name, (result, plain) in rows.items():
        expected = [plain(values[t - window + 1 : t + 1]) if t >= window - 1 else np.nan for t in range(count)]
        assert_close(result, expected, name=name, atol=1e-11)


def test_rolling_windows_of_equal_values_have_no_spread() -> None:
    mean, spread = rolling_moments(np.full(50, 0.1), 23)
    assert (mean[22:] == 0.1).all() and (spread[22:] == 0.0).all()


def test_rolling_windows_need_a_window() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        rolling_sum(np.ones(3), 0)


@given(seed=st.integers(0, 2**31), window=st.integers(1, 40), start=st.integers(0, 50))
@settings(max_examples=40)
def test_windows_have_the_same_bits_wherever_the_array_begins(seed: int, window: int, start: int) -> None:
    values = np.random.default_rng(seed).normal(size=100) * 10.0 ** np.random.default_rng(seed).integers(-9, 9, 100)
    from_start, part = start + window - 1, values[start:]
    for whole, later in (
        (rolling_sum(values, window), rolling_sum(part, window)),
        (rolling_sum(values, window, 0.7), rolling_sum(part, window, 0.7)),
        *zip(rolling_moments(values, window), rolling_moments(part, window), strict=True),
    ):
        assert whole[from_start:].tobytes() == later[window - 1 :].tobytes()


def test_nan_in_the_window_gives_nan_and_only_there() -> None:
    values = np.arange(20.0)
    values[5] = np.nan
    for result in (rolling_sum(values, 3), rolling_max(values, 3), rolling_min(values, 3), *rolling_moments(values, 3)):
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(result)), [0, 1, 5, 6, 7])
