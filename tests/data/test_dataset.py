"""Training and validation parts: nothing of the later one reaches the earlier one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxengine.data import (
    Bars,
    DataError,
    FeatureSpec,
    build_features,
    demo_bars,
    make_dataset,
    next_bar_labels,
    trailing_volatility,
)
from tests.data.makers import random_bars, spliced

SHORT = FeatureSpec(("return_1", "body", "volatility_6", "position_6", "volume_z_6", "hour_sin"))


def test_the_demo_dataset() -> None:
    dataset = make_dataset(demo_bars())
    train, validation = dataset.train, dataset.validation
    assert len(train) == 4788 and len(validation) == 1197 and train.start == 240 and validation.start == 5028
    assert dataset.state_size == 48 and dataset.regimes == 4
    assert train.time[-1] < validation.time[0]
    for part in (train, validation):
        assert part.states.shape == (len(part), 48) and part.states.dtype == np.float32
        assert part.next_bar.dtype == part.regime.dtype == np.int32
        assert np.isfinite(part.states).all() and np.abs(part.states).max() <= 5.0
        assert set(np.unique(part.regime)) == {0, 1, 2, 3}
        assert set(np.unique(part.next_bar)) == {-1, 0, 1}
    np.testing.assert_array_equal(np.bincount(train.regime), [1197] * 4)
    assert np.abs(train.states.astype(np.float64).mean(axis=0)).max() < 0.1


def test_describe_names_what_matters() -> None:
    dataset = make_dataset(demo_bars(), lookahead=3)
    text = dataset.describe()
    for part in ("48 features", "3 ahead", "4788 rows", "1197 rows", "2017-10-20T08:00", "majority baseline"):
        assert part in text, text
    assert "constant" not in text
    bars = demo_bars()
    quiet = Bars.from_arrays(bars.time, bars.open, bars.high, bars.low, bars.close)
    assert "constant in training, so always 0: volume_change, volume_z_6" in make_dataset(quiet).describe()


def test_a_dataset_can_be_pickled() -> None:
    dataset = make_dataset(random_bars(200, seed=0), features=SHORT)
    again = pickle.loads(pickle.dumps(dataset))
    assert again.train.states.tobytes() == dataset.train.states.tobytes() and again.spec == dataset.spec


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    count=st.integers(60, 400),
    lookahead=st.integers(1, 12),
    validation=st.floats(0.05, 0.95),
    window=st.integers(1, 30),
)
def test_parts(seed: int, count: int, lookahead: int, validation: float, window: int) -> None:
    bars = random_bars(count, seed, flat=0.02)
    try:
        dataset = make_dataset(bars, lookahead, 2, validation, window, features=SHORT)
    except DataError as error:
        assume("too short" not in str(error) and "cannot be cut" not in str(error))
        raise
    train, held = dataset.train, dataset.validation
    first = max(SHORT.lookback, window)
    # Together the parts are the bars after the warm-up, in order, each once.
    assert train.start == first and held.start == first + len(train) and held.start + len(held) == count
    assert train.bars == bars[first : held.start] and held.bars == bars[held.start :]
    assert abs(len(held) - validation * (count - first)) <= 0.5 + 1e-9
    # Labels are those of the whole, except that the last training rows are masked, and at least one is left in both.
    labels = next_bar_labels(bars.close, lookahead)
    np.testing.assert_array_equal(held.next_bar, labels[held.start :])
    np.testing.assert_array_equal(train.next_bar[:-lookahead], labels[first : held.start - lookahead])
    assert (train.next_bar[-lookahead:] == -1).all() and len(train) > lookahead and len(held) > lookahead
    assert (held.next_bar[-lookahead:] == -1).all()
    assert (train.regime >= 0).all() and (held.regime >= 0).all()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), lookahead=st.integers(1, 8), flat=st.sampled_from([0.0, 0.2]))
def test_the_validation_part_never_reaches_the_training_part(seed: int, lookahead: int, flat: float) -> None:
    """Other bars in the validation part: the training part and all fitted statistics keep their bits."""
    bars = random_bars(300, seed, flat=flat)
    dataset = make_dataset(bars, lookahead, features=SHORT)
    altered_bars = spliced(bars, random_bars(300, seed + 1, flat=flat), dataset.validation.start - 1)
    altered = make_dataset(altered_bars, lookahead, features=SHORT)
    for name in ("states", "next_bar", "regime"):
        assert getattr(dataset.train, name).tobytes() == getattr(altered.train, name).tobytes(), name
    assert dataset.edges.tobytes() == altered.edges.tobytes()
    for name, array in dataset.normalizer.to_dict().items():
        assert array.tobytes() == altered.normalizer.to_dict()[name].tobytes(), name
    assert dataset.validation.states.tobytes() != altered.validation.states.tobytes()


def test_statistics_are_those_of_the_training_rows() -> None:
    bars = random_bars(400, seed=4)
    dataset = make_dataset(bars, features=SHORT, volatility_window=10)
    rows = slice(dataset.train.start, dataset.validation.start)
    raw = build_features(bars, SHORT).values[rows].astype(np.float64)
    np.testing.assert_allclose(dataset.normalizer.mean, raw.mean(axis=0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(dataset.normalizer.std, raw.std(axis=0), rtol=1e-9)
    volatility = trailing_volatility(bars.close, 10)
    np.testing.assert_allclose(dataset.edges, np.quantile(volatility[rows], [0.25, 0.5, 0.75]))
    whole = np.searchsorted(dataset.edges, volatility, side="right")
    np.testing.assert_array_equal(dataset.validation.regime, whole[dataset.validation.start :])


def test_states_of_new_bars_have_the_bits_of_the_dataset() -> None:
    bars = random_bars(300, seed=9)
    dataset = make_dataset(bars, features=SHORT)
    assert dataset.states(bars[-SHORT.lookback - 1 :]).tobytes() == dataset.validation.states[-1:].tobytes()
    with pytest.raises(DataError, match="too short"):
        dataset.states(bars[-SHORT.lookback :])


def test_episode_ends_mask_labels_in_both_parts() -> None:
    bars = random_bars(300, seed=9, flat=0.0)
    plain = make_dataset(bars, 2, features=SHORT)
    ended = make_dataset(bars, 2, features=SHORT, episode_ends=[100, 280])
    for part, position in ((ended.train, 100), (ended.validation, 280)):
        at = position - part.start
        assert (part.next_bar[at - 1 : at + 1] == -1).all() and part.next_bar[at - 2] != -1 != part.next_bar[at + 1]
    assert (plain.train.next_bar != ended.train.next_bar).sum() == 2


def test_the_baseline_takes_the_class_from_training_and_scores_valid_rows() -> None:
    # Training rises (with every fourth move down), validation falls: the majority class of training is wrong there.
    steps = np.tile([2.0, 2.0, 2.0, -3.0], 40)
    steps[-32:] *= -1.0
    close = 1000.0 + np.cumsum(steps)
    time = np.datetime64("2020-01-01", "ns") + np.arange(160) * np.timedelta64(1, "h")
    bars = Bars.from_arrays(time, close, close, close, close)
    spec = FeatureSpec(("return_1", "return_2"))
    dataset = make_dataset(bars, 1, 2, 32 / (160 - 8), 8, features=spec)
    baseline = dataset.majority_baseline()
    valid = dataset.validation.next_bar[dataset.validation.next_bar >= 0]
    assert len(dataset.validation) == 32 and baseline.next_bar_rows == len(valid) == 31
    assert baseline.next_bar_class == 1 and baseline.next_bar == np.mean(valid == 1) < 0.5
    regime_class = int(np.argmax(np.bincount(dataset.train.regime)))
    assert baseline.regime_class == regime_class and baseline.regime_rows == 32
    assert baseline.regime == np.mean(dataset.validation.regime == regime_class)
    on_train = dataset.majority_baseline("train")
    assert on_train.next_bar_class == 1 and 0.7 < on_train.next_bar < 0.8
    with pytest.raises(DataError, match="part is 'test'"):
        dataset.majority_baseline("test")  # type: ignore[arg-type]


def test_a_part_without_labels_has_no_baseline() -> None:
    bars = random_bars(300, seed=9, flat=0.0)
    dataset = make_dataset(bars, features=SHORT, episode_ends=np.ones(300, bool))
    with pytest.raises(DataError, match="the train part has no valid next-bar label"):
        dataset.majority_baseline()
    assert "no baseline" in dataset.describe()


@settings(max_examples=40)
@given(lookahead=st.integers(1, 30), validation=st.floats(0.02, 0.98), window=st.integers(2, 30))
def test_the_number_of_bars_asked_for_is_enough_and_less_is_not(lookahead: int, validation: float, window: int) -> None:
    bars = random_bars(2500, seed=1, flat=0.0)
    arguments = {"lookahead": lookahead, "regimes": 2, "validation": validation, "volatility_window": window}
    with pytest.raises(DataError, match="too short") as caught:
        make_dataset(bars[: window + 2], features=SHORT, **arguments)  # type: ignore[arg-type]
    needed = int(str(caught.value).rpartition("needs at least ")[2])
    make_dataset(bars[:needed], features=SHORT, **arguments)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"{needed - 1} bars given, .*needs at least {needed}"):
        make_dataset(bars[: needed - 1], features=SHORT, **arguments)  # type: ignore[arg-type]


def test_bad_parameters_are_named() -> None:
    bars = random_bars(300, seed=0)
    for share in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(DataError, match="validation is"):
            make_dataset(bars, validation=share, features=SHORT)
    with pytest.raises(DataError, match="lookahead is 0"):
        make_dataset(bars, 0, features=SHORT)
    with pytest.raises(DataError, match="regimes is 1"):
        make_dataset(bars, regimes=1, features=SHORT)
    with pytest.raises(DataError, match="volatility window is 0"):
        make_dataset(bars, volatility_window=0, features=SHORT)
    with pytest.raises(DataError, match=r"too short: 300 bars given, .*240 warm-up bars"):
        make_dataset(bars, lookahead=60)
    still = Bars.from_arrays(bars.time, *[np.ones(300)] * 4)
    with pytest.raises(DataError, match="cannot be cut into 4 regimes"):
        make_dataset(still, features=SHORT)
