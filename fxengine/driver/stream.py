"""Streams and events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxengine.driver.api import SUCCESS
from fxengine.driver.errors import FxError
from fxengine.driver.resource import Resource, release_call

if TYPE_CHECKING:
    from fxengine.driver.device import Device

__all__ = ["Event", "Stream"]


class Stream(Resource):
    """A non-blocking stream: ordered with nothing but what it waits for. Made by `Device.stream()`."""

    rank = 3
    handle: Any
    """The CUstream."""

    def __init__(self, device: Device) -> None:
        driver = device.driver
        with device.activate():
            handle = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        super().__init__(device, f"stream of {device.label}", release_call(driver, "cuStreamDestroy", handle))
        self.handle = handle

    def synchronize(self) -> None:
        """Wait until everything launched on this stream has finished."""
        with self._device.activate():
            self._device.driver.cuStreamSynchronize(self.handle)

    def query(self) -> bool:
        """Whether everything launched on this stream has finished; never blocks."""
        return _finished(self._device, "cuStreamQuery", self.handle)

    def wait(self, event: Event) -> None:
        """Let later work on this stream wait for `event`, without blocking the host."""
        with self._device.activate():
            self._device.driver.cuStreamWaitEvent(self.handle, event.handle, 0)

    def event(self) -> Event:
        """An event recorded here and now."""
        event = Event(self._device, timing=False)
        event.record(stream=self)
        return event


class Event(Resource):
    """A point in a stream. Made by `Device.event()`; `timing=True` is needed for `elapsed_ms`."""

    rank = 2
    handle: Any
    """The CUevent."""

    def __init__(self, device: Device, *, timing: bool) -> None:
        driver = device.driver
        flags = driver.CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        with device.activate():
            handle = driver.cuEventCreate(int(flag))
        super().__init__(device, f"event of {device.label}", release_call(driver, "cuEventDestroy", handle))
        self.handle = handle
        self.timing = timing

    def record(self, *, stream: Stream) -> None:
        """Mark what has been launched on `stream` so far."""
        with self._device.activate():
            self._device.driver.cuEventRecord(self.handle, stream.handle)

    def synchronize(self) -> None:
        """Wait on the host for the recorded point; returns at once if nothing was recorded."""
        with self._device.activate():
            self._device.driver.cuEventSynchronize(self.handle)

    def query(self) -> bool:
        """Whether the recorded point has been reached; never blocks."""
        return _finished(self._device, "cuEventQuery", self.handle)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from `since` to this event; both need timing=True and must have been reached."""
        if not (self.timing and since.timing):
            raise FxError("elapsed_ms needs two events made with device.event(timing=True)")
        with self._device.activate():
            return float(self._device.driver.cuEventElapsedTime(since.handle, self.handle))


def _finished(device: Device, call: str, handle: Any) -> bool:
    with device.activate():
        result = getattr(device.driver.raw, call)(handle)[0]
    if result == SUCCESS:
        return True
    if result == device.driver.CUresult.CUDA_ERROR_NOT_READY:
        return False
    raise device.driver.error(call, (handle,), result)
