"""Draws, n-step returns, rows out and steps in: the kernels against their NumPy twins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from fxengine.driver import Arena, Device, Stream
from fxengine.graphs import MAPPED, Plan, Program, ProgramError, Tensor
from fxengine.ops import insertion, replay
from fxengine.ops.insertion import reference_bfloat16
from fxengine.ops.replay import FORMATS, Column, Ring, Sampled, reference_starts, reference_transitions
from tests.support import assert_close

STREAM = 1


def ring(program: Program, slots: int, envs: int, n_step: int) -> Ring:
    return Ring(
        counters=program.tensor("ring", (2,), np.uint64, arena=replay.ARENA),
        rewards=replay.column(program, "reward", slots, envs, 1, FORMATS["float32"]).data,
        done=replay.column(program, "done", slots, envs, 1, FORMATS["int32"]).data,
        n_step=n_step,
    )


def counters(program: Program, *, turn: int = 0, seed: int = 0) -> Tensor:
    return program.tensor("counters", (4,), np.uint64, arena="state", data=np.array([turn, 0, 0, seed], np.uint64))


def number(program: Program, name: str, value: float) -> Tensor:
    return program.tensor(name, (1,), arena="constants", data=np.float32([value]))


def sampled(program: Program, batch: int) -> Sampled:
    rows = [program.tensor(name, (batch,), np.int32) for name in ("start", "end")]
    return Sampled(*rows, *(program.tensor(name, (batch,)) for name in ("out_reward", "discount", "weight")))


@contextmanager
def planned(program: Program, device: Device, contents: Mapping[str, ArrayLike]) -> Iterator[tuple[Plan, Stream]]:
    """A guarded plan with these contents of storages, by name."""
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        for name, array in contents.items():
            plan.buffer(name).write(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        yield plan, stream
        stream.synchronize()
        plan.check_guards()


def run(plan: Plan, stream: Stream, *outputs: Tensor) -> list[np.ndarray]:
    plan.run(stream=stream)
    stream.synchronize()
    return [plan.buffer(t).read() for t in outputs]


@dataclass(frozen=True)
class History:
    """A replay of random rewards and episode ends."""

    slots: int
    envs: int
    n_step: int
    inserted: int
    rewards: np.ndarray
    done: np.ndarray

    @classmethod
    def random(cls, slots: int, envs: int, n_step: int, extra: int, seed: int, ends: float = 0.3) -> History:
        rng = np.random.default_rng(seed)
        done = rng.integers(1, 4, (slots, envs)) * (rng.random((slots, envs)) < ends)
        rewards = rng.standard_normal((slots, envs)).astype(np.float32)
        return cls(slots, envs, n_step, n_step + extra, rewards, done.astype(np.int32))

    @property
    def contents(self) -> dict[str, np.ndarray]:
        ring = np.array([self.inserted, self.inserted % self.slots], np.uint64)
        return {"ring": ring, "reward": self.rewards, "done": self.done}

    def starts(self, batch: int, *, seed: int = 0, turn: int = 0) -> np.ndarray:
        return reference_starts(
            self.inserted, self.slots, self.envs, self.n_step, seed=seed, replay=turn, stream=STREAM, batch=batch
        )


histories = st.builds(
    lambda n, more, envs, extra, seed: History.random(n + more, envs, n, extra, seed),
    st.integers(1, 6), st.integers(0, 9), st.sampled_from([1, 2, 3, 33]), st.integers(0, 40), st.integers(0, 99),
)  # fmt: skip


# -- draws and returns -------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(history=histories, batch=st.sampled_from([1, 7, 256, 300]), gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_transitions_equal_the_reference(device: Device, history: History, batch: int, gamma: float) -> None:
    program = Program(device.target)
    out = sampled(program, batch)
    replay.sample(
        program,
        ring(program, history.slots, history.envs, history.n_step),
        out,
        counters=counters(program, turn=3, seed=9),
        stream=STREAM,
        gamma=number(program, "gamma", gamma),
        label="s",
    )
    with planned(program, device, history.contents) as (plan, stream):
        start, end, reward, discount, weight = run(
            plan, stream, out.start, out.end, out.reward, out.discount, out.weight
        )
    starts = history.starts(batch, seed=9, turn=3)
    np.testing.assert_array_equal(start, starts)
    expected = reference_transitions(
        history.rewards, history.done, starts, gamma=float(np.float32(gamma)), n_step=history.n_step
    )
    assert_close(reward, expected[0], factor=2, name="reward")
    assert_close(discount, expected[1], factor=2, name="discount")
    np.testing.assert_array_equal(end, expected[2])
    assert (weight == 1).all()


@given(history=histories)
def test_windows_never_cross_the_write_head(history: History) -> None:
    """The n steps of every start were inserted one after the other, and are still there."""
    slot, env = np.divmod(history.starts(200), history.envs)
    newest = history.inserted - 1
    age = (newest - slot) % history.slots  # steps from the start to the newest one
    assert (age >= history.n_step - 1).all() and (age <= min(newest, history.slots - 1)).all()
    assert (env < history.envs).all()


def test_starts_are_uniform() -> None:
    history = History.random(13, 3, 4, 50, seed=0)
    picked = np.concatenate([history.starts(1000, turn=turn) for turn in range(60)])
    head = history.inserted % 13
    valid = [((head + k) % 13) * 3 + env for k in range(10) for env in range(3)]
    counts = np.bincount(picked, minlength=39)
    assert counts.sum() == counts[valid].sum()
    # chi-squared with 29 degrees of freedom: below 58.3 with probability 0.999
    assert ((counts[valid] - 2000) ** 2 / 2000).sum() < 58.3


def test_a_step_after_the_end_of_an_episode_counts_for_nothing(device: Device) -> None:
    """NaN behind a done step reaches neither reward nor discount; terminated and truncated differ in the discount."""
    program = Program(device.target)
    history = replace(
        History.random(3, 2, 3, 0, seed=0),
        rewards=np.float32([[1, 1], [2, 2], [np.nan, np.nan]]),
        done=np.int32([[0, 0], [1, 2], [0, 0]]),
    )
    out = sampled(program, 64)
    made = ring(program, 3, 2, 3)
    gamma = number(program, "gamma", 0.5)
    replay.sample(program, made, out, counters=counters(program), stream=STREAM, gamma=gamma, label="s")
    with planned(program, device, history.contents) as (plan, stream):
        start, end, reward, discount = run(plan, stream, out.start, out.end, out.reward, out.discount)
    assert set(start) == {0, 1}
    np.testing.assert_array_equal(end, start + 2)
    assert (reward == 2.0).all()
    np.testing.assert_array_equal(discount, np.where(start == 0, 0.0, 0.25))


# -- rows out ----------------------------------------------------------------------------------------------------------


def stored_rows(form: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random bits of every pattern that the format has."""
    dtype = FORMATS[form].stored
    size = int(np.prod(shape)) * dtype.itemsize
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(dtype).reshape(shape)


