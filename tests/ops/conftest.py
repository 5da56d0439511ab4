"""Kernels that only an sm_90 has, and the simulated device."""

from __future__ import annotations

import pytest

from fxengine.driver import Device
from fxengine.ops.linear_tiles import has_warpgroups


@pytest.fixture
def warpgroups(device: Device) -> Device:
    """The device, if it runs the kernels of warpgroups."""
    if device.kind == "cuda" and not has_warpgroups(device.target):
        pytest.skip(f"{device.label} has no warpgroups")
    return device


@pytest.fixture(autouse=True)
def _tile_of_the_device(request: pytest.FixtureRequest) -> None:
    """Skips a tile of packed weights where the device has none."""
    params = getattr(request.node, "callspec", None)
    if params is not None and str(params.params.get("tile", "")).startswith("w"):
        request.getfixturevalue("warpgroups")
