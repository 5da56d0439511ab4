"""The wire between the auxiliary nets and the Q heads, and other places where a scale of zero is an exact zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.nets import aux
from tests.reference.cases import random_case
from tests.reference.config import Tree
from tests.reference.golden import error
from tests.reference.step import State, step

from .whole import EVERYTHING, changed, in_groups, load, make, run

#: What the wire's gradient flows through, last to first.
BEHIND_THE_WIRE = {f"grad.{kind}_{layer}" for kind in "wb" for layer in ("nb2", "nb1", "a3", "a2", "a1")}
AUX = ("aux_trunk", "aux_heads")
ACTIONS = EVERYTHING.branches[0]
POISONS = (np.nan, np.inf, -np.inf)


@pytest.fixture(scope="module")
def engine(device: Device) -> Iterator[Engine]:
    """The whole small step; every test loads a state of its own."""
    with make(device) as made:
        yield made


@pytest.fixture(scope="module")
def wireless(device: Device) -> Iterator[Engine]:
    """The same step without the one record that leads from the wire back into the next-bar logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aux.gate, "wire_backward", lambda *args, **options: None)
        made = make(device)
    with made:
        assert "wire_backward" not in {r.family.name for r in made.builder.program.launches}
        yield made


def case(alpha: float, **signals: float) -> tuple[State, Tree]:
    """A warm state whose alpha stays where it is, and a batch."""
    state, batch = random_case(2, EVERYTHING)
    state["state"] |= {"alpha_grad": alpha, "gate_seen": 1.0}
    state["signals"] |= {"alpha_beta": 0.0, **signals}
    return state, batch


def step_of(engine: Engine, state: State, batch: Tree) -> Tree:
    load(engine, state)
    return run(engine, batch)


def poisoned(state: State, name: str, where: Any, value: float, part: str = "params") -> State:
    """The state with one element of a parameter replaced."""
    array = state[part][name].copy()
    array[where] = value
    state[part][name] = array
    return state


def only(arrays: Tree, names: list[str] | set[str]) -> Tree:
    return {n: arrays[n] for n in sorted(names)}


# -- alpha -------------------------------------------------------------------------------------------------------


def test_alpha_moves_what_lies_behind_the_wire_and_no_other_bit(engine: Engine) -> None:
    """The wire's own column of w_b0fc included: the Q head learns to use the wire whatever the gate says."""
    found = {alpha: step_of(engine, *case(alpha)) for alpha in (0.0, 0.25, 0.5, 1.0)}
    grads = {alpha: {n: x for n, x in out.items() if n.startswith("grad.")} for alpha, out in found.items()}
    for alpha, out in found.items():
        assert float(out["state.alpha_grad"]) == alpha
        assert not out["skipped"]
        if alpha:
            assert changed(grads[0.0], grads[alpha]) == BEHIND_THE_WIRE
    column = grads[0.0]["grad.w_b0fc"][:, EVERYTHING.h2]
    assert np.abs(column).max() > 1e-4
    for alpha in (0.25, 0.5):  # and in proportion
        for name in BEHIND_THE_WIRE:
            whole = np.float64(grads[1.0][name]) - grads[0.0][name]
            part = np.float64(grads[alpha][name]) - grads[0.0][name]
            np.testing.assert_allclose(part, alpha * whole, rtol=0, atol=2e-6 * np.abs(grads[1.0][name]).max())


def test_an_overridden_alpha_is_that_of_the_same_step(engine: Engine) -> None:
    expected = step_of(engine, *case(0.7))
    state, batch = case(0.1)
    load(engine, state)
    engine.signals.override("alpha_grad", 0.7)
    found = run(engine, batch)
    assert float(found["state.alpha_grad"]) == np.float32(0.7)
    assert changed(only(expected, BEHIND_THE_WIRE), only(found, BEHIND_THE_WIRE)) == set()


def test_alpha_zero_leaves_the_bits_of_a_step_without_the_wire(engine: Engine, wireless: Engine) -> None:
    names = {f"grad.{n}" for n in in_groups(engine, *AUX)}
    alone = step_of(wireless, *case(1.0))
    assert changed(only(alone, names), only(step_of(engine, *case(0.0)), names)) == set()
    assert changed(only(alone, names), only(step_of(engine, *case(1.0)), names)) == BEHIND_THE_WIRE


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("where", ["b_b0out", "w_v2", "b_glu", "weight"])
def test_alpha_zero_stops_nan_and_infinity(engine: Engine, where: str, poison: float) -> None:
    """Whatever the Q side sends, the auxiliary nets see their own losses, bit for bit."""
    names = {f"grad.{n}" for n in in_groups(engine, *AUX)}
    clean = step_of(engine, *case(0.0))
    sick = {}
    for alpha in (0.0, 1.0):
        state, batch = case(alpha)
        if where == "weight":
            batch["weight"] = batch["weight"].copy()
            batch["weight"][np.flatnonzero(batch["discount"])[0]] = poison
        else:
            poisoned(state, where, (0,) * state["params"][where].ndim, poison)
        sick[alpha] = step_of(engine, state, batch)
    report = engine.telemetry()
    assert report is not None
    assert {"branches", *AUX} <= set(report.nonfinite_groups), "the poison does not reach the wire"
    assert changed(only(clean, names), only(sick[0.0], names)) == set()


