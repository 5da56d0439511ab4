"""Hand-written backward passes of the layers in `forward` (docs/step.md, sections 1 to 3).

Each function takes the forward's cache and the gradient of its output and returns a dict of parameter gradients
(arrays are new: nothing accumulates), with input gradients only where the algorithm lets one flow: the aux trunk,
the curiosity and IQL networks and the attention have none.
"""

from __future__ import annotations

import numpy as np

from .config import Array, Config, Tree


def lin_params(name: str, dy: Array, x: Array) -> Tree:
    """dw = dyᵀ·x and db = Σ dy of lin(x; w, b), over all leading axes."""
    flat = dy.reshape(-1, dy.shape[-1])
    return {f"w_{name}": flat.T @ x.reshape(-1, x.shape[-1]), f"b_{name}": flat.sum(axis=0)}


def relu_grad(dy: Array, y: Array) -> Array:
    """Gradient through y = relu(x): zero where y = 0; a NaN in y lets dy pass."""
    return np.where(y <= 0.0, 0.0, dy)


def elu_grad(dy: Array, y: Array) -> Array:
    """Gradient through y = elu(x): the derivative is 1 where y > 0, else exp(x) = y + 1."""
    return dy * np.where(y > 0.0, 1.0, y + 1.0)


def softmax_grad(dy: Array, y: Array) -> Array:
    """Gradient through y = softmax(x) over the last axis: y·(dy − Σ dy·y)."""
    return y * (dy - np.sum(dy * y, axis=-1, keepdims=True))


def attention_params(config: Config, p: Tree, cache: Tree, dx: Array) -> Tree:
    """Gradients of w_q, w_k, w_val, w_o; the raw state needs none."""
    if not config.tokens:
        return {}
    t, weights = cache["t"], cache["weights"]
    dx = dx.reshape(t.shape)
    dmixed = dx @ p["w_o"]
    dscores = softmax_grad(dmixed @ np.swapaxes(cache["v"], 1, 2), weights) / np.sqrt(config.attn)
    dq, dk = dscores @ cache["k"], np.swapaxes(dscores, 1, 2) @ cache["q"]
    dv = np.swapaxes(weights, 1, 2) @ dmixed
    pairs = {"w_q": (dq, t), "w_k": (dk, t), "w_val": (dv, t), "w_o": (dx, cache["mixed"])}
    return {name: np.einsum("bto,bti->oi", dy, x) for name, (dy, x) in pairs.items()}


def layer_norm_grad(p: Tree, cache: Tree, dh2: Array) -> tuple[Array, Tree]:
    """Gradient of LayerNorm's input, and of ln_g and ln_b."""
    normed = cache["normed"]
    dn = dh2 * p["ln_g"]
    mean = dn.mean(axis=-1, keepdims=True)
    along = np.mean(dn * normed, axis=-1, keepdims=True)
    dy = cache["rstd"] * (dn - mean - normed * along)
    return dy, {"ln_g": np.sum(dh2 * normed, axis=0), "ln_b": dh2.sum(axis=0)}


def trunk(p: Tree, cache: Tree, dh2: Array) -> tuple[Array, Tree]:
    """Gradient of the trunk's input x and of its parameters."""
    dy, grads = layer_norm_grad(p, cache, dh2)
    a, gate, u, h1 = cache["a"], cache["gate"], cache["u"], cache["h1"]
    dglu = np.concatenate([dy * gate, dy * a * gate * (1.0 - gate)], axis=-1)
    grads |= lin_params("glu", dglu, u)
    ds2 = elu_grad(dglu @ p["w_glu"], u)
    grads |= lin_params("s2", ds2, h1)
    dh1 = ds2 @ p["w_s2"]
    if "w_skip" in p:
        grads["w_skip"] = dy.T @ h1
        dh1 = dh1 + dy @ p["w_skip"]
    else:
        dh1 = dh1 + dy
    ds1 = elu_grad(dh1, h1)
    grads |= lin_params("s1", ds1, cache["x"])
    return ds1 @ p["w_s1"], grads


def encoder(config: Config, p: Tree, nets: dict[str, Tree], dh2: Array) -> Tree:
    """Gradients of trunk and attention from the gradient of h2 at s."""
    dx, grads = trunk(p, nets["trunk"], dh2)
    return grads | attention_params(config, p, nets["attn"], dx)


def head_layer(p: Tree, name: str, dy: Array, hidden: Array, x: Array) -> tuple[Array, Tree]:
    """An aux head lin(elu(lin(x; {name}1)); {name}2): gradient of x and of its parameters."""
    dhidden = elu_grad(dy @ p[f"w_{name}2"], hidden)
    grads = lin_params(f"{name}2", dy, hidden) | lin_params(f"{name}1", dhidden, x)
    return dhidden @ p[f"w_{name}1"], grads


