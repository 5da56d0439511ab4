"""The auxiliary nets: a trunk that reads sg(h1), a next-bar head and a regime head (docs/step.md §2, §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import crossentropy, gate
from fxengine.ops.finish import Unfinished
from fxengine.train.groups import linear_specs


@dataclass(frozen=True)
class AuxHeads:
    """Outputs of the auxiliary nets: next-bar logits [B, 2] (0 = down, 1 = up) and regime logits [B, R]."""

    next_bar: Tensor
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


def forward(p: Pass, h1: Tensor, *, regime: bool = True) -> AuxHeads:
    """Trunk and heads on h1 [B, H1]. h1's gradient is stopped: no kernel here has an input gradient for it."""
    a1 = p.linear(p.tape.stop(h1), "a1", activation="elu", name="a1")
    a2 = p.linear(a1, "a2", activation="elu", name="a2")
    h_aux = p.linear(a2, "a3", name="h_aux")
    hidden = p.linear(h_aux, "nb1", activation="elu", name="nb1")
    next_bar = p.linear(hidden, "nb2", name="nb2")
    if not regime:
        return AuxHeads(next_bar, None)
    hidden = p.linear(h_aux, "rg1", activation="elu", name="rg1")
    return AuxHeads(next_bar, p.linear(hidden, "rg2", name="rg2"))


def wire(p: Pass, next_bar: Tensor, *, finishes: Sequence[Unfinished] = ()) -> Tensor:
    """p_up − p_down [B, 1] of next-bar logits, without labels: the wire at s'. Finishes layers that read it."""
    out = p.tensor("wire", next_bar.shape[0], 1)
    crossentropy.crossentropy(p.program, next_bar, wire=out, finishes=finishes, name=f"wire{p.suffix}")
    return out


def losses(
    step: StepBuilder,
    heads: AuxHeads,
    next_bar: Tensor,
    regime: Tensor | None,
    *,
    gated: bool,
    finishes: Sequence[Unfinished] = (),
) -> Tensor:
    """L_nb and L_regime over the valid rows of int32 labels [B]; returns the wire [B, 1] = p_up − p_down.

    Args:
        step: the builder.
        heads: outputs of the trained pass.
        next_bar: labels of the next bar.
        regime: labels of the regime; None without a regime head.
        gated: a Q head reads the wire: what it sends back is multiplied by alpha_grad and flows on into the logits.
        finishes: layers that read the wire.
    """
    tape = step.tape
    out = step.program.tensor("wire", (heads.next_bar.shape[0], 1))
    tape.crossentropy(
        heads.next_bar,
        next_bar,
        weight=step.signal("w_nb"),
        loss="L_nb",
        accuracy="accuracy_nb",
        wire=out,
        finishes=finishes,
        name="nb",
    )
    if heads.regime is not None and regime is not None:
        weight = step.signal("w_regime")
        tape.crossentropy(
            heads.regime, regime, weight=weight, loss="L_regime", accuracy="accuracy_regime", name="regime"
        )
    if not gated:
        return out

    def backward(gradients: Gradients) -> None:
        if not gradients.is_training:  # the decomposition does not follow the wire into the auxiliary nets
            return
        dwire = gradients.settle(out)
        if dwire is None:
            return
        dlogits, _ = gradients.contribute(heads.next_bar)  # the loss has written it
        gate.wire_backward(step.program, heads.next_bar, dwire, dlogits, alpha=step.signal("alpha_grad"))

    tape.record(backward)
    return tape.track(out)
