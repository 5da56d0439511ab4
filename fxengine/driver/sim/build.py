"""Builds kernel sources and the runtime of the simulated device with the system's C++ compiler; cached on disk."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from fxengine.driver.cache import DiskCache
from fxengine.driver.errors import CompileError
from fxengine.driver.sim.compilers import Compiler, find_compiler
from fxengine.driver.sim.elf import static_shared_bytes

__all__ = ["KernelText", "build_runtime", "build_shared_object", "kernel_facts"]

HERE = Path(__file__).parent
KERNEL_HEADERS = HERE.parent.parent / "cu"
HEADERS = ("fx_host.h", "fx_math.h", "fx_sim.h", "fx_warp.h")
RUNTIME = ("fibers.cpp", "scheduler.cpp", "copies.cpp", "faults.cpp", "runtime.cpp")
_TRAILER = b"FXSIMv2\n"
_KERNEL = re.compile(r'extern\s*"C"\s*__global__\b')
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_MESSAGE = re.compile(r"^(?P<path>[^\s:][^:\n]*):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$", re.MULTILINE)


class KernelText(Protocol):
    """A kernel source: where it lies (for messages and includes) and its text."""

    @property
    def path(self) -> Path:
        """The file the text came from."""

    @property
    def text(self) -> str:
        """The source text."""


def build_shared_object(source: KernelText, *, sanitize: str | None = None, defines: Sequence[str] = ()) -> Path:
    """Compile a .cu source for the simulated device; the shared object's path, from the cache if it is there.

    `sanitize`: None or "address" (the process must then run with libasan preloaded); where it is None, the
    environment variable FXENGINE_SIM_SANITIZE decides. `defines`: "NAME" or "NAME=VALUE".
    Raises CompileError with numbered source lines, DeviceNotFound where there is no compiler.
    """
    sanitize = sanitize or os.environ.get("FXENGINE_SIM_SANITIZE") or None
    if sanitize not in (None, "address"):
        raise ValueError(f"sanitize={sanitize!r}: expected None or 'address'")
    compiler = find_compiler()
    path, name = Path(source.path), _shown_name(source)
    options = [*compiler.kernel_options(sanitize), *(f"-D{define}" for define in defines)]
    kernels = _find_kernels(source.text, name)
    exports = "".join(f"FX_SIM_EXPORT({kernel}, ({bound}))\n" for kernel, bound in kernels)
    text = f'#line 1 "{name}"\n{source.text}\n#line 1 "exports of {path.name}"\n{exports}'
    included = [content for _, content in sorted(_include_closure(source.text, path.parent).items())]
    headers = [(HERE / name).read_bytes() for name in HEADERS]
    key: list[str | bytes] = ["kernels", _TRAILER, compiler.version, *compiler.command, *options, text]

    def build(target: Path) -> None:
        unit = target.with_suffix(".cpp")
        unit.write_text(text)
        objects = target.with_suffix(".o")
        search = ["-I", str(path.parent), "-I", str(KERNEL_HEADERS), "-include", str(HERE / "fx_host.h")]
        _compile(compiler, [*options, *search, "-c", str(unit), "-o", str(objects)], source)
        _compile(compiler, [*compiler.link_options(sanitize), str(objects), "-o", str(target), "-lm"], source)
        names = [kernel for kernel, _ in kernels]
        shared = dict.fromkeys(names, 0) if sanitize else static_shared_bytes(objects, names)
        facts = {"path": name, "sanitize": sanitize or "", "kernels": shared}
        payload = json.dumps(facts).encode()
        with target.open("ab") as file:  # loaders ignore what follows the last section
            file.write(payload + len(payload).to_bytes(4, "little") + _TRAILER)

    return DiskCache("sim").get_or_build([*key, *headers, *included], ".so", build)


def build_runtime() -> Path:
    """The shared object that schedules kernels: built once per compiler and cached."""
    compiler = find_compiler()
    options = [*compiler.common_options(), "-O2", "-g1", "-Wall", "-Wextra"]
    texts = [(HERE / name).read_bytes() for name in ("fx_sim.h", "runtime.h", "worker.h", *RUNTIME)]

    def build(target: Path) -> None:
        files = [str(HERE / name) for name in RUNTIME]
        link = [*compiler.link_options(None), "-pthread"]
        _compile(compiler, [*options, *link, *files, "-o", str(target), "-ldl"], None)

    return DiskCache("sim").get_or_build(
        ["runtime", compiler.version, *compiler.command, *options, *texts], ".so", build
    )


def kernel_facts(shared_object: Path) -> dict[str, Any]:
    """What build_shared_object noted in a shared object: "path" of the source, "sanitize",
    "kernels": {name: static shared bytes}.

    Raises ValueError for any other file.
    """
    with shared_object.open("rb") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        file.seek(max(0, end - 4 - len(_TRAILER)))
        tail = file.read()
        if len(tail) != 4 + len(_TRAILER) or tail[4:] != _TRAILER:
            raise ValueError(f"{shared_object} is no kernel module of the simulated device")
        length = int.from_bytes(tail[:4], "little")
        file.seek(end - 4 - len(_TRAILER) - length)
        facts: dict[str, Any] = json.loads(file.read(length))
    return facts


def _shown_name(source: KernelText) -> str:
    """How messages and line tables name the source: its own short name if it has one, else the path."""
    return str(getattr(source, "name", source.path))


def _compile(compiler: Compiler, arguments: list[str], source: KernelText | None) -> None:
    command = [*compiler.command, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if result.returncode == 0:
        return
    name = "the runtime of the simulated device" if source is None else _shown_name(source)
    log = result.stdout + result.stderr
    shown = "" if source is None else _numbered(log, source)
    raise CompileError(
        f"{name} does not compile for the simulated device\n{shown}{log}command: {shlex.join(command)}",
        source=name,
        log=log,
    )


def _numbered(log: str, source: KernelText) -> str:
    """The source lines around each error of the log, each with its number, the faulty one marked."""
    lines = source.text.splitlines()
    parts = []
    for match in list(_MESSAGE.finditer(log))[:5]:
        at = int(match["line"])
        if match["path"] != _shown_name(source) or not 1 <= at <= len(lines):
            continue
        parts.append(f"line {at}: {match['text']}")
        for number in range(max(1, at - 2), min(len(lines), at + 2) + 1):
            parts.append(f"{'>' if number == at else ' '}{number:5d} | {lines[number - 1]}")
    return "".join(f"{part}\n" for part in parts)


def _include_closure(text: str, folder: Path) -> dict[str, bytes]:
    """Every file that `#include "..."` reaches, by path. Files that are not found are the compiler's to report."""
    found: dict[str, bytes] = {}
    pending = [(text, folder)]
    while pending:
        text, folder = pending.pop()
        for name in _INCLUDE.findall(text):
            for base in (folder, KERNEL_HEADERS):
                path = base / name
                if path.is_file():
                    if str(path) not in found:
                        found[str(path)] = path.read_bytes()
                        pending.append((found[str(path)].decode(), path.parent))
                    break
    return found


