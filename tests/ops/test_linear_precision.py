"""Linear layers on tensor cores: how operands are rounded, and that nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fxengine.driver import Device
from fxengine.graphs import Plan, Tensor
from fxengine.ops import linear
from tests.ops.test_linear import TILES, Array, Bench, dw_tile, read

TENSOR_TILES = [case for case in TILES if case[0] != "fp32"]

# Ties up and down, numbers just beside them, and what rounding carries into the exponent; both signs.
_BITS = np.array(
    [0x3F800000 + (fraction << shift) + nudge for shift in (12, 15) for fraction in range(8) for nudge in (-1, 0, 1)]
    + [0x3FFFFFFF, 0x3FFFF000, 0x3FFFEFFF, 0x3FFF8000, 0x3FFF7FFF, 0x7F7F7FFF, 0x00801000, 0x0D801FFF, 0],
    np.uint32,
)
VALUES: Array = np.concatenate([_BITS, _BITS | np.uint32(0x80000000)]).view(np.float32)


def nearest(x: Array, precision: str, *, mapped: bool = False) -> NDArray[np.float64]:
    """The nearest number with 10 (tf32) or 7 (bf16) bits of fraction; ties away from zero, or to even."""
    fraction, exponent = np.frexp(np.abs(x.astype(np.float64)))
    scaled = np.ldexp(fraction, 11 if precision == "tf32" else 8)
    whole = np.floor(scaled + 0.5) if precision == "tf32" and not mapped else np.rint(scaled)
    return np.copysign(np.ldexp(whole, exponent - (11 if precision == "tf32" else 8)), x)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_reference_rounds_to_nearest(precision: str) -> None:
    rounded = linear.reference_rounded(VALUES, precision)
    np.testing.assert_array_equal(rounded, nearest(VALUES, precision))
    assert (rounded != VALUES).sum() > len(VALUES) / 2
    by_map = linear.reference_rounded(VALUES, precision, mapped=True)
    np.testing.assert_array_equal(by_map, nearest(VALUES, precision, mapped=True))
    assert (by_map != rounded).any() == (precision == "tf32")
    special = np.array([np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(linear.reference_rounded(special, precision), special)
    np.testing.assert_array_equal(linear.reference_rounded(VALUES, "fp32"), VALUES)
    with pytest.raises(ValueError, match="precision 'fp16': expected one of"):
        linear.reference_rounded(VALUES, "fp16")


@pytest.mark.parametrize(("precision", "tile"), TILES)
def test_what_is_not_finite_stays_so(device: Device, precision: str, tile: str) -> None:
    """Rounding makes no number of a NaN, whatever its sign and payload, nor of an infinity."""
    bits = [0x7FC00000, 0x7FFFFFFF, 0x7FFFF000, 0xFFC00000, 0xFFFFFFFF, 0xFFFFF000, 0x7F800000, 0xFF800000]
    values = np.array(bits, np.uint32).view(np.float32)
    bench = Bench(device, precision, tile=tile)
    column, row = bench.matrix(values[:, None]), bench.matrix(values[None, :])
    one = bench.matrix(np.ones((1, 1), np.float32))
    results = [bench.result(len(bits), 1), bench.result(1, len(bits)), bench.result(len(bits), 1)]
    linear.forward(bench.program, column, one, None, results[0], tile=tile)
    linear.backward_dx(bench.program, one, row, results[1], tile=tile)
    linear.backward_dw(bench.program, row, one, results[2], tile=dw_tile(tile))
    with bench.run() as plan:
        for result in results:
            got = read(plan, result).ravel()
            assert np.isnan(got[:6]).all(), got
            np.testing.assert_array_equal(got[6:], values[6:])


@pytest.mark.parametrize(("precision", "tile"), TILES)
def test_operands_are_rounded_to_nearest(device: Device, precision: str, tile: str) -> None:
    """Products with 1 show what became of each operand: the nearest number of the precision, bit for bit."""
    bench = Bench(device, precision, tile=tile)
    column, row = bench.matrix(VALUES[:, None]), bench.matrix(VALUES[None, :])
    one = bench.matrix(np.ones((1, 1), np.float32))
    count = len(VALUES)
    down = [bench.result(count, 1) for _ in range(4)]
    across = [bench.result(1, count) for _ in range(2)]
    linear.forward(bench.program, column, one, None, down[0], tile=tile)
    linear.forward(bench.program, one, column, None, across[0], tile=tile)
    linear.backward_dx(bench.program, column, one, down[1], tile=tile)
    linear.backward_dx(bench.program, one, row, across[1], tile=tile)
    linear.backward_dw(bench.program, row, one, down[2], tile=dw_tile(tile))
    linear.backward_dw(bench.program, row, one, down[3], tile=dw_tile(tile), slices=2)
    expected = VALUES.astype(np.float64) if precision == "fp32" else nearest(VALUES, precision)
    by_tile = nearest(VALUES, precision, mapped=True) if bench.mapped else expected
    with bench.run() as plan:
        for result in (*down, *across):
            np.testing.assert_array_equal(read(plan, result).reshape(-1), by_tile)


@pytest.mark.parametrize(("precision", "tile"), TENSOR_TILES)
def test_biases_and_what_is_added_to_stay_exact(device: Device, precision: str, tile: str) -> None:
    """Bias, bias gradient and earlier contents are float32 sums in every precision."""
    bench = Bench(device, precision, tile=tile)
    fine = np.array([1 + 2.0**-20, -1 - 2.0**-21, 3 + 2.0**-19], np.float32)
    zeros = bench.matrix(np.zeros((2, 3), np.float32))
    square = bench.matrix(np.zeros((3, 3), np.float32))
    before = np.stack([fine, -fine])
    y, added, dx = bench.result(2, 3), bench.matrix(before), bench.matrix(before)
    dw, db = bench.result(3, 3), bench.vector(np.full(3, np.nan, np.float32))
    linear.forward(bench.program, zeros, square, bench.vector(fine), y, tile=tile)
    linear.forward(bench.program, zeros, square, None, added, accumulate=True, tile=tile)
    linear.backward_dx(bench.program, zeros, square, dx, accumulate=True, tile=tile)
    linear.backward_dw(bench.program, bench.matrix(np.stack([fine, 0 * fine])), zeros, dw, db, tile=dw_tile(tile))
    with bench.run() as plan:
        np.testing.assert_array_equal(read(plan, y), np.stack([fine, fine]))
        np.testing.assert_array_equal(read(plan, added), before)
        np.testing.assert_array_equal(read(plan, dx), before)
        np.testing.assert_array_equal(read(plan, db), fine)


def _products(device: Device, precision: str) -> list[Array]:
    bench = Bench(device, precision)
    x, w, dy = bench.draw(40, 70), bench.draw(50, 70), bench.draw(40, 50)
    tensors: list[Tensor] = [bench.matrix(values) for values in (x, w, dy)]
    results = [bench.result(40, 50), bench.result(40, 70), bench.result(50, 70)]
    linear.forward(bench.program, tensors[0], tensors[1], None, results[0])
    linear.backward_dx(bench.program, tensors[2], tensors[1], results[1])
    linear.backward_dw(bench.program, tensors[2], tensors[0], results[2])
    plan: Plan
    with bench.run() as plan:
        return [read(plan, result) for result in results]


def test_precisions_differ_by_their_rounding(device: Device) -> None:
    """tf32 and bf16 are as far from fp32 as 11 and 8 significant bits make them: they are really used."""
    exact = _products(device, "fp32")
    for precision, unit in (("tf32", 2.0**-11), ("bf16", 2.0**-8)):
        for full, rounded in zip(exact, _products(device, precision), strict=True):
            error = np.linalg.norm(rounded - full) / np.linalg.norm(full)
            assert 0.1 * unit < error < unit
