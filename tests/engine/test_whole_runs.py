"""Runs of the whole step: the same bits whichever way it is run, and oracles that take their turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.signals import BOUND_FAMILIES, SignalMap
from fxengine.train.oracles import reference_p99
from tests.nets.whole import BARE, EVERYTHING, changed, feed, load, make, restore, run, snapshot, step_config, trained
from tests.reference.cases import random_batch, random_case
from tests.reference.config import FAMILIES, GROUPS, Config, Tree, bound_slot, group_shapes

ROWS = 40
QUEUED = 64
EVERY = 3


def resident(config: Config = EVERYTHING, seed: int = 5) -> dict[str, np.ndarray]:
    """Rows of every input but the quantile fractions, which the device draws."""
    batch = random_batch(np.random.default_rng(seed), replace(config, batch=ROWS))
    return {
        name: x.astype(np.int32 if x.dtype.kind == "i" else np.float32)
        for name, x in batch.items()
        if not name.startswith("tau")
    }


def drawing(device: Device, *, config: Config = EVERYTHING, **options: Any) -> Engine:
    """An engine that gathers its batches and draws its quantile fractions itself."""
    return Engine(step_config(config), device=device, data=resident(config), **options)


def after(engine: Engine, steps: int, *, captured: bool = True) -> str:
    for _ in range(steps):
        engine.step(captured=captured)
    return engine.state_hash()


# -- determinism -------------------------------------------------------------------------------------------------


def test_graph_uncaptured_and_again_give_the_same_bits(device: Device) -> None:
    with drawing(device) as a, drawing(device) as b, drawing(device) as c, drawing(device, seed=1) as d:
        hashes = [after(a, 5), after(b, 5), after(c, 5, captured=False), after(d, 5)]
        assert hashes[0] == hashes[1] == hashes[2] != hashes[3]
        reports = [engine.telemetry() for engine in (a, b, c)]
        assert reports[0] == reports[1] == reports[2]
        report = reports[0]
        assert report is not None and (report.step, report.skipped) == (5, 0)
        assert all(np.isfinite(x) for x in report.values())
        for name in a.builder.outputs:
            assert a.output(name).tobytes() == c.output(name).tobytes(), name


def test_graph_and_uncaptured_steps_mix(device: Device) -> None:
    with drawing(device) as a, drawing(device) as b:
        expected = after(a, 4)
        for captured in (True, False, False, True):
            b.step(captured=captured)
        assert b.state_hash() == expected


def test_64_queued_replays_with_rates_of_their_own(device: Device) -> None:
    rates = [1e-5 * (i + 1) for i in range(QUEUED)]
    with drawing(device) as queued, drawing(device) as waited:
        for lr in rates:
            queued.signals["lr"] = lr
            queued.step()
        for lr in rates:
            waited.signals["lr"] = lr
            waited.step()
            waited.synchronize()
        assert queued.state_hash() == waited.state_hash()
        assert queued.telemetry_since(0) == waited.telemetry_since(0)
        assert queued.graph.census().instantiations == 1


def test_a_decomposition_changes_no_bit(device: Device) -> None:
    """Nor does it cost the plain step a node; it is reported for its own replay alone."""
    with drawing(device) as plain, drawing(device) as split:
        nodes = len(split.plan.nodes)
        for decompose in (False, True, True, False):
            plain.step()
            split.step(decompose=decompose)
            assert plain.state_hash() == split.state_hash()
            report, other = split.telemetry(), plain.telemetry()
            assert report is not None and other is not None
            assert (report.decomposition is not None) == decompose
            assert other.decomposition is None
            assert all(report[name] == other[name] for name in other if not name.startswith(("split.", "decomposed")))
        assert len(split.plan.nodes) == len(plain.plan.nodes) == nodes


def test_a_resumed_run_has_the_same_bits(device: Device, tmp_path: Path) -> None:
    """Targets, spectral vectors, bounds, gate and readiness are part of a checkpoint."""
    path = tmp_path / "whole.safetensors"
    with drawing(device) as engine:
        after(engine, 3)
        engine.save(path)
        straight = after(engine, 3)
    with Engine.load(path, device=device, data=resident()) as resumed:
        assert after(resumed, 3) == straight


@pytest.mark.parametrize("lacking", ["nothing", "aux", "all"])
def test_an_evaluation_gives_the_losses_of_a_step(device: Device, lacking: str) -> None:
    """On the same rows, with the signals as the host has set them, before any step and without a trace."""
    config = {"nothing": EVERYTHING, "aux": replace(EVERYTHING, aux_h=0), "all": BARE}[lacking]
    state, batch = random_case(2, config)
    with make(device, config) as engine:
        load(engine, state)
        rows = {n: np.asarray(batch[n]).astype(t.dtype).reshape(t.shape) for n, t in engine.builder.inputs.items()}
        before = trained(snapshot(engine))
        found = engine.evaluate(rows)
        assert changed(before, trained(snapshot(engine))) == set()
        report = run(engine, batch)
        losses = {n for n in report if n.startswith(("L_", "accuracy_"))}
        assert losses and losses <= set(found)
        for name in losses:
            assert found[name] == pytest.approx(float(report[name]), rel=1e-6, abs=1e-7), name
        few = engine.evaluate({name: x[:4] for name, x in rows.items()})
        assert all(np.isfinite(few[name]) for name in losses)


@pytest.mark.parametrize("lacking", ["nothing", "aux", "iqn"])
def test_device_owned_signals_are_mirrored_in_every_report(device: Device, lacking: str) -> None:
    """Gate, readiness and bounds of what the step has, as the replay left them."""
    config = {
        "nothing": EVERYTHING,
        "aux": replace(EVERYTHING, aux_h=0),
        "iqn": replace(EVERYTHING, iqn_quantiles=0),
    }[lacking]
    state, batch = random_case(2, config)
    with make(device, config) as engine:
        load(engine, state)
        feed(engine, batch)
        for _ in range(2):
            engine.step()
            values = snapshot(engine)["signals.device"]
            report = engine.telemetry()
            assert report is not None
            owned = {s.name: s.index for s in engine.builder.signals.slots.values() if s.device_owned}
            present = {*state["state"], *(f"bound.{f}.{g}" for f in FAMILIES for g in group_shapes(config))}
            assert present == set(owned) & set(report)
            for name in present:
                assert report[name] == values[owned[name]], name


def test_quantile_fractions_are_drawn_anew_in_every_step(device: Device) -> None:
    with drawing(device) as engine:
        seen = []
        for _ in range(3):
            engine.step()
            engine.synchronize()
            seen += [engine.plan.buffer(name).read().view(np.float32) for name in ("tau", "tau_target")]
        assert all(((x >= 0) & (x < 1)).all() for x in seen)
        assert len({x.tobytes() for x in seen}) == len(seen)
        assert seen[0].size == EVERYTHING.batch * EVERYTHING.iqn_quantiles


def test_the_helpers_of_these_tests_see_the_engine_s_state(device: Device) -> None:
    """`snapshot`, which reads in large pieces, against `Engine.state`; `restore` against `Engine.load_state`."""
    with make(device) as engine:
        state, batch = random_case(2, EVERYTHING)
        load(engine, state)
        run(engine, batch)
        named, found = engine.state(), snapshot(engine)
        gradients = {n for n in found if n.startswith("grad.")}
        assert set(named) - {"signals.host"} == set(found) - gradients
        assert changed({n: x for n, x in found.items() if n not in gradients}, {
            n: x for n, x in named.items() if n != "signals.host"
        }) == set()  # fmt: skip
        expected = run(engine)
        restore(engine, found)
        assert changed(expected, run(engine)) == set()


# -- oracles -----------------------------------------------------------------------------------------------------


RARE = replace(EVERYTHING, oracle_every=EVERY)


@pytest.fixture(scope="module")
def rare(device: Device) -> Iterator[Engine]:
    """Oracles every third step, and no bound known at first."""
    with make(device, RARE) as engine:
        yield engine


def start(engine: Engine, config: Config = EVERYTHING) -> None:
    """Step 0 of a state without bounds, at a replay with which the count to the next run of the oracles begins."""
    state, batch = random_case(2, config)
    state["bounds"] = dict.fromkeys(state["bounds"], 0.0)
    state["step"] = 0
    load(engine, state)
    feed(engine, batch)
    while snapshot(engine)["counters"][0] % config.oracle_every:
        engine.step()
    load(engine, state)


def slots(arrays: Tree) -> dict[int, float]:
    """Every bound slot that there could be."""
    indices = [bound_slot(group, family) for group in GROUPS for family in FAMILIES]
    return {i: float(arrays["signals.device"][i]) for i in indices}


def test_between_runs_the_slots_stand(rare: Engine) -> None:
    start(rare, RARE)
    history = [slots(snapshot(rare))]
    for _ in range(2 * EVERY + 1):
        rare.step()
        history.append(slots(snapshot(rare)))
    moved = [t for t in range(1, len(history)) if history[t] != history[t - 1]]
    assert moved == [EVERY, 2 * EVERY]
    assert not any(history[EVERY - 1].values())
    assert all(history[EVERY].values()), "every group has parameters, curiosity too"


def test_a_run_takes_the_exact_percentile_of_every_group(rare: Engine) -> None:
    """p99 over all of a group, of what the step leaves: weights after Adam and spectral norm, and both moments."""
    start(rare, RARE)
    for _ in range(EVERY):
        found = run(rare)
    headroom = np.float32(rare.signals["oracle_headroom"])
    for group, table in group_shapes(EVERYTHING).items():
        for family, kind in (("weight", "param"), ("adam_m", "m"), ("adam_v", "v")):
            values = np.concatenate([found[f"{kind}.{name}"].ravel() for name in table])
            expected = headroom * np.float32(reference_p99(values))
            assert found[f"bound.{bound_slot(group, family)}"] == expected, (group, family)
        grads = np.concatenate([found[f"grad.{name}"].ravel() for name in table])
        taken = np.float32(min(1.0, rare.signals[f"clip.{group}"] / (found[f"grad_norm.{group}"] + 1e-6)))
        bound = float(found[f"bound.{bound_slot(group, 'grad')}"])
        assert bound == pytest.approx(float(headroom * taken * np.float32(reference_p99(grads))), rel=1e-5), group


def test_adam_of_the_next_step_uses_the_bounds(rare: Engine) -> None:
    """With next to no headroom the first run leaves bounds that everything after it must keep to."""
    start(rare, RARE)
    for _ in range(EVERY - 1):
        rare.step()
    kept = rare.signals.as_dict()
    rare.signals.update({"oracle_headroom": 0.25, "eps_clamp_floor": 0.0, "sn_max": 100.0})
    try:
        free, bound = run(rare), run(rare)
    finally:
        rare.signals.update(kept)
    for group, table in group_shapes(EVERYTHING).items():
        for family, kind in (("weight", "param"), ("adam_m", "m"), ("adam_v", "v")):
            limit = free[f"bound.{bound_slot(group, family)}"]
            assert limit == bound[f"bound.{bound_slot(group, family)}"], "no run between"
            names = [n for n, shape in table.items() if kind != "param" or len(shape) > 1]
            assert max(np.abs(free[f"{kind}.{n}"]).max() for n in names) > limit
            assert max(np.abs(bound[f"{kind}.{n}"]).max() for n in names) <= limit, (group, family)


@pytest.mark.parametrize("lacking", ["bare", "no_aux"])
def test_slots_of_absent_groups_stay_zero(device: Device, lacking: str) -> None:
    config = BARE if lacking == "bare" else replace(EVERYTHING, aux_h=0)
    present = set(group_shapes(config))
    with make(device, config) as engine:
        start(engine, config)
        run(engine)
        run(engine)
        found = slots(snapshot(engine))
        assert {g.name for g in engine.builder.groups} == present
        assert set(engine.builder.absent_groups) == set(GROUPS) - present
        for group in GROUPS:
            values = [found[bound_slot(group, family)] for family in FAMILIES]
            assert all(values) if group in present else not any(values), group


def test_the_slots_are_the_specification_s() -> None:
    named = SignalMap().slots
    for group in GROUPS:
        for family in FAMILIES:
            assert named[f"bound.{family}.{group}"].index == bound_slot(group, family)
    assert tuple(BOUND_FAMILIES) == FAMILIES
