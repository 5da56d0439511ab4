"""Losses and their constants (docs/step.md, section 3); complex parameters are welcome, as in `forward`."""

from __future__ import annotations

import numpy as np

from .config import Array, Config, Tree
from .forward import chosen, log_softmax, sg, times


def clean_batch(batch: Tree) -> Tree:
    """The batch with s' and next_ofi of dead rows (disc = 0) replaced by zeros (section 2)."""
    dead = (batch["discount"] == 0.0)[:, None]
    replaced = {k: np.where(dead, 0.0, batch[k]) for k in ("next_state", "next_ofi") if k in batch}
    return batch | replaced


def live_rows(batch: Tree) -> Array:
    """Live = 1 where disc > 0, else 0."""
    return (batch["discount"] > 0.0).astype(np.float64)


def live_mean(batch: Tree, x: Array) -> Array:
    """Σ_b live_b·x_b / max(1, Σ live)."""
    live = live_rows(batch)
    return np.sum(times(live, x)) / max(1.0, live.sum())


def intrinsic(batch: Tree, nets: dict[str, Tree]) -> Array:
    """Intr = ½·mean_S (ŝ' − s')² per row."""
    return 0.5 * np.mean((nets["curiosity"]["out"] - batch["next_state"]) ** 2, axis=1)


def shaped_reward(config: Config, signals: dict[str, float], batch: Tree, nets: dict[str, Tree]) -> Array:
    """R = reward + w_curiosity·live·min(sg(intr), curiosity_cap); r = reward without curiosity."""
    if not config.cur_h:
        return batch["reward"]
    capped = np.minimum(sg(intrinsic(batch, nets)), signals["curiosity_cap"])
    return batch["reward"] + times(signals["w_curiosity"] * live_rows(batch), capped)


def project(config: Config, r: Array, disc: Array, p_target: Array) -> Array:
    """Categorical projection: atom k receives Σ_j p_j·max(0, 1 − |u_j − k|), for p_target [B, D, K]."""
    z, k = config.atoms_z, np.arange(config.atoms)
    delta = (config.v_max - config.v_min) / (config.atoms - 1)
    u = (np.clip(r[:, None] + times(disc[:, None], z), config.v_min, config.v_max) - config.v_min) / delta
    hat = np.maximum(0.0, 1.0 - np.abs(u[:, :, None] - k))
    return p_target @ hat


def make_targets(config: Config, signals: dict[str, float], batch: Tree, nets: dict[str, Tree], after: Tree) -> Tree:
    """What the losses regress to; none of it carries a gradient."""
    r, disc = shaped_reward(config, signals, batch, nets), batch["discount"]
    out: Tree = {"m": project(config, r, disc, after["p_target"])}
    if config.ens:
        q0 = chosen(config, after["q_target"], after["best"])[:, 0]
        out["ens"] = r + times(disc, q0)
    if config.iqn_quantiles:
        theta = times(disc[:, None, None], after["theta_target"])
        out["iqn"] = r[:, None, None] + theta
        out["distill"] = sg(chosen(config, nets["iqn"]["theta"], batch["actions"]).mean(axis=1))
    if config.pred:
        out["pred"] = after["h2_target"]
    return out


def chosen_log_p(config: Config, batch: Tree, nets: dict[str, Tree]) -> Array:
    """Log p_d[a_d] as [B, D, K]."""
    rows = np.arange(batch["actions"].shape[0])
    taken = [nets["heads"][f"log_p{d}"][rows, batch["actions"][:, d]] for d in range(len(config.branches))]
    return np.stack(taken, axis=1)


def td_errors(config: Config, batch: Tree, nets: dict[str, Tree], goal: Tree) -> Array:
    """td_b = (1/D) Σ_d CE(projection, p_d[a_d]): the replay priority."""
    return -np.mean(np.sum(goal["m"] * chosen_log_p(config, batch, nets), axis=2), axis=1)


def cql_loss(config: Config, batch: Tree, nets: dict[str, Tree]) -> Array:
    """Mean over b, d of logsumexp_a q_d − q_d[a_d], which is −log softmax(q_d)[a_d]."""
    logs = [log_softmax(nets["heads"][f"q{d}"]) for d in range(len(config.branches))]
    return -np.mean(chosen(config, np.concatenate(logs, axis=1), batch["actions"]))


