"""Fully connected layers: y = act(x wᵀ + b), its input gradient and its weight gradient.

    linear.forward(program, x, w, b, y, activation="elu")
    linear.backward_dw(program, dy, x, dw, db)
    linear.backward_dx(program, dy, w, dx, x=x, activation="elu")             # only if somebody wants dx
    linear.backward_dx(program, [dy1, dy2], [w1, w2], dx, scales=[None, s])   # layers that read the same x

Matrices are row-major float32 with any row stride: x [m, k], w [n, k], b [n], y [m, n]. The input may be a
pair of tensors, read side by side as the columns of one matrix. `dy` holds the gradient before the layer's
activation (whoever writes a gradient into a tensor multiplies it by the slope of the activation that made the
tensor), so `backward_dx` is given the activation of x, the layer's input, and not the layer's own. A gradient
that must not flow is simply not asked for. Results overwrite, or with `accumulate=True` add to what is there.

`program.precision` says how products are computed: `fp32`; or `tf32` or `bf16`, where both operands of every product
are rounded to nearest and multiplied on the tensor cores. Memory, sums, biases, bias gradients and activations are
float32 in all of them.

Every sum has a fixed order that depends on the sizes and on the tile, and the tile on (target, precision, sizes) and
on whether all rows of the operands are aligned; of a weight gradient also on the number of all parameters.

Source: gradients of an affine layer as in Goodfellow, Bengio & Courville 2016, "Deep Learning", section 6.5;
register and shared-memory tiles after Volkov & Demmel 2008, "Benchmarking GPUs to tune dense linear algebra".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs.program import ACTIVATIONS, Family, Launch, Program, ProgramError, Tensor, TensorMap, Value
from fxengine.ops.checks import all_aligned, describe, separate
from fxengine.ops.linear_tiles import PRECISIONS, TILES, Tile, choose_dw, choose_tile, has_instructions, tiles_of
from fxengine.ops.pack import transpose

if TYPE_CHECKING:
    from fxengine.driver import Target

Activation: TypeAlias = Literal["none", "elu", "relu", "tanh"]
Input: TypeAlias = "Tensor | tuple[Tensor, Tensor]"

#: Codes of enum FxActivation in fx.cuh.
ACTIVATION_CODES: dict[str, int] = {"none": 0, "elu": 1, "relu": 2, "tanh": 3}

#: Layers whose input gradients one record of `backward_dx` can add up (array fields of struct LinearDx).
SOURCES = 16

# Blocks of tiles from this size on take several times as long as the small launches of their level: in one launch they
# would make the whole level wait.
_LARGE_TILE = 64 * 64

_OLDEST_TENSOR_ARCH = 80  # mma.sync of tf32 and bf16


def _families(
    kind: str,
    struct: str,
    tiles: Callable[[Tile, Mapping[str, Any]], int],
    *,
    late: bool = False,
    early: tuple[str, ...] = (),
    gradients: tuple[str, ...] = (),
    squares: Callable[[Tile, Mapping[str, Any]], int] | None = None,
) -> dict[str, dict[str, Family]]:
    def family(precision: str, name: str, tile: Tile) -> Family:
        stem = f"linear_{kind}" if precision == "fp32" else f"linear_{kind}_{precision}"
        source = f"linear_{kind}_warpgroup" if tile.warpgroups else f"linear_{kind}_mapped" if tile.mapped else stem
        return Family(
            f"{stem}_{name}",
            source=f"{source}.cu",
            kernel=f"fx_{stem}_{name}",
            struct=struct,
            tiles=lambda fields: tiles(tile, fields),
            late=late,
            shared=tile.shared,
            alone=tile.rows * tile.columns >= _LARGE_TILE,
            early=early,
            gradients=gradients,
            squares=partial(squares, tile) if squares else None,
        )

    return {mode: {n: family(mode, n, tile) for n, tile in tiles_of(kind, mode).items()} for mode in TILES}


#: Kernel families by precision and tile name. Weight gradients are late: only the optimizer waits for them.
FORWARD = _families("forward", "LinearForward", lambda t, f: t.count(f["m"], f["n"]), early=("w", "b"))
DX = _families("dx", "LinearDx", lambda t, f: t.count(f["m"], f["k"]), early=("w",))
DW = _families(
    "dw",
    "LinearDw",
    lambda t, f: t.count(f["n"], f["k"], f["k2"]) * f["slices"],
    late=True,
    gradients=("dw", "db"),
    squares=lambda t, f: t.count(f["n"], f["k"], f["k2"]),
)


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
    precision: str | None = None,
    tile: str | None = None,
    siblings: int | None = None,
    beside: tuple[int, int] | None = None,
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
        precision: of the product, if not the program's.
        tile: a key of `FORWARD[program.precision]` (default: `choose_tile`).
        siblings: number of products like this one that run side by side, for the choice of the tile.
        beside: columns and depth of another product of so many rows, whose launch this small one is to share: it takes
            the other one's tile, unless that is large.

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or y.name
    x1, x2 = _pair(x)
    m, n = _matrix(label, "y", y)
    k = _input_columns(label, x1, x2, m, f"y is {describe(y)}")
    _expect(label, "w", w, (n, k), f"x is {_shapes(x1, x2)} and y is {describe(y)}")
    _expect(label, "b", b, (n,), f"y is {describe(y)}")
    code = _activation(label, activation)
    if accumulate and code:
        raise ProgramError(f"linear '{label}': accumulate=True cannot go with activation={activation!r}; use 'none'")
    separate(f"linear '{label}'", "y", y, x=x1, x2=x2)
    mode = _precision(label, precision or program.precision, program.target)
    operands = {"x": x1, "x2": x2, "w": w, "w beside x2": w.columns(x1.shape[1], k) if x2 else None}
    aligned = all_aligned(*operands.values())
    if tile is None and beside is not None:
        shared = choose_tile(program.target, m, *beside, precision=mode, aligned=aligned)
        tile = None if FORWARD[mode][shared].alone else shared
    name = _tile(label, program.target, FORWARD, mode, tile) or choose_tile(
        program.target, m, n, k, precision=mode, siblings=siblings, aligned=aligned
    )
    shape, tensors = TILES[mode][name], (x1, x2, w, b, y)
    sizes = [(m, shape.rows), (n, shape.columns)]
    if x2:
        sizes.append((x1.shape[1], 4))  # inside w's rows, where the weights of x2 begin
    fields: dict[str, Value] = {
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
        "whole": int(_whole(*sizes, tensors=tensors)),
    }
    if shape.mapped:
        _require_aligned(label, name, operands)
        fields |= {
            "x": TensorMap(x1, shape.rows),
            "x2": 0 if x2 is None else TensorMap(x2, shape.rows),
            "w": TensorMap(w, shape.columns),
        }
    reads = [x1, x2, w, b, y if accumulate else None]
    return program.launch(FORWARD[mode][name], fields, reads=reads, writes=[y], label=label)


def backward_dx(
    program: Program,
    dy: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    dx: Tensor,
    *,
    x: Tensor | None = None,
    activation: Activation = "none",
    scale: Tensor | None = None,
    scales: Sequence[Tensor | None] | None = None,
    accumulate: bool = False,
    label: str | None = None,
    precision: str | None = None,
    tile: str | None = None,
    siblings: int | None = None,
) -> Launch:
    """Append dx = slope(x) * sum_i scale_i (dy_i w_i), or dx += the same; sources are added in order.

    Args:
        program: where the record goes.
        dy: [m, n], the gradient before the layer's activation; or a sequence of up to `SOURCES` of them, [m, n_i],
            of layers that read the same x: their gradients are added.
        w: [n, k], or a sequence of [n_i, k]. For one part of a two-part input pass the part's columns
            (`w.columns(start, stop)`).
        dx: [m, k], the gradient before the activation that made x; must not overlap any dy.
        x: [m, k], the layers' input; read (and needed) only if `activation` is not "none".
        activation: the one that made x.
        scale: one float on the device that multiplies every source.
        scales: instead of `scale`: of each source one float on the device, or None for 1. A source whose scale is 0
            adds an exact 0, even if its gradient holds NaN.
        accumulate: add to dx instead of overwriting it.
        label: name of the record (default: dx's name).
        precision: of the product, if not the program's.
        tile: a key of `DX[program.precision]` (default: `choose_tile`).
        siblings: number of products like this one that run side by side, for the choice of the tile.

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or dx.name
    m, k = _matrix(label, "dx", dx)
    sources = _sources(label, dy, w, scale, scales)
    widths = []
    for i, (dy_i, w_i, scale_i) in enumerate(sources):
        suffix = f"[{i}]" if len(sources) > 1 else ""
        n = _matrix(label, f"dy{suffix}", dy_i)[1]
        _expect(label, f"dy{suffix}", dy_i, (m, n), f"dx is {describe(dx)}")
        _expect(label, f"w{suffix}", w_i, (n, k), f"dy{suffix} is {describe(dy_i)} and dx is {describe(dx)}")
        _expect(label, f"scale{suffix}", scale_i, (1,), "it is read as one number")
        separate(f"linear '{label}'", "dx", dx, **{f"dy{suffix}": dy_i})
        widths.append(n)
    code = _activation(label, activation)
    if code and x is None:
        raise ProgramError(f"linear '{label}': activation={activation!r} is the one that made x; pass x as well")
    _expect(label, "x", x, (m, k), f"dx is {describe(dx)}")
    if not code:
        x = None
    mode = _precision(label, precision or program.precision, program.target)
    aligned = all_aligned(*(dy_i for dy_i, _, _ in sources))
    name = _tile(label, program.target, DX, mode, tile) or choose_tile(
        program.target, m, k, sum(widths), kind="dx", precision=mode, siblings=siblings, aligned=aligned
    )
    shape = TILES[mode][name]
    if shape.mapped:
        sources = [(dy_i, transpose(program, w_i, scale_i), scale_i) for dy_i, w_i, scale_i in sources]
    tensors = (x, dx, *(t for dy_i, w_i, _ in sources for t in (dy_i, w_i)))
    fields: dict[str, Value] = {
        "dy": [dy_i for dy_i, _, _ in sources],
        "w": [w_i for _, w_i, _ in sources],
        "scale": [0 if scale_i is None else scale_i for _, _, scale_i in sources],
        "lddy": [dy_i.ld for dy_i, _, _ in sources],
        "ldw": [w_i.ld for _, w_i, _ in sources],
        "n": widths,
        "sources": len(sources),
        **_operand("x", x),
        **_operand("dx", dx),
        "m": m,
        "k": k,
        "activation": code,
        "accumulate": int(accumulate),
        "whole": int(_whole((m, shape.rows), (k, shape.columns), tensors=tensors)),
    }
    if shape.mapped:
        fields |= {
            "dy": [TensorMap(dy_i, shape.rows) for dy_i, _, _ in sources],
            "w": [TensorMap(w_i, shape.columns) for _, w_i, _ in sources],
        }
    reads = [*(t for source in sources for t in source), x, dx if accumulate else None]
    return program.launch(DX[mode][name], fields, reads=reads, writes=[dx], label=label)


def backward_dw(
    program: Program,
    dy: Tensor,
    x: Input,
    dw: Tensor,
    db: Tensor | None = None,
    *,
    accumulate: bool = False,
    label: str | None = None,
    precision: str | None = None,
    tile: str | None = None,
    slices: int | None = None,
    siblings: int | None = None,
    outputs: int | None = None,
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
        precision: of the product, if not the program's.
        tile: a key of `DW[program.precision]` (default: `choose_dw`).
        slices: number of slices (default: `choose_dw`).
        siblings: number of such products that share the device, if it is known.
        outputs: elements of all weight gradients that are to share launches, if it is known.

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or dw.name
    x1, x2 = _pair(x)
    m, n = _matrix(label, "dy", dy)
    k = _input_columns(label, x1, x2, m, f"dy is {describe(dy)}")
    _expect(label, "dw", dw, (n, k), f"dy is {describe(dy)} and x is {_shapes(x1, x2)}")
    _expect(label, "db", db, (n,), f"dy is {describe(dy)}")
    separate(f"linear '{label}'", "dw", dw, dy=dy, x=x1, x2=x2, db=db)
    columns = (x1.shape[1], k - x1.shape[1]) if x2 else (k,)
    mode = _precision(label, precision or program.precision, program.target)
    fixed = _tile(label, program.target, DW, mode, tile)
    aligned = all_aligned(dy, x1, x2)
    name, wanted = choose_dw(
        program.target,
        n,
        columns,
        m,
        fixed,
        precision=mode,
        siblings=siblings,
        outputs=outputs,
        aligned=aligned,
    )
    slices = wanted if slices is None else slices
    if slices < 1:
        raise ProgramError(f"linear '{label}': slices={slices}, expected at least 1")
    shape = TILES[mode][name]
    if shape.mapped:
        _require_aligned(label, name, {"dy": dy, "x": x1, "x2": x2})
    parts = arrived = None
    if slices > 1:
        tiles = shape.count(n, *columns)
        size = (tiles, slices, shape.rows * (shape.columns + 1))
        unique = f"{label}#{len(program.launches)}"
        parts = program.tensor(f"{unique}.partial", size, np.float32, arena=ACTIVATIONS)
        zeros = np.zeros(tiles, np.uint32)  # the kernel leaves them at 0
        arrived = program.tensor(f"{unique}.arrived", zeros.shape, zeros.dtype, arena="counters", data=zeros)
    sizes = [(n, shape.rows), *((c, shape.columns) for c in columns)]
    fields: dict[str, Value] = {
        **_operand("dy", dy),
        **_operand("x", x1),
        **_operand("x2", x2),
        **_operand("dw", dw),
        "db": 0 if db is None else db,
        "partial": 0 if parts is None else parts,
        "arrived": 0 if arrived is None else arrived,
        "squares": 0,
        "m": m,
        "n": n,
        "k": x1.shape[1],
        "k2": k - x1.shape[1],
        "slices": slices,
        "accumulate": int(accumulate),
        "whole": int(slices == 1 and _whole(*sizes, tensors=(dy, x1, x2, dw))),
    }
    if shape.mapped:
        fields |= {
            "dy": TensorMap(dy, shape.depth, rounded=False),
            "x": TensorMap(x1, shape.depth),
            "x2": 0 if x2 is None else TensorMap(x2, shape.depth),
        }
    before = [dw, db] if accumulate else []
    writes = [dw, db, parts, arrived]
    return program.launch(DW[mode][name], fields, reads=[dy, x1, x2, *before], writes=writes, label=label)


def _require_aligned(label: str, tile: str, operands: Mapping[str, Tensor | None]) -> None:
    given = {role: t for role, t in operands.items() if t is not None}
    if all_aligned(*given.values()):
        return
    shapes = ", ".join(f"{role} {describe(t)}" for role, t in given.items())
    raise ProgramError(
        f"linear '{label}': tile {tile!r} reads by tensor maps, but {shapes} have row strides "
        f"{[t.ld for t in given.values()]} and offsets {[t.offset for t in given.values()]}; expected multiples of 4 "
        "elements"
    )


def _whole(*sizes: tuple[int, int], tensors: Sequence[Tensor | None]) -> bool:
    """Whether every size is a multiple of what it is given with, and all rows are aligned."""
    return all(n % unit == 0 for n, unit in sizes) and all_aligned(*tensors)


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
    """scale * slope(x) * (dy w) in float64; exactly 0 if the scale is 0. For more sources add the results."""
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


def reference_rounded(x: ArrayLike, precision: str, *, mapped: bool = False) -> NDArray[np.float64]:
    """The float32 array x as a product in that precision reads it.

    tf32 keeps 10 bits of the fraction, rounding ties away from zero, or to even in tiles that read by tensor maps
    (`mapped`); bf16 keeps 7, ties to even; fp32 all.

    Raises:
        ValueError: no such precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r}: expected one of {PRECISIONS}")
    values = np.asarray(x, np.float32)
    if precision == "fp32":
        return _wide(values)
    bits = values.view(np.uint32)
    dropped = np.uint32(13 if precision == "tf32" else 16)
    half, odd = np.uint32(1) << (dropped - np.uint32(1)), bits >> dropped & np.uint32(1)
    to_even = precision == "bf16" or mapped
    bits = (bits + (half - np.uint32(1) + odd if to_even else half)) >> dropped << dropped
    return np.where(np.isfinite(values), _wide(bits.view(np.float32)), _wide(values))


def _wide(a: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(a, dtype=np.float64)


# -- checks -------------------------------------------------------------------------------------------------


def _pair(x: Input) -> tuple[Tensor, Tensor | None]:
    return (x[0], x[1]) if isinstance(x, tuple) else (x, None)


def _sources(
    label: str,
    dy: Tensor | Sequence[Tensor],
    w: Tensor | Sequence[Tensor],
    scale: Tensor | None,
    scales: Sequence[Tensor | None] | None,
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """(dy, w, scale) of each source."""
    dys = [dy] if isinstance(dy, Tensor) else list(dy)
    ws = [w] if isinstance(w, Tensor) else list(w)
    if scale is not None and scales is not None:
        raise ProgramError(f"linear '{label}': scale and scales are both given; give the one or the other")
    factors = [scale] * len(dys) if scales is None else list(scales)
    if not len(dys) == len(ws) == len(factors):
        raise ProgramError(
            f"linear '{label}': {len(dys)} dy ({_shapes(*dys)}), {len(ws)} w ({_shapes(*ws)}) and {len(factors)} "
            "scales; give one of each for every source"
        )
    if not 1 <= len(dys) <= SOURCES:
        raise ProgramError(
            f"linear '{label}': {len(dys)} sources, expected 1 to {SOURCES}; give the others to a record of their own "
            "with accumulate=True"
        )
    return list(zip(dys, ws, factors, strict=True))


def _shapes(*tensors: Tensor | None) -> str:
    return " beside ".join(describe(t) for t in tensors if t is not None)


def _matrix(label: str, role: str, t: Tensor) -> tuple[int, int]:
    if len(t.shape) != 2:
        raise ProgramError(f"linear '{label}': {role} is {describe(t)}, expected a matrix; reshape it")
    return t.shape[0], t.shape[1]


def _expect(label: str, role: str, t: Tensor | None, shape: tuple[int, ...], because: str) -> None:
    if t is None:
        return
    if t.shape != shape:
        raise ProgramError(f"linear '{label}': {role} is {describe(t)}, expected {list(shape)}: {because}")
    if t.dtype != np.float32:
        raise ProgramError(f"linear '{label}': {role} is {describe(t)} of {t.dtype}, expected float32")


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


def _precision(label: str, mode: str, target: Target) -> str:
    if mode not in PRECISIONS:
        raise ProgramError(f"linear '{label}': unknown precision {mode!r}, expected one of {list(PRECISIONS)}")
    if mode != "fp32" and target.arch_number is not None and target.arch_number < _OLDEST_TENSOR_ARCH:
        raise ProgramError(
            f"linear '{label}': precision {mode!r} needs an sm_{_OLDEST_TENSOR_ARCH} or newer, not {target.arch}; "
            "use 'fp32'"
        )
    return mode


def _tile(
    label: str, target: Target, kind: Mapping[str, Mapping[str, Family]], mode: str, tile: str | None
) -> str | None:
    if tile is None:
        return None
    families = kind[mode]
    if tile not in families:
        raise ProgramError(f"linear '{label}': unknown tile {tile!r}, expected one of {list(families)} in {mode}")
    if (size := families[tile].shared) > target.shared_memory_optin:
        raise ProgramError(
            f"linear '{label}': a block of tile {tile!r} takes {size} bytes of shared memory, "
            f"the device has {target.shared_memory_optin}; choose a smaller tile"
        )
    shape = TILES[mode][tile]
    if target.kind == "cuda" and not has_instructions(target, shape):
        needed = "the warpgroups of sm_90" if shape.warpgroups else "tensor maps, of sm_90 or newer"
        raise ProgramError(f"linear '{label}': tile {tile!r} needs {needed}, not {target.arch}")
    return tile


def _operand(name: str, t: Tensor | None) -> dict[str, Tensor | int]:
    """Record fields of an optional matrix: its address and its row stride."""
    return {name: 0, f"ld{name}": 0} if t is None else {name: t, f"ld{name}": t.ld}
