"""Policies, risk-distorted fractions and quantile means against their NumPy twins, bit for bit where they are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import MAPPED, Plan, Program, Tensor
from fxengine.ops import policy as ops
from fxengine.ops.act import read, tile_words
from fxengine.ops.random import reference_uniform
from tests.support import assert_close

STREAM = 5


def _given(program: Program, name: str, data: np.ndarray) -> Tensor:
    return program.tensor(name, data.shape, data.dtype, arena="constants", data=data)


def _scalar(program: Program, name: str, value: float) -> Tensor:
    return _given(program, name, np.array([value], np.float32))


def _counters(program: Program, count: int = 0, seed: int = 0) -> Tensor:
    return _given(program, "counters", np.array([count, 0, 0, seed], np.uint64))


def _run(program: Program, device: Device, *outputs: Tensor) -> list[np.ndarray]:
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return [_contents(plan, t) for t in outputs]


def _contents(plan: Plan, t: Tensor) -> np.ndarray:
    if t.storage.arena == MAPPED:
        return plan.mapped(t.name).array.view(t.dtype).reshape(t.shape).copy()
    return plan.buffer(t).read()


def act(
    device: Device,
    q: np.ndarray,
    branches: Sequence[int],
    kind: Any,
    scalar: float = 0.0,
    *,
    seed: int = 0,
    count: int = 0,
) -> np.ndarray:
    """Actions [B, D] of one launch."""
    program = Program(device.target)
    values = _given(program, "q", q.astype(np.float32))
    actions = program.tensor("actions", (len(q), len(branches)), np.int32)
    random: dict[str, Any] = {}
    if kind != "greedy":
        random = {"scalar": _scalar(program, "s", scalar), "counters": _counters(program, count, seed)}
    ops.policy(program, values, actions, branches=branches, kind=kind, stream=STREAM, **random)
    return _run(program, device, actions)[0]


def chi_squared(actions: np.ndarray, p: Sequence[float]) -> float:
    """The statistic of drawn actions against probabilities."""
    expected = np.array(p) * actions.size
    return float(((np.bincount(actions.ravel(), minlength=len(p)) - expected) ** 2 / expected).sum())


# -- policies ----------------------------------------------------------------------------------------------------


def test_greedy_rules(device: Device) -> None:
    """Ties, NaN, infinities."""
    nan, inf = np.nan, np.inf
    rows = {
        (1, 2, 3): 2, (3, 1, 3): 0, (nan, 1, 2): 2, (2, nan, 1): 0, (nan, nan, nan): 0, (nan, -inf, nan): 1,
        (-inf, -inf, -inf): 0, (1, inf, inf): 1, (nan, nan, 4): 2, (-0.0, 0.0, -1): 0,
    }  # fmt: skip
    q = np.array(list(rows), np.float32)
    np.testing.assert_array_equal(act(device, q, (3,), "greedy")[:, 0], list(rows.values()))
    np.testing.assert_array_equal(ops.reference_greedy(q, (3,))[:, 0], list(rows.values()))


BRANCHES = st.lists(st.integers(1, 7), min_size=1, max_size=16)


@settings(max_examples=20)
@given(
    branches=BRANCHES,
    rows=st.sampled_from([1, 2, 15, 16, 17, 85, 300]),
    seed=st.integers(0, 2**64 - 1),
    count=st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 + 5]),
    epsilon=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_epsilon_greedy_equals_its_twin(
    device: Device, branches: list[int], rows: int, seed: int, count: int, epsilon: float
) -> None:
    q = np.random.default_rng(1).integers(-2, 3, (rows, sum(branches))).astype(np.float32)  # many ties
    drawn = act(device, q, branches, "epsilon_greedy", epsilon, seed=seed, count=count)
    expected = ops.reference_epsilon_greedy(q, branches, epsilon, seed=seed, count=count, stream=STREAM)
    np.testing.assert_array_equal(drawn, expected)
    if epsilon == 0.0:
        np.testing.assert_array_equal(drawn, act(device, q, branches, "greedy"))


@settings(max_examples=20)
@given(
    branches=BRANCHES,
    rows=st.sampled_from([1, 16, 85, 300]),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([1e-6, 0.1, 1.0, 30.0, 3e38]),
    poison=st.booleans(),
)
def test_boltzmann_equals_its_twin(
    device: Device, branches: list[int], rows: int, seed: int, temperature: float, poison: bool
) -> None:
    rng = np.random.default_rng(seed % 2**32)
    q = rng.standard_normal((rows, sum(branches))).astype(np.float32)
    if poison:
        q[rng.random(q.shape) < 0.3] = np.nan
        q[rng.random(q.shape) < 0.1] = np.inf
        q[rng.random(q.shape) < 0.1] = -np.inf
    drawn = act(device, q, branches, "boltzmann", temperature, seed=seed)
    expected, margins = ops.reference_boltzmann(q, branches, temperature, seed=seed, count=0, stream=STREAM)
    clear = margins > 1e-5
    assert clear.mean() > 0.95 or clear.size < 50
    np.testing.assert_array_equal(drawn[clear], expected[clear])


def test_boltzmann_draws_from_the_softmax(device: Device) -> None:
    q = np.array([0.5, -1.0, 1.5, 0.0])
    p = np.exp(q / 0.7) / np.exp(q / 0.7).sum()
    drawn = act(device, np.tile(q, (20_000, 1)), (4,), "boltzmann", 0.7, seed=3)
    assert chi_squared(drawn, p) < 16.3  # three degrees of freedom: exceeded once in a thousand


def test_a_low_temperature_is_greedy_and_never_draws_nan(device: Device) -> None:
    q = np.random.default_rng(2).standard_normal((500, 6))
    np.testing.assert_array_equal(act(device, q, (3, 3), "boltzmann", 1e-6), act(device, q, (3, 3), "greedy"))
    q[:, 1] = np.nan
    assert not (act(device, q, (3, 3), "boltzmann", 100.0)[:, 0] == 1).any()


def test_epsilon_is_the_share_of_exploring_branches(device: Device) -> None:
    """Explored actions are uniform over their branch, and a branch says nothing about its neighbour."""
    branches, epsilon = (4, 3), 0.4
    q = np.tile([9.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0], (20_000, 1))
    drawn = act(device, q, branches, "epsilon_greedy", epsilon, seed=11)
    assert chi_squared(drawn[:, 0], [1 - 0.3, 0.1, 0.1, 0.1]) < 16.3
    assert chi_squared(drawn[:, 1], [0.4 / 3, 0.4 / 3, 1 - 0.8 / 3]) < 13.8
    apart = (drawn[:, 0] != 0) & (drawn[:, 1] != 2)
    assert abs(apart.mean() - 0.3 * 0.8 / 3) < 4 * np.sqrt(0.08 * 0.92 / len(q))


def test_the_highest_epsilon_is_uniform(device: Device) -> None:
    q = np.tile([9.0, 0.0, -1.0, 2.0, 5.0], (20_000, 1))
    drawn = act(device, q, (5,), "epsilon_greedy", 1.0, seed=1)
    assert chi_squared(drawn, [0.2] * 5) < 18.5


def test_counts_and_seeds_give_other_actions(device: Device) -> None:
    q = np.zeros((2000, 2))
    draws = [act(device, q, (2,), "epsilon_greedy", 1.0, seed=s, count=c) for s, c in ((0, 0), (1, 0), (0, 1))]
    for other in draws[1:]:
        assert abs((draws[0] == other).mean() - 0.5) < 0.05


def test_strided_operands_and_the_report(device: Device) -> None:
    """Columns of wider matrices; words for the host carry the action or the bits of the value, and the tag."""
    program = Program(device.target)
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((40, 9)).astype(np.float32)
    canvas = program.tensor("canvas", (40, 5), np.int32, arena="state", data=np.full((40, 5), -7, np.int32))
    tag = _given(program, "tag", np.array([(3 << 32) + 0xFFFFFFF0], np.uint64))
    words = program.tensor("words", (80,), np.uint64, arena=MAPPED)
    values = program.tensor("values", (200,), np.uint64, arena=MAPPED)
    q = _given(program, "q", wide).columns(2, 7)
    ops.policy(program, q, canvas.columns(1, 3), branches=(2, 3), kind="greedy", report=ops.Report(tag, words, values))
    actions, reported, reported_q = _run(program, device, canvas, words, values)
    expected = ops.reference_greedy(wide[:, 2:7], (2, 3))
    np.testing.assert_array_equal(actions[:, 1:3], expected)
    assert (actions[:, [0, 3, 4]] == -7).all()
    for found, numbers in ((reported, expected.view(np.uint32)), (reported_q, wide[:, 2:7].copy().view(np.uint32))):
        np.testing.assert_array_equal(found >> np.uint64(32), 0xFFFFFFF0)
        np.testing.assert_array_equal((found & np.uint64(0xFFFFFFFF)).reshape(numbers.shape), numbers)


def test_policy_operands_are_checked(device: Device) -> None:
    program = Program(device.target)
    q, actions = program.tensor("q", (4, 5)), program.tensor("actions", (4, 2), np.int32)
    one, counters = program.tensor("one", (1,)), _counters(program)
    with pytest.raises(ValueError, match=r"q must be float32 \(4, 6\).*branches \(3, 3\), got float32 \(4, 5\)"):
        ops.policy(program, q, actions, branches=(3, 3), kind="greedy")
    with pytest.raises(ValueError, match="greedy, epsilon_greedy, boltzmann, got 'ucb'"):
        ops.policy(program, q, actions, branches=(2, 3), kind="ucb")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs both scalar and counters"):
        ops.policy(program, q, actions, branches=(2, 3), kind="boltzmann", scalar=one)
    with pytest.raises(ValueError, match="takes neither"):
        ops.policy(program, q, actions, branches=(2, 3), kind="greedy", scalar=one, counters=counters)
    with pytest.raises(ValueError, match=r"actions must be int32 \(4, 3\)"):
        ops.policy(program, q, actions, branches=(2, 2, 1), kind="greedy")
    with pytest.raises(ValueError, match="1 to 16 sizes"):
        ops.policy(program, q, actions, branches=(), kind="greedy")
    with pytest.raises(ValueError, match="stream"):
        ops.policy(program, q, actions, branches=(2, 3), kind="boltzmann", scalar=one, counters=counters, stream=2**32)


# -- quantiles ---------------------------------------------------------------------------------------------------


def _fractions(device: Device, shape: tuple[int, int], risk: float, *, seed: int = 0, count: int = 0) -> np.ndarray:
    program = Program(device.target)
    tau = program.tensor("tau", shape)
    ops.fractions(
        program, tau, risk=_scalar(program, "risk", risk), counters=_counters(program, count, seed), stream=STREAM
    )
    return _run(program, device, tau)[0]


@settings(max_examples=20)
@given(
    rows=st.sampled_from([1, 3, 64, 257]),
    quantiles=st.sampled_from([1, 2, 5, 8, 32]),
    risk=st.one_of(st.sampled_from([-1.0, -0.75, -0.1, 0.0, 0.5, 1.0]), st.floats(-1, 1, width=32)),
    seed=st.integers(0, 2**64 - 1),
)
def test_fractions_are_distorted_by_risk(device: Device, rows: int, quantiles: int, risk: float, seed: int) -> None:
    tau = _fractions(device, (rows, quantiles), risk, seed=seed, count=2**32)
    reference = ops.reference_fractions(seed, 2**32, STREAM, tau.size, risk)
    assert_close(tau.ravel(), reference, factor=1, atol=6e-8)
    if risk == 0.0:
        np.testing.assert_array_equal(tau.ravel(), reference_uniform(seed, 2**32, STREAM, tau.size))
    elif abs(risk) == 1.0:
        assert (tau == max(risk, 0.0)).all()
    else:
        assert tau.min() >= max(risk, 0.0) and tau.max() < min(1.0, 1.0 + risk)


def test_fractions_fill_their_interval(device: Device) -> None:
    for risk, low, high in ((-0.75, 0.0, 0.25), (0.0, 0.0, 1.0), (0.6, 0.6, 1.0)):
        tau = _fractions(device, (1000, 8), risk, seed=4)
        counts = np.histogram(tau, bins=8, range=(low, high))[0]
        assert counts.sum() == tau.size
        assert ((counts - 1000) ** 2 / 1000).sum() < 24.3  # seven degrees of freedom


@settings(max_examples=20)
@given(
    rows=st.sampled_from([1, 7, 100]),
    quantiles=st.sampled_from([1, 3, 8, 32, 50]),
    actions=st.sampled_from([1, 4, 12]),
)
def test_quantile_mean(device: Device, rows: int, quantiles: int, actions: int) -> None:
    theta = np.random.default_rng(rows).standard_normal((rows * quantiles, actions + 2)).astype(np.float32)
    program = Program(device.target)
    q = program.tensor("q", (rows, actions))
    source = _given(program, "theta", theta).columns(1, 1 + actions)
    ops.quantile_mean(program, source, q, quantiles=quantiles)
    (mean,) = _run(program, device, q)
    assert_close(mean, ops.reference_quantile_mean(theta[:, 1 : 1 + actions], quantiles), atol=1e-6)


def test_quantile_operands_are_checked(device: Device) -> None:
    program = Program(device.target)
    theta, q = program.tensor("theta", (12, 5)), program.tensor("q", (4, 5))
    with pytest.raises(ValueError, match=r"rows \* 5 quantiles.*\(12, 5\)"):
        ops.quantile_mean(program, theta, q, quantiles=5)
    with pytest.raises(ValueError, match=r"q must be float32 \(6, 5\)"):
        ops.quantile_mean(program, theta, q, quantiles=2)
    with pytest.raises(ValueError, match=r"risk must be float32 \(1,\)"):
        ops.fractions(program, q, risk=theta, counters=_counters(program), stream=0)


# -- input of an acting program ----------------------------------------------------------------------------------


@settings(max_examples=15)
@given(words=st.sampled_from([1, 7, 32, 33, 48, 300, 4097, 140_000]), scatter=st.booleans())
def test_the_host_is_read_word_by_word(device: Device, words: int, scatter: bool) -> None:
    scatter = scatter and words <= 300
    rng = np.random.default_rng(words)
    data = rng.integers(0, 2**32, words, np.uint64).astype(np.uint32)
    slots = rng.permutation(400)[:words].tolist() if scatter else None
    program = Program(device.target)
    source = program.tensor("source", (words,), np.uint32, arena=MAPPED)
    size = 400 if scatter else words
    target = program.tensor("target", (size,), np.float32, arena="state", data=np.zeros(size, np.float32))
    read(program, source, target, slots=slots)
    expected = np.zeros(size, np.uint32)
    expected[slots if slots is not None else slice(None)] = data
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.mapped("source").array.view(np.uint32)[:] = data
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        np.testing.assert_array_equal(plan.buffer(target).read().view(np.uint32), expected)


def test_tiles_of_the_input() -> None:
    assert [tile_words(n) for n in (1, 48, 4096, 4097, 12_288, 10**6)] == [32, 32, 32, 64, 128, 1024]


def test_the_input_is_checked(device: Device) -> None:
    program = Program(device.target)
    source = program.tensor("source", (8,), np.uint32, arena=MAPPED)
    target = program.tensor("target", (8,))
    with pytest.raises(ValueError, match="in mapped memory"):
        read(program, program.tensor("device", (8,), np.uint32), target)
    with pytest.raises(ValueError, match="8 words of source"):
        read(program, source, target.rows(0, 7))
    with pytest.raises(ValueError, match="8 different slots below 8"):
        read(program, source, target, slots=[0, 1, 2, 3, 4, 5, 6, 8])
    with pytest.raises(ValueError, match="8 different slots"):
        read(program, source, target, slots=[0] * 8)
