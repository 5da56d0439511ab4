"""The default network with the tiles, fusions and launches that a GPU would be given, on the simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fxengine import Engine, StepConfig
from fxengine.driver import Target
from tests.nets.whole import snapshot
from tests.reference.config import Tree
from tests.support import planned_for
from tools.bench_step import random_rows


def gradients(target: Target, precision: str, batch: int, **sizes: Any) -> tuple[Tree, set[str]]:
    """Of one step as planned for a device; and the kernel families that it takes."""
    config = StepConfig(batch=batch, **sizes)
    with (
        planned_for(target) as device,
        Engine(config, device=device, precision=precision, data=random_rows(config, 128), guard=True) as engine,
    ):
        engine.step()
        engine.check_guards()
        found = {name: x for name, x in snapshot(engine).items() if name.startswith("grad.")}
        return found, set(engine.graph.census().launches)


@pytest.mark.parametrize(
    ("arch", "precision", "batch", "kernels", "tolerance"),
    [
        ("sm_90", "fp32", 256, {"heads_32", "linear_dx_16x32"}, 1e-5),
        ("sm_90", "tf32", 64, {"heads_tf32_16", "iqn_warpgroup_tf32", "iqn_state_tf32", "linear_dx_tf32_16x16"}, 1e-3),
        # of two million ReLUs of the quantile network four flip
        ("sm_90", "tf32", 512, {"heads_tf32_64", "iqn_warpgroup_backward_tf32", "linear_forward_tf32_w64x64"}, 5e-3),
        ("sm_80", "tf32", 256, {"heads_tf32_32", "linear_forward_tf32_128x64"}, 1e-3),
        ("sm_120", "bf16", 64, {"heads_bf16_16", "linear_forward_bf16_16x16"}, 1e-3),
    ],
)
def test_gradients_are_those_of_another_plan(
    arch: str, precision: str, batch: int, kernels: set[str], tolerance: float
) -> None:
    """Of that for the simulated device, up to the order of sums; of `kernels`, which are launched, that lacks some."""
    found, launched = gradients(Target.of(arch), precision, batch)
    expected, others = gradients(Target.of("sim"), precision, batch)
    assert kernels <= launched and kernels - others
    assert_gradients(found, expected, tolerance)


@pytest.mark.parametrize("sizes", [{"h2": 254}, {"h2": 255, "atoms": 101}, {"h2": 254, "branches": (40, 3)}])
def test_widths_that_are_no_multiples_of_anything(sizes: dict[str, Any]) -> None:
    """Here and there a ReLU flips, which moves single gradients by some thousandths."""
    found, _ = gradients(Target.of("sm_90"), "tf32", 64, **sizes)
    expected, _ = gradients(Target.of("sim"), "tf32", 64, **sizes)
    assert_gradients(found, expected, 1e-2)


def assert_gradients(found: Tree, expected: Tree, tolerance: float) -> None:
    errors = {name: float(np.linalg.norm(found[name] - g) / np.linalg.norm(g)) for name, g in expected.items()}
    assert {name: error for name, error in errors.items() if not error <= tolerance} == {}


@pytest.mark.parametrize("batch", [64, 256])
def test_the_order_flow_is_embedded_beside_the_first_layer(batch: int) -> None:
    config = StepConfig(batch=batch)
    with (
        planned_for(Target.of("sm_90")) as device,
        Engine(config, device=device, precision="tf32", data=random_rows(config, 2 * batch)) as engine,
    ):
        (first,) = (node for node in engine.plan.nodes if "h1.fwd" in [record.label for record in node.records])
        assert {"ofi_embed.fwd", "ofi_embed.next.fwd"} <= {record.label for record in first.records}


@pytest.mark.parametrize(("tokens", "masked"), [(6, 1), (0, 2)])
def test_the_gathering_launch_masks_dead_rows_and_encodes_actions(tokens: int, masked: int) -> None:
    """Other records do so where the host writes the input, or what it is masked by."""
    config = StepConfig(batch=64, tokens=tokens)
    data = random_rows(config, 128)
    counts = []
    for written in ([], ["discount"], ["actions"], list(data)):
        rows = {name: array for name, array in data.items() if name not in written}
        with planned_for(Target.of("sm_90")) as device, Engine(config, device=device, data=rows) as engine:
            records = engine.graph.census().records
            counts.append((records.get("mask_rows", 0), records.get("onehots", 0)))
    assert counts == [(0, 0), (masked, 0), (0, 1), (masked, 1)]