def _find_kernels(text: str, name: str) -> list[tuple[str, str]]:
    """(name, launch bound as a C++ expression or "0") of every `extern "C" __global__ void name(...)` definition."""
    return [kernel for kernel in _scan_kernels(_without_comments(text), name) if kernel is not None]


def _scan_kernels(text: str, name: str) -> Iterator[tuple[str, str] | None]:
    for match in _KERNEL.finditer(text):
        at, bound = match.end(), "0"
        while True:
            word = re.compile(r"\s*(\w+)\s*").match(text, at)
            if word is None:
                line = text.count("\n", 0, match.start()) + 1
                raise CompileError(f'{name}:{line}: no kernel name follows extern "C" __global__', source=name)
            at = word.end()
            if word[1] == "__launch_bounds__":
                end = _closing(text, at)
                bound = _first_argument(text[at + 1 : end])
                at = end + 1
            elif word[1] not in ("void", "static", "inline"):
                break
        after = _closing(text, at) + 1
        defined = text[after:].lstrip().startswith("{")
        yield (word[1], bound) if defined else None


def _closing(text: str, at: int) -> int:
    """Index of the parenthesis that closes the one at `at`."""
    depth = 0
    for index in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _first_argument(text: str) -> str:
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, "<": 1, ")": -1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            return text[:index]
    return text


def _without_comments(text: str) -> str:
    """The text with comments blanked, line numbers kept."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return found if found[0] in "\"'" else re.sub(r"[^\n]", " ", found)

    return re.sub(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', blank, text, flags=re.DOTALL)
