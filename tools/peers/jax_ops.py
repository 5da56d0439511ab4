"""Operations of the JAX peer on planes: one product for networks that share a shape, a gradient for the first alone.

The step runs its encoder three times (online at s, online at s', target at s') and only the first has a gradient.
Arrays have a leading axis of planes, so that three small products are one batched product, and operations a backward
pass of their own that looks at the planes (and rows) that have a gradient. What comes back for the others is padding,
which the compiler drops because whatever reads it cuts it off again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def padded(x: Array, shape: tuple[int, ...]) -> Array:
    """x in the corner of an array of zeros."""
    return jnp.pad(x, [(0, n - k) for n, k in zip(shape, x.shape, strict=True)])


def scaled(scale: Array, gradient: Array) -> Array:
    """scale·gradient; an exact 0 where the scale is 0, whatever the gradient holds."""
    return jnp.where(scale == 0.0, 0.0, scale * gradient)


def _activated(x: Array, activation: str) -> Array:
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    if activation == "elu":
        return jnp.where(x > 0.0, x, jnp.expm1(x))
    return jnp.tanh(x) if activation == "tanh" else x


def _slope(y: Array, activation: str) -> Array:
    """Derivative of an activation by what it returned."""
    if activation == "relu":
        return (y > 0.0).astype(y.dtype)
    if activation == "elu":
        return jnp.where(y > 0.0, 1.0, y + 1.0)
    return 1.0 - y * y


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def affine(x: Array, w: Array, b: Array | None, activation: str, planes: int, rows: int | None) -> Array:
    """activation(x·wᵀ + b) per plane: x [P, M, K], w [P, N, K], b [P, N].

    Only the first `planes` planes, and of these the first `rows` rows (None for all), have a gradient.
    """
    y = jnp.einsum("pmk,pnk->pmn", x, w)
    return _activated(y if b is None else y + b[:, None], activation)


def _affine_forward(
    x: Array, w: Array, b: Array | None, activation: str, planes: int, rows: int | None
) -> tuple[Array, Any]:
    y = affine(x, w, b, activation, planes, rows)
    kept = (x[:planes, :rows], w[:planes], y[:planes, :rows] if activation else None)
    return y, (kept, x.shape, w.shape, None if b is None else b.shape)


def _affine_backward(activation: str, planes: int, rows: int | None, saved: Any, dy: Array) -> tuple[Array, ...]:
    (x, w, y), x_shape, w_shape, b_shape = saved
    d = dy[:planes, :rows]
    if activation:
        d = d * _slope(y, activation)
    dx = padded(jnp.einsum("pmn,pnk->pmk", d, w), x_shape)
    dw = padded(jnp.einsum("pmn,pmk->pnk", d, x), w_shape)
    return dx, dw, None if b_shape is None else padded(d.sum(1), b_shape)


affine.defvjp(_affine_forward, _affine_backward)


def single(x: Array, w: Array, b: Array | None, activation: str = "") -> Array:
    """`affine` of one plane: x [M, K], w [N, K], b [N]."""
    return affine(x[None], w[None], None if b is None else b[None], activation, 1, None)[0]


@jax.custom_vjp
def narrow(x: Array, w: Array) -> Array:
    """x·wᵀ per plane for a handful of columns: x [P, M, X], w [P, N, X]. Elementwise, to be part of what follows."""
    return sum(x[:, :, None, j] * w[:, None, :, j] for j in range(x.shape[2]))


def _narrow_backward(saved: Any, dy: Array) -> tuple[Array, Array]:
    x, w, x_shape, w_shape = saved
    return padded(dy[:1] @ w, x_shape), padded(jnp.einsum("pmn,pmk->pnk", dy[:1], x), w_shape)


narrow.defvjp(lambda x, w: (narrow(x, w), (x[:1], w[:1], x.shape, w.shape)), _narrow_backward)


@jax.custom_vjp
def mix(phi: Array, h2: Array) -> Array:
    """phi[p, b·N + i]·h2[p, b]: [P, B·N, H] and [P, B, H]; a gradient for plane 0."""
    quantiles = phi.shape[1] // h2.shape[1]
    return (phi.reshape(*h2.shape[:2], quantiles, -1) * h2[:, :, None]).reshape(phi.shape)


def _mix_backward(saved: Any, dy: Array) -> tuple[Array, Array]:
    phi, h2, planes = saved
    shape = (h2.shape[0], -1, h2.shape[1])
    d = dy[0].reshape(shape)
    dphi = (d * h2[:, None]).reshape(1, *phi.shape)
    dh2 = (d * phi.reshape(shape)).sum(1)[None]
    return padded(dphi, (planes, *phi.shape)), padded(dh2, (planes, *h2.shape))


mix.defvjp(lambda phi, h2: (mix(phi, h2), (phi[0], h2[0], phi.shape[0])), _mix_backward)


def _norm_parts(glu: Array, skip: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Halves of the gated unit, the gate, and the normalised sum with the root of its precision."""
    a, c = jnp.split(glu, 2, axis=-1)
    gate = jax.nn.sigmoid(c)
    y = skip + a * gate
    mean = y.mean(-1, keepdims=True)
    root = jax.lax.rsqrt(jnp.square(y - mean).mean(-1, keepdims=True) + 1e-5)
    return a, gate, y, mean, root


