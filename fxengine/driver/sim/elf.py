"""Static shared memory of each kernel, read from the object file that the C++ compiler wrote.

On the simulated device `__shared__` is thread-local storage. The object file says which function refers to which
thread-local symbol and which functions it refers to (every function has a section of its own), so the sum over all
that a kernel reaches is what the CUDA compiler would allot to it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

from fxengine.driver.elf import Section, sections

__all__ = ["static_shared_bytes"]

_SYMTAB, _RELA = 2, 4
_TLS = 6
_EXECUTABLE = 4


def static_shared_bytes(object_file: Path, kernels: Iterable[str]) -> dict[str, int]:
    """Bytes of static shared memory that each kernel reaches; needs a 64-bit little-endian ELF object."""
    data = object_file.read_bytes()
    table = sections(data)
    if not table:
        return dict.fromkeys(kernels, 0)
    number = next(i for i, section in enumerate(table) if section.type == _SYMTAB)
    symbols, names = _symbols(data, table, number)
    references: dict[int, list[int]] = {}
    for section in table:
        if section.type == _RELA and section.link == number:
            found = references.setdefault(section.info, [])
            for at in range(section.offset, section.offset + section.size, 24):
                found.append(struct.unpack_from("<Q", data, at + 8)[0] >> 32)
    return {kernel: _reachable(names.get(kernel, 0), table, symbols, references) for kernel in kernels}


def _symbols(data: bytes, table: list[Section], number: int) -> tuple[list[tuple[int, int, int]], dict[str, int]]:
    """(type, section, size) of every symbol of section `number`, and the section of every named one."""
    offset, size, link = table[number].offset, table[number].size, table[number].link
    strings = table[link].offset
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
    table: list[Section],
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
            elif section not in seen and section < len(table) and table[section].flags & _EXECUTABLE:
                seen.add(section)
                pending.append(section)
    return sum(symbols[index][2] for index in shared)
