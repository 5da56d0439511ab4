"""The non-finite guard of the whole step: one bad number anywhere, and the update is skipped, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from tests.nets.whole import BARE, EVERYTHING, changed, engine_state, feed, load, make, run
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


def check_skipped(engine: Engine, config: Config, state: State, batch: Tree) -> None:
    """A sick step changes no bit but the counter's and what follows rules of its own; its groups are named."""
    groups = expected_groups(config, state, batch)
    assert groups
    load(engine, state)
    feed(engine, batch)
    before = engine.state()
    found = run(engine)
    after = engine.state()
    report = engine.telemetry()
    assert report is not None
    assert set(report.nonfinite_groups) == groups
    assert (report.step, report.skipped) == (state["step"], 1)
    assert all(not np.isfinite(report[f"grad_norm.{g}"]) for g in groups)

    assert changed(before, after) <= {"counters", "signals.device"}
    slots = engine.builder.signals
    own = {slots.slot(n).index for n in (*GATE_NAMES, *READINESS_NAMES)}
    moved = np.flatnonzero(before["signals.device"].view(np.uint32) != after["signals.device"].view(np.uint32))
    bounds = {s.index for s in slots.slots.values() if s.name.startswith("bound.")}
    assert set(moved.tolist()) & bounds == set()
    assert {i for i in moved.tolist() if i >= 128} <= own
    with np.errstate(all="ignore"):
        reference, _ = step(config, state, batch)
    for name, value in reference["state"].items():
        assert float(found[f"state.{name}"]) == pytest.approx(value, rel=5e-5, abs=1e-6), name


def check_goes_on(engine: Engine, state: State, batch: Tree) -> None:
    """The next, healthy step is the one that would have come without the sick one."""
    sick = engine.state()
    healthy = engine_state(engine, state)
    sick |= {name: healthy[name] for name in healthy if name.startswith("param.")}
    sick["signals.device"] = healthy["signals.device"]  # the gate and the readiness have moved on
    engine.load_state(sick)
    after = run(engine, batch)
    report = engine.telemetry()
    assert report is not None
    assert (report.step, report.skipped, report.nonfinite_groups) == (state["step"] + 1, 1, ())
    load(engine, state)
    straight = run(engine, batch)
    assert changed(straight, after) == set()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_sick_parameter_skips_the_step(engine: Engine, group: str, poison: float) -> None:
    state, batch = case()
    sick = poisoned_parameter(state, PARAMETERS[group], poison)
    assert group in expected_groups(EVERYTHING, sick, batch)
    check_skipped(engine, EVERYTHING, sick, batch)
    check_goes_on(engine, state, batch)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("name", [n for n in FLOAT_INPUTS if n != "discount"])
def test_a_sick_input_skips_the_step(engine: Engine, name: str, poison: float) -> None:
    state, batch = case()
    check_skipped(engine, EVERYTHING, state, poisoned_input(batch, name, poison))
    check_goes_on(engine, state, batch)


@pytest.mark.parametrize("name", ["state", "next_state", "reward", "weight"])
def test_c51_alone_heals_no_nan(bare: Engine, name: str) -> None:
    """Clamping, projecting and masking must not turn a NaN into a number."""
    state, batch = case(BARE)
    check_skipped(bare, BARE, state, poisoned_input(batch, name, np.nan))
    check_goes_on(bare, state, batch)


@pytest.mark.parametrize("poison", POISONS)
def test_an_infinite_reward_is_a_certain_return_to_c51(bare: Engine, poison: float) -> None:
    """project() clamps it to v_max or v_min: C51 alone trains on. (A NaN is no return at all.)"""
    state, batch = case(BARE)
    batch = poisoned_input(batch, "reward", poison)
    load(bare, state)
    found = run(bare, batch)
    assert bool(found["skipped"]) == bool(np.isnan(poison))
    if not np.isnan(poison):
        _, reference = step(BARE, state, batch)
        np.testing.assert_allclose(found["td"], reference["td"], rtol=5e-5)


def test_a_nan_discount_skips_the_step(engine: Engine) -> None:
    state, batch = case()
    check_skipped(engine, EVERYTHING, state, poisoned_input(batch, "discount", np.nan))
    check_goes_on(engine, state, batch)


def test_an_overflowing_norm_is_not_finite(engine: Engine) -> None:
    """Finite gradients whose norm float32 cannot hold."""
    state, batch = case()
    state["params"]["b_c2"] = np.full_like(state["params"]["b_c2"], 3e38)
    load(engine, state)
    feed(engine, batch)
    before = engine.state()
    found = run(engine)
    assert np.isinf(found["grad_norm.curiosity"])
    report = engine.telemetry()
    assert report is not None and "curiosity" in report.nonfinite_groups
    assert changed(before, engine.state()) <= {"counters", "signals.device"}


def test_a_sick_step_among_queued_ones(engine: Engine) -> None:
    """Queued without waiting: every report names its own groups, and only the sick replays are skipped."""
    state, batch = case()
    other = random_batch(np.random.default_rng(7), EVERYTHING)
    sick = poisoned_input(batch, "weight", np.inf)
    load(engine, state)
    first = engine.telemetry()
    replays = first.replay if first is not None else 0
    for entry in (batch, sick, other, sick, sick, batch):
        feed(engine, entry)
        engine.step()
    engine.synchronize()
    reports = engine.telemetry_since(0)[-6:]
    assert [bool(r.nonfinite_groups) for r in reports] == [False, True, False, True, True, False]
    assert [r.skipped for r in reports] == [0, 1, 1, 2, 3, 3]
    assert [r.step - state["step"] for r in reports] == [1, 1, 2, 2, 2, 3]
    assert replays >= 0
