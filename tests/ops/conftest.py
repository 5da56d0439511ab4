"""Tiles that not all devices have."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _tile_of_the_device(request: pytest.FixtureRequest) -> None:
    """Skips tiles of warpgroups, or that read by tensor maps, where the device has none."""
    params = getattr(request.node, "callspec", None)
    if params is None:
        return
    needed = {"w": "warpgroups", "m": "tensor_maps"}.get(str(params.params.get("tile"))[:1])
    if needed:
        request.getfixturevalue(needed)
