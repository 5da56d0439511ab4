"""Checks of operands that several op families share. Each message names the record and both sides of the conflict."""

from __future__ import annotations

import numpy as np

from fxengine.graphs import ProgramError, Tensor


def describe(t: Tensor) -> str:
    """Name and shape of a tensor, as messages show them."""
    return f"'{t.name}' {list(t.shape)}"


def expect(
    record: str, role: str, t: Tensor | None, shape: tuple[int, ...], because: str, *, gaps: bool = True
) -> None:
    """Raise ProgramError unless t is absent or float32 of this shape, and without gaps between rows if so asked."""
    if t is None:
        return
    if t.shape != shape or t.dtype != np.float32:
        raise ProgramError(f"{record}: {role} is {describe(t)} of {t.dtype}, expected float32 {list(shape)}: {because}")
    if not gaps and not t.contiguous:
        raise ProgramError(f"{record}: {role} {describe(t)} has gaps between its rows, expected none")


def matrix(tensor: Tensor, name: str, label: str) -> tuple[int, int]:
    """Rows and columns of a float32 matrix; raises ProgramError if it is none."""
    if len(tensor.shape) != 2 or tensor.dtype != np.float32:
        raise ProgramError(f"'{label}': {name} must be a float32 matrix, got {tensor.dtype} {tensor.shape}")
    return tensor.shape[0], tensor.shape[1]


def require(tensor: Tensor | None, dtype: type[np.generic], shape: tuple[int, ...], name: str, label: str) -> None:
    """Raise ProgramError unless the tensor is absent or has this dtype and shape."""
    if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
        raise ProgramError(f"'{label}': {name} must be {np.dtype(dtype)} {shape}, got {tensor.dtype} {tensor.shape}")


def require_as(
    tensor: Tensor | None,
    shape: tuple[int, ...],
    role: str,
    because: str,
    label: str,
    dtype: type[np.generic] = np.float32,
) -> None:
    """`require`, with what asks for this shape in the message."""
    if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
        raise ProgramError(
            f"'{label}': {role} must be {np.dtype(dtype)} {shape}, as {because}; got {tensor.dtype} {tensor.shape}"
        )


def all_aligned(*tensors: Tensor | None) -> bool:
    """Whether all rows of those that there are start at multiples of 16 bytes."""
    return all(t is None or t.aligned for t in tensors)


def separate(record: str, role: str, written: Tensor | None, **read: Tensor | None) -> None:
    """Raise ProgramError if a result overlaps what other threads still read."""
    for name, t in read.items():
        if written is not None and t is not None and written.region().overlaps(t.region()):
            raise ProgramError(
                f"{record}: {role} {describe(written)} overlaps {name} {describe(t)}; give it memory of its own"
            )
