"""The longest chain of the whole step, and who finishes the hidden layers of the branches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fxengine import StepConfig
from fxengine.driver import Target
from fxengine.graphs import Program, Tensor, depth, schedule
from fxengine.nets.builder import Source, StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.step import acting_values, specified_step
from fxengine.train.groups import linear_specs
from tools.bench_step import random_rows


def declared(
    config: StepConfig, precision: str = "tf32", *, evaluation: bool = False, gathered: bool = False
) -> Program:
    rows = {name: Source(array) for name, array in random_rows(config, rows=4).items()} if gathered else None
    builder = StepBuilder(Target.of("sm_90"), precision=precision, data=rows, with_oracles=False, evaluation=evaluation)
    specified_step(builder, config)
    builder.finish()
    return builder.program


def finished(program: Program) -> dict[str, str]:
    """Hidden layers that lack columns, by the record that finishes them."""
    found = {}
    for record in program.launches:
        late, hidden = record.fields.get("late", 0), record.fields.get("hidden")
        if record.family.struct == "Heads" and late != 0 and isinstance(hidden, Tensor):
            found[record.label] = hidden.name
    return found


@pytest.mark.parametrize(("precision", "most"), [("fp32", 23), ("tf32", 21), ("bf16", 21)])
@pytest.mark.parametrize("batch", [64, 256, 1024, 4096])
def test_the_step_is_at_most_21_levels_deep(batch: int, precision: str, most: int) -> None:
    """In fp32, where the quantile networks are layer after layer, 23."""
    assert depth(schedule(declared(StepConfig(batch=batch), precision, gathered=True))) <= most


@pytest.mark.parametrize("evaluation", [False, True])
def test_who_makes_wire_or_policy_finishes_the_layer_that_reads_it(evaluation: bool) -> None:
    passes = ("", ".next", ".target")
    expected = {f"q{d}{suffix}": f"b{d}fc{suffix}" for d in range(2) for suffix in passes}
    assert finished(declared(StepConfig(), evaluation=evaluation)) == expected
    one_branch = finished(declared(StepConfig(branches=(3,)), evaluation=evaluation))
    assert one_branch == {name: layer for name, layer in expected.items() if name.startswith("q0")}
    no_wire = finished(declared(StepConfig(aux_h=0), evaluation=evaluation))
    assert no_wire == {name: layer for name, layer in expected.items() if name.startswith("q1")}


def test_only_a_layer_that_is_trained_is_kept() -> None:
    program = declared(StepConfig())
    kept = {r.label for r in program.launches if r.family.struct == "Heads" and r.fields["kept"]}
    assert kept == {"q0", "q1"}
    assert not any(r.fields["adv"] for r in program.launches if r.label.endswith(".next") and "adv" in r.fields)


@pytest.mark.parametrize("change", [{"adv_h": 1000}, {"atoms": 101}, {"branches": (40, 3)}])
def test_heads_that_are_too_large_are_made_layer_by_layer(change: dict[str, Any]) -> None:
    config = replace(StepConfig(), **change)
    program = declared(config)
    families = {r.family.struct for r in program.launches}
    assert "Heads" not in families and "Dueling" in families
    assert finished(program) == {} and depth(schedule(program)) > depth(schedule(declared(StepConfig())))


def test_acting_is_made_layer_by_layer() -> None:
    """Its records are folded into one kernel, which knows layers."""
    builder = StepBuilder(Target.of("sm_90"))
    config = StepConfig()
    tensors = {name: builder.input(name, (4, width)) for name, width in (("state", config.state), ("ofi", config.ofi))}
    acting_values(builder, config, tensors["state"], tensors["ofi"])
    assert "Heads" not in {r.family.struct for r in builder.program.launches}


@pytest.mark.parametrize(("batch", "parts"), [(64, 2), (1024, 1)])
def test_what_the_decoders_send_back_does_not_wait_for_the_quantile_networks(batch: int, parts: int) -> None:
    """Where the gradient of h2 out of those is made apart."""
    program = declared(StepConfig(batch=batch))
    sums = [r for r in program.launches if r.label == "h2.dx" and r.family.struct == "LinearDx"]
    reads = [{t.name for t in r.reads} for r in sums]
    assert len(reads) == parts and "d.pred" in reads[0] and {"d.ens", "d.v1"} <= reads[-1]
    if parts == 2:
        assert not reads[0] & {"d.ens", "d.v1"} and "d.pred" not in reads[1]
        level = {record: node.level for node in schedule(program) for record in node.records}
        quantiles = next(r for r in program.launches if r.label == "iqn.bwd.dh2")
        assert level[sums[0]] < level[quantiles] < level[sums[1]]


def test_a_layer_that_others_finish_is_begun_with_the_columns_that_are_there() -> None:
    builder = StepBuilder(Target.of("sm_90"))
    builder.group("value", linear_specs("v1", 8, 7), target=True)
    p = Pass(builder)
    y, late = p.begin_linear(builder.input("x", (4, 5)), "v1", name="v1")
    (record,) = builder.program.launches
    assert record.fields["k"] == 5 and record.fields["activation"] == 0
    assert y.shape == (4, 8) and late.shape == (8, 2)
    assert p.linear(y, "v1", activation="relu", y=y, name="v1") is y and len(builder.program.launches) == 1
