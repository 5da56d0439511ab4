"""What the peers share: layout of the parameters, starts and data, the check against the golden files, result rows."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fxengine.initialise import initial_value, unit_vector
from tests.reference import golden, limits
from tests.reference.config import (
    DEFAULT_SIGNALS,
    FAMILIES,
    GATE_NAMES,
    READINESS_NAMES,
    TARGET_GROUPS,
    Config,
    Tree,
    bound_slot,
    group_shapes,
    group_signals,
    param_shapes,
    target_names,
)
from tests.reference.step import State, empty_state, state_outputs
from tools.peers.data import random_rows

BATCHES = (64, 256, 1024, 4096)
PRECISIONS = ("fp32", "tf32")
ORACLE_EVERY = 8
#: Groups on the way from the state to h2, and those of the auxiliary nets.
ENCODER = ("trunk", "attn")
AUXILIARY = ("aux_trunk", "aux_heads")
#: What the golden files hold and no peer computes: a diagnostic, and not part of the timed step.
LEFT_OUT = ("decomposition",)


@dataclass(frozen=True)
class Entry:
    """One tensor: its group's index among the groups present, and whether it is a matrix (decay, weight clamp)."""

    name: str
    shape: tuple[int, ...]
    group: int
    matrix: bool
    target: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))


def groups_of(config: Config) -> list[str]:
    """The groups present, those with a Polyak copy first, so that their parameters are one prefix."""
    present = list(group_shapes(config))
    return [g for g in present if g in TARGET_GROUPS] + [g for g in present if g not in TARGET_GROUPS]


def entries_of(config: Config) -> list[Entry]:
    """All tensors, in the order of `groups_of`."""
    tables = group_shapes(config)
    return [
        Entry(name, shape, g, len(shape) > 1, group in TARGET_GROUPS)
        for g, group in enumerate(groups_of(config))
        for name, shape in tables[group].items()
    ]


def initial_state(config: Config, seed: int = 0) -> State:
    """A cold start as the engine makes it: fresh parameters, targets equal to them, no moments, no bounds."""
    params = {name: initial_value(name, shape, seed) for name, shape in param_shapes(config).items()}
    zeros = {name: np.zeros_like(x) for name, x in params.items()}
    widths = {f"b{d}fc": params[f"w_b{d}fc"].shape[1] for d in range(len(config.branches))}
    return {
        "params": params,
        "m": zeros,
        "v": zeros,
        "target": {name: params[name] for name in target_names(config)},
        "sn_v": {name: unit_vector(f"sn_v_{name}", (width,), seed) for name, width in widths.items()},
        "state": empty_state(config),
        "signals": DEFAULT_SIGNALS | group_signals(config),
        "bounds": {bound_slot(g, f): 0.0 for g in group_shapes(config) for f in FAMILIES},
        "step": 0,
    }


def bound_table(config: Config, state: State) -> NDArray[np.float64]:
    """The bounds as [4 families, groups present]."""
    return np.array([[state["bounds"][bound_slot(g, f)] for g in groups_of(config)] for f in FAMILIES])


def small_outputs(config: Config, gate: Any, readiness: Any, bounds: Any, norms: Any | None) -> Tree:
    """Gate, readiness, bounds and norms under the names of the golden files; `norms` None: the step was skipped."""
    groups = groups_of(config)
    out: Tree = {}
    if config.aux_h:
        out |= {f"state.{name}": x for name, x in zip(GATE_NAMES, np.asarray(gate), strict=True)}
    if config.iqn_quantiles:
        out |= {f"state.{name}": x for name, x in zip(READINESS_NAMES, np.asarray(readiness), strict=True)}
    table = np.asarray(bounds)
    out |= {f"bound.{bound_slot(g, f)}": table[i, j] for j, g in enumerate(groups) for i, f in enumerate(FAMILIES)}
    return out | ({} if norms is None else {f"grad_norm.{g}": x for g, x in zip(groups, norms, strict=True)})


class Stepper(Protocol):
    """A peer with a state, fed with batches: what the golden files check."""

    def check_step(self, batch: Tree) -> Mapping[str, Any]:
        """One step; outputs under the names of the golden files, as arrays."""


class Trainer(Protocol):
    """A peer that trains on resident data: what is timed."""

    def steps(self, count: int) -> None:
        """Start `count` steps, a multiple of `ORACLE_EVERY`, with oracles as often; may return before they are done."""

    def synchronize(self) -> None:
        """Wait until all started steps are done."""

    def elapsed_us(self, count: int) -> float:
        """µs that `count` steps take in a full queue, all of them done at the end."""

    def skipped(self) -> int:
        """Steps that were skipped because a gradient was not finite."""

    def launches(self) -> float | None:
        """Launches on the device per step; None where the framework does not tell."""


@dataclass(frozen=True)
class Verdict:
    """What came of a golden file: worst errors over both steps, and faults (none: passed)."""

    name: str
    error: float
    update: float
    worst: str
    faults: list[str]


