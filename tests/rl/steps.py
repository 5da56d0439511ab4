"""Training steps of the agents in float64: forward by hand, losses of the ops' references, backward by hand, Adam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fxengine.ops import c51, dqn, iqn
from fxengine.ops.dueling import reference_dueling
from fxengine.ops.policy import reference_greedy, reference_quantile_mean
from fxengine.rl.agents import C51Agent, DqnAgent, IqnAgent
from fxengine.train.optimizer import Hyper, reference_adam, reference_norms
from fxengine.train.targets import reference_polyak

Tree: TypeAlias = "dict[str, NDArray[Any]]"
PerceptronAgent: TypeAlias = "DqnAgent | C51Agent | IqnAgent"


@dataclass
class State:
    """What a step reads and writes."""

    params: Tree
    target: Tree
    m: Tree
    v: Tree
    t: int = 0


@dataclass
class Result:
    """What a step reports: losses by name, priorities, values at s and the gradient before clipping."""

    losses: dict[str, float]
    td: NDArray[np.float64]
    q: NDArray[np.float64]
    grads: Tree


def _layer(p: Tree, name: str, x: NDArray[Any]) -> NDArray[Any]:
    return x @ p[f"w_{name}"].T + p[f"b_{name}"]


def _layer_backward(p: Tree, grads: Tree, name: str, x: NDArray[Any], dy: NDArray[Any]) -> NDArray[Any]:
    grads[f"w_{name}"], grads[f"b_{name}"] = dy.T @ x, dy.sum(axis=0)
    return dy @ p[f"w_{name}"]


def features(agent: PerceptronAgent, p: Tree, state: NDArray[Any]) -> list[NDArray[Any]]:
    """The state and what each ReLU layer makes of it."""
    h = [np.asarray(state, np.float64)]
    for i in range(len(agent.hidden)):
        h.append(np.maximum(_layer(p, f"fc{i + 1}", h[-1]), 0.0))
    return h


def _features_backward(agent: PerceptronAgent, p: Tree, grads: Tree, h: list[NDArray[Any]], dh: NDArray[Any]) -> None:
    for i in reversed(range(len(agent.hidden))):
        dh = _layer_backward(p, grads, f"fc{i + 1}", h[i], dh * (h[i + 1] > 0.0))


def _network(p: Tree, h: NDArray[Any], tau: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """The quantile network, with all that its backward needs."""
    cosines = iqn.reference_cosines(tau, p["w_phi"].shape[1])
    phi = np.maximum(_layer(p, "phi", cosines), 0.0)
    mixed = phi * np.repeat(h, tau.shape[1], axis=0)
    hidden = np.maximum(_layer(p, "iq1", mixed), 0.0)
    return {"cosines": cosines, "phi": phi, "mixed": mixed, "hidden": hidden, "theta": _layer(p, "iq2", hidden)}


def _network_backward(
    p: Tree, grads: Tree, net: dict[str, NDArray[Any]], h: NDArray[Any], dtheta: NDArray[Any]
) -> NDArray[Any]:
    """Returns the gradient of h."""
    count = len(dtheta) // len(h)
    dhidden = _layer_backward(p, grads, "iq2", net["hidden"], dtheta) * (net["hidden"] > 0.0)
    dmixed = _layer_backward(p, grads, "iq1", net["mixed"], dhidden)
    dphi = dmixed * np.repeat(h, count, axis=0) * (net["phi"] > 0.0)
    _layer_backward(p, grads, "phi", net["cosines"], dphi)
    return (dmixed * net["phi"]).reshape(len(h), count, -1).sum(axis=1)


def values(agent: PerceptronAgent, p: Tree, state: NDArray[Any], tau: NDArray[Any] | None = None) -> NDArray[Any]:
    """Q [rows, Σn_d]; tau for quantiles."""
    h = features(agent, p, state)[-1]
    if isinstance(agent, IqnAgent):
        assert tau is not None
        return reference_quantile_mean(_network(p, h, tau)["theta"], tau.shape[1])
    out = _layer(p, "out", h)
    return _means(agent, out) if isinstance(agent, C51Agent) else out


def _logits(agent: C51Agent, out: NDArray[Any]) -> list[NDArray[Any]]:
    return np.split(out, np.cumsum(agent.branches)[:-1] * agent.atoms, axis=1)


def _means(agent: C51Agent, out: NDArray[Any]) -> NDArray[Any]:
    branches = _logits(agent, out)
    return np.concatenate([reference_dueling(None, x, agent.v_min, agent.v_max, agent.atoms).q for x in branches], 1)


def living(batch: Tree) -> NDArray[Any]:
    """s' with zeros in the rows whose discount is 0."""
    return np.where(batch["discount"][:, None] == 0.0, 0.0, batch["next_state"])


