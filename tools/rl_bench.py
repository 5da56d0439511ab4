"""Time of learning CartPole-v1 by DQN with the settings that CleanRL publishes, environment included.

    python tools/rl_bench.py --device cuda:0 --output rl.json
    python tools/rl_bench.py --device cuda:0 --steps 100000 --peers torch-captured jax

The unit of work is 500,000 environment steps with 49,000 updates of 128 transitions between them; --steps shortens it.
Times fxengine and beside it loops in PyTorch and JAX (tools/peers/dqn.py), each in a process of its own on the same
machine. Columns:

    steps_per_s, updates_per_s   environment steps and updates per second, of the whole loop
    us_per_step                  µs per environment step with its share of an update
    setup_s                      s before the first step: capture or compilation
    return_last_20               mean return of the last 20 episodes: whether all of them learn the same task

The row `environment` steps the environment with random actions alone: no learner can be faster.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import numpy as np

from fxengine import Device, DeviceNotFound
from fxengine.rl.settings import TrainConfig
from tools.digest import ROOT, origin, source_digest

STEPS = 500_000
PEERS = ("torch-eager", "torch-captured", "jax")
SIMULATED = "simulated device: its times say nothing about a GPU"


def bench(device: Device, config: TrainConfig, steps: int, *, seed: int, precision: str) -> dict[str, Any]:
    """The row of fxengine."""
    from fxengine.rl.trainer import Trainer

    start = time.perf_counter()
    with Trainer(
        "CartPole-v1", "dqn", total_steps=steps, seed=seed, device=device, precision=precision, config=config
    ) as trainer:
        setup = time.perf_counter() - start
        trainer.advance(steps)
        result = trainer.result()
    return {
        "by": f"fxengine {device.label} {precision}",
        "steps": result.steps,
        "updates": result.updates,
        "seconds": result.seconds,
        "setup_s": setup,
        "return_last_20": result.last_return if result.returns else None,
    }


def bench_environment(steps: int, *, seed: int) -> dict[str, Any]:
    """The row of the environment alone, at most 100,000 steps of it."""
    import gymnasium

    count = min(steps, 100_000)
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=seed)
    actions = np.random.default_rng(seed).integers(0, 2, count).tolist()
    start = time.perf_counter()
    for action in actions:
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return {"by": "environment", "steps": count, "updates": 0, "seconds": time.perf_counter() - start}


def run_peer(name: str, config: TrainConfig, steps: int, *, device: str, python: str, seed: int) -> Any:
    """The row of a peer, from a process of its own; a line that says why there is none.

    Raises:
        RuntimeError: its process failed; its output, printed above, says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [python, "-m", "tools.peers.dqn", name, str(output), "--device", device, "--steps", str(steps)]
        command += ["--learning-starts", str(config.learning_starts), "--seed", str(seed)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status or not output.is_file():
            raise RuntimeError(f"{name} on {device} ended with status {status}; its output above says why")
        return json.loads(output.read_text(encoding="utf-8"))


def rated(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its rates."""
    seconds = row["seconds"]
    return {
        **row,
        "seconds": round(seconds, 2),
        "setup_s": round(row.get("setup_s", 0.0), 2),
        "steps_per_s": round(row["steps"] / seconds, 1),
        "updates_per_s": round(row["updates"] / seconds, 1),
        "us_per_step": round(1e6 * seconds / row["steps"], 2),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, the fastest first."""
    columns = (
        "by", "steps", "updates", "seconds", "us_per_step", "steps_per_s", "updates_per_s", "setup_s", "return_last_20",
    )  # fmt: skip
    width = {"by": 26}
    lines = [" ".join(f"{column:>{width.get(column, 14)}}" for column in columns)]
    for row in sorted(rows, key=lambda row: row["us_per_step"]):
        cells = ("-" if row.get(column) is None else row[column] for column in columns)
        lines.append(" ".join(f"{x:>{width.get(c, 14)}}" for c, x in zip(columns, cells, strict=True)))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time of learning CartPole-v1 by DQN, environment included.")
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="environment steps (default: %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="default: all; none: ours alone")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the frameworks")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the rows as JSON, after every one")
    options = parser.parse_args(argv)
    if options.steps < 100:
        parser.error(f"--steps {options.steps}: at least 100")
    try:
        device = Device.open(options.device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # A shortened run has fewer updates, but in the same proportion.
    config = TrainConfig(learning_starts=min(10_000, options.steps // 50))
    rows: list[dict[str, Any]] = []
    failed = False
    with device:
        source = {"digest": source_digest(), **origin(device), "note": SIMULATED if device.kind == "sim" else None}

        def note(row: Mapping[str, Any]) -> None:
            rows.append(rated(row))
            if options.output:
                options.output.write_text(json.dumps({**source, "rl": rows}, indent=1) + "\n", encoding="utf-8")

        note(bench_environment(options.steps, seed=options.seed))
        note(bench(device, config, options.steps, seed=options.seed, precision=options.precision))
    peers = [(name, place) for name in options.peers for place in _places(name, device.kind)]
    for name, place in peers:
        try:
            found = run_peer(name, config, options.steps, device=place, python=options.python, seed=options.seed)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            failed = True
            continue
        if isinstance(found, str):
            print(f"{name}: {found}")
        else:
            note(found)
    print(table(rows))
    if source["note"]:
        print(f"note: {source['note']}")
    return 1 if failed else 0


def _places(peer: str, kind: str) -> tuple[str, ...]:
    """Where a peer is timed. Operation by operation a small network may well be faster on the CPU."""
    if kind == "sim":
        return () if peer == "torch-captured" else ("cpu",)
    return ("cpu", "cuda") if peer == "torch-eager" else ("cuda",)


if __name__ == "__main__":
    sys.exit(main())
