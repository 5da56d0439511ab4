"""Times the whole step of several source trees in turn, in one run: what a change of a kernel is worth in the step.

    python tools/compare_trees.py . ../other --batch 64 256 1024 4096
    python tools/compare_trees.py . ../other --json times.json

A tree is a checkout, or any folder that holds an `fxengine` folder. Each has a process of its own, which builds its
engines once; then they are timed one after another, round by round, while the others rest. So whatever changes about
the device meanwhile meets all of them. The table has, by tree and batch, the median over the rounds in µs per step,
half the spread (largest less smallest), and the difference to the first tree. A tree whose process ends early is left
out, and stderr says why; if it is the first one, in some round, differences are to the next.

A node that is timed by itself, in a chain of copies, runs warm code; in the step it does not. What counts is this.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

BATCHES = (64, 256, 1024, 4096)
ROOT = Path(__file__).resolve().parents[1]


class TreeError(RuntimeError):
    """The process of a tree has ended early."""


def serve(tree: Path, device: str, batches: Sequence[int], precision: str, steps: int) -> None:
    """Build a tree's engines; then, for each line of stdin, time all of them and print one line of JSON."""
    sys.path.insert(0, str(tree))
    import fxengine

    if tree not in Path(fxengine.__file__).parents:
        raise SystemExit(f"{tree} has no fxengine folder; found {fxengine.__file__}")
    sys.path.append(str(ROOT))
    from tools.bench_step import MODELS, device_us
    from tools.peers.data import random_rows

    opened = fxengine.Device.open(device)
    engines = {}
    for batch in batches:
        config = MODELS["step"](batch)
        engines[batch] = fxengine.Engine(config, device=opened, precision=precision, data=random_rows(config))
    print(json.dumps({str(b): sum(e.graph.census().nodes.values()) for b, e in engines.items()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({str(b): device_us(e, e.step, steps, 1) for b, e in engines.items()}), flush=True)


class Tree:
    """A tree, and its process.

    Attributes:
        name: what it is called.
        nodes: by batch, of its graph; known when it is `ready`.
        rounds: by batch, µs per step of each round.
    """

    def __init__(self, tree: Path, name: str, arguments: Sequence[str]):
        self.name = name
        self.nodes: dict[str, float] = {}
        self.rounds: list[dict[str, float]] = []
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(tree), "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def ready(self) -> None:
        """Wait until its engines are built.

        Raises:
            TreeError: the process has ended.
        """
        self.nodes = self._read()

    def time(self) -> None:
        """One more round.

        Raises:
            TreeError: the process has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is nothing to read either
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        self.rounds.append(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith("\n"):
            status = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().rstrip()
            raise TreeError(f"the process of tree '{self.name}' ended with status {status}" + (said and f":\n{said}"))
        found: dict[str, float] = json.loads(line)
        return found


def names(trees: Sequence[Path]) -> list[str]:
    """What the trees are called: by their folders; by whole paths where folders have the same name; numbered where a
    tree is given more than once."""
    folders = [tree.name for tree in trees]
    found = [name if folders.count(name) == 1 else str(tree) for name, tree in zip(folders, trees, strict=True)]
    return [n if found.count(n) == 1 else f"{n} #{1 + found[:i].count(n)}" for i, n in enumerate(found)]


def row(name: str, rounds: Sequence[dict[str, float]], nodes: dict[str, float]) -> dict[str, Any]:
    """What is shown of a tree: by batch the median of its rounds, the spread, and the nodes of the graph."""
    by_batch = {batch: [r[batch] for r in rounds] for batch in rounds[0]}
    return {
        "tree": name,
        "us": {batch: round(median(times), 2) for batch, times in by_batch.items()},
        "spread_us": {batch: round(max(times) - min(times), 2) for batch, times in by_batch.items()},
        "nodes": nodes,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    batches = list(rows[0]["us"])
    width = max(8, *(len(r["tree"]) for r in rows))
    lines = [" ".join([" " * width, *(f"{batch:>22}" for batch in batches)])]
    for r in rows:
        cells = [
            f"{r['us'][b]:9.1f} ±{r['spread_us'][b] / 2:4.1f} {r['us'][b] - rows[0]['us'][b]:+6.1f}" for b in batches
        ]
        lines.append(" ".join([f"{r['tree']:<{width}}", *(f"{cell:>22}" for cell in cells)]))
    return "\n".join(lines)


def compare(
    trees: Sequence[Path], device: str, batches: Sequence[int], precision: str, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each tree that could be timed in all rounds, the first one first; others are named on stderr.

    Raises:
        TreeError: the engines of the first tree cannot be built, or no tree is left.
    """

    def served(wait: Callable[[], None]) -> bool:
        try:
            wait()
        except TreeError as error:
            print(f"error: {error}", file=sys.stderr)
            return False
        return True

    arguments = ["--device", device, "--precision", precision, "--steps", str(steps), "--batch", *map(str, batches)]
    running: list[Tree] = []
    try:
        for folder, name in zip(trees, names(trees), strict=True):
            running.append(Tree(folder, name, arguments))
        running[0].ready()
        left = [running[0], *(tree for tree in running[1:] if served(tree.ready))]
        for _ in range(rounds):
            left = [tree for tree in left if served(tree.time)]
        if not left:
            raise TreeError("no tree could be timed in all rounds")
        return [row(tree.name, tree.rounds, tree.nodes) for tree in left]
    finally:
        for tree in running:
            tree.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the whole step of several source trees in turn.")
    parser.add_argument(
        "trees", nargs="+", type=Path, help="folders that hold an fxengine folder; the first is the base"
    )
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="default: %(default)s")
    parser.add_argument("--precision", default="tf32", help="default: %(default)s")
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="replays per time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    trees = [tree.resolve() for tree in options.trees]
    if options.serve:
        serve(trees[0], options.device, options.batch, options.precision, options.steps)
        return 0
    try:
        rows = compare(trees, options.device, options.batch, options.precision, options.steps, options.rounds)
    except TreeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
