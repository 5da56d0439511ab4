"""The wire gate, the readiness and the wire's backward against float64 and the golden states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops import gate
from fxengine.ops.elementwise import combine
from fxengine.signals import SLOTS, SignalMap
from tests.reference import golden
from tests.reference.config import DEFAULT_SIGNALS, Config
from tests.reference.forward import online
from tests.reference.gate import produce_gate, update_readiness
from tests.reference.losses import clean_batch
from tests.support import assert_close

MAP = SignalMap()
COLD = dict.fromkeys(gate.GATE_STATE + gate.READINESS_STATE, 0.0)
Values = Mapping[str, float]


class Snapshot:
    """A signal snapshot with the default signals and a state, as a tensor of a program."""

    def __init__(self, program: Program, values: Values) -> None:
        data = np.full(SLOTS, 77.0, np.float32)
        for name, value in {**DEFAULT_SIGNALS, **COLD, **values}.items():
            data[MAP.slot(name).index] = value
        self.before = data
        self.tensor = program.tensor("signals", (SLOTS,), arena="state", data=data)

    def __call__(self, name: str) -> Tensor:
        index = MAP.slot(name).index
        return self.tensor.rows(index, index + 1)

    def state(self, after: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
        """The state, after a check that nothing else of the snapshot changed."""
        mine = [MAP.slot(name).index for name in names]
        others = np.setdiff1d(np.arange(SLOTS), mine)
        np.testing.assert_array_equal(after[others], self.before[others])
        return dict(zip(names, after[mine].tolist(), strict=True))


def _run(program: Program, device: Device, *outputs: Tensor) -> list[np.ndarray]:
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return [plan.buffer(t).read() for t in outputs]


def _input(program: Program, name: str, data: Any, pad: int = 0) -> Tensor:
    """A tensor with this data, `pad` elements of rubbish behind each row."""
    array = np.asarray(data)
    if not pad:
        return program.tensor(name, array.shape, array.dtype, arena="inputs", data=array)
    wide = np.full((array.shape[0], array.shape[1] + pad), np.nan, array.dtype)
    wide[:, : array.shape[1]] = array
    return program.tensor(name, wide.shape, wide.dtype, arena="inputs", data=wide).columns(0, array.shape[1])


def _gate(
    device: Device, values: Values, nb: np.ndarray, labels: np.ndarray, q0: np.ndarray, pad: int = 0
) -> dict[str, float]:
    program = Program(device.target)
    snapshot = Snapshot(program, values)
    gate.produce(
        program,
        _input(program, "nb", nb.astype(np.float32), pad),
        _input(program, "labels", labels.astype(np.int32)),
        _input(program, "q", q0.astype(np.float32), pad),
        signal=snapshot,
    )
    (after,) = _run(program, device, snapshot.tensor)
    return snapshot.state(after, gate.GATE_STATE)


def _exact(values: Values) -> dict[str, float]:
    """As float32 slots hold them."""
    return {name: float(np.float32(value)) for name, value in values.items()}


def _check(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(np.float32(found[name]), value, factor=4, atol=1e-9, name=name)


def _warm(**changes: float) -> dict[str, float]:
    state = {"aux_acc_short": 0.6, "aux_acc_long": 0.55, "aux_acc_var": 0.002, "disagree_ema": 0.2}
    return _exact({**state, "gate_open": 1.0, "gate_seen": 1.0, "alpha_grad": 0.4, **changes})


def _batch(rng: np.random.Generator, rows: int, n0: int, masked: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    labels = np.where(
        rng.random(rows) < masked, rng.choice([-1, 2, -(2**31), 2**31 - 1], rows), rng.integers(0, 2, rows)
    )
    # few distinct values: ties are common
    nb = rng.integers(-1, 2, (rows, 2)).astype(np.float64)
    q0 = rng.integers(-1, 2, (rows, n0)).astype(np.float64)
    for array in (nb, q0):
        array[rng.random(array.shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    return nb, labels, q0


@settings(max_examples=60)
@given(
    rows=st.sampled_from([1, 2, 7, 32, 255, 256, 257, 700]),
    n0=st.sampled_from([1, 2, 3, 3, 3, 4]),
    masked=st.sampled_from([0.0, 0.4, 1.0]),
    seen=st.booleans(),
    pad=st.sampled_from([0, 3]),
    seed=st.integers(0, 1000),
)
def test_gate_against_float64(
    device: Device, rows: int, n0: int, masked: float, seen: bool, pad: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    nb, labels, q0 = _batch(rng, rows, n0, masked)
    state = {name: rng.random() for name in gate.GATE_STATE} | {"gate_seen": float(seen)}
    state = _exact(state | {"gate_open": float(rng.integers(2)), "aux_acc_var": 0.01 * rng.random()})
    signals = _exact({name: DEFAULT_SIGNALS[name] * rng.uniform(0.2, 1.5) for name in gate.GATE_SIGNALS})
    expected = gate.reference_gate(state, signals, nb, labels, q0)
    nets = {"aux": {"nb": nb}, "heads": {"q0": q0}}
    other = produce_gate(Config(branches=(n0,)), signals, state, nets, {"nb_label": labels})
    assert other == pytest.approx(expected, rel=1e-12, abs=1e-15)
    _check(_gate(device, {**state, **signals}, nb, labels, q0, pad), expected)


def _rows(right: int, wrong: int, masked: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A batch whose head says up everywhere, whose direction is flat."""
    labels = np.array([1] * right + [0] * wrong + [-1] * masked)
    return np.tile([0.0, 1.0], (len(labels), 1)), labels, np.tile([0.0, 1.0, 0.0], (len(labels), 1))


