"""Device memory: arenas, the buffers placed in them, and memory that host and device share."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fxengine.driver.errors import FxError
from fxengine.driver.resource import Resource, defer, release_call

if TYPE_CHECKING:
    from fxengine.driver.device import Device
    from fxengine.driver.stream import Stream

__all__ = ["ALIGNMENT", "Arena", "Buffer", "MappedBuffer", "StridedBuffer"]

ALIGNMENT = 256
"""Bytes: every placed buffer begins at a multiple of it (full-width vector loads, whole sectors)."""
_GUARD = 256


class Buffer:
    """A typed, row-major view into device memory. The owner (an Arena or MappedBuffer) keeps the memory.

    Reads and writes with `stream=` are ordered behind the work of that stream only; without it they wait for
    all work of the device. Both return when the copy is done. Neither is possible inside a capture.
    """

    __slots__ = ("_address", "_owner", "dtype", "name", "nbytes", "shape")

    def __init__(
        self, owner: Arena | MappedBuffer, address: int, shape: Sequence[int], dtype: DTypeLike, name: str
    ) -> None:
        self._owner = owner
        self._address = address
        self.shape = tuple(int(extent) for extent in shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        self.name = name

    @property
    def device(self) -> Device:
        """The device the memory belongs to."""
        return self._owner.device

    @property
    def owner(self) -> Arena | MappedBuffer:
        """What holds the memory; this view ends with it."""
        return self._owner

    @property
    def address(self) -> int:
        """Device address of the first element. Raises ClosedError once the owner is closed."""
        self._owner.check_open()
        return self._address

    def read(self, *, stream: Stream | None = None) -> NDArray[Any]:
        """A copy of the contents, of this shape and dtype."""
        array = np.empty(self.shape, self.dtype)
        address = self.address
        if self.nbytes:
            device = self._owner.device
            with device.activate():
                if stream is None:
                    device.synchronize()
                    device.driver.cuMemcpyDtoH(array.ctypes.data, address, self.nbytes)
                else:
                    device.driver.cuMemcpyDtoHAsync(array.ctypes.data, address, self.nbytes, stream.handle)
                    stream.synchronize()
        return array

    def write(self, array: ArrayLike, *, stream: Stream | None = None) -> None:
        """Copy a NumPy array of exactly this shape and dtype here; raises FxError for any other."""
        source = np.ascontiguousarray(self._fitting(array))
        address = self.address
        if self.nbytes:
            device = self._owner.device
            with device.activate():
                if stream is None:
                    device.synchronize()
                    device.driver.cuMemcpyHtoD(address, source.ctypes.data, self.nbytes)
                    # From pageable memory the call may return once the data is staged, and our streams do not
                    # wait for the default stream that carries the rest.
                    device.synchronize()
                else:
                    device.driver.cuMemcpyHtoDAsync(address, source.ctypes.data, self.nbytes, stream.handle)
                    stream.synchronize()  # `source` may be a temporary

    def fill_u32(self, value: int, *, stream: Stream | None = None) -> None:
        """Set every 32-bit word to `value`. With `stream=` it is only enqueued there, and can be captured."""
        if self.nbytes % 4:
            raise FxError(f"buffer {self.name!r} has {self.nbytes} bytes, not a whole number of 32-bit words")
        if not 0 <= value < 1 << 32:
            raise FxError(f"buffer {self.name!r}: {value} is no unsigned 32-bit value")
        address = self.address
        if self.nbytes:
            device = self._owner.device
            with device.activate():
                if stream is None:
                    device.synchronize()
                    device.driver.cuMemsetD32(address, value, self.nbytes // 4)
                    device.synchronize()  # asynchronous to the host, on a stream that ours do not wait for
                else:
                    device.driver.cuMemsetD32Async(address, value, self.nbytes // 4, stream.handle)

    def copy_from(self, source: Buffer, *, stream: Stream) -> None:
        """Enqueue a copy of `source`, of equal size in bytes, on `stream`; can be captured."""
        if source.nbytes != self.nbytes:
            raise FxError(
                f"buffer {self.name!r} has {self.nbytes} bytes; "
                f"{source.name!r}, to be copied to it, has {source.nbytes}"
            )
        if self.nbytes:
            device = self._owner.device
            with device.activate():
                device.driver.cuMemcpyDtoDAsync(self.address, source.address, self.nbytes, stream.handle)

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: DTypeLike, name: str | None = None) -> Buffer:
        """A part of this buffer, from `offset_bytes` on. Raises FxError where it reaches out of it."""
        part = Buffer(self._owner, self._address + offset_bytes, shape, dtype, name or self.name)
        if offset_bytes < 0 or offset_bytes + part.nbytes > self.nbytes:
            raise FxError(
                f"a view of {part.nbytes} bytes at {offset_bytes} reaches out of buffer {self.name!r} "
                f"of {self.nbytes} bytes"
            )
        if (self._address + offset_bytes) % part.dtype.alignment:
            raise FxError(
                f"a view of {self.name!r} at byte {offset_bytes} is not aligned for {part.dtype} "
                f"({part.dtype.alignment} bytes)"
            )
        return part

    def _fitting(self, array: ArrayLike) -> NDArray[Any]:
        """The array, of this shape and dtype."""
        given = np.asarray(array)
        if given.shape != self.shape or given.dtype != self.dtype:
            raise FxError(
                f"buffer {self.name!r} is {self.dtype} {list(self.shape)}; "
                f"the array written to it is {given.dtype} {list(given.shape)}"
            )
        return given

    def __repr__(self) -> str:
        return f"<buffer {self.name!r} {self.dtype} {list(self.shape)} at {self._address:#x}>"


class StridedBuffer(Buffer):
    """A matrix whose rows lie `ld` elements apart, from the start of a buffer to its end.

    It can be read and written as if there were no gaps; what lies between the rows is written back as it was.
    """

    __slots__ = ("_span", "_strides")

    def __init__(self, span: Buffer, shape: Sequence[int], ld: int) -> None:
        super().__init__(span.owner, span._address, shape, span.dtype, span.name)
        rows, columns = self.shape
        if (rows - 1) * ld + columns != math.prod(span.shape):
            raise FxError(f"{rows} rows of {columns} elements, {ld} apart, do not fill {span!r}")
        self._span = span
        self._strides = ld * self.dtype.itemsize, self.dtype.itemsize

    @property
    def address(self) -> int:
        """Refused: whoever takes an address takes the elements to follow each other."""
        raise FxError(f"buffer {self.name!r} has gaps between its rows: it can only be read and written")

    def read(self, *, stream: Stream | None = None) -> NDArray[Any]:
        """A copy of the contents, of this shape and dtype."""
        return self._rows(self._span.read(stream=stream)).copy()

    def write(self, array: ArrayLike, *, stream: Stream | None = None) -> None:
        """Copy a NumPy array of exactly this shape and dtype here; raises FxError for any other."""
        given = self._fitting(array)
        whole = self._span.read(stream=stream)
        self._rows(whole)[...] = given
        self._span.write(whole, stream=stream)

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: DTypeLike, name: str | None = None) -> Buffer:
        """Refused, like `address`."""
        raise FxError(f"buffer {self.name!r} has gaps between its rows: it has no views")

    def _rows(self, whole: NDArray[Any]) -> NDArray[Any]:
        return np.lib.stride_tricks.as_strided(whole, self.shape, self._strides)


class Arena(Resource):
    """One allocation that buffers are placed in, one behind the other, each at a multiple of 256 bytes.

    With `guard=True` all that no buffer covers, at least 256 bytes before and behind each, holds the guard byte
    in each byte, and `check_guards` finds kernels that wrote there. The guards need room: see `required`. In an
    arena that a program clears as a whole, choose guard_byte=0. Without guards the contents start undefined.
    """

    rank = 4
    handle: Any

    def __init__(self, device: Device, name: str, nbytes: int, guard: bool = False, *, guard_byte: int = 0xFD) -> None:
        """Allocate `nbytes` bytes; raises CudaError (CUDA_ERROR_OUT_OF_MEMORY) where the device is full."""
        if nbytes <= 0:
            raise FxError(f"arena {name!r}: {nbytes} bytes requested; an arena needs at least one")
        driver = device.driver
        self.name = name
        self.nbytes = -(-nbytes // 4) * 4
        self.guard = guard
        self.guard_byte = guard_byte
        self.buffers: dict[str, Buffer] = {}
        with device.activate():
            handle = driver.cuMemAlloc(self.nbytes)
        super().__init__(device, f"arena {name!r}", release_call(driver, "cuMemFree", handle))
        self.handle = handle
        self._base = int(handle)
        self._used = _GUARD if guard else 0
        if guard:
            self.whole.fill_u32(int.from_bytes(bytes([guard_byte] * 4), "little"))

    @staticmethod
    def required(sizes: Iterable[int], guard: bool = False) -> int:
        """Bytes an arena needs to place buffers of these sizes (bytes) in this order; at least 256."""
        used = _GUARD if guard else 0
        for size in sizes:
            used = _aligned(used) + size + (_GUARD if guard else 0)
        return max(_aligned(used), ALIGNMENT)

    @property
    def address(self) -> int:
        """Device address of the first byte. Raises ClosedError after close()."""
        self.check_open()
        return self._base

    @property
    def whole(self) -> Buffer:
        """The arena as one buffer of uint32."""
        return Buffer(self, self._base, (self.nbytes // 4,), np.uint32, self.name)

    @property
    def used(self) -> int:
        """Bytes up to the end of the last buffer (and its guard)."""
        return self._used

    def place(self, name: str, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        """Give `name` its place. Raises FxError for a name that is taken, or where the arena is full."""
        self.check_open()
        if name in self.buffers:
            raise FxError(f"arena {self.name!r} already has a buffer {name!r}")
        offset = _aligned(self._used)
        buffer = Buffer(self, self._base + offset, shape, dtype, name)
        end = offset + buffer.nbytes + (_GUARD if self.guard else 0)
        if end > self.nbytes:
            raise FxError(
                f"arena {self.name!r} of {self.nbytes} bytes is full: {self._used} used, buffer {name!r} "
                f"needs {end - self._used} more{' with its guard' if self.guard else ''}"
            )
        self._used = end
        self.buffers[name] = buffer
        return buffer

    def check_guards(self) -> None:
        """Raise FxError naming the buffers around the first guard that was overwritten. Waits for the device."""
        if not self.guard:
            raise FxError(f"arena {self.name!r} was made without guard=True: it has no guards to check")
        self.check_open()
        data = self.whole.read().view(np.uint8)
        start, before = 0, "the start of the arena"
        for name, buffer in [*self.buffers.items(), ("the end of the arena", None)]:
            end = self.nbytes if buffer is None else buffer.address - self._base
            wrong = np.flatnonzero(data[start:end] != self.guard_byte)
            if wrong.size:
                raise FxError(
                    f"arena {self.name!r}: {wrong.size} guard byte(s) between {before} and {name} were "
                    f"overwritten, first {int(wrong[0])} bytes behind {before}, "
                    f"last {end - start - int(wrong[-1])} before {name}"
                )
            if buffer is not None:
                start, before = end + buffer.nbytes, name


class MappedBuffer(Resource):
    """Page-locked host memory that the device reads and writes in place, zeroed at first.

    `array` and the device see the same bytes; ordering is up to the program (events, sequence numbers).
    NumPy views keep the memory: it is freed when the buffer is closed and the last view is gone.
    """

    rank = 5

    def __init__(self, device: Device, shape: Sequence[int], dtype: DTypeLike, name: str) -> None:
        driver = device.driver
        self.name = name
        self.shape = tuple(int(extent) for extent in shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        if self.nbytes <= 0:
            raise FxError(f"mapped buffer {name!r}: shape {list(self.shape)} has no elements")
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        with device.activate():
            host = int(driver.cuMemHostAlloc(self.nbytes, flags))
            block = (ctypes.c_ubyte * self.nbytes).from_address(host)
            # The block, base of every view, owns the memory; closing only lets go of it.
            device.core.hold()
            freeing = weakref.finalize(block, defer, device.core, release_call(driver, "cuMemFreeHost", host))
            freeing.atexit = False
            self._address = int(driver.cuMemHostGetDevicePointer(host, 0))
        super().__init__(device, f"mapped buffer {name!r}", _nothing)
        self._block: Any = block
        ctypes.memset(block, 0, self.nbytes)

    @property
    def array(self) -> NDArray[Any]:
        """The memory as a NumPy array, no copy. Raises ClosedError after close()."""
        self.check_open()
        return np.frombuffer(self._block, self.dtype).reshape(self.shape)

    @property
    def address(self) -> int:
        """Device address of the first element. Raises ClosedError after close()."""
        self.check_open()
        return self._address

    @property
    def buffer(self) -> Buffer:
        """The memory as a device buffer, for views and copies."""
        return Buffer(self, self.address, self.shape, self.dtype, self.name)

    def close(self) -> None:
        """Let go of the memory; a second call does nothing."""
        super().close()
        self.__dict__.pop("_block", None)  # the last reference frees it, now or when the last view goes


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _nothing() -> None:
    pass
