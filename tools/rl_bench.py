"""Time of learning CartPole-v1 by DQN with the settings that CleanRL publishes, environment included.

    python tools/rl_bench.py --device cuda:0 --output rl.json
    python tools/rl_bench.py --device cuda:0 --steps 100000 --peers torch-captured jax
    python tools/rl_bench.py --device cuda:0 --envs 1 16 --limit-s 60

The unit of work is 500,000 environment steps with 49,000 updates of 128 transitions between them; --steps shortens it.
Times fxengine and beside it loops in PyTorch and JAX (tools/peers/dqn.py), each in a process of its own on the same
machine. With --envs N > 1 all of them drive the same Gymnasium vector environment (tools/peers/cartpole.py): a step of
it is N environment steps and one call for N actions; the updates per environment step stay. With --limit-s a peer is
stopped after so many seconds, which is said and is no failure. Columns:

    envs                         environments N
    steps_per_s, updates_per_s   environment steps and updates per second, of the whole loop
    us_per_step                  µs per environment step with its share of an update
    setup_s                      s before the first step: capture or compilation
    return_last_20               mean return of the last 20 episodes: whether all of them learn the same task

The row `environment` steps the environments with random actions alone: no learner can be faster.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import gymnasium
import numpy as np

from fxengine import Device, DeviceNotFound
from fxengine.rl.settings import TrainConfig
from tools.bench_peers import group_status
from tools.digest import origin, source_digest
from tools.peers.cartpole import KINDS, make

STEPS = 500_000
#: The most important first: time may be short.
PEERS = ("torch-captured", "jax", "torch-eager")
SIMULATED = "simulated device: its times say nothing about a GPU"


@dataclass(frozen=True)
class Work:
    """What everybody is timed with.

    Attributes:
        steps: environment steps of all environments together.
        seed: of everything random.
        envs: environments N.
        vector: kind of the vector environment, for N > 1.
    """

    steps: int
    seed: int = 1
    envs: int = 1
    vector: str = "sync"

    @property
    def config(self) -> TrainConfig:
        """The published settings; a shortened run has fewer updates, but in the same proportion."""
        return TrainConfig(learning_starts=min(10_000, self.steps // 50))

    def environment(self) -> Any:
        """The environment, made anew."""
        return gymnasium.make("CartPole-v1") if self.envs == 1 else make(self.envs, self.vector)


def bench(device: Device, work: Work, *, precision: str) -> dict[str, Any]:
    """The row of fxengine."""
    from fxengine.rl.trainer import Trainer

    start = time.perf_counter()
    with Trainer(
        work.environment(),
        "dqn",
        total_steps=work.steps,
        envs=work.envs,
        seed=work.seed,
        device=device,
        precision=precision,
        config=work.config,
    ) as trainer:
        setup = time.perf_counter() - start
        trainer.advance(work.steps)
        result = trainer.result()
    return {
        "by": f"fxengine {device.label} {precision}",
        "envs": work.envs,
        "steps": result.steps,
        "updates": result.updates,
        "seconds": result.seconds,
        "setup_s": setup,
        "return_last_20": result.last_return if result.returns else None,
    }


def bench_environment(work: Work) -> dict[str, Any]:
    """The row of the environments alone, at most 100,000 steps of them."""
    env = work.environment()
    env.reset(seed=work.seed)
    rng, turns = np.random.default_rng(work.seed), -(-min(work.steps, 100_000) // work.envs)
    if work.envs == 1:
        actions = rng.integers(0, 2, turns).tolist()
        start = time.perf_counter()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
    else:
        together = rng.integers(0, 2, (turns, work.envs))
        start = time.perf_counter()
        for row in together:
            env.step(row)
    seconds = time.perf_counter() - start
    return {"by": "environment", "envs": work.envs, "steps": turns * work.envs, "updates": 0, "seconds": seconds}


def run_peer(name: str, work: Work, *, device: str, python: str, limit_s: float | None = None) -> Any:
    """The row of a peer, from a process of its own; a line that says why there is none.

    Raises:
        RuntimeError: its process failed; its output, printed above, says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "row.json"
        command = [python, "-m", "tools.peers.dqn", name, str(output), "--device", device, "--steps", str(work.steps)]
        command += ["--learning-starts", str(work.config.learning_starts), "--seed", str(work.seed)]
        command += ["--envs", str(work.envs), "--vector", work.vector]
        status = group_status(command, os.environ, limit_s)
        if status is None:
            return f"stopped after {limit_s:g} s"
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
    """The rows as text, the fastest of each number of environments first."""
    columns = (
        "by", "envs", "steps", "updates", "seconds", "us_per_step", "steps_per_s", "updates_per_s", "setup_s",
        "return_last_20",
    )  # fmt: skip
    width = {"by": 26, "envs": 6}
    lines = [" ".join(f"{column:>{width.get(column, 14)}}" for column in columns)]
    for row in sorted(rows, key=lambda row: (row.get("envs", 1), row["us_per_step"])):
        cells = ("-" if row.get(column) is None else row[column] for column in columns)
        lines.append(" ".join(f"{x:>{width.get(c, 14)}}" for c, x in zip(columns, cells, strict=True)))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time of learning CartPole-v1 by DQN, environment included.")
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=STEPS, help="environment steps (default: %(default)s)")
    parser.add_argument("--envs", type=int, nargs="+", default=[1], metavar="N", help="environments (default: 1)")
    parser.add_argument("--vector", choices=KINDS, default="sync", help="kind of N > 1 (default: %(default)s)")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="default: all; none: ours alone")
    parser.add_argument("--limit-s", type=float, metavar="S", help="stop a peer after so many seconds (default: none)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the frameworks")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="write the rows as JSON, after every one")
    options = parser.parse_args(argv)
    if options.steps < 100:
        parser.error(f"--steps {options.steps}: at least 100")
    works = [Work(options.steps, options.seed, envs, options.vector) for envs in options.envs]
    if bad := [work.envs for work in works if work.envs < 1 or work.config.buffer % work.envs]:
        parser.error(f"--envs {bad[0]}: must divide the {works[0].config.buffer} transitions that the replay holds")
    try:
        device = Device.open(options.device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    failed = False
    with device:
        source = {"digest": source_digest(), **origin(device), "note": SIMULATED if device.kind == "sim" else None}

        def note(row: Mapping[str, Any] | str) -> None:
            if isinstance(row, str):
                print(row, flush=True)
                left_out.append(row)
            else:
                rows.append(rated(row))
            if options.output:
                report = {**source, "rl": rows, "left_out": left_out}
                options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

        for work in works:
            note(bench_environment(work))
            note(bench(device, work, precision=options.precision))
    for name in options.peers:
        for place, work in product(_places(name, device.kind), works):
            try:
                found = run_peer(name, work, device=place, python=options.python, limit_s=options.limit_s)
            except RuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                failed = True
                continue
            note(f"{name} {place}, envs {work.envs}: {found}" if isinstance(found, str) else found)
    print(table(rows))
    if source["note"]:
        print(f"note: {source['note']}")
    return 1 if failed else 0


def _places(peer: str, kind: str) -> tuple[str, ...]:
    """Where a peer is timed. A small network may well be faster on the CPU."""
    if kind == "sim":
        return () if peer == "torch-captured" else ("cpu",)
    return {"jax": ("cuda", "cpu"), "torch-eager": ("cpu", "cuda")}.get(peer, ("cuda",))


if __name__ == "__main__":
    sys.exit(main())
