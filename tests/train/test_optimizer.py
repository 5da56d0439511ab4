"""Norms, the non-finite guard, clipping and Adam against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.signals import SLOTS, SignalMap
from fxengine.train.groups import ParamGroup, ParamSpec
from fxengine.train.optimizer import Hyper, optimize, reference_adam, reference_norms
from fxengine.train.targets import TargetGroup, reference_polyak
from tests.support import assert_close

GROUPS = {0: "trunk", 7: "curiosity", 8: "aux_trunk", 10: "decoders"}
SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [(17, 9), (17,), (3, 683)],
    7: [(1, 1)],
    8: [(64, 64), (64,), (33, 128), (5,)],
    10: [(2,), (1, 3)],
}
BUFFERS = ("params", "grads", "m", "v")


class Case:
    """An optimizer over some groups, its buffers filled at random, run as often as wanted."""

    def __init__(
        self,
        device: Device,
        *,
        shapes: Mapping[int, Sequence[tuple[int, ...]]] = SHAPES,
        signals: Mapping[str, float] | None = None,
        t: int = 0,
        seed: int = 0,
        followed: Sequence[int] = (),
        later: Sequence[str] = (),
    ) -> None:
        program = Program(device.target)
        self.map = SignalMap({g: GROUPS.get(g, f"g{g}") for g in shapes})
        values = np.zeros(SLOTS, np.float32)
        for slot in self.map.slots.values():
            values[slot.index] = slot.default
        for name, value in (signals or {}).items():
            for slot in self.map.expand(name):
                values[slot.index] = value
        self.values = values
        self.snapshot = program.tensor("signals", (SLOTS,), arena="state", data=values)
        self.counters = program.tensor(
            "counters", (4,), np.uint64, arena="state", data=np.array([t, t, 0, 0], np.uint64)
        )
        self.groups = [
            ParamGroup(program, self.map.groups[g], g, [ParamSpec(f"g{g}.{i}", s) for i, s in enumerate(specs)])
            for g, specs in shapes.items()
        ]
        self.norms = {g.name: program.tensor(f"norm.{g.name}", (1,)) for g in self.groups}
        self.targets = [TargetGroup(program, g) for g in self.groups if g.index in followed]
        self.later = later
        self.guard = optimize(
            program,
            self.groups,
            signal=self._signal,
            counters=self.counters,
            norms=self.norms,
            targets=self.targets,
            later=later,
        )
        self.plan = Plan(program, device, guard=True)
        self.stream = device.stream()
        rng = np.random.default_rng(seed)
        for group in self.groups:
            for name in BUFFERS:
                self.fill(group, name, rng)
        for target in self.targets:
            self.plan.buffer(target.values).write(rng.normal(size=target.values.size).astype(np.float32))

    def _signal(self, name: str) -> Tensor:
        index = self.map.slot(name).index
        return self.snapshot.rows(index, index + 1)

    def fill(self, group: ParamGroup, name: str, rng: np.random.Generator) -> None:
        """Random contents with zero padding; v is not negative."""
        whole = np.zeros(group.size, np.float32)
        for p in group.parameters:
            data = rng.normal(size=p.shape)
            p.cut(whole)[...] = data**2 if name == "v" else data
        self.plan.buffer(getattr(group, name)).write(whole)

    def put(self, name: str, value: float, *, at: int = -1, which: str = "grads") -> None:
        """Overwrite one element of a parameter's buffer."""
        group, p = next((g, p) for g in self.groups for p in g.parameters if p.name == name)
        whole = self.plan.buffer(getattr(group, which)).read()
        p.cut(whole).flat[at] = value
        self.plan.buffer(getattr(group, which)).write(whole)

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.plan.run(stream=self.stream)
        self.stream.synchronize()
        self.plan.check_guards()

    def state(self) -> dict[str, dict[str, np.ndarray]]:
        """Every tensor's four arrays."""
        result: dict[str, dict[str, np.ndarray]] = {}
        for group in self.groups:
            whole = {name: self.plan.buffer(getattr(group, name)).read() for name in BUFFERS}
            for p in group.parameters:
                result[p.name] = {name: p.cut(array) for name, array in whole.items()}
        return result

    def bits(self) -> dict[str, bytes]:
        """Whole buffers, padding included."""
        buffers = {f"{g.name}.{name}": getattr(g, name) for g in self.groups for name in BUFFERS}
        buffers |= {f"{t.name}.target": t.values for t in self.targets}
        return {name: self.plan.buffer(tensor).read().tobytes() for name, tensor in buffers.items()}

    def followers(self) -> dict[str, np.ndarray]:
        """Every target tensor."""
        return {name: self.plan.buffer(t[name]).read() for t in self.targets for name in t}

    def read(self, tensor: Tensor) -> Any:
        return self.plan.buffer(tensor).read()

    def hyper(self, group: ParamGroup, scale: float) -> Hyper:
        def value(name: str) -> float:
            return float(self.values[self.map.slot(name).index])

        return Hyper(
            lr=value(f"lr.{group.name}"),
            scale=scale,
            beta1=value("beta1"),
            beta2=value("beta2"),
            eps=value("adam_eps"),
            weight_decay=value("weight_decay"),
            floor=value("eps_clamp_floor"),
            weight=value(f"bound.weight.{group.name}"),
            m=value(f"bound.adam_m.{group.name}"),
            v=value(f"bound.adam_v.{group.name}"),
            grad=value(f"bound.grad.{group.name}"),
        )

    def check(self, before: dict[str, dict[str, np.ndarray]], t: int) -> None:
        """Norms, scales and every updated tensor against float64."""
        grads = [np.concatenate([before[p.name]["grads"].ravel() for p in g.parameters]) for g in self.groups]
        clips = [float(self.values[self.map.slot(f"clip.{g.name}").index]) for g in self.groups]
        norms, scales = reference_norms(grads, clips)
        assert_close([self.read(self.norms[g.name])[0] for g in self.groups], norms, factor=1, name="norms")
        assert_close(self.read(self.guard.scales), scales, factor=1, name="scales")
        assert self.read(self.guard.skip)[0] == self.read(self.guard.group_mask)[0] == 0
        after = self.state()
        for group, scale in zip(self.groups, scales, strict=True):
            hyper = self.hyper(group, float(scale))
            for p in group.parameters:
                old, new = before[p.name], after[p.name]
                w, m, v = reference_adam(old["params"], old["grads"], old["m"], old["v"], t=t, hyper=hyper)
                assert_close(new["m"], m, factor=8, atol=1e-6, name=f"{p.name} m")
                assert_close(new["v"], v, factor=8, atol=1e-6, name=f"{p.name} v")
                assert_close(new["params"], w, factor=8, atol=1e-6, name=f"{p.name} w")
                moved, expected = new["params"].astype(np.float64) - old["params"], w - old["params"]
                slack = 2.0**-24 * (np.abs(old["params"]) + np.abs(new["params"]))
                error = np.maximum(0, np.abs(moved - expected) - slack) / max(np.abs(expected).max(), 1e-6)
                assert error.max() <= 1e-5, f"{p.name}: update off by {error.max()}"
                np.testing.assert_array_equal(new["grads"].view(np.uint32), old["grads"].view(np.uint32))

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stream.close()
        self.plan.close()


