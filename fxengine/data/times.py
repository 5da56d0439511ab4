"""Reading time columns: ISO text, day-first or month-first text, epoch numbers. Everything becomes UTC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

ACCEPTED = "ISO (2017-01-31 22:00), day first (31.01.2017 22:00:00.000) or epoch seconds, ms, us, ns"
_YEAR_FIRST = r"^\s*(\d{4})[-./](\d{1,2})[-./](\d{1,2})"
_YEAR_LAST = r"^\s*(\d{1,2})([-./])(\d{1,2})[-./](\d{4})"
_COMPACT = r"^\s*((?:19|20)\d{2})([01]\d)([0-3]\d)(?=\D|$)"
_NUMBER = r"^\s*[+-]?\d+(?:\.\d*)?\s*$"
# A number in [lowest, highest) is an epoch in that unit: seconds from 1973 to 5138, and so on; the ranges do not
# overlap because 1e11 ms is again 1973. Below, a number is more likely a row counter than a time.
_EPOCH_UNITS = ((1e8, 1e11, 1_000_000_000), (1e11, 1e14, 1_000_000), (1e14, 1e17, 1_000), (1e17, 9.2e18, 1))
_EARLIEST, _LATEST = np.datetime64("1700-01-01", "us"), np.datetime64("2262-01-01", "us")


@dataclass(frozen=True)
class Times:
    """Result of `parse_times`.

    Attributes:
        values: datetime64[ns] [n], UTC; NaT where the entry is missing or unreadable.
        reading: how the column was read, for messages ("day first", "ISO", "epoch").
        ambiguous: True if day and month could be swapped and nothing in the column decides it.
    """

    values: NDArray[np.datetime64]
    reading: str
    ambiguous: bool = False


def parse_times(column: pd.Series, dayfirst: bool | None = None) -> Times:
    """Read a time column of any dtype.

    Text that starts with a four-digit year is ISO ("/" and "." are accepted for "-", and 20170131 too). Text that
    ends its date with the year is read day first or month first: as `dayfirst` says, else by the dates that only
    one reading can explain (31/01/2017), else by which reading leaves the column sorted; dates with dots are always
    day first. Text without a UTC offset is UTC. Entries that do not fit the shape of the first one are NaT.
    """
    import pandas as pd

    if isinstance(column.dtype, pd.DatetimeTZDtype):
        return Times(_nanoseconds(column.dt.tz_convert("UTC").dt.tz_localize(None)), "time stamps")
    kind = getattr(column.dtype, "kind", "O")
    if kind == "M":
        return Times(_nanoseconds(column), "time stamps")
    if kind in "iuf":
        return Times(_epoch(column), "epoch")
    if kind == "b":
        return Times(np.full(len(column), np.datetime64("NaT", "ns")), "text")
    text = column.astype("str").str.strip()
    if text.str.endswith(("UTC", "GMT")).any():
        text = text.str.replace(r"\s*(?:UTC|GMT)$", "", regex=True)
    text = text.mask(column.isna())
    present = text.dropna()
    first = str(present.iloc[0]) if len(present) else ""
    sample = pd.Series([first])
    if sample.str.match(_COMPACT).iloc[0]:
        return Times(_iso(text.str.replace(_COMPACT, r"\1-\2-\3", regex=True)), "ISO")
    if sample.str.match(_NUMBER).iloc[0]:
        return Times(_epoch(pd.to_numeric(text.where(text.str.match(_NUMBER, na=False)))), "epoch")
    if sample.str.match(_YEAR_LAST).iloc[0]:
        return _year_last(text, dayfirst, dotted="." in first[:3])
    if not text.str.match(r"\d{4}-", na=True).all():
        text = text.str.replace(_YEAR_FIRST, r"\1-\2-\3", regex=True)
    return Times(_iso(text), "ISO")


def _year_last(text: pd.Series, dayfirst: bool | None, *, dotted: bool) -> Times:
    day_first, month_first = r"\4-\3-\1", r"\4-\1-\3"
    shaped = text.where(text.str.match(_YEAR_LAST, na=False))

    def read(order: str) -> NDArray[np.datetime64]:
        return _iso(shaped.str.replace(_YEAR_LAST, order, regex=True))

    if dayfirst is None and dotted:
        dayfirst = True
    if dayfirst is not None:
        return Times(read(day_first if dayfirst else month_first), "day first" if dayfirst else "month first")
    day, month = read(day_first), read(month_first)
    only_day = int(np.count_nonzero(~np.isnat(day) & np.isnat(month)))
    only_month = int(np.count_nonzero(np.isnat(day) & ~np.isnat(month)))
    if only_day != only_month:
        # Few rows against many are faults of the file: they stay NaT and are reported as unreadable.
        return Times(day, "day first") if only_day > only_month else Times(month, "month first")
    day_sorted, month_sorted = _sorted(day), _sorted(month)
    if day_sorted != month_sorted and only_day == 0:
        return Times(day, "day first") if day_sorted else Times(month, "month first")
    return Times(day, "day first", ambiguous=not np.array_equal(day, month, equal_nan=True))


def _sorted(values: NDArray[np.datetime64]) -> bool:
    return bool(np.all(values[1:] > values[:-1]))


def _iso(text: pd.Series) -> NDArray[np.datetime64]:
    import pandas as pd

    # A bare year or month is ISO too, but no bar has such a time: without a day it is not read.
    whole = text.where(text.str.match(r"^\d{4}-\d{1,2}-\d{1,2}", na=False))
    stamps = pd.to_datetime(whole, format="ISO8601", errors="coerce", utc=True)
    return _nanoseconds(stamps.dt.tz_localize(None))


def _nanoseconds(stamps: pd.Series) -> NDArray[np.datetime64]:
    """As datetime64[ns]; what nanoseconds cannot hold becomes NaT instead of wrapping around."""
    values = np.asarray(stamps.to_numpy())
    if values.dtype != "datetime64[ns]":
        coarse = values.astype("datetime64[us]")
        outside = (coarse < _EARLIEST) | (coarse > _LATEST)
        values = np.where(outside, np.datetime64("NaT", "us"), coarse).astype("datetime64[ns]")
    return values


def _epoch(column: pd.Series) -> NDArray[np.datetime64]:
    """Epoch numbers; the first one gives the unit, numbers outside that unit's range become NaT."""
    missing = column.isna().to_numpy()
    result = np.full(len(column), np.datetime64("NaT", "ns"))
    if missing.all():
        return result
    rough = column.to_numpy(dtype=np.float64, na_value=np.nan)
    first = rough[~missing][0]
    for lowest, highest, scale in _EPOCH_UNITS:
        if not lowest <= first < highest:
            continue
        good = ~missing & (rough >= lowest) & (rough < highest)
        kept = column[good]
        if getattr(kept.dtype, "kind", "O") in "iu":
            stamps = kept.to_numpy(dtype=np.int64) * scale
        else:
            # Whole and fractional part apart: their product with 1e9 as one float64 would lose the microseconds.
            whole = np.floor(rough[good])
            stamps = whole.astype(np.int64) * scale
            stamps += np.rint((rough[good] - whole) * scale).astype(np.int64)
        result[good] = stamps.astype("datetime64[ns]")
    return result
