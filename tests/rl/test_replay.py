"""The replay of an engine: what is stored, what a step reads, insertion from the host, checkpoints, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine import Engine, StepConfig
from fxengine.driver import Device
from fxengine.graphs import Plan, Program
from fxengine.nets.builder import StepBuilder
from fxengine.ops.priorities import reference_leaf, reference_sample, reference_sums, reference_weights
from fxengine.ops.replay import reference_starts, reference_transitions
from fxengine.rl.replay import ARENA, STAGING_ROWS, Field, Memory, Replay, insert
from tests.nets.whole import BARE, EVERYTHING, step_config
from tests.support import assert_close

CONFIG = step_config(BARE)
FIELDS = {"state": Field(CONFIG.state), "actions": Field(1, "int32")}
SEED = 5


def replay(slots: int = 8, envs: int = 3, **options: Any) -> Replay:
    return Replay(slots, envs, **{"fields": FIELDS, "n_step": 2, **options})


def make(device: Device, spec: Replay, config: StepConfig = CONFIG, **options: Any) -> Engine:
    return Engine(config, device=device, seed=SEED, replay=spec, **options)


def random_step(spec: Replay, rng: np.random.Generator, ends: float = 0.25) -> dict[str, np.ndarray]:
    """A step of all environments with values of every kind, as `Memory.add` takes it."""
    step: dict[str, np.ndarray] = {}
    for name, field in spec.stored.items():
        shape = (spec.envs, *field.dims)
        if field.dtype == "float32" or field.dtype == "bfloat16":
            step[name] = rng.standard_normal(shape).astype(np.float32)
        else:
            step[name] = rng.integers(0, 2, shape).astype(field.format.given)
    del step["done"]
    step["terminated"], step["truncated"] = rng.random((2, spec.envs)) < ends / 2
    return step


def fill(memory: Memory, spec: Replay, steps: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Insert random steps; returns the arrays [slots, envs, ...] that the replay holds then."""
    rng = np.random.default_rng(seed)
    held: dict[str, np.ndarray] = {}
    for t in range(steps):
        step = random_step(spec, rng)
        memory.add(**step)
        for name, array in step.items():
            held.setdefault(name, np.zeros((spec.slots, *array.shape), array.dtype))[t % spec.slots] = array
    return held


def done(held: dict[str, np.ndarray]) -> np.ndarray:
    return held["terminated"] + 2 * held["truncated"]


def rows(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])[index]


def tree(engine: Engine) -> tuple[np.ndarray, np.ndarray, float]:
    """Leaves of the rows, sums, maximum; the sums are those of the leaves."""
    state = engine.state()
    leaves = state[f"replay.leaves.{engine.replay.n_step}_step"]
    np.testing.assert_array_equal(state["replay.sums"], reference_sums(leaves))
    return leaves.reshape(-1)[: engine.replay.capacity], state["replay.sums"], float(state["replay.maximum"][0])


# -- what a step reads -------------------------------------------------------------------------------------------------


@settings(max_examples=4)
@given(steps=st.integers(3, 30), n=st.integers(1, 3), prioritized=st.booleans())
def test_a_step_reads_the_transitions_it_draws(device: Device, steps: int, n: int, prioritized: bool) -> None:
    spec = replay(n_step=n, prioritized=prioritized)
    with make(device, spec, guard=True, signals={"gamma": 0.75}) as engine, Memory(engine) as memory:
        held = fill(memory, spec, steps)
        for turn in range(2):
            leaves = tree(engine)[0] if prioritized else None
            engine.step()
            start = engine.output("replay.start")
            if leaves is None:
                expected = reference_starts(
                    steps, spec.slots, spec.envs, n, seed=SEED, replay=turn, stream=1, batch=CONFIG.batch
                )
                np.testing.assert_array_equal(start, expected)
                assert (engine.output("weight") == 1).all()
            else:
                weights = reference_weights(leaves[start], float(np.float32(0.4)))
                assert_close(engine.output("weight"), weights, factor=16, name="weight")
            reward, discount, end = reference_transitions(held["reward"], done(held), start, gamma=0.75, n_step=n)
            assert_close(engine.output("reward"), reward, factor=2, name="reward")
            np.testing.assert_array_equal(engine.output("discount"), discount)
            np.testing.assert_array_equal(engine.output("replay.end"), end)
            for name, index in (("state", start), ("actions", start), ("next_state", end)):
                np.testing.assert_array_equal(engine.output(name), rows(held[name], index))
        engine.check_guards()


