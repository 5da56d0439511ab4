"""Acting: a captured inference graph, host array in, actions out, with the parameters of an engine as they are now.

A call writes its observations into mapped-pinned memory and launches one graph on the engine's stream, behind every
step queued before. The first node reads them there, the last one writes the actions back into mapped memory as words
that carry the number of the launch, and the host spins on these words: no copy is enqueued, nothing is synchronised,
and no row can be torn. Training is not touched: an acting program only reads what it shares with the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from fxengine.actgraph import ActingGraph, Actions, Result, Shape, Values, check_dtype
from fxengine.driver.errors import ClosedError
from fxengine.graphs import StepGraph
from fxengine.nets.step import acting_values
from fxengine.ops.policy import KINDS, PolicyKind

if TYPE_CHECKING:
    from typing import Literal

    from fxengine.engine import Engine


class Acting:
    """Actions of an engine's networks, at the lowest latency. `Engine.act` is one for a step made from a `StepConfig`.

    One graph is captured for each number of rows, policy and choice of results, when it is first asked for. Up to 64
    rows of a network that `fxengine.ops.act_net` knows (dense layers, and all that the specified step has) are one
    launch, in float32 whatever the engine's precision; others are a launch per layer, as in training. Calls are for one
    thread at a time. It closes with the engine.

    Args:
        engine: whose parameters, signals and stream are used.
        values: declares the online forward, with the engine's parameter groups: q [rows, sum n_d]. What it draws at
            random it draws with `step.counters`; `step.signal` gives signals as the host sets them.
        branches: actions n_d of each branch.
        extra: further inputs of the step that the forward reads, by name.
        rows: numbers of rows to capture now.
        policy: of calls that do not name one: `greedy`, `epsilon_greedy` or `boltzmann`.
        seed: of the random numbers; the engine's by default.

    Attributes:
        count: calls so far, over the whole run: the counter of the random numbers.

    Raises:
        ProgramError: the forward cannot be declared, or reads a signal or input that acting does not have.
        ValueError: an unknown policy or input, or a seed that does not fit 64 bits.
    """

    def __init__(
        self,
        engine: Engine,
        values: Values,
        *,
        branches: Sequence[int],
        extra: Collection[str] = (),
        rows: int | Sequence[int] = (),
        policy: PolicyKind = "epsilon_greedy",
        seed: int | None = None,
    ) -> None:
        self.branches = tuple(int(n) for n in branches)
        self.policy = _checked(policy)
        self.count = 0
        self.seed = engine.seed if seed is None else seed
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        known = engine.builder.inputs
        if missing := sorted({"state", *extra} - set(known)):
            raise ValueError(f"the step has no input {', '.join(missing)}; it has {sorted(known)}")
        self._widths = {name: known[name].shape[1:] for name in ("state", *extra)}
        self._engine, self._declare = engine, values
        self._graphs: dict[tuple[tuple[int, ...], PolicyKind, bool], ActingGraph] = {}
        self._closed = False
        engine._actings.append(self)
        for count in (rows,) if isinstance(rows, int) else rows:
            self.prepare(count)

    @overload
    def act(self, obs: NDArray[np.float32], *, values: Literal[False] = False, **options: Any) -> Actions: ...

    @overload
    def act(
        self, obs: NDArray[np.float32], *, values: Literal[True], **options: Any
    ) -> tuple[Actions, NDArray[np.float32]]: ...

    def act(
        self,
        obs: NDArray[np.float32],
        *,
        policy: PolicyKind | None = None,
        greedy: bool = False,
        values: bool = False,
        **extra: NDArray[np.float32],
    ) -> Result:
        """Actions of observations, with the parameters after every step queued so far and the signals as set by now.

        Args:
            obs: float32 [rows, S], or [S] for one row.
            policy: instead of the one given to the constructor.
            greedy: take the largest value, whatever the policy.
            values: also return the values that the actions were chosen by.
            extra: the further inputs, float32 [rows, ...]; for one row the first dimension may be left out.

        Returns:
            Actions int32 [rows, D]; with values=True also q float32 [rows, sum n_d]. The arrays are the caller's.

        Raises:
            ValueError: an array has another shape or dtype, or an input is missing. Nothing is converted.
            ClosedError: the engine is closed.
            CudaError: an earlier step or this call failed on the device.
        """
        return self.call(obs, "greedy" if greedy else policy or self.policy, values, extra)

    def call(
        self, obs: NDArray[np.float32], kind: PolicyKind, values: bool, extra: Mapping[str, NDArray[np.float32]]
    ) -> Result:
        """`act` with every option given."""
        try:
            graph = self._graphs[obs.shape, kind, values]
        except (KeyError, AttributeError):
            graph = self._first(obs, kind, values)
        result = graph.run(obs, extra, self.count)
        self.count += 1
        return result

    def begin(
        self, obs: NDArray[np.float32], kind: PolicyKind, values: bool, extra: Mapping[str, NDArray[np.float32]]
    ) -> Callable[[], Result]:
        """`call` in two halves: this one launches, the function that it returns waits for the result.

        In between the host may do other work, and queue some that the actions do not depend on: it runs behind them.
        The next call comes after the second half.
        """
        try:
            graph = self._graphs[obs.shape, kind, values]
        except (KeyError, AttributeError):
            graph = self._first(obs, kind, values)
        graph.begin(obs, extra, self.count)

        def finish() -> Result:
            result = graph.finish()
            self.count += 1
            return result

        return finish

    def prepare(
        self, rows: int, *, policy: PolicyKind | None = None, greedy: bool = False, values: bool = False
    ) -> StepGraph:
        """Capture the graph of such calls now, instead of at the first of them; returns it, to be looked at."""
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        return self._capture(rows, _checked("greedy" if greedy else policy or self.policy), values).graph

    def state(self) -> dict[str, NDArray[np.uint64]]:
        """What a resumed run needs to draw the same actions, as host arrays: {"acting": [calls, seed]}."""
        return {"acting": np.array([self.count, self.seed], np.uint64)}

    def load_state(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Inverse of `state`. Raises ValueError if the array is missing or has another shape or dtype."""
        found = arrays.get("acting")
        if found is None or found.shape != (2,) or found.dtype != np.uint64:
            given = "nothing" if found is None else f"{found.dtype} {found.shape}"
            raise ValueError(f"the state of acting is 'acting', uint64 (2,), got {given}")
        self.count, self.seed = int(found[0]), int(found[1])
        for graph in self._graphs.values():
            graph.set_seed(self.seed)

    def check_guards(self) -> None:
        """Raise if a kernel wrote past a buffer (engines made with guard=True)."""
        for graph in self._graphs.values():
            graph.plan.check_guards()

    def close(self) -> None:
        """Free the graphs and their memory. Idempotent."""
        self._closed = True
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _first(self, obs: object, kind: PolicyKind, values: bool) -> ActingGraph:
        """The graph of the first call of its kind, once the observations are known to be in order."""
        width = self._widths["state"]
        if not isinstance(obs, np.ndarray) or (obs.shape != width and obs.shape[1:] != width) or not obs.size:
            given = f"shape {obs.shape}" if isinstance(obs, np.ndarray) else type(obs).__name__
            inner = ", ".join(map(str, width))
            raise ValueError(f"observations must be a float32 array [rows, {inner}] or [{inner}], got {given}")
        check_dtype("observations", obs)
        return self._capture(1 if obs.shape == width else len(obs), _checked(kind), values)

    def _capture(self, rows: int, kind: PolicyKind, values: bool) -> ActingGraph:
        if self._closed:
            raise ClosedError("the engine is closed")
        width = self._widths["state"]
        key = (rows, *width), kind, values
        if key not in self._graphs:
            shape = Shape(rows, kind, values, self.branches, self._widths)
            graph = self._graphs[key] = ActingGraph(self._engine, shape, self._declare, self.seed)
            if rows == 1:
                self._graphs[width, kind, values] = graph
        return self._graphs[key]


def specified_acting(engine: Engine) -> Acting:
    """The acting of a step made from a `StepConfig`. Raises ValueError if the engine has none, or no actions."""
    config = engine.config
    if config is None:
        raise ValueError("an engine made from a function acts through fxengine.acting.Acting(engine, ...)")
    if not config.branches:
        raise ValueError("a step of the auxiliary nets alone has no actions; give StepConfig branches")
    return Acting(
        engine,
        lambda step, state, extra: acting_values(step, config, state, extra.get("ofi")),
        branches=config.branches,
        extra=("ofi",) if config.has_ofi else (),
    )


def _checked(kind: PolicyKind) -> PolicyKind:
    if kind not in KINDS:
        raise ValueError(f"policy must be one of {', '.join(KINDS)}, got {kind!r}")
    return kind
