"""Out of sample on the device: one account per environment walks through all bars of a market."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fxengine.graphs import Plan
from fxengine.ops import market
from fxengine.ops.market import TRACE
from fxengine.rl.transition import (
    LEARNT,
    TRACE_ARENA,
    append_end,
    append_transition,
    check_signals,
    loop_builder,
    reset_plan,
)

if TYPE_CHECKING:
    from fxengine.engine import Engine
    from fxengine.rl.agents import Agent
    from fxengine.rl.market import MarketData, MarketSpec

# Steps of a walk that one launch makes.
_CHAIN = 32


class Walk:
    """The greedy policy of an agent on its way through all bars of a market, on the device.

    Args:
        engine: its parameters and signals (the costs) are used as they are at each `run`.
        agent: acts.
        data: what is traded, such as the validation part.
        spec: the rules; the length of episodes does not matter.
        environments: accounts side by side. They differ only if the agent draws random numbers (`IqnAgent`).
        seed: of these; the engine's by default.

    Raises:
        ValueError: the agent does not fit the market.
        ProgramError: the step of the engine lacks a signal.
    """

    def __init__(
        self,
        engine: Engine,
        agent: Agent,
        data: MarketData,
        spec: MarketSpec,
        *,
        environments: int = 1,
        seed: int | None = None,
    ) -> None:
        self._engine = engine
        self._counters = np.array([0, 0, 0, engine.seed if seed is None else seed], np.uint64)
        builder = loop_builder(engine)
        program, self._shape = builder.program, (len(data), len(TRACE), environments)
        walked = market.declare(program, data, spec.through(data), environments)
        self._trace = program.tensor("walk.trace", self._shape, np.float64, arena=TRACE_ARENA)
        append_transition(builder, walked, agent, "greedy", trace=self._trace)
        append_end(builder)
        check_signals(builder, engine)
        self._plan = Plan(program, engine.device, guard=engine._guard, base=engine.plan, share=LEARNT)
        self._start = reset_plan(engine, self._plan, walked, stagger=False, trace=self._trace)
        self._many, self._rest = divmod(len(data) - 1, _CHAIN)
        nodes = range(len(self._plan.nodes))
        self._chain = self._plan.capture_nodes(nodes, stream=engine.stream, chain=_CHAIN)
        self._graph = self._plan.capture(stream=engine.stream)

    def run(self) -> NDArray[np.float64]:
        """Trace of the walk, float64 [n, 4, E], as `fxengine.rl.backtest.performance` takes it. Waits.

        Every account begins at the first bar, flat, with an equity of 1. One that is ruined stops: its later rows are
        NaN. The same parameters and signals give the same trace.
        """
        engine, plan = self._engine, self._plan
        trace = plan.buffer(self._trace)
        trace.fill_u32(0x7FFFFFFF)  # NaN
        engine._write(plan.buffer("collector.counters"), self._counters.view(np.uint8))
        engine._write_signals(plan)
        self._start.run(stream=engine.stream)
        for graph, times in ((self._chain, self._many), (self._graph, self._rest)):
            for _ in range(times):
                graph.launch(stream=engine.stream)
        return engine._read(trace)

    def close(self) -> None:
        """Free the graphs and the accounts. Idempotent."""
        for owned in (self._chain, self._graph, self._start, self._plan):
            owned.close()

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
