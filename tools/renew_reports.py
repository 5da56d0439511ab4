"""Renew every report on a GPU, with one command and within a given time.

    python tools/renew_reports.py --device cuda:0 --limit-s 900
    python tools/renew_reports.py --only compile peers report tests      # some of the phases
    python tools/renew_reports.py --list

The phases run one after another, each in processes of its own that are killed, with all that they started, when their
time is over; one that fails does not stop the others, and what it wrote until then stays. The most important come
first. JAX takes a minute to compile each step, so `compile` does that for all batch sizes side by side, into a cache
that `peers` reads. `tests` completes the report of `report`, also in another run.

Writes <phase>.log and the phases' JSON into the folder (default: reports). Exit status 1 if a phase failed or was
stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from tools.bench_peers import BATCHES, GOLDEN, start_group, stop_group
from tools.digest import ROOT

#: Processes that the tests may use.
_TEST_JOBS = max(1, (os.cpu_count() or 1) - 2)
#: Of the learning benchmark: environment steps, a share of its unit of work, for all competitors alike; numbers of
#: environments; seconds for each peer.
_RL = ("--steps", "40000", "--envs", "1", "16", "--limit-s", "25")


@dataclass(frozen=True)
class Phase:
    """Commands that run side by side.

    Attributes:
        name: of the phase and its log.
        limit_s: seconds after which they are stopped.
        commands: arguments of the Python interpreter.
        environment: variables besides those of this process.
    """

    name: str
    limit_s: float
    commands: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str]


def phases(device: str, folder: Path, cache: Path) -> list[Phase]:
    """All phases, the most important first."""

    def tool(name: str, *arguments: str) -> tuple[str, ...]:
        return (str(ROOT / "tools" / f"{name}.py"), *arguments)

    def out(name: str) -> str:
        return str(folder / name)

    jax = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    sizes = [str(batch) for batch in BATCHES]

    def compiles(variant: str, batch: str) -> tuple[str, ...]:
        checked = ("--check", str(GOLDEN / "golden_full.npz")) if batch == sizes[0] else ("--unchecked",)
        common = ("--variant", variant, "--device", "cuda", "--precision", "tf32", "--time", batch)
        return ("-m", "tools.peers.jax_step", *common, *checked)

    warm = tuple(compiles(variant, batch) for variant in ("step", "scan") for batch in sizes)
    peers = ("--peers", "torch-captured", "jax", "jax-scan", "--limit-s", "60")
    report = ("--model", "aux", "step", "--precision", "tf32", "--output", out("h200.json"))
    on = ("--device", device)
    return [
        Phase("compile", 240, warm, {**jax, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        Phase("peers", 150, (tool("bench_peers", *peers, "--files", "full", "--output", out("peers.json")),), jax),
        Phase("report", 60, (tool("gpu_report", *on, *report, "--peers", out("peers.json"), "--skip-tests"),), {}),
        Phase(
            "tests",
            240,
            (tool("gpu_report", *on, "--tests-only", "--output", out("h200.json"), "--", "-n", str(_TEST_JOBS)),),
            {},
        ),
        Phase("rl", 155, (tool("rl_bench", *on, *_RL, "--output", out("rl_h200.json")),), {}),
        Phase("market", 40, (tool("market_bench", *on, "--json", out("market_h200.json")),), {}),
        Phase("act", 120, (tool("bench_act", *on, "--limit-s", "40", "--json", out("act_h200.json")),), {}),
        Phase("cost", 60, (tool("bench_cost", *on, "--output", out("cost_h200.json")),), {}),
        Phase(
            "paired",
            200,
            tuple(
                tool("paired_reference", *on, "--agent", agent, "--output", out(f"paired_{agent}_h200.json"))
                for agent in ("dqn", "c51", "iqn")
            ),
            {},
        ),
    ]


def run(phase: Phase, log: Path, limit_s: float) -> str:
    """Run a phase; returns `done`, `failed` or `stopped`."""
    environment = {**os.environ, **phase.environment, "PYTHONUNBUFFERED": "1"}
    end = time.monotonic() + limit_s
    with log.open("w", encoding="utf-8") as output:
        running = []
        try:
            for command in phase.commands:
                running.append(start_group([sys.executable, *command], environment, output))
            while any(process.poll() is None for process in running):
                if time.monotonic() > end:
                    return "stopped"
                time.sleep(0.2)
        finally:
            for process in running:
                stop_group(process)
    return "failed" if any(process.returncode for process in running) else "done"


def run_all(
    chosen: Sequence[Phase], folder: Path, limit_s: float, say: Callable[[str], None] = print
) -> dict[str, str]:
    """Run phases one after another within the time; returns what became of each."""
    start = time.monotonic()
    outcome: dict[str, str] = {}
    for phase in chosen:
        left = limit_s - (time.monotonic() - start)
        begun = time.monotonic()
        outcome[phase.name] = (
            run(phase, folder / f"{phase.name}.log", min(phase.limit_s, left)) if left > 0 else "no time left"
        )
        say(f"{phase.name}: {outcome[phase.name]} after {time.monotonic() - begun:.0f} s")
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    names = [phase.name for phase in phases("", Path(), Path())]
    parser = argparse.ArgumentParser(description="Renew every report on a GPU.")
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    parser.add_argument("--limit-s", type=float, default=900.0, metavar="S", help="seconds for all (default: 900)")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PHASE", help="default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "reports", help="folder (default: reports)")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/fxengine-jax"), help="JAX's (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the phases and end")
    options = parser.parse_args(argv)
    chosen = [p for p in phases(options.device, options.output.resolve(), options.cache) if p.name in options.only]
    if options.list:
        for phase in chosen:
            print(f"{phase.name:>8}  up to {phase.limit_s:.0f} s, {len(phase.commands)} at a time")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    if "peers" in options.only:  # times of an earlier run must not stand beside those of this one
        (options.output / "peers.json").write_text("[]\n", encoding="utf-8")
    outcome = run_all(chosen, options.output, options.limit_s)
    return 0 if all(result == "done" for result in outcome.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
