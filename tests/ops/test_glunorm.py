"""Gated residual, layer norm, their gradients and column sums, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops import glunorm
from fxengine.ops.linear import Activation
from tests.ops.test_linear import Array, Bench, forget, read
from tests.support import assert_close

WIDTHS = [1, 2, 5, 32, 33, 128, 255, 256, 257, 300, 520]


class Case:
    """Forward with and without statistics, then the backward with all that it can give."""

    def __init__(
        self,
        device: Device,
        rows: int,
        width: int,
        *,
        lead: int = 0,
        pad: int = 0,
        pad_g: int | None = None,
        activation: Activation = "none",
        accumulate: bool = False,
        accumulate_params: bool = False,
        tile_rows: int | None = None,
        seed: int = 0,
        g: Array | None = None,
        skip: Array | None = None,
    ) -> None:
        bench = Bench(device, seed=seed)
        self.activation: Activation = activation
        drawn = 2 * bench.draw(rows, 2 * width), bench.draw(rows, width)
        self.g = drawn[0] if g is None else g
        self.skip = drawn[1] if skip is None else skip
        self.dh = bench.draw(rows, width)
        self.gain, self.bias = 1 + bench.draw(width), bench.draw(width)
        draws = {"dskip": bench.draw(rows, width), "dgain": bench.draw(width), "dbias": bench.draw(width)}
        added = {"dskip": accumulate, "dgain": accumulate_params, "dbias": accumulate_params}
        self.before = {name: value for name, value in draws.items() if added[name]}

        def matrix(values: Array) -> Tensor:
            own = pad if pad_g is None or values.shape[1] == width else pad_g
            return bench.matrix(values, lead=lead, pad=own)

        def result(name: str, shape: tuple[int, ...]) -> Tensor:
            values = self.before.get(name, np.full(shape, np.nan, np.float32))
            return matrix(values) if len(shape) == 2 else bench.vector(values, lead=lead)

        g_in, skip_in, dh_in = matrix(self.g), matrix(self.skip), matrix(self.dh)
        gain, bias = bench.vector(self.gain, lead=lead), bench.vector(self.bias, lead=lead)
        self.out = {
            "h": result("h", (rows, width)),
            "alone": result("alone", (rows, width)),
            "stats": bench.result(rows, 2, pad=0),
            "dg": result("dg", (rows, 2 * width)),
            "dskip": result("dskip", (rows, width)),
            "dgain": result("dgain", (width,)),
            "dbias": result("dbias", (width,)),
        }
        program = bench.program
        glunorm.forward(program, g_in, skip_in, gain, bias, self.out["h"], stats=self.out["stats"])
        glunorm.forward(program, g_in, skip_in, gain, bias, self.out["alone"], label="alone")
        glunorm.backward(
            program,
            dh_in,
            g_in,
            skip_in,
            gain,
            self.out["stats"],
            self.out["dg"],
            dskip=self.out["dskip"],
            activation=activation,
            accumulate=accumulate,
            dgain=self.out["dgain"],
            dbias=self.out["dbias"],
            accumulate_params=accumulate_params,
            tile_rows=tile_rows,
            label="back",
        )
        with bench.run() as plan:
            self.result = self.read(plan)
            if not self.before:  # a replay gives the same bits
                forget(plan, list(self.out.values()))
                with device.stream() as stream:
                    plan.run(stream=stream)
                    stream.synchronize()
                assert_same_bits(self.read(plan), self.result)

    def read(self, plan: Plan) -> dict[str, Array]:
        return {name: read(plan, t) for name, t in self.out.items()}

    def check(self) -> None:
        forward = glunorm.reference_forward(self.g, self.skip, self.gain, self.bias)
        expected = forward | {"alone": forward["h"]}
        expected |= glunorm.reference_backward(self.dh, self.g, self.skip, self.gain, activation=self.activation)
        for name, before in self.before.items():
            expected[name] = expected[name] + before
        # Rounding of y is magnified by 1 / its standard deviation, which is small in a row of few entries now and then.
        magnified = max(1.0, float(forward["stats"][:, 1].max() / 4.0)) if self.g.shape[1] > 2 else 1.0
        for name, result in self.result.items():
            check(result, expected[name], name, magnified)


def check(actual: Array, reference: NDArray[np.float64], name: str, magnified: float = 1.0) -> None:
    """Sums that may cancel: the rounding error goes with the largest entry."""
    atol = 32 * magnified * float(np.finfo(np.float32).eps) * max(1.0, float(np.abs(reference).max()))
    assert_close(actual, reference, factor=16.0, atol=atol, name=name)


def assert_same_bits(one: dict[str, Array], two: dict[str, Array]) -> None:
    for name, value in one.items():
        np.testing.assert_array_equal(value.view(np.uint32), two[name].view(np.uint32), name)


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 33]),
    width=st.sampled_from(WIDTHS),
    lead=st.sampled_from([0, 0, 1, 4]),
    pad=st.sampled_from([0, 3, 4]),
    activation=st.sampled_from(["none", "elu"]),
    accumulate=st.booleans(),
    accumulate_params=st.booleans(),
    tile_rows=st.sampled_from([None, 1, 3, 16]),
    seed=st.integers(0, 100),
)
@example(
    rows=70,
    width=256,
    lead=0,
    pad=0,
    activation="elu",
    accumulate=True,
    accumulate_params=False,
    tile_rows=None,
    seed=0,
)
def test_against_float64(
    device: Device,
    rows: int,
    width: int,
    lead: int,
    pad: int,
    activation: Activation,
    accumulate: bool,
    accumulate_params: bool,
    tile_rows: int | None,
    seed: int,
) -> None:
    Case(
        device,
        rows,
        width,
        lead=lead,
        pad=pad,
        activation=activation,
        accumulate=accumulate,
        accumulate_params=accumulate_params,
        tile_rows=tile_rows,
        seed=seed,
    ).check()


def test_reference_gradients_are_the_derivatives() -> None:
    rng = np.random.default_rng(3)
    x = {"g": rng.normal(size=(3, 10)), "skip": rng.normal(size=(3, 5)), "gain": rng.normal(size=5), "bias": np.ones(5)}
    dh = rng.normal(size=(3, 5))

    def loss(name: str, index: int, step: float) -> float:
        moved = {key: value.copy() for key, value in x.items()}
        moved[name].reshape(-1)[index] += step
        return float(np.sum(dh * glunorm.reference_forward(**moved)["h"]))

    grads = glunorm.reference_backward(dh, x["g"], x["skip"], x["gain"])
    for name, value in x.items():
        slopes = [(loss(name, i, 1e-5) - loss(name, i, -1e-5)) / 2e-5 for i in range(value.size)]
        np.testing.assert_allclose(grads[f"d{name}"].reshape(-1), slopes, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("width", [4, 200, 256, 516])
def test_bits_do_not_depend_on_alignment_or_neighbours(device: Device, width: int) -> None:
    """Rows 16-byte aligned, and not; the column sums by the same blocks."""
    assert_same_bits(
        Case(device, 9, width, activation="elu").result, Case(device, 9, width, lead=1, pad=2, activation="elu").result
    )


def test_rows_aligned_but_not_their_second_half(device: Device) -> None:
    """Every row begins on 16 bytes, but c = g[:, 10:] does not: a 16-byte access there would fault on a GPU."""
    Case(device, 3, 10, pad=2, pad_g=4, activation="elu").check()


@pytest.mark.parametrize("width", [1, 7, 100, 400])
def test_a_constant_row_is_the_bias(device: Device, width: int) -> None:
    """Its mean is exact, whatever the rounding of the sum."""
    g = np.zeros((6, 2 * width), np.float32)
    skip = np.repeat(np.array([[3.0], [0.1], [-12345.678], [1e6], [0.0], [1 / 3]], np.float32), width, axis=1)
    case = Case(device, 6, width, g=g, skip=skip)
    np.testing.assert_array_equal(case.result["h"], np.broadcast_to(case.bias, (6, width)))
    assert_close(case.result["stats"][:, 1], np.full(6, 1e-5**-0.5), factor=8)


@pytest.mark.parametrize("width", [64, 300])
def test_a_mean_far_from_zero(device: Device, width: int) -> None:
    """Values on a grid that float32 holds exactly: all that is left is the error of mean and variance."""
    rng = np.random.default_rng(4)
    g = np.zeros((5, 2 * width), np.float32)
    skip = (4096.0 + rng.integers(-64, 65, (5, width)) / 64.0).astype(np.float32)
    case = Case(device, 5, width, g=g, skip=skip)
    expected = glunorm.reference_forward(g, skip, case.gain, case.bias)
    # Half a unit in the last place of the mean, over a standard deviation of about 0.6.
    assert_close(case.result["h"], expected["h"], factor=16, atol=2 * 2.0**-12 / 0.5)
    assert_close(case.result["stats"], expected["stats"], factor=4)


def test_saturated_gates(device: Device) -> None:
    """Neither overflow, nor a derivative lost in 1 - sigmoid."""
    c = np.array([[-200.0, -90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 90.0, 200.0]], np.float32)
    a = np.linspace(-1, 1, 9, dtype=np.float32)[None, :]
    case = Case(device, 1, 9, g=np.concatenate([a, c], axis=1))
    expected = glunorm.reference_backward(case.dh, case.g, case.skip, case.gain)["dg"]
    assert np.isfinite(case.result["dg"]).all()
    normal = np.abs(expected) > 1e-30
    np.testing.assert_allclose(case.result["dg"][normal], expected[normal], rtol=1e-4)


@pytest.mark.parametrize("width", [5, 300])
def test_what_is_not_finite_stays_in_its_row(device: Device, width: int) -> None:
    clean = Case(device, 9, width)
    skip, g = clean.skip.copy(), clean.g.copy()
    skip[2, width - 1], skip[4, 0], g[7, width] = np.nan, np.inf, np.nan
    case = Case(device, 9, width, skip=skip, g=g)
    bad = np.isin(np.arange(9), [2, 4, 7])
    for name in ("h", "alone", "dg", "dskip"):
        assert np.isnan(case.result[name][bad]).all(), name
        np.testing.assert_array_equal(case.result[name][~bad], clean.result[name][~bad], name)
    assert np.isnan(case.result["dgain"]).all()
    np.testing.assert_array_equal(case.result["dbias"], clean.result["dbias"])


def test_what_is_not_asked_for_costs_nothing(device: Device) -> None:
    program = Program(device.target)
    g, skip, gain = program.tensor("g", (4, 10)), program.tensor("skip", (4, 5)), program.tensor("gain", (5,))
    h, dg, stats = program.tensor("h", (4, 5)), program.tensor("dg", (4, 10)), program.tensor("stats", (4, 2))
    before = set(program.storages)
    forward = glunorm.forward(program, g, skip, gain, gain, h)
    backward = glunorm.backward(program, h, g, skip, gain, stats, dg)
    assert set(program.storages) == before and len(program.launches) == 2
    assert forward.writes == (h,) and forward.fields["stats"] == 0
    assert backward.writes == (dg,) and backward.fields["dskip"] == backward.fields["partials"] == 0


def test_sums_of_gain_and_bias_share_one_late_launch(device: Device) -> None:
    bench = Bench(device)
    g, skip, gain = (bench.matrix(bench.draw(20, n)) for n in (6, 3, 3))
    stats = bench.matrix(np.ones((20, 2), np.float32), pad=0)
    dgain, dbias, dg = bench.vector(bench.draw(3)), bench.vector(bench.draw(3)), bench.result(20, 6)
    vector = bench.vector(bench.draw(3))
    glunorm.backward(bench.program, gain, g, skip, vector, stats, dg, dgain=dgain, dbias=dbias, tile_rows=4)
    assert glunorm.COLUMNSUM.late
    with bench.run() as plan:
        assert [node.name for node in plan.nodes] == ["glunorm_backward", "columnsum"]


@settings(max_examples=25)
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 100, 513]),
    cols=st.sampled_from([1, 5, 31, 32, 33, 100, 257]),
    pad=st.sampled_from([0, 3]),
    accumulate=st.booleans(),
    seed=st.integers(0, 100),
)
def test_columnsum(device: Device, rows: int, cols: int, pad: int, accumulate: bool, seed: int) -> None:
    bench = Bench(device, seed=seed)
    x, before = bench.draw(rows, cols), bench.draw(cols)
    out = bench.vector(before if accumulate else np.full(cols, np.nan, np.float32), lead=1)
    glunorm.columnsum(bench.program, bench.matrix(x, pad=pad), out, accumulate=accumulate)
    with bench.run() as plan:
        expected = x.astype(np.float64).sum(axis=0) + (before if accumulate else 0.0)
        assert_close(read(plan, out), expected, factor=1, atol=1e-12)


def test_columnsum_keeps_what_cancels(device: Device) -> None:
    bench = Bench(device)
    x = np.zeros((64, 3), np.float32)
    x[3], x[17], x[40] = 1e8, 1.0, -1e8
    out = bench.vector(np.zeros(3, np.float32))
    glunorm.columnsum(bench.program, bench.matrix(x), out)
    with bench.run() as plan:
        np.testing.assert_array_equal(read(plan, out), 1.0)


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    g, skip, gain = program.tensor("g", (4, 10)), program.tensor("skip", (4, 5)), program.tensor("gain", (5,))
    h, dg, stats = program.tensor("h", (4, 5)), program.tensor("dg", (4, 10)), program.tensor("stats", (4, 2))
    with pytest.raises(ProgramError, match=r"g is 'skip' \[4, 5\].*expected float32 \[4, 10\]: h is 'h' \[4, 5\]"):
        glunorm.forward(program, skip, skip, gain, gain, h)
    with pytest.raises(ProgramError, match=r"bias is 'g' \[4, 10\].*expected float32 \[5\]"):
        glunorm.forward(program, g, skip, gain, g, h)
    with pytest.raises(ProgramError, match=r"h 'skip' .* overlaps skip"):
        glunorm.forward(program, g, skip, gain, gain, skip)
    with pytest.raises(ProgramError, match=r"stats is 'skip' \[4, 5\].*expected float32 \[4, 2\]"):
        glunorm.forward(program, g, skip, gain, gain, h, stats=skip)
    with pytest.raises(ProgramError, match="gaps"):
        glunorm.forward(program, g, skip, gain, gain, h, stats=skip.columns(0, 2))
    with pytest.raises(ProgramError, match="go together"):
        glunorm.backward(program, h, g, skip, gain, stats, dg, dgain=gain)
    with pytest.raises(ProgramError, match="'gelu'"):
        glunorm.backward(program, h, g, skip, gain, stats, dg, dskip=h, activation="gelu")  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="concern dskip"):
        glunorm.backward(program, h, g, skip, gain, stats, dg, accumulate=True)
    with pytest.raises(ProgramError, match=r"dskip 'h' .* overlaps dh"):
        glunorm.backward(program, h, g, skip, gain, stats, dg, dskip=h)
    with pytest.raises(ProgramError, match=r"out is 'gain' \[5\].*expected float32 \[10\]"):
        glunorm.columnsum(program, g, gain)
