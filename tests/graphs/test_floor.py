"""Work counted from records, and the floor that it makes."""

from __future__ import annotations

import pytest

from fxengine import StepConfig
from fxengine.driver import Target
from fxengine.graphs import Family, Program, schedule
from fxengine.graphs import floor as floors
from fxengine.graphs.floor import H200, Ceilings, Work
from fxengine.nets.builder import StepBuilder
from fxengine.nets.step import specified_step
from fxengine.ops import linear

TARGET = Target.of("sm_90")
ROUND = Ceilings("round numbers", {"fp32": 1e12, "tf32": 2e12}, bandwidth=1e12, node_us=1.0, launch_us=3.0)


def product(precision: str = "fp32") -> Program:
    """y = x wᵀ + b of 64 rows, 32 to 48 columns, and z, which reads the same x."""
    program = Program(TARGET, precision)
    x = program.tensor("x", (64, 32))
    for name in ("y", "z"):
        w, b = program.tensor(f"w_{name}", (48, 32)), program.tensor(f"b_{name}", (48,))
        linear.forward(program, x, w, b, program.tensor(name, (64, 48)))
    return program


def whole_step(precision: str, batch: int) -> Program:
    builder = StepBuilder(TARGET, precision=precision, with_oracles=True)
    specified_step(builder, StepConfig(batch=batch))
    builder.finish()
    return builder.program


def test_a_launch_counts_products_and_distinct_bytes() -> None:
    (node,) = schedule(product())
    work = floors.node_work(node)
    assert work.flop == {"fp32": 2 * 2 * 64 * 32 * 48}
    read = 64 * 32 + 2 * (48 * 32 + 48)  # x once, though both records read it
    assert work.nbytes == 4 * (read + 2 * 64 * 48)
    (tensor,) = schedule(product("tf32"))
    assert set(floors.node_work(tensor).flop) == {"tf32"}


def test_the_gradients_of_a_layer_cost_what_it_costs() -> None:
    program = Program(TARGET, "fp32")
    x, w, dx = program.tensor("x", (64, 32)), program.tensor("w", (48, 32)), program.tensor("dx", (64, 32))
    dy, dw = program.tensor("dy", (64, 48)), program.tensor("dw", (48, 32))
    linear.backward_dx(program, [dy, dy], [w, w], dx)
    linear.backward_dw(program, dy, x, dw, None)
    assert [floors.record_flop(r) for r in program.launches] == [2 * 2 * 64 * 32 * 48, 2 * 64 * 32 * 48]


def test_picked_rows_are_read_as_often_as_they_are_written() -> None:
    family = Family("pick", "gather.cu", "fx_gather", "Gather", tiles=lambda fields: 1)
    program = Program(TARGET)
    table, out = program.tensor("table", (100_000, 8)), program.tensor("out", (4, 8))
    program.launch(family, {}, reads=[table], writes=[out], label="pick")
    (node,) = schedule(program)
    assert floors.node_work(node).nbytes == 2 * 4 * 8 * 4


def test_the_memset_writes_the_zeroed_arena() -> None:
    program = Program(TARGET)
    total = program.tensor("total", (1000,), arena="zeroed")
    family = Family("add", "elementwise.cu", "fx_elementwise", "Elementwise", tiles=lambda fields: 1)
    program.launch(family, {}, reads=[], writes=[total], label="add")
    nodes = schedule(program)
    assert floors.cleared_bytes(nodes) == floors.node_work(nodes[0], floors.cleared_bytes(nodes)).nbytes == 4000


def test_the_largest_part_is_the_floor() -> None:
    nodes = schedule(product())
    floor = floors.step_floor(nodes, ROUND)
    work = floors.step_work(nodes)
    assert floor.products_us == pytest.approx(work.total_flop / 1e6)
    assert floor.memory_us == pytest.approx(work.nbytes / 1e6)
    assert (floor.chain_us, floor.launch_us) == (1.0, 3.0)
    assert (floor.bound, floor.us) == ("chain", 4.0)
    slow = Ceilings("slow", {"fp32": 1e9}, bandwidth=1e12, node_us=1.0, launch_us=3.0)
    assert floors.step_floor(nodes, slow).bound == "products"
    assert Work({"fp32": 4e6, "tf32": 4e6}, 7_000_000).us(ROUND) == pytest.approx(7.0)


def test_levels_name_their_slowest_node() -> None:
    program = product()
    y = next(t for r in program.launches for t in r.writes if t.name == "y")
    linear.forward(program, y, program.tensor("w2", (8, 48)), None, program.tensor("y2", (64, 8)))
    nodes = schedule(program)
    first, second = floors.levels(nodes, [5.0, 2.0], ROUND)
    assert (first.level, first.longest_us, first.total_us, first.slowest) == (0, 5.0, 5.0, 0)
    assert first.floor_us == pytest.approx(1.0 + floors.node_work(nodes[0]).us(ROUND))
    assert second.share == pytest.approx(second.floor_us / 2.0)
    assert second.as_dict()["share"] == round(second.share, 4)


def step_flop(precision: str, batch: int) -> float:
    return floors.step_work(schedule(whole_step(precision, batch))).total_flop


def test_the_products_of_the_step_are_those_of_its_layers() -> None:
    """The quantile network by hand: most of the step, but not all."""
    rows, layers = 64 * 32, (64 * 256, 256 * 128, 128 * 12)
    forward, gradients = 2 * 2 * rows * sum(layers), 2 * rows * (layers[0] + 2 * layers[1] + 2 * layers[2])
    quantiles = forward + gradients
    total = step_flop("fp32", 64)
    assert 1.2 * quantiles < total < 2.0 * quantiles
    assert step_flop("fp32", 128) == pytest.approx(2 * total, rel=1e-3)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(("batch", "least", "most"), [(64, 1.2, 1.3), (4096, 1.0, 1.2)])
def test_no_product_of_the_step_is_missed(precision: str, batch: int, least: float, most: float) -> None:
    """Fused kernels compute some products twice, at small batch three times; a family that nobody counts would show as
    a step with fewer."""
    layers = step_flop("fp32", batch)
    assert least * layers <= step_flop(precision, batch) < most * layers


def test_products_count_at_the_rate_of_their_precision() -> None:
    work = floors.step_work(schedule(whole_step("tf32", 64)))
    assert set(work.flop) == {"fp32", "tf32"}  # attention and the expectile nets compute in float32
    assert work.flop["tf32"] > 10 * work.flop["fp32"]
    assert work.products_us(H200) < 1e6 * work.total_flop / H200.rates["fp32"]
