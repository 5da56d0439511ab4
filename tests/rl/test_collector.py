"""The loop on the device: what it stores, the same bits by every way of launching it, what it refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.driver.api import Driver
from fxengine.driver.errors import ClosedError
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.ops import market, policy
from fxengine.ops.market import ACCOUNT, CLOCK
from fxengine.rl.agents import Agent, FullAgent
from fxengine.rl.collector import Collector, market_replay, training_step
from fxengine.rl.market import MarketCosts
from fxengine.rl.replay import Replay, insert
from fxengine.rl.transition import MARKET_STREAM, POLICY_STREAM
from fxengine.rl.twin import Market
from fxengine.signals import RING_ROWS, SLOTS
from tests.rl.loops import AGENTS, COSTS, DATA, DQN, FULL, SIGNALS, SPEC, loop, state_of

ENVS = 5


def test_the_replay_holds_the_twins_transitions(device: Device) -> None:
    """The actions that the device took, put to the NumPy twin, give every field bit for bit."""
    steps = 14
    with loop(device, environments=ENVS, slots=steps, train_every=0, guard=True) as (engine, collector):
        collector.run(steps)
        held = engine.state()
        accounts = collector.accounts()
        collector.check_guards()
        assert (collector.steps, engine.inserted) == (steps, steps)
    costs = MarketCosts(*COSTS.values())
    twin = Market(DATA, SPEC, ENVS, seed=3, stream=MARKET_STREAM, costs=costs)
    observation = twin.reset()
    actions = held["replay.field.actions"][..., :2]
    assert all(len(np.unique(actions[..., d])) == 3 for d in range(2))
    for t in range(steps):
        transition = twin.step(actions[t])
        np.testing.assert_array_equal(held["replay.field.state"][t, :, : DQN.state], observation)
        np.testing.assert_array_equal(held["replay.field.next_state"][t, :, : DQN.state], transition.next_state)
        for name in ("reward", "done", "nb_label", "regime_label"):
            np.testing.assert_array_equal(held[f"replay.field.{name}"][t], getattr(transition, name), err_msg=name)
        observation = transition.observation
    for names, rows in ((ACCOUNT, twin.account), (CLOCK, twin.clock)):
        for name, row in zip(names, rows, strict=True):
            np.testing.assert_array_equal(accounts[name], row, err_msg=name)
    assert accounts["episodes"].sum() > ENVS


# -- the same bits -----------------------------------------------------------------------------------------------------


class Pieces:
    """The loop as separate programs that the host launches and waits for: act, step, insert, train."""

    def __init__(self, engine: Engine, agent: Agent, replay: Replay) -> None:
        self.engine, self.replay, self.steps = engine, replay, 0
        self.builder = StepBuilder(engine.device.target, groups=engine.builder.signals.groups, evaluation=True)
        for part in ("policy", "market"):
            self.builder.signals.include(part)
        self.plans = {
            "act": self._plan(
                self._act(agent), ("params", "grads", "adam_m", "adam_v", "fixed", "targets", "spectral")
            ),
            "reset": self._plan(self._market(agent, first=True)),
            "step": self._plan(self._market(agent, first=False)),
            "insert": self._plan(self._insertion(), ("replay",)),
        }
        host = engine.signals.current()
        for name in ("act", "reset", "step"):
            self.plans[name].buffer("signals").view(0, host.shape, host.dtype).write(host)
        self.run("reset")
        self.move("reset", "step", {name: name for name in ("market.account", "market.clock", "observation")})

    def _plan(self, program: Program, share: tuple[str, ...] = ()) -> Plan:
        return Plan(program, self.engine.device, base=self.engine.plan, share=share)

    def _act(self, agent: Agent) -> Program:
        builder, program = self.builder, self.builder.program
        builder.counters = program.tensor("mine.counters", (4,), np.uint64, arena="mine")
        observation = builder.input("observation", (self.replay.envs, agent.state))
        policy.policy(
            program,
            agent.values(builder, observation, {}),
            program.tensor("actions", (self.replay.envs, 2), np.int32),
            branches=agent.branches,
            kind="epsilon_greedy",
            scalar=builder.signal("epsilon"),
            counters=builder.counters,
            stream=POLICY_STREAM,
        )
        return program

    def _market(self, agent: Agent, *, first: bool) -> Program:
        program, count = Program(self.engine.device.target), self.replay.envs
        snapshot = program.tensor("signals", (SLOTS,), arena="signals")

        def signal(name: str) -> Tensor:
            index = self.builder.signals.slot(name).index
            return snapshot.rows(index, index + 1)

        common: dict[str, Any] = {
            "signal": signal,
            "counters": program.tensor("mine.counters", (4,), np.uint64, arena="mine"),
            "observation": program.tensor("observation", (count, agent.state)),
            "stream": MARKET_STREAM,
        }
        environments = market.declare(program, DATA, SPEC, count)
        if first:
            market.reset(program, environments, **common)
            return program
        shapes = {"next_state": (count, agent.state), "reward": (count,)}
        fields = {name: program.tensor(name, shape) for name, shape in shapes.items()}
        labels = ("done", "nb_label", "regime_label")
        fields |= {name: program.tensor(name, (count,), np.int32) for name in labels}
        fields["actions"] = program.tensor("actions", (count, 2), np.int32)
        market.step(program, environments, **fields, **common)
        return program

    def _insertion(self) -> Program:
        program = Program(self.engine.device.target)
        sources = {
            name: program.tensor(f"mine.{name}", (self.replay.envs, *field.dims), field.format.given)
            for name, field in self.replay.stored.items()
        }
        insert(program, self.replay.declare(program), sources)
        return program

    def run(self, name: str) -> None:
        if name != "insert":
            counters = np.array([self.steps, 0, 0, self.engine.seed], np.uint64)
            self.plans[name].buffer("mine.counters").write(counters.view(np.uint8))
        self.plans[name].run(stream=self.engine.stream)
        self.engine.synchronize()

    def move(self, source: str, target: str, names: dict[str, str]) -> None:
        """Tensors of one program to those of another, through the host's memory."""
        for name, there in names.items():
            self.plans[target].buffer(there).write(self.plans[source].buffer(name).read())

    def step(self) -> None:
        """One step of the environments."""
        results = {name: f"mine.{name}" for name in self.replay.stored if name != "state"}
        self.move("step", "act", {"observation": "observation"})
        self.move("step", "insert", {"observation": "mine.state"})
        self.run("act")
        self.move("act", "step", {"actions": "actions"})
        self.run("step")
        self.move("step", "insert", results)
        self.run("insert")
        self.engine.inserted += 1
        self.steps += 1

    def close(self) -> None:
        for plan in self.plans.values():
            plan.close()