def test_alpha_is_produced_in_the_step_that_uses_it(engine: Engine) -> None:
    """A cold gate, a first batch that the next-bar head gets right: alpha opens, and this backward sees it."""
    state, batch = random_case(2, EVERYTHING)
    state["state"] = dict.fromkeys(state["state"], 0.0)
    state["signals"] |= {"alpha_beta": 1.0, "gate_open_margin": 0.0}
    load(engine, state)
    run(engine, batch)
    batch["nb_label"] = engine.output("nb_logits").argmax(1).astype(np.int32)
    _, reference = step(EVERYTHING, state, batch)
    found = step_of(engine, state, batch)
    alpha = float(found["state.alpha_grad"])
    assert alpha > 0.1 and abs(alpha - reference["state.alpha_grad"]) < 1e-6
    assert float(found["state.gate_open"]) == float(found["state.gate_seen"]) == 1.0

    state["signals"]["alpha_beta"] = 0.0
    shut = step_of(engine, state, batch)
    assert float(shut["state.alpha_grad"]) == 0.0
    for name in BEHIND_THE_WIRE:
        assert error(found[name], reference[name]) < 5e-5, name
        assert error(shut[name], reference[name]) > 1e-3, f"{name} would be right with the alpha of the step before"


def test_the_gate_is_written_before_the_wire_reads_it(engine: Engine) -> None:
    """In the order of the program and along the edges of the captured graph."""
    alpha = engine.builder.signal("alpha_grad").region()
    nodes = engine.plan.nodes
    order = {id(record): i for i, record in enumerate(engine.builder.program.launches)}
    place = {}
    for n, node in enumerate(nodes):
        for record in node.records:
            if any(t.region().overlaps(alpha) for t in record.writes):
                place[record.family.name, "writes"] = order[id(record)], n
            elif any(t.region().overlaps(alpha) for t in record.reads):
                place[record.family.name, "reads"] = order[id(record)], n
    (produced, first), (used, last) = place["gate", "writes"], place["wire_backward", "reads"]
    assert produced < used
    before, queue = {last}, [last]
    while queue:
        fresh = set(nodes[queue.pop()].after) - before
        before |= fresh
        queue += fresh
    assert first in before


# -- K = H2 + 1 --------------------------------------------------------------------------------------------------


def test_a_poisoned_last_column_is_dropped_by_no_kernel(engine: Engine) -> None:
    """Row 0 of w_b0fc's wire column is NaN: the forward reads it at s and s', both backward kernels too."""
    state, batch = case(1.0)
    found = step_of(engine, poisoned(state, "w_b0fc", (0, EVERYTHING.h2), np.nan), batch)
    for name in ("q", "q_next"):
        assert np.isnan(found[name][:, :ACTIONS]).all(), name
        assert np.isfinite(found[name][:, -1]).all(), "the third branch does not read the wire"
    assert np.isfinite(found["q_target"]).all(), "the target networks have weights of their own"
    assert (found["best"][:, 0] == 0).all(), "all NaN gives action 0"
    assert np.isnan(found["grad.w_b0fc"][:, EVERYTHING.h2]).any()
    for name in BEHIND_THE_WIRE:
        assert np.isnan(found[name]).any(), f"{name}: the input gradient did not read the column"
    assert found["skipped"]


def test_the_target_networks_read_the_last_column(engine: Engine) -> None:
    state, batch = case(1.0)
    found = step_of(engine, poisoned(state, "w_b0fc", (0, EVERYTHING.h2), np.nan, "target"), batch)
    assert np.isnan(found["q_target"][:, :ACTIONS]).all()
    assert np.isfinite(found["q"]).all() and np.isfinite(found["q_next"]).all()


def test_a_poisoned_wire_reaches_the_gradient_of_its_column(engine: Engine) -> None:
    """The wire of every row is NaN; only the last column of w_b0fc multiplies it in the weight gradient."""
    state, batch = case(0.0)
    found = step_of(engine, poisoned(state, "b_nb2", 1, np.nan), batch)
    assert np.isnan(found["wire"]).all()
    assert np.isnan(found["q"][:, :ACTIONS]).all()
    assert np.isnan(found["grad.w_b0fc"][:, EVERYTHING.h2]).any()


