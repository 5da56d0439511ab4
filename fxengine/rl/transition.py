"""What every loop on the device is declared from: observe, act, step the market; counters; the first episodes.

`fxengine.rl.collector.Collector` and `fxengine.rl.walker.Walk` are made of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fxengine.graphs import MAPPED, Plan, ProgramError, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.ops import market, step
from fxengine.ops import policy as policies
from fxengine.ops.market import Environments
from fxengine.ops.policy import PolicyKind

if TYPE_CHECKING:
    from fxengine.engine import Engine
    from fxengine.rl.agents import Agent

#: Philox streams of the policy and of the first bars of episodes; no record of a step or of `engine.act` has them.
POLICY_STREAM, MARKET_STREAM = 17, 18
#: Arenas shared with the training step: what it leaves behind.
LEARNT = ("params", "grads", "adam_m", "adam_v", "fixed", "targets", "spectral")
#: Arena of the counters.
ARENA = "collector"
#: Arena of a trace.
TRACE_ARENA = "trace"

_SCALARS: dict[PolicyKind, str] = {"epsilon_greedy": "epsilon", "boltzmann": "temperature"}


def loop_builder(engine: Engine) -> StepBuilder:
    """A builder for a program over the engine's parameters, with counters of its own."""
    groups = engine.builder.signals.groups
    builder = StepBuilder(engine.device.target, precision=engine.precision, groups=groups, evaluation=True)
    for part in ("policy", "market"):
        builder.signals.include(part)
    builder.counters = builder.program.tensor("collector.counters", (4,), np.uint64, arena=ARENA)
    return builder


def append_transition(
    builder: StepBuilder,
    environments: Environments,
    agent: Agent,
    policy: PolicyKind,
    *,
    trace: Tensor | None = None,
) -> dict[str, Tensor]:
    """Append: observe, act, step. Returns what is to be known of the transitions, by the names of a replay's fields.

    Raises:
        ValueError: the agent does not fit the market.
    """
    program, spec = builder.program, environments.spec
    count, width = environments.observation_shape
    if (agent.state, agent.branches, len(agent.extra)) != (width, spec.branches, 0):
        raise ValueError(
            f"the market has states of {width} features, branches {spec.branches} and no further inputs; "
            f"the agent is for {agent.state}, {agent.branches} and {sorted(agent.extra)}"
        )
    common: dict[str, Any] = {"signal": builder.signal, "counters": builder.counters}
    found = {
        "state": program.tensor("state", (count, width)),
        "actions": program.tensor("actions", (count, len(spec.branches)), np.int32),
        "next_state": program.tensor("next_state", (count, width)),
        "reward": program.tensor("reward", (count,)),
    }
    found |= {name: program.tensor(name, (count,), np.int32) for name in ("done", "nb_label", "regime_label")}
    state, actions = found["state"], found["actions"]
    market.observe(program, environments, state, **common)
    scalar = _SCALARS.get(policy)
    policies.policy(
        program,
        agent.values(builder, state, {}),
        actions,
        branches=spec.branches,
        kind=policy,
        scalar=builder.signal(scalar) if scalar else None,
        counters=builder.counters if scalar else None,
        stream=POLICY_STREAM,
    )
    common |= {name: tensor for name, tensor in found.items() if name != "state"}
    market.step(program, environments, **common, stream=MARKET_STREAM, trace=trace)
    return found


def append_end(builder: StepBuilder) -> None:
    """Append: the counters advance, and the host sees it in `collector.head`."""
    program = builder.program
    step.end(
        program,
        values=builder.signal("epsilon"),  # its row must report something; nobody reads it
        counters=builder.counters,
        ring=program.tensor("collector.row", (1, 8 * (step.HEADER_WORDS + 1)), np.uint8, arena=MAPPED),
        head=program.tensor("collector.head", (1,), np.uint64, arena=MAPPED),
    )
    if not builder.reports:  # nothing that a memset node would have to clear
        del program.storages["telemetry.values"]


def reset_plan(
    engine: Engine, base: Plan, environments: Environments, *, stagger: bool, trace: Tensor | None = None
) -> Plan:
    """A program that begins an episode in every environment of another one.

    The observations that it leaves are not used: the next step observes again.
    """
    builder = loop_builder(engine)
    program = builder.program
    begun = market.declare(program, environments.data, environments.spec, environments.count)
    market.reset(
        program,
        begun,
        program.tensor("observation", begun.observation_shape),
        signal=builder.signal,
        counters=builder.counters,
        stream=MARKET_STREAM,
        stagger=stagger,
        trace=program.tensor(trace.name, trace.shape, trace.dtype, arena=trace.storage.arena) if trace else None,
    )
    del program.storages["telemetry.values"]
    shared = (ARENA, market.ARENA, market.DATA_ARENA, "signals", TRACE_ARENA)
    return Plan(program, engine.device, guard=engine._guard, base=base, share=shared)


def check_signals(builder: StepBuilder, engine: Engine) -> None:
    """Raise ProgramError if the program reads a signal that the host does not own in the engine's step."""
    storage, known = builder.snapshot.storage, engine.signals.map.slots
    views = [t for record in builder.program.launches for t in record.reads if t.storage is storage]
    read = {slot for t in views for slot in range(t.offset, t.offset + t.size)}
    wanted = [s.name for s in builder.signals.slots.values() if s.index in read]
    missing = [name for name in wanted if name not in known or known[name].device_owned]
    if missing:
        raise ProgramError(
            f"the host does not own the signals {missing} in the engine's step; make it with "
            "Engine(training_step(agent), ...), which includes those of the market"
        )
