"""Where a parameter lives in the JAX peer: slabs of like tensors, rows of 128 elements, one array for all of them.

A slab holds tensors that the step reads together, such as the first layers of all branches, or query, key and value;
tensors of other sizes are padded with zeros, whose gradients are 0 and which therefore stay 0. Every slab starts at a
row of its own and belongs to one group, so that what holds for a group (rate, scale, bounds) is a column over the rows.
With all parameters in one array, norms, Adam and targets are a handful of kernels, and a call has few arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference.config import TARGET_GROUPS, Config, Shape, group_shapes
from tools.peers.common import groups_of

ROW = 128
Array = Any
Index = tuple[slice | int, ...]


@dataclass(frozen=True)
class Slab:
    """One or more tensors of a group, in one array.

    Attributes:
        name: of the slab.
        shape: of the array.
        group: index of the group among those present.
        matrix: whether weight decay and the weight clamp apply.
        target: whether there is a Polyak copy.
        parts: the tensors and where each lies in the array.
        start: first element in the array of all slabs.
    """

    name: str
    shape: Shape
    group: int
    matrix: bool
    target: bool
    parts: tuple[tuple[str, Index], ...]
    start: int

    @property
    def size(self) -> int:
        """Elements, padding within the slab included."""
        return int(np.prod(self.shape))

    @property
    def rows(self) -> int:
        """Rows that it takes."""
        return -(-self.size // ROW)


def _stacks(config: Config) -> dict[str, list[str]]:
    """Slabs of several tensors: those whose name starts with ":" stack them (padded), the others join their rows."""
    branches = range(len(config.branches))
    stacks = {f":{x}_{part}": [f"{x}_b{d}{part}" for d in branches] for part in ("fc", "out") for x in ("w", "b")}
    stacks["w_qkv"] = ["w_q", "w_k", "w_val"]
    heads = ["nb", "rg"] if config.has_regime else ["nb"]
    decoders = ["rec"] * config.rec + ["pred"] * config.pred + ["ens"] * bool(config.ens)
    for x in ("w", "b"):
        stacks[f"{x}_aux1"] = [f"{x}_{head}1" for head in heads]
        stacks[f"{x}_dec"] = [f"{x}_{name}" for name in decoders]
    return stacks


def _placed(shapes: Sequence[Shape], stacked: bool) -> tuple[Shape, list[Index]]:
    """Shape of a slab of these tensors and the place of each."""
    if stacked:
        shape = (len(shapes), *(max(extents) for extents in zip(*shapes, strict=True)))
        return shape, [(i, *(slice(n) for n in extents)) for i, extents in enumerate(shapes)]
    ends = np.cumsum([extents[0] for extents in shapes])
    rows = [slice(int(end) - extents[0], int(end)) for end, extents in zip(ends, shapes, strict=True)]
    return (int(ends[-1]), *shapes[0][1:]), [(r,) for r in rows]


class Layout:
    """All slabs of a configuration, those with a Polyak copy first.

    Attributes:
        groups: names of the groups present.
        slabs: by name.
        rows, target_rows: rows of all slabs, and of the prefix that has a Polyak copy.
        owner: group of every row.
        matrix: whether a row belongs to a matrix.
        sizes: elements of every group, without padding.
        padded: elements of every group with padding.
    """

    def __init__(self, config: Config) -> None:
        self.groups = groups_of(config)
        tables, stacks = group_shapes(config), _stacks(config)
        self.slabs: dict[str, Slab] = {}
        start = 0
        for g, group in enumerate(self.groups):
            left = dict(tables[group])
            wanted = {k: names for k, names in stacks.items() if names and set(names) <= set(left)}
            wanted |= {n: [n] for n in left if not any(n in names for names in wanted.values())}
            for key, names in wanted.items():
                shapes = [left[n] for n in names]
                shape, places = _placed(shapes, key.startswith(":"))
                parts = tuple(zip(names, places, strict=True))
                matrix = len(shapes[0]) > 1
                slab = Slab(key.removeprefix(":"), shape, g, matrix, group in TARGET_GROUPS, parts, start)
                self.slabs[slab.name] = slab
                start += slab.rows * ROW
        found = list(self.slabs.values())
        self.rows = start // ROW
        self.target_rows = sum(slab.rows for slab in found if slab.target)
        self.owner = np.repeat([s.group for s in found], [s.rows for s in found])
        self.matrix = np.repeat([s.matrix for s in found], [s.rows for s in found])
        self.sizes = np.array([sum(int(np.prod(s)) for s in tables[g].values()) for g in self.groups])
        self.padded = np.bincount(self.owner, minlength=len(self.groups)) * ROW

    def pack(self, tensors: Mapping[str, Any]) -> NDArray[np.float64]:
        """Tensors by name as rows; those of a slab that are missing (no Polyak copy) are left out with it."""
        parts = []
        for slab in self.slabs.values():
            if slab.parts[0][0] not in tensors:
                continue
            whole = np.zeros(slab.shape)
            for name, place in slab.parts:
                whole[place] = np.asarray(tensors[name])
            parts.append(np.pad(whole.ravel(), (0, slab.rows * ROW - slab.size)))
        return np.concatenate(parts).reshape(-1, ROW)

    def unpack(self, rows: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Tensors by name of rows on the host: all of them, or the prefix that has a Polyak copy."""
        flat = rows.reshape(-1)
        tensors: dict[str, NDArray[Any]] = {}
        for slab in self.slabs.values():
            if slab.start < flat.size:
                whole = flat[slab.start : slab.start + slab.size].reshape(slab.shape)
                tensors |= {name: whole[place] for name, place in slab.parts}
        return tensors

    def view(self, rows: Array, name: str) -> Array:
        """A slab of rows on the device."""
        slab = self.slabs[name]
        return rows.reshape(-1)[slab.start : slab.start + slab.size].reshape(slab.shape)