@pytest.mark.parametrize("name", ["dqn", "iqn", "full"])
def test_the_loop_equals_separate_launches(device: Device, name: str) -> None:
    """With everything that the device does between host and host, and training after every second step from the 4th."""
    agent, steps = AGENTS[name], 11
    with loop(device, agent, train_every=2, warmup=3, n_step=2, prioritized=True) as (engine, collector):
        collector.run(steps)
        looped = engine.state_hash()
        accounts = [collector.state()[f"collector.{part}"].tobytes() for part in ("account", "clock")]
    replay = market_replay(agent, environments=ENVS, slots=16, n_step=2, prioritized=True)
    with Engine(
        training_step(agent), device=device, groups=agent.groups, replay=replay, seed=3, signals=SIGNALS
    ) as engine:
        pieces = Pieces(engine, agent, replay)
        for step in range(1, steps + 1):
            pieces.step()
            if step >= 3 and step % 2 == 0:
                engine.step()
                engine.synchronize()
        assert engine.state_hash() == looped
        held = [pieces.plans["step"].buffer(f"market.{part}").read().tobytes() for part in ("account", "clock")]
        assert held == accounts
        pieces.close()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("name", AGENTS)
def test_chains_and_other_runs_have_the_same_bits(device: Device, name: str, precision: str) -> None:
    """Chains that begin at different phases of the training and of the oracles, with a remainder."""
    found = []
    for chain in (1, 1, 3, 5):
        options: dict[str, Any] = {"train_every": 2, "warmup": 4, "prioritized": True, "precision": precision}
        with loop(device, AGENTS[name], **options) as (engine, collector):
            collector.run(13, chain=chain)
            collector.run(1)
            found.append(state_of(engine, collector))
            assert engine.state()["counters"][0] == 6
    assert all(state == found[0] for state in found[1:])


def test_a_resumed_run_has_the_same_bits(device: Device) -> None:
    with loop(device, FULL, train_every=2) as (engine, collector):
        collector.run(7)
        saved = engine.state(), collector.state()
        collector.run(9, chain=3)
        straight = state_of(engine, collector)
    with loop(device, FULL, train_every=2, seed=8) as (engine, collector):
        collector.run(2)
        engine.load_state(saved[0])
        collector.load_state(saved[1])
        assert (collector.steps, collector.seed) == (7, 3)
        collector.run(9, chain=2)
        assert state_of(engine, collector) == straight


def test_every_step_sees_the_signals_of_its_launch(device: Device) -> None:
    """More steps than the ring has rows, each with another epsilon and other costs: queued or waited for."""
    found = []
    for waits in (False, True):
        with loop(device, slots=128) as (engine, collector):
            for t in range(RING_ROWS + 20):
                engine.signals.update({"epsilon": t % 5 / 4, "market_fee": t % 3 * 1e-3})
                collector.run(1)
                if waits:
                    engine.synchronize()
            found.append(state_of(engine, collector))
    assert found[0] == found[1]


def test_epsilon_is_followed_without_recapture(device: Device) -> None:
    """Greedy at 0; at 1 every action is drawn."""
    with loop(device, train_every=0, slots=64, environments=32) as (engine, collector):
        engine.signals["epsilon"] = 0.0
        engine.params["b_out"] = np.array([0, 9, 0, 0, 0, 9], np.float32)
        collector.run(8)
        engine.signals["epsilon"] = 1.0
        collector.run(32, chain=32)
        actions = engine.state()["replay.field.actions"][..., :2]
    assert (actions[:8] == [1, 2]).all()
    counts = [Counter(actions[8:40, :, d].ravel().tolist()) for d in range(2)]
    assert all(280 < count[a] < 400 for count in counts for a in range(3))


