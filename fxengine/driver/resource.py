"""Lifetimes: current contexts, owners of driver objects, and releases that must wait.

A finaliser can run anywhere, also between two calls of a stream capture, where freeing memory would
invalidate the capture. Finalisers therefore only queue their release; the next `Device.activate()` outside a
capture runs it. What is still to be released holds the context, so the order in which objects die is free.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from fxengine.driver.api import SUCCESS, Driver
from fxengine.driver.errors import ClosedError, CudaError

if TYPE_CHECKING:
    from typing_extensions import Self

    from fxengine.driver.device import Device

__all__ = ["Activation", "Core", "Resource", "capturing", "defer", "drain"]


class _ThreadState(threading.local):
    captures = 0


thread_state = _ThreadState()
# deque.append and popleft are atomic, so a finaliser needs no lock (it may run while its thread holds one).
_deferred: deque[tuple[Core, Callable[[], Any]]] = deque()


def capturing() -> bool:
    """Whether this thread has a stream capture of this library open."""
    return thread_state.captures > 0


def defer(core: Core, release: Callable[[], Any]) -> None:
    """Queue `release` and, after it, the drop of one hold of `core`; makes no driver call."""
    _deferred.append((core, release))


def drain() -> None:
    """Run the queued releases, unless this thread is capturing. A release that fails becomes a ResourceWarning."""
    if not _deferred or thread_state.captures:
        return
    while _deferred:
        try:
            core, release = _deferred.popleft()
        except IndexError:  # another thread took the last one
            return
        try:
            core.finish(release)
        except CudaError as error:
            # Most often the context is lost, and then the call that noticed it first has already raised.
            warnings.warn(f"{core.label}: a deferred release failed: {error}", ResourceWarning, stacklevel=2)


class Core:
    """The driver and primary context of a device, apart from the Device: releases must not keep it alive.

    The context is given back when the last hold is dropped: the Device's, or that of something which
    outlived it, such as a NumPy view into mapped memory.
    """

    def __init__(self, driver: Driver, device: Any, label: str) -> None:
        self.driver = driver
        self.label = label
        self._device = device
        self.context = driver.cuDevicePrimaryCtxRetain(device)
        self.context_value = int(self.context)
        self.get_current = driver.raw.cuCtxGetCurrent  # unchecked: it is the price of every activation
        self._holds = 1
        self._lock = threading.Lock()

    def hold(self) -> None:
        """Keep the context until the matching `drop`."""
        with self._lock:
            self._holds += 1

    def drop(self) -> None:
        """Give one hold back, the last one with the context."""
        with self._lock:
            self._holds -= 1
            last = self._holds == 0
        if last:
            self.driver.cuDevicePrimaryCtxRelease(self._device)

    def current(self) -> Activation:
        """Context manager: this context is current on this thread, afterwards the caller's again."""
        return Activation(self)

    def finish(self, release: Callable[[], Any]) -> None:
        """Call `release` with the context current, then drop one hold, whether it failed or not."""
        try:
            with self.current():
                release()
        finally:
            self.drop()


class Activation:
    """Makes a context current on entry, if it is not, and restores the caller's on exit."""

    __slots__ = ("_core", "_previous")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._previous: Any = None

    def __enter__(self) -> None:
        core = self._core
        result, current = core.get_current()
        if result != SUCCESS:
            raise core.driver.error("cuCtxGetCurrent", (), result)
        if int(current) != core.context_value:
            core.driver.cuCtxSetCurrent(core.context)
            self._previous = current

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            self._core.driver.cuCtxSetCurrent(self._previous)
            self._previous = None


class Resource:
    """Base of what owns a driver object: closed by hand, by `with`, by the device, or at last by the GC.

    Subclasses pass `release`, which must not refer to the object itself. `handle` is a plain attribute, so
    that a launch pays nothing for the check; close() deletes it, after which reading it raises ClosedError.
    """

    rank = 0
    """Order in which a closing device closes what is left: low first."""

    def __init__(self, device: Device, label: str, release: Callable[[], Any]) -> None:
        self._device = device
        self._label = label
        device.core.hold()
        self._finalizer = weakref.finalize(self, defer, device.core, release)
        self._finalizer.atexit = False  # the process's end frees everything, the driver may be gone by then
        device.adopt(self)

    def __getattr__(self, name: str) -> NoReturn:
        if name == "handle" and "_finalizer" in self.__dict__ and not self._finalizer.alive:
            raise ClosedError(self._label)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def device(self) -> Device:
        """The device this belongs to."""
        return self._device

    @property
    def closed(self) -> bool:
        """Whether close() has run."""
        return not self._finalizer.alive

    def check_open(self) -> None:
        """Raise ClosedError, naming the object, after close()."""
        if not self._finalizer.alive:
            raise ClosedError(self._label)

    def close(self) -> None:
        """Release the driver object, inside a capture after its end; a second call does nothing."""
        found = self._finalizer.detach()  # one caller gets it, however many threads close at once
        if found is None:
            return
        self.__dict__.pop("handle", None)
        core, release = found[2]
        if capturing():
            defer(core, release)
        else:
            core.finish(release)
            drain()

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
        return f"<{self._label}{' (closed)' if self.closed else ''}>"


def release_call(driver: Driver, call: str, *arguments: Any) -> Callable[[], Any]:
    """A release that makes one driver call."""
    return partial(getattr(driver, call), *arguments)
