"""The nodes of the whole step on GPUs that are not there."""

from __future__ import annotations

import pytest

from fxengine import Engine, StepConfig
from fxengine.graphs import schedule
from tools import planned_nodes
from tools.peers.data import random_rows


def test_as_an_engine_plans() -> None:
    config = StepConfig(batch=4)
    with Engine(config, device="sim", precision="fp32", data=random_rows(config)) as engine:
        expected = [(node.name, node.level, node.after, node.blocks) for node in engine.plan.nodes]
    nodes = schedule(planned_nodes.program(4, "sim", "fp32"))
    assert [(node.name, node.level, node.after, node.blocks) for node in nodes] == expected


def test_the_nodes_of_an_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    for arch, by_warpgroups in (("sm_90", True), ("sm_80", False)):
        assert planned_nodes.main(["--arch", arch, "--batch", "64", "--why", "theta.fwd"]) == 0
        out = capsys.readouterr().out
        assert f"batch 64 on an {arch}: " in out
        assert ("iqn_warpgroup_tf32" in out) == ("params.iqn.packed" in out) == by_warpgroups
        assert "theta.fwd follows " in out and "theta.fwd is followed by iqn" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--arch", "sm_12"], "target 'sm_12' is unknown"), (["--why", "nobody"], "no record 'nobody'; there are a1.dw")],
)
def test_what_does_not_exist_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert planned_nodes.main(["--batch", "4", *arguments]) == 2
    assert message in capsys.readouterr().err
