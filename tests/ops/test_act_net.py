"""Acting programs folded into one launch: against the same program layer by layer, and how the work is cut up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine import StepConfig
from fxengine.config import ConfigError
from fxengine.driver import Device, Target
from fxengine.graphs import MAPPED, Plan, Program, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.step import acting_values
from fxengine.ops import act_net, crossentropy, linear
from fxengine.ops import policy as policies
from fxengine.ops.act import read
from fxengine.ops.act_schedule import LINEAR, SMALL, WARPS, Op, plan_steps, task_lists, unit_lists
from fxengine.ops.policy import reference_greedy
from tests.support import assert_close

HEADER = 160
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0.0),
    "elu": lambda x: np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0))),
    "tanh": np.tanh,
}


@dataclass
class Net:
    """A program like an acting one, with weights as constants, and the same in float64."""

    device: Device
    rows: int
    widths: Sequence[int]
    program: Program = field(init=False)
    inputs: list[tuple[Tensor, np.ndarray]] = field(init=False)

    def __post_init__(self) -> None:
        self.program = program = Program(self.device.target)
        self.rng = np.random.default_rng(sum(self.widths) + self.rows)
        sizes = [self.rows * width for width in self.widths]
        self.block = program.tensor("act.in", (HEADER + sum(-(-n // 32) * 32 for n in sizes),), np.uint32, arena=MAPPED)
        self.counters = program.tensor("act.counters", (4,), np.uint64, arena="acting")
        read(program, self.block.flat(0, 8), self.counters)
        self.inputs, self.at = [], HEADER
        self.words: list[tuple[int, np.ndarray]] = []
        for i, width in enumerate(self.widths):
            values = self.rng.standard_normal((self.rows, width)).astype(np.float32)
            tensor = program.tensor(f"input{i}", values.shape)
            read(program, self.block.flat(self.at, self.at + values.size), tensor)
            self.words.append((self.at, values))
            self.inputs.append((tensor, values.astype(np.float64)))
            self.at += -(-values.size // 32) * 32

    def layer(
        self, x: Any, n: int, activation: str = "none", *, bias: bool = True, name: str
    ) -> tuple[Tensor, np.ndarray]:
        """A layer on one or a pair of earlier results."""
        parts = x if isinstance(x, list) else [x]
        wide = np.concatenate([value for _, value in parts], axis=1)
        w = (self.rng.standard_normal((n, wide.shape[1])) / np.sqrt(wide.shape[1])).astype(np.float32)
        b = self.rng.standard_normal(n).astype(np.float32)
        weight = self.program.tensor(f"w_{name}", w.shape, arena="constants", data=w)
        offset = self.program.tensor(f"b_{name}", b.shape, arena="constants", data=b) if bias else None
        y = self.program.tensor(name, (self.rows, n))
        tensors = tuple(tensor for tensor, _ in parts)
        given = tensors if len(tensors) > 1 else tensors[0]
        linear.forward(self.program, given, weight, offset, y, activation=activation, label=name)  # type: ignore[arg-type]
        return y, ACTIVATIONS[activation](wide @ w.T.astype(np.float64) + (b if bias else 0.0))

    def decide(self, q: Tensor, branches: Sequence[int]) -> None:
        """A greedy policy that reports actions and values."""
        count = self.rows * len(branches)
        out = self.program.tensor("act.out", (count + q.size,), np.uint64, arena=MAPPED)
        actions = self.program.tensor("act.actions", (self.rows, len(branches)), np.int32)
        report = policies.Report(self.counters.rows(1, 2), out.rows(0, count), out.rows(count, out.size))
        policies.policy(self.program, q, actions, branches=branches, kind="greedy", report=report)

    def run(self, branches: int, tag: int = 7) -> tuple[np.ndarray, np.ndarray]:
        """Actions and values, as the host finds them."""
        with self.device.stream() as stream, Plan(self.program, self.device, guard=True) as plan:
            words = plan.mapped("act.in").array.view(np.uint32)
            words[2] = tag
            for start, values in self.words:
                words[start : start + values.size] = values.view(np.uint32).ravel()
            plan.run(stream=stream)
            stream.synchronize()
            plan.check_guards()
            found = plan.mapped("act.out").array.view(np.uint32).reshape(-1, 2).copy()
        assert (found[:, 1] == tag).all()
        count = self.rows * branches
        actions = found[:count, 0].view(np.int32).reshape(self.rows, branches)
        return actions, found[count:, 0].copy().view(np.float32).reshape(self.rows, -1)


def folded(net: Net) -> None:
    """Fold it; it must not be declined."""
    assert act_net.fold(net.program) == ""
    assert len(net.program.launches) == 1


@settings(max_examples=25)
@given(
    rows=st.sampled_from([1, 2, 3, 8, 9, 17, 33, 64]),
    width=st.sampled_from([1, 5, 31, 32, 48, 130]),
    hidden=st.lists(st.sampled_from([1, 3, 4, 31, 33, 120, 257, 300, 520]), min_size=0, max_size=3),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    bias=st.booleans(),
)
def test_layers(device: Device, rows: int, width: int, hidden: list[int], activation: str, bias: bool) -> None:
    """Columns beyond those loaded ahead, odd sizes, layers small enough for every block, rows that fill no cluster."""
    net = Net(device, rows, [width])
    x = net.inputs[0]
    for i, n in enumerate(hidden):
        x = net.layer(x, n, activation, bias=bias, name=f"layer{i}")
    q = net.layer(x, 5, bias=bias, name="q")
    net.decide(q[0], (2, 3))
    folded(net)
    actions, values = net.run(2)
    assert_close(values, q[1], factor=64, atol=1e-5)
    np.testing.assert_array_equal(actions, reference_greedy(values, (2, 3)))


@pytest.mark.parametrize("rows", [1, 6, 40])
@pytest.mark.parametrize("beside", [1, 3, 40])
def test_pairs_and_branches_of_the_graph(device: Device, rows: int, beside: int) -> None:
    """Layers on two tensors, the second of which comes later, and results that several layers read."""
    net = Net(device, rows, [20, beside])
    first = net.layer(net.inputs[0], 70, "elu", name="first")
    logits = net.layer(first, 2, name="logits")
    wire = net.program.tensor("wire", (rows, 1))
    crossentropy.crossentropy(net.program, logits[0], wire=wire, name="wire")
    one = wire, np.tanh(0.5 * (logits[1][:, 1:] - logits[1][:, :1]))
    left = net.layer([first, one], 37, "relu", name="left")
    right = net.layer([first, net.inputs[1]], 33, "tanh", name="right")
    q = net.layer(net.layer([left, right], 66, "relu", name="both"), 4, name="q")
    net.decide(q[0], (4,))
    folded(net)
    actions, values = net.run(1)
    assert_close(values, q[1], factor=64, atol=1e-5)
    np.testing.assert_array_equal(actions, reference_greedy(values, (4,)))


def test_rows_with_nan_stay_among_themselves(device: Device) -> None:
    def run(poison: bool) -> np.ndarray:
        net = Net(device, 20, [6])
        if poison:
            net.words[0][1][3] = np.nan
        q = net.layer(net.layer(net.inputs[0], 40, "relu", name="h"), 3, name="q")
        net.decide(q[0], (3,))
        folded(net)
        return net.run(1)[1]

    clean, poisoned = run(False), run(True)
    assert np.isnan(poisoned[3]).all()
    np.testing.assert_array_equal(np.delete(poisoned, 3, axis=0), np.delete(clean, 3, axis=0))


# -- what is declined --------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_declined_and_left_as_it_is(device: Device) -> None:
    def declined(net: Net, reason: str, q: tuple[Tensor, np.ndarray]) -> None:
        net.decide(q[0], (3,))
        before, names = list(net.program.launches), list(net.program.storages)
        assert reason in act_net.fold(net.program)
        assert net.program.launches == before and list(net.program.storages) == names
        assert_close(net.run(1)[1], q[1], factor=256, atol=1e-4)

    net = Net(device, 65, [6])
    declined(net, "too much for 8 clusters", net.layer(net.inputs[0], 3, name="q"))
    net = Net(device, 2, [1200])
    declined(net, "more than 1048576", net.layer(net.layer(net.inputs[0], 1200, name="h"), 3, name="q"))
    net = Net(device, 64, [6])
    units = net.program.target.shared_memory_optin // (8 * 4)  # 8 rows of them alone fill a multiprocessor
    wide = net.layer(net.layer(net.inputs[0], units, name="h"), 3, name="q")
    declined(net, "floats are too much", wide)
    net = Net(device, 2, [6, 70])
    declined(net, "a small layer has 3 x 70", net.layer([*net.inputs], 3, name="q"))
    net = Net(device, 3, [4])
    x = net.layer(net.inputs[0], 3, name="q")
    tau = net.program.tensor("tau", (3, 2))
    risk = net.program.tensor("risk", (1,), arena="constants", data=np.zeros(1, np.float32))
    policies.fractions(net.program, tau, risk=risk, counters=net.counters, stream=0)
    declined(net, "a fractions launch", x)


# -- how the work is cut up --------------------------------------------------------------------------------------

ARCHS = ("sm_90", "sm_100", "sm_103", "sm_120")


def default_program(arch: str, rows: int, config: StepConfig) -> Program:
    """The acting program of a configuration, without a device."""
    builder = StepBuilder(Target.of(arch), evaluation=True)
    program = builder.program
    counters = program.tensor("act.counters", (4,), np.uint64, arena="acting")
    block = program.tensor("act.in", (200 + rows * (config.state + config.ofi),), np.uint32, arena=MAPPED)
    read(program, block.flat(0, 8), counters)
    state = builder.input("state", (rows, config.state))
    read(program, block.flat(160, 160 + state.size), state)
    ofi = None
    if config.has_ofi:
        ofi = builder.input("ofi", (rows, config.ofi))
        read(program, block.flat(160 + state.size, 160 + state.size + ofi.size), ofi)
    q = acting_values(builder, config, state, ofi)
    out = program.tensor("act.out", (rows * len(config.branches),), np.uint64, arena=MAPPED)
    actions = program.tensor("act.actions", (rows, len(config.branches)), np.int32)
    report = policies.Report(counters.rows(1, 2), out)
    policies.policy(program, q, actions, branches=config.branches, kind="greedy", report=report)
    return program


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 33, 64])
def test_the_default_step_is_one_launch(arch: str, rows: int) -> None:
    program = default_program(arch, rows, StepConfig())
    reason = act_net.fold(program)
    if arch == "sm_120" and rows > 32:  # eight rows do not fit into its shared memory
        assert "too much" in reason
        return
    assert reason == ""
    (launch,) = program.launches
    blocks = launch.family.tiles(launch.fields)
    assert blocks % 8 == 0 and blocks <= 8 * 8


def test_old_devices_fold_what_one_block_can_read() -> None:
    small = StepConfig(tokens=0, ofi=0, h1=32, h2=32, value_h=16, adv_h=16, branches=(3,), aux_h=0)
    assert act_net.fold(default_program("sm_80", 1, small)) == ""
    assert "more than 65536" in act_net.fold(default_program("sm_80", 1, StepConfig()))


def _ops(seed: int) -> list[Op]:
    """Random operations, each reading some earlier results."""
    rng = np.random.default_rng(seed)
    ops: list[Op] = []
    end = 16
    results = [range(16)]
    for _ in range(int(rng.integers(2, 14))):
        x = results[int(rng.integers(len(results)))]
        n, shared = int(rng.integers(1, 90)), bool(rng.integers(2))
        fields: dict[str, Any] = {"x": x.start, "y": end, "n": n, "k": len(x), "groups": 1, "chunk": 32}
        own = range(end, end + n)
        after = [op for op in ops if op.writes.start < x.stop and x.start < op.writes.stop]
        ops.append(Op(LINEAR if shared else SMALL, fields, [x], own, after))
        results.append(own)
        end += n
    return ops


@given(seed=st.integers(0, 10_000), cluster=st.sampled_from([1, 8]), rows=st.sampled_from([1, 2, 8]))
def test_every_part_is_done_once_and_in_time(seed: int, cluster: int, rows: int) -> None:
    ops = _ops(seed)
    steps = plan_steps(ops)
    assert sorted(map(id, (op for step in steps for op in step))) == sorted(map(id, ops))
    ordered = [op for step in steps for op in step]
    numbers = {id(op): i for i, op in enumerate(ordered)}
    place = {id(op): s for s, step in enumerate(steps, start=1) for op in step}
    for step in steps:
        assert len({op.shared for op in step}) == 1
        for op in step:
            assert all(place[id(e)] < place[id(op)] or not op.shared for e in op.after)

    units = unit_lists(steps, numbers, cluster)
    assert units.shape[:2] == (cluster, WARPS) and (units[..., -1] == -1).all()
    entries = units[units >= 0]
    expected = {
        place[id(op)] << 24 | numbers[id(op)] << 18 | first
        for op in ops
        if op.shared
        for first in range(0, op.size("n"), 4)
    }
    assert len(entries) == len(expected) and set(entries.tolist()) == expected

    tasks = task_lists(steps, numbers, rows)
    for own in tasks:
        done: set[tuple[int, int, int]] = set()
        listed = own[own >= 0]
        assert (np.diff(listed >> 24) >= 0).all()
        for entry in listed[listed >> 24 > 0].tolist():
            step, op, row, part = entry >> 24, ordered[entry >> 18 & 63], entry >> 14 & 15, entry & 0x3FFF
            reads, _ = op.touched(part)
            for earlier in op.after:
                if place[id(earlier)] == step:  # no barrier in between: this warp has done it itself
                    for p in range(earlier.parts):
                        written = earlier.touched(p)[1]
                        if any(r.start < written.stop and written.start < r.stop for r in reads):
                            assert (numbers[id(earlier)], row, p) in done
            done.add((numbers[id(op)], row, part))
    wanted = {(numbers[id(op)], r, p) for op in ops if not op.shared for r in range(rows) for p in range(op.parts)}
    found = {(e >> 18 & 63, e >> 14 & 15, e & 0x3FFF) for e in tasks[tasks >= 1 << 24].tolist()}
    assert found == wanted


def test_configurations_of_every_kind_are_folded_or_say_why() -> None:
    """No component of the forward is unknown to the folding."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        tokens = int(rng.integers(0, 5))
        try:
            config = StepConfig(
                state=max(tokens, 1) * int(rng.integers(1, 9)),
                tokens=tokens,
                attn=int(rng.integers(1, 40)),
                ofi=int(rng.integers(0, 5)),
                h1=int(rng.integers(2, 90)),
                h2=int(rng.integers(2, 90)),
                aux_h=int(rng.integers(0, 40)),
                branches=tuple(int(n) for n in rng.integers(2, 6, int(rng.integers(1, 6)))),
                atoms=int(rng.integers(2, 65)),
            )
        except ConfigError:
            continue
        assert act_net.fold(default_program("sm_90", 5, config)) == "", config
    assert "64 atoms" in act_net.fold(default_program("sm_90", 1, StepConfig(atoms=65)))