def test_the_last_column_matters_in_proportion(engine: Engine) -> None:
    """q_0 moves with the wire column as the float64 reference says, and its gradient is the reference's."""
    state, batch = case(1.0)
    scaled = state["params"]["w_b0fc"].copy()
    scaled[:, EVERYTHING.h2] *= 8.0
    plain = step_of(engine, state, batch)["q"]
    state["params"]["w_b0fc"] = scaled
    _, reference = step(EVERYTHING, state, batch)
    found = step_of(engine, state, batch)
    assert np.abs(found["q"][:, :ACTIONS] - plain[:, :ACTIONS]).max() > 1e-2
    for name in ("q", "grad.w_b0fc", *BEHIND_THE_WIRE):
        assert error(found[name], reference[name]) < 5e-5, name


# -- other scales ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "parameter", "signals"),
    [
        ("ens", "w_ens", {"w_ens": 0.0}),
        ("rec", "w_rec", {"w_rec": 0.0}),
        ("pred", "w_pred", {"w_pred": 0.0}),
        ("iqn", "w_iq1", {"w_iqn": 0.0, "w_distill": 0.0}),
    ],
)
def test_a_scale_of_zero_keeps_poison_out_of_the_trunk(
    engine: Engine, head: str, parameter: str, signals: dict[str, float]
) -> None:
    """A sick head with weight 0: the gradients of all other groups keep their bits."""
    own = set(in_groups(engine, "iqn" if head == "iqn" else "decoders"))
    clean = step_of(engine, *case(0.5, **signals))
    state, batch = case(0.5, **signals)
    sick = step_of(engine, poisoned(state, parameter, (0, 0), np.nan), batch)
    assert sick["skipped"] and not clean["skipped"]
    touched = changed(*({n: x for n, x in out.items() if n.startswith("grad.")} for out in (clean, sick)))
    assert f"grad.{parameter}" in touched
    assert touched <= {f"grad.{n}" for n in own}


@pytest.mark.parametrize(
    ("signals", "poison", "groups"),
    [
        ({"w_nb": 0.0}, ("b_nb2", np.nan), AUX),
        ({"w_nb": 0.0}, ("b_nb2", np.inf), AUX),
        ({"w_regime": 0.0}, ("b_rg2", np.nan), AUX),
        ({"w_curiosity": 0.0}, ("b_c2", np.nan), ("trunk", "value", "branches", "iqn", "attn", *AUX, "decoders")),
        ({"w_c51": 0.0, "w_iqn": 0.0, "w_ens": 0.0}, ("reward", np.nan), ("trunk", "value", "branches", "attn", *AUX)),
        ({"w_c51": 0.0, "w_iqn": 0.0, "w_ens": 0.0}, ("weight", np.inf), ("trunk", "value", "branches", "attn", *AUX)),
    ],
)
def test_a_loss_of_weight_zero_sends_nothing(
    engine: Engine, signals: dict[str, float], poison: tuple[str, float], groups: tuple[str, ...]
) -> None:
    """Whatever it holds: the gradients of these groups are finite and have the bits of a healthy step."""
    name, value = poison
    names = {f"grad.{n}" for n in in_groups(engine, *groups)}
    clean = step_of(engine, *case(0.0, **signals))
    state, batch = case(0.0, **signals)
    if name in batch:
        batch[name] = np.where(np.arange(EVERYTHING.batch) == 4, value, batch[name])
        assert batch["discount"][4] > 0
    else:
        poisoned(state, name, 0, value)
    sick = step_of(engine, state, batch)
    assert not clean["skipped"] and changed(clean, sick)
    assert changed(only(clean, names), only(sick, names)) == set()


def test_a_readiness_of_zero_keeps_the_quantiles_out_of_the_trunk(engine: Engine) -> None:
    """Cold readiness: the trunk's gradient does not depend on w_iqn, and a sick θ does not reach it."""
    outs = []
    for weight, sick in ((1.0, False), (0.3, False), (1.0, True)):
        state, batch = case(0.5, w_iqn=weight, w_distill=0.0)
        state["state"]["iqn_readiness"] = 0.0
        if sick:
            poisoned(state, "b_iq2", 0, np.nan)
        found = step_of(engine, state, batch)
        outs.append(only(found, {f"grad.{n}" for n in in_groups(engine, "trunk", "attn", "value", "branches")}))
    assert changed(outs[0], outs[1]) == changed(outs[0], outs[2]) == set()


def test_a_dead_row_may_hold_anything_at_s_prime(engine: Engine) -> None:
    """disc = 0: NaN, infinities or numbers in next_state and next_ofi leave the same bits everywhere."""
    outs = []
    for poison in (0.0, 3.0, np.nan, np.inf):
        state, batch = case(0.5)
        dead = np.arange(EVERYTHING.batch) % 4 == 1
        batch["discount"] = np.where(dead, 0.0, batch["discount"])
        for name in ("next_state", "next_ofi"):
            batch[name] = batch[name].copy()
            batch[name][dead] = poison
        outs.append(step_of(engine, state, batch))
    assert not outs[0]["skipped"]
    for out in outs[1:]:
        assert changed(outs[0], out) == set()
