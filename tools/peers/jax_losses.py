"""Losses of the step in JAX and the gradients that they send into the networks (docs/step.md, section 3).

The networks are differentiated by JAX, the losses by hand: what a loss sends into logits, quantiles or decoders is a
short formula, and written out it becomes one kernel with its neighbours. Paths that are scaled or stopped are cut: each
part that reads h2 has an h2 of its own, whose cotangents are scaled and summed before they enter the encoder, and the
wire's is scaled by the gate before it enters the auxiliary nets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from tools.peers.jax_layout import Array
from tools.peers.jax_net import Net, Params, Tree
from tools.peers.jax_ops import scaled

Gate = Callable[[Array, Array, Array], tuple[Array, Array]]


@dataclass
class Scene:
    """What the losses share; arrays over branches are [D, B, ...].

    Attributes:
        net: the networks.
        batch: the batch, dead rows cleared.
        live: 1 where the discount is positive [B].
        hot: whether an action was taken [D, B, n].
        rows: per loss its values by row [B], to be summed over the rows.
        scale: per loss what the sum is multiplied with.
        out: other results.
    """

    net: Net
    batch: Tree
    live: Array
    hot: Array
    rows: Tree = field(default_factory=dict)
    scale: dict[str, Array | float] = field(default_factory=dict)
    out: Tree = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Rows of the batch."""
        return self.live.shape[0]

    def add(self, name: str, rows: Array, scale: Array | float) -> None:
        """A loss: scale·Σ rows."""
        self.rows[name], self.scale[name] = rows, scale


def project(net: Net, r: Array, disc: Array, p_target: Array) -> Array:
    """Categorical projection m of p_target [D, B, K]."""
    config = net.config
    z = jnp.clip(r[:, None] + disc[:, None] * net.z.astype(r.dtype), config.v_min, config.v_max)
    u = (z - config.v_min) * ((config.atoms - 1) / (config.v_max - config.v_min))
    hat = jnp.maximum(0.0, 1.0 - jnp.abs(u[:, None, :] - np.arange(config.atoms, dtype=r.dtype)[:, None]))
    return (p_target[:, :, None] * hat).sum(-1)


def best_actions(net: Net, q: Array) -> Array:
    """Best action per branch [D, B] of q [D, B, n]; q is finite or NaN, and NaN never wins."""
    return jnp.argmax(jnp.where(jnp.isnan(q) | ~net.valid, -jnp.inf, q), axis=2)


def head_cotangent(s: Scene, logits: Array, r: Array, p_target: Array, theta_mean: Array | None) -> Array:
    """Adds c51, cql and distill; returns what they send into the logits [D, B, n, K]."""
    net, signals = s.net, s.net.signals
    z, per = net.z.astype(r.dtype), 1.0 / (s.size * net.count)
    p = jax.nn.softmax(logits)
    q = (p * z).sum(-1)
    chosen = jnp.where(s.hot, q, 0.0).sum(-1)
    log_p = jax.nn.log_softmax(jnp.where(s.hot[..., None], logits, 0.0).sum(2))
    m = project(net, r, s.batch["discount"], p_target)
    td = -(m * log_p).sum(2).mean(0)
    s.add("c51", s.batch["weight"] * td, 1.0 / s.size)
    policy = jnp.where(net.valid, q, -jnp.inf)
    s.add("cql", (jax.nn.logsumexp(policy, axis=2) - chosen).sum(0), per)
    s.out |= {"q": q, "td": td, "chosen": chosen}
    dq = jnp.zeros_like(q)
    if signals["w_cql"]:
        dq += signals["w_cql"] * per * (jax.nn.softmax(policy) - s.hot)
    if theta_mean is not None:
        gap = chosen - theta_mean
        s.add("distill", 0.5 * jnp.square(gap).sum(0), per)
        if signals["w_distill"]:
            dq += jnp.where(s.hot, signals["w_distill"] * per * gap[..., None], 0.0)
    dlogits = p * (z - q[..., None]) * dq[..., None]
    if signals["w_c51"]:
        pull = jnp.exp(log_p) * m.sum(-1, keepdims=True) - m
        share = signals["w_c51"] * per * s.batch["weight"]
        dlogits += jnp.where(s.hot[..., None], (share[:, None] * pull)[:, :, None], 0.0)
    return dlogits


