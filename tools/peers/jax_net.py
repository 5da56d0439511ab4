"""Forward, losses and gradients of the step in JAX (docs/step.md, sections 2 to 4).

Paths that are scaled or stopped are cut as in `torch_losses`: every head has an h2 of its own, whose cotangents are
scaled and summed before they enter the encoder; the wire's is scaled by the gate before it enters the auxiliary nets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference.config import Config, group_shapes
from tools.peers.common import AUXILIARY, ENCODER

Array = Any
Tree = dict[str, Array]
HEAD_LEVEL = ("c51", "cql", "distill")


def linear(p: Mapping[str, Array], name: str, x: Array) -> Array:
    """x·wᵀ + b."""
    return x @ p[f"w_{name}"].T + p[f"b_{name}"]


def elu(x: Array) -> Array:
    """ELU."""
    return jax.nn.elu(x)


def scaled(scale: Array, gradient: Array) -> Array:
    """scale·gradient; an exact 0 where the scale is 0, whatever the gradient holds."""
    return jnp.where(scale == 0.0, 0.0, scale * gradient)


class Net:
    """The networks of one configuration; signals are constants of the traced step."""

    def __init__(self, config: Config, signals: Mapping[str, float], *, complete: bool = False) -> None:
        self.config, self.signals, self.complete = config, signals, complete
        self.count, self.even = len(config.branches), len(set(config.branches)) == 1
        self.z = np.asarray(config.atoms_z)
        self.offsets = np.array([0, *accumulate(config.branches)][:-1])
        tables = group_shapes(config)
        self.encoder_names = [n for g in ENCODER for n in tables.get(g, ())]
        self.aux_names = [n for g in AUXILIARY for n in tables.get(g, ())]

    # -- networks --------------------------------------------------------------------------------------------------

    def encoder(self, p: Mapping[str, Array], state: Array) -> tuple[Array, Array]:
        """h2 and h1 of attention and gated residual trunk."""
        h1 = elu(linear(p, "s1", self._attention(p, state)))
        u = elu(linear(p, "s2", h1))
        a, c = jnp.split(linear(p, "glu", u), 2, axis=-1)
        y = (h1 @ p["w_skip"].T if "w_skip" in p else h1) + a * jax.nn.sigmoid(c)
        centred = y - y.mean(-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
        return normed * p["ln_g"] + p["ln_b"], h1

    def _attention(self, p: Mapping[str, Array], state: Array) -> Array:
        config = self.config
        if not config.tokens:
            return state
        t = state.reshape(state.shape[0], config.tokens, -1)
        q, k, v = jnp.split(t @ jnp.concatenate([p["w_q"], p["w_k"], p["w_val"]]).T, 3, axis=-1)
        scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(config.attn)
        mixed = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)
        return (t + mixed @ p["w_o"].T).reshape(state.shape)

    def aux(self, p: Mapping[str, Array], h1: Array) -> tuple[Array, Array | None, Array]:
        """Next-bar logits, regime logits and the wire."""
        out = linear(p, "a3", elu(linear(p, "a2", elu(linear(p, "a1", h1)))))
        nb = linear(p, "nb2", elu(linear(p, "nb1", out)))
        rg = linear(p, "rg2", elu(linear(p, "rg1", out))) if self.config.has_regime else None
        return nb, rg, jnp.tanh(0.5 * (nb[:, 1] - nb[:, 0]))

    def logits(self, p: Mapping[str, Array], h2: Array, wire: Array | None, ofi: Array | None) -> Array:
        """Dueling logits of all actions as [B, Σn_d, K]."""
        config = self.config
        value = self.mlp(p, "v", h2)[:, None]
        embedded = jnp.tanh(linear(p, "ofi", ofi)) if config.has_ofi else None
        found: list[Array] = []
        for d, n in enumerate(config.branches):
            if d == 1:
                extra = jax.lax.stop_gradient(jax.nn.softmax(self.q_of(found[0])))
            else:
                extra = embedded if d else None if wire is None else wire[:, None]
            c = h2 if extra is None else jnp.concatenate([h2, extra], axis=1)
            hidden = jax.nn.relu(linear(p, f"b{d}fc", c))
            adv = linear(p, f"b{d}out", hidden).reshape(-1, n, config.atoms)
            found.append(value + (adv - adv.mean(1, keepdims=True)))
        return jnp.concatenate(found, axis=1)

    def q_of(self, logits: Array) -> Array:
        """Expected value of every action."""
        return (jax.nn.softmax(logits) * self.z.astype(logits.dtype)).sum(-1)

    def iqn(self, p: Mapping[str, Array], h2: Array, tau: Array) -> Array:
        """θ as [B, N, Σn_d]."""
        multiples = (np.pi * np.arange(self.config.iqn_cos)).astype(tau.dtype)
        phi = jax.nn.relu(linear(p, "phi", jnp.cos(tau[:, :, None] * multiples)))
        return linear(p, "iq2", jax.nn.relu(linear(p, "iq1", h2[:, None] * phi)))

    def mlp(self, p: Mapping[str, Array], name: str, x: Array) -> Array:
        """A relu MLP of two layers."""
        return linear(p, f"{name}2", jax.nn.relu(linear(p, f"{name}1", x)))

    def per_branch(self, function: Callable[[Array], Array], q: Array) -> list[Array]:
        """A function of each branch's columns."""
        return [function(part) for part in jnp.split(q, self.offsets[1:], axis=1)]

    def argmax(self, q: Array) -> Array:
        """Best action per branch [B, D]; q is finite or NaN, and NaN never wins."""
        ordered = jnp.where(jnp.isnan(q), -jnp.inf, q)
        return jnp.stack(self.per_branch(lambda part: jnp.argmax(part, axis=1), ordered), axis=1)

    def pick(self, x: Array, actions: Array) -> Array:
        """x[..., a_d] of every branch: a sum over one-hot columns, which fuses where a gather does not."""
        width = 1 if x.ndim == 2 else x.shape[1]
        parts = jnp.split(x.reshape(x.shape[0], width, -1), self.offsets[1:], axis=2)
        taken = [
            jnp.where((actions[:, d, None] == np.arange(part.shape[2]))[:, None], part, 0.0).sum(2)
            for d, part in enumerate(parts)
        ]
        return jnp.stack(taken, axis=-1).reshape((*x.shape[:-1], self.count))

    def pick_atoms(self, x: Array, actions: Array) -> Array:
        """x[b, a_d, k] of x [B, Σn_d, K] as [B, D, K]."""
        return jnp.take_along_axis(x, (actions + self.offsets)[:, :, None], axis=1)

    # -- targets ---------------------------------------------------------------------------------------------------

    def next_state(self, p: Mapping[str, Array], target: Mapping[str, Array], batch: Tree) -> Tree:
        """Best actions of the online networks at s', and what the target networks say of them there."""
        h2, h1 = self.encoder(p, batch["next_state"])
        wire = self.aux(p, h1)[2] if self.config.aux_h else None
        q_next = self.q_of(self.logits(p, h2, wire, batch.get("next_ofi")))
        best = self.argmax(q_next)
        h2_target, _ = self.encoder(target, batch["next_state"])
        logits = self.logits(target, h2_target, wire, batch.get("next_ofi"))
        out = {"best": best, "h2_target": h2_target, "p_target": jax.nn.softmax(self.pick_atoms(logits, best))}
        if self.config.iqn_quantiles:
            out["theta_target"] = self.pick(self.iqn(target, h2_target, batch["tau_target"]), best)  # [B, N', D]
        return out | ({"q_next": q_next, "q_target": self.q_of(logits)} if self.complete else {})

    def project(self, r: Array, disc: Array, p_target: Array) -> Array:
        """Categorical projection of p_target [B, D, K]."""
        config = self.config
        z = jnp.clip(r[:, None] + disc[:, None] * self.z.astype(r.dtype), config.v_min, config.v_max)
        u = (z - config.v_min) * ((config.atoms - 1) / (config.v_max - config.v_min))
        hat = jnp.maximum(0.0, 1.0 - jnp.abs(u[:, :, None] - np.arange(config.atoms, dtype=r.dtype)))
        return (p_target[:, :, :, None] * hat[:, None]).sum(2)

    # -- losses ----------------------------------------------------------------------------------------------------

    def shaped_reward(self, p: Mapping[str, Array], batch: Tree, live: Array) -> tuple[Array, Array | None]:
        """The reward with the intrinsic one, which is returned as well."""
        if not self.config.cur_h:
            return batch["reward"], None
        hot = [batch["actions"][:, d, None] == np.arange(n) for d, n in enumerate(self.config.branches)]
        inputs = jnp.concatenate([batch["state"], *(x.astype(live.dtype) for x in hot)], axis=1)
        intrinsic = 0.5 * jnp.square(self.mlp(p, "c", inputs) - batch["next_state"]).mean(1)
        capped = jnp.minimum(jax.lax.stop_gradient(intrinsic), self.signals["curiosity_cap"])
        return batch["reward"] + self.signals["w_curiosity"] * live * capped, intrinsic

    def head_losses(
        self, p: Mapping[str, Array], leaves: Mapping[str, Array], batch: Tree, after: Tree
    ) -> tuple[Array, tuple[Tree, Tree]]:
        """Sum of all losses but the auxiliary nets', as each weighs for its own parameters; losses and outputs."""
        config, actions = self.config, batch["actions"]
        live = (batch["discount"] > 0.0).astype(batch["state"].dtype)
        live_count = jnp.maximum(1.0, live.sum())
        r, intrinsic = self.shaped_reward(p, batch, live)
        losses: Tree = {} if intrinsic is None else {"curiosity": (live * intrinsic).sum() / live_count}
        logits = self.logits(p, leaves["q"], leaves.get("wire"), batch.get("ofi"))
        q = self.q_of(logits)
        chosen = self.pick(q, actions)
        m = self.project(r, batch["discount"], after["p_target"])
        td = -(m * jax.nn.log_softmax(self.pick_atoms(logits, actions))).sum(2).mean(1)
        policy = jnp.concatenate(self.per_branch(jax.nn.log_softmax, q), axis=1)
        losses |= {"c51": (batch["weight"] * td).mean(), "cql": -self.pick(policy, actions).mean()}
        out = {"q": q, "td": td}
        if config.iqn_quantiles:
            losses |= self._iqn_losses(p, leaves, batch, after, r, chosen, out)
        if config.ens:
            heads = linear(p, "ens", leaves["ens"]).reshape(-1, config.ens, config.branches[0])
            taken = jnp.take_along_axis(heads, actions[:, :1, None], axis=2)[:, :, 0]
            goal = r + batch["discount"] * (after["p_target"][:, 0] * self.z.astype(r.dtype)).sum(1)
            losses["ens"] = 0.5 * (batch["weight"] * jnp.square(taken - goal[:, None]).mean(1)).mean()
        if config.rec:
            losses["rec"] = 0.5 * jnp.square(linear(p, "rec", leaves["rec"]) - batch["state"]).mean()
        if config.pred:
            gap = linear(p, "pred", leaves["pred"]) - after["h2_target"]
            losses["pred"] = (live * (0.5 * jnp.square(gap).mean(1))).sum() / live_count
        for side in ("high", "low") if config.iql_h else ():
            u = jax.lax.stop_gradient(chosen).mean(1) - self.mlp(p, f"iql{side}", batch["state"])[:, 0]
            tilt = jnp.abs(self.signals[f"iql_tau_{side}"] - (u < 0.0))
            losses[f"iql_{side}"] = (tilt * jnp.square(u)).mean()
        weights = {name: self.signals[f"w_{name}"] if name in HEAD_LEVEL else 1.0 for name in losses}
        return sum(weights[name] * x for name, x in losses.items() if weights[name]), (losses, out)

    def _iqn_losses(
        self,
        p: Mapping[str, Array],
        leaves: Mapping[str, Array],
        batch: Tree,
        after: Tree,
        r: Array,
        chosen: Array,
        out: Tree,
    ) -> Tree:
        kappa, tau = self.config.huber, batch["tau"]
        theta = self.iqn(p, leaves["iqn"], tau)
        taken = self.pick(theta, batch["actions"])  # [B, N, D]
        goal = r[:, None, None] + batch["discount"][:, None, None] * after["theta_target"]
        delta = goal[:, None] - taken[:, :, None]  # [B, N, N', D]
        size = jnp.abs(delta)
        # κ·(size − ½κ) only meets the derivative where it is taken, so that an infinite δ has the slope ±κ.
        inner = jnp.minimum(size, kappa)
        huber = jnp.where(size <= kappa, 0.5 * inner * inner, kappa * (size - 0.5 * kappa))
        errors = jnp.where(delta < 0.0, 1.0 - tau[:, :, None, None], tau[:, :, None, None]) * huber
        scale = 1.0 / (kappa * goal.shape[1] * self.count)
        out["theta"] = theta
        distill = 0.5 * jnp.square(chosen - jax.lax.stop_gradient(taken.mean(1))).mean()
        return {"iqn": (batch["weight"] * errors.sum((1, 2, 3))).mean() * scale, "distill": distill}


