"""`Market`: the NumPy twin of the environments on the device, the same bits without one.

It is the kernel's oracle and the way to try a policy on the host. The order of every float64 operation is that of
`market.cu`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.ops.gather import random_bits
from fxengine.ops.market import ACCOUNT, ACCOUNT_FEATURES, CLOCK, TRACE
from fxengine.rl.market import (
    LIMIT,
    MARKET,
    MID,
    NORMAL,
    PATIENT,
    URGENT,
    MarketCosts,
    MarketData,
    MarketSpec,
    Transition,
    checked_actions,
)

Float = NDArray[np.float64]
Flags = NDArray[np.bool_]

_RESET_BIT = 2**31
_THIRD = 1.0 / 3.0


class Market:
    """E environments in lockstep, bit for bit as `fxengine.ops.market` steps them.

    Args:
        data: what is traded.
        spec: the rules.
        environments: how many.
        seed: key of the random numbers, 64 bits.
        stream: their stream, 32 bits.
        costs: fee, spread and urgency cost; assign `costs` to change them between steps.

    Attributes:
        account: float64 [len(ACCOUNT), E], the accounts (`fxengine.ops.market.ACCOUNT`).
        clock: int32 [len(CLOCK), E].
        replay: steps done, part of the counter of the random numbers; a device counts replays of its graph.

    Raises:
        ValueError: no environment, or an episode longer than the data.
    """

    def __init__(
        self,
        data: MarketData,
        spec: MarketSpec,
        environments: int,
        *,
        seed: int = 0,
        stream: int = 0,
        costs: MarketCosts | None = None,
    ) -> None:
        if environments < 1:
            raise ValueError(f"environments must be at least 1, got {environments}")
        spec.check(data)
        self.data, self.spec, self.seed, self.stream = data, spec, seed, stream
        self.costs = costs or MarketCosts()
        self.replay = 0
        self.account = np.zeros((len(ACCOUNT), environments))
        self.clock = np.zeros((len(CLOCK), environments), np.int32)
        self._a = dict(zip(ACCOUNT, self.account, strict=True))
        self._c = dict(zip(CLOCK, self.clock, strict=True))
        self._constants = spec.constants(data)

    def __len__(self) -> int:
        return self.clock.shape[1]

    def reset(self, *, stagger: bool = True) -> NDArray[np.float32]:
        """Begin an episode in every environment; with `stagger` of random lengths. Returns observations [E, S]."""
        self.account[:] = 0.0
        self.clock[:] = 0
        self._begin(np.arange(len(self)), reset=True, stagger=stagger)
        return self.observe()

    def observe(self) -> NDArray[np.float32]:
        """The observations to act on, float32 [E, S]."""
        return np.concatenate([self.data.features[self._c["bar"]], self._account_features()], axis=1)

    def trace(self) -> Float:
        """Rows of a trace as the environments are: float64 [len(TRACE), E]."""
        rows: dict[str, NDArray[Any]] = {
            "equity": self._a["equity"],
            "position": self._c["level"] * self._constants["size"],
            "turnover": self._a["turnover"],
            "trades": self._c["trades"],
        }
        return np.stack([rows[name] for name in TRACE]).astype(np.float64)

    def step(self, actions: ArrayLike) -> Transition:
        """One bar in every environment; what ends begins anew.

        Args:
            actions: integers [E, D] in 0..2.

        Raises:
            ValueError: actions of another shape, or outside 0..2.
        """
        transition, _ = self.step_traced(actions)
        return transition

    def step_traced(self, actions: ArrayLike) -> tuple[Transition, Float]:
        """`step`, and the rows of the trace of the bars reached, before any episode begins anew."""
        chosen = checked_actions(actions, len(self), self.spec)
        a, c, k = self._a, self._c, self._constants
        at = c["bar"].copy()
        close, following = self.data.prices[at, 3], self.data.prices[at + 1]
        level, before = c["level"].copy(), a["equity"].copy()
        self._trade(chosen, close, following)
        c["held"][:] = np.where(level * c["level"] > 0, c["held"] + 1, 0)
        c["bar"][:] = at + 1
        a["equity"][:] = a["cash"] + a["units"] * following[:, 3]
        earned = (a["equity"] - before) / before
        a["peak"][:] = np.maximum(a["peak"], a["equity"])
        a["drawdown"][:] = np.maximum(a["drawdown"], (a["peak"] - a["equity"]) / a["peak"])
        terminated = a["equity"] <= k["ruin"]
        truncated = ~terminated & (c["bar"] == c["end"])
        next_state, trace = self.observe(), self.trace()
        visible = at + self.data.lookahead <= c["end"]
        nb_label = np.where(visible, self.data.next_bar[at], -1).astype(np.int32)
        ended = np.flatnonzero(terminated | truncated)
        self._conclude(ended)
        self._begin(ended, reset=False, stagger=False)
        self.replay += 1
        transition = Transition(
            next_state,
            (earned * k["reward_scale"]).astype(np.float32),
            np.where(terminated, 1, np.where(truncated, 2, 0)).astype(np.int32),
            nb_label,
            self.data.regime[at],
            self.observe(),
        )
        return transition, trace

    # -- orders --------------------------------------------------------------------------------------------------

    def _trade(self, actions: NDArray[np.int64], close: Float, following: Float) -> None:
        """The orders that the actions stand for, and what the following bars make of them."""
        c, branches = self._c, actions.shape[1]
        magnitude = actions[:, 1] + 1 if branches > 1 else 3
        kind = actions[:, 2] if branches > 2 else np.full(len(self), MARKET)
        urgency = actions[:, 3] if branches > 3 else np.full(len(self), NORMAL)
        level = (actions[:, 0] - 1) * magnitude
        trading = level != c["level"]
        self._place(trading, level, kind, urgency, close)
        filled, price = self._fill(kind, urgency, following)
        self._settle(trading & filled, price)
        self._cancel(~trading | filled | (urgency != PATIENT))

    def _place(
        self,
        trading: Flags,
        level: NDArray[np.int64],
        kind: NDArray[np.int64],
        urgency: NDArray[np.int64],
        close: Float,
    ) -> None:
        a, c, k = self._a, self._c, self._constants
        same = (kind == c["order_type"]) & (level == c["order_level"])
        placed = trading & ~((kind != MARKET) & (urgency == PATIENT) & same)
        units = (level * k["size"]) * a["equity"] / close
        offset = np.array([k["offset_patient"], k["offset_normal"], k["offset_urgent"]])[urgency]
        away = np.where(units < a["units"], offset, -offset)
        price = np.where(kind == LIMIT, close * (1.0 + away), close)
        a["order_units"][placed], a["order_price"][placed] = units[placed], price[placed]
        c["order_level"][placed], c["order_type"][placed] = level[placed], kind[placed]

    def _fill(self, kind: NDArray[np.int64], urgency: NDArray[np.int64], following: Float) -> tuple[Flags, Float]:
        """Which orders the following bars fill, and at what prices."""
        a = self._a
        opened, high, low, close = following.T
        half, late = 0.5 * self.costs.spread, self.costs.urgency_cost
        side = np.where(a["order_units"] < a["units"], -1.0, 1.0)
        asked = a["order_price"]
        limit = np.where(side > 0.0, low <= asked, high >= asked)
        better = np.where(side > 0.0, np.minimum(opened, asked), np.maximum(opened, asked))
        mid = (low <= asked) & (asked <= high)
        filled = np.where(kind == MARKET, True, np.where(kind == MID, mid, limit))
        price = np.where(kind == MARKET, opened * (1.0 + side * half), np.where(kind == MID, asked, better))
        completed = ~filled & (urgency == URGENT)
        price = np.where(completed, close * (1.0 + side * (half + late)), price)
        return filled | completed, price

    def _settle(self, filled: Flags, price: Float) -> None:
        a, c = self._a, self._c
        delta = a["order_units"] - a["units"]
        value = delta * price
        size = np.abs(value)
        before, after = np.abs(a["units"]), np.abs(a["order_units"])
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = (a["entry"] * before + price * np.abs(delta)) / after
            entry = np.where(after > before, mean, a["entry"])
        entry = np.where(c["level"] * c["order_level"] <= 0, price, entry)
        entry = np.where(c["order_level"] == 0, 0.0, entry)
        results = {
            "cash": (a["cash"] - value) - self.costs.fee * size,
            "turnover": a["turnover"] + size / a["equity"],
            "entry": entry,
            "units": a["order_units"],
        }
        for name, result in results.items():
            a[name][filled] = result[filled]
        c["trades"][filled] += 1
        c["level"][filled] = c["order_level"][filled]

    def _cancel(self, gone: Flags) -> None:
        for row in (self._a["order_price"], self._a["order_units"]):
            row[gone] = 0.0
        for clock in (self._c["order_type"], self._c["order_level"]):
            clock[gone] = 0

    # -- episodes ------------------------------------------------------------------------------------------------

    def _begin(self, which: NDArray[np.int64], *, reset: bool, stagger: bool) -> None:
        items = which + (_RESET_BIT if reset else 0)
        bits = random_bits(self.seed, self.replay, self.stream, items).astype(np.uint64)
        episode = self.spec.episode_bars
        start = _scaled(bits[:, 1], bits[:, 0], len(self.data) - episode)
        length = 1 + _scaled(bits[:, 3], bits[:, 2], episode) if stagger else np.full(len(which), episode)
        opening = {"equity": 1.0, "cash": 1.0, "peak": 1.0}
        for name in ACCOUNT:
            if not name.startswith("final"):
                self._a[name][which] = opening.get(name, 0.0)
        begun = {"bar": start, "start": start, "end": start + length}
        for name in CLOCK:
            if name != "episodes" and not name.startswith("final"):
                self._c[name][which] = begun.get(name, 0)

    def _conclude(self, which: NDArray[np.int64]) -> None:
        a, c = self._a, self._c
        for name in ("equity", "drawdown", "turnover"):
            a[f"final_{name}"][which] = a[name][which]
        c["episodes"][which] += 1
        c["final_bars"][which] = (c["bar"] - c["start"])[which]
        c["final_trades"][which] = c["trades"][which]

    def _account_features(self) -> NDArray[np.float32]:
        a, c, k = self._a, self._c, self._constants
        close, side = self.data.prices[c["bar"], 3], np.sign(c["level"]).astype(np.float64)
        resting, held = c["order_type"] != MARKET, c["held"].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            profit = ((close - a["entry"]) / a["entry"]) * side * k["per_range"]
        distance = ((a["order_price"] - close) / close) * k["per_range"]
        out = np.empty((len(self), len(ACCOUNT_FEATURES)), np.float32)
        out[:, 0] = side
        out[:, 1] = (side * c["level"]) * _THIRD
        out[:, 2] = np.where(c["level"] != 0, profit, 0.0)
        out[:, 3] = held / (held + k["held_half"])
        out[:, 4] = np.where(resting, np.where(a["order_units"] < a["units"], -1.0, 1.0), 0.0)
        out[:, 5] = np.where(resting, c["order_level"] * _THIRD, 0.0)
        out[:, 6] = np.where(resting, distance, 0.0)
        out[:, 7] = (0.5 * self.costs.spread + self.costs.fee) * k["per_range"]
        return out


def _scaled(high: NDArray[np.uint64], low: NDArray[np.uint64], population: int) -> NDArray[np.int64]:
    """High 64 bits of (high:low)·population, the words 32 bits wide, population below 2**32."""
    n, shift = np.uint64(population), np.uint64(32)
    return ((high * n + (low * n >> shift)) >> shift).astype(np.int64)
