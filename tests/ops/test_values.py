"""Expectile regression, one-hot actions and the curiosity bonus, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops.decoders import count_live, reference_squares
from fxengine.ops.values import (
    curiosity,
    expectile,
    onehots,
    reference_expectile,
    reference_onehots,
    reference_shaped,
)
from tests.reference import forward
from tests.reference.cases import random_case
from tests.reference.config import Config
from tests.reference.gradients import curiosity as curiosity_gradient
from tests.reference.gradients import iql
from tests.reference.losses import losses, shaped_reward
from tests.reference.step import scene
from tests.support import assert_close

SIZES = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=8).map(tuple), st.sampled_from([(3, 3, 3, 3), (32, 2), (40,)])
)


def _run(program: Program, device: Device, outputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Contents of the outputs; what lies between their rows must hold 77."""
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        read = {}
        for name, t in outputs.items():
            whole = plan.buffer(t.name).read().view(t.dtype).reshape(-1, t.ld)
            read[name] = whole[:, : t.shape[-1]].reshape(t.shape) if len(t.shape) > 1 else whole.reshape(-1)
            if len(t.shape) > 1:
                np.testing.assert_array_equal(whole[:, t.shape[1] :], 77)
        return read


def _given(program: Program, name: str, data: np.ndarray, pad: int = 0) -> Tensor:
    data = data.astype(np.float32) if data.dtype.kind == "f" else data
    if data.ndim < 2:
        return program.tensor(name, data.shape, data.dtype, arena="inputs", data=np.ascontiguousarray(data))
    wide = np.full((data.shape[0], data.shape[1] + pad), 77, data.dtype)
    wide[:, : data.shape[1]] = data
    return program.tensor(name, wide.shape, data.dtype, arena="inputs", data=wide).columns(0, data.shape[1])


def _actions(rng: np.random.Generator, rows: int, sizes: tuple[int, ...]) -> np.ndarray:
    return np.stack([rng.integers(0, n, rows) for n in sizes], axis=1).astype(np.int32)


def _expectile(
    device: Device, v: np.ndarray, q: np.ndarray, actions: np.ndarray, sizes: tuple[int, ...], tau: float, pad: int = 0
) -> dict[str, np.ndarray]:
    program = Program(device.target)
    results = {"dv": _given(program, "dv", np.full(v.shape, 9.0), pad), "loss": program.tensor("loss", (1,))}
    expectile(
        program,
        _given(program, "v", v, pad),
        _given(program, "q", q, pad),
        _given(program, "actions", actions, pad),
        sizes=sizes,
        tau=_given(program, "tau", np.array([tau])),
        name="iql",
        **results,
    )
    return _run(program, device, results)


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 255, 256, 257, 600]),
    sizes=SIZES,
    tau=st.sampled_from([0.1, 0.5, 0.9, 0.0, 1.0]),
    pad=st.sampled_from([0, 3]),
    column=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_expectile(
    device: Device, rows: int, sizes: tuple[int, ...], tau: float, pad: int, column: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    q, v = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, sum(sizes)), (rows, 1)))
    v = v if column else v[:, 0]
    actions = _actions(rng, rows, sizes)
    result = _expectile(device, v, q, actions, sizes, tau, pad)
    loss, dv = reference_expectile(v, q, actions, sizes, np.float32(tau))
    assert_close(result["loss"][0], loss, factor=16, atol=1e-7, name="loss")
    assert_close(result["dv"].reshape(-1), dv, atol=2e-6 / rows, name="dv")


def test_expectile_of_what_is_not_finite(device: Device) -> None:
    """NaN and infinities show in their own rows; an unknown action is NaN."""
    q = np.zeros((5, 5), np.float32)
    q[0, 1], q[1, 4] = np.nan, np.inf
    actions = np.array([[1, 0], [0, 1], [3, 0], [0, -1], [2, 1]], np.int32)
    result = _expectile(device, np.ones(5), q, actions, (3, 2), 0.9)
    expected = [np.nan, -np.inf, np.nan, np.nan, 2 * 0.1 / 5]
    assert_close(result["dv"], np.array(expected))
    assert np.isnan(result["loss"][0])


