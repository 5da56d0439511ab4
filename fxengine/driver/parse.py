"""Kernel signatures and record layouts, read from the .cu text: each is written down once, in CUDA.

Understood are `extern "C" __global__ void __launch_bounds__(n) name(parameters) {` and
`struct Name { fields };` with one field per line: a scalar, a pointer, or an array of one of them whose length is a
number (`const float* adv[8];`). Other structs (with methods or bases) may stand in the file; asking for their layout
raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fxengine.driver.errors import FxError

__all__ = ["KernelSignature", "Parameter", "ParsedSource", "StructLayout", "parse_source"]

_SCALARS = {
    "int": "<i4",
    "unsigned": "<u4",
    "unsigned int": "<u4",
    "float": "<f4",
    "double": "<f8",
    "long long": "<i8",
    "unsigned long long": "<u8",
    "u64": "<u8",  # fx.cuh's short name
}
_POINTER = "<u8"
_ALLOWED = "a pointer, int, unsigned, float, double, long long or unsigned long long"

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_KERNEL = re.compile(
    r'\bextern\s*"C"(?P<words>(?:\s+(?:__global__|void|__launch_bounds__\s*\([^()]*\)))+)'
    r"\s+(?P<name>\w+)\s*\((?P<parameters>[^()]*)\)\s*\{"
)
_BOUNDS = re.compile(r"__launch_bounds__\s*\(\s*([^(),]+?)\s*(?:,[^()]*)?\)")
_CONSTANT = re.compile(
    r"\bconstexpr\s+(?:int|unsigned)\s+(\w+)\s*=\s*(\d+)\s*;|^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(\d+)",
    re.MULTILINE,
)
_STRUCT = re.compile(r"\bstruct\s+(\w+)\s*\{")
_DECLARATION = re.compile(r"(?P<type>[A-Za-z_][\w\s]*?)\s*(?P<stars>\*[\s*]*)?\b(?P<name>[A-Za-z_]\w*)")
_ARRAY = re.compile(r"(?P<element>.*\w)\s*\[\s*(?P<length>[1-9]\d*)\s*\]\s*", re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter or a record field."""

    name: str
    ctype: str
    """The type without const and __restrict__, for example "float*" or "float*[8]"."""
    dtype: np.dtype
    """Its NumPy type; pointers are '<u8', arrays are subarrays."""
    pointer: bool
    """Whether it, or each entry of the array, is a pointer."""
    offset: int
    """Bytes from the start of the parameter block or record."""
    comment: str = ""
    """The text behind // on the field's line."""


@dataclass(frozen=True)
class KernelSignature:
    """An entry point: its parameters and the block size it is bounded to (None without __launch_bounds__)."""

    name: str
    parameters: tuple[Parameter, ...]
    threads: int | None


@dataclass(frozen=True)
class StructLayout:
    """A record: its fields and its NumPy type with C's alignment and padding."""

    name: str
    fields: tuple[Parameter, ...]

    @cached_property
    def dtype(self) -> np.dtype:
        """Structured, aligned dtype; one element per record of a table."""
        return np.dtype([(field.name, field.dtype) for field in self.fields], align=True)


@dataclass(frozen=True)
class ParsedSource:
    """What `parse_source` found."""

    name: str
    kernels: dict[str, KernelSignature]
    _structs: dict[str, tuple[str, int, str]]
    """name: (file, line of the body's start, body with comments)."""

    @property
    def struct_names(self) -> tuple[str, ...]:
        """Every struct, whether its layout is understood or not."""
        return tuple(self._structs)

    def struct(self, name: str) -> StructLayout:
        """The layout of a record struct. Raises FxError if there is none, or its fields are not understood."""
        if name not in self._structs:
            known = ", ".join(self._structs) or "none"
            raise FxError(f"{self.name} defines no struct {name}; it defines {known}")
        file, line, body = self._structs[name]
        fields: list[Parameter] = []
        offset = 0
        plain_lines = _blank_comments(body).split("\n")
        for number, (plain, full) in enumerate(zip(plain_lines, body.split("\n"), strict=True), line):
            if not plain.strip():
                continue
            where = f"{file}:{number}: struct {name}"
            declared = plain.strip()
            if not declared.endswith(";") or declared.count(";") != 1:
                raise FxError(f"{where}: {declared!r} is not one field on one line ('type name;')")
            field = _field(declared[:-1], offset, where, full.partition("//")[2].strip())
            offset = field.offset + field.dtype.itemsize
            fields.append(field)
        if not fields:
            raise FxError(f"{file}:{line}: struct {name} has no fields")
        repeated = {f.name for f in fields if sum(g.name == f.name for g in fields) > 1}
        if repeated:
            raise FxError(f"{file}:{line}: struct {name} repeats {', '.join(sorted(repeated))}")
        return StructLayout(name, tuple(fields))


