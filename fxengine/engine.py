"""What a host application holds: one captured step, its signals, its telemetry, its parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine import state as run_state
from fxengine import telemetry as telemetry_rows
from fxengine.acting import Acting, Actions, PolicyKind, Result, specified_acting
from fxengine.checkpoint import Checkpoint
from fxengine.config import StepConfig
from fxengine.driver import Buffer, Device
from fxengine.driver.errors import ClosedError, CudaError
from fxengine.evaluation import Evaluation
from fxengine.graphs import Plan, StepGraph
from fxengine.nets.builder import Source, StepBuilder
from fxengine.nets.step import specified_step
from fxengine.ops.linear_tiles import PRECISIONS
from fxengine.ops.step import COUNTERS
from fxengine.parameters import Parameters
from fxengine.signals import Signals
from fxengine.staging import InputStaging, SignalRows
from fxengine.telemetry import Report, Telemetry

if TYPE_CHECKING:
    from fxengine.rl.replay import Replay

Definition: TypeAlias = Callable[[StepBuilder], None]


@dataclass(frozen=True)
class _Variant:
    """One captured form of the step. All forms share their memory; they differ in diagnostics and oracles."""

    plan: Plan
    graph: StepGraph
    replay: Callable[[], None]


class Engine:
    """A training step, captured once and replayed per `step()`.

    Args:
        definition: a `StepConfig` (the specified step), or a function that declares a step on a `StepBuilder`.
        device: `auto`, `cuda:N`, `sim`, or an open Device (which stays open when the engine closes).
        seed: seeds the initial parameters and the Philox stream of batch indices.
        precision: how linear products are computed: `fp32`, or on tensor cores `tf32` or `bf16`.
        signals: first values of host-owned signals, by name.
        data: per input, device-resident rows [n, ...]: each step gathers its batch from them, and nothing is copied
            from the host. Inputs without data are written by the host with `write`.
        replay: a replay buffer (`fxengine.rl.replay`) that fills all inputs instead: each step draws its batch from it.
        groups: parameter groups by index, for a definition with groups of its own.
        feed: random inputs (tau, tau_target) that the host writes instead of the device drawing them.
        guard: put guard words around every buffer and let `check_guards` look for stray writes.

    Attributes:
        builder: the declared step: its program, groups, inputs, outputs, signals.
        plan: its place in memory: `plan.buffer(tensor)`.
        signals: the host-owned signals.
        stream: the stream that steps run on.
        replay: the replay given, or None.
        inserted: steps inserted into the replay so far, as launched. Who launches insertions counts them here.

    Raises:
        DeviceNotFound: no such device; the message says what to install.
        ConfigError, ProgramError: the definition cannot be built.
        CudaError: the driver refused something.
    """

    def __init__(
        self,
        definition: StepConfig | Definition,
        *,
        device: str | Device = "auto",
        seed: int = 0,
        precision: str = "fp32",
        signals: Mapping[str, float] | None = None,
        data: Mapping[str, NDArray[Any]] | None = None,
        replay: Replay | None = None,
        groups: Mapping[int, str] | None = None,
        feed: Collection[str] = (),
        guard: bool = False,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {seed}")
        if data and replay is not None:
            raise ValueError(f"inputs come from data= or from replay=, not from both; data is given for {sorted(data)}")
        self.config = definition if isinstance(definition, StepConfig) else None
        self.precision = precision
        self.seed = seed
        self.replay = replay
        self.inserted = 0
        self._owns_device = not isinstance(device, Device)
        self.device = device if isinstance(device, Device) else Device.open(device)
        self._closed = False
        self._evaluations: dict[Any, Evaluation] = {}
        self._actings: list[Acting] = []
        self._acting: Acting | None = None
        self._parameters: Parameters | None = None
        try:
            self._build(_as_definition(definition), _checked_data(data), groups, feed, guard)
            run_state.initialise(self)
            self.signals.update(signals or {})
        except BaseException:
            self.close()
            raise

    # -- running -------------------------------------------------------------------------------------------------

    def step(self, *, captured: bool = True, decompose: bool = False) -> None:
        """Run one step asynchronously: publish the signals, replay the graph.

        The oracles are part of every `oracle_every`-th replay, counted over the whole run; the others replay a graph
        without them. With decompose=True a variant of the step runs that trains to the same bits and adds
        `report.decomposition`; it is captured at its first use, and a step without it pays nothing for it.

        Waits only when `signals.RING_ROWS` replays are already queued. With captured=False the same program runs
        launch by launch, without the graph, with the same bits: the debugging mode.

        Raises:
            ClosedError: the engine is closed.
            RuntimeError: the replay does not hold a whole transition of n steps yet.
            CudaError: an earlier replay failed, or the launch was refused.
        """
        if self._closed:
            raise ClosedError("the engine is closed")
        if self.replay is not None:
            self.require_transitions(self.inserted)
        oracles = self.runs_oracles(self._submitted)
        variant = self._variant(decompose, oracles) if decompose or oracles else self._plain
        self.signals.publish(self._submitted)
        try:
            if captured:
                variant.replay()
            else:
                variant.plan.run(stream=self.stream)
            self._submitted += 1
        except BaseException:  # an interrupt may come between a launch and its count
            self.recount()
            raise

    def run(self, steps: int) -> None:
        """Queue that many steps, as `step()` does."""
        for _ in range(steps):
            self.step()

    def runs_oracles(self, replay: int) -> bool:
        """Whether replay number `replay`, counted from 0 over the whole run, has the oracles in it."""
        every = self._oracle_every
        return every > 0 and replay % every == every - 1

    def require_transitions(self, inserted: int) -> None:
        """Raise RuntimeError unless the replay can serve a batch after so many insertions."""
        if self.replay is not None and inserted < self.replay.n_step:
            envs, steps = self.replay.envs, self.replay.n_step
            raise RuntimeError(
                f"the replay holds {inserted * envs} of at least {steps * envs} transitions; insert more first"
            )

    def recount(self) -> None:
        """Take the numbers of steps and insertions from the device; a launch may be uncounted. Waits."""
        with suppress(CudaError):  # what went wrong is on its way to the caller already
            self.synchronize()
            self._submitted = self._telemetry.finished()
            if self.builder.sampling is not None:
                self.inserted = int(self._read(self.plan.buffer(self.builder.sampling.stored.ring.counters))[0])

    def synchronize(self) -> None:
        """Wait until every queued step has finished."""
        with self.device.activate():
            self.stream.synchronize()

    def telemetry(self) -> Report | None:
        """Report of the newest finished step, None before the first. Never blocks."""
        return self._telemetry.latest()

    def telemetry_since(self, replay: int) -> list[Report]:
        """Reports of the finished steps after replay number `replay`, as far back as the ring reaches. Never blocks."""
        return self._telemetry.since(replay)

    def write(self, **inputs: ArrayLike) -> None:
        """Copy batch inputs to the device for the following steps, in stream order (earlier steps are not disturbed).

        Raises:
            KeyError: no such input.
            ValueError: a shape or dtype differs from the input's, or the input is gathered from resident data.
        """
        for name in inputs:
            if name not in self.builder.inputs:
                raise KeyError(f"no input '{name}'; the step has {sorted(self.builder.inputs)}")
            if name in self._resident:
                raise ValueError(f"input '{name}' is gathered from device-resident data and cannot be written")
        self._staging.write(inputs)

    def evaluate(self, inputs: Mapping[str, NDArray[Any]], *, definition: Definition | None = None) -> dict[str, float]:
        """Losses and accuracies of the present parameters on given rows, without training on them.

        Args:
            inputs: every input of the step, with any number of rows n for a StepConfig.
            definition: for an engine made from a function: the function that declares the step for these shapes.

        Returns:
            The telemetry values of the forward pass (losses over the n rows, accuracies), by name.
        """
        rows = {len(a) for a in inputs.values()}
        if len(rows) != 1:
            shapes = {k: np.shape(a) for k, a in inputs.items()}
            raise ValueError(f"inputs must have equally many rows, got {shapes}")
        if self.config is not None:
            count = rows.pop()
            key: Any = count
            definition = partial(specified_step, config=replace(self.config, batch=count))
        elif definition is None:
            raise ValueError("an engine made from a function needs definition= to evaluate")
        else:
            key = definition
        if key not in self._evaluations:
            self._evaluations[key] = Evaluation(self, definition)
        return self._evaluations[key].run(inputs)

    # -- acting --------------------------------------------------------------------------------------------------

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
        policy: PolicyKind = "epsilon_greedy",
        greedy: bool = False,
        values: bool = False,
        **inputs: NDArray[np.float32],
    ) -> Result:
        """Actions of the specified step's online networks, after every step queued so far; waits for them.

        The signals `epsilon` and `temperature` hold as set by now. One graph is captured per number of rows and policy,
        at its first use or by `prepare_act`. An engine made from a function acts through `fxengine.acting.Acting`.

        Args:
            obs: float32 [rows, S], or [S] for one row.
            policy: `greedy`, `epsilon_greedy` or `boltzmann`.
            greedy: take the largest value, whatever the policy.
            values: also return the values q float32 [rows, sum n_d].
            inputs: ofi float32 [rows, O], where the step reads order flow.

        Returns:
            int32 [rows, D], the caller's own; with values=True a pair.

        Raises:
            ValueError: an array has another shape or dtype (nothing is converted), or the step has no actions.
            ClosedError: the engine is closed.
            CudaError: an earlier step or this call failed on the device.
        """
        acting = self._acting or self.acting
        return acting.call(obs, "greedy" if greedy else policy, values, inputs)

    def prepare_act(
        self, rows: int, *, policy: PolicyKind = "epsilon_greedy", greedy: bool = False, values: bool = False
    ) -> StepGraph:
        """Capture the graph of such calls of `act` now, instead of at the first; returns it, to be looked at."""
        return self.acting.prepare(rows, policy=policy, greedy=greedy, values=values)

    @property
    def acting(self) -> Acting:
        """What `act` runs: its `state()` belongs to a checkpoint of a run that explores."""
        if self._closed:
            raise ClosedError("the engine is closed")
        if self._acting is None:
            self._acting = specified_acting(self)
        return self._acting

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> StepGraph:
        """The captured step: `graph.census()`, `graph.table()`, `graph.dot()`."""
        return self._plain.graph

    @property
    def params(self) -> Parameters:
        """Parameters by name: read and assign float32 arrays."""
        if self._parameters is None:
            self._parameters = Parameters(self)
        return self._parameters

    def output(self, name: str) -> NDArray[Any]:
        """Copy of a named output of the last step (for example h1, wire). Waits for the queued steps."""
        tensor = self.builder.outputs.get(name) or self.builder.inputs.get(name)
        if tensor is None:
            raise KeyError(f"no output '{name}'; there are {sorted([*self.builder.outputs, *self.builder.inputs])}")
        return self._read(self.plan.buffer(tensor))

    def state(self) -> dict[str, NDArray[Any]]:
        """Everything that a resumed run needs, as host arrays: parameters, moments, counters, signals."""
        return run_state.collect(self)

    def load_state(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Inverse of `state`. Nothing is changed if an array is missing or has another shape.

        Raises:
            ValueError: names every array that is missing or does not fit.
        """
        run_state.restore(self, arrays)

    def state_hash(self) -> str:
        """SHA-256 over the state: equal exactly when every bit of it is."""
        return run_state.digest(self.state())

    def save(self, path: str | Path, extra: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Write a safetensors checkpoint (through a temporary file, replaced in one step).

        Args:
            path: file to write.
            extra: further arrays to keep with it, under the prefix `extra.`.
        """
        config = self.config.to_json() if self.config is not None else ""
        Checkpoint(self.state(), dict(extra or {}), config, self.seed).save(path)

    @classmethod
    def load(cls, path: str | Path, **options: Any) -> Engine:
        """An engine from a checkpoint, with the options of the constructor (device, data, ...).

        Raises:
            ValueError: the file is no checkpoint of a StepConfig engine.
        """
        checkpoint = Checkpoint.load(path)
        if not checkpoint.config:
            raise ValueError(f"{path} holds a step made from a function; build that engine and use load_state()")
        engine = cls(StepConfig.from_json(checkpoint.config), seed=checkpoint.seed, **options)
        engine.load_state(checkpoint.state)
        return engine

    def check_guards(self) -> None:
        """Raise if a kernel wrote past a buffer (engines made with guard=True)."""
        self.synchronize()
        for variant in self._variants.values():
            variant.plan.check_guards()
        for acting in self._actings:
            acting.check_guards()

    # -- construction --------------------------------------------------------------------------------------------

    def _build(
        self,
        definition: Definition,
        data: dict[str, Source],
        groups: Mapping[int, str] | None,
        feed: Collection[str],
        guard: bool,
    ) -> None:
        self._guard = guard

        def declare(*, decompose: bool, oracles: bool) -> StepBuilder:
            builder = StepBuilder(
                self.device.target,
                precision=self.precision,
                groups=groups,
                data=data,
                replay=self.replay,
                feed=feed,
                decompose=decompose,
                with_oracles=oracles,
            )
            definition(builder)
            builder.finish()
            return builder

        self._declare = declare
        self.builder = builder = declare(decompose=False, oracles=False)
        self._oracle_every = builder.oracle_every
        self._resident = frozenset(data if self.replay is None else set(builder.inputs) - set(feed))
        self.stream = self.device.stream()
        self.plan = Plan(builder.program, self.device, guard=guard)
        graph = self.plan.capture(stream=self.stream)
        self._plain = _Variant(self.plan, graph, graph.bind(self.stream))
        self._variants = {(False, False): self._plain}
        if self._oracle_every:
            self._variant(decompose=False, oracles=True)  # now, so that no step of a run pays for it

        row = telemetry_rows.row_bytes(len(builder.reported))
        self._telemetry = Telemetry(
            builder.reported,
            builder.signals.groups,
            self.plan.mapped("telemetry.ring").array.view(np.uint32).reshape(telemetry_rows.RING_ROWS, row // 8, 2),
            self.plan.mapped("telemetry.head").array.view(np.uint64),
        )
        self._signal_rows = SignalRows(self.device, self.stream, self.plan.buffer(builder.snapshot))
        self.signals = Signals(
            builder.signals,
            self._signal_rows.rows,
            self._signal_rows.send,
            finished=self._telemetry.finished,
            idle=self._idle,
        )
        self._staging = InputStaging(
            self.device,
            self.stream,
            {n: self.plan.buffer(t) for n, t in builder.inputs.items() if n not in self._resident},
        )

    def _variant(self, decompose: bool, oracles: bool) -> _Variant:
        """Another graph for a replay: other records over the same memory; captured when first asked for."""
        key = decompose, oracles
        if key not in self._variants:
            builder = self._declare(decompose=decompose, oracles=oracles)
            if decompose and "decomposed" not in builder.reported:
                raise ValueError("this step has no decomposition: it has no Q network")
            plan = Plan(builder.program, self.device, guard=self._guard, base=self.plan)
            graph = plan.capture(stream=self.stream)
            self._variants[key] = _Variant(plan, graph, graph.bind(self.stream))
        return self._variants[key]

    def _set_counters(self, counters: NDArray[np.uint64]) -> None:
        """Device counters and the host's mirror of them: the next rows of the rings, the next replay number."""
        self._write(self.plan.buffer("counters"), counters.view(np.uint8))
        self._submitted = int(counters[COUNTERS.index("replays")])
        self.plan.mapped("telemetry.head").array.view(np.uint64)[0] = self._submitted
        self.signals.restart(self._submitted)

    def _parameter_buffers(self) -> dict[str, Buffer]:
        trained = {p.name: self.plan.buffer(p.value) for p in self.builder.groups.parameters}
        fixed = {n: self.plan.buffer(t) for n, t in self.builder.fixed_parameters.items()}
        return {**trained, **fixed}

    def _idle(self) -> bool:
        with self.device.activate():
            return self.stream.query()

    def _read(self, buffer: Buffer) -> NDArray[Any]:
        self.synchronize()
        return buffer.read()

    def _write(self, buffer: Buffer, array: NDArray[Any]) -> None:
        self.synchronize()
        buffer.write(np.ascontiguousarray(array))

    def _write_signals(self, plan: Plan) -> None:
        """Send what the host has set to the snapshot that a plan reads; for who launches it without a step."""
        host = self.signals.current()
        self._write(plan.buffer("signals").view(0, host.shape, host.dtype), host)

    # -- lifetime ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Idempotent; a device given to the constructor stays open."""
        if self._closed:
            return
        self._closed = True
        for evaluation in self._evaluations.values():
            evaluation.close()
        for acting in self._actings:
            acting.close()
        for variant in reversed(list(self.__dict__.get("_variants", {}).values())):
            variant.graph.close()
            variant.plan.close()
        for name in ("_staging", "_signal_rows", "plan", "stream"):
            owned = self.__dict__.get(name)
            if owned is not None:
                owned.close()
        if self._owns_device:
            self.device.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_definition(definition: StepConfig | Definition) -> Definition:
    return partial(specified_step, config=definition) if isinstance(definition, StepConfig) else definition


def _checked_data(data: Mapping[str, NDArray[Any]] | None) -> dict[str, Source]:
    arrays = {name: np.ascontiguousarray(array) for name, array in (data or {}).items()}
    rows = {len(a) for a in arrays.values()}
    if len(rows) > 1:
        raise ValueError(f"data must have equally many rows, got { ({n: len(a) for n, a in arrays.items()}) }")
    return {name: Source(array) for name, array in arrays.items()}
