"""Prioritized sampling: draws, updates and insertions against their NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Program, ProgramError, Tensor
from fxengine.ops import insertion, priorities, replay
from fxengine.ops.priorities import (
    LEAST,
    NODE,
    Tree,
    reference_leaf,
    reference_sample,
    reference_sums,
    reference_weights,
)
from tests.ops.test_replay import STREAM, History, counters, number, planned, ring, run, sampled
from tests.support import assert_close


def contents(leaves: np.ndarray, maximum: float = 0.0) -> dict[str, np.ndarray]:
    """What a tree over these leaves [nodes, 1024] holds."""
    return {"leaves.1_step": leaves, "sums": reference_sums(leaves), "maximum": np.float32([maximum])}


def tree(program: Program, nodes: int) -> Tree:
    return priorities.tree(program, nodes * NODE, prefix="", n_step=1)


def draw(
    device: Device, leaves: np.ndarray, batch: int, *, seed: int = 0, turn: int = 0, inflate: float = 1.0
) -> list[np.ndarray]:
    """Rows drawn from leaves [nodes, 1024], and their leaves; the sums are too large by the factor `inflate`."""
    program = Program(device.target)
    starts, chosen = program.tensor("starts", (batch,), np.int32), program.tensor("chosen", (batch,))
    state = counters(program, seed=seed, turn=turn)
    made = tree(program, len(leaves))
    priorities.sample(program, made, counters=state, stream=STREAM, starts=starts, leaves=chosen, label="s")
    start = contents(leaves)
    start["sums"] = start["sums"] * inflate
    with planned(program, device, start) as (plan, stream):
        rows, found = run(plan, stream, starts, chosen)
    np.testing.assert_array_equal(found, leaves.reshape(-1)[rows])
    return [rows, found]


# -- draws -------------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    nodes=st.sampled_from([1, 2, 3, 33, 255, 256, 257, 600]),
    batch=st.sampled_from([1, 7, 8, 32, 100, 1025]),
    kept=st.sampled_from([1.0, 0.3, 0.001]),
    seed=st.integers(0, 2**64 - 1),
    turn=st.sampled_from([0, 1, 2**32 + 5]),
)
def test_draws_equal_the_reference(device: Device, nodes: int, batch: int, kept: float, seed: int, turn: int) -> None:
    """Whole numbers, whose sums are exact: every row is the one that searching the running sums finds."""
    rng = np.random.default_rng(nodes)
    leaves = rng.integers(1, 9, (nodes, NODE)) * (rng.random((nodes, NODE)) < kept)
    leaves[rng.integers(nodes), rng.integers(NODE)] = 5
    rows, _ = draw(device, leaves.astype(np.float32), batch, seed=seed, turn=turn)
    expected = reference_sample(leaves.reshape(-1), seed=seed, replay=turn, stream=STREAM, batch=batch)
    np.testing.assert_array_equal(rows, expected)


def test_a_thread_looks_after_more_than_a_warp_of_nodes(device: Device) -> None:
    """8,480 nodes: 34 to a thread, which its warp searches in two rounds."""
    leaves = np.zeros((8480, NODE), np.float32)
    where = np.random.default_rng(3).integers(0, leaves.size, 4000)
    leaves.reshape(-1)[where] = 1 + where % 7
    rows, _ = draw(device, leaves, 64, seed=4)
    np.testing.assert_array_equal(rows, reference_sample(leaves.reshape(-1), seed=4, replay=0, stream=STREAM, batch=64))


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), nodes=st.sampled_from([1, 5, 300]), spread=st.sampled_from([1, 30, 120]))
def test_a_leaf_of_zero_is_never_drawn(device: Device, seed: int, nodes: int, spread: int) -> None:
    """Whatever rounding does: leaves of many magnitudes, whose sums are far from exact."""
    rng = np.random.default_rng(seed)
    leaves = np.exp2(rng.uniform(-spread, 0, (nodes, NODE))) * (rng.random((nodes, NODE)) < 0.05)
    leaves[0, 0] = LEAST
    rows, found = draw(device, leaves.astype(np.float32), 200, seed=seed)
    assert (found > 0).all()
    reach = np.cumsum(leaves.astype(np.float32).astype(np.float64))
    strata = reach[-1] / 200 * np.arange(201)
    slack = 1e-9 * reach[-1]
    assert (reach[rows] >= strata[:-1] - slack).all(), "below its stratum"
    assert (reach[rows] - found <= strata[1:] + slack).all(), "above its stratum"


def test_a_place_behind_the_end_falls_on_the_last_leaf(device: Device) -> None:
    """Rounding can put a place behind the last leaf of a node; sums that are twice too large do so half of the time."""
    leaves = np.zeros((2, NODE), np.float32)
    leaves[1, [301, 302]] = [1, 2]
    rows, _ = draw(device, leaves, 60, inflate=2.0)
    np.testing.assert_array_equal(rows, NODE + np.where(np.arange(60) < 10, 301, 302))


def test_rows_are_drawn_in_proportion(device: Device) -> None:
    leaves = np.zeros((2, NODE), np.float32)
    leaves[0, [3, 4, 700]] = [1, 2, 3.5]
    leaves[1, [0, 900]] = [0.5, 3]
    picked = np.concatenate([draw(device, leaves, 100, turn=turn)[0] for turn in range(60)])
    p = leaves.reshape(-1) / leaves.sum()
    counts = np.bincount(picked, minlength=2 * NODE)
    assert counts[p == 0].sum() == 0
    expected = 6000 * p[p > 0]
    # Strata make counts more even than independent draws; chi-squared with 4 degrees of freedom: 18.5 at 0.999.
    assert ((counts[p > 0] - expected) ** 2 / expected).sum() < 18.5
    single = np.concatenate([draw(device, leaves, 1, turn=turn)[0] for turn in range(600)])
    expected = 600 * p[p > 0]
    assert ((np.bincount(single, minlength=2 * NODE)[p > 0] - expected) ** 2 / expected).sum() < 18.5


@settings(max_examples=20)
@given(batch=st.sampled_from([1, 5, 256, 300]), beta=st.sampled_from([0.0, 0.4, 1.0]), seed=st.integers(0, 99))
def test_importance_weights_equal_the_reference(device: Device, batch: int, beta: float, seed: int) -> None:
    program = Program(device.target)
    history = History.random(6, 3, 2, 5, seed)
    rng = np.random.default_rng(seed)
    leaves = np.exp2(rng.uniform(-12, 4, batch)).astype(np.float32)
    out = sampled(program, batch)
    made = ring(program, 6, 3, 2)
    drawn = program.tensor("drawn", (batch,), arena="state", data=leaves)
    gamma, beta_signal = number(program, "gamma", 0.9), number(program, "beta", beta)
    replay.sample(
        program, made, out, counters=counters(program), stream=STREAM, gamma=gamma, drawn_by=drawn, beta=beta_signal,
        label="s",
    )  # fmt: skip
    starts = rng.integers(0, 18, batch).astype(np.int32)
    with planned(program, device, {**history.contents, "start": starts}) as (plan, stream):
        weight, reward, kept = run(plan, stream, out.weight, out.reward, out.start)
    assert_close(weight, reference_weights(leaves, float(np.float32(beta))), factor=16, name="weight")
    assert weight.max() == 1.0
    np.testing.assert_array_equal(kept, starts)
    expected = replay.reference_transitions(
        history.rewards, history.done, starts, gamma=float(np.float32(0.9)), n_step=2
    )
    assert_close(reward, expected[0], factor=2, name="reward")


# -- updates -----------------------------------------------------------------------------------------------------------


def update(
    device: Device,
    leaves: np.ndarray,
    starts: np.ndarray,
    td: np.ndarray,
    *,
    alpha: float = 0.5,
    eps: float = 0.01,
    skip: int = 0,
    maximum: float = 0.0,
) -> list[np.ndarray]:
    """Leaves, sums and maximum after the update."""
    program = Program(device.target)
    made = tree(program, len(leaves))

    def given(name: str, array: np.ndarray) -> Tensor:
        return program.tensor(name, array.shape, array.dtype, arena="state", data=array)

    priorities.update(
        program,
        made,
        starts=given("starts", starts.astype(np.int32)),
        td=given("td", td.astype(np.float32)),
        alpha=number(program, "alpha", alpha),
        eps=number(program, "eps", eps),
        skip=given("skip", np.uint32([skip])),
        label="u",
    )
    with planned(program, device, contents(leaves, maximum)) as (plan, stream):
        return run(plan, stream, made.leaves, made.sums, made.maximum)


@settings(max_examples=30)
@given(
    nodes=st.sampled_from([1, 2, 9]),
    batch=st.sampled_from([1, 2, 31, 256, 300]),
    rows=st.sampled_from([3, 100, 9 * NODE]),
    alpha=st.sampled_from([0.0, 0.6, 1.0]),
    seed=st.integers(0, 99),
)
def test_updates_equal_the_reference(
    device: Device, nodes: int, batch: int, rows: int, alpha: float, seed: int
) -> None:
    """Many transitions start at one row when there are few: the first with a finite td counts."""
    rng = np.random.default_rng(seed)
    leaves = rng.random((nodes, NODE)).astype(np.float32)
    starts = rng.integers(0, min(rows, nodes * NODE), batch)
    td = 10 * rng.standard_normal(batch)
    td[rng.random(batch) < 0.2] = rng.choice([np.nan, np.inf, -np.inf])
    found, sums, maximum = update(device, leaves, starts, td, alpha=alpha, eps=0.01)
    expected = leaves.astype(np.float64).reshape(-1)
    set_ = np.zeros(nodes * NODE, bool)
    for b in reversed(range(batch)):
        if np.isfinite(td[b]):
            expected[starts[b]] = reference_leaf(np.float32(td[b]), alpha=float(np.float32(alpha)), eps=0.01)
            set_[starts[b]] = True
    assert_close(found.reshape(-1), expected, factor=16, name="leaves")
    np.testing.assert_array_equal(found.reshape(-1)[~set_], leaves.reshape(-1)[~set_])
    np.testing.assert_array_equal(sums, reference_sums(found))
    assert maximum[0] == (found.reshape(-1)[set_].max() if set_.any() else 0.0)


def test_a_row_that_was_drawn_can_be_drawn_again(device: Device) -> None:
    """A td of 0 with eps = 0 sets the smallest leaf, not 0."""
    found, sums, maximum = update(device, np.ones((1, NODE), np.float32), np.arange(NODE), np.zeros(NODE), eps=0.0)
    assert (found == np.float32(LEAST)).all() and sums[0] == NODE * LEAST and maximum[0] == np.float32(LEAST)


def test_the_maximum_only_rises(device: Device) -> None:
    leaves = np.ones((2, NODE), np.float32)
    for before, after in ((7.0, 7.0), (2.0, 3.0)):
        *_, maximum = update(device, leaves, np.int32([5, 1500]), np.float32([3, 1]), alpha=1.0, eps=0, maximum=before)
        assert maximum[0] == pytest.approx(after, rel=1e-6)


def test_a_skipped_step_leaves_every_bit(device: Device) -> None:
    leaves = np.random.default_rng(0).random((2, NODE)).astype(np.float32)
    found, sums, maximum = update(device, leaves, np.arange(20), np.ones(20), skip=1, maximum=0.25)
    np.testing.assert_array_equal(found, leaves)
    np.testing.assert_array_equal(sums, reference_sums(leaves))
    assert maximum[0] == 0.25


# -- insertions --------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    n=st.integers(1, 5),
    more=st.integers(0, 6),
    envs=st.sampled_from([1, 3, 300, 1023, 1024, 1025, 2100]),
    steps=st.integers(1, 14),
)
def test_only_whole_transitions_have_a_priority(device: Device, n: int, more: int, envs: int, steps: int) -> None:
    """Over several wraps: starts with n steps behind them have the maximum, all other leaves are 0."""
    slots = n + more
    program = Program(device.target)
    made = ring(program, slots, envs, n)
    grown = priorities.tree(program, slots * envs, prefix="", n_step=n)
    priorities.insert(program, grown, made, label="p")
    insertion.advance(program, made, label="a")
    nodes = grown.sums.size
    start = {
        "ring": np.zeros(2, np.uint64),
        f"leaves.{n}_step": np.zeros(nodes * NODE, np.float32),
        "sums": np.zeros(nodes),
        "maximum": np.float32([2.5]),
    }
    with planned(program, device, start) as (plan, stream):
        for t in range(steps):
            leaves, sums = run(plan, stream, grown.leaves, grown.sums)
            newest = [time % slots for time in range(max(0, t + 1 - slots), t + 2 - n)]
            expected = np.zeros((slots, envs), np.float32)
            expected[newest] = 2.5
            np.testing.assert_array_equal(leaves.reshape(-1)[: slots * envs].reshape(slots, envs), expected)
            assert not leaves.reshape(-1)[slots * envs :].any()
            np.testing.assert_array_equal(sums, reference_sums(leaves))


def test_the_first_transitions_have_priority_one(device: Device) -> None:
    program = Program(device.target)
    made, grown = ring(program, 3, 2, 1), priorities.tree(program, 6, prefix="", n_step=1)
    priorities.insert(program, grown, made, label="p")
    start = contents(np.zeros((1, NODE), np.float32), maximum=0.5)
    with planned(program, device, {"ring": np.zeros(2, np.uint64), **start}) as (plan, stream):
        (leaves,) = run(plan, stream, grown.leaves)
    assert leaves[0, :3].tolist() == [1, 1, 0]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_operands_are_checked(device: Device) -> None:
    program = Program(device.target)
    made = tree(program, 1)
    starts, leaves = program.tensor("starts", (4,), np.int32), program.tensor("chosen", (4,))
    state, alpha = counters(program), number(program, "alpha", 1)
    with pytest.raises(ProgramError, match=r"leaves must be float32 \(4,\), got int32"):
        priorities.sample(program, made, counters=state, stream=1, starts=starts, leaves=starts, label="s")
    with pytest.raises(ValueError, match="stream 4294967296 does not fit"):
        priorities.sample(program, made, counters=state, stream=2**32, starts=starts, leaves=leaves, label="s")
    with pytest.raises(ProgramError, match=r"skip must be uint32 \(1,\)"):
        priorities.update(program, made, starts=starts, td=leaves, alpha=alpha, eps=alpha, skip=alpha, label="u")