def test_a_step_sees_the_gamma_that_was_set_when_it_was_launched(device: Device) -> None:
    """More steps than the signal ring has rows, launched without waiting; each reads its own row."""
    spec = replay(slots=9, n_step=1)
    with make(device, spec) as engine, Memory(engine) as memory:
        for t in range(9):
            memory.add(**{**random_step(spec, np.random.default_rng(t)), "terminated": np.zeros(3, bool)})
        for turn in range(80):
            engine.signals["gamma"] = turn / 80
            engine.step()
            if turn in (5, 79):
                assert (engine.output("discount") == np.float32(turn / 80)).all()


def test_evaluation_reads_given_rows_and_leaves_the_replay_alone(device: Device) -> None:
    spec = replay(prioritized=True)
    with make(device, spec) as engine, Memory(engine) as memory:
        fill(memory, spec, 5)
        engine.step()
        inputs = {name: engine.output(name) for name in engine.builder.inputs}
        before = engine.state_hash()
        first = engine.evaluate(inputs)
        assert np.isfinite(first["L_c51"]) and engine.evaluate(inputs) == first
        assert engine.state_hash() == before


def test_every_input_of_the_whole_step_comes_from_the_replay(device: Device) -> None:
    """Labels and order flow are fields like others; next_ofi is taken from the last step of a transition."""
    config = step_config(EVERYTHING)
    fields = {
        "state": Field(config.state),
        "actions": Field(len(config.branches), "int32"),
        "ofi": Field(config.ofi),
        "next_ofi": Field(config.ofi, "bfloat16"),
        "nb_label": Field((), "int32"),
        "regime_label": Field((), "int32"),
    }
    spec = replay(fields=fields, n_step=3, prioritized=True)
    with make(device, spec, config) as engine, Memory(engine) as memory:
        held = fill(memory, spec, 9)
        for decompose in (False, True):
            engine.step(decompose=decompose)
            start, end = engine.output("replay.start"), engine.output("replay.end")
            for name in ("state", "actions", "ofi", "nb_label", "regime_label"):
                np.testing.assert_array_equal(engine.output(name), rows(held[name], start))
            np.testing.assert_allclose(engine.output("next_ofi"), rows(held["next_ofi"], end), rtol=2**-8)
        report = engine.telemetry()
        assert report is not None and (report.step, report.skipped) == (2, 0)


def reader(shape: tuple[int, ...], batch: int = 16) -> Any:
    """A step that reads images and fits the reward from them."""

    def definition(step: StepBuilder) -> None:
        from fxengine.ops.decoders import mean_squares
        from fxengine.train.groups import ParamSpec

        width = int(np.prod(shape))
        step.group("head", [ParamSpec("w_head", (1, width)), ParamSpec("b_head", (1,))])
        state = step.input("state", (batch, *shape))
        step.input("next_state", (batch, *shape))
        y = step.tape.linear(state.reshape(batch, width), "w_head", "b_head", name="y")
        goal = step.input("reward", (batch,)).reshape(batch, 1)
        mean_squares(step.program, y, goal, dy=step.loss_gradient(y), loss=step.report("L"), name="loss")

    return definition


@pytest.mark.parametrize("field", [Field((2, 3, 5), "uint8", scale=1 / 255), Field((2, 3, 5), "bfloat16")])
def test_images_are_served_as_float32(device: Device, field: Field) -> None:
    spec = Replay(4, 2, {"state": field})
    with Engine(reader(field.dims), device=device, groups={0: "head"}, replay=spec, seed=SEED) as engine:
        memory = Memory(engine)
        rng = np.random.default_rng(0)
        if field.dtype == "uint8":
            images = rng.integers(0, 256, (4, 2, 2, *field.dims)).astype(np.uint8)
            seen = np.float32(1 / 255) * images.astype(np.float32)
        else:
            images = seen = rng.integers(-128, 128, (4, 2, 2, *field.dims)).astype(np.float32) / 32
        for t in range(4):
            ends = np.zeros((2, 2), bool)
            memory.add(
                state=images[t, 0], next_state=images[t, 1], reward=np.float32([1, 2]), terminated=ends[0],
                truncated=ends[1],
            )  # fmt: skip
        engine.step()
        start = engine.output("replay.start")
        np.testing.assert_array_equal(engine.output("state"), rows(seen[:, 0], start))
        np.testing.assert_array_equal(engine.output("next_state"), rows(seen[:, 1], start))


# -- priorities --------------------------------------------------------------------------------------------------------


