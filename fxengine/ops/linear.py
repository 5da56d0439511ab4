"""Fully connected layers: y = act(x wᵀ + b), its input gradient and its weight gradient.

    linear.forward(program, x, w, b, y, activation="elu")
    linear.backward_dw(program, dy, x, dw, db)
    linear.backward_dx(program, dy, w, dx, x=x, activation="elu")     # only if somebody wants dx

Matrices are row-major float32 with any row stride: x [m, k], w [n, k], b [n], y [m, n]. The input may be a
pair of tensors, read side by side as the columns of one matrix. `dy` holds the gradient before the layer's
activation (whoever writes a gradient into a tensor multiplies it by the slope of the activation that made the
tensor), so `backward_dx` is given the activation of x, the layer's input, and not the layer's own. A gradient
that must not flow is simply not asked for. Results overwrite, or with `accumulate=True` add to what is there.

Every sum has a fixed order that depends on the sizes and on the tile, and the tile on (target, sizes) alone.

Source: gradients of an affine layer as in Goodfellow, Bengio & Courville 2016, "Deep Learning", section 6.5;
register and shared-memory tiles after Volkov & Demmel 2008, "Benchmarking GPUs to tune dense linear algebra".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs.program import ACTIVATIONS, Family, Launch, Program, ProgramError, Tensor

if TYPE_CHECKING:
    from fxengine.driver import Target

Activation: TypeAlias = Literal["none", "elu", "relu", "tanh"]
Input: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

#: Codes of enum FxActivation in fx.cuh.
ACTIVATION_CODES: dict[str, int] = {"none": 0, "elu": 1, "relu": 2, "tanh": 3}

# A weight gradient is cut into one of these numbers of slices, none shorter than so many rows: shorter ones would cost
# more in partial results than they gain.
_SLICES = (1, 2, 4, 8, 16, 32, 64)
_SLICE_ROWS = 256


@dataclass(frozen=True)
class Tile:
    """Outputs of one block, and what the choice among tiles has to know.

    Attributes:
        rows: height in outputs.
        columns: width in outputs.
        depth: elements of the sum per shared-memory stage.
        rate: multiply-adds per clock and multiprocessor that the tile sustains.
        latency: clocks that a block needs besides them (first loads, adding the groups, storing).
    """

    rows: int
    columns: int
    depth: int
    rate: int
    latency: int

    def count(self, rows: int, *columns: int) -> int:
        """Blocks for `rows` x each of `columns` (parts that may not share a tile)."""
        return _ceil(rows, self.rows) * sum(_ceil(c, self.columns) for c in columns)


#: The tile shapes that the kernels exist for.
TILES: dict[str, Tile] = {
    "128x128": Tile(128, 128, 16, rate=90, latency=3000),
    "64x64": Tile(64, 64, 32, rate=72, latency=2200),
    "32x32": Tile(32, 32, 64, rate=48, latency=1700),
    "16x32": Tile(16, 32, 64, rate=36, latency=1500),
    "16x16": Tile(16, 16, 128, rate=26, latency=1400),
}


def choose_tile(target: Target, rows: int, columns: int, depth: int) -> str:
    """Name of the tile with the smallest estimated time for `rows` x `columns` sums of `depth` terms.

    A pure function of its arguments.
    """
    return min(TILES, key=lambda name: _cost(target, TILES[name], rows, (columns,), depth))


def choose_dw(
    target: Target, rows: int, columns: tuple[int, ...], depth: int, tile: str | None = None
) -> tuple[str, int]:
    """Tile, and number of slices of the sum, for a weight gradient; `tile` fixes the tile.

    Weight gradients share one launch, so each is given an eighth of the device, which favours tiles that waste no
    work over tiles that finish soon.
    """
    slices = [1] if target.kind == "sim" else [s for s in _SLICES if s == 1 or depth >= s * _SLICE_ROWS]
    choices = [
        (name, s)
        for name in (TILES if tile is None else [tile])
        for s in slices
        if s == 1 or TILES[name].count(rows, *columns) < 2 * target.sm_count  # else the outputs fill the device alone
    ]
    return min(choices, key=lambda c: _cost(target, TILES[c[0]], rows, columns, depth, slices=c[1], share=8))


def _cost(
    target: Target, tile: Tile, rows: int, columns: tuple[int, ...], depth: int, *, slices: int = 1, share: int = 1
) -> float:
    """Estimated time: of a GPU in clocks, of the simulated device (one block after another) in nanoseconds."""
    tiles = tile.count(rows, *columns)
    terms = _ceil(depth, slices)
    work = tile.rows * tile.columns * terms
    if target.kind == "sim":
        return tiles * (20_000 + 3_500 * _ceil(depth, tile.depth) + work / 8)
    block = tile.latency + work / tile.rate
    merge = 1_500 + slices * tile.rows * tile.columns / 16 if slices > 1 else 0.0
    return (tiles * slices * block + tiles * merge) * share / target.sm_count + block + merge


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _families(
    kind: str, struct: str, tiles: Callable[[Tile, Mapping[str, Any]], int], *, late: bool = False
) -> dict[str, Family]:
    def family(name: str, tile: Tile) -> Family:
        return Family(
            f"linear_{kind}_{name}",
            source=f"linear_{kind}.cu",
            kernel=f"fx_linear_{kind}_{name}",
            struct=struct,
            tiles=lambda fields: tiles(tile, fields),
            late=late,
        )

    return {name: family(name, tile) for name, tile in TILES.items()}


#: Kernel families by tile name. Weight gradients are late: only the optimizer waits for them.
FORWARD = _families("forward", "LinearForward", lambda t, f: t.count(f["m"], f["n"]))
DX = _families("dx", "LinearDx", lambda t, f: t.count(f["m"], f["k"]))
DW = _families("dw", "LinearDw", lambda t, f: t.count(f["n"], f["k"], f["k2"]) * f["slices"], late=True)


def forward(
    program: Program,
    x: Input,
    w: Tensor,
    b: Tensor | None,
    y: Tensor,
    *,
    activation: Activation = "none",
    accumulate: bool = False,
    label: str | None = None,
    tile: str | None = None,
) -> Launch:
    """Append y = activation(x wᵀ + b), or y += x wᵀ + b.

    Args:
        program: where the record goes.
        x: [m, k], or a pair [m, k1], [m, k2] with k1 + k2 = k.
        w: [n, k].
        b: [n], or None.
        y: [m, n]; must not overlap x.
        activation: applied to the result; "none" if `accumulate`.
        accumulate: add to y instead of overwriting it.
        label: name of the record (default: y's name).
        tile: a key of `TILES` (default: `choose_tile`).

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or y.name
    x1, x2 = _pair(x)
    m, n = _matrix(label, "y", y)
    k = _input_columns(label, x1, x2, m, f"y is {_shape(y)}")
    _expect(label, "w", w, (n, k), f"x is {_shapes(x1, x2)} and y is {_shape(y)}")
    _expect(label, "b", b, (n,), f"y is {_shape(y)}")
    code = _activation(label, activation)
    if accumulate and code:
        raise ProgramError(f"linear '{label}': accumulate=True cannot go with activation={activation!r}; use 'none'")
    _separate(label, "y", y, x=x1, x2=x2)
    fields = {
        **_operand("x", x1),
        **_operand("x2", x2),
        **_operand("w", w),
        "b": 0 if b is None else b,
        **_operand("y", y),
        "m": m,
        "n": n,
        "k": x1.shape[1],
        "k2": k - x1.shape[1],
        "activation": code,
        "accumulate": int(accumulate),
    }
    name = _tile(label, tile) or choose_tile(program.target, m, n, k)
    reads = [x1, x2, w, b, y if accumulate else None]
    return program.launch(FORWARD[name], fields, reads=reads, writes=[y], label=label)


def backward_dx(
    program: Program,
    dy: Input,
    w: Input,
    dx: Tensor,
    *,
    x: Tensor | None = None,
    activation: Activation = "none",
    scale: Tensor | None = None,
    accumulate: bool = False,
    label: str | None = None,
    tile: str | None = None,
) -> Launch:
    """Append dx = scale * slope(x) * (dy w), or dx += the same.

    Args:
        program: where the record goes.
        dy: [m, n], the gradient before the layer's activation; or a pair [m, n1], [m, n2] of two layers that
            read the same x: their gradients are added.
        w: [n, k], or a pair [n1, k], [n2, k]. For one part of a two-part input pass the part's columns
            (`w.columns(start, stop)`).
        dx: [m, k], the gradient before the activation that made x; must not overlap dy.
        x: [m, k], the layer's input; read (and needed) only if `activation` is not "none".
        activation: the one that made x.
        scale: one float on the device that multiplies the result; 0 gives an exact 0 even for a NaN gradient.
        accumulate: add to dx instead of overwriting it.
        label: name of the record (default: dx's name).
        tile: a key of `TILES` (default: `choose_tile`).

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or dx.name
    dy1, dy2 = _pair(dy)
    w1, w2 = _pair(w)
    m, k = _matrix(label, "dx", dx)
    if (dy2 is None) != (w2 is None):
        raise ProgramError(
            f"linear '{label}': dy is {_shapes(dy1, dy2)} but w is {_shapes(w1, w2)}; "
            "give one of each or a pair of each"
        )
    total = 0
    for suffix, dy_i, w_i in (("", dy1, w1), ("2", dy2, w2)):
        if dy_i is not None and w_i is not None:
            n = _matrix(label, f"dy{suffix}", dy_i)[1]
            total += n
            _expect(label, f"dy{suffix}", dy_i, (m, n), f"dx is {_shape(dx)}")
            _expect(label, f"w{suffix}", w_i, (n, k), f"dy{suffix} is {_shape(dy_i)} and dx is {_shape(dx)}")
    code = _activation(label, activation)
    if code and x is None:
        raise ProgramError(f"linear '{label}': activation={activation!r} is the one that made x; pass x as well")
    _expect(label, "x", x, (m, k), f"dx is {_shape(dx)}")
    if not code:
        x = None
    _expect(label, "scale", scale, (1,), "it is read as one number")
    _separate(label, "dx", dx, dy=dy1, dy2=dy2)
    fields = {
        **_operand("dy", dy1),
        **_operand("w", w1),
        **_operand("dy2", dy2),
        **_operand("w2", w2),
        **_operand("x", x),
        "scale": 0 if scale is None else scale,
        **_operand("dx", dx),
        "m": m,
        "n": dy1.shape[1],
        "n2": total - dy1.shape[1],
        "k": k,
        "activation": code,
        "accumulate": int(accumulate),
    }
    name = _tile(label, tile) or choose_tile(program.target, m, k, total)
    reads = [dy1, dy2, w1, w2, x, scale, dx if accumulate else None]
    return program.launch(DX[name], fields, reads=reads, writes=[dx], label=label)


def backward_dw(
    program: Program,
    dy: Tensor,
    x: Input,
    dw: Tensor,
    db: Tensor | None = None,
    *,
    accumulate: bool = False,
    label: str | None = None,
    tile: str | None = None,
    slices: int | None = None,
) -> Launch:
    """Append dw = dyᵀ x and db = sum over the rows of dy, or += both.

    A long sum is cut into slices, each the work of other blocks; the partial results are added in slice
    order.

    Args:
        program: where the record goes.
        dy: [m, n], the gradient before the layer's activation.
        x: [m, k], the layer's input, or a pair [m, k1], [m, k2] with k1 + k2 = k.
        dw: [n, k].
        db: [n], or None.
        accumulate: add to dw and db instead of overwriting them.
        label: name of the record (default: dw's name).
        tile: a key of `TILES` (default: `choose_dw`).
        slices: number of slices (default: `choose_dw`).

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or dw.name
    x1, x2 = _pair(x)
    m, n = _matrix(label, "dy", dy)
    k = _input_columns(label, x1, x2, m, f"dy is {_shape(dy)}")
    _expect(label, "dw", dw, (n, k), f"dy is {_shape(dy)} and x is {_shapes(x1, x2)}")
    _expect(label, "db", db, (n,), f"dy is {_shape(dy)}")
    _separate(label, "dw", dw, dy=dy, x=x1, x2=x2, db=db)
    columns = (x1.shape[1], k - x1.shape[1]) if x2 else (k,)
    name, wanted = choose_dw(program.target, n, columns, m, _tile(label, tile))
    slices = wanted if slices is None else slices
    if slices < 1:
        raise ProgramError(f"linear '{label}': slices={slices}, expected at least 1")
    shape = TILES[name]
    partial = arrived = None
    if slices > 1:
        tiles = shape.count(n, *columns)
        size = (tiles, slices, shape.rows * (shape.columns + 1))
        unique = f"{label}#{len(program.launches)}"
        partial = program.tensor(f"{unique}.partial", size, np.float32, arena=ACTIVATIONS)
        zeros = np.zeros(tiles, np.uint32)  # the kernel leaves them at 0
        arrived = program.tensor(f"{unique}.arrived", zeros.shape, zeros.dtype, arena="counters", data=zeros)
    fields = {
        **_operand("dy", dy),
        **_operand("x", x1),
        **_operand("x2", x2),
        **_operand("dw", dw),
        "db": 0 if db is None else db,
        "partial": 0 if partial is None else partial,
        "arrived": 0 if arrived is None else arrived,
        "m": m,
        "n": n,
        "k": x1.shape[1],
        "k2": k - x1.shape[1],
        "slices": slices,
        "accumulate": int(accumulate),
    }
    before = [dw, db] if accumulate else []
    return program.launch(DW[name], fields, reads=[dy, x1, x2, *before], writes=[dw, db, partial, arrived], label=label)


# -- references ---------------------------------------------------------------------------------------------


def reference_forward(
    x: ArrayLike, w: ArrayLike, b: ArrayLike | None = None, *, activation: Activation = "none"
) -> NDArray[np.float64]:
    """activation(x wᵀ + b) in float64."""
    z = _wide(x) @ _wide(w).T
    if b is not None:
        z = z + _wide(b)
    if activation == "elu":
        return np.where(z > 0, z, np.expm1(np.minimum(z, 0)))
    if activation == "relu":
        return np.maximum(z, 0)
    return np.tanh(z) if activation == "tanh" else z


def reference_dx(
    dy: ArrayLike,
    w: ArrayLike,
    *,
    x: ArrayLike | None = None,
    activation: Activation = "none",
    scale: float = 1.0,
) -> NDArray[np.float64]:
    """scale * slope(x) * (dy w) in float64; exactly 0 if the scale is 0. For two layers add two results."""
    if scale == 0:
        return np.zeros((_wide(dy).shape[0], _wide(w).shape[1]))
    dx = _wide(dy) @ _wide(w)
    if activation != "none":
        if x is None:
            raise ValueError(f"activation={activation!r} is the one that made x; pass x as well")
        y = _wide(x)
        slopes = {"elu": np.where(y > 0, 1, y + 1), "relu": np.where(y > 0, 1, 0), "tanh": 1 - y * y}
        dx = dx * slopes[activation]
    return scale * dx


def reference_dw(dy: ArrayLike, x: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(dyᵀ x, sum over the rows of dy) in float64."""
    return _wide(dy).T @ _wide(x), _wide(dy).sum(axis=0)


def _wide(a: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(a, dtype=np.float64)


# -- checks -------------------------------------------------------------------------------------------------


def _pair(x: Input) -> tuple[Tensor, Tensor | None]:
    return (x[0], x[1]) if isinstance(x, tuple) else (x, None)


def _shape(t: Tensor) -> str:
    return f"'{t.name}' {list(t.shape)}"


def _shapes(first: Tensor, second: Tensor | None) -> str:
    return _shape(first) if second is None else f"{_shape(first)} beside {_shape(second)}"


def _matrix(label: str, role: str, t: Tensor) -> tuple[int, int]:
    if len(t.shape) != 2:
        raise ProgramError(f"linear '{label}': {role} is {_shape(t)}, expected a matrix; reshape it")
    return t.shape[0], t.shape[1]


def _expect(label: str, role: str, t: Tensor | None, shape: tuple[int, ...], because: str) -> None:
    if t is None:
        return
    if t.shape != shape:
        raise ProgramError(f"linear '{label}': {role} is {_shape(t)}, expected {list(shape)}: {because}")
    if t.dtype != np.float32:
        raise ProgramError(f"linear '{label}': {role} is {_shape(t)} of {t.dtype}, expected float32")


def _input_columns(label: str, x1: Tensor, x2: Tensor | None, rows: int, because: str) -> int:
    """Checks the parts of an input against the number of rows; returns their columns together."""
    columns = 0
    for role, part in (("x", x1), ("x2", x2)):
        if part is not None:
            width = _matrix(label, role, part)[1]
            _expect(label, role, part, (rows, width), because)
            columns += width
    return columns


def _activation(label: str, activation: str) -> int:
    if activation not in ACTIVATION_CODES:
        raise ProgramError(
            f"linear '{label}': unknown activation {activation!r}, expected one of {sorted(ACTIVATION_CODES)}"
        )
    return ACTIVATION_CODES[activation]


def _tile(label: str, tile: str | None) -> str | None:
    if tile is not None and tile not in TILES:
        raise ProgramError(f"linear '{label}': unknown tile {tile!r}, expected one of {list(TILES)}")
    return tile


def _separate(label: str, role: str, written: Tensor, **read: Tensor | None) -> None:
    """Refuse a result that overlaps what other blocks still read."""
    for name, t in read.items():
        if t is not None and written.region().overlaps(t.region()):
            raise ProgramError(
                f"linear '{label}': {role} {_shape(written)} overlaps {name} {_shape(t)}; give it memory of its own"
            )


def _operand(name: str, t: Tensor | None) -> dict[str, Tensor | int]:
    """Record fields of an optional matrix: its address and its row stride."""
    return {name: 0, f"ld{name}": 0} if t is None else {name: t, f"ld{name}": t.ld}
