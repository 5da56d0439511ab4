"""Squared-error losses of decoders and ensemble heads, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops.decoders import (
    Shaping,
    count_live,
    ensemble,
    mean_squares,
    reference_ensemble,
    reference_squares,
)
from tests.reference import gradients
from tests.reference.cases import random_case
from tests.reference.config import Config
from tests.reference.losses import losses
from tests.reference.step import scene
from tests.support import assert_close


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


def _squares(
    device: Device,
    y: np.ndarray,
    target: np.ndarray,
    discount: np.ndarray | None = None,
    *,
    pad: int = 0,
    outputs: tuple[str, ...] = ("dy", "loss"),
) -> dict[str, np.ndarray]:
    program = Program(device.target)
    results: dict[str, Tensor] = {}
    if "dy" in outputs:
        results["dy"] = _given(program, "dy", np.full(y.shape, 9.0), pad)
    if "loss" in outputs:
        results["loss"] = program.tensor("loss", (1,))
    optional: dict[str, Any] = dict(results)
    if discount is not None:
        optional |= {"discount": _given(program, "discount", discount), "live": program.tensor("live", (1,), np.int32)}
        count_live(program, optional["discount"], optional["live"], label="live")
        results["live"] = optional["live"]
    mean_squares(
        program, _given(program, "y", y, pad), _given(program, "target", target, 2 * pad), name="loss_of", **optional
    )
    return _run(program, device, results)


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 65]),
    cols=st.sampled_from([1, 2, 31, 32, 33, 48, 256]),
    pad=st.sampled_from([0, 0, 3]),
    dead=st.sampled_from([None, 0.0, 0.3, 1.0]),
    seed=st.integers(0, 1000),
)
def test_mean_squares(device: Device, rows: int, cols: int, pad: int, dead: float | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    y, target = (rng.normal(size=(rows, cols)).astype(np.float32) for _ in range(2))
    discount = None
    if dead is not None:
        discount = np.where(rng.random(rows) < dead, rng.choice([0.0, -0.0, -1.0], rows), 0.97)
        y[discount <= 0], target[discount <= 0] = np.nan, np.inf
    result = _squares(device, y, target, discount, pad=pad)
    loss, dy, _ = reference_squares(y, target, discount)
    assert_close(result["loss"][0], loss, factor=16, name="loss")
    assert_close(result["dy"], dy, atol=1e-9, factor=8, name="dy")
    if discount is not None:
        np.testing.assert_array_equal(result["live"], [(discount > 0).sum()])
        np.testing.assert_array_equal(result["dy"][discount <= 0], 0.0)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_count_live(device: Device, n: int) -> None:
    rng = np.random.default_rng(n)
    discount = rng.choice([0.0, 1e-30, 0.9, np.nan, -1.0, np.inf], n).astype(np.float32)
    program = Program(device.target)
    live = program.tensor("live", (1,), np.int32)
    count_live(program, _given(program, "discount", discount), live, label="live")
    assert _run(program, device, {"live": live})["live"][0] == (discount > 0).sum()


def test_what_is_not_finite_shows(device: Device) -> None:
    y = np.zeros((3, 4), np.float32)
    y[1, 2] = np.nan
    result = _squares(device, y, np.zeros_like(y), np.ones(3, np.float32))
    assert np.isnan(result["loss"][0])
    np.testing.assert_array_equal(np.isnan(result["dy"]), np.isnan(y))


def test_outputs_are_optional_and_bits_the_same(device: Device) -> None:
    rng = np.random.default_rng(0)
    y, target = (rng.normal(size=(70, 48)).astype(np.float32) for _ in range(2))
    discount = rng.choice([0.0, 0.9], 70).astype(np.float32)
    full = _squares(device, y, target, discount)
    for outputs in (("dy",), ("loss",)):
        for name, array in _squares(device, y, target, discount, outputs=outputs).items():
            np.testing.assert_array_equal(array, full[name])


def _ensemble(device: Device, case: dict[str, np.ndarray], *, pad: int = 0, column: bool = False) -> dict[str, Any]:
    program = Program(device.target)
    tensors = {name: _given(program, name, data, pad) for name, data in case.items()}
    if column:  # actions and greedy actions as columns of matrices over all branches
        for name in ("action", "best"):
            wide = np.stack([case[name] * 0 - 5, case[name], case[name] * 0 + 99], axis=1)
            tensors[name] = program.tensor(f"{name}s", wide.shape, np.int32, data=wide).columns(1, 2)
    results = {"dy": _given(program, "dy", np.full(case["y"].shape, 9.0), pad), "loss": program.tensor("loss", (1,))}
    heads = case["y"].shape[1] // case["value"].shape[1]
    ensemble(program, heads=heads, name="ens", **tensors, **results)
    return _run(program, device, results)


def _ensemble_case(seed: int, rows: int, heads: int, actions: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "y": rng.normal(size=(rows, heads * actions)).astype(np.float32),
        "action": rng.integers(0, actions, rows).astype(np.int32),
        "best": rng.integers(0, actions, rows).astype(np.int32),
        "value": rng.normal(size=(rows, actions)).astype(np.float32),
        "reward": rng.normal(size=rows).astype(np.float32),
        "discount": rng.choice([0.0, 0.9], rows).astype(np.float32),
        "weight": rng.uniform(0.5, 1.5, rows).astype(np.float32),
    }


def _reference_ensemble(case: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    y, *rest = case.values()
    return reference_ensemble(y, y.shape[1] // case["value"].shape[1], *rest)


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 9, 100, 257]),
    heads=st.sampled_from([1, 2, 5, 40]),
    actions=st.sampled_from([1, 2, 3, 32]),
    pad=st.sampled_from([0, 3]),
    column=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_ensemble(device: Device, rows: int, heads: int, actions: int, pad: int, column: bool, seed: int) -> None:
    case = _ensemble_case(seed, rows, heads, actions)
    case["value"][case["discount"] == 0] = np.nan
    result = _ensemble(device, case, pad=pad, column=column)
    loss, dy = _reference_ensemble(case)
    assert_close(result["loss"][0], loss, factor=16, name="loss")
    assert_close(result["dy"], dy, atol=1e-6 / rows / heads, factor=8, name="dy")


def test_an_infinite_reward_reaches_the_guard(device: Device) -> None:
    case = _ensemble_case(0, 5, 2, 3)
    case["discount"][:] = [0.9, 0.0, 0.9, 0.9, 0.9]
    case["reward"][:3] = [np.inf, -np.inf, np.nan]
    case["value"][3] = np.nan
    result = _ensemble(device, case)
    loss, dy = _reference_ensemble(case)
    assert np.isnan(loss) and np.isnan(result["loss"][0])
    assert_close(result["dy"], dy, name="dy")
    assert (~np.isfinite(result["dy"])).sum() == 8
    assert np.isneginf(result["dy"]).any() and np.isposinf(result["dy"]).any()


def test_an_unknown_action_makes_its_row_nan(device: Device) -> None:
    case = _ensemble_case(1, 4, 2, 3)
    case["action"][:2] = [3, -1]
    result = _ensemble(device, case)
    np.testing.assert_array_equal(np.isnan(result["dy"]).any(axis=1), [True, True, False, False])
    assert np.isnan(result["loss"][0])


def test_agrees_with_the_reference_of_the_step(device: Device) -> None:
    """Losses of a whole step, and gradients by way of the decoders' bias gradients."""
    config = Config(batch=9, state=8, tokens=2, h1=6, h2=6, branches=(3, 2), ens=4)
    state, batch = random_case(7, config)
    s, after = scene(config, state, batch)
    expected = losses(config, s.signals, s.batch, s.nets, s.goal)
    discount = s.batch["discount"]
    rec = _squares(device, s.nets["rec"]["out"], s.batch["state"])
    pred = _squares(device, s.nets["pred"]["out"], after["h2_target"], discount)
    case = {
        "y": s.nets["ens"]["out"].reshape(9, -1),
        "action": batch["actions"][:, 0].copy(),
        "best": after["best"][:, 0].copy(),
        "value": after["q_target"][:, :3],
        "reward": s.goal["ens"] - discount * after["q_target"][np.arange(9), after["best"][:, 0]],
        "discount": discount,
        "weight": s.batch["weight"],
    }
    ens = _ensemble(device, case)
    for name, result in (("rec", rec), ("pred", pred), ("ens", ens)):
        bias = getattr(gradients, name)(s).own[f"b_{name}"]
        assert_close(result["loss"][0], expected[f"L_{name}"], name=name)
        assert_close(result["dy"].sum(axis=0), bias, atol=1e-7, name=f"d{name}")


