"""What a walk through all bars earned: performance figures, and baselines that are accounted for in the same way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.ops.market import TRACE
from fxengine.rl.market import FLAT, LONG, MarketCosts, MarketData, MarketSpec
from fxengine.rl.twin import Market

#: Chooses actions, integers [E, D], from observations, float32 [E, S].
Policy: TypeAlias = Callable[[NDArray[np.float32]], ArrayLike]

_YEAR = 365.25 * 86_400e9  # nanoseconds


@dataclass(frozen=True)
class Performance:
    """Figures of one account.

    Attributes:
        total_return: last equity over the first, minus 1.
        sharpe: mean over standard deviation of the returns of a bar, times the root of the bars in a year; 0 if the
            equity never changes. The bars of a year are counted from the times: weekends and holes are no bars.
        max_drawdown: largest fall of the equity below its peak, as a share of the peak.
        turnover: traded value over equity, summed.
        trades: orders filled.
        exposure: mean of |position|.
    """

    total_return: float
    sharpe: float
    max_drawdown: float
    turnover: float
    trades: int
    exposure: float

    def __str__(self) -> str:
        return (
            f"return {100 * self.total_return:+.2f} %, Sharpe {self.sharpe:+.2f}, drawdown "
            f"{100 * self.max_drawdown:.2f} %, {self.trades} trades, turnover {self.turnover:.1f}"
        )


def bars_per_year(time: NDArray[np.datetime64]) -> float:
    """How many bars a year has, from the times of at least two of them."""
    span = float((time[-1] - time[0]) / np.timedelta64(1, "ns"))
    return (len(time) - 1) / (span / _YEAR)


def performance(trace: NDArray[np.float64], time: NDArray[np.datetime64]) -> list[Performance]:
    """Figures of every account of a trace.

    Args:
        trace: float64 [n, 4, E] as `walk` returns it and `fxengine.ops.market.step` writes it. Rows behind an account's
            ruin hold NaN in a trace that was NaN before: the last row before them then stands to the end.
        time: datetime64 [n], of the bars.

    Raises:
        ValueError: the shapes do not fit, fewer than 2 bars, or the first row of an account is missing.
    """
    if trace.ndim != 3 or trace.shape[1] != len(TRACE) or time.shape != trace.shape[:1] or len(time) < 2:
        raise ValueError(
            f"trace must be [n, {len(TRACE)}, E] and time [n], n at least 2, got {trace.shape} and {time.shape}"
        )
    if np.isnan(trace[0]).any():
        raise ValueError("the first row of the trace is missing: reset with trace=")
    present = ~np.isnan(trace).any(axis=1)
    newest = np.maximum.accumulate(np.where(present, np.arange(len(time))[:, None], 0))
    filled = np.take_along_axis(trace, newest[:, None, :], axis=0)
    yearly = bars_per_year(time)
    return [_figures(*account, yearly=yearly) for account in filled.transpose(2, 1, 0)]


def _figures(
    equity: NDArray[np.float64],
    position: NDArray[np.float64],
    turnover: NDArray[np.float64],
    trades: NDArray[np.float64],
    *,
    yearly: float,
) -> Performance:
    moves = np.diff(equity)
    # A ruined account may be at 0 for good: it earns nothing on nothing.
    returns = np.divide(moves, equity[:-1], out=np.zeros_like(moves), where=moves != 0.0)
    spread = float(np.std(returns))
    peak = np.maximum.accumulate(equity)
    return Performance(
        total_return=float(equity[-1] / equity[0] - 1.0),
        sharpe=float(np.mean(returns)) / spread * math.sqrt(yearly) if spread > 0.0 else 0.0,
        max_drawdown=float(np.max((peak - equity) / peak)),
        turnover=float(turnover[-1]),
        trades=int(trades[-1]),
        exposure=float(np.mean(np.abs(position))),
    )


def walk(
    data: MarketData, spec: MarketSpec, policy: Policy, environments: int = 1, *, costs: MarketCosts | None = None
) -> NDArray[np.float64]:
    """Let a policy trade through all bars of `data`, in float64 [n, 4, E]: the trace (`TRACE`).

    Every account begins at the first bar, flat, with an equity of 1. One that is ruined stops: its later rows are NaN.

    Args:
        data: what is traded.
        spec: the rules; the length of episodes does not matter.
        policy: chooses the actions of all accounts.
        environments: accounts side by side.
        costs: fee, spread and urgency cost.
    """
    market = Market(data, spec.through(data), environments, costs=costs)
    trace = np.full((len(data), len(TRACE), environments), np.nan)
    observation = market.reset(stagger=False)
    trace[0] = market.trace()
    alive = np.ones(environments, np.bool_)
    for bar in range(1, len(data)):
        transition, row = market.step_traced(policy(observation))
        trace[bar][:, alive] = row[:, alive]
        alive &= transition.done == 0
        observation = transition.observation
    return trace


def baselines(
    data: MarketData, spec: MarketSpec, *, costs: MarketCosts | None = None, draws: int = 8, seed: int = 0
) -> dict[str, list[Performance]]:
    """What needs no learning: `buy and hold`, `flat`, and `random` (uniformly drawn actions, `draws` accounts).

    Buy and hold is long at full size from the first bar on, by a market order.
    """
    if draws < 1:
        raise ValueError(f"draws must be at least 1, got {draws}")
    branches = len(spec.branches)
    rng = np.random.default_rng(seed)
    held = np.array([LONG, 2, 0, 1], np.int64)[:branches]
    still = np.array([FLAT, 0, 0, 1], np.int64)[:branches]

    def policy(observation: NDArray[np.float32]) -> NDArray[np.int64]:
        return np.concatenate([[held, still], rng.integers(0, 3, (len(observation) - 2, branches))])

    found = performance(walk(data, spec, policy, 2 + draws, costs=costs), data.bars.time)
    return {"buy and hold": found[:1], "flat": found[1:2], "random": found[2:]}
