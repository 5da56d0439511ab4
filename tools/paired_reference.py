"""Training runs in pairs: the same batches through fxengine and through the float64 reference, and what differs.

    python tools/paired_reference.py --device cuda:0 --output paired.json --plot paired.png
    python tools/paired_reference.py --device sim --agent full --batches 100

4,000 transitions of CartPole-v1 under random actions lie in a replay on the device. The engine draws its batches from
it inside the captured step; each is read back and given to the NumPy reference (tests/rl/steps.py, for `full`
tests/reference), which began with the same parameters and goes on with its own. Settings are the defaults of
`fxengine.rl.train`, those of CleanRL, with the network copied to the target after every 50 batches. What is read back
must also be, bit for bit, what was inserted at the places that the random numbers of the draw say.

After 10 batches, after 100 and at the end:

    largest     largest difference of a parameter
    relative    largest difference relative to the largest parameter of its tensor
    drift       distance between both sets of parameters over the distance that the reference has come, both L2

and of every loss:

    apart       largest relative difference of the moving averages over 50 batches
    last        relative difference of the means over the last 100 batches

`drift` and `apart` have limits. In float32 they are several times what rounding makes of two runs that are both right,
and after 10 and 100 batches a fifth to a half of what a learning rate makes of them that is wrong by 5 %;
tests/rl/paired.py has the measurements and the reasons, and tests/rl/test_paired.py shows that wrong runs fail. In tf32
and bf16 they notice gross faults alone. A single parameter has no limit: one rounding at a ReLU may move it by many
learning rates.

Exit status: 0 if every agent is within the limits, 1 if not, 2 if the device is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from fxengine import Device, DeviceNotFound
from fxengine.rl.settings import ALGORITHMS, TrainConfig
from tests.rl.paired import WINDOW, Limits, Outcome, limits_of, run_pair
from tools.bench_step import PRECISIONS
from tools.digest import origin, source_digest


def report(outcome: Outcome, limits: Limits) -> dict[str, Any]:
    """What the file says of a pair."""
    faults = outcome.faults(limits)
    return {
        "passed": not faults,
        "faults": faults,
        "limits": vars(limits),
        "copies": outcome.copies,
        "foreign_rows": outcome.foreign,
        "parameters": [vars(gap) for gap in outcome.gaps],
        "losses": {
            name: {"apart": curves.apart, "last": curves.last, **vars(curves)}
            for name, curves in outcome.curves.items()
        },
    }


def table(agent: str, outcome: Outcome, limits: Limits) -> str:
    """The numbers of a pair as text."""
    lines = [f"{agent:<14}{'largest':>10}{'relative':>10}{'drift':>10}{'limit':>10}"]
    for gap in outcome.gaps:
        numbers = (gap.largest, gap.relative, gap.drift, limits.drift(gap.batches))
        lines.append(f"{f'after {gap.batches}':<14}" + "".join(f"{x:>10.1e}" for x in numbers))
    lines.append(f"{'':<14}{'apart':>10}{'limit':>10}{'last':>10}")
    for name, curves in outcome.curves.items():
        lines.append(f"{name:<14}{curves.apart:>10.1e}{limits.curve:>10.1e}{curves.last:>10.1e}")
    return "\n".join(lines)


def plot(path: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Draw both curves of every loss as a PNG, every batch and the moving averages, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(f"{agent} {name}", curves) for agent, found in outcomes.items() for name, curves in found.curves.items()]
    figure = Figure(figsize=(10, 0.5 + 2.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (label, curves) in zip(axes, panels, strict=True):
        window = min(WINDOW, len(curves.engine))
        ends = range(window, len(curves.engine) + 1)
        engine, reference = curves.averages(window)
        axis.plot(range(1, len(curves.reference) + 1), curves.reference, color="tab:blue", alpha=0.2, linewidth=0.5)
        axis.plot(range(1, len(curves.engine) + 1), curves.engine, color="tab:orange", alpha=0.2, linewidth=0.5)
        axis.plot(ends, reference, color="tab:blue", linewidth=4.0, alpha=0.5, label="float64 reference")
        axis.plot(ends, engine, color="tab:orange", linewidth=1.2, label="fxengine")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="upper right")
    axes[-1].set_xlabel("batch")
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Training runs on the same batches, by fxengine and in float64.")
    parser.add_argument("--agent", nargs="+", choices=ALGORITHMS, default=["dqn", "c51", "iqn"])
    parser.add_argument("--batches", type=int, default=1_000, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=TrainConfig.batch, help="transitions (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outcome as JSON, after every agent")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loss curves as a PNG")
    options = parser.parse_args(argv)
    for name in ("batches", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: at least 1")
    try:
        device = Device.open(options.device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = TrainConfig(batch=options.batch)
    asked = {name: getattr(options, name) for name in ("batches", "precision", "seed")}
    outcomes: dict[str, Outcome] = {}
    reports: list[dict[str, Any]] = []
    with device:
        source = {"digest": source_digest(), **origin(device), **asked, "config": json.loads(config.to_json())}
        print(f"{source['device']['name']} ({source['device']['arch']}), {asked}")
        for agent in options.agent:
            started = time.perf_counter()
            outcomes[agent] = outcome = run_pair(device, agent, config, **asked)
            seconds = time.perf_counter() - started
            limits = limits_of(agent, options.precision)
            reports.append({"agent": agent, **report(outcome, limits), "seconds": round(seconds, 1)})
            print(table(agent, outcome, limits))
            print(
                f"{agent}: {outcome.copies} copies to the target, {outcome.foreign} foreign rows, {seconds:.0f} s: "
                + ("; ".join(reports[-1]["faults"]) or "passed"),
                flush=True,
            )
            if options.output:
                text = json.dumps({**source, "agents": reports}, indent=1)
                options.output.write_text(text + "\n", encoding="utf-8")
    if options.plot:
        plot(options.plot, outcomes)
    return 0 if all(row["passed"] for row in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
