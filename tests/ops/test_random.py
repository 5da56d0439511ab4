"""Uniform random numbers: the kernel against its NumPy twin, bit for bit, and the twin against whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops.gather import gather, philox4x32, reference_indices
from fxengine.ops.random import reference_uniform, uniform


def _counters(program: Program, *, replay: int = 0, seed: int = 0) -> Tensor:
    return program.tensor("counters", (4,), np.uint64, arena="state", data=np.array([replay, 0, 0, seed], np.uint64))


def _run(program: Program, device: Device, *outputs: Tensor) -> list[np.ndarray]:
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return [plan.buffer(t).read() for t in outputs]


@given(
    seed=st.integers(0, 2**64 - 1),
    replay=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    n=st.integers(1, 30),
)
def test_twin_is_exact(seed: int, replay: int, stream: int, n: int) -> None:
    """Value e is word e % 4 of item e // 4, its upper 24 bits, over 2^24."""
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    drawn = reference_uniform(seed, replay, stream, n)
    assert drawn.dtype == np.float32
    for e in range(n):
        counter = np.array([e // 4, stream, replay & 0xFFFFFFFF, replay >> 32], np.uint32)
        assert float(drawn[e]) == (int(philox4x32(key, counter)[e % 4]) >> 8) / 2**24


@settings(max_examples=25)
@given(
    n=st.sampled_from([1, 2, 3, 4, 5, 7, 255, 256, 1023, 1024, 1025, 4099]),
    offset=st.integers(0, 3),
    seed=st.integers(0, 2**64 - 1),
    replay=st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 + 5]),
    stream=st.sampled_from([0, 1, 2**32 - 1]),
)
def test_kernel_equals_twin(device: Device, n: int, offset: int, seed: int, replay: int, stream: int) -> None:
    """At every alignment; what lies beside the target stands."""
    program = Program(device.target)
    canvas = np.full(n + 8, -3.0, np.float32)
    whole = program.tensor("out", canvas.shape, arena="state", data=canvas)
    counters = _counters(program, replay=replay, seed=seed)
    uniform(program, whole.rows(offset, offset + n), counters=counters, stream=stream, label="tau")
    (drawn,) = _run(program, device, whole)
    canvas[offset : offset + n] = reference_uniform(seed, replay, stream, n)
    np.testing.assert_array_equal(drawn, canvas)


def test_a_matrix_is_filled_row_by_row(device: Device) -> None:
    program = Program(device.target)
    tau = program.tensor("tau", (13, 7))
    uniform(program, tau, counters=_counters(program, seed=3, replay=4), stream=2)
    (drawn,) = _run(program, device, tau)
    np.testing.assert_array_equal(drawn.reshape(-1), reference_uniform(3, 4, 2, 91))


def test_every_replay_and_stream_draws_anew(device: Device) -> None:
    """A graph draws by the counters, not by how often it ran; streams of one replay differ."""
    program = Program(device.target)
    a, b = program.tensor("a", (64,)), program.tensor("b", (64,))
    counters = _counters(program, seed=11)
    uniform(program, a, counters=counters, stream=1)
    uniform(program, b, counters=counters, stream=2)
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        graph = plan.capture(stream=stream)
        drawn = []
        for replay in (0, 1, 0):
            plan.buffer(counters).write(np.array([replay, 5, 6, 11], np.uint64))
            graph.launch(stream=stream)
            stream.synchronize()
            drawn.append([plan.buffer(t).read().tolist() for t in (a, b)])
    assert drawn[0] == drawn[2]
    assert len({tuple(values) for pair in drawn[:2] for values in pair}) == 4


def test_values_are_uniform() -> None:
    drawn = np.concatenate([reference_uniform(1, replay, 0, 1000) for replay in range(100)])
    assert drawn.min() >= 0.0 and drawn.max() < 1.0
    counts = np.histogram(drawn, bins=10, range=(0.0, 1.0))[0]
    # chi-squared with 9 degrees of freedom: below 27.9 with probability 0.999
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 27.9


def test_independent_of_the_rows_of_another_stream(device: Device) -> None:
    program = Program(device.target)
    rows = program.tensor("rows", (2**20,), np.int32, arena="constants", data=np.arange(2**20, dtype=np.int32))
    picked, tau = program.tensor("picked", (256,), np.int32), program.tensor("tau", (256,))
    counters = _counters(program, seed=9)
    gather(program, rows, picked, counters=counters, stream=0, label="g")
    uniform(program, tau, counters=counters, stream=1)
    indices, drawn = _run(program, device, picked, tau)
    np.testing.assert_array_equal(indices, reference_indices(9, 0, 0, 256, 2**20))
    # the correlation of 256 independent pairs is below 0.25 with probability 0.9999
    assert abs(np.corrcoef(indices, drawn)[0, 1]) < 0.25


def test_arguments_are_checked(device: Device) -> None:
    program = Program(device.target)
    counters = _counters(program)
    out = program.tensor("out", (4, 6))
    with pytest.raises(ValueError, match=r"'out'.*without gaps.*row stride 6"):
        uniform(program, out.columns(0, 3), counters=counters, stream=0)
    with pytest.raises(ValueError, match=r"float32.*int32"):
        uniform(program, program.tensor("i", (4,), np.int32), counters=counters, stream=0)
    with pytest.raises(ValueError, match=r"counters must be uint64 \(4,\), got float32 \(4, 6\)"):
        uniform(program, out, counters=out, stream=0)
    with pytest.raises(ValueError, match="stream 4294967296"):
        uniform(program, out, counters=counters, stream=2**32)
