"""Which tile a linear product runs on: a pure function of the device, the sizes and the precision.

The shapes are those that kernels exist for, in fp32 on the CUDA cores (linear.cuh) and in tf32 and bf16 on the tensor
cores (linear_tensor.cuh, linear_warpgroup.cuh, linear_mapped.cuh). The choice minimises an estimated time; its
constants only rank tiles against each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxengine.driver import Target

# A weight gradient is cut into one of these numbers of slices, none shorter than so many rows: shorter ones would cost
# more in partial results than they gain.
_SLICES = (1, 2, 4, 8, 16, 32, 64)
_SLICE_ROWS = 256

_OLDEST_MAPPED_ARCH = 90

# A product is given one over so many of the device: it shares it with others of its level. Who knows how many, says so.
_SIBLINGS = {"forward": 4, "dx": 1, "dw": 16}


@dataclass(frozen=True)
class Tile:
    """Outputs of one block.

    Attributes:
        rows: height in outputs.
        columns: width in outputs.
        depth: elements of the sum per step of the block; half of them for weight gradients on small tiles.
        stages: steps of the sum that a block holds in dynamic shared memory; 0 if its shared memory is static.
        mapped: it reads its operands by tensor maps, which sm_90 and newer have, so that their rows start at multiples
            of 16 bytes.
        warpgroups: it works by warpgroups, which sm_90 alone has.
    """

    rows: int
    columns: int
    depth: int
    stages: int = 0
    mapped: bool = False
    warpgroups: bool = False

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory of a block; what tensor maps bring is aligned in it."""
        return 4 * self.stages * self.depth * (self.rows + self.columns) + 1024 * self.mapped

    def count(self, rows: int, *columns: int) -> int:
        """Blocks for `rows` x each of `columns` (parts that may not share a tile)."""
        return _ceil(rows, self.rows) * sum(_ceil(c, self.columns) for c in columns)


_TENSOR_TILES = {
    "128x128": Tile(128, 128, 32, stages=3),
    "128x64": Tile(128, 64, 32, stages=3),
    "64x64": Tile(64, 64, 32, stages=3),
    "32x32": Tile(32, 32, 128),
    "16x32": Tile(16, 32, 128),
    "16x16": Tile(16, 16, 128),
}
_WARPGROUP_TILES = {
    "w64x128": Tile(64, 128, 32, stages=3, mapped=True, warpgroups=True),
    "w64x64": Tile(64, 64, 32, stages=3, mapped=True, warpgroups=True),
}
_MAPPED_TILES = {
    "m128x64": Tile(128, 64, 32, stages=3, mapped=True),
    "m64x64": Tile(64, 64, 32, stages=3, mapped=True),
}
#: The tile shapes that the kernels exist for, by precision and name.
TILES: dict[str, dict[str, Tile]] = {
    "fp32": {
        "128x128": Tile(128, 128, 16),
        "64x64": Tile(64, 64, 32),
        "32x32": Tile(32, 32, 64),
        "16x32": Tile(16, 32, 64),
        "16x16": Tile(16, 16, 128),
    },
    "tf32": {**_TENSOR_TILES, **_WARPGROUP_TILES, **_MAPPED_TILES},
    "bf16": _TENSOR_TILES,
}


@dataclass(frozen=True)
class Cost:
    """Clocks of a block with a sum of `terms`.

    Attributes:
        latency, step: what a launch that does not fill the device takes, latency + step * terms.
        load, load_step: what it takes of a multiprocessor that has enough of them, load + load_step * terms.
    """

    latency: float
    step: float
    load: float
    load_step: float


def _fp32(rate: float, latency: float, tile: Tile) -> Cost:
    step = tile.rows * tile.columns / rate  # multiply-adds per clock
    return Cost(latency, step, latency, step)


