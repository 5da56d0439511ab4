"""Device and page-locked memory of the simulated device: host memory, each allocation at the edge of a page.

The page behind an allocation is unreadable, so that an access past the end faults at once; freed memory stays
unreadable. The bytes between the end and that page (fewer than the alignment), and some before the beginning, hold
a pattern that is checked when the memory is freed or the device synchronizes.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
from dataclasses import dataclass

__all__ = ["Allocation", "Memory"]

_PAGE = mmap.PAGESIZE
_PATTERN = 0xFD
_FRONT = 64
_NONE, _READ_WRITE = 0, 3
_PRIVATE, _FIXED, _ANONYMOUS, _NORESERVE = 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MAX_ALIGNMENT = 4096

_c = ctypes.CDLL(None, use_errno=True)
_c.mmap.restype = ctypes.c_void_p
_c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_c.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_c.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_c.free.argtypes = [ctypes.c_void_p]
_c.free.restype = None


@dataclass(frozen=True)
class Allocation:
    """One allocation. `start` and `span` are the pages it lies in; span 0: malloc'ed."""

    address: int
    nbytes: int
    pinned: bool
    start: int
    span: int


class Memory:
    """All allocations of a device. New memory holds 0xFF bytes (NaN, -1): reading it before writing shows."""

    def __init__(self, *, guard_pages: bool, alignment: int, sanitized: bool) -> None:
        if alignment < 16 or alignment > _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment}: expected a power of two from 16 to {_MAX_ALIGNMENT}")
        self._guard_pages = guard_pages
        self._alignment = alignment
        self._sanitized = sanitized
        self._addresses: list[int] = []
        self._table: dict[int, Allocation] = {}
        self.used = 0
        self.total = os.sysconf("SC_PHYS_PAGES") * _PAGE
        self.freed: dict[int, int] = {}
        """Address and size of what was freed and lies unreadable, for messages."""

    def allocate(self, nbytes: int, *, pinned: bool) -> int | None:
        """The address of new memory, None where there is not enough."""
        if self.used + nbytes > self.total:
            return None
        made = self._malloc(nbytes, pinned) if self._sanitized else self._map(nbytes, pinned)
        if made is None:
            return None
        ctypes.memset(made.address, 0xFF, nbytes)
        bisect.insort(self._addresses, made.address)
        self._table[made.address] = made
        self.freed.pop(made.address, None)
        self.used += nbytes
        return made.address

    def free(self, address: int, *, pinned: bool) -> tuple[bool, str]:
        """(whether an allocation begins there, what is wrong with its edges or '')."""
        found = self._table.get(address)
        if found is None or found.pinned != pinned:
            return False, ""
        damage = self._damage(found)
        del self._table[address]
        del self._addresses[bisect.bisect_left(self._addresses, address)]
        self.used -= found.nbytes
        if found.span == 0:
            _c.free(address)
        elif self._guard_pages:
            flags = _PRIVATE | _ANONYMOUS | _NORESERVE | _FIXED
            _c.mmap(found.start, found.span, _NONE, flags, -1, 0)
            self.freed[address] = found.nbytes
        else:
            _c.munmap(found.start, found.span)
        return True, damage

    def free_all(self) -> None:
        """Free everything (the context ends)."""
        for allocation in list(self._table.values()):
            self.free(allocation.address, pinned=allocation.pinned)

    def find(self, address: int, nbytes: int) -> Allocation | None:
        """The allocation that holds this range wholly."""
        at = bisect.bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        found = self._table[self._addresses[at]]
        return found if address + nbytes <= found.address + found.nbytes else None

    def explain(self, address: int, nbytes: int) -> str:
        """Why a range is not inside an allocation."""
        for start, size in self.freed.items():
            if start <= address < start + max(size, 1):
                return f"{address:#x} lies in memory that was freed ({size} bytes at {start:#x})"
        at = bisect.bisect_right(self._addresses, address) - 1
        if at >= 0:
            near = self._table[self._addresses[at]]
            if address <= near.address + near.nbytes + _PAGE:
                return (
                    f"{nbytes} bytes at {address:#x} reach out of the allocation of {near.nbytes} bytes "
                    f"at {near.address:#x}"
                )
        return f"{address:#x} lies in no allocation"

    def check_edges(self) -> str:
        """What is wrong around the allocations, '' for nothing."""
        for allocation in self._table.values():
            damage = self._damage(allocation)
            if damage:
                return damage
        return ""

    def _malloc(self, nbytes: int, pinned: bool) -> Allocation | None:
        address = ctypes.c_void_p()
        # AddressSanitizer's allocator: red zones begin right behind the last byte.
        if _c.posix_memalign(ctypes.byref(address), self._alignment, nbytes) or address.value is None:
            return None
        return Allocation(address.value, nbytes, pinned, 0, 0)

    def _map(self, nbytes: int, pinned: bool) -> Allocation | None:
        room = -(-nbytes // self._alignment) * self._alignment
        pages = -(-room // _PAGE) * _PAGE
        span = pages + (2 * _PAGE if self._guard_pages else 0)
        start = _c.mmap(None, span, _READ_WRITE, _PRIVATE | _ANONYMOUS | _NORESERVE, -1, 0)
        if start is None or start == _FAILED:
            return None
        address = start + pages - room
        if self._guard_pages:
            address += _PAGE
            _c.mprotect(start, _PAGE, _NONE)
            _c.mprotect(start + _PAGE + pages, _PAGE, _NONE)
            front = min(_FRONT, address - start - _PAGE)
            ctypes.memset(address - front, _PATTERN, front)
            ctypes.memset(address + nbytes, _PATTERN, room - nbytes)
        return Allocation(address, nbytes, pinned, start, span)

    def _damage(self, allocation: Allocation) -> str:
        if allocation.span == 0 or not self._guard_pages:
            return ""
        front = min(_FRONT, allocation.address - allocation.start - _PAGE)
        end = allocation.address + allocation.nbytes
        rest = allocation.start + allocation.span - _PAGE - end
        for where, start, size in (("before", allocation.address - front, front), ("behind", end, rest)):
            data = ctypes.string_at(start, size)
            if data.count(_PATTERN) != size:
                at = next(i for i, byte in enumerate(data) if byte != _PATTERN)
                distance = front - at if where == "before" else at
                return (
                    f"something wrote {distance} bytes {where} the "
                    f"{'end' if where == 'behind' else 'beginning'} of the allocation of {allocation.nbytes} "
                    f"bytes at {allocation.address:#x}"
                )
        return ""
