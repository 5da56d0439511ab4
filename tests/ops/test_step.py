"""The end of a replay: counters on, telemetry rows out."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.graphs import MAPPED, Plan, Program, Tensor
from fxengine.ops import step
from fxengine.ops.reduce import reference_sum
from tests.graphs.chains import chain
from tests.support import assert_close

SLOTS, ROWS = 96, 4


@dataclass(frozen=True)
class _Guard:
    skip: Tensor
    group_mask: Tensor


class Replay:
    """A program that adds 1 to its values if they `rise`, and reports them."""

    def __init__(
        self,
        device: Device,
        *,
        guard: bool = True,
        counters: tuple[int, ...] = (0, 0, 0, 7),
        slots: int = SLOTS,
        rise: bool = False,
        partials: dict[str, np.ndarray] | None = None,
    ) -> None:
        program = Program(device.target)
        self.slots = slots
        self.counters = program.tensor("counters", (4,), np.uint64, arena="state", data=np.array(counters, np.uint64))
        self.values = program.tensor("values", (slots,), arena="state", data=np.full(slots, -1.0, np.float32))
        zero = np.zeros(1, np.uint32)
        self.guard = _Guard(
            program.tensor("skip", (1,), np.uint32, arena="state", data=zero),
            program.tensor("mask", (1,), np.uint64, arena="state", data=zero.astype(np.uint64)),
        )
        sums = [
            step.Sum(
                self.values.rows(slots - len(partials or {}) + i, slots - len(partials or {}) + i + 1),
                program.tensor(name, a.shape, a.dtype, arena="state", data=a),
                program.tensor(f"{name}.n", (1,), np.int32, arena="state", data=np.array([5 * i], np.int32))
                if i
                else None,
                1.0 + i,
            )
            for i, (name, a) in enumerate((partials or {}).items())
        ]
        rows = program.tensor("telemetry ring", (ROWS, 8 * (6 + slots)), np.uint8, arena=MAPPED)
        head = program.tensor("head", (1,), np.uint64, arena=MAPPED)
        if rise:
            nothing = program.tensor("nothing", (slots,), arena="state", data=np.zeros(slots, np.float32))
            chain(program, nothing, self.values, nothing, 1.0, accumulate=True)
        step.end(
            program,
            values=self.values,
            counters=self.counters,
            ring=rows,
            head=head,
            guard=self.guard if guard else None,
            sums=sums,
        )
        self.plan = Plan(program, device, guard=True)
        self.stream = device.stream()
        self.graph = self.plan.capture(stream=self.stream)
        self.telemetry = self.plan.mapped("telemetry ring").array.view(np.uint32).reshape(ROWS, -1, 2)
        self.head = self.plan.mapped("head").array.view(np.uint64)
        self.telemetry[:] = 0xEEEEEEEE
        self.head[:] = 0

    def launch(self, replays: int = 1) -> None:
        for _ in range(replays):
            self.graph.launch(stream=self.stream)
        self.stream.synchronize()
        self.plan.check_guards()

    def counts(self) -> list[int]:
        return [int(x) for x in self.plan.buffer(self.counters).read()]

    def row(self, sequence: int) -> tuple[list[int], np.ndarray]:
        row = self.telemetry[(sequence - 1) % ROWS]
        assert (row[:, 1] == sequence & 0xFFFFFFFF).all(), "every word carries the tag of its replay"
        header = [int(row[i, 0]) | int(row[i + 1, 0]) << 32 for i in (0, 2, 4)]
        return header, row[6:, 0].copy().view(np.float32)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.graph.close()
        self.stream.close()
        self.plan.close()


def test_each_replay_reports_what_it_finds(device: Device) -> None:
    with Replay(device, rise=True) as replay:
        replay.plan.buffer(replay.values).write(np.arange(SLOTS, dtype=np.float32))
        replay.launch(ROWS)  # queued together: no row may hold what a neighbour found
        for sequence in range(1, ROWS + 1):
            header, values = replay.row(sequence)
            assert header[0] == sequence
            np.testing.assert_array_equal(values, sequence + np.arange(SLOTS))
        assert replay.head[0] == ROWS


@pytest.mark.parametrize("slots", [1, 32, 200, 256, 2048])
def test_any_number_of_values(device: Device, slots: int) -> None:
    with Replay(device, slots=slots) as replay:
        replay.plan.buffer(replay.values).write(np.arange(slots, dtype=np.float32))
        replay.launch()
        np.testing.assert_array_equal(replay.row(1)[1], np.arange(slots))


def test_sums_are_finished_and_reported(device: Device) -> None:
    rng = np.random.default_rng(0)
    partials = {
        "losses": rng.standard_normal(300),
        "counts": rng.integers(0, 99, 33).astype(np.int32),
        "one": np.array([2.5]),
        **{f"more{i}": rng.standard_normal(i) for i in range(1, 30)},
    }
    with Replay(device, partials=partials) as replay:
        replay.launch(2)
        for sequence in (1, 2):
            values = replay.row(sequence)[1][SLOTS - len(partials) : SLOTS]
            expected = [reference_sum(a, 5 * i if i else None, 1.0 + i) for i, a in enumerate(partials.values())]
            assert_close(values, expected, name="sums")
            assert replay.row(sequence)[1].tobytes() == replay.row(1)[1].tobytes()


def test_too_many_sums_are_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="at most 32 sums can be reported, got 33"):
        Replay(device, partials={f"p{i}": np.zeros(1) for i in range(33)})


def test_bits_pass_unchanged(device: Device) -> None:
    with Replay(device) as replay:
        bits = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32)
        replay.plan.buffer(replay.values.rows(0, 4)).write(bits.view(np.float32))
        replay.launch()
        np.testing.assert_array_equal(replay.row(1)[1][:4].view(np.uint32), bits)


def test_counters_and_header(device: Device) -> None:
    with Replay(device) as replay:
        replay.launch(2)
        assert replay.counts() == [2, 2, 0, 7]
        replay.plan.buffer(replay.guard.skip).write(np.ones(1, np.uint32))
        replay.plan.buffer(replay.guard.group_mask).write(np.array([1 << 40 | 5], np.uint64))
        replay.launch()
        assert replay.counts() == [3, 2, 1, 7]
        assert replay.row(3)[0] == [2, 1, 1 << 40 | 5]
        assert replay.row(2)[0] == [2, 0, 0]
        replay.plan.buffer(replay.guard.skip).write(np.zeros(1, np.uint32))
        replay.launch()
        assert replay.counts() == [4, 3, 1, 7]


def test_without_an_optimizer_t_stands(device: Device) -> None:
    with Replay(device, guard=False, counters=(0, 11, 2, 7)) as replay:
        replay.launch(3)
        assert replay.counts() == [3, 11, 2, 7]
        assert replay.row(3)[0] == [11, 2, 0]


def test_counters_carry_into_the_high_word(device: Device) -> None:
    start = 2**32 - 2
    with Replay(device, rise=True, counters=(start, start, start, 7)) as replay:
        replay.launch(3)
        assert replay.counts() == [start + 3, start + 3, start, 7]
        for sequence in range(start + 1, start + 4):
            header, values = replay.row(sequence)
            assert header == [sequence, start, 0]
            np.testing.assert_array_equal(values, np.full(SLOTS, sequence - start - 1))
        assert int(replay.head[0]) == start + 3


def test_rows_stay_until_the_ring_comes_round(device: Device) -> None:
    with Replay(device) as replay:
        replay.launch(ROWS + 2)
        assert sorted(int(tag) for tag in replay.telemetry[:, 0, 1]) == [3, 4, 5, 6]


def test_a_reader_never_takes_a_torn_row(device: Device) -> None:
    """A thread copies the row that is being overwritten; what the sequence numbers let pass must be whole."""
    slots, chain, enough, most = 2048, 100, 40, 200
    with Replay(device, slots=slots, rise=True) as replay:
        row = replay.telemetry[0, 6 : 6 + 256].view(np.uint64).reshape(-1)
        stop = threading.Event()
        torn: list[int] = []
        accepted: set[int] = set()

        def read() -> None:
            while not stop.is_set():
                words = row.copy()
                tags = words >> np.uint64(32)
                if (tags == tags[0]).all() and 0 < tags[0] <= chain * most:
                    sequence = int(tags[0])
                    accepted.add(sequence)
                    if (words.astype(np.uint32).view(np.float32) != sequence - 1).any():
                        torn.append(sequence)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            # Many replays in one graph: the reader is not kept from them by the interpreter's lock.
            nodes = range(len(replay.plan.nodes))
            with replay.plan.capture_nodes(nodes, stream=replay.stream, chain=chain) as graph:
                launches = 0
                while launches < most and len(accepted) < enough:  # a loaded machine gives the reader few turns
                    graph.launch(stream=replay.stream)
                    replay.stream.synchronize()
                    launches += 1
        finally:
            stop.set()
            reader.join()
        assert int(replay.head[0]) == chain * launches
        assert not torn
        assert len(accepted) >= enough


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    counters = step.declare_counters(program, seed=3)
    values = program.tensor("values", (64,))
    head = program.tensor("head", (1,), np.uint64, arena=MAPPED)
    with pytest.raises(ValueError, match="needs 560 bytes"):
        step.end(
            program,
            values=values,
            counters=counters,
            ring=program.tensor("t", (4, 280), np.uint8, arena=MAPPED),
            head=head,
        )
    with pytest.raises(ValueError, match="64 bits"):
        step.declare_counters(program, seed=-1)
