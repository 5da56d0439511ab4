"""`fxengine rl`: an agent trained in a Gymnasium environment; its returns, checkpoint and report out."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fxengine.cli.options import (
    add_choice,
    add_device,
    add_json,
    documented,
    output_folder,
    plain,
    print_json,
    report_stream,
    require,
    table,
)
from fxengine.driver.errors import FxError
from fxengine.ops.linear_tiles import PRECISIONS
from fxengine.rl.logs import CHECKPOINT, METRICS

if TYPE_CHECKING:
    from fxengine.rl.outcome import Progress, TrainResult
    from fxengine.rl.settings import TrainConfig

_RETURNS, _REPORT = "returns.png", "report.json"
_INTERRUPTED = 130
_SETTINGS = ("auto", "published", "quick")
#: Environment steps where none are asked for, by settings.
_STEPS = {"published": 500_000, "quick": 20_000}
#: Lines of progress over a run that no terminal watches.
_LINES = 10


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rl",
        help="train an agent in a Gymnasium environment",
        description="Train an agent in a Gymnasium environment and play greedy episodes with it. On the simulated "
        "device the settings are quick ones unless others are asked for: a small network and 20,000 steps, which learn "
        f"CartPole-v1 in about a minute. Writes {METRICS}, {CHECKPOINT}, {_RETURNS} and {_REPORT}. Ctrl-C ends the run "
        "early and writes them all the same (exit status 130); --resume goes on with it.",
    )
    parser.add_argument(
        "env",
        nargs="?",
        metavar="ENV",
        help="id, such as CartPole-v1, or gym_anytrading:forex-v0 where a package has to be imported first",
    )
    add_device(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--algorithm", metavar="A", help="dqn, c51, iqn or full, the specified step (default: dqn)")
    add_choice(
        run, "settings", _SETTINGS, "auto", "hyperparameters to start from: those that CleanRL publishes, or quick ones"
    )
    run.add_argument("--steps", type=int, metavar="N", help="environment steps (default: 500000; quick: 20000)")
    run.add_argument("--envs", type=int, metavar="N", help="environments that step together (default: 1)")
    run.add_argument("--seed", type=int, metavar="N", help="seed of everything random (default: 0)")
    run.add_argument("--precision", choices=PRECISIONS, help="of linear products (default: fp32)")
    run.add_argument("--resume", metavar="FILE", help="go on from this checkpoint, with its settings")
    run.add_argument(
        "--evaluation-episodes", type=int, default=20, metavar="N", help="greedy episodes at the end (default: 20)"
    )
    run.add_argument(
        "--evaluate-every", type=int, default=0, metavar="N", help="steps between further evaluations (default: none)"
    )
    run.add_argument(
        "--checkpoint-every", type=int, default=0, metavar="N", help="steps between checkpoints (default: at the end)"
    )
    _add_hyperparameters(parser.add_argument_group("hyperparameters (defaults: the published ones)"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out", metavar="DIR", help="folder for the results (default: runs/DATE-TIME, or that of FILE)"
    )
    output.add_argument("--overwrite", action="store_true", help="replace the results that DIR already holds")
    output.add_argument("--tensorboard", action="store_true", help="also write event files for TensorBoard")
    add_json(output)
    parser.set_defaults(command=_rl)


def _add_hyperparameters(group: argparse._ArgumentGroup) -> None:
    from fxengine.rl.settings import TrainConfig

    texts = documented(TrainConfig)
    for entry in fields(TrainConfig):
        default: Any = entry.default
        options: dict[str, Any] = {"type": type(default), "metavar": "N" if isinstance(default, int) else "X"}
        shown = default
        if isinstance(default, bool):
            options = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, str):
            options = {"choices": ("mse", "huber")}
        elif isinstance(default, tuple):
            options = {"type": _widths, "metavar": "N,N"}
            shown = ",".join(map(str, default))
        text = texts[entry.name].rstrip(".").replace("%", "%%")
        group.add_argument(
            f"--{entry.name.replace('_', '-')}", default=None, help=f"{text} (default: {shown})", **options
        )


def _widths(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def _rl(arguments: argparse.Namespace) -> int:
    out = report_stream(arguments.json)
    require("matplotlib", "rl (for the picture of the returns)")
    if out.isatty():
        require("rich", "rl (for the progress bar)")
    from fxengine.driver import Device
    from fxengine.rl.training import train

    folder = _folder(arguments)
    with Device.open(arguments.device) as device:
        config, steps = _settings(arguments, device.kind)
        started = time.perf_counter()
        with _watcher(out) as show:
            result = train(
                arguments.env,
                arguments.algorithm,
                total_steps=steps,
                envs=arguments.envs,
                seed=arguments.seed,
                device=device,
                precision=arguments.precision,
                config=config,
                evaluation_episodes=arguments.evaluation_episodes,
                evaluate_every=arguments.evaluate_every,
                checkpoint_every=arguments.checkpoint_every,
                out=folder,
                overwrite=arguments.overwrite,
                resume=arguments.resume,
                callbacks=[show],
                tensorboard=arguments.tensorboard,
            )
    _draw(folder / _RETURNS, result)
    report = _as_json(result, folder)
    (folder / _REPORT).write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    print(_describe(result, time.perf_counter() - started), file=out)
    ended = f"stopped by Ctrl-C after {result.steps} steps; go on with --resume; " if result.interrupted else ""
    print(f"{ended}written to {folder}: {METRICS}, {CHECKPOINT}, {_RETURNS}, {_REPORT}", file=out)
    if arguments.json:
        sys.stderr.flush()
        print_json(report)
    return _INTERRUPTED if result.interrupted else 0


def _settings(arguments: argparse.Namespace, kind: str) -> tuple[TrainConfig | None, int | None]:
    """Hyperparameters and environment steps of the run; None of a resumed one: those of the checkpoint."""
    from fxengine.rl.settings import TrainConfig

    given = {f.name: getattr(arguments, f.name) for f in fields(TrainConfig)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.resume is not None:
        if given or arguments.settings != "auto":
            names = [f"--{name.replace('_', '-')}" for name in given] or ["--settings"]
            raise FxError(f"--resume goes on with the settings of the checkpoint; leave out {', '.join(names)}")
        return None, arguments.steps
    settings = arguments.settings
    if settings == "auto":
        settings = "quick" if kind == "sim" else "published"
    base = TrainConfig.quick() if settings == "quick" else TrainConfig()
    steps = arguments.steps if arguments.steps is not None else _STEPS[settings]
    return replace(base, **given), steps


def _folder(arguments: argparse.Namespace) -> Path:
    """The folder of the results: that of the run to go on with, if no other is named."""
    if arguments.out is None and arguments.resume is not None:
        return Path(arguments.resume).parent
    return output_folder(arguments.out)


@contextlib.contextmanager
def _watcher(out: TextIO) -> Iterator[Callable[[Progress], None]]:
    """A callback that shows progress: a bar on a terminal, elsewhere a few lines."""
    if out.isatty():
        from fxengine.rl.logs import progress_bar

        with progress_bar(out) as show:
            yield show
        return
    told = 0

    def line(progress: Progress) -> None:
        nonlocal told
        tenth = progress.step * _LINES // progress.total_steps
        if tenth > told:
            told = tenth
            print(f"step {progress.step:>7}: {progress.sentence()}", file=out, flush=True)

    yield line


def _as_json(result: TrainResult, folder: Path) -> dict[str, Any]:
    """The outcome of a run as plain data."""
    values: dict[str, Any] = {
        name: getattr(result, name)
        for name in (
            "env", "algorithm", "steps", "updates", "skipped", "interrupted", "exact_resume", "steps_per_s",
            "updates_per_s", "seconds", "device", "device_name",
        )
    }  # fmt: skip
    values |= {
        "episodes": len(result.returns),
        "return_first": result.first_return,
        "return_last": result.last_return,
        "loss_last": result.losses[-1][1] if result.losses else None,
        "evaluations": [
            {"step": e.step, "mean": e.mean, "std": e.std, "episodes": len(e.returns)} for e in result.evaluations
        ],
        "out": str(folder),
        "census": result.census.as_dict(),
    }
    return values


def _describe(result: TrainResult, seconds: float) -> str:
    """The outcome of a run for people."""
    rows: dict[str, str] = {
        "environment": f"{result.env}, {result.algorithm}, on {result.device} ({result.device_name})",
        "steps": f"{result.steps} with {result.updates} updates in {seconds:.1f} s; "
        f"{result.steps_per_s:,.0f} steps/s, {result.updates_per_s:,.0f} updates/s",
        "returns": f"{len(result.returns)} episodes; mean of the first 20 {result.first_return:.1f}, "
        f"of the last 20 {result.last_return:.1f}",
    }
    if result.evaluations:
        last = result.evaluations[-1]
        rows["evaluation"] = f"{len(last.returns)} greedy episodes: {last.mean:.1f} ± {last.std:.1f}"
    if result.skipped:
        rows["skipped"] = f"{result.skipped} updates changed nothing, because a gradient was not finite"
    return table(rows)


def _draw(path: Path, result: TrainResult) -> None:
    """Every episode faintly, the mean of 20 on top, evaluations as points."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fxengine.rl.outcome import RECENT

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(result.ends, result.returns, ".", color="tab:blue", alpha=0.25, markersize=3, label="episodes")
    if len(result.returns) >= RECENT:
        smooth = np.convolve(result.returns, np.full(RECENT, 1.0 / RECENT), mode="valid")
        axis.plot(result.ends[RECENT - 1 :], smooth, color="tab:blue", label=f"mean of {RECENT}")
    if result.evaluations:
        axis.errorbar(
            [e.step for e in result.evaluations],
            [e.mean for e in result.evaluations],
            yerr=[e.std for e in result.evaluations],
            fmt="o",
            color="tab:orange",
            capsize=3,
            label="greedy episodes, mean and standard deviation",
        )
    axis.set_xlabel("environment steps")
    axis.set_ylabel("return")
    axis.set_title(f"{result.env}, {result.algorithm}")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left")
    figure.savefig(path, dpi=110)
