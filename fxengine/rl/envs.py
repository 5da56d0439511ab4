"""Gymnasium environments that step together, and what is true about the end of an episode.

An observation has three roles. `state` was acted on; `next_state` is what followed, also where the episode ended, and
is what the replay keeps; `current` is what is acted on next, the first observation of a new episode where one ended.
Termination and truncation stay apart: a truncated episode still has a future, so its value is bootstrapped.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fxengine.driver.errors import FxError

try:
    import gymnasium
    from gymnasium import Env, spaces
    from gymnasium.vector import AutoresetMode, VectorEnv
except ImportError as error:  # the module exists for Gymnasium alone
    raise FxError(f"training in environments needs Gymnasium ({error}): pip install 'fxengine[rl]'") from error

#: An id, a function that makes an environment, an environment, or a vector environment.
Source: TypeAlias = "str | Callable[[], Env[Any, Any]] | Env[Any, Any] | VectorEnv[Any, Any, Any]"
#: Streams of seeds: the environments of training, the episodes of an evaluation, episodes restarted by a resumed run.
TRAINING, EVALUATION, RESTART = range(3)


def seed_of(seed: int, stream: int, *index: int) -> int:
    """Seed of one environment or episode: streams do not overlap, whatever the seed of the run."""
    return int(np.random.SeedSequence([seed, stream, *index]).generate_state(1)[0])


@dataclass(frozen=True)
class Spaces:
    """What an environment shows and takes.

    Attributes:
        shape: of an observation; it is read flat.
        dtype: float32 or uint8.
        branches: actions n_d of each branch.
        start: the environment's number of a branch's first action.
        discrete: one branch, whose action the environment takes as a number instead of an array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    branches: tuple[int, ...]
    start: tuple[int, ...]
    discrete: bool

    @classmethod
    def of(cls, observation: spaces.Space[Any], action: spaces.Space[Any]) -> Spaces:
        """Spaces of an environment, given as Gymnasium has them.

        Raises:
            ValueError: a space that cannot be handled; the message names it.
        """
        if not isinstance(observation, spaces.Box) or observation.dtype not in (np.float32, np.uint8):
            raise ValueError(
                f"observations are float32 or uint8 Box spaces, got {observation}; wrap the environment, for example "
                "in gymnasium.wrappers.FlattenObservation and DtypeObservation(env, numpy.float32)"
            )
        if not math.prod(observation.shape):
            raise ValueError(f"observations need at least one element, got {observation}")
        if isinstance(action, spaces.Discrete):
            branches, start = (int(action.n),), (int(action.start),)
        elif isinstance(action, spaces.MultiDiscrete) and action.nvec.ndim == 1:
            branches, start = tuple(action.nvec.tolist()), tuple(action.start.tolist())
        else:
            raise ValueError(f"actions are Discrete or one-dimensional MultiDiscrete spaces, got {action}")
        discrete = isinstance(action, spaces.Discrete)
        return cls(observation.shape, np.dtype(observation.dtype), branches, start, discrete)

    @property
    def size(self) -> int:
        """Size S of a state."""
        return math.prod(self.shape)

    @property
    def scale(self) -> float:
        """Factor of the elements as a network reads them."""
        return 1.0 / 255.0 if self.dtype == np.uint8 else 1.0

    def put(self, target: NDArray[Any], observation: Any) -> None:
        """Copy an observation [*shape].

        Raises:
            ValueError: it is none of the space.
        """
        if (
            type(observation) is not np.ndarray
            or observation.shape != self.shape
            or (observation.dtype is not self.dtype and observation.dtype != self.dtype)
        ):
            shape, dtype = np.shape(observation), getattr(observation, "dtype", type(observation).__name__)
            raise ValueError(
                f"the environment returned an observation {dtype} {shape}; its space says {self.dtype} {self.shape}"
            )
        target[...] = observation

    def readable(self, observations: NDArray[Any]) -> NDArray[np.float32]:
        """Observations as a network reads them; a float32 array is returned as it is."""
        if self.dtype == np.float32:
            return observations
        return observations * np.float32(self.scale)

    def taken(self, actions: NDArray[np.int32]) -> list[Any]:
        """Actions [E, D] as the environments take them, one each."""
        if self.discrete:
            (first,) = self.start
            return (actions[:, 0] + first).tolist() if first else actions[:, 0].tolist()
        return list(actions.astype(np.int64) + np.array(self.start))

    def taken_together(self, actions: NDArray[np.int32]) -> NDArray[np.int64]:
        """Actions [E, D] as a vector environment takes them: [E] where they are discrete."""
        taken = actions.astype(np.int64)
        if any(self.start):
            taken += np.array(self.start)
        return taken[:, 0] if self.discrete else taken


