"""Which tile a linear product runs on: a pure function of the device, the sizes and the precision.

The shapes are those that kernels exist for, in fp32 on the CUDA cores (linear.cuh) and in tf32 and bf16 on the tensor
cores (linear_tensor.cuh). The choice minimises an estimated time; its constants only rank tiles against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxengine.driver import Target

# A weight gradient is cut into one of these numbers of slices, none shorter than so many rows: shorter ones would cost
# more in partial results than they gain.
_SLICES = (1, 2, 4, 8, 16, 32, 64)
_SLICE_ROWS = 256

# A layer is given one over so many of the device: it shares it with others of its level.
_SIBLINGS = 2


@dataclass(frozen=True)
class Tile:
    """Outputs of one block, and what the choice among tiles has to know.

    Attributes:
        rows: height in outputs.
        columns: width in outputs.
        depth: elements of the sum per step of the block.
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


#: The tile shapes that the kernels exist for, by precision and name.
TILES: dict[str, dict[str, Tile]] = {
    "fp32": {
        "128x128": Tile(128, 128, 16, rate=90, latency=3000),
        "64x64": Tile(64, 64, 32, rate=72, latency=2200),
        "32x32": Tile(32, 32, 64, rate=48, latency=1700),
        "16x32": Tile(16, 32, 64, rate=36, latency=1500),
        "16x16": Tile(16, 16, 128, rate=26, latency=1400),
    },
    "tf32": {
        "128x128": Tile(128, 128, 16, rate=300, latency=3500),
        "128x64": Tile(128, 64, 32, rate=280, latency=3000),
        "64x64": Tile(64, 64, 32, rate=200, latency=2300),
        "32x32": Tile(32, 32, 128, rate=110, latency=1600),
        "16x32": Tile(16, 32, 128, rate=70, latency=1400),
        "16x16": Tile(16, 16, 128, rate=50, latency=1300),
    },
    "bf16": {
        "128x128": Tile(128, 128, 32, rate=400, latency=3500),
        "128x64": Tile(128, 64, 32, rate=380, latency=3000),
        "64x64": Tile(64, 64, 64, rate=260, latency=2300),
        "32x32": Tile(32, 32, 128, rate=120, latency=1600),
        "16x32": Tile(16, 32, 128, rate=75, latency=1400),
        "16x16": Tile(16, 16, 128, rate=52, latency=1300),
    },
}

#: How products may be computed: float32, or operands rounded to tf32 or bf16 with float32 sums.
PRECISIONS: tuple[str, ...] = tuple(TILES)


def choose_tile(target: Target, rows: int, columns: int, depth: int, *, precision: str = "fp32") -> str:
    """Name of the tile with the smallest estimated time for `rows` x `columns` sums of `depth` terms.

    A pure function of its arguments.
    """
    tiles = TILES[precision]
    return min(tiles, key=lambda name: _cost(target, tiles[name], rows, (columns,), depth, share=_SIBLINGS))


def choose_dw(
    target: Target,
    rows: int,
    columns: tuple[int, ...],
    depth: int,
    tile: str | None = None,
    *,
    precision: str = "fp32",
) -> tuple[str, int]:
    """Tile, and number of slices of the sum, for a weight gradient; `tile` fixes the tile.

    Weight gradients share one launch, so each is given an eighth of the device, which favours tiles that waste no
    work over tiles that finish soon.
    """
    tiles = TILES[precision]
    slices = [1] if target.kind == "sim" else [s for s in _SLICES if s == 1 or depth >= s * _SLICE_ROWS]
    choices = [
        (name, s)
        for name in (tiles if tile is None else [tile])
        for s in slices
        if s == 1 or tiles[name].count(rows, *columns) < 2 * target.sm_count  # else the outputs fill the device alone
    ]

    def cost(choice: tuple[str, int]) -> float:
        return _cost(target, tiles[choice[0]], rows, columns, depth, slices=choice[1], share=8)

    return min(choices, key=cost)


def _cost(
    target: Target,
    tile: Tile,
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
    work = tile.rows * tile.columns * terms
    if target.kind == "sim":
        return tiles * (20_000 + 3_500 * _ceil(depth, tile.depth) + work / 8)
    block = tile.latency + work / tile.rate
    merge = 1_500 + slices * tile.rows * tile.columns / 16 if slices > 1 else 0.0
    return (tiles * slices * block + tiles * merge) * share / target.sm_count + block + merge


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
