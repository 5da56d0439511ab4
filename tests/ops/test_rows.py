"""Rows that are replaced by zeros."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Program, ProgramError
from fxengine.ops.rows import mask_rows, reference_mask_rows
from tests.ops.test_linear import Bench, read
from tests.support import assert_close


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 7, 33, 300]),
    cols=st.sampled_from([1, 3, 4, 6, 48, 257, 2047, 2048, 2500]),
    lead=st.sampled_from([0, 0, 1, 4]),
    pad=st.sampled_from([0, 3, 4]),
    in_place=st.booleans(),
    seed=st.integers(0, 100),
)
def test_against_float64(device: Device, rows: int, cols: int, lead: int, pad: int, in_place: bool, seed: int) -> None:
    rows = min(rows, 40_000 // cols)
    bench = Bench(device, seed=seed)
    values = bench.draw(rows, cols)
    mask = np.where(bench.random.random(rows) < 0.4, 0.0, 0.99).astype(np.float32)
    x = bench.matrix(values, lead=lead, pad=pad)
    y = x if in_place else bench.result(rows, cols, pad=pad)
    mask_rows(bench.program, x, bench.vector(mask, lead=1), y)
    with bench.run() as plan:
        assert_close(read(plan, y), reference_mask_rows(values, mask), factor=0, atol=0)
        if not in_place:
            np.testing.assert_array_equal(read(plan, x), values)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("cols", [6, 8])
def test_bit_for_bit(device: Device, cols: int, in_place: bool) -> None:
    """A masked row may hold anything and becomes +0; a live one keeps its bits, of NaN too."""
    bench = Bench(device)
    mask = np.array([0.0, -0.0, 1.0, -1.0, 1e-45, np.nan, 0.0], np.float32)
    values = bench.draw(7, cols)
    values.view(np.uint32)[:, 1] = 0x7FC12345
    values[:, 0], values[:, 2], values[:, 3] = np.inf, -0.0, 1e-45
    values[6] = np.nan
    x = bench.matrix(values, pad=0)
    y = x if in_place else bench.result(7, cols, pad=0)
    mask_rows(bench.program, x, bench.vector(mask), y)
    with bench.run() as plan:
        expected = values.view(np.uint32).copy()
        expected[[0, 1, 6]] = 0
        np.testing.assert_array_equal(read(plan, y).view(np.uint32), expected)


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    x, y, mask = program.tensor("x", (4, 3)), program.tensor("y", (4, 3)), program.tensor("mask", (4,))
    with pytest.raises(ProgramError, match=r"'x' float32 \[4, 3\] and 'mask' float32 \[4\]"):
        mask_rows(program, x, mask, mask)
    with pytest.raises(ProgramError, match=r"mask is 'm3' float32 \[3\], expected float32 \[4\]"):
        mask_rows(program, x, program.tensor("m3", (3,)), y)
    with pytest.raises(ProgramError, match="overlaps"):
        mask_rows(program, x.rows(0, 3), mask.rows(0, 3), x.rows(1, 4))