class Recorder:
    """A driver that keeps the names of its calls."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.calls = raw, []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.raw, name)
        if not name.startswith("cu") or not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return found(*arguments)

        return call


def test_a_run_is_launches_and_nothing_else(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(device.driver.raw)
    with monkeypatch.context() as patch:
        patch.setattr(device, "driver", Driver(recorder))
        with loop(device, FULL, train_every=2) as (_, collector):
            collector.run(24, chain=12)  # captures the chain
            collector.run(12)
            recorder.calls.clear()
            collector.run(12)
            assert Counter(recorder.calls) == {"cuGraphLaunch": 12 + 6}
            recorder.calls.clear()
            collector.run(12, chain=12)
            assert Counter(recorder.calls) == {"cuGraphLaunch": 1}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused(device: Device) -> None:
    def refused(error: type[Exception], message: str, agent: Agent = DQN, **options: Any) -> None:
        with pytest.raises(error, match=message), loop(device, agent, **options):
            pass

    message = r"states of 13 features, branches \(3, 3\) and no further inputs; the agent is for "
    refused(ValueError, message + r"13, \(3, 3, 3\) and \[\]", replace(DQN, branches=(3, 3, 3)))
    refused(ValueError, message + r"12, \(3, 3\) and \[\]", replace(DQN, state=12))
    refused(ValueError, "train_every and warmup are numbers of steps", warmup=-1)
    refused(ProgramError, "'ofi' is none of the replay's", FullAgent(replace(FULL.config, ofi=2, branches=(3, 3, 3))))
    refused(ValueError, "the policy must be one of", policy="best")

    def refused_over(error: type[Exception], message: str, definition: Any, replay: Replay | None) -> None:
        with (
            Engine(definition, device=device, groups=DQN.groups, replay=replay) as engine,
            pytest.raises(error, match=message),
        ):
            Collector(engine, DQN, DATA, SPEC)

    replay = market_replay(DQN, environments=2, slots=4)
    more = Replay(4, 2, {**replay.fields, "ofi": replay.fields["state"]})
    refused_over(ValueError, "the engine has no replay", training_step(DQN), None)
    refused_over(ProgramError, r"does not own the signals \['market_fee', .*training_step\(agent\)", DQN.train, replay)
    refused_over(ProgramError, r"a step has the fields .*'ofi'", training_step(DQN), more)


def test_states_of_others_and_bad_calls_are_refused(device: Device) -> None:
    with loop(device) as (engine, collector):
        before = collector.state()
        with pytest.raises(
            ValueError, match=r"account is float64 \(12, 2\), expected float64 \(12, 5\); .*counters is"
        ):
            collector.load_state({**before, "collector.account": np.zeros((12, 2)), "collector.counters": np.zeros(4)})
        with pytest.raises(ValueError, match=r"collector\.clock is missing"):
            collector.load_state({name: array for name, array in before.items() if name != "collector.clock"})
        assert all(np.array_equal(array, before[name]) for name, array in collector.state().items())
        for steps, chain in ((-1, 1), (1, 0), (1, RING_ROWS + 1)):
            with pytest.raises(ValueError, match=r"steps must be 0 or more and chain in 1\.\.64"):
                collector.run(steps, chain=chain)
        collector.close()
        collector.close()
        with pytest.raises(ClosedError, match="the collector is closed"):
            collector.run(1)
        assert engine.inserted == 0


@pytest.mark.parametrize("chain", [1, 4])
def test_an_interrupt_around_a_launch_loses_no_count(
    device: Device, monkeypatch: pytest.MonkeyPatch, chain: int
) -> None:
    """Ctrl-C may come when the launch is made and not counted yet."""
    with (
        loop(device, environments=ENVS, slots=40, train_every=2) as (engine, collector),
        loop(device, environments=ENVS, slots=40, train_every=2) as (other_engine, other),
    ):
        collector.run(8, chain=chain)
        count = collector._launched

        def interrupted(steps: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(collector, "_launched", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collector.run(chain, chain=chain)
        monkeypatch.setattr(collector, "_launched", count)
        collector.run(12 - collector.steps, chain=1)
        other.run(12)
        assert collector.steps == other.steps == engine.inserted == other_engine.inserted == 12
        assert state_of(engine, collector) == state_of(other_engine, other)


def test_a_chain_does_not_train_from_an_empty_replay(device: Device) -> None:
    with (
        loop(device, environments=ENVS, slots=40, train_every=1) as (_, done),
        loop(device, environments=ENVS, slots=40, train_every=1, n_step=3) as (_, collector),
    ):
        done.run(8)
        collector.load_state(done.state())  # the replay is not loaded
        with pytest.raises(RuntimeError, match="the replay holds"):
            collector.run(4, chain=4)
