"""NVRTC: kernel sources to cubins, for any architecture and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from fxengine.driver.cache import DiskCache, cache_root
from fxengine.driver.elf import sections
from fxengine.driver.errors import CompileError, FxError
from fxengine.driver.source import KernelSource

__all__ = [
    "KernelUsage",
    "compile_cubin",
    "compile_report",
    "nvrtc_version",
    "resource_usage",
    "supported_archs",
]

# Lambdas inside kernels carry no execution space, and NVRTC 13.0 takes such functions for host functions.
BASE_OPTIONS = ("--std=c++17", "-DFX_DEVICE=1", "-lineinfo", "--fmad=true", "--device-as-default-execution-space")
_BUNDLED_SINCE = (13, 3)
# Architectures compiled with their own instructions (wgmma): a cubin runs on exactly its architecture anyway.
_SPECIFIC = {"sm_90": "sm_90a"}
_ERROR_LINE = re.compile(r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?:catastrophic )?error", re.MULTILINE)
_CONTEXT = 2


@dataclass(frozen=True)
class KernelUsage:
    """What a kernel takes, as ptxas reports it: bytes, except `registers` per thread and `barriers`."""

    kernel: str
    registers: int
    barriers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    serialized: bool = False
    """Whether ptxas made every product of a warpgroup wait for the one before."""
    code: int = 0
    """Machine code, as the cubin has it; 0 if only ptxas's report was read."""


def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC library; raises CompileError where there is none."""
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # DynamicLibNotFoundError is one
        raise CompileError(f"NVRTC cannot be loaded: {error}. Install nvidia-cuda-nvrtc.") from error
    _succeeded("nvrtcVersion", status)
    return int(major), int(minor)


def supported_archs() -> tuple[str, ...]:
    """Architectures this NVRTC compiles for, for example ("sm_75", ..., "sm_121")."""
    nvrtc_version()
    status, archs = nvrtc.nvrtcGetSupportedArchs()
    _succeeded("nvrtcGetSupportedArchs", status)
    return tuple(f"sm_{arch}" for arch in archs)


def compile_cubin(source: KernelSource, arch: str, options: Sequence[str] = ()) -> Path:
    """The cubin of `source` for exactly `arch` ("sm_90"), from the cache or compiled now; needs no GPU.

    Raises CompileError with the lines around each error, or where NVRTC does not know the architecture.
    """
    flags = _options(source, arch, options)
    key = [".".join(map(str, nvrtc_version())), arch, *flags, source.name, source.text]
    for header in source.headers:
        key += header

    def build(path: Path) -> None:
        path.write_bytes(_compile(source, flags)[0])

    return DiskCache("cubin").get_or_build(key, ".cubin", build)


def compile_report(source: KernelSource, arch: str, options: Sequence[str] = ()) -> list[KernelUsage]:
    """Registers, spills, shared memory and code of every kernel of `source` on `arch`, in order of name; not cached."""
    # NVRTC's own cache would skip ptxas, and with it the report.
    flags = _options(source, arch, (*options, "--ptxas-options=-v", "--no-cache"))
    cubin, log = _compile(source, flags)
    sizes = {section.name: section.size for section in sections(cubin)}
    return [replace(usage, code=sizes[f".text.{usage.kernel}"]) for usage in resource_usage(log)]


def resource_usage(log: str) -> list[KernelUsage]:
    """Parse the output of `--ptxas-options=-v`."""
    found: list[KernelUsage] = []
    serialized = set(re.findall(r"wgmma\S* instructions are serialized .* function '(\w+)'", log))
    for part in re.split(r"Compiling entry function '", log)[1:]:

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        kernel = part.split("'", 1)[0]
        found.append(
            KernelUsage(
                kernel=kernel,
                registers=number(r"Used (\d+) registers"),
                barriers=number(r"used (\d+) barriers"),
                stack=number(r"(\d+) bytes stack frame"),
                spill_stores=number(r"(\d+) bytes spill stores"),
                spill_loads=number(r"(\d+) bytes spill loads"),
                shared=number(r"(\d+) bytes smem"),
                serialized=kernel in serialized,
            )
        )
    return sorted(found, key=lambda usage: usage.kernel)


def _options(source: KernelSource, arch: str, extra: Sequence[str]) -> list[str]:
    known = supported_archs()
    if re.sub(r"[af]$", "", arch) not in known:
        version = ".".join(map(str, nvrtc_version()))
        raise CompileError(
            f"{source.name}: NVRTC {version} does not compile for {arch}; it knows {', '.join(known)}. "
            "For a newer GPU install a newer nvidia-cuda-nvrtc.",
            source=source.name,
        )
    return [*BASE_OPTIONS, f"--gpu-architecture={_SPECIFIC.get(arch, arch)}", *_header_options(source), *extra]


def _header_options(source: KernelSource) -> list[str]:
    """How NVRTC finds CUDA's own headers (cuda_fp16.h, cuda_bf16.h); nothing where the source needs none."""
    if not source.system_headers:
        return []
    version = nvrtc_version()
    if version >= _BUNDLED_SINCE:
        # NVRTC unpacks them there once, under a lock of its own.
        folder = cache_root() / f"nvrtc-headers-{version[0]}.{version[1]}"
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FxError(f"the cache folder {folder.parent} cannot be written: {error}") from error
        return [f"--use-bundled-headers={folder}"]
    from cuda import pathfinder

    found = pathfinder.find_nvidia_header_directory("cudart")
    if found is None:
        raise CompileError(
            f"{source.name} includes <{source.system_headers[0]}>, and no CUDA headers were found: install "
            "nvidia-cuda-runtime, or nvidia-cuda-nvrtc 13.3 or newer, which brings its own",
            source=source.name,
        )
    return [f"-I{found}"]


def _compile(source: KernelSource, options: Sequence[str]) -> tuple[bytes, str]:
    """(cubin, log). Headers are passed as text, so that nothing else than what was hashed can be compiled."""
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    status, program = nvrtc.nvrtcCreateProgram(source.text.encode(), source.name.encode(), len(texts), texts, names)
    _succeeded("nvrtcCreateProgram", status)
    try:
        encoded = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        log = _fetch(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        text = log.rstrip(b"\0 \n").decode("utf-8", "replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise _compile_error(source, options, status.name, text)
        return _fetch(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetch(program: Any, size_of: Any, read: Any) -> bytes:
    status, size = size_of(program)
    _succeeded(size_of.__name__, status)
    content = bytes(size)  # the binding writes into the object it is given
    _succeeded(read.__name__, read(program, content)[0])
    return content


def _succeeded(call: str, status: Any) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{call} returned {status.name}")


def _compile_error(source: KernelSource, options: Sequence[str], status: str, log: str) -> CompileError:
    texts = {source.name: source.text, **dict(source.headers)}
    excerpts: list[str] = []
    shown: set[tuple[str, int]] = set()
    for match in _ERROR_LINE.finditer(log):
        file, line = match["file"], int(match["line"])
        if file in texts and (file, line) not in shown:
            shown.add((file, line))
            excerpts.append(_excerpt(file, texts[file], line))
    parts = [f"{source.name} did not compile ({status}); options: {' '.join(options)}", *excerpts, log]
    return CompileError("\n".join(part for part in parts if part), source=source.name, log=log)


def _excerpt(file: str, text: str, line: int) -> str:
    lines = text.splitlines()
    first, last = max(1, line - _CONTEXT), min(len(lines), line + _CONTEXT)
    rows = (f"{'>' if n == line else ' '}{n:5} | {lines[n - 1]}" for n in range(first, last + 1))
    return "\n".join([f"{file}:", *rows])
