"""Bars in memory."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from fxengine.data import Bars, DataError
from fxengine.driver.errors import FxError
from tests.data.makers import random_bars


def arrays(count: int = 5) -> dict[str, np.ndarray]:
    bars = random_bars(count, seed=3, flat=0.0)
    return {name: getattr(bars, name).copy() for name in ("time", "open", "high", "low", "close", "volume")}


def test_length_slices_and_equality() -> None:
    bars = random_bars(20, seed=0)
    assert len(bars) == 20 and len(bars[3:7]) == 4 and len(bars[-2:]) == 2
    np.testing.assert_array_equal(bars[3:7].close, bars.close[3:7])
    assert bars[3:7].time[0] == bars.time[3] and bars[3:7].source == bars.source
    assert np.shares_memory(bars[3:7].close, bars.close)
    assert bars == bars[:] and bars[:10] != bars[1:11] and bars != "bars"


def test_slices_take_no_step_and_no_single_position() -> None:
    bars = random_bars(20, seed=0)
    with pytest.raises(TypeError, match="sliced by position"):
        bars[::2]
    with pytest.raises(TypeError, match="sliced by position"):
        bars[3]  # type: ignore[index]


def test_bars_are_frozen_and_leave_the_callers_arrays_writeable() -> None:
    given = arrays()
    bars = Bars(**given)
    with pytest.raises(FrozenInstanceError):
        bars.close = bars.open  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        bars.close[0] = 1.0
    given["close"][0] = 1.0
    copied = Bars.from_arrays(**arrays())
    assert copied.time.dtype == "datetime64[ns]" and copied.volume.dtype == np.float64


def test_volume_is_optional_and_means_zeros() -> None:
    given = arrays()
    del given["volume"]
    np.testing.assert_array_equal(Bars.from_arrays(**given).volume, np.zeros(5))


@pytest.mark.parametrize(
    ("column", "position", "value", "fault"),
    [
        ("open", 2, np.nan, "no value"),
        ("volume", 4, np.nan, "no value"),
        ("close", 1, -1.0, "not positive and finite"),
        ("low", 3, 0.0, "not positive and finite"),
        ("high", 0, np.inf, "not positive and finite"),
        ("volume", 2, -1.0, "negative or not finite"),
        ("volume", 2, np.inf, "negative or not finite"),
        ("high", 2, 1e-3, "is below low"),
        ("open", 2, 99.0, "lies outside"),
        ("close", 3, 1e-3, "lies outside"),
        ("time", 2, np.datetime64("NaT"), "no time"),
        ("time", 2, np.datetime64("2000-01-01"), "is before"),
    ],
)
def test_bad_values_are_named(column: str, position: int, value: object, fault: str) -> None:
    given = arrays()
    given[column][position] = value
    with pytest.raises(DataError, match=fault) as caught:
        Bars.from_arrays(**given, source="feed")
    assert (caught.value.source, caught.value.row, caught.value.column) == ("feed", position, column)
    assert f"feed: bar {position}, column '{column}'" in str(caught.value)


def test_first_fault_and_the_number_of_others() -> None:
    given = arrays()
    given["close"][[1, 3, 4]] = -1.0
    with pytest.raises(DataError, match=r"bar 1, .*\(2 more bars like it\)") as caught:
        Bars.from_arrays(**given)
    assert caught.value.more == 2


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"close": np.ones(4)}, r"close has shape \(4,\), time has \(5,\)"),
        ({"close": np.ones((5, 1))}, "one-dimensional"),
        ({"close": np.ones(5, np.float32)}, "close is float32"),
        ({"close": [1.0] * 5}, "close is list"),
        ({"time": np.arange(5)}, "time is int64"),
    ],
)
def test_the_constructor_checks_shapes_and_dtypes(change: dict[str, object], fault: str) -> None:
    with pytest.raises(DataError, match=fault):
        Bars(**{**arrays(), **change})  # type: ignore[arg-type]


def test_from_arrays_needs_datetimes_and_numbers() -> None:
    with pytest.raises(DataError, match="expected datetime64"):
        Bars.from_arrays(**{**arrays(), "time": np.arange(5)})
    with pytest.raises(DataError, match="low is not an array of numbers"):
        Bars.from_arrays(**{**arrays(), "low": np.array(["a"] * 5)})


def test_too_short_names_both_numbers() -> None:
    with pytest.raises(DataError, match="too short: 5 bars given, training needs at least 9"):
        random_bars(5, seed=0).require(9, "training")


def test_errors_are_value_errors_and_survive_pickling() -> None:
    given = arrays()
    given["close"][1] = -1.0
    with pytest.raises(ValueError) as caught:
        Bars.from_arrays(**given)
    assert isinstance(caught.value, FxError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value) and copy.row == 1 and copy.column == "close"


def test_importing_the_package_imports_numpy_at_most() -> None:
    code = (
        "import sys, fxengine, fxengine.data as d\n"
        "assert not {'pandas', 'pyarrow', 'gymnasium'} & set(sys.modules)\n"
        "[getattr(d, name) for name in d.__all__]\n"
        "assert not {'pandas', 'pyarrow', 'gymnasium', 'gym_anytrading'} & set(sys.modules)\n"
        "assert set(d.__all__) <= set(dir(d))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
