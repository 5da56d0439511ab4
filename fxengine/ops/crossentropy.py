"""Softmax cross-entropy over the valid rows, with its gradient in the same pass (`crossentropy.cu`).

A label outside [0, classes) masks its row: no loss, no share in the accuracy, an exact-zero gradient whatever the
row's logits hold. Loss and gradient are divided by max(1, valid rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops.checks import require


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // (256 // int(fields["lanes"])))


CROSSENTROPY = Family("crossentropy", "crossentropy.cu", "fx_crossentropy", "CrossEntropy", tiles=_tiles)


@dataclass(frozen=True)
class Partials:
    """What a cross-entropy leaves for its reports: loss = sum(losses) / max(1, valid), accuracy likewise.

    Attributes:
        losses: float64 [tiles], sums of -log p[label] over the valid rows of a tile.
        correct: int32 [tiles], valid rows whose argmax is the label.
        valid: int32 [1], number of valid rows.
    """

    losses: Tensor
    correct: Tensor
    valid: Tensor


def crossentropy(
    program: Program,
    logits: Tensor,
    labels: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    dlogits: Tensor | None = None,
    probabilities: Tensor | None = None,
    wire: Tensor | None = None,
    name: str,
) -> Partials | None:
    """Append softmax, cross-entropy and its gradient; every output is optional and overwritten.

    Args:
        program: program to append to.
        logits: float32 [B, C], C >= 2.
        labels: int32 [B]; None: softmax and wire alone.
        weight: float32 [1], weight of the loss, usually a signal; needed by dlogits. It does not scale the loss.
        dlogits: float32 [B, C] = weight (p - onehot) / max(1, valid), exact 0 in masked rows and for weight 0.
        probabilities: float32 [B, C], of every row.
        wire: float32 [B] or a column [B, 1] = p[1] - p[0], two classes only, of every row.
        name: label of the record; begins the names of the tensors declared here: `<name>.valid`,
            `<name>.loss_partials`, `<name>.correct_partials`.

    Returns:
        The partial results of loss and accuracy; None without labels.

    Raises:
        ValueError: a shape or dtype does not match, or an output lacks an input that it needs.
    """
    if len(logits.shape) != 2 or logits.dtype != np.float32 or logits.shape[1] < 2:
        raise ValueError(f"'{name}': logits must be float32 [B, C >= 2], got {logits.dtype} {logits.shape}")
    rows, classes = logits.shape
    require(dlogits, np.float32, (rows, classes), "dlogits", name)
    require(probabilities, np.float32, (rows, classes), "probabilities", name)
    require(labels, np.int32, (rows,), "labels", name)
    require(weight, np.float32, (1,), "weight", name)
    if wire is not None and (classes != 2 or wire.dtype != np.float32 or wire.shape not in ((rows,), (rows, 1))):
        raise ValueError(
            f"'{name}': wire must be float32 ({rows},) or ({rows}, 1) of two-class logits, "
            f"got {wire.dtype} {wire.shape} of {logits.shape}"
        )
    if dlogits and (weight is None or labels is None):
        raise ValueError(f"'{name}': dlogits needs labels and a weight")
    lanes = _lanes(classes)
    partials = None
    if labels is not None:
        tiles = _tiles({"rows": rows, "lanes": lanes})
        partials = Partials(
            losses=program.tensor(f"{name}.loss_partials", (tiles,), np.float64),
            correct=program.tensor(f"{name}.correct_partials", (tiles,), np.int32),
            valid=program.tensor(f"{name}.valid", (1,), np.int32),
        )
    program.launch(
        CROSSENTROPY,
        {
            "logits": logits,
            "labels": labels or 0,
            "valid": partials.valid if partials else 0,
            "weight": weight or 0,
            "dlogits": dlogits or 0,
            "probabilities": probabilities or 0,
            "wire": wire or 0,
            "loss_partials": partials.losses if partials else 0,
            "correct_partials": partials.correct if partials else 0,
            "ld_logits": logits.ld,
            "ld_dlogits": dlogits.ld if dlogits else 0,
            "ld_probabilities": probabilities.ld if probabilities else 0,
            "wire_stride": wire.ld if wire else 0,
            "rows": rows,
            "classes": classes,
            "lanes": lanes,
        },
        reads=[logits, labels, weight],
        writes=[
            dlogits,
            probabilities,
            wire,
            *((partials.losses, partials.correct, partials.valid) if partials else ()),
        ],
        label=name,
    )
    return partials


def _lanes(classes: int) -> int:
    """Lanes of a warp that share a row."""
    return 2 if classes <= 2 else 8 if classes <= 16 else 32


@dataclass(frozen=True)
class Reference:
    """Float64 results of `reference_crossentropy`."""

    probabilities: NDArray[np.float64]
    dlogits: NDArray[np.float64]
    loss: float
    accuracy: float
    valid: int


def reference_crossentropy(logits: ArrayLike, labels: ArrayLike, weight: float = 1.0) -> Reference:
    """What `crossentropy` computes, in float64.

    Args:
        logits: [B, C].
        labels: int [B].
        weight: weight of the loss in the gradient.
    """
    x = np.asarray(logits, dtype=np.float64)
    wanted = np.asarray(labels)
    classes = x.shape[1]
    mask = (wanted >= 0) & (wanted < classes)
    valid = int(mask.sum())
    own = np.where(mask, wanted, 0)
    onehot = np.arange(classes) == own[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        peak = np.where(np.isnan(x), -np.inf, x).max(axis=1, keepdims=True)
        exps = np.exp(x - peak)
        total = exps.sum(axis=1, keepdims=True)
        p = exps / total
        # 1 - p and -log p from the other classes, not as differences: exact also where p is nearly 1
        rest = np.where(onehot, 0.0, exps).sum(axis=1)
        distance = (x - peak)[onehot]
        losses = np.log1p(rest + np.expm1(distance)) - distance
    dlogits = np.zeros_like(x)
    if weight != 0:
        slopes = np.where(onehot, -rest[:, None] / total, p)
        dlogits[mask] = weight * slopes[mask] / max(1, valid)
    hits = np.array([_argmax(row) for row in x]) == wanted
    return Reference(
        probabilities=p,
        dlogits=dlogits,
        loss=float(losses[mask].sum()) / max(1, valid),
        accuracy=float((hits & mask).sum()) / max(1, valid),
        valid=valid,
    )


def _argmax(row: NDArray[np.float64]) -> int:
    """Lowest index of the largest value; NaN never wins, all NaN gives 0."""
    return 0 if np.isnan(row).all() else int(np.nanargmax(row))
