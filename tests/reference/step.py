"""One training step, as docs/step.md tells it: forward, gate, losses, backward, guard, optimizer, oracles."""

from __future__ import annotations

from typing import Any

import numpy as np

from .config import GATE_NAMES, READINESS_NAMES, Array, Config, Tree, group_shapes
from .decomposition import decomposition
from .forward import next_state, online
from .gate import produce_gate, update_readiness
from .gradients import Component, Scene, by_group, encoder_components, total
from .losses import clean_batch, losses, make_targets, td_errors
from .optimizer import adam, bad_groups, clipped, group_norms, oracles, polyak, spectral_norm

State = dict[str, Any]
Outputs = dict[str, Any]


def scene(config: Config, state: State, batch: Tree) -> tuple[Scene, Tree]:
    """Forward at s and s', and the targets (sections 2 and 3). Returns the scene and what was seen at s'."""
    batch = clean_batch(batch)
    p, signals = state["params"], state["signals"]
    nets = online(config, p, batch)
    after = next_state(config, p, state["target"], batch)
    goal = make_targets(config, signals, batch, nets, after)
    readiness = state["state"].get("iqn_readiness", 0.0)
    return Scene(config, signals, readiness, p, batch, nets, goal), after


def forward_outputs(s: Scene, after: Tree) -> Outputs:
    """Losses, td and the network outputs at s and s'."""
    out: Outputs = losses(s.config, s.signals, s.batch, s.nets, s.goal)
    out["td"] = td_errors(s.config, s.batch, s.nets, s.goal)
    out |= {name: s.nets["trunk"][name] for name in ("h1", "h2")} | {"q": s.nets["heads"]["q"]}
    if s.config.aux_h:
        out["wire"] = s.nets["aux"]["wire"]
    if s.config.iqn_quantiles:
        out["theta"] = s.nets["iqn"]["theta"]
    return out | {name: after[name] for name in ("q_target", "q_next", "best")}


def next_gate(s: Scene, state: State) -> dict[str, float]:
    """Gate state of this step (section 4), unchanged without aux nets."""
    gate: dict[str, float] = dict(state["state"])
    return produce_gate(s.config, s.signals, gate, s.nets, s.batch) if s.config.aux_h else gate


def backward(s: Scene, alpha: float) -> tuple[dict[str, Component], Tree]:
    """Components that reach the encoder, and the total gradient (section 3)."""
    with np.errstate(invalid="ignore", over="ignore"):
        components = encoder_components(s)
        return components, total(s, alpha, components)


def optimize(config: Config, state: State, grads: Tree, norms: dict[str, float]) -> tuple[State, dict[str, float]]:
    """Adam, spectral norm, oracles and targets (sections 5 and 6). Returns the new state and every σ."""
    signals, bounds, t = state["signals"], state["bounds"], int(state["step"]) + 1
    trees: dict[str, Tree] = {"weight": {}, "adam_m": {}, "adam_v": {}, "grad": {}}
    for group, names in by_group(config, grads).items():
        for name, g in names.items():
            entered = clipped(signals, bounds, group, norms[group], g)
            w, m, v = (state[part][name] for part in ("params", "m", "v"))
            w, m, v = adam(signals, bounds, group, t, w, entered, m, v)
            for family, x in zip(trees, (w, m, v, entered), strict=True):
                trees[family][name] = x
    params, sn_v, sigmas = trees["weight"], {}, {}
    for key, v in state["sn_v"].items():
        params[f"w_{key}"], sn_v[key], sigmas[key] = spectral_norm(params[f"w_{key}"], v, signals["sn_max"])
    if t % config.oracle_every == 0:
        bounds = oracles(config, signals, bounds, trees)
    target = polyak(state["target"], params, signals["polyak_tau"])
    new = {"params": params, "m": trees["adam_m"], "v": trees["adam_v"], "target": target, "sn_v": sn_v}
    return state | new | {"bounds": bounds, "step": t}, sigmas


def state_outputs(config: Config, state: State) -> Outputs:
    """The state after a step under the names of the golden files."""
    out: Outputs = {}
    for part in ("params", "m", "v", "target", "state"):
        out |= {f"{part.removesuffix('s')}.{name}": x for name, x in state[part].items()}
    out |= {f"sn_v_{key}": x for key, x in state["sn_v"].items()}
    return out | {f"bound.{slot}": x for slot, x in state["bounds"].items()} | {"step": state["step"]}


def step(config: Config, state: State, batch: Tree) -> tuple[State, Outputs]:
    """One step: the new state, and outputs named as `step{i}.out.*` of the golden files."""
    s, after = scene(config, state, batch)
    out = forward_outputs(s, after)
    gate = next_gate(s, state)
    components, grads = backward(s, gate.get("alpha_grad", 0.0))
    norms = group_norms(config, grads)
    out |= {f"grad.{name}": g for name, g in grads.items()}
    out["decomposition"] = decomposition(config, components)
    out["skipped"] = float(bool(bad_groups(norms)))
    new = dict(state)
    if not out["skipped"]:
        new, sigmas = optimize(config, state, grads, norms)
        out |= {f"grad_norm.{g}": x for g, x in norms.items()} | {f"sigma_{k}": x for k, x in sigmas.items()}
    if config.iqn_quantiles:
        gate = update_readiness(s.signals, gate, float(out["L_iqn"]))
    new["state"] = gate
    return new, out | state_outputs(config, new)


def empty_state(config: Config) -> dict[str, float]:
    """Gate and readiness state of a cold start: the gate's names only with aux nets, iqn_* only with IQN."""
    names = (GATE_NAMES if config.aux_h else ()) + (READINESS_NAMES if config.iqn_quantiles else ())
    return dict.fromkeys(names, 0.0)


def group_gradients(config: Config, outputs: Outputs) -> dict[str, Array]:
    """Every group's gradient as one flat array, in buffer order."""
    groups = group_shapes(config).items()
    return {g: np.concatenate([outputs[f"grad.{n}"].ravel() for n in names]) for g, names in groups}
