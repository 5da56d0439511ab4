"""The fused quantile networks (`iqn_fused`) by the warpgroups of sm_90, with packed weights (`pack`).

`iqn_fused.forward` and `iqn_fused.backward` choose these kernels where `fits_warpgroup` and `fits_warpgroup_backward`
say so.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops.iqn_sizes import (
    BACKWARD_COLUMNS,
    BACKWARD_OUTPUTS,
    MAX_COSINES,
    MAX_WIDTH,
    STATIC,
    Sizes,
    Weights,
    extents,
)
from fxengine.ops.linear_tiles import has_warpgroups
from fxengine.ops.pack import packed, packed_transpose

if TYPE_CHECKING:
    from fxengine.driver import Target

#: Rows of a tile of the backward.
WARPGROUP_ROWS = 32
# Warpgroups of a block of the forward, and rows that each takes at a time.
_FORWARD_GROUPS = 3
_FORWARD_ROWS = 64

# Outputs of which a block of the backward can make the last layer's gradients.
_LAST_OUTPUTS = 8

# Dynamic shared memory of a block of the backward (IqnLayout): w_phi; two tiles; phi, and two times the hidden numbers;
# two times dtheta, in boxes of 32 columns; w_iq2; b_phi, two times h2; tau, db_iq2. Aligned.
_WARPGROUP_BACKWARD_SHARED = (
    512 * MAX_COSINES
    + 16 * WARPGROUP_ROWS * (MAX_COSINES + MAX_WIDTH)
    + 4 * WARPGROUP_ROWS * (BACKWARD_COLUMNS + 2 * MAX_WIDTH)
    + 256 * WARPGROUP_ROWS
    + 64 * MAX_WIDTH
    + (WARPGROUP_ROWS + 4) * BACKWARD_COLUMNS
    + 8 * WARPGROUP_ROWS
    + 64 * BACKWARD_OUTPUTS
    + 1024
)


def warpgroup_shared(sizes: Sizes) -> int:
    """Bytes of dynamic shared memory of a block of `forward` by warpgroups: all weights, packed, the biases, and h2 of
    a sample for each warp."""
    last = -(-sizes.outputs // 16) * 16
    weights = sizes.features * (sizes.cosines + MAX_WIDTH) + MAX_WIDTH * last
    states = 4 * _FORWARD_GROUPS * sizes.features
    return 4 * (weights + sizes.features + MAX_WIDTH + last + states) + 1024  # aligned


def fits_warpgroup(target: Target, precision: str, sizes: Sizes, quantiles: int) -> bool:
    """Whether `forward` serves this shape by warpgroups, whose products are the fastest of an sm_90."""
    return has_warpgroups(target) and warpgroup_shape(target, precision, sizes, quantiles)


def warpgroup_shape(target: Target, precision: str, sizes: Sizes, quantiles: int) -> bool:
    """Whether the forward kernel takes this precision and shape, where the device can run it."""
    whole = sizes.cosines in (32, 64) and sizes.features % 64 == 0 and sizes.features <= 512 and quantiles % 16 == 0
    fits = warpgroup_shared(sizes) + 2 * STATIC <= target.shared_memory_optin
    return precision == "tf32" and whole and sizes.width == MAX_WIDTH and fits


def fits_warpgroup_backward(target: Target, precision: str, sizes: Sizes, quantiles: int) -> bool:
    """Whether `backward` serves this shape by warpgroups, whose products are the fastest of an sm_90."""
    return has_warpgroups(target) and warpgroup_backward_shape(target, precision, sizes, quantiles)


def warpgroup_backward_shape(target: Target, precision: str, sizes: Sizes, quantiles: int) -> bool:
    """Whether the backward kernel takes this precision and shape, where the device can run it."""
    whole = sizes.cosines in (32, 64) and sizes.features % BACKWARD_COLUMNS == 0 and sizes.width == MAX_WIDTH
    tiles = quantiles % 8 == 0 and (WARPGROUP_ROWS % quantiles == 0 or quantiles % WARPGROUP_ROWS == 0)
    fits = target.shared_memory_optin >= _WARPGROUP_BACKWARD_SHARED + 2 * STATIC
    return precision == "tf32" and whole and sizes.outputs <= BACKWARD_OUTPUTS and tiles and fits


def reaches_last_layer(sizes: Sizes) -> bool:
    """Whether the blocks of the backward that see the same rows are enough to make the last layer's gradients too."""
    return sizes.outputs <= _LAST_OUTPUTS * (sizes.features // BACKWARD_COLUMNS)


def forward_blocks(rows: int, room: int) -> int:
    """Blocks of the forward for so many rows on `room` multiprocessors: one for every tile, if there is room for them;
    else the fewest that are through as soon as `room` of them would be."""
    tiles = -(-rows // _FORWARD_ROWS)
    if tiles <= room:
        return tiles
    rounds = -(-tiles // (_FORWARD_GROUPS * room))  # of the busiest warpgroup
    return -(-tiles // (_FORWARD_GROUPS * rounds))


def forward_by_warpgroups(
    program: Program,
    tau: Tensor,
    h2: Tensor,
    weights: Weights,
    theta: Tensor,
    hidden: Tensor | None,
    *,
    blocks: int,
    label: str,
) -> None:
    """Append `forward` by warpgroups, of arguments that fit each other, in so many blocks."""
    sizes = weights.sizes
    matrices = {name: packed(program, getattr(weights, name)) for name in ("w_phi", "w_iq1", "w_iq2")}
    biases = {name: getattr(weights, name) for name in ("b_phi", "b_iq1", "b_iq2")}
    program.launch(
        _warpgroup_family(warpgroup_shared(sizes)),
        {
            "tau": tau,
            "h2": h2,
            **matrices,
            **biases,
            "hidden": hidden or 0,
            "theta": theta,
            "ld_h2": h2.ld,
            "ld_hidden": hidden.ld if hidden else 0,
            "ld_theta": theta.ld,
            "rows": tau.size,
            "quantiles": tau.shape[1],
            **extents(sizes),
            "blocks": blocks,
        },
        reads=[tau, h2, *matrices.values(), *biases.values()],
        writes=[theta, hidden],
        label=label,
    )


def packed_for_backward(program: Program, weights: Weights) -> tuple[Tensor, Tensor]:
    """w_phi and the transpose of w_iq1 as the backward kernel reads them."""
    return packed(program, weights.w_phi), packed_transpose(program, weights.w_iq1)


@cache
def warpgroup_backward_family() -> Family:
    """The backward kernel, whose records have packed matrices and no strides of them."""
    return Family(
        "iqn_warpgroup_backward_tf32",
        source="iqn_warpgroup_backward.cu",
        kernel="fx_iqn_warpgroup_backward",
        struct="IqnWarpgroupBackward",
        tiles=lambda fields: int(fields["slices"]) * (int(fields["features"]) // BACKWARD_COLUMNS),
        shared=_WARPGROUP_BACKWARD_SHARED,
        whole=True,
        early=("w_phi", "b_phi", "w_iq1", "w_iq2"),
    )


@cache
def _warpgroup_family(shared: int) -> Family:
    return Family(
        "iqn_warpgroup_tf32",
        source="iqn_warpgroup.cu",
        kernel="fx_iqn_warpgroup",
        struct="IqnWarpgroup",
        tiles=lambda fields: int(fields["blocks"]),
        late=True,
        shared=shared,
        whole=True,
        early=("w_phi", "b_phi", "w_iq1", "b_iq1", "w_iq2", "b_iq2"),
    )
