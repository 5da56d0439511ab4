"""Markets for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from fxengine.data import Bars, next_bar_labels
from fxengine.ops.market import ACCOUNT, CLOCK
from fxengine.rl.market import MarketData, typical_range
from fxengine.rl.twin import Market

Bar = tuple[float, float, float, float]


def market_of(*bars: Bar, bar_range: float = 0.01, lookahead: int = 1, **fields: Any) -> MarketData:
    """Hourly bars (open, high, low, close) with one feature, the position of the bar."""
    prices = np.array(bars, np.float64)
    time = np.datetime64("2020-01-01T00", "ns") + np.arange(len(bars)) * np.timedelta64(1, "h")
    values: dict[str, Any] = {
        "bars": Bars.from_arrays(time, *prices.T, source="test bars"),
        "features": np.arange(len(bars), dtype=np.float32)[:, None],
        "next_bar": next_bar_labels(prices[:, 3], lookahead),
        "regime": np.arange(len(bars), dtype=np.int32) % 4,
        "lookahead": lookahead,
        "bar_range": bar_range,
    }
    return MarketData(**(values | fields))


def random_market(count: int, seed: int, *, width: int = 5, volatility: float = 0.01, lookahead: int = 3) -> MarketData:
    """A random walk with gaps between the bars; the prices lie on a grid, so that orders touch highs and lows."""
    rng = np.random.default_rng(seed)
    close = 100.0 * np.exp(np.cumsum(rng.normal(0.0, volatility, count)))
    opened = np.append(close[:1], close[:-1]) * np.exp(rng.normal(0.0, volatility / 3, count))
    high = np.maximum(opened, close) * np.exp(rng.exponential(volatility / 2, count))
    low = np.minimum(opened, close) * np.exp(-rng.exponential(volatility / 2, count))
    bars = np.maximum(np.round(np.stack([opened, high, low, close], axis=1), 1), 0.1)
    data = market_of(*map(tuple, bars), lookahead=lookahead)
    features = rng.normal(size=(count, width)).astype(np.float32)
    return market_of(*map(tuple, bars), lookahead=lookahead, features=features, bar_range=typical_range(data.bars))


def account(market: Market, name: str) -> float:
    """A quantity of the first environment."""
    row = market.account[ACCOUNT.index(name)] if name in ACCOUNT else market.clock[CLOCK.index(name)]
    return float(row[0])
