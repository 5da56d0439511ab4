"""Oracles of the bound slots against NumPy's sort: the percentile bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.signals import BOUND_FAMILIES, GROUPS, SLOTS, SignalMap
from fxengine.train.groups import ParamGroup, ParamSpec
from fxengine.train.optimizer import Guard, optimize
from fxengine.train.oracles import oracles, rank, reference_oracle, reference_p99, reference_taken
from tests.reference import optimizer as step_reference
from tests.support import assert_close

BUFFERS = dict(zip(BOUND_FAMILIES, ("params", "m", "v", "grads"), strict=True))
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "trunk": [(17, 9), (17,), (3, 683)],
    "curiosity": [(1, 1)],
    "aux_trunk": [(64, 130), (65,), (2,), (5,)],
    "decoders": [(2,), (1, 3)],
}
#: What stands between the tensors: it must not count, whatever it is.
POISON = np.array([np.nan, np.inf, -1e30, 0.0], np.float32)


class Case:
    """The oracles of some groups on given data; with `adam`, behind a whole optimizer."""

    def __init__(
        self,
        device: Device,
        *,
        shapes: Mapping[str, Sequence[tuple[int, ...]]] = SHAPES,
        signals: Mapping[str, float] | None = None,
        scales: Sequence[float] | None = None,
        every: int = 1,
        t: int = 0,
        skip: int = 0,
        seed: int = 0,
        adam: bool = False,
    ) -> None:
        program = Program(device.target)
        self.map = SignalMap()
        values = np.zeros(SLOTS, np.float32)
        for slot in self.map.slots.values():
            values[slot.index] = slot.default
        for name, value in {"oracle_headroom": 1.0, **(signals or {})}.items():
            for slot in self.map.expand(name):
                values[slot.index] = value
        self.values = values
        self.snapshot = program.tensor("signals", (SLOTS,), arena="state", data=values)
        start = np.array([9, t, 0, 0], np.uint64)
        self.counters = program.tensor("counters", (4,), np.uint64, arena="state", data=start)
        self.groups = [
            ParamGroup(program, name, GROUPS.index(name), [ParamSpec(f"{name}.{i}", s) for i, s in enumerate(specs)])
            for name, specs in shapes.items()
        ]
        self.scales = np.array(scales or [1.0] * len(self.groups), np.float32)
        if adam:
            norms = {g.name: program.tensor(f"norm.{g.name}", (1,)) for g in self.groups}
            self.guard = optimize(program, self.groups, signal=self._signal, counters=self.counters, norms=norms)
        else:
            flag = np.array([skip], np.uint32)
            self.guard = Guard(
                scales=program.tensor("scales", (len(self.groups),), arena="state", data=self.scales),
                skip=program.tensor("skip", (1,), np.uint32, arena="state", data=flag),
                group_mask=program.tensor("mask", (1,), np.uint64),
            )
        self.absent = oracles(
            program,
            self.groups,
            signal=self._signal,
            counters=self.counters,
            guard=self.guard,
            every=every,
            known=GROUPS,
        )
        self.plan = Plan(program, device, guard=True)
        self.stream = device.stream()
        rng = np.random.default_rng(seed)
        for group in self.groups:
            for family in BOUND_FAMILIES:
                data = rng.normal(size=sum(p.value.size for p in group.parameters)).astype(np.float32)
                self.put(group, family, data**2 if family == "adam_v" else data, pad=0.0 if adam else None)

    def _signal(self, name: str) -> Tensor:
        index = self.map.slot(name).index
        return self.snapshot.rows(index, index + 1)

    def put(self, group: ParamGroup, family: str, data: np.ndarray, *, pad: float | None = None) -> None:
        """Write the elements of a group's tensors, one after another; poison between them unless `pad` is given."""
        whole = np.resize(POISON, group.size) if pad is None else np.full(group.size, pad, np.float32)
        done = 0
        for p in group.parameters:
            p.cut(whole)[...] = data[done : done + p.value.size].reshape(p.shape)
            done += p.value.size
        self.plan.buffer(getattr(group, BUFFERS[family])).write(whole)

    def elements(self, group: ParamGroup, family: str) -> np.ndarray:
        whole = self.plan.buffer(getattr(group, BUFFERS[family])).read()
        return np.concatenate([p.cut(whole).ravel() for p in group.parameters])

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.plan.run(stream=self.stream)
        self.stream.synchronize()
        self.plan.check_guards()

    def read(self, tensor: Tensor | str) -> Any:
        return self.plan.buffer(tensor).read()

    def slot(self, family: str, group: str) -> np.float32:
        return self.read(self.snapshot)[self.map.slot(f"bound.{family}.{group}").index]

    def set(self, name: str, value: float) -> None:
        """Change a signal between two runs."""
        self.values = self.read(self.snapshot)
        self.values[self.map.slot(name).index] = value
        self.plan.buffer(self.snapshot).write(self.values)

    def idle(self) -> bool:
        """Whether the scratch is as a run must leave it."""
        return not self.read("oracles.histograms").any() and not self.read("oracles.tickets").any()

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stream.close()
        self.plan.close()


