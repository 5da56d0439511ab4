"""Bars from CSV and Parquet files, and back."""

from __future__ import annotations

import csv
import importlib.util
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fxengine.data.bars import COLUMNS, Bars, check_bars
from fxengine.data.errors import DataError, Place
from fxengine.data.times import ACCEPTED, parse_times

if TYPE_CHECKING:
    import pandas as pd

ALIASES: dict[str, tuple[str, ...]] = {
    "time": ("time", "date", "datetime", "timestamp", "date_time", "open_time", "gmt_time"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "c"),
    "volume": ("volume", "vol", "v", "tickvol", "tick_volume"),
}
"""Accepted column names, compared in lower case without <>, spaces as underscores. A column called "index" or
without a name is the time if nothing else is; a text date and a text time column are joined."""

_INDEX_NAMES = ("index", "", "level_0", "__index_level_0__")
_CSV, _PARQUET = (".csv", ".tsv", ".txt"), (".parquet", ".pq")
_DEMO_FILE = ("datasets", "data", "FOREX_EURUSD_1H_ASK.csv")


def load_bars(
    path: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    dayfirst: bool | None = None,
    minimum: int = 1,
) -> Bars:
    """Read price bars from a CSV (.csv, .tsv, .txt) or Parquet (.parquet, .pq) file.

    Args:
        path: the file. The first line of a CSV file names the columns; its separator is one of , ; tab |.
        columns: the file's own names for time, open, high, low, close, volume, where `ALIASES` do not know them.
        dayfirst: how to read 01/02/2017; None: found out from the column (see `parse_times`), or DataError where
            nothing decides it.
        minimum: fewest bars that will do.

    Returns:
        Checked bars; times are UTC. Volume is optional: without such a column it is all zeros.

    Raises:
        DataError: no such file, an unknown suffix, pandas missing, a missing or ambiguous column, or a bad value:
            the message names file, row (in CSV counted with the header as row 1, in Parquet from 1) and column.
    """
    path = Path(path)
    source = str(path)
    suffix = path.suffix.lower()
    if suffix not in (*_CSV, *_PARQUET):
        raise DataError(f"{source}: unknown suffix {suffix!r}, expected {', '.join((*_CSV, *_PARQUET))}", source=source)
    if not path.is_file():
        raise DataError(f"{source}: no such file", source=source)
    if path.stat().st_size == 0:
        raise DataError(f"{source}: the file is empty; expected bars with {', '.join(COLUMNS)}", source=source)
    _pandas()
    if suffix in _CSV:
        names, separator = _csv_header(path)
        chosen = _choose_columns(source, names, columns or {})
        frame = _read_csv(path, names, separator, text=chosen["time"])
    else:
        frame, names = _read_parquet(path)
        chosen = _choose_columns(source, names, columns or {})
    labels = {key: " + ".join(names[i] for i in where) for key, where in chosen.items()}
    place = Place(source, "row", 2 if suffix in _CSV else 1, labels)
    if len(frame) == 0:
        raise DataError(f"{source}: the file has columns but no bars", source=source)
    values: dict[str, Any] = {"volume": np.zeros(len(frame))}
    for key, where in chosen.items():
        if key == "time":
            values[key] = _times(_joined(frame, where), place, dayfirst)
        else:
            values[key] = _numbers(frame.iloc[:, where[0]], place, key)
    bars = Bars(**values, source=source)
    check_bars(bars, place)
    bars.require(minimum, "the caller")
    return bars


def demo_bars() -> Bars:
    """The EURUSD hourly bars of 2017 that the package gym-anytrading carries (6,225 bars, ask prices).

    Raises:
        DataError: gym-anytrading is not installed, or does not carry the file.
    """
    # find_spec of a top-level package does not import it, so Gymnasium and its dependencies stay out.
    spec = importlib.util.find_spec("gym_anytrading")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        raise DataError(
            "the demo bars come with the package gym-anytrading, which is not installed: pip install fxengine[demo]"
        )
    bars = load_bars(Path(folders[0]).joinpath(*_DEMO_FILE), dayfirst=True)
    return replace(bars, source="demo bars (EURUSD, hourly, 2017)")


def save_bars(bars: Bars, path: str | os.PathLike[str]) -> None:
    """Write bars as .csv or .parquet/.pq; `load_bars` reads equal bars back, bit for bit.

    Raises:
        DataError: an unknown suffix, or pandas missing.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".csv", *_PARQUET):
        raise DataError(
            f"{path}: unknown suffix {suffix!r}, expected {', '.join(('.csv', *_PARQUET))}", source=str(path)
        )
    frame = _pandas().DataFrame({name: getattr(bars, name) for name in COLUMNS})
    if suffix == ".csv":
        frame["time"] = np.datetime_as_string(bars.time)
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise DataError(f"reading bars needs pandas: pip install fxengine[demo] ({error})") from error
    return pandas


def _csv_header(path: Path) -> tuple[list[str], str]:
    """Column names and the separator."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            line = file.readline()
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from error
    if not line.strip():
        raise DataError(f"{path}: row 1 is blank; it must name the columns", source=str(path), row=1)
    separator = max(",;\t|", key=line.count)
    return [name.strip() for name in next(csv.reader([line], delimiter=separator))], separator


