"""Gradient of every loss, component by component, and their sum (docs/step.md, section 3).

A component holds the parameter gradients that one loss produces, before its scale: `own` those that enter at
full scale, `shared` (trunk, attn and, in the head-level losses, everything) those that its scale multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from . import backward
from .config import Array, Config, Tree, group_shapes, param_shapes
from .forward import chosen, softmax, times
from .losses import ens_errors, iql_errors, live_rows, quantile_errors


@dataclass
class Component:
    """Unscaled gradients of one loss: full-scale ones, scaled ones, and what reaches the wire."""

    scale: float = 1.0
    own: Tree = field(default_factory=dict)
    shared: Tree = field(default_factory=dict)
    dwire: Array | None = None

    def merged(self) -> Tree:
        """What the component adds to the total gradient; a scale of 0 gives an exact 0."""
        return self.own | {name: times(self.scale, g) for name, g in self.shared.items()}


@dataclass
class Scene:
    """What the gradients of a step read: sizes, signals, parameters, batch, forward caches and targets."""

    config: Config
    signals: dict[str, float]
    readiness: float
    p: Tree
    batch: Tree
    nets: dict[str, Tree]
    goal: Tree


def one_hot(actions: Array, n: int) -> Array:
    """One-hot rows of one branch's actions."""
    return np.eye(n)[actions]


def head_component(s: Scene, scale: float, dlogits: list[Array]) -> Component:
    """A head-level loss, from the gradients of the logits down to the encoder and up to the wire."""
    dh2, dwire, grads = backward.heads(s.config, s.p, s.nets["heads"], dlogits)
    return Component(scale, {}, grads | backward.encoder(s.config, s.p, s.nets, dh2), dwire)


def c51(s: Scene) -> Component:
    """d L_c51 / d logits of the chosen action = weight_b/(B·D)·(p·Σm − m)."""
    cache, batch, branches = s.nets["heads"], s.batch, s.config.branches
    rows = np.arange(len(batch["weight"]))
    factor = batch["weight"][:, None] / (len(rows) * len(branches))
    dlogits = []
    for d in range(len(branches)):
        g, m, taken = np.zeros_like(cache[f"p{d}"]), s.goal["m"][:, d], batch["actions"][:, d]
        g[rows, taken] = factor * (cache[f"p{d}"][rows, taken] * m.sum(axis=1, keepdims=True) - m)
        dlogits.append(g)
    return head_component(s, s.signals["w_c51"], dlogits)


def cql(s: Scene) -> Component:
    """d L_cql / d q_d = (softmax(q_d) − onehot(a_d))/(B·D)."""
    cache, branches = s.nets["heads"], s.config.branches
    count = len(s.batch["weight"]) * len(branches)
    taken = [one_hot(s.batch["actions"][:, d], n) for d, n in enumerate(branches)]
    dq = [(softmax(cache[f"q{d}"]) - taken[d]) / count for d in range(len(branches))]
    return head_component(s, s.signals["w_cql"], backward.q_to_logits(s.config, cache, dq))


def distill(s: Scene) -> Component:
    """d L_distill / d q_d[a_d] = (q_d[a_d] − mean_i θ_i[a_d])/(B·D)."""
    cache, actions, branches = s.nets["heads"], s.batch["actions"], s.config.branches
    gap = (chosen(s.config, cache["q"], actions) - s.goal["distill"]) / (len(actions) * len(branches))
    dq = [np.zeros_like(cache[f"q{d}"]) for d in range(len(branches))]
    for d, g in enumerate(dq):
        g[np.arange(len(actions)), actions[:, d]] = gap[:, d]
    return head_component(s, s.signals["w_distill"], backward.q_to_logits(s.config, cache, dq))


def iqn(s: Scene) -> Component:
    """d L_iqn / d θ_i[a_d] = −weight_b/(B·D·N') Σ_j |τ_i − 1{δ<0}|·clamp(δ, −κ, κ)/κ; iqn at full scale."""
    config, batch = s.config, s.batch
    delta, tilt = quantile_errors(config, batch, s.nets, s.goal)
    slope = tilt * np.clip(delta, -config.huber, config.huber) / config.huber
    factor = batch["weight"] / (len(batch["weight"]) * len(config.branches))
    dchosen = -factor[:, None, None] * slope.mean(axis=2)
    dtheta = np.zeros_like(s.nets["iqn"]["theta"])
    columns = batch["actions"] + np.asarray(config.offsets)
    np.put_along_axis(dtheta, np.broadcast_to(columns[:, None, :], dchosen.shape), dchosen, axis=2)
    dh2, grads = backward.iqn(s.p, s.nets["iqn"], dtheta)
    scale = s.signals["w_iqn"] * s.readiness
    return Component(scale, grads, backward.encoder(config, s.p, s.nets, dh2))


