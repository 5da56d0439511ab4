"""Checks of a launch, and operations of the runtime made from what driver calls give."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cu

from fxengine.driver.sim.core import Refused, Result
from fxengine.driver.sim.runtime import Operation
from fxengine.driver.sim.state import Function

__all__ = ["argument_array", "check_attributes", "check_shape", "kernel_operation", "memory_operation"]

_LIMITS = (2**31 - 1, 65535, 65535, 1024, 1024, 64)
_NAMES = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ")
_ID = cu.CUlaunchAttributeID
_HARMLESS = {
    _ID.CU_LAUNCH_ATTRIBUTE_IGNORE,
    _ID.CU_LAUNCH_ATTRIBUTE_PRIORITY,
    _ID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
    _ID.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    _ID.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
}


def check_shape(function: Function, shape: tuple[int, ...], shared: int) -> None:
    """Refuse a launch with an impossible grid, block or amount of dynamic shared memory."""
    gx, gy, gz, bx, by, bz = shape
    if not (0 < gx <= 2147483647 and 0 < gy <= 65535 and 0 < gz <= 65535 and 0 < bz <= 64 and bx > 0 and by > 0):
        for name, value, limit in zip(_NAMES, shape, _LIMITS, strict=True):
            if not 0 < value <= limit:
                raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"{name} {value}: expected 1 to {limit}")
    if bx * by * bz > function.max_threads:
        raise Refused(
            Result.CUDA_ERROR_INVALID_VALUE,
            f"kernel {function.name}: a block of {bx * by * bz} threads; its __launch_bounds__ and the device "
            f"allow {function.max_threads}",
        )
    if not 0 <= shared <= function.max_dynamic:
        raise Refused(
            Result.CUDA_ERROR_INVALID_VALUE,
            f"kernel {function.name}: {shared} bytes of dynamic shared memory; allowed are {function.max_dynamic} "
            f"beside {function.static_shared} static ones (cuFuncSetAttribute raises the limit)",
        )


def check_attributes(config: Any) -> bool:
    """Whether a CUlaunchConfig asks for programmatic stream serialization; refuses what is not simulated."""
    attributes = list(config.attrs or ())
    if config.numAttrs != len(attributes):
        raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"numAttrs {config.numAttrs}, but {len(attributes)} attributes")
    programmatic = False
    for attribute in attributes:
        if attribute.id == _ID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            allowed = attribute.value.programmaticStreamSerializationAllowed
            if allowed not in (0, 1):
                raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"programmatic stream serialization {allowed}")
            programmatic = bool(allowed)
        elif attribute.id == _ID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE and attribute.value.cooperative == 0:
            continue
        elif attribute.id not in _HARMLESS:
            raise Refused(Result.CUDA_ERROR_NOT_SUPPORTED, f"launch attribute {attribute.id!s} is not simulated")
    return programmatic


def argument_array(function: Function, parameters: Any, extra: Any) -> tuple[int, Any]:
    """(address of the void* array, what keeps it alive) from what the bindings accept as kernelParams."""
    if extra not in (0, None):
        raise Refused(Result.CUDA_ERROR_NOT_SUPPORTED, "arguments through `extra` are not simulated")
    count = len(function.sizes)
    if isinstance(parameters, int):
        address, keep = parameters, None
    elif parameters is None:
        address, keep = 0, None
    elif isinstance(parameters, tuple):
        return _from_values(function, parameters)
    else:  # an array of pointers that offers its buffer
        view = memoryview(parameters)
        address = ctypes.addressof(ctypes.c_char.from_buffer(view)) if view.nbytes else 0
        keep = view
    if count and address == 0:
        raise Refused(
            Result.CUDA_ERROR_INVALID_VALUE, f"kernel {function.name} takes {count} arguments; none were given"
        )
    return address, keep


def _from_values(function: Function, parameters: tuple[Any, ...]) -> tuple[int, Any]:
    """((values...), (ctypes types or None...)), as the bindings take them."""
    values, types = parameters if parameters else ((), ())
    if len(values) != len(function.sizes) or len(types) != len(values):
        raise Refused(
            Result.CUDA_ERROR_INVALID_VALUE,
            f"kernel {function.name} takes {len(function.sizes)} arguments, {len(values)} were given",
        )
    boxes = []
    for value, kind, size in zip(values, types, function.sizes, strict=True):
        box = ctypes.c_void_p(int(value)) if kind is None else kind(value)
        if ctypes.sizeof(box) != size:
            raise Refused(
                Result.CUDA_ERROR_INVALID_VALUE,
                f"kernel {function.name}: an argument of {ctypes.sizeof(box)} bytes for one of {size}",
            )
        boxes.append(box)
    pointers = (ctypes.c_void_p * max(len(boxes), 1))(*(ctypes.addressof(box) for box in boxes))
    return ctypes.addressof(pointers), (pointers, boxes)


def kernel_operation(function: Function, shape: tuple[int, ...], shared: int, pointers: int) -> tuple[Operation, Any]:
    """An operation with its own copy of the arguments, and what must live as long."""
    address, keep = function.pack(pointers)
    operation = Operation(function.kernel, address, shape[:3], shape[3:], shared, 0)
    return operation, keep


def memory_operation(kernel: int, target: int, second: int, amount: int) -> tuple[Operation, list[Any]]:
    """The runtime's memset (value, words) or memcpy (source, bytes) as an operation."""
    values = (ctypes.c_uint64 * 3)(target, second & 0xFFFFFFFFFFFFFFFF, amount)
    base = ctypes.addressof(values)
    pointers = (ctypes.c_void_p * 3)(base, base + 8, base + 16)
    operation = Operation(kernel, ctypes.addressof(pointers), (1, 1, 1), (1, 1, 1), 0, 0)
    return operation, [values, pointers]
