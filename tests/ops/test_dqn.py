"""The temporal-difference loss of expected-value heads, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops import dqn
from fxengine.ops.dqn import Reference, reference_losses
from tests.support import assert_close

Arrays = dict[str, Any]

OUTPUTS = ("dq", "td", "best", "loss", "q_mean")
SIZES = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=8).map(tuple),
    st.sampled_from([(2,), (1,), (18,), (40,), (33, 2), (3, 3, 3, 3), (2,) * 8]),
)


def _case(seed: int, rows: int, branches: tuple[int, ...], *, spread: float = 1.0, double: bool = False) -> Arrays:
    rng = np.random.default_rng(seed)
    shape = (rows, sum(branches))
    case = {
        "q": spread * rng.normal(size=shape),
        "q_target": spread * rng.normal(size=shape),
        "actions": np.stack([rng.integers(0, n, rows) for n in branches], axis=1),
        "reward": rng.normal(size=rows),
        "discount": rng.choice([0.0, 0.5, 0.97, 1.0], rows),
        "weight": rng.uniform(0.5, 1.5, rows),
    }
    if double:
        case["q_next"] = spread * rng.normal(size=shape)
    return {name: x.astype(np.float32 if x.dtype.kind == "f" else np.int32) for name, x in case.items()}


def _run(
    device: Device,
    case: Arrays,
    branches: tuple[int, ...],
    *,
    huber: bool = False,
    pad: int = 0,
    outputs: tuple[str, ...] = OUTPUTS,
) -> dict[str, np.ndarray]:
    program = Program(device.target)
    rows, total = case["q"].shape

    def wide(name: str, data: np.ndarray) -> Tensor:
        """With matrices `pad` columns wider than they seem."""
        if data.ndim < 2:
            return program.tensor(name, data.shape, data.dtype, arena="inputs", data=data)
        whole = np.full((data.shape[0], data.shape[1] + pad), 77, data.dtype)
        whole[:, : data.shape[1]] = data
        return program.tensor(name, whole.shape, data.dtype, arena="inputs", data=whole).columns(0, data.shape[1])

    shapes = {"dq": (rows, total), "td": (rows,), "best": (rows, len(branches)), "loss": (1,), "q_mean": (1,)}
    out: Arrays = {
        name: wide(name, np.full(shapes[name], 55, np.int32 if name == "best" else np.float32)) for name in outputs
    }
    given: Arrays = {name: wide(name, data) for name, data in case.items()}
    dqn.losses(program, **given, branches=branches, huber=huber, **out, name="dqn")
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        read = {}
        for name, t in out.items():
            whole = plan.buffer(t.name).read().view(t.dtype).reshape(-1, t.ld)
            read[name] = whole[:, : t.shape[-1]].reshape(t.shape)
            if len(t.shape) > 1:
                np.testing.assert_array_equal(whole[:, t.shape[1] :], 77)
        return read


def _compare(result: dict[str, np.ndarray], expected: Reference, scale: float = 1.0) -> None:
    np.testing.assert_array_equal(result["best"], expected.best)
    assert_close(result["td"], expected.td, factor=8, atol=1e-6 * scale, name="td")
    assert_close(result["loss"][0], expected.loss, factor=16, atol=1e-6 * scale, name="loss")
    assert_close(result["q_mean"][0], expected.q_mean, factor=16, atol=1e-6 * scale, name="q_mean")
    assert_close(result["dq"], expected.dq, factor=8, atol=2e-6 * scale / expected.td.size, name="dq")


@settings(max_examples=60)
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 33]),
    branches=SIZES,
    huber=st.booleans(),
    double=st.booleans(),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
    pad=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 1000),
)
def test_losses_and_gradient(
    device: Device, rows: int, branches: tuple[int, ...], huber: bool, double: bool, spread: float, pad: int, seed: int
) -> None:
    case = _case(seed, rows, branches, spread=spread, double=double)
    expected = reference_losses(**case, branches=branches, huber=huber)
    _compare(_run(device, case, branches, huber=huber, pad=pad), expected, max(1.0, spread**2))


@pytest.mark.parametrize("huber", [False, True])
def test_the_reference_is_the_derivative(huber: bool) -> None:
    case = _case(1, 5, (3, 2), double=True)
    rest = {name: x for name, x in case.items() if name != "q"}
    q, step = case["q"].astype(np.float64), 1e-6
    dq = reference_losses(q, **rest, branches=(3, 2), huber=huber).dq
    for index in np.ndindex(q.shape):
        shift = np.zeros_like(q)
        shift[index] = step
        ends = [reference_losses(q + sign * shift, **rest, branches=(3, 2), huber=huber).loss for sign in (1, -1)]
        np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), dq[index], rtol=1e-6, atol=1e-9)


def test_huber_is_half_a_square_within_one_and_a_line_beyond(device: Device) -> None:
    case = _case(0, 4, (2,))
    case["q"][:], case["actions"][:], case["weight"][:], case["discount"][:] = 0.0, 1, 1.0, 0.0
    case["reward"][:] = [0.5, 1.0, -3.0, 4.0]
    result = _run(device, case, (2,), huber=True)
    np.testing.assert_array_equal(result["td"], [0.5, 1.0, 3.0, 4.0])
    np.testing.assert_array_equal(result["dq"][:, 1] * 4, [-0.5, -1.0, 1.0, -1.0])
    np.testing.assert_array_equal(result["dq"][:, 0], 0.0)
    assert result["loss"][0] == (0.125 + 0.5 + 2.5 + 3.5) / 4
    squares = _run(device, case, (2,))
    np.testing.assert_array_equal(squares["dq"][:, 1] * 4, [-1.0, -2.0, 6.0, -8.0])
    assert squares["loss"][0] == (0.25 + 1.0 + 9.0 + 16.0) / 4


def test_the_choice_takes_the_lowest_of_equals_and_no_nan(device: Device) -> None:
    case = _case(2, 5, (40, 3))
    case["discount"][:] = 1.0
    case["q_target"][:] = -1.0
    case["q_target"][1, [7, 35, 39]] = 2.0  # lanes 7, 3 and 7
    case["q_target"][2, 0] = np.nan
    case["q_target"][3, :40] = np.nan
    case["q_target"][4, :39] = -np.inf
    case["q_target"][0, 40:] = [np.nan, -np.inf, -np.inf]
    result = _run(device, case, (40, 3))
    np.testing.assert_array_equal(result["best"][:, 0], [0, 7, 1, 0, 39])
    np.testing.assert_array_equal(result["best"][:, 1], [1, 0, 0, 0, 0])
    np.testing.assert_array_equal(np.isnan(result["td"]), [False, False, False, True, False])
    np.testing.assert_array_equal(result["best"], reference_losses(**case, branches=(40, 3)).best)


def test_double_takes_the_online_choice_at_the_target_value(device: Device) -> None:
    case = _case(3, 1, (3,), double=True)
    case["q"][:], case["reward"][:], case["discount"][:], case["actions"][:] = 0.0, 1.0, 0.5, 0
    case["q_target"][:], case["q_next"][:] = [[8.0, 2.0, 4.0]], [[0.0, 0.0, 1.0]]
    result = _run(device, case, (3,))
    assert result["best"][0, 0] == 2 and result["td"][0] == 3.0
    del case["q_next"]
    result = _run(device, case, (3,))
    assert result["best"][0, 0] == 0 and result["td"][0] == 5.0


def test_dead_rows_ignore_the_target(device: Device) -> None:
    case = _case(4, 9, (3, 4), double=True)
    case["discount"][:] = [0.0, 0.9, 0.9] * 3
    clean = _run(device, case, (3, 4))
    for name in ("q_target", "q_next"):
        case[name][::3] = [np.nan, np.inf, -np.inf] * 2 + [np.nan]
    dirty = _run(device, case, (3, 4))
    for name in ("dq", "td", "loss", "q_mean"):
        np.testing.assert_array_equal(dirty[name], clean[name])


def test_what_is_not_finite_stays_in_its_row(device: Device) -> None:
    case = _case(5, 6, (3, 2))
    case["discount"][:] = 0.9
    clean = _run(device, case, (3, 2))
    bad = {name: x.copy() for name, x in case.items()}
    bad["reward"][1], bad["q"][2, 0] = np.nan, np.nan
    bad["actions"][2, 0] = 0
    bad["actions"][3, 1], bad["actions"][4, 0] = 2, -1
    result = _run(device, bad, (3, 2))
    np.testing.assert_array_equal(np.isnan(result["td"]), [False, True, True, True, True, False])
    assert np.isnan(result["dq"][3, 3:]).all() and np.isnan(result["dq"][4, :3]).all()
    assert np.isnan(result["loss"][0])
    for name in ("td", "dq", "best"):
        np.testing.assert_array_equal(result[name][[0, 5]], clean[name][[0, 5]])
    case["reward"][0] = np.inf  # a line has a slope there, a square has none
    huber = _run(device, case, (3, 2), huber=True)
    assert np.isinf(huber["loss"][0]) and np.isfinite(huber["dq"]).all()


def test_bits_do_not_depend_on_the_outputs_nor_on_the_place_in_the_batch(device: Device) -> None:
    case = _case(6, 21, (3, 2), double=True)
    full = _run(device, case, (3, 2))
    for outputs in (("td",), ("dq", "loss"), ("best", "q_mean"), ()):
        for name, array in _run(device, case, (3, 2), outputs=outputs).items():
            np.testing.assert_array_equal(array, full[name])
    rows = np.r_[20, 3, 3, 0:18]
    moved = _run(device, {name: x[rows] for name, x in case.items()}, (3, 2))
    for name in ("td", "dq", "best"):
        np.testing.assert_array_equal(moved[name], full[name][rows])
    if device.kind == "sim":
        for schedule in ("reverse", "random:1"):
            with Device.open_sim(schedule=schedule, poison="ff") as other:
                again = _run(other, case, (3, 2))
            for name, array in full.items():
                np.testing.assert_array_equal(again[name], array)


def test_what_does_not_fit_is_refused(device: Device) -> None:
    case = _case(7, 4, (3, 2))
    wrong: list[tuple[Arrays, tuple[int, ...], str]] = [
        ({}, (3, 3), r"q must be float32 \(4, 6\), got float32 \(4, 5\)"),
        ({}, (1,) * 9, "branches must be 1 to 8 sizes"),
        ({}, (), "branches must be 1 to 8 sizes"),
        ({"actions": case["actions"][:, :1]}, (3, 2), r"actions must be int32 \(4, 2\), got int32 \(4, 1\)"),
        ({"actions": case["q"][:, :2]}, (3, 2), r"actions must be int32 \(4, 2\), got float32"),
        ({"reward": case["reward"][:3]}, (3, 2), r"reward must be float32 \(4,\), got float32 \(3,\)"),
        ({"q_next": case["q"][:, :4]}, (3, 2), r"q_next must be float32 \(4, 5\), got float32 \(4, 4\)"),
    ]
    for change, branches, message in wrong:
        with pytest.raises(ProgramError, match=message):
            _run(device, {**case, **change}, branches, outputs=())
