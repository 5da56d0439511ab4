"""What is shown and kept of a running training: progress bar or plain lines, and metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fxengine.cli.options import plain

if TYPE_CHECKING:
    from fxengine.health import Health
    from fxengine.session import Progress, Validation
    from fxengine.telemetry import Report


class Metrics:
    """Writer of metrics.jsonl: one object per step, one with the key `health` per health report, one with the key
    `validation` per validation.

    Steps wait in memory until the next validation, when the clock of the training stands still.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._waiting: list[tuple[Report, float, Health | None]] = []

    def write(self, progress: Progress) -> None:
        """Take over what the progress brings."""
        health = {h.step: h for h in progress.health}
        for report, loss in zip(progress.reports, progress.losses, strict=True):
            self._waiting.append((report, loss, health.get(report.replay)))
        if progress.validation is not None:
            self._flush()
            self._append(step=progress.validation.step, validation=vars(progress.validation))
            self._file.flush()

    def _flush(self) -> None:
        from fxengine.health import DETAILS

        for report, loss, health in self._waiting:
            values = {name: value for name, value in report.items() if not name.startswith(DETAILS)}
            self._append(step=report.replay, loss=loss, skipped=report.skipped, **values)
            if health is not None:
                self._append(step=health.step, health=health.as_dict())
        self._waiting.clear()

    def _append(self, **row: object) -> None:
        self._file.write(json.dumps(plain(row), allow_nan=False) + "\n")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._file:
            self._flush()


@contextlib.contextmanager
def watcher(steps: int, out: TextIO) -> Iterator[Callable[[Progress], None]]:
    """A function that shows progress: a bar on a terminal, elsewhere the health reports and a line per validation."""
    if not out.isatty():
        yield lambda progress: _line(progress, out)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=steps, speed="", loss="")

        def show(progress: Progress) -> None:
            if progress.losses:
                loss = sum(progress.losses) / len(progress.losses)
                bar.update(
                    task,
                    completed=progress.step,
                    speed=f"{progress.steps_per_s:,.1f} steps/s",
                    loss=f"loss {loss:.4f}",
                )
            for health in progress.health:
                bar.console.print(str(health), highlight=False)
            if progress.validation is not None:
                bar.console.print(_sentence(progress.validation), highlight=False)

        yield show


def _line(progress: Progress, out: TextIO) -> None:
    for health in progress.health:
        print(health, file=out, flush=True)
    if progress.validation is not None:
        speed = f", {progress.steps_per_s:,.1f} steps/s"
        print(_sentence(progress.validation) + speed, file=out, flush=True)


def _sentence(validation: Validation) -> str:
    c51 = "" if validation.c51_loss is None else f"C51 {validation.c51_loss:.4f}, "
    return (
        f"step {validation.step:>6}: validation loss {validation.loss:.4f}, {c51}"
        f"next bar {validation.next_bar_accuracy:.4f}, regime {validation.regime_accuracy:.4f}"
    )