def test_first_valid_step_sets_the_averages(device: Device) -> None:
    found = _gate(device, {}, *_rows(7, 3, 5))
    expected = gate.reference_gate(COLD, DEFAULT_SIGNALS, *_rows(7, 3, 5))
    _check(found, expected)
    assert found["aux_acc_short"] == found["aux_acc_long"] == np.float32(0.7)
    assert found["aux_acc_var"] == np.float32(0.7 * 0.3 / 10)
    assert found["gate_seen"] == found["gate_open"] == 1.0 and 0.0 < found["alpha_grad"] < 0.05


def test_cold_without_a_valid_row_nothing_changes(device: Device) -> None:
    """Not even an alpha that the host has set."""
    assert _gate(device, {"alpha_grad": 0.5, "gate_open": 1.0}, *_rows(0, 0, 9)) == {
        **dict.fromkeys(gate.GATE_STATE, 0.0),
        "alpha_grad": 0.5,
        "gate_open": 1.0,
    }


def test_warm_without_a_valid_row_trigger_and_alpha_still_run(device: Device) -> None:
    state = _warm(gate_open=0.0)
    found = _gate(device, state, *_rows(0, 0, 9))
    kept = ("aux_acc_short", "aux_acc_long", "aux_acc_var", "disagree_ema", "gate_seen")
    assert {name: found[name] for name in kept} == {name: state[name] for name in kept}
    assert found["gate_open"] == 1.0 and found["alpha_grad"] > state["alpha_grad"]


@pytest.mark.parametrize(
    ("short", "before", "after"),
    [(0.529, 0, 0), (0.529, 1, 1), (0.531, 0, 1), (0.531, 1, 1), (0.511, 0, 0), (0.511, 1, 1), (0.509, 1, 0)],
)
def test_schmitt_trigger(device: Device, short: float, before: int, after: int) -> None:
    found = _gate(device, _warm(aux_acc_short=short, gate_open=before), *_rows(0, 0, 4))
    assert found["gate_open"] == after


def test_the_later_line_of_the_trigger_wins(device: Device) -> None:
    """With crossed margins both conditions hold; the closing one comes second."""
    margins = {"gate_open_margin": -0.1, "gate_close_margin": 0.2}
    assert _gate(device, _warm(gate_open=1.0, **margins), *_rows(0, 0, 4))["gate_open"] == 0.0


def test_alpha_is_exactly_zero_while_the_gate_stays_shut(device: Device) -> None:
    state = _warm(aux_acc_short=0.3, gate_open=0.0, alpha_grad=0.0)
    assert _gate(device, state, *_rows(2, 3))["alpha_grad"] == 0.0


