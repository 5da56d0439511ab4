"""Masked softmax cross-entropy against float64: losses, gradients, argmax, and what must be exactly zero."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program
from fxengine.ops.crossentropy import Reference, crossentropy, reference_crossentropy
from fxengine.ops.reduce import sum_partials
from tests.support import assert_close


class Case:
    """One cross-entropy with every output, on rows that lie `pad` elements further apart than they are long."""

    def __init__(
        self, device: Device, logits: np.ndarray, labels: np.ndarray, *, weight: float = 1.0, pad: int = 0
    ) -> None:
        rows, classes = logits.shape
        program = Program(device.target)
        wide = np.full((rows, classes + pad), np.nan, np.float32)
        wide[:, :classes] = logits
        canvas = np.full((rows, classes + pad), 77.0, np.float32)
        x = program.tensor("logits", wide.shape, arena="inputs", data=wide).columns(0, classes)
        outputs = {
            name: program.tensor(name, canvas.shape, arena="state", data=canvas)
            for name in ("dlogits", "probabilities")
        }
        wire = program.tensor("wire", (rows, 3), arena="state", data=np.full((rows, 3), 77.0, np.float32))
        scalars = {name: program.tensor(name, (1,)) for name in ("loss", "accuracy")}
        partials = crossentropy(
            program,
            x,
            program.tensor("labels", (rows,), np.int32, arena="inputs", data=labels.astype(np.int32)),
            weight=program.tensor("weight", (1,), arena="state", data=np.array([weight], np.float32)),
            wire=wire.columns(1, 2) if classes == 2 else None,
            name="ce",
            **{name: t.columns(0, classes) for name, t in outputs.items()},
        )
        assert partials is not None
        for name, found in (("loss", partials.losses), ("accuracy", partials.correct)):
            sum_partials(program, found, scalars[name], denominator=partials.valid, label=name)
        with device.stream() as stream, Plan(program, device, guard=True) as plan:
            plan.run(stream=stream)
            stream.synchronize()
            plan.check_guards()
            self.nodes = [node.name for node in plan.nodes]
            read = {name: plan.buffer(t).read() for name, t in {**outputs, **scalars, "wire": wire}.items()}
            self.valid = int(plan.buffer("ce.valid").read().view(np.int32)[0])
        for name in outputs:
            np.testing.assert_array_equal(read[name][:, classes:], 77.0)
        self.dlogits = read["dlogits"][:, :classes]
        self.probabilities = read["probabilities"][:, :classes]
        self.loss, self.accuracy = read["loss"][0], read["accuracy"][0]
        np.testing.assert_array_equal(read["wire"][:, [0, 2]], 77.0)
        self.wire = read["wire"][:, 1]

    def check(self, reference: Reference) -> None:
        assert self.valid == reference.valid
        assert_close(self.probabilities, reference.probabilities, factor=16, name="probabilities")
        # The difference of two logits is rounded, and so its exponential: eps/2 per unit of difference.
        assert_close(self.dlogits, reference.dlogits, factor=128, atol=1e-37, name="dlogits")
        assert_close(self.loss, reference.loss, factor=128, atol=1e-37, name="loss")
        assert_close(self.accuracy, reference.accuracy, factor=1, name="accuracy")
        if self.probabilities.shape[1] == 2:
            p = reference.probabilities
            assert_close(self.wire, p[:, 1] - p[:, 0], factor=16, name="wire")


@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 31, 32, 33, 127, 128, 129, 200]),
    classes=st.sampled_from([2, 2, 3, 4, 8, 9, 16, 17, 51, 64, 100]),
    pad=st.sampled_from([0, 3]),
    weight=st.sampled_from([1.0, 0.5, 1e-3]),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
    spread=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 100),
)
def test_against_float64(
    device: Device, rows: int, classes: int, pad: int, weight: float, masked: float, spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = (spread * rng.normal(size=(rows, classes))).astype(np.float32)
    labels = rng.integers(0, classes, rows)
    outside = rng.choice([-1, -(2**31), classes, 2**31 - 1], rows)
    labels = np.where(rng.random(rows) < masked, outside, labels)
    Case(device, logits, labels, weight=weight, pad=pad).check(
        reference_crossentropy(logits, labels, float(np.float32(weight)))
    )


@pytest.mark.parametrize("classes", [2000, 4097])
def test_thousands_of_classes(device: Device, classes: int) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(11, classes)).astype(np.float32)
    labels = rng.integers(0, classes, 11)
    Case(device, logits, labels).check(reference_crossentropy(logits, labels))


@pytest.mark.parametrize("classes", [2, 4, 51])
def test_masked_rows_may_hold_anything(device: Device, classes: int) -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(40, classes)).astype(np.float32)
    labels = rng.integers(0, classes, 40)
    clean = Case(device, logits, np.where(np.arange(40) % 3 == 0, -1, labels))
    poisoned = logits.copy()
    for row in range(0, 40, 3):
        poisoned[row, row % classes] = (np.nan, np.inf, -np.inf)[row % 9 // 3]
    poisoned[0] = np.nan
    poisoned[3] = np.inf
    case = Case(device, poisoned, np.where(np.arange(40) % 3 == 0, classes, labels))
    np.testing.assert_array_equal(case.dlogits[::3].view(np.uint32), 0)
    np.testing.assert_array_equal(case.dlogits.view(np.uint32), clean.dlogits.view(np.uint32))
    assert (case.loss, case.accuracy, case.valid) == (clean.loss, clean.accuracy, clean.valid)
    assert np.isfinite(case.loss)


def test_a_valid_row_passes_what_is_not_finite(device: Device) -> None:
    """The guard of the optimizer must see it."""
    logits = np.zeros((4, 3), np.float32)
    logits[1, 2] = np.nan
    case = Case(device, logits, np.array([0, 1, 2, 0]))
    assert np.isnan(case.loss) and np.isnan(case.dlogits[1]).all()
    assert np.isfinite(case.dlogits[[0, 2, 3]]).all()
    logits[1] = [0.0, np.inf, 0.0]
    case = Case(device, logits, np.array([0, 1, 2, 0]))
    assert np.isnan(case.loss) and np.isnan(case.dlogits[1, 1])
    logits[1] = [0.0, -np.inf, 0.0]
    case = Case(device, logits, np.array([0, 1, 2, 0]))
    assert np.isposinf(case.loss)
    assert_close(case.dlogits[1], [0.125, -0.25, 0.125])


def test_weight_zero_is_an_exact_zero(device: Device) -> None:
    logits = np.array([[np.nan, 0.0], [np.inf, 1.0], [0.5, 0.25]], np.float32)
    case = Case(device, logits, np.array([0, 1, 1]), weight=0.0)
    np.testing.assert_array_equal(case.dlogits.view(np.uint32), 0)


def test_no_valid_row(device: Device) -> None:
    case = Case(device, np.full((5, 4), np.nan, np.float32), np.full(5, -1))
    assert (case.valid, case.loss, case.accuracy) == (0, 0.0, 0.0)
    np.testing.assert_array_equal(case.dlogits.view(np.uint32), 0)


@pytest.mark.parametrize("classes", [2, 5, 40])
def test_argmax_rules(device: Device, classes: int) -> None:
    """The lowest index wins a tie, NaN never wins, all NaN gives 0."""
    nan, inf = np.nan, np.inf
    rows, best = [], []

    def add(head: list[float], fill: float, expected: int) -> None:
        rows.append(([*head] + [fill] * classes)[:classes])
        best.append(expected)

    add([1.0, 1.0], 0.0, 0)
    add([0.0, 2.0], 2.0, 1)
    add([nan, -5.0], -6.0, 1)
    add([nan, -inf], -inf, 1)
    add([nan, nan], nan, 0)
    add([-inf, -inf], -inf, 0)
    add([inf, inf], inf, 0)
    rows.append([0.0] * (classes - 1) + [1.0])
    best.append(classes - 1)
    rows.append([nan] * (classes - 1) + [-1.0])
    best.append(classes - 1)
    logits = np.array(rows, np.float32)
    for row, expected in enumerate(best):
        for label in {0, 1, classes - 1}:
            labels = np.full(len(rows), -1)
            labels[row] = label
            case = Case(device, logits, labels)
            assert case.accuracy == float(label == expected), (rows[row], label)


def test_large_logits_are_stable(device: Device) -> None:
    logits = np.array([[1e4, 0.0, -1e4], [3e38, -3e38, 0.0], [-1e30, -1e30, -1e30]], np.float32)
    case = Case(device, logits, np.array([0, 0, 1]))
    case.check(reference_crossentropy(logits, [0, 0, 1]))
    assert np.isfinite(case.dlogits).all()


def test_a_row_that_is_nearly_right_keeps_its_gradient(device: Device) -> None:
    """p = 1 - 1e-13 is 1 in float32; loss and gradient are made of the 1e-13."""
    logits = np.array([[30.0, 0.0, -1.0], [-20.0, 10.0, 0.0]], np.float32)
    case = Case(device, logits, np.array([0, 1]))
    case.check(reference_crossentropy(logits, [0, 1]))
    assert case.dlogits[0, 0] < 0 < case.loss


def test_same_bits_twice(device: Device) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(700, 7)).astype(np.float32)
    labels = rng.integers(-1, 7, 700)
    one, two = Case(device, logits, labels), Case(device, logits, labels)
    assert one.loss.tobytes() == two.loss.tobytes()
    np.testing.assert_array_equal(one.dlogits.view(np.uint32), two.dlogits.view(np.uint32))


def test_softmax_alone_and_shared_launches(device: Device) -> None:
    """Without labels only the softmax is left; two heads share each launch."""
    program = Program(device.target)
    data = np.array([[0.0, 1.0], [2.0, -2.0]], np.float32)
    logits = program.tensor("logits", (2, 2), arena="inputs", data=data)
    wires = [program.tensor(f"wire{i}", (2,)) for i in range(2)]
    for i, wire in enumerate(wires):
        crossentropy(program, logits, wire=wire, name=f"head{i}")
    with device.stream() as stream, Plan(program, device) as plan:
        assert [node.name for node in plan.nodes] == ["crossentropy"]
        plan.run(stream=stream)
        for wire in wires:
            assert_close(plan.buffer(wire).read(), np.tanh((data[:, 1] - data[:, 0]) / 2.0), factor=8)


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    logits = program.tensor("logits", (4, 3))
    labels = program.tensor("labels", (4,), np.int32)
    weight = program.tensor("weight", (1,))
    with pytest.raises(ValueError, match=r"dlogits must be float32 \(4, 3\), got float32 \(3, 4\)"):
        crossentropy(program, logits, labels, weight=weight, dlogits=program.tensor("d", (3, 4)), name="ce")
    with pytest.raises(ValueError, match=r"labels must be int32 \(4,\), got float32 \(4, 3\)"):
        crossentropy(program, logits, logits, name="ce")
    with pytest.raises(ValueError, match="two-class"):
        crossentropy(program, logits, labels, wire=program.tensor("w", (4,)), name="ce")
    with pytest.raises(ValueError, match="needs labels and a weight"):
        crossentropy(program, logits, labels, dlogits=program.tensor("e", (4, 3)), name="ce")
    with pytest.raises(ValueError, match="needs labels and a weight"):
        crossentropy(program, logits, weight=weight, dlogits=program.tensor("f", (4, 3)), name="ce")
    with pytest.raises(ValueError, match=r"C >= 2"):
        crossentropy(program, logits.columns(0, 1), name="ce")
