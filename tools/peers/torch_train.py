"""State, gate, optimizer and oracles of the step in PyTorch (docs/step.md, sections 4 to 6); all in place.

A skipped step is one whose coefficients let nothing move (lerp weights of 0, a rate of 0, no clamps), so that the
guard costs no pass over the parameters and no wait of the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tests.reference.config import GATE_NAMES, READINESS_NAMES, Config
from tests.reference.step import State
from tools.peers.common import bound_table, entries_of, groups_of
from tools.peers.torch_net import Net

#: Elements per row of the row layout: rows belong to one tensor, tensors start at 512 bytes.
ROW = 128
WEIGHT, ADAM_M, ADAM_V, GRAD = range(4)


class TorchState:
    """Everything that a step changes, as tensors; `tensors()` lists the storage."""

    def __init__(self, config: Config, start: State, device: str, dtype: torch.dtype) -> None:
        def scalars(values: Any) -> Tensor:
            return torch.tensor(np.asarray(values), dtype=dtype, device=device)

        state, names = start["state"], [f"b{d}fc" for d in range(len(config.branches))]
        self.gate = scalars([state.get(name, 0.0) for name in GATE_NAMES])
        self.readiness = scalars([state.get(name, 0.0) for name in READINESS_NAMES])
        self.bounds = scalars(bound_table(config, start))
        self.t = scalars(float(start["step"]))
        self.skipped = scalars(0.0)
        self.sn_v = {name: scalars(start["sn_v"][name]) for name in names}

    def small(self) -> list[Tensor]:
        """All but the parameters and their moments."""
        return [self.gate, self.readiness, self.bounds, self.t, self.skipped, *self.sn_v.values()]


class Rows:
    """All tensors in one buffer [R, 128], each padded to whole rows: one kernel per operation for all groups.

    Attributes:
        views: per part (params, m, v, target) the tensors by name, as views.
    """

    parts = ("params", "m", "v", "target")

    def __init__(self, config: Config, start: State, device: str, dtype: torch.dtype) -> None:
        self.entries = entries_of(config)
        counts = [-(-entry.size // ROW) for entry in self.entries]
        self.starts = [sum(counts[:i]) for i in range(len(counts))]
        total, self.target_rows = sum(counts), sum(c for c, e in zip(counts, self.entries, strict=True) if e.target)
        self.buffers = {part: torch.zeros(total, ROW, dtype=dtype, device=device) for part in self.parts[:3]}
        self.buffers["target"] = torch.zeros(self.target_rows, ROW, dtype=dtype, device=device)
        self.grad = torch.zeros(total, ROW, dtype=dtype, device=device)
        self.padding = [c * ROW - e.size for c, e in zip(counts, self.entries, strict=True)]
        self.grad_views = list(self._views(self.grad, False).values())
        self.views = {part: self._views(buffer, part == "target") for part, buffer in self.buffers.items()}
        for part, views in self.views.items():
            for name, view in views.items():
                view.copy_(torch.from_numpy(np.asarray(start[part][name])))
        owners = [entry.group for entry, c in zip(self.entries, counts, strict=True) for _ in range(c)]
        vectors = [0.0 if e.matrix else math.inf for e, c in zip(self.entries, counts, strict=True) for _ in range(c)]
        self.owner = torch.tensor(owners, device=device)
        self.no_weight_bound = torch.tensor(vectors, dtype=dtype, device=device)[:, None]
        self.spans = [(owners.index(g), owners.index(g) + owners.count(g)) for g in range(owners[-1] + 1)]
        self.sizes = [sum(e.size for e in self.entries if e.group == g) for g in range(len(self.spans))]
        signals, groups = start["signals"], groups_of(config)
        rates = torch.tensor([signals[f"lr.{groups[g]}"] for g in owners], dtype=dtype, device=device)[:, None]
        self.rate = -rates
        self.decay = torch.where(self.no_weight_bound == 0.0, -rates * signals["weight_decay"], 0.0)

    def _views(self, buffer: Tensor, target: bool) -> dict[str, Tensor]:
        flat, kept = buffer.view(-1), [(s, e) for s, e in zip(self.starts, self.entries, strict=True)]
        return {e.name: flat[s * ROW : s * ROW + e.size].view(e.shape) for s, e in kept if e.target or not target}

    def tensors(self) -> list[Tensor]:
        """The storage."""
        return list(self.buffers.values())

    def adopt(self, buffers: Sequence[Tensor]) -> None:
        """Take these tensors for the storage (order of `tensors`)."""
        self.buffers = dict(zip(self.buffers, buffers, strict=True))
        self.views = {part: self._views(buffer, part == "target") for part, buffer in self.buffers.items()}

    def norms(self, grads: Mapping[str, Tensor], fusing: bool) -> Tensor:
        """‖g‖ of every group; gathers the gradients in one buffer, a new one where a compiler fuses what follows."""
        found = [grads[entry.name] for entry in self.entries]
        if fusing:
            padded = [functional.pad(x.reshape(-1), (0, n)) for x, n in zip(found, self.padding, strict=True)]
            self.grad = torch.cat(padded).view(-1, ROW)
        else:
            torch._foreach_copy_(self.grad_views, found)
        return torch.stack(torch._foreach_norm([self.grad[a:b] for a, b in self.spans]))

    def update(self, net: Net, ok: Tensor, scale: Tensor, bounds: Tensor, t: Tensor) -> None:
        """Clip and clamped Adam; `grad` then holds ĝ."""
        signals, g = net.signals, self.grad
        w, m, v = (self.buffers[part] for part in ("params", "m", "v"))
        table = torch.cat([scale[None], bounds])[:, self.owner]
        scale_r, weight_r, m_r, v_r, grad_r = (row[:, None] for row in table)
        live = ok.to(t.dtype)
        beta1, beta2, factor, eps = adam_scalars(signals, live, t)
        g.masked_fill_(~ok, 0.0).mul_(scale_r).clamp_(-grad_r, grad_r)
        m.lerp_(g, beta1).clamp_(-m_r, m_r)
        torch.minimum(v.lerp_(g * g, beta2), v_r, out=v)
        step = m / v.sqrt().add_(eps)
        if signals["weight_decay"]:
            w.addcmul_(w, self.decay * live)
        w.addcmul_(step, self.rate * factor)
        bound = weight_r + self.no_weight_bound
        w.clamp_(-bound, bound)

    def polyak(self, tau: Tensor) -> None:
        """θ' += τ(θ − θ')."""
        self.buffers["target"].lerp_(self.buffers["params"][: self.target_rows], tau)

    def family_parts(self) -> list[list[Tensor]]:
        """Per group its elements of the four families; padding is 0, below every |x|."""
        families = (self.buffers["params"], self.buffers["m"], self.buffers["v"], self.grad)
        return [[x[a:b].view(-1) for x in families] for a, b in self.spans]


def adam_scalars(signals: Mapping[str, float], live: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lerp weights of m and v, factor of the rate, and eps scaled by √(1 − β2ᵗ); the first three times `live`.

    m̂/(√v̂ + eps) = √(1 − β2ᵗ)/(1 − β1ᵗ) · m/(√v + eps·√(1 − β2ᵗ)); 1 − βᵗ by expm1, which keeps its digits.
    """
    beta1, beta2 = signals["beta1"], signals["beta2"]
    corrected1 = -torch.expm1(t * math.log(beta1)) if beta1 else torch.ones_like(t)
    root2 = torch.sqrt(-torch.expm1(t * math.log(beta2))) if beta2 else torch.ones_like(t)
    return live * (1.0 - beta1), live * (1.0 - beta2), live * (root2 / corrected1), signals["adam_eps"] * root2


