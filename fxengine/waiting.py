"""Waiting for a count that the device writes into mapped memory."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOKS = 256  # between two questions to the driver, which cost more than a look


def wait_for(
    needed: int, count: Callable[[], int], idle: Callable[[], bool], failure: Callable[[int], Exception]
) -> int:
    """Look at a count until it has reached `needed`; returns it.

    Args:
        needed: count to wait for.
        count: reads it; never blocks.
        idle: whether nothing is queued that could still raise it; raises what the device raises.
        failure: what to raise, given the count, if it stays too small on an idle device.
    """
    looks = 0
    while True:
        found = count()
        if found >= needed:
            return found
        looks += 1
        if looks % _LOOKS == 0:
            if idle():
                found = count()  # once idle, all that was written can be seen
                if found < needed:
                    raise failure(found)
            time.sleep(0)
