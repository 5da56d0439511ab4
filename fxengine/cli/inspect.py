"""`fxengine inspect`: what the captured training step consists of."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxengine.cli.options import add_choice, add_device, add_json, add_option, print_json, report_stream, size, table
from fxengine.ops.linear_tiles import PRECISIONS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fxengine.config import StepConfig
    from fxengine.engine import Engine
    from fxengine.graphs import Census
    from fxengine.graphs.floor import Ceilings, Level

#: Rows of the stand-in data that the batches are gathered from.
_ROWS = 1024


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    from fxengine.cli.options import documented
    from fxengine.config import StepConfig
    from fxengine.settings import MODELS

    parser: argparse.ArgumentParser = commands.add_parser(
        "inspect",
        help="show the captured step: nodes, launches, memory, time per node",
        description="Capture the step that `fxengine train` replays, on stand-in data, and show its nodes and counts "
        "as the driver reports them.",
    )
    add_device(parser)
    text = "the auxiliary nets alone, or the whole specified step in its full sizes"
    add_choice(parser, "model", MODELS, "aux", text)
    add_choice(parser, "precision", PRECISIONS, "fp32", "precision of linear products")
    texts = documented(StepConfig)
    for name in ("batch", "state", "regimes"):
        add_option(parser, name, getattr(StepConfig.aux_only(), name), texts.get(name, ""))
    parser.add_argument("--dot", metavar="FILE", help="write the graph in Graphviz DOT")
    parser.add_argument(
        "--time",
        action="store_true",
        help="measure every node by itself, and set each level against its floor (simulated: time on this CPU)",
    )
    add_json(parser)
    parser.set_defaults(command=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from fxengine.config import StepConfig
    from fxengine.engine import Engine
    from fxengine.graphs import node_times

    out = report_stream(arguments.json)
    sizes = {name: getattr(arguments, name) for name in ("batch", "state", "regimes")}
    config = StepConfig(**sizes) if arguments.model == "full" else StepConfig.aux_only(**sizes)
    data = _stand_in(config)
    with Engine(config, device=arguments.device, precision=arguments.precision, data=data) as engine:
        census = engine.graph.census()
        # Timing runs single nodes of this engine's plan, out of order: nothing but the counts is used afterwards.
        times = node_times(engine.plan, stream=engine.stream) if arguments.time else None
        if arguments.dot:
            Path(arguments.dot).write_text(engine.graph.dot() + "\n")
        print(_describe(engine, census, times), file=out)
        if arguments.dot:
            print(f"\ndrawing: {arguments.dot} (dot -Tsvg {arguments.dot})", file=out)
        if arguments.json:
            sys.stderr.flush()
            print_json(_as_json(engine, census, times))
    return 0


def _stand_in(config: StepConfig) -> dict[str, NDArray[np.generic]]:
    """Rows of every input that `fxengine train` keeps on the device; what they hold costs no time."""
    import numpy as np

    data: dict[str, NDArray[np.generic]] = {"state": np.zeros((_ROWS, config.state), np.float32)}
    data.update((name, np.zeros(_ROWS, np.int32)) for name in ("nb_label", "regime_label"))
    if config.is_aux_only:
        return data
    data["next_state"] = np.zeros((_ROWS, config.state), np.float32)
    data.update((name, np.zeros((_ROWS, config.ofi), np.float32)) for name in ("ofi", "next_ofi"))
    data.update((name, np.ones(_ROWS, np.float32)) for name in ("reward", "discount", "weight"))
    data["actions"] = np.zeros((_ROWS, len(config.branches)), np.int32)
    return data


def _describe(engine: Engine, census: Census, times: list[float] | None) -> str:
    head, *rows = engine.graph.table().splitlines()
    if times is not None:
        head = f"{'us':>8} {head}"
        rows = [f"{us:>8.2f} {row}" for us, row in zip(times, rows, strict=True)]
    counts = {
        "precision": engine.precision,
        "device": f"{engine.device.label} ({engine.device.name})",
        "depth": census.depth,
        "nodes": ", ".join(f"{n} {kind}" for kind, n in census.nodes.items()),
        "edges": census.edges,
        "instantiations": census.instantiations,
        "memory": ", ".join(f"{arena} {size(n)}" for arena, n in census.bytes.items()),
    }
    if times is not None:
        counts["node times"] = f"{sum(times):.1f} us in sum, each measured by itself, with warm caches"
    families = [f"{family:<22} {census.launches[family]:>8} {census.records[family]:>7}" for family in census.launches]
    parts = [head, *rows, "", table(counts), "", f"{'family':<22} {'launches':>8} {'records':>7}", *families]
    return "\n".join([*parts, *([] if times is None else ["", *_floor_lines(engine, times)])])


def _floor_lines(engine: Engine, times: list[float]) -> list[str]:
    """The levels beside their floors, and the floor of the step."""
    from fxengine.graphs.floor import step_floor

    nodes, (ceilings, own) = engine.plan.nodes, _ceilings(engine)
    floor = step_floor(nodes, ceilings)
    lines = [f"{'level':>5} {'us':>8} {'sum us':>8} {'MFLOP':>9} {'MB':>8} {'floor us':>8} {'share':>6}  slowest node"]
    for row in _levels(engine, times):
        share = f"{row.share:>6.0%}" if own else f"{'-':>6}"
        lines.append(
            f"{row.level:>5} {row.longest_us:>8.2f} {row.total_us:>8.2f} {row.work.total_flop / 1e6:>9.1f} "
            f"{row.work.nbytes / 1e6:>8.2f} {row.floor_us:>8.2f} {share}  {nodes[row.slowest].name}"
        )
    note = "" if own else "; of this device no ceilings are known, so there is no share"
    parts = f"products {floor.products_us:.1f}, memory {floor.memory_us:.1f}, chain {floor.chain_us:.1f}"
    text = f"{floor.us:.1f} us = the largest of {parts}, and {floor.launch_us} for the launch"
    return [*lines, "", f"floor on an {ceilings.name}: {text}{note}"]


def _levels(engine: Engine, times: list[float]) -> list[Level]:
    from fxengine.graphs.floor import levels

    return levels(engine.plan.nodes, times, _ceilings(engine)[0])


def _ceilings(engine: Engine) -> tuple[Ceilings, bool]:
    """Ceilings to measure the step against, and whether they are this device's own."""
    from fxengine.graphs.floor import H200, KNOWN

    own = KNOWN.get(engine.device.name)
    return (own, True) if own else (H200, False)


def _as_json(engine: Engine, census: Census, times: list[float] | None) -> dict[str, Any]:
    from fxengine.graphs.floor import step_floor

    values: dict[str, Any] = {"device": engine.device.label, "name": engine.device.name, "precision": engine.precision}
    if engine.config is not None:
        values["batch"] = engine.config.batch
    values.update(census.as_dict())
    if times is not None:
        ceilings, own = _ceilings(engine)
        values["node_us"] = [
            {"node": i, "family": node.name, "label": node.label, "us": us}
            for i, (node, us) in enumerate(zip(engine.plan.nodes, times, strict=True))
        ]
        values["levels"] = [row.as_dict() | ({} if own else {"share": None}) for row in _levels(engine, times)]
        values["floor"] = {"ceilings": ceilings.name, **step_floor(engine.plan.nodes, ceilings).as_dict()}
    return values
