"""Gate, optimizer and oracles of the step in JAX (docs/step.md, sections 4 to 6), on the rows of `jax_layout`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference.config import Config
from tools.peers.jax_layout import ROW, Array, Layout
from tools.peers.jax_net import Net, Tree

WEIGHT, ADAM_M, ADAM_V, GRAD = range(4)
#: Bits that one pass of the oracles' search settles.
DIGIT = 4


def gate_update(net: Net, old: Array, nb: Array, labels: Array, q: Array) -> Array:
    """Gate state of this step (section 4)."""
    signals = net.signals
    valid = (labels >= 0) & (labels < nb.shape[1])
    count = jnp.maximum(1, valid.sum())
    up = jnp.argmax(jnp.where(jnp.isnan(nb), -jnp.inf, nb), axis=1)
    acc = (valid & (up == labels)).sum().astype(old.dtype) / count
    dis = jnp.zeros_like(acc)
    if net.config.branches[0] == 3:
        side = jnp.argmax(jnp.where(jnp.isnan(q[:, :3]), -jnp.inf, q[:, :3]), axis=1)
        dis = ((2 * up - 1) * (side - 1) < 0).astype(old.dtype).mean()
    short, long, var, ema, opened, seen, alpha = old
    has, dev = valid.any(), acc - long
    first = jnp.stack([acc, acc, acc * (1.0 - acc) / count, dis])
    goal = jnp.stack([acc, acc, dev * dev, dis])
    names = ("acc_beta_short", "acc_beta_long", "acc_beta_long", "disagree_beta")
    rates = np.array([signals[name] for name in names]).astype(old.dtype)
    moved = old[:4] + rates * (goal - old[:4])
    averages = jnp.where(has, jnp.where(seen == 0.0, first, moved), old[:4])
    short, _, var, ema = averages
    opened = jnp.where(short > 0.5 + signals["gate_open_margin"], 1.0, opened)
    opened = jnp.where(short < 0.5 + signals["gate_close_margin"], 0.0, opened)
    score = signals["gate_gain"] * (short - 0.5 - signals["gate_margin"]) * jax.lax.rsqrt(var + 1e-4)
    raw = opened * jax.nn.sigmoid(score) * (1.0 - ema)
    alpha = alpha + signals["alpha_beta"] * (raw - alpha)
    alpha = jnp.where(jnp.isfinite(alpha), jnp.clip(alpha, 0.0, 1.0), 0.0)
    new = jnp.concatenate([averages, jnp.stack([opened, jnp.ones_like(opened), alpha])])
    return jnp.where(has | (seen != 0.0), new, old)


def readiness_update(net: Net, old: Array, loss: Array) -> Array:
    """IQN readiness at the end of a step (section 4); a non-finite loss changes nothing."""
    beta, (seen, ema, ref, readiness) = net.signals["readiness_beta"], old
    warm = seen < net.signals["readiness_warmup"]
    warm_ref = ref + (loss - ref) / (seen + 1.0)
    new_ema = jnp.where(warm, warm_ref, ema + beta * (loss - ema))
    new_ref = jnp.where(warm, warm_ref, jnp.maximum(ref, new_ema))
    raw = jnp.where(warm | (new_ref <= 0.0), 0.0, jnp.clip(1.0 - new_ema / new_ref, 0.0, 1.0))
    readiness = jnp.clip(readiness + beta * (raw - readiness), 0.0, 1.0)
    return jnp.where(jnp.isfinite(loss), jnp.stack([seen + 1.0, new_ema, new_ref, readiness]), old)


class Optimizer:
    """Norms, guard, clamped Adam, spectral norm, targets and oracles on rows."""

    def __init__(self, config: Config, net: Net, layout: Layout) -> None:
        self.config, self.net, self.layout = config, net, layout
        signals, groups = net.signals, layout.groups
        self.clips = np.array([signals[f"clip.{g}"] for g in groups])
        self.rates = np.array([signals[f"lr.{g}"] for g in groups])[layout.owner, None]
        self.decay = np.where(layout.matrix[:, None], signals["weight_decay"], 0.0)
        self.member = layout.owner == np.arange(len(groups))[:, None]  # [G, R]

    def packed(self, grads: Mapping[str, Array]) -> Array:
        """Gradients by slab as rows."""
        parts = []
        for slab in self.layout.slabs.values():
            parts.append(grads[slab.name].reshape(-1))
            if slab.rows * ROW > slab.size:
                parts.append(jnp.zeros(slab.rows * ROW - slab.size, parts[-1].dtype))
        return jnp.concatenate(parts).reshape(-1, ROW)

    def by_group(self, rows: Array) -> Array:
        """Sums over the rows of every group; rows are on the last axis."""
        return jnp.where(self.member, rows[..., None, :], 0).sum(-1)

    def apply(self, state: Tree, grads: Mapping[str, Array]) -> tuple[Tree, Tree]:
        """What Adam, spectral norm and targets make of the state (ĝ in `grad`); also norms and σ."""
        signals, owner, (w, m, v) = self.net.signals, self.layout.owner, (state[n] for n in ("params", "m", "v"))
        # Barriers: gradients are gathered once and Adam is one kernel that writes in place, not part of its readers.
        g = jax.lax.optimization_barrier(self.packed(grads))
        norms = jnp.sqrt(self.by_group(jnp.square(g).sum(1)))
        ok = jnp.isfinite(norms).all()
        t = state["t"] + 1.0
        bounds = jnp.where(state["bounds"] != 0.0, jnp.maximum(state["bounds"], signals["eps_clamp_floor"]), jnp.inf)
        scale = jnp.minimum(1.0, self.clips.astype(norms.dtype) / (norms + 1e-6))
        weight, high_m, high_v, high, scale = jnp.concatenate([bounds, scale[None]])[:, owner, None]
        beta1, beta2 = signals["beta1"], signals["beta2"]
        g = jnp.clip(scale * g, -high, high)
        new_m = jnp.clip(m + (1.0 - beta1) * (g - m), -high_m, high_m)
        new_v = jnp.minimum(v + (1.0 - beta2) * (g * g - v), high_v)
        corrected1 = -jnp.expm1(t * math.log(beta1)) if beta1 else 1.0
        root2 = jnp.sqrt(-jnp.expm1(t * math.log(beta2))) if beta2 else 1.0
        step = (root2 / corrected1) * new_m / (jnp.sqrt(new_v) + signals["adam_eps"] * root2)
        if signals["weight_decay"]:
            step += self.decay.astype(w.dtype) * w
        weight = jnp.where(self.layout.matrix[:, None], weight, jnp.inf)
        new_w = jnp.clip(w - self.rates.astype(w.dtype) * step, -weight, weight)
        moved = (jnp.where(ok, new, old) for new, old in ((new_w, w), (new_m, m), (new_v, v)))
        w, m, v, g = jax.lax.optimization_barrier((*moved, g))
        w, sn_v, sigma = self.spectral_norm(w, state["sn_v"], ok)
        rows, tau = self.layout.target_rows, jnp.where(ok, signals["polyak_tau"], 0.0).astype(t.dtype)
        target = state["target"] + tau * (w[:rows] - state["target"])
        made = {"params": w, "m": m, "v": v, "grad": g, "target": target, "sn_v": sn_v}
        made |= {"t": jnp.where(ok, t, state["t"]), "skipped": state["skipped"] + ~ok, "ok": ok}
        return state | made, {"norms": norms, "sigma": sigma}

    def spectral_norm(self, params: Array, v: Array, ok: Array) -> tuple[Array, Array, Array]:
        """One power iteration per branch and w ×= sn_max/σ where σ exceeds sn_max: rows, v [D, K], σ before scaling.

        With y = w·v and z = wᵀ·y: u = y/‖y‖, wᵀu = z/‖y‖, so that σ = uᵀ·w·v' = ‖z‖/‖y‖ needs no third product.
        """
        slab = self.layout.slabs["w_fc"]
        w = self.layout.view(params, "w_fc")
        y = (w * v[:, None]).sum(2)
        z = (w * y[..., None]).sum(1)
        u_norm = jnp.maximum(jnp.sqrt(jnp.square(y).sum(1)), 1e-12)
        back = jnp.sqrt(jnp.square(z).sum(1)) / u_norm  # ‖wᵀu‖
        v_norm = jnp.maximum(back, 1e-12)
        sigma, limit = back * (back / v_norm), self.net.signals["sn_max"]
        factor = jnp.where(ok & jnp.isfinite(sigma) & (sigma > limit), limit / sigma, 1.0)
        new_v = jnp.where(ok, z / (u_norm * v_norm)[:, None], v)
        flat = jax.lax.dynamic_update_slice(params.reshape(-1), (w * factor[:, None, None]).reshape(-1), (slab.start,))
        return flat.reshape(params.shape), new_v, sigma

    def oracles(self, state: Tree) -> Tree:
        """The state with its bounds moved towards p99 of every group and family, exact, by search.

        |x| as an integer is in the same order as |x| itself. Every pass settles four bits of all p99: of sixteen
        candidates the highest below which no more elements lie than the index allows. Padding is 0: as many elements
        more below.
        """
        layout = self.layout
        rows = jnp.stack([state[name] for name in ("params", "m", "v", "grad")])
        bits = jnp.abs(rows).astype(jnp.float32).view(jnp.uint32)
        index = (99 * layout.sizes + 99) // 100 - 1 + layout.padded - layout.sizes
        digits = np.arange(1, 2**DIGIT, dtype=np.uint32)
        found = jnp.zeros((4, len(layout.groups)), jnp.uint32)
        for shift in reversed(range(0, 32, DIGIT)):
            candidates = found[..., None] + (digits << np.uint32(shift))  # [4, G, 15]
            below = bits[:, :, None] < candidates[:, layout.owner][..., None]  # [4, R, 15, 128]
            counts = self.by_group(below.sum(3, dtype=jnp.int32).transpose(0, 2, 1))  # [4, 15, G]
            taken = (counts <= index).sum(1).astype(jnp.uint32)
            found += taken << np.uint32(shift)
        raw = self.net.signals["oracle_headroom"] * found.view(jnp.float32).astype(rows.dtype)
        old = state["bounds"]
        moved = jnp.where(old == 0.0, raw, old + self.net.signals["oracle_beta"] * (raw - old))
        return state | {"bounds": jnp.where(state["ok"], moved, old)}
