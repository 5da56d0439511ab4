"""Fused quantile networks against float64, and whole steps with them against steps with the separate layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fxengine import Engine, StepConfig
from fxengine.driver import Device, Target
from fxengine.graphs import Plan, Program, Tensor
from fxengine.nets import iqn as nets_iqn
from fxengine.ops import iqn_fused, iqn_warpgroup, linear, linear_tiles
from fxengine.train.decomposition import COMPONENTS
from tests.support import orders_of_threads
from tools.bench_step import random_rows

PRECISIONS = ("tf32", "bf16")

#: Error of a product of rounded operands whose float32 values were rounded once more on the way, per unit of scale.
TOLERANCE = {"tf32": 2e-3, "bf16": 2e-2}


SIZES = iqn_fused.Sizes(20, 24, 40, 5)


class Net:
    """A quantile network on random data; matrices have `pad` columns of rubbish behind their rows, and if they are to
    be `aligned`, all but theta have as many more as bring the next row to a multiple of 16 bytes. Behind the last row
    of what is given there are `behind` rows of NaN."""

    def __init__(
        self,
        device: Device,
        precision: str,
        *,
        batch: int = 3,
        quantiles: int = 16,
        sizes: iqn_fused.Sizes = SIZES,
        pad: int = 0,
        aligned: bool = False,
        behind: int = 0,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.device, self.sizes, self.batch, self.quantiles = device, sizes, batch, quantiles
        self.pad, self.aligned, self.behind = pad, aligned, behind
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

    def gap(self, columns: int) -> int:
        """Columns behind so many."""
        return self.pad + (-(columns + self.pad) % 4 if self.aligned else 0)

    def data(self, name: str, array: np.ndarray[Any, Any]) -> Tensor:
        if array.ndim != 2:
            return self.program.tensor(name, array.shape, arena="inputs", data=array)
        rows, columns = array.shape
        whole = np.full((rows + self.behind, columns + (0 if "tau" in name else self.gap(columns))), np.nan, np.float32)
        whole[:rows, :columns] = array
        return self.program.tensor(name, whole.shape, arena="inputs", data=whole).rows(0, rows).columns(0, columns)

    def output(self, name: str, columns: int) -> Tensor:
        gap = self.pad if name == "theta" else self.gap(columns)
        data = np.full((self.rows, columns + gap), 77.0, np.float32)
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


@pytest.mark.parametrize(
    ("batch", "quantiles", "sizes", "pad"),
    [
        (2, 32, iqn_fused.Sizes(64, 64, 128, 12), 4),
        (5, 16, iqn_fused.Sizes(32, 64, 128, 33), 3),
        (1, 16, iqn_fused.Sizes(64, 64, 128, 1), 0),
        (9, 48, iqn_fused.Sizes(32, 128, 128, 16), 1),
    ],
)
def test_forward_by_warpgroups(
    warpgroups: Device, batch: int, quantiles: int, sizes: iqn_fused.Sizes, pad: int
) -> None:
    """Against float64, whatever runs beside; and a row has the same bits in every batch."""
    net = Net(warpgroups, "tf32", batch=batch, quantiles=quantiles, sizes=sizes, pad=pad, aligned=True)
    theta, hidden, again = (net.output(n, c) for n, c in (("theta", sizes.outputs), ("hidden", 128), ("again", 128)))
    tau, h2 = net.tensors["tau"], net.tensors["h2"]
    iqn_fused.forward(net.program, tau, h2, net.weights, theta, hidden=hidden, warpgroups=True)
    last = net.output("last", sizes.outputs)
    own = tau.rows(batch - 1, batch)
    iqn_fused.forward(
        net.program,
        own,
        h2.rows(batch - 1, batch),
        net.weights,
        last.rows(0, quantiles),
        hidden=again.rows(0, quantiles),
        warpgroups=True,
    )
    found = net.run(theta, hidden, last, again)
    expected = net.reference("tf32")
    close(found[0], expected.theta, "tf32", "theta")
    close(found[1], expected.hidden, "tf32", "hidden")
    for whole, part in ((found[0], found[2]), (found[1], found[3])):
        np.testing.assert_array_equal(whole[-quantiles:], part[:quantiles])


def test_warpgroups_take_several_groups_of_rows(warpgroups: Device) -> None:
    """One block of four chunks of features, on any device: its groups go round more than once, in any order."""
    sizes = iqn_fused.Sizes(32, 256, 128, 12)
    net = Net(warpgroups, "tf32", batch=41, quantiles=16, sizes=sizes)
    theta, hidden = net.output("theta", sizes.outputs), net.output("hidden", 128)
    share = 1.0 / warpgroups.target.sm_count
    iqn_fused.forward(
        net.program,
        net.tensors["tau"],
        net.tensors["h2"],
        net.weights,
        theta,
        hidden=hidden,
        share=share,
        warpgroups=True,
    )
    assert net.program.launches[-1].fields["blocks"] == 1
    expected = net.reference("tf32")
    results = set()
    with orders_of_threads(warpgroups) as turns:
        for _ in turns:
            found = net.run(theta, hidden)
            close(found[0], expected.theta, "tf32", "theta")
            close(found[1], expected.hidden, "tf32", "hidden")
            results.add(b"".join(array.tobytes() for array in found))
    assert len(results) == 1


def test_nan_stays_with_its_rows_in_warpgroups(warpgroups: Device) -> None:
    sizes = iqn_fused.Sizes(32, 64, 128, 5)
    net = Net(warpgroups, "tf32", batch=6, quantiles=16, sizes=sizes)
    net.arrays["h2"][4, 3] = np.nan
    h2 = net.data("sick", net.arrays["h2"])
    theta = net.output("theta", sizes.outputs)
    iqn_fused.forward(net.program, net.tensors["tau"], h2, net.weights, theta, warpgroups=True)
    bad = np.isnan(net.run(theta)[0])
    assert bad[64:80].all() and bad.sum() == 16 * sizes.outputs


def backward(
    net: Net,
    dtheta: np.ndarray[Any, Any],
    *,
    scale: tuple[float, float] | None = (0.5, 0.75),
    activation: linear.Activation = "none",
    accumulate: bool = False,
    wanted: bool = True,
    warpgroups: bool | None = None,
    name: str = "iqn",
) -> dict[str, Tensor]:
    """Appends forward and backward; the gradients, which hold 0.5 before: of the last layer too where they are made."""
    sizes = net.sizes
    if iqn_fused.fits(net.program.target, net.program.precision, sizes):
        theta, hidden = net.output("theta", sizes.outputs), net.output("hidden", sizes.width)
        iqn_fused.forward(net.program, net.tensors["tau"], net.tensors["h2"], net.weights, theta, hidden=hidden)
    else:  # what `backward` serves all the same
        hidden = net.data("hidden", net.reference(net.program.precision).hidden.astype(np.float32))
    found = {}
    last = ("w_iq2", "b_iq2") if warpgroups and iqn_warpgroup.reaches_last_layer(sizes) else ()
    for role in ("w_phi", "b_phi", "w_iq1", "b_iq1", *last, "h2"):
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
        activation=activation,
        accumulate=accumulate,
        gradients=iqn_fused.WeightGradients(**{n: t for n, t in found.items() if n != "h2"}) if wanted else None,
        accumulate_gradients=accumulate,
        warpgroups=warpgroups,
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
        (3, 64, iqn_fused.Sizes(64, 70, 128, 35), 2, True),  # several tiles per sample
        (3, 48, iqn_fused.Sizes(33, 30, 65, 10), 0, False),  # tiles of 16 rows, three per sample
        (5, 16, iqn_fused.Sizes(5, 150, 20, 3), 2, True),  # columns of two blocks
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


@pytest.mark.parametrize(
    ("batch", "quantiles", "sizes", "pad", "accumulate"),
    [
        (3, 32, iqn_fused.Sizes(64, 128, 128, 12), 4, True),
        (21, 8, iqn_fused.Sizes(32, 128, 128, 5), 3, False),  # the last tile has a quarter of its rows
        (11, 16, iqn_fused.Sizes(64, 256, 128, 16), 0, True),  # columns of two blocks
        (3, 64, iqn_fused.Sizes(32, 256, 128, 1), 1, False),  # two tiles per sample
        (5, 96, iqn_fused.Sizes(64, 128, 128, 13), 0, True),
        (1, 8, iqn_fused.Sizes(64, 128, 128, 3), 0, False),
        (40, 32, iqn_fused.Sizes(64, 128, 128, 12), 0, False),  # ten tiles per slice on a small device
        (37, 8, iqn_fused.Sizes(32, 256, 128, 9), 1, True),
        (9, 32, iqn_fused.Sizes(32, 128, 128, 8), 0, True),  # one block makes all of the last layer
        (5, 16, iqn_fused.Sizes(32, 384, 128, 11), 0, False),  # columns of three blocks, and of four
        (45, 8, iqn_fused.Sizes(32, 512, 128, 16), 2, True),
    ],
)
def test_backward_by_warpgroups(
    warpgroups: Device, batch: int, quantiles: int, sizes: iqn_fused.Sizes, pad: int, accumulate: bool
) -> None:
    """Against float64, with the last layer where enough blocks see the same rows."""
    net = Net(warpgroups, "tf32", batch=batch, quantiles=quantiles, sizes=sizes, pad=pad, aligned=True)
    dtheta = np.random.default_rng(5).normal(size=(net.rows, sizes.outputs)).astype(np.float32)
    gradients = backward(net, dtheta, activation="elu", accumulate=accumulate, warpgroups=True)
    found = dict(zip(gradients, net.run(*gradients.values()), strict=True))
    assert ("w_iq2" in found) == ("b_iq2" in found) == (sizes.outputs <= sizes.features // 16)
    expected = iqn_fused.reference_backward(
        dtheta, net.arrays["tau"], net.arrays["h2"], net.parameters, scale=0.375, precision="tf32"
    )
    slope = np.where(net.arrays["h2"] > 0.0, 1.0, net.arrays["h2"] + 1.0)
    expected = replace(expected, h2=expected.h2 * slope)
    for name, gradient in found.items():
        close(gradient, getattr(expected, name) + (0.5 if accumulate else 0.0), "tf32", name)


#: As small as the warpgroups' backward takes.
SMALL = iqn_fused.Sizes(32, 128, 128, 5)


def gradients_by_warpgroups(
    device: Device,
    dtheta: np.ndarray[Any, Any],
    *,
    quantiles: int,
    sizes: iqn_fused.Sizes = SMALL,
    behind: int = 0,
    sick: tuple[str, int] | None = None,
    **options: Any,
) -> dict[str, np.ndarray[Any, Any]]:
    """Gradients of a network whose numbers are the same in every call; `sick`: where there is a NaN in a row."""
    batch = len(dtheta) // quantiles
    net = Net(device, "tf32", batch=batch, quantiles=quantiles, sizes=sizes, aligned=True, behind=behind)
    if sick is not None:
        name, row = sick
        net.arrays[name][row, 3] = np.nan
        net.tensors[name] = net.data(f"sick.{name}", net.arrays[name])
    gradients = backward(net, dtheta, warpgroups=True, **options)
    return dict(zip(gradients, net.run(*gradients.values()), strict=True))


@pytest.mark.parametrize("quantiles", [8, 32, 64])
def test_what_is_not_wanted_of_warpgroups_is_not_written(warpgroups: Device, quantiles: int) -> None:
    dtheta = np.random.default_rng(2).normal(size=(7 * quantiles, SMALL.outputs)).astype(np.float32)
    everything, states, weights = (
        gradients_by_warpgroups(warpgroups, dtheta, quantiles=quantiles, **options)
        for options in ({}, {"wanted": False}, {"scale": None})
    )
    np.testing.assert_array_equal(states["h2"], everything["h2"])
    np.testing.assert_array_equal(weights["h2"], 0.5)
    for name in ("w_phi", "b_phi", "w_iq1", "b_iq1", "w_iq2", "b_iq2"):
        np.testing.assert_array_equal(weights[name], everything[name])
        np.testing.assert_array_equal(states[name], 0.5)


def test_nan_stays_with_its_output_in_the_last_layer(warpgroups: Device) -> None:
    """And numbers beyond the outputs are not seen: they are NaN behind the rows of dtheta."""
    sizes, found = replace(SMALL, features=256, outputs=11), []
    for sick in (None, 2, 9):
        net = Net(warpgroups, "tf32", batch=5, quantiles=8, sizes=sizes, pad=1, aligned=True)
        dtheta = np.random.default_rng(3).normal(size=(net.rows, sizes.outputs)).astype(np.float32)
        if sick is not None:
            dtheta[21, sick] = np.nan
        gradients = backward(net, dtheta, warpgroups=True)
        found.append(net.run(gradients["w_iq2"], gradients["b_iq2"]))
    for sick, ill in zip((2, 9), found[1:], strict=True):
        for a, b in zip(found[0], ill, strict=True):
            assert np.isnan(b[sick]).all()
            np.testing.assert_array_equal(np.delete(b, sick, axis=0), np.delete(a, sick, axis=0))


@pytest.mark.parametrize("scale", [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize(("accumulate", "expected"), [(False, 0.0), (True, 0.5)])
def test_a_scale_of_zero_is_an_exact_zero_by_warpgroups(
    warpgroups: Device, scale: tuple[float, float], accumulate: bool, expected: float
) -> None:
    sick = np.full((3 * 16, SMALL.outputs), np.nan, np.float32)
    found = gradients_by_warpgroups(warpgroups, sick, quantiles=16, scale=scale, accumulate=accumulate)
    np.testing.assert_array_equal(found["h2"], np.float32(expected))
    assert not np.signbit(found["h2"]).any()
    assert np.isnan(found["w_iq1"]).any()


@pytest.mark.parametrize("quantiles", [8, 16, 32, 64])
def test_nan_stays_with_its_sample_in_gradients_by_warpgroups(warpgroups: Device, quantiles: int) -> None:
    dtheta = np.random.default_rng(2).normal(size=(6 * quantiles, SMALL.outputs)).astype(np.float32)
    well = gradients_by_warpgroups(warpgroups, dtheta, quantiles=quantiles)["h2"]
    ill = [gradients_by_warpgroups(warpgroups, dtheta, quantiles=quantiles, sick=(n, 4))["h2"] for n in ("h2", "tau")]
    dtheta[4 * quantiles + 3, 1] = np.nan
    ill.append(gradients_by_warpgroups(warpgroups, dtheta, quantiles=quantiles)["h2"])
    for found in ill:
        assert (found[4] != well[4]).any()
        np.testing.assert_array_equal(np.delete(found, 4, axis=0), np.delete(well, 4, axis=0))
    assert np.isnan(ill[-1][4]).all()


@pytest.mark.parametrize("quantiles", [8, 16])
def test_what_lies_behind_the_last_row_is_not_seen_by_warpgroups(warpgroups: Device, quantiles: int) -> None:
    """The last tile has rows that do not exist."""
    dtheta = np.random.default_rng(8).normal(size=(21 * quantiles, SMALL.outputs)).astype(np.float32)
    alone, followed = (
        gradients_by_warpgroups(warpgroups, dtheta, quantiles=quantiles, behind=behind) for behind in (0, 5)
    )
    for name, gradient in alone.items():
        np.testing.assert_array_equal(followed[name], gradient)


@pytest.mark.parametrize(
    ("batch", "quantiles", "sizes"),
    [
        (43, 8, SMALL),
        (3, 64, SMALL),
        (9, 16, iqn_fused.Sizes(64, 256, 128, 12)),
        (3, 96, iqn_fused.Sizes(64, 256, 128, 12)),
    ],
)
def test_order_of_the_threads_does_not_change_the_gradients_by_warpgroups(
    device: Device, batch: int, quantiles: int, sizes: iqn_fused.Sizes
) -> None:
    """Barriers are where they are needed, and nothing is read that was not written before."""
    if device.kind != "sim":
        pytest.skip("only the simulated device can choose the order of threads")
    dtheta = np.random.default_rng(6).normal(size=(batch * quantiles, sizes.outputs)).astype(np.float32)
    found = set()
    with orders_of_threads(device) as turns:
        for _ in turns:
            gradients = gradients_by_warpgroups(device, dtheta, quantiles=quantiles, sizes=sizes)
            found.add(b"".join(gradients[name].tobytes() for name in sorted(gradients)))
    assert len(found) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("quantiles", [8, 32])
def test_small_tiles_give_the_same(
    device: Device, precision: str, quantiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 16 rows, for devices without shared memory for more, and in several blocks of rows."""

    def run() -> dict[str, np.ndarray[Any, Any]]:
        net = Net(device, precision, batch=11, quantiles=quantiles)
        dtheta = np.random.default_rng(7).normal(size=(net.rows, SIZES.outputs)).astype(np.float32)
        gradients = backward(net, dtheta)
        return dict(zip(gradients, net.run(*gradients.values()), strict=True))

    large = run()  # where there is room
    monkeypatch.setattr(iqn_fused, "_TILE_ROWS", (16,))
    for name, gradient in run().items():
        np.testing.assert_allclose(gradient, large[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_gradient_goes_on_through_what_made_h2(device: Device, precision: str, accumulate: bool) -> None:
    def gradient(activation: linear.Activation) -> np.ndarray[Any, Any]:
        net = Net(device, precision, batch=5)
        gradients = backward(net, dtheta, activation=activation, accumulate=accumulate)
        return net.run(gradients["h2"])[0]

    net = Net(device, precision, batch=5)
    dtheta = np.random.default_rng(3).normal(size=(net.rows, SIZES.outputs)).astype(np.float32)
    before = 0.5 if accumulate else 0.0
    expected = np.where(net.arrays["h2"] > 0.0, gradient("none") - before, 0.0) + before
    np.testing.assert_allclose(gradient("relu"), expected, rtol=1e-6, atol=1e-6 if accumulate else 0.0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_scale_of_zero_is_an_exact_zero(device: Device, precision: str) -> None:
    """Whatever dtheta holds; accumulating, the bits stay. The weights learn at full scale all the same."""
    for scale in ((0.0, 1.0), (1.0, 0.0)):
        for accumulate, expected in ((False, 0.0), (True, 0.5)):
            net = Net(device, precision)
            sick = np.full((net.rows, SIZES.outputs), np.nan, np.float32)
            gradients = backward(net, sick, scale=scale, accumulate=accumulate)
            found = dict(zip(gradients, net.run(*gradients.values()), strict=True))
            np.testing.assert_array_equal(found["h2"], np.float32(expected))
            assert not np.signbit(found["h2"]).any()
            assert np.isnan(found["w_iq1"]).any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_wanted_is_not_written(device: Device, precision: str) -> None:
    def run(**options: Any) -> dict[str, np.ndarray[Any, Any]]:
        net = Net(device, precision, batch=9)
        dtheta = np.random.default_rng(2).normal(size=(net.rows, SIZES.outputs)).astype(np.float32)
        gradients = backward(net, dtheta, **options)
        return dict(zip(gradients, net.run(*gradients.values()), strict=True))

    everything, states, weights = run(), run(wanted=False), run(scale=None)
    np.testing.assert_array_equal(states["h2"], everything["h2"])
    np.testing.assert_array_equal(weights["h2"], 0.5)
    for name in ("w_phi", "b_phi", "w_iq1", "b_iq1"):
        np.testing.assert_array_equal(weights[name], everything[name])
        np.testing.assert_array_equal(states[name], 0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sick", ["tau", "h2"])
def test_nan_stays_with_its_rows(device: Device, precision: str, sick: str) -> None:
    found = []
    for ill in (False, True):
        net = Net(device, precision, batch=3, quantiles=8)
        if ill:
            net.arrays[sick][1, 0] = np.nan
            net.tensors[sick] = net.data(f"{sick}.ill", net.arrays[sick])
        theta = net.output("theta", SIZES.outputs)
        iqn_fused.forward(net.program, net.tensors["tau"], net.tensors["h2"], net.weights, theta)
        found.append(net.run(theta)[0])
    rows = slice(8, 9) if sick == "tau" else slice(8, 16)
    assert np.isnan(found[1][rows]).all()
    np.testing.assert_array_equal(np.delete(found[1], rows, axis=0), np.delete(found[0], rows, axis=0))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("sick", "at", "feature"), [("w_phi", (3, 2), 3), ("w_iq1", (2, 3), 3)])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF])
def test_nan_among_the_weights_is_not_rounded_away(
    device: Device, precision: str, sick: str, at: tuple[int, int], feature: int, bits: int
) -> None:
    net = Net(device, precision, batch=3)
    weights = net.arrays[sick].copy()
    weights.view(np.uint32)[at] = bits
    net.weights = replace(net.weights, **{sick: net.data("sick", weights)})
    dtheta = np.random.default_rng(5).normal(size=(net.rows, SIZES.outputs)).astype(np.float32)
    dh2 = net.run(backward(net, dtheta)["h2"])[0]
    assert np.isnan(dh2[:, feature]).all()


def test_every_batch_size_gives_a_row_the_same_bits(device: Device) -> None:
    """Rows lie in tiles of other warps and blocks; their sums have one order all the same."""
    alone, among = (Net(device, "tf32", batch=batch, quantiles=32) for batch in (2, 40))
    among.arrays["tau"][38:], among.arrays["h2"][38:] = alone.arrays["tau"], alone.arrays["h2"]
    found = []
    for net in (alone, among):
        arrays = net.arrays | {name: alone.arrays[name] for name in net.parameters}
        tensors = {name: net.data(f"{name}.same", array) for name, array in arrays.items()}
        weights = iqn_fused.Weights(**{name: tensors[name] for name in net.parameters})
        theta = net.output("theta", SIZES.outputs)
        iqn_fused.forward(net.program, tensors["tau"], tensors["h2"], weights, theta)
        found.append(net.run(theta)[0])
    np.testing.assert_array_equal(found[1][-64:], found[0])


def test_who_is_served_is_a_pure_function() -> None:
    usual = iqn_fused.Sizes(64, 256, 128, 12)
    hopper, ampere, card, old = (Target.of(arch) for arch in ("sm_90", "sm_80", "sm_120", "sm_75"))
    assert iqn_fused.fits(hopper, "tf32", usual) and iqn_fused.fits(hopper, "bf16", usual)
    assert not iqn_fused.fits(hopper, "fp32", usual)
    assert not iqn_fused.fits(ampere, "tf32", usual) and iqn_fused.fits(ampere, "bf16", usual)
    assert not iqn_fused.fits(old, "bf16", iqn_fused.Sizes(16, 16, 16, 3))
    assert not iqn_fused.fits(hopper, "tf32", iqn_fused.Sizes(65, 256, 128, 12))
    assert not iqn_fused.fits(hopper, "tf32", iqn_fused.Sizes(64, 256, 129, 12))
    for quantiles in (8, 32, 64):
        assert iqn_fused.backward_rows(hopper, "tf32", usual, quantiles) == 32
        assert iqn_fused.backward_rows(ampere, "tf32", usual, quantiles) == 32
        assert iqn_fused.backward_rows(card, "tf32", usual, quantiles) == 16
        assert iqn_fused.backward_rows(card, "bf16", usual, quantiles) == 32
    assert iqn_fused.backward_rows(hopper, "tf32", usual, 48) == 16
    assert not iqn_fused.fits_backward(hopper, "tf32", usual, 24)
    assert not iqn_fused.fits_backward(hopper, "tf32", usual, 12)
    assert iqn_warpgroup.fits_warpgroup(hopper, "tf32", usual, 32)
    assert not iqn_warpgroup.fits_warpgroup(hopper, "bf16", usual, 32)
    assert not iqn_warpgroup.fits_warpgroup(hopper, "tf32", usual, 8)
    assert not iqn_warpgroup.fits_warpgroup(ampere, "tf32", usual, 32)
    assert iqn_warpgroup.fits_warpgroup(hopper, "tf32", replace(usual, outputs=32), 32)
    assert not iqn_warpgroup.fits_warpgroup(hopper, "tf32", replace(usual, outputs=33), 32)
    for quantiles in (8, 16, 32, 64, 96):
        assert iqn_warpgroup.fits_warpgroup_backward(hopper, "tf32", usual, quantiles)
        assert iqn_fused.fits_backward(hopper, "tf32", usual, quantiles)
    assert not iqn_warpgroup.fits_warpgroup_backward(hopper, "bf16", usual, 32)
    assert not iqn_warpgroup.fits_warpgroup_backward(hopper, "tf32", usual, 48)
    assert not iqn_warpgroup.fits_warpgroup_backward(hopper, "tf32", replace(usual, features=192), 32)
    assert not iqn_warpgroup.fits_warpgroup_backward(hopper, "tf32", replace(usual, outputs=17), 32)
    assert not iqn_warpgroup.fits_warpgroup_backward(ampere, "tf32", usual, 32)
    assert iqn_fused.makes_last_layer(hopper, "tf32", usual, 32, aligned=True)
    assert not iqn_fused.makes_last_layer(hopper, "tf32", usual, 32, aligned=False)
    assert iqn_fused.makes_last_layer(hopper, "tf32", replace(usual, features=128, outputs=8), 32, aligned=True)
    assert not iqn_fused.makes_last_layer(hopper, "tf32", replace(usual, features=128), 32, aligned=True)
    assert not iqn_fused.makes_last_layer(hopper, "bf16", usual, 32, aligned=True)
    assert not iqn_fused.makes_last_layer(hopper, "tf32", usual, 48, aligned=True)
    assert not iqn_fused.makes_last_layer(ampere, "tf32", usual, 32, aligned=True)


@pytest.mark.parametrize(
    ("outputs", "pad", "aligned", "families"),
    [
        (5, 0, True, ["iqn_warpgroup_tf32", "iqn_warpgroup_backward_tf32"]),
        (5, 0, False, ["iqn_warpgroup_tf32", "iqn_backward_tf32_32"]),  # rows of dtheta
        (8, 3, False, ["iqn_forward_tf32_16", "iqn_backward_tf32_32"]),  # all rows
    ],
)
def test_rows_that_start_elsewhere_go_without_warpgroups(
    outputs: int, pad: int, aligned: bool, families: list[str]
) -> None:
    sizes = replace(SMALL, outputs=outputs)
    hopper = SimpleNamespace(target=Target.of("sm_90"))
    net = Net(cast(Device, hopper), "tf32", batch=2, quantiles=16, sizes=sizes, pad=pad, aligned=aligned)
    backward(net, np.zeros((net.rows, outputs), np.float32))
    launched = [launch.family.name for launch in net.program.launches]
    assert [name for name in launched if name in families] == families


def test_what_does_not_fit_is_refused(device: Device) -> None:
    net = Net(device, "tf32")
    theta = net.output("theta", SIZES.outputs)
    with pytest.raises(ValueError, match=r"theta must be float32 \(48, 5\).*\(48, 4\)"):
        iqn_fused.forward(net.program, net.tensors["tau"], net.tensors["h2"], net.weights, theta.columns(0, 4))
    plain = Net(device, "fp32")
    with pytest.raises(ValueError, match=r"in fp32 on .* use the separate layers"):
        iqn_fused.forward(
            plain.program,
            plain.tensors["tau"],
            plain.tensors["h2"],
            plain.weights,
            plain.output("theta", SIZES.outputs),
        )
    with pytest.raises(ValueError, match=r"24 quantiles .* use the separate layers"):
        backward(Net(device, "tf32", quantiles=24), np.zeros((72, SIZES.outputs), np.float32))
    with pytest.raises(ValueError, match=r"see fits_warpgroup_backward"):
        backward(Net(device, "tf32"), np.zeros((48, SIZES.outputs), np.float32), warpgroups=True)
    for pad, gap, role in ((1, 0, "h2"), (0, 1, "hidden")):
        net = Net(device, "tf32", sizes=SMALL, pad=pad)
        tau, h2, theta = net.tensors["tau"], net.tensors["h2"], net.output("theta", SMALL.outputs)
        hidden = net.program.tensor("hidden", (net.rows, SMALL.width + gap)).columns(0, SMALL.width)
        with pytest.raises(ValueError, match=rf"rows of {role} must start at multiples of 16 bytes .* padded=True"):
            iqn_fused.forward(net.program, tau, h2, net.weights, theta, hidden=hidden, warpgroups=True)
    for sizes, pad, role in ((SMALL, 0, "dtheta"), (replace(SMALL, outputs=8), 2, "dtheta"), (SMALL, 3, "h2")):
        net = Net(device, "tf32", sizes=sizes, pad=pad)
        with pytest.raises(ValueError, match=rf"rows of {role} must start at multiples of 16 bytes .* padded=True"):
            backward(net, np.zeros((48, sizes.outputs), np.float32), warpgroups=True)
    for roles, reason in (
        (("w_iq2", "b_iq2"), r"are not made here \(see makes_last_layer\)"),
        (("b_iq2",), r"together, got that of b_iq2 alone"),
    ):
        net = Net(device, "tf32")
        like = {name: net.program.tensor(f"grad.{name}", array.shape) for name, array in net.parameters.items()}
        own = iqn_fused.WeightGradients(**{n: t for n, t in like.items() if "iq2" not in n or n in roles})
        with pytest.raises(ValueError, match=reason):
            iqn_fused.backward(
                net.program,
                net.data("dtheta", np.zeros((net.rows, SIZES.outputs), np.float32)),
                net.tensors["tau"],
                net.tensors["h2"],
                net.weights,
                net.data("hidden", np.zeros((net.rows, SIZES.width), np.float32)),
                gradients=own,
                warpgroups=False,
                name="iqn",
            )


CONFIG = StepConfig(
    batch=9, state=12, tokens=3, attn=4, ofi=3, ofi_embed=4, h1=14, h2=12, value_h=6, adv_h=6, branches=(3, 2, 2),
    atoms=7, iqn_quantiles=8, iqn_target_quantiles=3, iqn_cos=5, iqn_h=6, ens=2, aux_h=6, aux_out=5, aux_head=4,
    regimes=3, iql_h=5, cur_h=5, oracle_every=2,
)  # fmt: skip


def whole_step(
    device: Device, precision: str, config: StepConfig = CONFIG
) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, int]]:
    """Gradients, target values and the decomposition of one step; and the kernels that it launched."""
    with Engine(config, device=device, data=random_rows(config, 40), precision=precision, guard=True) as engine:
        engine.signals.override("iqn_readiness", 0.6)
        engine.step(decompose=True)
        engine.check_guards()
        report = engine.telemetry()
        assert report is not None and report.decomposition is not None
        found = {p.name: engine.plan.buffer(p.grad).read() for g in engine.builder.groups for p in g.parameters}
        row = report.decomposition[COMPONENTS.index("iqn")]
        found |= {"decomposition": np.asarray(row), "L_iqn": np.asarray(report["L_iqn"])}
        return found, dict(engine.graph.census().launches)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_as_with_separate_layers(device: Device, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, launches = whole_step(device, precision)
    assert [n for name, n in launches.items() if name.startswith("iqn_forward")] == [1]
    monkeypatch.setattr(nets_iqn, "_is_fused", lambda p, config: False)
    separate, plain = whole_step(device, precision)
    assert not [name for name in plain if name.startswith(("iqn_forward", "iqn_backward"))]
    for name, expected in separate.items():
        close(fused[name], expected, precision, name)


def test_a_step_by_warpgroups_as_with_separate_layers(warpgroups: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks forward and backward, and products with packed weights, in one step."""
    config = replace(CONFIG, h2=128, iqn_cos=32, iqn_h=128, iqn_quantiles=16, iqn_target_quantiles=16)
    for module in (iqn_warpgroup, linear_tiles):  # the simulated device runs them if it is asked to
        monkeypatch.setattr(module, "has_warpgroups", lambda target: True)
    with monkeypatch.context() as mapped:
        mapped.setattr(
            linear,
            "choose_tile",
            lambda *sizes, precision, aligned, **options: "w64x64" if precision == "tf32" and aligned else "32x32",
        )
        mapped.setattr(
            linear,
            "choose_dw",
            lambda *sizes, precision, aligned, **options: (
                "m64x64" if precision == "tf32" and aligned else "32x32",
                1,
            ),
        )
        fused, launches = whole_step(warpgroups, "tf32", config)
    assert launches["linear_dw_tf32_m64x64"]
    assert launches["iqn_warpgroup_tf32"] == launches["iqn_warpgroup_backward_tf32"] == 1
    assert launches["pack"] and launches["linear_forward_tf32_w64x64"] and launches["linear_dx_tf32_w64x64"]
    monkeypatch.setattr(nets_iqn, "_is_fused", lambda p, config: False)
    separate, plain = whole_step(warpgroups, "tf32", config)
    assert not [name for name in plain if name.startswith("iqn_warpgroup")]
    for name, expected in separate.items():
        close(fused[name], expected, "tf32", name)


@pytest.mark.parametrize(
    ("rows", "room", "blocks"), [(1, 44, 1), (2048, 44, 32), (8192, 44, 43), (131_072, 44, 43), (8192, 33, 22)]
)
def test_as_few_blocks_by_warpgroups_as_take_no_longer(rows: int, room: int, blocks: int) -> None:
    assert iqn_warpgroup.forward_blocks(rows, room) == blocks
    tiles = -(-rows // 64)
    rounds = -(-tiles // (3 * blocks))
    assert rounds == -(-tiles // (3 * room))
    assert tiles <= room or -(-tiles // (3 * (blocks - 1))) > rounds
