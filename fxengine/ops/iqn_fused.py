"""Implicit quantile networks in a launch forward and one or two backward, on the tensor cores.

    if iqn_fused.fits(program.target, program.precision, sizes):
        iqn_fused.forward(program, tau, h2, weights, theta, hidden=hidden)
    if iqn_fused.fits_backward(program.target, program.precision, sizes, quantiles):
        last = dw_iq2, db_iq2
        aligned = all(t.aligned for t in (dtheta, tau, h2, hidden))
        if not iqn_fused.makes_last_layer(program.target, program.precision, sizes, quantiles, aligned=aligned):
            linear.backward_dw(program, dtheta, hidden, *last)
            last = None, None
        iqn_fused.backward(program, dtheta, tau, h2, weights, hidden, dh2=dh2, weight=w_iqn, readiness=readiness,
                           gradients=iqn_fused.WeightGradients(dw_phi, db_phi, dw_iq1, db_iq1, *last), name="iqn")

    if iqn_fused.apart(program.target, batch) and iqn_fused.fits_state(program.target, program.precision, sizes):
        iqn_fused.state_gradient(program, dtheta, tau, h2, weights, hidden, dh2=dh2, weight=w_iqn,
                                 readiness=readiness, name="iqn.dh2")  # and `backward` without dh2

What the separate layers of `iqn` and `linear` pass through memory stays in registers and shared memory here. Operands
of every product are rounded to tf32 or bf16, sums are float32 in fixed order, as there; the cosines are good to 1e-6.
Whether a device and a shape are served is a pure function: `fits`, `fits_backward`, `fits_state`, `makes_last_layer`.
What is not served goes through the separate layers.

The rest of a backward pass waits for the gradient of h2, but not for those of the weights. Where samples are few and a
step is a chain of short launches, `state_gradient` makes the former alone, and `backward` runs beside the chain.

Source: Dabney, Ostrovski, Silver, Munos 2018, "Implicit quantile networks for distributional RL". Sums that become the
operand of the next product without leaving the registers: Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor, TensorMap
from fxengine.ops import iqn, iqn_warpgroup, linear
from fxengine.ops.checks import all_aligned, require_as
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
from fxengine.ops.shares import beside_heads

if TYPE_CHECKING:
    from fxengine.driver import Target

# Columns of h2 that a block of the state's gradient owns, and rows of its chunks, of which it holds two.
_STATE_COLUMNS = 128
_STATE_ROWS = 32

# Samples per multiprocessor up to which the gradient of h2 is made apart: beyond, the products that both launches make
# cost more than the wait for the weight gradients.
_APART_SAMPLES = 2
#: Part of the device for the weight gradients where that of h2 is made apart, which has the other two thirds first.
WEIGHTS_SHARE = 1 / 3
# Samples per multiprocessor up to which forward passes not made by warpgroups leave half of the device to others:
# beyond, the step is made of such launches.
_BESIDE_SAMPLES = 8

_WARPS = 8  # of a block

# Rows of a tile of the backward: the more there is room for, the better.
_TILE_ROWS = (32, 16)

_OLDEST_ARCH = 80  # mma.sync of tf32 and bf16


@dataclass(frozen=True)
class WeightGradients:
    """Float32 gradients of the parameters of the same names, in their shapes; for the last see `makes_last_layer`."""

    w_phi: Tensor
    b_phi: Tensor
    w_iq1: Tensor
    b_iq1: Tensor
    w_iq2: Tensor | None = None
    b_iq2: Tensor | None = None


def forward_shared(precision: str, sizes: Sizes) -> int:
    """Bytes of dynamic shared memory that a block of `forward` needs: all weights, rounded, and the biases."""
    chunks, last = -(-sizes.features // 16), -(-sizes.outputs // 16)
    unit = 512 * (1 if precision == "bf16" else 2)  # 16 x 16 weights
    units = chunks * (MAX_COSINES + MAX_WIDTH) // 16 + last * MAX_WIDTH // 16
    return units * unit + 4 * (16 * chunks + MAX_WIDTH + 16 * last)


def fits(target: Target, precision: str, sizes: Sizes) -> bool:
    """Whether `forward` serves this device, precision and shape."""
    return (
        _in_range(target, precision, sizes) and forward_shared(precision, sizes) + STATIC <= target.shared_memory_optin
    )


def backward_shared(precision: str, rows: int) -> int:
    """Bytes of dynamic shared memory of a block of `backward` with tiles of so many rows."""
    operand, columns = 2 if precision == "bf16" else 4, BACKWARD_COLUMNS
    weights = operand * (MAX_COSINES * columns + MAX_WIDTH * BACKWARD_OUTPUTS)
    tile = 2 * operand * rows * (MAX_COSINES + MAX_WIDTH) + 4 * (rows // 8) * columns
    return weights + 4 * rows * columns + 2 * tile + 4 * columns


def backward_rows(target: Target, precision: str, sizes: Sizes, quantiles: int) -> int:
    """Rows of a tile of `backward` on this device; 0 where `backward` does not serve it."""
    if _in_range(target, precision, sizes) and quantiles % 8 == 0:
        for rows in _TILE_ROWS:
            enough = backward_shared(precision, rows) + STATIC <= target.shared_memory_optin
            if enough and (rows % quantiles == 0 or quantiles % rows == 0):
                return rows
    return 0


def fits_backward(target: Target, precision: str, sizes: Sizes, quantiles: int) -> bool:
    """Whether `backward` serves this device, precision and shape."""
    return backward_rows(target, precision, sizes, quantiles) > 0


def makes_last_layer(target: Target, precision: str, sizes: Sizes, quantiles: int, *, aligned: bool) -> bool:
    """Whether `backward` makes the gradients of w_iq2 and b_iq2 too; else they take a `linear.backward_dw`.

    `aligned` says whether all rows of its dtheta, tau, h2 and hidden start at multiples of 16 bytes (`Tensor.aligned`).
    """
    by_warpgroups = iqn_warpgroup.fits_warpgroup_backward(target, precision, sizes, quantiles)
    return aligned and by_warpgroups and iqn_warpgroup.reaches_last_layer(sizes)


def state_shared(precision: str) -> int:
    """Bytes of dynamic shared memory of a block of `state_gradient`: cosines and hidden gradients of two chunks."""
    return 2 * _STATE_ROWS * (MAX_COSINES + MAX_WIDTH) * (2 if precision == "bf16" else 4)


def fits_state(target: Target, precision: str, sizes: Sizes) -> bool:
    """Whether `state_gradient` serves this device, precision and shape."""
    return _in_range(target, precision, sizes) and state_shared(precision) + STATIC <= target.shared_memory_optin


def apart(target: Target, samples: int) -> bool:
    """Whether the gradient of h2 should have a launch of its own, where it and those of the weights are wanted."""
    return samples <= _APART_SAMPLES * target.sm_count


def forward_share(target: Target, precision: str, sizes: Sizes, samples: int, quantiles: int) -> float:
    """Part of the device for the forward passes of a step, which the heads run beside; where warpgroups serve them, as
    they do where all rows start at multiples of 16 bytes."""
    if iqn_warpgroup.fits_warpgroup(target, precision, sizes, quantiles):
        return beside_heads(target) / target.sm_count
    return 0.5 if samples <= _BESIDE_SAMPLES * target.sm_count else 1.0


def forward(
    program: Program,
    tau: Tensor,
    h2: Tensor,
    weights: Weights,
    theta: Tensor,
    *,
    hidden: Tensor | None = None,
    share: float = 1.0,
    warpgroups: bool | None = None,
    label: str | None = None,
) -> None:
    """Append theta = w_iq2 relu(w_iq1 (relu(w_phi cos(pi i tau) + b_phi) * h2) + b_iq1) + b_iq2, row by row.

    Args:
        program: program to append to; its precision is tf32 or bf16.
        tau: float32 [B, N] without gaps.
        h2: float32 [B, H2].
        weights: the parameters.
        theta: float32 [B*N, A], overwritten; row b*N + i is quantile i of sample b.
        hidden: float32 [B*N, I] for the activations that a backward needs, or None.
        share: part of the device's multiprocessors to work on; records that run at the same time divide it.
        warpgroups: make the products by warpgroups, with packed weights (default: where
            `iqn_warpgroup.fits_warpgroup` says so, and all rows of h2 and hidden start at multiples of 16 bytes).
        label: shown in tables (default: the name of `theta`).

    Raises:
        ValueError: shapes or dtypes do not fit, `fits` says no, or warpgroups are asked for and rows start elsewhere;
            the message shows both sides.
    """
    label = label or theta.name
    sizes = weights.sizes
    rows, quantiles = _check(tau, h2, weights, label)
    if warpgroups is None:
        by_warpgroups = iqn_warpgroup.fits_warpgroup(program.target, program.precision, sizes, quantiles)
        warpgroups = by_warpgroups and all_aligned(h2, hidden)
    if warpgroups:
        served = iqn_warpgroup.warpgroup_shape(program.target, program.precision, sizes, quantiles)
        shape = f"{sizes} with {quantiles} quantiles"
        _require_served(served, program, shape, label, "fits_warpgroup")
        _require_aligned(label, h2=h2, hidden=hidden)
    else:
        _require_served(fits(program.target, program.precision, sizes), program, str(sizes), label, "fits")
    require_as(theta, (rows, sizes.outputs), "theta", f"tau is {tau.shape}", label)
    require_as(hidden, (rows, sizes.width), "hidden", f"tau is {tau.shape}", label)
    room = max(1, int(program.target.sm_count * share))
    if warpgroups:
        blocks = iqn_warpgroup.forward_blocks(rows, room)
        iqn_warpgroup.forward_by_warpgroups(program, tau, h2, weights, theta, hidden, blocks=blocks, label=label)
        return
    # Of 32 rows a warp makes two products per weight that it reads, but they should give all warps work.
    height = 32 if quantiles % 32 == 0 and rows > _WARPS * 16 * room else 16
    program.launch(
        _forward_family(program.precision, height, forward_shared(program.precision, sizes)),
        {
            "tau": tau,
            "h2": h2,
            **_parameters(weights),
            "hidden": hidden or 0,
            "theta": theta,
            "ld_h2": h2.ld,
            "ld_hidden": hidden.ld if hidden else 0,
            "ld_theta": theta.ld,
            "rows": rows,
            "quantiles": quantiles,
            **extents(sizes),
            "blocks": min(-(-rows // (_WARPS * height)), room),
        },
        reads=[tau, h2, *_all(weights)],
        writes=[theta, hidden],
        label=label,
    )


def backward(
    program: Program,
    dtheta: Tensor,
    tau: Tensor,
    h2: Tensor,
    weights: Weights,
    hidden: Tensor,
    *,
    dh2: Tensor | None = None,
    weight: Tensor | None = None,
    readiness: Tensor | None = None,
    activation: linear.Activation = "none",
    accumulate: bool = False,
    gradients: WeightGradients | None = None,
    accumulate_gradients: bool = False,
    share: float = 1.0,
    warpgroups: bool | None = None,
    name: str,
) -> None:
    """Append the gradients of `forward`; those of w_iq2 and b_iq2 where `makes_last_layer` says so.

    Elsewhere these are a `linear.backward_dw` of dtheta and hidden. By warpgroups the gradients of b_phi and b_iq2 are
    sums of numbers rounded to tf32.

    Args:
        program: program to append to; its precision is tf32 or bf16.
        dtheta: float32 [B*N, A], gradient of theta.
        tau: float32 [B, N], as given to `forward`, like h2 and weights.
        h2: float32 [B, H2].
        weights: the parameters.
        hidden: float32 [B*N, I], from `forward`.
        dh2: float32 [B, H2] = (or += with `accumulate`) weight * readiness * the gradient, times the slope of the
            activation that made h2; None: not wanted.
        weight: float32 [1], usually the signal w_iqn; needed by dh2.
        readiness: float32 [1], usually the state iqn_readiness; needed by dh2. Where weight * readiness is 0, dh2
            becomes an exact 0, or with `accumulate` keeps its bits.
        activation: the one that made h2.
        accumulate: add to dh2 instead of overwriting it.
        gradients: where the gradients of the parameters go, at full scale; None: not wanted.
        accumulate_gradients: add to them instead of overwriting them.
        share: part of the device's multiprocessors to work on.
        warpgroups: make the products by warpgroups, with packed weights (default: where
            `iqn_warpgroup.fits_warpgroup_backward` says so, and all rows of dtheta, tau, h2 and hidden start at
            multiples of 16 bytes).
        name: label, and beginning of the tensors declared here, `<name>.partial` and `<name>.partial_iq2`.

    Raises:
        ValueError: shapes or dtypes do not fit, dh2 lacks weight or readiness, `fits_backward` says no, gradients of
            the last layer are given that are not made, or warpgroups are asked for and rows start elsewhere.
    """
    sizes = weights.sizes
    fields, reads = _gradient(
        dtheta,
        tau,
        h2,
        weights,
        hidden,
        dh2,
        weight,
        readiness,
        activation=activation,
        accumulate=accumulate,
        name=name,
    )
    rows, quantiles = tau.size, tau.shape[1]
    shape = f"{sizes} with {quantiles} quantiles"
    if warpgroups is None:
        by_warpgroups = iqn_warpgroup.fits_warpgroup_backward(program.target, program.precision, sizes, quantiles)
        warpgroups = by_warpgroups and all_aligned(dtheta, tau, h2, hidden)
    if warpgroups:
        served = iqn_warpgroup.warpgroup_backward_shape(program.target, program.precision, sizes, quantiles)
        _require_served(served, program, shape, name, "fits_warpgroup_backward")
        _require_aligned(name, dtheta=dtheta, tau=tau, h2=h2, hidden=hidden)
        height, family = iqn_warpgroup.WARPGROUP_ROWS, iqn_warpgroup.warpgroup_backward_family()
        w_phi, w_iq1 = iqn_warpgroup.packed_for_backward(program, weights)
        fields |= {"dtheta": TensorMap(dtheta, height), "hidden": TensorMap(hidden, height), "partial_iq2": 0}
        makes_last = iqn_warpgroup.reaches_last_layer(sizes)
    else:
        height = backward_rows(program.target, program.precision, sizes, quantiles)
        _require_served(height > 0, program, shape, name, "fits_backward")
        family = _backward_family(program.precision, height)
        w_phi, w_iq1 = weights.w_phi, weights.w_iq1
        fields |= {"ld_dtheta": dtheta.ld, "ld_hidden": hidden.ld, "ld_phi": w_phi.ld, "ld_iq1": w_iq1.ld}
        makes_last = False
    parts = -(-sizes.features // BACKWARD_COLUMNS)
    slices = max(1, min(-(-rows // max(height, quantiles)), int(program.target.sm_count * share) // parts))
    total = sizes.width * sizes.features + sizes.features * sizes.cosines + sizes.features + sizes.width
    wanted = _wanted(gradients, weights, makes_last, name)
    last = "w_iq2" in wanted
    partials = {}
    if wanted:
        partials["partial"] = program.tensor(f"{name}.partial", (slices, total))
    if last:
        partials["partial_iq2"] = program.tensor(f"{name}.partial_iq2", (slices, sizes.outputs * (sizes.width + 1)))
    program.launch(
        family,
        {**fields, "w_phi": w_phi, "w_iq1": w_iq1, "partial": 0, **partials, "rows": rows, "slices": slices},
        reads=[*reads, w_phi, w_iq1],
        writes=[dh2, *partials.values()],
        label=name,
    )
    if not wanted:
        return
    program.launch(
        GRADIENTS,
        {
            "partial_iq2": 0,
            **partials,
            "dw_iq2": 0,
            "db_iq2": 0,
            **{f"d{role}": gradient for role, gradient in wanted.items()},
            "squares": 0,
            "ld_iq1": wanted["w_iq1"].ld,
            "ld_phi": wanted["w_phi"].ld,
            "ld_iq2": wanted["w_iq2"].ld if last else 0,
            "cosines": sizes.cosines,
            "features": sizes.features,
            "width": sizes.width,
            "outputs": sizes.outputs if last else 0,
            "slices": slices,
            "accumulate": int(accumulate_gradients),
        },
        reads=[*partials.values(), *(wanted.values() if accumulate_gradients else [])],
        writes=list(wanted.values()),
        label=f"{name}.dw",
    )


def state_gradient(
    program: Program,
    dtheta: Tensor,
    tau: Tensor,
    h2: Tensor,
    weights: Weights,
    hidden: Tensor,
    *,
    dh2: Tensor,
    weight: Tensor,
    readiness: Tensor,
    activation: linear.Activation = "none",
    accumulate: bool = False,
    name: str,
) -> None:
    """Append the gradient of h2 alone, as of `backward` but for the order of its sums, sooner and of any N.

    Args:
        program: program to append to; its precision is tf32 or bf16.
        dtheta: float32 [B*N, A], gradient of theta.
        tau: float32 [B, N], as given to `forward`, like h2 and weights.
        h2: float32 [B, H2].
        weights: the parameters.
        hidden: float32 [B*N, I], from `forward`.
        dh2: float32 [B, H2] = (or += with `accumulate`) weight * readiness * the gradient, times the slope of the
            activation that made h2.
        weight: float32 [1], usually the signal w_iqn.
        readiness: float32 [1], usually the state iqn_readiness. Where weight * readiness is 0, dh2 becomes an exact 0,
            or with `accumulate` keeps its bits.
        activation: the one that made h2.
        accumulate: add to dh2 instead of overwriting it.
        name: label.

    Raises:
        ValueError: shapes or dtypes do not fit, or `fits_state` says no.
    """
    sizes = weights.sizes
    fields, reads = _gradient(
        dtheta,
        tau,
        h2,
        weights,
        hidden,
        dh2,
        weight,
        readiness,
        activation=activation,
        accumulate=accumulate,
        name=name,
    )
    served = fits_state(program.target, program.precision, sizes)
    _require_served(served, program, str(sizes), name, "fits_state")
    samples, parts = tau.shape[0], -(-sizes.features // _STATE_COLUMNS)
    program.launch(
        _state_family(program.precision),
        {
            **fields,
            "w_phi": weights.w_phi,
            "w_iq1": weights.w_iq1,
            "ld_dtheta": dtheta.ld,
            "ld_hidden": hidden.ld,
            "ld_phi": weights.w_phi.ld,
            "ld_iq1": weights.w_iq1.ld,
            "samples": samples,
            "slices": min(samples, max(1, beside_heads(program.target) // parts)),
        },
        reads=[*reads, weights.w_phi, weights.w_iq1],
        writes=[dh2],
        label=name,
    )


def _gradient(
    dtheta: Tensor,
    tau: Tensor,
    h2: Tensor,
    weights: Weights,
    hidden: Tensor,
    dh2: Tensor | None,
    weight: Tensor | None,
    readiness: Tensor | None,
    *,
    activation: linear.Activation,
    accumulate: bool,
    name: str,
) -> tuple[dict[str, Tensor | TensorMap | int], list[Tensor | None]]:
    """The fields that records of gradients have in common, and what they read: all but w_phi and w_iq1, of which some
    have copies. Checks the arguments."""
    sizes = weights.sizes
    rows, quantiles = _check(tau, h2, weights, name)
    for role, tensor, shape in (
        ("dtheta", dtheta, (rows, sizes.outputs)),
        ("hidden", hidden, (rows, sizes.width)),
        ("dh2", dh2, h2.shape),
        ("weight", weight, (1,)),
        ("readiness", readiness, (1,)),
    ):
        require_as(tensor, shape, role, f"tau is {tau.shape} and the parameters are {sizes}", name)
    if dh2 is not None and (weight is None or readiness is None):
        raise ValueError(f"'{name}': dh2 needs weight and readiness")
    fields: dict[str, Tensor | TensorMap | int] = {
        "dtheta": dtheta,
        "tau": tau,
        "h2": h2,
        "hidden": hidden,
        "b_phi": weights.b_phi,
        "w_iq2": weights.w_iq2,
        "weight": weight or 0,
        "readiness": readiness or 0,
        "dh2": dh2 or 0,
        "ld_h2": h2.ld,
        "ld_iq2": weights.w_iq2.ld,
        "ld_dh2": dh2.ld if dh2 else 0,
        "quantiles": quantiles,
        **extents(sizes),
        "activation": linear.ACTIVATION_CODES[activation],
        "accumulate": int(accumulate),
    }
    parameters = (weights.b_phi, weights.b_iq1, weights.w_iq2, weights.b_iq2)
    return fields, [dtheta, tau, h2, hidden, *parameters, weight, readiness, dh2 if accumulate else None]


def _wanted(gradients: WeightGradients | None, weights: Weights, makes_last: bool, name: str) -> dict[str, Tensor]:
    """The gradients that are asked for, by the names of their parameters. Checks them."""
    if gradients is None:
        return {}
    last = {"w_iq2": gradients.w_iq2, "b_iq2": gradients.b_iq2}
    given = {role: gradient for role, gradient in last.items() if gradient is not None}
    if len(given) == 1:
        raise ValueError(f"'{name}': w_iq2 and b_iq2 have gradients together, got that of {next(iter(given))} alone")
    if given and not makes_last:
        raise ValueError(f"'{name}': gradients of w_iq2 and b_iq2 are not made here (see makes_last_layer)")
    wanted = {role: getattr(gradients, role) for role in ("w_iq1", "w_phi", "b_phi", "b_iq1")} | given
    for role, gradient in wanted.items():
        shape = getattr(weights, role).shape
        require_as(gradient, shape, f"d{role}", f"the parameter is {shape}", name)
    return wanted


def _in_range(target: Target, precision: str, sizes: Sizes) -> bool:
    """What all kernels ask: tensor cores, a precision for them, and no more than they have room for."""
    if precision not in ("tf32", "bf16") or sizes.cosines > MAX_COSINES or sizes.width > MAX_WIDTH:
        return False
    return target.arch_number is None or target.arch_number >= _OLDEST_ARCH


def _blocks(fields: Mapping[str, Any]) -> int:
    return int(fields["blocks"])


def _gradient_tiles(fields: Mapping[str, Any]) -> int:
    features, width = int(fields["features"]), int(fields["width"])
    last = int(fields["outputs"]) * (width + 1)
    return -(-(features * (width + int(fields["cosines"]) + 1) + width + last) // 256)


#: Sums of the partial weight gradients; like all weight gradients nothing but the optimizer waits for them.
GRADIENTS = Family(
    "iqn_gradients",
    "iqn_fused_backward.cu",
    "fx_iqn_gradients",
    "IqnGradients",
    tiles=_gradient_tiles,
    late=True,
    gradients=("dw_iq1", "dw_phi", "db_phi", "db_iq1", "dw_iq2", "db_iq2"),
    squares=_gradient_tiles,
)


@cache
def _backward_family(precision: str, rows: int) -> Family:
    return Family(
        f"iqn_backward_{precision}_{rows}",
        source="iqn_fused_backward.cu",
        kernel=f"fx_iqn_backward_{precision}_{rows}",
        struct="IqnBackward",
        tiles=lambda fields: int(fields["slices"]) * -(-int(fields["features"]) // BACKWARD_COLUMNS),
        shared=backward_shared(precision, rows),
        whole=True,
        early=("w_phi", "b_phi", "w_iq1", "w_iq2"),
    )


@cache
def _state_family(precision: str) -> Family:
    return Family(
        f"iqn_state_{precision}",
        source="iqn_state.cu",
        kernel=f"fx_iqn_state_{precision}",
        struct="IqnState",
        tiles=lambda fields: int(fields["slices"]) * -(-int(fields["features"]) // _STATE_COLUMNS),
        shared=state_shared(precision),
        whole=True,
        early=("w_phi", "b_phi", "w_iq1", "w_iq2"),
    )


# Late: the networks of a step, whose states are ready at different times, then share a launch, and the device.
@cache
def _forward_family(precision: str, height: int, shared: int) -> Family:
    return Family(
        f"iqn_forward_{precision}_{height}",
        source="iqn_fused.cu",
        kernel=f"fx_iqn_forward_{precision}_{height}",
        struct="IqnForward",
        tiles=_blocks,
        late=True,
        shared=shared,
        whole=True,
        early=("w_phi", "b_phi", "w_iq1", "b_iq1", "w_iq2", "b_iq2"),
    )


# -- references ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """Float64 results of `reference_forward`, [B*N, ...]."""

    cosines: NDArray[np.float64]
    phi: NDArray[np.float64]
    mixed: NDArray[np.float64]
    hidden: NDArray[np.float64]
    theta: NDArray[np.float64]


def reference_forward(
    tau: ArrayLike, h2: ArrayLike, weights: Mapping[str, ArrayLike], *, precision: str = "fp32"
) -> Reference:
    """The networks in float64; `weights` by the names of `Weights`, operands of products as `precision` reads them."""

    def product(x: ArrayLike, w: str, b: str, activation: linear.Activation) -> NDArray[np.float64]:
        left, right = (linear.reference_rounded(a, precision) for a in (x, weights[w]))
        return linear.reference_forward(left, right, weights[b], activation=activation)

    cosines = iqn.reference_cosines(tau, np.shape(weights["w_phi"])[1])
    phi = product(cosines, "w_phi", "b_phi", "relu")
    mixed = iqn.reference_mix(phi, h2)
    hidden = product(mixed, "w_iq1", "b_iq1", "relu")
    return Reference(cosines, phi, mixed, hidden, product(hidden, "w_iq2", "b_iq2", "none"))


@dataclass(frozen=True)
class ReferenceGradients:
    """Float64 gradients of the parameters and of h2, by the names of what they belong to."""

    w_phi: NDArray[np.float64]
    b_phi: NDArray[np.float64]
    w_iq1: NDArray[np.float64]
    b_iq1: NDArray[np.float64]
    w_iq2: NDArray[np.float64]
    b_iq2: NDArray[np.float64]
    h2: NDArray[np.float64]


def reference_backward(
    dtheta: ArrayLike,
    tau: ArrayLike,
    h2: ArrayLike,
    weights: Mapping[str, ArrayLike],
    *,
    scale: float = 1.0,
    precision: str = "fp32",
) -> ReferenceGradients:
    """Gradients in float64, operands of products as `precision` reads them; h2's is an exact 0 where the scale is 0."""

    def rounded(x: ArrayLike) -> NDArray[np.float64]:
        return linear.reference_rounded(x, precision)

    found = reference_forward(tau, h2, weights, precision=precision)
    dhidden = linear.reference_dx(rounded(dtheta), rounded(weights["w_iq2"]), x=found.hidden, activation="relu")
    dmixed = linear.reference_dx(rounded(dhidden), rounded(weights["w_iq1"]))
    dphi, dh2 = iqn.reference_mix_backward(dmixed, found.phi, h2, scale)
    return ReferenceGradients(
        w_phi=linear.reference_dw(rounded(dphi), rounded(found.cosines))[0],
        b_phi=dphi.sum(axis=0),
        w_iq1=linear.reference_dw(rounded(dhidden), rounded(found.mixed))[0],
        b_iq1=dhidden.sum(axis=0),
        w_iq2=linear.reference_dw(rounded(dtheta), rounded(found.hidden))[0],
        b_iq2=np.asarray(dtheta, np.float64).sum(axis=0),
        h2=dh2,
    )