def test_a_step_sets_the_priorities_of_its_batch(device: Device) -> None:
    spec = replay(slots=40, prioritized=True)
    with make(device, spec, signals={"priority_alpha": 0.75, "priority_eps": 0.125}) as engine:
        memory = Memory(engine)
        fill(memory, spec, 20)
        for turn in range(3):
            before, _, maximum = tree(engine)
            starts = reference_sample(before, seed=SEED, replay=turn, stream=1, batch=CONFIG.batch)
            engine.step()
            np.testing.assert_array_equal(engine.output("replay.start"), starts)
            td, (after, _, risen) = engine.output("td"), tree(engine)
            expected = before.astype(np.float64)
            expected[starts[::-1]] = reference_leaf(td[::-1], alpha=0.75, eps=0.125)
            assert_close(after, expected, factor=16, name="leaves")
            assert risen == max(maximum, after[starts].max())
        memory.add(**random_step(spec, np.random.default_rng(9)))
        newest = tree(engine)[0].reshape(40, 3)
        np.testing.assert_array_equal(newest[19], np.float32(max(1.0, risen)))
        assert not newest[20:].any()


def test_a_skipped_step_leaves_the_priorities(device: Device) -> None:
    spec = replay(prioritized=True)
    with make(device, spec) as engine:
        memory = Memory(engine)
        fill(memory, spec, 8)
        engine.step()
        engine.synchronize()
        good = engine.params["w_v1"]
        engine.params["w_v1"] = np.where(np.arange(good.size).reshape(good.shape) == 1, np.nan, good).astype(np.float32)
        before = engine.state()
        engine.step()
        after = engine.state()
        assert [n for n in before if before[n].tobytes() != after[n].tobytes()] == ["counters"]
        report = engine.telemetry()
        assert report is not None and report.skipped == 1


@pytest.mark.parametrize(("tokens", "masks"), [(3, 0), (0, 1)])
def test_how_many_levels_a_replay_costs(device: Device, tokens: int, masks: int) -> None:
    """A uniform batch costs the levels of one gathered from resident rows, and without attention one more: it masks s'
    itself, resident rows are masked as they are gathered. Drawing by priority is one more."""
    config = replace(CONFIG, tokens=tokens)
    depths = {}
    for prioritized in (False, True):
        with make(device, replay(prioritized=prioritized), config) as engine:
            census = engine.graph.census()
            depths[prioritized] = census.depth
            assert census.launches["replay_gather"] == census.launches["replay_sample"] == 1
            assert census.records["replay_gather"] == 3
            assert census.launches.get("priority_sample", 0) == census.launches.get("priority_update", 0) == prioritized
    data = {name: np.zeros((9, 6), np.float32) for name in ("state", "next_state")}
    data |= {name: np.zeros(9, np.float32) for name in ("reward", "discount", "weight")}
    with Engine(config, device=device, data={**data, "actions": np.zeros((9, 1), np.int32)}) as resident:
        depth = resident.graph.census().depth
    assert depths == {False: depth + masks, True: depth + masks + 1}


# -- insertion ---------------------------------------------------------------------------------------------------------


def test_memory_counts_what_it_holds(device: Device) -> None:
    spec = replay(slots=4, envs=3)
    with make(device, spec) as engine, Memory(engine) as memory:
        assert (len(memory), memory.filled) == (0, 0.0)
        fill(memory, spec, 3)
        assert (len(memory), memory.filled) == (9, 0.75)
        fill(memory, spec, 3)
        assert (len(memory), memory.filled) == (12, 1.0)


def test_bound_arrays_are_inserted_as_they_are_when_called(device: Device) -> None:
    spec = replay(slots=3 * STAGING_ROWS)
    with make(device, spec) as engine, Memory(engine) as memory, make(device, spec) as other:
        given = Memory(other)
        bound = random_step(spec, np.random.default_rng(0))
        insert_bound = memory.bind(**bound)
        for t in range(2 * STAGING_ROWS + 3):  # often without an end in any environment
            step = random_step(spec, np.random.default_rng(t), ends=0.1)
            for name, array in step.items():
                bound[name][...] = array
            insert_bound()
            given.add(**step)
        assert (engine.inserted, engine.state_hash()) == (other.inserted, other.state_hash())


def test_more_steps_than_the_staging_ring_has_rows(device: Device) -> None:
    spec = replay(slots=3 * STAGING_ROWS)
    with make(device, spec) as engine, Memory(engine) as memory:
        held = fill(memory, spec, 3 * STAGING_ROWS)
        state = engine.state()
    np.testing.assert_array_equal(state["replay.field.state"][..., : CONFIG.state], held["state"])
    np.testing.assert_array_equal(state["replay.field.reward"], held["reward"])
    np.testing.assert_array_equal(state["replay.field.done"], done(held))


