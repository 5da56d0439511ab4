"""One captured acting program: its declaration, its place in mapped memory, and a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fxengine.driver.errors import FxError
from fxengine.graphs import MAPPED, Plan, ProgramError, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.ops import act as host
from fxengine.ops import act_net
from fxengine.ops import policy as policies
from fxengine.ops.policy import PolicyKind
from fxengine.signals import HOST_SLOTS

if TYPE_CHECKING:
    from fxengine.engine import Engine

#: Declares the online forward for acting: (step, observations [rows, S], further inputs) -> q [rows, sum n_d].
Values: TypeAlias = Callable[[StepBuilder, Tensor, Mapping[str, Tensor]], Tensor]
Actions: TypeAlias = NDArray[np.int32]
Result: TypeAlias = "Actions | tuple[Actions, NDArray[np.float32]]"

#: Philox stream of the policies' random numbers.
ACT_STREAM = 16

# Arenas shared with the step: what training leaves behind. The snapshot of the signals is the acting program's own: it
# holds what the host sets now, not what the newest replay has read.
_LEARNT = ("params", "grads", "adam_m", "adam_v", "fixed", "targets", "spectral")
_SCALARS: dict[PolicyKind, str] = {"epsilon_greedy": "epsilon", "boltzmann": "temperature"}
# Words of the mapped input: the counters, room for every host-owned signal, then the inputs, each at a 128-byte line.
_COUNTER_WORDS, _LINE = 8, 32
_HEADER_WORDS = -(-(_COUNTER_WORDS + HOST_SLOTS) // _LINE) * _LINE
# The four counters: calls, number of the launch (the tag of its result), nothing, seed.
_COUNT, _SEQUENCE, _, _SEED = range(4)
# Looks at the result between two questions to the driver whether the launch has failed.
_LOOKS = 4096
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Shape:
    """What an acting program is declared from.

    Attributes:
        rows: observations per call.
        kind: the policy.
        values: whether q is a result.
        branches: actions n_d of each branch.
        widths: shape of a row of each input, "state" first.
    """

    rows: int
    kind: PolicyKind
    values: bool
    branches: tuple[int, ...]
    widths: Mapping[str, tuple[int, ...]]

    def words(self, name: str) -> int:
        """4-byte words of an input."""
        return self.rows * int(np.prod(self.widths[name]))

    @property
    def offsets(self) -> dict[str, int]:
        """First word of each input in the mapped block."""
        lines = [-(-self.words(name) // _LINE) * _LINE for name in self.widths]
        return dict(zip(self.widths, accumulate(lines, initial=_HEADER_WORDS), strict=False))

    @property
    def block(self) -> int:
        """Words of the mapped block."""
        name, first = list(self.offsets.items())[-1]
        return first + self.words(name)


class ActingGraph:
    """A captured acting program of one shape, ready to be called.

    Args:
        engine: whose parameters, signals and stream it uses.
        shape: rows, policy, inputs, outputs.
        declare: the forward.
        seed: of the policy's random numbers.
    """

    def __init__(self, engine: Engine, shape: Shape, declare: Values, seed: int) -> None:
        self._engine, self._shape = engine, shape
        builder, slots = _declare(engine, shape, declare, "fp32")
        if act_net.fold(builder.program) and engine.precision != "fp32":
            builder, slots = _declare(engine, shape, declare, engine.precision)
        self.plan = Plan(builder.program, engine.device, guard=engine._guard, base=engine.plan, share=_LEARNT)
        try:
            self.graph = self.plan.capture(stream=engine.stream)
            self._launch = self.graph.bind(engine.stream)
            self._map(slots)
            self.set_seed(seed)
            self._start(0)  # of zeros: the first launch of a graph takes longer than all others
            self._wait()
        except BaseException:
            self.close()
            raise

    def _map(self, slots: Sequence[int]) -> None:
        """Arrays over the mapped memory, made once: a call only fills and reads them."""
        shape, offsets = self._shape, self._shape.offsets
        words = self.plan.mapped("act.in").array.view(np.uint32)
        self._header = words[:_COUNTER_WORDS].view(np.uint64).data  # writing to it takes half as long
        self._signals = words[_COUNTER_WORDS : _COUNTER_WORDS + len(slots)].view(np.float32)
        self._slots = np.array(slots, np.intp)
        self._version = 0  # of the signals in the header; the host's begin with 1
        self._sequence = 0
        self._pending = False  # a launch whose result has not arrived
        self._inputs: dict[str, NDArray[np.float32]] = {}
        for name, width in shape.widths.items():
            part = words[offsets[name] : offsets[name] + shape.words(name)]
            self._inputs[name] = part.view(np.float32).reshape(shape.rows, *width)
        self._state = self._inputs.pop("state")

        self._out = self.plan.mapped("act.out").array.view(np.uint64)
        self._last = self._out[-1:].data
        self._seen = np.zeros_like(self._out)
        numbers = self._seen.view(np.uint32)
        self._tags, numbers = numbers[1::2], numbers[0::2]
        count = shape.rows * len(shape.branches)
        self._actions = numbers[:count].view(np.int32).reshape(shape.rows, -1)
        self._values = numbers[count:].view(np.float32).reshape(shape.rows, -1)

    def run(self, obs: NDArray[np.float32], extra: Mapping[str, NDArray[np.float32]], count: int) -> Result:
        """Call number `count`, counted from 0, on observations of a shape that this graph is for."""
        self.begin(obs, extra, count)
        return self.finish()

    def begin(self, obs: NDArray[np.float32], extra: Mapping[str, NDArray[np.float32]], count: int) -> None:
        """The first half of `run`: launch. What the host queues before `finish` runs on the device after it."""
        if obs.dtype is not FLOAT32:
            check_dtype("observations", obs)
        if self._pending:  # an interrupted call's launch may not have read its inputs yet
            self._engine.synchronize()
            self._pending = False
        if extra or self._inputs:
            self._write(extra)
        self._state[...] = obs
        self._start(count)

    def finish(self) -> Result:
        """The second half of `run`: wait for the result."""
        self._wait()
        actions = self._actions.copy()
        return (actions, self._values.copy()) if self._shape.values else actions

    def set_seed(self, seed: int) -> None:
        """Draw from the random numbers of this seed from now on."""
        self._header[_SEED] = seed

    def _write(self, extra: Mapping[str, NDArray[np.float32]]) -> None:
        array = None
        for name, place in self._inputs.items():
            array = extra.get(name)
            if array is None:
                break
            if not isinstance(array, np.ndarray) or (array.shape != place.shape and (1, *array.shape) != place.shape):
                given = f"shape {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
                raise ValueError(f"input '{name}' must be a float32 array {place.shape}, got {given}")
            if array.dtype is not FLOAT32:
                check_dtype(f"input '{name}'", array)
            place[...] = array
        if len(extra) != len(self._inputs) or array is None:
            raise ValueError(f"acting reads {['state', *self._inputs]}, got {['state', *extra]}")

    def _start(self, count: int) -> None:
        """Launch."""
        header, signals = self._header, self._engine.signals
        self._sequence += 1
        header[_COUNT], header[_SEQUENCE] = count, self._sequence
        version = signals._version  # read before the values: a later change is written by the next call
        if version != self._version:
            self._signals[:] = signals.current()[self._slots]
            self._version = version
        self._pending = True
        self._launch()

    def _wait(self) -> None:
        """Spin until every word in `_seen` is that of the newest launch."""
        tag = self._sequence & 0xFFFFFFFF
        expected = tag.to_bytes(4, "little") * len(self._tags)
        last, looks = self._last, 0
        while True:
            if last[0] >> 32 == tag and self._arrived(expected):
                self._pending = False
                return
            looks += 1
            if looks % _LOOKS == 0:
                # Raises what the device raises. Once it is idle, all that it wrote can be seen.
                if self._engine._idle() and not self._arrived(expected):
                    raise FxError("the acting graph has finished, but its result did not arrive in mapped memory")
                time.sleep(0)

    def _arrived(self, expected: bytes) -> bool:
        """Copy the words and look at the copy's tags: each word is written and read as a whole."""
        self._seen[...] = self._out
        return self._tags.tobytes() == expected

    def close(self) -> None:
        """Free the graph and its memory. Idempotent."""
        graph = self.__dict__.get("graph")
        if graph is not None:
            graph.close()
        self.plan.close()


