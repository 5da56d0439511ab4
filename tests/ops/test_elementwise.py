"""Elementwise sums, activations and the way back through them, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops.elementwise import backward_activation, combine, reference_activation, reference_slope
from fxengine.ops.linear import ACTIVATION_CODES
from tests.support import assert_close


def _run(program: Program, device: Device, *outputs: Tensor) -> list[np.ndarray]:
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return [plan.buffer(t).read() for t in outputs]


def _given(program: Program, name: str, data: np.ndarray, pad: int = 0) -> Tensor:
    """A tensor with these contents, its rows `pad` elements further apart than they are long."""
    wide = np.full((data.shape[0], data.shape[1] + pad), 77.0, np.float32)
    wide[:, : data.shape[1]] = data
    tensor = program.tensor(name, wide.shape, np.float32, arena="state", data=wide)
    return tensor.columns(0, data.shape[1])


def _whole(program: Program, name: str) -> Tensor:
    storage = program.storages[name]
    return Tensor(storage, 0, (storage.nbytes // 4,), np.dtype(np.float32), 1)


SHAPES = {
    "rows": st.sampled_from([1, 2, 3, 8, 33]),
    "cols": st.sampled_from([1, 2, 3, 4, 64, 65, 2047, 2048, 2049]),
    "pad": st.sampled_from([0, 0, 1, 4]),
    "activation": st.sampled_from(sorted(ACTIVATION_CODES)),
    "accumulate": st.booleans(),
    "seed": st.integers(0, 100),
}


@settings(max_examples=40)
@given(**SHAPES, alpha=st.sampled_from([1.0, -0.5]), second=st.booleans())
def test_combine(
    device: Device,
    rows: int,
    cols: int,
    pad: int,
    activation: str,
    accumulate: bool,
    seed: int,
    alpha: float,
    second: bool,
) -> None:
    rng = np.random.default_rng(seed)
    a, b, y = (rng.normal(size=(rows, cols)).astype(np.float32) for _ in range(3))
    program = Program(device.target)
    target = _given(program, "y", y, pad)
    combine(
        program,
        target,
        _given(program, "a", a),
        _given(program, "b", b, pad) if second else None,
        alpha=alpha,
        beta=3.0,
        activation=activation,
        accumulate=accumulate,
        label="combine",
    )
    (result,) = _run(program, device, _whole(program, "y"))
    result = result.reshape(rows, cols + pad)
    expected = reference_activation(activation, alpha * a.astype(np.float64) + 3.0 * b.astype(np.float64) * second)
    assert_close(result[:, :cols], expected + y * accumulate, factor=8, atol=2e-6)
    np.testing.assert_array_equal(result[:, cols:], 77.0)


@settings(max_examples=25)
@given(**SHAPES)
def test_backward(device: Device, rows: int, cols: int, pad: int, activation: str, accumulate: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dy, x, dx = (rng.normal(size=(rows, cols)).astype(np.float32) for _ in range(3))
    output = reference_activation(activation, x).astype(np.float32)
    program = Program(device.target)
    target = _given(program, "dx", dx, pad)
    backward_activation(
        program,
        target,
        _given(program, "dy", dy, pad),
        _given(program, "output", output),
        activation=activation,
        alpha=2.0,
        accumulate=accumulate,
        label="back",
    )
    (result,) = _run(program, device, _whole(program, "dx"))
    expected = 2.0 * dy * reference_slope(activation, output) + dx * accumulate
    assert_close(result.reshape(rows, cols + pad)[:, :cols], expected, factor=8, atol=1e-6)


def test_scales_are_read_on_the_device_and_zero_is_exact(device: Device) -> None:
    program = Program(device.target)
    poison = np.array([[np.nan, np.inf, -np.inf, 1.0]], np.float32)
    ones = np.ones((1, 4), np.float32)
    scale = program.tensor("scale", (2,), arena="state", data=np.array([0.0, 0.25], np.float32))
    zero, quarter = scale.rows(0, 1), scale.rows(1, 2)
    y, z, dx = (_given(program, name, ones * 5) for name in "yzd")
    a, b = _given(program, "a", poison), _given(program, "b", ones)
    combine(program, y, a, b, alpha_signal=zero, beta=2.0, beta_signal=quarter, label="y")
    combine(program, z, b, a, alpha_signal=quarter, beta=0.0, accumulate=True, label="z")
    backward_activation(program, dx, a, a, activation="elu", alpha=3.0, alpha_signal=zero, label="d")
    y_out, z_out, dx_out = _run(program, device, y, z, dx)
    np.testing.assert_array_equal(y_out, 0.5 * ones)
    np.testing.assert_array_equal(z_out, 5.25 * ones)
    np.testing.assert_array_equal(dx_out.view(np.uint32), np.zeros((1, 4), np.uint32))


def test_in_place_and_vectors(device: Device) -> None:
    program = Program(device.target)
    data = np.linspace(-2, 2, 5001, dtype=np.float32)
    x = program.tensor("x", data.shape, arena="state", data=data)
    combine(program, x, x, x, alpha=0.5, beta=0.25, activation="tanh", label="x")
    (result,) = _run(program, device, x)
    assert_close(result, np.tanh(0.75 * data.astype(np.float64)), factor=8)


def test_relu_lets_nan_pass(device: Device) -> None:
    program = Program(device.target)
    x = _given(program, "x", np.array([[np.nan, -np.inf, np.inf, -0.5]], np.float32))
    combine(program, x, x, activation="relu", label="x")
    (result,) = _run(program, device, x)
    np.testing.assert_array_equal(result, [[np.nan, 0.0, np.inf, 0.0]])


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    a, b = program.tensor("a", (2, 3)), program.tensor("b", (3, 2))
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        combine(program, a, b, label="e")
    with pytest.raises(ValueError, match="'gelu' is unknown"):
        combine(program, a, a, activation="gelu", label="e")
    with pytest.raises(ValueError, match="float64"):
        combine(program, a, program.tensor("c", (2, 3), np.float64), label="e")
