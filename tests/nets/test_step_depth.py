"""The longest chain of the whole step, and who finishes the first layers of the branches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxengine import StepConfig
from fxengine.driver import Target
from fxengine.graphs import Program, ProgramError, depth, schedule
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


def finished(program: Program) -> dict[str, list[str]]:
    """Layers by the record that finishes them."""
    found = {}
    for record in program.launches:
        layers = [t.name for t in record.writes if t.name.split(".")[0].endswith("fc")]
        if layers and record.family.name in ("crossentropy", "dueling"):
            found[record.label] = layers
    return found


@pytest.mark.parametrize(("precision", "most"), [("fp32", 27), ("tf32", 25), ("bf16", 25)])
@pytest.mark.parametrize("batch", [64, 256, 1024, 4096])
def test_the_step_is_at_most_25_levels_deep(batch: int, precision: str, most: int) -> None:
    """In fp32, where the quantile networks are layer after layer, 27."""
    assert depth(schedule(declared(StepConfig(batch=batch), precision, gathered=True))) <= most


@pytest.mark.parametrize("evaluation", [False, True])
def test_wire_and_policy_finish_the_layers_that_read_them(evaluation: bool) -> None:
    expected = {"nb": ["b0fc"], "q0": ["b1fc"], "wire.next": ["b0fc.next", "b0fc.target"]}
    expected |= {"q0.next": ["b1fc.next"], "q0.target": ["b1fc.target"]}
    assert finished(declared(StepConfig(), evaluation=evaluation)) == expected
    one_branch = finished(declared(StepConfig(branches=(3,)), evaluation=evaluation))
    assert one_branch == {name: layers for name, layers in expected.items() if not name.startswith("q")}
    no_wire = finished(declared(StepConfig(aux_h=0), evaluation=evaluation))
    assert no_wire == {name: layers for name, layers in expected.items() if name.startswith("q")}


def test_layers_that_are_too_large_are_products_of_their_own() -> None:
    config = StepConfig()
    assert set(finished(declared(replace(config, adv_h=300)))) == {"q0", "q0.next", "q0.target"}
    assert finished(declared(replace(config, adv_h=1000))) == {}
    assert depth(schedule(declared(replace(config, adv_h=1000)))) == 2 + depth(schedule(declared(config)))


def test_acting_reads_both_parts_at_once() -> None:
    builder = StepBuilder(Target.of("sm_90"))
    config = StepConfig()
    tensors = {name: builder.input(name, (4, width)) for name, width in (("state", config.state), ("ofi", config.ofi))}
    acting_values(builder, config, tensors["state"], tensors["ofi"])
    assert finished(builder.program) == {}


def test_a_layer_that_was_begun_is_a_relu_layer() -> None:
    builder = StepBuilder(Target.of("sm_90"))
    builder.group("value", linear_specs("v1", 8, 6), target=True)
    p = Pass(builder)
    begun = p.begin_linear(builder.input("x", (4, 5)), "v1", name="v1")
    with pytest.raises(ProgramError, match="layer 'v1' was begun as a ReLU layer; it cannot have activation='elu'"):
        p.linear(begun.y, "v1", activation="elu", y=begun.y, name="v1")
    assert p.linear(begun.y, "v1", activation="relu", y=begun.y, name="v1") is begun.y
