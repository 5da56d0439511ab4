"""Gated residual with layer norm, h = LayerNorm(skip + a⊙σ(c)), and sums of columns (`glunorm.cu`).

    stats = program.tensor("trunk.stats", (batch, 2))                           # only if there will be a backward
    glunorm.forward(program, g, skip, gain, bias, h, stats=stats)
    glunorm.backward(program, dh, g, skip, gain, stats, dg, dskip=dskip, activation="elu", dgain=dgain, dbias=dbias)

g = [a, c]. The backward makes the normalised row again from g, skip and the two numbers of `stats`, so that a forward
stores nothing as wide as a row.

Sources: gated linear units of Dauphin et al. 2017, "Language modeling with gated convolutional networks"; layer
normalisation of Ba, Kiros & Hinton 2016; the variance by the corrected two-pass algorithm (Chan, Golub & LeVeque 1983,
"Algorithms for computing the sample variance").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.graphs.program import Launch, ProgramError, Value
from fxengine.ops.checks import describe, expect, separate
from fxengine.ops.elementwise import reference_slope
from fxengine.ops.linear import ACTIVATION_CODES, Activation

#: Added to the variance of a row.
EPS = 1e-5
# A block has eight warps, a warp has one row at a time.
_ROWS = 8
# Columns of one block of a column sum.
_COLUMNS = 32
# Rows of a backward block beyond which its own sums would be long.
_MAX_TILE_ROWS = 64


def _backward_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // int(fields["tile_rows"]))


def _column_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["cols"]) // _COLUMNS)


FORWARD = Family(
    "glunorm_forward",
    "glunorm.cu",
    "fx_glunorm_forward",
    "GluNormForward",
    tiles=lambda fields: -(-int(fields["rows"]) // _ROWS),
    early=("gain", "bias"),
)
BACKWARD = Family(
    "glunorm_backward",
    "glunorm.cu",
    "fx_glunorm_backward",
    "GluNormBackward",
    tiles=_backward_tiles,
    early=("gain",),
)
#: Late, like weight gradients: only the optimizer waits for it.
COLUMNSUM = Family(
    "columnsum",
    "glunorm.cu",
    "fx_columnsum",
    "ColumnSum",
    tiles=_column_tiles,
    late=True,
    gradients=("out",),
    squares=_column_tiles,
)


def forward(
    program: Program,
    g: Tensor,
    skip: Tensor,
    gain: Tensor,
    bias: Tensor,
    h: Tensor,
    *,
    stats: Tensor | None = None,
    eps: float = EPS,
    label: str | None = None,
) -> Launch:
    """Append h = (y − mean)·rstd·gain + bias per row, with y = skip + a⊙σ(c) and rstd = 1/√(var + eps).

    Args:
        program: where the record goes.
        g: float32 [B, 2·H]: a, then c. This and the matrices below have any row stride.
        skip: float32 [B, H].
        gain: float32 [H].
        bias: float32 [H].
        h: float32 [B, H], overwritten.
        stats: float32 [B, 2] without gaps, receives mean and rstd; None keeps nothing for a backward.
        eps: added to the variance.
        label: name of the record (default: h's name).

    Raises:
        ProgramError: shapes or dtypes that do not fit each other; both sides are named.
    """
    label = label or h.name
    rows, width = _matrix(label, "h", h)
    because = f"h is {describe(h)}"
    expect(f"glunorm '{label}'", "g", g, (rows, 2 * width), because)
    expect(f"glunorm '{label}'", "skip", skip, (rows, width), because)
    expect(f"glunorm '{label}'", "gain", gain, (width,), because)
    expect(f"glunorm '{label}'", "bias", bias, (width,), because)
    expect(f"glunorm '{label}'", "stats", stats, (rows, 2), because, gaps=False)
    separate(f"glunorm '{label}'", "h", h, g=g, skip=skip)
    fields = {
        "g": g,
        "skip": skip,
        "gain": gain,
        "bias": bias,
        "h": h,
        "stats": stats or 0,
        "ldg": g.ld,
        "ld_skip": skip.ld,
        "ldh": h.ld,
        "rows": rows,
        "width": width,
        "inverse_width": 1.0 / width,
        "eps": eps,
    }
    return program.launch(FORWARD, fields, reads=[g, skip, gain, bias], writes=[h, stats], label=label)


def backward(
    program: Program,
    dh: Tensor,
    g: Tensor,
    skip: Tensor,
    gain: Tensor,
    stats: Tensor,
    dg: Tensor,
    *,
    dskip: Tensor | None = None,
    activation: Activation = "none",
    accumulate: bool = False,
    dgain: Tensor | None = None,
    dbias: Tensor | None = None,
    accumulate_params: bool = False,
    tile_rows: int | None = None,
    label: str | None = None,
) -> Launch:
    """Append dg, dskip and the gradients of gain and bias; each but dg is optional.

    Args:
        program: where the records go.
        dh: float32 [B, H], gradient of the forward's h. This and the matrices below have any row stride.
        g: float32 [B, 2·H], the forward's input.
        skip: float32 [B, H], the forward's input.
        gain: float32 [H].
        stats: float32 [B, 2] without gaps, what the forward kept.
        dg: float32 [B, 2·H], overwritten.
        dskip: float32 [B, H]: the gradient before the activation that made skip.
        activation: the activation that made skip; its slope is taken from skip.
        accumulate: add to dskip instead of overwriting it.
        dgain: float32 [H]; given together with dbias. Partial sums `<label>#<n>.partials` are declared for them.
        dbias: float32 [H].
        accumulate_params: add to dgain and dbias instead of overwriting them.
        tile_rows: rows of a block, whose sums make one partial result (default: by the target and the rows).
        label: name of the record (default: dh's name); the sums are called `<label>.gain` and `<label>.bias`.

    Returns:
        The record of dg and dskip.

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or dh.name
    rows, width = _matrix(label, "dh", dh)
    because = f"dh is {describe(dh)}"
    for role, t, columns in (
        ("g", g, 2 * width),
        ("skip", skip, width),
        ("dg", dg, 2 * width),
        ("dskip", dskip, width),
    ):
        expect(f"glunorm '{label}'", role, t, (rows, columns), because)
    for role, t in (("gain", gain), ("dgain", dgain), ("dbias", dbias)):
        expect(f"glunorm '{label}'", role, t, (width,), because)
    expect(f"glunorm '{label}'", "stats", stats, (rows, 2), because, gaps=False)
    if activation not in ACTIVATION_CODES:
        raise ProgramError(
            f"glunorm '{label}': unknown activation {activation!r}, expected one of {sorted(ACTIVATION_CODES)}"
        )
    if (dgain is None) != (dbias is None):
        raise ProgramError(f"glunorm '{label}': dgain and dbias go together, got only one of them; pass both or none")
    if dskip is None and (accumulate or activation != "none"):
        raise ProgramError(f"glunorm '{label}': accumulate and activation concern dskip, which is not given")
    separate(f"glunorm '{label}'", "dg", dg, dh=dh, g=g, skip=skip, dskip=dskip)
    separate(f"glunorm '{label}'", "dskip", dskip, dh=dh, g=g, skip=skip)
    tile_rows = tile_rows or _tile_rows(rows, program.target.sm_count)
    tiles = -(-rows // tile_rows)
    partials = None
    if dgain:
        partials = program.tensor(f"{label}#{len(program.launches)}.partials", (tiles, 2 * width))
    fields = {
        "dh": dh,
        "g": g,
        "skip": skip,
        "gain": gain,
        "stats": stats,
        "dg": dg,
        "dskip": dskip or 0,
        "partials": partials or 0,
        "lddh": dh.ld,
        "ldg": g.ld,
        "ld_skip": skip.ld,
        "lddg": dg.ld,
        "ld_dskip": dskip.ld if dskip else 0,
        "rows": rows,
        "width": width,
        "tile_rows": tile_rows,
        "activation": ACTIVATION_CODES[activation],
        "accumulate": int(accumulate),
        "inverse_width": 1.0 / width,
    }
    reads = [dh, g, skip, gain, stats, dskip if accumulate else None]
    record = program.launch(BACKWARD, fields, reads=reads, writes=[dg, dskip, partials], label=label)
    if dgain and dbias and partials:
        halves = ((dgain, partials.columns(0, width), "gain"), (dbias, partials.columns(width, 2 * width), "bias"))
        for out, half, name in halves:
            columnsum(program, half, out, accumulate=accumulate_params, label=f"{label}.{name}")
    return record


def columnsum(
    program: Program, x: Tensor, out: Tensor, *, accumulate: bool = False, label: str | None = None
) -> Launch:
    """Append out = (or +=) the sum over the rows of x, in double and in a fixed order.

    Args:
        program: where the record goes.
        x: float32 [rows, C], any row stride.
        out: float32 [C].
        accumulate: add to out instead of overwriting it.
        label: name of the record (default: out's name).

    Raises:
        ProgramError: shapes or dtypes that do not fit each other; both sides are named.
    """
    label = label or out.name
    rows, cols = _matrix(label, "x", x)
    expect(f"glunorm '{label}'", "out", out, (cols,), f"x is {describe(x)}")
    separate(f"glunorm '{label}'", "out", out, x=x)
    fields: dict[str, Value] = {
        "x": x,
        "out": out,
        "squares": 0,
        "ld": x.ld,
        "rows": rows,
        "cols": cols,
        "accumulate": int(accumulate),
    }
    return program.launch(COLUMNSUM, fields, reads=[x, out if accumulate else None], writes=[out], label=label)


# -- references ---------------------------------------------------------------------------------------------


def reference_forward(
    g: ArrayLike, skip: ArrayLike, gain: ArrayLike, bias: ArrayLike, *, eps: float = EPS
) -> dict[str, NDArray[np.float64]]:
    """What `forward` computes, in float64: h [B, H], stats [B, 2], and the normalised rows `normed` [B, H]."""
    a, c = np.split(_wide(g), 2, axis=-1)
    y = _wide(skip) + a * _sigmoid(c)
    mean = y.mean(axis=-1, keepdims=True)
    rstd = 1.0 / np.sqrt(np.mean((y - mean) ** 2, axis=-1, keepdims=True) + eps)
    normed = (y - mean) * rstd
    return {
        "h": normed * _wide(gain) + _wide(bias),
        "stats": np.concatenate([mean, rstd], axis=-1),
        "normed": normed,
    }


def reference_backward(
    dh: ArrayLike,
    g: ArrayLike,
    skip: ArrayLike,
    gain: ArrayLike,
    *,
    activation: Activation = "none",
    eps: float = EPS,
) -> dict[str, NDArray[np.float64]]:
    """What `backward` computes, in float64: dg [B, 2·H], dskip [B, H] (nothing added to it), dgain [H], dbias [H]."""
    forward = reference_forward(g, skip, gain, np.zeros(np.shape(gain)), eps=eps)
    normed, rstd = forward["normed"], forward["stats"][:, 1:]
    a, c = np.split(_wide(g), 2, axis=-1)
    gate = _sigmoid(c)
    dn = _wide(dh) * _wide(gain)
    along = np.mean(dn * normed, axis=-1, keepdims=True)
    dy = rstd * (dn - dn.mean(axis=-1, keepdims=True) - normed * along)
    return {
        "dg": np.concatenate([dy * gate, dy * a * gate * _sigmoid(-c)], axis=-1),
        "dskip": dy * reference_slope(activation, skip),
        "dgain": np.sum(_wide(dh) * normed, axis=0),
        "dbias": _wide(dh).sum(axis=0),
    }


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    power = np.exp(-np.abs(x))
    return np.where(x >= 0.0, 1.0, power) / (1.0 + power)


def _wide(a: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(a, dtype=np.float64)


# -- checks -------------------------------------------------------------------------------------------------


def _tile_rows(rows: int, sm_count: int) -> int:
    """Two blocks per multiprocessor, no fewer rows than warps."""
    return min(_MAX_TILE_ROWS, _ROWS * max(1, -(-rows // (_ROWS * 2 * sm_count))))


def _matrix(label: str, role: str, t: Tensor) -> tuple[int, int]:
    if len(t.shape) != 2 or t.dtype != np.float32:
        raise ProgramError(f"glunorm '{label}': {role} is {describe(t)} of {t.dtype}, expected a float32 matrix")
    return t.shape[0], t.shape[1]