def quantile_cotangent(s: Scene, taken: Array, goal: Array) -> Array:
    """Adds iqn; returns what it sends into the quantiles of the actions taken [D, B, N]; goal is [D, B, N']."""
    kappa, tau = s.net.config.huber, s.batch["tau"][:, :, None]
    delta = goal[:, :, None] - taken[..., None]  # [D, B, N, N']
    size = jnp.abs(delta)
    # κ·(size − ½κ) only meets the derivative where it is taken, so that an infinite δ has the slope ±κ.
    inner = jnp.minimum(size, kappa)
    huber = jnp.where(size <= kappa, 0.5 * inner * inner, kappa * (size - 0.5 * kappa))
    tilt = jnp.where(delta < 0.0, 1.0 - tau, tau)
    scale = 1.0 / (kappa * goal.shape[2] * s.net.count * s.size)
    s.add("iqn", s.batch["weight"] * (tilt * huber).sum((0, 2, 3)), scale)
    return -scale * s.batch["weight"][:, None] * (tilt * jnp.clip(delta, -kappa, kappa)).sum(-1)


def decoder_cotangent(s: Scene, decoded: Array, r: Array, q_target: Array, h2_target: Array, count: Array) -> Array:
    """Adds rec, pred and ens; returns what they send into the decoders [B, ...]. `count` is that of live rows."""
    config, batch, parts, at = s.net.config, s.batch, [], 0
    if config.rec:
        gap = decoded[:, : config.state] - batch["state"]
        s.add("rec", jnp.square(gap).sum(1), 0.5 / gap.size)
        parts.append(gap / gap.size)
        at = config.state
    if config.pred:
        gap = decoded[:, at : at + config.h2] - h2_target
        share = s.live / (config.h2 * count)
        s.add("pred", s.live * jnp.square(gap).sum(1), 0.5 / (config.h2 * count))
        parts.append(share[:, None] * gap)
        at += config.h2
    if config.ens:
        hot = s.hot[0, :, None, : config.branches[0]]
        goal = r + batch["discount"] * q_target
        heads = decoded[:, at:].reshape(s.size, config.ens, -1)
        gap = jnp.where(hot, heads, 0.0).sum(2) - goal[:, None]
        per = 1.0 / (s.size * config.ens)
        s.add("ens", batch["weight"] * jnp.square(gap).sum(1), 0.5 * per)
        into = (per * batch["weight"])[:, None] * gap
        parts.append(jnp.where(hot, into[:, :, None], 0.0).reshape(s.size, -1))
    return jnp.concatenate(parts, axis=1)


def expectile_cotangent(s: Scene, v: Array) -> Array:
    """Adds iql_high and iql_low; returns what they send into V [2, B]."""
    u = s.out["chosen"].mean(0) - v
    taus = np.array([s.net.signals[f"iql_tau_{side}"] for side in ("high", "low")]).astype(v.dtype)
    tilt = jnp.abs(taus[:, None] - (u < 0.0))
    for i, side in enumerate(("high", "low")):
        s.add(f"iql_{side}", (tilt * jnp.square(u))[i], 1.0 / s.size)
    return (-2.0 / s.size) * tilt * u


