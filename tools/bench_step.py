"""Time of a captured step: on the device, on the host, and without the graph.

    python tools/bench_step.py --model aux --batch 64 256 1024 4096 --device cuda:0 --output bench.json
    python tools/bench_step.py --model step --precision tf32 --peers --output bench.json

Prints a table and, with --json, one JSON object last. Columns:

    us_per_step     µs from one replay to the next in a queue that is kept full (device events)
    host_us         µs that the host spends in `engine.step()` while the queue is not full
    depth, nodes    of the captured graph
    floor_us        what the step's products, bytes and depth take at least (fxengine/graphs/floor.py): at the ceilings
                    of an H200, or with --measure-floor at those that this device shows now
    share           floor over time: 1 is as fast as the program can be
    best_peer       with --peers: the fastest of PyTorch and JAX on the same step (tools/bench_peers.py)
    ratio           its time over ours

The JSON has more: uncaptured_us, the step launch by launch without a graph; launch_us, what the host spends per such
launch; changed_us and changed_host_us, both times with a learning rate set before each step; and what the floor is made
of.

Each time is the median of five batches of steps after a warm-up. The step trains on random rows that lie on the device,
gathered by the step itself. On the simulated device the tool runs a few steps, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from fxengine import Device, DeviceNotFound, Engine, StepConfig
from fxengine.graphs.floor import H200, Ceilings, step_floor, step_work
from fxengine.signals import RING_ROWS
from tools.bench_peers import MODEL as PEER_MODEL
from tools.bench_peers import PEERS, PeerError, load_peers, peers_of, run_peer
from tools.ceilings import measure as measure_ceilings
from tools.digest import origin, source_digest
from tools.peers.data import random_rows

BATCHES = (64, 256, 1024, 4096)
PRECISIONS = ("fp32", "tf32", "bf16")
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


def _step(batch: int) -> StepConfig:
    return StepConfig(batch=batch)


#: Steps that can be timed, by name: batch size -> configuration. The peers compute the whole step.
MODELS: dict[str, Callable[[int], StepConfig]] = {"aux": _aux, PEER_MODEL: _step}


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
    for _ in range(samples + 1):
        engine.synchronize()
        start = time.perf_counter_ns()
        for _ in range(steps):
            step()
        times.append((time.perf_counter_ns() - start) / 1e3 / steps)
    engine.synchronize()
    return round(median(times[1:]), 3)


def floor_of(engine: Engine, ceilings: Ceilings) -> dict[str, Any]:
    """The floor of an engine's step: its time and parts, the work, and whose ceilings they are."""
    nodes = engine.plan.nodes
    work = step_work(nodes)
    counted = {"flop": work.total_flop, "bytes": work.nbytes, "ceilings": ceilings.name}
    return {**step_floor(nodes, ceilings).as_dict(), **counted}


def bench_row(
    model: str, batch: int, device: Device, effort: Effort, precision: str = "fp32", ceilings: Ceilings = H200
) -> dict[str, Any]:
    """Every number of one model at one batch size.

    Raises:
        RuntimeError: a step was skipped (a gradient was not finite): its time would not be that of a step.
    """
    config = MODELS[model](batch)
    with Engine(config, device=device, precision=precision, data=random_rows(config)) as engine:
        rates = cycle((1e-4, 2e-4))

        def changed() -> None:
            engine.signals["lr"] = next(rates)
            engine.step()

        def uncaptured() -> None:
            engine.step(captured=False)

        census = engine.graph.census()
        launches = sum(census.nodes.values())
        row = {
            "model": model,
            "batch": batch,
            "precision": precision,
            "us_per_step": device_us(engine, engine.step, effort.steps, effort.samples),
            "uncaptured_us": device_us(engine, uncaptured, effort.uncaptured, effort.samples),
            "host_us": host_us(engine, engine.step, effort.queued, effort.samples),
            # the same with a learning rate set before each step
            "changed_us": device_us(engine, changed, effort.steps, effort.samples),
            "changed_host_us": host_us(engine, changed, effort.queued, effort.samples),
            "launch_us": round(host_us(engine, uncaptured, min(effort.uncaptured, 20), effort.samples) / launches, 3),
            "depth": census.depth,
            "nodes": launches,
            "nodes_by_type": census.nodes,
            "floor": floor_of(engine, ceilings),
        }
        engine.synchronize()
        report = engine.telemetry()
        if report is None or report.skipped:
            raise RuntimeError(f"{model} at batch {batch}: steps were skipped or none ran, got {report}")
    return row


