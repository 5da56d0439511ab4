"""Checkpoints of a run in environments: the engine with its replay, where the run stood, and the environments.

The environments are Python objects, pickled into a file of their own beside the checkpoint; the checkpoint holds its
SHA-256, so that no other file is ever unpickled in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fxengine.ops.replay import TRUNCATED
from fxengine.rl.envs import Source, name_of
from fxengine.rl.outcome import Evaluation
from fxengine.rl.settings import Algorithm, TrainConfig

if TYPE_CHECKING:
    from fxengine.checkpoint import Checkpoint

_RUN, _ACTING = "run", "acting"


@dataclass(frozen=True)
class RunSettings:
    """What a run was asked for, and a resumed one goes by.

    Attributes:
        env: name of the environment.
        named: whether that is an id, from which environments can be made.
        algorithm: its name, or that of the function that made the agent.
        made: whether a function made the agent.
        config: hyperparameters.
        total_steps: environment steps of the whole run.
        envs: environments.
        seed: of everything random.
        precision: of linear products.
    """

    env: str
    named: bool
    algorithm: str
    made: bool
    config: TrainConfig
    total_steps: int
    envs: int
    seed: int
    precision: str

    @classmethod
    def of(cls, env: Source, algorithm: Algorithm, given: Mapping[str, Any]) -> RunSettings:
        """Those of a run that begins; `given` has a value or None for `config`, `total_steps`, ..., `precision`.

        Raises:
            ValueError: `total_steps` is missing or below 1.
        """
        steps, envs = given["total_steps"], given["envs"]
        if steps is None or steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {steps}")
        made = callable(algorithm)
        return cls(
            env=name_of(env),
            named=isinstance(env, str),
            algorithm=getattr(algorithm, "__name__", type(algorithm).__name__) if made else str(algorithm),
            made=made,
            config=given["config"] or TrainConfig(),
            total_steps=steps,
            envs=getattr(env, "num_envs", 1) if envs is None else envs,
            seed=given["seed"] or 0,
            precision=given["precision"] or "fp32",
        )

    def chosen(self, given: Algorithm | None) -> Algorithm:
        """The algorithm to go on with.

        Raises:
            ValueError: another one is given, or none where a function made the agent.
        """
        if self.made:
            if not callable(given):
                raise ValueError(f"the agent of this run was made by {self.algorithm}(); give it as algorithm=")
            return given
        if given is not None and given != self.algorithm:
            raise ValueError(f"the run was trained with algorithm '{self.algorithm}', not {given!r}")
        return self.algorithm


@dataclass
class History:
    """What has happened, as `TrainResult` tells it."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)


@dataclass
class RunState:
    """Where a run stands, beside what the engine knows.

    Attributes:
        settings: what it was asked for.
        history: what has happened.
        steps: environment steps taken.
        updates: training steps launched.
        next_copy: environment steps from which on the target network moves next.
        repeat_copy: whether the newest move was skipped and is to be repeated.
        environments: SHA-256 of the pickled environments; empty if they cannot be pickled.
    """

    settings: RunSettings
    history: History = field(default_factory=History)
    steps: int = 0
    updates: int = 0
    next_copy: int = 0
    repeat_copy: bool = False
    environments: str = ""

    def arrays(self, acting: NDArray[np.uint64]) -> dict[str, NDArray[Any]]:
        """What a checkpoint holds of it, and of the acting."""
        text = json.dumps(asdict(self)).encode()
        return {_RUN: np.frombuffer(text, np.uint8), _ACTING: acting}

    @classmethod
    def of(cls, checkpoint: Checkpoint, path: str | Path) -> RunState:
        """The state in a checkpoint.

        Raises:
            ValueError: it is not one of a run in environments.
        """
        if _RUN not in checkpoint.extra:
            raise ValueError(f"{path} is no checkpoint of a run in environments, but of an engine")
        values: dict[str, Any] = json.loads(checkpoint.extra[_RUN].tobytes())
        settings, history = values.pop("settings"), values.pop("history")
        config = TrainConfig(**settings.pop("config"))
        history["losses"] = [(step, loss) for step, loss in history["losses"]]
        history["evaluations"] = [Evaluation(e["step"], tuple(e["returns"])) for e in history["evaluations"]]
        return cls(RunSettings(config=config, **settings), History(**history), **values)

    def adopt(self, given: Mapping[str, Any]) -> None:
        """Compare settings, None for those that are not given, with those held; the length of the run may change.

        Raises:
            ValueError: they differ.
        """
        for name, value in given.items():
            held = getattr(self.settings, name)
            if name != "total_steps" and value is not None and value != held:
                raise ValueError(f"the checkpoint was made with {name} = {held}, not {value}; leave it out to go on")
        if given["total_steps"] is not None:
            self.settings = replace(self.settings, total_steps=given["total_steps"])

    def source(self, given: Source | None) -> Source:
        """The environment to go on with.

        Raises:
            ValueError: none is given where the run had no id.
        """
        if given is not None:
            return given
        if not self.settings.named:
            raise ValueError(f"this run was given its environment ({self.settings.env}) as an object; give it as env=")
        return self.settings.env

    def check_parameters(self, expected: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint) -> None:
        """Raise ValueError unless a checkpoint has parameters of these shapes."""
        held = {n.removeprefix("param."): a.shape for n, a in checkpoint.state.items() if n.startswith("param.")}
        if held != dict(expected):
            raise ValueError(f"the run does not fit this environment: it has parameters {held}, expected {expected}")


def acting_state(checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """What `Acting.load_state` takes."""
    return {_ACTING: checkpoint.extra[_ACTING]}


def cut_episodes(arrays: dict[str, NDArray[Any]]) -> None:
    """Mark the newest step of each environment as truncated: what follows it in the replay is another episode.

    Args:
        arrays: state of an engine with a replay.
    """
    inserted = int(arrays["replay.counters"][0])
    if not inserted:
        return
    done = arrays["replay.field.done"] = arrays["replay.field.done"].copy()
    newest = done[(inserted - 1) % len(done)]
    newest[newest == 0] = TRUNCATED


def environments_path(path: Path) -> Path:
    """The file of the environments beside a checkpoint."""
    return path.with_suffix(".environments.pickle")


def write_environments(path: Path, snapshot: bytes | None) -> str:
    """Write the pickled environments beside a checkpoint, before it; returns their SHA-256."""
    target = environments_path(path)
    if snapshot is None:
        target.unlink(missing_ok=True)
        return ""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_bytes(snapshot)
    os.replace(temporary, target)
    return hashlib.sha256(snapshot).hexdigest()


def read_environments(path: Path, digest: str) -> bytes | None:
    """The pickled environments of a checkpoint; None if there are none, or the file is not the one written with it."""
    target = environments_path(path)
    if not digest or not target.is_file():
        return None
    snapshot = target.read_bytes()
    return snapshot if hashlib.sha256(snapshot).hexdigest() == digest else None
