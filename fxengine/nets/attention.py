"""Attention over feature tokens: x = t + softmax(q·kᵀ/√Da)·v·w_oᵀ (docs/step.md §2)."""

from __future__ import annotations

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import attention
from fxengine.train.groups import ParamSpec

_WEIGHTS = ("w_q", "w_k", "w_val", "w_o")


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Group attn (6), with a target copy."""
    features = config.state // config.tokens
    specs = [ParamSpec(name, (config.attn, features)) for name in _WEIGHTS[:3]]
    step.group("attn", [*specs, ParamSpec("w_o", (features, config.attn))], target=True)


def forward(p: Pass, config: StepConfig, state: Tensor, *, live: Tensor | None = None) -> Tensor:
    """x [B, S] of state [B, S]; the state itself without tokens.

    With tokens, rows in which `live` [B] is 0 read as zeros, whatever they hold.
    """
    if not config.tokens:
        return state
    x = p.tensor("x", *state.shape, padded=False)  # it and its gradient are also read token by token
    weights = [p.weight(name) for name in _WEIGHTS]
    saved = (
        attention.Saved.declare(p.program, state.shape[0], config.tokens, config.attn, name="attn")
        if p.trained
        else None
    )
    w_q, w_k, w_val, w_o = weights
    attention.forward(
        p.program,
        state,
        w_q,
        w_k,
        w_val,
        w_o,
        x,
        tokens=config.tokens,
        live=live,
        saved=saved,
        label=f"x{p.suffix}.fwd",
    )
    if saved is None:
        return x

    def backward(gradients: Gradients) -> None:
        if not gradients.wants("w_q"):
            return
        dx = gradients.settle(x)
        if dx is None:
            return
        name = gradients.prefix + "d.attn."
        dq, dk, dv = (
            p.program.tensor(name + n, t.shape) for n, t in zip("qkv", (saved.q, saved.k, saved.v), strict=True)
        )
        attention.backward(p.program, dx, weights[3], saved, dq, dk, dv, label=f"{gradients.prefix}x.dx")
        own = [gradients.parameter(w)[0] for w in _WEIGHTS]
        attention.backward_weights(p.program, dx, state, saved, dq, dk, dv, *own, label=f"{gradients.prefix}x.dw")

    p.tape.record(backward)
    return p.tape.track(x)
