"""Driver calls of the simulated device about modules, functions and launches."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

from fxengine.driver.sim.build import kernel_facts
from fxengine.driver.sim.capture_calls import CaptureCalls
from fxengine.driver.sim.core import Refused, Result, call, handle_of
from fxengine.driver.sim.device_calls import MAX_THREADS, SHARED_OPTIN, SHARED_PER_BLOCK
from fxengine.driver.sim.launches import argument_array, check_attributes, check_shape, kernel_operation
from fxengine.driver.sim.runtime import KernelRecord
from fxengine.driver.sim.state import Function, LoadedModule, Stream

__all__ = ["ModuleCalls"]

_F = cu.CUfunction_attribute


class ModuleCalls(CaptureCalls):
    """Modules are the shared objects of `build_shared_object`."""

    @call(1)
    def cuModuleLoad(self, path: bytes) -> cu.CUmodule:
        """Load the shared object at a path."""
        self.forbid_in_capture()
        name = os.fsdecode(path)
        if not os.path.isfile(name):
            raise Refused(Result.CUDA_ERROR_FILE_NOT_FOUND, f"{name} does not exist")
        try:
            facts = kernel_facts(Path(name))
            if facts["sanitize"] and not self.library.sanitized:
                raise Refused(
                    Result.CUDA_ERROR_INVALID_IMAGE,
                    f"{name} was built with AddressSanitizer; start Python with "
                    "LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0",
                )
            library = ctypes.CDLL(name)
        except (OSError, ValueError) as error:
            raise Refused(Result.CUDA_ERROR_INVALID_IMAGE, str(error)) from error
        for kernel, size in facts["kernels"].items():
            if size > SHARED_PER_BLOCK:
                raise Refused(
                    Result.CUDA_ERROR_INVALID_IMAGE,
                    f"kernel {kernel} uses {size} bytes of static shared memory, more than {SHARED_PER_BLOCK}",
                )
        handle = self.new_handle()
        self.modules[handle] = LoadedModule(handle, name, library, facts["kernels"])
        return cu.CUmodule(handle)

    @call()
    def cuModuleUnload(self, module: Any) -> None:
        """Unload: its functions, and graphs that launch them, cannot be used any more."""
        self.forbid_in_capture()
        found = self.find(self.modules, module, "module")
        self.drain()
        for function in found.functions.values():
            self.functions.pop(function.handle, None)
        # The shared object stays mapped: its code may still be on the stack of a failed launch.
        del self.modules[found.handle]

    @call(1)
    def cuModuleGetFunction(self, module: Any, name: bytes) -> cu.CUfunction:
        """A kernel by name."""
        found = self.find(self.modules, module, "module")
        text = os.fsdecode(name)
        function = found.functions.get(text)
        if function is None:
            if text not in found.shared:
                raise Refused(
                    Result.CUDA_ERROR_NOT_FOUND,
                    f"{found.path} has no kernel {text}; it has {', '.join(sorted(found.shared))}",
                )
            function = found.functions[text] = self._function(found, text)
            self.functions[function.handle] = function
        return cu.CUfunction(function.handle)

    def _function(self, module: LoadedModule, name: str) -> Function:
        record = KernelRecord.in_dll(module.library, f"fx_sim_kernel_{name}")
        count = record.arguments
        static = module.shared[name]
        return Function(
            handle=self.new_handle(),
            name=name,
            kernel=ctypes.addressof(record),
            sizes=tuple(record.sizes[:count]),
            offsets=tuple(record.offsets[:count]),
            max_threads=min(record.max_threads or MAX_THREADS, MAX_THREADS),
            static_shared=static,
            max_dynamic=SHARED_PER_BLOCK - static,
            module=module,
        )

    # --- functions ---

    @call(1)
    def cuFuncGetAttribute(self, attribute: cu.CUfunction_attribute, function: Any) -> int:
        """An attribute; registers, local memory and versions are 0."""
        found = self.find(self.functions, function, "function")
        values = {
            _F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: found.max_threads,
            _F.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: found.static_shared,
            _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: found.max_dynamic,
            _F.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: -1,
        }
        return values.get(cu.CUfunction_attribute(attribute), 0)

    @call()
    def cuFuncSetAttribute(self, function: Any, attribute: cu.CUfunction_attribute, value: int) -> None:
        """Raise the limit of dynamic shared memory; a carveout is accepted and has no effect."""
        found = self.find(self.functions, function, "function")
        if attribute == _F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            if not 0 <= value <= SHARED_OPTIN - found.static_shared:
                raise Refused(
                    Result.CUDA_ERROR_INVALID_VALUE,
                    f"kernel {found.name}: {value} bytes of dynamic shared memory; the device has {SHARED_OPTIN}, "
                    f"of which {found.static_shared} are static",
                )
            found.max_dynamic = value
        elif attribute != _F.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE, f"{attribute!s} cannot be set")

    @call()
    def cuFuncLoad(self, function: Any) -> None:
        """Functions are always loaded."""
        self.find(self.functions, function, "function")

    @call(2)
    def cuFuncGetParamInfo(self, function: Any, index: int) -> tuple[int, int]:
        """Offset and size of a parameter."""
        found = self.find(self.functions, function, "function")
        if not 0 <= index < len(found.sizes):
            raise Refused(Result.CUDA_ERROR_INVALID_VALUE)
        return found.offsets[index], found.sizes[index]

    @call(1)
    def cuFuncGetName(self, function: Any) -> bytes:
        """The kernel's name."""
        return self.find(self.functions, function, "function").name.encode()

    # --- launches ---

    @call()
    def cuLaunchKernel(
        self,
        function: Any,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        block_x: int,
        block_y: int,
        block_z: int,
        shared: int,
        stream: Any,
        parameters: Any,
        extra: Any,
    ) -> None:
        """Launch a kernel: now, queued or captured. The argument values are read before the call returns."""
        found = self.functions.get(int(function))
        if found is None:
            found = self.find(self.functions, function, "function")
        shape = (grid_x, grid_y, grid_z, block_x, block_y, block_z)
        self._launch(found, shape, shared, self.find_stream(stream), parameters, extra, False)

    @call()
    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: Any) -> None:
        """Launch with attributes; programmatic stream serialization makes captured edges programmatic."""
        found = self.find(self.functions, function, "function")
        programmatic = check_attributes(config)
        shape = (
            config.gridDimX,
            config.gridDimY,
            config.gridDimZ,
            config.blockDimX,
            config.blockDimY,
            config.blockDimZ,
        )
        stream = self.find_stream(handle_of(config.hStream))
        self._launch(found, shape, config.sharedMemBytes, stream, parameters, extra, programmatic)

    def _launch(
        self,
        function: Function,
        shape: tuple[int, ...],
        shared: int,
        stream: Stream,
        parameters: Any,
        extra: Any,
        programmatic: bool,
    ) -> None:
        check_shape(function, shape, shared)
        if isinstance(parameters, int) and parameters and not extra:
            pointers, keep = parameters, None
        else:
            pointers, keep = argument_array(function, parameters, extra)
        if self.sequences:
            self.check_legacy(stream)
        if stream.sequence is not None:
            operation, kept = kernel_operation(function, shape, shared, pointers)
            kind = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
            node = self.add_node(stream, kind, operation, kept, programmatic=programmatic)
            node.function = function
        elif self.lazy or stream is self.legacy:
            operation, kept = kernel_operation(function, shape, shared, pointers)

            def work() -> None:
                self.run_operations(ctypes.addressof(operation), 1)
                kept  # noqa: B018

            self.submit(stream, work)
        else:
            self.launch_now(function, pointers, shape, shared)
        del keep