@settings(max_examples=40)
@given(rows=st.sampled_from([1, 2, 33, 256, 1025]), sizes=SIZES, pad=st.sampled_from([0, 1]), seed=st.integers(0, 1000))
def test_onehots(device: Device, rows: int, sizes: tuple[int, ...], pad: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    actions = _actions(rng, rows, sizes)
    actions[rng.random(actions.shape) < 0.2] = rng.choice([-1, 1000])
    program = Program(device.target)
    out = _given(program, "out", np.full((rows, sum(sizes)), 9.0), pad)
    onehots(program, _given(program, "actions", actions, pad), out, sizes=sizes, label="onehots")
    np.testing.assert_array_equal(_run(program, device, {"out": out})["out"], reference_onehots(actions, sizes))


def _curiosity(
    device: Device, case: dict[str, np.ndarray], outputs: tuple[str, ...] = ("dprediction", "loss"), pad: int = 0
) -> dict[str, np.ndarray]:
    program = Program(device.target)
    tensors: dict[str, Any] = {name: _given(program, name, data, pad) for name, data in case.items()}
    tensors["live"] = program.tensor("live", (1,), np.int32)
    count_live(program, tensors["discount"], tensors["live"], label="live")
    results = {"shaped": program.tensor("shaped", (len(case["reward"]),))}
    if "dprediction" in outputs:
        results["dprediction"] = _given(program, "dprediction", np.full(case["prediction"].shape, 9.0), pad)
    if "loss" in outputs:
        results["loss"] = program.tensor("loss", (1,))
    curiosity(program, name="curiosity", **tensors, **results)
    return _run(program, device, results)


def _curiosity_case(seed: int, rows: int, cols: int, w: float = 0.3, cap: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "prediction": rng.normal(size=(rows, cols)).astype(np.float32),
        "next_state": rng.normal(size=(rows, cols)).astype(np.float32),
        "discount": rng.choice([0.0, 0.9], rows).astype(np.float32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "w_curiosity": np.array([w], np.float32),
        "cap": np.array([cap], np.float32),
    }


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 8, 9, 100]),
    cols=st.sampled_from([1, 5, 32, 33, 48]),
    w=st.sampled_from([0.0, 0.01, 0.3, -2.0]),
    cap=st.sampled_from([0.0, 0.8, 1.0, 100.0]),
    pad=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_curiosity(device: Device, rows: int, cols: int, w: float, cap: float, pad: int, seed: int) -> None:
    case = _curiosity_case(seed, rows, cols, w, cap)
    case["next_state"][case["discount"] == 0] = np.nan
    result = _curiosity(device, case, pad=pad)
    loss, gradient, halves = reference_squares(case["prediction"], case["next_state"], case["discount"])
    shaped = reference_shaped(
        case["reward"], case["discount"], halves, float(case["w_curiosity"][0]), float(case["cap"][0])
    )
    assert_close(result["shaped"], shaped, factor=16, name="shaped")
    assert_close(result["loss"][0], loss, factor=16, name="loss")
    assert_close(result["dprediction"], gradient, atol=1e-9, factor=8, name="gradient")
    dead = case["discount"] == 0
    np.testing.assert_array_equal(result["shaped"][dead], case["reward"][dead])
    for outputs in ((), ("loss",)):
        for name, array in _curiosity(device, case, outputs, pad).items():
            np.testing.assert_array_equal(array, result[name])


