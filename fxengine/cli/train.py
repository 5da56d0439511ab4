"""`fxengine train`: bars in; a trained network, its curves and an honest report out."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxengine.cli.display import Metrics, watcher
from fxengine.cli.options import (
    add_choice,
    add_device,
    add_fields,
    add_json,
    add_option,
    documented,
    output_folder,
    plain,
    print_json,
    report_stream,
    require,
    require_free,
)
from fxengine.cli.report import as_json, describe
from fxengine.driver.errors import FxError
from fxengine.interrupt import interruptible

if TYPE_CHECKING:
    from fxengine.session import Progress, TrainingSession, TrainResult

_CHECKPOINT, _CURVES, _METRICS, _REPORT = "checkpoint.safetensors", "curves.png", "metrics.jsonl", "report.json"
_INTERRUPTED = 130
#: What `make_dataset` is asked for on the command line.
_DATASET_OPTIONS = ("lookahead", "regimes", "validation", "volatility_window")


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    from fxengine.data import make_dataset
    from fxengine.settings import DEFAULT_BATCH, MODELS, SIZES, SMALL, TrainSettings

    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train on price bars",
        description="Train on price bars and judge the result on the bars that follow: the next-bar and the regime "
        "head alone (aux), or the whole specified step (full) on transitions that a simple logged policy makes of the "
        "bars. On the simulated device the full model has small sizes unless --sizes spec is given, so that its 200 "
        f"steps take well below two minutes: {_sizes(SMALL)}, batch {DEFAULT_BATCH['small']}. "
        f"Writes {_CHECKPOINT}, {_CURVES}, {_METRICS} and {_REPORT}. Ctrl-C ends the training early and "
        "writes them all the same (exit status 130).",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="CSV or Parquet file with time, open, high, low, close and, if there is one, volume "
        "(default: hourly EUR/USD bars of 2017, installed with fxengine[demo])",
    )
    add_device(parser)
    training = parser.add_argument_group("training")
    settings = documented(TrainSettings)
    add_choice(training, "model", MODELS, TrainSettings.model, settings["model"])
    add_choice(training, "sizes", SIZES, TrainSettings.sizes, settings["sizes"])
    add_fields(training, TrainSettings)
    training.add_argument(
        "--signal",
        action="append",
        default=[],
        metavar="NAME=X",
        help="first value of a signal, for example clip=0.5 or w_regime=1; may be repeated",
    )
    data = parser.add_argument_group("labels and split")
    texts = documented(make_dataset)
    parameters = inspect.signature(make_dataset).parameters
    for name in _DATASET_OPTIONS:
        add_option(data, name, parameters[name].default, texts.get(name, ""))
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="DIR", help="folder for the results (default: runs/DATE-TIME)")
    output.add_argument("--overwrite", action="store_true", help="replace the results that DIR already holds")
    add_json(output)
    parser.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> int:
    from fxengine.data import demo_bars, load_bars, make_dataset
    from fxengine.session import TrainingSession, TrainSettings

    out = report_stream(arguments.json)
    require("matplotlib", "train (for the learning curves)")
    if out.isatty():
        require("rich", "train (for the progress bar)")
    settings = TrainSettings(
        **{entry.name: getattr(arguments, entry.name) for entry in fields(TrainSettings) if entry.name != "signals"},
        signals=dict(_signal(text) for text in arguments.signal),
    )
    bars = load_bars(arguments.data) if arguments.data else demo_bars()
    dataset = make_dataset(bars, **{name: getattr(arguments, name) for name in _DATASET_OPTIONS})
    folder = output_folder(arguments.out)
    require_free(folder, (_CHECKPOINT, _CURVES, _METRICS, _REPORT), overwrite=arguments.overwrite)
    print(dataset.describe(), file=out)

    with TrainingSession(dataset, settings, device=arguments.device) as session:
        print(_plan(session), file=out)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with (
            interruptible(session.stop),
            Metrics(folder / _METRICS) as metrics,
            watcher(session.steps, out) as show,
        ):

            def watch(progress: Progress) -> None:
                metrics.write(progress)
                show(progress)

            result = session.run(watch)
        session.save(folder / _CHECKPOINT)
        _draw(folder / _CURVES, session, result)
        census = session.engine.graph.census()
        report = as_json(session, result, census, folder)
        (folder / _REPORT).write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
        print(describe(session, result, census, time.perf_counter() - started), file=out)
        ended = f"stopped by Ctrl-C after {result.steps} of {session.steps} steps; " if result.interrupted else ""
        print(f"{ended}written to {folder}: {_CHECKPOINT}, {_CURVES}, {_METRICS}, {_REPORT}", file=out)
    if arguments.json:
        sys.stderr.flush()
        print_json(report)
    return _INTERRUPTED if result.interrupted else 0


def _plan(session: TrainingSession) -> str:
    """What is going to be trained, and how large it is."""
    from fxengine.settings import SMALL

    config, device, settings = session.model.config, session.engine.device, session.settings
    lines = []
    if session.model.transitions is not None:
        lines.append(session.model.transitions.describe())
        if settings.chosen_sizes(device.kind) == "small":
            lines.append(f"small sizes: {_sizes(SMALL)}; --sizes spec takes those of the specification")
    lines.append(f"training {session.steps} steps of {config.batch} rows on {device.label} ({device.name})")
    return "\n".join(lines)


def _sizes(sizes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


def _signal(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return name.strip(), float(value)
    except ValueError:
        raise FxError(f"--signal {text!r}: expected NAME=NUMBER, for example clip=0.5") from None


def _draw(path: Path, session: TrainingSession, result: TrainResult) -> None:
    from fxengine.cli.plot import learning_curves

    learning_curves(
        path, session.curves, session.validations, result, health=session.health, title=session.dataset.source
    )