@pytest.mark.parametrize(
    "state",
    [
        {"aux_acc_var": -1.0},
        {"aux_acc_short": math.nan},
        {"disagree_ema": math.inf},
        {"alpha_grad": math.nan},
        {"alpha_grad": -math.inf},
        {"gate_gain": math.nan},
    ],
)
def test_what_is_not_finite_gives_alpha_zero(device: Device, state: Values) -> None:
    assert _gate(device, _warm(**state), *_rows(0, 0, 4))["alpha_grad"] == 0.0


def test_alpha_is_limited(device: Device) -> None:
    assert _gate(device, _warm(alpha_grad=40.0), *_rows(0, 0, 4))["alpha_grad"] == 1.0
    assert _gate(device, _warm(alpha_grad=-40.0), *_rows(0, 0, 4))["alpha_grad"] == 0.0


def test_disagreement_needs_three_directions(device: Device) -> None:
    """Up against short everywhere; with another number of directions there is nothing to compare."""
    nb, labels, _ = _rows(5, 0)
    short = np.tile([1.0, 0.0, 0.0], (5, 1))
    assert _gate(device, {}, nb, labels, short)["disagree_ema"] == 1.0
    assert _gate(device, {}, nb, labels, short[:, :2])["disagree_ema"] == 0.0
    assert _gate(device, {}, nb, labels, np.tile([1.0, 0.0, 0.0, 0.0], (5, 1)))["disagree_ema"] == 0.0
    assert _gate(device, {}, nb, labels, np.tile([np.nan, np.nan, 0.0], (5, 1)))["disagree_ema"] == 0.0


# -- readiness --------------------------------------------------------------------------------------------------


def _readiness(device: Device, values: Values, loss: float) -> dict[str, float]:
    program = Program(device.target)
    snapshot = Snapshot(program, values)
    gate.update_readiness(program, _input(program, "loss", np.array([loss], np.float32)), signal=snapshot)
    (after,) = _run(program, device, snapshot.tensor)
    return snapshot.state(after, gate.READINESS_STATE)


@settings(max_examples=60)
@given(
    seen=st.sampled_from([0, 1, 62, 63, 64, 65, 10_000]),
    ema=st.floats(0.0, 10.0, width=32),
    ref=st.floats(-1.0, 10.0, width=32),
    readiness=st.floats(0.0, 1.0, width=32),
    loss=st.floats(-2.0, 1e4, width=32),
    beta=st.sampled_from([0.0, 0.25, 1.0]),
    warmup=st.sampled_from([0.0, 64.0]),
)
@example(seen=64, ema=0.0, ref=0.0, readiness=0.5, loss=0.0, beta=0.25, warmup=64.0)
def test_readiness_against_float64(
    device: Device, seen: int, ema: float, ref: float, readiness: float, loss: float, beta: float, warmup: float
) -> None:
    state = dict(zip(gate.READINESS_STATE, (float(seen), ema, ref, readiness), strict=True))
    signals = {"readiness_beta": beta, "readiness_warmup": warmup}
    expected = gate.reference_readiness(state, signals, loss)
    assert update_readiness(signals, state, loss) == pytest.approx(expected, rel=1e-12, abs=1e-300)
    _check(_readiness(device, {**state, **signals}, loss), expected)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seen", [3.0, 300.0])
def test_a_loss_that_is_not_finite_changes_nothing(device: Device, loss: float, seen: float) -> None:
    state = _exact(dict(zip(gate.READINESS_STATE, (seen, 2.0, 2.1, 0.2), strict=True)))
    assert _readiness(device, state, loss) == state


def test_warmup_is_a_plain_mean_and_gives_no_readiness(device: Device) -> None:
    found = _readiness(device, {"iqn_seen": 3.0, "iqn_loss_ref": 2.0, "iqn_readiness": 0.5}, 4.0)
    assert found == {"iqn_seen": 4.0, "iqn_loss_ema": 2.5, "iqn_loss_ref": 2.5, "iqn_readiness": np.float32(0.495)}


