"""Norms, guard, clamped Adam, spectral norm, Polyak targets (docs/step.md, 5) and bound oracles (6)."""

from __future__ import annotations

import math

import numpy as np

from .config import FAMILIES, Array, Config, Tree, bound_slot, group_shapes

Signals = dict[str, float]
Bounds = dict[int, float]


def group_norms(config: Config, grads: Tree) -> dict[str, float]:
    """‖g‖₂ of every group over all its tensors."""
    table = group_shapes(config)
    with np.errstate(over="ignore", invalid="ignore"):
        return {g: math.sqrt(sum(float(np.sum(grads[n] ** 2)) for n in names)) for g, names in table.items()}


def bad_groups(norms: dict[str, float]) -> list[str]:
    """Groups whose norm is not finite; any of them makes the whole step a skipped one."""
    return [g for g, norm in norms.items() if not math.isfinite(norm)]


def limit(signals: Signals, bounds: Bounds, group: str, family: str) -> float:
    """max(bound slot, eps_clamp_floor); no clamp while the slot is still 0."""
    slot = bounds[bound_slot(group, family)]
    return max(slot, signals["eps_clamp_floor"]) if slot != 0.0 else math.inf


def clipped(signals: Signals, bounds: Bounds, group: str, norm: float, grad: Array) -> Array:
    """ĝ = clamp(min(1, clip/(‖g‖ + 1e-6))·g, ±G)."""
    bound = limit(signals, bounds, group, "grad")
    return np.clip(min(1.0, signals[f"clip.{group}"] / (norm + 1e-6)) * grad, -bound, bound)


def adam(
    signals: Signals, bounds: Bounds, group: str, t: int, w: Array, g: Array, m: Array, v: Array
) -> tuple[Array, Array, Array]:
    """One tensor's clamped Adam; decay and the weight clamp touch matrices only. Returns w, m, v."""
    beta1, beta2 = signals["beta1"], signals["beta2"]
    bound_m, bound_v = limit(signals, bounds, group, "adam_m"), limit(signals, bounds, group, "adam_v")
    m = np.clip(beta1 * m + (1.0 - beta1) * g, -bound_m, bound_m)
    v = np.minimum(beta2 * v + (1.0 - beta2) * g * g, bound_v)
    update = (m / (1.0 - beta1**t)) / (np.sqrt(v / (1.0 - beta2**t)) + signals["adam_eps"])
    lr = signals[f"lr.{group}"]
    if w.ndim < 2:
        return w - lr * update, m, v
    bound_w = limit(signals, bounds, group, "weight")
    return np.clip(w - lr * (update + signals["weight_decay"] * w), -bound_w, bound_w), m, v


def normalize(x: Array) -> Array:
    """x/max(‖x‖, 1e-12)."""
    return x / max(math.sqrt(float(np.sum(x * x))), 1e-12)


def spectral_norm(w: Array, v: Array, sn_max: float) -> tuple[Array, Array, float]:
    """One power iteration and w ×= sn_max/σ where σ exceeds sn_max. Returns w, v and σ before scaling."""
    u = normalize(w @ v)
    v = normalize(w.T @ u)
    sigma = float(u @ w @ v)
    if math.isfinite(sigma) and sigma > sn_max:
        w = w * (sn_max / sigma)
    return w, v, sigma


def p99(parts: list[Array]) -> float:
    """The sorted |x| at index (99·n + 99)//100 − 1 of a whole group."""
    flat = np.sort(np.abs(np.concatenate([x.ravel() for x in parts])))
    return float(flat[(99 * flat.size + 99) // 100 - 1])


def oracle_step(signals: Signals, slot: float, parts: list[Array]) -> float:
    """Slot moves by oracle_beta towards oracle_headroom·p99; a slot of 0 takes it whole."""
    raw = signals["oracle_headroom"] * p99(parts)
    return raw if slot == 0.0 else slot + signals["oracle_beta"] * (raw - slot)


def oracles(config: Config, signals: Signals, bounds: Bounds, trees: dict[str, Tree]) -> Bounds:
    """All groups and families; `trees` maps each family to its tensors."""
    new = dict(bounds)
    for group, table in group_shapes(config).items():
        for family in FAMILIES:
            slot = bound_slot(group, family)
            new[slot] = oracle_step(signals, bounds[slot], [trees[family][name] for name in table])
    return new


def polyak(target: Tree, params: Tree, tau: float) -> Tree:
    """θ' += polyak_tau·(θ − θ')."""
    return {name: old + tau * (params[name] - old) for name, old in target.items()}
