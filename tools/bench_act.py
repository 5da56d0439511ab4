"""Latency of one decision: observations in a host array in, actions in a host array out.

    python tools/bench_act.py --device cuda:0 --json act.json
    python tools/bench_act.py --device cuda:0 --batch 1 64 --precision tf32 --peers torch-captured onnxruntime

Times `engine.act` (the default step, greedy) and `Acting.act` (a DQN's 48-120-84-4 as a function), and beside them the
same networks with the same weights in PyTorch, JAX and ONNX Runtime where they can be imported, each in a process of
its own; a peer whose values differ is an error. One that cannot be imported, or is stopped after --limit-s seconds, is
left out by name, and a stopped one is not started again for another network. Prints one table:

    p50, p99    µs per call, from the NumPy array that goes in to the NumPy array that comes out
    depth       fxengine: nodes on the longest path of the captured graph

On the simulated device the tool runs a few calls, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import numpy as np
from numpy.typing import NDArray

from fxengine import Device, DeviceNotFound, Engine, StepConfig
from fxengine.acting import Acting
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.train.groups import linear_specs
from tools.bench_peers import group_status
from tools.bench_step import PRECISIONS, SIMULATED
from tools.digest import origin, source_digest

BATCHES = (1, 16, 64, 256)
#: In this order. ONNX Runtime comes last: exporting a network for it can take minutes.
PEERS = ("torch-eager", "torch-captured", "jax", "onnxruntime")
#: How far values of a peer may differ from ours, by our precision; more rows than one launch takes follow it.
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2}
#: Widths of the small network.
DQN = (48, 120, 84, 4)
Arrays = dict[str, NDArray[Any]]


def latencies(call: Callable[[], object], calls: int, warmup: int) -> dict[str, float]:
    """p50 and p99 in µs of single calls, after a warm-up."""
    for _ in range(warmup):
        call()
    times = np.empty(calls)
    for i in range(calls):
        start = time.perf_counter_ns()
        call()
        times[i] = time.perf_counter_ns() - start
    return {f"p{p}": round(float(np.percentile(times, p)) / 1e3, 2) for p in (50, 99)}


# -- fxengine ----------------------------------------------------------------------------------------------------


def _layers() -> list[tuple[str, int, int]]:
    return [(str(i + 1), n, k) for i, (k, n) in enumerate(pairwise(DQN))]


def dqn_values(step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    """The small network on observations."""
    step.group("net", [spec for name, n, k in _layers() for spec in linear_specs(name, n, k)])
    x = state
    for name, n, _ in _layers():
        last = n == DQN[-1]
        x = step.tape.linear(x, f"w_{name}", f"b_{name}", activation="none" if last else "relu", name=f"layer{name}")
    return x


def dqn_step(step: StepBuilder) -> None:
    """Something to train it on: nothing here is timed."""
    step.signals.include("policy")
    rows = 32
    state, label = step.input("state", (rows, DQN[0])), step.input("label", (rows,), np.int32)
    logits = dqn_values(step, state, {})
    step.tape.crossentropy(logits, label, weight=step.signal("w_nb"), loss="loss", name="loss")


def open_model(model: str, device: Device, precision: str) -> tuple[Engine, Acting]:
    """An engine of the model, and what acts for it."""
    if model == "step":
        engine = Engine(StepConfig(), device=device, precision=precision)
        return engine, engine.acting
    engine = Engine(dqn_step, device=device, groups={0: "net"}, precision=precision)
    return engine, Acting(engine, dqn_values, branches=DQN[-1:])


def observations(model: str, rows: int) -> dict[str, Any]:
    """Random inputs of a call by name, observations first."""
    rng = np.random.default_rng(rows)
    config = StepConfig()
    widths = {"obs": config.state, "ofi": config.ofi} if model == "step" else {"obs": DQN[0]}
    return {name: rng.standard_normal((rows, width)).astype(np.float32) for name, width in widths.items()}


def bench_model(
    model: str, device: Device, batches: Sequence[int], precision: str, calls: int
) -> tuple[list[dict[str, Any]], Arrays]:
    """Rows of one model, and what its peers need: parameters, inputs and the values to agree with."""
    rows: list[dict[str, Any]] = []
    case: Arrays = {"tolerance": np.array(TOLERANCE[precision])}
    engine, acting = open_model(model, device, precision)
    with engine:
        case |= {f"param.{name}": value for name, value in engine.params.items()}
        for count in batches:
            inputs = observations(model, count)
            _, q = acting.act(**inputs, greedy=True, values=True)
            case |= {f"{count}.{name}": x for name, x in inputs.items()} | {f"{count}.q": q}
            graph = acting.prepare(count, greedy=True)

            def call(inputs: Mapping[str, Any] = inputs) -> object:
                return acting.act(**inputs, greedy=True)

            timed = latencies(call, calls, calls // 10 + 1)
            census = graph.census()
            rows.append({"model": model, "batch": count, "by": f"fxengine {precision}", **timed, "depth": census.depth})
    return rows, case


# -- peers -------------------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """A peer took too long."""


def run_peer(
    name: str, model: str, case: Arrays, *, device: str, calls: int, limit_s: float
) -> list[dict[str, Any]] | str:
    """Rows of one peer, from a process of its own; why there are none, if it cannot be imported.

    Raises:
        StoppedError: it was stopped at the limit, with all that it started.
        RuntimeError: it could not compute the values, or computed others; its output, printed above, says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        data, output = Path(folder) / "case.npz", Path(folder) / "rows.json"
        np.savez(data, allow_pickle=False, **case)
        command = [sys.executable, "-m", "tools.peers.acting", name, model, str(data), str(output)]
        command += ["--device", device, "--calls", str(calls)]
        status = group_status(command, os.environ, limit_s)
        if status is None:
            raise StoppedError(f"stopped after {limit_s:g} s")
        if status or not output.is_file():
            raise RuntimeError(f"{name} ended with status {status}; its output above says why")
        found: list[dict[str, Any]] | str = json.loads(output.read_text(encoding="utf-8"))
        return found


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, the fastest of each model and batch size marked."""
    columns = ("model", "batch", "by", "p50", "p99", "depth")
    lines = [" ".join(f"{column:>22}" if column == "by" else f"{column:>9}" for column in columns)]
    for row in sorted(rows, key=lambda row: (row["model"], row["batch"], row["p50"])):
        best = min(r["p50"] for r in rows if (r["model"], r["batch"]) == (row["model"], row["batch"])) == row["p50"]
        cells = [str(row.get(column, "-")) for column in columns]
        line = " ".join(f"{cell:>22}" if i == 2 else f"{cell:>9}" for i, cell in enumerate(cells))
        lines.append(line + (" <- best" if best else ""))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Latency of one decision, host array to host array.")
    parser.add_argument("--model", nargs="+", choices=("step", "dqn"), default=["step", "dqn"])
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="default: %(default)s")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="default: all; none: ours alone")
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--calls", type=int, help="calls per number (default: 2000; 3 on the simulated device)")
    parser.add_argument("--limit-s", type=float, default=60.0, metavar="S", help="seconds of a peer (default: 60)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON, after every peer")
    options = parser.parse_args(argv)
    try:
        device = Device.open(options.device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    with device:
        simulated = device.kind == "sim"
        calls = options.calls or (3 if simulated else 2000)
        source = {"digest": source_digest(), **origin(device), "note": SIMULATED if simulated else None}

        def note(found: list[dict[str, Any]] | str) -> None:
            if isinstance(found, str):
                print(found, flush=True)
                left_out.append(found)
            else:
                rows.extend(found)
            if options.json:
                text = json.dumps({**source, "act": rows, "left_out": left_out}, indent=1)
                options.json.write_text(text + "\n", encoding="utf-8")

        cases: dict[str, Arrays] = {}
        for model in options.model:
            ours, cases[model] = bench_model(model, device, options.batch, options.precision, calls)
            note(ours)
    failed = False
    for name in sorted(options.peers, key=PEERS.index):
        for model, case in cases.items():
            place = "cpu" if simulated else "cuda"
            try:
                found = run_peer(name, model, case, device=place, calls=calls, limit_s=options.limit_s)
            except StoppedError as stopped:
                note(f"{name}, {model}: {stopped}")
                break
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                failed = True
                continue
            note(f"{name}, {model}: {found}" if isinstance(found, str) else [{"model": model, **row} for row in found])
    print(f"{source['device']['name']} ({source['device']['arch']}), µs per call")
    print(table(rows))
    if source["note"]:
        print(f"note: {source['note']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
