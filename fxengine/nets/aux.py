"""The auxiliary nets: a trunk that reads sg(h1), a next-bar head and a regime head (docs/step.md §2, §3)."""

from __future__ import annotations

from dataclasses import dataclass

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.signals import GROUPS
from fxengine.train.groups import ParamSpec


@dataclass(frozen=True)
class AuxHeads:
    """Outputs of the auxiliary nets.

    Attributes:
        h_aux: [B, Ao] output of the auxiliary trunk.
        next_bar: [B, 2] logits, 0 = down, 1 = up.
        regime: [B, R] logits.
    """

    h_aux: Tensor
    next_bar: Tensor
    regime: Tensor


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Parameter groups aux_trunk (8) and aux_heads (9)."""
    trunk = [
        *_layer("a1", config.aux_h, config.h1),
        *_layer("a2", config.aux_h, config.aux_h),
        *_layer("a3", config.aux_out, config.aux_h),
    ]
    heads = [
        *_layer("nb1", config.aux_head, config.aux_out),
        *_layer("nb2", 2, config.aux_head),
        *_layer("rg1", config.aux_head, config.aux_out),
        *_layer("rg2", config.regimes, config.aux_head),
    ]
    step.group("aux_trunk", GROUPS.index("aux_trunk"), trunk)
    step.group("aux_heads", GROUPS.index("aux_heads"), heads)


def forward(step: StepBuilder, h1: Tensor) -> AuxHeads:
    """Trunk and heads on h1 [B, H1]. h1's gradient is stopped: no kernel here has an input-gradient for it."""
    tape = step.tape
    a1 = tape.linear(tape.stop(h1), "w_a1", "b_a1", activation="elu", name="a1")
    a2 = tape.linear(a1, "w_a2", "b_a2", activation="elu", name="a2")
    h_aux = tape.linear(a2, "w_a3", "b_a3", name="h_aux")
    nb = tape.linear(h_aux, "w_nb1", "b_nb1", activation="elu", name="nb1")
    rg = tape.linear(h_aux, "w_rg1", "b_rg1", activation="elu", name="rg1")
    return AuxHeads(
        h_aux,
        next_bar=tape.linear(nb, "w_nb2", "b_nb2", name="nb2"),
        regime=tape.linear(rg, "w_rg2", "b_rg2", name="rg2"),
    )


def losses(step: StepBuilder, heads: AuxHeads, next_bar: Tensor, regime: Tensor) -> Tensor:
    """L_nb and L_regime over the valid rows of int32 labels [B]; returns the wire [B] = p_up - p_down."""
    wire = step.program.tensor("wire", (heads.next_bar.shape[0],))
    for name, logits, labels, weight, out in (
        ("nb", heads.next_bar, next_bar, "w_nb", wire),
        ("regime", heads.regime, regime, "w_regime", None),
    ):
        step.tape.crossentropy(
            logits,
            labels,
            weight=step.signal(weight),
            loss=f"L_{name}",
            accuracy=f"accuracy_{name}",
            wire=out,
            name=name,
        )
    return wire


def _layer(name: str, width: int, inputs: int) -> list[ParamSpec]:
    return [ParamSpec(f"w_{name}", (width, inputs)), ParamSpec(f"b_{name}", (width,))]
