"""Driver calls of the simulated device about the device, its context and its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver as cu

from fxengine.driver.sim.core import CONTEXT, Refused, Result, address_of, call, handle_of
from fxengine.driver.sim.launches import memory_operation
from fxengine.driver.sim.state import Stream
from fxengine.driver.sim.stream_calls import StreamCalls

__all__ = ["DeviceCalls"]

NAME = b"fxengine simulated device"
SHARED_PER_BLOCK = 48 * 1024
SHARED_OPTIN = 227 * 1024
MAX_THREADS = 1024

_A = cu.CUdevice_attribute
# Few multiprocessors, so that what is sized by them stays small. Compute capability 0.0 is that of no GPU.
_ATTRIBUTES = {
    _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 0,
    _A.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
    _A.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 4,
    _A.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
    _A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: MAX_THREADS,
    _A.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: 1024,
    _A.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: 1024,
    _A.CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: 64,
    _A.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: 2**31 - 1,
    _A.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: 65535,
    _A.CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: 65535,
    _A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: SHARED_PER_BLOCK,
    _A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: SHARED_OPTIN,
    _A.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: SHARED_OPTIN + 1024,
    _A.CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: 1024,
    _A.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: 2048,
    _A.CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: 65536,
    _A.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 4 * 1024 * 1024,
    _A.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: 1,
    _A.CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: 1,
    _A.CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: 1,
    _A.CU_DEVICE_ATTRIBUTE_INTEGRATED: 0,
    _A.CU_DEVICE_ATTRIBUTE_CLOCK_RATE: 1000000,
}


class DeviceCalls(StreamCalls):
    """Device, context and memory calls; arguments and values are those of cuda.bindings.driver."""

    # --- device ---

    @call(context=False)
    def cuInit(self, flags: int) -> None:
        """Initialise; needed once."""
        if flags:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        self.initialized = True

    @call(1, context=False)
    def cuDriverGetVersion(self) -> int:
        """CUDA 13.0."""
        return 13000

    @call(1, context=False)
    def cuDeviceGetCount(self) -> int:
        """One device."""
        self._require_init()
        return 1

    @call(1, context=False)
    def cuDeviceGet(self, ordinal: int) -> cu.CUdevice:
        """Device 0."""
        self._require_init()
        return cu.CUdevice(self._check_device(ordinal))

    @call(1, context=False)
    def cuDeviceGetName(self, length: int, device: Any) -> bytes:
        """The name, padded with zeros to `length`."""
        self._check_device(device)
        return NAME[: max(length - 1, 0)].ljust(length, b"\0")

    @call(1, context=False)
    def cuDeviceGetAttribute(self, attribute: cu.CUdevice_attribute, device: Any) -> int:
        """An attribute; 0 for those the simulated device has no notion of."""
        self._check_device(device)
        return _ATTRIBUTES.get(cu.CUdevice_attribute(attribute), 0)

    @call(1, context=False)
    def cuDeviceTotalMem(self, device: Any) -> int:
        """The machine's memory in bytes."""
        self._check_device(device)
        return self.memory.total

    # --- context ---

    @call(1, context=False)
    def cuDevicePrimaryCtxRetain(self, device: Any) -> cu.CUcontext:
        """Retain the primary context; not made current."""
        self._require_init()
        self._check_device(device)
        self.retained += 1
        return cu.CUcontext(CONTEXT)

    @call(context=False)
    def cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        """Release it; the last release destroys all that was made in it, and a lost context is well again."""
        self._check_device(device)
        if self.retained == 0:
            raise Refused(Result.CUDA_ERROR_INVALID_CONTEXT)
        self.retained -= 1
        if self.retained == 0:
            if self.lost is None:
                self.drain()
            self.memory.free_all()
            self.clear()

    @call(1, context=False)
    def cuCtxGetCurrent(self) -> cu.CUcontext:
        """This thread's context, CUcontext(0) for none."""
        self._require_init()
        return cu.CUcontext(self.local.context)

    @call(context=False)
    def cuCtxSetCurrent(self, context: Any) -> None:
        """Make the context, or none, current on this thread."""
        self._require_init()
        if handle_of(context) not in (0, CONTEXT):
            raise Refused(Result.CUDA_ERROR_INVALID_CONTEXT)
        self.local.context = handle_of(context)

    @call()
    def cuCtxSynchronize(self) -> None:
        """Run everything that is queued; also checks the edges of all allocations."""
        self.forbid_in_capture()
        self.drain()
        damage = self.memory.check_edges()
        if damage:
            self.lose(Result.CUDA_ERROR_ILLEGAL_ADDRESS, damage)

    # --- memory ---

    @call(1)
    def cuMemAlloc(self, nbytes: int) -> cu.CUdeviceptr:
        """Allocate device memory."""
        return cu.CUdeviceptr(self._allocate(nbytes, pinned=False))

    @call()
    def cuMemFree(self, address: Any) -> None:
        """Free device memory, after all queued work."""
        self._free(handle_of(address), pinned=False)

    @call(1)
    def cuTensorMapEncodeTiled(
        self,
        kind: cu.CUtensorMapDataType,
        rank: int,
        address: int,
        sizes: Sequence[Any],
        strides: Sequence[Any],
        box: Sequence[Any],
        steps: Sequence[Any],
        interleave: cu.CUtensorMapInterleave,
        swizzle: cu.CUtensorMapSwizzle,
        promotion: cu.CUtensorMapL2promotion,
        fill: cu.CUtensorMapFloatOOBfill,
    ) -> cu.CUtensorMap:
        """A tensor map as `FxTensorMap` of bulk_copy.cuh reads it: a matrix, rounded to tf32 or not."""
        kinds = cu.CUtensorMapDataType
        columns, rows = (int(n) for n in sizes)
        (stride,), (box_columns, box_rows) = (int(n) for n in strides), (int(n) for n in box)
        if (
            rank != 2
            or kind not in (kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32)
            or swizzle != cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
            or interleave != cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
            or fill != cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
            or box_columns != 32
            or [int(n) for n in steps] != [1, 1]
        ):
            raise Refused(Result.CUDA_ERROR_NOT_SUPPORTED, "the simulated device has no tensor maps of this kind")
        fits = 1 <= columns <= 2**32 and 1 <= rows <= 2**32 and stride < 2**40 and 1 <= box_rows <= 256
        if not fits or address % 16 or stride % 16:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        encoded = cu.CUtensorMap()
        rounded = kind == kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32
        words = [address, stride, columns | rows << 32, box_rows | rounded << 32, *[0] * 12]
        encoded.opaque = [cu.cuuint64_t(word & (2**64 - 1)) for word in words]
        return encoded

    @call(1)
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        """Allocate page-locked host memory; device and host address are the same."""
        if flags & ~7:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        return self._allocate(nbytes, pinned=True)

    @call(1)
    def cuMemHostGetDevicePointer(self, host: Any, flags: int) -> cu.CUdeviceptr:
        """The device address of page-locked memory."""
        address = address_of(host)
        found = self.memory.find(address, 1)
        if flags or found is None or not found.pinned:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"{address:#x} lies in no page-locked memory")
        return cu.CUdeviceptr(address)

    @call()
    def cuMemFreeHost(self, host: Any) -> None:
        """Free page-locked memory, after all queued work."""
        self._free(address_of(host), pinned=True)

    @call(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        """Free and total bytes."""
        return self.memory.total - self.memory.used, self.memory.total

    @call()
    def cuMemcpyHtoD(self, target: Any, host: Any, nbytes: int) -> None:
        """Copy to the device on the legacy stream, which non-blocking streams do not wait for."""
        self._copy_now(handle_of(target), address_of(host), nbytes, (handle_of(target),))

    @call()
    def cuMemcpyDtoH(self, host: Any, source: Any, nbytes: int) -> None:
        """Copy from the device."""
        self._copy_now(address_of(host), handle_of(source), nbytes, (handle_of(source),))

    @call()
    def cuMemcpyDtoD(self, target: Any, source: Any, nbytes: int) -> None:
        """Copy on the device."""
        self._copy_now(handle_of(target), handle_of(source), nbytes, (handle_of(target), handle_of(source)))

    @call()
    def cuMemsetD32(self, target: Any, value: int, count: int) -> None:
        """Fill `count` 32-bit words on the legacy stream."""
        self.forbid_in_capture()
        self.check_legacy(self.legacy)
        self.submit(self.legacy, self._fill(handle_of(target), value, count))

    @call()
    def cuMemcpyHtoDAsync(self, target: Any, host: Any, nbytes: int, stream: Any) -> None:
        """Copy to the device in the order of a stream. Pageable memory is read before the call returns."""
        source, to = address_of(host), handle_of(target)
        self._check_range(to, nbytes)
        on = self.find_stream(stream)
        if self._pageable_copy(on, source, nbytes):
            staged = ctypes.create_string_buffer(ctypes.string_at(source, nbytes), nbytes)
            self._copy(on, to, ctypes.addressof(staged), nbytes, staged)
        else:
            self._copy(on, to, source, nbytes, None)

    @call()
    def cuMemcpyDtoHAsync(self, host: Any, source: Any, nbytes: int, stream: Any) -> None:
        """Copy from the device in the order of a stream. Into pageable memory it returns when it is done."""
        to, from_ = address_of(host), handle_of(source)
        self._check_range(from_, nbytes)
        on = self.find_stream(stream)
        pageable = self._pageable_copy(on, to, nbytes)
        self._copy(on, to, from_, nbytes, None)
        if pageable:
            self.advance(lambda: not on.queue)

    @call()
    def cuMemcpyDtoDAsync(self, target: Any, source: Any, nbytes: int, stream: Any) -> None:
        """Copy on the device in the order of a stream."""
        self._check_range(handle_of(target), nbytes)
        self._check_range(handle_of(source), nbytes)
        self._copy(self.find_stream(stream), handle_of(target), handle_of(source), nbytes, None)

    @call()
    def cuMemsetD32Async(self, target: Any, value: int, count: int, stream: Any) -> None:
        """Fill `count` 32-bit words in the order of a stream."""
        on = self.find_stream(stream)
        self.check_legacy(on)
        work = self._fill(handle_of(target), value, count)
        if on.sequence is not None:
            operation, keep = memory_operation(self.library.memset, handle_of(target), value, count)
            kind = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET
            node = self.add_node(on, kind, operation, keep)
            node.fill = (handle_of(target), value & 0xFFFFFFFF, count)
        else:
            self.submit(on, work)

    def _require_init(self) -> None:
        if not self.initialized:
            raise Refused(Result.CUDA_ERROR_NOT_INITIALIZED)

    def _check_device(self, device: Any) -> int:
        if int(device) != 0:
            raise Refused(Result.CUDA_ERROR_INVALID_DEVICE)
        return 0

    def _allocate(self, nbytes: int, *, pinned: bool) -> int:
        self.forbid_in_capture()
        if nbytes <= 0:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "an allocation of 0 bytes")
        address = self.memory.allocate(nbytes, pinned=pinned)
        if address is None:
            raise Refused(
                Result.CUDA_ERROR_OUT_OF_MEMORY,
                f"{nbytes} bytes wanted, {self.memory.used} of {self.memory.total} in use",
            )
        return address

    def _free(self, address: int, *, pinned: bool) -> None:
        self.forbid_in_capture()
        if address == 0:
            return
        self.drain()
        found, damage = self.memory.free(address, pinned=pinned)
        if not found:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"no allocation begins at {address:#x}")
        if damage:
            self.lose(Result.CUDA_ERROR_ILLEGAL_ADDRESS, damage)

    def _check_range(self, address: int, nbytes: int) -> None:
        if nbytes < 0 or self.memory.find(address, nbytes) is None:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, self.memory.explain(address, nbytes))

    def _copy_now(self, target: int, source: int, nbytes: int, device: tuple[int, ...]) -> None:
        self.forbid_in_capture()
        self.check_legacy(self.legacy)
        for address in device:
            self._check_range(address, nbytes)
        if nbytes and (target == 0 or source == 0):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "a null host address")
        self.submit(self.legacy, lambda: _move(target, source, nbytes))

    def _pageable_copy(self, stream: Stream, host: int, nbytes: int) -> bool:
        """Whether the host side is pageable; that cannot be captured."""
        self.check_legacy(stream)
        if nbytes and host == 0:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "a null host address")
        found = self.memory.find(host, nbytes)
        if found is not None:
            return False
        if stream.sequence is not None:
            stream.sequence.invalidated = True
            raise Refused(
                Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                f"{host:#x} is pageable host memory: a captured copy needs page-locked memory",
            )
        return True

    def _copy(self, stream: Stream, target: int, source: int, nbytes: int, keep: Any) -> None:
        self.check_legacy(stream)
        if stream.sequence is not None:
            operation, kept = memory_operation(self.library.memcpy, target, source, nbytes)
            self.add_node(stream, cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY, operation, kept)
            return

        def work() -> None:
            if keep is None and (self._gone(target) or self._gone(source)):
                self.lose(Result.CUDA_ERROR_ILLEGAL_ADDRESS, f"copy of {nbytes} bytes touches freed memory")
            _move(target, source, nbytes)

        self.submit(stream, work)

    def _gone(self, address: int) -> bool:
        return address in self.memory.freed

    def _fill(self, target: int, value: int, count: int) -> Callable[[], None]:
        self._check_range(target, count * 4)
        if target % 4:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"{target:#x} is not aligned to 4 bytes")
        operation, keep = memory_operation(self.library.memset, target, value, count)

        def work() -> None:
            self.run_operations(ctypes.addressof(operation), 1)
            del keep[:]

        return work


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)
