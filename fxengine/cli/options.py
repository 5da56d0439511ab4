"""What the commands share: options from docstrings, output that leaves stdout to JSON, names of extras."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from fxengine.driver.errors import FxError


class MissingExtra(FxError):  # noqa: N818
    """A package that only an extra installs is missing."""


def require(package: str, purpose: str) -> None:
    """Raise MissingExtra unless a package of the extra `demo` is installed."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(f"{purpose} needs {package}, which is not installed: pip install 'fxengine[demo]'")


def documented(owner: object) -> dict[str, str]:
    """Texts by name of the "Attributes:" or "Args:" section of a docstring, each on one line."""
    texts: dict[str, str] = {}
    inside, current = False, ""
    for line in inspect.cleandoc(getattr(owner, "__doc__", None) or "").splitlines():
        if not line.startswith(" "):
            inside = line in ("Attributes:", "Args:") or (inside and not line)
        elif inside and not line.startswith("     "):
            current, _, text = line.strip().partition(": ")
            texts[current] = text
        elif inside and current:
            texts[current] += f" {line.strip()}"
    return texts


def add_option(parser: argparse._ActionsContainer, name: str, default: Any, text: str) -> None:
    """Add `--name` with the type of its default; the default closes the help text."""
    shown = text.rstrip(".").replace("%", "%%")
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        type=type(default),
        default=default,
        metavar="N" if isinstance(default, int) else "X",
        help=f"{shown} (default: {default})",
    )


def add_fields(parser: argparse._ActionsContainer, owner: type[Any]) -> None:
    """An option for every number of a dataclass, explained by its docstring."""
    texts = documented(owner)
    for entry in fields(owner):
        if isinstance(entry.default, int | float):
            add_option(parser, entry.name, entry.default, texts.get(entry.name, ""))


def add_choice(parser: argparse._ActionsContainer, name: str, choices: Sequence[str], default: str, text: str) -> None:
    """Add `--name` with a list of words to choose from."""
    shown = text.rstrip(".").replace("%", "%%")
    parser.add_argument(f"--{name}", choices=choices, default=default, help=f"{shown} (default: {default})")


def add_device(parser: argparse._ActionsContainer) -> None:
    """`--device`."""
    parser.add_argument(
        "--device",
        default="auto",
        metavar="D",
        help="auto (a GPU if there is one, else the simulated device), sim, or cuda:N (default: auto)",
    )


def add_json(parser: argparse._ActionsContainer) -> None:
    """`--json`."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout; everything else goes to stderr"
    )


def report_stream(as_json: bool) -> TextIO:
    """Where text for people goes: stdout, or stderr if stdout is for JSON."""
    return sys.stderr if as_json else sys.stdout


def print_json(values: Mapping[str, Any]) -> None:
    """One JSON object as the last line of stdout."""
    print(json.dumps(plain(values), allow_nan=False))


def plain(value: Any) -> Any:
    """Data that JSON can hold: NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def size(nbytes: int) -> str:
    """Bytes for people: 512 B, 3.4 MiB."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024.0:
            break
        value, unit = value / 1024.0, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def table(rows: Mapping[str, object]) -> str:
    """Two aligned columns."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def output_folder(given: str | None, *, prefix: str = "") -> Path:
    """The folder that --out names, or a new one under runs; it is not made yet.

    Raises:
        FxError: the name is that of a file.
    """
    if given is not None:
        folder = Path(given)
        if folder.exists() and not folder.is_dir():
            raise FxError(f"--out {folder} is a file, expected a folder")
        return folder
    stem = Path("runs") / time.strftime(f"{prefix}%Y%m%d-%H%M%S")
    folder, n = stem, 1
    while folder.exists():
        folder, n = Path(f"{stem}-{n}"), n + 1
    return folder


def require_free(folder: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """Raise FxError if the folder holds results of these names already, unless they may be overwritten."""
    held = [name for name in names if (folder / name).exists()]
    if held and not overwrite:
        raise FxError(f"{folder} already holds {', '.join(held)}; choose another folder or pass --overwrite")
