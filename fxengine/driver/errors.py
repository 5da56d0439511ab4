"""Exceptions of the driver layer, and what the driver's result codes usually mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ClosedError",
    "CompileError",
    "CudaError",
    "DeviceNotFound",
    "FxError",
    "SimulatedDeviceWarning",
    "hint_for",
]

_STICKY = (
    "The context is lost: every later call on this device fails, so the process has to be restarted. "
    "Run the same program on Device.open('sim'), which names the kernel, block and thread."
)
_HINTS = {
    "CUDA_ERROR_INVALID_VALUE": (
        "An argument is out of range: a null or foreign pointer, a size beyond the allocation, a grid or "
        "block of 0, "
        "a block larger than the kernel's __launch_bounds__, or more dynamic shared memory than "
        "Kernel.set_dynamic_shared allowed."
    ),
    "CUDA_ERROR_OUT_OF_MEMORY": (
        "The device has not enough free memory. Use a smaller batch, close engines that are no longer "
        "needed, "
        "or look with nvidia-smi for other processes on this GPU."
    ),
    "CUDA_ERROR_NOT_INITIALIZED": ("cuInit has not run in this process. A forked child must open its own device."),
    "CUDA_ERROR_DEINITIALIZED": "The driver is shutting down: the call came after interpreter exit began.",
    "CUDA_ERROR_STUB_LIBRARY": (
        "The libcuda that was loaded is the toolkit's stub. Remove the 'stubs' folder from LD_LIBRARY_PATH."
    ),
    "CUDA_ERROR_NO_DEVICE": "The driver sees no GPU. Check nvidia-smi and CUDA_VISIBLE_DEVICES.",
    "CUDA_ERROR_INVALID_DEVICE": ("There is no device of this number. Check CUDA_VISIBLE_DEVICES and nvidia-smi -L."),
    "CUDA_ERROR_INVALID_IMAGE": ("The file is no cubin, or it is truncated. Delete the cache folder and run again."),
    "CUDA_ERROR_INVALID_CONTEXT": (
        "This thread has no context, or that of another device. Make the call inside `with device.activate():`."
    ),
    "CUDA_ERROR_NO_BINARY_FOR_GPU": (
        "The cubin was compiled for another architecture. Compile for the architecture of this device (Device.arch)."
    ),
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": (
        "PTX of an NVRTC newer than the driver. Load a cubin instead of PTX, or update the NVIDIA driver."
    ),
    "CUDA_ERROR_INSUFFICIENT_DRIVER": (
        "The NVIDIA driver is older than this CUDA version needs: update it (CUDA 13 needs driver 580)."
    ),
    "CUDA_ERROR_INVALID_SOURCE": ("The cubin comes from an NVRTC that this driver does not know. Update the driver."),
    "CUDA_ERROR_FILE_NOT_FOUND": "The module file does not exist (was the cache folder deleted meanwhile?).",
    "CUDA_ERROR_INVALID_HANDLE": (
        "The handle belongs to another context or was destroyed. For an event timing: both events need "
        "timing=True "
        "and must have been recorded."
    ),
    "CUDA_ERROR_ILLEGAL_STATE": (
        "The object is in no state for this call, for example a stream that is not capturing."
    ),
    "CUDA_ERROR_NOT_FOUND": (
        'The module has no kernel of this name. Kernels must be extern "C"; look at Module.kernel_names.'
    ),
    "CUDA_ERROR_NOT_READY": "The work is still running. Synchronize the stream or the event first.",
    "CUDA_ERROR_ILLEGAL_ADDRESS": f"A kernel read or wrote outside its allocations. {_STICKY}",
    "CUDA_ERROR_MISALIGNED_ADDRESS": (f"A kernel used an address that its access width does not divide. {_STICKY}"),
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": f"A kernel used a pointer of the wrong memory space. {_STICKY}",
    "CUDA_ERROR_INVALID_PC": f"A kernel jumped outside its code. {_STICKY}",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": f"A kernel met an illegal instruction. {_STICKY}",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": f"A kernel's stack is corrupt or overflowed. {_STICKY}",
    "CUDA_ERROR_ASSERT": f"A device-side assert failed. {_STICKY}",
    "CUDA_ERROR_LAUNCH_TIMEOUT": f"The kernel ran longer than the display's watchdog allows. {_STICKY}",
    "CUDA_ERROR_LAUNCH_FAILED": f"A kernel failed on the device. {_STICKY}",
    "CUDA_ERROR_ECC_UNCORRECTABLE": f"The GPU found an uncorrectable memory error. {_STICKY}",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "The primary context was reset or destroyed behind this library.",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": (
        "The block needs more registers, threads or shared memory than a multiprocessor has. Compare the "
        "block with "
        "Kernel.attributes.max_threads and with __launch_bounds__."
    ),
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": (
        "This call cannot be recorded. Inside a capture only launches, asynchronous copies and memsets "
        "are allowed: "
        "allocate, load modules and synchronize before."
    ),
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": (
        "An earlier call made the capture invalid (an allocation, a synchronization, a module load or a "
        "failed "
        "launch inside it). Look at the first error, not at this one."
    ),
    "CUDA_ERROR_STREAM_CAPTURE_MERGE": "The call would join two separate captures.",
    "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED": "The capture must be ended on the stream that began it.",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": (
        "Work captured on another stream was not joined: record an event there and let the capturing "
        "stream wait for it."
    ),
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "A captured operation depends on work from outside the capture.",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": ("The default stream was used during a capture. Use a stream of the device."),
    "CUDA_ERROR_CAPTURED_EVENT": (
        "The event was last recorded inside a capture; it can be neither queried nor waited for."
    ),
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": "A capture must end on the thread that began it.",
    "CUDA_ERROR_NOT_SUPPORTED": "This device or driver does not offer the operation.",
    "CUDA_ERROR_NOT_PERMITTED": ("The operation is not permitted now, for example on an object that is in use."),
    "CUDA_ERROR_SYSTEM_NOT_READY": (
        "The system is not ready for CUDA: check the driver and, on NVSwitch machines, the fabric manager."
    ),
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": (
        "libcuda and the kernel driver have different versions. Reboot after the driver update, or "
        "rebuild the container."
    ),
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": (
        "The CUDA compatibility package does not support this GPU. Remove it."
    ),
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "Another process holds the GPU in exclusive mode.",
    "CUDA_ERROR_OPERATING_SYSTEM": ("The operating system refused: check /dev/nvidia* and the container's GPU option."),
    "CUDA_ERROR_UNKNOWN": "The driver gave no reason: check dmesg, /dev/nvidia* and the driver installation.",
}


def hint_for(result: str) -> str:
    """Likely cause of a result such as `CUDA_ERROR_OUT_OF_MEMORY` and what to do; '' if nothing is known."""
    return _HINTS.get(result, "")


class FxError(Exception):
    """Base of every error this library raises on purpose."""


class SimulatedDeviceWarning(UserWarning):
    """`Device.open("auto")` found no GPU and runs on the simulated device."""


def readable(argument: Any) -> str:
    """An argument as text: addresses and handles in hexadecimal, long values shortened."""
    if isinstance(argument, bool) or argument is None:
        return str(argument)
    name = getattr(argument, "name", None)
    if isinstance(name, str):  # an enum member, also an integer one
        return name
    if isinstance(argument, int):
        return hex(argument) if argument >= 1 << 20 else str(argument)
    if isinstance(argument, bytes):
        return repr(argument.decode("utf-8", "replace"))
    if isinstance(argument, list | tuple):
        shown = ", ".join(readable(item) for item in argument[:4])
        return f"[{shown}{', ...' if len(argument) > 4 else ''}]"
    if not isinstance(argument, str | float):
        try:
            return f"{type(argument).__name__}({int(argument):#x})"
        except (TypeError, ValueError):
            pass
    text = repr(argument)
    return text if len(text) <= 80 else f"{text[:77]}..."


class CudaError(FxError, RuntimeError):
    """A driver call did not return CUDA_SUCCESS.

    Attributes: `call` (name of the driver function), `arguments` (tuple as given), `result` (name of the
    CUresult), `hint` (likely cause and what to do, may be ''), `detail` (what the simulated device adds).
    """

    def __init__(
        self,
        call: str,
        arguments: Sequence[Any] = (),
        result: str = "CUDA_ERROR_UNKNOWN",
        *,
        hint: str = "",
        detail: str = "",
    ) -> None:
        self.call = call
        self.arguments = tuple(arguments)
        self.result = result
        self.hint = hint or hint_for(result)
        self.detail = detail
        message = f"{call}({', '.join(readable(a) for a in self.arguments)}) returned {result}"
        for part in (detail, self.hint):
            if part:
                message += f"\n  {part}"
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Driver handles do not pickle; an error that crosses a process boundary carries them as text.
        arguments = tuple(readable(argument) for argument in self.arguments)
        return _rebuild, (self.call, arguments, self.result, self.hint, self.detail)


def _rebuild(call: str, arguments: tuple[str, ...], result: str, hint: str, detail: str) -> CudaError:
    return CudaError(call, arguments, result, hint=hint, detail=detail)


class DeviceNotFound(FxError):  # noqa: N818
    """The requested device does not exist or cannot be used; the message says what is missing."""


class CompileError(FxError):
    """A kernel source did not compile. `log` is the compiler's whole output, `source` names the file."""

    def __init__(self, message: str, *, source: str = "", log: str = "") -> None:
        super().__init__(message)
        self.source = source
        self.log = log


class ClosedError(FxError):
    """An object was used after close(); the message names it."""

    def __init__(self, what: str) -> None:
        super().__init__(what if what.endswith("is closed") else f"{what} is closed")
