"""The replay: what it stores, how steps come in from the device (`insert`) and from the host (`Memory`).

    replay = Replay(slots=4096, envs=64, fields={"state": Field(48), "actions": Field(3, "int32")}, n_step=3)
    engine = Engine(config, replay=replay)
    memory = Memory(engine)
    memory.add(state=s, actions=a, reward=r, next_state=s2, terminated=over, truncated=cut)
    engine.step()

A step of the engine draws its batch from the replay inside its graph; see `fxengine.nets.sampling` for its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.driver.errors import ClosedError
from fxengine.graphs import MAPPED, Plan, Program, ProgramError, Tensor
from fxengine.ops import insertion, priorities
from fxengine.ops import replay as ops
from fxengine.ops.insertion import Staging
from fxengine.ops.replay import ARENA, FORMATS, TRUNCATED, Column, Format, Ring
from fxengine.waiting import wait_for

if TYPE_CHECKING:
    from fxengine.engine import Engine

#: Steps that `Memory.add` may have under way before it waits for the oldest.
STAGING_ROWS = 16

# Every step has these; a specification does not name them.
_IMPLIED = ("next_state", "reward", "discount", "weight", "done", "terminated", "truncated")


@dataclass(frozen=True)
class Field:
    """One value of a step of one environment.

    Attributes:
        shape: extents, or a number for a vector; () for a scalar.
        dtype: `float32`, `int32`, `uint8` (a step reads scale * x as float32), `bfloat16` (given and read as float32).
        scale: factor of a uint8 field, such as 1 / 255.

    Raises:
        ValueError: an extent below 1, another dtype, or a factor that is not finite or not of a uint8 field.
    """

    shape: int | Sequence[int]
    dtype: str = "float32"
    scale: float = 1.0

    def __post_init__(self) -> None:
        shape = (self.shape,) if isinstance(self.shape, int) else tuple(int(n) for n in self.shape)
        object.__setattr__(self, "shape", shape)
        if any(n < 1 for n in shape):
            raise ValueError(f"a field has extents of at least 1, got shape {shape}")
        if self.dtype not in FORMATS:
            raise ValueError(f"a field is stored as {', '.join(FORMATS)}; got {self.dtype!r}")
        if not math.isfinite(self.scale) or (self.scale != 1.0 and self.dtype != "uint8"):
            raise ValueError(f"scale = {self.scale} of a {self.dtype} field; uint8 fields can have one, finite")

    @property
    def dims(self) -> tuple[int, ...]:
        """The extents."""
        assert isinstance(self.shape, tuple)
        return self.shape

    @property
    def width(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def format(self) -> Format:
        """How it is stored."""
        return FORMATS[self.dtype]


@dataclass(frozen=True)
class Replay:
    """What a replay stores and how a step draws from it.

    Beside its fields a step of an environment has next_state (the observation that followed, also where the episode was
    truncated; stored like state), reward, terminated and truncated. A field `next_<name>` belongs to the step's end, as
    next_state does: a transition of several steps takes it from its last one.

    Attributes:
        slots: steps that are kept of each environment; the oldest makes room.
        envs: environments that step together.
        fields: `state`, and whatever else a step is to read (`actions`, labels, ...).
        n_step: most steps that a transition spans, 1 to slots.
        prioritized: draw by priority (the step's output `td`) instead of uniformly.

    Raises:
        ValueError: a number is out of range, `state` is missing, or a name is taken or no identifier.
    """

    slots: int
    envs: int
    fields: Mapping[str, Field]
    n_step: int = 1
    prioritized: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", dict(self.fields))
        if self.slots < 1 or self.envs < 1 or self.capacity >= 2**31:
            raise ValueError(
                f"a replay has at least one slot and environment and fewer than 2**31 transitions, "
                f"got slots = {self.slots}, envs = {self.envs}"
            )
        if not 1 <= self.n_step <= self.slots:
            raise ValueError(f"n_step must be between 1 and slots = {self.slots}, got {self.n_step}")
        if "state" not in self.fields:
            raise ValueError(f"a replay needs a field 'state', got {sorted(self.fields)}")
        for name, field in self.fields.items():
            if name in _IMPLIED or not name.isidentifier():
                raise ValueError(f"field '{name}': names are identifiers, and none of {', '.join(_IMPLIED)}")
            if not isinstance(field, Field):
                raise ValueError(f"field '{name}' must be a Field, got {field!r}")

    @property
    def capacity(self) -> int:
        """Transitions that it holds when it is full."""
        return self.slots * self.envs

    @property
    def stored(self) -> dict[str, Field]:
        """Every field that is stored: those given, next_state, reward, and done (bit 0 terminated, bit 1 truncated)."""
        implied = {"next_state": self.fields["state"], "reward": Field(()), "done": Field((), "int32")}
        return {**self.fields, **implied}

    def declare(self, program: Program) -> Stored:
        """Declare the tensors in a program, in arena `replay`, all undefined until the engine has zeroed them.

        Any program that declares them and is planned with `Plan(program, device, base=engine.plan, share=("replay",))`
        works on the engine's replay.
        """
        columns = {
            name: ops.column(
                program, f"replay.field.{name}", self.slots, self.envs, field.width, field.format, scale=field.scale
            )
            for name, field in self.stored.items()
        }
        counters = program.tensor("replay.counters", (2,), np.uint64, arena=ARENA)
        ring = Ring(counters, columns["reward"].data, columns["done"].data, self.n_step)
        tree = (
            priorities.tree(program, self.capacity, prefix="replay.", n_step=self.n_step) if self.prioritized else None
        )
        return Stored(self, columns, ring, tree)


@dataclass(frozen=True)
class Stored:
    """A replay's tensors in one program.

    Attributes:
        replay: what it stores.
        columns: the fields by name, those of `Replay.stored`.
        ring: how far it is filled.
        tree: priorities, or None where it draws uniformly.
    """

    replay: Replay
    columns: Mapping[str, Column]
    ring: Ring
    tree: priorities.Tree | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them: what a checkpoint holds."""
        tree = (self.tree.leaves, self.tree.sums, self.tree.maximum) if self.tree else ()
        return (self.ring.counters, *tree, *(column.data for column in self.columns.values()))


def insert(program: Program, stored: Stored, sources: Mapping[str, Tensor], *, staging: Staging | None = None) -> None:
    """Append the insertion of one step of all environments. May be appended several times, for several steps.

    Who launches the program tells the engine: `engine.inserted += 1` for each insertion in it.

    Args:
        program: program to append to.
        stored: the replay as this program declared it.
        sources: for every field of `Replay.stored` a tensor [envs, *shape] of the dtype that the field takes: float32
            for bfloat16, int32 for `done` (bit 0 terminated, bit 1 truncated), else its own.
        staging: where `sources` are the tensors of a staging ring, the ring.

    Raises:
        ProgramError: a source is missing or unknown, or has another shape or dtype.
    """
    expected = stored.replay.stored
    if set(sources) != set(expected):
        raise ProgramError(f"a step has the fields {sorted(expected)}, got {sorted(sources)}")
    if staging is None:
        for name, field in expected.items():
            shape = (stored.replay.envs, *field.dims)
            if sources[name].shape != shape or sources[name].dtype != field.format.given:
                raise ProgramError(
                    f"'{name}' of a step is {field.format.given} {shape}, "
                    f"got {sources[name].dtype} {sources[name].shape}"
                )
    for name, column in stored.columns.items():
        insertion.insert(program, stored.ring, column, sources[name], staging=staging, label=f"insert.{name}")
    if stored.tree is not None:
        priorities.insert(program, stored.tree, stored.ring, label="insert.priorities")
    insertion.advance(program, stored.ring, staging=staging, label="insert.advance")


class Memory:
    """The host's way into an engine's replay: `add` hands over one step of all environments and does not wait for it.

    A step is written to a row of a ring of mapped-pinned memory, from where a captured graph takes it, in order with
    the engine's steps. Not to be used from several threads at once.

    Args:
        engine: made with `replay=`; stays in use as long as this.

    Raises:
        ValueError: the engine has no replay.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.replay is None:
            raise ValueError("the engine has no replay; make it with Engine(..., replay=Replay(...))")
        self._engine = engine
        self._replay = engine.replay
        self._closed = False
        self._launched = 0
        self._read = 0
        flags = {name: (np.dtype(np.bool_), (self._replay.envs,)) for name in ("terminated", "truncated")}
        fields = {
            name: (field.format.given, (self._replay.envs, *field.dims))
            for name, field in self._replay.stored.items()
            if name != "done"
        }
        self._expected = {**fields, **flags}
        self._quick = [(name, dtype, shape) for name, (dtype, shape) in self._expected.items()]
        self._quiet = bytes(self._replay.envs)  # of flags where no episode ends
        self._build()

    def _build(self) -> None:
        engine, program = self._engine, Program(self._engine.device.target)
        stored = self._replay.declare(program)
        turn = program.tensor("memory.turn", (1,), np.uint64, arena="memory", data=np.zeros(1, np.uint64))
        head = program.tensor("memory.head", (1,), np.uint64, arena=MAPPED)
        sources = {
            name: program.tensor(
                f"memory.{name}", (STAGING_ROWS, *column.data.shape[1:]), column.format.given, arena=MAPPED
            )
            for name, column in stored.columns.items()
        }
        insert(program, stored, sources, staging=Staging(turn, head, STAGING_ROWS))
        self._plan = Plan(program, engine.device, base=engine.plan, share=(ARENA,))
        self._graph = self._plan.capture(stream=engine.stream)
        self._launch = self._graph.bind(engine.stream)
        self._head = self._plan.mapped("memory.head").array.view(np.uint64)
        rows: dict[str, list[NDArray[Any]]] = {}
        for name, source in sources.items():
            ring = self._plan.mapped(source.name).array.view(source.dtype).reshape(source.shape)
            width, shape = stored.columns[name].width, (source.shape[1], *self._replay.stored[name].dims)
            # Views without the padding, of the shape of the field: splitting the last axis copies nothing.
            rows[name] = [(row if row.ndim == 1 else row[:, :width]).reshape(shape) for row in ring]
        self._done = rows.pop("done")
        self._ended = [True] * STAGING_ROWS  # whether a row of `_done` may hold anything but zeros
        self._rows = list(zip(*(rows[name] for name in self._expected if name in rows), strict=True))

    def add(self, **step: ArrayLike) -> None:
        """Insert one step of all environments, behind everything that the engine has launched and before what follows.

        Waits only when `STAGING_ROWS` insertions are under way.

        Args:
            step: [envs, ...] for every field, next_state (also where the episode was truncated: what would have
                followed, not the first state of the next episode) and reward, of the dtype of the field, float32 for
                bfloat16; terminated and truncated, bool [envs].

        Raises:
            ValueError: an array is missing, unknown, or of another shape or dtype; nothing is inserted then.
            ClosedError: the engine or this memory is closed.
            CudaError: an earlier launch failed, or this one was refused.
        """
        self._check_open()
        *fields, terminated, truncated = self._checked(step)
        self._insert(fields, terminated, truncated)

    def bind(self, **step: NDArray[Any]) -> Callable[[], None]:
        """A function that inserts what these arrays hold when it is called: `add` for a loop over the same arrays.

        They are checked here, once. Their contents may change, their shapes and dtypes may not.

        Args:
            step: NumPy arrays, as `add` takes them.

        Raises:
            ValueError: an array is missing, unknown, of another shape or dtype, or no NumPy array.
        """
        *fields, terminated, truncated = arrays = self._checked(step)
        if copies := [name for name, array in zip(self._expected, arrays, strict=True) if array is not step[name]]:
            raise ValueError(f"only NumPy arrays can be bound; {', '.join(map(repr, copies))} would be a copy")
        return partial(self._insert, fields, terminated, truncated)

    def _insert(self, fields: list[NDArray[Any]], terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """`add` of arrays that fit, in the order of `_expected`."""
        self._check_open()
        launched = self._launched
        if launched - self._read >= STAGING_ROWS:
            self._wait(launched - STAGING_ROWS + 1)
        row = launched % STAGING_ROWS
        for i, target in enumerate(self._rows[row]):
            target[...] = fields[i]
        # Looking at bytes takes a tenth of what arithmetic on a few flags does, and most often no episode ends.
        cut = truncated.tobytes() != self._quiet
        ends = cut or terminated.tobytes() != self._quiet
        if ends or self._ended[row]:
            self._ended[row] = True
            done = self._done[row]
            done[...] = terminated  # bit 0
            if cut:
                done[truncated] |= TRUNCATED
            self._ended[row] = ends
        try:
            self._launch()
            self._launched += 1
            self._engine.inserted += 1
        except BaseException:  # an interrupt may come between the launch and its count
            self._recount()
            raise

    def _check_open(self) -> None:
        if self._closed or self._engine._closed:
            raise ClosedError("the memory is closed" if self._closed else "the engine is closed")

    def _recount(self) -> None:
        """Take the number of insertions from the device. Waits."""
        self._engine.recount()
        self._launched = self._read = int(self._head[0])

    def __len__(self) -> int:
        """Transitions that the replay holds, counting the insertions under way."""
        return min(self._engine.inserted, self._replay.slots) * self._replay.envs

    @property
    def filled(self) -> float:
        """Share of the replay that is filled, from 0.0 to 1.0."""
        return len(self) / self._replay.capacity

    def _checked(self, step: dict[str, Any]) -> list[NDArray[Any]]:
        """The arrays of a step, which fit, in the order of `_expected`. Most often they do, and nothing is made."""
        if len(step) == len(self._quick):
            found = []
            for name, dtype, shape in self._quick:
                array = step.get(name)
                if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                    break
                found.append(array)
            else:
                return found
        if set(step) != set(self._expected):
            raise ValueError(f"a step consists of {sorted(self._expected)}, got {sorted(step)}")
        arrays = {name: np.asarray(value) for name, value in step.items()}
        problems = [
            f"'{name}' is {dtype} {shape}, got {arrays[name].dtype} {arrays[name].shape}"
            for name, (dtype, shape) in self._expected.items()
            if (arrays[name].dtype, arrays[name].shape) != (dtype, shape)
        ]
        if problems:
            raise ValueError("the step does not fit the replay: " + "; ".join(problems))
        return [arrays[name] for name in self._expected]

    def _wait(self, needed: int) -> None:
        """Until so many rows of the staging ring have been read."""
        self._read = wait_for(
            needed,
            lambda: int(self._head[0]),
            self._engine._idle,
            lambda found: RuntimeError(f"the device is idle but has read {found} steps, {needed} expected"),
        )

    def close(self) -> None:
        """Free the staging ring and the graph; the replay stays. Idempotent."""
        self._closed = True
        self._graph.close()
        self._plan.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
