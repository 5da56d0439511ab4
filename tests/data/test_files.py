"""Reading and writing bars: accepted shapes of files, and every fault with its row and column."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.data import Bars, DataError, demo_bars, load_bars, save_bars
from tests.data.makers import HEADER, ROWS, random_bars, with_cell, write

EXPECTED = np.datetime64("2017-01-01T22:00", "ns") + np.arange(5) * np.timedelta64(1, "h")


def retimed(times: list[str], header: str = HEADER) -> list[str]:
    return [",".join([time, *row.split(",")[1:]]) for time, row in zip(times, ROWS, strict=True)]


def test_a_csv_file_gives_its_numbers(tmp_path: Path) -> None:
    bars = load_bars(write(tmp_path / "bars.csv"))
    np.testing.assert_array_equal(bars.time, EXPECTED)
    np.testing.assert_array_equal(bars.open, [1.05, 1.055, 1.06, 1.05, 1.04])
    np.testing.assert_array_equal(bars.high, [1.06, 1.07, 1.065, 1.06, 1.05])
    np.testing.assert_array_equal(bars.low, [1.04, 1.05, 1.05, 1.03, 1.03])
    np.testing.assert_array_equal(bars.close, [1.055, 1.06, 1.05, 1.04, 1.045])
    np.testing.assert_array_equal(bars.volume, [100, 200, 0, 50.5, 70])
    assert bars.source == str(tmp_path / "bars.csv")


def test_demo_bars() -> None:
    bars = demo_bars()
    assert len(bars) == 6225
    assert bars.time[0] == np.datetime64("2017-01-01T22:00") and bars.time[-1] == np.datetime64("2017-12-29T21:00")
    assert bars.close[0] == 1.05227 and bars.close[-1] == 1.20075 and bars.volume[0] == 143539993.3


def test_demo_bars_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install fxengine\[demo\]"):
        demo_bars()


def test_without_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(DataError, match=r"needs pandas: pip install fxengine\[demo\]"):
        load_bars(write(tmp_path / "bars.csv"))


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 60), scale=st.sampled_from([1e-9, 1.0, 1e12]))
def test_csv_and_parquet_round_trip_bit_for_bit(seed: int, count: int, scale: float, tmp_path: Path) -> None:
    walk = random_bars(count, seed)
    prices = [scale * getattr(walk, name) for name in ("open", "high", "low", "close")]
    nanoseconds = walk.time + np.arange(count).astype("timedelta64[ns]")
    bars = Bars.from_arrays(nanoseconds, *prices, walk.volume)
    for name in ("bars.csv", "bars.parquet", "bars.pq"):
        save_bars(bars, tmp_path / name)
        assert load_bars(tmp_path / name) == bars


@pytest.mark.parametrize(
    "times",
    [
        [str(time)[:19] for time in EXPECTED],
        [str(time)[:19].replace("T", " ") for time in EXPECTED],
        [f"{str(time)[:16]}Z" for time in EXPECTED],
        [f"{str(time)[:19].replace('T', ' ')} UTC" for time in EXPECTED],
        [f"{str(time + np.timedelta64(2, 'h'))[:19]}+02:00" for time in EXPECTED],
        [str(time)[:16].replace("-", ".").replace("T", " ") for time in EXPECTED],
        [str(time)[:16].replace("-", "/").replace("T", " ") for time in EXPECTED],
        [str(time)[:19].replace("-", "").replace("T", " ") for time in EXPECTED],
        [str(time)[:19].replace("-", "").replace(":", "").replace("T", " ") for time in EXPECTED],
        [str(time.astype("int64") // 10**9) for time in EXPECTED],
        [f"{time.astype('int64') // 10**9}.0" for time in EXPECTED],
        [str(time.astype("int64") // 10**6) for time in EXPECTED],
        [str(time.astype("int64") // 10**3) for time in EXPECTED],
        [str(time.astype("int64")) for time in EXPECTED],
        ["1.1.2017 22:00", "1.1.2017 23:00", "2.1.2017 00:00", "2.1.2017 01:00", "2.1.2017 02:00"],
    ],
    ids=lambda times: times[2],
)
def test_accepted_times(times: list[str], tmp_path: Path) -> None:

    bars = load_bars(write(tmp_path / "bars.csv", retimed(times)))
    np.testing.assert_array_equal(bars.time, EXPECTED)


def test_dates_alone(tmp_path: Path) -> None:
    days = np.datetime64("2017-01-30", "ns") + np.arange(5) * np.timedelta64(1, "D")
    for times in (
        ["2017-01-30", "2017-01-31", "2017-02-01", "2017-02-02", "2017-02-03"],
        ["20170130", "20170131", "20170201", "20170202", "20170203"],
        ["30/01/2017", "31/01/2017", "01/02/2017", "02/02/2017", "03/02/2017"],
        ["01/30/2017", "01/31/2017", "02/01/2017", "02/02/2017", "02/03/2017"],
        ["01-30-2017", "01-31-2017", "02-01-2017", "02-02-2017", "02-03-2017"],
        ["30.01.2017", "31.01.2017", "01.02.2017", "02.02.2017", "03.02.2017"],
    ):
        bars = load_bars(write(tmp_path / "bars.csv", retimed(times)))
        np.testing.assert_array_equal(bars.time, days, err_msg=times[0])


def test_the_order_decides_between_day_and_month_first(tmp_path: Path) -> None:
    # No day is above 12; only day first leaves these sorted.
    times = ["10/03/2017", "11/03/2017", "12/03/2017", "01/04/2017", "02/04/2017"]
    bars = load_bars(write(tmp_path / "bars.csv", retimed(times)))
    assert bars.time[3] == np.datetime64("2017-04-01")


def test_undecidable_dates_are_refused_until_told(tmp_path: Path) -> None:
    times = ["01/02/2017", "02/02/2017", "03/02/2017", "04/02/2017", "05/02/2017"]
    path = write(tmp_path / "bars.csv", retimed(times))
    with pytest.raises(DataError, match=r"'01/02/2017' can be day first or month first.*dayfirst=True") as caught:
        load_bars(path)
    assert caught.value.row == 2 and caught.value.column == "Time"
    assert load_bars(path, dayfirst=True).time[1] == np.datetime64("2017-02-02")
    assert load_bars(path, dayfirst=False).time[2] == np.datetime64("2017-03-02")


def test_fractions_of_epoch_seconds_keep_microseconds(tmp_path: Path) -> None:
    times = [f"{1483308000 + i}.25" for i in range(5)]
    bars = load_bars(write(tmp_path / "bars.csv", retimed(times)))
    np.testing.assert_array_equal(bars.time.astype("int64"), [(1483308000 + i) * 10**9 + 250_000_000 for i in range(5)])


@pytest.mark.parametrize(
    "header",
    [
        "TIME,OPEN,HIGH,LOW,CLOSE,VOLUME",
        "date, open, high, low, close, vol",
        "Datetime,O,H,L,C,V",
        "timestamp,Open,High,Low,Close,Volume",
        "index,open,high,low,close,tick volume",
        ",open,high,low,close,volume",
        "<DATE>,<OPEN>,<HIGH>,<LOW>,<CLOSE>,<TICKVOL>",
        "\ufeffGmt time,Open,High,Low,Close,Volume",
    ],
)
def test_accepted_headers(header: str, tmp_path: Path) -> None:
    assert load_bars(write(tmp_path / "a.csv", header=header)) == load_bars(write(tmp_path / "b.csv"))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_other_separators(separator: str, tmp_path: Path) -> None:
    rows = [row.replace(",", separator) for row in ROWS]
    path = write(tmp_path / "a.tsv", rows, HEADER.replace(",", separator))
    assert load_bars(path) == load_bars(write(tmp_path / "b.csv"))


def test_date_and_time_in_two_columns_are_joined(tmp_path: Path) -> None:
    rows = [row.replace(" ", "\t", 1).replace(",", "\t") for row in ROWS]
    path = write(tmp_path / "a.txt", rows, "<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<VOL>")
    assert load_bars(path) == load_bars(write(tmp_path / "b.csv"))


def test_columns_in_any_order_with_others_between_and_without_volume(tmp_path: Path) -> None:
    rows = []
    for row in ROWS:
        time, open_, high, low, close, _ = row.split(",")
        rows.append(f"{close},x,{low},{high},{time},{open_}")
    bars = load_bars(write(tmp_path / "a.csv", rows, "Close,Adj Close,Low,High,Time,Open"))
    expected = load_bars(write(tmp_path / "b.csv"))
    np.testing.assert_array_equal(bars.close, expected.close)
    np.testing.assert_array_equal(bars.open, expected.open)
    np.testing.assert_array_equal(bars.volume, np.zeros(5))


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", header="when,Open,High,Low,Last,Volume")
    assert load_bars(path, columns={"time": "When", "close": "last"}) == load_bars(write(tmp_path / "b.csv"))
    with pytest.raises(DataError, match=r"no column 'close'.*'price'"):
        load_bars(path, columns={"time": "when", "close": "price"})
    with pytest.raises(DataError, match=r"columns= names \['bid'\]"):
        load_bars(path, columns={"bid": "Close"})


def test_blank_lines_at_the_end_are_no_rows(tmp_path: Path) -> None:
    assert len(load_bars(write(tmp_path / "a.csv", [*ROWS, "", ""]))) == 5


def test_parquet_with_times_in_the_index(tmp_path: Path) -> None:
    expected = load_bars(write(tmp_path / "b.csv"))
    frame = pd.DataFrame({name.upper(): getattr(expected, name) for name in ("open", "high", "low", "close", "volume")})
    for index in (
        pd.DatetimeIndex(expected.time),
        pd.DatetimeIndex(expected.time, name="Date"),
        pd.DatetimeIndex(expected.time).tz_localize("UTC").tz_convert("America/New_York"),
        pd.DatetimeIndex(expected.time).as_unit("s"),
        pd.Index(expected.time.astype("int64") // 10**9, name="timestamp"),
        pd.Index([str(time) for time in expected.time], name="time"),
    ):
        frame.set_index(index).to_parquet(tmp_path / "a.parquet")
        assert load_bars(tmp_path / "a.parquet") == expected


@pytest.mark.parametrize(
    ("row", "column", "value", "fault"),
    [
        (4, "Open", "abc", "'abc' is not a number"),
        (3, "High", "1,5", None),
        (5, "Close", "", "no value"),
        (5, "Close", "NaN", "no value"),
        (2, "Volume", "", "no value"),
        (6, "Low", "True", "'True' is not a number"),
        (4, "Low", "-1.05", "price -1.05 is not positive"),
        (4, "Close", "0", "price 0 is not positive"),
        (3, "High", "inf", "price inf is not positive and finite"),
        (3, "High", "1e999", "price inf is not positive and finite|'1e999' is not a number"),
        (4, "High", "1.01", r"high 1.01 is below low 1.05"),
        (2, "Open", "1.2", r"open 1.2 lies outside \[low, high\] = \[1.04, 1.06\]"),
        (6, "Close", "1.01", "close 1.01 lies outside"),
        (3, "Volume", "-5", "volume -5 is negative"),
        (4, "Time", "", "no time"),
        (4, "Time", "yesterday", "unreadable time 'yesterday'"),
        (4, "Time", "2017-01-02 00:00", "unreadable time.*read as day first"),
        (4, "Time", "31.02.2017 00:00:00.000", "unreadable time"),
        (4, "Time", "02.01.9999 00:00:00.000", "unreadable time"),
        (4, "Time", "01.01.2017 23:00:00.000", "repeats the time of row 3"),
        (4, "Time", "01.01.2017 22:30:00.000", "is before .* of row 3"),
    ],
)
def test_bad_cells_are_named(row: int, column: str, value: str, fault: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "bars.csv", with_cell(row, column, value))
    with pytest.raises(DataError, match=fault or "7 fields, the header has 6") as caught:
        load_bars(path)
    assert caught.value.row == row and caught.value.source == str(path) and caught.value.more == 0
    assert str(caught.value).startswith(f"{path}: row {row}")
    if fault is not None:
        assert caught.value.column == column and f"column {column!r}" in str(caught.value)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_first_bad_row_and_how_many_more(suffix: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"time": EXPECTED, **dict.fromkeys(("open", "high", "low", "Close"), 1.0)})
    frame.loc[[1, 3, 4], "Close"] = -2.0
    path = tmp_path / f"bars{suffix}"
    frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
    with pytest.raises(DataError, match=r"column 'Close': price -2 .*\(2 more rows like it\)") as caught:
        load_bars(path)
    assert caught.value.row == (3 if suffix == ".csv" else 2) and caught.value.more == 2


def test_parquet_cells_that_are_no_numbers(tmp_path: Path) -> None:
    frame = pd.DataFrame({"time": EXPECTED, **dict.fromkeys(("open", "high", "low", "close"), 1.0)})
    cases = {
        "is not a number": [frame.assign(close=bad) for bad in (True, EXPECTED, ["1", "1", "1", "1", "x"])],
        "no value": [frame.assign(close=[1.0, 1.0, None, 1.0, 1.0])],
        "unreadable time": [frame.assign(time=np.arange(5)), frame.assign(time=True)],
        "no time": [frame.assign(time=[*EXPECTED[:4], None])],
    }
    for fault, frames in cases.items():
        for bad in frames:
            bad.to_parquet(tmp_path / "bars.parquet")
            with pytest.raises(DataError, match=fault):
                load_bars(tmp_path / "bars.parquet")


def test_a_blank_line_between_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 4, column 'Time': no time") as caught:
        load_bars(write(tmp_path / "bars.csv", [*ROWS[:2], "", *ROWS[2:]]))
    assert caught.value.row == 4


def test_rows_of_other_lengths_are_named(tmp_path: Path) -> None:
    for row in (2, 5):
        rows = [f"{text},1" if at in (row, 6) else text for at, text in enumerate(ROWS, start=2)]
        with pytest.raises(DataError, match=f"row {row}: 7 fields, the header has 6.*1 more") as caught:
            load_bars(write(tmp_path / "long.csv", rows))
        assert caught.value.row == row
    with pytest.raises(DataError, match="row 4, column 'Volume': no value"):
        load_bars(write(tmp_path / "short.csv", [*ROWS[:2], ROWS[2].rpartition(",")[0], *ROWS[3:]]))


@pytest.mark.parametrize("column", ["Time", "Open", "High", "Low", "Close"])
def test_missing_columns_are_named(column: str, tmp_path: Path) -> None:
    path = write(tmp_path / "bars.csv", header=HEADER.replace(column, "Other"))
    with pytest.raises(DataError, match=f"no column '{column.lower()}'.*'Other'") as caught:
        load_bars(path)
    assert caught.value.column == column.lower()


def test_ambiguous_columns_are_refused_until_told(tmp_path: Path) -> None:
    path = write(tmp_path / "bars.csv", header="Time,Open,High,Low,Close,CLOSE")
    with pytest.raises(DataError, match=r"several columns can be close: \['Close', 'CLOSE'\]"):
        load_bars(path)
    rows = [f"{row},7" for row in ROWS]
    path = write(tmp_path / "bars.csv", rows, HEADER + ",TickVol")
    with pytest.raises(DataError, match="several columns can be volume"):
        load_bars(path)
    np.testing.assert_array_equal(load_bars(path, columns={"volume": "tickvol"}).volume, np.full(5, 7.0))


def test_files_that_are_no_bars(tmp_path: Path) -> None:
    def fault(name: str, content: bytes | None) -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            load_bars(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        return str(caught.value)

    assert "no such file" in fault("missing.csv", None)
    assert "unknown suffix '.xls', expected .csv" in fault("bars.xls", b"x")
    assert "the file is empty" in fault("empty.csv", b"")
    assert "the file is empty" in fault("empty.parquet", b"")
    assert "row 1 is blank" in fault("blank.csv", b"\n\n")
    assert "columns but no bars" in fault("header.csv", HEADER.encode())
    assert "columns but no bars" in fault("header.csv", HEADER.encode() + b"\n\n")
    assert "not a UTF-8 text file" in fault("binary.csv", b"\xff\xfe\x00\x01")
    assert "not a UTF-8 text file" in fault("late.csv", "\n".join([HEADER, *ROWS]).encode() + b"\n\xff,1,1,1,1,1\n")
    assert "not a readable Parquet file" in fault("text.parquet", b"Time,Open\n")


def test_too_few_bars(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"too short: 5 bars given, .* needs at least 6"):
        load_bars(write(tmp_path / "bars.csv"), minimum=6)


def test_unknown_suffix_when_saving(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"unknown suffix '\.xls'"):
        save_bars(random_bars(3, seed=0), tmp_path / "bars.xls")
