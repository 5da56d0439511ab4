"""Small launches of different families at one level, in one kernel generated for them.

At small batch a step is made of many launches that each fill a part of the device, and every join between branches of
the graph costs more than the work. A level's launches are independent, so they may run in one launch: blocks 0..e0-1
work for the first family, e0..e1-1 for the second, and so on. The generated source is the families' own files, each in
a namespace, their entry points turned into device functions; a block runs the very code that it would have run alone,
so the bits are the same.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from fxengine.driver import KERNEL_FOLDER, Device, Kernel, KernelSource
from fxengine.graphs.schedule import Part

#: A part with more blocks than this many per multiprocessor fills the device by itself and gains nothing.
_BLOCKS_PER_MULTIPROCESSOR = 4
_THREADS = 256
#: Names of the generated kernels.
_KERNEL = "fx_fused"

_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+__launch_bounds__\s*\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)\s+(\w+)')
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[^\n]*\n", re.MULTILINE)
#: A kernel that looks at the whole grid cannot share it.
_GRID = re.compile(r"\b(gridDim|blockIdx)\b")


class Fusion:
    """Decides, from (device, family, shapes) alone, which parts of a level share a launch.

    Args:
        device: where the plan runs.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._limit = _BLOCKS_PER_MULTIPROCESSOR * device.target.sm_count

    def fuses(self, part: Part) -> bool:
        """Whether a part may share a launch: small, two blocks to a multiprocessor, no view of the whole grid."""
        family = part.family
        if family.alone or family.shared or part.blocks > self._limit:
            return False
        text = KernelSource.load(family.source).text
        bounds = {name: (int(threads), int(blocks or 2)) for threads, blocks, name in _ENTRY.findall(text)}
        threads, blocks = bounds.get(family.kernel, (0, 0))
        return threads == _THREADS and blocks >= 2 and not _GRID.search(text)


def fused_kernel(device: Device, parts: Sequence[Part]) -> Kernel:
    """The kernel for parts of several families; compiled once for each combination and kept in the cache on disk."""
    return device.module(fused_source(parts)).kernel(_KERNEL)


def fused_shared(device: Device, parts: Sequence[Part]) -> int:
    """Bytes of the pool that the families' large shared arrays have in common: what the hungriest has alone."""
    kernels = (device.module(p.family.source).kernel(p.family.kernel) for p in parts)
    return max(kernel.attributes.static_shared for kernel in kernels)


def fused_source(parts: Sequence[Part]) -> KernelSource:
    """The generated source, named by its contents."""
    text = fused_text(parts)
    name = f"fused_{hashlib.sha256(text.encode()).hexdigest()[:16]}.cu"
    return KernelSource.from_text(text, KERNEL_FOLDER / name)


def fused_text(parts: Sequence[Part]) -> str:
    """CUDA source of the kernel for some parts: `fx_fused(table, count, end, table, count, end, ...)`."""
    sources = {part.family.source: KernelSource.load(part.family.source) for part in parts}
    headers = {name: None for source in sources.values() for name in _direct_includes(source)}
    lines = ["// Generated: one launch for the small launches of a level.", "#define FX_FUSED 1"]
    lines += [f'#include "{name}"' for name in headers]
    spaces = {path: f"part_{i}" for i, path in enumerate(sources)}
    for path, source in sources.items():
        body = _INCLUDE.sub("", source.text)
        body = _ENTRY.sub(r"template <int = 0> __device__ __forceinline__ void \3", body)
        lines += [f"namespace {spaces[path]} {{", body]
        for i, part in enumerate(parts):
            if part.family.source == path:
                lines.append(
                    f"__device__ __forceinline__ void run_{i}(const void* table, int count) {{ "
                    f"{part.family.kernel}<>(static_cast<const {part.family.struct}*>(table), count); }}"
                )
        lines.append("}")
    arguments = ", ".join(f"const void* table{i}, int count{i}, int end{i}" for i in range(len(parts)))
    lines.append(f'extern "C" __global__ void __launch_bounds__({_THREADS}, 2) {_KERNEL}({arguments}) {{')
    lines.append("    const int block = static_cast<int>(blockIdx.x);")
    for i, part in enumerate(parts):
        condition = f"if (block < end{i}) " if i + 1 < len(parts) else ""
        lines.append(f"    {'else ' if i else ''}{condition}{spaces[part.family.source]}::run_{i}(table{i}, count{i});")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _direct_includes(source: KernelSource) -> list[str]:
    """Headers that a source includes itself, in order."""
    named = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', source.text, re.MULTILINE)
    return [str(name) for name in named]
