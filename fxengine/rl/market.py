"""Trading environments on real bars: the rules, and the data they run on.

The kernel `market.cu` follows these rules on the device (`fxengine.ops.market`), `fxengine.rl.twin.Market` in NumPy.

**Time.** The agent sees an environment at the close of bar t, with the features of bar t, and acts; bar t+1 shows what
the action brings. Nothing of bar t+1 or later is in the observation. An episode begins at a bar drawn at random and
lasts `episode_bars` steps (then it is truncated), or until the equity at a close is at or below `ruin` (terminated).
The next one begins in the same step.

**Action** at the close of t, up to four branches of three, a prefix of these:

| branch | actions 0, 1, 2 | without the branch |
|---|---|---|
| direction | short, flat, long | |
| magnitude | level 1, 2, 3: thirds of `max_position` | level 3 |
| order type | market, limit, mid | market |
| urgency | patient, normal, urgent | normal |

Direction and magnitude name a level in -3..3. If the position has that level already, nothing is traded and a resting
order is withdrawn: a position is left to drift with its price and not trimmed every bar. Else an order is placed for

    units = level·(max_position/3)·equity[t] / close[t]        (signed target; what is traded is its distance from now)

and replaces a resting one. An order that rests stays as it is, price and units, if the action asks for the same level
with the same order type, patiently, once more.

**Orders** during bar t+1, with half = spread/2, side = +1 for a buy and -1 for a sale:

| type | price | filled |
|---|---|---|
| market | open[t+1]·(1 + side·half) | always |
| limit | p = close[t]·(1 - side·offset); at the open where it is better: min or max(p, open) | low <= p, high >= p |
| mid | p = close[t], no spread | low <= p <= high |

`offset` is `limit_offsets[urgency]` typical ranges of a bar. What is not filled: an urgent order is completed at
close[t+1]·(1 + side·(half + urgency cost)), a normal one expires, a patient one rests. Urgency changes nothing about a
market order. A touched price counts as filled and the size of an order as small against the market.

**Accounts** are kept in float64, in units and cash: cash falls by units·price and by fee·|units|·price, equity =
cash + units·close. An episode begins with 1. Reward = reward_scale·(equity[t+1] - equity[t])/equity[t], rounded to
float32: the simple return, not its logarithm, because a position that loses more than everything has none, and because
products and quotients have the same bits on every device. Fees and spread are charged when a trade is made, so an
episode that ends by truncation keeps its position, valued at the close.

**Observation**: features of the bar, then eight of the account: side -1/0/1, size in 0..1, profit per unit since entry,
held/(held + `held_half`), side and target level/3 of the resting order and its distance from the close, and what a
market order costs one way. Profit, distance and cost are measured in typical ranges of a bar, so that they are of one
size in every market. Equity is left out: it says what luck was, and a walk through years would show values that no
episode of training has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.data.bars import PRICES, Bars
from fxengine.data.dataset import Dataset, Part
from fxengine.ops.market import ACCOUNT_FEATURES

#: Branches of an action.
BRANCHES = ("direction", "magnitude", "order type", "urgency")
SHORT, FLAT, LONG = 0, 1, 2
MARKET, LIMIT, MID = 0, 1, 2
PATIENT, NORMAL, URGENT = 0, 1, 2


@dataclass(frozen=True)
class MarketSpec:
    """The rules of an environment.

    Attributes:
        branches: (3,), (3, 3), (3, 3, 3) or (3, 3, 3, 3): how many of the branches an action has.
        episode_bars: steps of an episode.
        max_position: value of the largest position as a multiple of the equity.
        limit_offsets: distance of a limit order from the close, patient, normal and urgent, in typical ranges of a bar.
        ruin: equity at which an episode is terminated, below the 1 that it begins with.
        reward_scale: reward of a return of 1; the default makes the reward a return in per cent.
        held_half: bars at which the feature of the holding time reaches 1/2.
    """

    branches: tuple[int, ...] = (3, 3, 3, 3)
    episode_bars: int = 256
    max_position: float = 1.0
    limit_offsets: tuple[float, float, float] = (0.5, 0.25, 0.1)
    ruin: float = 0.5
    reward_scale: float = 100.0
    held_half: float = 24.0

    def __post_init__(self) -> None:
        def positive(value: float) -> bool:
            return 0.0 < value < math.inf

        rules = {
            "branches": (
                0 < len(self.branches) <= len(BRANCHES) and set(self.branches) == {3},
                "one to four branches of 3: " + ", ".join(BRANCHES),
            ),
            "episode_bars": (self.episode_bars >= 1, "at least 1"),
            "max_position": (positive(self.max_position), "positive and finite"),
            "limit_offsets": (
                len(self.limit_offsets) == 3 and all(0.0 <= x < math.inf for x in self.limit_offsets),
                "three numbers, 0 or more: patient, normal, urgent",
            ),
            "ruin": (0.0 <= self.ruin < 1.0, "in [0, 1): an episode begins with an equity of 1"),
            "reward_scale": (positive(self.reward_scale), "positive and finite"),
            "held_half": (positive(self.held_half), "positive and finite"),
        }
        for name, (holds, expected) in rules.items():
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")

    def check(self, data: MarketData) -> None:
        """Raise ValueError unless `data` has bars for an episode and prices that limit orders stay positive at."""
        if len(data) < self.episode_bars + 1:
            raise ValueError(
                f"{data.bars.source}: an episode of {self.episode_bars} steps needs {self.episode_bars + 1} bars, "
                f"got {len(data)}"
            )
        if max(self.limit_offsets) * data.bar_range >= 1.0:
            raise ValueError(
                f"limit_offsets {self.limit_offsets} of bars with a typical range of {data.bar_range:g} of the price "
                "put buy orders at or below 0"
            )

    def through(self, data: MarketData) -> MarketSpec:
        """The same rules with one episode through all bars of `data`, which then always begins at the first."""
        return replace(self, episode_bars=len(data) - 1)

    def observation_size(self, features: int) -> int:
        """Width of an observation whose bars have so many features."""
        return features + len(ACCOUNT_FEATURES)

    def constants(self, data: MarketData) -> dict[str, float]:
        """The numbers that kernel and twin calculate with, float64, by their names in the record."""
        patient, normal, urgent = (offset * data.bar_range for offset in self.limit_offsets)
        return {
            "size": self.max_position / 3.0,
            "offset_patient": patient,
            "offset_normal": normal,
            "offset_urgent": urgent,
            "ruin": self.ruin,
            "reward_scale": self.reward_scale,
            "per_range": 1.0 / data.bar_range,
            "held_half": self.held_half,
        }


@dataclass(frozen=True, eq=False)
class MarketData:
    """What environments run on: n bars and everything that is known of them.

    Attributes:
        bars: prices and times.
        features: float32 [n, F], finite; row t is known at the close of bar t.
        next_bar: int32 [n]: 1 up, 0 down, -1 masked.
        regime: int32 [n], -1 masked.
        lookahead: bars that a next-bar label looks ahead.
        bar_range: typical range of a bar as a share of the price, the unit of offsets and of the account's features.
            Take it from the training part for every part.

    Raises:
        ValueError: fewer than 2 bars, an array of another shape or dtype, a feature that is not finite.
    """

    bars: Bars
    features: NDArray[np.float32]
    next_bar: NDArray[np.int32]
    regime: NDArray[np.int32]
    lookahead: int
    bar_range: float

    def __post_init__(self) -> None:
        count, source = len(self.bars), self.bars.source
        if count < 2:
            raise ValueError(f"{source}: a market needs at least 2 bars, got {count}")
        features = self.features
        if features.dtype != np.float32 or features.ndim != 2 or len(features) != count or features.shape[1] == 0:
            raise ValueError(
                f"{source}: features must be float32 [{count}, F], a row for each bar, "
                f"got {features.dtype} {features.shape}"
            )
        bad = np.argwhere(~np.isfinite(features))
        if len(bad):
            row, column = map(int, bad[0])
            raise ValueError(
                f"{source}: feature {column} of bar {row} is {features[row, column]} and {len(bad) - 1} more are not "
                "finite; leave the warm-up bars out"
            )
        for name in ("next_bar", "regime"):
            labels = getattr(self, name)
            if labels.dtype != np.int32 or labels.shape != (count,):
                raise ValueError(f"{source}: {name} must be int32 ({count},), got {labels.dtype} {labels.shape}")
        if self.lookahead < 1:
            raise ValueError(f"{source}: lookahead must be at least 1, got {self.lookahead}")
        if not 0.0 < self.bar_range < math.inf:
            raise ValueError(f"{source}: bar_range must be positive and finite, got {self.bar_range}")

    def __len__(self) -> int:
        return len(self.bars)

    @cached_property
    def prices(self) -> NDArray[np.float64]:
        """Open, high, low and close, float64 [n, 4]."""
        return np.stack([getattr(self.bars, name) for name in PRICES], axis=1)


def typical_range(bars: Bars) -> float:
    """Mean of (high - low)/close."""
    return float(np.mean((bars.high - bars.low) / bars.close))


def market_data(dataset: Dataset) -> tuple[MarketData, MarketData]:
    """Training and validation part of a dataset as markets; the typical range is that of the training part.

    Raises:
        ValueError: a part has fewer than 2 bars, or the training bars have no range.
    """
    unit = typical_range(dataset.train.bars)

    def data(part: Part) -> MarketData:
        return MarketData(part.bars, part.states, part.next_bar, part.regime, dataset.lookahead, unit)

    return data(dataset.train), data(dataset.validation)


@dataclass(frozen=True)
class MarketCosts:
    """The signals of the part `market`, rounded to float32 as the device reads them.

    Attributes:
        fee: share of the traded value.
        spread: share of the price between buying and selling.
        urgency_cost: share of the price that completing an urgent order costs on top.
    """

    fee: float = 0.0
    spread: float = 0.0
    urgency_cost: float = 0.0

    def __post_init__(self) -> None:
        for name in ("fee", "spread", "urgency_cost"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be in [0, 1], got {value!r}")
            object.__setattr__(self, name, float(np.float32(value)))


@dataclass(frozen=True, eq=False)
class Transition:
    """What one step of all environments gives.

    Attributes:
        next_state: float32 [E, S], what the action led to.
        reward: float32 [E].
        done: int32 [E], bit 0 terminated, bit 1 truncated.
        nb_label: int32 [E], next-bar label of the bar acted at; masked where it looks past the episode.
        regime_label: int32 [E], regime of the bar acted at.
        observation: float32 [E, S], what to act on next: another episode's first observation where one is done.
    """

    next_state: NDArray[np.float32]
    reward: NDArray[np.float32]
    done: NDArray[np.int32]
    nb_label: NDArray[np.int32]
    regime_label: NDArray[np.int32]
    observation: NDArray[np.float32]


def checked_actions(actions: ArrayLike, environments: int, spec: MarketSpec) -> NDArray[np.int64]:
    """Actions as integers [E, D].

    Raises:
        ValueError: another shape, no integers, or an action outside 0..2.
    """
    array = np.asarray(actions)
    expected = (environments, len(spec.branches))
    if array.shape != expected or array.dtype.kind not in "iu":
        raise ValueError(f"actions must be integers {expected}, got {array.dtype} {array.shape}")
    outside = np.argwhere((array < 0) | (array > 2))
    if len(outside):
        row, branch = map(int, outside[0])
        raise ValueError(f"action {array[row, branch]} of environment {row}, branch {BRANCHES[branch]}, is not in 0..2")
    return array.astype(np.int64)
