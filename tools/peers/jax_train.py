"""Gate, optimizer and oracles of the step in JAX (docs/step.md, sections 4 to 6), on blocks of parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference.config import Config
from tools.peers.common import Block, groups_of
from tools.peers.jax_net import Array, Net, Tree

WEIGHT, ADAM_M, ADAM_V, GRAD = range(4)


def unpack(blocks: Sequence[Block], arrays: Sequence[Array]) -> Tree:
    """Tensors by name from the arrays of their blocks."""
    tree: Tree = {}
    for block, x in zip(blocks, arrays, strict=True):
        ends = np.cumsum([e.size for e in block.entries])
        flat = x.reshape(-1)
        parts = [flat[end - e.size : end].reshape(e.shape) for e, end in zip(block.entries, ends, strict=True)]
        tree |= {e.name: part for e, part in zip(block.entries, parts, strict=True)}
    return tree


def pack(blocks: Sequence[Block], tree: Mapping[str, Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Arrays of blocks from tensors by name."""
    flat = [[tree[e.name].reshape(-1) for e in block.entries] for block in blocks]
    joined = [jnp.concatenate(parts) if len(parts) > 1 else parts[0] for parts in flat]
    return [x.reshape(shape) for x, shape in zip(joined, shapes, strict=True)]


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


def spectral_norm(net: Net, w: Array, v: Array, ok: Array) -> tuple[Array, Array, Array]:
    """One power iteration and w ×= sn_max/σ where σ exceeds sn_max. Returns w, v and σ before scaling."""
    u = w @ v
    u = u / jnp.maximum(jnp.linalg.norm(u), 1e-12)
    back = w.T @ u
    new = back / jnp.maximum(jnp.linalg.norm(back), 1e-12)
    sigma = back @ new
    limit = net.signals["sn_max"]
    factor = jnp.where(ok & jnp.isfinite(sigma) & (sigma > limit), limit / sigma, 1.0)
    return w * factor, jnp.where(ok, new, v), sigma


class Optimizer:
    """Norms, guard, clamped Adam, spectral norm, targets and oracles on blocks."""

    def __init__(self, config: Config, net: Net, blocks: Sequence[Block]) -> None:
        self.config, self.net, self.blocks = config, net, list(blocks)
        self.groups = groups_of(config)
        self.targets = [block for block in blocks if block.target]
        self.clips = np.array([net.signals[f"clip.{g}"] for g in self.groups])
        self.names = [f"b{d}fc" for d in range(len(config.branches))]

    def apply(self, state: Tree, grads: Tree) -> tuple[Tree, Tree]:
        """What Adam, spectral norm and targets make of the state; also norms, σ and whether the step counts."""
        blocks, signals = self.blocks, self.net.signals
        shapes = [x.shape for x in state["params"]]
        packed = pack(blocks, grads, shapes)
        squares = [jnp.square(g).sum() for g in packed]
        members = [[i for i, b in enumerate(blocks) if b.group == g] for g in range(len(self.groups))]
        norms = jnp.sqrt(jnp.stack([sum(squares[i] for i in part) for part in members]))
        ok = jnp.isfinite(norms).all()
        t = state["t"] + 1.0
        bounds = jnp.where(state["bounds"] != 0.0, jnp.maximum(state["bounds"], signals["eps_clamp_floor"]), jnp.inf)
        scale = jnp.minimum(1.0, self.clips.astype(norms.dtype) / (norms + 1e-6))
        new: dict[str, list[Array]] = {"params": [], "m": [], "v": []}
        entered = []
        for i, block in enumerate(blocks):
            old = tuple(state[part][i] for part in new)
            g, *moved = self._adam(block, packed[i], old, scale[block.group], bounds[:, block.group], t)
            entered.append(g)
            for part, x, y in zip(new, moved, old, strict=True):
                new[part].append(jnp.where(ok, x, y))
        sigma, sn_v = self._spectral(state, new["params"], shapes, ok)
        tau = jnp.where(ok, signals["polyak_tau"], 0.0).astype(t.dtype)
        kept = [x for x, block in zip(new["params"], blocks, strict=True) if block.target]
        target = [old + tau * (x - old) for old, x in zip(state["target"], kept, strict=True)]
        made = new | {"target": target, "sn_v": sn_v, "grad": entered, "t": jnp.where(ok, t, state["t"])}
        made["skipped"] = state["skipped"] + ~ok
        return state | made, {"norms": norms, "sigma": sigma, "ok": ok}

    def _adam(
        self, block: Block, g: Array, old: tuple[Array, ...], scale: Array, bounds: Array, t: Array
    ) -> tuple[Array, Array, Array, Array]:
        """ĝ and the new w, m, v."""
        signals, (w, m, v) = self.net.signals, old
        beta1, beta2 = signals["beta1"], signals["beta2"]
        g = jnp.clip(scale * g, -bounds[GRAD], bounds[GRAD])
        m = jnp.clip(m + (1.0 - beta1) * (g - m), -bounds[ADAM_M], bounds[ADAM_M])
        v = jnp.minimum(v + (1.0 - beta2) * (g * g - v), bounds[ADAM_V])
        corrected1 = -jnp.expm1(t * math.log(beta1)) if beta1 else 1.0
        root2 = jnp.sqrt(-jnp.expm1(t * math.log(beta2))) if beta2 else 1.0
        step = (root2 / corrected1) * m / (jnp.sqrt(v) + signals["adam_eps"] * root2)
        rate = signals[f"lr.{self.groups[block.group]}"]
        if not block.matrix:
            return g, w - rate * step, m, v
        w = w - rate * (step + signals["weight_decay"] * w)
        return g, jnp.clip(w, -bounds[WEIGHT], bounds[WEIGHT]), m, v

    def _spectral(
        self, state: Tree, params: list[Array], shapes: Sequence[tuple[int, ...]], ok: Array
    ) -> tuple[Array, Tree]:
        """Scales w_b{d}fc within `params`; returns every σ and the new vectors."""
        sigmas, vectors = [], {}
        wanted = {f"w_{name}" for name in self.names}
        for i, block in enumerate(self.blocks):
            if not wanted & {e.name for e in block.entries}:
                continue
            tree = unpack([block], [params[i]])
            for name in self.names:
                if f"w_{name}" in tree:
                    w, vectors[name], sigma = spectral_norm(self.net, tree[f"w_{name}"], state["sn_v"][name], ok)
                    tree[f"w_{name}"] = w
                    sigmas.append(sigma)
            params[i] = pack([block], tree, [shapes[i]])[0]
        return jnp.stack(sigmas), vectors

    def oracles(self, state: Tree, ok: Array) -> Array:
        """The bounds after p99 of every group and family, exact, by sorting."""
        rows: list[Any] = []
        for g in range(len(self.groups)):
            members = [i for i, block in enumerate(self.blocks) if block.group == g]
            families = [[state[part][i].reshape(-1) for i in members] for part in ("params", "m", "v", "grad")]
            values = jnp.abs(jnp.stack([jnp.concatenate(parts) for parts in families]))
            n = values.shape[1]
            rows.append(jnp.sort(values, axis=1)[:, (99 * n + 99) // 100 - 1])
        raw = self.net.signals["oracle_headroom"] * jnp.stack(rows, axis=1)
        old = state["bounds"]
        moved = jnp.where(old == 0.0, raw, old + self.net.signals["oracle_beta"] * (raw - old))
        return jnp.where(ok, moved, old)
