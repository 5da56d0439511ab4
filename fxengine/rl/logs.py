"""Where a run is written down: JSON lines, TensorBoard, and a progress bar."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fxengine.driver.errors import FxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from fxengine.rl.outcome import Progress

#: Files of a run.
METRICS, CHECKPOINT = "metrics.jsonl", "checkpoint.safetensors"


class JsonLog:
    """One JSON object per line for every event: {"event": ..., "step": environment steps, ...}.

    Args:
        path: file; made if there is none.
        append: go on behind what it holds.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._file = path.open("a" if append else "w", encoding="utf-8")

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append an event. Numbers that JSON does not have become null."""
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"event": event, "step": step, **plain}, allow_nan=False) + "\n")

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard, as scalars `event/name` over environment steps.

    Args:
        folder: where they go.

    Raises:
        FxError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise FxError(
                f"logging for TensorBoard needs tensorboardX ({error}): pip install 'fxengine[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(folder))

    def write(self, event: str, step: int, **values: Any) -> None:
        """Append the numbers of an event."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{event}/{name}", value, step)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()


@contextlib.contextmanager
def progress_bar(out: TextIO) -> Iterator[Callable[[Progress], None]]:
    """A callback that moves a bar on a terminal.

    Raises:
        FxError: rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError as error:
        raise FxError(f"the progress bar needs rich ({error}): pip install 'fxengine[demo]'") from error
    columns = BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Bar(*columns, console=Console(file=out)) as bar:
        task = bar.add_task("", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, total=progress.total_steps, completed=progress.step, description=progress.sentence())

        yield show
