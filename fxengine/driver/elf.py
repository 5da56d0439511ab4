"""The section table of an ELF file, which cubins are as well as the object files of the C++ compiler."""

from __future__ import annotations

import struct
from typing import NamedTuple

__all__ = ["Section", "sections"]

_UNLISTED = 0xFFFF  # a section number that stands in the first header instead


class Section(NamedTuple):
    """One section: its name, and the rest of its header as it lies in the file."""

    name: str
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_bytes: int


def sections(data: bytes) -> list[Section]:
    """The sections of a file, by number; none where it is not a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        return []
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if table == 0:
        return []
    first = struct.unpack_from("<IIQQQQIIQQ", data, table)
    if count == 0:  # more than 65,279 sections: the count stands in the first header
        count = first[5]
    if names == _UNLISTED:
        names = first[6]
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry_bytes) for i in range(count)]
    strings = headers[names][4]

    def text(at: int) -> str:
        return data[strings + at : data.index(b"\0", strings + at)].decode()

    return [Section(text(name), *rest) for name, *rest in headers]
