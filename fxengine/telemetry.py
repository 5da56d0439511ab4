"""What a finished replay reports, through a ring of mapped-pinned rows that the host reads without waiting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxengine.ops.step import HEADER_WORDS

#: Rows of the telemetry ring.
RING_ROWS = 64


# Between two looks at the head the device would have to finish a whole ring of replays to take both rows away.
_ATTEMPTS = 3


@dataclass(frozen=True)
class Report(Mapping[str, float]):
    """One finished replay. A mapping from telemetry name to value, plus the counters.

    Attributes:
        replay: number of replays finished, this one included.
        step: Adam step t after this replay; a skipped step does not advance it.
        skipped: number of replays so far whose update was skipped because a gradient norm was not finite.
        nonfinite_groups: names of the groups whose norm was not finite in this replay.
        readings: the named values.
    """

    replay: int
    step: int
    skipped: int
    nonfinite_groups: tuple[str, ...]
    readings: dict[str, float]

    @property
    def decomposition(self) -> NDArray[np.float32] | None:
        """Gradient norms [9, 3]: a row per component, columns magnitude, direction, trunk; None if not decomposed.

        Rows: iqn, ens, c51, cql, distill, rec, pred, cql_sx, c51_bs (docs/step.md §7). The replay must have been one
        of `step(decompose=True)`.
        """
        if self.readings.get("decomposed") != 1.0:
            return None
        return np.array([v for name, v in self.readings.items() if name.startswith("split.")], np.float32).reshape(
            -1, 3
        )

    def __getitem__(self, name: str) -> float:
        return self.readings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readings)

    def __len__(self) -> int:
        return len(self.readings)


class Telemetry:
    """Reader of the telemetry ring.

    Args:
        names: names of the values, in row order.
        groups: group name by index, for the mask of non-finite groups.
        rows: uint32 [RING_ROWS, words, 2], mapped-pinned: value and tag of each word (`step.cu`).
        head: uint64 [1], mapped-pinned: number of replays that have finished.
    """

    def __init__(
        self,
        names: Sequence[str],
        groups: Mapping[int, str],
        rows: NDArray[np.uint32],
        head: NDArray[np.uint64],
    ) -> None:
        self.names = tuple(names)
        self._groups = dict(groups)
        self._rows = rows
        self._head = head

    def finished(self) -> int:
        """Number of replays that have finished. Never blocks."""
        return int(self._head[0])

    def latest(self) -> Report | None:
        """Report of the newest finished replay, or None before the first of this engine. Never blocks."""
        for _ in range(_ATTEMPTS):
            head = self.finished()
            report = self._read(head) or self._read(head - 1)  # the head may be seen shortly before its row
            if report is not None:
                return report
        return None

    def since(self, replay: int) -> list[Report]:
        """Reports of the finished replays after number `replay`, oldest first, as far as the ring still holds them."""
        head = self.finished()
        first = max(replay + 1, head - len(self._rows) + 1, 1)
        reports = (self._read(n) for n in range(first, head + 1))
        return [r for r in reports if r is not None]

    def _read(self, replay: int) -> Report | None:
        """The row of a replay; None if it is not there (yet), or overwritten meanwhile."""
        if replay < 1:
            return None
        row = self._rows[(replay - 1) % len(self._rows), : HEADER_WORDS + len(self.names)].copy()
        if (row[:, 1] != replay & 0xFFFFFFFF).any():
            return None
        numbers = row[:, 0]
        step, skipped, mask = (int(numbers[i]) | int(numbers[i + 1]) << 32 for i in (0, 2, 4))
        values = numbers[HEADER_WORDS:].copy().view(np.float32)
        return Report(
            replay=replay,
            step=step,
            skipped=skipped,
            nonfinite_groups=tuple(name for g, name in sorted(self._groups.items()) if mask >> g & 1),
            readings=dict(zip(self.names, values.tolist(), strict=True)),
        )


def row_bytes(values: int) -> int:
    """Bytes of a telemetry row with so many values, padded to 128."""
    return -(-8 * (HEADER_WORDS + values) // 128) * 128
