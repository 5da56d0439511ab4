"""Losses and gradients of the step in PyTorch (docs/step.md, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from tools.peers.torch_net import Batch, Net, Params, Scene, pick

MASKED = -1


def clean(batch: Batch) -> dict[str, Tensor]:
    """The batch with s' and next_ofi of dead rows replaced by zeros."""
    dead = (batch["discount"] == 0.0)[:, None]
    names = [name for name in ("next_state", "next_ofi") if name in batch]
    return dict(batch) | {name: batch[name].masked_fill(dead, 0.0) for name in names}


def curiosity(net: Net, p: Params, batch: Batch) -> Tensor:
    """½·mean over S of the squared error of the predicted next state, per row."""
    hot = (batch["actions"][:, net.column_branch] == net.column_action).to(batch["state"].dtype)
    predicted = net.mlp(p, "c", torch.cat([batch["state"], hot], dim=1))
    return 0.5 * (predicted - batch["next_state"]).square().mean(1)


def head_losses(net: Net, s: Scene, logits: Tensor, q: Tensor) -> None:
    """Adds c51, cql, td and the chosen q."""
    m = net.project(s.reward, s.batch["discount"], s.after["p_target"])
    td = -(m * pick(logits, s.columns).log_softmax(-1)).sum(2).mean(1)
    s.out |= {"td": td, "chosen": q.gather(1, s.columns)}
    s.losses["c51"] = (s.batch["weight"] * td).mean()
    if net.even:
        log_policy = q.view(q.shape[0], net.count, -1).log_softmax(-1).flatten(1)
    else:
        log_policy = torch.cat([part.log_softmax(-1) for part in q.split(net.config.branches, dim=1)], dim=1)
    s.losses["cql"] = -log_policy.gather(1, s.columns).mean()


def iqn_losses(net: Net, p: Params, s: Scene) -> None:
    """Adds iqn and distill, and theta."""
    theta = net.iqn(p, s.leaves["iqn"], s.batch["tau"])
    columns = s.columns[:, None].expand(-1, theta.shape[1], -1)
    taken = theta.gather(2, columns).transpose(1, 2)  # [B, D, N]
    # disc·θ' of a dead row is an exact 0: its s' was replaced by zeros, so θ' is finite.
    goal = torch.addcmul(s.reward[:, None, None], s.batch["discount"][:, None, None], s.after["theta_target"])
    theta_i, goal_j = torch.broadcast_tensors(taken[:, :, :, None], goal[:, :, None, :])
    tau = s.batch["tau"][:, None, :, None]
    tilt = torch.where(goal_j < theta_i, 1.0 - tau, tau)
    errors = (tilt * functional.huber_loss(theta_i, goal_j, reduction="none", delta=net.config.huber)).sum((1, 2, 3))
    scale = 1.0 / (net.config.huber * goal.shape[2] * net.count)
    s.losses["iqn"] = (s.batch["weight"] * errors).mean() * scale
    s.losses["distill"] = 0.5 * functional.mse_loss(s.out["chosen"], taken.detach().mean(2))
    s.out["theta"] = theta


def ens_loss(net: Net, p: Params, s: Scene) -> Tensor:
    """Every ensemble head regresses to r + disc·q_target of the first branch."""
    heads = functional.linear(s.leaves["ens"], p["w_ens"], p["b_ens"]).view(-1, net.config.ens, net.config.branches[0])
    taken = heads.gather(2, s.columns[:, :1, None].expand(-1, net.config.ens, -1))[:, :, 0]
    goal = torch.addcmul(s.reward, s.batch["discount"], torch.mv(s.after["p_target"][:, 0], net.z))
    return 0.5 * (s.batch["weight"] * (taken - goal[:, None]).square().mean(1)).mean()


def decoder_losses(net: Net, p: Params, s: Scene) -> None:
    """Adds rec and pred."""
    if net.config.rec:
        s.losses["rec"] = 0.5 * functional.mse_loss(
            functional.linear(s.leaves["rec"], p["w_rec"], p["b_rec"]), s.batch["state"]
        )
    if net.config.pred:
        gap = functional.linear(s.leaves["pred"], p["w_pred"], p["b_pred"]) - s.after["h2_target"]
        s.losses["pred"] = (s.live * (0.5 * gap.square().mean(1))).sum() / s.live_count


def iql_losses(net: Net, p: Params, s: Scene) -> None:
    """Adds both expectile losses, side by side."""
    values = torch.cat([net.mlp(p, f"iql{side}", s.batch["state"]) for side in ("high", "low")], dim=1)
    u = s.out["chosen"].detach().mean(1, keepdim=True) - values
    tilt = torch.where(u < 0.0, 1.0 - net.iql_tau, net.iql_tau)
    s.losses["iql_high"], s.losses["iql_low"] = (tilt * u.square()).mean(0).unbind()


