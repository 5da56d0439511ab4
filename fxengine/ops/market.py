"""Trading environments on the device (`market.cu`): bars in, actions in, transitions out, one record for all of them.

The rules (what an action means, when an order fills, how accounts are kept) are those of `fxengine/rl/market.py`, whose
`Market` is the NumPy twin of these records, bit for bit. A program declares the environments once and appends records:

    environments = market.declare(program, data, spec, 65536)
    observation = program.tensor("observation", environments.observation_shape)
    market.reset(program, environments, observation, signal=signal, counters=counters, stream=8)

Nothing of a record changes between replays: costs are signals of the part `market`, read through pointers, and random
numbers depend on the counters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import require, separate

if TYPE_CHECKING:
    from fxengine.rl.market import MarketData, MarketSpec

#: Rows of the float64 accounts. Equity begins with 1; cash and the value of `units` are its parts; `entry` is the mean
#: price of the open position; the order rows hold what rests; `peak`, `drawdown` and `turnover` are of the present
#: episode, the final rows of the last finished one.
ACCOUNT = (
    "equity", "cash", "units", "entry", "order_price", "order_units", "peak", "drawdown", "turnover",
    "final_equity", "final_drawdown", "final_turnover",
)  # fmt: skip
#: Rows of the int32 accounts: present bar, first and last bar of the episode, level of the position (-3..3), bars that
#: its side is held, type (0 none) and target level of the resting order, trades; then how many episodes have ended, and
#: bars and trades of the last one.
CLOCK = (
    "bar", "start", "end", "level", "held", "order_type", "order_level", "trades",
    "episodes", "final_bars", "final_trades",
)  # fmt: skip
#: Rows of a trace: equity, position (the share of the equity that it was opened with, signed), turnover, trades.
TRACE = ("equity", "position", "turnover", "trades")
#: Features of the account that follow those of the bar in an observation.
ACCOUNT_FEATURES = ("side", "size", "profit", "held", "order_side", "order_target", "order_distance", "cost")
#: Arena of the accounts: programs that share it work on the same environments.
ARENA = "environment"
#: Arena of bars, features and labels.
DATA_ARENA = "data"
#: The signals that a record reads.
COSTS = ("market_fee", "market_spread", "market_urgency_cost")

_STEP, _RESET, _OBSERVE = range(3)
# Environments of a tile: many, so that more than a warp of a block does accounts; but few of them where there are few,
# so that the tiles spread over the device.
_TILE_ROWS, _SPREAD_ROWS, _SPREAD_BELOW = 64, 16, 8192
_RESET_BIT = 2**31


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["environments"]) // int(fields["tile_rows"]))


MARKET = Family("market", "market.cu", "fx_market", "Market", tiles=_tiles)


@dataclass(frozen=True, eq=False)
class Environments:
    """What a program knows of its environments.

    Attributes:
        data: the bars, on the host.
        spec: the rules.
        prices: float64 [n, 4].
        features: float32 [n, F].
        next_bar: int32 [n].
        regime: int32 [n].
        account: float64 [len(ACCOUNT), E].
        clock: int32 [len(CLOCK), E].
    """

    data: MarketData
    spec: MarketSpec
    prices: Tensor
    features: Tensor
    next_bar: Tensor
    regime: Tensor
    account: Tensor
    clock: Tensor

    @property
    def count(self) -> int:
        """Number of environments E."""
        return self.clock.shape[1]

    @property
    def observation_shape(self) -> tuple[int, int]:
        """Shape of the observations of all environments, [E, S]."""
        return self.count, self.features.shape[1] + len(ACCOUNT_FEATURES)


def declare(
    program: Program, data: MarketData, spec: MarketSpec, environments: int, *, name: str = "market"
) -> Environments:
    """Declare bars, features, labels (arena `data`) and the accounts of the environments (arena `environment`).

    Until a `reset` every environment stands at the first bar, at the beginning of a whole episode.

    Args:
        program: program to declare in; another program that declares the same shares the memory by name and arena.
        data: what is traded.
        spec: the rules.
        environments: how many run side by side, 1 to 2**31 - 1.
        name: begins the names of the tensors.

    Raises:
        ValueError: no environment or too many, or an episode longer than the data.
    """
    if not 1 <= environments < _RESET_BIT:
        raise ValueError(f"'{name}': environments must be in 1..2**31 - 1, got {environments}")
    spec.check(data)

    account = np.zeros((len(ACCOUNT), environments))
    account[[ACCOUNT.index(row) for row in ("equity", "cash", "peak")]] = 1.0
    clock = np.zeros((len(CLOCK), environments), np.int32)
    clock[CLOCK.index("end")] = spec.episode_bars

    def resident(part: str, array: np.ndarray[Any, Any]) -> Tensor:
        return program.tensor(f"{name}.{part}", array.shape, array.dtype, arena=DATA_ARENA, data=array)

    return Environments(
        data,
        spec,
        resident("prices", data.prices),
        resident("features", data.features),
        resident("next_bar", data.next_bar),
        resident("regime", data.regime),
        program.tensor(f"{name}.account", account.shape, account.dtype, arena=ARENA, data=account),
        program.tensor(f"{name}.clock", clock.shape, clock.dtype, arena=ARENA, data=clock),
    )


def reset(
    program: Program,
    environments: Environments,
    observation: Tensor,
    *,
    signal: Callable[[str], Tensor],
    counters: Tensor,
    stream: int,
    stagger: bool = True,
    trace: Tensor | None = None,
    label: str = "market.reset",
) -> None:
    """Append: begin an episode in every environment.

    Args:
        program: program to append to.
        environments: what `declare` gave.
        observation: float32 [E, S], receives the first observations.
        signal: gives a signal of the part `market` as float32 [1].
        counters: uint64 [4].
        stream: number of the random stream, the one of the steps.
        stagger: give the first episodes random lengths in 1..episode_bars. Otherwise all environments end their
            episodes together, again and again.
        trace: float64 [n, 4, E], receives the row of the first bar, or None.
        label: shown in tables.

    Raises:
        ValueError: a shape or dtype is wrong; the message shows what was given.
    """
    _record(
        program,
        environments,
        _RESET,
        signal=signal,
        counters=counters,
        stream=stream,
        observation=observation,
        trace=trace,
        stagger=stagger,
        label=label,
    )


def observe(
    program: Program,
    environments: Environments,
    observation: Tensor,
    *,
    signal: Callable[[str], Tensor],
    counters: Tensor,
    label: str = "market.observe",
) -> None:
    """Append: the observations that the next actions are to be chosen by, float32 [E, S].

    A graph that begins with this record keeps the observation acted on until the transition is stored; one that takes
    `observation` of `step` saves the record, but must store the old one before the step overwrites it.
    """
    _record(program, environments, _OBSERVE, signal=signal, counters=counters, observation=observation, label=label)


def step(
    program: Program,
    environments: Environments,
    *,
    actions: Tensor,
    next_state: Tensor,
    reward: Tensor,
    done: Tensor,
    signal: Callable[[str], Tensor],
    counters: Tensor,
    stream: int,
    observation: Tensor | None = None,
    nb_label: Tensor | None = None,
    regime_label: Tensor | None = None,
    trace: Tensor | None = None,
    label: str = "market.step",
) -> None:
    """Append: one bar in every environment; what ends begins anew.

    Args:
        program: program to append to.
        environments: what `declare` gave.
        actions: int32 [E, D], D branches of the spec, each in 0..2; an action outside gives the reward NaN.
        next_state: float32 [E, S], the observation that the transition leads to, also at the end of an episode.
        reward: float32 [E].
        done: int32 [E], bit 0 terminated, bit 1 truncated.
        signal: gives a signal of the part `market` as float32 [1].
        counters: uint64 [4].
        stream: number of the random stream of the first bars, 32 bits.
        observation: float32 [E, S], the observation to act on next: `next_state`, or the first one of the episode that
            begins. None: `observe` gives it when it is wanted.
        nb_label: int32 [E], next-bar label of the bar that the action was taken at, or None.
        regime_label: int32 [E], its regime, or None.
        trace: float64 [n, 4, E], receives the row of the bar reached (TRACE), or None. Episodes that overlap write over
            each other: it is meant for a walk through all bars.
        label: shown in tables.

    Raises:
        ValueError: a shape or dtype is wrong, or results overlap; the message shows what was given.
    """
    count, spec = environments.count, environments.spec
    require(actions, np.int32, (count, len(spec.branches)), "actions", label)
    require(next_state, np.float32, environments.observation_shape, "next_state", label)
    require(reward, np.float32, (count,), "reward", label)
    require(done, np.int32, (count,), "done", label)
    require(nb_label, np.int32, (count,), "nb_label", label)
    require(regime_label, np.int32, (count,), "regime_label", label)
    separate(f"'{label}'", "next_state", next_state, actions=actions, observation=observation)
    _record(
        program,
        environments,
        _STEP,
        signal=signal,
        counters=counters,
        stream=stream,
        actions=actions,
        next_state=next_state,
        reward=reward,
        done=done,
        next_bar_label=nb_label,
        regime_label=regime_label,
        observation=observation,
        trace=trace,
        label=label,
    )


def _record(
    program: Program,
    environments: Environments,
    mode: int,
    *,
    signal: Callable[[str], Tensor],
    counters: Tensor,
    observation: Tensor | None,
    label: str,
    stream: int = 0,
    actions: Tensor | None = None,
    next_state: Tensor | None = None,
    trace: Tensor | None = None,
    stagger: bool = False,
    **outputs: Tensor | None,
) -> None:
    data, spec, count = environments.data, environments.spec, environments.count
    require(counters, np.uint64, (4,), "counters", label)
    require(observation, np.float32, environments.observation_shape, "observation", label)
    require(trace, np.float64, (len(data), len(TRACE), count), "trace", label)
    if not 0 <= stream < 2**32:
        raise ProgramError(f"'{label}': stream {stream} does not fit 32 bits without sign")
    fee, spread, urgency_cost = map(signal, COSTS)
    for name, tensor in zip(COSTS, (fee, spread, urgency_cost), strict=True):
        require(tensor, np.float32, (1,), name, label)
    results = dict.fromkeys(("reward", "done", "next_bar_label", "regime_label")) | outputs
    program.launch(
        MARKET,
        {
            "prices": environments.prices,
            "features": environments.features,
            "next_bar": environments.next_bar,
            "regime": environments.regime,
            "fee": fee,
            "spread": spread,
            "urgency_cost": urgency_cost,
            "counters": counters,
            "actions": actions or 0,
            "account": environments.account,
            "clock": environments.clock,
            "next_state": next_state or 0,
            "observation": observation or 0,
            **{name: tensor or 0 for name, tensor in results.items()},
            "trace": trace or 0,
            "actions_stride": actions.ld if actions else 0,
            "next_stride": next_state.ld if next_state else 0,
            "observation_stride": observation.ld if observation else 0,
            **spec.constants(data),
            "bars": len(data),
            "width": environments.features.shape[1],
            "environments": count,
            "branches": len(spec.branches),
            "episode_bars": spec.episode_bars,
            "lookahead": data.lookahead,
            "tile_rows": _SPREAD_ROWS if count <= _SPREAD_BELOW else _TILE_ROWS,
            "mode": mode,
            "stagger": int(stagger),
            "stream": stream,
        },
        reads=[
            *(environments.prices, environments.features, environments.next_bar, environments.regime),
            *(fee, spread, urgency_cost, counters, actions, environments.account, environments.clock),
        ],
        writes=[
            *((environments.account, environments.clock) if mode != _OBSERVE else ()),
            *(next_state, observation, trace, *results.values()),
        ],
        label=label,
    )
