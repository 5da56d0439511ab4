"""State features of price bars, none of which looks ahead.

A feature at bar t is a function of bars t-k..t alone, k its look-back, computed so that its bits do not depend on
where the bars begin: the last row of `build_features` over the last `lookback + 1` bars equals the row that the
whole history gives. A live loop can therefore keep that many bars and no more.

The default 48 features are six tokens of eight, which is how an attention front end with 6 tokens reads a state of
48: token 0 the shape of the bar, token 1 recent returns and the clock, tokens 2-5 the same eight measures over
windows of 6, 12, 24 and 120 bars (on hourly bars: a quarter of a day to a trading week).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxengine.data.bars import Bars
from fxengine.data.errors import DataError
from fxengine.data.rolling import rolling_max, rolling_min, rolling_moments, rolling_sum, shift

Array = NDArray[np.float64]
_DAY = 86_400 * 10**9
_WEEK = 7 * _DAY
_MONDAY = 4 * _DAY  # 1970-01-05


class Series:
    """The logarithms and returns that features share, each computed once."""

    def __init__(self, bars: Bars) -> None:
        self.nanoseconds = bars.time.astype(np.int64)
        self.open, self.high = np.log(bars.open), np.log(bars.high)
        self.low, self.close = np.log(bars.low), np.log(bars.close)
        self.volume = np.log1p(bars.volume)
        self.returns = self.close - shift(self.close, 1)
        self.squares = self.returns * self.returns
        self._square_sums: dict[int, Array] = {}

    def square_sum(self, window: int) -> Array:
        """Sum of squared returns over the window."""
        if window not in self._square_sums:
            self._square_sums[window] = rolling_sum(self.squares, window)
        return self._square_sums[window]


@dataclass(frozen=True)
class Family:
    """A kind of feature; a windowed one is named `family_w`, w in bars.

    Attributes:
        compute: (series, window) -> float64 [n].
        lookback: window -> how many bars before t the feature reads.
        meaning: what it is, for people.
        smallest: smallest window, or 0 if the family has none.
    """

    compute: Callable[[Series, int], Array]
    lookback: Callable[[int], int]
    meaning: str
    smallest: int = 0


def _ratio(above: Array, below: Array) -> Array:
    """above / below; 0 where below is 0: nothing moved, so there is nothing to compare."""
    return np.divide(above, below, out=np.zeros_like(above), where=below != 0.0)


def _place(value: Array, lowest: Array, highest: Array) -> Array:
    return _ratio((value - lowest) - (highest - value), highest - lowest)


def _gap(s: Series, _: int) -> Array:
    return s.open - shift(s.close, 1)


def _bar_gap(s: Series, _: int) -> Array:
    minutes = np.full(len(s.nanoseconds), np.nan)
    minutes[1:] = np.diff(s.nanoseconds) / 60e9
    return np.log1p(minutes)


def _phase(s: Series, period: int) -> Array:
    # Integer remainder first: an exact phase, whatever the distance from 1970.
    return np.remainder(s.nanoseconds - _MONDAY, period) * (2.0 * np.pi / period)


def _rsi(s: Series, w: int) -> Array:
    up = rolling_sum(np.maximum(s.returns, 0.0), w)
    down = rolling_sum(np.maximum(-s.returns, 0.0), w)
    return _ratio(up - down, up + down)


def _ma_distance(s: Series, w: int) -> Array:
    return s.close - rolling_moments(s.close, w)[0]


def _ema_distance(s: Series, w: int) -> Array:
    # D = close - ema obeys D[t] = d * (D[t-1] + return[t]): a sum of decaying returns, exactly 0 if nothing moves.
    decay = 1.0 - 2.0 / (w + 1.0)
    return decay * rolling_sum(s.returns, 2 * w, decay)


def _position(s: Series, w: int) -> Array:
    return _place(s.close, rolling_min(s.low, w), rolling_max(s.high, w))


def _autocorrelation(s: Series, w: int) -> Array:
    product = rolling_sum(s.returns * shift(s.returns, 1), w)
    return _ratio(product, np.sqrt(s.square_sum(w) * shift(s.square_sum(w), 1)))


def _volume_z(s: Series, w: int) -> Array:
    mean, spread = rolling_moments(s.volume, w)
    return _ratio(s.volume - mean, np.sqrt(spread / w))


def _parkinson(s: Series, w: int) -> Array:
    spread = s.high - s.low
    return np.sqrt(rolling_sum(spread * spread, w) / (4.0 * np.log(2.0) * w))


FAMILIES: dict[str, Family] = {
    "range": Family(lambda s, _: s.high - s.low, lambda w: 0, "log(high / low)"),
    "body": Family(lambda s, _: s.close - s.open, lambda w: 0, "log(close / open)"),
    "upper_wick": Family(
        lambda s, _: s.high - np.maximum(s.open, s.close), lambda w: 0, "log(high / max(open, close))"
    ),
    "lower_wick": Family(lambda s, _: np.minimum(s.open, s.close) - s.low, lambda w: 0, "log(min(open, close) / low)"),
    "gap": Family(_gap, lambda w: 1, "log(open / previous close)"),
    "close_location": Family(
        lambda s, _: _place(s.close, s.low, s.high), lambda w: 0, "close in the bar's range: -1 at low, 1 at high"
    ),
    "volume_change": Family(
        lambda s, _: s.volume - shift(s.volume, 1), lambda w: 1, "log((1 + volume) / (1 + previous volume))"
    ),
    "bar_gap": Family(_bar_gap, lambda w: 1, "log(1 + minutes since the previous bar): weekends and holes show"),
    "hour_sin": Family(lambda s, _: np.sin(_phase(s, _DAY)), lambda w: 0, "sine of the time of day, UTC"),
    "hour_cos": Family(lambda s, _: np.cos(_phase(s, _DAY)), lambda w: 0, "cosine of the time of day, UTC"),
    "week_sin": Family(lambda s, _: np.sin(_phase(s, _WEEK)), lambda w: 0, "sine of the time of week from Monday 0:00"),
    "week_cos": Family(lambda s, _: np.cos(_phase(s, _WEEK)), lambda w: 0, "cosine of the time of week"),
    "return": Family(lambda s, w: s.close - shift(s.close, w), lambda w: w, "log(close / close w bars ago)", 1),
    "lag_return": Family(lambda s, w: shift(s.returns, w), lambda w: w + 1, "one-bar log return w bars ago", 1),
    "volatility": Family(
        lambda s, w: np.sqrt(s.square_sum(w) / w), lambda w: w, "root mean square of w one-bar log returns", 1
    ),
    "rsi": Family(_rsi, lambda w: w, "(gains - losses) / (gains + losses) over w returns: 2 RSI - 1", 1),
    "ma_distance": Family(_ma_distance, lambda w: w - 1, "log close minus the mean log close of w bars", 2),
    "ema_distance": Family(
        _ema_distance,
        lambda w: 2 * w,
        "log close minus its exponential mean of span w, started 2w bars ago at that close",
        2,
    ),
    "position": Family(
        _position, lambda w: w - 1, "log close between the lowest low (-1) and the highest high (1) of w bars", 1
    ),
    "autocorrelation": Family(
        _autocorrelation, lambda w: w + 1, "lag-1 autocorrelation of w returns (about 0), in [-1, 1]", 2
    ),
    "volume_z": Family(_volume_z, lambda w: w - 1, "log volume against mean and standard deviation of w bars", 2),
    "volume_ratio": Family(
        lambda s, w: s.volume - rolling_moments(s.volume, w)[0],
        lambda w: w - 1,
        "log volume minus the mean log volume of w bars",
        2,
    ),
    "parkinson": Family(_parkinson, lambda w: w - 1, "Parkinson's high-low volatility over w bars", 1),
}
"""Every kind of feature by name. Logs are natural, so prices in another unit give the same features."""

_WINDOWED = ("return", "volatility", "rsi", "ma_distance", "ema_distance", "position", "autocorrelation", "volume_z")
DEFAULT_FEATURES: tuple[str, ...] = (
    *("return_1", "range", "body", "upper_wick", "lower_wick", "gap", "close_location", "volume_change"),
    *("lag_return_1", "lag_return_2", "lag_return_3", "bar_gap", "hour_sin", "hour_cos", "week_sin", "week_cos"),
    *(f"{family}_{window}" for window in (6, 12, 24, 120) for family in _WINDOWED),
)
"""The 48 features of the default state, in order: six tokens of eight."""


@dataclass(frozen=True)
class FeatureSpec:
    """Which features make a state, in order.

    Attributes:
        names: names of `FAMILIES`, windowed ones with their window: "body", "volatility_24".

    Raises:
        DataError: no names, a repeated name, an unknown family, a window missing, too small or not wanted.
    """

    names: tuple[str, ...] = DEFAULT_FEATURES

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise DataError("a state needs at least one feature, names is empty")
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if repeated:
            raise DataError(f"features named more than once: {repeated}")
        self._families()

    @property
    def size(self) -> int:
        """Number of features, S."""
        return len(self.names)

    @property
    def lookback(self) -> int:
        """How many bars before t the state of bar t reads; so many first bars have no state."""
        return max(family.lookback(window) for family, window in self._families())

    def describe(self) -> str:
        """One line per feature: position, name, look-back, meaning."""
        lines = []
        for at, (name, (family, window)) in enumerate(zip(self.names, self._families(), strict=True)):
            lines.append(f"{at:3d}  {name:<22} {family.lookback(window):4d} bars back  {family.meaning}")
        return "\n".join(lines)

    def _families(self) -> list[tuple[Family, int]]:
        return [_parse(name) for name in self.names]

    def columns(self, series: Series) -> Iterator[Array]:
        """Each feature for every bar, float64 [n], in order; NaN before its own look-back."""
        for family, window in self._families():
            yield family.compute(series, window)


def _parse(name: str) -> tuple[Family, int]:
    if name in FAMILIES and not FAMILIES[name].smallest:
        return FAMILIES[name], 0
    stem, _, digits = name.rpartition("_")
    family = FAMILIES.get(stem)
    if family is not None and family.smallest and digits.isascii() and digits.isdigit():
        if int(digits) < family.smallest:
            raise DataError(f"feature {name!r}: window {digits} is too small, {stem} needs at least {family.smallest}")
        return family, int(digits)
    plain = [key for key, kind in FAMILIES.items() if not kind.smallest]
    windowed = [f"{key}_<bars>" for key, kind in FAMILIES.items() if kind.smallest]
    raise DataError(f"unknown feature {name!r}; there are {', '.join(plain + windowed)}")


@dataclass(frozen=True, eq=False)
class Features:
    """Features of every bar.

    Attributes:
        names: S names.
        values: float32 [n, S], row t belongs to bar t; the warm-up rows before `first_valid` are NaN.
        first_valid: first row with every feature, = look-back of the spec.
        time: datetime64[ns] [n], times of the bars.
    """

    names: tuple[str, ...]
    values: NDArray[np.float32]
    first_valid: int
    time: NDArray[np.datetime64]

    @property
    def valid(self) -> NDArray[np.float32]:
        """The rows after the warm-up, float32 [n - first_valid, S]: a view."""
        return self.values[self.first_valid :]


def build_features(bars: Bars, spec: FeatureSpec | None = None) -> Features:
    """Compute the features of `spec` (None: the default 48) for every bar.

    Raises:
        DataError: fewer than `spec.lookback + 1` bars.
    """
    spec = FeatureSpec() if spec is None else spec
    bars.require(spec.lookback + 1, f"a state of {spec.size} features that looks {spec.lookback} bars back")
    first = spec.lookback
    series = Series(bars)
    values = np.empty((len(bars), spec.size), dtype=np.float32)
    values[:first] = np.nan
    for at, column in enumerate(spec.columns(series)):
        values[first:, at] = column[first:]
    return Features(spec.names, values, first, bars.time)
