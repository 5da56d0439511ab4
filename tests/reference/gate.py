"""Gate producer and IQN readiness (docs/step.md, section 4). State is a dict of floats, returned anew."""

from __future__ import annotations

import math

import numpy as np

from .config import Array, Config, Tree
from .forward import argmax

State = dict[str, float]
Signals = dict[str, float]


def accuracy(nb: Array, labels: Array) -> tuple[float, int]:
    """Share of valid next-bar rows whose argmax is right, and the number of valid rows."""
    valid = (labels >= 0) & (labels < nb.shape[1])
    count = int(valid.sum())
    return float(np.sum(valid & (argmax(nb) == labels)) / max(1, count)), count


def disagreement(config: Config, nb: Array, q0: Array) -> float:
    """Share of all rows with aux_sign·q_sign < 0; 0 unless the direction branch has three actions."""
    if config.branches[0] != 3:
        return 0.0
    aux_sign = 2 * argmax(nb) - 1
    q_sign = argmax(q0) - 1
    return float(np.mean(aux_sign * q_sign < 0))


def averages(state: State, signals: Signals, acc: float, valid: int, dis: float) -> State:
    """Accuracy and disagreement averages: the first valid step sets them, later ones move them."""
    new = dict(state)
    if state["gate_seen"] == 0.0:
        new |= {"aux_acc_short": acc, "aux_acc_long": acc, "aux_acc_var": acc * (1.0 - acc) / valid}
        new |= {"disagree_ema": dis, "gate_seen": 1.0}
        return new
    dev = acc - state["aux_acc_long"]
    new["aux_acc_short"] += signals["acc_beta_short"] * (acc - state["aux_acc_short"])
    new["aux_acc_long"] += signals["acc_beta_long"] * dev
    new["aux_acc_var"] += signals["acc_beta_long"] * (dev * dev - state["aux_acc_var"])
    new["disagree_ema"] += signals["disagree_beta"] * (dis - state["disagree_ema"])
    return new


def produce_gate(config: Config, signals: Signals, state: State, nets: dict[str, Tree], batch: Tree) -> State:
    """Gate state after this step's forward; its alpha_grad scales the wire in this step's backward."""
    nb = nets["aux"]["nb"]
    acc, valid = accuracy(nb, batch["nb_label"])
    if not valid and state["gate_seen"] == 0.0:
        return dict(state)
    new = dict(state)
    if valid:
        new = averages(state, signals, acc, valid, disagreement(config, nb, nets["heads"]["q0"]))
    short = new["aux_acc_short"]
    if short > 0.5 + signals["gate_open_margin"]:
        new["gate_open"] = 1.0
    if short < 0.5 + signals["gate_close_margin"]:
        new["gate_open"] = 0.0
    with np.errstate(all="ignore"):
        deviation = np.sqrt(new["aux_acc_var"] + 1e-4)
        score = signals["gate_gain"] * (short - 0.5 - signals["gate_margin"]) / deviation
        raw = float(new["gate_open"] / (1.0 + np.exp(-score)) * (1.0 - new["disagree_ema"]))
    alpha = state["alpha_grad"] + signals["alpha_beta"] * (raw - state["alpha_grad"])
    new["alpha_grad"] = min(max(alpha, 0.0), 1.0) if math.isfinite(alpha) else 0.0
    return new


def update_readiness(signals: Signals, state: State, loss: float) -> State:
    """Readiness at the end of a step from its L_iqn; a non-finite loss changes nothing."""
    if not math.isfinite(loss):
        return dict(state)
    new, beta = dict(state), signals["readiness_beta"]
    seen, ref, ema = state["iqn_seen"], state["iqn_loss_ref"], state["iqn_loss_ema"]
    if seen < signals["readiness_warmup"]:
        ref += (loss - ref) / (seen + 1.0)
        ema, raw = ref, 0.0
    else:
        ema += beta * (loss - ema)
        ref = max(ref, ema)
        raw = min(max(1.0 - ema / ref, 0.0), 1.0) if ref > 0.0 else 0.0
    readiness = state["iqn_readiness"] + beta * (raw - state["iqn_readiness"])
    new |= {"iqn_seen": seen + 1.0, "iqn_loss_ema": ema, "iqn_loss_ref": ref}
    new["iqn_readiness"] = min(max(readiness, 0.0), 1.0)
    return new
