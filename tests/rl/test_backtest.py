"""Figures of a trace, and the baselines."""

from __future__ import annotations

import numpy as np
import pytest

from fxengine.rl.backtest import bars_per_year, baselines, performance, walk
from fxengine.rl.market import MarketCosts, MarketSpec
from tests.rl.markets import random_market

HOUR = np.timedelta64(1, "h")
START = np.datetime64("2021-01-01T00", "ns")


def _trace(*equity: float) -> np.ndarray:
    """One account that holds 0.5 short from the second bar on."""
    n = len(equity)
    rows = [np.array(equity), np.r_[0.0, np.full(n - 1, -0.5)], 0.5 * np.arange(n), np.arange(n, dtype=float)]
    return np.stack(rows, axis=1)[:, :, None]


def test_figures_worked_out_by_hand() -> None:
    """Returns +10 %, -20 %, +25 %: mean 5 %, deviations 5, -25 and 20 %."""
    (found,) = performance(_trace(1.0, 1.1, 0.88, 1.1), START + np.arange(4) * HOUR)
    assert found.total_return == pytest.approx(0.1)
    assert found.max_drawdown == pytest.approx(0.2)
    deviation = (0.05**2 + 0.25**2 + 0.2**2) / 3
    assert found.sharpe == pytest.approx(0.05 / deviation**0.5 * (365.25 * 24) ** 0.5)
    assert (found.turnover, found.trades, found.exposure) == (1.5, 3, 0.375)
    assert "return +10.00 %" in str(found) and "3 trades" in str(found)


def test_years_are_counted_from_the_times() -> None:
    assert bars_per_year(START + np.arange(3) * HOUR) == pytest.approx(365.25 * 24)
    weekdays = START + np.array([0, 1, 2, 3, 4, 7]) * np.timedelta64(1, "D")
    assert bars_per_year(weekdays) == pytest.approx(365.25 * 5 / 7)


def test_rows_after_ruin_stand_still() -> None:
    trace = _trace(1.0, 0.8, 0.0, np.nan, np.nan)
    trace[3:] = np.nan
    (found,) = performance(trace, START + np.arange(5) * HOUR)
    assert (found.total_return, found.max_drawdown, found.trades) == (-1.0, 1.0, 2)
    # Returns -20 %, -100 %, 0, 0.
    assert found.sharpe == pytest.approx(-0.3 / np.std([-0.2, -1.0, 0.0, 0.0]) * (365.25 * 24) ** 0.5)


def test_baselines_on_the_same_accounting() -> None:
    data = random_market(400, 6, volatility=0.002)
    costs = MarketCosts(fee=1e-4, spread=1e-3)
    for branches in range(1, 5):
        spec = MarketSpec(branches=(3,) * branches)
        found = baselines(data, spec, costs=costs, draws=3, seed=1)
        (held,), (flat,), drawn = found["buy and hold"], found["flat"], found["random"]
        paid = data.bars.open[1] * (1 + costs.spread / 2) * (1 + costs.fee)
        assert held.total_return == pytest.approx((data.bars.close[-1] - paid) / data.bars.close[0], rel=1e-9)
        assert (held.trades, flat.trades, flat.total_return, flat.sharpe) == (1, 0, 0.0, 0.0)
        assert len(drawn) == 3 and all(one.trades > 50 for one in drawn)
        assert all(one.total_return < 0.0 for one in drawn)  # some 200 trades or more at 6 basis points
        assert drawn == baselines(data, spec, costs=costs, draws=3, seed=1)["random"]


def test_figures_agree_with_the_accounts() -> None:
    """Drawdown and turnover of the trace are what the environments themselves keep."""
    data = random_market(150, 6)
    rng = np.random.default_rng(0)
    trace = walk(data, MarketSpec(), lambda o: rng.integers(0, 3, (len(o), 4)), 5)
    for one, equity, turnover in zip(performance(trace, data.bars.time), trace[:, 0].T, trace[:, 2].T, strict=True):
        peak = np.maximum.accumulate(equity)
        assert one.max_drawdown == ((peak - equity) / peak).max()
        assert one.turnover == turnover[-1] and (np.diff(turnover) >= 0.0).all()


def test_what_is_refused() -> None:
    time = START + np.arange(4) * HOUR
    with pytest.raises(ValueError, match=r"\(4, 3, 1\)"):
        performance(np.ones((4, 3, 1)), time)
    with pytest.raises(ValueError, match=r"\(3,\)"):
        performance(np.ones((4, 4, 1)), time[:3])
    with pytest.raises(ValueError, match="first row"):
        performance(np.full((4, 4, 1), np.nan), time)
    with pytest.raises(ValueError, match="draws"):
        baselines(random_market(20, 1), MarketSpec(), draws=0)
