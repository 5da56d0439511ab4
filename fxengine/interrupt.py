"""Ctrl-C that ends a run instead of losing it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def interruptible(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls `stop`, which asks the run to end after its present step; the second one interrupts it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals, and only it gets them
        return
    previous = signal.getsignal(signal.SIGINT)

    def handle(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, previous)
        stop()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
