"""A GPU, or the simulated device in its place."""

from __future__ import annotations

import os
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fxengine.driver.api import Driver, probe
from fxengine.driver.errors import (
    ClosedError,
    CudaError,
    DeviceNotFound,
    FxError,
    SimulatedDeviceWarning,
)
from fxengine.driver.resource import Activation, Core, Resource, capturing, defer, drain
from fxengine.driver.source import KernelSource
from fxengine.driver.stream import Event, Stream
from fxengine.driver.target import DeviceProperties, Target

if TYPE_CHECKING:
    from typing_extensions import Self

    from fxengine.driver.maps import TensorMaps
    from fxengine.driver.module import Module

__all__ = ["Device"]

_warned = False


class Device:
    """An open device: its primary context, and everything made from it.

    May be used from several threads. `close()` closes what is still open in an order that is safe, then gives
    the context back; afterwards every use raises ClosedError.
    """

    def __init__(self, driver: Driver, ordinal: int, kind: str, *, sanitize: str | None = None) -> None:
        """Not for callers: use `Device.open` or `Device.open_sim`."""
        self.driver = driver
        """Checked driver calls."""
        self.kind = kind
        """"cuda" or "sim"."""
        self.label = f"cuda:{ordinal}" if kind == "cuda" else "sim"
        """"cuda:0" or "sim"."""
        handle = driver.cuDeviceGet(ordinal)
        self.properties = _properties(driver, handle)
        self.core = Core(driver, handle, self.label)
        self.capture_lock = threading.RLock()
        """Held by a capture on this device and by what would invalidate one from another thread."""
        self._sanitize = sanitize
        self._lock = threading.RLock()
        self._modules: dict[str, Module] = {}
        self._maps: TensorMaps | None = None
        self._owned: weakref.WeakSet[Resource] = weakref.WeakSet()
        self._finalizer = weakref.finalize(self, defer, self.core, _nothing)
        self._finalizer.atexit = False
        self._closed = False

    @classmethod
    def open(cls, spec: str = "auto") -> Device:
        """Open "cuda" (the first GPU), "cuda:N", "sim", or "auto": a GPU if there is one, else "sim".

        "auto" says once per process, with a SimulatedDeviceWarning, that it runs simulated and why.
        Raises DeviceNotFound where the named device is missing, FxError for any other `spec`.
        """
        if spec == "sim":
            return cls.open_sim()
        if spec == "auto":
            try:
                return cls._open_cuda(0)
            except DeviceNotFound as missing:
                device = cls.open_sim()
                _warn_simulated(missing)
                return device
        match = re.fullmatch(r"cuda(?::(\d+))?", spec)
        if match is None:
            raise FxError(f"device {spec!r} is unknown; expected 'auto', 'sim', 'cuda' or 'cuda:N'")
        return cls._open_cuda(int(match[1] or 0))

    @classmethod
    def open_sim(cls, *, sanitize: str | None = None, **options: Any) -> Device:
        """Open a simulated device with options of its own.

        Args:
            sanitize: "address" builds its kernels with AddressSanitizer (libasan must be preloaded); None leaves
                it to the environment variable FXENGINE_SIM_SANITIZE.
            options: of SimDriver, for example schedule="reverse", the order in which threads run. What is left
                out is taken from the environment (FXENGINE_SIM_SCHEDULE, ...), for whole test runs.
        """
        from fxengine.driver.sim import SimDriver

        driver = Driver(SimDriver(**options))
        driver.cuInit(0)
        return cls(driver, 0, "sim", sanitize=sanitize)

    @classmethod
    def _open_cuda(cls, ordinal: int) -> Device:
        driver = Driver(probe())
        count = driver.cuDeviceGetCount()
        if ordinal >= count:
            raise DeviceNotFound(f"cuda:{ordinal} does not exist; this process sees {count} GPU(s)")
        try:
            return cls(driver, ordinal, "cuda")
        except CudaError as error:
            raise DeviceNotFound(f"cuda:{ordinal} cannot be opened: {error}") from error

    @property
    def name(self) -> str:
        """The product name, for example "NVIDIA H200"."""
        return self.properties.name

    @property
    def arch(self) -> str:
        """The architecture kernels are compiled for, for example "sm_90"; "sim" on the simulated device."""
        if self.kind == "sim":
            return "sim"
        major, minor = self.properties.compute_capability
        return f"sm_{major}{minor}"

    @property
    def target(self) -> Target:
        """What planners need to know of this device."""
        limits = self.properties
        return Target(
            self.kind,
            self.arch,
            limits.sm_count,
            limits.shared_memory_per_block_optin,
            limits.max_threads_per_block,
        )

    @property
    def programmatic_launch(self) -> bool:
        """Whether a kernel may begin before its predecessor ends (programmatic dependent launch, sm_90 and later)."""
        return self.kind == "sim" or self.properties.compute_capability >= (9, 0)

    @property
    def closed(self) -> bool:
        """Whether close() has run."""
        return self._closed

    def check_open(self) -> None:
        """Raise ClosedError after close()."""
        if self._closed:
            raise ClosedError(f"device {self.label}")

    def activate(self) -> Activation:
        """Context manager: the primary context is current on this thread; afterwards the caller's is again.

        Also runs releases that finalisers left behind, unless this thread is capturing.
        """
        self.check_open()
        drain()
        return Activation(self.core)

    def stream(self) -> Stream:
        """A new non-blocking stream."""
        return Stream(self)

    def event(self, timing: bool = False) -> Event:
        """A new event; `timing=True` for `Event.elapsed_ms`."""
        return Event(self, timing=timing)

    def synchronize(self) -> None:
        """Wait until everything launched on this device has finished; raises CudaError if any of it failed.

        Waits for a capture on another thread to end first, since it would invalidate it.
        """
        with self.capture_lock, self.activate():
            self.driver.cuCtxSynchronize()

    def module(self, source: str | KernelSource) -> Module:
        """The kernels of fxengine/cu/`source`, of a .cu file at an absolute path, or of a source given as text.

        Compiled, loaded, and kept under its name. Raises CompileError, and FxError inside a capture: load before.
        """
        from fxengine.driver.module import Module

        name = source if isinstance(source, str) else source.name
        with self._lock:
            self.check_open()
            module = self._modules.get(name)
            if module is None:
                loaded = KernelSource.load(source) if isinstance(source, str) else source
                module = self._modules[name] = Module(self, name, loaded, sanitize=self._sanitize)
            return module

    def compile_all(self, sources: Iterable[str | KernelSource]) -> None:
        """Compile sources that are not in the cache yet, side by side; `module` then finds them there."""
        from fxengine.driver.module import compiled

        with self._lock:
            known = set(self._modules)
        wanted = {s if isinstance(s, str) else s.name: s for s in sources}
        loaded = [KernelSource.load(s) if isinstance(s, str) else s for name, s in wanted.items() if name not in known]
        if len(loaded) < 2:
            return
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(lambda source: compiled(self, source, self._sanitize), loaded))

    def launch_failed(self, call: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Follow up a launch made without `activate()`: repeat it in our context if that was missing, else raise.

        Launches skip the context check because it is nearly always right and costs more than the launch's Python.
        """
        error = self.driver.error(call, arguments, result)
        codes = self.driver.CUresult
        if result not in (codes.CUDA_ERROR_INVALID_CONTEXT, codes.CUDA_ERROR_INVALID_HANDLE):
            raise error
        if int(self.driver.cuCtxGetCurrent()) == self.core.context_value:
            raise error
        with self.activate():
            getattr(self.driver, call)(*arguments)

    @property
    def tensor_maps(self) -> TensorMaps:
        """Its tensor maps."""
        from fxengine.driver.maps import TensorMaps

        with self._lock:
            if self._maps is None:
                self.check_open()
                self._maps = TensorMaps(self)
            return self._maps

    def adopt(self, resource: Resource) -> None:
        """Close `resource` with this device, should it still be open then."""
        with self._lock:
            self._owned.add(resource)

    def defer(self, release: Callable[[], Any]) -> None:
        """Run `release` with the context current at the next call outside a capture (for finalisers)."""
        self.core.hold()
        defer(self.core, release)

    def close(self) -> None:
        """Close everything made from this device, then the device; a second call does nothing.

        Raises FxError inside a capture. Where releases fail, all are tried and the first error is raised.
        """
        with self._lock:
            if self._closed:
                return
            if capturing():
                raise FxError(f"device {self.label} cannot be closed inside a capture")
            self._closed = True
            owned = sorted(self._owned, key=lambda resource: resource.rank)
            self._modules.clear()
            self._maps = None
        first: CudaError | None = None
        try:
            with self.capture_lock, self.core.current():
                self.driver.cuCtxSynchronize()
        except CudaError as error:  # a lost context: still give back what can be given back
            first = error
        for resource in owned:
            try:
                resource.close()
            except CudaError as error:
                first = first or error
        drain()
        if self._finalizer.detach() is not None:
            try:
                self.core.drop()
            except CudaError as error:
                first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        self.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CudaError:
            if error is None:  # else the first error is the one to see
                raise

    def __repr__(self) -> str:
        return f"<device {self.label} ({self.name}){' (closed)' if self.closed else ''}>"


def _nothing() -> None:
    pass


def _properties(driver: Driver, handle: Any) -> DeviceProperties:
    attributes = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(driver.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}"), handle))

    return DeviceProperties(
        name=driver.cuDeviceGetName(128, handle).split(b"\0")[0].decode(),
        compute_capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        shared_memory_per_block=attribute("MAX_SHARED_MEMORY_PER_BLOCK"),
        shared_memory_per_block_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_memory_reserved=attribute("RESERVED_SHARED_MEMORY_PER_BLOCK"),
        max_threads_per_block=attribute("MAX_THREADS_PER_BLOCK"),
        total_memory=int(driver.cuDeviceTotalMem(handle)),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        driver_version=int(driver.cuDriverGetVersion()),
    )


def _warn_simulated(missing: DeviceNotFound) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    warnings.warn(
        f"running on the simulated device, thousands of times slower than a GPU: {missing}",
        SimulatedDeviceWarning,
        stacklevel=3,
    )
