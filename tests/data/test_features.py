"""Features: values against plain loops, no look-ahead, the same bits wherever the bars begin."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.data import (
    DEFAULT_FEATURES,
    FAMILIES,
    Bars,
    DataError,
    FeatureSpec,
    Normalizer,
    build_features,
    demo_bars,
)
from tests.data.makers import random_bars, spliced
from tests.support import assert_close

SMALL = FeatureSpec(
    tuple(f"{name}_{max(family.smallest, 5)}" if family.smallest else name for name, family in FAMILIES.items())
)
"""Every family once, with short windows."""


def logs(bars: Bars) -> tuple[np.ndarray, ...]:
    return np.log(bars.open), np.log(bars.high), np.log(bars.low), np.log(bars.close), np.log1p(bars.volume)


def reference(bars: Bars, name: str, t: int) -> float:
    """The feature as its documentation says it, one bar at a time in float64."""
    o, h, l, c, v = logs(bars)  # noqa: E741
    r = np.concatenate([[np.nan], np.diff(c)])
    stem, _, digits = name.rpartition("_")
    w = int(digits) if digits.isdigit() else 0
    last = slice(t - w + 1, t + 1)
    minutes = int(bars.time[t].astype("int64")) // 60_000_000_000
    week_minutes = (minutes - 4 * 1440) % (7 * 1440)
    plain: dict[str, Callable[[], float]] = {
        "range": lambda: h[t] - l[t],
        "body": lambda: c[t] - o[t],
        "upper_wick": lambda: h[t] - max(o[t], c[t]),
        "lower_wick": lambda: min(o[t], c[t]) - l[t],
        "gap": lambda: o[t] - c[t - 1],
        "close_location": lambda: 2 * (c[t] - l[t]) / (h[t] - l[t]) - 1 if h[t] > l[t] else 0.0,
        "volume_change": lambda: v[t] - v[t - 1],
        "bar_gap": lambda: math.log1p((bars.time[t] - bars.time[t - 1]) / np.timedelta64(1, "m")),
        "hour_sin": lambda: math.sin(2 * math.pi * (minutes % 1440) / 1440),
        "hour_cos": lambda: math.cos(2 * math.pi * (minutes % 1440) / 1440),
        "week_sin": lambda: math.sin(2 * math.pi * week_minutes / (7 * 1440)),
        "week_cos": lambda: math.cos(2 * math.pi * week_minutes / (7 * 1440)),
    }
    if name in plain:
        return float(plain[name]())

    def ema() -> float:
        mean = c[t - 2 * w]
        for i in range(t - 2 * w + 1, t + 1):
            mean += 2.0 / (w + 1.0) * (c[i] - mean)
        return c[t] - mean

    def rsi() -> float:
        gain, loss = np.maximum(r[last], 0).sum(), np.maximum(-r[last], 0).sum()
        return 2 * gain / (gain + loss) - 1 if gain + loss > 0 else 0.0

    def position() -> float:
        lowest, highest = l[last].min(), h[last].max()
        return 2 * (c[t] - lowest) / (highest - lowest) - 1 if highest > lowest else 0.0

    def autocorrelation() -> float:
        now, before = r[last], r[t - w : t]
        scale = math.sqrt((now**2).sum() * (before**2).sum())
        return float((now * before).sum() / scale) if scale > 0 else 0.0

    def volume_z() -> float:
        return float((v[t] - v[last].mean()) / v[last].std()) if np.ptp(v[last]) > 0 else 0.0

    windowed: dict[str, Callable[[], float]] = {
        "return": lambda: c[t] - c[t - w],
        "lag_return": lambda: r[t - w],
        "volatility": lambda: math.sqrt((r[last] ** 2).mean()),
        "rsi": rsi,
        "ma_distance": lambda: c[t] - c[last].mean(),
        "ema_distance": ema,
        "position": position,
        "autocorrelation": autocorrelation,
        "volume_z": volume_z,
        "volume_ratio": lambda: v[t] - v[last].mean(),
        "parkinson": lambda: math.sqrt(((h[last] - l[last]) ** 2).mean() / (4 * math.log(2))),
    }
    return float(windowed[stem]())


def test_the_default_state_is_48_different_features_in_six_tokens() -> None:
    spec = FeatureSpec()
    assert spec.size == 48 == len(set(spec.names)) and spec.names == DEFAULT_FEATURES
    tokens = [spec.names[at : at + 8] for at in range(0, 48, 8)]
    stems = [[name.rpartition("_")[0] for name in token] for token in tokens[2:]]
    assert stems[0] == stems[1] == stems[2] == stems[3]


def test_every_default_feature_of_the_demo_bars_says_something() -> None:
    features = build_features(demo_bars())
    assert features.values.shape == (6225, 48) and features.values.dtype == np.float32
    assert features.first_valid == FeatureSpec().lookback == 240
    assert np.isnan(features.values[:240]).all() and np.isfinite(features.valid).all()
    assert (features.valid.std(axis=0) > 0).all()
    correlation = np.corrcoef(features.valid.astype(np.float64).T)
    np.fill_diagonal(correlation, 0.0)
    assert np.abs(correlation).max() < 0.9999, "two features are the same"


@pytest.mark.parametrize("name", [*SMALL.names, "return_1", "ema_distance_12", "volume_z_24", "rsi_1", "position_1"])
def test_values_are_what_the_documentation_says(name: str) -> None:
    bars = random_bars(80, seed=11, flat=0.3)
    features = build_features(bars, FeatureSpec((name,)))
    expected = [reference(bars, name, t) for t in range(features.first_valid, len(bars))]
    assert_close(features.valid[:, 0], expected, name=name, factor=4, atol=1e-7)


@pytest.mark.parametrize("name", SMALL.names)
def test_the_look_back_is_exact(name: str) -> None:
    """Bar t - lookback changes the feature at t (for some t), bar t - lookback - 1 never does."""
    spec = FeatureSpec((name,))
    bars, other = random_bars(60, seed=5, flat=0.0), random_bars(60, seed=6, flat=0.0)
    changed_at_edge = False
    for t in range(30, 60):
        for distance in (spec.lookback, spec.lookback + 1):
            row = t - distance
            # Replace everything up to `row`: time too, but in order.
            values = {
                column: np.concatenate([2 * getattr(other, column)[: row + 1], getattr(bars, column)[row + 1 :]])
                for column in ("open", "high", "low", "close", "volume")
            }
            time = np.concatenate([bars.time[: row + 1] - np.timedelta64(7, "m"), bars.time[row + 1 :]])
            altered = Bars.from_arrays(time, **values)
            same = build_features(altered, spec).values[t] == build_features(bars, spec).values[t]
            if distance == spec.lookback:
                changed_at_edge |= not same.all()
            else:
                assert same.all(), f"bar {t} reads bar {row}"
    assert changed_at_edge


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), data=st.data(), flat=st.sampled_from([0.0, 0.2, 0.9]))
def test_no_feature_looks_ahead(seed: int, data: st.DataObject, flat: float) -> None:
    """All bars after t replaced: every feature and normalised feature up to t keeps its bits."""
    spec = data.draw(st.sampled_from([SMALL, FeatureSpec()]))
    count = spec.lookback + data.draw(st.integers(2, 120))
    t = data.draw(st.integers(spec.lookback, count - 2))
    bars = random_bars(count, seed, flat=flat)
    altered = spliced(bars, random_bars(count, seed + 1, flat=flat), t)
    assert (altered.close[t + 1 :] != bars.close[t + 1 :]).any()
    before, after = build_features(bars, spec), build_features(altered, spec)
    assert before.values[: t + 1].tobytes() == after.values[: t + 1].tobytes()
    assert before.values[t + 1 :].tobytes() != after.values[t + 1 :].tobytes()
    training = slice(spec.lookback, t + 1)
    scaled = [Normalizer.fit(f.values[training]).apply(f.values)[: t + 1] for f in (before, after)]
    assert scaled[0].tobytes() == scaled[1].tobytes()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_the_last_bars_give_the_bits_of_the_whole_history(seed: int, data: st.DataObject) -> None:
    spec = data.draw(st.sampled_from([SMALL, FeatureSpec()]))
    count = spec.lookback + data.draw(st.integers(2, 150))
    bars = random_bars(count, seed)
    whole = build_features(bars, spec)
    start = data.draw(st.integers(0, count - spec.lookback - 1))
    stop = data.draw(st.integers(start + spec.lookback + 1, count))
    part = build_features(bars[start:stop], spec)
    assert part.valid.tobytes() == whole.values[start + spec.lookback : stop].tobytes()
    np.testing.assert_array_equal(part.time, bars.time[start:stop])


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-6, 150.0, 1e9]))
@settings(max_examples=10)
def test_another_unit_of_price_gives_the_same_features(seed: int, scale: float) -> None:
    bars = random_bars(120, seed, flat=0.0)
    prices = [scale * getattr(bars, name) for name in ("open", "high", "low", "close")]
    scaled = Bars.from_arrays(bars.time, *prices, bars.volume)
    # Rounding of a log around 20 is 4e-15; over the smallest move here that stays below 1e-6.
    assert_close(build_features(scaled, SMALL).valid, build_features(bars, SMALL).valid, atol=2e-6, factor=8)


def test_bars_that_do_not_move_give_exact_zeros() -> None:
    bars = random_bars(300, seed=1, flat=1.0)
    bars = Bars.from_arrays(bars.time, *[np.full(300, 1.1)] * 4, np.full(300, 3.3))
    features = build_features(bars)
    still = [i for i, name in enumerate(features.names) if not name.startswith(("hour", "week", "bar_gap"))]
    assert not features.valid[:, still].any()


def test_too_few_bars() -> None:
    with pytest.raises(DataError, match=r"too short: 240 bars given, a state of 48 .* needs at least 241"):
        build_features(random_bars(240, seed=0))
    assert build_features(random_bars(241, seed=0)).valid.shape == (1, 48)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ((), "at least one feature"),
        (("body", "range", "body"), r"more than once: \['body'\]"),
        (("magic",), "unknown feature 'magic'; there are range, body"),
        (("return",), "unknown feature 'return'"),
        (("return_x",), "unknown feature"),
        (("return_0",), "needs at least 1"),
        (("volume_z_1",), "window 1 is too small, volume_z needs at least 2"),
        (("body_3",), "unknown feature 'body_3'"),
    ],
)
def test_names_are_checked(names: tuple[str, ...], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        FeatureSpec(names)


def test_specs_describe_themselves_and_can_be_pickled() -> None:
    spec = FeatureSpec(("body", "volatility_24"))
    assert pickle.loads(pickle.dumps(spec)) == spec
    lines = spec.describe().splitlines()
    assert len(lines) == 2 and "volatility_24" in lines[1] and "24 bars back" in lines[1]