def test_steps_from_the_device_equal_steps_from_the_host(device: Device) -> None:
    """A program of its own over the engine's replay, two insertions to a launch; the host goes on where it ends."""
    spec = replay(n_step=1, prioritized=True)
    rng = np.random.default_rng(3)
    steps = [random_step(spec, rng) for _ in range(6)]
    with make(device, spec) as fed, make(device, spec) as collected:
        memory = Memory(fed)
        for step in steps:
            memory.add(**step)
        program = Program(device.target)
        stored = spec.declare(program)
        sources = [
            {
                name: program.tensor(f"{turn}.{name}", (spec.envs, *field.dims), field.format.given, arena="mine")
                for name, field in spec.stored.items()
            }
            for turn in range(2)
        ]
        for source in sources:
            insert(program, stored, source)
        with Plan(program, device, base=collected.plan, share=(ARENA,)) as plan:
            for pair in (steps[:2], steps[2:4]):
                for source, step in zip(sources, pair, strict=True):
                    bits = (step["terminated"] + 2 * step["truncated"]).astype(np.int32)
                    for name, tensor in source.items():
                        plan.buffer(tensor).write({**step, "done": bits}[name])
                plan.run(stream=collected.stream)
                collected.inserted += 2
            collected.synchronize()
        second = Memory(collected)
        for step in steps[4:]:
            second.add(**step)
        assert fed.state_hash() == collected.state_hash()


# -- the same bits -----------------------------------------------------------------------------------------------------


def drive(engine: Engine, memory: Memory, steps: int, *, first: int = 0, captured: bool = True) -> str:
    """Insert and train in turn; the data are a function of the number of the step."""
    for t in range(first, first + steps):
        memory.add(**random_step(engine.replay, np.random.default_rng(t)))
        if t >= engine.replay.n_step:
            engine.step(captured=captured)
    return engine.state_hash()


@pytest.mark.parametrize("prioritized", [False, True])
def test_graph_uncaptured_and_again_give_the_same_bits(device: Device, prioritized: bool) -> None:
    hashes = set()
    for captured in (True, True, False):
        with make(device, replay(prioritized=prioritized)) as engine:
            hashes.add(drive(engine, Memory(engine), 12, captured=captured))
    assert len(hashes) == 1


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_resumed_run_has_the_same_bits(device: Device, tmp_path: Path, prioritized: bool) -> None:
    """Contents, priorities and counters are part of the checkpoint; a memory goes on with the engine's count."""
    spec, path = replay(prioritized=prioritized), tmp_path / "run.safetensors"
    with make(device, spec) as engine, Memory(engine) as memory:
        drive(engine, memory, 20)
        engine.save(path)
        saved = engine.state()
        straight = drive(engine, memory, 20, first=20)
        engine.load_state(saved)
        assert (engine.inserted, memory.filled) == (20, 1.0)
        assert drive(engine, memory, 20, first=20) == straight
    with Engine.load(path, device=device, replay=spec) as resumed, Memory(resumed) as memory:
        assert resumed.inserted == 20
        assert drive(resumed, memory, 20, first=20) == straight


def test_a_state_of_another_replay_is_refused(device: Device) -> None:
    def refused(message: str, one: Replay, other: Replay) -> None:
        with make(device, one) as engine, make(device, other) as refusing, pytest.raises(ValueError, match=message):
            refusing.load_state(engine.state())

    refused(
        r"replay\.field\.state is float32 \(8, 3, 8\), expected float32 \(3, 8, 8\)",
        replay(slots=8, envs=3),
        replay(slots=3, envs=8),
    )
    refused(r"replay\.leaves\.1_step is missing", replay(prioritized=True), replay(n_step=1, prioritized=True))


@pytest.mark.parametrize("made", [True, False], ids=["after", "before"])
def test_an_interrupt_around_an_insertion_loses_no_count(
    device: Device, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """Ctrl-C may come when the launch is made and not counted yet; the next steps must not take an old row."""
    spec = replay(slots=2 * STAGING_ROWS)
    steps = [random_step(spec, np.random.default_rng(t)) for t in range(STAGING_ROWS + 4)]
    with make(device, spec) as engine, Memory(engine) as memory:
        for step in steps[:3]:
            memory.add(**step)
        launch = memory._launch

        def interrupted() -> None:
            if made:
                launch()
            raise KeyboardInterrupt

        monkeypatch.setattr(memory, "_launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            memory.add(**steps[3])
        monkeypatch.setattr(memory, "_launch", launch)
        rest = steps[4:] if made else steps[3:]
        for step in rest:
            memory.add(**step)
        assert engine.inserted == len(steps)
        held = engine.state()["replay.field.state"][: len(steps)]
    np.testing.assert_array_equal(held[..., : CONFIG.state], np.stack([step["state"] for step in steps]))
