"""Implicit quantile network: θ = lin(relu(lin(h⊙φ))), φ = relu(lin(cos(π·i·τ))) (docs/step.md §2).

Where the fused kernels serve the device, the precision and the sizes, a network is one launch forward and one backward,
or two at small batch; else it is made of separate layers. Which of them is a pure function of these and the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fxengine.config import StepConfig
from fxengine.graphs import CONSTANTS, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import iqn, iqn_fused, linear
from fxengine.ops.checks import all_aligned
from fxengine.train.groups import ParamSpec, linear_specs

#: Two floats on the device whose product multiplies the gradient into h.
Scale: TypeAlias = "tuple[Tensor, Tensor]"


@dataclass(frozen=True)
class Network:
    """Shape of a quantile network.

    Attributes:
        sizes: of its layers.
        quantiles: fractions N per row of the pass that is trained.
        others: fractions per row of the pass that runs beside it, N'; 0: there is none.
    """

    sizes: iqn_fused.Sizes
    quantiles: int
    others: int = 0


def network(config: StepConfig) -> Network:
    """The quantile network of the specified step."""
    sizes = iqn_fused.Sizes(config.iqn_cos, config.h2, config.iqn_h, sum(config.branches))
    return Network(sizes, config.iqn_quantiles, config.iqn_target_quantiles)


def specs(sizes: iqn_fused.Sizes, *, random_bias: bool = False) -> list[ParamSpec]:
    """Parameters of a quantile network: layers phi, iq1, iq2."""
    return [
        *linear_specs("phi", sizes.features, sizes.cosines, random_bias=random_bias),
        *linear_specs("iq1", sizes.width, sizes.features, random_bias=random_bias),
        *linear_specs("iq2", sizes.outputs, sizes.width, random_bias=random_bias),
    ]


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Group iqn (3), with a target copy."""
    step.group("iqn", specs(network(config).sizes), target=True)


def forward(p: Pass, config: StepConfig, h2: Tensor, tau: Tensor) -> Tensor:
    """θ of the specified step, whose gradient into h2 is scaled by w_iqn·iqn_readiness."""
    scale = (p.step.signal("w_iqn"), p.step.signal("iqn_readiness")) if p.trained else None
    return quantiles(p, network(config), h2, tau, scale=scale)


def quantiles(p: Pass, net: Network, h: Tensor, tau: Tensor, *, scale: Scale | None = None) -> Tensor:
    """θ [B·N, outputs] of h [B, H] at the fractions τ [B, N]; row b·N + i is quantile i of row b.

    Args:
        p: the pass; its step has the parameters `specs`.
        net: the network.
        h: features of the state. If they are trained they get a gradient.
        tau: quantile fractions.
        scale: multiplies that gradient; None: it flows at full scale.
    """
    if p.trained and scale is None:
        one = p.program.tensor(f"theta{p.suffix}.one", (1,), arena=CONSTANTS, data=np.ones(1, np.float32))
        scale = one, one
    if _is_fused(p, net):
        return _fused(p, net, h, tau, scale)
    cosines = p.tensor("cosines", tau.size, net.sizes.cosines)
    iqn.cosines(p.program, tau, cosines, label=f"cosines{p.suffix}")
    phi = p.linear(cosines, "phi", activation="relu", name="phi")
    mixed = _mix(p, phi, h, scale)
    hidden = p.linear(mixed, "iq1", activation="relu", name="iq1")
    return p.linear(hidden, "iq2", name="theta")


def _is_fused(p: Pass, net: Network) -> bool:
    """Whether the fused kernels serve all passes of the step, forward and backward."""
    served = (p.program.target, p.program.precision, net.sizes)
    return iqn_fused.fits(*served) and iqn_fused.fits_backward(*served, net.quantiles)


def _apart(p: Pass, net: Network, h: Tensor) -> bool:
    """Whether the gradient of h, for which the rest of the backward pass waits, is made apart from the weights'."""
    served = iqn_fused.fits_state(p.program.target, p.program.precision, net.sizes)
    return served and iqn_fused.apart(p.program.target, h.shape[0])