def ens(s: Scene) -> Component:
    """d L_ens / d q_e[a_0] = weight_b/(B·Ens)·(q_e[a_0] − target); the heads at full scale."""
    config, batch = s.config, s.batch
    rows = np.arange(len(batch["weight"]))
    dq = np.zeros_like(s.nets["ens"]["out"])
    errors = ens_errors(batch, s.nets, s.goal)
    dq[rows, :, batch["actions"][:, 0]] = (batch["weight"] / (len(rows) * config.ens))[:, None] * errors
    dh2, grads = backward.decoder(s.p, "ens", s.nets["ens"]["h2"], dq.reshape(len(rows), -1))
    return Component(s.signals["w_ens"], grads, backward.encoder(config, s.p, s.nets, dh2))


def rec(s: Scene) -> Component:
    """d L_rec / d output = (output − s)/(B·S); the decoder at full scale."""
    return decoder_component(s, "rec", (s.nets["rec"]["out"] - s.batch["state"]) / s.batch["state"].size)


def pred(s: Scene) -> Component:
    """d L_pred / d output = live·(output − h2_target(s'))/(H2·max(1, Σ live)); the decoder at full scale."""
    live = live_rows(s.batch)
    gap = times(live[:, None], s.nets["pred"]["out"] - s.goal["pred"])
    return decoder_component(s, "pred", gap / (s.config.h2 * max(1.0, live.sum())))


def decoder_component(s: Scene, name: str, dy: Array) -> Component:
    """A linear decoder's loss: own parameters at full scale, trunk and attn by w_{name}."""
    dh2, grads = backward.decoder(s.p, name, s.nets[name]["h2"], dy)
    return Component(s.signals[f"w_{name}"], grads, backward.encoder(s.config, s.p, s.nets, dh2))


def cross_entropy_grad(logits: Array, labels: Array) -> Array:
    """(softmax − onehot)/max(1, valid rows) on the rows with a label, 0 on the others."""
    classes = logits.shape[1]
    valid = (labels >= 0) & (labels < classes)
    gap = softmax(logits) - one_hot(np.where(valid, labels, 0), classes)
    return np.where(valid[:, None], gap, 0.0) / max(1, valid.sum())


def aux(s: Scene, alpha: float, components: dict[str, Component]) -> Tree:
    """Aux nets: w_nb·L_nb + w_regime·L_regime, and alpha_grad times what the wire receives."""
    cache, signals = s.nets["aux"], s.signals
    dwire = sum(times(c.scale, c.dwire) for c in components.values() if c.dwire is not None)
    dnb = times(signals["w_nb"], cross_entropy_grad(cache["nb"], s.batch["nb_label"]))
    dnb = dnb + backward.wire_logits(cache, times(alpha, dwire))
    drg = None
    if s.config.has_regime:
        drg = times(signals["w_regime"], cross_entropy_grad(cache["rg"], s.batch["regime_label"]))
    return backward.aux(s.config, s.p, cache, dnb, drg)


def iql(s: Scene, side: str) -> Tree:
    """d L_iql / d V = −2·|τ_iql − 1{u<0}|·u/B."""
    u, tilt = iql_errors(s.config, s.batch, s.nets, side, s.signals[f"iql_tau_{side}"])
    dv = (-2.0 * tilt * u / len(u))[:, None]
    return backward.mlp_params(s.p, f"iql{side}", s.nets[f"iql_{side}"], dv)


def curiosity(s: Scene) -> Tree:
    """d L_curiosity / d ŝ' = live·(ŝ' − s')/(S·max(1, Σ live))."""
    live = live_rows(s.batch)
    gap = times(live[:, None], s.nets["curiosity"]["out"] - s.batch["next_state"])
    dy = gap / (s.config.state * max(1.0, live.sum()))
    return backward.mlp_params(s.p, "c", s.nets["curiosity"], dy)


def encoder_components(s: Scene) -> dict[str, Component]:
    """The losses that reach the encoder, in the order of the decomposition's rows."""
    config = s.config
    makers = {
        "iqn": (iqn, config.iqn_quantiles),
        "ens": (ens, config.ens),
        "c51": (c51, True),
        "cql": (cql, True),
        "distill": (distill, config.iqn_quantiles),
        "rec": (rec, config.rec),
        "pred": (pred, config.pred),
    }
    return {name: make(s) for name, (make, present) in makers.items() if present}


def total(s: Scene, alpha: float, components: dict[str, Component]) -> Tree:
    """Sum of all merged components, ordered as the groups' buffers."""
    grads = {name: np.zeros(shape) for name, shape in param_shapes(s.config).items()}
    parts = [c.merged() for c in components.values()]
    if s.config.aux_h:
        parts.append(aux(s, alpha, components))
    if s.config.iql_h:
        parts += [iql(s, "high"), iql(s, "low")]
    if s.config.cur_h:
        parts.append(curiosity(s))
    for part in parts:
        for name, g in part.items():
            grads[name] = grads[name] + g
    return grads


def by_group(config: Config, tree: Tree) -> dict[str, Tree]:
    """The tensors of each group."""
    return {g: {name: tree[name] for name in table} for g, table in group_shapes(config).items()}
