"""Parameters of an engine as a mapping from name to array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.driver import Buffer

if TYPE_CHECKING:
    from fxengine.engine import Engine


class Parameters(Mapping[str, NDArray[np.float32]]):
    """Parameters of an engine by name. Reading copies from the device, assigning copies to it; both wait."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffers = engine._parameter_buffers()

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self._engine._read(self._buffer(name))

    def __setitem__(self, name: str, value: ArrayLike) -> None:
        buffer = self._buffer(name)
        array = np.asarray(value)
        if array.shape != buffer.shape or array.dtype != np.float32:
            raise ValueError(f"parameter '{name}' is float32 {buffer.shape}, got {array.dtype} {array.shape}")
        self._engine._write(buffer, array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)

    def _buffer(self, name: str) -> Buffer:
        if name not in self._buffers:
            raise KeyError(f"no parameter '{name}'; there are {', '.join(self._buffers)}")
        return self._buffers[name]
