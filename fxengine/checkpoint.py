"""Checkpoints in the safetensors format."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FORMAT = "fxengine checkpoint 1"
_EXTRA = "extra."


@dataclass
class Checkpoint:
    """State of an engine on disk.

    Attributes:
        state: arrays of `Engine.state`.
        extra: further arrays kept with it (for example the normaliser of the features).
        config: JSON of the StepConfig; empty for a step made from a function.
        seed: seed of the engine.
    """

    state: dict[str, NDArray[Any]]
    extra: dict[str, NDArray[Any]] = field(default_factory=dict)
    config: str = ""
    seed: int = 0

    def save(self, path: str | Path) -> None:
        """Write the file beside its place and replace it in one step: a crash leaves the old file or the new one."""
        from safetensors.numpy import save

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        tensors = {**self.state, **{_EXTRA + n: np.asarray(a) for n, a in self.extra.items()}}
        data = save(
            {n: np.ascontiguousarray(a) for n, a in tensors.items()},
            metadata={"format": _FORMAT, "config": self.config, "seed": str(self.seed)},
        )
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes private files
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | Path) -> Checkpoint:
        """Read a checkpoint.

        Raises:
            FileNotFoundError: no such file.
            ValueError: the file is not a checkpoint of this format.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}") from None
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{path} is not an fxengine checkpoint: format {metadata.get('format')!r}, expected {_FORMAT!r}"
            )
        return cls(
            state={n: a for n, a in arrays.items() if not n.startswith(_EXTRA)},
            extra={n[len(_EXTRA) :]: a for n, a in arrays.items() if n.startswith(_EXTRA)},
            config=metadata["config"],
            seed=int(metadata["seed"]),
        )


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
