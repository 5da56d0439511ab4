"""Versions of everything that a result can depend on."""

from __future__ import annotations

import platform
from importlib import metadata

from fxengine.driver.api import Driver, bindings, version_text
from fxengine.driver.errors import FxError

__all__ = ["versions"]


def versions() -> dict[str, str | None]:
    """Version texts by component; None where it is absent. Never raises, makes no device.

    Keys: fxengine, python, numpy, cuda-bindings, driver-cuda (what the NVIDIA driver supports), driver (its own
    number), gpu (name of the first), nvrtc, compiler (the C++ compiler of the simulated device).
    """
    driver, gpu = _management()
    return {
        "fxengine": _package("fxengine"),
        "python": platform.python_version(),
        "numpy": _package("numpy"),
        "cuda-bindings": _package("cuda-bindings"),
        "driver-cuda": _driver_cuda(),
        "driver": driver,
        "gpu": gpu,
        "nvrtc": _nvrtc(),
        "compiler": _compiler(),
    }


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        if name == "fxengine":  # run from a source tree
            import fxengine

            return getattr(fxengine, "__version__", None)
        return None


def _driver_cuda() -> str | None:
    try:
        return version_text(Driver(bindings).cuDriverGetVersion())
    except (FxError, RuntimeError):
        return None


def _nvrtc() -> str | None:
    from fxengine.driver.compiler import nvrtc_version

    try:
        return ".".join(map(str, nvrtc_version()))
    except FxError:
        return None


def _management() -> tuple[str | None, str | None]:
    """(driver version, name of the first GPU) from nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, None
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion()), _text(
            pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        )
    except pynvml.NVMLError:
        return None, None
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _compiler() -> str | None:
    from fxengine.driver.sim.compilers import find_compiler

    try:
        return find_compiler().version
    except FxError:
        return None