@pytest.mark.parametrize("t", [0, 1, 99, 2**32 + 5])
def test_defaults(device: Device, t: int) -> None:
    with Case(device, t=t) as case:
        before = case.state()
        case.run()
        case.check(before, t + 1)
        assert [n.name for n in case.plan.nodes] == ["norm", "adam"]


@settings(max_examples=12)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 5, 1023, 1024, 1025, 4095, 4096, 4097, 9000]), min_size=1, max_size=4),
    matrix=st.booleans(),
    seed=st.integers(0, 100),
)
def test_sizes_around_tile_edges(device: Device, sizes: list[int], matrix: bool, seed: int) -> None:
    shapes = {g: [(1, n) if matrix else (n,)] for g, n in enumerate(sizes)}
    with Case(device, shapes=shapes, signals={"weight_decay": 0.1, "clip": 1e9}, seed=seed) as case:
        before = case.state()
        case.run()
        case.check(before, 1)


@settings(max_examples=15)
@given(
    beta1=st.sampled_from([0.0, 0.5, 0.9]),
    beta2=st.sampled_from([0.0, 0.9, 0.999]),
    eps=st.sampled_from([1e-8, 1e-3]),
    decay=st.sampled_from([0.0, 0.1]),
    floor=st.sampled_from([0.0, 0.2, 1.0]),
    bounds=st.tuples(*[st.sampled_from([0.0, 0.05, 0.5]) for _ in range(4)]),
    clip=st.sampled_from([0.0, 0.01, 1.0, 1e6]),
    t=st.sampled_from([0, 9]),
)
def test_every_scalar_counts(
    device: Device,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    floor: float,
    bounds: tuple[float, float, float, float],
    clip: float,
    t: int,
) -> None:
    shapes = {0: [(9, 5), (9,)], 8: [(3, 7), (2,)]}
    families = dict(zip(("weight", "adam_m", "adam_v", "grad"), bounds, strict=True))
    signals = {
        "beta1": beta1,
        "beta2": beta2,
        "adam_eps": eps,
        "weight_decay": decay,
        "eps_clamp_floor": floor,
        "clip": clip,
        "lr.trunk": 0.02,
        "lr.aux_trunk": 0.005,
        "clip.trunk": clip * 0.5,
        **{f"bound.{family}.{group}": b for family, b in families.items() for group in ("trunk", "aux_trunk")},
    }
    with Case(device, shapes=shapes, signals=signals, t=t) as case:
        before = case.state()
        case.run()
        case.check(before, t + 1)


