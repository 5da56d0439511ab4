"""The C runtime of the simulated device, seen from Python."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from fxengine.driver.errors import DeviceNotFound
from fxengine.driver.sim.build import build_runtime

__all__ = ["Failure", "KernelRecord", "Library", "Operation", "parse_schedule"]

_SCHEDULES = {"greedy": 0, "reverse": 1, "random": 2}


class KernelRecord(ctypes.Structure):
    """fx_sim::Kernel, exported by a kernel module."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("invoke", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("offsets", ctypes.POINTER(ctypes.c_uint)),
        ("arguments", ctypes.c_uint),
        ("max_threads", ctypes.c_uint),
        ("shared_anchor", ctypes.c_void_p),
    )


class Operation(ctypes.Structure):
    """fx_sim::Operation: one launch."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("size", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_uint),
        ("reserved", ctypes.c_uint),
    )


class Failure(ctypes.Structure):
    """fx_sim::Failure: why a launch failed."""

    _fields_ = (
        ("code", ctypes.c_int),
        ("operation", ctypes.c_int),
        ("instruction", ctypes.c_uint64),
        ("module", ctypes.c_char * 512),
        ("text", ctypes.c_char * 1024),
    )

    def describe(self) -> str:
        """The text, with the source line of a fault where addr2line knows it."""
        text = bytes(self.text).decode("utf-8", "replace")
        line = _source_line(bytes(self.module).decode(), int(self.instruction)) if self.instruction else ""
        return f"{text}, at {line}" if line else text


class Library:
    """The loaded runtime. One per process; built at first use.

    Raises DeviceNotFound where there is no C++ compiler, or what it built cannot be loaded.
    """

    def __init__(self) -> None:
        path = build_runtime()
        try:
            # Kernel modules find the runtime's symbols because it is loaded for all.
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise DeviceNotFound(
                f"the runtime of the simulated device cannot be loaded: {error}. Where the cache folder forbids "
                "execution, set FXENGINE_CACHE to another."
            ) from error
        self.start: Any = library.fx_sim_start
        self.start.argtypes = [ctypes.c_uint]
        self.start.restype = None
        self.run: Any = library.fx_sim_run
        self.run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_void_p,
        ]
        self.memset = ctypes.addressof(KernelRecord.in_dll(library, "fx_sim_memset"))
        self.memcpy = ctypes.addressof(KernelRecord.in_dll(library, "fx_sim_memcpy"))
        self.sanitized = bool(library.fx_sim_sanitized())
        """Whether this process runs under AddressSanitizer."""

    @staticmethod
    @functools.cache
    def shared() -> Library:
        """The library of this process."""
        return Library()


def parse_schedule(text: str) -> tuple[int, int]:
    """ "greedy", "reverse" or "random:<seed>" as the runtime's (kind, seed); raises ValueError for others."""
    name, _, seed = text.partition(":")
    if name not in _SCHEDULES or (name == "random") != seed.isdecimal():
        raise ValueError(f"schedule {text!r}: expected 'greedy', 'reverse' or 'random:<seed>'")
    return _SCHEDULES[name], int(seed or 0)


def _source_line(module: str, instruction: int) -> str:
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None or not module:
        return ""
    try:
        shown = subprocess.run(
            [tool, "-e", module, hex(instruction)], capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    shown = shown.split(" (")[0]
    if shown.startswith("?"):
        return ""
    path, _, line = shown.rpartition(":")
    # The compiler makes the name given by #line absolute, relative to where it ran.
    relative = os.path.relpath(path) if path.startswith(f"{Path.cwd()}/") else path
    return f"{relative}:{line}"