def aux_cotangent(s: Scene, logits: Array) -> Array:
    """Adds nb and regime; returns what they send into both heads' logits [B, 2 + R]."""
    heads = [("nb", "nb_label", logits[:, :2])]
    if s.net.config.has_regime:
        heads.append(("regime", "regime_label", logits[:, 2:]))
    parts = []
    for name, label, part in heads:
        hot = s.batch[label][:, None] == np.arange(part.shape[1])
        valid = hot.any(1)
        count = jnp.maximum(1, valid.sum())
        log_p = jax.nn.log_softmax(part)
        s.add(name, -jnp.where(hot, log_p, 0.0).sum(1), 1.0 / count)
        into = s.net.signals[f"w_{name}"] * (jnp.exp(log_p) - hot) / count
        parts.append(jnp.where(valid[:, None], into, 0.0) if s.net.signals[f"w_{name}"] else jnp.zeros_like(part))
    return jnp.concatenate(parts, axis=1)


def clean(batch: Tree) -> Tree:
    """The batch with s' and next_ofi of dead rows replaced by zeros."""
    dead = (batch["discount"] == 0.0)[:, None]
    return batch | {k: jnp.where(dead, 0.0, batch[k]) for k in ("next_state", "next_ofi") if k in batch}


@dataclass
class Forward:
    """What the heads made of h2, and how to go back: `into(cotangents)` gives gradients by slab and of the leaves.

    Attributes:
        made: outputs that have a gradient, all of the online networks at s.
        value, advantages: of all planes.
        theta_target: quantiles of the target network at s' [B, N', Σn_d], or None.
        into: the way back.
    """

    made: Tree
    value: Array
    advantages: list[Array]
    theta_target: Array | None
    into: Callable[[Tree], tuple[Tree, Tree, Tree]]


def heads_forward(net: Net, planes: Params, once: Params, leaves: Tree, batch: Tree) -> Forward:
    """Everything behind h2, the expectile nets and the curiosity model."""
    config = net.config
    ofi = jnp.stack([batch["ofi"], batch["next_ofi"], batch["next_ofi"]]) if config.has_ofi else None

    def forward(planes: Params, once: Params, leaves: Tree) -> tuple[Tree, tuple[Array, list[Array], Array | None]]:
        value, advantages = net.heads(planes, leaves["q"], leaves.get("wire"), ofi)
        made, theta_target = {"value": value[0]}, None
        made |= {f"adv{i}": adv[0] for i, adv in enumerate(advantages)}
        if config.iqn_quantiles:
            made["theta"], theta_target = net.quantiles(planes, leaves["iqn"], [batch["tau"], batch["tau_target"]])
        if "dec" in leaves:
            made["dec"] = net.decoded(once, leaves["dec"])
        if config.iql_h:
            made["iql"] = net.expectiles(once, batch["state"])
        if config.cur_h:
            made["cur"] = net.predicted(once, batch["state"], batch["actions"].T)
        return made, (value, advantages, theta_target)

    made, into, (value, advantages, theta_target) = jax.vjp(forward, planes, once, leaves, has_aux=True)
    return Forward(made, value, advantages, theta_target, into)


def q_cotangents(s: Scene, f: Forward, r: Array, logits: list[Array], p_target: Array, theta: Array | None) -> Tree:
    """Cotangents of the value logits and of the advantages by stage."""
    net = s.net
    dlogits = head_cotangent(s, net.ordered([x[:1] for x in logits])[0], r, p_target, theta)
    counts = np.array(net.config.branches)[:, None, None, None]
    centred = dlogits - dlogits.sum(2, keepdims=True) * (1.0 / counts).astype(dlogits.dtype)
    dadv = jnp.where(net.valid[..., None], centred, 0.0)
    stages = {f"adv{i}": jnp.stack([dadv[d] for d in stage]) for i, stage in enumerate(net.stages)}
    return {"value": dlogits.sum((0, 2))} | stages