@dataclass(frozen=True)
class Episode:
    """A finished episode: the sum of its rewards, not discounted, and its number of steps."""

    total: float
    length: int


class Environments:
    """Environments that step together: what the trainer sees of them. The arrays stay, each step writes them anew.

    Attributes:
        count: environments E.
        spaces: what they show and take.
        state, next_state, current: [E, S], see above.
        actions: int32 [E, D], those of the newest step.
        reward: float32 [E].
        terminated, truncated: bool [E].
        finished: episodes that have ended, in order; whoever reads them empties the list.
    """

    def __init__(self, held: Any, count: int, spaces_: Spaces) -> None:
        self.count, self.spaces = count, spaces_
        self._held = held
        shape = (count, *spaces_.shape)
        self._next, self._current = np.zeros(shape, spaces_.dtype), np.zeros(shape, spaces_.dtype)
        self.next_state, self.current = self._next.reshape(count, -1), self._current.reshape(count, -1)
        self.state = np.zeros_like(self.current)
        self.actions = np.zeros((count, len(spaces_.branches)), np.int32)
        self.reward = np.zeros(count, np.float32)
        self.terminated, self.truncated = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self.finished: list[Episode] = []
        # Of the present episodes.
        self._totals: Any = [0.0] * count
        self._lengths: Any = [0] * count

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin new episodes everywhere."""
        raise NotImplementedError

    def step(self, actions: NDArray[np.int32]) -> None:
        """Take a step everywhere, and begin a new episode where one ends.

        Args:
            actions: [E, D], counted from 0 in each branch.

        Raises:
            ValueError: an environment returned something that is not of its spaces, or a reward that is not finite.
        """
        raise NotImplementedError

    def _finish(self, i: int) -> None:
        """The episode of an environment has ended."""
        self.finished.append(Episode(float(self._totals[i]), int(self._lengths[i])))
        self._totals[i], self._lengths[i] = 0.0, 0

    def snapshot(self) -> bytes | None:
        """What `restore` needs to go on in the middle of the episodes; None if an environment cannot be pickled."""
        try:
            return pickle.dumps((self._held, self.current, [*map(float, self._totals)], [*map(int, self._lengths)]))
        except Exception:  # pickle raises whatever the environment's parts raise
            return None

    def restore(self, snapshot: bytes) -> None:
        """Go on where `snapshot` was taken. It is unpickled, which runs code: only for files that are trusted."""
        held, current, totals, lengths = pickle.loads(snapshot)
        self.close()
        self._held = held
        self._totals[:], self._lengths[:] = totals, lengths
        self.current[...] = current

    def close(self) -> None:
        """Close the environments."""
        raise NotImplementedError


class SeparateEnvironments(Environments):
    """Single environments, one after the other, in this process: less work per step than a vector environment."""

    _held: list[Env[Any, Any]]

    def __init__(self, envs: Sequence[Env[Any, Any]]) -> None:
        super().__init__(list(envs), len(envs), Spaces.of(envs[0].observation_space, envs[0].action_space))
        for env in envs[1:]:
            if Spaces.of(env.observation_space, env.action_space) != self.spaces:
                raise ValueError(
                    f"environments differ: {envs[0].observation_space}, {envs[0].action_space} and "
                    f"{env.observation_space}, {env.action_space}"
                )
        self._rows = list(self._next)

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin new episodes everywhere."""
        for row, env, seed in zip(self._current, self._held, seeds, strict=True):
            self.spaces.put(row, env.reset(seed=seed)[0])
        self._totals[:], self._lengths[:] = [0.0] * self.count, [0] * self.count

    def step(self, actions: NDArray[np.int32]) -> None:
        """Take a step everywhere; see `Environments.step`."""
        put, rows, totals, lengths = self.spaces.put, self._rows, self._totals, self._lengths
        self.state[...] = self.current
        self.actions[...] = actions
        taken = self.spaces.taken(self.actions)
        begun: list[tuple[int, Any]] = []
        for i, env in enumerate(self._held):
            observation, reward, terminated, truncated, _ = env.step(taken[i])
            put(rows[i], observation)
            reward = float(reward)
            if not isfinite(reward):
                raise ValueError(f"environment {i} returned a reward of {reward}")
            self.reward[i], self.terminated[i], self.truncated[i] = reward, terminated, truncated
            totals[i] += reward
            lengths[i] += 1
            if terminated or truncated:
                self._finish(i)
                begun.append((i, env.reset()[0]))
        self._current[...] = self._next
        for i, observation in begun:
            put(self._current[i], observation)

    def close(self) -> None:
        """Close the environments."""
        for env in self._held:
            env.close()