def losses(agent: PerceptronAgent, p: Tree, target: Tree, batch: Tree) -> Result:
    """Losses and gradient of a batch."""
    outcome: dict[str, Any] = {name: batch[name] for name in ("actions", "reward", "discount", "weight")}
    h, after, grads = features(agent, p, batch["state"]), living(batch), dict[str, NDArray[Any]]()
    if isinstance(agent, IqnAgent):
        ahead = features(agent, target, after)[-1]
        net, goal = _network(p, h[-1], batch["tau"]), _network(target, ahead, batch["tau_target"])["theta"]
        q, q_target = (reference_quantile_mean(x, n) for x, n in (
            (net["theta"], agent.quantiles), (goal, agent.target_quantiles)
        ))  # fmt: skip
        choice = dqn.reference_losses(q, q_target, **outcome, branches=agent.branches)
        loss = iqn.reference_loss(
            net["theta"], goal, batch["tau"], **outcome, best=choice.best, branches=agent.branches, kappa=agent.kappa
        )
        dh = _network_backward(p, grads, net, h[-1], loss.dtheta)
        _features_backward(agent, p, grads, h, dh)
        return Result({"L_iqn": loss.loss, "q_mean": choice.q_mean}, choice.td, q, grads)

    out, goal = _layer(p, "out", h[-1]), _layer(target, "out", features(agent, target, after)[-1])
    if isinstance(agent, C51Agent):
        chooser = values(agent, p if agent.double else target, after)
        found = c51.reference_losses(
            (None, _logits(agent, out)),
            (None, _logits(agent, goal)),
            best=reference_greedy(chooser, agent.branches),
            **outcome,
            v_min=agent.v_min,
            v_max=agent.v_max,
            atoms=agent.atoms,
            w_c51=1.0,
        )
        dout, td, q = np.concatenate(found.dadv, axis=1), found.td, _means(agent, out)
        reported = {"L_c51": found.loss_c51}
    else:
        q_next = values(agent, p, after) if agent.double else None
        squares = dqn.reference_losses(
            out, goal, **outcome, branches=agent.branches, q_next=q_next, huber=agent.loss == "huber"
        )
        dout, td, q = squares.dq, squares.td, out
        reported = {"L_td": squares.loss, "q_mean": squares.q_mean}
    _features_backward(agent, p, grads, h, _layer_backward(p, grads, "out", h[-1], dout))
    return Result(reported, td, q, grads)


def train(agent: PerceptronAgent, state: State, batch: Tree, signals: dict[str, float]) -> Result:
    """One step, which changes the state: losses, gradient, clip, Adam, targets."""
    result = losses(agent, state.params, state.target, batch)
    state.t += 1
    names = list(state.params)
    _, (scale,) = reference_norms([np.concatenate([result.grads[n].ravel() for n in names])], [signals["clip"]])
    hyper = Hyper(lr=signals["lr"], eps=signals["adam_eps"], scale=scale)
    for n in names:
        state.params[n], state.m[n], state.v[n] = reference_adam(
            state.params[n], result.grads[n], state.m[n], state.v[n], t=state.t, hyper=hyper
        )
        state.target[n] = reference_polyak(state.target[n], state.params[n], signals["polyak_tau"])
    return result