def check_dtype(what: str, array: NDArray[Any]) -> None:
    """Raise ValueError unless the array is float32."""
    if array.dtype != FLOAT32:
        raise ValueError(f"{what} must be float32, got {array.dtype}; convert with .astype(np.float32)")


# -- declaration -------------------------------------------------------------------------------------------------


def _declare(engine: Engine, shape: Shape, declare: Values, precision: str) -> tuple[StepBuilder, list[int]]:
    """The program, and the slots of the signals that it reads."""
    builder = StepBuilder(
        engine.device.target, precision=precision, groups=engine.builder.signals.groups, evaluation=True
    )
    builder.signals.include("policy")
    program, offsets = builder.program, shape.offsets
    builder.counters = program.tensor("act.counters", (4,), np.uint64, arena="acting")
    block = program.tensor("act.in", (shape.block,), np.uint32, arena=MAPPED)
    host.read(program, block.flat(0, _COUNTER_WORDS), builder.counters)
    inputs = {}
    for name, width in shape.widths.items():
        inputs[name] = builder.input(name, (shape.rows, *width))
        host.read(program, block.flat(offsets[name], offsets[name] + shape.words(name)), inputs[name])

    q = declare(builder, inputs.pop("state"), inputs)
    if strange := sorted(set(builder.inputs) - set(shape.widths)):
        raise ProgramError(f"the forward reads inputs {strange}, which no call of acting gives; name them in extra=")
    _append_policy(builder, shape, q)
    slots = _read_signals(builder, engine, block)
    if not builder.reports:  # nothing to report, so nothing that a memset node would have to clear
        del program.storages["telemetry.values"]
    return builder, slots


