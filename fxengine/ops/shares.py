"""How much of the device a launch takes that runs beside others of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxengine.driver import Target


def beside_heads(target: Target) -> int:
    """Multiprocessors for a launch of the heads, or of the quantile networks, whose blocks need one each.

    Two of them run at the same time. On an H200, with two thirds of the device for either, both are through soonest
    (docs/performance.md).
    """
    return 2 * target.sm_count // 3