def test_bounds_are_those_of_the_own_group_and_vectors_stay_free(device: Device) -> None:
    shapes = {0: [(4, 4), (4,)], 8: [(4, 4), (4,)]}
    with Case(device, shapes=shapes, signals={"eps_clamp_floor": 0.0, "bound.weight.aux_trunk": 0.25}) as case:
        case.run()
        after = case.state()
        assert np.abs(after["g8.0"]["params"]).max() == np.float32(0.25)
        for free in ("g0.0", "g0.1", "g8.1"):
            assert np.abs(after[free]["params"]).max() > 0.3


def test_a_known_bound_is_never_below_the_floor(device: Device) -> None:
    shapes = {0: [(64, 64)]}
    with Case(device, shapes=shapes, signals={"eps_clamp_floor": 1.0, "bound.weight.trunk": 1e-3}) as case:
        case.run()
        assert np.abs(case.state()["g0.0"]["params"]).max() == 1.0


@pytest.mark.parametrize("tau", [0.005, 0.4, 1.0])
@pytest.mark.parametrize("later", [(), ("g0.0", "g8.3")])
def test_targets_follow_the_new_parameters(device: Device, tau: float, later: Sequence[str]) -> None:
    """Those of some groups, except the tensors that are left to a later record."""
    with Case(device, signals={"polyak_tau": tau, "lr": 0.1}, followed=(0, 8, 10), later=later) as case:
        assert [n.name for n in case.plan.nodes] == ["norm", "adam"]
        before, old = case.state(), case.followers()
        assert {name[:3] for name in old} == {"g0.", "g8.", "g10"}
        case.run()
        case.check(before, 1)
        after, new = case.state(), case.followers()
        for name, moved in new.items():
            expected = old[name] if name in later else reference_polyak(old[name], after[name]["params"], tau)
            assert_close(moved, expected, factor=2, atol=0.0 if name in later else 1e-6, name=name)
            assert name in later or np.abs(moved - old[name]).max() > 1e-4