class VectorEnvironments(Environments):
    """A vector environment that loses no step where an episode ends.

    Args:
        vector: its autoreset mode is SAME_STEP or DISABLED. With NEXT_STEP the step after an end ignores its action,
            and would have to be left out of the replay.

    Raises:
        ValueError: another autoreset mode, or a space that cannot be handled.
    """

    _held: VectorEnv[Any, Any, Any]

    def __init__(self, vector: VectorEnv[Any, Any, Any]) -> None:
        self._mode = vector.metadata.get("autoreset_mode")
        if self._mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
            raise ValueError(
                f"a vector environment resets by SAME_STEP or DISABLED, got {self._mode}; make it with "
                "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP, or give an id or a function with envs="
            )
        found = Spaces.of(vector.single_observation_space, vector.single_action_space)
        super().__init__(vector, vector.num_envs, found)
        self._totals, self._lengths = np.zeros(self.count), np.zeros(self.count, np.int64)

    def reset(self, seeds: Sequence[int]) -> None:
        """Begin new episodes everywhere."""
        self._show(self._current, self._held.reset(seed=list(seeds))[0])  # type: ignore[arg-type]
        self._totals[:], self._lengths[:] = 0.0, 0

    def step(self, actions: NDArray[np.int32]) -> None:
        """Take a step everywhere; see `Environments.step`."""
        self.state[...] = self.current
        self.actions[...] = actions
        observations, rewards, terminated, truncated, infos = self._held.step(self.spaces.taken_together(actions))
        self._show(self._next, observations)
        self._earn(np.asarray(rewards, np.float64))
        self.terminated[...], self.truncated[...] = terminated, truncated
        ended = np.logical_or(self.terminated, self.truncated)
        if np.count_nonzero(ended):
            which = np.flatnonzero(ended).tolist()
            if self._mode is AutoresetMode.SAME_STEP:
                for i in which:
                    self.spaces.put(self._next[i], infos["final_obs"][i])
            else:
                observations, _ = self._held.reset(options={"reset_mask": ended})
            self._show(self._current, observations)
            for i in which:
                self._finish(i)
        else:
            self._current[...] = self._next

    def _earn(self, rewards: NDArray[np.float64]) -> None:
        if rewards.shape != (self.count,):
            raise ValueError(f"the vector environment returned rewards {rewards.shape}, expected ({self.count},)")
        if not isfinite(sum(rewards.tolist())) and not np.isfinite(rewards).all():  # finite numbers may overflow
            i = int(np.flatnonzero(~np.isfinite(rewards))[0])
            raise ValueError(f"environment {i} returned a reward of {rewards[i]}")
        self.reward[...] = rewards
        self._totals += rewards
        self._lengths += 1

    def _show(self, target: NDArray[Any], observations: Any) -> None:
        """Copy observations [E, *shape], or a sequence of E."""
        shape, dtype = target.shape, target.dtype
        if type(observations) is np.ndarray and observations.shape == shape and observations.dtype == dtype:
            target[...] = observations
            return
        for i in range(self.count):
            self.spaces.put(target[i], observations[i])

    def close(self) -> None:
        """Close the environments."""
        self._held.close()


def open_environments(source: Source, count: int) -> Environments:
    """The environments of a run.

    Args:
        source: an id (`module:id` imports the module first), a function that makes an environment, an environment, or a
            vector environment.
        count: how many; of the last two there is one.

    Raises:
        ValueError: the count is below 1 or not that of the environments given, an id is unknown, a space cannot be
            handled.
    """
    if count < 1:
        raise ValueError(f"envs must be at least 1, got {count}")
    if isinstance(source, VectorEnv):
        if count not in (1, source.num_envs):
            raise ValueError(f"envs = {count}, but the vector environment has {source.num_envs}")
        return VectorEnvironments(source)
    if isinstance(source, Env):
        if count != 1:
            raise ValueError(f"envs = {count} of one environment; give a function that makes it, or its id")
        return SeparateEnvironments([source])
    make = maker(source)
    return SeparateEnvironments([make() for _ in range(count)])


def maker(source: Source) -> Callable[[], Env[Any, Any]]:
    """A function that makes single environments.

    Raises:
        ValueError: the source is an environment that exists already.
    """
    if isinstance(source, str):
        return lambda: _make(source)
    if isinstance(source, Env | VectorEnv) or not callable(source):
        raise ValueError(f"cannot make further environments from {source}; give an id or a function that makes one")
    return source


def name_of(source: Source) -> str:
    """What a log or a checkpoint calls it."""
    if isinstance(source, str):
        return source
    spec = getattr(source, "spec", None)
    return spec.id if spec is not None else getattr(source, "__name__", type(source).__name__)


def _make(name: str) -> Env[Any, Any]:
    try:
        return gymnasium.make(name)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        hint = "" if ":" in name else "; if a package registers it, name the package too, like gym_anytrading:forex-v0"
        raise ValueError(f"environment '{name}': {error}{hint}") from None
