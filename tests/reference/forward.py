"""Forward passes (docs/step.md, section 2).

Every function accepts complex parameters as well, so that a derivative is the imaginary part after an
imaginary step: comparisons look at real parts, `sg` drops the imaginary part, `scale_gradient` multiplies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import Array, Config, Tree

LN_EPS = 1e-5


def sg(x: Array) -> Array:
    """Stop-gradient: the value without the derivative that an imaginary part carries."""
    return np.real(x)


def scale_gradient(x: Array, scale: float) -> Array:
    """The value of x with its derivative multiplied by `scale`; an exact 0 where the scale is 0."""
    if not np.iscomplexobj(x):
        return x
    return x.real + 1j * scale * x.imag if scale != 0.0 else x.real


def times(scale: Array | float, x: Array | float) -> Array:
    """scale·x, an exact 0 wherever the scale is 0, whatever x holds (section 3)."""
    scale = np.asarray(scale)
    with np.errstate(invalid="ignore"):
        return np.where(scale == 0.0, 0.0, scale * x)


def argmax(x: Array) -> Array:
    """Argmax over the last axis: the lowest index on ties, NaN never wins, all NaN gives 0 (section 2)."""
    x = np.real(x)
    best = np.zeros(x.shape[:-1], dtype=np.int32)
    top = x[..., 0]
    for a in range(1, x.shape[-1]):
        wins = (x[..., a] > top) | (np.isnan(top) & ~np.isnan(x[..., a]))
        best, top = np.where(wins, np.int32(a), best), np.where(wins, x[..., a], top)
    return best


def lin(p: Tree, name: str, x: Array) -> Array:
    """lin(x; w, b) = x·wᵀ + b."""
    return x @ p[f"w_{name}"].T + p[f"b_{name}"]


def relu(x: Array) -> Array:
    """max(x, 0); NaN passes."""
    return np.where(np.real(x) <= 0.0, 0.0, x)


def elu(x: Array) -> Array:
    """X where x > 0, else exp(x) − 1; NaN passes."""
    positive = np.real(x) > 0.0
    return np.where(positive, x, np.expm1(np.where(positive, 0.0, x)))


def sigmoid(x: Array) -> Array:
    """1/(1 + exp(−x)), by way of tanh, which does not overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def log_softmax(x: Array) -> Array:
    """Log-softmax over the last axis."""
    shifted = x - np.max(np.real(x), axis=-1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True))


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    return np.exp(log_softmax(x))


def attention(config: Config, p: Tree, state: Array) -> Tree:
    """x = t + softmax(q·kᵀ/√Da)·v·w_oᵀ over feature tokens t = state as [B, T, F]; T = 0: x = state."""
    if not config.tokens:
        return {"x": state}
    t = state.reshape(state.shape[0], config.tokens, -1)
    q, k, v = t @ p["w_q"].T, t @ p["w_k"].T, t @ p["w_val"].T
    weights = softmax(q @ np.swapaxes(k, 1, 2) / np.sqrt(config.attn))
    mixed = weights @ v
    x = (t + mixed @ p["w_o"].T).reshape(state.shape)
    return {"t": t, "q": q, "k": k, "v": v, "weights": weights, "mixed": mixed, "x": x}


def trunk(p: Tree, x: Array) -> Tree:
    """Gated residual trunk: h2 = LayerNorm(skip + a⊙σ(c)), skip = h1 or h1·w_skipᵀ."""
    s1 = lin(p, "s1", x)
    h1 = elu(s1)
    s2 = lin(p, "s2", h1)
    u = elu(s2)
    a, c = np.split(lin(p, "glu", u), 2, axis=-1)
    gate = sigmoid(c)
    y = (h1 @ p["w_skip"].T if "w_skip" in p else h1) + a * gate
    centred = y - y.mean(axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + LN_EPS)
    normed = centred * rstd
    h2 = normed * p["ln_g"] + p["ln_b"]
    return {"x": x, "h1": h1, "u": u, "a": a, "gate": gate, "rstd": rstd, "normed": normed, "h2": h2}


def aux(config: Config, p: Tree, h1: Array) -> Tree:
    """Aux trunk on sg(h1), its two heads and the wire p_up − p_down."""
    h = sg(h1)
    a1 = elu(lin(p, "a1", h))
    a2 = elu(lin(p, "a2", a1))
    out = lin(p, "a3", a2)
    nb1 = elu(lin(p, "nb1", out))
    nb = lin(p, "nb2", nb1)
    up_down = softmax(nb)
    cache = {"h1": h, "a1": a1, "a2": a2, "out": out, "nb1": nb1, "nb": nb, "up_down": up_down}
    cache["wire"] = up_down[:, 1] - up_down[:, 0]
    if config.has_regime:
        cache["rg1"] = elu(lin(p, "rg1", out))
        cache["rg"] = lin(p, "rg2", cache["rg1"])
    return cache


def heads(config: Config, p: Tree, h2: Array, wire: Array | None, ofi: Array | None) -> Tree:
    """Dueling C51: logits = v + adv − mean_a adv, p = softmax over atoms, q = Σ_k z_k p_k, per branch d."""
    vh = relu(lin(p, "v1", h2))
    value = lin(p, "v2", vh)
    cache: Tree = {"h2": h2, "vh": vh}
    if config.has_ofi and ofi is not None:
        cache["ofi"] = ofi
        cache["e"] = np.tanh(lin(p, "ofi", ofi))
    for d, n in enumerate(config.branches):
        c = branch_input(config, d, h2, wire, cache)
        hidden = relu(lin(p, f"b{d}fc", c))
        adv = lin(p, f"b{d}out", hidden).reshape(-1, n, config.atoms)
        log_p = log_softmax(value[:, None, :] + adv - adv.mean(axis=1, keepdims=True))
        probs = np.exp(log_p)
        cache |= {f"c{d}": c, f"hidden{d}": hidden, f"log_p{d}": log_p, f"p{d}": probs}
        cache[f"q{d}"] = probs @ config.atoms_z
    cache["q"] = np.concatenate([cache[f"q{d}"] for d in range(len(config.branches))], axis=1)
    return cache


