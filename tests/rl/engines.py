"""Engines of agents for the tests: small agents, batches, states put in and read out, and forward programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fxengine import Engine, StepBuilder
from fxengine.driver import Device
from fxengine.graphs import Plan
from fxengine.rl.agents import Agent, C51Agent, DqnAgent, IqnAgent
from tests.rl.steps import PerceptronAgent, State, Tree

#: What the program shares with the engine's step.
ARENAS = ("params", "grads", "adam_m", "adam_v", "targets", "fixed", "spectral", "signals")

SIGNALS = {"lr": 1e-2, "clip": 0.4, "polyak_tau": 0.25, "adam_eps": 1e-3}

DQN = DqnAgent(5, (3, 2), hidden=(9, 7), batch=13)
C51 = C51Agent(5, (3, 2), hidden=(9, 7), batch=13, atoms=21, v_min=-2.0, v_max=2.0)
IQN = IqnAgent(5, (3, 2), hidden=(9, 7), batch=13, cosines=6, quantiles=5, target_quantiles=3, act_quantiles=4, width=8)
AGENTS = {"dqn": DQN, "c51": C51, "iqn": IQN}


def a_batch(agent: PerceptronAgent, seed: int) -> Tree:
    """Random transitions; what follows a dead row is no number."""
    rng, rows = np.random.default_rng(seed), agent.batch
    batch = {
        "state": rng.normal(size=(rows, agent.state)),
        "next_state": rng.normal(size=(rows, agent.state)),
        "reward": rng.normal(size=rows),
        "discount": rng.choice([0.0, 0.9, 0.97], rows),
        "weight": rng.uniform(0.5, 1.5, rows),
        "actions": np.stack([rng.integers(0, n, rows) for n in agent.branches], axis=1),
    }
    batch["next_state"][batch["discount"] == 0.0] = np.nan
    if isinstance(agent, IqnAgent):
        batch["tau"] = rng.random((rows, agent.quantiles))
        batch["tau_target"] = rng.random((rows, agent.target_quantiles))
    return {name: x.astype(np.int32 if name == "actions" else np.float32) for name, x in batch.items()}


def an_engine(device: Device, agent: Agent, **options: Any) -> Engine:
    return Engine(agent.train, device=device, groups=agent.groups, **{"feed": ("tau", "tau_target"), **options})


def start(engine: Engine, seed: int = 0) -> State:
    """Random parameters and targets in the engine, and the same state for the reference."""
    rng = np.random.default_rng(seed)
    state = State({}, {}, {}, {})
    for name, value in engine.params.items():
        for part in (state.params, state.target):
            scale = 1.0 if value.ndim < 2 else 1.0 / np.sqrt(value.shape[1])
            part[name] = (scale * rng.normal(size=value.shape)).astype(np.float32)
        engine.params[name] = state.params[name]
        engine.plan.buffer(engine.builder.target_parameters[name]).write(state.target[name])
        state.m[name] = state.v[name] = np.zeros(value.shape)
    return state


def read(engine: Engine) -> dict[str, Tree]:
    """Gradients, and the state as the step has left it."""
    engine.synchronize()
    found: dict[str, Tree] = {"grad": {}, "params": {}, "target": {}, "m": {}, "v": {}}
    for p in engine.builder.groups.parameters:
        tensors = {
            "grad": p.grad,
            "params": p.value,
            "m": p.m,
            "v": p.v,
            "target": engine.builder.target_parameters[p.name],
        }
        for part, tensor in tensors.items():
            found[part][p.name] = engine.plan.buffer(tensor).read()
    return found


class Forward:
    """Values on given rows, over an engine's parameters.

    Args:
        engine: whose parameters and signals are read.
        agent: the agent.
        rows: of a state.
        extra: further inputs: columns by name.
        times: how many states, named state0, state1, ...
    """

    def __init__(self, engine: Engine, agent: Agent, rows: int, extra: Mapping[str, int], times: int = 1) -> None:
        self.builder = StepBuilder(
            engine.device.target, precision=engine.precision, groups=agent.groups, evaluation=True
        )
        self.builder.counters = self.builder.program.tensor("act.counters", (4,), np.uint64, arena="acting")
        given = {name: self.builder.input(name, (rows, columns)) for name, columns in extra.items()}
        states = [self.builder.input(f"state{i}", (rows, agent.state)) for i in range(times)]
        self.q = [agent.values(self.builder, state, given) for state in states]
        self.plan = Plan(self.builder.program, engine.device, base=engine.plan, share=ARENAS, guard=True)
        self.stream = engine.stream

    def __call__(self, **inputs: np.ndarray) -> list[np.ndarray]:
        for name, array in inputs.items():
            self.plan.buffer(name).view(0, array.shape, array.dtype).write(array)
        self.plan.run(stream=self.stream)
        self.stream.synchronize()
        self.plan.check_guards()
        return [self.plan.buffer(q).read() for q in self.q]

    def close(self) -> None:
        self.plan.close()

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