# -- the golden states ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "edges", "cold_odd", "aux_closed", "skip"])
def test_golden_states(device: Device, name: str) -> None:
    """Both steps of a file, the second from the state that the device left; logits and q_0 from the reference."""
    file = golden.load(name)
    state: dict[str, float] = dict(file.state["state"])
    signals: dict[str, float] = file.state["signals"]
    params = file.state["params"]
    for batch, out in zip(file.batches, file.outputs, strict=True):
        clean = clean_batch(batch)
        with np.errstate(invalid="ignore"):
            nets = online(file.config, params, clean)
        state |= _gate(device, {**signals, **state}, nets["aux"]["nb"], batch["nb_label"], nets["heads"]["q0"])
        state |= _readiness(device, {**signals, **state}, float(out["L_iqn"]))
        for key, value in golden.under(out, "state.").items():
            assert golden.error(state[key], value) <= golden.FP32_LIMIT, f"{key}: {state[key]}, expected {value}"
        params = golden.under(out, "param.")


def test_readiness_is_updated_behind_its_readers(device: Device) -> None:
    """Within one program the readers declared before the update see the old value."""
    program = Program(device.target)
    snapshot = Snapshot(program, {"iqn_readiness": 0.5, "iqn_seen": 100.0, "iqn_loss_ref": 1.0, "readiness_beta": 1.0})
    seen = program.tensor("seen", (1,))
    combine(program, seen, snapshot("iqn_readiness"), label="reader")
    gate.update_readiness(program, _input(program, "loss", np.array([0.25], np.float32)), signal=snapshot)
    before, after = _run(program, device, seen, snapshot.tensor)
    assert before[0] == 0.5
    assert snapshot.state(after, gate.READINESS_STATE)["iqn_readiness"] == 0.75


# -- backward through the wire ----------------------------------------------------------------------------------


def _wire(
    device: Device, nb: np.ndarray, dwire: np.ndarray, dnb: np.ndarray, alpha: float, *, column: bool = False
) -> np.ndarray:
    program = Program(device.target)
    snapshot = Snapshot(program, {"alpha_grad": alpha})
    wide = np.full((len(dwire), 5), np.nan, np.float32)
    wide[:, 3] = dwire
    source = program.tensor("dc0", wide.shape, arena="inputs", data=wide).columns(3, 4)
    dlogits = program.tensor("dnb", dnb.shape, arena="state", data=dnb.astype(np.float32))
    gate.wire_backward(
        program,
        _input(program, "nb", nb.astype(np.float32), 2 if column else 0),
        source if column else _input(program, "dwire", dwire.astype(np.float32)),
        dlogits,
        alpha=snapshot("alpha_grad"),
    )
    return _run(program, device, dlogits)[0]