def gate_update(net: Net, s: TorchState, nb: Tensor, valid: Tensor, count: Tensor, labels: Tensor, q: Tensor) -> Tensor:
    """Gate state of this step (section 4), in place; returns alpha_grad."""
    signals, old = net.signals, s.gate
    up = torch.nan_to_num(nb, nan=-math.inf).argmax(1)
    has = valid.any()
    acc = (valid & (up == labels)).sum().to(old.dtype) / count
    dis = torch.zeros_like(acc)
    if net.config.branches[0] == 3:
        side = torch.nan_to_num(q[:, :3], nan=-math.inf).argmax(1)
        dis = ((2 * up - 1) * (side - 1) < 0).to(old.dtype).mean()
    seen, alpha = old[5], old[6]
    dev = acc - old[1]
    rates = [signals[name] for name in ("acc_beta_short", "acc_beta_long", "acc_beta_long", "disagree_beta")]
    goal = torch.stack([acc, acc, dev * dev, dis])
    first = torch.stack([acc, acc, acc * (1.0 - acc) / count, dis])
    moved = torch.stack([torch.lerp(old[i], goal[i], rate) for i, rate in enumerate(rates)])
    averages = torch.where(has, torch.where(seen == 0.0, first, moved), old[:4])
    short, var, ema = averages[0], averages[2], averages[3]
    opened = torch.where(short > 0.5 + signals["gate_open_margin"], 1.0, old[4])
    opened = torch.where(short < 0.5 + signals["gate_close_margin"], 0.0, opened)
    score = signals["gate_gain"] * (short - 0.5 - signals["gate_margin"]) * torch.rsqrt(var + 1e-4)
    raw = opened * torch.sigmoid(score) * (1.0 - ema)
    alpha = torch.nan_to_num(torch.lerp(alpha, raw, signals["alpha_beta"]), 0.0, 0.0, 0.0).clamp(0.0, 1.0)
    new = torch.cat([averages, torch.stack([opened, torch.ones_like(opened), alpha])])
    s.gate.copy_(torch.where(has | (seen != 0.0), new, old))
    return s.gate[6]