def test_a_tau_of_one_copies_the_new_parameters_bit_for_bit(device: Device) -> None:
    """Also where the difference of both would lose them."""
    with Case(device, signals={"polyak_tau": 1.0, "lr": 0.1}, followed=(0, 8), later=("g8.3",)) as case:
        for target in case.targets:
            case.plan.buffer(target.values).write(case.read(target.values) * np.float32(1e30))
        old = case.followers()
        case.run()
        after = case.state()
        for name, new in case.followers().items():
            expected = old[name] if name == "g8.3" else after[name]["params"]
            assert new.tobytes() == expected.tobytes(), name


def test_targets_change_no_bit_of_the_rest(device: Device) -> None:
    with Case(device) as alone, Case(device, signals={"polyak_tau": 0.3}, followed=(0, 10)) as case:
        alone.run()
        case.run()
        with_targets = case.bits()
        assert all(with_targets[name] == bits for name, bits in alone.bits().items())


@pytest.mark.parametrize("fault", [True, False])
def test_a_skipped_step_or_no_tau_moves_no_target(device: Device, fault: bool) -> None:
    with Case(device, signals={"polyak_tau": 0.5 if fault else 0.0}, followed=(0, 8)) as case:
        if fault:
            case.put("g10.0", np.nan)  # of a group without targets
        else:
            case.put("g8.0", np.inf, which="params")
        before = case.bits()
        case.run()
        after = case.bits()
        changed = {name for name in after if after[name] != before[name]}
        assert changed if not fault else not changed
        assert not {name for name in changed if name.endswith("target")}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["g0.2", "g7.0", "g8.1", "g10.0"])
def test_one_bad_gradient_stops_every_group(device: Device, name: str, bad: float) -> None:
    with Case(device) as case:
        case.put(name, bad)
        before = case.bits()
        case.run(2)
        assert case.bits() == before
        group = int(name[1:].split(".")[0])
        assert case.read(case.guard.skip)[0] == 1
        assert int(case.read(case.guard.group_mask)[0]) == 1 << group
        case.put(name, 0.5)  # the guard lets go at once
        clean = case.state()
        case.run()
        case.check(clean, 1)


def test_the_mask_names_every_group(device: Device) -> None:
    with Case(device) as case:
        case.put("g7.0", np.nan)
        case.put("g10.1", np.inf, at=0)
        case.run()
        assert int(case.read(case.guard.group_mask)[0]) == 1 << 7 | 1 << 10
        assert np.isfinite(case.read(case.norms["trunk"])[0])
        assert np.isnan(case.read(case.norms["curiosity"])[0])
        assert np.isposinf(case.read(case.norms["decoders"])[0])


def test_a_large_finite_norm_is_no_fault(device: Device) -> None:
    """Its square, and even the norm itself, leaves float32; the update is clipped, not skipped."""
    with Case(device, shapes={0: [(4, 8)], 8: [(3,)]}) as case:
        whole = np.full(32, 3e38, np.float32)
        case.plan.buffer(case.groups[0].grads).write(whole)
        before = case.state()
        case.run()
        assert case.read(case.guard.skip)[0] == 0
        assert np.isposinf(case.read(case.norms["trunk"])[0])  # 1.7e39
        _, scales = reference_norms([whole], [1.0])
        assert_close(case.read(case.guard.scales)[:1], scales, factor=4096, atol=0.0)  # a denormal
        after = case.state()["g0.0"]
        m = 0.9 * before["g0.0"]["m"].astype(np.float64) + 0.1 / np.sqrt(32)
        assert_close(after["m"], m, factor=4096)


@pytest.mark.parametrize("scale", [1e-30, 1e-17, 1e-15, 1.0, 1e17, 1e19])
def test_norms_of_any_size(device: Device, scale: float) -> None:
    """Squares that a thread adds up in float, and those that it may not."""
    with Case(device, shapes={0: [(5000,)]}) as case:
        rng = np.random.default_rng(3)
        grads = (rng.normal(size=5000) * np.where(np.arange(5000) % 7, scale, 1e-3 * scale)).astype(np.float32)
        grads[1200:1300] = 0
        case.plan.buffer(case.groups[0].grads).write(grads)
        case.run()
        norms, _ = reference_norms([grads], [1.0])
        assert_close(case.read(case.norms["trunk"]), norms, factor=1, atol=0.0)


