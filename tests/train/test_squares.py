"""Norms from the sums of squares that kernels report of the gradients they write, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops import glunorm, iqn_fused, linear
from fxengine.signals import SLOTS, SignalMap
from fxengine.train.groups import ParamGroup, ParamSpec
from fxengine.train.optimizer import optimize
from tests.support import assert_close

NAMES = {0: "trunk", 1: "value", 2: "branches"}


class Net:
    """Groups of parameters, records that write their gradients, and an optimizer behind them."""

    def __init__(self, device: Device, *groups: dict[str, tuple[int, ...]], precision: str = "fp32") -> None:
        self.device = device
        self.program = Program(device.target, precision)
        self.map = SignalMap({i: NAMES[i] for i in range(len(groups))})
        self.groups = [
            ParamGroup(self.program, NAMES[i], i, [ParamSpec(name, shape) for name, shape in specs.items()])
            for i, specs in enumerate(groups)
        ]
        self.rng = np.random.default_rng(3)

    def grad(self, name: str) -> Tensor:
        return next(p.grad for group in self.groups for p in group.parameters if p.name == name)

    def data(self, *shape: int, scale: float = 1.0, bad: float | None = None, rows: int | None = None) -> Tensor:
        """Random numbers; `bad` is one of them; those behind the first `rows` rows are zeros."""
        array = (scale * self.rng.normal(size=shape)).astype(np.float32)
        array[shape[0] if rows is None else rows :] = 0.0
        if bad is not None:
            array.flat[array.size // 2] = bad
        return self.program.tensor(f"data{len(self.program.storages)}", shape, arena="inputs", data=array)

    def layer(
        self, w: str, b: str | None = None, *, m: int, k2: int = 0, dy: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """The weight gradient of a layer."""
        dw, db = self.grad(w), self.grad(b) if b else None
        n, k = dw.shape
        x = (self.data(m, k - k2), self.data(m, k2)) if k2 else self.data(m, k)
        linear.backward_dw(self.program, self.data(m, n, **(dy or {})), x, dw, db, label=f"{w}.dw", **options)

    def run(self, *, times: int = 1, host: dict[str, float] | None = None) -> dict[str, Any]:
        """Norms by group, norms of what the gradients hold, names of the nodes, the guard. `host`: gradients that are
        filled before."""
        values = np.zeros(SLOTS, np.float32)
        for slot in self.map.slots.values():
            values[slot.index] = slot.default
        snapshot = self.program.tensor("signals", (SLOTS,), arena="state", data=values)
        counters = self.program.tensor("counters", (4,), np.uint64, arena="state", data=np.zeros(4, np.uint64))

        def signal(name: str) -> Tensor:
            index = self.map.slot(name).index
            return snapshot.rows(index, index + 1)

        norms = {group.name: self.program.tensor(f"norm.{group.name}", (1,)) for group in self.groups}
        guard = optimize(self.program, self.groups, signal=signal, counters=counters, norms=norms)
        with Plan(self.program, self.device, guard=True) as plan, self.device.stream() as stream:
            for group in self.groups:
                for buffer in (group.params, group.grads, group.m, group.v):
                    plan.buffer(buffer).write(np.zeros(group.size, np.float32))
            for name, value in (host or {}).items():
                plan.buffer(self.grad(name)).write(np.full(self.grad(name).shape, value, np.float32))
            for _ in range(times):
                plan.run(stream=stream)
            stream.synchronize()
            plan.check_guards()
            with np.errstate(invalid="ignore", over="ignore"):
                grads = [plan.buffer(group.grads).read().astype(np.float64) for group in self.groups]
                expected = [np.sqrt((g**2).sum()) for g in grads]
            return {
                "norms": np.concatenate([plan.buffer(norms[g.name]).read() for g in self.groups]),
                "expected": np.array(expected),
                "largest": [float(np.abs(g).max()) for g in grads],
                "nodes": [node.name for node in plan.nodes],
                "mask": int(plan.buffer(guard.group_mask).read()[0]),
                "moved": [bool(plan.buffer(g.m).read().any()) for g in self.groups],
            }

    def check(self, *, fallback: bool = False, **options: Any) -> dict[str, Any]:
        """Norms are those of what the gradients hold, made by records of their own or not."""
        found = self.run(**options)
        assert_close(found["norms"], found["expected"], factor=4, atol=0.0, name="norms")
        assert np.all(found["expected"] > 0)
        assert ("norm" in found["nodes"]) == fallback
        return found


@pytest.mark.parametrize("precision", linear.PRECISIONS)
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("tile", [None, "16x16", "16x32", "32x32", "64x64", "128x64", "128x128"])
def test_norms_of_layers(device: Device, precision: str, slices: int, tile: str | None) -> None:
    if tile is not None and tile not in linear.DW[precision]:
        pytest.skip(f"no tile {tile} in {precision}")
    shapes = {"w0": (5, 7), "b0": (5,), "w1": (70, 53), "b1": (70,), "w2": (33, 40), "w3": (1, 1), "b3": (1,)}
    net = Net(device, shapes, {"w4": (64, 96), "b4": (64,)}, precision=precision)
    options = {"slices": slices, "tile": tile}
    net.layer("w0", "b0", m=9, **options)
    net.layer("w1", "b1", m=133, k2=20, **options)
    net.layer("w2", m=40, dy={"rows": 17}, **options)
    net.layer("w3", "b3", m=1, **options)
    net.layer("w4", "b4", m=64, k2=32, **options)
    net.check(times=2)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("tile", ["m64x64", "m128x64"])
def test_norms_of_layers_by_tensor_maps(tensor_maps: Device, slices: int, tile: str) -> None:
    shapes = {"w0": (4, 8), "b0": (4,), "w1": (72, 52), "b1": (72,), "w2": (36, 40), "w3": (1, 4)}
    net = Net(tensor_maps, shapes, precision="tf32")
    options = {"slices": slices, "tile": tile}
    net.layer("w0", "b0", m=9, **options)
    net.layer("w1", "b1", m=133, k2=20, **options)
    net.layer("w2", m=40, dy={"rows": 17}, **options)
    linear.backward_dw(net.program, net.data(5, 4).columns(0, 1), net.data(5, 4), net.grad("w3"), **options)
    net.check(times=2)


@pytest.mark.parametrize("offset", [1, 7])
def test_a_gradient_that_records_make_part_by_part(device: Device, offset: int) -> None:
    """Wherever it begins in its group; what was there before counts no more, nor what only the whole of it held."""
    net = Net(device, {"first": (1, offset), "w": (20, 31), "b": (20,), "last": (3, 3)})
    w = net.grad("w")
    net.layer("first", m=2)
    net.layer("w", m=4)
    net.layer("last", m=2)
    for columns, bias in (((0, 30), net.grad("b")), ((30, 31), None)):
        part = w.columns(*columns)
        linear.backward_dw(net.program, net.data(9, 20), net.data(9, part.shape[1]), part, bias)
    found = net.check()
    assert len(found["norms"]) == 1


def test_vectors_and_columns(device: Device) -> None:
    net = Net(device, {"gain": (77,), "bias": (5,)}, {"w": (3, 4)})
    for name, rows in (("gain", 19), ("bias", 1)):
        glunorm.columnsum(net.program, net.data(rows, *net.grad(name).shape), net.grad(name))
    net.layer("w", m=6)
    net.check()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_quantile_networks(device: Device, precision: str) -> None:
    sizes = iqn_fused.Sizes(20, 24, 40, 5)
    shapes = {"w_phi": (24, 20), "b_phi": (24,), "w_iq1": (40, 24), "b_iq1": (40,), "w_iq2": (5, 40), "b_iq2": (5,)}
    net = Net(device, shapes, precision=precision)
    weights = iqn_fused.Weights(**{name: net.data(*shape) for name, shape in shapes.items()})
    assert weights.sizes == sizes
    tau = net.program.tensor("tau", (3, 16), arena="inputs", data=net.rng.random((3, 16)).astype(np.float32))
    dtheta, hidden = net.data(48, 5), net.data(48, 40)
    own = iqn_fused.WeightGradients(**{name: net.grad(name) for name in ("w_phi", "b_phi", "w_iq1", "b_iq1")})
    iqn_fused.backward(net.program, dtheta, tau, net.data(3, 24), weights, hidden, gradients=own, name="iqn")
    linear.backward_dw(net.program, dtheta, hidden, net.grad("w_iq2"), net.grad("b_iq2"))
    net.check()


def test_quantile_networks_by_warpgroups(warpgroups: Device) -> None:
    """One record reports the squares of all of their gradients."""
    shapes = {
        "w_phi": (256, 32),
        "b_phi": (256,),
        "w_iq1": (128, 256),
        "b_iq1": (128,),
        "w_iq2": (13, 128),
        "b_iq2": (13,),
    }
    net = Net(warpgroups, shapes, precision="tf32")
    weights = iqn_fused.Weights(**{name: net.data(*shape) for name, shape in shapes.items()})
    tau = net.program.tensor("tau", (9, 8), arena="inputs", data=net.rng.random((9, 8)).astype(np.float32))
    dtheta, hidden = net.data(72, 16).columns(0, 13), net.data(72, 128)
    own = iqn_fused.WeightGradients(**{name: net.grad(name) for name in shapes})
    iqn_fused.backward(
        net.program, dtheta, tau, net.data(9, 256), weights, hidden, gradients=own, warpgroups=True, name="iqn"
    )
    net.check()


@pytest.mark.parametrize("slices", [1, 2])
def test_the_last_of_several_writers_reports(device: Device, slices: int) -> None:
    net = Net(device, {"w": (20, 30), "b": (20,), "gain": (9,)})
    net.layer("w", "b", m=12)
    net.layer("w", "b", m=30, accumulate=True, slices=slices)
    for accumulate in (False, True):
        glunorm.columnsum(net.program, net.data(5, 9), net.grad("gain"), accumulate=accumulate)
    net.check()


def test_a_gradient_that_is_added_to_what_the_host_has_written(device: Device) -> None:
    net = Net(device, {"w": (20, 30), "b": (20,)})
    net.layer("w", "b", m=12, accumulate=True)
    found = net.check(host={"w": 100.0, "b": -100.0})
    assert found["norms"][0] > 100 * np.sqrt(600)


@pytest.mark.parametrize("case", ["host", "shared bias", "part", "rows", "a part twice", "two groups"])
def test_groups_whose_kernels_cannot_report_have_records_of_their_own(device: Device, case: str) -> None:
    """They count every gradient once; the other groups go without."""
    sick = {"w": (20, 30), "b": (20,), "v": (20, 9)}
    net = Net(device, sick, {"w1": (8, 8)}, {"w2": (8, 8), "b2": (20,)} if case == "two groups" else {"w2": (8, 8)})
    net.layer("w1", m=5)
    net.layer("w2", m=5)
    if case == "two groups":
        net.layer("w", "b2", m=12)
        net.layer("v", "b", m=3)
    elif case == "shared bias":
        net.layer("w", "b", m=12)
        net.layer("v", "b", m=3, accumulate=True)
    elif case == "host":
        net.layer("w", "b", m=12)
    elif case == "a part twice":  # as many numbers as the whole has, before the other part is met
        net.layer("w", "b", m=12)
        v = net.grad("v")
        for columns, accumulate in (((0, 4), False), ((4, 9), False), ((5, 9), True)):
            part = v.columns(*columns)
            x = net.data(6, part.shape[1])
            linear.backward_dw(net.program, net.data(6, 20), x, part, accumulate=accumulate)
    else:
        net.layer("w", "b", m=12)
        net.layer("v", m=3)
        part = net.grad("v").rows(2, 7) if case == "rows" else net.grad("v").columns(1, 4)
        linear.backward_dw(net.program, net.data(6, part.shape[0]), net.data(6, part.shape[1]), part, accumulate=True)
    found = net.check(fallback=True, host={"v": 2.0} if case == "host" else None)
    labels = [record.label for record in net.program.launches if record.family.name == "norm"]
    assert labels == ["norm.trunk", *(["norm.branches"] if case == "two groups" else [])]
    assert found["moved"] == [True] * 3


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-17, 1e-15, 1e15, 1e17, 1e19, 1e36])
@pytest.mark.parametrize("slices", [1, 2])
def test_norms_of_any_size(device: Device, scale: float, slices: int) -> None:
    """Squares that a thread adds up in float, and those that it may not."""
    net = Net(device, {"w": (40, 70), "b": (40,), "gain": (40,)})
    net.layer("w", "b", m=30, dy={"scale": scale, "rows": 20}, slices=slices)
    glunorm.columnsum(net.program, net.data(4, 40, scale=scale), net.grad("gain"))
    assert net.check()["moved"] == [True]


def test_a_norm_beyond_float_is_no_fault(device: Device) -> None:
    net = Net(device, {"w": (64, 64)})
    net.layer("w", m=1, dy={"scale": 2e37})
    found = net.run()
    assert found["mask"] == 0
    assert found["largest"][0] < np.inf
    assert found["expected"][0] > np.finfo(np.float32).max
    assert found["norms"][0] == np.inf
    assert found["moved"] == [True]


@pytest.mark.parametrize("precision", linear.PRECISIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("slices", [1, 2])
def test_what_is_not_finite_stops_every_group(device: Device, precision: str, bad: float, slices: int) -> None:
    net = Net(device, {"w": (20, 30), "b": (20,)}, {"w1": (8, 8)}, {"gain": (7,)}, precision=precision)
    net.layer("w", "b", m=12, dy={"bad": bad}, slices=slices)
    net.layer("w1", m=5)
    glunorm.columnsum(net.program, net.data(3, 7, bad=bad), net.grad("gain"))
    found = net.run(times=2)
    assert found["mask"] == 0b101
    assert found["moved"] == [False] * 3
    assert not np.isfinite(found["norms"][[0, 2]]).any()
    assert_close(found["norms"][1:2], found["expected"][1:2], factor=4)
    assert "norm" not in found["nodes"]


def test_many_partial_sums(device: Device) -> None:
    """More than the blocks of Adam fetch at once, of which one group has few."""
    net = Net(device, {"w": (330, 1024)}, {"w1": (3, 2)}, {"w2": (64, 64)})
    net.layer("w1", m=5)
    net.layer("w", m=2, tile="16x16")
    net.layer("w2", m=2)
    found = net.check()
    assert net.program.storages["optimizer.partials"].nbytes > 8 * 1024
    assert found["moved"] == [True] * 3