def served_rows(form: str, rows: np.ndarray, scale: float) -> np.ndarray:
    if form == "bfloat16":
        return (rows.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.float32(scale) * rows.astype(np.float32) if form == "uint8" else rows


def contents(field: Column, rows: np.ndarray) -> np.ndarray:
    """Rows [slots, envs, width] as the replay lays them out; the padding holds what nobody may see."""
    if field.ld == 1:
        return rows[..., 0]
    padded = np.full((*rows.shape[:2], field.ld), 93, rows.dtype)
    padded[..., : rows.shape[2]] = rows
    return padded


@settings(max_examples=40)
@given(
    history=histories,
    form=st.sampled_from(sorted(FORMATS)),
    width=st.sampled_from([1, 2, 3, 4, 5, 8, 48, 49, 4100, 8200]),
    batch=st.sampled_from([1, 5, 70]),
    at_end=st.booleans(),
)
def test_rows_are_served_exactly(
    device: Device, history: History, form: str, width: int, batch: int, at_end: bool
) -> None:
    program = Program(device.target)
    scale = 1 / 255 if form == "uint8" and width % 2 else 1.0
    made = ring(program, history.slots, history.envs, history.n_step)
    field = replay.column(program, "x", history.slots, history.envs, width, FORMATS[form], scale=scale)
    target = program.tensor("target", (batch, width), FORMATS[form].served)
    replay.gather(program, made, field, target, counters=counters(program), stream=STREAM, at_end=at_end, label="g")
    rows = stored_rows(form, (history.slots, history.envs, width))
    with planned(program, device, {**history.contents, "x": contents(field, rows)}) as (plan, stream):
        (result,) = run(plan, stream, target)
    starts = history.starts(batch)
    end = reference_transitions(history.rewards, history.done, starts, gamma=1, n_step=history.n_step)[2]
    expected = served_rows(form, rows.reshape(-1, width)[end if at_end else starts], scale)
    np.testing.assert_array_equal(result.view(np.uint32), expected.view(np.uint32))


def test_rows_go_into_columns_of_a_matrix_and_come_from_given_starts(device: Device) -> None:
    program = Program(device.target)
    history = History.random(5, 4, 1, 3, seed=1)
    made = ring(program, 5, 4, 1)
    field = replay.column(program, "x", 5, 4, 3, FORMATS["float32"])
    canvas = np.full((6, 9), -3.0, np.float32)
    target = program.tensor("target", canvas.shape, arena="state", data=canvas)
    chosen = np.int32([3, 3, 0, 19, 7, 8])
    starts = program.tensor("starts", (6,), np.int32, arena="state", data=chosen)
    replay.gather(
        program, made, field, target.columns(2, 5), counters=counters(program), stream=STREAM, starts=starts, label="g"
    )
    rows = stored_rows("float32", (5, 4, 3))
    with planned(program, device, {**history.contents, "x": contents(field, rows)}) as (plan, stream):
        (result,) = run(plan, stream, target)
    canvas[:, 2:5] = rows.reshape(-1, 3)[chosen]
    np.testing.assert_array_equal(result.view(np.uint32), canvas.view(np.uint32))


@pytest.mark.parametrize("form", ["float32", "uint8", "bfloat16"])
def test_rows_lie_beyond_two_to_the_31_elements(device: Device, form: str) -> None:
    """Row 5 of rows that are 2**30 elements apart: only the addresses are that large, the memory is one row's."""
    form_of, ld, row = FORMATS[form], 2**30, 5
    program = Program(device.target)
    made = ring(program, 8, 1, 1)
    field = replay.column(program, "x", 1, 1, 8, form_of)
    target = program.tensor("target", (2, 8), form_of.served)
    source = program.tensor("source", (1, 8), form_of.given, arena="state")
    starts = program.tensor("starts", (2,), np.int32, arena="state", data=np.int32([row, row]))
    replay.gather(program, made, field, target, counters=counters(program), stream=STREAM, starts=starts, label="g")
    insertion.insert(program, made, field, source, label="i")
    rows = stored_rows(form, (1, 8))
    given = served_rows(form, rows, 1.0) if form == "bfloat16" else rows
    given = np.where(np.isnan(given), 0, given).astype(form_of.given)
    with Arena(device, "one row", 256) as arena:
        home = arena.place("row", (8,), form_of.stored)
        far = {"data": home.address - row * ld * form_of.stored.itemsize, "ld": ld}
        program.launches[:] = [replace(r, fields={**r.fields, **far}) for r in program.launches]
        program.launches.reverse()  # the insertion first
        ring_state = {"ring": np.uint64([row, row]), "reward": np.zeros(8), "done": np.zeros(8)}
        start = {name: np.asarray(x, np.float32) for name, x in ring_state.items() if name != "ring"}
        with planned(program, device, {**start, "ring": ring_state["ring"], "source": given}) as (plan, stream):
            (result,) = run(plan, stream, target)
        np.testing.assert_array_equal(result, np.repeat(served_rows(form, home.read()[None], 1.0), 2, axis=0))
        np.testing.assert_array_equal(result[0], served_rows(form, rows, 1.0)[0] if form == "uint8" else given[0])


# -- steps in ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    slots=st.integers(1, 7),
    envs=st.sampled_from([1, 2, 5, 40]),
    steps=st.integers(1, 16),
    form=st.sampled_from(sorted(FORMATS)),
    width=st.sampled_from([1, 2, 3, 4, 7, 8, 30]),
    staged=st.booleans(),
)
def test_steps_fill_the_ring_and_wrap(
    device: Device, slots: int, envs: int, steps: int, form: str, width: int, staged: bool
) -> None:
    """From device tensors, and from a staging ring that is shorter than the run."""
    program = Program(device.target)
    made = ring(program, slots, envs, 1)
    field = replay.column(program, "x", slots, envs, width, FORMATS[form])
    given = FORMATS[form].given
    staging = None
    if staged:
        turn = program.tensor("turn", (1,), np.uint64, arena="state", data=np.zeros(1, np.uint64))
        staging = insertion.Staging(turn, program.tensor("head", (1,), np.uint64, arena=MAPPED), 3)
        source = program.tensor("source", (3, *field.data.shape[1:]), given, arena=MAPPED)
    else:
        source = program.tensor("source", (envs, width), given, arena="state")
    insertion.insert(program, made, field, source, staging=staging, label="i")
    insertion.advance(program, made, staging=staging, label="a")
    rng = np.random.default_rng(0)
    history = rng.integers(0, 256, (steps, envs, width)).astype(given) / (3 if given == np.float32 else 1)
    history = history.astype(given)
    empty = {name: np.zeros(t.shape, t.dtype) for name, t in (("ring", made.counters), ("x", field.data))}
    with planned(program, device, empty) as (plan, stream):
        for t, rows in enumerate(history):
            if staged:
                ring_rows = plan.mapped("source").array.view(given).reshape(source.shape)
                ring_rows[t % 3].reshape(envs, -1)[:, :width] = rows
            else:
                plan.buffer(source).write(rows)
            data, count = run(plan, stream, field.data, made.counters)
            if staged:
                assert plan.mapped("head").array.view(np.uint64)[0] == t + 1
    expected = np.zeros((slots, envs, width), FORMATS[form].stored)
    for t, rows in enumerate(history):
        expected[t % slots] = reference_bfloat16(rows) if form == "bfloat16" else rows
    np.testing.assert_array_equal(data.reshape(slots, envs, -1)[..., :width], expected)
    assert not data.reshape(slots, envs, -1)[..., width:].any()
    np.testing.assert_array_equal(count, [steps, steps % slots])