def test_tiny_gradients_are_counted(device: Device) -> None:
    with Case(device, shapes={0: [(4,)]}) as case:
        case.plan.buffer(case.groups[0].grads).write(np.full(4, 1e-30, np.float32))
        case.run()
        assert_close(case.read(case.norms["trunk"]), np.array([2e-30]), atol=0.0, factor=4)
        assert case.read(case.guard.scales)[0] == 1.0
    with Case(device, shapes={0: [(4,)]}, signals={"clip": 1e-6}) as case:
        case.plan.buffer(case.groups[0].grads).write(np.full(4, 1e-6, np.float32))
        case.run()
        assert_close(case.read(case.guard.scales), np.array([1 / 3]), atol=0.0)  # 1e-6 / (2e-6 + 1e-6)


def test_padding_stays_zero(device: Device) -> None:
    with Case(device, signals={"weight_decay": 0.5}) as case:
        case.run(3)
        for group in case.groups:
            padding = group.padding()
            assert padding.size == group.size - sum(p.value.size for p in group.parameters)
            for name in BUFFERS:
                whole = case.read(getattr(group, name))
                np.testing.assert_array_equal(whole[padding].view(np.uint32), 0)


def test_rows_start_at_multiples_of_four_floats(device: Device) -> None:
    shapes = [(128, 257), (3,), (5, 3), (2, 8), (1, 1)]
    with Case(device, shapes={0: shapes}) as case:
        group = case.groups[0]
        strides = [(p.offset, p.end, p.value.ld) for p in group.parameters]
        assert strides == [(0, 33280, 260), (33280, 33283, 1), (33284, 33304, 4), (33304, 33320, 8), (33320, 33324, 4)]
        assert group.size == 33324
        for p in group.parameters:
            for view in (p.value, p.grad, p.m, p.v):
                assert (view.shape, view.offset, view.ld) == (p.shape, p.offset, p.value.ld)
        whole = case.read(group.params)
        for p in group.parameters:
            np.testing.assert_array_equal(case.read(p.value), p.cut(whole))
            assert p.cut(whole).shape == p.shape
        assert sorted(group.padding()) == [
            *(260 * row + column for row in range(128) for column in (257, 258, 259)),
            33283,
            *(33284 + 4 * row + 3 for row in range(5)),
            *range(33321, 33324),
        ]


def test_same_bits_twice_and_in_a_graph(device: Device) -> None:
    results = []
    for captured in (False, False, True):
        with Case(device) as case:
            if captured:
                with case.plan.capture(stream=case.stream) as graph:
                    for _ in range(3):
                        graph.launch(stream=case.stream)
                    case.stream.synchronize()
            else:
                case.run(3)
            results.append((case.bits(), case.read(case.guard.scales).tobytes()))
    assert results[0] == results[1] == results[2]


def test_groups_are_checked(device: Device) -> None:
    program = Program(device.target)
    groups = [ParamGroup(program, name, 3, [ParamSpec(name, (2,))]) for name in ("a", "b")]
    counters = program.tensor("counters", (4,), np.uint64)
    signal = program.tensor("signal", (1,))
    norms = {g.name: program.tensor(f"n.{g.name}", (1,)) for g in groups}
    with pytest.raises(ValueError, match=r"distinct indices.*\[3, 3\]"):
        optimize(program, groups, signal=lambda name: signal, counters=counters, norms=norms)
    with pytest.raises(ValueError, match="distinct indices"):
        optimize(program, [], signal=lambda name: signal, counters=counters, norms=norms)
    good = ParamGroup(program, "c", 1, [ParamSpec("c", (2,))])
    for targets, later in (([TargetGroup(program, groups[0])], ()), ([TargetGroup(program, good)], ("b",))):
        with pytest.raises(ValueError, match=r"no updated group or target \['[ab]'\]; targets are those of"):
            optimize(
                program,
                [good],
                signal=lambda name: signal,
                counters=counters,
                norms=norms,
                targets=targets,
                later=later,
            )
