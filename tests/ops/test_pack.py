"""Packed weights: places, rounding, padding, and when a copy is made again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fxengine import StepConfig
from fxengine.driver import Device, Target
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.graphs.program import Storage
from fxengine.graphs.schedule import schedule
from fxengine.nets.builder import StepBuilder
from fxengine.nets.step import specified_step
from fxengine.ops import linear, pack

sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 130, 257]))


def weights(device: Device, n: int, k: int, gap: int) -> tuple[Program, Tensor, NDArray[np.float32]]:
    """A program, and in it a matrix with gaps of NaN between its rows, and its numbers."""
    whole = np.full((n, k + gap), np.nan, np.float32)
    whole[:, :k] = np.random.default_rng(n * 7 + k).standard_normal((n, k))
    program = Program(device.target)
    return program, program.tensor("w", whole.shape, data=whole).columns(0, k), whole[:, :k]


@given(n=sizes, k=sizes, gap=st.integers(0, 5))
def test_copies_are_rounded_permuted_and_padded(device: Device, n: int, k: int, gap: int) -> None:
    program, w, values = weights(device, n, k, gap)
    straight, across = pack.packed(program, w), pack.packed_transpose(program, w)
    expected = pack.reference(values), pack.reference(values.T)
    with Plan(program, device, guard=True) as plan, device.stream() as stream:
        plan.buffer(straight).fill_u32(0x7FC00000)
        plan.buffer(across).fill_u32(0x7FC00000)
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        for out, numbers in zip((straight, across), expected, strict=True):
            assert out.shape == numbers.shape
            found = plan.buffer(out).read().view(np.float32).reshape(out.shape)
            # what the hardware reads of it is the nearest number
            kept = (found.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
            np.testing.assert_array_equal(kept, linear.reference_rounded(numbers, "tf32"))


@given(n=sizes, k=sizes, gap=st.integers(0, 5), scaled=st.booleans())
def test_transposes_in_rows(device: Device, n: int, k: int, gap: int, scaled: bool) -> None:
    program, w, values = weights(device, n, k, gap)
    scale = program.tensor("scale", (1,), data=np.array([-1.75], np.float32)) if scaled else None
    out = pack.transpose(program, w, scale)
    assert out.shape == (k, n)
    assert out.aligned
    with Plan(program, device, guard=True) as plan, device.stream() as stream:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        expected = values.T * np.float32(-1.75 if scaled else 1)
        np.testing.assert_array_equal(plan.buffer(out).read(), expected)


def test_a_copy_is_made_again_only_after_what_it_was_made_of_was_written(device: Device) -> None:
    program = Program(device.target, "tf32")
    ones = np.ones((70, 64), np.float32)
    x, w, dy = (program.tensor(name, (70, 64), data=ones) for name in ("x", "w", "dy"))
    scale = program.tensor("scale", (1, 1), data=np.ones((1, 1), np.float32))
    outputs = [program.tensor(f"dx{i}", (70, 64)) for i in range(4)]

    def use(dx: Tensor) -> int:
        linear.backward_dx(program, dy, w.rows(0, 64), dx, scale=scale.reshape(1), tile="w64x64")
        return sum(record.family is pack.PACK for record in program.launches)

    assert use(outputs[0]) == use(outputs[1]) == 1
    linear.backward_dw(program, x, x, w.rows(0, 64))
    assert use(outputs[2]) == 2
    linear.forward(program, x.rows(0, 1), w.rows(0, 1), None, scale)
    assert use(outputs[3]) == 3
    with Plan(program, device) as plan, device.stream() as stream:
        plan.run(stream=stream)
        stream.synchronize()
        for i, expected in ((0, 64), (2, 64 * 70), (3, 64 * 70 * 64 * 70)):
            assert (plan.buffer(outputs[i]).read() == expected).all()


def test_tiles_that_need_it_are_refused_elsewhere() -> None:
    program = Program(Target.of("sm_80"), "tf32")
    x, w, y = program.tensor("x", (64, 64)), program.tensor("w", (64, 64)), program.tensor("y", (64, 64))
    with pytest.raises(ProgramError, match="tile 'w64x64' needs the warpgroups of sm_90, not sm_80"):
        linear.forward(program, x, w, None, y, tile="w64x64")
    with pytest.raises(ProgramError, match="unknown tile 'w64x64'"):  # not for weight gradients
        linear.backward_dw(program, y, x, w, tile="w64x64")
    with pytest.raises(ProgramError, match="tile 'm64x64' needs tensor maps, of sm_90 or newer, not sm_80"):
        linear.backward_dw(program, y, x, w, tile="m64x64")
    assert not program.launches


def test_rows_that_no_tensor_map_describes() -> None:
    """A tile of warpgroups is refused where it is asked for, and not chosen by itself."""
    program = Program(Target.of("sm_90"), "tf32")
    x, w, y = (program.tensor(name, (4096, 258)) for name in ("x", "w", "y"))
    part = y.columns(0, 256), w.rows(0, 256), program.tensor("out", (4096, 256))
    with pytest.raises(ProgramError, match=r"tile 'w64x64' reads by tensor maps, but x 'x'.*strides \[258, 258\]"):
        linear.forward(program, x, part[1], None, part[2], tile="w64x64")
    assert "_w" not in linear.forward(program, x, part[1], None, part[2]).family.name
    with pytest.raises(ProgramError, match=r"tensor 'y' of shape \(4096, 256\).*row stride 258.*padded=True"):
        linear.backward_dx(program, part[0], part[1], x, tile="w64x64")
    assert "_w" not in linear.backward_dx(program, part[0], part[1], x).family.name
    # the second input's weights begin inside rows of w
    wide = program.tensor("wide", (256, 272), padded=True)
    for first, served in ((258, False), (256, True)):
        inputs = tuple(program.tensor(f"x{first}.{n}", (4096, n), padded=True) for n in (first, 272 - first))
        assert ("_w" in linear.forward(program, inputs, wide, None, part[2]).family.name) is served
        if not served:
            beside = r"'wide' \[256, 272\], w beside x2 'wide' \[256, 14\] have.*offsets \[0, 0, 0, 258\]; expected"
            with pytest.raises(ProgramError, match=beside):
                linear.forward(program, inputs, wide, None, part[2], tile="w64x64")
            # the columns of dw may begin anywhere: no tensor map describes it
            assert "_m" in linear.backward_dw(program, part[2], inputs, wide, tile="m64x64").family.name


def test_weight_gradients_that_no_tensor_map_describes() -> None:
    program = Program(Target.of("sm_90"), "tf32")
    dy, whole = program.tensor("dy", (4096, 512)), program.tensor("x", (4096, 516))
    dw = program.tensor("dw", (512, 512))
    refused = (
        r"tile 'm64x64' reads by tensor maps, but dy 'dy' \[4096, 512\], x 'x' \[4096, 512\] have row strides "
        r"\[512, 516\] and offsets \[0, 2\]; expected multiples of 4 elements$"
    )
    with pytest.raises(ProgramError, match=refused):
        linear.backward_dw(program, dy, whole.columns(2, 514), dw, tile="m64x64")
    assert len(program.storages) == 3 and not program.launches
    outputs = 4_000_000
    assert "_m" not in linear.backward_dw(program, dy, whole.columns(2, 514), dw, outputs=outputs).family.name
    assert "_m" in linear.backward_dw(program, dy, whole.columns(4, 516), dw, outputs=outputs).family.name


@pytest.mark.parametrize("batch", [64, 1024])
def test_copies_in_the_whole_step_are_fresh(batch: int) -> None:
    """Between a copy and whoever reads it, no record of the step for an sm_90 writes what it was made of."""
    builder = StepBuilder(Target.of("sm_90"), precision="tf32")
    specified_step(builder, StepConfig(batch=batch))
    builder.finish()
    program = builder.program
    copies: dict[Storage, bool] = {}  # whether each is fresh
    sources: dict[Storage, list[Storage]] = {}
    read = 0
    for record in program.launches:
        for tensor in record.reads:
            if tensor.storage in copies:
                assert copies[tensor.storage], f"{record.label} reads a stale copy"
                read += record.family.name.startswith(("linear_", "iqn_"))
        for tensor in record.writes:
            for copy in sources.get(tensor.storage, ()):
                copies[copy] = False
        if record.family is pack.PACK:
            copies[record.writes[0].storage] = True
            sources.setdefault(record.reads[0].storage, []).append(record.writes[0].storage)
    assert read > 4
    nodes = schedule(program)
    for node in (n for n in nodes if n.overlaps):  # what is read before the wait comes from no direct predecessor
        early = [tensor.region() for record in node.records for tensor in record.early]
        for written in (t.region() for i in node.after for record in nodes[i].records for t in record.writes):
            assert not any(written.overlaps(region) for region in early), node.name