def parse_source(name: str, text: str, headers: Iterable[tuple[str, str]] = ()) -> ParsedSource:
    """Parse a .cu text and its headers (name, text). Raises FxError with file and line for what it cannot read."""
    kernels: dict[str, KernelSignature] = {}
    structs: dict[str, tuple[str, int, str]] = {}
    files = [(name, text), *headers]
    constants: dict[str, int] = {}
    for _, content in files:
        for a, b, c, d in _CONSTANT.findall(_blank_comments(content)):
            constants[a or c] = int(b or d)
    for file, content in files:
        plain = _blank_comments(content)
        for match in _STRUCT.finditer(plain):
            end = _closing_brace(plain, match.end())
            body = content[match.end() : end]
            structs[match[1]] = (file, _line(content, match.end()), body)
        for match in _KERNEL.finditer(plain):
            if "__global__" not in match["words"]:
                continue
            where = f"{file}:{_line(content, match.start())}: kernel {match['name']}"
            if match["name"] in kernels:
                raise FxError(f"{where} is defined twice")
            kernels[match["name"]] = _kernel(match, where, constants)
    return ParsedSource(name, kernels, structs)


def _kernel(match: re.Match[str], where: str, constants: dict[str, int]) -> KernelSignature:
    parameters: list[Parameter] = []
    offset = 0
    listed = match["parameters"].strip()
    for declared in listed.split(",") if listed else []:
        parameter = _declaration(declared, offset, where)
        offset = parameter.offset + parameter.dtype.itemsize
        parameters.append(parameter)
    bounds = _BOUNDS.search(match["words"])
    threads = None
    if bounds is not None:
        value = bounds[1]
        if not value.isdigit() and value not in constants:
            raise FxError(f"{where}: __launch_bounds__({value}) is neither a number nor a named constant of one")
        threads = int(value) if value.isdigit() else constants[value]
    return KernelSignature(match["name"], tuple(parameters), threads)


def _field(text: str, end: int, where: str, comment: str) -> Parameter:
    """Parse a record field: a declaration, or an array 'const float* x[8]', which C aligns as its entries."""
    array = _ARRAY.fullmatch(text)
    if array is None and "[" in text:
        raise FxError(f"{where}: {text.strip()!r} is no array 'type name[n]' with a number n of at least 1")
    if array is None:
        return _declaration(text, end, where, comment)
    entry = _declaration(array["element"], end, where, comment)
    dtype = np.dtype((entry.dtype, (int(array["length"]),)))
    return replace(entry, ctype=f"{entry.ctype}[{array['length']}]", dtype=dtype)


def _declaration(text: str, end: int, where: str, comment: str = "") -> Parameter:
    """Parse 'const float* __restrict__ x' as what follows `end` bytes."""
    words = re.sub(r"\b(?:const|__restrict__)\b", " ", text).strip()
    match = _DECLARATION.fullmatch(words)
    if match is None:
        raise FxError(f"{where}: {text.strip()!r} is not understood; expected {_ALLOWED}, then one name")
    base = " ".join(match["type"].split())
    stars = (match["stars"] or "").count("*")
    if not stars and base not in _SCALARS:
        raise FxError(f"{where}: {text.strip()!r} has type {base!r}; expected {_ALLOWED}")
    dtype = np.dtype(_POINTER if stars else _SCALARS[base])
    offset = -(-end // dtype.alignment) * dtype.alignment
    return Parameter(match["name"], base + "*" * stars, dtype, bool(stars), offset, comment)


def _blank_comments(text: str) -> str:
    """`text` with every comment replaced by blanks: positions and lines stay. Strings are left alone."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return found if found[0] == '"' else re.sub(r"[^\n]", " ", found)

    return _COMMENT.sub(blank, text)


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
