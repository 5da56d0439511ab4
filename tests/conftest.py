"""One suite, two devices: a test that takes `device` runs on the simulated device and, where there is one, a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from fxengine.driver import Device, DeviceNotFound
from fxengine.ops.linear_tiles import has_tensor_maps, has_warpgroups

settings.register_profile(
    "fxengine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("fxengine")

DEVICES = [pytest.param("sim", marks=pytest.mark.sim), pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """An open device: the simulated one, then the first GPU (skipped where there is none)."""
    try:
        opened = Device.open(request.param)
    except DeviceNotFound as error:
        pytest.skip(f"no GPU: {error}")
    with opened:
        yield opened


@pytest.fixture
def warpgroups(device: Device) -> Device:
    """The device, if it runs the kernels of warpgroups."""
    if device.kind == "cuda" and not has_warpgroups(device.target):
        pytest.skip(f"{device.label} has no warpgroups")
    return device


@pytest.fixture
def tensor_maps(device: Device) -> Device:
    """The device, if its copy engine reads tensor maps."""
    if device.kind == "cuda" and not has_tensor_maps(device.target):
        pytest.skip(f"{device.label} has no tensor maps")
    return device
