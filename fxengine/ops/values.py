"""State values by expectile regression, and the curiosity model's inputs, bonus and loss (`values.cu`, `decoders.cu`).

Sources: expectile regression: Kostrikov, Nair & Levine 2022, "Offline reinforcement learning with implicit
Q-learning", equation 5; curiosity as the error of a forward model: Pathak et al. 2017, "Curiosity-driven exploration
by self-supervised prediction".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import require
from fxengine.ops.decoders import Shaping, mean_squares
from fxengine.ops.reduce import sum_partials

#: Most branches that a record describes.
MAX_BRANCHES = 8


def _expectile_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // 256)


def _onehot_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) * int(fields["cols"]) // 1024)


EXPECTILE = Family("expectile", "values.cu", "fx_expectile", "Expectile", tiles=_expectile_tiles)
ONEHOTS = Family("onehots", "values.cu", "fx_onehots", "Onehots", tiles=_onehot_tiles)


def expectile(
    program: Program,
    v: Tensor,
    q: Tensor,
    actions: Tensor,
    *,
    sizes: Sequence[int],
    tau: Tensor,
    dv: Tensor | None = None,
    loss: Tensor | None = None,
    name: str,
) -> None:
    """Append loss = mean |tau - [u < 0]| u^2, u = mean_d q_d[action_d] - v, and its gradient; q gets none.

    Args:
        program: program to append to.
        v: float32 [B] or [B, 1].
        q: float32 [B, sum n_d], branches side by side.
        actions: int32 [B, D]; one outside [0, n_d) makes its row NaN.
        sizes: n_d per branch.
        tau: float32 [1], the expectile.
        dv: of v's shape, overwritten: -2 |tau - [u < 0]| u / B.
        loss: float32 [1], overwritten.
        name: begins the labels and the name of the tensor declared here, `<name>.partials`.

    Raises:
        ProgramError: a shape or dtype does not match.
    """
    rows = v.shape[0]
    offsets = _offsets(sizes, name)
    require(v, np.float32, (rows, 1) if len(v.shape) == 2 else (rows,), "v", name)
    require(dv, np.float32, v.shape, "dv", name)
    require(q, np.float32, (rows, sum(sizes)), "q", name)
    require(actions, np.int32, (rows, len(sizes)), "actions", name)
    require(tau, np.float32, (1,), "tau", name)
    require(loss, np.float32, (1,), "loss", name)
    partials = program.tensor(f"{name}.partials", (_expectile_tiles({"rows": rows}),), np.float64) if loss else None
    program.launch(
        EXPECTILE,
        {
            "q": q,
            "actions": actions,
            "v": v,
            "tau": tau,
            "dv": dv or 0,
            "partials": partials or 0,
            "ld_q": q.ld,
            "ld_actions": actions.ld,
            "v_stride": v.ld,
            "dv_stride": dv.ld if dv else 0,
            "offset": offsets,
            "sizes": tuple(sizes),
            "branches": len(sizes),
            "rows": rows,
        },
        reads=[q, actions, v, tau],
        writes=[dv, partials],
        label=name,
    )
    if loss and partials:
        sum_partials(program, partials, loss, divisor=float(rows), label=f"{name}.loss")


def onehots(program: Program, actions: Tensor, out: Tensor, *, sizes: Sequence[int], label: str) -> None:
    """Append: out = one-hot codes of all branches' actions, side by side.

    Args:
        program: program to append to.
        actions: int32 [B, D]; one outside [0, n_d) has no 1.
        out: float32 [B, sum n_d], overwritten.
        sizes: n_d per branch.
        label: shown in tables.

    Raises:
        ProgramError: a shape or dtype does not match.
    """
    rows, cols = actions.shape[0], sum(sizes)
    offsets = _offsets(sizes, label)
    require(actions, np.int32, (rows, len(sizes)), "actions", label)
    require(out, np.float32, (rows, cols), "out", label)
    program.launch(
        ONEHOTS,
        {
            "actions": actions,
            "out": out,
            "ld_actions": actions.ld,
            "ld_out": out.ld,
            "offset": offsets,
            "branches": len(sizes),
            "rows": rows,
            "cols": cols,
        },
        reads=[actions],
        writes=[out],
        label=label,
    )


def curiosity(
    program: Program,
    prediction: Tensor,
    next_state: Tensor,
    *,
    discount: Tensor,
    live: Tensor,
    reward: Tensor,
    w_curiosity: Tensor,
    cap: Tensor,
    shaped: Tensor,
    dprediction: Tensor | None = None,
    loss: Tensor | None = None,
    name: str,
) -> None:
    """Append: shaped = reward + w_curiosity live min(intr, cap), and the loss of the model.

    intr = half the mean over S of (prediction - next_state)^2.

    Args:
        program: program to append to.
        prediction: float32 [B, S], the model's next state.
        next_state: float32 [B, S]; rows without a discount are not read.
        discount: float32 [B]; live = 1 where it is above 0, else 0.
        live: int32 [1], number of live rows, from `decoders.count_live`.
        reward: float32 [B].
        w_curiosity: float32 [1]; 0 leaves the bare reward.
        cap: float32 [1], the largest bonus before the weight.
        shaped: float32 [B], overwritten; the bonus carries no gradient.
        dprediction: float32 [B, S], gradient of the loss at full scale, overwritten.
        loss: float32 [1] = sum_b live_b intr_b / max(1, live).
        name: begins the labels and the name of the tensor declared here, `<name>.partials`.

    Raises:
        ProgramError: a shape or dtype does not match.
    """
    mean_squares(
        program,
        prediction,
        next_state,
        discount=discount,
        live=live,
        dy=dprediction,
        loss=loss,
        shaping=Shaping(reward, w_curiosity, cap, shaped),
        name=name,
    )


def _offsets(sizes: Sequence[int], label: str) -> tuple[int, ...]:
    """First column of each branch in arrays over all actions."""
    if not 1 <= len(sizes) <= MAX_BRANCHES or min(sizes) < 1:
        raise ProgramError(
            f"'{label}': sizes {tuple(sizes)} must be 1 to {MAX_BRANCHES} branches of one action or more"
        )
    return tuple(accumulate(sizes[:-1], initial=0))


# -- references ---------------------------------------------------------------------------------------------------


def reference_expectile(
    v: ArrayLike, q: ArrayLike, actions: ArrayLike, sizes: Sequence[int], tau: float
) -> tuple[float, NDArray[np.float64]]:
    """Loss and dv [B] of `expectile`, in float64."""
    columns = np.asarray(actions) + np.array(_offsets(sizes, "reference"))
    taken = np.take_along_axis(np.asarray(q, dtype=np.float64), columns, axis=1)
    u = taken.mean(axis=1) - np.asarray(v, dtype=np.float64).reshape(-1)
    tilt = np.abs(tau - (u < 0.0))
    return float((tilt * u * u).mean()), -2.0 * tilt * u / len(u)


def reference_onehots(actions: ArrayLike, sizes: Sequence[int]) -> NDArray[np.float64]:
    """What `onehots` computes."""
    taken = np.asarray(actions)
    return np.concatenate([taken[:, d : d + 1] == np.arange(n) for d, n in enumerate(sizes)], axis=1).astype(np.float64)


def reference_shaped(
    reward: ArrayLike, discount: ArrayLike, halves: ArrayLike, w_curiosity: float, cap: float
) -> NDArray[np.float64]:
    """Shaped reward of `curiosity` in float64, from every row's half mean square."""
    bonus = w_curiosity * (np.asarray(discount) > 0.0)
    capped = np.minimum(np.asarray(halves, dtype=np.float64), cap)
    return np.asarray(reward, dtype=np.float64) + np.where(bonus == 0.0, 0.0, bonus * capped)
