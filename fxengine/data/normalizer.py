"""Normalisation by statistics of the training part, kept for the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxengine.data.errors import DataError

_CHUNK = 65536  # rows normalised at a time, in float64: bounds the memory that a long history takes


@dataclass(frozen=True, eq=False)
class Normalizer:
    """y = clip((x - mean) / std, -clip, clip), and exactly 0 for a column that was constant in the training part.

    A constant column tells the network nothing, and dividing by its spread would blow up the first value that
    differs; so it stays 0 until the normaliser is fitted anew. `constant` tells which columns those are.

    Attributes:
        mean: float64 [S].
        std: float64 [S], 0 marks a constant column.
        clip: bound of the result, in standard deviations of the training part.
        names: S feature names.
    """

    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    clip: float
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        size = len(self.names)
        for name in ("mean", "std"):
            array = getattr(self, name)
            if array.shape != (size,) or array.dtype != np.float64 or not np.isfinite(array).all():
                raise DataError(
                    f"normaliser: {name} is {array.dtype} {array.shape}, expected finite float64 ({size},) "
                    f"for its {size} names"
                )
        if (self.std < 0.0).any():
            raise DataError("normaliser: a standard deviation is negative")
        if not (np.isfinite(self.clip) and self.clip > 0.0):
            raise DataError(f"normaliser: clip is {self.clip}, expected a positive number")

    @classmethod
    def fit(cls, values: NDArray[np.float32], *, names: Sequence[str] | None = None, clip: float = 5.0) -> Normalizer:
        """Statistics of `values` [n, S], which must be the training rows and nothing else.

        Args:
            values: finite numbers, without the warm-up rows.
            names: feature names; None: "0", "1", ...
            clip: bound of normalised values.

        Raises:
            DataError: no rows, not two-dimensional, a value that is not finite (row and column are named).
        """
        if values.ndim != 2 or len(values) == 0:
            raise DataError(f"normaliser: values have shape {values.shape}, expected [n, S] with n > 0")
        names = tuple(map(str, range(values.shape[1]))) if names is None else tuple(names)
        if len(names) != values.shape[1]:
            raise DataError(f"normaliser: {len(names)} names for {values.shape[1]} columns")
        bad = ~np.isfinite(values)
        if bad.any():
            row, at = (int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                f"normaliser: row {row}, column {names[at]!r} is {values[row, at]}; "
                "fit on finite rows only (the warm-up rows are NaN)",
                row=row,
                column=names[at],
            )
        mean, std = np.empty(len(names)), np.zeros(len(names))
        for at in range(len(names)):
            column = values[:, at].astype(np.float64)
            mean[at] = column.mean()
            # Equality, not a small spread, decides: rounding can give equal entries a spread, and a true one counts.
            if column.min() != column.max():
                std[at] = column.std()
        return cls(mean, std, float(clip), names)

    @property
    def constant(self) -> tuple[str, ...]:
        """Names of the columns that were constant in the training part."""
        return tuple(name for name, std in zip(self.names, self.std, strict=True) if std == 0.0)

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Normalise float [..., S] to float32 of that shape, element by element; NaN stays NaN.

        Raises:
            DataError: the last axis is not S long.
        """
        if values.shape[-1:] != self.mean.shape:
            raise DataError(f"normaliser: values have shape {values.shape}, expected [..., {len(self.mean)}]")
        varies = self.std > 0.0
        scale = np.where(varies, 1.0 / np.where(varies, self.std, 1.0), 0.0)
        rows = values.reshape(-1, len(self.mean))
        result = np.empty(rows.shape, dtype=np.float32)
        for start in range(0, len(rows), _CHUNK):
            wide = (rows[start : start + _CHUNK] - self.mean) * scale
            result[start : start + _CHUNK] = np.clip(wide, -self.clip, self.clip, out=wide)
        return result.reshape(values.shape)

    def to_dict(self) -> dict[str, NDArray[np.generic]]:
        """Arrays for a checkpoint: mean, std float64 [S], clip float64 [1], names uint8 (UTF-8, one a line)."""
        return {
            "mean": self.mean,
            "std": self.std,
            "clip": np.array([self.clip]),
            "names": np.frombuffer("\n".join(self.names).encode(), dtype=np.uint8),
        }

    @classmethod
    def from_dict(cls, arrays: Mapping[str, NDArray[np.generic]]) -> Normalizer:
        """The inverse of `to_dict`.

        Raises:
            DataError: an array is missing or does not fit the others.
        """
        missing = sorted({"mean", "std", "clip", "names"} - set(arrays))
        if missing:
            raise DataError(f"normaliser: arrays {missing} are missing, given are {sorted(arrays)}")
        names = tuple(np.asarray(arrays["names"], dtype=np.uint8).tobytes().decode().split("\n"))
        mean, std = (np.array(arrays[key], dtype=np.float64) for key in ("mean", "std"))
        return cls(mean, std, float(np.asarray(arrays["clip"]).reshape(-1)[0]), names)