def gradients(
    net: Net, planes: Params, once: Params, batch: Tree, readiness: Array | None, gate: Gate
) -> tuple[Tree, Tree, Array | None]:
    """One forward and backward pass: gradients by slab, outputs (td and every loss among them) and the gate's state.

    `gate` makes (state, alpha_grad) of this step from nb, the labels and q_0; not called without auxiliary nets.
    """
    config, signals, batch = net.config, net.signals, clean(batch)
    live = batch["discount"] > 0.0
    s = Scene(net, batch, live.astype(batch["state"].dtype), batch["actions"].T[:, :, None] == np.arange(net.actions))
    count = jnp.maximum(1.0, s.live.sum())

    def encoder(w: Params) -> tuple[Array, tuple[Array, Array]]:
        h2, h1 = net.encoder(w, jnp.stack([batch["state"], batch["next_state"], batch["next_state"]]))
        return h2[0], (h2, h1)

    def aux(w: Params) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        logits, wire = net.aux(w, h1[:2])
        return (logits[0], wire[0]), (logits[0], wire)

    _, into_encoder, (h2, h1) = jax.vjp(encoder, net.part(planes, "encoder"), has_aux=True)
    leaves = {"q": h2} | ({"iqn": h2} if config.iqn_quantiles else {}) | ({"dec": h2[0]} if "w_dec" in once else {})
    if config.aux_h:
        _, into_aux, (nb_rg, wire) = jax.vjp(aux, net.part(once, "aux"), has_aux=True)
        leaves["wire"] = jnp.stack([wire[0], wire[1], wire[1]])
    f = heads_forward(net, net.part(planes, "heads"), net.part(once, "heads"), leaves, batch)

    r, into = batch["reward"], {}
    if config.cur_h:
        gap = f.made["cur"] - batch["next_state"]
        intrinsic = 0.5 * jnp.square(gap).mean(1)
        s.add("curiosity", s.live * intrinsic, 1.0 / count)
        into["cur"] = (s.live / (config.state * count))[:, None] * gap
        r = r + signals["w_curiosity"] * s.live * jnp.minimum(intrinsic, signals["curiosity_cap"])
    logits = [net.dueling(f.value, adv, i) for i, adv in enumerate(f.advantages)]
    q_next = net.q_of(net.ordered([x[1:2] for x in logits])[0])
    best = best_actions(net, q_next)
    picked = (best[..., None] == np.arange(net.actions))[..., None]
    logits_target = net.ordered([x[2:] for x in logits])[0]
    p_target = jax.nn.softmax(jnp.where(picked, logits_target, 0.0).sum(2))
    mean = None
    if f.theta_target is not None:
        taken = net.pick(f.made["theta"], batch["actions"].T)
        goal = r[:, None] + batch["discount"][:, None] * net.pick(f.theta_target, best)
        mean = taken.mean(2)
        into["theta"] = net.spread(quantile_cotangent(s, taken, goal), batch["actions"].T)
    into |= q_cotangents(s, f, r, logits, p_target, mean)
    if "dec" in leaves:
        q_target = (p_target[0] * net.z.astype(r.dtype)).sum(1)
        into["dec"] = decoder_cotangent(s, f.made["dec"], r, q_target, h2[2], count)
    if config.iql_h:
        into["iql"] = expectile_cotangent(s, f.made["iql"])
    planes_grad, once_grad, back = f.into(into)

    grads, state = {n: x[0] for n, x in planes_grad.items()} | once_grad, None
    if config.aux_h:
        daux = aux_cotangent(s, nb_rg)
        state, alpha = gate(nb_rg[:, :2], batch["nb_label"], s.out["q"][0, :, : config.branches[0]])
        grads |= into_aux((daux, scaled(alpha, back["wire"][0])))[0]
    dh2 = back["q"][0] + back.get("dec", 0.0)
    if readiness is not None:
        dh2 += scaled(signals["w_iqn"] * readiness, back["iqn"][0])
    grads |= {n: x[0] for n, x in into_encoder(dh2)[0].items()}

    out = s.out | {"h1": h1[0], "h2": h2[0], "q_next": q_next, "best": best, "q_target": net.q_of(logits_target)}
    out |= ({"theta": f.made["theta"]} if mean is not None else {}) | ({"wire": wire[0]} if config.aux_h else {})
    sums = jnp.stack(list(s.rows.values())).sum(1)
    return grads, out | {f"L_{n}": sums[i] * s.scale[n] for i, n in enumerate(s.rows)}, state
