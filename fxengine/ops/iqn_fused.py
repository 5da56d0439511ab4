"""Implicit quantile networks in one launch each way, on the tensor cores (`iqn_fused.cu`, `iqn_fused_backward.cu`).

    if iqn_fused.fits(program.target, program.precision, sizes):
        iqn_fused.forward(program, tau, h2, weights, theta, hidden=hidden)

What the separate layers of `iqn` and `linear` pass through memory stays in registers and shared memory here. Operands
of every product are rounded to tf32 or bf16, sums are float32 in fixed order, as there; the cosines are good to 1e-6.
Whether a device and a shape are served is a pure function: `fits`. What is not served goes through the separate layers.

Source: Dabney, Ostrovski, Silver, Munos 2018, "Implicit quantile networks for distributional RL". Sums that become the
operand of the next product without leaving the registers: Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops import iqn, linear

if TYPE_CHECKING:
    from fxengine.driver import Target

#: Most cosines and most hidden numbers that the kernels have room for.
MAX_COSINES = 64
MAX_WIDTH = 128

# Shared memory that the kernels declare themselves.
_STATIC = 256

_OLDEST_ARCH = 80  # mma.sync of tf32 and bf16


@dataclass(frozen=True)
class Sizes:
    """Sizes of a quantile network.

    Attributes:
        cosines: features of a fraction, M.
        features: features of the state, H2.
        width: hidden numbers, I.
        outputs: actions of all branches.
    """

    cosines: int
    features: int
    width: int
    outputs: int


@dataclass(frozen=True)
class Weights:
    """Float32 parameters: w_phi [H2, M], b_phi [H2], w_iq1 [I, H2], b_iq1 [I], w_iq2 [A, I], b_iq2 [A]."""

    w_phi: Tensor
    b_phi: Tensor
    w_iq1: Tensor
    b_iq1: Tensor
    w_iq2: Tensor
    b_iq2: Tensor

    @property
    def sizes(self) -> Sizes:
        """The sizes that the parameters speak of."""
        return Sizes(self.w_phi.shape[1], self.w_phi.shape[0], self.w_iq1.shape[0], self.w_iq2.shape[0])


def forward_shared(precision: str, sizes: Sizes) -> int:
    """Bytes of dynamic shared memory that a block of `forward` needs: all weights, rounded, and the biases."""
    chunks, last = -(-sizes.features // 16), -(-sizes.outputs // 16)
    unit = 512 * (1 if precision == "bf16" else 2)  # 16 x 16 weights
    units = chunks * (MAX_COSINES + MAX_WIDTH) // 16 + last * MAX_WIDTH // 16
    return units * unit + 4 * (16 * chunks + MAX_WIDTH + 16 * last)


def fits(target: Target, precision: str, sizes: Sizes) -> bool:
    """Whether `forward` serves this device, precision and shape."""
    return (
        _tensor_cores(target, precision)
        and sizes.cosines <= MAX_COSINES
        and sizes.width <= MAX_WIDTH
        and forward_shared(precision, sizes) + _STATIC <= target.shared_memory_optin
    )


def forward(
    program: Program,
    tau: Tensor,
    h2: Tensor,
    weights: Weights,
    theta: Tensor,
    *,
    hidden: Tensor | None = None,
    share: float = 1.0,
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
        label: shown in tables (default: the name of `theta`).

    Raises:
        ValueError: shapes or dtypes do not fit, or `fits` says no; the message shows both sides.
    """
    label = label or theta.name
    sizes = weights.sizes
    rows, quantiles = _check(program, tau, h2, weights, label)
    _require(theta, (rows, sizes.outputs), "theta", f"tau is {tau.shape}", label)
    _require(hidden, (rows, sizes.width), "hidden", f"tau is {tau.shape}", label)
    height = 32 if program.precision == "bf16" and quantiles % 32 == 0 and rows > 128 * program.target.sm_count else 16
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
            **_extents(sizes),
            "blocks": max(1, min(-(-rows // (8 * height)), int(program.target.sm_count * share))),
        },
        reads=[tau, h2, *_all(weights)],
        writes=[theta, hidden],
        label=label,
    )


def _tensor_cores(target: Target, precision: str) -> bool:
    if precision not in ("tf32", "bf16"):
        return False
    number = re.match(r"sm_(\d+)", target.arch)
    return number is None or int(number[1]) >= _OLDEST_ARCH


def _blocks(fields: Mapping[str, Any]) -> int:
    return int(fields["blocks"])


# Late: the networks of a step, whose states are ready at different times, then share a launch, and the device.
@lru_cache(maxsize=None)
def _forward_family(precision: str, height: int, shared: int) -> Family:
    return Family(
        f"iqn_forward_{precision}_{height}",
        source="iqn_fused.cu",
        kernel=f"fx_iqn_forward_{precision}_{height}",
        struct="IqnForward",
        tiles=_blocks,
        late=True,
        shared=shared,
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


# -- checks -------------------------------------------------------------------------------------------------


def _check(program: Program, tau: Tensor, h2: Tensor, weights: Weights, label: str) -> tuple[int, int]:
    """Rows and quantiles, of arguments that fit each other and the kernels."""
    sizes = weights.sizes
    if len(tau.shape) != 2 or tau.dtype != np.float32 or not tau.contiguous:
        raise ValueError(f"'{label}': tau must be float32 [B, N] without gaps, got {tau.dtype} {tau.shape}")
    because = f"the parameters are {sizes}"
    _require(h2, (tau.shape[0], sizes.features), "h2", f"tau is {tau.shape} and {because}", label)
    for role, shape in (
        ("w_phi", (sizes.features, sizes.cosines)),
        ("b_phi", (sizes.features,)),
        ("w_iq1", (sizes.width, sizes.features)),
        ("b_iq1", (sizes.width,)),
        ("w_iq2", (sizes.outputs, sizes.width)),
        ("b_iq2", (sizes.outputs,)),
    ):
        _require(getattr(weights, role), shape, role, because, label)
    if not fits(program.target, program.precision, sizes):
        raise ValueError(
            f"'{label}': {sizes} in {program.precision} on {program.target} is not for the fused kernels (see fits); "
            "use the separate layers"
        )
    return tau.size, tau.shape[1]


def _require(tensor: Tensor | None, shape: tuple[int, ...], role: str, because: str, label: str) -> None:
    if tensor is not None and (tensor.dtype != np.float32 or tensor.shape != shape):
        raise ValueError(f"'{label}': {role} must be float32 {shape}, as {because}; got {tensor.dtype} {tensor.shape}")


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


def _extents(sizes: Sizes) -> dict[str, int]:
    return {
        "cosines": sizes.cosines,
        "features": sizes.features,
        "width": sizes.width,
        "outputs": sizes.outputs,
    }


def _all(weights: Weights) -> list[Tensor]:
    return [weights.w_phi, weights.b_phi, weights.w_iq1, weights.b_iq1, weights.w_iq2, weights.b_iq2]
