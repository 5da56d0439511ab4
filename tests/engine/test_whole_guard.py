"""The non-finite guard of the whole step: one bad number anywhere, and the update is skipped, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.signals import HOST_SLOTS
from tests.nets.whole import BARE, EVERYTHING, changed, feed, load, make, restore, run, snapshot, trained
from tests.reference.cases import random_batch, random_case
from tests.reference.config import GATE_NAMES, GROUPS, READINESS_NAMES, Config, Tree
from tests.reference.optimizer import bad_groups, group_norms
from tests.reference.step import State, step

POISONS = (np.nan, np.inf, -np.inf)
#: A parameter of every group whose sickness nothing downstream can heal.
PARAMETERS = {
    "trunk": "b_glu",
    "value": "w_v1",
    "branches": "b_b2out",
    "iqn": "w_iq1",
    "iql_high": "b_iqlhigh2",
    "iql_low": "b_iqllow2",
    "attn": "w_o",
    "curiosity": "b_c2",
    "aux_trunk": "b_a3",
    "aux_heads": "w_nb1",
    "decoders": "b_ens",
}
FLOAT_INPUTS = ("state", "next_state", "reward", "discount", "weight", "tau", "tau_target", "ofi", "next_ofi")
LIVE_ROW = 4


@pytest.fixture(scope="module")
def engine(device: Device) -> Iterator[Engine]:
    with make(device) as made:
        yield made


@pytest.fixture(scope="module")
def bare(device: Device) -> Iterator[Engine]:
    with make(device, BARE) as made:
        yield made


def case(config: Config = EVERYTHING) -> tuple[State, Tree]:
    """A warm state and a batch whose row `LIVE_ROW` is alive."""
    state, batch = random_case(2, config)
    batch["discount"] = np.where(np.arange(config.batch) == LIVE_ROW, 0.9375, batch["discount"])
    for name in {"next_state", "next_ofi"} & set(batch):
        batch[name] = np.where(np.isnan(batch[name]), 0.5, batch[name])
    return state, batch


def poisoned_input(batch: Tree, name: str, poison: float) -> Tree:
    array = batch[name].copy()
    array[(LIVE_ROW, 0)[: array.ndim]] = poison
    return {**batch, name: array}


def poisoned_parameter(state: State, name: str, poison: float) -> State:
    array = state["params"][name].copy()
    array[(0,) * array.ndim] = poison
    return {**state, "params": {**state["params"], name: array}}


def expected_groups(config: Config, state: State, batch: Tree) -> set[str]:
    """Groups whose norm the float64 reference cannot give."""
    with np.errstate(all="ignore"):
        _, out = step(config, state, batch)
        grads = {n.removeprefix("grad."): x for n, x in out.items() if n.startswith("grad.")}
        return set(bad_groups(group_norms(config, grads)))


def check(engine: Engine, config: Config, healthy: tuple[State, Tree], sick: tuple[State, Tree]) -> None:
    """A sick step is skipped whole and names its groups, and the next one is as if it had not been."""
    (state, batch), groups = sick, expected_groups(config, *sick)
    assert groups
    load(engine, state)
    feed(engine, batch)
    before = snapshot(engine)
    engine.step()
    after = snapshot(engine)
    report = engine.telemetry()
    assert report is not None
    assert set(report.nonfinite_groups) == groups
    assert (report.step, report.skipped) == (state["step"], 1)
    assert all(not np.isfinite(report[f"grad_norm.{g}"]) for g in groups)
    assert changed(trained(before), trained(after)) == set()
    check_slots(engine, config, sick, before["signals.device"], after["signals.device"])

    state, batch = healthy
    before |= {f"param.{name}": x for name, x in state["params"].items()}  # the cure; gate and readiness start again
    restore(engine, {**before, "counters": after["counters"]})
    continued = run(engine, batch)
    report = engine.telemetry()
    assert report is not None
    assert (report.step, report.skipped, report.nonfinite_groups) == (state["step"] + 1, 1, ())
    load(engine, state)
    assert changed(run(engine, batch), continued) == set()


def check_slots(engine: Engine, config: Config, sick: tuple[State, Tree], before: Any, after: Any) -> None:
    """Bounds stand; the gate and the readiness follow their own rules."""
    slots = engine.builder.signals
    own = [slots.slot(n).index for n in (*GATE_NAMES, *READINESS_NAMES)]
    others = np.ones(before.size, bool)
    others[:HOST_SLOTS] = False
    others[own] = False
    assert before[others].tobytes() == after[others].tobytes()
    with np.errstate(all="ignore"):
        reference, _ = step(config, *sick)
    for name, value in reference["state"].items():
        assert float(after[slots.slot(name).index]) == pytest.approx(value, rel=5e-5, abs=1e-6), name


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_sick_parameter_skips_the_step(engine: Engine, group: str, poison: float) -> None:
    state, batch = case()
    sick = poisoned_parameter(state, PARAMETERS[group], poison), batch
    assert group in expected_groups(EVERYTHING, *sick)
    check(engine, EVERYTHING, (state, batch), sick)


@pytest.mark.parametrize("name", FLOAT_INPUTS)
def test_a_nan_in_an_input_skips_the_step(engine: Engine, name: str) -> None:
    state, batch = case()
    check(engine, EVERYTHING, (state, batch), (state, poisoned_input(batch, name, np.nan)))


@pytest.mark.parametrize("poison", [np.inf, -np.inf])
@pytest.mark.parametrize("name", [n for n in FLOAT_INPUTS if n not in ("discount", "next_ofi")])
def test_an_infinite_input_skips_the_step(engine: Engine, name: str, poison: float) -> None:
    """Of an infinite order flow at s' nothing is left but a tanh of 1, and no gradient passes there."""
    state, batch = case()
    check(engine, EVERYTHING, (state, batch), (state, poisoned_input(batch, name, poison)))


@pytest.mark.parametrize("name", ["state", "next_state", "reward", "weight", "discount"])
def test_c51_alone_heals_no_nan(bare: Engine, name: str) -> None:
    """Clamping, projecting and masking must not turn a NaN into a number."""
    state, batch = case(BARE)
    check(bare, BARE, (state, batch), (state, poisoned_input(batch, name, np.nan)))


@pytest.mark.parametrize("poison", [np.inf, -np.inf])
def test_to_c51_an_infinite_reward_is_a_certain_return(bare: Engine, poison: float) -> None:
    """project() clamps it to v_max or v_min: C51 alone trains on."""
    state, batch = case(BARE)
    batch = poisoned_input(batch, "reward", poison)
    load(bare, state)
    found = run(bare, batch)
    assert not found["skipped"]
    _, reference = step(BARE, state, batch)
    np.testing.assert_allclose(found["td"], reference["td"], rtol=5e-5)


def test_a_sick_step_among_queued_ones(engine: Engine) -> None:
    """Queued without waiting: every report names its own groups, and only the sick replays are skipped."""
    state, batch = case()
    other = random_batch(np.random.default_rng(7), EVERYTHING)
    sick = poisoned_input(batch, "weight", np.inf)
    load(engine, state)
    for entry in (batch, sick, other, sick, sick, batch):
        feed(engine, entry)
        engine.step()
    engine.synchronize()
    reports = engine.telemetry_since(0)[-6:]
    assert [bool(r.nonfinite_groups) for r in reports] == [False, True, False, True, True, False]
    assert [r.skipped for r in reports] == [0, 1, 1, 2, 3, 3]
    assert [r.step - state["step"] for r in reports] == [1, 1, 2, 2, 2, 3]
