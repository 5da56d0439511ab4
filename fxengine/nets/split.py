"""The gradient decomposition of the specified step: one backward per loss (docs/step.md §7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fxengine.config import StepConfig
from fxengine.graphs import CONSTANTS, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.tape import Gradients
from fxengine.train.decomposition import COMPONENTS, SLICES, slice_norm, slice_partials, value_name

#: Telemetry value that is 1 in a step that was decomposed.
FLAG = "decomposed"


def declare(step: StepBuilder) -> dict[str, Tensor]:
    """Telemetry values of the decomposition, by name; they read 0 in a step without it."""
    names = [value_name(component, part) for component in COMPONENTS for part in SLICES]
    return {name: step.report(name) for name in (*names, FLAG)}


class Split:
    """Backward and norms of single losses.

    Args:
        step: the builder of the decomposing variant.
        config: the configuration.
        values: telemetry values, from `declare`.
    """

    def __init__(self, step: StepBuilder, config: StepConfig, values: dict[str, Tensor]) -> None:
        self._step = step
        self._values = values
        parameters = {group.name: [p.name for p in group.parameters] for group in step.groups}
        self._slices = {
            "magnitude": _branch(1) if len(config.branches) > 1 else (),
            "direction": _branch(0),
            "trunk": tuple(parameters["trunk"]),
        }
        one = step.program.tensor("split.one", (1,), np.float64, arena=CONSTANTS, data=np.ones(1))
        slice_norm(step.program, one, values[FLAG], label=FLAG)

    def head(self, component: str, y: Tensor) -> None:
        """A loss that alone writes the gradient of y: training's gradient of y is its gradient."""
        gradients = self._gradients(component)
        gradients.adopt(y, self._step.tape.training)
        self._finish(component, gradients, {component: None})

    def losses(self, component: str, write: Callable[[Gradients], None], rows: dict[str, Tensor | None]) -> None:
        """A loss that shares the gradients it writes to.

        Args:
            component: names the set of gradients.
            write: appends the records that write the loss's own gradients into a set.
            rows: rows of the decomposition, each with the scale it applies to the norms.
        """
        gradients = self._gradients(component)
        write(gradients)
        self._finish(component, gradients, rows)

    def _gradients(self, component: str) -> Gradients:
        wanted = {name for names in self._slices.values() for name in names}
        return Gradients(self._step.tape, f"split.{component}.", only=wanted)

    def _finish(self, component: str, gradients: Gradients, rows: dict[str, Tensor | None]) -> None:
        self._step.tape.backward(gradients)
        for part, names in self._slices.items():
            reached = [gradients.parameters[name] for name in names if name in gradients.parameters]
            if not reached:
                continue
            partials = slice_partials(self._step.program, reached, label=f"split.{component}.{part}")
            for row, scale in rows.items():
                name = value_name(row, part)
                slice_norm(self._step.program, partials, self._values[name], scale=scale, label=name)


def _branch(d: int) -> tuple[str, ...]:
    return (f"w_b{d}fc", f"b_b{d}fc", f"w_b{d}out", f"b_b{d}out")
