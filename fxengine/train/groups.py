"""Parameter groups: four equally long contiguous buffers each; a tensor is a view into them.

Tensors, and the rows of a matrix, start at multiples of 4 floats (16 bytes), so that they can be read in such pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.graphs import Program, Tensor, row_stride


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of one trainable tensor.

    Attributes:
        name: unique over all groups.
        shape: `[out, in]` for a matrix, `[n]` for a vector.
        bound: initial values are uniform in ±bound; None: as `fxengine.initialise.initial_value` says for the shape.
    """

    name: str
    shape: tuple[int, ...]
    bound: float | None = None


def linear_specs(layer: str, outputs: int, inputs: int, *, random_bias: bool = False) -> list[ParamSpec]:
    """Weight `w_<layer>` [outputs, inputs] and bias `b_<layer>` [outputs] of a fully connected layer.

    The weight starts uniform in ±1/√inputs. The bias starts at 0, or with `random_bias` like the weight, as in PyTorch.
    """
    bound = 1.0 / math.sqrt(inputs) if random_bias else None
    return [ParamSpec(f"w_{layer}", (outputs, inputs)), ParamSpec(f"b_{layer}", (outputs,), bound)]


@dataclass(frozen=True)
class Parameter:
    """One trainable tensor of a group.

    Attributes:
        name: its name, unique over all groups.
        shape: its shape.
        bound: half width of its initial values; None: the rule for its shape.
        offset: first element in each of the group's buffers.
        end: behind its last element and the padding of its last row.
        value, grad, m, v: views into the group's four buffers.
    """

    name: str
    shape: tuple[int, ...]
    bound: float | None
    offset: int
    end: int
    value: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor

    @property
    def is_matrix(self) -> bool:
        """Whether weight decay and the weight clamp apply."""
        return len(self.shape) > 1

    def within(self, buffer: Tensor) -> Tensor:
        """Its view into a buffer laid out like the group's."""
        return _view(buffer, self.shape, self.offset, self.end)

    def cut(self, whole: NDArray[Any]) -> NDArray[Any]:
        """Its view into the contents of such a buffer, on the host."""
        part = whole[self.offset : self.end]
        return part.reshape(self.shape[0], -1)[:, : self.shape[1]] if self.is_matrix else part


class ParamGroup:
    """Tensors that share a norm, a learning rate and a clip.

    The padding between tensors and between rows is zero, gets zero gradients, and stays zero.

    Args:
        program: where the four buffers are declared, in the arenas `params`, `grads`, `adam_m`, `adam_v`.
        name: group name; signals `lr.<name>` and `clip.<name>` belong to it.
        index: index of the group in the signal map (0..15).
        specs: its tensors, in order.
    """

    def __init__(self, program: Program, name: str, index: int, specs: Sequence[ParamSpec]) -> None:
        self.name = name
        self.index = index
        spans, self.size = _layout(specs)
        self.params, self.grads, self.m, self.v = (
            program.tensor(f"{arena}.{name}", (self.size,), np.float32, arena=arena)
            for arena in ("params", "grads", "adam_m", "adam_v")
        )
        self.parameters = tuple(
            Parameter(
                spec.name,
                spec.shape,
                spec.bound,
                offset,
                end,
                *(_view(buffer, spec.shape, offset, end) for buffer in (self.params, self.grads, self.m, self.v)),
            )
            for spec, (offset, end) in zip(specs, spans, strict=True)
        )

    def padding(self) -> NDArray[np.int64]:
        """Elements of the buffers that belong to no tensor."""
        mask = np.ones(self.size, np.bool_)
        for p in self.parameters:
            p.cut(mask)[...] = False
        return np.flatnonzero(mask).astype(np.int64)


class ParamGroups:
    """All groups of a step, in the order of their index."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self.groups = tuple(sorted(groups, key=lambda g: g.index))
        self._by_name = {p.name: p for g in self.groups for p in g.parameters}
        if len(self._by_name) != sum(len(g.parameters) for g in self.groups):
            raise ValueError("parameter names must be unique over all groups")

    def __getitem__(self, name: str) -> Parameter:
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f"no parameter '{name}'; there are {', '.join(self._by_name)}") from None

    def __iter__(self) -> Iterator[ParamGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every trainable tensor, group by group."""
        return tuple(self._by_name.values())

    @property
    def count(self) -> int:
        """Number of trainable scalars (padding not counted)."""
        return sum(math.prod(p.shape) for p in self.parameters)


def _layout(specs: Sequence[ParamSpec]) -> tuple[list[tuple[int, int]], int]:
    """Offset and end of each tensor, and the padded total."""
    spans, total = [], 0
    for spec in specs:
        if len(spec.shape) not in (1, 2):
            raise ValueError(f"parameter '{spec.name}' has shape {spec.shape}; expected [n] or [out, in]")
        *rows, columns = spec.shape
        end = total + (rows[0] * row_stride(columns) if rows else columns)
        spans.append((total, end))
        total = row_stride(end)
    return spans, total


def _view(buffer: Tensor, shape: tuple[int, ...], offset: int, end: int) -> Tensor:
    flat = buffer.flat(offset, end)
    return flat.reshape(shape[0], flat.size // shape[0]).columns(0, shape[1]) if len(shape) > 1 else flat