def masked_cross_entropy(logits: Array, labels: Array) -> Array:
    """Mean cross-entropy over the rows whose label is a class."""
    hot = labels[:, None] == np.arange(logits.shape[1])
    return -jnp.where(hot, jax.nn.log_softmax(logits), 0.0).sum() / jnp.maximum(1, hot.sum())


def gradients(
    net: Net,
    p: Tree,
    target: Tree,
    batch: Tree,
    readiness: Array | None,
    gate: Callable[[Array, Array, Array], tuple[Array, Array]],
) -> tuple[Tree, Tree, Array | None]:
    """One forward and backward pass: gradients, outputs and the gate's state.

    `gate` makes (state, alpha_grad) of this step from nb, the labels and q; not called without auxiliary nets.
    """
    config, signals = net.config, net.signals
    dead = (batch["discount"] == 0.0)[:, None]
    batch = batch | {k: jnp.where(dead, 0.0, batch[k]) for k in ("next_state", "next_ofi") if k in batch}
    after = net.next_state(p, target, batch)
    h2, encoder_vjp, h1 = jax.vjp(
        lambda part: net.encoder(part, batch["state"]), {n: p[n] for n in net.encoder_names}, has_aux=True
    )

    def aux(part: Tree) -> tuple[tuple[Array, Array], tuple[Array, Tree]]:
        nb, rg, wire = net.aux(part, h1)
        losses = {"nb": masked_cross_entropy(nb, batch["nb_label"])}
        if rg is not None:
            losses["regime"] = masked_cross_entropy(rg, batch["regime_label"])
        weighted = [signals[f"w_{name}"] * x for name, x in losses.items() if signals[f"w_{name}"]]
        return (sum(weighted, jnp.zeros((), h1.dtype)), wire), (nb, losses)

    present = {"q": True, "iqn": config.iqn_quantiles, "ens": config.ens, "rec": config.rec, "pred": config.pred}
    leaves = {name: h2 for name, there in present.items() if there}
    if config.aux_h:
        (total, wire), aux_vjp, (nb, aux_losses) = jax.vjp(aux, {n: p[n] for n in net.aux_names}, has_aux=True)
        leaves["wire"] = wire
    taken = {*net.encoder_names, *net.aux_names}
    heads = {name: x for name, x in p.items() if name not in taken}
    (_, (losses, out)), (grads, into) = jax.value_and_grad(net.head_losses, argnums=(0, 1), has_aux=True)(
        heads, leaves, batch, after
    )
    state = None
    if config.aux_h:
        state, alpha = gate(nb, batch["nb_label"], out["q"])
        grads |= aux_vjp((jnp.ones_like(total), scaled(alpha, into["wire"])))[0]
        losses |= aux_losses
    # A weight of 0 leaves its loss outside: 0 times its gradient is an exact 0.
    weights = {name: signals[f"w_{name}"] for name in ("ens", "rec", "pred") if name in into}
    dh2 = into["q"] + sum(w * into[name] for name, w in weights.items() if w)
    if readiness is not None:
        dh2 += scaled(signals["w_iqn"] * readiness, into["iqn"])
    grads |= encoder_vjp(dh2)[0]
    made = {f"L_{name}": x for name, x in losses.items()} | {"td": out["td"]}
    if net.complete:
        made |= out | {"h1": h1, "h2": h2} | {k: after[k] for k in ("q_target", "q_next", "best")}
        made |= {"wire": leaves["wire"]} if config.aux_h else {}
    return grads, made, state
