"""Static shared memory of each kernel, read from the object file that the C++ compiler wrote.

On the simulated device `__shared__` is thread-local storage. The object file says which function refers to which
thread-local symbol and which functions it refers to (every function has a section of its own), so the sum over all
that a kernel reaches is what the CUDA compiler would allot to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

__all__ = ["static_shared_bytes"]

_SYMTAB, _RELA = 2, 4
_TLS = 6
_EXECUTABLE = 4


def static_shared_bytes(object_file: Path, kernels: Iterable[str]) -> dict[str, int]:
    """Bytes of static shared memory that each kernel reaches; needs a 64-bit little-endian ELF object."""
    data = object_file.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return dict.fromkeys(kernels, 0)
    (table_offset,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, section_count, _ = struct.unpack_from("<HHH", data, 0x3A)
    if section_count == 0:  # more than 65,279 sections: the count stands in the first header
        (section_count,) = struct.unpack_from("<Q", data, table_offset + 0x20)
    # (name, type, flags, address, offset, size, link, info, alignment, entry size)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table_offset + i * entry_bytes) for i in range(section_count)]
    table = next(i for i, section in enumerate(sections) if section[1] == _SYMTAB)
    symbols, names = _symbols(data, sections, table)
    references: dict[int, list[int]] = {}
    for section in sections:
        if section[1] == _RELA and section[6] == table:
            found = references.setdefault(section[7], [])
            for at in range(section[4], section[4] + section[5], 24):
                found.append(struct.unpack_from("<Q", data, at + 8)[0] >> 32)
    return {kernel: _reachable(names.get(kernel, 0), sections, symbols, references) for kernel in kernels}


def _symbols(
    data: bytes, sections: list[tuple[int, ...]], table: int
) -> tuple[list[tuple[int, int, int]], dict[str, int]]:
    """(type, section, size) of every symbol, and the section of every named one."""
    offset, size, link = sections[table][4], sections[table][5], sections[table][6]
    strings = sections[link][4]
    symbols, names = [], {}
    for at in range(offset, offset + size, 24):
        name, info, _, section, _, length = struct.unpack_from("<IBBHQQ", data, at)
        symbols.append((info & 15, section, length))
        if name:
            end = data.index(b"\0", strings + name)
            names[data[strings + name : end].decode()] = section
    return symbols, names


def _reachable(
    start: int,
    sections: list[tuple[int, ...]],
    symbols: list[tuple[int, int, int]],
    references: dict[int, list[int]],
) -> int:
    pending, seen, shared = [start], {start}, set[int]()
    while pending:
        for index in references.get(pending.pop(), ()):
            kind, section, _ = symbols[index]
            if kind == _TLS:
                if section != 0:  # undefined: a variable of the runtime
                    shared.add(index)
            elif section not in seen and section < len(sections) and sections[section][2] & _EXECUTABLE:
                seen.add(section)
                pending.append(section)
    return sum(symbols[index][2] for index in shared)
