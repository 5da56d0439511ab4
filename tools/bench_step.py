"""Time of a captured step: on the device, on the host, and without the graph.

    python tools/bench_step.py --model aux --batch 64 256 1024 4096 --device cuda:0 --output bench.json

Prints a table and, with --json, one JSON object last. Columns:

    us_per_step     µs from one replay to the next in a queue that is kept full (device events)
    uncaptured_us   the same, launch by launch without a graph
    host_us         µs that the host spends in `engine.step()` while the queue is not full; every call writes its
                    signal row, as after a change of a signal
    launch_us       µs that the host spends per uncaptured launch
    depth, nodes    of the captured graph

Each time is the median of five batches of steps after a warm-up. The step trains on random rows that lie on the device,
gathered by the step itself. On the simulated device the tool runs a few steps, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import numpy as np
from numpy.typing import NDArray

from fxengine import Device, DeviceNotFound, Engine, StepConfig
from fxengine.signals import RING_ROWS
from tools.digest import origin, source_digest

BATCHES = (64, 256, 1024, 4096)
PRECISION = "fp32"
SIMULATED = "simulated device: the times say nothing about a GPU"


@dataclass(frozen=True)
class Effort:
    """How much to measure.

    Attributes:
        samples: batches of steps per number; their median counts.
        steps: replays per batch of the device times.
        queued: replays per batch of the host times; fewer than the rows of the signal ring, so that none waits.
        uncaptured: uncaptured steps per batch. Few: the driver's own queue holds about a thousand launches.
    """

    samples: int = 5
    steps: int = 200
    queued: int = 50
    uncaptured: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.queued < RING_ROWS:
            raise ValueError(f"queued = {self.queued}: it must be in [1, {RING_ROWS - 1}], so that no step waits")


QUICK = Effort(samples=1, steps=2, queued=2, uncaptured=1)


def _aux(batch: int) -> StepConfig:
    return StepConfig.aux_only(batch=batch)


#: Steps that can be timed, by name: batch size -> configuration.
MODELS: dict[str, Callable[[int], StepConfig]] = {"aux": _aux}


def random_rows(config: StepConfig, rows: int = 8192, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Resident data of the step: normal states, labels of every class and some masked ones. Never zeros."""
    random = np.random.default_rng(seed)
    return {
        "state": random.standard_normal((rows, config.state), dtype=np.float32),
        "nb_label": random.integers(-1, 2, rows, dtype=np.int32),
        "regime_label": random.integers(-1, config.regimes, rows, dtype=np.int32),
    }


def device_us(engine: Engine, step: Callable[[], None], steps: int, samples: int) -> float:
    """µs per step between two events around `steps` calls, median of `samples` after one uncounted batch."""
    times = []
    with engine.device.event(timing=True) as start, engine.device.event(timing=True) as stop:
        for _ in range(samples + 1):
            start.record(stream=engine.stream)
            for _ in range(steps):
                step()
            stop.record(stream=engine.stream)
            stop.synchronize()
            times.append(stop.elapsed_ms(start) * 1e3 / steps)
    return round(median(times[1:]), 3)


def host_us(engine: Engine, step: Callable[[], None], steps: int, samples: int) -> float:
    """µs of host time per call, median of `samples` after one uncounted batch; the queue is empty at the start."""
    times = []
    for sample in range(samples + 1):
        engine.synchronize()
        # Every row of the ring is now out of date: each of the calls below writes one.
        engine.signals["lr"] = 1e-4 * (1 + sample % 2)
        start = time.perf_counter_ns()
        for _ in range(steps):
            step()
        times.append((time.perf_counter_ns() - start) / 1e3 / steps)
    engine.synchronize()
    return round(median(times[1:]), 3)


def bench_row(model: str, batch: int, device: Device, effort: Effort) -> dict[str, Any]:
    """Every number of one model at one batch size.

    Raises:
        RuntimeError: a step was skipped (a gradient was not finite): its time would not be that of a step.
    """
    config = MODELS[model](batch)
    with Engine(config, device=device, precision=PRECISION, data=random_rows(config)) as engine:

        def uncaptured() -> None:
            engine.step(captured=False)

        census = engine.graph.census()
        launches = sum(census.nodes.values())
        row = {
            "model": model,
            "batch": batch,
            "precision": PRECISION,
            "us_per_step": device_us(engine, engine.step, effort.steps, effort.samples),
            "uncaptured_us": device_us(engine, uncaptured, effort.uncaptured, effort.samples),
            "host_us": host_us(engine, engine.step, effort.queued, effort.samples),
            "launch_us": round(host_us(engine, uncaptured, min(effort.uncaptured, 20), effort.samples) / launches, 3),
            "depth": census.depth,
            "nodes": launches,
            "nodes_by_type": census.nodes,
        }
        engine.synchronize()
        report = engine.telemetry()
        if report is None or report.skipped:
            raise RuntimeError(f"{model} at batch {batch}: steps were skipped or none ran, got {report}")
    return row


def bench(
    device: Device, models: Sequence[str] = ("aux",), batches: Sequence[int] = BATCHES, effort: Effort | None = None
) -> list[dict[str, Any]]:
    """One row per model and batch size; the effort defaults to what the device is worth."""
    chosen = effort or (QUICK if device.kind == "sim" else Effort())
    return [bench_row(model, batch, device, chosen) for model in models for batch in batches]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    columns = ("model", "batch", "precision", "us_per_step", "uncaptured_us", "host_us", "launch_us", "depth", "nodes")
    lines = [" ".join(f"{column:>13}" for column in columns)]
    for row in rows:
        cells = (f"{value:.2f}" if isinstance(value := row[column], float) else str(value) for column in columns)
        lines.append(" ".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time of a captured step on the device and on the host.")
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["aux"])
    parser.add_argument(
        "--batch", nargs="+", type=int, default=list(BATCHES), help="batch sizes (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--output", type=Path, help="write the JSON to this file as well")
    options = parser.parse_args(argv)

    try:
        device = Device.open(options.device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with device:
        note = SIMULATED if device.kind == "sim" else None
        rows = bench(device, options.model, options.batch)
        result = {"digest": source_digest(), **origin(device), "note": note, "bench": rows}
    print(f"{result['device']['name']} ({result['device']['arch']})")
    print(table(rows))
    if note:
        print(f"note: {note}")
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
