"""The auxiliary nets: a trunk that reads sg(h1), a next-bar head and a regime head (docs/step.md §2, §3)."""

from __future__ import annotations

from dataclasses import dataclass

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import crossentropy, gate
from fxengine.ops.heads import Wire
from fxengine.train.groups import linear_specs


@dataclass(frozen=True)
class AuxHeads:
    """Outputs of the auxiliary nets.

    Attributes:
        hidden: [B, Hh], the next-bar head's hidden layer.
        next_bar: logits [B, 2] (0 = down, 1 = up); None where they come late and nobody asks for them.
        regime: logits [B, R]; None without a regime head.
    """

    hidden: Tensor
    next_bar: Tensor | None
    regime: Tensor | None


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Groups aux_trunk (8) and aux_heads (9). No target copies: every pass shares them."""
    trunk = [
        *linear_specs("a1", config.aux_h, config.h1),
        *linear_specs("a2", config.aux_h, config.aux_h),
        *linear_specs("a3", config.aux_out, config.aux_h),
    ]
    heads = []
    for head, classes in (("nb", 2), *((("rg", config.regimes),) if config.regimes else ())):
        heads += linear_specs(f"{head}1", config.aux_head, config.aux_out)
        heads += linear_specs(f"{head}2", classes, config.aux_head)
    step.group("aux_trunk", trunk)
    step.group("aux_heads", heads)


def forward(p: Pass, h1: Tensor, *, regime: bool = True, late: bool = False, wanted: bool = True) -> AuxHeads:
    """Trunk and heads on h1 [B, H1]. h1's gradient is stopped: no kernel here has an input gradient for it.

    Args:
        p: the pass.
        h1: [B, H1].
        regime: make the regime head too.
        late: leave the last layer of the next-bar head to who reads `late_wire`.
        wanted: somebody reads the late logits.
    """
    a1 = p.linear(p.tape.stop(h1), "a1", activation="elu", name="a1")
    a2 = p.linear(a1, "a2", activation="elu", name="a2")
    h_aux = p.linear(a2, "a3", name="h_aux")
    hidden = p.linear(h_aux, "nb1", activation="elu", name="nb1")
    next_bar = None
    if wanted or not late:
        next_bar = p.tensor("nb2", h1.shape[0], 2) if late else None
        next_bar = p.linear(hidden, "nb2", y=next_bar, name="nb2")
    if not regime:
        return AuxHeads(hidden, next_bar, None)
    second = p.linear(h_aux, "rg1", activation="elu", name="rg1")
    return AuxHeads(hidden, next_bar, p.linear(second, "rg2", name="rg2"))


def wire(p: Pass, heads: AuxHeads) -> Tensor:
    """p_up − p_down [B, 1] of the next-bar logits."""
    assert heads.next_bar is not None
    out = p.tensor("wire", heads.next_bar.shape[0], 1)
    crossentropy.crossentropy(p.program, heads.next_bar, wire=out, name=f"wire{p.suffix}")
    return _tracked(p, heads.next_bar, out)


def late_wire(p: Pass, heads: AuxHeads) -> Wire:
    """The same, to be made by the record that reads it, as are the logits."""
    out = None
    if heads.next_bar is not None:
        out = _tracked(p, heads.next_bar, p.tensor("wire", heads.next_bar.shape[0], 1))
    return Wire(heads.hidden, p.weight("w_nb2"), p.weight("b_nb2"), heads.next_bar, out)


def _tracked(p: Pass, next_bar: Tensor, out: Tensor) -> Tensor:
    """In training, what a Q head sends back over the wire is multiplied by alpha_grad and flows on into the logits."""
    if not p.trained:
        return out

    def backward(gradients: Gradients) -> None:
        if not gradients.is_training:  # the decomposition does not follow the wire into the auxiliary nets
            return
        dwire = gradients.settle(out)
        if dwire is None:
            return
        dlogits, _ = gradients.contribute(next_bar)  # the loss has written it
        gate.wire_backward(p.program, next_bar, dwire, dlogits, alpha=p.step.signal("alpha_grad"))

    p.tape.record(backward)
    return p.tape.track(out)


def losses(step: StepBuilder, heads: AuxHeads, next_bar: Tensor, regime: Tensor | None) -> None:
    """L_nb and L_regime over the valid rows of int32 labels [B].

    Args:
        step: the builder.
        heads: outputs of the pass at s.
        next_bar: labels of the next bar.
        regime: labels of the regime; None without a regime head.
    """
    assert heads.next_bar is not None
    parts = [("nb", heads.next_bar, next_bar), ("regime", heads.regime, regime)]
    for name, logits, labels in parts:
        if logits is not None and labels is not None:
            weight = step.signal(f"w_{name}")
            step.tape.crossentropy(
                logits, labels, weight=weight, loss=f"L_{name}", accuracy=f"accuracy_{name}", name=name
            )
