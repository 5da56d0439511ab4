"""The nodes that the whole step is given on a GPU, without one: what a change of the planner or of a tile's cost does.

    python tools/planned_nodes.py --batch 64 256
    python tools/planned_nodes.py --arch sm_120 --batch 1024 --why h2.dx

A plan depends on a device only through its `Target`. Of a node the line shows its level, its blocks, whether it may
begin while those before it still run, its families, the nodes that it begins behind, and the records in it. With --why,
of each record with such a label: what it must follow, and what must follow it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from fxengine import StepConfig
from fxengine.driver import Target
from fxengine.driver.errors import FxError
from fxengine.engine import _checked_data
from fxengine.graphs import Program, depth, schedule
from fxengine.graphs.schedule import _dependencies
from fxengine.nets.builder import StepBuilder
from fxengine.nets.step import specified_step
from tools.bench_step import BATCHES, PRECISIONS
from tools.peers.data import random_rows


def program(batch: int, arch: str = "sm_90", precision: str = "tf32") -> Program:
    """The program of the whole step, as an engine with resident data declares it, without the oracles.

    Raises:
        FxError: no such architecture is known.
    """
    config = StepConfig(batch=batch)
    data = _checked_data(random_rows(config))
    builder = StepBuilder(Target.of(arch), precision=precision, data=data, with_oracles=False)
    specified_step(builder, config)
    builder.finish()
    return builder.program


def table(declared: Program) -> str:
    """The nodes of a program as text."""
    nodes = schedule(declared)
    lines = [
        f"{len(nodes)} nodes, depth {depth(nodes)}",
        f"{'node':>5} {'level':>5} {'blocks':>6} {'early':>5}  {'family':<30} {'after':<22} for",
    ]
    for i, node in enumerate(nodes):
        after = ",".join(map(str, node.after)) or "-"
        early = "yes" if node.overlaps else "-"
        lines.append(
            f"{i:>5} {node.level:>5} {node.blocks:>6} {early:>5}  {node.name:<30.30} {after:<22} {node.label:.80}"
        )
    return "\n".join(lines)


def why(declared: Program, label: str) -> str:
    """What the records of that label must follow, and what must follow them.

    Raises:
        ValueError: there is no such record.
    """
    records = declared.launches
    before = _dependencies(records)
    lines = []
    for i in (i for i, record in enumerate(records) if record.label == label):
        lines.append(f"{label} follows {', '.join(records[j].label for j in sorted(before[i])) or 'nothing'}")
        behind = [records[j].label for j, deps in enumerate(before) if i in deps]
        lines.append(f"{label} is followed by {', '.join(behind) or 'nothing'}")
    if not lines:
        raise ValueError(f"no record '{label}'; there are {', '.join(sorted({r.label for r in records}))}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The nodes that the whole step is given on a GPU, without one.")
    parser.add_argument("--arch", default="sm_90", help="default: %(default)s")
    parser.add_argument(
        "--batch", nargs="+", type=int, default=list(BATCHES), help="batch sizes (default: %(default)s)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="default: %(default)s")
    parser.add_argument("--why", nargs="+", default=[], metavar="LABEL", help="records whose neighbours are shown")
    options = parser.parse_args(argv)
    try:
        for batch in options.batch:
            declared = program(batch, options.arch, options.precision)
            print(f"batch {batch} on an {options.arch}: {table(declared)}\n")
            for label in options.why:
                print(why(declared, label))
    except (FxError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