def test_curiosity_of_what_is_not_finite(device: Device) -> None:
    """NaN passes the cap, an infinite error is capped, and a weight of 0 gives the bare reward."""
    case = _curiosity_case(0, 4, 6, 0.5, 2.0)
    case["discount"][:] = [0.9, 0.9, 0.0, 0.9]
    case["prediction"][0, 3], case["prediction"][1, 2], case["prediction"][2] = np.nan, np.inf, np.nan
    shaped = _curiosity(device, case)["shaped"]
    assert np.isnan(shaped[0])
    np.testing.assert_array_equal(shaped[1:3], case["reward"][1:3] + np.float32([1.0, 0.0]))
    case["w_curiosity"][:] = 0.0
    case["cap"][:] = np.nan
    np.testing.assert_array_equal(_curiosity(device, case)["shaped"], case["reward"])
    case["w_curiosity"][:] = 0.5
    np.testing.assert_array_equal(np.isnan(_curiosity(device, case)["shaped"]), [True, True, False, True])


def test_agrees_with_the_reference_of_the_step(device: Device) -> None:
    """Losses, shaped rewards and one-hots of a whole step; gradients by way of the output layers' bias gradients."""
    config = Config(batch=9, state=8, tokens=2, h1=6, h2=6, branches=(3, 2))
    state, batch = random_case(7, config)
    s, _ = scene(config, state, batch)
    expected = losses(config, s.signals, s.batch, s.nets, s.goal)
    for side in ("high", "low"):
        tau = s.signals[f"iql_tau_{side}"]
        result = _expectile(
            device, s.nets[f"iql_{side}"]["out"], s.nets["heads"]["q"], batch["actions"], config.branches, tau
        )
        assert_close(result["loss"][0], expected[f"L_iql_{side}"], name=side)
        assert_close(result["dv"].sum(axis=0), iql(s, side)[f"b_iql{side}2"], name=f"d{side}")
    case = {
        "prediction": s.nets["curiosity"]["out"],
        "next_state": s.batch["next_state"],
        "discount": s.batch["discount"],
        "reward": s.batch["reward"],
        "w_curiosity": np.array([s.signals["w_curiosity"]]),
        "cap": np.array([s.signals["curiosity_cap"]]),
    }
    result = _curiosity(device, case)
    assert_close(result["loss"][0], expected["L_curiosity"], name="curiosity")
    assert_close(result["shaped"], shaped_reward(config, s.signals, s.batch, s.nets), name="shaped")
    assert_close(result["dprediction"].sum(axis=0), curiosity_gradient(s)["b_c2"], atol=1e-7, name="gradient")
    codes = reference_onehots(batch["actions"], config.branches)
    np.testing.assert_array_equal(codes, forward.onehots(config, batch["actions"]))


def test_what_does_not_fit_is_refused(device: Device) -> None:
    program = Program(device.target)
    v, q, tau = program.tensor("v", (4, 1)), program.tensor("q", (4, 5)), program.tensor("tau", (1,))
    actions = program.tensor("actions", (4, 2), np.int32)
    with pytest.raises(ProgramError, match=r"'i': q must be float32 \(4, 6\), got float32 \(4, 5\)"):
        expectile(program, v, q, actions, sizes=(3, 3), tau=tau, name="i")
    with pytest.raises(ProgramError, match=r"actions must be int32 \(4, 1\), got int32 \(4, 2\)"):
        expectile(program, v, q, actions, sizes=(5,), tau=tau, name="i")
    with pytest.raises(ProgramError, match=r"v must be float32 \(4, 1\), got float32 \(4, 5\)"):
        expectile(program, q, q, actions, sizes=(3, 2), tau=tau, name="i")
    with pytest.raises(ProgramError, match="1 to 8 branches"):
        onehots(
            program, program.tensor("nine", (4, 9), np.int32), program.tensor("o9", (4, 9)), sizes=[1] * 9, label="o"
        )
    with pytest.raises(ProgramError, match=r"out must be float32 \(4, 5\), got float32 \(4, 1\)"):
        onehots(program, actions, v, sizes=(3, 2), label="o")
    assert not program.launches
