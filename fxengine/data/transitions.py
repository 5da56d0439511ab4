"""Transitions (s, a, r, s') of price bars, for the Q networks: what a simple logged policy would have met.

    from fxengine.data import demo_bars, make_dataset
    from fxengine.data.transitions import make_transitions
    transitions = make_transitions(make_dataset(demo_bars()))
    transitions.train.inputs()      # the arrays that the specified step reads, by name

The policy is a demonstration, made to fill a replay without a market: it knows the past alone, it is not meant to earn
money, and a replay of collected experience takes its place in an application. Four branches of three actions each:

| branch | actions | rule |
|---|---|---|
| 0 direction | short, flat, long | sign of the momentum; flat while it is weak |
| 1 magnitude | 0.5, 1, 2 units | large in calm regimes, small in wild ones |
| 2 order type | market, limit, stop | market if the momentum is strong, else stop with the bar, limit against it |
| 3 urgency | patient, normal, urgent | volume of the bar against its day |

and each branch is, with probability `explore`, a uniformly drawn action instead. The momentum is the log return of
6 bars over the volatility that 24 bars would let expect for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.data.bars import COLUMNS, Bars
from fxengine.data.dataset import Dataset, Part
from fxengine.data.errors import DataError
from fxengine.data.features import FeatureSpec, build_features
from fxengine.data.labels import trailing_volatility
from fxengine.data.normalizer import Normalizer
from fxengine.data.rolling import rolling_sum, shift

#: Actions of the four branches: direction, magnitude, order type, urgency.
BRANCHES = (3, 3, 3, 3)
SHORT, FLAT, LONG = 0, 1, 2
MARKET, LIMIT, STOP = 0, 1, 2
#: Units of position per magnitude.
SIZES = (0.5, 1.0, 2.0)
#: Share of the spread that an order type pays, and share of the fee that an urgency pays.
SPREAD_SHARES, FEE_SHARES = (1.0, 0.5, 1.25), (0.5, 1.0, 1.5)
#: The order-flow inputs, in order.
ORDER_FLOW = ("volume_z_24", "volume_ratio_6", "volume_change", "signed_volume", "signed_volume_6", "range")

_MOMENTUM_BARS, _VOLATILITY_BARS, _SIGNED_BARS = 6, 24, 6
_WEAK, _STRONG, _BUSY = 0.25, 1.0, 0.5
#: A long or short unit position held for ever earns returns with this share of the atoms' half width as their
#: standard deviation.
_SPREAD_OF_RETURNS = 0.25
#: First bars of the training part without a transition: what momentum and order flow look back.
WARM_UP = _VOLATILITY_BARS + _SIGNED_BARS


@dataclass(frozen=True)
class TransitionSettings:
    """How transitions are made.

    Attributes:
        steps: bars n from s to s'; 0: the lookahead of the dataset.
        gamma: discount of one bar. The default looks two bars or so ahead: what bars bring later is noise here, and the
            readiness of IQN falls back while targets that are bootstrapped further spread out (docs/step.md §4).
        explore: probability of a uniformly drawn action, for each branch by itself.
        spread: basis points that a market order of one unit pays, in and out.
        fee: basis points that a unit of normal urgency pays, in and out.
        episode: most bars of an episode.
        gap: a wait of more than so many typical waits between bars ends an episode: weekends and holes in the data.
        v_min: lowest atom of the value distribution that the rewards are scaled for.
        v_max: highest atom.
        seed: of the drawn actions.
    """

    steps: int = 0
    gamma: float = 0.5
    explore: float = 0.2
    spread: float = 0.8
    fee: float = 0.2
    episode: int = 120
    gap: float = 3.0
    v_min: float = -10.0
    v_max: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "steps": (self.steps >= 0, "0 or more"),
            "gamma": (0.0 < self.gamma < 1.0, "between 0 and 1, both excluded"),
            "explore": (0.0 <= self.explore <= 1.0, "between 0 and 1"),
            "spread": (0.0 <= self.spread < math.inf, "0 or more"),
            "fee": (0.0 <= self.fee < math.inf, "0 or more"),
            "episode": (self.episode >= 2, "at least 2"),
            "gap": (self.gap > 1.0, "above 1"),
            "v_min": (self.v_min < 0.0, "below 0: rewards have both signs"),
            "v_max": (self.v_max > 0.0, "above 0: rewards have both signs"),
            "seed": (self.seed >= 0, "0 or more"),
        }
        for name, (holds, allowed) in rules.items():
            if not holds:
                raise DataError(f"{name} is {getattr(self, name)}, expected {allowed}")


@dataclass(frozen=True, eq=False)
class Transitions:
    """Transitions of one part, m of them, in the order of their bars.

    Attributes:
        rows: int64 [m], the row of the part that s belongs to.
        state: float32 [m, S], normalised features at the bar of s.
        next_state: float32 [m, S], at the bar of s'.
        reward: float32 [m]: position times the discounted log returns up to s', minus spread and fee, scaled.
        discount: float32 [m]: γⁿ, or 0 where the episode ends on the way to s' or at it.
        weight: float32 [m]: 1, importance weights are the replay's business.
        actions: int32 [m, 4].
        nb_label: int32 [m], the next-bar label of the dataset at s: 1 up, 0 down, -1 masked.
        regime_label: int32 [m], its regime label.
        ofi: float32 [m, 6], normalised order-flow inputs at s (`ORDER_FLOW`).
        next_ofi: float32 [m, 6], at s'.
    """

    rows: NDArray[np.int64]
    state: NDArray[np.float32]
    next_state: NDArray[np.float32]
    reward: NDArray[np.float32]
    discount: NDArray[np.float32]
    weight: NDArray[np.float32]
    actions: NDArray[np.int32]
    nb_label: NDArray[np.int32]
    regime_label: NDArray[np.int32]
    ofi: NDArray[np.float32]
    next_ofi: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.rows)

    def inputs(self, at: NDArray[np.int64] | slice = slice(None)) -> dict[str, NDArray[Any]]:
        """What the specified step reads, by name, for the chosen transitions (all of them by default)."""
        return {name: getattr(self, name)[at] for name in vars(self) if name != "rows"}


@dataclass(frozen=True, eq=False)
class TransitionSet:
    """Transitions of the training part and of the validation part; no training row reads a bar of validation.

    Attributes:
        train: of the training part.
        validation: of the validation part.
        settings: how they were made, `steps` filled in.
        scale: basis points that make a reward of 1, from the training part.
        order_flow: statistics of the training part's order-flow inputs.
    """

    train: Transitions
    validation: Transitions
    settings: TransitionSettings
    scale: float
    order_flow: Normalizer

    def describe(self) -> str:
        """A few lines for people."""
        s = self.settings
        lines = [
            f"transitions of a logged demonstration policy: {s.steps} bars ahead, gamma {s.gamma:g} a bar, "
            f"{100 * s.explore:g} % of actions drawn at random, reward 1 = {self.scale:.3g} basis points"
        ]
        for name, part in (("train", self.train), ("validation", self.validation)):
            taken = np.bincount(part.actions[:, 0], minlength=3)
            lines.append(
                f"{name}: {len(part)} transitions, {np.count_nonzero(part.discount == 0.0)} end an episode; short "
                f"{taken[SHORT]}, flat {taken[FLAT]}, long {taken[LONG]}; reward {part.reward.mean():+.4f} in the "
                f"mean, standard deviation {part.reward.std():.3f}"
            )
        return "\n".join(lines)


def make_transitions(dataset: Dataset, settings: TransitionSettings | None = None) -> TransitionSet:
    """Transitions of a dataset under the demonstration policy.

    An episode ends at a gap, after `episode` bars, and at the end of a part. s' is `steps` bars after s, or the last
    bar of the episode if that comes sooner; the transition that reaches it is terminal (discount 0). The last bar of
    an episode starts no transition, nor do the first `WARM_UP` bars of the training part.

    Reward of a transition with k bars, in basis points, before it is divided by `scale`:
    position·Σ_{i<k} γ^i·return[t+1+i] − |position|·(spread·share of the order type + fee·share of the urgency).
    `scale` puts the returns of one unit held for ever at a standard deviation of a quarter of the smaller of |v_min|
    and v_max, so that the atoms hold nearly all of them; a reward beyond the atoms is clipped to them.

    Raises:
        DataError: too few rows in a part; the training part's prices do not move.
    """
    wanted = settings or TransitionSettings()
    wanted = TransitionSettings(**{**vars(wanted), "steps": wanted.steps or dataset.lookahead})
    bars = _joined(dataset)
    split = len(dataset.train)
    last = _episode_ends(bars, split, wanted)
    position = np.arange(len(bars))
    ahead = np.minimum(position + wanted.steps, last)
    starts = np.flatnonzero((ahead > position) & (position >= WARM_UP))
    train, validation = starts[starts < split], starts[starts >= split]
    if len(train) == 0 or len(validation) == 0:
        raise DataError(
            f"{bars.source}: {len(dataset.train)} training and {len(dataset.validation)} validation rows give "
            f"{len(train)} and {len(validation)} transitions; the training part needs more than {WARM_UP + 1} rows, "
            "and every episode at least 2 bars"
        )
    flow, statistics = _order_flow(bars, split)
    actions = _policy(bars, dataset, wanted)
    returns = _discounted_returns(bars, ahead, wanted)
    scale = _scale(returns[train], wanted)
    reward = np.clip(_profit(returns, actions, wanted) / scale, wanted.v_min, wanted.v_max)
    discount = np.where(ahead == last, 0.0, wanted.gamma**wanted.steps)

    def part(source: Part, rows: NDArray[np.int64], first: int) -> Transitions:
        at, then = rows - first, ahead[rows] - first
        return Transitions(
            rows=at,
            state=source.states[at],
            next_state=source.states[then],
            reward=reward[rows].astype(np.float32),
            discount=discount[rows].astype(np.float32),
            weight=np.ones(len(rows), np.float32),
            actions=actions[rows],
            nb_label=source.next_bar[at],
            regime_label=source.regime[at],
            ofi=flow[rows],
            next_ofi=flow[ahead[rows]],
        )

    return TransitionSet(
        part(dataset.train, train, 0), part(dataset.validation, validation, split), wanted, scale, statistics
    )


def _joined(dataset: Dataset) -> Bars:
    """Both parts as one history: the validation part follows the training part bar by bar."""
    parts = (dataset.train.bars, dataset.validation.bars)
    return Bars(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in COLUMNS}, source=dataset.source)


def _episode_ends(bars: Bars, split: int, settings: TransitionSettings) -> NDArray[np.int64]:
    """Position of the last bar of each bar's episode, int64 [n]."""
    wait = np.diff(bars.time.astype(np.int64)).astype(np.float64)
    begins = np.ones(len(bars), np.bool_)
    begins[1:] = wait > settings.gap * np.median(wait[: max(1, split - 1)])
    begins[split] = True
    since = np.arange(len(bars)) - np.maximum.accumulate(np.where(begins, np.arange(len(bars)), 0))
    first = np.flatnonzero(since % settings.episode == 0)
    final = np.append(first[1:], len(bars)) - 1
    return np.asarray(np.repeat(final, np.diff(np.append(first, len(bars)))), np.int64)


