"""Runs of the whole step: the same bits whichever way it is run, and oracles that take their turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from fxengine import Engine, StepConfig
from fxengine.driver import Device, Target
from fxengine.graphs import ACTIVATIONS
from fxengine.nets.builder import StepBuilder
from fxengine.nets.step import specified_step
from fxengine.ops.gather import reference_indices
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


# -- gaps between rows -------------------------------------------------------------------------------------------


def padding(engine: Engine) -> np.ndarray:
    """What lies between tensors and between rows in parameters, gradients, moments and targets."""
    engine.synchronize()
    groups = {group.name: group for group in engine.builder.groups}
    found = [(g, t) for g in groups.values() for t in (g.params, g.grads, g.m, g.v)]
    found += [(groups[target.name], target.values) for target in engine.builder.target_groups]
    return np.concatenate([engine.plan.buffer(t).read()[g.padding()] for g, t in found])


def test_rows_of_the_default_step_are_read_16_bytes_at_a_time() -> None:
    """The strides that linear layers are given, of matrices wide enough: inputs have rows of 48 and 6 floats."""
    builder = StepBuilder(Target.of("sm_90"))
    specified_step(builder, StepConfig())
    builder.finish()
    groups, targets = builder.groups, builder.target_parameters
    assert groups["w_b0fc"].shape == (128, 257) and groups["w_b1fc"].shape == (128, 259)
    for p in groups.parameters:
        views = [p.value, p.grad, p.m, p.v, *([targets[p.name]] if p.name in targets else [])]
        assert all(t.ld % 4 == 0 and t.offset % 4 == 0 for t in views if p.is_matrix), p.name
    inputs = {t.storage for t in builder.inputs.values()}
    tensors = [t for r in builder.program.launches if "Linear" in r.family.struct for t in (*r.reads, *r.writes)]
    wide = [t for t in tensors if len(t.shape) == 2 and t.shape[1] > 4 and t.storage not in inputs]
    assert {153, 51, 256} <= {t.shape[1] for t in wide}
    # What the wire and the policy give to a weight has a record of its own: their rows are not aligned.
    assert not {257, 259} & {t.shape[1] for t in wide}
    labels = [r.label for r in builder.program.launches]
    assert all(labels.count(f"{name}.dw{part}") == 1 for name in ("b0fc", "b1fc") for part in ("", ".x2"))
    assert [t.name for t in wide if t.ld % 4 or t.offset % 4] == []


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_gaps_are_never_read(device: Device, precision: str) -> None:
    """NaN in everything that a step computes, gaps between rows included, before every step: the same bits."""
    hashes = []
    for fill in (0, 0x7FC00000):
        with drawing(device, precision=precision) as engine:
            computed = [
                s.name
                for s in engine.builder.program.storages.values()
                if s.arena in (ACTIVATIONS, "inputs") and s.data is None
            ]
            engine.signals["weight_decay"] = 0.3
            for _ in range(3):
                engine.synchronize()
                for name in computed:
                    engine.plan.buffer(name).fill_u32(fill)
                engine.step()
            hashes.append(engine.state_hash())
            report = engine.telemetry()
            assert report is not None and report.skipped == 0
    assert hashes[0] == hashes[1]


def test_padding_of_parameters_stays_zero(device: Device) -> None:
    with drawing(device) as engine:
        engine.signals["weight_decay"] = 0.3
        engine.signals["polyak_tau"] = 0.1
        after(engine, 9)
        assert any(p.value.ld != p.shape[1] for p in engine.builder.groups.parameters if p.is_matrix)
        found = padding(engine)
        assert found.size > 100 and not found.view(np.uint32).any()


def test_checkpoints_hold_no_padding(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with drawing(device) as engine:
        after(engine, 3)
        engine.save(path)
        digest = engine.state_hash()
        shapes = {p.name: p.shape for p in engine.builder.groups.parameters}
        assert engine.builder.groups.count == sum(int(np.prod(shape)) for shape in shapes.values())
        assert {n: engine.params[n].shape for n in shapes} == shapes
    with safe_open(str(path), framework="numpy") as file:
        stored = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a mapping)
        tight = {name: file.get_tensor(name) for name in stored}
    for kind in ("param", "m", "v"):
        assert {n: tuple(stored[f"{kind}.{n}"]) for n in shapes} == shapes
    assert stored["target.w_b0fc"] == list(shapes["w_b0fc"]) != [6, 8]
    with drawing(device, seed=7) as other:  # arrays without gaps, as every version has written them
        after(other, 2)
        other.load_state(tight)
        assert other.state_hash() == digest
        assert not padding(other).view(np.uint32).any()


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


@pytest.mark.parametrize("tokens", [3, 0])
def test_gathered_batches_and_written_ones_give_the_same_bits(device: Device, tokens: int) -> None:
    """With NaN in dead rows, which other records mask where the host writes; read back, gathered ones are zeros."""
    config = replace(EVERYTHING, tokens=tokens, ofi=6)
    data = resident(config)
    with drawing(device, config=config) as gathered, Engine(step_config(config), device=device) as written:
        for replay in range(3):
            index = reference_indices(0, replay, 1, config.batch, ROWS)
            written.write(**{name: rows[index] for name, rows in data.items()})
            assert after(gathered, 1) == after(written, 1)
            dead = data["discount"][index] == 0
            assert dead.any() and np.isnan(data["next_ofi"][index][dead]).all()
            for name in ("next_ofi",) if tokens else ("next_ofi", "next_state"):
                expected = np.where(dead[:, None], np.float32(0), data[name][index])
                assert gathered.output(name).tobytes() == expected.tobytes()
        report = gathered.telemetry()
        assert report is not None and report.skipped == 0


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
