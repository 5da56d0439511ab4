"""What a planner must know of a device, also of one that is not there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxengine.driver.errors import FxError

__all__ = ["DeviceProperties", "Target"]

# arch: multiprocessors of the usual card, bytes of shared memory that one block may opt in to.
_KNOWN = {
    "sm_75": (72, 65_536),
    "sm_80": (108, 166_912),
    "sm_86": (84, 101_376),
    "sm_89": (128, 101_376),
    "sm_90": (132, 232_448),
    "sm_100": (148, 232_448),
    "sm_103": (160, 232_448),
    "sm_120": (188, 101_376),
}
_SIM = (4, 232_448)


@dataclass(frozen=True)
class DeviceProperties:
    """Limits of a device, as the driver reports them (sizes in bytes)."""

    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_reserved: int
    max_threads_per_block: int
    total_memory: int
    l2_bytes: int
    driver_version: int
    """As cuDriverGetVersion counts: 13000 is CUDA 13.0."""


@dataclass(frozen=True)
class Target:
    """The device facts that choose tiles and launches."""

    kind: str
    """"cuda" or "sim"."""
    arch: str
    """"sm_90", or "sim"."""
    sm_count: int
    shared_memory_optin: int
    """Bytes of shared memory, static and dynamic, that one block may use."""
    max_threads: int = 1024
    """Threads per block."""

    @property
    def arch_number(self) -> int | None:
        """90 for "sm_90" and "sm_90a"; None of the simulated device."""
        number = re.match(r"sm_(\d+)", self.arch)
        return int(number[1]) if number else None

    @property
    def cluster(self) -> int:
        """Blocks of a thread block cluster, FX_CLUSTER of cluster.cuh: 8 since sm_90, else 1."""
        return 8 if self.kind == "cuda" and (self.arch_number or 0) >= 90 else 1

    @classmethod
    def of(cls, arch: str) -> Target:
        """The target of an architecture ("sm_90") or of the simulated device ("sim"), without hardware.

        Raises FxError for an architecture whose numbers are not known.
        """
        if arch == "sim":
            return cls("sim", "sim", *_SIM)
        known = _KNOWN.get(re.sub(r"[af]$", "", arch))
        if known is None:
            raise FxError(f"target {arch!r} is unknown; known are sim, {', '.join(_KNOWN)}")
        return cls("cuda", arch, *known)
