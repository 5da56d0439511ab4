"""Learning gates: does an algorithm reach what is published for it, on several seeds, and do crippled ones fail?

    python tools/rl_gates.py --device cuda:0 --gate cartpole-dqn --seeds 1 2 3 4 5 --jobs 5 --output gates.json
    python tools/rl_gates.py --list

Every seed is a process of its own. Processes take turns on a GPU, so that several jobs are no faster than one, unless
NVIDIA's multi-process service runs (`nvidia-cuda-mps-control -d`).

A seed passes a gate if a greedy evaluation reaches each of its marks in time; a gate is passed if enough of its seeds
pass and, where it says so, the last evaluations of all seeds are good enough on average and at best. A control is a run
that must not learn: it holds if its gate is not passed. Settings are those that CleanRL publishes for DQN and C51
(Huang et al. 2022), for LunarLander those of the RL Baselines3 Zoo (Raffin 2020). Needs NumPy, cuda-bindings,
safetensors and Gymnasium.

Exit status: 0 if every gate is passed and every control holds, 1 if not, 2 if a seed could not be run.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import numpy as np
from numpy.typing import NDArray

from fxengine.rl.settings import Algorithm, TrainConfig
from tools.digest import ROOT, origin, source_digest

if TYPE_CHECKING:
    from fxengine.nets.builder import StepBuilder
    from fxengine.rl.agents import Agent
    from fxengine.rl.networks import Batch

#: Greedy episodes of the last evaluation, and of those before.
EPISODES, EARLY_EPISODES = 100, 20


@dataclass(frozen=True)
class Mark:
    """A mean return that an evaluation after at most so many steps must reach."""

    within: int
    mean: float


@dataclass(frozen=True)
class Gate:
    """What is trained, and what it has to reach.

    Attributes:
        env: environment.
        algorithm: its name.
        steps: environment steps.
        marks: the mean returns to reach. Only the last evaluation counts for a mark at the end.
        needed: share of the seeds that must pass.
        average: mean return over the last evaluations of all seeds that must be reached.
        best: mean return that the last evaluation of the best seed must reach.
        config: hyperparameters.
        evaluate_every: steps between early evaluations; 0: only at the end.
        control: must not pass.
        stuck: whether the random numbers are the same in every step: zeros for exploration, one draw for all batches.
    """

    env: str
    algorithm: str
    steps: int
    marks: tuple[Mark, ...]
    needed: float = 0.8
    average: float = -math.inf
    best: float = -math.inf
    config: TrainConfig = field(default_factory=TrainConfig)
    evaluate_every: int = 0
    control: bool = False
    stuck: bool = False


_CARTPOLE = Gate("CartPole-v1", "dqn", 500_000, (Mark(500_000, 475.0),))
_ZOO_LUNAR = TrainConfig(
    hidden=(256, 256), lr=6.3e-4, batch=128, buffer=50_000, learning_starts=0, train_every=4, updates=4,
    target_every=250, exploration=0.12, epsilon_end=0.1, loss="huber", clip=10.0,
)  # fmt: skip

GATES: Mapping[str, Gate] = {
    "cartpole-dqn": _CARTPOLE,
    "cartpole-c51": replace(_CARTPOLE, algorithm="c51"),
    "cartpole-iqn": replace(
        _CARTPOLE, algorithm="iqn", marks=(Mark(100_000, 195.0), Mark(500_000, 475.0)), evaluate_every=10_000
    ),
    "acrobot-dqn": Gate("Acrobot-v1", "dqn", 500_000, (Mark(500_000, -100.0),)),
    "acrobot-c51": Gate("Acrobot-v1", "c51", 500_000, (Mark(500_000, -100.0),)),
    "lunarlander-dqn": Gate("LunarLander-v3", "dqn", 100_000, (), average=150.0, best=200.0, config=_ZOO_LUNAR),
    "control-rate": replace(_CARTPOLE, config=TrainConfig(lr=0.0), control=True),
    "control-target": replace(_CARTPOLE, config=TrainConfig(tau=0.0), control=True),
    "control-stuck": replace(_CARTPOLE, control=True, stuck=True),
}


# -- one seed ------------------------------------------------------------------------------------------------------


def run_seed(gate: Gate, seed: int, *, device: str, steps: int, precision: str) -> dict[str, Any]:
    """Train and evaluate with one seed, in this process."""
    from fxengine.rl.trainer import Trainer

    algorithm: Algorithm = _stuck(gate, seed) if gate.stuck else gate.algorithm
    started = time.perf_counter()
    with Trainer(
        gate.env,
        algorithm,
        total_steps=steps,
        seed=seed,
        device=device,
        precision=precision,
        config=gate.config,
    ) as trainer:
        evaluations = []
        every = gate.evaluate_every or steps
        for step in range(every, steps + 1, every):
            trainer.advance(step)
            if step < steps:
                evaluations.append(trainer.evaluate(EARLY_EPISODES))
        trainer.advance(steps)
        evaluations.append(trainer.evaluate(EPISODES))
        result = trainer.result()
        last = evaluations[-1]
        return {
            "seed": seed,
            "mean": last.mean,
            "std": last.std,
            "episodes": EPISODES,
            "evaluations": [{"step": e.step, "mean": e.mean, "std": e.std} for e in evaluations],
            "training_return_last_20": None if math.isnan(result.last_return) else result.last_return,
            "passed": passes(gate, [(e.step, e.mean) for e in evaluations], steps),
            "updates": result.updates,
            "skipped": result.skipped,
            "steps_per_s": round(result.steps_per_s, 1),
            "updates_per_s": round(result.updates_per_s, 1),
            "training_s": round(result.seconds, 2),
            "seconds": round(time.perf_counter() - started, 2),
            "origin": origin(trainer.engine.device),
        }


def passes(gate: Gate, evaluations: Sequence[tuple[int, float]], steps: int) -> bool:
    """Whether every mark is reached. Marks of a shortened run are those of its own length."""

    def reached(mark: Mark) -> bool:
        within = min(steps, mark.within)
        counted = [(step, mean) for step, mean in evaluations if step <= within]
        if mark.within >= gate.steps and not gate.evaluate_every:
            counted = counted[-1:]
        return any(mean >= mark.mean for _, mean in counted)

    return all(map(reached, gate.marks))


def gate_passed(gate: Gate, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the seeds' outcomes pass the gate."""
    means = [row["mean"] for row in rows]
    enough = sum(row["passed"] for row in rows) >= math.ceil(gate.needed * len(rows))
    return enough and sum(means) / len(means) >= gate.average and max(means) >= gate.best


