"""Kernel sources: a .cu file with the headers it includes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fxengine.driver.errors import FxError

__all__ = ["KERNEL_FOLDER", "KernelSource"]

KERNEL_FOLDER = Path(__file__).resolve().parent.parent / "cu"
"""Where the kernels of this package lie."""

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A kernel file and its include closure, as read at one moment: what is hashed is what is compiled."""

    path: Path
    text: str
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """(name as included, text) of every `#include "..."`, direct or not, in order of first appearance."""
    system_headers: tuple[str, ...] = ()
    """Names of every `#include <...>`."""

    @property
    def name(self) -> str:
        """The name in logs, error messages and line tables: the same wherever the package is installed."""
        if self.path.is_relative_to(KERNEL_FOLDER):
            return f"fxengine/cu/{self.path.relative_to(KERNEL_FOLDER).as_posix()}"
        return self.path.name

    @classmethod
    def load(cls, name: str | Path) -> KernelSource:
        """Read fxengine/cu/`name`, or the file at an absolute path; raises FxError where a file is missing."""
        path = Path(name)
        if not path.is_absolute():
            path = KERNEL_FOLDER / path
        return cls.from_text(_read(path, f"kernel source {str(name)!r}"), path)

    @classmethod
    def defining(cls, name: str | Path, macros: Mapping[str, str]) -> KernelSource:
        """The file `name` as `load` reads it, with macros defined before its first line and shown in its name."""
        source = cls.load(name)
        lines = "".join(f"#define {macro} {value}\n" for macro, value in macros.items())
        shown = ",".join(f"{macro}={value}" for macro, value in macros.items()).replace(" ", "")
        path = source.path.with_name(f"{source.path.stem}[{shown}]{source.path.suffix}")
        return replace(source, path=path, text=f"{lines}#line 1\n{source.text}")

    @classmethod
    def from_text(cls, text: str, path: str | Path) -> KernelSource:
        """A source given as text; `path` names it and is where its relative includes are looked up first."""
        path = Path(path)
        headers: dict[str, str] = {}
        system: dict[str, None] = {}

        def visit(current: str, folder: Path, user: str) -> None:
            for quoted, angled in _INCLUDE.findall(current):
                if angled:
                    system[angled] = None
                elif quoted not in headers:
                    found = next((p for p in (folder / quoted, KERNEL_FOLDER / quoted) if p.is_file()), None)
                    if found is None:
                        raise FxError(
                            f'{user} includes "{quoted}", which is neither in {folder} nor in {KERNEL_FOLDER}'
                        )
                    headers[quoted] = _read(found, f"header {quoted!r}")
                    visit(headers[quoted], found.parent, quoted)

        visit(text, path.parent, path.name)
        return cls(path, text, tuple(headers.items()), tuple(system))


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FxError(f"{what} cannot be read: {error}") from error