def bench(
    device: Device,
    models: Sequence[str] = ("aux",),
    batches: Sequence[int] = BATCHES,
    effort: Effort | None = None,
    precision: str = "fp32",
    ceilings: Ceilings = H200,
) -> list[dict[str, Any]]:
    """One row per model and batch size; the effort defaults to what the device is worth."""
    chosen = effort or (QUICK if device.kind == "sim" else Effort())
    return [bench_row(model, batch, device, chosen, precision, ceilings) for model in models for batch in batches]


def peer_times(row: Mapping[str, Any], peers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """µs per step by peer on the step of this row; only the whole step has peers, others get an empty dict."""
    return peers_of(peers, row["batch"], row["precision"]) if row["model"] == PEER_MODEL else {}


def with_peers(row: Mapping[str, Any], times: Mapping[str, float]) -> dict[str, Any]:
    """The row with `peers` and `best_ratio`, the time of the fastest of them over ours (None without peers)."""
    return {**row, "peers": dict(times), "best_ratio": min(times.values()) / row["us_per_step"] if times else None}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, with the best peer where there are any."""
    columns = ["model", "batch", "precision", "us_per_step", "host_us", "nodes", "depth", "floor_us", "share"]
    if any(row.get("peers") for row in rows):
        columns += ["ratio", "best_peer"]
    lines = [" ".join(f"{column:>11}" for column in columns)]
    for row in rows:
        shown: dict[str, Any] = {**row, "ratio": "-", "best_peer": "-", "floor_us": "-", "share": "-"}
        if floor := row.get("floor"):
            shown |= {"floor_us": floor["us"], "share": floor["us"] / row["us_per_step"]}
        if times := row.get("peers"):
            best = min(times, key=lambda name: times[name])
            shown |= {"ratio": row["best_ratio"], "best_peer": f"{best} {times[best]:.1f}"}
        cells = (f"{value:.2f}" if isinstance(value := shown[column], float) else str(value) for column in columns)
        lines.append(" ".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


def _described(ceilings: Ceilings, precision: str) -> str:
    rate, bandwidth = ceilings.rates[precision] / 1e12, ceilings.bandwidth / 1e12
    costs = f"{ceilings.node_us} us per node of the depth, {ceilings.launch_us} us per launch"
    return f"{ceilings.name}: {rate:.0f} TFLOP/s in {precision}, {bandwidth:.2f} TB/s, {costs}"


def peer_rows(
    names: Sequence[str], *, batches: Sequence[int], device: str, precision: str, limit_s: float | None = None
) -> list[dict[str, Any]]:
    """Rows of peers: from a file, or measured now; one that fails is named on stderr and left out.

    Raises:
        ValueError: a name is neither a peer nor a file of tools/bench_peers.py.
    """
    if len(names) == 1 and names[0] not in PEERS:
        return load_peers(Path(names[0]))
    rows: list[dict[str, Any]] = []
    for name in names or PEERS:
        if name not in PEERS:
            raise ValueError(f"--peers {name}: expected one file, or some of {', '.join(PEERS)}")
        try:
            rows += run_peer(name, batches=batches, device=device, precision=precision, limit_s=limit_s)
        except PeerError as error:
            print(f"error: {error}", file=sys.stderr)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time of a captured step on the device and on the host.")
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["aux"])
    parser.add_argument(
        "--batch", nargs="+", type=int, default=list(BATCHES), help="batch sizes (default: %(default)s)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="NAME|FILE",
        help=f"compare with peers: a file of tools/bench_peers.py, or some of {', '.join(PEERS)}, to be timed now "
        "after ours (no value: all)",
    )
    parser.add_argument("--limit-s", type=float, metavar="S", help="stop a peer that is timed now after S seconds")
    parser.add_argument(
        "--measure-floor", action="store_true", help="measure the device's ceilings first (seconds), for the floor"
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
        try:
            ceilings = measure_ceilings(device, options.precision) if options.measure_floor else H200
        except ValueError as error:
            print(f"error: --measure-floor: {error}", file=sys.stderr)
            return 2
        rows = bench(device, options.model, options.batch, precision=options.precision, ceilings=ceilings)
        if options.peers is not None:
            kind = "cpu" if device.kind == "sim" else "cuda"
            wanted = {"batches": options.batch, "precision": options.precision, "limit_s": options.limit_s}
            peers = peer_rows(options.peers, device=kind, **wanted)
            rows = [with_peers(row, peer_times(row, peers)) for row in rows]
        result = {"digest": source_digest(), **origin(device), "note": note, "bench": rows}
    print(f"{result['device']['name']} ({result['device']['arch']})")
    print(table(rows))
    print(f"floor: {_described(ceilings, options.precision)}")
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