def _p99(x: np.ndarray) -> np.float32:
    """The definition, in float32 and thus without rounding."""
    n = x.size
    return np.sort(np.abs(x.astype(np.float32)).ravel())[(99 * n + 99) // 100 - 1]


def _split(n: int, tensors: int) -> list[tuple[int, ...]]:
    """`n` elements in some tensors, most of whose sizes are no multiples of four."""
    sizes = [n // tensors + (1 if i < n % tensors else 0) for i in range(tensors)]
    return [(s,) for s in sizes if s]


def _same(actual: np.float32, expected: np.float32, name: str) -> None:
    assert actual.tobytes() == np.float32(expected).tobytes(), f"{name}: got {actual!r}, expected {expected!r}"


def test_every_group_and_family(device: Device) -> None:
    with Case(device) as case:
        assert [n.name for n in case.plan.nodes] == ["oracle"] * 3
        case.run()
        for group in case.groups:
            for family in BOUND_FAMILIES:
                _same(case.slot(family, group.name), _p99(case.elements(group, family)), f"{family} {group.name}")
        assert case.idle()
        touched = {case.map.slot(f"bound.{f}.{g}").index for f in BOUND_FAMILIES for g in SHAPES}
        others = sorted(set(range(SLOTS)) - touched)
        np.testing.assert_array_equal(case.read(case.snapshot)[others], case.values[others])


def test_absent_groups_are_named(device: Device) -> None:
    with Case(device) as case:
        assert case.absent == tuple(g for g in GROUPS if g not in SHAPES)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "ties": lambda rng, n: rng.integers(-3, 4, size=n) * 0.5,
    "zeros": lambda rng, n: np.zeros(n),
    "mostly zeros": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.005),
    "negative zeros": lambda rng, n: np.full(n, -0.0),
    "denormals": lambda rng, n: rng.integers(-200, 200, size=n) * 2.0**-149,
    "constant": lambda rng, n: np.full(n, -1.2345),
    "all sizes": lambda rng, n: rng.normal(size=n) * 2.0 ** rng.integers(-149, 127, size=n),
    "neighbours": lambda rng, n: 1.0 + rng.integers(0, 4096, size=n) * 2.0**-23,
    "largest": lambda rng, n: rng.choice([3.4028234663852886e38, -3.4e38, 1.0], size=n),
}


