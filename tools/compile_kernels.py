"""Compile every kernel for every supported architecture, without a GPU, and show what each one takes.

    python tools/compile_kernels.py                              # all of fxengine/cu
    python tools/compile_kernels.py linear_dw.cu --arch sm_90 --json

Exit status 1 if a file does not compile, a kernel spills registers to memory (unless `ALLOWED_SPILLS` says why it may),
or its products of warpgroups wait for each other: that costs time on every step and is invisible in the results.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from fxengine.driver.compiler import KernelUsage, compile_report
from fxengine.driver.errors import FxError
from fxengine.driver.source import KERNEL_FOLDER, KernelSource

#: A data-centre and a consumer card of every generation that the project supports.
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")

#: Heads of the columns of an architecture in the table.
COLUMNS = "regs shared  spill st/ld   KiB"

#: Files whose kernels are for some architectures alone, which have what they use; elsewhere they compile to nothing.
ONLY: dict[str, tuple[str, ...]] = {
    "iqn_warpgroup.cu": ("sm_90",),
    "iqn_warpgroup_backward.cu": ("sm_90",),
    "linear_dw_mapped.cu": ("sm_90", "sm_100", "sm_120"),
    "linear_dx_warpgroup.cu": ("sm_90",),
    "linear_forward_warpgroup.cu": ("sm_90",),
}

#: Registers that a kernel must have been given when it starts, because it deals them out anew.
REGISTERS = {"fx_iqn_warpgroup_backward": 128}

#: Files that are compiled with sizes as well, those of the default network and the largest: macros by file.
SIZES: dict[str, tuple[Mapping[str, str], ...]] = {
    "c51_many.cu": tuple({"C51_SIZES": sizes} for sizes in ("4, 51, 3, 3, true", "1, 64, 8, 1, true")),
    **{
        name: tuple({"HEADS_SIZES": f"{height}, 128, 128, 51, 3"} for height in (16, 32, 64))
        for name in ("heads.cu", "heads_tf32.cu", "heads_bf16.cu")
    },
}

#: (kernel, architecture) -> why this kernel may spill there.
ALLOWED_SPILLS: dict[tuple[str, str], str] = {}


@dataclass(frozen=True)
class Result:
    """One file compiled for one architecture.

    Attributes:
        source: name of the .cu file.
        arch: architecture, "sm_90".
        kernels: what each kernel takes; empty if the file did not compile.
        error: the compiler's message, or None.
    """

    source: str
    arch: str
    kernels: tuple[KernelUsage, ...]
    error: str | None = None


def sources(names: Sequence[str] = ()) -> list[str]:
    """The given .cu files (of fxengine/cu, or anywhere), or all of fxengine/cu."""
    if not names:
        return sorted(path.name for path in KERNEL_FOLDER.glob("*.cu"))
    return [name if (KERNEL_FOLDER / name).is_file() else str(Path(name).resolve()) for name in names]


def compile_one(name: str, arch: str, macros: Mapping[str, str] | None = None) -> Result:
    """Compile one file for one architecture, with macros or without; kernels with macros are named after those too."""
    short = Path(name).name
    try:
        if not macros:
            return Result(short, arch, tuple(compile_report(KernelSource.load(name), arch)))
        found = compile_report(KernelSource.defining(name, macros), arch)
        shown = "; ".join(macros.values())
        return Result(short, arch, tuple(replace(use, kernel=f"{use.kernel} [{shown}]") for use in found))
    except FxError as error:
        return Result(short, arch, (), str(error))


def compile_all(names: Sequence[str], archs: Sequence[str] = ARCHS, *, jobs: int = 1) -> list[Result]:
    """Compile files for architectures in `jobs` processes (NVRTC runs one compilation per process at a time)."""
    tasks = [(name, arch, macros) for name in names for macros in (None, *SIZES.get(name, ())) for arch in archs]
    if jobs == 1 or len(tasks) == 1:
        return [compile_one(*task) for task in tasks]
    # Spawned, not forked: the parent may have threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        return list(pool.map(compile_one, *zip(*tasks, strict=True)))


def problems(results: Sequence[Result], allowed: Mapping[tuple[str, str], str] = ALLOWED_SPILLS) -> list[str]:
    """What makes the check fail: errors, no kernel, spills that nobody gave a reason for, serialized products."""
    found = []
    for result in results:
        where = f"{result.source} for {result.arch}"
        if result.error is not None:
            found.append(f"{where}: {result.error}")
        elif not result.kernels and result.arch in ONLY.get(result.source, (result.arch,)):
            found.append(f"{where}: no kernel was found in the compiler's report")
        found += [
            f"{where}: {use.kernel} spills ({use.spill_stores} bytes stored, {use.spill_loads} loaded, "
            f"{use.registers} registers); lower its register use, or give a reason in ALLOWED_SPILLS"
            for use in result.kernels
            if (use.spill_stores or use.spill_loads) and (use.kernel, result.arch) not in allowed
        ]
        found += [
            f"{where}: {use.kernel} has its products of warpgroups serialized; ptxas's remark C75.. says why"
            for use in result.kernels
            if use.serialized
        ]
        found += [
            f"{where}: {use.kernel} takes {use.registers} registers, not {REGISTERS[use.kernel]}: its warpgroups "
            "share out so many among themselves (fx_warpgroup_give, fx_warpgroup_take)"
            for use in result.kernels
            if use.registers != REGISTERS.get(use.kernel, use.registers)
        ]
    return found


def table(results: Sequence[Result]) -> str:
    """Kernels by architectures: registers per thread, bytes of static shared memory, bytes spilled, KiB of code."""
    archs = list(dict.fromkeys(result.arch for result in results))
    cells = {(use.kernel, result.arch): use for result in results for use in result.kernels}
    kernels = list(dict.fromkeys(kernel for kernel, _ in cells))
    width = max([len(kernel) for kernel in kernels] + [len("kernel")])
    lines = [
        " ".join([" " * width, *(f"| {arch:<{len(COLUMNS)}}" for arch in archs)]).rstrip(),
        " ".join([f"{'kernel':<{width}}", *([f"| {COLUMNS}"] * len(archs))]),
    ]
    for kernel in kernels:
        row = [f"{kernel:<{width}}"]
        for arch in archs:
            use = cells.get((kernel, arch))
            if use is None:
                row.append(f"| {'-':<{len(COLUMNS)}}")
                continue
            spill = f"{use.spill_stores}/{use.spill_loads}"
            row.append(f"| {use.registers:>4} {use.shared:>6} {spill:>12} {use.code / 1024:>5.1f}")
        lines.append(" ".join(row))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the kernels for every architecture and check for spills.")
    parser.add_argument("files", nargs="*", help=".cu files, by name in fxengine/cu or by path (default: all)")
    parser.add_argument("--arch", nargs="+", default=list(ARCHS), help="architectures (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)

    results = compile_all(sources(options.files), options.arch, jobs=options.jobs)
    failures = problems(results)
    if options.json:
        print(json.dumps({"results": [asdict(r) for r in results], "problems": failures}, indent=1))
    else:
        print(table(results))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
