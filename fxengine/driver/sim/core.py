"""What the parts of SimDriver share: the lock, contexts, handles, refusals, and the run of work on the runtime."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import random
import struct
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from cuda.bindings import driver as cu

from fxengine.driver.sim.memory import Memory
from fxengine.driver.sim.runtime import Failure, Library, Operation, parse_schedule
from fxengine.driver.sim.state import Event, Function, Graph, GraphExec, LoadedModule, Node, Record, Sequence, Stream

__all__ = ["CONTEXT", "Core", "Refused", "address_of", "call", "handle_of"]

Result = cu.CUresult
CONTEXT = 0x51C0
"""Handle of the one context, the primary one."""
_Found = TypeVar("_Found")
_PACK = struct.Struct("@QQ8I")
"""The layout of Operation; writing one this way takes a quarter of the time."""


class Refused(Exception):  # noqa: N818
    """Ends a call with a result other than CUDA_SUCCESS; caught by `call`."""

    def __init__(self, result: cu.CUresult, detail: str = "") -> None:
        super().__init__(result, detail)
        self.result = result
        self.detail = detail


def call(outputs: int = 0, *, context: bool = True) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """Make a method a driver call: takes the lock, checks the context, returns `(CUresult, *values)`.

    The method returns None for no value, the value for one, a tuple for more (`outputs` says how many).
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(method)
        def checked(self: Core, *arguments: Any, **named: Any) -> tuple[Any, ...]:
            with self.lock:
                try:
                    if context:
                        self.require_context()
                    value = method(self, *arguments, **named)
                except Refused as refusal:
                    self.local.detail = refusal.detail
                    return (refusal.result, *[None] * outputs)
            if outputs == 0:
                return (Result.CUDA_SUCCESS,)
            return (Result.CUDA_SUCCESS, value) if outputs == 1 else (Result.CUDA_SUCCESS, *value)

        return checked

    return decorate


class _Local(threading.local):
    """State of one host thread."""

    context = 0
    detail = ""
    capture_mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