def masked_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean over the rows whose label is a class; also those rows and their number, at least 1."""
    valid = (labels >= 0) & (labels < logits.shape[1])
    count = valid.sum().clamp_min(1)
    total = functional.cross_entropy(logits, labels.where(valid, MASKED), ignore_index=MASKED, reduction="sum")
    return total / count, valid, count


def gradients(
    net: Net, p: Params, target: Params, batch: Batch, readiness: Tensor | None, gate: Callable[..., Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """One forward and backward pass.

    Args:
        net: the networks.
        p: parameters, as autograd leaves.
        target: Polyak copies.
        batch: rows of the step.
        readiness: iqn_readiness; None without IQN.
        gate: makes alpha_grad of this step from (nb, valid, count, labels, q); not called without auxiliary nets.

    Returns:
        Gradients by tensor, and the outputs of the forward pass.
    """
    config, signals = net.config, net.signals
    batch = clean(batch)
    after = net.next_state(p, target, batch)
    h1, h2 = net.encoder(p, batch["state"])
    aux_losses: dict[str, Tensor] = {}
    wire = wire_leaf = None
    if config.aux_h:
        nb, rg, wire = net.aux(p, h1.detach())
        wire_leaf = wire.detach().requires_grad_()
        aux_losses["nb"], valid, count = masked_cross_entropy(nb, batch["nb_label"])
        if rg is not None:
            aux_losses["regime"] = masked_cross_entropy(rg, batch["regime_label"])[0]

    live = (batch["discount"] > 0.0).to(h2.dtype)
    s = Scene(batch, after, live, live.sum().clamp_min(1.0), batch["reward"], batch["actions"] + net.offsets)
    present = {"q": True, "iqn": config.iqn_quantiles, "ens": config.ens, "rec": config.rec, "pred": config.pred}
    s.leaves = {name: h2.detach().requires_grad_() for name, there in present.items() if there}
    if config.cur_h:
        intrinsic = curiosity(net, p, batch)
        s.losses["curiosity"] = (live * intrinsic).sum() / s.live_count
        shaped = live * intrinsic.detach().clamp_max(signals["curiosity_cap"])
        s.reward = net.add_scaled(batch["reward"], shaped, signals["w_curiosity"])

    logits = net.logits(p, s.leaves["q"], wire_leaf, batch.get("ofi"))
    q = net.q_of(logits)
    head_losses(net, s, logits, q)
    if config.iqn_quantiles:
        iqn_losses(net, p, s)
    if config.ens:
        s.losses["ens"] = ens_loss(net, p, s)
    decoder_losses(net, p, s)
    if config.iql_h:
        iql_losses(net, p, s)

    grads, into = _head_gradients(net, p, s, wire_leaf)
    if wire is not None and wire_leaf is not None:
        alpha = gate(nb.detach(), valid, count, batch["nb_label"], q.detach())
        entering = [name for name in aux_losses if net.seeds[name] is not None]
        outputs, seeds = [aux_losses[n] for n in entering], [net.seeds[n] for n in entering]
        grads |= _grads([*outputs, wire], [*seeds, scaled(alpha, into["wire"])], p, net.aux_names)
    grads |= _grads([h2], [_into_h2(net, into, readiness)], p, net.encoder_names)

    out = {f"L_{name}": x.detach() for name, x in (s.losses | aux_losses).items()}
    out["td"] = s.out["td"].detach()
    if net.complete:
        out |= {"h1": h1, "h2": h2, "q": q} | {k: after[k] for k in ("q_target", "q_next", "best")}
        out |= ({"wire": wire} if wire is not None else {}) | ({"theta": s.out["theta"]} if "theta" in s.out else {})
    return grads, out


def scaled(scale: Tensor, gradient: Tensor) -> Tensor:
    """scale·gradient; an exact 0 where the scale is 0, whatever the gradient holds."""
    return torch.where(scale == 0.0, 0.0, scale * gradient)


def _grads(outputs: list[Tensor], seeds: list[Tensor | None], p: Params, names: list[str]) -> dict[str, Tensor]:
    found = torch.autograd.grad(outputs, [p[n] for n in names], seeds, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def _head_gradients(
    net: Net, p: Params, s: Scene, wire_leaf: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the heads' parameters, and what the leaves (h2 per head, the wire) receive."""
    leaves = s.leaves | ({"wire": wire_leaf} if wire_leaf is not None else {})
    # A loss of weight 0 stays outside: 0 times its gradient is an exact 0.
    entering = [name for name in s.losses if net.seeds[name] is not None]
    seeds = [net.seeds[name] for name in entering]
    inputs = [p[n] for n in net.head_names] + list(leaves.values())
    found = torch.autograd.grad([s.losses[n] for n in entering], inputs, seeds, materialize_grads=True)
    cut = len(net.head_names)
    return dict(zip(net.head_names, found[:cut], strict=True)), dict(zip(leaves, found[cut:], strict=True))


def _into_h2(net: Net, into: Mapping[str, Tensor], readiness: Tensor | None) -> Tensor:
    """Scaled sum of what the heads send into h2."""
    total = into["q"]
    for name in ("ens", "rec", "pred"):
        if name in into and net.signals[f"w_{name}"] != 0.0:
            total = net.add_scaled(total, into[name], net.signals[f"w_{name}"])
    if "iqn" in into and readiness is not None:
        total = total + scaled(net.signals["w_iqn"] * readiness, into["iqn"])
    return total
