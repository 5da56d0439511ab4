"""Spectral norm against float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program
from fxengine.train.groups import ParamGroup, ParamSpec
from fxengine.train.optimizer import Guard
from fxengine.train.spectral import reference_spectral_norm, spectral_norm
from tests.reference import optimizer as step_reference
from tests.support import assert_close

Matrix = tuple[np.ndarray, np.ndarray]


class Case:
    """Spectral norm of some matrices, all of them tensors of one group."""

    def __init__(self, device: Device, matrices: Sequence[Matrix], *, sn_max: float = 3.0, skip: int = 0) -> None:
        program = Program(device.target)
        limit = program.tensor("sn_max", (1,), data=np.array([sn_max], np.float32))
        self.skip = program.tensor("skip", (1,), np.uint32, data=np.array([skip], np.uint32))
        mask, floats = program.tensor("mask", (1,), np.uint64), program.tensor("floats", (2,))
        guard = Guard(scales=floats, skip=self.skip, group_mask=mask)
        self.group = ParamGroup(
            program, "branches", 2, [ParamSpec(f"w{i}", np.shape(w)) for i, (w, _) in enumerate(matrices)]
        )
        self.v, self.sigma = [], []
        for i, (p, (_, v)) in enumerate(zip(self.group.parameters, matrices, strict=True)):
            self.v.append(program.tensor(f"v{i}", v.shape, arena="sn_v", data=v.astype(np.float32)))
            self.sigma.append(program.tensor(f"sigma{i}", (1,), data=np.array([-7], np.float32)))
            spectral_norm(
                program, p.value, self.v[-1], self.sigma[-1], signal=lambda name: limit, guard=guard, label=f"sn{i}"
            )
        self.plan = Plan(program, device, guard=True)
        self.stream = device.stream()
        whole = np.full(self.group.size, 77, np.float32)  # padding included
        for p, (w, _) in zip(self.group.parameters, matrices, strict=True):
            p.cut(whole)[...] = w
        self.plan.buffer(self.group.params).write(whole)

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.plan.run(stream=self.stream)
        self.stream.synchronize()
        self.plan.check_guards()

    def result(self, i: int) -> tuple[np.ndarray, np.ndarray, float]:
        p = self.group.parameters[i]
        return (
            self.plan.buffer(p.value).read(),
            self.plan.buffer(self.v[i]).read(),
            float(self.plan.buffer(self.sigma[i]).read()[0]),
        )

    def bits(self) -> list[bytes]:
        tensors = [self.group.params, *self.v, *self.sigma]
        return [self.plan.buffer(t).read().tobytes() for t in tensors]

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stream.close()
        self.plan.close()


def _matrix(seed: int, rows: int, cols: int, scale: float = 1.0) -> Matrix:
    rng = np.random.default_rng(seed)
    w = (scale * rng.normal(size=(rows, cols)) / np.sqrt(max(rows, cols))).astype(np.float32)
    return w, rng.normal(size=cols).astype(np.float32)


def _check(case: Case, i: int, matrix: Matrix, sn_max: float) -> float:
    w, v, sigma = reference_spectral_norm(*matrix, sn_max)
    got = case.result(i)
    size = float(np.abs(w).max(initial=1e-30))
    assert_close(got[0], w, factor=16, atol=1e-6 * size, name="w")
    assert_close(got[1], v, factor=16, atol=1e-6, name="v")
    assert_close(np.float32(got[2]), sigma, factor=16, atol=0.0, name="sigma")
    assert (case.plan.buffer(case.group.params).read()[case.group.padding()] == 77).all()
    return sigma


@settings(max_examples=30)
@given(
    rows=st.sampled_from([1, 2, 31, 32, 33, 127, 128, 129, 260]),
    cols=st.sampled_from([1, 2, 3, 31, 33, 257, 264, 287, 288, 289, 600]),
    sn_max=st.sampled_from([0.5, 1.5, 100.0]),
    seed=st.integers(0, 100),
)
def test_shapes(device: Device, rows: int, cols: int, sn_max: float, seed: int) -> None:
    matrix = _matrix(seed, rows, cols)
    with Case(device, [matrix], sn_max=sn_max) as case:
        case.run()
        _check(case, 0, matrix, sn_max)


def test_the_branches_of_the_default_step_share_a_launch(device: Device) -> None:
    matrices = [_matrix(d, 128, cols, 2.0 + d) for d, cols in enumerate((257, 259, 264, 264))]
    with Case(device, matrices, sn_max=3.5) as case:
        assert [n.name for n in case.plan.nodes] == ["spectral"]
        case.run()
        sigmas = [_check(case, i, m, 3.5) for i, m in enumerate(matrices)]
        assert min(sigmas) < 3.5 < max(sigmas)
        assert case.group.padding().size == 128 * 3 + 128  # two matrices have gaps between their rows


def test_a_large_matrix(device: Device) -> None:
    matrix = _matrix(5, 512, 513, 4.0)
    with Case(device, [matrix]) as case:
        case.run()
        _check(case, 0, matrix, 3.0)


def test_agrees_with_the_reference_of_the_step() -> None:
    w, v = (x.astype(np.float64) for x in _matrix(1, 9, 7, 8.0))
    ours, theirs = reference_spectral_norm(w, v, 1.0), step_reference.spectral_norm(w, v, 1.0)
    for i in range(3):
        np.testing.assert_allclose(np.asarray(ours[i]), np.asarray(theirs[i]), rtol=1e-14)


def test_repeated_it_finds_the_largest_singular_value(device: Device) -> None:
    w, v = _matrix(2, 24, 40, 3.0)
    with Case(device, [(w, v)], sn_max=100.0) as case:
        case.run(60)
        _, right, sigma = case.result(0)
        assert sigma == pytest.approx(np.linalg.svd(w.astype(np.float64))[1][0], rel=1e-3)
        assert np.linalg.norm(right) == pytest.approx(1.0, abs=1e-6)


def test_a_matrix_below_the_limit_keeps_every_bit(device: Device) -> None:
    w, v = _matrix(3, 20, 30)
    sigma = np.float32(reference_spectral_norm(w, v, 1.0)[2])
    with Case(device, [(w, v)], sn_max=float(sigma) * 1.00001) as case:
        case.run()
        np.testing.assert_array_equal(case.result(0)[0].view(np.uint32), w.view(np.uint32))
    with Case(device, [(w, v)], sn_max=float(sigma) * 0.99999) as case:
        case.run()
        assert (np.abs(case.result(0)[0]) < np.abs(w)).all()
        assert case.result(0)[2] == pytest.approx(float(sigma), rel=1e-6)  # of before it was scaled


def test_a_limit_of_zero_makes_zeros(device: Device) -> None:
    with Case(device, [_matrix(3, 5, 6)], sn_max=0.0) as case:
        case.run()
        assert (case.result(0)[0] == 0).all()
        assert case.result(0)[2] > 0.1


@pytest.mark.parametrize("which", ["w", "v", "both"])
def test_zeros(device: Device, which: str) -> None:
    w, v = _matrix(4, 6, 9)
    matrix = (w * (which == "v"), v * (which == "w"))
    with Case(device, [matrix], sn_max=0.5) as case:
        case.run(2)
        after = case.result(0)
        np.testing.assert_array_equal(after[0], matrix[0])
        assert (after[1] == 0).all()
        assert after[2] == 0.0


@pytest.mark.parametrize("scale", [1e-18, 1e-14, 1e30])
def test_extreme_sizes(device: Device, scale: float) -> None:
    """Squares that leave float32, and norms below 1e-12, where normalize divides by 1e-12 instead."""
    w, v = _matrix(6, 17, 11)
    matrix = ((w * np.float64(scale)).astype(np.float32), v / np.float32(np.linalg.norm(v)))
    w64, v64, sigma = reference_spectral_norm(*matrix, 3.0)
    with Case(device, [matrix]) as case:
        case.run()
        got = case.result(0)
        assert_close(got[0], w64, factor=32, atol=1e-6 * float(np.abs(w64).max()))
        assert_close(got[1], v64, factor=32, atol=1e-6 * float(np.abs(v64).max()) + 1e-44)
        assert_close(np.float32(got[2]), sigma, factor=64, atol=1e-44)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_matrix_that_is_not_finite_is_not_scaled(device: Device, bad: float) -> None:
    w, v = _matrix(7, 40, 50, 9.0)
    w[13, 21] = bad
    other = _matrix(8, 40, 50, 9.0)
    with Case(device, [(w, v), other], sn_max=1.0) as case:
        case.run()
        got = case.result(0)
        np.testing.assert_array_equal(got[0].view(np.uint32), w.view(np.uint32))
        assert np.isnan(got[2]) and np.isnan(got[1]).any()
        _check(case, 1, other, 1.0)  # the neighbour in the launch is none the wiser


def test_a_skipped_step_changes_nothing(device: Device) -> None:
    matrices = [_matrix(9, 12, 13, 9.0), _matrix(10, 3, 4, 9.0)]
    with Case(device, matrices, skip=1) as case:
        before = case.bits()
        case.run(2)
        assert case.bits() == before
        case.plan.buffer(case.skip).write(np.zeros(1, np.uint32))
        case.run()
        for i, m in enumerate(matrices):
            _check(case, i, m, 3.0)


def test_same_bits_in_every_order_and_in_a_graph(device: Device) -> None:
    matrices = [_matrix(11, 130, 290, 9.0), _matrix(12, 7, 300, 9.0), _matrix(13, 128, 257, 9.0), _matrix(14, 21, 40)]

    def bits(on: Device, captured: bool = False) -> list[bytes]:
        with Case(on, matrices) as case:
            if captured:
                with case.plan.capture(stream=case.stream) as graph:
                    graph.launch(stream=case.stream)
                    case.stream.synchronize()
            else:
                case.run()
            return case.bits()

    expected = bits(device)
    assert bits(device, captured=True) == expected
    if device.kind == "sim":
        for schedule in ("reverse", "random:1"):
            with Device.open_sim(schedule=schedule, poison="ff") as other:
                assert bits(other) == expected, schedule


def test_arguments_are_checked(device: Device) -> None:
    program = Program(device.target)
    w = program.tensor("w", (4, 6))
    v, sigma, skip = program.tensor("v", (6,)), program.tensor("s", (1,)), program.tensor("skip", (1,), np.uint32)
    guard = Guard(scales=sigma, skip=skip, group_mask=sigma)
    good: dict[str, Any] = {"w": w, "v": v, "sigma": sigma}
    bad: list[tuple[dict[str, Any], str]] = [
        ({"w": w.flat()}, r"rows, cols"),
        ({"v": program.tensor("v5", (5,))}, r"\(6,\) for w \(4, 6\)"),
        ({"v": program.tensor("v64", (6,), np.float64)}, "float64"),
        ({"sigma": v}, r"sigma must be float32 \(1,\)"),
    ]
    for change, message in bad:
        with pytest.raises(ValueError, match=message):
            spectral_norm(program, **{**good, **change}, signal=lambda name: sigma, guard=guard, label="sn")
