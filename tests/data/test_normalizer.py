"""Normalisation."""

from __future__ import annotations

import numpy as np
import pytest

from fxengine.data import DataError, Normalizer
from tests.support import assert_close


def values(count: int = 500) -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.normal(size=(count, 3)) * [1e-4, 1.0, 1e5] + [0.0, 5.0, -1e6]).astype(np.float32)


def test_the_fitted_rows_get_mean_0_and_deviation_1() -> None:
    given = values()
    scaled = Normalizer.fit(given, clip=100.0).apply(given)
    assert scaled.dtype == np.float32 and scaled.shape == given.shape
    assert_close(scaled.astype(np.float64).mean(axis=0), np.zeros(3), atol=1e-6)
    assert_close(scaled.astype(np.float64).std(axis=0), np.ones(3), atol=1e-6)


def test_values_are_clipped_on_both_sides() -> None:
    normalizer = Normalizer.fit(values(), clip=2.5)
    extreme = np.array([[1.0, 1e9, -1e30], [-1.0, np.inf, -np.inf]], np.float32)
    np.testing.assert_array_equal(normalizer.apply(extreme), [[2.5, 2.5, -2.5], [-2.5, 2.5, -2.5]])


def test_a_column_that_was_constant_in_training_stays_0() -> None:
    given = values()
    given[:, 1] = 0.1
    normalizer = Normalizer.fit(given, names=("a", "b", "c"))
    assert normalizer.constant == ("b",)
    given[::2, 1] = 1e6
    assert not normalizer.apply(given)[:, 1].any() and normalizer.apply(given)[:, 0].any()


def test_a_small_true_spread_is_not_taken_for_constant() -> None:
    given = np.float32(1.0) + np.array([[0.0], [2.0**-23]], np.float32)
    normalizer = Normalizer.fit(given)
    assert normalizer.constant == ()
    assert_close(normalizer.apply(given), [[-1.0], [1.0]])


def test_nan_passes_and_any_number_of_axes_does() -> None:
    normalizer = Normalizer.fit(values())
    row = values()[3]
    assert normalizer.apply(row).shape == (3,)
    assert normalizer.apply(row.reshape(1, 1, 3)).tobytes() == normalizer.apply(row).tobytes()
    row[1] = np.nan
    np.testing.assert_array_equal(np.isnan(normalizer.apply(row)), [False, True, False])


def test_long_arrays_are_the_same_row_by_row() -> None:
    given = np.tile(values(), (300, 1))  # longer than one chunk
    normalizer = Normalizer.fit(values())
    whole = normalizer.apply(given)
    assert whole.tobytes() == np.tile(normalizer.apply(values()), (300, 1)).tobytes()


def test_dictionary_round_trip() -> None:
    normalizer = Normalizer.fit(values(), names=("a", "bé", "c"), clip=3.0)
    arrays = normalizer.to_dict()
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "mean": "float64",
        "std": "float64",
        "clip": "float64",
        "names": "uint8",
    }
    again = Normalizer.from_dict(arrays)
    assert again.names == normalizer.names and again.clip == 3.0
    assert again.apply(values()).tobytes() == normalizer.apply(values()).tobytes()


def test_faults_are_named() -> None:
    given = values()
    given[7, 2] = np.nan
    with pytest.raises(DataError, match="row 7, column 'c' is nan") as caught:
        Normalizer.fit(given, names=("a", "b", "c"))
    assert caught.value.row == 7 and caught.value.column == "c"
    with pytest.raises(DataError, match="2 names for 3 columns"):
        Normalizer.fit(values(), names=("a", "b"))
    with pytest.raises(DataError, match="n > 0"):
        Normalizer.fit(values()[:0])
    for clip in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(DataError, match="clip is"):
            Normalizer.fit(values(), clip=clip)
    normalizer = Normalizer.fit(values())
    with pytest.raises(DataError, match=r"shape \(5, 2\), expected \[..., 3\]"):
        normalizer.apply(np.zeros((5, 2), np.float32))
    arrays = normalizer.to_dict()
    with pytest.raises(DataError, match=r"arrays \['std'\] are missing"):
        Normalizer.from_dict({name: array for name, array in arrays.items() if name != "std"})
    with pytest.raises(DataError, match=r"std is float64 \(2,\), expected finite float64 \(3,\)"):
        Normalizer.from_dict({**arrays, "std": arrays["std"][:2]})
    with pytest.raises(DataError, match="deviation is negative"):
        Normalizer.from_dict({**arrays, "std": np.array([1.0, -1.0, 1.0])})