def _stuck(gate: Gate, seed: int) -> Algorithm:
    """From now on exploration draws zeros, and every batch comes from the same places of the replay."""
    from fxengine.graphs import CONSTANTS
    from fxengine.rl import exploration, trainer
    from fxengine.rl.agents import DqnAgent

    class StuckExploration(exploration.Exploration):
        def _numbers(self, block: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
            coins, actions = super()._numbers(block)
            return np.zeros_like(coins), np.zeros_like(actions)

    class StuckAgent(DqnAgent):
        def _begin(self, step: StepBuilder) -> Batch:
            counters = step.counters
            data = np.array([0, 0, 0, seed], np.uint64)
            step.counters = step.program.tensor("stuck", (4,), np.uint64, arena=CONSTANTS, data=data)
            batch = super()._begin(step)
            step.counters = counters
            return batch

    def stuck(state: int, branches: tuple[int, ...]) -> Agent:
        return StuckAgent(state, branches, gate.config.hidden, gate.config.batch)

    trainer.Exploration = StuckExploration  # type: ignore[misc]
    return stuck


# -- all of them ---------------------------------------------------------------------------------------------------


def run_gate(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the seeds of a gate side by side and judge it.

    Raises:
        RuntimeError: a seed's process failed; its output, printed above, says why.
    """
    gate = GATES[name]
    steps = options.steps or gate.steps
    started = time.perf_counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda seed: _process(name, seed, steps, options), options.seeds))
    places = [row.pop("origin") for row in rows]
    passed = sum(row["passed"] for row in rows)
    needed = math.ceil(gate.needed * len(rows))
    good = gate_passed(gate, rows)
    return {
        "gate": name,
        "env": gate.env,
        "algorithm": gate.algorithm,
        "steps": steps,
        "config": json.loads(gate.config.to_json()),
        "marks": [vars(mark) for mark in gate.marks],
        "average_needed": gate.average if math.isfinite(gate.average) else None,
        "best_needed": gate.best if math.isfinite(gate.best) else None,
        "control": gate.control,
        "precision": options.precision,
        "seeds": rows,
        "seeds_passed": passed,
        "seeds_needed": needed,
        "passed": good,
        "as_expected": good != gate.control,
        "jobs": options.jobs,
        "seconds": round(time.perf_counter() - started, 1),
        "digest": source_digest(),
        **places[0],
    }


def _process(name: str, seed: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """One seed in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seed.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--gate", name, "--seeds", str(seed), "--worker"]
        command += ["--device", options.device, "--precision", options.precision, "--steps", str(steps)]
        status = subprocess.run([*command, "--output", str(output)], cwd=ROOT, check=False).returncode
        if status or not output.is_file():
            raise RuntimeError(f"{name}, seed {seed}: ended with status {status}; its output above says why")
        row: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    print(f"  {name} seed {seed}: {describe(row)}", flush=True)
    return row


def describe(row: Mapping[str, Any]) -> str:
    """A seed's outcome in a line."""
    return (
        f"{row['mean']:.1f} ± {row['std']:.1f} over {row['episodes']} episodes, {row['steps_per_s']:,.0f} steps/s, "
        f"{row['updates_per_s']:,.0f} updates/s, {row['seconds']:.0f} s: {'passed' if row['passed'] else 'not passed'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Learning gates.")
    parser.add_argument(
        "--gate", nargs="+", choices=[*GATES, "all"], default=["cartpole-dqn"], help="default: %(default)s"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5], help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="environment steps instead of the gate's own")
    parser.add_argument("--output", type=Path, help="write the outcome as JSON, after every gate")
    parser.add_argument("--list", action="store_true", help="print the gates and end")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.list:
        for name, gate in GATES.items():
            wanted = [f"{mark.mean:g} within {mark.within:,}" for mark in gate.marks]
            wanted += [f"{gate.average:g} on average, {gate.best:g} at best"] * math.isfinite(gate.average)
            marks = ", ".join(wanted)
            print(f"{name:>16}  {gate.env}, {gate.algorithm}: {marks}{' (must fail)' if gate.control else ''}")
        return 0
    names = list(GATES) if "all" in options.gate else options.gate
    if options.worker:
        gate = GATES[names[0]]
        row = run_seed(gate, options.seeds[0], device=options.device, steps=options.steps, precision=options.precision)
        options.output.write_text(json.dumps(row) + "\n", encoding="utf-8")
        return 0
    return _judge(names, options)


def _judge(names: Sequence[str], options: argparse.Namespace) -> int:
    outcomes: list[dict[str, Any]] = []
    status = 0
    for name in names:
        if GATES[name].env.startswith("LunarLander") and find_spec("Box2D") is None:
            print(f"{name}: left out, it needs Box2D: pip install 'fxengine[box2d]'")
            continue
        try:
            outcome = run_gate(name, options)
        except RuntimeError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
            continue
        outcomes.append(outcome)
        if not outcome["as_expected"]:
            status = status or 1
        verdict = "passed" if outcome["passed"] else "not passed"
        expected = "as a control must" if outcome["control"] else ""
        print(
            f"{name}: {outcome['seeds_passed']} of {len(outcome['seeds'])} seeds, {outcome['seeds_needed']} needed: "
            f"{verdict} {expected if outcome['as_expected'] else 'UNEXPECTED'} ({outcome['seconds']:.0f} s)"
        )
        # After every gate: one that fails or is stopped must not take the others with it.
        if options.output:
            options.output.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
