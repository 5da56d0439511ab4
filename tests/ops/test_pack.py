"""Packed weights: places, rounding, padding, and when a copy is made again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxengine import StepConfig
from fxengine.driver import Device, Target
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.graphs.program import Storage
from fxengine.graphs.schedule import schedule
from fxengine.nets.builder import StepBuilder
from fxengine.nets.step import specified_step
from fxengine.ops import linear, pack

sizes = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 130, 257]))


@given(n=sizes, k=sizes, k2=st.sampled_from([0, 0, 1, 5, 16, 37]), gap=st.integers(0, 5))
def test_copies_are_rounded_permuted_and_padded(device: Device, n: int, k: int, k2: int, gap: int) -> None:
    whole = np.full((n, k + k2 + gap), np.nan, np.float32)
    values = np.random.default_rng(n * 7 + k).standard_normal((n, k + k2)).astype(np.float32)
    whole[:, : k + k2] = values
    program = Program(device.target)
    w = program.tensor("w", whole.shape, data=whole).columns(0, k + k2)
    straight, across = pack.packed(program, w, k2=k2), pack.packed_transpose(program, w)
    parts = [values[:, :k], values[:, k:]] if k2 else [values]
    expected = np.concatenate([pack.reference(part) for part in parts]), pack.reference(values.T)
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


def test_a_copy_is_made_again_only_after_its_weight_was_written(device: Device) -> None:
    program = Program(device.target, "tf32")
    x, w = (program.tensor(name, (70, 64), data=np.ones((70, 64), np.float32)) for name in "xw")
    outputs = [program.tensor(f"y{i}", (70, 70)) for i in range(3)]

    def use(y: Tensor) -> int:
        linear.forward(program, x, w, None, y, tile="w64x64")
        return sum(record.family is pack.PACK for record in program.launches)

    assert use(outputs[0]) == use(outputs[1]) == 1
    linear.backward_dw(program, outputs[0], x, w)
    assert use(outputs[2]) == 2
    with Plan(program, device) as plan, device.stream() as stream:
        plan.run(stream=stream)
        stream.synchronize()
        first, second = (plan.buffer(outputs[i]).read().view(np.float32) for i in (0, 2))
        assert (first == 64).all()
        assert (second == 64 * 70 * 64).all()


def test_tiles_that_need_it_are_refused_elsewhere() -> None:
    program = Program(Target.of("sm_80"), "tf32")
    x, w, y = program.tensor("x", (64, 64)), program.tensor("w", (64, 64)), program.tensor("y", (64, 64))
    with pytest.raises(ProgramError, match="tile 'w64x64' needs the warpgroups of sm_90, not sm_80"):
        linear.forward(program, x, w, None, y, tile="w64x64")
    with pytest.raises(ProgramError, match="unknown tile 'w64x64'"):  # not for weight gradients
        linear.backward_dw(program, y, x, w, tile="w64x64")


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