def check_file(path: Path, make: Callable[[Config, State], Stepper], precision: str) -> Verdict:
    """Both steps of a golden file against the limits of the precision."""
    name = path.stem.removeprefix("golden_")
    if path.resolve().parent != golden.DIRECTORY.resolve() or name not in golden.names():
        raise FileNotFoundError(f"{path}: expected one of {golden.DIRECTORY}/golden_*.npz")
    case = golden.load(name)
    stepper = make(case.config, case.state)
    before: Any = state_outputs(case.config, case.state)
    ref_before: Any = before
    outputs: list[Any] = []
    references = [{k: x for k, x in ref.items() if k not in LEFT_OUT} for ref in case.outputs]
    found: list[golden.Difference] = []
    faults: list[str] = []
    for i, (batch, reference) in enumerate(zip(case.batches, references, strict=True)):
        out = stepper.check_step(batch)
        differences = golden.compare(out, reference, before, ref_before)
        found += differences
        if precision == "fp32":
            try:
                golden.assert_fp32(differences)
            except AssertionError as error:
                faults.append(f"step {i}: {error}")
        outputs.append(out)
        before, ref_before = out, reference
    if precision != "fp32":
        faults = limits.judge(precision, case.config, outputs, references)
    worst = golden.worst(found)
    return Verdict(name, worst.error, worst.update, worst.name, faults)


def check(paths: Sequence[Path], make: Callable[[Config, State], Stepper], precision: str, label: str) -> bool:
    """Check files, print one line each; whether all passed."""
    good = True
    for path in paths:
        start = time.perf_counter()
        verdict = check_file(path, make, precision)
        good &= not verdict.faults
        line = f"{label} {verdict.name:<11} {'FAILED' if verdict.faults else 'passed'}  error {verdict.error:.2e}"
        print(f"{line}  update {verdict.update:.2e}  ({verdict.worst}, {time.perf_counter() - start:.1f} s)")
        for fault in verdict.faults:
            print(f"    {fault}")
    return good


@dataclass(frozen=True)
class Effort:
    """How much to measure: the median of `samples` batches of `steps` counts; `queued` steps for the host time."""

    samples: int = 5
    steps: int = 200
    queued: int = 48

    def __post_init__(self) -> None:
        if self.steps % ORACLE_EVERY or self.queued % ORACLE_EVERY:
            raise ValueError(f"{self}: steps and queued must be multiples of {ORACLE_EVERY}, the period of the oracles")


def measure(trainer: Trainer, effort: Effort) -> dict[str, float]:
    """us_per_step in a full queue and host_us per started step, medians after a warm-up.

    Raises:
        RuntimeError: a step was skipped, so that the time is not that of a training step.
    """
    trainer.steps(2 * ORACLE_EVERY)
    trainer.synchronize()
    device = [trainer.elapsed_us(effort.steps) / effort.steps for _ in range(effort.samples + 1)][1:]
    host = []
    for _ in range(effort.samples + 1):
        trainer.synchronize()
        start = time.perf_counter_ns()
        trainer.steps(effort.queued)
        host.append((time.perf_counter_ns() - start) / 1e3 / effort.queued)
    trainer.synchronize()
    if trainer.skipped():
        raise RuntimeError(f"{trainer.skipped()} steps were skipped: the times are not those of training steps")
    return {"us_per_step": round(median(device), 2), "host_us": round(median(host[1:]), 2)}


def parser(description: str, variants: Sequence[str]) -> argparse.ArgumentParser:
    """The command line that the peers share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--variant", choices=variants, default=variants[0], help="default: %(default)s")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    made.add_argument("--precision", choices=PRECISIONS, default="fp32", help="default: %(default)s")
    made.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of --check")
    made.add_argument("--check", nargs="+", type=Path, default=[], help="golden files that have to pass before timing")
    made.add_argument("--unchecked", action="store_true", help="time without --check, to try something out")
    made.add_argument("--time", nargs="*", type=int, metavar="BATCH", help="time these batch sizes (default: all)")
    made.add_argument("--steps", type=int, default=Effort.steps, help="steps per sample (default: %(default)s)")
    made.add_argument("--samples", type=int, default=Effort.samples, help="default: %(default)s")
    made.add_argument("--launches", action="store_true", help="count the launches per step as well (profiler)")
    made.add_argument("--output", type=Path, help="write the rows as JSON to this file, after every batch size")
    return made


def run(
    options: argparse.Namespace,
    label: str,
    make: Callable[[Config, State], Stepper],
    train: Callable[[Config, State, Mapping[str, NDArray[Any]]], Trainer],
    memory: Callable[[], float | None],
) -> int:
    """Check, then time what passed; status 1 where a golden file failed."""
    if options.time is not None and not options.check and not options.unchecked:
        print("error: a peer is timed after it has passed golden files: give them with --check", file=sys.stderr)
        return 2
    if options.check and not check(options.check, make, options.precision, label):
        print(f"error: {label} does not compute the step; it is not timed", file=sys.stderr)
        return 1
    rows = []
    for batch in (options.time or BATCHES) if options.time is not None else ():
        config = Config(batch=batch, oracle_every=ORACLE_EVERY)
        start = time.perf_counter()
        trainer = train(config, initial_state(config), random_rows(config))
        trainer.steps(ORACLE_EVERY)
        trainer.synchronize()
        setup = time.perf_counter() - start
        effort = Effort(options.samples, options.steps, min(Effort.queued, options.steps))
        row = {"peer": label, "batch": batch, "precision": options.precision, **measure(trainer, effort)}
        rows.append(row | {"setup_s": round(setup, 2), "memory_mib": memory()})
        if options.launches:
            rows[-1]["launches"] = trainer.launches()
        print(json.dumps(rows[-1]), flush=True)
        if options.output:  # what is measured counts, whatever becomes of the rest
            options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0
