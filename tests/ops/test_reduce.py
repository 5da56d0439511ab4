"""Sums of partial results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops.reduce import reference_sum, sum_partials
from tests.support import assert_close


def _run(program: Program, device: Device, *outputs: Tensor) -> list[np.ndarray]:
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return [plan.buffer(t).read() for t in outputs]


def _given(program: Program, name: str, data: np.ndarray) -> Tensor:
    return program.tensor(name, data.shape, data.dtype, arena="inputs", data=data)


@settings(max_examples=25)
@given(
    n=st.sampled_from([1, 2, 31, 33, 255, 256, 257, 1000]),
    denominator=st.sampled_from([None, -1, 0, 1, 7]),
    divisor=st.sampled_from([1.0, 256.0]),
    counts=st.booleans(),
)
def test_sum(device: Device, n: int, denominator: int | None, divisor: float, counts: bool) -> None:
    rng = np.random.default_rng(n)
    data = rng.integers(0, 1000, n).astype(np.int32) if counts else rng.normal(size=n)
    program = Program(device.target)
    out = program.tensor("out", (1,))
    below = None if denominator is None else _given(program, "below", np.array([denominator], np.int32))
    sum_partials(program, _given(program, "data", data), out, denominator=below, divisor=divisor, label="sum")
    (result,) = _run(program, device, out)
    assert_close(result[0], reference_sum(data, denominator, divisor), factor=1, atol=1e-12)


def test_sum_is_wide(device: Device) -> None:
    """Terms that float32 would lose, counts that int32 could not hold."""
    program = Program(device.target)
    values = _given(program, "values", np.array([1e9, *[1e-3] * 1000, -1e9]))
    counts = _given(program, "counts", np.full(300, 2**31 - 1, np.int32))
    outs = [program.tensor(f"out{i}", (1,)) for i in range(2)]
    sum_partials(program, values, outs[0], label="values")
    sum_partials(program, counts, outs[1], label="counts")
    assert len(Plan(program, device).nodes) == 1
    small, large = _run(program, device, *outs)
    assert abs(small[0] - 1.0) < 1e-4
    assert large[0] == np.float32(300 * (2**31 - 1))


def test_not_finite_passes(device: Device) -> None:
    program = Program(device.target)
    outs = [program.tensor(f"out{i}", (1,)) for i in range(2)]
    for out, bad in zip(outs, (np.nan, np.inf), strict=True):
        sum_partials(program, _given(program, f"in{bad}", np.array([1.0, bad])), out, label=f"{bad}")
    nan, inf = _run(program, device, *outs)
    assert np.isnan(nan[0]) and np.isposinf(inf[0])


def test_dtypes_are_checked(device: Device) -> None:
    program = Program(device.target)
    out, wide = program.tensor("out", (1,)), program.tensor("wide", (4,), np.float64)
    with pytest.raises(ValueError, match=r"float64 or int32.*float32"):
        sum_partials(program, program.tensor("narrow", (4,)), out, label="s")
    with pytest.raises(ValueError, match=r"out must be float32.*float64"):
        sum_partials(program, wide, wide, label="s")
    with pytest.raises(ValueError, match=r"denominator must be int32.*float32"):
        sum_partials(program, wide, out, denominator=out, label="s")