_FP32 = {
    name: _fp32(rate, latency, TILES["fp32"][name])
    for name, rate, latency in (
        ("128x128", 90, 3000), ("64x64", 72, 2200), ("32x32", 48, 1700), ("16x32", 36, 1500), ("16x16", 26, 1400),
    )
}  # fmt: skip
# Fitted to tools/bench_linear.py on an H200, tf32, all layers at batch 64 to 4,096; for warpgroups before they read by
# tensor maps, which made them a quarter faster. Layers one by one, choices are within 4 to 10 % of the best. No step is
# shorter than the tensor cores need, 682 multiply-adds per clock. bf16 moves the same bytes.
_TENSOR = {
    "forward": {
        "128x128": Cost(8400, 59, 6150, 24),
        "128x64": Cost(7300, 40, 2800, 12),
        "64x64": Cost(4700, 27, 1730, 8.2),
        "32x32": Cost(2700, 5.5, 1370, 4.3),
        "16x32": Cost(2280, 4.0, 1110, 3.7),
        "16x16": Cost(2220, 2.9, 800, 2.3),
        "w64x128": Cost(6700, 25, 2200, 6.5),
        "w64x64": Cost(4450, 21, 1350, 5.5),
    },
    "dx": {
        "128x128": Cost(11400, 49, 7900, 25),
        "128x64": Cost(10200, 34, 3760, 12),
        "64x64": Cost(6460, 24, 1960, 6),
        "32x32": Cost(3030, 6.0, 1580, 5.2),
        "16x32": Cost(2530, 4.3, 1380, 4.7),
        "16x16": Cost(2590, 2.8, 1100, 2.6),
        "w64x128": Cost(7180, 26, 3700, 4),
        "w64x64": Cost(4470, 19.5, 1400, 5),
    },
    "dw": {
        "128x128": Cost(5400, 79, 0, 24),
        "128x64": Cost(4500, 56, 0, 12),
        "64x64": Cost(2900, 36, 0, 6),
        "32x32": Cost(2300, 7.2, 0, 4.9),  # this and the next fitted when their blocks had eight warps, not four
        "16x32": Cost(1900, 4.9, 180, 4.2),
        "16x16": Cost(1630, 3.0, 600, 3.2),
        "m128x64": Cost(4500, 80, 0, 12),
        "m64x64": Cost(2900, 67, 0, 8),
    },
}
# Of all weight gradients of a step together, on one tile: fitted to those of the default network at batch 64 to 4,096,
# within 10 %. The second-level cache, not the tensor cores, sets their pace.
_WEIGHT_GRADIENTS = {
    "m128x64": Cost(6000, 30, 0, 12),
    "m64x64": Cost(2660, 28, 360, 8),
    "128x64": Cost(3400, 57, 0, 19.8),
    "64x64": Cost(2660, 35, 360, 17.9),
    "32x32": Cost(870, 28.6, 540, 7.2),
    "16x32": Cost(2140, 18.5, 410, 5.1),
}
# Clocks for each output of each slice to be stored, and read again.
_MERGE = 0.85
# A weight gradient takes the tile of all others if its tiles then hold at most so many times its outputs.
_MOST_WASTE = 2


#: How products may be computed: float32, or operands rounded to tf32 or bf16 with float32 sums.
PRECISIONS: tuple[str, ...] = tuple(TILES)


def choose_tile(
    target: Target,
    rows: int,
    columns: int,
    depth: int,
    *,
    kind: str = "forward",
    precision: str = "fp32",
    siblings: int | None = None,
    aligned: bool = True,
) -> str:
    """Name of the tile with the smallest estimated time for `rows` x `columns` sums of `depth` terms.

    A pure function of its arguments; `kind` is `forward` or `dx`, `siblings` the number of such products that run side
    by side, if it is known, `aligned` says whether all rows of both operands start at multiples of 16 bytes.
    """
    share = siblings or _SIBLINGS[kind]
    tiles = served(target, precision, kind, aligned=aligned)

    def cost(name: str) -> float:
        return _cost(target, tiles[name], _clocks(precision, kind)[name], rows, (columns,), depth, share=share)

    return min(tiles, key=cost)


def tiles_of(kind: str, precision: str) -> dict[str, Tile]:
    """The tiles that have a kernel of this kind (`forward`, `dx`, `dw`), by name."""
    return {name: tile for name, tile in TILES[precision].items() if name in _clocks(precision, kind)}


def served(target: Target, precision: str, kind: str, *, aligned: bool = True) -> dict[str, Tile]:
    """Those whose blocks find room on the device, and their instructions; `aligned` as of `choose_tile`."""
    return {
        name: tile
        for name, tile in tiles_of(kind, precision).items()
        if tile.shared <= target.shared_memory_optin and has_instructions(target, tile) and (aligned or not tile.mapped)
    }


