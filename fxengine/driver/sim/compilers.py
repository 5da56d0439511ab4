"""Which C++ compiler builds kernels for the simulated device, and with which options."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fxengine.driver.errors import DeviceNotFound

__all__ = ["Compiler", "find_compiler"]

_ADVICE = (
    "The simulated device compiles its kernels with a C++17 compiler and found none (tried {tried}). Install one: "
    "`apt-get install g++` on Debian and Ubuntu, `dnf install gcc-c++` on Fedora, "
    "or `pip install ziglang` anywhere; or name one in the environment variable CXX."
)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command, its family ("gcc", "clang" or "zig") and the first line of its version."""

    command: tuple[str, ...]
    family: str
    version: str

    def kernel_options(self, sanitize: str | None) -> list[str]:
        """Options for kernel sources. Floating point is never reassociated or contracted: explicit fmaf only."""
        options = [
            *self.common_options(),
            "-O2",
            "-g1",
            "-ffunction-sections",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fno-strict-aliasing",
            "-Wno-unknown-pragmas",
            *_machine_options(self.family),
        ]
        if self.family == "gcc":
            # Unique symbols would merge the shared memory of equal templates across modules.
            options.append("-fno-gnu-unique")
        if sanitize == "address":
            options += ["-fsanitize=address", "-fno-omit-frame-pointer", "-DFX_SIM_SANITIZED=1"]
        elif self.family == "gcc":
            options += ["-fsanitize=bounds-strict", "-fsanitize-undefined-trap-on-error"]
        else:
            options += ["-fsanitize=bounds", "-fsanitize-trap=bounds"]
        return options

    def common_options(self) -> list[str]:
        """Options for kernels and runtime alike."""
        options = [
            "-std=c++17",
            "-fPIC",
            "-fno-exceptions",
            "-fno-rtti",
            "-fno-stack-protector",
            "-U_FORTIFY_SOURCE",
        ]
        if platform.machine() in ("x86_64", "AMD64"):
            options.append("-fcf-protection=none")  # fibers end in a jump, which shadow stacks forbid
        if self.family == "zig":
            options.append("-fno-sanitize=undefined")
        return options

    def link_options(self, sanitize: str | None) -> list[str]:
        """Options for linking a shared object."""
        options = ["-shared"]
        if sanitize == "address":
            options.append("-fsanitize=address")
            if self.family == "clang":
                options.append("-shared-libasan")
        if self.family == "zig":
            options.append("-nostdlib++")
        return options


def find_compiler() -> Compiler:
    """The compiler of $CXX, else g++, clang++, c++, else `zig c++` of the ziglang package.

    Raises DeviceNotFound, naming the package to install, where there is none.
    """
    return _find(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.lru_cache(maxsize=8)
def _find(chosen: str, path: str) -> Compiler:
    tried = []
    for words in ([shlex.split(chosen)] if chosen else []) + [["g++"], ["clang++"], ["c++"]]:
        found = shutil.which(words[0], path=path)
        if found is not None:
            return _identified((found, *words[1:]))
        tried.append(words[0])
        if chosen:
            raise DeviceNotFound(_ADVICE.format(tried=f"CXX={chosen}"))
    zig = importlib.util.find_spec("ziglang")
    if zig is not None and zig.origin is not None:
        executable = Path(zig.origin).with_name("zig")
        if executable.exists():
            return _identified((str(executable), "c++"))
    raise DeviceNotFound(_ADVICE.format(tried=", ".join([*tried, "zig of the ziglang package"])))


def _identified(command: tuple[str, ...]) -> Compiler:
    try:
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise DeviceNotFound(f"the C++ compiler {shlex.join(command)} does not run: {error}") from error
    text = shown.stdout
    family = "clang" if "clang" in text.lower() else "gcc"
    if os.path.basename(command[0]) == "zig":
        family = "zig"
    return Compiler(command, family, text.splitlines()[0] if text else "")


@functools.lru_cache(maxsize=4)
def _machine_options(family: str) -> tuple[str, ...]:
    # With FMA instructions fmaf is one of them instead of a library call; its value is the same.
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        flags = Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
    except (OSError, IndexError):
        return ()
    if not {"avx2", "fma", "bmi2", "movbe"} <= set(flags):
        return ()
    return ("-mcpu=x86_64_v3",) if family == "zig" else ("-march=x86-64-v3",)
