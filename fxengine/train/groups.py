"""Parameter groups: four equally long contiguous buffers each; a tensor is a view into them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fxengine.graphs import Program, Tensor

#: Tensors start at multiples of so many floats (16 bytes), so that aligned ones can be read in 16-byte pieces.
_ALIGN = 4


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
        value, grad, m, v: views into the group's four buffers.
    """

    name: str
    shape: tuple[int, ...]
    bound: float | None
    offset: int
    value: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor

    @property
    def is_matrix(self) -> bool:
        """Whether weight decay and the weight clamp apply."""
        return len(self.shape) > 1


class ParamGroup:
    """Tensors that share a norm, a learning rate and a clip.

    The padding between tensors is zero, gets zero gradients, and stays zero.

    Args:
        program: where the four buffers are declared, in the arenas `params`, `grads`, `adam_m`, `adam_v`.
        name: group name; signals `lr.<name>` and `clip.<name>` belong to it.
        index: index of the group in the signal map (0..15).
        specs: its tensors, in order.
    """

    def __init__(self, program: Program, name: str, index: int, specs: Sequence[ParamSpec]) -> None:
        self.name = name
        self.index = index
        offsets, self.size = _layout(specs)
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
                *(
                    buffer.flat(offset, offset + math.prod(spec.shape)).reshape(*spec.shape)
                    for buffer in (self.params, self.grads, self.m, self.v)
                ),
            )
            for spec, offset in zip(specs, offsets, strict=True)
        )


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


def _layout(specs: Sequence[ParamSpec]) -> tuple[list[int], int]:
    """Offset of each tensor and the padded total."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end = -(-(end + math.prod(spec.shape)) // _ALIGN) * _ALIGN
    return offsets, end
