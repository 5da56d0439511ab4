"""Golden files: two consecutive steps in float64 of an independent implementation; how errors are measured and judged.

An .npz archive: `config` is the configuration as JSON, `in.*` the state before the first step, `step{n}.in.*` the
batches, `step{n}.out.*` the results (docs/step.md, "Golden files").
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
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

    def results(self, step: int) -> dict[str, Array]:
        """A step's results by name, without `step{n}.out.`."""
        prefix = f"step{step}.out."
        return {n[len(prefix) :]: array for n, array in self._arrays.items() if n.startswith(prefix)}


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


# -- measures ----------------------------------------------------------------------------------------------------


def array_error(actual: Array, reference: Array) -> float:
    """max|x - ref| / max(max|ref|, 1e-6); inf unless shape, NaN and infinities are those of `reference`."""
    x, ref = _finite_parts(actual, reference)
    if x is None:
        return float("inf")
    return float(np.abs(x - ref).max(initial=0.0) / max(np.abs(ref).max(initial=0.0), 1e-6))


def relative_l2(actual: Array, reference: Array) -> float:
    """‖x - ref‖ / max(‖ref‖, 1e-6); inf unless shape, NaN and infinities are those of `reference`."""
    x, ref = _finite_parts(actual, reference)
    if x is None:
        return float("inf")
    return float(np.linalg.norm(x - ref) / max(float(np.linalg.norm(ref)), 1e-6))


def update_error(before: Array, after: Array, ref_before: Array, ref_after: Array, floor: float) -> float:
    """Error of what a step changed: max(0, |Δx - Δref| - 2⁻²⁴(|before| + |after|)) / max(max|Δref|, floor).

    The second term is what storing x in float32 may cost. Each side's Δ is taken from its own tensor.
    """
    x0, x1, r0, r1 = (a.astype(np.float64) for a in (before, after, ref_before, ref_after))
    if not x0.shape == x1.shape == r0.shape == r1.shape:
        return float("inf")
    stored = 2.0**-24 * (np.abs(x0) + np.abs(x1))
    excess = np.maximum(0.0, np.abs((x1 - x0) - (r1 - r0)) - stored)
    error = float(excess.max() / max(np.abs(r1 - r0).max(), floor))
    return error if np.isfinite(error) else float("inf")


def clear_choices(q_next: Array, branches: tuple[int, ...]) -> NDArray[np.bool_]:
    """Where the two best of a branch's q_next [B, Σn_d] differ by more than 1e-2, as [B, D]."""
    clear = np.empty((len(q_next), len(branches)), np.bool_)
    end = 0
    for d, actions in enumerate(branches):
        ordered = np.sort(q_next[:, end : end + actions], axis=1)
        clear[:, d] = ordered[:, -1] - ordered[:, -2] > 1e-2
        end += actions
    return clear


def _finite_parts(actual: Array, reference: Array) -> tuple[Array | None, Array]:
    """The entries that are finite in `reference`; None for `actual` if the others do not agree exactly."""
    x, ref = actual.astype(np.float64), reference.astype(np.float64)
    if x.shape != ref.shape:
        return None, ref
    finite = np.isfinite(ref)
    if not np.array_equal(x[~finite], ref[~finite], equal_nan=True) or not np.isfinite(x[finite]).all():
        return None, ref
    return x[finite], ref[finite]


# -- limits ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """Largest errors that a precision may show, by kind of array. None: reported, not judged.

    Attributes:
        measure: of every array's error: `array_error` or `relative_l2`.
        forward: outputs, losses, td.
        median: median of the errors of all gradient arrays.
        group: a group's gradient arrays, concatenated.
        gradient: a single gradient array.
        norms: gradient norms and the decomposition.
        m: first moments.
        v: second moments.
        spectral: sigma and sn_v.
        params: parameters and targets.
        slots: state and bounds.
        update: `update_error` of params, m, v and targets.
    """

    measure: Callable[[Array, Array], float]
    forward: float
    median: float | None
    group: float | None
    gradient: float
    norms: float
    m: float
    v: float
    spectral: float
    params: float
    slots: float | None
    update: float | None

    def of(self, name: str) -> float | None:
        """Limit of the error of one array, by its name without the step. best, skipped and step must be exact."""
        return next((limit(self) for pattern, limit in _LIMIT_OF if fnmatchcase(name, pattern)), self.forward)


_LIMIT_OF: tuple[tuple[str, Callable[[Limits], float | None]], ...] = (
    ("best", lambda x: 0.0),
    ("skipped", lambda x: 0.0),
    ("step", lambda x: 0.0),
    ("grad.*", lambda x: x.gradient),
    ("grad_norm.*", lambda x: x.norms),
    ("decomposition", lambda x: x.norms),
    ("m.*", lambda x: x.m),
    ("v.*", lambda x: x.v),
    ("sigma_*", lambda x: x.spectral),
    ("sn_v_*", lambda x: x.spectral),
    ("param.*", lambda x: x.params),
    ("target.*", lambda x: x.params),
    ("state.*", lambda x: x.slots),
    ("bound.*", lambda x: x.slots),
)

#: By precision, in the order of the table of docs/step.md, section 10.
LIMITS = {
    "fp32": Limits(array_error, 5e-5, None, None, 5e-5, 5e-5, 5e-5, 5e-5, 5e-5, 5e-5, slots=5e-5, update=1e-3),
    "tf32": Limits(relative_l2, 1e-2, 1e-2, 1e-1, 3e-1, 3e-2, 6e-2, 2e-2, 2e-3, 5e-3, slots=None, update=None),
    "bf16": Limits(relative_l2, 3e-2, 5e-2, 5e-1, 5e-1, 5e-1, 4e-1, 5e-2, 1e-2, 3e-2, slots=None, update=None),
}
