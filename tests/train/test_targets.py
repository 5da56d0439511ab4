"""Polyak targets against float64."""

from __future__ import annotations

import numpy as np
import pytest

from fxengine.driver import Device, Target
from fxengine.graphs import Plan, Program
from fxengine.train.groups import ParamGroup, ParamSpec
from fxengine.train.optimizer import Guard
from fxengine.train.targets import TargetGroup, polyak, reference_polyak
from tests.reference import optimizer as step_reference
from tests.support import assert_close

SHAPES = {
    "trunk": [(17, 9), (17,), (3, 683), (1,)],
    "value": [(1,)],
    "iqn": [(1020,), (1, 3)],
    "attn": [(1024,), (1, 1)],
}


class Case:
    """Targets of some groups, filled at random."""

    def __init__(self, device: Device, *, tau: float, skip: int = 0, shapes: dict | None = None, seed: int = 0) -> None:
        program = Program(device.target)
        self.tau = program.tensor("tau", (1,), data=np.array([tau], np.float32))
        self.skip = program.tensor("skip", (1,), np.uint32, data=np.array([skip], np.uint32))
        mask, floats = program.tensor("mask", (1,), np.uint64), program.tensor("floats", (2,))
        guard = Guard(scales=floats, skip=self.skip, group_mask=mask)
        self.targets = []
        for index, (name, tensors) in enumerate((shapes or SHAPES).items()):
            specs = [ParamSpec(f"{name}.{i}", shape) for i, shape in enumerate(tensors)]
            self.targets.append(TargetGroup(program, ParamGroup(program, name, index, specs)))
        self.asked: list[str] = []

        def signal(name: str) -> object:
            self.asked.append(name)
            return self.tau

        polyak(program, self.targets, signal=signal, guard=guard)  # type: ignore[arg-type]
        self.plan = Plan(program, device, guard=True)
        self.stream = device.stream()
        rng = np.random.default_rng(seed)
        for target in self.targets:
            for tensor in (target.values, target.group.params):
                self.plan.buffer(tensor).write(rng.normal(size=tensor.size).astype(np.float32))

    def values(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Targets and parameters of each group."""
        return [(self.plan.buffer(t.values).read(), self.plan.buffer(t.group.params).read()) for t in self.targets]

    def bits(self) -> list[bytes]:
        return [array.tobytes() for pair in self.values() for array in pair]

    def run(self, times: int = 1) -> None:
        for _ in range(times):
            self.plan.run(stream=self.stream)
        self.stream.synchronize()
        self.plan.check_guards()

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stream.close()
        self.plan.close()


@pytest.mark.parametrize("tau", [0.005, 0.3, 1.0])
def test_targets_follow(device: Device, tau: float) -> None:
    with Case(device, tau=tau) as case:
        assert [n.name for n in case.plan.nodes] == ["polyak"]
        assert set(case.asked) == {"polyak_tau"}
        before = case.values()
        case.run()
        for (old, params), (new, still) in zip(before, case.values(), strict=True):
            assert_close(new, reference_polyak(old, params, float(np.float32(tau))), factor=2, atol=1e-6)
            np.testing.assert_array_equal(still.view(np.uint32), params.view(np.uint32))


@pytest.mark.parametrize("skip", [0, 1])
def test_a_tau_of_one_copies_every_bit(device: Device, skip: int) -> None:
    """Whatever both sides hold: sizes that a difference would lose, negative zeros, infinities, NaN."""
    with Case(device, tau=1.0, skip=skip) as case:
        for t in case.targets:
            for tensor, special in ((t.values, [3e38, 1e-40, np.nan, -np.inf]), (t.group.params, [-0.0, -3e38, 1e-45])):
                array = case.plan.buffer(tensor).read()
                array[:: max(1, len(array) // 9)] *= np.float32(1e30)
                array[1 : 1 + len(special)] = special[: len(array[1 : 1 + len(special)])]
                case.plan.buffer(tensor).write(array)
        before = case.values()
        case.run()
        for (old, params), (new, still) in zip(before, case.values(), strict=True):
            assert new.tobytes() == (old if skip else params).tobytes()
            assert still.tobytes() == params.tobytes()


def test_updates_are_exact_enough_to_add_up(device: Device) -> None:
    with Case(device, tau=0.005) as case:
        expected = [old.astype(np.float64) for old, _ in case.values()]
        for _ in range(20):
            case.run()
            params = [p for _, p in case.values()]
            expected = [reference_polyak(e, p, float(np.float32(0.005))) for e, p in zip(expected, params, strict=True)]
        for e, (new, _) in zip(expected, case.values(), strict=True):
            assert_close(new, e, factor=12, atol=1e-6)


def test_agrees_with_the_reference_of_the_step() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=(2, 5, 3))
    np.testing.assert_array_equal(
        reference_polyak(old, new, 0.25), step_reference.polyak({"w": old}, {"w": new}, 0.25)["w"]
    )


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 1023, 1024, 1025, 2049])
def test_lengths(device: Device, length: int) -> None:
    with Case(device, tau=0.5, shapes={"trunk": [(length,)]}) as case:
        ((old, params),) = case.values()
        case.run()
        ((new, _),) = case.values()
        assert_close(new, reference_polyak(old, params, 0.5), factor=2, atol=1e-6)


def test_targets_that_are_equal_stay_so(device: Device) -> None:
    with Case(device, tau=0.3) as case:
        for t in case.targets:
            case.plan.buffer(t.values).write(case.plan.buffer(t.group.params).read())
        before = case.bits()
        case.run(3)
        assert case.bits() == before


@pytest.mark.parametrize(("tau", "skip"), [(0.5, 1), (0.0, 0), (0.0, 1)])
def test_a_skipped_step_or_no_tau_changes_nothing(device: Device, tau: float, skip: int) -> None:
    with Case(device, tau=tau, skip=skip) as case:
        for t in case.targets:  # whatever the parameters hold
            params = case.plan.buffer(t.group.params).read()
            params[:: max(1, len(params) // 3)] = [np.nan, np.inf, -0.0, 1e38][len(params) % 4]
            case.plan.buffer(t.group.params).write(params)
        before = case.bits()
        case.run(2)
        assert case.bits() == before


def test_the_flag_lets_go(device: Device) -> None:
    with Case(device, tau=0.5, skip=1) as case:
        case.run()
        before = case.values()
        case.plan.buffer(case.skip).write(np.zeros(1, np.uint32))
        case.run()
        for (old, params), (new, _) in zip(before, case.values(), strict=True):
            assert_close(new, reference_polyak(old, params, 0.5), factor=2, atol=1e-6)


def test_same_bits_in_every_order_and_in_a_graph(device: Device) -> None:
    def bits(on: Device, captured: bool = False) -> list[bytes]:
        with Case(on, tau=0.01) as case:
            if captured:
                with case.plan.capture(stream=case.stream) as graph:
                    graph.launch(stream=case.stream)
                    case.stream.synchronize()
            else:
                case.run()
            return case.bits()

    expected = bits(device)
    assert bits(device, captured=True) == expected
    if device.kind == "sim":
        for schedule in ("reverse", "random:1"):
            with Device.open_sim(schedule=schedule, poison="ff") as other:
                assert bits(other) == expected, schedule


def test_single_tensors_of_a_group(device: Device) -> None:
    program = Program(device.target)
    group = ParamGroup(program, "trunk", 0, [ParamSpec(n, (7,)) for n in "abc"])
    target = TargetGroup(program, group)
    tau = program.tensor("tau", (1,), data=np.array([0.5], np.float32))
    skip = program.tensor("skip", (1,), np.uint32, data=np.zeros(1, np.uint32))
    guard = Guard(scales=tau, skip=skip, group_mask=tau)
    polyak(program, [target], signal=lambda name: tau, guard=guard, only=("b", "elsewhere"))
    assert [r.label for r in program.launches] == ["polyak.b"]
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.buffer(target.values).write(np.zeros(24, np.float32))
        plan.buffer(group.params).write(np.ones(24, np.float32))
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        moved = plan.buffer(target.values).read()
        np.testing.assert_array_equal(moved, np.where((np.arange(24) >= 8) & (np.arange(24) < 15), 0.5, 0.0))


def test_targets_by_name(device: Device) -> None:
    program = Program(device.target)
    group = ParamGroup(program, "trunk", 0, [ParamSpec("w", (2, 3)), ParamSpec("b", (5,))])
    target = TargetGroup(program, group)
    assert list(target) == ["w", "b"]
    assert target.name == "trunk"
    assert target["w"].shape == (2, 3) and target["b"].offset == 8
    assert target["w"].storage is target["b"].storage is target.values.storage
    with pytest.raises(KeyError, match=r"no target of 'x'; group 'trunk' has w, b"):
        target["x"]


def test_parameters_are_vectors_and_matrices() -> None:
    with pytest.raises(ValueError, match=r"parameter 'w' has shape \(2, 3, 4\); expected \[n\] or \[out, in\]"):
        ParamGroup(Program(Target.of("sim")), "trunk", 0, [ParamSpec("w", (2, 3, 4))])
