"""The gated residual trunk: h1 = elu(lin(x)), h2 = LayerNorm(skip + a⊙σ(c)) (docs/step.md §2)."""

from __future__ import annotations

from dataclasses import dataclass

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import glunorm
from fxengine.train.groups import ParamSpec, linear_specs


@dataclass(frozen=True)
class Trunk:
    """Outputs of the trunk: h1 [B, H1], which the auxiliary nets read, and h2 [B, H2], which all heads read."""

    h1: Tensor
    h2: Tensor


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Group trunk (0), with a target copy."""
    h1, h2 = config.h1, config.h2
    specs = [*linear_specs("s1", h1, config.state), *linear_specs("s2", h2, h1), *linear_specs("glu", 2 * h2, h2)]
    if h1 != h2:
        specs.append(ParamSpec("w_skip", (h2, h1)))
    step.group("trunk", [*specs, ParamSpec("ln_g", (h2,)), ParamSpec("ln_b", (h2,))], target=True)


def forward(p: Pass, config: StepConfig, x: Tensor) -> Trunk:
    """h1 and h2 of x [B, S]."""
    h1 = p.linear(x, "s1", activation="elu", name="h1")
    u = p.linear(h1, "s2", activation="elu", name="u")
    glu = p.linear(u, "glu", name="glu")
    skip = h1 if config.h1 == config.h2 else p.linear(h1, "skip", bias=False, name="skip")
    return Trunk(h1, _glu_norm(p, glu, skip))


def _glu_norm(p: Pass, glu: Tensor, skip: Tensor) -> Tensor:
    """LayerNorm(skip + a⊙σ(c)) with (a, c) the halves of glu."""
    rows, width = skip.shape
    h2 = p.tensor("h2", rows, width)
    gain, bias = p.weight("ln_g"), p.weight("ln_b")
    stats = p.tensor("h2.stats", rows, 2) if p.trained else None
    glunorm.forward(p.program, glu, skip, gain, bias, h2, stats=stats, label=f"h2{p.suffix}.fwd")
    if stats is None:
        return h2

    def backward(gradients: Gradients) -> None:
        dh2 = gradients.settle(h2)
        if dh2 is None:
            return
        dskip, accumulate = gradients.contribute(skip)
        glunorm.backward(
            p.program,
            dh2,
            glu,
            skip,
            gain,
            stats,
            gradients.output(glu),
            dskip=dskip,
            activation=p.tape.activation(skip),
            accumulate=accumulate,
            dgain=gradients.parameter("ln_g")[0],
            dbias=gradients.parameter("ln_b")[0],
            label=f"{gradients.prefix}h2.dx",
        )

    p.tape.record(backward)
    return p.tape.track(h2)
