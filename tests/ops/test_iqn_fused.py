"""Fused quantile networks against float64, and against the separate layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops import iqn_fused

PRECISIONS = ("tf32", "bf16")

#: Error of a product of rounded operands whose float32 values were rounded once more on the way, per unit of scale.
TOLERANCE = {"tf32": 2e-3, "bf16": 2e-2}


SIZES = iqn_fused.Sizes(20, 24, 40, 5)


class Net:
    """A quantile network on random data; matrices have `pad` columns of rubbish behind their rows."""

    def __init__(
        self,
        device: Device,
        precision: str,
        *,
        batch: int = 3,
        quantiles: int = 16,
        sizes: iqn_fused.Sizes = SIZES,
        pad: int = 0,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.device, self.sizes, self.batch, self.quantiles, self.pad = device, sizes, batch, quantiles, pad
        self.program = Program(device.target, precision)
        self.whole: dict[str, Tensor] = {}  # outputs with the columns behind them
        self.arrays: dict[str, np.ndarray[Any, Any]] = {
            "tau": rng.random((batch, quantiles)),
            "h2": rng.normal(size=(batch, sizes.features)),
            "w_phi": rng.normal(size=(sizes.features, sizes.cosines)) / np.sqrt(sizes.cosines),
            "b_phi": rng.normal(size=sizes.features),
            "w_iq1": rng.normal(size=(sizes.width, sizes.features)) / np.sqrt(sizes.features),
            "b_iq1": rng.normal(size=sizes.width),
            "w_iq2": rng.normal(size=(sizes.outputs, sizes.width)) / np.sqrt(sizes.width),
            "b_iq2": rng.normal(size=sizes.outputs),
        }
        self.arrays = {name: array.astype(np.float32) for name, array in self.arrays.items()}
        self.tensors = {name: self.data(name, array) for name, array in self.arrays.items()}
        self.weights = iqn_fused.Weights(**{n: t for n, t in self.tensors.items() if n[1] == "_"})

    @property
    def rows(self) -> int:
        return self.batch * self.quantiles

    def data(self, name: str, array: np.ndarray[Any, Any]) -> Tensor:
        pad = self.pad if array.ndim == 2 and name != "tau" else 0
        if not pad:
            return self.program.tensor(name, array.shape, arena="inputs", data=array)
        wide = np.full((array.shape[0], array.shape[1] + pad), np.nan, np.float32)
        wide[:, : array.shape[1]] = array
        return self.program.tensor(name, wide.shape, arena="inputs", data=wide).columns(0, array.shape[1])

    def output(self, name: str, columns: int) -> Tensor:
        data = np.full((self.rows, columns + self.pad), 77.0, np.float32)
        self.whole[name] = self.program.tensor(name, data.shape, arena="state", data=data)
        return self.whole[name].columns(0, columns)

    def run(self, *outputs: Tensor) -> list[np.ndarray[Any, Any]]:
        with self.device.stream() as stream, Plan(self.program, self.device, guard=True) as plan:
            plan.run(stream=stream)
            stream.synchronize()
            plan.check_guards()
            found = [plan.buffer(self.whole.get(t.name, t)).read() for t in outputs]
        for t, array in zip(outputs, found, strict=True):
            if array.ndim == 2 and array.shape != t.shape:
                assert (array[:, t.shape[1] :] == 77.0).all(), f"{t.name}: something was written behind its rows"
        return [array[:, : t.shape[1]] if array.ndim == 2 else array for t, array in zip(outputs, found, strict=True)]

    def reference(self, precision: str = "fp32") -> iqn_fused.Reference:
        return iqn_fused.reference_forward(self.arrays["tau"], self.arrays["h2"], self.parameters, precision=precision)

    @property
    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: array for name, array in self.arrays.items() if name[1] == "_"}


def close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], precision: str, name: str) -> None:
    scale = float(np.abs(expected).max())
    worst = float(np.abs(found - expected).max())
    assert worst <= TOLERANCE[precision] * scale, f"{name}: off by {worst} where the largest is {scale}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("batch", "quantiles", "sizes", "pad"),
    [
        (3, 16, iqn_fused.Sizes(20, 24, 40, 5), 0),
        (2, 32, iqn_fused.Sizes(64, 64, 128, 12), 4),
        (5, 7, iqn_fused.Sizes(9, 17, 33, 18), 3),
        (1, 1, iqn_fused.Sizes(1, 1, 1, 1), 0),
    ],
)
def test_forward_against_float64(
    device: Device, precision: str, batch: int, quantiles: int, sizes: iqn_fused.Sizes, pad: int
) -> None:
    net = Net(device, precision, batch=batch, quantiles=quantiles, sizes=sizes, pad=pad)
    theta, hidden = net.output("theta", sizes.outputs), net.output("hidden", sizes.width)
    iqn_fused.forward(net.program, net.tensors["tau"], net.tensors["h2"], net.weights, theta, hidden=hidden)
    found = net.run(theta, hidden)
    expected = net.reference(precision)
    close(found[0], expected.theta, precision, "theta")
    close(found[1], expected.hidden, precision, "hidden")


def backward(
    net: Net,
    dtheta: np.ndarray[Any, Any],
    *,
    scale: tuple[float, float] | None = (0.5, 0.75),
    accumulate: bool = False,
    wanted: bool = True,
    name: str = "iqn",
) -> dict[str, Tensor]:
    """Appends forward and backward; the gradients, which hold 0.5 before."""
    sizes = net.sizes
    theta, hidden = net.output("theta", sizes.outputs), net.output("hidden", sizes.width)
    iqn_fused.forward(net.program, net.tensors["tau"], net.tensors["h2"], net.weights, theta, hidden=hidden)
    found = {}
    for role in ("w_phi", "b_phi", "w_iq1", "b_iq1", "h2"):
        before = np.full(net.arrays[role].shape, 0.5, np.float32)
        found[role] = net.program.tensor(f"grad.{role}", before.shape, arena="state", data=before)
    scales = [
        net.program.tensor(f"scale{i}", (1,), arena="inputs", data=np.array([s], np.float32))
        for i, s in enumerate(scale or (1.0, 1.0))
    ]
    iqn_fused.backward(
        net.program,
        net.data("dtheta", dtheta),
        net.tensors["tau"],
        net.tensors["h2"],
        net.weights,
        hidden,
        dh2=found["h2"] if scale else None,
        weight=scales[0],
        readiness=scales[1],
        accumulate=accumulate,
        gradients=iqn_fused.WeightGradients(**{n: t for n, t in found.items() if n != "h2"}) if wanted else None,
        accumulate_gradients=accumulate,
        name=name,
    )
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("batch", "quantiles", "sizes", "pad", "accumulate"),
    [
        (3, 16, iqn_fused.Sizes(20, 24, 40, 5), 0, False),
        (3, 32, iqn_fused.Sizes(64, 80, 128, 12), 4, True),
        (17, 8, iqn_fused.Sizes(9, 17, 33, 18), 3, False),
        (1, 8, iqn_fused.Sizes(1, 1, 1, 1), 0, True),
    ],
)
def test_backward_against_float64(
    device: Device, precision: str, batch: int, quantiles: int, sizes: iqn_fused.Sizes, pad: int, accumulate: bool
) -> None:
    net = Net(device, precision, batch=batch, quantiles=quantiles, sizes=sizes, pad=pad)
    dtheta = np.random.default_rng(5).normal(size=(net.rows, sizes.outputs)).astype(np.float32)
    gradients = backward(net, dtheta, accumulate=accumulate)
    found = dict(zip(gradients, net.run(*gradients.values()), strict=True))
    expected = iqn_fused.reference_backward(
        dtheta, net.arrays["tau"], net.arrays["h2"], net.parameters, scale=0.375, precision=precision
    )
    for name, gradient in found.items():
        close(gradient, getattr(expected, name) + (0.5 if accumulate else 0.0), precision, name)