def quantile_errors(config: Config, batch: Tree, nets: dict[str, Tree], goal: Tree) -> tuple[Array, Array]:
    """δ_ij = r + disc·θ'_j − θ_i and |τ_i − 1{δ_ij < 0}|, both [B, N, N', D]."""
    theta = chosen(config, nets["iqn"]["theta"], batch["actions"])
    delta = goal["iqn"][:, None, :, :] - theta[:, :, None, :]
    return delta, np.abs(batch["tau"][:, :, None, None] - (np.real(delta) < 0.0))


def huber(delta: Array, kappa: float) -> Array:
    """½δ² if |δ| ≤ κ, else κ(|δ| − ½κ)."""
    size = np.where(np.real(delta) < 0.0, -delta, delta)
    inner = np.where(np.real(size) <= kappa, delta, 0.0)
    return np.where(np.real(size) <= kappa, 0.5 * inner * inner, kappa * (size - 0.5 * kappa))


def iqn_loss(config: Config, batch: Tree, nets: dict[str, Tree], goal: Tree) -> Array:
    """mean_b weight_b·(1/D) Σ_d Σ_i (1/N') Σ_j |τ_i − 1{δ_ij<0}|·Huber_κ(δ_ij)/κ."""
    delta, tilt = quantile_errors(config, batch, nets, goal)
    over_targets = np.mean(tilt * huber(delta, config.huber) / config.huber, axis=2)
    return np.mean(batch["weight"] * over_targets.sum(axis=1).mean(axis=1))


def ens_errors(batch: Tree, nets: dict[str, Tree], goal: Tree) -> Array:
    """q_e[a_0] − (r + disc·q_target,0[a*_0]) as [B, Ens]."""
    rows = np.arange(batch["actions"].shape[0])
    return nets["ens"]["out"][rows, :, batch["actions"][:, 0]] - goal["ens"][:, None]


def masked_cross_entropy(logits: Array, labels: Array) -> Array:
    """Cross-entropy over the rows whose label is a class, divided by max(1, valid rows)."""
    valid = (labels >= 0) & (labels < logits.shape[1])
    rows = np.arange(len(labels))
    logs = log_softmax(logits)[rows, np.where(valid, labels, 0)]
    return -np.sum(np.where(valid, logs, 0.0)) / max(1, valid.sum())


def iql_errors(config: Config, batch: Tree, nets: dict[str, Tree], side: str, tau: float) -> tuple[Array, Array]:
    """u = sg(mean_d q_d[a_d]) − V(s) and |τ_iql − 1{u < 0}|."""
    q = sg(chosen(config, nets["heads"]["q"], batch["actions"])).mean(axis=1)
    u = q - nets[f"iql_{side}"]["out"][:, 0]
    return u, np.abs(tau - (np.real(u) < 0.0))


def losses(
    config: Config, signals: dict[str, float], batch: Tree, nets: dict[str, Tree], goal: Tree
) -> dict[str, Array]:
    """Every L_* of the configuration, unweighted."""
    out: dict[str, Array] = {
        "L_c51": np.mean(batch["weight"] * td_errors(config, batch, nets, goal)),
        "L_cql": cql_loss(config, batch, nets),
    }
    if config.iqn_quantiles:
        q = chosen(config, nets["heads"]["q"], batch["actions"])
        out["L_distill"] = 0.5 * np.mean((q - goal["distill"]) ** 2)
        out["L_iqn"] = iqn_loss(config, batch, nets, goal)
    if config.ens:
        out["L_ens"] = np.mean(batch["weight"] * np.mean(0.5 * ens_errors(batch, nets, goal) ** 2, axis=1))
    if config.rec:
        out["L_rec"] = 0.5 * np.mean((nets["rec"]["out"] - batch["state"]) ** 2)
    if config.pred:
        out["L_pred"] = live_mean(batch, 0.5 * np.mean((nets["pred"]["out"] - goal["pred"]) ** 2, axis=1))
    if config.aux_h:
        out["L_nb"] = masked_cross_entropy(nets["aux"]["nb"], batch["nb_label"])
    if config.has_regime:
        out["L_regime"] = masked_cross_entropy(nets["aux"]["rg"], batch["regime_label"])
    if config.iql_h:
        for side in ("high", "low"):
            u, tilt = iql_errors(config, batch, nets, side, signals[f"iql_tau_{side}"])
            out[f"L_iql_{side}"] = np.mean(tilt * u * u)
    if config.cur_h:
        out["L_curiosity"] = live_mean(batch, intrinsic(batch, nets))
    return out