def _not_text(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{path}: not a UTF-8 text file ({error.reason})", source=str(path))


def _read_csv(path: Path, names: Sequence[str], separator: str, text: Sequence[int]) -> pd.DataFrame:
    """All rows, columns numbered from 0; the columns at `text` as text, the others as pandas finds them."""
    pandas = _pandas()
    options: dict[str, Any] = {}
    if tuple(int(part) for part in pandas.__version__.split(".")[:2]) < (3, 1):
        options["float_precision"] = "round_trip"  # the default, and deprecated as an option, from pandas 3.1 on
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                path,
                sep=separator,
                header=None,
                skiprows=1,
                names=list(range(len(names))),
                index_col=False,
                dtype=dict.fromkeys(text, str),
                skip_blank_lines=False,  # so that positions stay rows of the file
                encoding="utf-8-sig",
                low_memory=False,
                **options,
            )
    except pandas.errors.EmptyDataError:
        frame = pandas.DataFrame({i: [] for i in range(len(names))})
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from error
    except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        raise _too_many_fields(path, separator, len(names), error) from error
    filled = np.flatnonzero(frame.notna().any(axis=1).to_numpy())
    return frame.iloc[: int(filled[-1]) + 1 if len(filled) else 0]  # blank lines at the end are no rows


def _too_many_fields(path: Path, separator: str, expected: int, cause: Exception) -> DataError:
    with open(path, encoding="utf-8-sig", newline="") as file:
        counts = [len(record) for record in csv.reader(file, delimiter=separator)]
    long = [(row, count) for row, count in enumerate(counts, start=1) if count > expected]
    if not long:
        return DataError(f"{path}: not a readable CSV file: {cause}", source=str(path))
    row, count = long[0]
    tail = f" ({len(long) - 1} more rows like it)" if len(long) > 1 else ""
    return DataError(
        f"{path}: row {row}: {count} fields, the header has {expected}{tail}. "
        "Is a number written with the separator, or a column without a name?",
        source=str(path),
        row=row,
        more=len(long) - 1,
    )


def _read_parquet(path: Path) -> tuple[pd.DataFrame, list[str]]:
    pandas = _pandas()
    try:
        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install fxengine[demo]") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}", source=str(path)) from error
    if frame.index.name is not None or not isinstance(frame.index, pandas.RangeIndex):
        frame = frame.reset_index()
    return frame, [str(name) for name in frame.columns]


def _plain(name: str) -> str:
    return "_".join(name.strip().strip("<>").lower().split())


def _choose_columns(source: str, names: Sequence[str], wanted: Mapping[str, str]) -> dict[str, list[int]]:
    """Positions of the columns in the file; two for a time that is split into date and time."""
    unknown = sorted(set(wanted) - set(COLUMNS))
    if unknown:
        raise DataError(f"columns= names {unknown}, expected some of {list(COLUMNS)}")
    plain = [_plain(name) for name in names]
    chosen: dict[str, list[int]] = {}
    for key in COLUMNS:
        accepted = (_plain(wanted[key]),) if key in wanted else ALIASES[key]
        found = [i for i, name in enumerate(plain) if name in accepted]
        if key == "time" and key not in wanted:
            if not found:
                found = [i for i, name in enumerate(plain) if name in _INDEX_NAMES]
            if sorted(plain[i] for i in found) == ["date", "time"]:
                chosen[key] = sorted(found, key=lambda i: plain[i])
                continue
        if len(found) > 1:
            raise DataError(
                f"{source}: several columns can be {key}: {[names[i] for i in found]}; "
                f"choose one with columns={{{key!r}: ...}}",
                source=source,
                column=key,
            )
        if found:
            chosen[key] = found
        elif key != "volume" or key in wanted:
            raise DataError(
                f"{source}: no column {key!r}: expected one called {' or '.join(map(repr, accepted))} (any case), "
                f"the file has {list(names)}; name it with columns={{{key!r}: ...}}",
                source=source,
                column=key,
            )
    return chosen


def _joined(frame: pd.DataFrame, where: Sequence[int]) -> pd.Series:
    """The time column, or date and time joined by a space."""
    if len(where) == 1:
        return frame.iloc[:, where[0]]
    date, time = (frame.iloc[:, i] for i in where)
    joined = date.astype("str").str.strip() + " " + time.astype("str").str.strip()
    return joined.mask(date.isna() | time.isna())


def _times(column: pd.Series, place: Place, dayfirst: bool | None) -> NDArray[np.datetime64]:
    missing = column.isna().to_numpy()
    if missing.any():
        raise place.error(missing, "time", "no time", "Every bar needs a time: complete or drop the row.")
    times = parse_times(column, dayfirst)
    bad = np.isnat(times.values)
    if bad.any():
        given = column.iloc[int(np.argmax(bad))]
        raise place.error(
            bad, "time", f"unreadable time {given!r} (column read as {times.reading})", f"Expected {ACCEPTED}."
        )
    if times.ambiguous:
        raise place.error(
            np.arange(len(bad)) == 0,
            "time",
            f"{column.iloc[0]!r} can be day first or month first and no row decides it",
            "Say dayfirst=True or dayfirst=False.",
        )
    return times.values


def _numbers(column: pd.Series, place: Place, key: str) -> NDArray[np.float64]:
    pandas = _pandas()
    missing = column.isna().to_numpy()
    if getattr(column.dtype, "kind", "O") in "iuf":
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
        unreadable = np.zeros(len(column), dtype=np.bool_)
    else:
        # Text only where some entry is no number; dates and booleans are no numbers either, whatever pandas says.
        text = column.astype("str").mask(column.isna())
        values = pandas.to_numeric(text, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        unreadable = np.isnan(values) & ~missing
    if unreadable.any():
        given = column.iloc[int(np.argmax(unreadable))]
        raise place.error(
            unreadable, key, f"{str(given)!r} is not a number", "Expected a number with a decimal point, as in 1.0525."
        )
    if missing.any():
        raise place.error(missing, key, "no value", "Complete or drop the row.")
    return np.ascontiguousarray(values, dtype=np.float64)
