"""Time of the linear kernels by tile shape, over the layers of the default network.

    python tools/bench_linear.py --precision fp32 tf32 bf16 --batch 64 256 1024 4096 --device cuda:0 --output out.json

Each line is one layer, one kind (forward, dx, dw) and one batch: µs per launch and TFLOP/s of every tile, the
fastest one marked `*`, the one that `choose_tile` picks marked `<`. A launch is timed inside a captured graph of
`--chain` copies that follow each other (hand-off included, caches warm), median of `--repeats` replays. `heads dx` is
the gradient of what all heads read, one record with many sources. The last lines sum µs over all layers: for each tile
that has every line, for the choice, and for the fastest of each line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from fxengine.driver import Device, Stream
from fxengine.graphs import Plan, Program, Tensor, node_times, row_stride
from fxengine.ops import linear
from fxengine.ops.linear_tiles import served

#: Layers of the default network: name, rows per sample, outputs, inputs.
LAYERS: tuple[tuple[str, int, int, int], ...] = (
    ("s1", 1, 256, 48),
    ("s2", 1, 256, 256),
    ("glu", 1, 512, 256),
    ("v1", 1, 128, 256),
    ("v2", 1, 51, 128),
    ("fc", 1, 128, 257),
    ("out", 1, 153, 128),
    ("a2", 1, 128, 128),
    ("nb1", 1, 32, 64),
    ("nb2", 1, 2, 32),
    ("rec", 1, 48, 256),
    ("phi", 32, 256, 64),
    ("iq1", 32, 128, 256),
    ("iq2", 32, 12, 128),
)
KINDS = ("forward", "dx", "dw")
#: Widths of the layers that read the same [batch, 256]; timed as one record.
HEADS = (128, 128, 128, 128, 128, 48)


@dataclass
class Line:
    """Times of one product: µs by tile, and the tile that the rule picks."""

    precision: str
    layer: str
    kind: str
    batch: int
    m: int
    n: int
    k: int
    chosen: str
    us: dict[str, float]

    @property
    def fastest(self) -> str:
        """Tile with the smallest time."""
        return min(self.us, key=self.us.__getitem__)

    def __str__(self) -> str:
        flop = 2.0 * self.m * self.n * self.k
        cells = []
        for tile in linear.TILES[self.precision]:
            us = self.us.get(tile)
            if us is None:
                cells.append(" " * 18)
                continue
            mark = ("*" if tile == self.fastest else " ") + ("<" if tile == self.chosen else " ")
            cells.append(f"{us:9.2f} {flop / us * 1e-6:6.2f}{mark}")
        return f"{self.batch:>5} {self.layer:<5} {self.kind:<8} {self.m:>7}x{self.n:<4}x{self.k:<4}" + "".join(cells)


def declare(program: Program, layer: str, kind: str, m: int, n: int, k: int, tile: str | None) -> str:
    """Append one record; returns the name of its tile."""

    def matrix(name: str, rows: int, columns: int) -> Tensor:
        return program.tensor(name, (rows, row_stride(columns))).columns(0, columns)

    x, w, y = matrix("x", m, k), matrix("w", n, k), matrix("y", m, n)
    if kind == "forward":
        b = program.tensor("b", (n,))
        record = linear.forward(program, x, w, b, y, activation="elu", tile=tile)
    elif kind == "dx":
        dx = matrix("dx", m, k)
        ends = list(accumulate(HEADS)) if layer == "heads" else [n]
        parts = list(pairwise([0, *ends]))
        dys, ws = [y.columns(*part) for part in parts], [w.rows(*part) for part in parts]
        record = linear.backward_dx(program, dys, ws, dx, x=x, activation="elu", tile=tile)
    else:
        dw, db = matrix("dw", n, k), program.tensor("db", (n,))
        record = linear.backward_dw(program, y, x, dw, db, tile=tile)
    return record.family.name.rsplit("_", 1)[1]


def measure(device: Device, stream: Stream, precision: str, batch: int, chain: int, repeats: int) -> Iterator[Line]:
    """One line per layer and kind."""
    layers = [(layer, rows * batch, n, k, kind) for layer, rows, n, k in LAYERS for kind in KINDS]
    for layer, m, n, k, kind in [*layers, ("heads", batch, sum(HEADS), 256, "dx")]:
        chosen = declare(Program(device.target, precision), layer, kind, m, n, k, None)
        us = {}
        for tile in served(device.target, precision, kind):
            program = Program(device.target, precision)
            declare(program, layer, kind, m, n, k, tile)
            with Plan(program, device) as plan:
                us[tile] = node_times(plan, stream=stream, chain=chain, repeats=repeats)[-1]
        yield Line(precision, layer, kind, batch, m, n, k, chosen, us)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--precision", nargs="+", choices=linear.PRECISIONS, default=list(linear.PRECISIONS))
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--chain", type=int, default=20, help="copies of a launch in one graph")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write all lines as JSON")
    options = parser.parse_args()

    lines: list[Line] = []
    with Device.open(options.device) as device, device.stream() as stream:
        print(f"{device.name} ({device.label}), µs and TFLOP/s per launch; * fastest, < chosen")
        for precision in options.precision:
            tiles = "".join(f"{tile:>17} " for tile in linear.TILES[precision])
            print(f"\n{precision}\n{'batch':>5} {'':<5} {'':<8} {'m x n x k':>17}{tiles}")
            for batch in options.batch:
                for line in measure(device, stream, precision, batch, options.chain, options.repeats):
                    lines.append(line)
                    print(line, flush=True)
    for precision in options.precision:
        for batch in options.batch:
            mine = [line for line in lines if line.batch == batch and line.precision == precision]
            common = [t for t in linear.TILES[precision] if all(t in line.us for line in mine)]
            sums = ", ".join(f"{t} {sum(line.us[t] for line in mine):.1f}" for t in common)
            chosen = sum(line.us[line.chosen] for line in mine)
            fastest = sum(line.us[line.fastest] for line in mine)
            print(f"{precision}, batch {batch}, sum of µs: {sums}; chosen {chosen:.1f}, fastest {fastest:.1f}")
    if options.output:
        options.output.write_text(json.dumps([asdict(line) for line in lines], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
