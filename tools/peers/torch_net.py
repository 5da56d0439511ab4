"""Forward, losses and gradients of the step in PyTorch (docs/step.md, sections 2 to 4), by autograd.

Paths that are scaled or stopped are cut at leaves: every head reads a detached h2 of its own, and autograd runs three
times: losses down to the leaves and head parameters, auxiliary nets (with what the wire received, times the gate), and
the encoder (with the scaled sum of what the leaves received). Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from tests.reference.config import Config, group_shapes
from tools.peers.common import AUXILIARY, ENCODER

Params = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]
HEAD_LEVEL = ("c51", "cql", "distill", "nb", "regime")
FULL_SCALE = ("iqn", "ens", "rec", "pred", "iql_high", "iql_low", "curiosity")


class Net:
    """The networks of one configuration, with their constants on one device.

    Args:
        config: sizes of the step.
        signals: its scalars, as constants.
        like: a tensor of the dtype and on the device to compute in.
        fusing: a compiler fuses what follows: the C51 projection is a sum over all atoms, not a scatter.
        complete: also return what only the golden files ask for.
    """

    def __init__(
        self,
        config: Config,
        signals: Mapping[str, float],
        like: Tensor,
        *,
        fusing: bool = False,
        complete: bool = False,
    ) -> None:
        self.config, self.signals, self.fusing, self.complete = config, signals, fusing, complete
        self.count = len(config.branches)
        self.even = len(set(config.branches)) == 1

        def constant(values: object, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=like.device)

        self.z = constant(config.atoms_z.tolist())
        self.atoms = constant(list(range(config.atoms)))
        self.multiples = constant([math.pi * i for i in range(config.iqn_cos)])
        self.offsets = constant([0, *accumulate(config.branches)][:-1], torch.int64)
        self.column_branch = constant([d for d, n in enumerate(config.branches) for _ in range(n)], torch.int64)
        self.column_action = constant([a for n in config.branches for a in range(n)], torch.int64)
        #: What a loss weighs for its own parameters: the head-level ones their signal, others 1; None for 0.
        weights = dict.fromkeys(FULL_SCALE, 1.0) | {name: signals[f"w_{name}"] for name in HEAD_LEVEL}
        self.seeds = {name: constant(w) if w else None for name, w in weights.items()}
        self.iql_tau = constant([signals["iql_tau_high"], signals["iql_tau_low"]])
        tables = group_shapes(config)
        self.encoder_names = [n for g in ENCODER for n in tables.get(g, ())]
        self.aux_names = [n for g in AUXILIARY for n in tables.get(g, ())]
        taken = {*self.encoder_names, *self.aux_names}
        self.head_names = [n for table in tables.values() for n in table if n not in taken]

    # -- networks --------------------------------------------------------------------------------------------------

    def encoder(self, p: Params, state: Tensor) -> tuple[Tensor, Tensor]:
        """h1 and h2 of attention and gated residual trunk."""
        h1 = functional.elu(functional.linear(self._attention(p, state), p["w_s1"], p["b_s1"]))
        u = functional.elu(functional.linear(h1, p["w_s2"], p["b_s2"]))
        gated = functional.glu(functional.linear(u, p["w_glu"], p["b_glu"]))
        y = torch.addmm(gated, h1, p["w_skip"].t()) if "w_skip" in p else h1 + gated
        return h1, functional.layer_norm(y, y.shape[1:], p["ln_g"], p["ln_b"], 1e-5)

    def _attention(self, p: Params, state: Tensor) -> Tensor:
        config = self.config
        if not config.tokens:
            return state
        t = state.reshape(state.shape[0] * config.tokens, -1)
        qkv = functional.linear(t, torch.cat([p["w_q"], p["w_k"], p["w_val"]]))
        q, k, v = qkv.view(state.shape[0], 1, config.tokens, 3 * config.attn).split(config.attn, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return torch.addmm(t, mixed.reshape(t.shape[0], config.attn), p["w_o"].t()).view(state.shape)

    def aux(self, p: Params, h1: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Next-bar logits, regime logits and the wire, p_up − p_down = tanh of half the difference of the logits."""
        a1 = functional.elu(functional.linear(h1, p["w_a1"], p["b_a1"]))
        a2 = functional.elu(functional.linear(a1, p["w_a2"], p["b_a2"]))
        out = functional.linear(a2, p["w_a3"], p["b_a3"])
        nb = functional.linear(functional.elu(functional.linear(out, p["w_nb1"], p["b_nb1"])), p["w_nb2"], p["b_nb2"])
        rg = None
        if self.config.has_regime:
            rg = functional.linear(
                functional.elu(functional.linear(out, p["w_rg1"], p["b_rg1"])), p["w_rg2"], p["b_rg2"]
            )
        return nb, rg, torch.tanh(0.5 * (nb[:, 1] - nb[:, 0]))

    def logits(self, p: Params, h2: Tensor, wire: Tensor | None, ofi: Tensor | None) -> Tensor:
        """Dueling logits of all actions as [B, Σn_d, K]."""
        config = self.config
        value = functional.linear(functional.relu(functional.linear(h2, p["w_v1"], p["b_v1"])), p["w_v2"], p["b_v2"])[
            :, None
        ]
        embedded = (
            torch.tanh(functional.linear(ofi, p["w_ofi"], p["b_ofi"])) if config.has_ofi and ofi is not None else None
        )
        advantages: list[Tensor] = []
        for d, n in enumerate(config.branches):
            if d == 1:
                with torch.no_grad():
                    first = self.q_of(value + advantages[0] - advantages[0].mean(1, keepdim=True)).softmax(-1)
            extra = (wire[:, None] if wire is not None else None) if d == 0 else first if d == 1 else embedded
            c = h2 if extra is None else torch.cat([h2, extra], dim=1)
            hidden = functional.relu(functional.linear(c, p[f"w_b{d}fc"], p[f"b_b{d}fc"]))
            advantages.append(functional.linear(hidden, p[f"w_b{d}out"], p[f"b_b{d}out"]).view(-1, n, config.atoms))
        if self.even:
            stacked = torch.stack(advantages, dim=1)
            return (value[:, None] + (stacked - stacked.mean(2, keepdim=True))).flatten(1, 2)
        return value + torch.cat([x - x.mean(1, keepdim=True) for x in advantages], dim=1)

    def q_of(self, logits: Tensor) -> Tensor:
        """Expected value of every action."""
        return torch.matmul(logits.softmax(-1), self.z)

    def iqn(self, p: Params, h2: Tensor, tau: Tensor) -> Tensor:
        """θ as [B, N, Σn_d]."""
        cosines = torch.cos(tau[:, :, None] * self.multiples)
        mixed = h2[:, None] * functional.relu(functional.linear(cosines, p["w_phi"], p["b_phi"]))
        return functional.linear(
            functional.relu(functional.linear(mixed, p["w_iq1"], p["b_iq1"])), p["w_iq2"], p["b_iq2"]
        )

    def mlp(self, p: Params, name: str, x: Tensor) -> Tensor:
        """A relu MLP of two layers."""
        return functional.linear(
            functional.relu(functional.linear(x, p[f"w_{name}1"], p[f"b_{name}1"])), p[f"w_{name}2"], p[f"b_{name}2"]
        )

    def argmax(self, q: Tensor) -> Tensor:
        """Best action per branch [B, D]; q is finite or NaN, and NaN never wins."""
        ordered = torch.nan_to_num(q, nan=-math.inf)
        if self.even:
            return ordered.view(q.shape[0], self.count, -1).argmax(-1)
        return torch.stack([part.argmax(-1) for part in ordered.split(self.config.branches, dim=1)], dim=1)

    # -- targets ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def next_state(self, p: Params, target: Params, batch: Batch) -> dict[str, Tensor]:
        """Best actions of the online networks at s', and what the target networks say of them there."""
        h1, h2 = self.encoder(p, batch["next_state"])
        wire = self.aux(p, h1)[2] if self.config.aux_h else None
        q_next = self.q_of(self.logits(p, h2, wire, batch.get("next_ofi")))
        best = self.argmax(q_next)
        _, h2_target = self.encoder(target, batch["next_state"])
        logits = self.logits(target, h2_target, wire, batch.get("next_ofi"))
        columns = best + self.offsets
        out = {"best": best, "h2_target": h2_target, "p_target": pick(logits, columns).softmax(-1)}
        if self.config.iqn_quantiles:
            theta = self.iqn(target, h2_target, batch["tau_target"])
            out["theta_target"] = theta.gather(2, columns[:, None].expand(-1, theta.shape[1], -1)).transpose(1, 2)
        if self.complete:
            out |= {"q_next": q_next, "q_target": self.q_of(logits)}
        return out

    def add_scaled(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """x + scale·y. Inductor (2.13) drops the alpha of an addition whose summand is a matrix product."""
        return x + scale * y if self.fusing else torch.add(x, y, alpha=scale)

    def project(self, r: Tensor, disc: Tensor, p_target: Tensor) -> Tensor:
        """Categorical projection of p_target [B, D, K]."""
        config = self.config
        z = torch.addcmul(r[:, None], disc[:, None], self.z).clamp(config.v_min, config.v_max)
        u = (z - config.v_min) * ((config.atoms - 1) / (config.v_max - config.v_min))
        if self.fusing:
            hat = (1.0 - (u[:, :, None] - self.atoms).abs()).clamp_min(0.0)
            return (p_target[:, :, :, None] * hat[:, None]).sum(2)
        low = u.floor()
        share = (u - low)[:, None]
        # An index is clamped as an integer, so that a NaN reward gives a NaN projection and no wild write.
        index = low.long().clamp_(0, config.atoms - 1)[:, None].expand_as(p_target)
        upper = p_target * share
        m = torch.zeros_like(p_target).scatter_add_(2, index, p_target - upper)
        return m.scatter_add_(2, (index + 1).clamp_max_(config.atoms - 1), upper)


def pick(x: Tensor, columns: Tensor) -> Tensor:
    """x[b, columns[b, d]] of x [B, Σn_d, K] as [B, D, K]."""
    return x.gather(1, columns[:, :, None].expand(-1, -1, x.shape[2]))


@dataclass
class Scene:
    """What the losses of a step read and leave: leaves of h2, losses with their weights, outputs."""

    batch: Batch
    after: dict[str, Tensor]
    live: Tensor
    live_count: Tensor
    reward: Tensor
    columns: Tensor
    leaves: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)
    out: dict[str, Tensor] = field(default_factory=dict)
