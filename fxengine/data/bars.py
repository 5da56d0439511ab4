"""Price bars in memory: six equally long arrays that have passed every check."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.data.errors import DataError, Place

PRICES = ("open", "high", "low", "close")
COLUMNS = ("time", *PRICES, "volume")


@dataclass(frozen=True, eq=False)
class Bars:
    """Price bars in chronological order.

    Build them with `load_bars`, `demo_bars` or `Bars.from_arrays`, which check every value; the constructor itself
    checks shapes and dtypes only. The arrays are read-only. `len(bars)` counts them, `bars[a:b]` is a view of bars
    a..b-1, `==` compares the six arrays (not the source).

    Attributes:
        time: datetime64[ns] [n], UTC, strictly increasing; the time stamp that the source gives the bar.
        open: float64 [n], first price of the bar, positive and finite (as are the other prices).
        high: float64 [n], highest price.
        low: float64 [n], lowest price.
        close: float64 [n], last price.
        volume: float64 [n], not negative; zeros where the source has no volume column.
        source: file or array name, for messages.

    Raises:
        DataError: an array is not one-dimensional, has another dtype or another length than `time`.
    """

    time: NDArray[np.datetime64]
    open: NDArray[np.float64]
    high: NDArray[np.float64]
    low: NDArray[np.float64]
    close: NDArray[np.float64]
    volume: NDArray[np.float64]
    source: str = "arrays"

    def __post_init__(self) -> None:
        length = np.shape(self.time)
        for name in COLUMNS:
            array = getattr(self, name)
            expected = "datetime64[ns]" if name == "time" else "float64"
            if not isinstance(array, np.ndarray) or array.dtype != expected:
                kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                raise DataError(f"{self.source}: {name} is {kind}, expected a NumPy array of {expected}")
            if array.ndim != 1 or array.shape != length:
                raise DataError(
                    f"{self.source}: {name} has shape {array.shape}, time has {length}; "
                    "all six must be one-dimensional and equally long"
                )
            # Contiguous, so that NumPy takes the same code path (and so gives the same bits) for a part as for the
            # whole; a read-only view, so that the caller's own array stays writeable.
            view = np.ascontiguousarray(array).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    @classmethod
    def from_arrays(
        cls,
        time: ArrayLike,
        open: ArrayLike,
        high: ArrayLike,
        low: ArrayLike,
        close: ArrayLike,
        volume: ArrayLike | None = None,
        *,
        source: str = "arrays",
    ) -> Bars:
        """Checked bars from array-likes; `time` must be datetime64 (UTC), no volume means zeros.

        Raises:
            DataError: naming the first bar (counted from 0) and column at fault.
        """
        stamps = np.asarray(time)
        if stamps.dtype.kind != "M":
            raise DataError(f"{source}: time is {stamps.dtype}, expected datetime64; convert it with astype")
        if volume is None:
            volume = np.zeros(stamps.shape)
        numbers: dict[str, NDArray[np.float64]] = {}
        for name, values in (("open", open), ("high", high), ("low", low), ("close", close), ("volume", volume)):
            try:
                numbers[name] = np.array(values, dtype=np.float64)
            except (TypeError, ValueError) as error:
                raise DataError(f"{source}: {name} is not an array of numbers: {error}") from error
        bars = cls(time=stamps.astype("datetime64[ns]"), source=source, **numbers)
        check_bars(bars, Place(source))
        return bars

    def __len__(self) -> int:
        return len(self.time)

    def __getitem__(self, rows: slice) -> Bars:
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError(f"bars are sliced by position without a step, as in bars[10:20]; got {rows!r}")
        return Bars(**{name: getattr(self, name)[rows] for name in COLUMNS}, source=self.source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bars):
            return NotImplemented
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        span = f", {str(self.time[0])[:16]} to {str(self.time[-1])[:16]}" if len(self) else ""
        return f"Bars({self.source!r}, {len(self)} bars{span})"

    def require(self, needed: int, purpose: str) -> None:
        """Raise DataError unless there are at least `needed` bars for `purpose`."""
        if len(self) < needed:
            raise DataError(
                f"{self.source}: too short: {len(self)} bars given, {purpose} needs at least {needed}",
                source=self.source,
            )


def check_bars(bars: Bars, place: Place) -> None:
    """Check every value of `bars`; NaN counts as missing.

    Raises:
        DataError: naming the first row and the column of the first check that fails, in the order: missing values,
            order of times, prices positive and finite, high >= low, open and close within, volume.
    """
    time = bars.time
    bad = np.isnat(time)
    if bad.any():
        raise place.error(bad, "time", "no time", "Every bar needs a time: complete or drop the row.")
    for name in (*PRICES, "volume"):
        bad = np.isnan(getattr(bars, name))
        if bad.any():
            raise place.error(bad, name, "no value (NaN)", "Complete or drop the row.")
    _check_order(time, place)
    for name in PRICES:
        values = getattr(bars, name)
        bad = ~(np.isfinite(values) & (values > 0.0))
        if bad.any():
            given = values[np.argmax(bad)]
            raise place.error(bad, name, f"price {given:g} is not positive and finite", "Correct or drop the row.")
    bad = bars.high < bars.low
    if bad.any():
        at = np.argmax(bad)
        raise place.error(
            bad,
            "high",
            f"high {bars.high[at]!s} is below low {bars.low[at]!s}",
            "Are the two columns swapped? Correct or drop the row.",
        )
    for name in ("open", "close"):
        values = getattr(bars, name)
        bad = (values > bars.high) | (values < bars.low)
        if bad.any():
            at = np.argmax(bad)
            raise place.error(
                bad,
                name,
                f"{name} {values[at]!s} lies outside [low, high] = [{bars.low[at]!s}, {bars.high[at]!s}]",
                "Correct or drop the row.",
            )
    bad = ~(np.isfinite(bars.volume) & (bars.volume >= 0.0))
    if bad.any():
        given = bars.volume[np.argmax(bad)]
        raise place.error(bad, "volume", f"volume {given:g} is negative or not finite", "Correct or drop the row.")


def _check_order(time: NDArray[np.datetime64], place: Place) -> None:
    """Times must increase strictly; a repeated time and a step back are told apart."""
    bad = np.zeros(len(time), dtype=np.bool_)
    bad[1:] = time[1:] <= time[:-1]
    if not bad.any():
        return
    at = int(np.argmax(bad))
    if time[at] == time[at - 1]:
        fault = f"time {time[at]} repeats the time of {place.word} {place.first + at - 1}"
        advice = "Drop the duplicate."
    else:
        fault = f"time {time[at]} is before {time[at - 1]} of {place.word} {place.first + at - 1}"
        advice = "Sort the bars by time; if they are sorted, day and month may be swapped: say dayfirst=."
    raise place.error(bad, "time", fault, advice)
