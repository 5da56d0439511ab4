"""Forward records now, their backward records later, in reverse.

A tensor has a gradient buffer only if something upstream of it has parameters to train and someone asked for it: what
is not tracked gets no buffer and no kernel argument. That is how a stop-gradient is built here: structurally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fxengine.graphs import Program, ProgramError, Tensor
from fxengine.ops import crossentropy, linear
from fxengine.ops.linear import Activation
from fxengine.train.groups import ParamGroups


@dataclass
class _Gradient:
    """Gradient of a tracked tensor: dL/d(pre-activation), as every kernel of the project keeps it."""

    tensor: Tensor
    y: Tensor
    activation: Activation
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    written: bool = False


class Tape:
    """Ops on named tensors that know how to append their own backward.

    Args:
        program: receives the records.
        groups: parameters by name.
        report: receives what ops report: name, partial results, denominator (`StepBuilder.report_sum`).
        train: False builds the forward alone: no gradient is declared.
    """

    def __init__(
        self, program: Program, groups: ParamGroups, *, report: Callable[..., None], train: bool = True
    ) -> None:
        self.program = program
        self.groups = groups
        self.train = train
        self._report = report
        self._gradients: dict[Tensor, _Gradient] = {}
        self._backward: list[Callable[[], None]] = []
        self._written: set[str] = set()

    def stop(self, x: Tensor) -> Tensor:
        """sg(x): the same elements without a gradient. No kernel downstream gets an input-gradient argument."""
        return replace(x)

    def linear(self, x: Tensor, w: str, b: str | None = None, *, activation: Activation = "none", name: str) -> Tensor:
        """y[M, N] = act(x[M, K]·wᵀ + b) with parameters w [N, K] and b [N]; returns y.

        Backward: the weight and bias gradients, and x's gradient if x is tracked.
        """
        weight = self.groups[w]
        bias = self.groups[b] if b is not None else None
        y = self.program.tensor(name, (x.shape[0], weight.shape[0]))
        linear.forward(
            self.program,
            x,
            weight.value,
            bias.value if bias else None,
            y,
            activation=activation,
            label=f"{name}.fwd",
        )
        if self.train:
            self._track(y, activation)
            self._backward.append(lambda: self._linear_backward(x, w, b, y, name))
        return y

    def crossentropy(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        weight: Tensor,
        loss: str,
        accuracy: str | None = None,
        wire: Tensor | None = None,
        name: str,
    ) -> None:
        """Mean cross-entropy over the valid rows (label in [0, classes)), times the signal `weight` in the gradient.

        Reports the unweighted loss and the share of right rows under the given names; writes p_up - p_down to `wire`.
        """
        gradient = self._gradients.get(logits)
        partials = crossentropy.crossentropy(
            self.program,
            logits,
            labels,
            weight=weight,
            dlogits=gradient.tensor if gradient else None,
            wire=wire,
            name=name,
        )
        assert partials is not None  # labels were given
        self._report(loss, partials.losses, denominator=partials.valid)
        if accuracy is not None:
            self._report(accuracy, partials.correct, denominator=partials.valid)
        if gradient is not None:
            gradient.written = True

    def backward(self) -> None:
        """Append the backward of everything recorded so far, last op first.

        Raises:
            ProgramError: a parameter gets no gradient; such a parameter does not belong in a trained group.
        """
        for step in reversed(self._backward):
            step()
        self._backward.clear()
        missing = [p.name for p in self.groups.parameters if p.name not in self._written]
        if missing:
            raise ProgramError(
                f"parameters {missing} get no gradient from any loss; declare them with fixed() or use them in a loss"
            )

    # -- gradients -----------------------------------------------------------------------------------------------

    def _track(self, y: Tensor, activation: Activation) -> None:
        gradient = self.program.tensor(f"d.{y.name}", y.shape)
        self._gradients[y] = _Gradient(gradient, y, activation)

    def _linear_backward(self, x: Tensor, w: str, b: str | None, y: Tensor, name: str) -> None:
        dy = self._settle(y)
        if dy is None:
            return
        weight = self.groups[w]
        if x in self._gradients:
            self._gradients[x].pending.append((dy, weight.value))
        linear.backward_dw(
            self.program,
            dy,
            x,
            weight.grad,
            self.groups[b].grad if b is not None else None,
            accumulate=w in self._written,
            label=f"{name}.dw",
        )
        self._written.update(n for n in (w, b) if n is not None)

    def _settle(self, y: Tensor) -> Tensor | None:
        """y's gradient with all its contributions written, two sources to a launch; None if no loss depends on y."""
        gradient = self._gradients[y]
        while gradient.pending:
            sources, gradient.pending = gradient.pending[:2], gradient.pending[2:]
            paired = len(sources) == 2
            linear.backward_dx(
                self.program,
                (sources[0][0], sources[1][0]) if paired else sources[0][0],
                (sources[0][1], sources[1][1]) if paired else sources[0][1],
                gradient.tensor,
                x=gradient.y,
                activation=gradient.activation,
                accumulate=gradient.written,
                label=f"{y.name}.dx",
            )
            gradient.written = True
        return gradient.tensor if gradient.written else None