def _order_flow(bars: Bars, split: int) -> tuple[NDArray[np.float32], Normalizer]:
    """Normalised order-flow inputs of every bar from WARM_UP on, float32 [n, 6], 0 before."""
    names = ("volume_z_24", "volume_ratio_6", "volume_change", "range", "close_location", "volume_ratio_24")
    z, ratio, change, spread, location, level = build_features(bars, FeatureSpec(names)).values.T.astype(np.float64)
    signed = location * np.exp(level)  # volume in units of its geometric mean
    values = np.stack([z, ratio, change, signed, rolling_sum(signed, _SIGNED_BARS) / _SIGNED_BARS, spread], axis=1)
    raw = values.astype(np.float32)
    statistics = Normalizer.fit(raw[WARM_UP:split], names=ORDER_FLOW)
    flow = np.zeros_like(raw)
    flow[WARM_UP:] = statistics.apply(raw[WARM_UP:])
    return flow, statistics


def _policy(bars: Bars, dataset: Dataset, settings: TransitionSettings) -> NDArray[np.int32]:
    """Actions of the demonstration policy at every bar, int32 [n, 4]; see the module's table."""
    logs = np.log(bars.close)
    usual = trailing_volatility(bars.close, _VOLATILITY_BARS) * math.sqrt(_MOMENTUM_BARS)
    moved = logs - shift(logs, _MOMENTUM_BARS)
    momentum = np.divide(moved, usual, out=np.zeros_like(moved), where=usual > 0.0)  # the warm-up is NaN: flat
    close, volume = build_features(bars, FeatureSpec(("close_location", "volume_z_24"))).values.T
    regime = np.concatenate([dataset.train.regime, dataset.validation.regime])

    direction = np.where(momentum > _WEAK, LONG, np.where(momentum < -_WEAK, SHORT, FLAT))
    magnitude = 2 - np.clip(3 * regime // dataset.regimes, 0, 2)
    follows = np.sign(close) * (direction - FLAT) > 0
    order = np.where(np.abs(momentum) > _STRONG, MARKET, np.where(follows, STOP, LIMIT))
    urgency = np.where(volume > _BUSY, 2, np.where(volume < -_BUSY, 0, 1))
    rules = np.stack([direction, magnitude, order, urgency], axis=1)

    draws = np.random.default_rng(settings.seed).random((len(bars), 2, len(BRANCHES)))
    drawn = (draws[:, 1] * BRANCHES).astype(np.int32)
    return np.where(draws[:, 0] < settings.explore, drawn, rules).astype(np.int32)


def _discounted_returns(bars: Bars, ahead: NDArray[np.int64], settings: TransitionSettings) -> NDArray[np.float64]:
    """Σ_{i<k} γ^i·return[t+1+i] in basis points, k = ahead[t] − t; what the bars from t to s' did."""
    logs = np.log(bars.close)
    step = np.append(np.diff(logs), 0.0) * 1e4
    total = np.zeros(len(bars))
    position = np.arange(len(bars))
    for i in range(settings.steps):
        reached = position + i < ahead
        total[reached] += settings.gamma**i * step[position[reached] + i]
    return total


def _profit(
    returns: NDArray[np.float64], actions: NDArray[np.int32], settings: TransitionSettings
) -> NDArray[np.float64]:
    """Basis points that each action earns, float64 [n]."""
    held = (actions[:, 0] - FLAT) * np.asarray(SIZES)[actions[:, 1]]
    spread = settings.spread * np.asarray(SPREAD_SHARES)[actions[:, 2]]
    fee = settings.fee * np.asarray(FEE_SHARES)[actions[:, 3]]
    return np.asarray(held * returns - np.abs(held) * (spread + fee))


def _scale(returns: NDArray[np.float64], settings: TransitionSettings) -> float:
    """Basis points of a reward of 1; see `make_transitions`."""
    spread = float(np.std(returns)) / math.sqrt(1.0 - settings.gamma ** (2 * settings.steps))
    if not spread > 0.0:
        raise DataError("the closes of the training part do not move: there is nothing to trade")
    return spread / (_SPREAD_OF_RETURNS * min(-settings.v_min, settings.v_max))