class Core:
    """State of one simulated device."""

    def __init__(
        self,
        *,
        schedule: str | None = None,
        poison: str | None = None,
        streams: str | None = None,
        workers: int | None = None,
        guard_pages: bool = True,
        alignment: int = 256,
    ) -> None:
        self.lock = threading.RLock()
        self.local = _Local()
        self.library = Library.shared()
        self.library.start(workers or _processors())
        self.memory = Memory(guard_pages=guard_pages, alignment=alignment, sanitized=self.library.sanitized)
        self._process = os.getpid()
        self.initialized = False
        self.retained = 0
        self._failure = Failure()
        self._failure_address = ctypes.addressof(self._failure)
        self._single = ctypes.create_string_buffer(ctypes.sizeof(Operation))
        self._single_address = ctypes.addressof(self._single)
        self._numbers = itertools.count(0x51D000, 0x10)
        self.set_schedule(
            schedule or os.environ.get("FXENGINE_SIM_SCHEDULE") or "greedy",
            poison=poison or os.environ.get("FXENGINE_SIM_POISON") or "off",
            streams=streams or os.environ.get("FXENGINE_SIM_STREAMS") or "immediate",
        )
        self.clear()

    def clear(self) -> None:
        """Forget everything that belongs to the context."""
        self.lost: cu.CUresult | None = None
        self.lost_detail = ""
        self.legacy = Stream(0, blocking=True)
        self.streams: dict[int, Stream] = {0: self.legacy, 1: self.legacy}
        self.events: dict[int, Event] = {}
        self.modules: dict[int, LoadedModule] = {}
        self.functions: dict[int, Function] = {}
        self.graphs: dict[int, Graph] = {}
        self.nodes: dict[int, Node] = {}
        self.execs: dict[int, GraphExec] = {}
        self.sequences: list[Sequence] = []

    def set_schedule(
        self, schedule: str | None = None, *, poison: str | None = None, streams: str | None = None
    ) -> None:
        """Change how later work runs; what is None stays.

        `schedule`: order of threads, blocks and independent graph nodes: "greedy" (in order, each as far as it
        can), "reverse", "random:<seed>". Kernels without races give the same bits in all.
        `poison`: "00" or "ff" fills shared memory with that byte before every block, "off" leaves it.
        `streams`: "immediate" runs work when it is submitted; "lazy:<seed>" when somebody waits for it, the
        streams interleaved at random as far as events allow.
        Raises ValueError for anything else.
        """
        if schedule is not None:
            self.kind, self.seed = parse_schedule(schedule)
            self.schedule = schedule
        if poison is not None:
            if poison not in ("off", "00", "ff"):
                raise ValueError(f"poison {poison!r}: expected 'off', '00' or 'ff'")
            self.poison = -1 if poison == "off" else int(poison, 16)
        if streams is not None:
            name, _, seed = streams.partition(":")
            if name not in ("immediate", "lazy") or (name == "lazy") != seed.isdecimal():
                raise ValueError(f"streams {streams!r}: expected 'immediate' or 'lazy:<seed>'")
            if hasattr(self, "streams"):
                self.drain()
            self.lazy = name == "lazy"
            self.random = random.Random(int(seed or 0))

    @property
    def last_detail(self) -> str:
        """What the simulated device knows about the last refusal on this thread, '' for nothing."""
        return self.local.detail

    # --- handles and contexts ---

    def new_handle(self) -> int:
        """A handle that was never given out before."""
        return next(self._numbers)

    def require_context(self) -> None:
        """Refuse unless the context is alive and current on this thread."""
        if not self.initialized or os.getpid() != self._process:
            raise Refused(Result.CUDA_ERROR_NOT_INITIALIZED)
        if self.lost is not None:
            raise Refused(self.lost, self.lost_detail)
        if self.local.context == 0:
            raise Refused(Result.CUDA_ERROR_INVALID_CONTEXT)
        if self.retained == 0:
            raise Refused(Result.CUDA_ERROR_CONTEXT_IS_DESTROYED)

    def find(self, table: dict[int, _Found], handle: Any, what: str) -> _Found:
        """The object of a handle; refuses with INVALID_HANDLE."""
        found = table.get(handle_of(handle))
        if found is None:
            raise Refused(Result.CUDA_ERROR_INVALID_HANDLE, f"{handle_of(handle):#x} is no {what}, or it was destroyed")
        return found

    def find_stream(self, handle: Any) -> Stream:
        """The stream of a handle; 0, 1 and None are the legacy default stream."""
        return self.find(self.streams, handle, "stream")

    # --- running work ---

    def run_operations(self, operations: int, count: int) -> None:
        """Run an array of Operation at an address; a failure is the end of the context."""
        if self.library.run(operations, count, self.kind, self.seed, self.poison, self._failure_address):
            self.fail()

    def fail(self) -> None:
        """Make the runtime's failure the context's: every later call returns it."""
        self.lose(Result(self._failure.code), self._failure.describe())

    def lose(self, result: cu.CUresult, detail: str) -> None:
        """End the context with an error that every later call returns."""
        self.lost, self.lost_detail = result, detail
        raise Refused(result, detail)

    def launch_now(self, function: Function, arguments: int, shape: tuple[int, ...], shared: int) -> None:
        """Run one kernel; `shape` is grid and block."""
        _PACK.pack_into(self._single, 0, function.kernel, arguments, *shape, shared, 0)
        self.run_operations(self._single_address, 1)

    def submit(self, stream: Stream, work: Callable[[], None]) -> None:
        """Run work in the order of its stream: now, or when somebody waits for it."""
        if stream is self.legacy:
            # The legacy stream waits for blocking streams, and they for it.
            self.advance(lambda: not any(s.queue for s in self.streams.values() if s.blocking))
            work()
        elif self.lazy:
            stream.queue.append(work)
        else:
            work()

    def advance(self, until: Callable[[], bool], steps: int | None = None) -> None:
        """Run queued work, a random runnable piece at a time, until the condition holds (or `steps` pieces ran)."""
        while not until() and steps != 0:
            ready = [s for s in self.streams.values() if s.queue and _runnable(s.queue[0])]
            if not ready:
                return
            stream = self.random.choice(ready)
            work = stream.queue.popleft()
            if not isinstance(work, Record):
                work()
            steps = None if steps is None else steps - 1

    def drain(self) -> None:
        """Run everything that is queued."""
        self.advance(lambda: False)

    # --- captures ---

    def forbid_in_capture(self) -> None:
        """Refuse a call that could not be captured while this thread's captures forbid it; ends those captures."""
        modes = cu.CUstreamCaptureMode
        mine = self.local.capture_mode
        if not self.sequences or mine == modes.CU_STREAM_CAPTURE_MODE_RELAXED:
            return
        thread = threading.get_ident()
        guilty = [
            s
            for s in self.sequences
            if (s.thread == thread and s.mode != modes.CU_STREAM_CAPTURE_MODE_RELAXED)
            or (mine == modes.CU_STREAM_CAPTURE_MODE_GLOBAL and s.mode == modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
        ]
        for sequence in guilty:
            sequence.invalidated = True
        if guilty:
            raise Refused(
                Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                "a stream capture is open on this thread; it is invalid now",
            )

    def check_legacy(self, stream: Stream) -> None:
        """Refuse work on the legacy stream while a stream that it would wait for is capturing."""
        if stream is not self.legacy:
            return
        guilty = [s for s in self.sequences if any(member.blocking for member in s.streams)]
        for sequence in guilty:
            sequence.invalidated = True
        if guilty:
            raise Refused(Result.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)

    def forbid_on_capturing(self, stream: Stream) -> None:
        """Refuse a query or wait on a capturing stream; ends the capture."""
        self.check_legacy(stream)
        if stream.sequence is not None:
            stream.sequence.invalidated = True
            raise Refused(
                Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the stream is capturing; the capture is invalid now"
            )


def _processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _runnable(head: Callable[[], None] | Record) -> bool:
    return not isinstance(head, Record) or head.done


def handle_of(value: Any) -> int:
    """A handle given as int, as a cuda.bindings object or None."""
    return 0 if value is None else int(value)


def address_of(value: Any) -> int:
    """A host address given as int, None, a cuda.bindings object or anything with a contiguous buffer."""
    if isinstance(value, int):
        return value
    if value is None:
        return 0
    try:
        view = memoryview(value)
    except TypeError:
        return int(value)
    if not view.c_contiguous:
        raise Refused(Result.CUDA_ERROR_INVALID_VALUE, "the host buffer is not contiguous")
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
