"""The loop on the device: act, step the market, insert, train, with no host between them.

    agent = DqnAgent(spec.observation_size(features), spec.branches)
    replay = market_replay(agent, environments=1024, slots=256)
    with Engine(training_step(agent), groups=agent.groups, replay=replay) as engine:
        with Collector(engine, agent, data, spec, warmup=16) as collector:
            collector.run(10_000, chain=16)
        with Walk(engine, agent, held_out, spec) as walk:
            trace = walk.run()

A collector is a program of its own over the engine's parameters and replay. Its forward has its own activations, and a
snapshot of the host's signals of its own: a step sees what `engine.signals` held when it was launched, and nothing is
captured again. Its last record advances the counters that key its random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fxengine.driver.errors import ClosedError
from fxengine.graphs import Plan, StepGraph
from fxengine.graphs.plan import capture_sequence
from fxengine.nets.builder import StepBuilder
from fxengine.ops import market
from fxengine.ops.market import ACCOUNT, CLOCK
from fxengine.ops.policy import PolicyKind
from fxengine.ops.replay import ARENA as REPLAY_ARENA
from fxengine.rl.replay import Field, Replay, insert
from fxengine.rl.transition import LEARNT, append_end, append_transition, check_signals, loop_builder, reset_plan
from fxengine.signals import HOST_SLOTS, RING_ROWS
from fxengine.staging import SignalRows
from fxengine.waiting import wait_for

if TYPE_CHECKING:
    from fxengine.engine import Definition, Engine
    from fxengine.rl.agents import Agent
    from fxengine.rl.market import MarketData, MarketSpec


def training_step(agent: Agent) -> Definition:
    """The agent's training step, as `Engine` takes it, with the signals of the market beside its own."""

    def declare(builder: StepBuilder) -> None:
        builder.signals.include("market")
        agent.train(builder)

    return declare


def market_replay(agent: Agent, *, environments: int, slots: int, n_step: int = 1, prioritized: bool = False) -> Replay:
    """A replay of all that a market environment tells: states, actions, rewards and the labels of the bars."""
    fields = {
        "state": Field(agent.state),
        "actions": Field(len(agent.branches), "int32"),
        "nb_label": Field((), "int32"),
        "regime_label": Field((), "int32"),
    }
    return Replay(slots, environments, fields, n_step=n_step, prioritized=prioritized)