def readiness_update(net: Net, s: TorchState, loss: Tensor) -> None:
    """IQN readiness at the end of a step (section 4), in place; a non-finite loss changes nothing."""
    beta, (seen, ema, ref, readiness) = net.signals["readiness_beta"], s.readiness.unbind()
    warm = seen < net.signals["readiness_warmup"]
    warm_ref = ref + (loss - ref) / (seen + 1.0)
    new_ema = torch.where(warm, warm_ref, torch.lerp(ema, loss, beta))
    new_ref = torch.where(warm, warm_ref, torch.maximum(ref, new_ema))
    raw = torch.where(warm | (new_ref <= 0.0), 0.0, (1.0 - new_ema / new_ref).clamp(0.0, 1.0))
    new = torch.stack([seen + 1.0, new_ema, new_ref, torch.lerp(readiness, raw, beta).clamp(0.0, 1.0)])
    s.readiness.copy_(torch.where(torch.isfinite(loss), new, s.readiness))


def spectral_norm(net: Net, s: TorchState, params: Mapping[str, Tensor], ok: Tensor) -> Tensor:
    """One power iteration per branch and w ×= sn_max/σ where σ exceeds sn_max; returns every σ before scaling.

    With y = w·v and z = wᵀ·y: u = y/‖y‖, wᵀu = z/‖y‖, so that σ = uᵀ·w·v' = ‖z‖/‖y‖ needs no third product.
    """
    weights, vs = [params[f"w_{name}"] for name in s.sn_v], list(s.sn_v.values())
    y = [torch.mv(w, v) for w, v in zip(weights, vs, strict=True)]
    z = [torch.mv(w.t(), x) for w, x in zip(weights, y, strict=True)]
    norms = torch.stack(torch._foreach_norm([*y, *z]))
    count = len(y)
    u_norm = norms[:count].clamp_min(1e-12)
    back = norms[count:] / u_norm  # ‖wᵀu‖
    v_norm = back.clamp_min(1e-12)
    sigma = back * (back / v_norm)
    limit = net.signals["sn_max"]
    factor = torch.where(ok & torch.isfinite(sigma) & (sigma > limit), limit / sigma, 1.0)
    inverse = 1.0 / (u_norm * v_norm)
    for i, (w, v) in enumerate(zip(weights, vs, strict=True)):
        w.mul_(factor[i])
        v.copy_(torch.where(ok, z[i] * inverse[i], v))
    return sigma


def oracles(net: Net, s: TorchState, store: Rows, ok: Tensor) -> None:
    """p99 of every group and family, exact; the smallest of the largest n − index values."""
    found = []
    for n, parts in zip(store.sizes, store.family_parts(), strict=True):
        from_top = n - ((99 * n + 99) // 100 - 1)
        found.append(torch.stack(parts).abs_().topk(from_top, dim=1, sorted=False).values.amin(1))
    raw = net.signals["oracle_headroom"] * torch.stack(found, dim=1)
    new = torch.where(s.bounds == 0.0, raw, torch.lerp(s.bounds, raw, net.signals["oracle_beta"]))
    s.bounds.copy_(torch.where(ok, new, s.bounds))


def optimize(net: Net, s: TorchState, store: Rows, clips: Tensor, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Norms, guard, Adam, spectral norm and targets, in place. Returns norms, σ and whether the step counts."""
    norms = store.norms(grads, net.fusing)
    ok = torch.isfinite(norms).all()
    t = s.t + 1.0
    floor = net.signals["eps_clamp_floor"]
    bounds = torch.where((s.bounds != 0.0) & ok, s.bounds.clamp_min(floor), math.inf)
    scale = torch.where(ok, (clips / (norms + 1e-6)).clamp_max(1.0), 1.0)
    store.update(net, ok, scale, bounds, t)
    sigma = spectral_norm(net, s, store.views["params"], ok)
    store.polyak(ok.to(t.dtype) * net.signals["polyak_tau"])
    s.t.add_(ok)
    s.skipped.add_(~ok)
    return {"norms": norms, "sigma": sigma, "ok": ok}
