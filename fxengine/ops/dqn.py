"""The temporal-difference loss of heads that hold expected values, all branches in one pass (`dqn.cu`).

    dqn.losses(program, q, q_target, actions=actions, reward=reward, discount=discount, weight=weight,
               branches=(3, 4), dq=dq, td=td, loss=loss, name="dqn")

Sources: Mnih et al. 2015, "Human-level control through deep reinforcement learning", algorithm 1; the choice of the
next action by the online networks (`q_next`): van Hasselt, Guez & Silver 2016, "Deep reinforcement learning with double
Q-learning", equation 4; one head per action dimension, each with its own target: Tavakoli, Pardo & Kormushev 2018,
"Action branching architectures for deep reinforcement learning", equation 4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import require
from fxengine.ops.policy import reference_greedy
from fxengine.ops.reduce import sum_partials

#: Most branches that a record describes and a block works on.
MAX_BRANCHES = 8


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // (MAX_BRANCHES // int(fields["branches"])))


DQN = Family("dqn", "dqn.cu", "fx_dqn", "Dqn", tiles=_tiles)


def losses(
    program: Program,
    q: Tensor,
    q_target: Tensor,
    *,
    actions: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    branches: Sequence[int],
    q_next: Tensor | None = None,
    huber: bool = False,
    dq: Tensor | None = None,
    td: Tensor | None = None,
    best: Tensor | None = None,
    loss: Tensor | None = None,
    q_mean: Tensor | None = None,
    name: str,
) -> None:
    """Append the loss of delta_d = q_d[action_d] - (reward + discount q_target_d[best_d]) and its gradient.

    Every output is optional and overwritten.

    Args:
        program: program to append to.
        q: float32 [B, A], online networks at s, branches side by side; A = sum of `branches`.
        q_target: float32 [B, A], target networks at s'.
        actions: int32 [B, D]; one outside [0, n_d) makes its row NaN.
        reward: float32 [B].
        discount: float32 [B]; 0 where the episode ended: the row then ignores what q_target holds.
        weight: float32 [B], importance weights.
        branches: n_d of each of the D branches, at most `MAX_BRANCHES`.
        q_next: float32 [B, A], online networks at s', which then choose the next actions; None: q_target does.
        huber: delta^2 / 2 within 1, |delta| - 1/2 beyond, instead of delta^2.
        dq: float32 [B, A], gradient of q: exact zeros at the actions that were not taken.
        td: float32 [B] = mean_d |delta_d|: a replay priority.
        best: int32 [B, D], the next actions: the lowest index on ties, NaN never wins, all NaN gives 0.
        loss: float32 [1] = mean_b weight_b mean_d of the squares (or Huber's function) of delta_d.
        q_mean: float32 [1], mean over rows and branches of q_d[action_d].
        name: label, and beginning of the tensors declared here: `<name>.loss_partials`, `<name>.value_partials`.

    Raises:
        ProgramError: a shape or dtype does not match, or there are too many branches.
    """
    sizes = tuple(branches)
    if not 1 <= len(sizes) <= MAX_BRANCHES or min(sizes) < 1:
        raise ProgramError(f"'{name}': branches must be 1 to {MAX_BRANCHES} sizes of at least 1, got {sizes}")
    rows, total, count = actions.shape[0], sum(sizes), len(sizes)
    for role, tensor in (("q", q), ("q_target", q_target), ("q_next", q_next), ("dq", dq)):
        require(tensor, np.float32, (rows, total), role, name)
    for role, tensor in (("actions", actions), ("best", best)):
        require(tensor, np.int32, (rows, count), role, name)
    for role, tensor in (("reward", reward), ("discount", discount), ("weight", weight), ("td", td)):
        require(tensor, np.float32, (rows,), role, name)
    for role, tensor in (("loss", loss), ("q_mean", q_mean)):
        require(tensor, np.float32, (1,), role, name)
    means = {"loss": loss, "value": q_mean}
    shape = (_tiles({"rows": rows, "branches": count}),)
    partials = {
        kind: program.tensor(f"{name}.{kind}_partials", shape, np.float64) if out else None
        for kind, out in means.items()
    }
    program.launch(
        DQN,
        {
            "q": q,
            "q_target": q_target,
            "q_next": q_next or 0,
            "actions": actions,
            "reward": reward,
            "discount": discount,
            "weight": weight,
            "dq": dq or 0,
            "td": td or 0,
            "best": best or 0,
            **{f"{kind}_partials": tensor or 0 for kind, tensor in partials.items()},
            "ld_q": q.ld,
            "ld_target": q_target.ld,
            "ld_next": q_next.ld if q_next else 0,
            "ld_actions": actions.ld,
            "ld_dq": dq.ld if dq else 0,
            "ld_best": best.ld if best else 0,
            "offset": tuple(accumulate(sizes[:-1], initial=0)),
            "sizes": sizes,
            "branches": count,
            "rows": rows,
            "huber": int(huber),
        },
        reads=[q, q_target, q_next, actions, reward, discount, weight],
        writes=[dq, td, best, *partials.values()],
        label=name,
    )
    for kind, tensor in partials.items():
        out = means[kind]
        if tensor is not None and out is not None:
            sum_partials(program, tensor, out, divisor=float(rows), label=f"{name}.{kind}")


# -- reference ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Float64 results of `reference_losses`."""

    loss: float
    q_mean: float
    td: NDArray[np.float64]
    best: NDArray[np.int32]
    dq: NDArray[np.float64]


def reference_losses(
    q: ArrayLike,
    q_target: ArrayLike,
    *,
    actions: ArrayLike,
    reward: ArrayLike,
    discount: ArrayLike,
    weight: ArrayLike,
    branches: Sequence[int],
    q_next: ArrayLike | None = None,
    huber: bool = False,
) -> Reference:
    """What `losses` computes, in float64, for actions that exist; arguments as there."""
    value, goal = np.asarray(q, np.float64), np.asarray(q_target, np.float64)
    chooser = goal if q_next is None else np.asarray(q_next, np.float64)
    taken = np.asarray(actions)
    r, disc, importance = (np.asarray(x, np.float64) for x in (reward, discount, weight))
    rows, index = len(value), np.arange(len(value))
    best = reference_greedy(chooser, branches)
    delta, chosen = np.zeros(taken.shape), np.zeros(taken.shape)
    dq, first = np.zeros_like(value), 0
    for d, n in enumerate(branches):
        ahead = np.where(disc == 0.0, 0.0, disc * goal[index, first + best[:, d]])
        chosen[:, d] = value[index, first + taken[:, d]]
        delta[:, d] = chosen[:, d] - (r + ahead)
        slope = np.clip(delta[:, d], -1.0, 1.0) if huber else 2.0 * delta[:, d]
        dq[index, first + taken[:, d]] = importance * slope / (rows * len(branches))
        first += n
    size = np.abs(delta)
    each = np.where(size <= 1.0, 0.5 * size**2, size - 0.5) if huber else size**2
    loss = float((importance * each.mean(axis=1)).mean())
    return Reference(loss, float(chosen.mean()), size.mean(axis=1), best, dq)