# -- checks -------------------------------------------------------------------------------------------------


def _check(tau: Tensor, h2: Tensor, weights: Weights, label: str) -> tuple[int, int]:
    """Rows and quantiles, of arguments that fit each other."""
    sizes = weights.sizes
    if len(tau.shape) != 2 or tau.dtype != np.float32 or not tau.contiguous:
        raise ValueError(f"'{label}': tau must be float32 [B, N] without gaps, got {tau.dtype} {tau.shape}")
    because = f"the parameters are {sizes}"
    require_as(h2, (tau.shape[0], sizes.features), "h2", f"tau is {tau.shape} and {because}", label)
    for role, shape in (
        ("w_phi", (sizes.features, sizes.cosines)),
        ("b_phi", (sizes.features,)),
        ("w_iq1", (sizes.width, sizes.features)),
        ("b_iq1", (sizes.width,)),
        ("w_iq2", (sizes.outputs, sizes.width)),
        ("b_iq2", (sizes.outputs,)),
    ):
        require_as(getattr(weights, role), shape, role, because, label)
    return tau.size, tau.shape[1]


def _require_served(served: bool, program: Program, shape: str, label: str, see: str) -> None:
    if not served:
        raise ValueError(
            f"'{label}': {shape} in {program.precision} on {program.target} is not for the fused kernels (see {see}); "
            "use the separate layers"
        )


def _require_aligned(label: str, **tensors: Tensor | None) -> None:
    for role, tensor in tensors.items():
        if tensor is not None and not tensor.aligned:
            raise ValueError(
                f"'{label}': rows of {role} must start at multiples of 16 bytes for the kernel by warpgroups, got "
                f"offset {tensor.offset} and row stride {tensor.ld} (floats); declare it padded=True, or pass "
                "warpgroups=False"
            )


def _parameters(weights: Weights) -> dict[str, Tensor | int]:
    return {
        "w_phi": weights.w_phi,
        "b_phi": weights.b_phi,
        "w_iq1": weights.w_iq1,
        "b_iq1": weights.b_iq1,
        "w_iq2": weights.w_iq2,
        "b_iq2": weights.b_iq2,
        "ld_phi": weights.w_phi.ld,
        "ld_iq1": weights.w_iq1.ld,
        "ld_iq2": weights.w_iq2.ld,
    }


def _all(weights: Weights) -> list[Tensor]:
    return [weights.w_phi, weights.b_phi, weights.w_iq1, weights.b_iq1, weights.w_iq2, weights.b_iq2]
