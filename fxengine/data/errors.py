"""The one error of the market-data part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fxengine.driver.errors import FxError


class DataError(FxError, ValueError):
    """Market data or a request on it is not usable; the message says what was given and what is expected.

    Where the fault has a place it is also given as fields: `source` (file or array name), `row` (as counted in
    that source), `column` (as the source names it) and `more` (how many further rows have the same fault).
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        row: int | None = None,
        column: str | None = None,
        more: int = 0,
    ) -> None:
        super().__init__(message)
        self.source = source
        self.row = row
        self.column = column
        self.more = more


@dataclass(frozen=True)
class Place:
    """How positions in arrays are named in messages.

    Attributes:
        source: file or array name.
        word: what one entry is called ("row" in a file, "bar" in memory).
        first: number of entry 0: 2 in a CSV file (the header is row 1), 1 in Parquet, 0 in memory.
        labels: the source's own names of the columns time, open, high, low, close, volume.
    """

    source: str
    word: str = "bar"
    first: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def label(self, column: str) -> str:
        """The source's own name of `column`."""
        return self.labels.get(column, column)

    def error(self, bad: NDArray[np.bool_], column: str, fault: str, advice: str) -> DataError:
        """The error for the rows where `bad` holds (at least one); `fault` describes the first of them."""
        index = int(np.argmax(bad))
        more = int(np.count_nonzero(bad)) - 1
        row = self.first + index
        tail = f" ({more} more {self.word}{'s' if more > 1 else ''} like it)" if more else ""
        return DataError(
            f"{self.source}: {self.word} {row}, column {self.label(column)!r}: {fault}{tail}. {advice}",
            source=self.source,
            row=row,
            column=self.label(column),
            more=more,
        )
