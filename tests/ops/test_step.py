"""Both ends of a replay: signal rows in, counters on, telemetry rows out."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.graphs import MAPPED, Plan, Program, Tensor
from fxengine.ops import step
from fxengine.ops.gather import gather_signals
from fxengine.ops.reduce import reference_sum
from tests.support import assert_close

SLOTS, ROWS = 96, 4
STRIDE = SLOTS + 32


@dataclass(frozen=True)
class _Guard:
    skip: Tensor
    group_mask: Tensor


class Replay:
    """A program of the two ends alone: the snapshot of the signals is its telemetry."""

    def __init__(
        self,
        device: Device,
        *,
        guard: bool = True,
        counters: tuple[int, ...] = (0, 0, 0, 7),
        slots: int = SLOTS,
        words: int | None = None,
        partials: dict[str, np.ndarray] | None = None,
        signal_rows: int = ROWS,
    ) -> None:
        program = Program(device.target)
        self.slots = slots
        words = min(slots, 256) if words is None else words
        self.counters = program.tensor("counters", (4,), np.uint64, arena="state", data=np.array(counters, np.uint64))
        self.snapshot = program.tensor("signals", (slots,), arena="state", data=np.full(slots, -1.0, np.float32))
        zero = np.zeros(1, np.uint32)
        self.guard = _Guard(
            program.tensor("skip", (1,), np.uint32, arena="state", data=zero),
            program.tensor("mask", (1,), np.uint64, arena="state", data=zero.astype(np.uint64)),
        )
        stride = words + 2 + 2 * 16
        ring = program.tensor("signal ring", (signal_rows, stride), arena=MAPPED)
        sums = [
            step.Sum(
                self.snapshot.rows(slots - len(partials or {}) + i, slots - len(partials or {}) + i + 1),
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
        gather_signals(program, ring, self.snapshot, words=words, counters=self.counters, label="signals")
        step.end(
            program,
            values=self.snapshot,
            counters=self.counters,
            ring=rows,
            head=head,
            guard=self.guard if guard else None,
            sums=sums,
        )
        self.plan = Plan(program, device, guard=True)
        self.stream = device.stream()
        self.graph = self.plan.capture(stream=self.stream)
        self.rows = self.plan.mapped("signal ring").array.view(np.float32).reshape(signal_rows, stride)
        self.overrides = self.rows[:, words:].view(np.uint32)
        self.telemetry = self.plan.mapped("telemetry ring").array.view(np.uint32).reshape(ROWS, -1, 2)
        self.head = self.plan.mapped("head").array.view(np.uint64)
        self.rows[:] = 0
        self.telemetry[:] = 0xEEEEEEEE
        self.head[:] = 0

    def launch(self, replays: int = 1) -> None:
        for _ in range(replays):
            self.graph.launch(stream=self.stream)
        self.stream.synchronize()
        self.plan.check_guards()

    def signals(self) -> np.ndarray:
        return self.plan.buffer(self.snapshot).read()

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


def test_each_replay_reads_its_own_row(device: Device) -> None:
    with Replay(device) as replay:
        for r in range(ROWS):
            replay.rows[r, :SLOTS] = 1000 * r + np.arange(SLOTS)
        replay.launch(ROWS)  # queued together: no row may be seen by a neighbour
        for sequence in range(1, ROWS + 1):
            header, values = replay.row(sequence)
            assert header[0] == sequence
            np.testing.assert_array_equal(values, 1000 * (sequence - 1) + np.arange(SLOTS))
        replay.rows[0, :SLOTS] = 5.0
        replay.launch()
        np.testing.assert_array_equal(replay.signals(), np.full(SLOTS, 5.0))
        assert replay.head[0] == ROWS + 1


def test_only_carried_and_overridden_slots_change(device: Device) -> None:
    with Replay(device, words=40) as replay:
        replay.rows[:, :40] = np.arange(40)
        replay.overrides[0, 0] = 2
        replay.overrides[0, [2, 4]] = [95, 3]
        replay.rows[0, 40 + np.array([3, 5])] = [0.5, 0.25]
        replay.launch()
        expected = np.full(SLOTS, -1.0)
        expected[:40] = np.arange(40)
        expected[95] = 0.5
        signals = replay.signals()
        assert signals[3] in (3.0, 0.25)  # an override of a carried slot is the host's mistake: either may win
        signals[3] = 3.0
        np.testing.assert_array_equal(signals, expected)
        replay.launch()  # row 1 overrides nothing; what was overridden stays
        assert replay.signals()[95] == 0.5


@pytest.mark.parametrize("slots", [1, 32, 200, 256, 2048])
def test_any_number_of_slots(device: Device, slots: int) -> None:
    with Replay(device, slots=slots) as replay:
        carried = min(slots, 256)
        replay.rows[0, :carried] = np.arange(carried)
        replay.launch()
        expected = np.full(slots, -1.0)
        expected[:carried] = np.arange(carried)
        np.testing.assert_array_equal(replay.signals(), expected)


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
        replay.rows[0, :4].view(np.uint32)[:] = bits
        replay.launch()
        np.testing.assert_array_equal(replay.signals()[:4].view(np.uint32), bits)


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
    with Replay(device, counters=(start, start, start, 7)) as replay:
        for r in range(ROWS):
            replay.rows[r, :SLOTS] = r
        replay.launch(3)
        assert replay.counts() == [start + 3, start + 3, start, 7]
        for sequence in range(start + 1, start + 4):
            header, values = replay.row(sequence)
            assert header == [sequence, start, 0]
            np.testing.assert_array_equal(values, np.full(SLOTS, (sequence - 1) % ROWS))
        assert int(replay.head[0]) == start + 3


def test_rows_stay_until_the_ring_comes_round(device: Device) -> None:
    with Replay(device) as replay:
        replay.launch(ROWS + 2)
        assert sorted(int(tag) for tag in replay.telemetry[:, 0, 1]) == [3, 4, 5, 6]


def test_a_reader_never_takes_a_torn_row(device: Device) -> None:
    """A thread copies the row that is being overwritten; what the sequence numbers let pass must be whole."""
    slots, chain, enough, most = 2048, 100, 40, 200
    signal_rows = ROWS - 1  # so that a telemetry row changes its contents every time round
    with Replay(device, slots=slots, signal_rows=signal_rows) as replay:
        replay.rows[:, :256] = np.arange(signal_rows)[:, None]
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
                    if (words.astype(np.uint32).view(np.float32) != (sequence - 1) % signal_rows).any():
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
    signals = program.tensor("signals", (64,))
    head = program.tensor("head", (1,), np.uint64, arena=MAPPED)
    with pytest.raises(ValueError, match="needs 66 words"):
        short = program.tensor("r", (4, 65), arena=MAPPED)
        gather_signals(program, short, signals, words=64, counters=counters, label="signals")
    with pytest.raises(ValueError, match="1 to 256 slots"):
        long = program.tensor("r2", (4, 600), arena=MAPPED)
        gather_signals(program, long, signals, words=65, counters=counters, label="signals")
    with pytest.raises(ValueError, match="needs 560 bytes"):
        step.end(
            program,
            values=signals,
            counters=counters,
            ring=program.tensor("t", (4, 280), np.uint8, arena=MAPPED),
            head=head,
        )
    with pytest.raises(ValueError, match="64 bits"):
        step.declare_counters(program, seed=-1)
