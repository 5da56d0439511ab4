"""Loaded kernels: their signatures, argument blocks and launches."""

from __future__ import annotations

import ctypes
import numbers
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from fxengine.driver.api import SUCCESS
from fxengine.driver.compiler import compile_cubin
from fxengine.driver.errors import ClosedError, CudaError, FxError
from fxengine.driver.memory import Arena, Buffer, MappedBuffer
from fxengine.driver.parse import KernelSignature, Parameter, StructLayout, parse_source
from fxengine.driver.resource import Resource, capturing, release_call
from fxengine.driver.source import KernelSource

if TYPE_CHECKING:
    from fxengine.driver.device import Device
    from fxengine.driver.stream import Stream

__all__ = ["Arguments", "Kernel", "KernelAttributes", "Module"]

_DEFAULT_SHARED = 48 * 1024  # what a block may use without opting in


@dataclass(frozen=True)
class KernelAttributes:
    """What the driver says of a loaded kernel."""

    registers: int
    """Per thread."""
    static_shared: int
    """Bytes per block."""
    local_bytes: int
    """Local memory per thread: arrays and spilled registers."""
    max_threads: int
    """Largest block the kernel can be launched with."""


class Arguments:
    """The argument block of one launch, laid out once: values copied in, and the void* array that points at them.

    The values do not change afterwards; what a kernel reads anew in every step it reads through a pointer.
    """

    __slots__ = ("_block", "_pointers", "address", "kernel", "values")

    def __init__(self, kernel: Kernel, values: tuple[Any, ...]) -> None:
        """Not for callers: use `Kernel.bind`."""
        parameters = kernel.params
        if len(values) != len(parameters):
            expected = ", ".join(f"{p.ctype} {p.name}" for p in parameters)
            raise FxError(f"{kernel.name} takes {len(parameters)} arguments ({expected}), got {len(values)}")
        self.kernel = kernel
        self.values = values  # keeps buffers alive
        size = max((p.offset + p.dtype.itemsize for p in parameters), default=8)
        self._block = (ctypes.c_ulonglong * (-(-size // 8)))()
        base = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_void_p * max(1, len(parameters)))()
        for i, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
            data = np.array(_converted(kernel.name, parameter, value), parameter.dtype).tobytes()
            ctypes.memmove(base + parameter.offset, data, len(data))
            self._pointers[i] = base + parameter.offset
        self.address = ctypes.addressof(self._pointers)
        """Address of the void* array, for the driver's kernelParams."""

    def __repr__(self) -> str:
        named = zip(self.kernel.params, self.values, strict=True)
        return f"<arguments {self.kernel.name}({', '.join(f'{p.name}={v!r}' for p, v in named)})>"


class Kernel:
    """An entry point of a loaded module. Made by `Module.kernel`."""

    handle: Any
    """The CUfunction; reading it raises ClosedError once the module is closed."""

    def __init__(self, module: Module, signature: KernelSignature, handle: Any) -> None:
        self.module = module
        self.name = signature.name
        self.params: tuple[Parameter, ...] = signature.parameters
        self.handle = handle
        self.dynamic_shared = 0
        """Largest dynamic shared memory `set_dynamic_shared` has allowed so far, in bytes."""
        self._threads = signature.threads
        self._device = module.device
        driver = module.device.driver
        self._launch = driver.raw.cuLaunchKernel
        self._launch_ex = driver.raw.cuLaunchKernelEx
        self._check_signature()
        attribute = driver.CUfunction_attribute
        self.attributes = KernelAttributes(
            registers=driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, handle),
            static_shared=driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle),
            local_bytes=driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, handle),
            max_threads=driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, handle),
        )
        self._overlap: list[Any] = []
        if module.device.programmatic_launch:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            self._overlap = [overlap]

    @property
    def threads(self) -> int:
        """The block size the kernel is written for, from its __launch_bounds__; FxError where it has none."""
        if self._threads is None:
            raise FxError(f"kernel {self.name} has no __launch_bounds__(n): its block size is not known")
        return self._threads

    def set_dynamic_shared(self, nbytes: int) -> None:
        """Allow launches with up to `nbytes` of dynamic shared memory (above 48 KiB it has to be asked for).

        Raises FxError where static and dynamic memory together exceed what a block of this device can have.
        """
        limit = self._device.properties.shared_memory_per_block_optin
        static = self.attributes.static_shared
        if nbytes < 0 or static + nbytes > limit:
            raise FxError(
                f"kernel {self.name}: {nbytes} bytes of dynamic and {static} of static shared memory; a block on "
                f"{self._device.label} can have {limit} together"
            )
        if nbytes <= self.dynamic_shared:
            return
        if static + nbytes > _DEFAULT_SHARED:
            driver = self._device.driver
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with self._device.activate():
                driver.cuFuncSetAttribute(self.handle, attribute, nbytes)
        self.dynamic_shared = nbytes

    def bind(self, *values: Any) -> Arguments:
        """The argument block for these values: integers and floats for scalars, buffers or addresses for pointers.

        Count, kind and range are checked; raises FxError naming the parameter.
        """
        return Arguments(self, values)

    def launch(
        self,
        grid: int | tuple[int, int, int],
        block: int | tuple[int, int, int],
        arguments: Arguments,
        *,
        stream: Stream,
        shared: int = 0,
        pdl: bool = False,
    ) -> None:
        """Enqueue the kernel on `stream`.

        Args:
            grid: number of blocks, as x or (x, y, z).
            block: threads per block, likewise.
            arguments: from this kernel's `bind`; copied by the driver during the call, also into a capture.
            stream: the stream.
            shared: bytes of dynamic shared memory; above 48 KiB `set_dynamic_shared` comes first.
            pdl: let the kernel begin while its predecessors end; it must call fx_wait() before it touches what they
                write. Devices before sm_90 cannot, and start it after them: the results are the same.
        """
        if arguments.kernel is not self:
            raise FxError(f"kernel {self.name} was given arguments bound to {arguments.kernel.name}")
        gx, gy, gz = (grid, 1, 1) if isinstance(grid, int) else grid
        bx, by, bz = (block, 1, 1) if isinstance(block, int) else block
        if pdl and self._overlap:
            config = self._device.driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = gx, gy, gz
            config.blockDimX, config.blockDimY, config.blockDimZ = bx, by, bz
            config.sharedMemBytes = shared
            config.hStream = stream.handle
            config.attrs = self._overlap
            config.numAttrs = 1
            status = self._launch_ex(config, self.handle, arguments.address, 0)[0]
            if status != SUCCESS:
                given: tuple[Any, ...] = (config, self.handle, arguments.address, 0)
                self._device.launch_failed("cuLaunchKernelEx", given, status)
            return
        status = self._launch(self.handle, gx, gy, gz, bx, by, bz, shared, stream.handle, arguments.address, 0)[0]
        if status != SUCCESS:
            given = (self.handle, gx, gy, gz, bx, by, bz, shared, stream.handle, arguments.address, 0)
            self._device.launch_failed("cuLaunchKernel", given, status)

    def _check_signature(self) -> None:
        """Compare what was parsed with what was compiled: a wrong parse must never become a wrong launch."""
        driver = self._device.driver
        for i, parameter in enumerate(self.params):
            offset, size = driver.cuFuncGetParamInfo(self.handle, i)
            if (offset, size) != (parameter.offset, parameter.dtype.itemsize):
                raise FxError(
                    f"kernel {self.name}: parameter {parameter.name} was read as {parameter.dtype.itemsize} bytes "
                    f"at {parameter.offset}, compiled it has {size} at {offset}"
                )
        if driver.raw.cuFuncGetParamInfo(self.handle, len(self.params))[0] == SUCCESS:
            raise FxError(f"kernel {self.name} has more parameters than the {len(self.params)} that were read")

    def __getattr__(self, name: str) -> NoReturn:
        if name == "handle" and "module" in self.__dict__:  # deleted with the module
            raise ClosedError(f"kernel {self.name}")
        raise AttributeError(f"Kernel has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<kernel {self.name}({', '.join(f'{p.ctype} {p.name}' for p in self.params)})>"


class Module(Resource):
    """A compiled and loaded .cu file with all its kernels. Made by `Device.module`, closed with the device."""

    rank = 6
    handle: Any

    def __init__(self, device: Device, name: str, source: KernelSource, *, sanitize: str | None = None) -> None:
        """Not for callers: use `Device.module`."""
        if capturing():
            raise FxError(f"module {name!r} cannot be loaded inside a capture; load it before with device.module")
        self.name = name
        self.source = source
        self.parsed = parse_source(self.source.name, self.source.text, self.source.headers)
        self.path = compiled(device, self.source, sanitize)
        """The cubin, or the shared object of the simulated device."""
        self._structs: dict[str, StructLayout] = {}
        self._kernels: dict[str, Kernel] = {}
        driver = device.driver
        with device.activate():
            handle = driver.cuModuleLoad(str(self.path).encode())
            super().__init__(device, f"module {name!r}", release_call(driver, "cuModuleUnload", handle))
            self.handle = handle
            for signature in self.parsed.kernels.values():
                try:
                    function = driver.cuModuleGetFunction(handle, signature.name.encode())
                except CudaError as error:
                    if error.result != "CUDA_ERROR_NOT_FOUND":
                        raise
                    continue  # behind an #if that this device does not take
                # Loading is lazy by default, and a first launch inside a capture would then load code there.
                driver.cuFuncLoad(function)
                self._kernels[signature.name] = Kernel(self, signature, function)

    @property
    def kernel_names(self) -> tuple[str, ...]:
        """Names of the kernels, in the order of the file."""
        return tuple(self._kernels)

    def kernel(self, name: str) -> Kernel:
        """An entry point; raises FxError for a name that the file does not have."""
        self.check_open()
        if name not in self._kernels:
            if name in self.parsed.kernels:
                raise FxError(f"{self.name}: kernel {name} is behind an #if and not compiled for {self._device.label}")
            raise FxError(f"{self.name} has no kernel {name!r}; it has {', '.join(self._kernels) or 'none'}")
        return self._kernels[name]

    def layout(self, name: str) -> StructLayout:
        """Fields of a record struct of the file or its headers, with comments and which are pointers."""
        if name not in self._structs:
            self._structs[name] = self.parsed.struct(name)
        return self._structs[name]

    def struct(self, name: str) -> np.dtype:
        """NumPy dtype of a record struct, laid out as in C; pointers are '<u8'."""
        return self.layout(name).dtype

    def close(self) -> None:
        """Unload; kernels of this module raise ClosedError from now on."""
        for kernel in self._kernels.values():
            kernel.__dict__.pop("handle", None)
        super().close()


def compiled(device: Device, source: KernelSource, sanitize: str | None) -> Path:
    """The cubin of a source, or the shared object of the simulated device: from the cache, or built now."""
    if device.kind == "sim":
        from fxengine.driver.sim.build import build_shared_object

        return build_shared_object(source, sanitize=sanitize)
    return compile_cubin(source, device.arch)


def _converted(kernel: str, parameter: Parameter, value: Any) -> int | float:
    """The number that goes into the block; FxError where `value` does not fit the parameter."""
    where = f"kernel {kernel}, parameter '{parameter.ctype} {parameter.name}'"
    if parameter.pointer and isinstance(value, Buffer | MappedBuffer | Arena):
        return value.address
    if parameter.dtype.kind == "f":
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
        raise FxError(f"{where}: expected a number, got {type(value).__name__} {value!r}")
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        wanted = "a buffer or an address" if parameter.pointer else "an integer"
        raise FxError(f"{where}: expected {wanted}, got {type(value).__name__} {value!r}")
    limits = np.iinfo(parameter.dtype)
    if not limits.min <= int(value) <= limits.max:
        raise FxError(f"{where}: {value} is outside {limits.min}..{limits.max}")
    return int(value)