def test_a_step_may_be_columns_of_a_wider_matrix(device: Device) -> None:
    program = Program(device.target)
    made = ring(program, 2, 3, 1)
    field = replay.column(program, "x", 2, 3, 3, FORMATS["float32"])
    rows = np.arange(24, dtype=np.float32).reshape(3, 8) + 1
    source = program.tensor("source", rows.shape, arena="state", data=rows)
    insertion.insert(program, made, field, source.columns(4, 7), label="i")
    empty = {"ring": np.zeros(2, np.uint64), "x": np.zeros(field.data.shape, np.float32)}
    with planned(program, device, empty) as (plan, stream):
        (data,) = run(plan, stream, field.data)
    expected = np.zeros((2, 3, 4))
    expected[0, :, :3] = rows[:, 4:7]
    np.testing.assert_array_equal(data, expected)


def test_bfloat16_is_the_nearest_and_ties_go_to_even(device: Device) -> None:
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000]
    expected = [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0]
    values = np.array([*bits, 0, 0x80000000, 0x00018000], np.uint32).view(np.float32)
    np.testing.assert_array_equal(reference_bfloat16(values), [*expected, 0, 0x8000, 0x0002])
    program = Program(device.target)
    made = ring(program, 1, 1, 1)
    field = replay.column(program, "x", 1, 1, 12, FORMATS["bfloat16"])
    source = program.tensor("source", (1, 12), arena="state", data=values[None])
    insertion.insert(program, made, field, source, label="i")
    with planned(program, device, {"ring": np.zeros(2, np.uint64)}) as (plan, stream):
        (data,) = run(plan, stream, field.data)
    np.testing.assert_array_equal(data[0, 0], reference_bfloat16(values))


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_operands_are_checked(device: Device) -> None:
    program = Program(device.target)
    made, state = ring(program, 4, 2, 1), counters(program)
    field = replay.column(program, "x", 4, 2, 3, FORMATS["uint8"])
    wide = program.tensor("wide", (5, 4))
    bits = program.tensor("bits", (5, 3), np.uint8)
    with pytest.raises(ProgramError, match=r"a row has 3 elements, target has shape \(5, 4\)"):
        replay.gather(program, made, field, wide, counters=state, stream=STREAM, label="g")
    with pytest.raises(ProgramError, match="served as float32, target is uint8"):
        replay.gather(program, made, field, bits, counters=state, stream=STREAM, label="g")
    with pytest.raises(ValueError, match="stream -1"):
        replay.gather(program, made, field, wide.columns(0, 3), counters=state, stream=-1, label="g")
    with pytest.raises(ProgramError, match=r"2 rows, one per environment, got \(5, 3\)"):
        insertion.insert(program, made, field, bits, label="i")
    with pytest.raises(ProgramError, match="takes uint8, source is float32"):
        insertion.insert(program, made, field, wide.rows(0, 2).columns(0, 3), label="i")
    turn = program.tensor("turn", (1,), np.uint64)
    with pytest.raises(ProgramError, match="mapped memory, got arena activations"):
        insertion.advance(program, made, staging=insertion.Staging(turn, turn, 3), label="a")
    staging = insertion.Staging(turn, program.tensor("head", (1,), np.uint64, arena=MAPPED), 3)
    with pytest.raises(ProgramError, match=r"source must be \(3, 2, 4\), got \(5, 3\)"):
        insertion.insert(program, made, field, bits, staging=staging, label="i")
    beta = number(program, "beta", 1)
    with pytest.raises(ProgramError, match="drawn_by and beta go together"):
        replay.sample(program, made, sampled(program, 5), counters=state, stream=1, gamma=beta, beta=beta, label="s")