def branch_input(config: Config, d: int, h2: Array, wire: Array | None, cache: Tree) -> Array:
    """c_0 = [h2, wire]; c_1 = [h2, sg(softmax(q_0))]; c_d = [h2, e] for d ≥ 2, each where the part exists."""
    if d == 0:
        return h2 if wire is None else np.concatenate([h2, wire[:, None]], axis=1)
    if d == 1:
        return np.concatenate([h2, sg(softmax(cache["q0"]))], axis=1)
    return np.concatenate([h2, cache["e"]], axis=1) if config.has_ofi else h2


def iqn(config: Config, p: Tree, h2: Array, tau: Array) -> Tree:
    """φ = relu(lin(cos(π·i·τ); phi)), θ = lin(relu(lin(h2⊙φ; iq1)); iq2) as [B, N, Σn_d]."""
    cosines = np.cos(np.pi * np.arange(config.iqn_cos) * tau[:, :, None])
    phi = relu(lin(p, "phi", cosines))
    mixed = h2[:, None, :] * phi
    hidden = relu(lin(p, "iq1", mixed))
    theta = lin(p, "iq2", hidden)
    return {"h2": h2, "cosines": cosines, "phi": phi, "mixed": mixed, "hidden": hidden, "theta": theta}


def mlp(p: Tree, name: str, x: Array) -> Tree:
    """A relu MLP of two layers, {name}1 and {name}2: the IQL values and the curiosity model."""
    hidden = relu(lin(p, f"{name}1", x))
    return {"x": x, "hidden": hidden, "out": lin(p, f"{name}2", hidden)}


def onehots(config: Config, actions: Array) -> Array:
    """One-hot codes of all D actions, side by side."""
    return np.concatenate([np.eye(n)[actions[:, d]] for d, n in enumerate(config.branches)], axis=1)


def chosen(config: Config, x: Array, actions: Array) -> Array:
    """x[..., a_d] for every branch d of an array over all actions [B, ..., Σn_d] → [B, ..., D]."""
    columns = actions + np.asarray(config.offsets)
    index = columns.reshape(columns.shape[0], *([1] * (x.ndim - 2)), columns.shape[1])
    return np.take_along_axis(x, np.broadcast_to(index, (*x.shape[:-1], columns.shape[1])), axis=-1)


@dataclass(frozen=True)
class PathScales:
    """Factors on the gradients from the wire, and from the heads outside the head-level total into h2."""

    wire: float = 1.0
    iqn: float = 1.0
    ens: float = 1.0
    rec: float = 1.0
    pred: float = 1.0


def online(config: Config, p: Tree, batch: Tree, scales: PathScales = PathScales()) -> dict[str, Tree]:
    """Everything that the online networks compute at s, by component."""
    nets = {"attn": attention(config, p, batch["state"])}
    nets["trunk"] = trunk(p, nets["attn"]["x"])
    h2, wire = nets["trunk"]["h2"], None
    if config.aux_h:
        nets["aux"] = aux(config, p, nets["trunk"]["h1"])
        wire = scale_gradient(nets["aux"]["wire"], scales.wire)
    nets["heads"] = heads(config, p, h2, wire, batch.get("ofi"))
    if config.iqn_quantiles:
        nets["iqn"] = iqn(config, p, scale_gradient(h2, scales.iqn), batch["tau"])
    if config.ens:
        q_ens = lin(p, "ens", scale_gradient(h2, scales.ens))
        nets["ens"] = {"h2": h2, "out": q_ens.reshape(-1, config.ens, config.branches[0])}
    for name, present, scale in (("rec", config.rec, scales.rec), ("pred", config.pred, scales.pred)):
        if present:
            nets[name] = {"h2": h2, "out": lin(p, name, scale_gradient(h2, scale))}
    if config.cur_h:
        inputs = np.concatenate([batch["state"], onehots(config, batch["actions"])], axis=1)
        nets["curiosity"] = mlp(p, "c", inputs)
    if config.iql_h:
        nets |= {f"iql_{side}": mlp(p, f"iql{side}", batch["state"]) for side in ("high", "low")}
    return nets


def next_state(config: Config, p: Tree, target: Tree, batch: Tree) -> Tree:
    """q_next and best = argmax of the online networks at s', and what the target networks say there.

    The target networks have their own attention, trunk, w_ofi and c_1, and are fed the online wire'.
    """
    online_trunk = trunk(p, attention(config, p, batch["next_state"])["x"])
    wire = aux(config, p, online_trunk["h1"])["wire"] if config.aux_h else None
    online_heads = heads(config, p, online_trunk["h2"], wire, batch.get("next_ofi"))
    branches = range(len(config.branches))
    best = np.stack([argmax(online_heads[f"q{d}"]) for d in branches], axis=1)
    h2 = trunk(target, attention(config, target, batch["next_state"])["x"])["h2"]
    target_heads = heads(config, target, h2, wire, batch.get("next_ofi"))
    rows = np.arange(best.shape[0])
    out: Tree = {"best": best, "h2_target": h2, "q_next": online_heads["q"], "q_target": target_heads["q"]}
    out["p_target"] = np.stack([target_heads[f"p{d}"][rows, best[:, d]] for d in branches], axis=1)
    if config.iqn_quantiles:
        out["theta_target"] = chosen(config, iqn(config, target, h2, batch["tau_target"])["theta"], best)
    return out