@jax.custom_vjp
def glu_norm(glu: Array, skip: Array, gain: Array, bias: Array) -> Array:
    """LayerNorm(skip + a⊙σ(c))·gain + bias per plane, (a, c) = halves of glu; a gradient for plane 0."""
    _, _, y, mean, root = _norm_parts(glu, skip)
    return (y - mean) * root * gain[:, None] + bias[:, None]


def _glu_norm_forward(glu: Array, skip: Array, gain: Array, bias: Array) -> tuple[Array, Any]:
    _, _, y, mean, root = _norm_parts(glu, skip)
    out = (y - mean) * root * gain[:, None] + bias[:, None]
    return out, (glu[0], skip[0], gain[0], mean[0], root[0], glu.shape[0])


def _glu_norm_backward(saved: Any, dy: Array) -> tuple[Array, ...]:
    glu, skip, gain, mean, root, planes = saved
    a, c = jnp.split(glu, 2, axis=-1)
    gate = jax.nn.sigmoid(c)
    d, normed = dy[0], (skip + a * gate - mean) * root
    through = d * gain
    centred = through - through.mean(-1, keepdims=True) - normed * (through * normed).mean(-1, keepdims=True)
    dskip = root * centred
    dglu = jnp.concatenate([dskip * gate, dskip * a * gate * (1.0 - gate)], axis=-1)
    found = (dglu, dskip, (d * normed).sum(0), d.sum(0))
    return tuple(padded(x[None], (planes, *x.shape)) for x in found)


glu_norm.defvjp(_glu_norm_forward, _glu_norm_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def attend(qkv: Array, tokens: int) -> Array:
    """softmax(q·kᵀ/√Da)·v per row: qkv [P, B·T, 3·Da] to [P, B·T, Da]; a gradient for plane 0."""
    return _attend_forward(qkv, tokens)[0]


def _attend_forward(qkv: Array, tokens: int) -> tuple[Array, Any]:
    width = qkv.shape[2] // 3
    q, k, v = (x.reshape(qkv.shape[0], -1, tokens, width) for x in jnp.split(qkv, 3, axis=-1))
    # Written out: products of six by six are too small for a kernel of matrix products.
    scores = (q[:, :, :, None] * k[:, :, None]).sum(-1) * width**-0.5
    p = jax.nn.softmax(scores)
    out = (p[..., None] * v[:, :, None]).sum(3).reshape(*qkv.shape[:2], width)
    return out, (q[0], k[0], v[0], p[0], qkv.shape)


def _attend_backward(tokens: int, saved: Any, dy: Array) -> tuple[Array]:
    q, k, v, p, shape = saved
    do = dy[0].reshape(v.shape)
    dv = (p[..., None] * do[:, :, None]).sum(1)
    dp = (do[:, :, None] * v[:, None]).sum(-1)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    dq = (ds[..., None] * k[:, None]).sum(2)
    dk = (ds[..., None] * q[:, :, None]).sum(1)
    dqkv = jnp.concatenate([dq, dk, dv], axis=-1).reshape(1, *shape[1:])
    return (padded(dqkv, shape),)


attend.defvjp(_attend_forward, _attend_backward)
