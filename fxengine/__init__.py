"""fxengine: a training engine that captures forward, backward and Adam as one CUDA graph and replays it per step.

Importing the package makes no driver call and loads nothing heavy; names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "CudaError": "fxengine.driver",
    "Device": "fxengine.driver",
    "DeviceNotFound": "fxengine.driver",
    "Engine": "fxengine.engine",
    "ParamSpec": "fxengine.train.groups",
    "StepBuilder": "fxengine.nets.builder",
    "StepConfig": "fxengine.config",
}
__all__ = [
    "CudaError",
    "Device",
    "DeviceNotFound",
    "Engine",
    "ParamSpec",
    "StepBuilder",
    "StepConfig",
    "__version__",
]

if TYPE_CHECKING:
    from fxengine.config import StepConfig
    from fxengine.driver import CudaError, Device, DeviceNotFound
    from fxengine.engine import Engine
    from fxengine.nets.builder import StepBuilder
    from fxengine.train.groups import ParamSpec


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'fxengine' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
