"""What the host sends to the device: batches and signals, through pinned memory, by copies in stream order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fxengine.driver import Buffer, Device, Event, MappedBuffer, Stream
from fxengine.signals import RING_ROWS, ROW

#: Batches that may be under way to the device before `write` waits for the oldest copy.
SLOTS = 4


class InputStaging:
    """Copies host arrays into device inputs without disturbing steps already queued.

    Args:
        device: the device.
        stream: the stream the steps run on.
        inputs: device buffers by input name.
    """

    def __init__(self, device: Device, stream: Stream, inputs: Mapping[str, Buffer]) -> None:
        self._device = device
        self._stream = stream
        self._inputs = dict(inputs)
        self._slots: dict[str, list[MappedBuffer]] = {}
        self._copied: dict[str, list[Event]] = {}
        self._turn: dict[str, int] = {}

    def write(self, arrays: Mapping[str, ArrayLike]) -> None:
        """Enqueue copies of the arrays. All are checked before the first is copied.

        Raises:
            ValueError: a shape or dtype differs from the input's.
        """
        checked = {name: self._checked(name, value) for name, value in arrays.items()}
        with self._device.activate():
            for name, array in checked.items():
                self._enqueue(name, array)

    def _checked(self, name: str, value: ArrayLike) -> np.ndarray:
        buffer = self._inputs[name]
        array = _as_numpy(value)
        if array.shape != buffer.shape or array.dtype != buffer.dtype:
            raise ValueError(f"input '{name}' is {buffer.dtype} {buffer.shape}, got {array.dtype} {array.shape}")
        return array

    def _enqueue(self, name: str, array: np.ndarray) -> None:
        buffer = self._inputs[name]
        if name not in self._slots:
            self._slots[name] = [
                MappedBuffer(self._device, buffer.shape, buffer.dtype, name=f"staging.{name}") for _ in range(SLOTS)
            ]
            self._copied[name] = [self._device.event() for _ in range(SLOTS)]
            self._turn[name] = 0
        turn = self._turn[name]
        slot, copied = self._slots[name][turn % SLOTS], self._copied[name][turn % SLOTS]
        if turn >= SLOTS:
            copied.synchronize()
        slot.array[...] = array
        self._device.driver.cuMemcpyHtoDAsync(
            buffer.address, slot.array.ctypes.data, buffer.nbytes, self._stream.handle
        )
        copied.record(stream=self._stream)
        self._turn[name] = turn + 1

    def close(self) -> None:
        """Free the slots. Idempotent."""
        for owned in (self._slots, self._copied):
            for entries in owned.values():
                for entry in entries:
                    entry.close()
            owned.clear()


class SignalRows:
    """A ring of rows in pinned memory, from which signals go to a snapshot on the device.

    A row must not be written while a copy of it is still to be made: `Signals` and `Collector` wait for the replay that
    it was sent for.

    Args:
        device: the device.
        stream: the stream of the replays.
        snapshot: float32 [SLOTS] on the device.
    """

    def __init__(self, device: Device, stream: Stream, snapshot: Buffer) -> None:
        self._device, self._stream, self._snapshot = device, stream, snapshot
        self._memory = MappedBuffer(device, (RING_ROWS, ROW), np.float32, name="signal rows")
        self.rows = self._memory.array
        """float32 [RING_ROWS, ROW]."""
        self._first = self.rows.ctypes.data

    def send(self, row: int, first: int, count: int, slot: int) -> None:
        """Enqueue a copy of `count` floats of a row, from `first` on, to the snapshot from `slot` on."""
        source = self._first + 4 * (row * ROW + first)
        with self._device.activate():
            self._device.driver.cuMemcpyHtoDAsync(
                self._snapshot.address + 4 * slot, source, 4 * count, self._stream.handle
            )

    def close(self) -> None:
        """Free the rows. Idempotent."""
        self._memory.close()


def _as_numpy(value: Any) -> np.ndarray:
    """NumPy view of an array on the host: NumPy itself, anything with `__array__`, or a host DLPack tensor."""
    if isinstance(value, np.ndarray):
        return value
    return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
