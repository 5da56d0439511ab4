"""Bars and files for the tests of market data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fxengine.data import Bars

HEADER = "Time,Open,High,Low,Close,Volume"
ROWS = (
    "01.01.2017 22:00:00.000,1.05,1.06,1.04,1.055,100",
    "01.01.2017 23:00:00.000,1.055,1.07,1.05,1.06,200",
    "02.01.2017 00:00:00.000,1.06,1.065,1.05,1.05,0",
    "02.01.2017 01:00:00.000,1.05,1.06,1.03,1.04,50.5",
    "02.01.2017 02:00:00.000,1.04,1.05,1.03,1.045,70",
)
CELLS = dict(zip(HEADER.split(","), range(6), strict=True))


def random_bars(count: int, seed: int, *, flat: float = 0.1) -> Bars:
    """A valid random walk: irregular times, a share `flat` of bars that do not move at all."""
    rng = np.random.default_rng(seed)
    minutes = rng.choice([60, 60, 60, 60, 60, 120, 2940], size=count)
    time = np.datetime64("2016-12-31T22:00", "ns") + np.cumsum(minutes) * np.timedelta64(1, "m")
    still = rng.random(count) < flat
    close = 1.1 * np.exp(np.cumsum(np.where(still, 0.0, rng.normal(0.0, 1e-3, count))))
    previous = np.concatenate([close[:1], close[:-1]])
    open_ = np.where(still, close, previous * np.exp(rng.normal(0.0, 1e-4, count)))
    high = np.where(still, close, np.maximum(open_, close) * np.exp(rng.exponential(3e-4, count)))
    low = np.where(still, close, np.minimum(open_, close) * np.exp(-rng.exponential(3e-4, count)))
    volume = np.where(still, 0.0, rng.lognormal(8.0, 0.5, count))
    return Bars.from_arrays(time, open_, high, low, close, volume, source="random walk")


def spliced(past: Bars, future: Bars, at: int) -> Bars:
    """Bars 0..at of `past`, then other bars with other times: all that comes after `at` is replaced."""
    shift = past.time[at] - future.time[at]
    time = np.concatenate([past.time[: at + 1], future.time[at + 1 :] + shift])
    values = [
        np.concatenate([getattr(past, name)[: at + 1], 3.0 * getattr(future, name)[at + 1 :]])
        for name in ("open", "high", "low", "close", "volume")
    ]
    return Bars.from_arrays(time, *values, source="spliced")


def write(path: Path, rows: tuple[str, ...] | list[str] = ROWS, header: str = HEADER) -> Path:
    """A text file of these lines."""
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return path


def with_cell(row: int, column: str, value: str) -> list[str]:
    """`ROWS` with one cell changed; `row` counts as in the file (the header is row 1)."""
    cells = ROWS[row - 2].split(",")
    cells[CELLS[column]] = value
    return [*ROWS[: row - 2], ",".join(cells), *ROWS[row - 1 :]]
