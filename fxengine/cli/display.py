"""What is shown and kept of a running training: progress bar or plain lines, and metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fxengine.cli.options import plain

if TYPE_CHECKING:
    from fxengine.session import Progress, Validation
    from fxengine.telemetry import Report


class Metrics:
    """Writer of metrics.jsonl: one object per step, and one with the key `validation` per validation.

    Steps wait in memory until the next validation, when the clock of the training stands still.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._waiting: list[tuple[Report, float]] = []

    def write(self, progress: Progress) -> None:
        """Take over what the progress brings."""
        self._waiting.extend(zip(progress.reports, progress.losses, strict=True))
        if progress.validation is not None:
            self._flush()
            self._append(step=progress.validation.step, validation=vars(progress.validation))
            self._file.flush()

    def _flush(self) -> None:
        for report, loss in self._waiting:
            self._append(step=report.replay, loss=loss, skipped=report.skipped, **report)
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
    """A function that shows progress: a bar on a terminal, a line per validation elsewhere."""
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
            if progress.validation is not None:
                bar.console.print(_sentence(progress.validation), highlight=False)

        yield show


def _line(progress: Progress, out: TextIO) -> None:
    if progress.validation is not None:
        speed = f", {progress.steps_per_s:,.1f} steps/s"
        print(_sentence(progress.validation) + speed, file=out, flush=True)


def _sentence(validation: Validation) -> str:
    return (
        f"step {validation.step:>6}: validation loss {validation.loss:.4f}, "
        f"next bar {validation.next_bar_accuracy:.4f}, regime {validation.regime_accuracy:.4f}"
    )
