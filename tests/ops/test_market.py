"""Trading environments on the device against their NumPy twin, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops import market
from fxengine.rl.backtest import performance, walk
from fxengine.rl.market import MarketCosts, MarketData, MarketSpec
from fxengine.rl.twin import Market
from tests.rl.markets import market_of, random_market

STREAM = 11
COSTS = MarketCosts(fee=1e-4, spread=2e-3, urgency_cost=1e-3)
OUTPUTS = ("next_state", "reward", "done", "nb_label", "regime_label", "observation")


class OnDevice:
    """Environments on a device with the interface of the twin: a program for reset, one for a step."""

    def __init__(
        self,
        device: Device,
        data: MarketData,
        spec: MarketSpec,
        environments: int,
        *,
        seed: int = 0,
        costs: MarketCosts | None = None,
        traced: bool = False,
        gap: int = 0,
    ) -> None:
        self._stream = device.stream()
        self._costs = costs or MarketCosts()
        self.replay, self._seed = 0, seed
        self.tensors: dict[str, Tensor] = {}
        self._plan = Plan(
            self._steps(Program(device.target), data, spec, environments, traced, gap), device, guard=True
        )
        self._starts = {
            stagger: Plan(
                self._starting(Program(device.target), data, spec, environments, traced, gap, stagger),
                device,
                base=self._plan,
            )
            for stagger in (False, True)
        }
        self.write_counters()
        if traced:
            self._plan.buffer("trace").write(np.full((len(data), 4, environments), np.nan).view(np.uint8).reshape(-1))

    def _common(self, program: Program, *arguments: Any) -> tuple[market.Environments, dict[str, Any], Tensor | None]:
        data, spec, environments, traced, gap = arguments
        values = dict(zip(market.COSTS, (self._costs.fee, self._costs.spread, self._costs.urgency_cost), strict=True))
        signals = {
            name: program.tensor(name, (1,), arena="signals", data=np.array([value], np.float32))
            for name, value in values.items()
        }
        counters = program.tensor("counters", (4,), np.uint64, arena="state")
        declared = market.declare(program, data, spec, environments)
        width = declared.observation_shape[1]
        whole = program.tensor("observation", (environments, width + gap), arena="environment")
        observation = whole.columns(0, width)
        self.tensors["observation"] = observation
        trace = program.tensor("trace", (len(data), 4, environments), np.float64, arena="state") if traced else None
        common = {"signal": signals.__getitem__, "counters": counters, "observation": observation}
        return declared, common, trace

    def _steps(self, program: Program, *arguments: Any) -> Program:
        declared, common, trace = self._common(program, *arguments)
        gap, count, width = arguments[-1], *declared.observation_shape
        t = self.tensors
        t["actions"] = program.tensor("actions", (count, len(declared.spec.branches)), np.int32, arena="state")
        t["next_state"] = program.tensor("next_state", (count, width + 2 * gap)).columns(0, width)
        t["reward"] = program.tensor("reward", (count,))
        for name in ("done", "nb_label", "regime_label"):
            t[name] = program.tensor(name, (count,), np.int32)
        results = {name: t[name] for name in OUTPUTS[:-1]}
        market.step(program, declared, actions=t["actions"], **results, **common, stream=STREAM, trace=trace)
        return program

    def _starting(self, program: Program, *arguments: Any) -> Program:
        *shared, stagger = arguments
        declared, common, trace = self._common(program, *shared)
        market.reset(program, declared, stream=STREAM, stagger=stagger, trace=trace, **common)
        return program

    def write_counters(self) -> None:
        counters = np.array([self.replay, 0, 0, self._seed], np.uint64)
        self._plan.buffer("counters").write(counters.view(np.uint8))

    def read(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        raw = self._plan.buffer(tensor.name).read().view(tensor.dtype)
        return raw.reshape(tensor.shape[0], tensor.ld)[:, : tensor.shape[1]] if len(tensor.shape) == 2 else raw

    def accounts(self) -> tuple[np.ndarray, np.ndarray]:
        names, kinds = ("market.account", "market.clock"), (np.float64, np.int32)
        account, clock = (self._plan.buffer(n).read().view(k) for n, k in zip(names, kinds, strict=True))
        return account.reshape(len(market.ACCOUNT), -1), clock.reshape(len(market.CLOCK), -1)

    def reset(self, *, stagger: bool = True) -> np.ndarray:
        self._starts[stagger].run(stream=self._stream)
        self._stream.synchronize()
        return self.read("observation")

    def step(self, actions: np.ndarray) -> dict[str, np.ndarray]:
        self.write_counters()
        self._plan.buffer("actions").write(np.ascontiguousarray(actions, np.int32).view(np.uint8).reshape(-1))
        self._plan.run(stream=self._stream)
        self._stream.synchronize()
        self.replay += 1
        return {name: self.read(name) for name in OUTPUTS}

    def trace(self) -> np.ndarray:
        return self._plan.buffer("trace").read().view(np.float64)

    def close(self) -> None:
        self._plan.check_guards()
        for plan in (*self._starts.values(), self._plan):
            plan.close()
        self._stream.close()


@contextmanager
def on_device(*arguments: Any, **options: Any) -> Iterator[OnDevice]:
    opened = OnDevice(*arguments, **options)
    try:
        yield opened
    finally:
        opened.close()


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _compare(
    device: Device, data: MarketData, spec: MarketSpec, count: int, steps: int, seed: int, **options: Any
) -> Market:
    """Random actions in both; every output and account after every step has the same bits."""
    costs = options.get("costs")
    twin = Market(data, spec, count, seed=seed, stream=STREAM, costs=costs)
    rng = np.random.default_rng(seed % 2**32)
    with on_device(device, data, spec, count, seed=seed, **options) as real:
        np.testing.assert_array_equal(_bits(real.reset()), _bits(twin.reset()))
        for _ in range(steps):
            actions = rng.integers(0, 3, (count, len(spec.branches)))
            found, expected = real.step(actions), twin.step(actions)
            for name in OUTPUTS:
                np.testing.assert_array_equal(_bits(found[name]), _bits(getattr(expected, name)), err_msg=name)
            for a, b in zip(real.accounts(), (twin.account, twin.clock), strict=True):
                np.testing.assert_array_equal(_bits(a), _bits(b))
    return twin


def test_thousands_of_steps_with_ruin_and_costs(device: Device) -> None:
    """Volatile bars and a position of nine times the equity: all three ends of an episode and every order occur."""
    data = random_market(300, 1, volatility=0.02)
    spec = MarketSpec(episode_bars=40, max_position=9.0)
    twin = _compare(device, data, spec, 70, 120, 2**63 + 9, costs=COSTS)
    row = dict(zip((*market.ACCOUNT, *market.CLOCK), (*twin.account, *twin.clock), strict=True))
    assert (row["episodes"] >= 3).all()
    assert (row["final_equity"] <= 0.5).any() and (row["final_equity"] > 0.5).any()
    assert (row["final_bars"] < 40).any() and (row["final_bars"] == 40).any()


@settings(max_examples=12)
@given(
    count=st.sampled_from([1, 31, 64, 65, 130]),
    width=st.sampled_from([1, 4, 7, 48]),
    gap=st.sampled_from([0, 1, 4]),
    branches=st.integers(1, 4),
    bars=st.sampled_from([2, 3, 60]),
    seed=st.integers(0, 2**64 - 1),
)
def test_shapes(device: Device, count: int, width: int, gap: int, branches: int, bars: int, seed: int) -> None:
    """Every alignment of rows, every number of branches, tiles that are not full, episodes as long as the data."""
    data = random_market(bars, 3, width=width)
    spec = MarketSpec(branches=(3,) * branches, episode_bars=min(bars - 1, 9))
    _compare(device, data, spec, count, 6, seed, gap=gap, costs=MarketCosts(spread=1e-4))


def test_many_environments_have_larger_tiles(device: Device) -> None:
    _compare(device, random_market(60, 3, width=4), MarketSpec(episode_bars=2), 8193 + 40, 4, 3, costs=COSTS)


def test_observe_gives_what_a_step_left(device: Device) -> None:
    data, spec, count = random_market(80, 5), MarketSpec(episode_bars=5), 33
    with on_device(device, data, spec, count) as real:
        real.reset()
        for _ in range(8):
            expected = real.step(np.random.default_rng(1).integers(0, 3, (count, 4)))["observation"]
        program = Program(device.target)
        declared, common, _ = real._common(program, data, spec, count, False, 0)
        again = program.tensor("again", declared.observation_shape)
        market.observe(program, declared, again, signal=common["signal"], counters=common["counters"])
        with Plan(program, device, base=real._plan) as plan:
            plan.run(stream=real._stream)
            real._stream.synchronize()
            np.testing.assert_array_equal(plan.buffer(again).read(), expected)


def test_a_walk_has_the_trace_of_the_twin(device: Device) -> None:
    """Three accounts side by side through all bars, one of them ruined on the way; what comes after changes nothing."""
    data = random_market(150, 7, volatility=0.03)
    spec = MarketSpec(max_position=12.0)
    costs = MarketCosts(fee=1e-3, spread=1e-3)
    rng = np.random.default_rng(2)
    actions = rng.integers(0, 3, (len(data) + 20, 3, 4))
    actions[:, 1, 0] = 1
    given = iter(actions)
    expected = walk(data, spec, lambda _: next(given), 3, costs=costs)
    with on_device(device, data, spec.through(data), 3, costs=costs, traced=True) as real:
        real.reset(stagger=False)
        for chosen in actions:
            real.step(chosen)
        trace = real.trace().reshape(expected.shape)
    np.testing.assert_array_equal(_bits(trace), _bits(expected))
    assert np.isnan(trace[-1, 0, 0]) and trace[-1, 0, 1] == 1.0
    ruined, flat, _ = performance(trace, data.bars.time)
    assert ruined.total_return <= -0.5 and flat.total_return == 0.0


def test_same_seed_same_bits_other_seed_other_bars(device: Device) -> None:
    data, spec = random_market(500, 3), MarketSpec(episode_bars=50)
    first = []
    for seed in (1, 1, 2):
        with on_device(device, data, spec, 64, seed=seed) as real:
            first.append(real.reset())
    np.testing.assert_array_equal(first[0], first[1])
    assert (first[0][:, :5] != first[2][:, :5]).any(axis=1).mean() > 0.9


def test_an_action_outside_its_branch_gives_nan(device: Device) -> None:
    data, spec = random_market(50, 3), MarketSpec(episode_bars=10)
    with on_device(device, data, spec, 6) as real:
        real.reset()
        actions = np.ones((6, 4), np.int32)
        actions[1, 0], actions[2, 1], actions[4, 3] = 3, -1, 2**30
        reward = real.step(actions)["reward"]
    np.testing.assert_array_equal(np.isnan(reward), [False, True, True, False, True, False])


def test_operands_are_checked(device: Device) -> None:
    program = Program(device.target)
    data, spec = random_market(50, 3), MarketSpec(episode_bars=10)
    one = program.tensor("one", (1,))
    counters = program.tensor("counters", (4,), np.uint64)
    with pytest.raises(ValueError, match="environments must be in 1"):
        market.declare(program, data, spec, 0)
    with pytest.raises(ValueError, match="51 bars, got 50"):
        market.declare(program, data, replace(spec, episode_bars=50), 2, name="long")
    declared = market.declare(program, data, spec, 6)
    assert declared.observation_shape == (6, 13)
    good: dict[str, Any] = {
        "actions": program.tensor("actions", (6, 4), np.int32),
        "next_state": program.tensor("next_state", (6, 13)),
        "reward": program.tensor("reward", (6,)),
        "done": program.tensor("done", (6,), np.int32),
        "signal": lambda _: one,
        "counters": counters,
        "stream": 3,
    }
    wrong: dict[str, tuple[Any, str]] = {
        "actions": (program.tensor("a", (6, 3), np.int32), r"actions must be int32 \(6, 4\), got int32 \(6, 3\)"),
        "next_state": (program.tensor("b", (6, 12)), r"next_state must be float32 \(6, 13\)"),
        "reward": (program.tensor("c", (5,)), "reward must be"),
        "done": (program.tensor("d", (6,)), "done must be int32"),
        "signal": (lambda _: counters, "market_fee must be float32"),
        "counters": (one, "counters must be uint64"),
        "stream": (2**32, "stream 4294967296"),
        "observation": (good["next_state"], "next_state .* overlaps observation"),
        "nb_label": (one, "nb_label must be int32"),
        "regime_label": (one, "regime_label must be int32"),
        "trace": (program.tensor("e", (49, 4, 6), np.float64), r"trace must be float64 \(50, 4, 6\)"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            market.step(program, declared, **(good | {name: value}))
    assert not program.launches
    market.step(program, declared, **good)
    with pytest.raises(ValueError, match="observation must be float32"):
        market.observe(program, declared, good["reward"], signal=good["signal"], counters=counters)


def test_two_bars_are_enough(device: Device) -> None:
    """The smallest market: one step, long at full size, 101/100 - 1 less half a spread of 0.2 and a fee of 0.1 %."""
    data = market_of((100.0, 100.0, 100.0, 100.0), (100.0, 101.0, 100.0, 101.0))
    costs = MarketCosts(spread=0.002, fee=0.001)
    with on_device(device, data, MarketSpec(branches=(3,), episode_bars=1), 1, costs=costs) as real:
        real.reset()
        found = real.step(np.array([[2]]))
    assert found["done"].tolist() == [2]
    assert found["reward"][0] == pytest.approx(100.0 * (1.0 - 0.1 - 0.1001) / 100.0, rel=1e-6)
    assert found["nb_label"].tolist() == [1]


def test_as_declared_all_stand_at_the_first_bar(device: Device) -> None:
    data, spec = random_market(50, 3), MarketSpec(episode_bars=10)
    twin = Market(data, spec.through(data), 3, costs=COSTS)
    twin.reset(stagger=False)
    actions = np.random.default_rng(1).integers(0, 3, (3, 4))
    expected = twin.step(actions)
    with on_device(device, data, spec, 3, costs=COSTS) as real:
        found = real.step(actions)
        assert real.accounts()[1][market.CLOCK.index("end")].tolist() == [10, 10, 10]
    np.testing.assert_array_equal(found["next_state"], expected.next_state)
    np.testing.assert_array_equal(found["reward"], expected.reward)