def _fused(p: Pass, net: Network, h: Tensor, tau: Tensor, scale: Scale | None) -> Tensor:
    """The network in one launch, which the step's two networks share; backward in another or two."""
    weights = iqn_fused.Weights(*(p.weight(f"{kind}_{layer}") for layer in ("phi", "iq1", "iq2") for kind in "wb"))
    hidden = p.tensor("iq1", tau.size, net.sizes.width) if p.trained else None
    theta = p.tensor("theta", tau.size, net.sizes.outputs)
    target, precision, samples = p.program.target, p.program.precision, h.shape[0]
    share = iqn_fused.forward_share(target, precision, net.sizes, samples, tau.shape[1])
    share *= tau.shape[1] / (net.quantiles + net.others)  # the two networks divide it in proportion to their rows
    iqn_fused.forward(p.program, tau, h, weights, theta, hidden=hidden, share=share, label=f"{theta.name}.fwd")
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
            reached = {name: gradients.parameter(name) for name in ("w_phi", "b_phi", "w_iq1", "b_iq1")}
            last = {name: gradients.parameter(name) for name in ("w_iq2", "b_iq2")}
            accumulate_gradients = reached["w_iq1"][1]
            aligned = all_aligned(dtheta, tau, h, stored)
            if iqn_fused.makes_last_layer(target, precision, net.sizes, tau.shape[1], aligned=aligned):
                reached |= last
            else:
                linear.backward_dw(
                    p.program,
                    dtheta,
                    stored,
                    last["w_iq2"][0],
                    last["b_iq2"][0],
                    accumulate=accumulate_gradients,
                    label=f"{gradients.prefix}theta.dw",
                )
            wanted = iqn_fused.WeightGradients(**{name: gradient for name, (gradient, _) in reached.items()})
        given = (p.program, dtheta, tau, h, weights, stored)
        name = f"{gradients.prefix}iqn.bwd"
        into_h: dict[str, Any] = {}
        apart = False
        if p.tape.tracked(h):
            apart = wanted is not None and _apart(p, net, h)
            if apart:
                gradients.settle(h)  # what is owed by now, which is there early, need not wait for what comes from here
            dh, accumulate = gradients.contribute(h)
            weight, readiness = scale or (None, None)
            into_h = {"dh2": dh, "weight": weight, "readiness": readiness}
            into_h |= {"activation": p.tape.activation(h), "accumulate": accumulate}
        share = 1.0
        if apart:
            iqn_fused.state_gradient(*given, **into_h, name=f"{name}.dh2")
            into_h, share = {}, iqn_fused.WEIGHTS_SHARE
        iqn_fused.backward(
            *given,
            **into_h,
            gradients=wanted,
            accumulate_gradients=accumulate_gradients,
            share=share,
            name=name,
        )

    p.tape.record(backward)
    return p.tape.track(theta)


def _mix(p: Pass, phi: Tensor, h: Tensor, scale: Scale | None) -> Tensor:
    """h⊙φ, each row of h met by its N rows of φ."""
    mixed = p.tensor("mixed", *phi.shape)
    iqn.mix(p.program, phi, h, mixed, label=f"mixed{p.suffix}")
    if not p.trained:
        return mixed

    def backward(gradients: Gradients) -> None:
        dmixed = gradients.settle(mixed)
        if dmixed is None:
            return
        dh, accumulate = gradients.contribute(h) if p.tape.tracked(h) else (None, False)
        weight, readiness = scale or (None, None)
        iqn.mix_backward(
            p.program,
            dmixed,
            phi,
            h,
            gradients.output(phi),
            dh2=dh,
            weight=weight,
            readiness=readiness,
            activation=p.tape.activation(h) if dh else "none",
            accumulate=accumulate,
            label=f"{gradients.prefix}mixed.dx",
        )

    p.tape.record(backward)
    return p.tape.track(mixed)
