"""The batch of a step out of a replay: which record fills which input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import DTypeLike

from fxengine.graphs import ProgramError, Tensor
from fxengine.ops import priorities
from fxengine.ops import replay as ops

if TYPE_CHECKING:
    from fxengine.nets.builder import StepBuilder
    from fxengine.rl.replay import Replay

#: Philox stream of the batch indices.
BATCH_STREAM = 1
#: Inputs that are computed from the steps of a transition.
_COMPUTED = ("reward", "discount", "weight")


class Sampling:
    """Fills the inputs of a step from a replay, drawn anew in every replay of the graph.

    With the replay's n-step transitions: `state` and every other field are those of the first step, `next_state` and
    every field `next_<name>` those of the last one, `reward` and `discount` the n-step return and the factor of the
    value behind it (signal `gamma`), `weight` the importance weight: 1, or by signal `priority_beta` where the replay
    draws by priority. Outputs `replay.start` and `replay.end` (int32 [B]) say which rows were drawn.

    Args:
        step: the step; its tensors, signals and checkpoint get those of the replay.
        replay: what is stored.

    Attributes:
        stored: the replay's tensors.
    """

    def __init__(self, step: StepBuilder, replay: Replay) -> None:
        step.signals.include("replay")
        self.stored = replay.declare(step.program)
        step.persistent.update({tensor.name: tensor for tensor in self.stored.tensors})
        self._step = step
        self._drawn: ops.Sampled | None = None
        self._leaves: Tensor | None = None

    @property
    def serves(self) -> tuple[str, ...]:
        """Names of the inputs that it can fill."""
        return (*_COMPUTED, *(name for name in self.stored.columns if name not in ("reward", "done")))

    def input(self, name: str, shape: Sequence[int], dtype: DTypeLike) -> Tensor:
        """The input of this name, filled in every replay.

        Raises:
            ProgramError: the replay has no such field, or its rows are of another shape or dtype, or the batch is not
                that of the other inputs.
        """
        if name not in self.serves:
            raise ProgramError(f"input '{name}' is none of the replay's: it fills {', '.join(sorted(self.serves))}")
        field = None if name in _COMPUTED else self.stored.replay.stored[name]
        dims, served = (field.dims, field.format.served) if field else ((), np.dtype(np.float32))
        given = tuple(int(n) for n in shape)
        if given[1:] != dims or np.dtype(dtype) != served:
            raise ProgramError(
                f"input '{name}' has rows {np.dtype(dtype)} {given[1:]}, the replay fills {served} {dims}"
            )
        drawn = self._draw(given[0])
        if drawn.start.shape != given[:1]:
            raise ProgramError(f"input '{name}' has {given[0]} rows, the batch of the replay {drawn.start.shape[0]}")
        if field is None:
            tensor: Tensor = getattr(drawn, name)
            return tensor
        step, stored = self._step, self.stored
        tensor = step.program.tensor(name, shape, served, arena="inputs")
        ops.gather(
            step.program,
            stored.ring,
            stored.columns[name],
            tensor,
            counters=step.counters,
            stream=BATCH_STREAM,
            starts=drawn.start if stored.tree else None,
            at_end=name.startswith("next_"),
            label=f"gather.{name}",
        )
        return tensor

    def update(self, skip: Tensor) -> None:
        """Append the new priorities of the batch, if it is drawn by priority; `skip`: uint32 [1], leave them.

        Raises:
            ProgramError: no input reads the replay, or there is no output `td` [B] to take the priorities from.
        """
        if self._drawn is None:
            raise ProgramError(f"the step reads nothing of its replay, which fills {', '.join(sorted(self.serves))}")
        if self.stored.tree is None:
            return
        td = self._step.outputs.get("td")
        if td is None:
            raise ProgramError("a prioritized replay takes its priorities from the step's output 'td'; there is none")
        priorities.update(
            self._step.program,
            self.stored.tree,
            starts=self._drawn.start,
            td=td,
            alpha=self._step.signal("priority_alpha"),
            eps=self._step.signal("priority_eps"),
            skip=skip,
            label="priorities",
        )

    def _draw(self, batch: int) -> ops.Sampled:
        """The records that draw the batch; appended with its first input."""
        if self._drawn is not None:
            return self._drawn
        step, stored = self._step, self.stored
        rows = {
            name: step.program.tensor(f"replay.{name}", (batch,), np.int32, arena="inputs") for name in ("start", "end")
        }
        numbers = {name: step.program.tensor(f"replay.{name}", (batch,), arena="inputs") for name in _COMPUTED}
        self._drawn = ops.Sampled(**rows, **numbers)
        for name, tensor in rows.items():
            step.output(f"replay.{name}", tensor)
        if stored.tree is not None:
            self._leaves = step.program.tensor("replay.leaves", (batch,))
            priorities.sample(
                step.program,
                stored.tree,
                counters=step.counters,
                stream=BATCH_STREAM,
                starts=self._drawn.start,
                leaves=self._leaves,
                label="draw",
            )
        ops.sample(
            step.program,
            stored.ring,
            self._drawn,
            counters=step.counters,
            stream=BATCH_STREAM,
            gamma=step.signal("gamma"),
            drawn_by=self._leaves,
            beta=step.signal("priority_beta") if self._leaves else None,
            label="returns",
        )
        return self._drawn
