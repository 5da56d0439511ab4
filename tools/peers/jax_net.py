"""The networks of the step in JAX (docs/step.md, section 2), on planes (`jax_ops`).

Planes of the encoder and the heads: online at s, online at s', target at s'. The auxiliary nets have the first two, as
rows of one product, since both have the same weights; the quantile network has the first and the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference.config import Config
from tools.peers.common import AUXILIARY, ENCODER
from tools.peers.jax_layout import Array, Layout
from tools.peers.jax_ops import affine, attend, glu_norm, mix, narrow, scaled, single

Tree = dict[str, Array]
Params = Mapping[str, Array]
PLANES = 3


@jax.custom_vjp
def decoders(h2: Array, w: Array, b: Array, scale: Array) -> Array:
    """h2·wᵀ + b; what enters h2 is scaled by column, what enters w and b is not."""
    return h2 @ w.T + b


def _decoders_backward(saved: Any, dy: Array) -> tuple[Array | None, ...]:
    h2, w, scale = saved
    return scaled(scale, dy) @ w, dy.T @ h2, dy.sum(0), None


decoders.defvjp(lambda h2, w, b, scale: (decoders(h2, w, b, scale), (h2, w, scale)), _decoders_backward)


class Net:
    """The networks of one configuration; signals are constants of the traced step."""

    def __init__(self, config: Config, layout: Layout, signals: Mapping[str, float]) -> None:
        self.config, self.layout, self.signals = config, layout, signals
        self.count, self.actions = len(config.branches), max(config.branches)
        self.z = np.asarray(config.atoms_z)
        #: Actions that exist, [D, 1, n]: branches with fewer than the widest are padded.
        self.valid = (np.arange(self.actions) < np.array(config.branches)[:, None])[:, None]
        #: The branches in the order in which they can be computed: the second sees the first's q.
        order = [[d for d in range(self.count) if d != 1], [1]]
        self.stages = order if self.count > 1 else order[:1]
        slabs = self.layout.slabs.values()
        self.twice = [slab.name for slab in slabs if slab.target]
        self.once = [slab.name for slab in slabs if not slab.target]
        kinds = dict.fromkeys(ENCODER, "encoder") | dict.fromkeys(AUXILIARY, "aux")
        self.kinds = {slab.name: kinds.get(layout.groups[slab.group], "heads") for slab in slabs}
        self.columns = np.repeat(np.arange(self.count), config.branches)

    def parameters(self, params: Array, target: Array) -> tuple[Tree, Tree]:
        """Slabs of networks with a target copy as planes, and the other slabs."""
        view = self.layout.view
        planes = {n: jnp.stack([view(params, n), view(params, n), view(target, n)]) for n in self.twice}
        return planes, {n: view(params, n) for n in self.once}

    def part(self, weights: Params, kind: str) -> Tree:
        """The slabs of the encoder, of the auxiliary nets ("aux") or of all the others ("heads")."""
        return {n: x for n, x in weights.items() if self.kinds[n] == kind}

    def encoder(self, w: Params, states: Array) -> tuple[Array, Array]:
        """h2 and h1 of attention and gated residual trunk; states are [3, B, S]."""
        config, x = self.config, states
        if config.tokens:
            tokens = states.reshape(PLANES, -1, config.state // config.tokens)
            mixed = attend(affine(tokens, w["w_qkv"], None, "", 1, None), config.tokens)
            x = states + affine(mixed, w["w_o"], None, "", 1, None).reshape(states.shape)
        h1 = affine(x, w["w_s1"], w["b_s1"], "elu", 1, None)
        glu = affine(affine(h1, w["w_s2"], w["b_s2"], "elu", 1, None), w["w_glu"], w["b_glu"], "", 1, None)
        skip = affine(h1, w["w_skip"], None, "", 1, None) if "w_skip" in w else h1
        return glu_norm(glu, skip, w["ln_g"], w["ln_b"]), h1

    def aux(self, w: Params, h1: Array) -> tuple[Array, Array]:
        """Logits of both heads [2, B, 2 + R] and the wire [2, B]; h1 is that of the first two planes."""
        batch = h1.shape[1]

        def layer(x: Array, name: str, activation: str) -> Array:
            return affine(x, w[f"w_{name}"][None], w[f"b_{name}"][None], activation, 1, batch)

        out = h1.reshape(1, 2 * batch, -1)
        for name, activation in (("a1", "elu"), ("a2", "elu"), ("a3", ""), ("aux1", "elu")):
            out = layer(out, name, activation)
        last, bias = w["w_nb2"], w["b_nb2"]
        if self.config.has_regime:  # both heads' last layers as one: each reads its half of what the first layers gave
            rows, columns = last.shape
            corner = jnp.pad(last, [(0, self.config.regimes), (0, columns)])
            last = corner + jnp.pad(w["w_rg2"], [(rows, 0), (columns, 0)])
            bias = jnp.concatenate([bias, w["b_rg2"]])
        logits = affine(out, last[None], bias[None], "", 1, batch)[0].reshape(2, batch, -1)
        return logits, jnp.tanh(0.5 * (logits[:, :, 1] - logits[:, :, 0]))

    def heads(self, w: Params, h2: Array, wire: Array | None, ofi: Array | None) -> tuple[Array, list[Array]]:
        """Value logits [3, B, K] and advantages by stage, each [3, D', B, n, K]."""
        config, batch = self.config, h2.shape[1]
        fc = w["w_fc"]
        first = fc[:, :, :, : config.h2].reshape(PLANES, -1, config.h2)
        joined = jnp.concatenate([w["w_v1"], first], axis=1)
        bias = jnp.concatenate([w["b_v1"], w["b_fc"].reshape(PLANES, -1)], axis=1)
        base = affine(h2, joined, bias, "", 1, None)
        value = affine(jnp.maximum(base[:, :, : config.value_h], 0.0), w["w_v2"], w["b_v2"], "", 1, None)
        hidden = base[:, :, config.value_h :].reshape(PLANES, batch, self.count, config.adv_h)
        embedded = None if ofi is None else affine(ofi, w["w_ofi"], w["b_ofi"], "tanh", 1, None)
        found: list[Array] = []
        for stage in self.stages:
            parts = []
            for d in stage:
                extra = embedded if d else None if wire is None else wire[:, :, None]
                if d == 1:
                    q = self.q_of(self.dueling(value, found[0][:, :1], 0))[:, 0, :, : config.branches[0]]
                    extra = jax.lax.stop_gradient(jax.nn.softmax(q))
                part = hidden[:, :, d]
                if extra is not None:
                    part = part + narrow(extra, fc[:, d, :, config.h2 : config.h2 + extra.shape[2]])
                parts.append(jnp.maximum(part, 0.0))
            x = jnp.stack(parts, axis=1).reshape(-1, batch, config.adv_h)
            out, b_out = (jnp.stack([w[n][:, d] for d in stage], axis=1) for n in ("w_out", "b_out"))
            planes = PLANES * len(stage)
            adv = affine(x, out.reshape(planes, -1, config.adv_h), b_out.reshape(planes, -1), "", len(stage), None)
            found.append(adv.reshape(PLANES, len(stage), batch, self.actions, config.atoms))
        return value, found

    def dueling(self, value: Array, adv: Array, stage: int) -> Array:
        """Logits [P, D', B, n, K] of a stage; advantages of padded actions are 0 and count for nothing."""
        counts = np.array([self.config.branches[d] for d in self.stages[stage]][: adv.shape[1]])
        mean = adv.sum(3, keepdims=True) * (1.0 / counts)[:, None, None, None].astype(adv.dtype)
        return value[:, None, :, None] + (adv - mean)

    def ordered(self, stages: list[Array]) -> Array:
        """Arrays [P, D', ...] of all stages as one [P, D, ...] in the order of the branches."""
        if len(stages) == 1:
            return stages[0]
        return jnp.concatenate([stages[0][:, :1], stages[1], stages[0][:, 1:]], axis=1)

    def q_of(self, logits: Array) -> Array:
        """Expected value of every action."""
        return (jax.nn.softmax(logits) * self.z.astype(logits.dtype)).sum(-1)

    def quantiles(self, w: Params, h2: Array, taus: list[Array]) -> list[Array]:
        """θ [B, N, Σn_d] of the online network at s and of the target network at s', by their fractions [B, N]."""
        names = ("w_phi", "b_phi", "w_iq1", "b_iq1", "w_iq2", "b_iq2")
        if taus[0].shape == taus[1].shape:
            both = {n: w[n][::2] for n in names}
            return list(self._quantiles(both, h2[::2], jnp.stack(taus)))
        one, other = ({n: w[n][i : i + 1] for n in names} for i in (0, 2))
        target = jax.lax.stop_gradient(self._quantiles(other, h2[2:], taus[1][None])[0])
        return [self._quantiles(one, h2[:1], taus[0][None])[0], target]

    def _quantiles(self, w: Params, h2: Array, tau: Array) -> Array:
        planes, batch, count = tau.shape
        multiples = (np.pi * np.arange(self.config.iqn_cos)).astype(tau.dtype)
        cosines = jnp.cos(tau[..., None] * multiples).reshape(planes, batch * count, -1)
        mixed = mix(affine(cosines, w["w_phi"], w["b_phi"], "relu", 1, None), h2)
        hidden = affine(mixed, w["w_iq1"], w["b_iq1"], "relu", 1, None)
        return affine(hidden, w["w_iq2"], w["b_iq2"], "", 1, None).reshape(planes, batch, count, -1)

    def pick(self, theta: Array, actions: Array) -> Array:
        """θ [B, N, Σn_d] of one action per branch [D, B], as [D, B, N]."""
        offsets = np.cumsum([0, *self.config.branches[:-1]])
        taken = jnp.take_along_axis(theta, (actions.T + offsets)[:, None], axis=2)
        return taken.transpose(2, 0, 1)

    def spread(self, taken: Array, actions: Array) -> Array:
        """The transpose of `pick`: [D, B, N] into the columns of the actions, 0 into the others."""
        own = np.concatenate([np.arange(n) for n in self.config.branches])
        hot = actions[self.columns] == own[:, None]  # [Σn_d, B]
        return jnp.where(hot[..., None], taken[self.columns], 0.0).transpose(1, 2, 0)

    def decoded(self, w: Params, h2: Array) -> Array:
        """What the decoders that there are make of h2: state, target h2, ensemble, side by side [B, ...]."""
        config, signals = self.config, self.signals
        widths = {"rec": config.state * config.rec, "pred": config.h2 * config.pred}
        widths["ens"] = config.ens * config.branches[0]
        scale = np.repeat([signals[f"w_{n}"] for n in widths], list(widths.values())).astype(h2.dtype)
        return decoders(h2, w["w_dec"], w["b_dec"], scale)

    def expectiles(self, w: Params, state: Array) -> Array:
        """V of the high and the low expectile net [2, B]."""

        def both(name: str) -> Array:
            return jnp.stack([w[name], w[f"{name.replace('high', 'low')}"]])

        x = jnp.broadcast_to(state, (2, *state.shape))
        hidden = affine(x, both("w_iqlhigh1"), both("b_iqlhigh1"), "relu", 2, None)
        return affine(hidden, both("w_iqlhigh2"), both("b_iqlhigh2"), "", 2, None)[:, :, 0]

    def predicted(self, w: Params, state: Array, actions: Array) -> Array:
        """ŝ' of the curiosity model; actions are [D, B]."""
        pairs = zip(actions, self.config.branches, strict=True)
        hot = [(chosen[:, None] == np.arange(n)).astype(state.dtype) for chosen, n in pairs]
        hidden = single(jnp.concatenate([state, *hot], axis=1), w["w_c1"], w["b_c1"], "relu")
        return single(hidden, w["w_c2"], w["b_c2"])
