"""Implicit quantile network: θ = lin(relu(lin(h2⊙φ))), φ = relu(lin(cos(π·i·τ))) (docs/step.md §2)."""

from __future__ import annotations

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import iqn
from fxengine.train.groups import linear_specs


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Group iqn (3), with a target copy."""
    specs = [
        *linear_specs("phi", config.h2, config.iqn_cos),
        *linear_specs("iq1", config.iqn_h, config.h2),
        *linear_specs("iq2", sum(config.branches), config.iqn_h),
    ]
    step.group("iqn", specs, target=True)


def forward(p: Pass, config: StepConfig, h2: Tensor, tau: Tensor) -> Tensor:
    """θ [B·N, Σn_d] of h2 [B, H2] at the fractions τ [B, N]."""
    rows = tau.size
    cosines = p.tensor("cosines", rows, config.iqn_cos)
    iqn.cosines(p.program, tau, cosines, label=f"cosines{p.suffix}")
    phi = p.linear(cosines, "phi", activation="relu", name="phi")
    mixed = _mix(p, phi, h2)
    hidden = p.linear(mixed, "iq1", activation="relu", name="iq1")
    return p.linear(hidden, "iq2", name="theta")


def _mix(p: Pass, phi: Tensor, h2: Tensor) -> Tensor:
    """h2⊙φ, each row of h2 met by its N rows of φ. The gradient into h2 is scaled by w_iqn·iqn_readiness."""
    mixed = p.tensor("mixed", *phi.shape)
    iqn.mix(p.program, phi, h2, mixed, label=f"mixed{p.suffix}")
    if not p.trained:
        return mixed

    def backward(gradients: Gradients) -> None:
        dmixed = gradients.settle(mixed)
        if dmixed is None:
            return
        dh2, accumulate = gradients.contribute(h2)
        iqn.mix_backward(
            p.program,
            dmixed,
            phi,
            h2,
            gradients.output(phi),
            dh2=dh2,
            weight=p.step.signal("w_iqn"),
            readiness=p.step.signal("iqn_readiness"),
            accumulate=accumulate,
            label=f"{gradients.prefix}mixed.dx",
        )

    p.tape.record(backward)
    return p.tape.track(mixed)
