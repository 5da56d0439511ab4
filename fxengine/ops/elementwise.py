"""Sums, scalings and activations of whole matrices, and the way back through an activation (`elementwise.cu`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops.linear import ACTIVATION_CODES

_TILE = 2048


def _tiles(fields: Mapping[str, Any]) -> int:
    row_tiles = -(-int(fields["rows"]) // int(fields["tile_rows"]))
    return row_tiles * -(-int(fields["cols"]) // int(fields["tile_cols"]))


ELEMENTWISE = Family("elementwise", "elementwise.cu", "fx_elementwise", "Elementwise", tiles=_tiles)


def combine(
    program: Program,
    y: Tensor,
    a: Tensor,
    b: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    alpha_signal: Tensor | None = None,
    beta_signal: Tensor | None = None,
    activation: str = "none",
    accumulate: bool = False,
    label: str,
) -> None:
    """Append: y = (or +=) act(alpha a + beta b).

    Args:
        program: program to append to.
        y: float32 vector or matrix; may be `a` or `b` itself.
        a: the same shape.
        b: the same shape, or None.
        alpha: constant factor of a.
        beta: constant factor of b.
        alpha_signal: float32 [1] that multiplies alpha, or None. A product of 0 gives an exact 0, whatever a holds.
        beta_signal: the same for b.
        activation: one of `linear.ACTIVATION_CODES`.
        accumulate: add to y instead of overwriting it.
        label: shown in tables.

    Raises:
        ValueError: shapes differ, a dtype is not float32, or the activation is unknown.
    """
    _append(
        program, y, a, b, None, alpha, beta, alpha_signal, beta_signal, activation, accumulate, label
    )  # fmt: skip


def backward_activation(
    program: Program,
    dx: Tensor,
    dy: Tensor,
    output: Tensor,
    *,
    activation: str,
    alpha: float = 1.0,
    alpha_signal: Tensor | None = None,
    accumulate: bool = False,
    label: str,
) -> None:
    """Append: dx = (or +=) alpha dy act'(output), with the derivative taken from what the activation returned.

    Args:
        program: program to append to.
        dx: gradient with respect to the pre-activation; may be `dy` itself.
        dy: gradient with respect to the output.
        output: result of the activation.
        activation: one of `linear.ACTIVATION_CODES`.
        alpha: constant factor.
        alpha_signal: float32 [1] that multiplies alpha, or None. A product of 0 gives an exact 0.
        accumulate: add to dx instead of overwriting it.
        label: shown in tables.

    Raises:
        ValueError: shapes differ, a dtype is not float32, or the activation is unknown.
    """
    _append(
        program, dx, dy, None, output, alpha, 0.0, alpha_signal, None, activation, accumulate, label
    )  # fmt: skip


def _append(
    program: Program,
    y: Tensor,
    a: Tensor,
    b: Tensor | None,
    output: Tensor | None,
    alpha: float,
    beta: float,
    alpha_signal: Tensor | None,
    beta_signal: Tensor | None,
    activation: str,
    accumulate: bool,
    label: str,
) -> None:
    if activation not in ACTIVATION_CODES:
        raise ValueError(f"'{label}': activation '{activation}' is unknown; there are {', '.join(ACTIVATION_CODES)}")
    operands = [t for t in (y, a, b, output) if t is not None]
    for tensor in operands:
        if tensor.dtype != np.float32 or tensor.shape != y.shape or len(tensor.shape) > 2:
            raise ValueError(
                f"'{label}': operands must be float32 vectors or matrices of one shape, "
                f"got {y.dtype} {y.shape} and {tensor.dtype} {tensor.shape}"
            )
    flat = all(t.contiguous for t in operands)
    rows, cols = (1, y.size) if flat or len(y.shape) == 1 else y.shape
    tile_cols = min(_TILE, -(-cols // 4) * 4)

    def ld(tensor: Tensor | None) -> int:
        return 0 if tensor is None else cols if rows == 1 else tensor.ld

    program.launch(
        ELEMENTWISE,
        {
            "a": a,
            "b": b or 0,
            "output": output or 0,
            "y": y,
            "alpha_signal": alpha_signal or 0,
            "beta_signal": beta_signal or 0,
            "ld_a": ld(a),
            "ld_b": ld(b),
            "ld_output": ld(output),
            "ld_y": ld(y),
            "cols": cols,
            "rows": rows,
            "tile_rows": _TILE // tile_cols,
            "tile_cols": tile_cols,
            "alpha": alpha,
            "beta": beta,
            "activation": ACTIVATION_CODES[activation],
            "accumulate": int(accumulate),
        },
        reads=[a, b, output, alpha_signal, beta_signal, y if accumulate else None],
        writes=[y],
        label=label,
    )


def reference_activation(activation: str, x: ArrayLike) -> NDArray[np.float64]:
    """The activation in float64."""
    wide = np.asarray(x, dtype=np.float64)
    if activation == "elu":
        return np.where(wide > 0, wide, np.expm1(np.minimum(wide, 0)))
    if activation == "relu":
        return np.maximum(wide, 0)
    return np.tanh(wide) if activation == "tanh" else wide


def reference_slope(activation: str, output: ArrayLike) -> NDArray[np.float64]:
    """Derivative of the activation in float64, from its output."""
    wide = np.asarray(output, dtype=np.float64)
    if activation == "elu":
        return np.where(wide > 0, 1.0, wide + 1)
    if activation == "relu":
        return (wide > 0).astype(np.float64)
    return 1 - wide**2 if activation == "tanh" else np.ones_like(wide)
