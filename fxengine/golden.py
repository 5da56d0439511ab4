"""Golden files: two consecutive steps in float64 of an independent implementation, and how errors are measured.

An .npz archive: `config` is the configuration as JSON, `in.*` the state before the first step, `step{n}.in.*` the
batches, `step{n}.out.*` the results (docs/step.md, "Golden files").
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.config import ConfigError, StepConfig
from fxengine.driver.errors import FxError

Array = NDArray[Any]


class GoldenFileError(FxError, ValueError):
    """A file that is no golden file, or lacks an array; the message names the file and what is wrong with it."""


class GoldenFile:
    """A golden file in memory: `file["step0.out.wire"]` is an array, `name in file` tells whether it exists.

    Attributes:
        path: where it was read from.
        config: the configuration of its step.
        steps: number of consecutive steps it holds.
    """

    def __init__(self, path: str | Path) -> None:
        """Read and check a file.

        Raises:
            GoldenFileError: no such file, not an .npz archive, or not a golden file.
        """
        self.path = Path(path)
        self._arrays = _read_npz(self.path)
        if "config" not in self._arrays or "in.step" not in self._arrays:
            raise GoldenFileError(f"{path} is not a golden file: it has no arrays 'config' and 'in.step'")
        try:
            config = StepConfig.from_json(str(self._arrays["config"]))
        except (json.JSONDecodeError, TypeError, ConfigError) as error:
            raise GoldenFileError(f"{path} is not a golden file: its config cannot be read: {error}") from None
        self.config = replace(config, oracle_every=1)
        self.steps = 0
        while any(name.startswith(f"step{self.steps}.out.") for name in self._arrays):
            self.steps += 1
        if self.steps == 0:
            raise GoldenFileError(f"{path} is not a golden file: it has no results step0.out.*")

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Array:
        try:
            return self._arrays[name]
        except KeyError:
            raise GoldenFileError(f"{self.path}: array '{name}' is missing") from None

    def like(self, name: str, expected: Array) -> Array:
        """An array of the file in the dtype of `expected`.

        Raises:
            GoldenFileError: it is missing or has another shape.
        """
        array = self[name]
        if array.shape != expected.shape:
            raise GoldenFileError(f"{self.path}: array '{name}' has shape {array.shape}, the step has {expected.shape}")
        return array.astype(expected.dtype)

    def scalars(self, prefix: str) -> dict[str, float]:
        """The numbers under a prefix, by the rest of their name."""
        return {n[len(prefix) :]: float(self._arrays[n]) for n in self._arrays if n.startswith(prefix)}

    def results(self, step: int) -> list[str]:
        """Names of a step's results, without `step{n}.out.`."""
        prefix = f"step{step}.out."
        return [n[len(prefix) :] for n in self._arrays if n.startswith(prefix)]


def _read_npz(path: Path) -> dict[str, Array]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise GoldenFileError(f"{path} is not a golden file: it holds a single array, expected an .npz archive")
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise GoldenFileError(f"{path}: no such file") from None
    except OSError as error:
        raise GoldenFileError(f"{path} cannot be read: {error.strerror or error}") from None
    except GoldenFileError:
        raise
    except (ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise GoldenFileError(f"{path} is not a golden file (.npz): {str(error).splitlines()[0]}") from None


def array_error(actual: Array, reference: Array) -> float:
    """max|x - ref| / max(max|ref|, 1e-6) ; inf unless NaN and infinities stand as in `reference`."""
    x, ref = actual.astype(np.float64), reference.astype(np.float64)
    if x.shape != ref.shape:
        return float("inf")
    finite = np.isfinite(ref)
    if not np.array_equal(x[~finite], ref[~finite], equal_nan=True) or not np.isfinite(x[finite]).all():
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(x[finite] - ref[finite]).max() / max(np.abs(ref[finite]).max(), 1e-6))


def update_error(before: Array, after: Array, ref_before: Array, ref_after: Array, floor: float) -> float:
    """Error of what a step changed: max(0, |Δx - Δref| - 2⁻²⁴(|before| + |after|)) / max(max|Δref|, floor).

    The second term is what storing x in float32 may cost. Each side's Δ is taken from its own tensor.
    """
    x0, x1, r0, r1 = (a.astype(np.float64) for a in (before, after, ref_before, ref_after))
    stored = 2.0**-24 * (np.abs(x0) + np.abs(x1))
    excess = np.maximum(0.0, np.abs((x1 - x0) - (r1 - r0)) - stored)
    error = float(excess.max() / max(np.abs(r1 - r0).max(), floor))
    return error if np.isfinite(error) else float("inf")
