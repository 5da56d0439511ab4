"""The CUDA driver layer: devices, memory, kernels and captures, on a GPU or on the simulated device.

The only part of the package that imports `cuda.bindings`; nothing above it knows whether the device is real.
"""

from __future__ import annotations

from fxengine.driver.api import Driver, probe
from fxengine.driver.cache import DiskCache, cache_root
from fxengine.driver.capture import Capture, Graph, GraphExec, capture
from fxengine.driver.compiler import KernelUsage, compile_cubin, compile_report, resource_usage, supported_archs
from fxengine.driver.device import Device
from fxengine.driver.errors import (
    ClosedError,
    CompileError,
    CudaError,
    DeviceNotFound,
    FxError,
    SimulatedDeviceWarning,
)
from fxengine.driver.maps import MAP_BYTES, TensorMaps, tensor_map
from fxengine.driver.memory import Arena, Buffer, MappedBuffer, StridedBuffer
from fxengine.driver.module import Arguments, Kernel, KernelAttributes, Module
from fxengine.driver.parse import KernelSignature, Parameter, StructLayout, parse_source
from fxengine.driver.source import KERNEL_FOLDER, KernelSource
from fxengine.driver.stream import Event, Stream
from fxengine.driver.target import DeviceProperties, Target
from fxengine.driver.versions import versions

__all__ = [
    "KERNEL_FOLDER",
    "MAP_BYTES",
    "Arena",
    "Arguments",
    "Buffer",
    "Capture",
    "ClosedError",
    "CompileError",
    "CudaError",
    "Device",
    "DeviceNotFound",
    "DeviceProperties",
    "DiskCache",
    "Driver",
    "Event",
    "FxError",
    "Graph",
    "GraphExec",
    "Kernel",
    "KernelAttributes",
    "KernelSignature",
    "KernelSource",
    "KernelUsage",
    "MappedBuffer",
    "Module",
    "Parameter",
    "SimulatedDeviceWarning",
    "Stream",
    "StridedBuffer",
    "StructLayout",
    "Target",
    "TensorMaps",
    "cache_root",
    "capture",
    "compile_cubin",
    "compile_report",
    "parse_source",
    "probe",
    "resource_usage",
    "supported_archs",
    "tensor_map",
    "versions",
]