@settings(max_examples=30)
@given(
    rows=st.sampled_from([1, 2, 31, 255, 256, 257, 600]),
    alpha=st.sampled_from([0.0, 1e-3, 0.4, 1.0]),
    spread=st.sampled_from([0.0, 1.0, 40.0]),
    column=st.booleans(),
    seed=st.integers(0, 100),
)
def test_wire_backward_against_float64(
    device: Device, rows: int, alpha: float, spread: float, column: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    nb = (spread * rng.normal(size=(rows, 2))).astype(np.float32)
    dwire, dnb = (rng.normal(size=shape).astype(np.float32) for shape in (rows, (rows, 2)))
    added = gate.reference_wire_backward(nb, dwire, float(np.float32(alpha)))
    found = _wire(device, nb, dwire, dnb, alpha, column=column)
    rounding = (
        8 * float(np.finfo(np.float32).eps) * float(np.abs(dnb).max() + np.abs(added).max())
    )  # the sum may cancel
    assert_close(found, dnb + added, factor=8, atol=rounding, name="dnb")
    # alone, to its own relative accuracy: what a sure head still learns is tiny but not lost
    assert_close(_wire(device, nb, dwire, 0 * dnb, alpha, column=column), added, factor=256, atol=1e-37, name="added")


def test_wire_reference_is_the_derivative() -> None:
    rng = np.random.default_rng(0)
    nb, dwire, step = rng.normal(size=(20, 2)), rng.normal(size=20), 1e-6

    def wire(x: np.ndarray) -> np.ndarray:
        p = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
        return p[:, 1] - p[:, 0]

    for side in (0, 1):
        shift = step * (np.arange(2) == side)
        slope = (wire(nb + shift) - wire(nb - shift)) / (2 * step)
        np.testing.assert_allclose(
            gate.reference_wire_backward(nb, dwire, 0.7)[:, side], 0.7 * dwire * slope, rtol=1e-7, atol=1e-10
        )


def test_a_shut_gate_changes_no_bit(device: Device) -> None:
    """NaN and infinities at the wire do not pass, and a negative zero stays one."""
    rng = np.random.default_rng(1)
    nb = rng.normal(size=(300, 2))
    dnb = rng.normal(size=(300, 2)).astype(np.float32)
    dnb[::3] = -0.0
    dwire = rng.choice([np.nan, np.inf, -np.inf, 3.0], 300)
    for alpha in (0.0, -0.0):
        assert _wire(device, nb, dwire, dnb, alpha).tobytes() == dnb.tobytes()
    assert np.isnan(_wire(device, nb, dwire, dnb, 0.5)).any()


def test_gate_and_wire_in_one_program(device: Device) -> None:
    """The backward of a step uses the alpha that the step produced."""
    nb, labels, q0 = _rows(9, 1)
    state = _warm()
    program = Program(device.target)
    snapshot = Snapshot(program, state)
    logits = _input(program, "nb", nb.astype(np.float32))
    dlogits = program.tensor("dnb", (10, 2), arena="state", data=np.zeros((10, 2), np.float32))
    gate.produce(
        program, logits, _input(program, "l", labels.astype(np.int32)), _input(program, "q", q0.astype(np.float32)),
        signal=snapshot,
    )  # fmt: skip
    dwire = _input(program, "dwire", np.ones(10, np.float32))
    gate.wire_backward(program, logits, dwire, dlogits, alpha=snapshot("alpha_grad"))
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.capture(stream=stream).launch(stream=stream)
        stream.synchronize()
        found = plan.buffer(dlogits).read()
    alpha = gate.reference_gate(state, DEFAULT_SIGNALS, nb, labels, q0)["alpha_grad"]
    assert abs(alpha - state["alpha_grad"]) > 1e-3
    assert_close(found, gate.reference_wire_backward(nb, np.ones(10), alpha), factor=16, name="dnb")


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    snapshot = Snapshot(program, {})
    nb, labels = program.tensor("nb", (4, 2)), program.tensor("labels", (4,), np.int32)
    q, three = program.tensor("q", (4, 3)), program.tensor("three", (3, 3))
    with pytest.raises(ValueError, match=r"logits must be float32 \[B, 2\], got float32 \(4, 3\)"):
        gate.produce(program, q, labels, q, signal=snapshot)
    with pytest.raises(ValueError, match=r"labels must be int32 \(4,\).*got float32 \(4, 2\)"):
        gate.produce(program, nb, nb, q, signal=snapshot)
    with pytest.raises(ValueError, match=r"q0 must be float32 \(4, 3\).*got float32 \(3, 3\)"):
        gate.produce(program, nb, labels, three, signal=snapshot)
    with pytest.raises(ValueError, match="signal 'aux_acc_short'"):
        gate.produce(program, nb, labels, q, signal=lambda name: snapshot.tensor)
    with pytest.raises(ValueError, match=r"loss must be float32 \(1,\)"):
        gate.update_readiness(program, nb, signal=snapshot)
    with pytest.raises(ValueError, match=r"dwire must be float32 \(4, 1\).*got float32 \(4, 3\)"):
        gate.wire_backward(program, nb, q, nb, alpha=snapshot("alpha_grad"))
    with pytest.raises(ValueError, match=r"dlogits must be float32 \(4, 2\).*got float32 \(4, 3\)"):
        gate.wire_backward(program, nb, q.columns(0, 1), q, alpha=snapshot("alpha_grad"))