def _append_policy(builder: StepBuilder, shape: Shape, q: Tensor) -> None:
    program = builder.program
    actions = program.tensor("act.actions", (shape.rows, len(shape.branches)), np.int32, arena="acting")
    count = actions.size
    out = program.tensor("act.out", (count + (q.size if shape.values else 0),), np.uint64, arena=MAPPED)
    report = policies.Report(
        tag=builder.counters.rows(_SEQUENCE, _SEQUENCE + 1),
        actions=out.rows(0, count),
        values=out.rows(count, out.size) if shape.values else None,
    )
    scalar = _SCALARS.get(shape.kind)
    policies.policy(
        program,
        q,
        actions,
        branches=shape.branches,
        kind=shape.kind,
        scalar=builder.signal(scalar) if scalar else None,
        counters=builder.counters if scalar else None,
        stream=ACT_STREAM,
        report=report,
    )


def _read_signals(builder: StepBuilder, engine: Engine, block: Tensor) -> list[int]:
    """The first record: the signals that the program reads, from the block to its snapshot; returns their slots."""
    program, storage = builder.program, builder.snapshot.storage
    views = [t for record in program.launches for t in record.reads if t.storage is storage]
    slots = sorted({slot for t in views for slot in range(t.offset, t.offset + t.size)})
    known = {s.index: s for s in engine.signals.map.slots.values()}
    wanted = {s.index: s.name for s in builder.signals.slots.values()}
    for slot in slots:
        if slot not in known:
            raise ProgramError(
                f"acting reads the signal '{wanted[slot]}', which the step does not have; include its part in the "
                "step's definition, for example step.signals.include('policy')"
            )
        if known[slot].device_owned:
            raise ProgramError(f"acting reads the signal '{known[slot].name}', which only a training step has")
    if slots:
        source = block.flat(_COUNTER_WORDS, _COUNTER_WORDS + len(slots))
        host.read(program, source, builder.snapshot, slots=slots, label="signals")
        program.launches.insert(0, program.launches.pop())
    return slots