def aux(config: Config, p: Tree, cache: Tree, dnb: Array, drg: Array | None) -> Tree:
    """Gradients of aux heads and aux trunk from those of the logits; there is no gradient of h1 at all."""
    dout, grads = head_layer(p, "nb", dnb, cache["nb1"], cache["out"])
    if config.has_regime and drg is not None:
        dregime, regime_grads = head_layer(p, "rg", drg, cache["rg1"], cache["out"])
        dout, grads = dout + dregime, grads | regime_grads
    grads |= lin_params("a3", dout, cache["a2"])
    da2 = elu_grad(dout @ p["w_a3"], cache["a2"])
    grads |= lin_params("a2", da2, cache["a1"])
    da1 = elu_grad(da2 @ p["w_a2"], cache["a1"])
    return grads | lin_params("a1", da1, cache["h1"])


def wire_logits(cache: Tree, dwire: Array) -> Array:
    """Gradient of the next-bar logits through wire = p_up − p_down."""
    return softmax_grad(np.stack([-dwire, dwire], axis=1), cache["up_down"])


def heads(config: Config, p: Tree, cache: Tree, dlogits: list[Array]) -> tuple[Array, Array | None, Tree]:
    """Dueling heads from the gradients of the logits, one [B, n_d, K] per branch.

    Returns the gradient of h2, that of the wire column of c_0 (before the wire gate; None without aux nets) and
    the parameters'. The sg in c_1 stops what would flow into q_0.
    """
    dv = np.sum([d.sum(axis=1) for d in dlogits], axis=0)
    dvh = relu_grad(dv @ p["w_v2"], cache["vh"])
    grads = lin_params("v2", dv, cache["vh"]) | lin_params("v1", dvh, cache["h2"])
    dh2, dwire, width = dvh @ p["w_v1"], None, cache["h2"].shape[1]
    de = np.zeros_like(cache["e"]) if config.has_ofi else None
    for d, dlogit in enumerate(dlogits):
        dadv = (dlogit - dlogit.mean(axis=1, keepdims=True)).reshape(dlogit.shape[0], -1)
        dhidden = relu_grad(dadv @ p[f"w_b{d}out"], cache[f"hidden{d}"])
        grads |= lin_params(f"b{d}out", dadv, cache[f"hidden{d}"])
        grads |= lin_params(f"b{d}fc", dhidden, cache[f"c{d}"])
        dc = dhidden @ p[f"w_b{d}fc"]
        dh2 = dh2 + dc[:, :width]
        if d == 0 and config.aux_h:
            dwire = dc[:, width]
        if d >= 2 and de is not None:
            de = de + dc[:, width:]
    if de is not None:
        grads |= lin_params("ofi", de * (1.0 - cache["e"] ** 2), cache["ofi"])
    return dh2, dwire, grads


def iqn(p: Tree, cache: Tree, dtheta: Array) -> tuple[Array, Tree]:
    """Gradient of h2 and of the IQN parameters from that of θ [B, N, Σn_d]."""
    dhidden = relu_grad(dtheta @ p["w_iq2"], cache["hidden"])
    dmixed = dhidden @ p["w_iq1"]
    dphi = relu_grad(dmixed * cache["h2"][:, None, :], cache["phi"])
    grads = lin_params("phi", dphi, cache["cosines"])
    grads |= lin_params("iq1", dhidden, cache["mixed"]) | lin_params("iq2", dtheta, cache["hidden"])
    return np.sum(dmixed * cache["phi"], axis=1), grads


def mlp_params(p: Tree, name: str, cache: Tree, dy: Array) -> Tree:
    """Gradients of a relu MLP of two layers; its input needs none."""
    dhidden = relu_grad(dy @ p[f"w_{name}2"], cache["hidden"])
    return lin_params(f"{name}2", dy, cache["hidden"]) | lin_params(f"{name}1", dhidden, cache["x"])


def decoder(p: Tree, name: str, h2: Array, dy: Array) -> tuple[Array, Tree]:
    """A linear decoder on h2: gradient of h2 and of its parameters."""
    return dy @ p[f"w_{name}"], lin_params(name, dy, h2)


def q_to_logits(config: Config, cache: Tree, dq: list[Array]) -> list[Array]:
    """Gradients of the logits from those of q_d = Σ_k z_k p_k: dq·p·(z − q)."""
    out = []
    for d, g in enumerate(dq):
        spread = config.atoms_z - cache[f"q{d}"][:, :, None]
        out.append(g[:, :, None] * cache[f"p{d}"] * spread)
    return out
