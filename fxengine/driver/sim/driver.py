"""SimDriver: the simulated device behind the calls of cuda.bindings.driver."""

from __future__ import annotations

from cuda.bindings import driver as cu

from fxengine.driver.sim.core import call
from fxengine.driver.sim.device_calls import DeviceCalls
from fxengine.driver.sim.graph_calls import GraphCalls

__all__ = ["SimDriver"]


class SimDriver(GraphCalls, DeviceCalls):
    """A device that runs kernels on the CPU, with the calls, values and refusals of cuda.bindings.driver.

    Methods have the names, arguments and return tuples `(CUresult, *values)` of the functions of that module;
    enums and structs come from there. `last_detail` tells more about the last refusal on this thread.

    Keyword arguments, None for what the environment says (FXENGINE_SIM_SCHEDULE, _POISON, _STREAMS):
    `schedule`, `poison`, `streams`: see `set_schedule`. `workers`: OS threads that run blocks (1: serial;
    default: one per processor; per process, the last SimDriver decides). `guard_pages`: an allocation ends at
    an unreadable page and stays unreadable once freed. `alignment`: of allocations; bytes up to the next
    multiple are not unreadable, but writes there are found.

    Differences from a GPU: errors of a kernel come from the launch itself unless streams are lazy. A thread
    block runs on one OS thread, so weak memory ordering, bank conflicts and coalescing are not modelled.
    Raises DeviceNotFound where there is no C++ compiler.
    """

    @call(1, context=False)
    def cuGetErrorName(self, error: cu.CUresult) -> bytes:
        """The name of a result."""
        return cu.CUresult(error).name.encode()

    @call(1, context=False)
    def cuGetErrorString(self, error: cu.CUresult) -> bytes:
        """A result in words."""
        return cu.CUresult(error).name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()
