"""The forward of a step over given rows, without training on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fxengine.graphs import Plan
from fxengine.nets.builder import StepBuilder

if TYPE_CHECKING:
    from fxengine.engine import Engine

#: Arenas that an evaluation shares with the step: what training leaves behind.
_STATE_ARENAS = ("params", "grads", "adam_m", "adam_v", "fixed", "signals", "targets", "spectral")


class Evaluation:
    """The forward of a step over given rows, with the parameters and signals of an engine."""

    def __init__(self, engine: Engine, definition: Callable[[StepBuilder], None]) -> None:
        self._engine = engine
        self._builder = StepBuilder(
            engine.device.target, precision=engine.precision, groups=engine.builder.signals.groups, evaluation=True
        )
        definition(self._builder)
        self._builder.finish()
        self._plan = Plan(self._builder.program, engine.device, base=engine.plan, share=_STATE_ARENAS)
        self._graph = self._plan.capture(stream=engine.stream)

    def run(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, float]:
        """Reported values of the rows `inputs`, by name. Waits.

        Raises:
            ValueError: other inputs than the step reads, or rows of another shape or dtype.
        """
        if set(inputs) != set(self._builder.inputs):
            raise ValueError(f"inputs {sorted(inputs)} given, the step reads {sorted(self._builder.inputs)}")
        for name, array in inputs.items():
            self._engine._write(self._plan.buffer(self._builder.inputs[name]), np.asarray(array))
        self._engine._write_signals(self._engine.plan)
        self._graph.launch(stream=self._engine.stream)
        values = self._engine._read(self._plan.buffer("telemetry.values")).view(np.float32)
        return {name: float(values[i]) for i, name in enumerate(self._builder.reports)}

    def close(self) -> None:
        """Free the graph and its memory. Idempotent."""
        self._graph.close()
        self._plan.close()
