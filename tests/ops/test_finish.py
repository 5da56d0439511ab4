"""Layers finished by the kernels that make the last columns of their input, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops import crossentropy, dueling, linear
from fxengine.ops.finish import FLOATS, ROWS, Unfinished, fits, reference_finish
from tests.support import assert_close

HIDDEN = st.sampled_from([1, 4, 31, 33, 100, 128, 129, 200])
N_ROWS = st.sampled_from([1, 7, 8, 9, 64, 130])
PAD = st.sampled_from([0, 1, 3])


class Layers:
    """Layers with half of their input still to come; what lies beside their rows must stay as it is."""

    def __init__(self, program: Program, count: int, rows: int, hidden: int, columns: int, pad: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.y = [rng.normal(size=(rows, hidden)).astype(np.float32) for _ in range(count)]
        self.w = [rng.normal(size=(hidden, columns)).astype(np.float32) for _ in range(count)]
        self.outputs: list[Tensor] = []
        self.layers: list[Unfinished] = []
        for i, (y, w) in enumerate(zip(self.y, self.w, strict=True)):
            wide_y = np.full((rows, hidden + 2 * pad), 77.0, np.float32)
            wide_y[:, pad : pad + hidden] = y
            wide_w = np.full((hidden, 5 + columns + pad), np.nan, np.float32)
            wide_w[:, 5 : 5 + columns] = w
            self.outputs.append(program.tensor(f"y{i}", wide_y.shape, arena="state", data=wide_y))
            weights = program.tensor(f"w{i}", wide_w.shape, arena="params", data=wide_w)
            self.layers.append(Unfinished(self.outputs[i].columns(pad, pad + hidden), weights.columns(5, 5 + columns)))
        self.pad = pad

    def check(self, plan: Plan, z: np.ndarray) -> list[np.ndarray]:
        found = []
        for out, y, w in zip(self.outputs, self.y, self.w, strict=True):
            wide = plan.buffer(out).read()
            last = self.pad + y.shape[1]
            np.testing.assert_array_equal(np.delete(wide, np.s_[self.pad : last], axis=1), 77.0)
            found.append(wide[:, self.pad : last])
            assert_close(found[-1], reference_finish(y, z, w), factor=64, name=out.name)
        return found


@settings(max_examples=40)
@given(
    rows=N_ROWS, hidden=HIDDEN, pad=PAD, count=st.sampled_from([1, 2]), labelled=st.booleans(), seed=st.integers(0, 100)
)
def test_the_wire_finishes_layers(
    device: Device, rows: int, hidden: int, pad: int, count: int, labelled: bool, seed: int
) -> None:
    """And changes nothing else that the cross-entropy gives."""
    program = Program(device.target)
    rng = np.random.default_rng(seed)
    logits = program.tensor("logits", (rows, 2), arena="inputs", data=rng.normal(size=(rows, 2)).astype(np.float32))
    given = rng.integers(-1, 2, rows).astype(np.int32)
    labels = program.tensor("labels", (rows,), np.int32, arena="inputs", data=given) if labelled else None
    weight = program.tensor("weight", (1,), arena="inputs", data=np.ones(1, np.float32))
    wires = [program.tensor(f"wire{i}", (rows, 1)) for i in range(2)]
    gradients = [program.tensor(f"dlogits{i}", (rows, 2)) if labelled else None for i in range(2)]
    layers = Layers(program, count, rows, hidden, 1, pad, seed)
    for i, (wire, dlogits) in enumerate(zip(wires, gradients, strict=True)):
        crossentropy.crossentropy(
            program,
            logits,
            labels,
            weight=weight,
            dlogits=dlogits,
            wire=wire,
            finishes=layers.layers if i else (),
            name=f"ce{i}",
        )
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        assert [node.name for node in plan.nodes] == ["crossentropy"]
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        alone, wire = (plan.buffer(w).read() for w in wires)
        np.testing.assert_array_equal(alone, wire)
        layers.check(plan, wire)
        if labelled:
            found = [plan.buffer(g).read() for g in gradients if g]
            np.testing.assert_array_equal(*found)
            correct = [plan.buffer(f"ce{i}.correct_partials").read().view(np.int32).sum() for i in range(2)]
            losses = [plan.buffer(f"ce{i}.loss_partials").read().view(np.float64).sum() for i in range(2)]
            assert correct[0] == correct[1]
            assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@settings(max_examples=40)
@given(
    rows=N_ROWS,
    hidden=HIDDEN,
    pad=PAD,
    actions=st.sampled_from([1, 2, 3, 4, 5, 9]),
    atoms=st.sampled_from([2, 51, 65, 129]),
    seed=st.integers(0, 100),
)
def test_the_policy_finishes_a_layer(
    device: Device, rows: int, hidden: int, pad: int, actions: int, atoms: int, seed: int
) -> None:
    program = Program(device.target)
    rng = np.random.default_rng(seed)
    v, adv = (
        program.tensor(name, (rows, width), arena="inputs", data=rng.normal(size=(rows, width)).astype(np.float32))
        for name, width in (("v", atoms), ("adv", actions * atoms))
    )
    q = [program.tensor(f"q{i}", (rows, actions)) for i in range(2)]
    policies = [program.tensor(f"policy{i}", (rows, actions)) for i in range(2)]
    (layer,) = (layers := Layers(program, 1, rows, hidden, actions, pad, seed)).layers
    for i, policy in enumerate(policies):
        dueling.forward(
            program, v, adv, q[i], policy=policy, finishes=layer if i else None, v_min=-10, v_max=10, label=f"q{i}"
        )
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        for pair in (q, policies):
            np.testing.assert_array_equal(*(plan.buffer(t).read() for t in pair))
        layers.check(plan, plan.buffer(policies[1]).read())


def test_a_layer_in_two_parts_is_the_layer(device: Device) -> None:
    """Product of the first columns, then the record that makes the last one: NaN passes, as through any ReLU."""
    program = Program(device.target)
    rng = np.random.default_rng(0)
    x, w, b = (rng.normal(size=shape).astype(np.float32) for shape in ((20, 24), (40, 25), (40,)))
    x[3, 5] = np.nan
    weights = program.tensor("w", w.shape, arena="params", data=w)
    y = program.tensor("y", (20, 40))
    linear.forward(
        program,
        program.tensor("x", x.shape, arena="inputs", data=x),
        weights.columns(0, 24),
        program.tensor("b", b.shape, arena="params", data=b),
        y,
    )
    logits = program.tensor("logits", (20, 2), arena="inputs", data=rng.normal(size=(20, 2)).astype(np.float32))
    wire = program.tensor("wire", (20, 1))
    finishes = [Unfinished(y, weights.columns(24, 25))]
    crossentropy.crossentropy(program, logits, wire=wire, finishes=finishes, name="ce")
    with device.stream() as stream, Plan(program, device) as plan:
        plan.run(stream=stream)
        z = plan.buffer(wire).read()
        expected = linear.reference_forward(np.hstack([x, z]), w, b, activation="relu")
        assert np.isnan(expected[3]).all()
        assert_close(plan.buffer(y).read(), expected, atol=1e-5)


def test_a_record_takes_as_much_as_fits(device: Device) -> None:
    widest = max(n for n in range(1, FLOATS) if fits(n, 1, 2))
    program = Program(device.target)
    logits = program.tensor("logits", (9, 2), arena="inputs", data=np.eye(9, 2, dtype=np.float32))
    wire = program.tensor("wire", (9, 1))
    layers = Layers(program, 2, 9, widest, 1, 0, 0)
    crossentropy.crossentropy(program, logits, wire=wire, finishes=layers.layers, name="ce")
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        layers.check(plan, plan.buffer(wire).read())
    assert fits(128, 1, 2) and fits(128, 3) and not fits(widest + 1, 1, 2)
    assert 2 * widest * (1 + ROWS) + ROWS <= FLOATS


def test_what_does_not_fit_is_refused(device: Device) -> None:
    program = Program(device.target)
    logits, wire = program.tensor("logits", (4, 2)), program.tensor("wire", (4, 1))
    y, w = program.tensor("y", (4, 8)), program.tensor("w", (8, 3))
    column = w.columns(0, 1)

    def finish(*layers: Unfinished, wire: Tensor | None = wire) -> None:
        crossentropy.crossentropy(program, logits, wire=wire, finishes=layers, name="ce")

    with pytest.raises(ProgramError, match=r"'ce': w of a layer to finish is 'w' \[8, 3\].*expected float32 \[8, 1\]"):
        finish(Unfinished(y, w))
    with pytest.raises(ProgramError, match=r"'ce': a layer to finish is 'y5' \[5, 8\].*expected float32 \[4, 8\]"):
        finish(Unfinished(program.tensor("y5", (5, 8)), column))
    with pytest.raises(ProgramError, match=r"3 layers to finish, 8 outputs and 1 columns each"):
        finish(*[Unfinished(y, column)] * 3)
    with pytest.raises(ProgramError, match=r"1 layers to finish, 2000 outputs"):
        finish(Unfinished(program.tensor("wide", (4, 2000)), program.tensor("w_wide", (2000, 1))))
    with pytest.raises(ValueError, match="pass wire as well"):
        finish(Unfinished(y, column), wire=None)
    adv, q = program.tensor("adv", (4, 15)), program.tensor("q", (4, 3))
    with pytest.raises(ProgramError, match="pass policy as well"):
        dueling.forward(program, None, adv, q, finishes=Unfinished(y, w), v_min=-1, v_max=1, label="q")
    assert not program.launches
