"""One pass through the networks: which weights, and whether a gradient will be asked for.

The step runs its nets up to three times: the online networks at s (trained), the online networks at s' (greedy actions,
no gradient) and the target networks at s'. Every net is written once, against a `Pass`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from fxengine.graphs import Program, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.tape import Tape
from fxengine.ops import linear
from fxengine.ops.linear import Activation


@dataclass(frozen=True)
class Pass:
    """Where a net takes its weights from and what becomes of its activations.

    Attributes:
        step: the builder.
        suffix: ends the names of the pass's tensors.
        target: read the target copies where a parameter has one.
        trained: record the backward.
    """

    step: StepBuilder
    suffix: str = ""
    target: bool = False
    trained: bool = False

    @property
    def program(self) -> Program:
        """The program that receives the records."""
        return self.step.program

    @property
    def passes(self) -> int:
        """Passes of the step that run side by side."""
        return 3 if self.step.train else 1

    @property
    def tape(self) -> Tape:
        """The tape of the step."""
        return self.step.tape

    def weight(self, name: str) -> Tensor:
        """A parameter as this pass sees it. The auxiliary nets have no target copy: all passes share them."""
        if self.target and name in self.step.target_parameters:
            return self.step.target_parameters[name]
        return self.tape.groups[name].value

    def tensor(self, name: str, *shape: int, dtype: DTypeLike = np.float32, padded: bool = True) -> Tensor:
        """A new activation of the pass, its rows `padded` as `Program.tensor` says."""
        return self.program.tensor(name + self.suffix, shape, dtype, padded=padded)

    def linear(
        self,
        x: linear.Input,
        layer: str,
        *,
        activation: Activation = "none",
        bias: bool = True,
        input_scale: Tensor | None = None,
        precision: str | None = None,
        y: Tensor | None = None,
        siblings: int | None = None,
        beside: tuple[int, int] | None = None,
        name: str,
    ) -> Tensor:
        """y = act(x·w_layerᵀ + b_layer); see `Tape.linear`. With `y`, other records make the layer.

        `siblings`: number of layers like this one that run side by side in the pass, if it is known. `beside`: columns
        and depth of the layer whose launch this small one is to share.
        """
        w, b = f"w_{layer}", f"b_{layer}" if bias else None
        full = name + self.suffix
        if self.trained:
            return self.tape.linear(
                x,
                w,
                b,
                activation=activation,
                input_scale=input_scale,
                precision=precision,
                y=y,
                siblings=self._all(siblings),
                gradient_siblings=siblings,
                beside=beside,
                name=full,
            )
        if y is not None:
            return y
        weight = self.weight(w)
        rows = (x[0] if isinstance(x, tuple) else x).shape[0]
        y = self.tensor(name, rows, weight.shape[0])
        linear.forward(
            self.program,
            x,
            weight,
            self.weight(b) if b else None,
            y,
            activation=activation,
            label=f"{full}.fwd",
            precision=precision,
            siblings=self._all(siblings),
            beside=beside,
        )
        return y

    def begin_linear(self, x: Tensor, layer: str, *, siblings: int | None = None, name: str) -> tuple[Tensor, Tensor]:
        """A layer's product with the first columns of its input, x, and the bias; no activation.

        Returns it and the weights of the other columns. Who makes those finishes it, in place, and
        `linear(..., y=<the product>)` then stands for the whole layer.
        """
        weight, known = self.weight(f"w_{layer}"), x.shape[1]
        y = self.tensor(name, x.shape[0], weight.shape[0])
        bias, label = self.weight(f"b_{layer}"), f"{name}{self.suffix}.fwd"
        columns = weight.columns(0, known)
        linear.forward(self.program, x, columns, bias, y, siblings=self._all(siblings), label=label)
        return y, weight.columns(known, weight.shape[1])

    def _all(self, siblings: int | None) -> int | None:
        """Of all passes, from those of this one."""
        return siblings * self.passes if siblings else None