class Collector:
    """Environments on the device that fill the replay of an engine, and the training in between.

    Everything is launched on the engine's stream, in order. Close it before the engine.

    Args:
        engine: its step is `training_step(agent)`; its replay has as many environments as are to run side by side.
        agent: acts.
        data: what is traded.
        spec: the rules.
        policy: `greedy`, `epsilon_greedy` (signal `epsilon`) or `boltzmann` (signal `temperature`).
        train_every: steps of the environments between two steps of training; 0: none.
        warmup: steps of the environments before the first step of training.
        seed: of the random numbers; the engine's by default.

    Raises:
        ValueError: the engine has no replay, the agent does not fit the market, or a number is out of range.
        ProgramError: the replay has other fields than the market gives, or the step lacks a signal.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Agent,
        data: MarketData,
        spec: MarketSpec,
        *,
        policy: PolicyKind = "epsilon_greedy",
        train_every: int = 1,
        warmup: int = 0,
        seed: int | None = None,
    ) -> None:
        if engine.replay is None:
            raise ValueError("the engine has no replay; make it with Engine(..., replay=market_replay(agent, ...))")
        if train_every < 0 or warmup < 0:
            raise ValueError(f"train_every and warmup are numbers of steps, got {train_every} and {warmup}")
        self.seed = engine.seed if seed is None else seed
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        self._engine, self._every = engine, train_every
        self._first = max(warmup, engine.replay.n_step)
        self._closed = False

        builder = loop_builder(engine)
        environments = market.declare(builder.program, data, spec, engine.replay.envs)
        transition = append_transition(builder, environments, agent, policy)
        wanted = {name: tensor for name, tensor in transition.items() if name in engine.replay.stored}
        insert(builder.program, engine.replay.declare(builder.program), wanted)
        append_end(builder)
        check_signals(builder, engine)
        shared = (*LEARNT, REPLAY_ARENA)
        self._plan = Plan(builder.program, engine.device, guard=engine._guard, base=engine.plan, share=shared)
        self._resident = {
            "account": environments.account,
            "clock": environments.clock,
            "counters": builder.counters,
        }
        self._plan.buffer(builder.snapshot).fill_u32(0)
        self._start = reset_plan(engine, self._plan, environments, stagger=True)
        self._graph = self._plan.capture(stream=engine.stream)
        self._launch = self._graph.bind(engine.stream)
        self._chains: dict[tuple[Plan, ...], StepGraph] = {}
        self._rows = SignalRows(engine.device, engine.stream, self._plan.buffer(builder.snapshot))
        self._version = 0  # of the signals in the snapshot; the host's begin with 1
        self._head = self._plan.mapped("collector.head").array.view(np.uint64)
        self._set_counters(0)
        self.reset()

    @property
    def steps(self) -> int:
        """Steps of each environment so far, as launched."""
        return self._steps

    def run(self, steps: int, *, chain: int = 1) -> None:
        """Let every environment make so many steps, and train in between; does not wait for them.

        After step number n, counted over the whole run, the engine trains if n is at least `warmup` and divisible by
        `train_every`. The host waits only before a launch while `signals.RING_ROWS` steps are queued.

        Args:
            steps: how many.
            chain: steps that one launch makes, with their training: less work for the host, the same bits. The signals
                of all of them are those of the launch. A graph is captured at the first launch of its kind.

        Raises:
            ValueError: a negative number of steps, or chain is not in 1..signals.RING_ROWS.
            ClosedError: the collector or its engine is closed.
            CudaError: an earlier launch failed, or one was refused.
        """
        if steps < 0 or not 1 <= chain <= RING_ROWS:
            raise ValueError(f"steps must be 0 or more and chain in 1..{RING_ROWS}, got {steps} and {chain}")
        self._check_open()
        chains, rest = divmod(steps, chain) if chain > 1 else (0, steps)
        with self._engine.device.activate():  # once, so that no launch has to
            for _ in range(chains):
                self._run_chain(chain)
            for _ in range(rest):
                self._publish()
                try:
                    self._launch()
                    self._launched(1)
                except BaseException:  # an interrupt may come between the launch and its count
                    self._recount()
                    raise
                if self._trains(self._steps):
                    self._engine.step()

    def reset(self) -> None:
        """Begin an episode of random length in every environment. Waits. A new collector has done so."""
        self._check_open()
        self._start.run(stream=self._engine.stream)
        self._engine.synchronize()

    def accounts(self) -> dict[str, NDArray[Any]]:
        """The accounts by name (`ops.market.ACCOUNT` and `CLOCK`), each [E]. Waits."""
        state = self.state()
        rows = (*state["collector.account"], *state["collector.clock"])
        return dict(zip((*ACCOUNT, *CLOCK), rows, strict=True))

    # -- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, NDArray[Any]]:
        """What a resumed run needs beside `engine.state()`, as host arrays. Waits."""
        read, buffer = self._engine._read, self._plan.buffer
        return {f"collector.{name}": read(buffer(tensor)) for name, tensor in self._resident.items()}

    def load_state(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Inverse of `state`. Nothing is changed if an array is missing or has another shape.

        Raises:
            ValueError: names every array that is missing or does not fit.
        """
        problems = []
        for name, tensor in self._resident.items():
            key, given = f"collector.{name}", arrays.get(f"collector.{name}")
            if given is None:
                problems.append(f"{key} is missing")
            elif (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                problems.append(f"{key} is {given.dtype} {given.shape}, expected {tensor.dtype} {tensor.shape}")
        if problems:
            raise ValueError("the state does not belong to this collector: " + "; ".join(problems))
        for name in ("account", "clock"):
            self._engine._write(self._plan.buffer(self._resident[name]), arrays[f"collector.{name}"])
        steps, _, _, self.seed = map(int, arrays["collector.counters"])
        self._set_counters(steps)

    def _set_counters(self, steps: int) -> None:
        """Device counters and the host's mirror of them: the next row of the ring."""
        counters = np.array([steps, 0, 0, self.seed], np.uint64)
        self._engine._write(self._plan.buffer(self._resident["counters"]), counters)
        self._steps = self._finished = steps
        self._head[0] = steps

    # -- launching -----------------------------------------------------------------------------------------------

    def _trains(self, step: int) -> bool:
        """Whether the engine trains after step number `step`."""
        return bool(self._every) and step >= self._first and step % self._every == 0

    def _launched(self, steps: int) -> None:
        self._steps += steps
        self._engine.inserted += steps

    def _run_chain(self, steps: int) -> None:
        """One launch of so many steps and their training."""
        engine = self._engine
        plans, number = [], engine._submitted
        for step in range(self._steps + 1, self._steps + steps + 1):
            plans.append(self._plan)
            if self._trains(step):
                engine.require_transitions(engine.inserted + step - self._steps)
                plans.append(self._training_plan(number))
                number += 1
        if number > engine._submitted:
            engine.signals.publish(engine._submitted)
        self._publish()
        key = tuple(plans)
        if key not in self._chains:
            self._chains[key] = capture_sequence(plans, stream=engine.stream)
        try:
            self._chains[key].launch(stream=engine.stream)
            self._launched(steps)
            engine._submitted = number
        except BaseException:
            self._recount()
            raise

    def _recount(self) -> None:
        """Take the number of steps from the device, where it is not known whether the last launch was made. Waits."""
        self._engine.recount()
        self._steps = self._finished = int(self._head[0])

    def _training_plan(self, number: int) -> Plan:
        """The form of the training step that replay `number` of the engine has."""
        return self._engine._variant(decompose=False, oracles=self._engine.runs_oracles(number)).plan

    def _publish(self) -> None:
        """Let the next launch see the signals as they are; waits until the row of its first step is free."""
        signals = self._engine.signals
        if self._steps - self._finished >= RING_ROWS:
            self._wait(self._steps - RING_ROWS + 1)
        version = signals._version  # read before the values: a later change is sent by the next launch
        if self._version != version:
            row = self._steps % RING_ROWS
            self._rows.rows[row, :HOST_SLOTS] = signals.current()
            self._rows.send(row, 0, HOST_SLOTS, 0)
            self._version = version

    def _wait(self, needed: int) -> None:
        """Until so many steps have finished."""
        self._finished = wait_for(
            needed,
            lambda: int(self._head[0]),
            self._engine._idle,
            lambda found: RuntimeError(f"the device is idle but has finished {found} steps, {needed} expected"),
        )

    # -- lifetime ------------------------------------------------------------------------------------------------

    def check_guards(self) -> None:
        """Raise if a kernel wrote past a buffer (engines made with guard=True)."""
        self._engine.synchronize()
        self._plan.check_guards()

    def _check_open(self) -> None:
        if self._closed or self._engine._closed:
            raise ClosedError("the collector is closed" if self._closed else "the engine is closed")

    def close(self) -> None:
        """Free the graphs and the environments; the replay stays. Idempotent."""
        self._closed = True
        for graph in (*self._chains.values(), self._graph):
            graph.close()
        self._chains.clear()
        self._start.close()
        self._rows.close()
        self._plan.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