def test_what_does_not_fit_is_refused(device: Device) -> None:
    program = Program(device.target)
    y, vector, live = (
        program.tensor("y", (4, 3)),
        program.tensor("vector", (4,)),
        program.tensor("live", (1,), np.int32),
    )
    with pytest.raises(ProgramError, match=r"'d': target must be float32 \(4, 3\), got float32 \(4, 2\)"):
        mean_squares(program, y, program.tensor("t", (4, 2)), name="d")
    with pytest.raises(ProgramError, match="discount and live go together"):
        mean_squares(program, y, y, discount=vector, name="d")
    with pytest.raises(ProgramError, match="shaped must not overlap reward"):
        one = program.tensor("one", (1,))
        shaping = Shaping(vector, one, one, vector)
        mean_squares(program, y, y, discount=vector, live=live, shaping=shaping, name="d")
    with pytest.raises(ProgramError, match=r"y must be a float32 matrix, got float32 \(4,\)"):
        mean_squares(program, vector, vector, name="d")
    with pytest.raises(ProgramError, match=r"live must be int32 \(1,\), got float32 \(4,\)"):
        count_live(program, vector, vector, label="l")
    index = program.tensor("index", (4,), np.int32)
    rest = {"best": index, "reward": vector, "discount": vector, "weight": vector}
    with pytest.raises(ProgramError, match=r"y must be float32 \(4, 6\), got float32 \(4, 3\)"):
        ensemble(program, y, heads=2, action=index, value=y, name="e", **rest)
    with pytest.raises(ProgramError, match=r"action must be int32 \(4,\), got float32 \(4,\)"):
        ensemble(program, y, heads=1, action=vector, value=y, name="e", **rest)
    assert not program.launches