def _clocks(precision: str, kind: str) -> dict[str, Cost]:
    return _FP32 if precision == "fp32" else _TENSOR[kind]


def has_warpgroups(target: Target) -> bool:
    """Whether the device has the instructions of the tiles that work by warpgroups."""
    return target.arch in ("sm_90", "sm_90a")


def has_tensor_maps(target: Target) -> bool:
    """Whether the device has the instructions of the tiles that read by tensor maps."""
    return target.arch_number is not None and target.arch_number >= _OLDEST_MAPPED_ARCH


def has_instructions(target: Target, tile: Tile) -> bool:
    """Whether the device has those of the tile."""
    if tile.warpgroups:
        return has_warpgroups(target)
    return not tile.mapped or has_tensor_maps(target)


def choose_dw(
    target: Target,
    rows: int,
    columns: tuple[int, ...],
    depth: int,
    tile: str | None = None,
    *,
    precision: str = "fp32",
    siblings: int | None = None,
    outputs: int | None = None,
    aligned: bool = True,
) -> tuple[str, int]:
    """Tile, and number of slices of the sum, for a weight gradient.

    `tile` fixes the tile; `aligned` is as of `choose_tile`.

    Weight gradients share launches if they have the same tile. So where `outputs` says how many elements all of them
    have together, and each is a sum of this depth, all take the tile that suits the whole: but for those of which too
    little would be in it. Where neither that nor `siblings` is known, each is given a sixteenth of the device, which
    favours tiles that waste no work over tiles that finish soon.
    """
    tiles = served(target, precision, "dw", aligned=aligned) if tile is None else {tile: TILES[precision][tile]}
    slices = [1] if target.kind == "sim" else [s for s in _SLICES if s == 1 or depth >= s * _SLICE_ROWS]
    if tile is None and outputs is not None and target.kind == "cuda" and precision != "fp32":
        name, wanted = _choose_for_all(target, tiles, slices, outputs, depth)
        shape = tiles[name]
        if shape.count(rows, *columns) * shape.rows * shape.columns <= _MOST_WASTE * rows * sum(columns):
            return name, wanted
    possible = [
        (name, s)
        for name, shape in tiles.items()
        for s in slices
        if s == 1 or shape.count(rows, *columns) < 2 * target.sm_count  # else the outputs fill the device
    ]

    def cost(choice: tuple[str, int]) -> float:
        name, slices = choice
        clocks, share = _clocks(precision, "dw")[name], siblings or _SIBLINGS["dw"]
        return _cost(target, tiles[name], clocks, rows, columns, depth, slices=slices, share=share)

    return min(possible, key=cost)


def _choose_for_all(
    target: Target, tiles: Mapping[str, Tile], slices: Sequence[int], outputs: int, depth: int
) -> tuple[str, int]:
    """Tile and slices for weight gradients that have so many outputs together."""

    def cost(choice: tuple[str, int]) -> float:
        name, slices = choice
        area, clocks, terms = tiles[name].rows * tiles[name].columns, _WEIGHT_GRADIENTS[name], depth / slices
        load = clocks.load + clocks.load_step * terms + (_MERGE * area if slices > 1 else 0.0)
        return clocks.latency + clocks.step * terms + outputs / area * slices * load / target.sm_count

    return min(((name, s) for name in tiles if name in _WEIGHT_GRADIENTS for s in slices), key=cost)


def _cost(
    target: Target,
    tile: Tile,
    clocks: Cost,
    rows: int,
    columns: tuple[int, ...],
    depth: int,
    *,
    slices: int = 1,
    share: int = 1,
) -> float:
    """Estimated time: of a GPU in clocks, of the simulated device (one block after another) in nanoseconds."""
    tiles = tile.count(rows, *columns)
    terms = _ceil(depth, slices)
    if target.kind == "sim":
        return tiles * (20_000 + 3_500 * _ceil(depth, tile.depth) + tile.rows * tile.columns * terms / 8)
    merge = 3_000 + slices * tile.rows * tile.columns / 5 if slices > 1 else 0.0
    work = slices * (clocks.load + clocks.load_step * terms) + merge
    return tiles * work * share / target.sm_count + clocks.latency + clocks.step * terms + merge


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
