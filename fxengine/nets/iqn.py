"""Implicit quantile network: θ = lin(relu(lin(h2⊙φ))), φ = relu(lin(cos(π·i·τ))) (docs/step.md §2).

Where the fused kernels serve the device, the precision and the sizes, a network is one launch forward and one backward;
else it is made of separate layers. Which of both is a pure function of these three.
"""

from __future__ import annotations

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import iqn, iqn_fused, linear
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
    if _is_fused(p, config):
        return _fused(p, config, h2, tau)
    rows = tau.size
    cosines = p.tensor("cosines", rows, config.iqn_cos)
    iqn.cosines(p.program, tau, cosines, label=f"cosines{p.suffix}")
    phi = p.linear(cosines, "phi", activation="relu", name="phi")
    mixed = _mix(p, phi, h2)
    hidden = p.linear(mixed, "iq1", activation="relu", name="iq1")
    return p.linear(hidden, "iq2", name="theta")


def _is_fused(p: Pass, config: StepConfig) -> bool:
    """Whether the fused kernels serve both networks of the step, forward and backward."""
    sizes = iqn_fused.Sizes(config.iqn_cos, config.h2, config.iqn_h, sum(config.branches))
    served = (p.program.target, p.program.precision, sizes)
    return iqn_fused.fits(*served) and iqn_fused.fits_backward(*served, config.iqn_quantiles)


def _fused(p: Pass, config: StepConfig, h2: Tensor, tau: Tensor) -> Tensor:
    """The network in one launch, which the step's two networks share; backward in another."""
    weights = iqn_fused.Weights(*(p.weight(f"{kind}_{layer}") for layer in ("phi", "iq1", "iq2") for kind in "wb"))
    hidden = p.tensor("iq1", tau.size, config.iqn_h) if p.trained else None
    theta = p.tensor("theta", tau.size, sum(config.branches))
    share = tau.shape[1] / (config.iqn_quantiles + config.iqn_target_quantiles)
    iqn_fused.forward(p.program, tau, h2, weights, theta, hidden=hidden, share=share, label=f"{theta.name}.fwd")
    if hidden is None:
        return theta
    stored = hidden

    def backward(gradients: Gradients) -> None:
        dtheta = gradients.settle(theta)
        if dtheta is None:
            return
        wanted = None
        accumulate_gradients = False
        if gradients.wants("w_iq1"):
            reached = {
                name: gradients.parameter(name) for name in ("w_phi", "b_phi", "w_iq1", "b_iq1", "w_iq2", "b_iq2")
            }
            accumulate_gradients = reached["w_iq1"][1]
            wanted = iqn_fused.WeightGradients(*(reached[name][0] for name in ("w_phi", "b_phi", "w_iq1", "b_iq1")))
            linear.backward_dw(
                p.program,
                dtheta,
                stored,
                reached["w_iq2"][0],
                reached["b_iq2"][0],
                accumulate=accumulate_gradients,
                label=f"{gradients.prefix}theta.dw",
            )
        dh2, accumulate = gradients.contribute(h2)
        iqn_fused.backward(
            p.program,
            dtheta,
            tau,
            h2,
            weights,
            stored,
            dh2=dh2,
            weight=p.step.signal("w_iqn"),
            readiness=p.step.signal("iqn_readiness"),
            accumulate=accumulate,
            gradients=wanted,
            accumulate_gradients=accumulate_gradients,
            name=f"{gradients.prefix}iqn.bwd",
        )

    p.tape.record(backward)
    return p.tape.track(theta)


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
