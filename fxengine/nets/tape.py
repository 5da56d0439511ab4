"""Forward records now, their backward records later, in reverse.

A tensor has a gradient only if it is tracked, and a gradient buffer only if some loss reaches it: what is not tracked
gets no buffer and no kernel argument. That is how a stop-gradient is built here: structurally.

    y = tape.linear(x, "w", "b", activation="elu", name="y")       # appends the forward
    dy = tape.training.output(y)                                    # a loss writes here
    tape.backward()                                                 # appends the backward of everything
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from fxengine.graphs import Program, ProgramError, Tensor
from fxengine.ops import crossentropy, linear
from fxengine.ops.linear import Activation
from fxengine.ops.reduce import sum_partials
from fxengine.train.groups import ParamGroups

#: Most sources that one input-gradient record sums.
MAX_SOURCES = 16


@dataclass(frozen=True)
class _Source:
    """scale·dy·w, owed to a gradient; computed in the precision of the layer that it comes from."""

    dy: Tensor
    w: Tensor
    scale: Tensor | None
    precision: str | None


@dataclass
class _Gradient:
    """Gradient of a tracked tensor: dL/d(pre-activation), as every kernel of the project keeps it."""

    tensor: Tensor
    sources: list[_Source] = field(default_factory=list)
    written: bool = False


class Gradients:
    """One set of gradient buffers of a tape. Training has one; the decomposition has one per loss.

    Args:
        tape: the tape whose tensors the gradients belong to.
        prefix: begins the names of this set's buffers. Empty for training, whose parameter gradients are those of the
            groups; any other set has parameter gradients of its own.
        only: parameters whose gradients are wanted; None for all.
    """

    def __init__(self, tape: Tape, prefix: str = "", *, only: Collection[str] | None = None) -> None:
        self.prefix = prefix
        self._only = only
        self._tape = tape
        self._gradients: dict[Tensor, _Gradient] = {}
        self._parameters: dict[str, Tensor] = {}

    @property
    def is_training(self) -> bool:
        """Whether these are the gradients that the optimizer sees."""
        return not self.prefix

    def output(self, y: Tensor) -> Tensor:
        """The gradient of y for a loss to overwrite; y must be tracked and have no gradient yet."""
        gradient, accumulate = self.contribute(y)
        if accumulate:
            raise ProgramError(f"the gradient of {y} is written already; a loss would overwrite it")
        return gradient

    def adopt(self, y: Tensor, other: Gradients) -> None:
        """Read another set's gradient of y, which is complete, as this set's."""
        self._gradients[y] = _Gradient(other._gradients[y].tensor, written=True)

    def wants(self, parameter: str) -> bool:
        """Whether a parameter's gradient is to be computed."""
        return self._only is None or parameter in self._only

    def contribute(self, y: Tensor) -> tuple[Tensor, bool]:
        """The gradient of y, and whether to add to it (else overwrite). The caller does write it."""
        gradient = self._of(y)
        accumulate, gradient.written = gradient.written, True
        return gradient.tensor, accumulate

    def add_source(self, y: Tensor, dy: Tensor, w: Tensor, scale: Tensor | None, precision: str | None) -> None:
        """Owe scale·dy·w to the gradient of y; it is paid with all other sources when y's gradient is needed."""
        self._of(y).sources.append(_Source(dy, w, scale, precision))

    def settle(self, y: Tensor) -> Tensor | None:
        """y's gradient with everything that is owed to it; None if no loss reaches y."""
        gradient = self._gradients.get(y)
        if gradient is None:
            return None
        while gradient.sources:
            precision = gradient.sources[0].precision
            due = [s for s in gradient.sources if s.precision == precision][:MAX_SOURCES]
            gradient.sources = [s for s in gradient.sources if s not in due]
            activation = self._tape.activation(y)
            linear.backward_dx(
                self._tape.program,
                [s.dy for s in due],
                [s.w for s in due],
                gradient.tensor,
                scales=[s.scale for s in due],
                x=y if activation != "none" else None,
                activation=activation,
                accumulate=gradient.written,
                label=f"{self.prefix}{y.name}.dx",
                precision=precision,
                siblings=self._tape.siblings(y),
            )
            gradient.written = True
        return gradient.tensor

    def parameter(self, name: str) -> tuple[Tensor, bool]:
        """The gradient of a parameter, and whether to add to it (else overwrite). The caller does write it."""
        accumulate = name in self._parameters
        if not accumulate:
            own = self._tape.groups[name]
            self._parameters[name] = (
                own.grad if self.is_training else self._tape.program.tensor(f"{self.prefix}grad.{name}", own.shape)
            )
        return self._parameters[name], accumulate

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Gradients of the parameters that were reached."""
        return dict(self._parameters)

    def _of(self, y: Tensor) -> _Gradient:
        if y not in self._gradients:
            self._tape.activation(y)  # raises if y is not tracked
            padded = not y.contiguous
            gradient = self._tape.program.tensor(f"{self.prefix}d.{y.name}", y.shape, padded=padded)
            self._gradients[y] = _Gradient(gradient)
        return self._gradients[y]


#: Appends the backward of one op for one set of gradients.
Backward: TypeAlias = Callable[[Gradients], None]


class Tape:
    """Ops on named tensors that know how to append their own backward.

    Args:
        program: receives the records.
        groups: parameters by name.
        report: gives the telemetry value of a name (`StepBuilder.report`).
        train: False builds the forward alone: no gradient is declared.
    """

    def __init__(
        self, program: Program, groups: ParamGroups, *, report: Callable[[str], Tensor], train: bool = True
    ) -> None:
        self.program = program
        self.groups = groups
        self.train = train
        self.training = Gradients(self)
        self._report = report
        self._activations: dict[Tensor, Activation] = {}
        self._siblings: dict[Tensor, int] = {}
        self._ops: list[Backward] = []

    # -- tracking ------------------------------------------------------------------------------------------------

    def track(self, y: Tensor, activation: Activation = "none") -> Tensor:
        """Let y have a gradient; `activation` is the one that made it. Returns y."""
        if self.train:
            self._activations[y] = activation
        return y

    def tracked(self, y: Tensor) -> bool:
        """Whether y can have a gradient."""
        return y in self._activations

    def activation(self, y: Tensor) -> Activation:
        """The activation that made a tracked tensor."""
        if y not in self._activations:
            raise ProgramError(f"{y} has no gradient: nothing upstream of it is trained, or it was stopped")
        return self._activations[y]

    def siblings(self, y: Tensor) -> int | None:
        """Number of gradients like that of y that are made side by side; None if it is not known."""
        return self._siblings.get(y)

    def stop(self, x: Tensor) -> Tensor:
        """sg(x): the same elements without a gradient. No kernel downstream gets an input-gradient argument."""
        return replace(x)

    def record(self, backward: Backward) -> None:
        """Remember how the op just appended runs backward. Called by ops."""
        if self.train:
            self._ops.append(backward)

    def backward(self, gradients: Gradients | None = None) -> None:
        """Append the backward of every op for one set of gradients (default: training), last op first.

        Raises:
            ProgramError: in training, a parameter gets no gradient; it does not belong in a trained group then.
        """
        target = gradients or self.training
        for backward in reversed(self._ops):
            backward(target)
        missing = [p.name for p in self.groups.parameters if p.name not in target.parameters]
        if missing and target.is_training:
            raise ProgramError(
                f"parameters {missing} get no gradient from any loss; declare them with fixed() or use them in a loss"
            )

    # -- ops -----------------------------------------------------------------------------------------------------

    def linear(
        self,
        x: linear.Input,
        w: str,
        b: str | None = None,
        *,
        activation: Activation = "none",
        input_scale: Tensor | None = None,
        precision: str | None = None,
        y: Tensor | None = None,
        siblings: int | None = None,
        gradient_siblings: int | None = None,
        beside: tuple[int, int] | None = None,
        name: str,
    ) -> Tensor:
        """y[M, N] = act(x[M, K]·wᵀ + b) with parameters w [N, K] and b [N]; returns y.

        Args:
            x: [M, K], or a pair [M, K1], [M, K2] that is read side by side.
            w: name of the weight.
            b: name of the bias, or None.
            activation: applied to the result.
            input_scale: one float on the device that multiplies the gradient into x, not those of w and b.
            precision: of this layer's products, forward and backward, if not the program's.
            y: [M, N], what other records have made: only the backward is left.
            siblings: number of products like the forward's that run side by side, if it is known.
            gradient_siblings: number of gradients like that of y that are made side by side, if it is known.
            beside: columns and depth of the layer whose launch this small one is to share.
            name: of y.
        """
        weight, bias = self.groups[w], self.groups[b] if b is not None else None
        parts = x if isinstance(x, tuple) else (x,)
        if y is None:
            y = self.program.tensor(name, (parts[0].shape[0], weight.shape[0]), padded=True)
            linear.forward(
                self.program,
                x,
                weight.value,
                bias.value if bias else None,
                y,
                activation=activation,
                label=f"{name}.fwd",
                precision=precision,
                siblings=siblings,
                beside=beside,
            )

        def backward(gradients: Gradients) -> None:
            dy = gradients.settle(y)
            if dy is None:
                return
            first = 0
            for part in parts:
                last = first + part.shape[1]
                if self.tracked(part):
                    gradients.add_source(part, dy, weight.value.columns(first, last), input_scale, precision)
                first = last
            if not gradients.wants(w):
                return
            dw, accumulate = gradients.parameter(w)
            db = gradients.parameter(b)[0] if b is not None else None

            def add(x: linear.Input, to: Tensor, bias: Tensor | None, suffix: str = "") -> None:
                linear.backward_dw(
                    self.program,
                    dy,
                    x,
                    to,
                    bias,
                    accumulate=accumulate,
                    label=f"{gradients.prefix}{name}.dw{suffix}",
                    precision=precision,
                    outputs=self.groups.count,
                )

            if not isinstance(x, tuple) or not x[0].aligned or x[1].aligned:
                return add(x, dw, db)
            # A part of a few columns whose rows are not aligned would keep the other from tiles that ask for that.
            first = x[0].shape[1]
            add(x[0], dw.columns(0, first), db)
            add(x[1], dw.columns(first, dw.shape[1]), None, ".x2")

        self.record(backward)
        if gradient_siblings is not None:
            self._siblings[y] = gradient_siblings
        return self.track(y, activation)

    def crossentropy(
        self,
        logits: Tensor,
        labels: Tensor,
        *,
        weight: Tensor,
        loss: str,
        accuracy: str | None = None,
        name: str,
    ) -> None:
        """Mean cross-entropy over the valid rows (label in [0, classes)), times the signal `weight` in the gradient.

        Reports the unweighted loss and the share of right rows under the given names.
        """
        partials = crossentropy.crossentropy(
            self.program,
            logits,
            labels,
            weight=weight,
            dlogits=self.training.output(logits) if self.tracked(logits) else None,
            name=name,
        )
        assert partials is not None  # labels were given
        for value, found in ((loss, partials.losses), (accuracy, partials.correct)):
            if value is not None:
                sum_partials(self.program, found, self._report(value), denominator=partials.valid, label=value)
