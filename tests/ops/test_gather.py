"""Random batches: the generator against published vectors, the kernel against its NumPy twin, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops.gather import gather, gather_onehots, philox4x32, reference_indices
from fxengine.ops.values import reference_onehots


def _source(program: Program, name: str, data: np.ndarray) -> Tensor:
    return program.tensor(name, data.shape, data.dtype, arena="constants", data=data)


def _counters(program: Program, *, replay: int = 0, seed: int = 0) -> Tensor:
    return program.tensor("counters", (4,), np.uint64, arena="state", data=np.array([replay, 0, 0, seed], np.uint64))


def _run(program: Program, device: Device, *outputs: Tensor) -> list[np.ndarray]:
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return [plan.buffer(t).read() for t in outputs]


# Random123, tests/kat_vectors: philox4x32 10 rounds. counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> np.ndarray:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    np.testing.assert_array_equal(philox4x32(_words(key), _words(counter)), _words(expected))


def test_philox_known_answer_on_the_device(device: Device) -> None:
    """Counter and key 0: the index is the high half of e169c58d6627e8d5 * population."""
    program = Program(device.target)
    population = 2**20 - 1
    indices = program.tensor("indices", (1,), np.int32)
    rows = _source(program, "rows", np.arange(population, dtype=np.int32))
    target = program.tensor("target", (1,), np.int32)
    gather(program, rows, target, counters=_counters(program), stream=0, indices=indices, label="g")
    index, value = _run(program, device, indices, target)
    assert index[0] == value[0] == 0xE169C58D6627E8D5 * population >> 64


@given(
    seed=st.integers(0, 2**64 - 1),
    replay=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    batch=st.integers(1, 40),
    population=st.one_of(st.integers(1, 9), st.integers(1, 2**62)),
)
def test_twin_is_exact(seed: int, replay: int, stream: int, batch: int, population: int) -> None:
    """The vectorised twin against whole-number arithmetic."""
    key = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    expected = []
    for b in range(batch):
        x, y, _, _ = philox4x32(key, np.array([b, stream, replay & 0xFFFFFFFF, replay >> 32], np.uint32))
        expected.append((int(y) << 32 | int(x)) * population >> 64)
    picked = reference_indices(seed, replay, stream, batch, population)
    assert picked.tolist() == expected
    assert picked.min() >= 0 and picked.max() < population


@settings(max_examples=25)
@given(
    width=st.sampled_from([0, 1, 2, 3, 4, 5, 8, 48, 49, 130]),
    batch=st.sampled_from([1, 2, 3, 31, 32, 33, 255, 256, 257, 300]),
    population=st.sampled_from([1, 2, 7, 1000]),
    seed=st.integers(0, 2**64 - 1),
    replay=st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 + 5]),
    wide=st.booleans(),
)
def test_kernel_equals_twin(
    device: Device, width: int, batch: int, population: int, seed: int, replay: int, wide: bool
) -> None:
    program = Program(device.target)
    dtype = np.uint64 if wide else np.uint32
    shape = (population, width) if width else (population,)
    data = np.random.default_rng(1).integers(0, 2**32, shape, np.uint64).astype(dtype)
    target = program.tensor("target", (batch, *shape[1:]), dtype)
    indices = program.tensor("indices", (batch,), np.int32)
    gather(
        program,
        _source(program, "source", data),
        target,
        counters=_counters(program, replay=replay, seed=seed),
        stream=9,
        indices=indices,
        label="g",
    )
    rows, picked = _run(program, device, target, indices)
    expected = reference_indices(seed, replay, 9, batch, population)
    np.testing.assert_array_equal(picked, expected)
    np.testing.assert_array_equal(rows, data[expected])


def test_strided_rows(device: Device) -> None:
    """Columns of wider matrices on both sides; the columns beside the target stand."""
    program = Program(device.target)
    data = np.arange(50 * 12, dtype=np.float32).reshape(50, 12)
    canvas = np.full((20, 9), -3.0, np.float32)
    target = program.tensor("target", (20, 9), arena="state", data=canvas)
    counters = _counters(program, seed=5)
    source = _source(program, "source", data)
    gather(program, source.columns(5, 8), target.columns(2, 5), counters=counters, stream=1, label="g")
    (result,) = _run(program, device, target)
    expected = canvas.copy()
    expected[:, 2:5] = data[reference_indices(5, 0, 1, 20, 50), 5:8]
    np.testing.assert_array_equal(result, expected)


def test_records_of_a_stream_match_and_streams_differ(device: Device) -> None:
    program = Program(device.target)
    n, batch = 1000, 300
    counters = _counters(program, seed=2**63 + 17)
    ids = np.arange(n, dtype=np.int32)
    states = np.repeat(ids.astype(np.float32)[:, None], 24, axis=1)
    source, rows = _source(program, "states", states), _source(program, "ids", ids)
    state, label = program.tensor("state", (batch, 24)), program.tensor("label", (batch,), np.int32)
    other = program.tensor("other", (batch,), np.int32)
    gather(program, source, state, counters=counters, stream=3, label="a")
    gather(program, rows, label, counters=counters, stream=3, label="b")
    gather(program, rows, other, counters=counters, stream=4, label="c")
    picked, labels, others = _run(program, device, state, label, other)
    np.testing.assert_array_equal(picked, np.repeat(labels[:, None], 24, axis=1))
    assert (labels == others).mean() < 0.05


@settings(max_examples=25)
@given(
    width=st.sampled_from([0, 1, 3, 4, 6, 8, 48, 49, 130]),
    batch=st.sampled_from([1, 31, 256, 257, 300]),
    pad=st.sampled_from([0, 1, 4]),
    wide=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_masked_rows_are_zeros(device: Device, width: int, batch: int, pad: int, wide: bool, seed: int) -> None:
    """Bit for bit, where the mask is 0 of either sign; NaN, infinities and the smallest number let a row through."""
    program = Program(device.target)
    population = 50
    rng = np.random.default_rng(1)
    shape = (population, width) if width else (population,)
    dtype = np.uint64 if wide else np.uint32
    data = rng.integers(0, 2**32, shape, np.uint64).astype(dtype)
    if not wide:
        data[::3] = 0x7FC00001  # NaN
    mask = rng.choice(np.array([0.0, -0.0, 1e-45, 0.97, np.nan, -np.inf], np.float32), population)
    canvas = program.tensor("target", (batch, width + pad) if width else (batch,), dtype, arena="state")
    target = canvas.columns(0, width) if width else canvas
    gather(
        program,
        _source(program, "source", data),
        target,
        counters=_counters(program, seed=seed),
        stream=9,
        mask=_source(program, "mask", mask),
        label="g",
    )
    (rows,) = _run(program, device, target)
    picked = reference_indices(seed, 0, 9, batch, population)
    expected = data.copy()
    expected[mask == 0] = 0
    np.testing.assert_array_equal(rows, expected[picked])


@settings(max_examples=25)
@given(
    sizes=st.sampled_from([(2,), (3, 3, 3, 3), (2, 5, 3), (300, 2), (3,) * 8]),
    batch=st.sampled_from([1, 64, 257]),
    pad=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**64 - 1),
)
def test_onehot_codes_of_the_rows_picked(
    device: Device, sizes: tuple[int, ...], batch: int, pad: int, seed: int
) -> None:
    """An action outside its range has none; the columns beside the codes stand."""
    program = Program(device.target)
    rng = np.random.default_rng(2)
    actions = np.stack([rng.integers(0, n, 40, dtype=np.int32) for n in sizes], axis=1)
    unknown = np.stack([rng.choice(np.array([-1, n, -(2**31), 2**31 - 1]), 40) for n in sizes], axis=1)
    actions = np.where(rng.random(actions.shape) < 0.3, unknown, actions).astype(np.int32)
    canvas = np.full((batch, sum(sizes) + pad), 9.0, np.float32)
    out = program.tensor("out", canvas.shape, arena="state", data=canvas)
    gather_onehots(
        program,
        _source(program, "actions", actions),
        out.columns(0, sum(sizes)),
        sizes=sizes,
        counters=_counters(program, seed=seed),
        stream=9,
        label="g",
    )
    (result,) = _run(program, device, out)
    canvas[:, : sum(sizes)] = reference_onehots(actions[reference_indices(seed, 0, 9, batch, 40)], sizes)
    np.testing.assert_array_equal(result, canvas)


def test_indices_are_uniform() -> None:
    picked = np.concatenate([reference_indices(1, replay, 0, 1000, 10) for replay in range(100)])
    counts = np.bincount(picked, minlength=10)
    # chi-squared with 9 degrees of freedom: below 27.9 with probability 0.999
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 27.9


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    counters = _counters(program)
    rows = program.tensor("rows", (10, 3))
    with pytest.raises(ValueError, match=r"\(10, 3\).*\(4, 2\)"):
        gather(program, rows, program.tensor("t", (4, 2)), counters=counters, stream=0, label="g")
    with pytest.raises(ValueError, match=r"float32.*int32"):
        gather(program, rows, program.tensor("u", (4, 3), np.int32), counters=counters, stream=0, label="g")
    with pytest.raises(ValueError, match="stream"):
        gather(program, rows, rows, counters=counters, stream=-1, label="g")
    bytes_ = program.tensor("bytes", (10, 4), np.uint8)
    with pytest.raises(ValueError, match="4 or 8 bytes"):
        gather(program, bytes_, bytes_, counters=counters, stream=0, label="g")
    target, short = program.tensor("v", (4, 3)), program.tensor("w", (4,))
    with pytest.raises(ValueError, match=r"mask must be float32 \(10,\).*float32 \(4,\)"):
        gather(program, rows, target, counters=counters, stream=0, mask=short, label="g")
    with pytest.raises(ValueError, match=r"mask must be float32 \(10,\).*int32 \(10,\)"):
        whole = program.tensor("x", (10,), np.int32)
        gather(program, rows, target, counters=counters, stream=0, mask=whole, label="g")


def test_shapes_of_onehot_codes_are_checked(device: Device) -> None:
    program = Program(device.target)
    counters = _counters(program)
    actions, codes = program.tensor("actions", (10, 2), np.int32), program.tensor("codes", (4, 5))

    def append(source: Tensor, target: Tensor, sizes: tuple[int, ...], stream: int = 0) -> None:
        gather_onehots(program, source, target, sizes=sizes, counters=counters, stream=stream, label="g")

    with pytest.raises(ValueError, match=r"int32 \[population, 2\].*float32 \(4, 5\)"):
        append(codes, codes, (3, 2))
    with pytest.raises(ValueError, match=r"int32 \[population, 1\].*int32 \(10, 2\)"):
        append(actions, codes, (5,))
    with pytest.raises(ValueError, match=r"at least 1.*int32 \(10, 2\)"):
        append(actions, codes, (5, 0))
    with pytest.raises(ValueError, match=r"float32 \[batch, 4\].*float32 \(4, 5\)"):
        append(actions, codes, (2, 2))
    with pytest.raises(ValueError, match="stream"):
        append(actions, codes, (3, 2), stream=2**32)
    assert not program.launches
