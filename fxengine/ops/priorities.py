"""Proportional prioritized sampling over the rows of a replay (`priorities.cu`), and its NumPy references.

Schaul, Quan, Antonoglou, Silver, "Prioritized experience replay" (ICLR 2016): a row is drawn with probability
P(i) = p_i^alpha / sum_k p_k^alpha (equation 1), p = |td| + eps, a batch in equal strata of the line of all priorities;
importance weights (N P(i))^-beta (section 3.4), divided by the largest of the batch, which makes them
(min_k p_k^alpha / p_i^alpha)^beta over the batch.

A leaf holds p^alpha, as alpha was when it was set. Above the leaves lies one level of sums, each over 1024 of them;
what is above is added up by whoever samples. That is one launch to sample and one to update, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops.checks import require
from fxengine.ops.gather import random_bits
from fxengine.ops.replay import ARENA, Ring

#: Leaves under one sum.
NODE = 1024
#: The smallest leaf that a priority sets.
LEAST = 2.0**-126

_THREADS = 256
# So many blocks sample before a block takes more than a transition per warp: each adds up all sums.
_BLOCKS = 128


def _sample_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // int(fields["tile_rows"]))


def _insert_tiles(fields: Mapping[str, Any]) -> int:
    return int(fields["span"]) * (1 if fields["n"] == 1 else 2)


_SOURCE = "priorities.cu"
SAMPLE = Family("priority_sample", _SOURCE, "fx_priority_sample", "PrioritySample", tiles=_sample_tiles)
UPDATE = Family(
    "priority_update", _SOURCE, "fx_priority_update", "PriorityUpdate", tiles=lambda fields: int(fields["rows"])
)
INSERT = Family("priority_insert", _SOURCE, "fx_priority_insert", "PriorityInsert", tiles=_insert_tiles)


@dataclass(frozen=True)
class Tree:
    """Priorities of all rows.

    Attributes:
        leaves: float32 [nodes, 1024]: p^alpha of each row, 0 where no transition can start.
        sums: float64 [nodes], of the leaves.
        maximum: float32 [1], the largest leaf that a priority has set.
    """

    leaves: Tensor
    sums: Tensor
    maximum: Tensor


def tree(program: Program, rows: int, *, prefix: str, n_step: int) -> Tree:
    """Declare the priorities of so many rows; all must be zeroed before the first insertion.

    The leaves' name says n_step: which of them are 0 depends on it.
    """
    nodes = -(-rows // NODE)
    return Tree(
        leaves=program.tensor(f"{prefix}leaves.{n_step}_step", (nodes, NODE), np.float32, arena=ARENA),
        sums=program.tensor(f"{prefix}sums", (nodes,), np.float64, arena=ARENA),
        maximum=program.tensor(f"{prefix}maximum", (1,), np.float32, arena=ARENA),
    )


def sample(
    program: Program, tree: Tree, *, counters: Tensor, stream: int, starts: Tensor, leaves: Tensor, label: str
) -> None:
    """Append: draw the rows that a batch starts at, transition b from the b-th of equal strata.

    Args:
        program: program to append to.
        tree: the priorities.
        counters: uint64 [4] (replays finished, t, skipped, seed).
        stream: number of the random stream, 32 bits.
        starts: int32 [B], overwritten with rows.
        leaves: float32 [B], overwritten with their leaves.
        label: shown in tables.

    Raises:
        ProgramError: a shape or dtype does not match.
        ValueError: the stream does not fit 32 bits.
    """
    batch = starts.shape[0]
    require(counters, np.uint64, (4,), "counters", label)
    require(starts, np.int32, (batch,), "starts", label)
    require(leaves, np.float32, (batch,), "leaves", label)
    if not 0 <= stream < 2**32:
        raise ValueError(f"'{label}': stream {stream} does not fit 32 bits without sign")
    nodes = tree.sums.size
    program.launch(
        SAMPLE,
        {
            "leaves": tree.leaves,
            "sums": tree.sums,
            "counters": counters,
            "starts": starts,
            "chosen": leaves,
            "nodes": nodes,
            "share": -(-nodes // _THREADS),
            "rows": batch,
            "tile_rows": 8 * -(-batch // (8 * _BLOCKS)),
            "stream": stream,
        },
        reads=[tree.leaves, tree.sums, counters],
        writes=[starts, leaves],
        label=label,
    )


def update(
    program: Program,
    tree: Tree,
    *,
    starts: Tensor,
    td: Tensor,
    alpha: Tensor,
    eps: Tensor,
    skip: Tensor,
    label: str,
) -> None:
    """Append, in place: leaf = max((|td| + eps)^alpha, 2**-126) for the rows of a batch, and the sums above.

    Args:
        program: program to append to.
        tree: the priorities.
        starts: int32 [B], rows. Of several transitions that start at one row the first counts.
        td: float32 [B]; a transition whose td is not finite leaves its row's priority as it is.
        alpha: float32 [1].
        eps: float32 [1].
        skip: uint32 [1]; nothing is written when it is set.
        label: shown in tables.

    Raises:
        ProgramError: a shape or dtype does not match.
    """
    batch = starts.shape[0]
    require(starts, np.int32, (batch,), "starts", label)
    require(td, np.float32, (batch,), "td", label)
    require(alpha, np.float32, (1,), "alpha", label)
    require(eps, np.float32, (1,), "eps", label)
    require(skip, np.uint32, (1,), "skip", label)
    state = {"leaves": tree.leaves, "sums": tree.sums, "maximum": tree.maximum}
    given = {"starts": starts, "td": td, "alpha": alpha, "eps": eps, "skip": skip}
    program.launch(
        UPDATE,
        {**state, **given, "rows": batch},
        reads=[*state.values(), *given.values()],
        writes=[*state.values()],
        label=label,
    )


def insert(program: Program, tree: Tree, ring: Ring, *, label: str) -> None:
    """Append: the priorities when one step of all environments is inserted. Comes before `replay.advance`.

    The n - 1 newest steps get 0: their windows are not complete, or the step that was there is overwritten. The step
    whose window this one completes gets the largest priority so far, at least 1.
    """
    program.launch(
        INSERT,
        {
            "leaves": tree.leaves,
            "sums": tree.sums,
            "maximum": tree.maximum,
            "ring": ring.counters,
            "slots": ring.slots,
            "envs": ring.envs,
            "n": ring.n_step,
            "span": (ring.envs + NODE - 2) // NODE + 1,
        },
        reads=[tree.leaves, tree.sums, tree.maximum, ring.counters],
        writes=[tree.leaves, tree.sums],
        label=label,
    )


def reference_sums(leaves: ArrayLike) -> NDArray[np.float64]:
    """Sums of leaves [nodes, 1024] in the order of the kernels: the same bits."""
    x = np.asarray(leaves, np.float32).astype(np.float64).reshape(-1, 8, 32, 4)
    lanes = ((x[..., 0] + x[..., 1]) + x[..., 2]) + x[..., 3]
    for offset in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., np.arange(32) ^ offset]
    total = lanes[:, 0, 0]
    for warp in range(1, 8):
        total = total + lanes[:, warp, 0]
    return total


def reference_sample(leaves: ArrayLike, *, seed: int, replay: int, stream: int, batch: int) -> NDArray[np.int64]:
    """The rows that `sample` draws: exact where the sums of the leaves are.

    Args:
        leaves: [rows].
        seed: 64-bit seed.
        replay: replays finished before this one.
        stream: number of the random stream.
        batch: how many.
    """
    bits = random_bits(seed, replay, stream, np.arange(batch)).astype(np.uint64)
    uniform = ((bits[:, 1] << np.uint64(32) | bits[:, 0]) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    reach = np.cumsum(np.asarray(leaves, np.float64))
    places = reach[-1] / batch * (np.arange(batch) + uniform)
    return np.searchsorted(reach, places, side="right").astype(np.int64)


def reference_leaf(td: ArrayLike, *, alpha: float, eps: float) -> NDArray[np.float64]:
    """Leaves that finite TD errors set, in float64."""
    return np.maximum((np.abs(np.asarray(td, np.float64)) + eps) ** alpha, LEAST)


def reference_weights(leaves: ArrayLike, beta: float) -> NDArray[np.float64]:
    """Importance weights of a batch drawn by these leaves [B], as section 3.4 states them, in float64."""
    p = np.asarray(leaves, np.float64)
    raw = (len(p) * p / p.sum()) ** -beta
    return raw / raw.max()