@settings(max_examples=60)
@given(
    n=st.sampled_from([1, 2, 3, 4, 5, 99, 100, 101, 199, 200, 201, 8191, 8192, 8193, 20001]),
    tensors=st.integers(1, 5),
    kinds=st.tuples(*[st.sampled_from(sorted(KINDS)) for _ in range(4)]),
    seed=st.integers(0, 1000),
)
def test_any_data(device: Device, n: int, tensors: int, kinds: tuple[str, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    with Case(device, shapes={"iqn": _split(n, tensors)}) as case:
        data = {f: KINDS[kind](rng, n).astype(np.float32) for f, kind in zip(BOUND_FAMILIES, kinds, strict=True)}
        for family, x in data.items():
            case.put(case.groups[0], family, x)
        case.run()
        for family, x in data.items():
            _same(case.slot(family, "iqn"), _p99(x), f"{family} {kinds}")


@pytest.mark.parametrize("n", [1, 2, 99, 100, 101, 65537])
def test_lengths(device: Device, n: int) -> None:
    with Case(device, shapes={"trunk": _split(n, 3), "iqn": [(n,)]}, seed=n) as case:
        case.run()
        for group in case.groups:
            for family in BOUND_FAMILIES:
                _same(case.slot(family, group.name), _p99(case.elements(group, family)), f"{family} {group.name}")


def test_a_million_elements(device: Device) -> None:
    n = 1_000_001
    with Case(device, shapes={"trunk": [(n - 3,), (3,)]}) as case:
        case.run()
        for family in BOUND_FAMILIES:
            _same(case.slot(family, "trunk"), _p99(case.elements(case.groups[0], family)), family)


def test_the_rank_needs_more_than_32_bits() -> None:
    assert [rank(n) for n in (1, 2, 99, 100, 101, 199, 200)] == [0, 1, 98, 98, 99, 197, 197]
    assert rank(10**8) == 99 * 10**6 - 1
    assert rank(10**11) == 99 * 10**9 - 1


@pytest.mark.parametrize("at", [97, 98, 99])
def test_neighbouring_ranks_are_told_apart(device: Device, at: int) -> None:
    """Of 100 values the 99th: one more or one fewer large one is seen."""
    x = np.ones(100, np.float32)
    x[at:] = 2.0
    with Case(device, shapes={"trunk": [(100,)]}) as case:
        case.put(case.groups[0], "weight", x)
        case.run()
        assert case.slot("weight", "trunk") == (2.0 if at <= 98 else 1.0)


def test_the_slot_moves(device: Device) -> None:
    signals = {"oracle_headroom": 4.0, "oracle_beta": 0.05}
    with Case(device, shapes={"trunk": [(50, 7)]}, signals=signals) as case:
        expected = dict.fromkeys(BOUND_FAMILIES, 0.0)
        rng = np.random.default_rng(5)
        for _ in range(6):
            for family in BOUND_FAMILIES:
                x = rng.normal(size=350) * rng.uniform(0.1, 3.0)
                case.put(case.groups[0], family, (x**2 if family == "adam_v" else x).astype(np.float32))
                x = case.elements(case.groups[0], family)
                if family == "grad":
                    x = reference_taken(x, scale=1.0, slot=float(case.slot("grad", "trunk")), floor=1.0)
                beta = float(np.float32(0.05))
                expected[family] = reference_oracle(x, expected[family], headroom=4.0, beta=beta)
            case.run()
            for family, value in expected.items():
                assert_close(case.slot(family, "trunk"), value, factor=8, atol=0.0, name=family)


@settings(max_examples=25)
@given(
    slot=st.sampled_from([0.0, 0.01, 0.5, 2.0, 1e30]),
    floor=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([1.0, 0.37, 1e-3, 0.0, 1e-40]),
    beta=st.sampled_from([0.0, 0.25, 1.0]),
    headroom=st.sampled_from([0.0, 1.0, 4.0]),
)
def test_gradients_as_adam_took_them(
    device: Device, slot: float, floor: float, scale: float, beta: float, headroom: float
) -> None:
    signals = {
        "eps_clamp_floor": floor,
        "oracle_beta": beta,
        "oracle_headroom": headroom,
        **{f"bound.{f}.trunk": slot for f in BOUND_FAMILIES},
    }
    with Case(device, shapes={"trunk": [(11, 13), (3,)]}, signals=signals, scales=[scale]) as case:
        case.run()
        for family in BOUND_FAMILIES:
            x = case.elements(case.groups[0], family)
            old = float(np.float32(slot))
            if family == "grad":
                x = reference_taken(x, scale=float(case.scales[0]), slot=old, floor=float(np.float32(floor)))
            expected = reference_oracle(x, old, headroom=headroom, beta=beta)
            atol = float(np.float32(1e-7)) * max(old, abs(expected)) + 1e-44
            assert_close(case.slot(family, "trunk"), expected, factor=8, atol=atol, name=family)


def test_behind_the_optimizer(device: Device) -> None:
    """Three steps of Adam with bounds that bind, against the float64 reference of the whole step."""
    signals = {"oracle_headroom": 0.9, "oracle_beta": 0.3, "eps_clamp_floor": 0.01, "clip": 30.0, "lr": 0.05}
    with Case(device, signals=signals, adam=True) as case:
        assert [n.name for n in case.plan.nodes] == ["norm", "adam", *["oracle"] * 3]
        names = {slot.name: float(case.values[slot.index]) for slot in case.map.slots.values()}
        bounds = {case.map.slot(f"bound.{f}.{g.name}").index: 0.0 for g in case.groups for f in BOUND_FAMILIES}
        rng = np.random.default_rng(8)
        for _ in range(3):
            taken = {}
            for group in case.groups:
                grads = rng.normal(size=sum(p.value.size for p in group.parameters)).astype(np.float32)
                case.put(group, "grad", grads, pad=0.0)
                norm = float(np.linalg.norm(grads.astype(np.float64)))
                limits = {slot: float(v) for slot, v in enumerate(case.read(case.snapshot))}
                taken[group.name] = step_reference.clipped(names, limits, group.name, norm, grads.astype(np.float64))
            case.run()
            for group in case.groups:
                for family in BOUND_FAMILIES:
                    x = taken[group.name] if family == "grad" else case.elements(group, family)
                    index = case.map.slot(f"bound.{family}.{group.name}").index
                    bounds[index] = step_reference.oracle_step(names, bounds[index], [x.astype(np.float64)])
                    got = case.slot(family, group.name)
                    assert_close(got, bounds[index], factor=16, atol=0.0, name=f"{family} {group.name}")


@pytest.mark.parametrize("every", [1, 2, 3, 5, 6, 7, 8, 12, 100, 1024, 2**31 - 1])
@pytest.mark.parametrize("base", [0, 2**32 - 3, 2**52])
def test_runs_every_n_steps(device: Device, every: int, base: int) -> None:
    starts = {base, base // every * every + every - 1, base // every * every + every}
    for t in sorted(starts):
        with Case(device, shapes={"trunk": [(3,)]}, every=every, t=t) as case:
            case.run()
            assert (case.slot("weight", "trunk") != 0) == ((t + 1) % every == 0), (t, every)


@pytest.mark.parametrize(("skip", "t"), [(1, 7), (0, 6), (0, 8), (1, 8)])
def test_otherwise_nothing_changes(device: Device, skip: int, t: int) -> None:
    with Case(device, every=8, t=t, skip=skip) as case:
        case.run(2)
        np.testing.assert_array_equal(case.read(case.snapshot).view(np.uint32), case.values.view(np.uint32))
        assert case.idle()


def test_runs_leave_nothing_behind(device: Device) -> None:
    """Idle steps and skipped ones between two runs; each run sees its own data alone."""
    with Case(device, signals={"oracle_beta": 1.0, "eps_clamp_floor": 1e9}, every=2, t=1) as case:
        rng = np.random.default_rng(1)
        for t, skip in ((1, 0), (2, 0), (3, 1), (4, 0), (5, 0), (7, 0)):
            case.plan.buffer(case.counters).write(np.array([t, t, 0, 0], np.uint64))
            case.plan.buffer(case.guard.skip).write(np.array([skip], np.uint32))
            x = rng.normal(size=sum(p.value.size for p in case.groups[0].parameters)).astype(np.float32)
            case.put(case.groups[0], "weight", x)
            before = case.slot("weight", "trunk")
            case.run()
            runs = t % 2 == 1 and not skip
            expected = _p99(x) if runs else before
            assert_close(case.slot("weight", "trunk"), expected, factor=1, atol=0.0)
            assert case.idle()


def test_what_is_not_finite(device: Device) -> None:
    """One such element in a thousand is outranked; enough of them leave the slot as it was."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=1000).astype(np.float32)
    with Case(device, shapes={"trunk": [(1000,)]}, signals={"bound.weight.trunk": 0.25, "oracle_beta": 1.0}) as case:
        x[:4], x[4:9] = np.nan, -np.inf
        case.put(case.groups[0], "weight", x)
        case.put(case.groups[0], "adam_v", np.full(1000, np.nan, np.float32))
        case.put(case.groups[0], "adam_m", np.full(1000, 3e38, np.float32))
        case.set("oracle_headroom", 4.0)
        case.run()
        finite = np.sort(np.abs(x[9:]))
        assert case.slot("weight", "trunk") == np.float32(4.0) * finite[989]
        assert case.slot("adam_v", "trunk") == 0.0
        assert case.slot("adam_m", "trunk") == 0.0  # headroom times p99 leaves float32
        x[9:14] = np.inf
        case.put(case.groups[0], "weight", x)
        before = case.slot("weight", "trunk")
        case.run()
        assert case.slot("weight", "trunk") == before


def test_agrees_with_the_reference_of_the_step() -> None:
    rng = np.random.default_rng(0)
    for n in (1, 2, 99, 100, 101, 1234):
        x = rng.normal(size=n)
        assert reference_p99(x) == step_reference.p99([x[: n // 2], x[n // 2 :]])
        signals = {"oracle_headroom": 4.0, "oracle_beta": 0.05}
        for slot in (0.0, 0.7):
            ours = reference_oracle(x, slot, headroom=4.0, beta=0.05)
            assert ours == step_reference.oracle_step(signals, slot, [x])


def test_same_bits_in_every_order_and_in_a_graph(device: Device) -> None:
    def bits(on: Device, captured: bool = False) -> bytes:
        with Case(on, signals={"oracle_headroom": 4.0}) as case:
            if captured:
                with case.plan.capture(stream=case.stream) as graph:
                    for _ in range(2):
                        graph.launch(stream=case.stream)
                    case.stream.synchronize()
            else:
                case.run(2)
            return case.read(case.snapshot).tobytes()

    expected = bits(device)
    assert bits(device, captured=True) == expected
    if device.kind == "sim":
        for schedule in ("reverse", "random:1"):
            with Device.open_sim(schedule=schedule, poison="ff") as other:
                assert bits(other) == expected, schedule


def test_arguments_are_checked(device: Device) -> None:
    program = Program(device.target)
    group = ParamGroup(program, "trunk", 0, [ParamSpec("w", (2,))])
    counters, one = program.tensor("counters", (4,), np.uint64), program.tensor("one", (1,))
    guard = Guard(scales=one, skip=one, group_mask=one)

    def declare(groups: Sequence[ParamGroup], every: int = 1, signal: Callable[[str], Tensor] = lambda n: one) -> None:
        oracles(program, groups, signal=signal, counters=counters, guard=guard, every=every)

    with pytest.raises(ValueError, match=r"1 groups that were given to norm.*got \[\]"):
        declare([])
    with pytest.raises(ValueError, match=r"got \['trunk', 'trunk'\]"):
        declare([group, group])
    with pytest.raises(ValueError, match=r"at least 1 and below .*; got 0"):
        declare([group], every=0)
