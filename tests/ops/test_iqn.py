"""Implicit quantile networks against float64: features, product, loss, and the gradients of the golden files."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device, Target
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops import iqn, linear
from tests.reference import backward, golden
from tests.reference.losses import shaped_reward
from tests.reference.step import scene
from tests.support import assert_close

Arrays = dict[str, Any]


def _run(program: Program, device: Device, *outputs: Tensor | str, times: int = 1) -> list[np.ndarray]:
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        for _ in range(times):
            plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return [plan.buffer(t).read() for t in outputs]


def _data(program: Program, name: str, data: Any, pad: int = 0) -> Tensor:
    """A tensor with this data; floats become float32; `pad` elements of rubbish lie behind each row."""
    array = np.asarray(data)
    array = array.astype(np.float32 if array.dtype.kind == "f" else np.int32)
    if not pad:
        return program.tensor(name, array.shape, array.dtype, arena="inputs", data=array)
    wide = np.full((array.shape[0], array.shape[1] + pad), 2**30, array.dtype)
    wide[:, : array.shape[1]] = array
    return program.tensor(name, wide.shape, wide.dtype, arena="inputs", data=wide).columns(0, array.shape[1])


def _canvas(program: Program, name: str, shape: tuple[int, ...], pad: int, fill: Any = 77.0) -> tuple[Tensor, Tensor]:
    """A float32 output with `pad` columns behind it: the whole storage, and the output."""
    rows, cols = shape
    data = np.full((rows, cols + pad), 77.0, np.float32)
    data[:, :cols] = fill
    whole = program.tensor(name, data.shape, arena="state", data=data)
    return whole, whole.columns(0, cols)


def _inside(whole: np.ndarray, cols: int) -> np.ndarray:
    """The output, after a check that nothing was written behind it."""
    np.testing.assert_array_equal(whole[:, cols:], 77.0)
    return whole[:, :cols]


# -- cosine features --------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    batch=st.sampled_from([1, 3, 16]),
    quantiles=st.sampled_from([1, 5, 8, 33]),
    count=st.sampled_from([1, 2, 3, 4, 9, 16, 64, 65]),
    pad=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 100),
)
def test_cosines_against_float64(device: Device, batch: int, quantiles: int, count: int, pad: int, seed: int) -> None:
    tau = np.random.default_rng(seed).random((batch, quantiles)).astype(np.float32)
    program = Program(device.target)
    whole, out = _canvas(program, "cosines", (batch * quantiles, count), pad)
    iqn.cosines(program, _data(program, "tau", tau), out)
    (found,) = _run(program, device, whole)
    assert_close(_inside(found, count), iqn.reference_cosines(tau, count), factor=4, atol=2.5e-7, name="cosines")


def test_many_cosines_lose_nothing(device: Device) -> None:
    """Rounding i·tau to float32 before the cosine would be an error of 8e-4 at i = 5000."""
    tau = np.array([0.0, 0.1, 1 / 3, 0.7654321, 1.0 - 2.0**-24], np.float32)
    program = Program(device.target)
    out = program.tensor("cosines", (5, 5000))
    iqn.cosines(program, _data(program, "tau", tau), out)
    (found,) = _run(program, device, out)
    assert_close(found, iqn.reference_cosines(tau, 5000), factor=4, atol=2.5e-7, name="cosines")
    np.testing.assert_array_equal(found[0], 1.0)


def test_cosines_of_what_is_no_number(device: Device) -> None:
    program = Program(device.target)
    out = program.tensor("cosines", (2, 4))
    iqn.cosines(program, _data(program, "tau", np.array([np.nan, 0.5])), out)
    (found,) = _run(program, device, out)
    assert np.isnan(found[0]).all()
    assert_close(found[1], [1.0, 0.0, -1.0, 0.0], factor=1, atol=1e-7)


# -- product ----------------------------------------------------------------------------------------------------


class Mix:
    """Product and backward on random data, phi a relu's output; arrays with `pad` columns of rubbish behind them."""

    def __init__(self, seed: int, batch: int, quantiles: int, cols: int) -> None:
        rng = np.random.default_rng(seed)
        self.shape = (batch * quantiles, cols)
        self.phi = np.maximum(rng.normal(size=self.shape), 0.0).astype(np.float32)
        self.h2 = rng.normal(size=(batch, cols)).astype(np.float32)
        self.dx = rng.normal(size=self.shape).astype(np.float32)
        self.before = rng.normal(size=(batch, cols)).astype(np.float32)

    def forward(self, device: Device, pad: int = 0) -> np.ndarray:
        program = Program(device.target)
        whole, x = _canvas(program, "x", self.shape, pad)
        iqn.mix(program, _data(program, "phi", self.phi, pad), _data(program, "h2", self.h2, pad), x)
        return _inside(_run(program, device, whole)[0], self.shape[1])

    def backward(
        self,
        device: Device,
        scale: tuple[float, float] | None,
        *,
        activation: linear.Activation = "none",
        accumulate: bool = False,
        pad: int = 0,
        place: int = 0,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(dphi, dh2); place = 1 puts dphi where dx is."""
        program = Program(device.target)
        whole_dx, dx = _canvas(program, "dx", self.shape, pad, self.dx)
        whole_dphi, dphi = (whole_dx, dx) if place else _canvas(program, "dphi", self.shape, pad)
        whole_dh2, dh2 = _canvas(program, "dh2", self.h2.shape, pad, self.before)
        weight, readiness = (_data(program, f"s{i}", np.array([s])) for i, s in enumerate(scale or (1.0, 1.0)))
        iqn.mix_backward(
            program,
            dx,
            _data(program, "phi", self.phi, pad),
            _data(program, "h2", self.h2, pad),
            dphi,
            dh2=dh2 if scale else None,
            weight=weight,
            readiness=readiness,
            activation=activation,
            accumulate=accumulate,
        )
        found = _run(program, device, whole_dphi, whole_dh2)
        return _inside(found[0], self.shape[1]), _inside(found[1], self.shape[1])


MIXES: dict[str, st.SearchStrategy[int]] = {
    "batch": st.sampled_from([1, 2, 5, 16]),
    "quantiles": st.sampled_from([1, 5, 8, 9, 32, 70]),
    "cols": st.sampled_from([1, 3, 4, 28, 32, 127, 128, 129, 132, 260]),
    "pad": st.sampled_from([0, 1, 4]),
    "seed": st.integers(0, 100),
}


@settings(max_examples=20)
@given(**MIXES)
def test_mix_is_exact(device: Device, batch: int, quantiles: int, cols: int, pad: int, seed: int) -> None:
    case = Mix(seed, batch, quantiles, cols)
    np.testing.assert_array_equal(case.forward(device, pad), iqn.reference_mix(case.phi, case.h2).astype(np.float32))


@settings(max_examples=30)
@given(**MIXES, accumulate=st.booleans(), place=st.integers(0, 1), weight=st.sampled_from([1.0, 0.3]))
def test_mix_backward_against_float64(
    device: Device,
    batch: int,
    quantiles: int,
    cols: int,
    pad: int,
    seed: int,
    accumulate: bool,
    place: int,
    weight: float,
) -> None:
    case = Mix(seed, batch, quantiles, cols)
    dphi, dh2 = case.backward(device, (weight, 0.7), accumulate=accumulate, pad=pad, place=place)
    scale = float(np.float32(weight)) * float(np.float32(0.7))
    expected_dphi, expected_dh2 = iqn.reference_mix_backward(case.dx, case.phi, case.h2, scale)
    np.testing.assert_array_equal(dphi, expected_dphi.astype(np.float32))
    # error of a sum of N terms of size 1, in the worst order
    atol = 1e-7 * quantiles
    assert_close(dh2, expected_dh2 + (case.before if accumulate else 0.0), factor=8, atol=atol, name="dh2")


@pytest.mark.parametrize("scale", [(0.0, 1.0), (1.0, 0.0), (1e-30, 1e-30)])
def test_a_scale_of_zero_stops_everything(device: Device, scale: tuple[float, float]) -> None:
    """Dh2 is an exact 0 or keeps its bits, a negative zero included; phi's own gradient knows no scale."""
    case = Mix(3, 4, 9, 30)
    case.dx[::2] = np.nan
    case.phi[1::5] = np.inf
    case.before[:, ::2] = -0.0
    _, dh2 = case.backward(device, scale)
    assert dh2.tobytes() == np.zeros_like(dh2).tobytes()
    dphi, kept = case.backward(device, scale, accumulate=True)
    assert kept.tobytes() == case.before.tobytes()
    assert np.isnan(dphi).any()
    assert np.isnan(case.backward(device, (1.0, 1e-30))[1]).any()


@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_mix_backward_goes_on_through_what_made_h2(
    device: Device, activation: linear.Activation, accumulate: bool
) -> None:
    case = Mix(5, 5, 9, 130)
    case.h2 = {"relu": np.maximum(case.h2, 0.0), "elu": case.h2, "tanh": np.tanh(case.h2)}[activation]
    slope = {
        "relu": np.where(case.h2 > 0.0, 1.0, 0.0),
        "elu": np.where(case.h2 > 0.0, 1.0, case.h2.astype(np.float64) + 1.0),
        "tanh": 1.0 - case.h2.astype(np.float64) ** 2,
    }[activation]
    _, dh2 = case.backward(device, (0.5, 0.75), activation=activation, accumulate=accumulate)
    _, expected = iqn.reference_mix_backward(case.dx, case.phi, case.h2, 0.375)
    before = case.before if accumulate else 0.0
    assert_close(dh2, slope * expected + before, factor=8, atol=2e-6, name="dh2")


def test_a_shut_relu_stops_everything(device: Device) -> None:
    case = Mix(4, 2, 3, 8)
    shut = case.phi == 0.0
    case.dx[shut] = np.inf
    dphi, untouched = case.backward(device, None)
    np.testing.assert_array_equal(dphi[shut], 0.0)
    assert np.isfinite(dphi).all()
    np.testing.assert_array_equal(untouched, case.before)


# -- loss -------------------------------------------------------------------------------------------------------


def _loss_case(
    seed: int, batch: int, quantiles: int, targets: int, branches: tuple[int, ...], spread: float = 1.0
) -> Arrays:
    rng = np.random.default_rng(seed)
    wide = sum(branches)
    disc = np.where(rng.random(batch) < 0.3, 0.0, rng.uniform(0.9, 0.99, batch))
    return {
        "theta": (spread * rng.normal(size=(batch * quantiles, wide))).astype(np.float32),
        "theta_target": (spread * rng.normal(size=(batch * targets, wide))).astype(np.float32),
        "tau": rng.random((batch, quantiles)).astype(np.float32),
        "actions": np.stack([rng.integers(0, n, batch) for n in branches], axis=1),
        "best": np.stack([rng.integers(0, n, batch) for n in branches], axis=1),
        "reward": rng.normal(size=batch).astype(np.float32),
        "discount": disc.astype(np.float32),
        "weight": rng.uniform(0.5, 1.5, batch).astype(np.float32),
    }


def _loss(
    device: Device, case: Arrays, branches: tuple[int, ...], kappa: float, pad: int = 0, *, times: int = 1
) -> dict[str, np.ndarray]:
    program = Program(device.target)
    rows, count = case["actions"].shape
    inputs: Arrays = {k: _data(program, k, v, pad if np.ndim(v) == 2 else 0) for k, v in case.items()}
    whole, dtheta = _canvas(program, "dtheta", case["theta"].shape, pad)
    whole_mean, mean = _canvas(program, "theta_mean", (rows, count), pad)
    loss = program.tensor("loss", (1,))
    outputs: Arrays = {"dtheta": dtheta, "loss": loss, "theta_mean": mean}
    iqn.loss(program, **inputs, branches=branches, kappa=kappa, **outputs)
    found = _run(program, device, whole, whole_mean, loss, times=times)
    return {
        "dtheta": _inside(found[0], case["theta"].shape[1]),
        "theta_mean": _inside(found[1], count),
        "loss": found[2][0],
    }


def _taken(case: Arrays, branches: tuple[int, ...]) -> np.ndarray:
    """Which elements of theta belong to an action that was taken."""
    rows = np.concatenate([np.arange(n) == case["actions"][:, d, None] for d, n in enumerate(branches)], axis=1)
    return np.repeat(rows, len(case["theta"]) // len(rows), axis=0)


@settings(max_examples=60)
@given(
    batch=st.sampled_from([1, 2, 3, 9]),
    many=st.booleans(),
    quantiles=st.sampled_from([1, 5, 8, 31, 32, 33, 70]),
    targets=st.sampled_from([1, 4, 7, 32, 128, 129, 300]),
    branches=st.sampled_from([(3, 3, 3, 3), (3,), (1,), (3, 2), (1, 5, 2), (2,) * 7, (4, 3, 2, 1, 1, 2, 3, 4)]),
    kappa=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    spread=st.sampled_from([0.0, 1.0, 5.0]),
    pad=st.sampled_from([0, 3]),
    seed=st.integers(0, 100),
)
def test_loss_against_float64(
    device: Device,
    batch: int,
    many: bool,
    quantiles: int,
    targets: int,
    branches: tuple[int, ...],
    kappa: float,
    spread: float,
    pad: int,
    seed: int,
) -> None:
    case = _loss_case(seed, batch, quantiles, targets, branches, spread)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iqn, "_MANY", 0 if many else 1 << 30)
        found = _loss(device, case, branches, kappa, pad)
    expected = iqn.reference_loss(**case, branches=branches, kappa=kappa)
    assert_close(found["loss"], expected.loss, factor=64, name="loss")
    # a slope is a mean of terms up to kappa: relative to the largest possible one
    scale = 1.5 / (batch * len(branches))
    assert_close(found["dtheta"], expected.dtheta, factor=16, atol=5e-6 * scale, name="dtheta")
    assert_close(found["theta_mean"], expected.theta_mean, factor=16, atol=2e-6, name="theta_mean")
    np.testing.assert_array_equal(found["dtheta"][~_taken(case, branches)], 0.0)


@pytest.fixture(params=[False, True], ids=["spread", "many"])
def many(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether one warp works on all branches of a row, whatever the number of rows."""
    monkeypatch.setattr(iqn, "_MANY", 0 if request.param else 1 << 30)
    return bool(request.param)


def test_many_rows_have_a_warp_each(device: Device) -> None:
    def tiles(rows: int) -> int:
        program = Program(Target.of("sm_90"))
        tensors = {k: _data(program, k, v) for k, v in _loss_case(0, rows, 2, 2, (3, 2, 1)).items()}
        iqn.loss(program, **tensors, branches=(3, 2, 1), kappa=1.0, theta_mean=program.tensor("mean", (rows, 3)))
        (launch,) = program.launches
        return launch.family.tiles(launch.fields)

    assert (tiles(2112), tiles(2113)) == (1056, 265)


@pytest.mark.parametrize("kappa", [1e-9, 1e-7, 1e7, 1e30])
@pytest.mark.parametrize("shift", [0.0, 50.0])
def test_any_threshold(device: Device, kappa: float, shift: float) -> None:
    case = _loss_case(7, 6, 5, 33, (3, 2))
    case["discount"][:] = 1.0
    case["theta"] += np.float32(shift)
    case["theta_target"] += np.float32(shift)
    found = _loss(device, case, (3, 2), kappa)
    expected = iqn.reference_loss(**case, branches=(3, 2), kappa=kappa)
    np.testing.assert_allclose(found["loss"], expected.loss, rtol=5e-6)
    np.testing.assert_allclose(found["dtheta"], expected.dtheta, rtol=1e-4, atol=1e-5 * np.abs(expected.dtheta).max())


def test_small_differences_far_from_zero(device: Device) -> None:
    """The loss is a sum of squares of differences, not a difference of large sums."""
    case = _loss_case(8, 9, 32, 32, (3, 2), 0.01)
    case["discount"][:], case["reward"][:] = 1.0, 0.0
    case["theta"] += np.float32(64.0)
    case["theta_target"] += np.float32(64.0)
    found = _loss(device, case, (3, 2), 1.0)
    expected = iqn.reference_loss(**case, branches=(3, 2), kappa=1.0)
    np.testing.assert_allclose(found["loss"], expected.loss, rtol=2e-6)


@pytest.mark.usefixtures("many")
def test_loss_does_not_depend_on_runs(device: Device) -> None:
    case = _loss_case(1, 9, 33, 130, (3, 2))
    once, thrice = (_loss(device, case, (3, 2), 1.0, times=n) for n in (1, 3))
    for name, array in once.items():
        assert array.tobytes() == thrice[name].tobytes()


@pytest.mark.usefixtures("many")
def test_dead_rows_ignore_the_target(device: Device) -> None:
    case = _loss_case(2, 12, 5, 7, (3, 2))
    dead = case["discount"] == 0.0
    assert 0 < dead.sum() < 12
    poisoned = {**case, "theta_target": case["theta_target"].copy()}
    poisoned["theta_target"].reshape(12, 7, 5)[dead] = np.nan
    clean, found = (_loss(device, c, (3, 2), 1.0) for c in (case, poisoned))
    for name, array in clean.items():
        assert array.tobytes() == found[name].tobytes()


@pytest.mark.usefixtures("many")
def test_infinities_and_nan(device: Device) -> None:
    """An infinite reward has the slope kappa and an infinite loss; a NaN stays in its row and in the loss."""
    case = _loss_case(3, 8, 5, 7, (3, 2))
    case["reward"][2] = np.inf
    found = _loss(device, case, (3, 2), 0.7)
    expected = iqn.reference_loss(**case, branches=(3, 2), kappa=0.7)
    assert found["loss"] == np.inf
    assert_close(found["dtheta"], expected.dtheta, factor=16, atol=1e-6, name="dtheta")
    tau, weight = case["tau"][2].astype(np.float64), float(case["weight"][2])
    np.testing.assert_allclose(found["dtheta"][10:15].min(axis=1), -weight * tau / 16, rtol=1e-6)

    case["reward"][2] = np.nan
    found = _loss(device, case, (3, 2), 0.7)
    assert np.isnan(found["loss"])
    mine = np.zeros((8, 5), bool)
    mine[2] = True
    np.testing.assert_array_equal(np.isnan(found["dtheta"]), mine.reshape(-1, 1) & _taken(case, (3, 2)))


@pytest.mark.usefixtures("many")
def test_infinite_quantiles(device: Device) -> None:
    """Of both networks: slopes of kappa or NaN, each where the difference says so."""
    case = _loss_case(9, 8, 5, 137, (3, 2))
    case["discount"][:] = 0.9
    theta, target = case["theta"].reshape(8, 5, 5), case["theta_target"].reshape(8, 137, 5)
    theta[1, 2], theta[2, 4], theta[3, 0] = np.inf, -np.inf, np.nan
    target[2, 0], target[4, 3], target[5, 130], target[6, [7, 131]] = -np.inf, np.inf, np.nan, [[np.inf], [-np.inf]]
    found = _loss(device, case, (3, 2), 0.7)
    expected = iqn.reference_loss(**case, branches=(3, 2), kappa=0.7)
    assert np.isnan(found["loss"])
    assert_close(found["dtheta"], expected.dtheta, factor=16, atol=1e-6, name="dtheta")
    assert np.isnan(expected.dtheta).any(axis=1).reshape(8, 5).sum(axis=1).tolist() == [0, 0, 1, 1, 0, 5, 0, 0]
    for row in (1, 4, 6):
        one = {k: v.reshape(8, -1, *v.shape[1:])[row] for k, v in case.items()}
        assert _loss(device, one, (3, 2), 0.7)["loss"] == np.inf


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("action", [-1, 3, 2**31 - 1, -(2**31)])
def test_actions_that_do_not_exist(device: Device, action: int) -> None:
    """They reach no memory; the row's loss is NaN, so that the step is skipped rather than wrong."""
    case = _loss_case(4, 6, 5, 7, (3, 2))
    case["discount"][:] = 0.9
    clean = _loss(device, case, (3, 2), 1.0)
    for name in ("actions", "best"):
        wrong = {**case, name: case[name].copy()}
        wrong[name][4, 1] = action if action != 3 else 2
        found = _loss(device, wrong, (3, 2), 1.0)
        assert np.isnan(found["loss"])
        np.testing.assert_array_equal(np.isnan(found["dtheta"][20:25]).sum(axis=1), 1)
        np.testing.assert_array_equal(found["dtheta"][:20], clean["dtheta"][:20])


@pytest.mark.usefixtures("many")
def test_each_output_alone(device: Device) -> None:
    case = _loss_case(5, 6, 5, 7, (3, 2))
    everything = _loss(device, case, (3, 2), 1.0)
    shapes: dict[str, tuple[int, ...]] = {"dtheta": (30, 5), "theta_mean": (6, 2), "loss": (1,)}
    for name, shape in shapes.items():
        program = Program(device.target)
        inputs: Arrays = {k: _data(program, k, v) for k, v in case.items()}
        out: Arrays = {name: program.tensor(name, shape)}
        iqn.loss(program, **inputs, branches=(3, 2), kappa=1.0, **out)
        (found,) = _run(program, device, out[name])
        np.testing.assert_array_equal(found, np.reshape(everything[name], shape))


def test_the_reference_is_the_derivative() -> None:
    case = _loss_case(6, 3, 4, 5, (3, 2))
    args = {k: v for k, v in case.items() if k != "theta"} | {"branches": (3, 2), "kappa": 0.7}
    theta, step = case["theta"].astype(np.float64), 1e-6
    gradient = iqn.reference_loss(theta, **args).dtheta
    for index in np.ndindex(theta.shape):
        shift = np.zeros_like(theta)
        shift[index] = step
        ends = [iqn.reference_loss(theta + sign * shift, **args).loss for sign in (1, -1)]
        assert math.isclose((ends[0] - ends[1]) / (2 * step), gradient[index], rel_tol=1e-5, abs_tol=1e-8)


# -- the whole component against the golden files ---------------------------------------------------------------


class Network:
    """IQN at s: features, product, layers, loss, and everything backward, on the parameters of a golden file."""

    def __init__(self, program: Program, case: Arrays, sizes: tuple[int, int, int, int], seen: Arrays) -> None:
        rows, quantiles, cosines, hidden = sizes
        count = rows * quantiles
        self.program = program
        self.params = {k: _data(program, k, v) for k, v in case["params"].items()}
        self.h2 = _data(program, "h2", case["h2"])
        self.tau = _data(program, "tau", case["tau"])
        width, actions = case["h2"].shape[1], case["params"]["w_iq2"].shape[0]
        self.cosines = program.tensor("cosines", (count, cosines))
        self.phi, self.x = program.tensor("phi", (count, width)), program.tensor("x", (count, width))
        self.hidden, self.theta = program.tensor("hidden", (count, hidden)), program.tensor("theta", (count, actions))
        iqn.cosines(program, self.tau, self.cosines)
        self._forward(self.cosines, "phi", self.phi, "relu")
        iqn.mix(program, self.phi, self.h2, self.x)
        self._forward(self.x, "iq1", self.hidden, "relu")
        self._forward(self.hidden, "iq2", self.theta, "none")
        self.loss, self.dtheta = program.tensor("loss", (1,)), program.tensor("dtheta", (count, actions))
        batch: Arrays = {k: _data(program, k, v) for k, v in seen.items() if k not in ("branches", "kappa")}
        batch |= {k: seen[k] for k in ("branches", "kappa")} | {"theta": self.theta, "tau": self.tau}
        iqn.loss(program, **batch, dtheta=self.dtheta, loss=self.loss)

    def _forward(self, x: Tensor, name: str, y: Tensor, activation: linear.Activation) -> None:
        p = self.params
        linear.forward(self.program, x, p[f"w_{name}"], p[f"b_{name}"], y, activation=activation)

    def backward(self, weight: float, readiness: float) -> dict[str, Tensor]:
        """Gradients of the parameters and of h2."""
        program = self.program
        grads = {k: program.tensor(f"grad.{k}", t.shape) for k, t in self.params.items()}
        grads["h2"] = program.tensor("grad.h2", self.h2.shape)
        dhidden, dx = program.tensor("dhidden", self.hidden.shape), program.tensor("dx", self.x.shape)
        p = self.params
        linear.backward_dw(program, self.dtheta, self.hidden, grads["w_iq2"], grads["b_iq2"])
        linear.backward_dx(program, self.dtheta, p["w_iq2"], dhidden, x=self.hidden, activation="relu")
        linear.backward_dw(program, dhidden, self.x, grads["w_iq1"], grads["b_iq1"])
        linear.backward_dx(program, dhidden, p["w_iq1"], dx)
        scales: Arrays = {
            "weight": _data(program, "w_iqn", np.array([weight])),
            "readiness": _data(program, "iqn_readiness", np.array([readiness])),
        }
        iqn.mix_backward(program, dx, self.phi, self.h2, dx, dh2=grads["h2"], **scales)
        linear.backward_dw(program, dx, self.cosines, grads["w_phi"], grads["b_phi"])
        return grads


@pytest.mark.parametrize("name", ["full", "edges", "cold_odd", "aux_closed"])
def test_golden_component(device: Device, name: str) -> None:
    """Loss, theta and the group's gradient of the first step: it enters its own parameters at full scale."""
    file = golden.load(name)
    config, batch, out = file.config, file.batches[0], file.outputs[0]
    s, after = scene(config, file.state, batch)
    program = Program(device.target)
    target = after["theta_target"]  # [B, N', D], of the best actions alone
    spread = np.full((config.batch, config.iqn_target_quantiles, config.actions), 1e9)
    columns = out["best"] + np.asarray(config.offsets)
    np.put_along_axis(spread, np.broadcast_to(columns[:, None, :], target.shape), target, axis=2)
    seen: Arrays = {
        "theta_target": spread.reshape(-1, config.actions),
        "actions": batch["actions"],
        "best": out["best"],
        "reward": shaped_reward(config, s.signals, s.batch, s.nets),
        "discount": batch["discount"],
        "weight": batch["weight"],
        "branches": config.branches,
        "kappa": config.huber,
    }
    group = ("w_phi", "b_phi", "w_iq1", "b_iq1", "w_iq2", "b_iq2")
    case = {"params": {k: file.state["params"][k] for k in group}, "h2": out["h2"], "tau": batch["tau"]}
    net = Network(program, case, (config.batch, config.iqn_quantiles, config.iqn_cos, config.iqn_h), seen)
    scale = (s.signals["w_iqn"], s.readiness)
    grads = net.backward(*scale)
    loss, theta, *found = _run(program, device, net.loss, net.theta, *grads.values())
    assert golden.error(loss[0], out["L_iqn"]) <= golden.FP32_LIMIT
    assert golden.error(theta.reshape(out["theta"].shape), out["theta"]) <= golden.FP32_LIMIT
    measured = dict(zip(grads, found, strict=True))
    for key in group:
        assert golden.error(measured[key], out[f"grad.{key}"]) <= golden.FP32_LIMIT, key
    reference = iqn.reference_loss(s.nets["iqn"]["theta"], tau=batch["tau"], **seen)
    dh2, _ = backward.iqn(s.p, s.nets["iqn"], reference.dtheta.reshape(out["theta"].shape))
    assert golden.error(measured["h2"], scale[0] * scale[1] * dh2) <= golden.FP32_LIMIT


# -- checks -----------------------------------------------------------------------------------------------------


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    tau, phi, h2 = program.tensor("tau", (4, 5)), program.tensor("phi", (20, 6)), program.tensor("h2", (4, 6))
    with pytest.raises(ValueError, match=r"out must be float32 \(20, 6\), as tau is \(4, 5\); got float32 \(4, 6\)"):
        iqn.cosines(program, tau, h2)
    with pytest.raises(ValueError, match="tau must be float32 without gaps"):
        iqn.cosines(program, tau.columns(0, 2), phi)
    with pytest.raises(ValueError, match=r"phi must be float32 \(16, 6\).*got float32 \(19, 6\)"):
        iqn.mix(program, program.tensor("odd", (19, 6)), h2, phi)
    with pytest.raises(ValueError, match=r"x must be float32 \(20, 6\).*got float32 \(4, 6\)"):
        iqn.mix(program, phi, h2, h2)
    with pytest.raises(ValueError, match="dh2 needs weight and readiness"):
        iqn.mix_backward(program, phi, phi, h2, phi, dh2=h2)
    with pytest.raises(ValueError, match=r"weight must be float32 \(1,\).*got float32 \(4, 5\)"):
        iqn.mix_backward(program, phi, phi, h2, phi, dh2=h2, weight=tau, readiness=tau)
    with pytest.raises(ValueError, match=r"dh2 must be float32 \(4, 6\).*got float32 \(20, 6\)"):
        iqn.mix_backward(program, phi, phi, h2, phi, dh2=phi, weight=tau, readiness=tau)


def test_loss_arguments_are_checked(device: Device) -> None:
    case = _loss_case(0, 4, 5, 7, (3, 2))
    program = Program(device.target)
    tensors = {k: _data(program, k, v) for k, v in case.items()}
    good: Arrays = {**tensors, "branches": (3, 2), "kappa": 1.0}
    wrong: list[tuple[Arrays, str]] = [
        ({"branches": (3, 3)}, r"theta must be float32 \(20, 6\).*got float32 \(20, 5\)"),
        ({"branches": (1,) * 9}, "branches must be 1 to 8"),
        ({"kappa": 0.0}, "kappa must be above 0"),
        ({"kappa": math.nan}, "kappa must be above 0"),
        ({"theta_target": tensors["theta"].rows(0, 3)}, r"theta_target must be float32 \(4, 5\).*\(3, 5\)"),
        ({"theta_target": tensors["theta"].rows(0, 18)}, r"theta_target must be float32 \(16, 5\).*\(18, 5\)"),
        ({"actions": tensors["tau"]}, r"actions must be int32 \(4, 2\).*got float32 \(4, 5\)"),
        ({"best": tensors["weight"]}, r"best must be int32 \(4, 2\).*got float32 \(4,\)"),
        ({"weight": tensors["tau"]}, r"weight must be float32 \(4,\).*got float32 \(4, 5\)"),
        ({"dtheta": tensors["tau"]}, r"dtheta must be float32 \(20, 5\).*got float32 \(4, 5\)"),
        ({"theta_mean": tensors["tau"]}, r"theta_mean must be float32 \(4, 2\).*got float32 \(4, 5\)"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            iqn.loss(program, **{**good, **change})
