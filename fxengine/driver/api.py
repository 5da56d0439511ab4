"""Checked driver calls, the same for a GPU and for the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from cuda.bindings import driver as bindings

from fxengine.driver.errors import CudaError, DeviceNotFound

__all__ = ["MINIMUM_DRIVER", "SUCCESS", "Driver", "bindings_version", "probe", "version_text"]

SUCCESS = bindings.CUresult.CUDA_SUCCESS
MINIMUM_DRIVER = 13000
"""Oldest driver that loads the cubins of a CUDA 13 compiler, as cuDriverGetVersion counts: CUDA 13.0."""


def version_text(version: int) -> str:
    """13000 -> "13.0"."""
    return f"{version // 1000}.{version % 1000 // 10}"


def bindings_version() -> tuple[int, int]:
    """(major, minor) of cuda-bindings."""
    major, minor = metadata.version("cuda-bindings").split(".")[:2]
    return int(major), int(minor)


class Driver:
    """Driver functions as methods that return their values and raise CudaError.

    `raw` is the module `cuda.bindings.driver` or a SimDriver: functions that return `(CUresult, *values)`.
    A call gives None for no value, the value itself for one, a tuple for more. Every other attribute (enums,
    structs) comes from `cuda.bindings.driver`, for the simulated device too.
    """

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def __getattr__(self, name: str) -> Any:
        # Only reached for names not seen before: the result is stored on the instance.
        if name.startswith("cu"):
            function = getattr(self.raw, name, None)
            if function is None:
                kind = "cuda-bindings" if self.raw is bindings else type(self.raw).__name__
                raise AttributeError(f"{kind} has no driver function {name}")
            value: Any = self._checked(name, function)
        else:
            value = getattr(bindings, name)
        setattr(self, name, value)
        return value

    def _checked(self, name: str, function: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            returned = function(*arguments)
            if returned[0] != SUCCESS:
                raise self.error(name, arguments, returned[0])
            if len(returned) == 2:
                return returned[1]
            return returned[1:] if len(returned) > 2 else None

        call.__name__ = call.__qualname__ = name
        call.__doc__ = function.__doc__
        return call

    def error(self, call: str, arguments: tuple[Any, ...], result: Any) -> CudaError:
        """The CudaError of a call that returned `result` (for callers that look at results themselves)."""
        detail = str(getattr(self.raw, "last_detail", None) or "")
        return CudaError(call, arguments, getattr(result, "name", str(result)), detail=detail)


def probe() -> Any:
    """Initialise the real driver and return its raw module, `cuda.bindings.driver`.

    Raises DeviceNotFound, saying what is missing, where there is no libcuda, no usable driver or no GPU.
    """
    try:
        result = bindings.cuInit(0)[0]
    except RuntimeError as error:  # DynamicLibNotFoundError of cuda.pathfinder is one as well
        raise DeviceNotFound(f"no NVIDIA driver: libcuda cannot be loaded ({error})") from error
    try:
        driver = Driver(bindings)
        if result != SUCCESS:
            raise driver.error("cuInit", (0,), result)
        version = driver.cuDriverGetVersion()
        if version < MINIMUM_DRIVER:
            raise DeviceNotFound(
                f"the NVIDIA driver supports CUDA {version_text(version)}; CUDA "
                f"{version_text(MINIMUM_DRIVER)} "
                "(driver 580) or newer is needed: update the driver"
            )
        if driver.cuDeviceGetCount() == 0:
            raise CudaError("cuDeviceGetCount", (), "CUDA_ERROR_NO_DEVICE")
    except CudaError as error:
        raise DeviceNotFound(f"no usable GPU: {error}") from error
    return bindings
