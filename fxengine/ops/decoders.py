"""Squared-error losses: decoders, ensemble heads, and the building block of the curiosity loss (`decoders.cu`).

Gradients are those of the loss at full scale: the weight of a decoder's loss belongs where its gradient enters the
trunk (`linear.backward_dx(..., scale=...)`), and a head's own parameters learn without it.

Sources: reconstruction and prediction as auxiliary losses: Jaderberg et al. 2017, "Reinforcement learning with
unsupervised auxiliary tasks"; prediction of the target network's features: Schwarzer et al. 2021, "Data-efficient
reinforcement learning with self-predictive representations"; ensemble heads: Osband et al. 2016, "Deep exploration via
bootstrapped DQN".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import matrix, require
from fxengine.ops.reduce import sum_partials

# About this many elements make a tile of the ensemble loss.
_ENSEMBLE_TILE = 1024


def _rows_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // 8)


def _ensemble_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // int(fields["tile_rows"]))


COUNT_LIVE = Family("count_live", "decoders.cu", "fx_count_live", "CountLive", tiles=lambda fields: 1)
SQUARES = Family("squares", "decoders.cu", "fx_squares", "Squares", tiles=_rows_tiles)
ENSEMBLE = Family("ensemble", "decoders.cu", "fx_ensemble", "Ensemble", tiles=_ensemble_tiles)


def count_live(program: Program, discount: Tensor, live: Tensor, *, label: str) -> None:
    """Append: live = number of rows with discount > 0.

    Args:
        program: program to append to.
        discount: float32 [B].
        live: int32 [1], overwritten.
        label: shown in tables.

    Raises:
        ProgramError: a dtype or shape is not one of these.
    """
    require(discount, np.float32, discount.shape[:1], "discount", label)
    require(live, np.int32, (1,), "live", label)
    program.launch(
        COUNT_LIVE,
        {"discount": discount, "live": live, "n": discount.shape[0]},
        reads=[discount],
        writes=[live],
        label=label,
    )


@dataclass(frozen=True)
class Shaping:
    """A bonus on the reward of live rows for a large error: shaped = reward + bonus min(half mean square, cap).

    Attributes:
        reward: float32 [B].
        bonus: float32 [1]; 0 leaves the bare reward, whatever the error holds.
        cap: float32 [1].
        shaped: float32 [B], overwritten; not `reward` itself.
    """

    reward: Tensor
    bonus: Tensor
    cap: Tensor
    shaped: Tensor


def mean_squares(
    program: Program,
    y: Tensor,
    target: Tensor,
    *,
    discount: Tensor | None = None,
    live: Tensor | None = None,
    dy: Tensor | None = None,
    loss: Tensor | None = None,
    shaping: Shaping | None = None,
    name: str,
) -> None:
    """Append loss = half the mean over the live rows of mean_columns (y - target)^2, and its gradient.

    Args:
        program: program to append to.
        y: float32 [B, n].
        target: float32 [B, n]; no gradient.
        discount: float32 [B]: only rows above 0 count, and no other row of y or target is read. None: all count.
        live: int32 [1], the number of rows that count, from `count_live`; goes with discount. A batch without a
            live row gives 0.
        dy: float32 [B, n] = (y - target) / (n max(1, live)), exact 0 in dead rows; overwritten.
        loss: float32 [1], overwritten.
        shaping: adds a bonus for the row's error to its reward.
        name: begins the labels and the name of the tensor declared here, `<name>.partials`.

    Raises:
        ProgramError: a shape or dtype does not match, or an output lacks an input that it needs.
    """
    rows, cols = matrix(y, "y", name)
    require(target, np.float32, (rows, cols), "target", name)
    require(dy, np.float32, (rows, cols), "dy", name)
    require(discount, np.float32, (rows,), "discount", name)
    require(live, np.int32, (1,), "live", name)
    require(loss, np.float32, (1,), "loss", name)
    if (discount is None) != (live is None):
        raise ProgramError(f"'{name}': discount and live go together; got discount={discount}, live={live}")
    if shaping:
        for role, shape in (("reward", (rows,)), ("bonus", (1,)), ("cap", (1,)), ("shaped", (rows,))):
            require(getattr(shaping, role), np.float32, shape, role, name)
        if shaping.shaped.region().overlaps(shaping.reward.region()):
            raise ProgramError(f"'{name}': shaped must not overlap reward, {shaping.reward}, which others read")
    reward, bonus, cap, shaped = (
        (shaping.reward, shaping.bonus, shaping.cap, shaping.shaped) if shaping else (None, None, None, None)
    )
    tiles = _rows_tiles({"rows": rows})
    partials = program.tensor(f"{name}.partials", (tiles,), np.float64) if loss else None
    program.launch(
        SQUARES,
        {
            "y": y,
            "target": target,
            "discount": discount or 0,
            "live": live or 0,
            "reward": reward or 0,
            "bonus": bonus or 0,
            "cap": cap or 0,
            "dy": dy or 0,
            "shaped": shaped or 0,
            "partials": partials or 0,
            "ld_y": y.ld,
            "ld_target": target.ld,
            "ld_dy": dy.ld if dy else 0,
            "rows": rows,
            "cols": cols,
        },
        reads=[y, target, discount, live, reward, bonus, cap],
        writes=[dy, shaped, partials],
        label=name,
    )
    if loss and partials:
        divisor = 2.0 * cols * (rows if live is None else 1)
        sum_partials(program, partials, loss, denominator=live, divisor=divisor, label=f"{name}.loss")


def ensemble(
    program: Program,
    y: Tensor,
    *,
    heads: int,
    action: Tensor,
    best: Tensor,
    value: Tensor,
    reward: Tensor,
    discount: Tensor,
    weight: Tensor,
    dy: Tensor | None = None,
    loss: Tensor | None = None,
    name: str,
) -> None:
    """Append loss = mean_b weight_b mean_e err^2 / 2 and its gradient; err = y[action] - reward - discount value[best].

    Args:
        program: program to append to.
        y: float32 [B, heads * n], head by head.
        heads: number of heads.
        action: int32 [B] or a column [B, 1]; one outside [0, n) makes its row NaN.
        best: int32 [B] or a column [B, 1], greedy actions at s'.
        value: float32 [B, n], q of the target networks at s'.
        reward: float32 [B]. An infinite one gives infinite gradients.
        discount: float32 [B]; 0 gives an exact 0 for its term, whatever value holds.
        weight: float32 [B], importance weights.
        dy: float32 [B, heads * n], overwritten; 0 for every action but the one taken.
        loss: float32 [1], overwritten.
        name: begins the labels and the name of the tensor declared here, `<name>.partials`.

    Raises:
        ProgramError: a shape or dtype does not match.
    """
    rows, actions = matrix(value, "value", name)
    require(y, np.float32, (rows, heads * actions), "y", name)
    require(dy, np.float32, (rows, heads * actions), "dy", name)
    for role, index in (("action", action), ("best", best)):
        require(index, np.int32, (rows, 1) if len(index.shape) == 2 else (rows,), role, name)
    for role, vector in (("reward", reward), ("discount", discount), ("weight", weight)):
        require(vector, np.float32, (rows,), role, name)
    require(loss, np.float32, (1,), "loss", name)
    tile_rows = max(1, _ENSEMBLE_TILE // (heads * actions))
    tiles = _ensemble_tiles({"rows": rows, "tile_rows": tile_rows})
    partials = program.tensor(f"{name}.partials", (tiles,), np.float64) if loss else None
    program.launch(
        ENSEMBLE,
        {
            "y": y,
            "action": action,
            "best": best,
            "value": value,
            "reward": reward,
            "discount": discount,
            "weight": weight,
            "dy": dy or 0,
            "partials": partials or 0,
            "ld_y": y.ld,
            "ld_value": value.ld,
            "ld_dy": dy.ld if dy else 0,
            "action_stride": action.ld,
            "best_stride": best.ld,
            "rows": rows,
            "heads": heads,
            "actions": actions,
            "tile_rows": tile_rows,
        },
        reads=[y, action, best, value, reward, discount, weight],
        writes=[dy, partials],
        label=name,
    )
    if loss and partials:
        sum_partials(program, partials, loss, divisor=float(rows * heads), label=f"{name}.loss")


# -- references ---------------------------------------------------------------------------------------------------


def reference_squares(
    y: ArrayLike, target: ArrayLike, discount: ArrayLike | None = None
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Loss, dy and every row's half mean square (0 in dead rows) of `mean_squares`, in float64."""
    prediction = np.asarray(y, dtype=np.float64)
    rows, cols = prediction.shape
    live = np.ones(rows, bool) if discount is None else np.asarray(discount) > 0.0
    gap = np.where(live[:, None], prediction - np.asarray(target, dtype=np.float64), 0.0)
    count = max(1, int(live.sum()))
    halves = 0.5 * (gap * gap).mean(axis=1)
    return float(halves.sum()) / count, gap / (cols * count), halves


def reference_ensemble(
    y: ArrayLike,
    heads: int,
    action: ArrayLike,
    best: ArrayLike,
    value: ArrayLike,
    reward: ArrayLike,
    discount: ArrayLike,
    weight: ArrayLike,
) -> tuple[float, NDArray[np.float64]]:
    """Loss and dy of `ensemble`, in float64."""
    r, disc, importance, v = (np.asarray(x, dtype=np.float64) for x in (reward, discount, weight, value))
    rows = np.arange(len(r))
    prediction = np.asarray(y, dtype=np.float64).reshape(len(r), heads, -1)
    taken = np.asarray(action)
    with np.errstate(invalid="ignore"):
        goal = r + np.where(disc == 0.0, 0.0, disc * v[rows, np.asarray(best)])
        error = prediction[rows, :, taken] - goal[:, None]
        dy = np.zeros_like(prediction)
        dy[rows, :, taken] = importance[:, None] * error / error.size
        loss = float((importance[:, None] * 0.5 * error**2).mean())
    return loss, dy.reshape(len(r), -1)
