"""What tests share: comparison with a reference, and what the simulated device can be asked to be or do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
from numpy.typing import ArrayLike

from fxengine.driver import Device, Target

#: Orders of threads and blocks, and what shared memory holds before a kernel.
ORDERS = (("greedy", "00"), ("reverse", "ff"), ("random:1", "ff"), ("random:2", "00"))


@contextmanager
def planned_for(target: Target) -> Iterator[Device]:
    """The simulated device, open, which is planned for as if it were another one, but with its own clusters of one."""
    with (
        patch.object(Device, "target", property(lambda _: target)),
        patch.object(Target, "cluster", 1),
        Device.open("sim") as device,
    ):
        yield device


@contextmanager
def orders_of_threads(device: Device) -> Iterator[Iterator[None]]:
    """Turns, each in another of `ORDERS`; just one on a GPU, which chooses its order itself."""

    def turns() -> Iterator[None]:
        if device.kind == "cuda":
            yield
            return
        for schedule, poison in ORDERS:
            device.driver.raw.set_schedule(schedule, poison=poison)
            yield

    try:
        yield turns()
    finally:
        if device.kind == "sim":
            device.driver.raw.set_schedule("greedy", poison="off")


def assert_close(
    actual: ArrayLike, reference: ArrayLike, *, factor: float = 32.0, atol: float = 1e-6, name: str = "array"
) -> None:
    """Assert |actual - reference| <= atol + |reference| * eps(dtype of actual) * factor, elementwise.

    Infinities and NaN must stand where the reference has them. The worst index is part of the message.
    """
    actual = np.asarray(actual)
    reference = np.asarray(reference, dtype=np.float64)
    assert actual.shape == reference.shape, f"{name}: shape {actual.shape}, reference {reference.shape}"
    if actual.size == 0:
        return
    eps = float(np.finfo(actual.dtype).eps) if actual.dtype.kind == "f" else 0.0
    wide = actual.astype(np.float64)
    same = (wide == reference) | (np.isnan(wide) & np.isnan(reference))
    with np.errstate(invalid="ignore"):
        excess = np.where(same, -1.0, np.abs(wide - reference) - (atol + np.abs(reference) * eps * factor))
    excess = np.where(np.isnan(excess), np.inf, excess)
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    assert excess[worst] <= 0.0, (
        f"{name}: worst at {tuple(int(i) for i in worst)}: got {wide[worst]!r}, expected {reference[worst]!r}, "
        f"{int((excess > 0).sum())} of {excess.size} beyond atol={atol} + |ref|*eps*{factor}"
    )
