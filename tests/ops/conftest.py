"""Tiles that only an sm_90 and the simulated device have."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _tile_of_the_device(request: pytest.FixtureRequest) -> None:
    """Skips a tile of warpgroups where the device has none."""
    params = getattr(request.node, "callspec", None)
    if params is not None and str(params.params.get("tile", "")).startswith("w"):
        request.getfixturevalue("warpgroups")
