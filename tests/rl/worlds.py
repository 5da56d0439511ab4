"""Small Gymnasium environments whose course is known."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

STATES, PRIZE, CRUMB = 5, 1.0, 0.1


class Counter(gymnasium.Env[Any, Any]):
    """The observation counts the steps of the episode: 0, 1, ..., length, where it ends. The reward is its square."""

    def __init__(self, length: int = 3, *, truncate: bool = False, dtype: Any = np.float32) -> None:
        self.observation_space = spaces.Box(0, 255, (1, 2), dtype)
        self.action_space = spaces.Discrete(2)
        self.length, self.truncate, self.t = length, truncate, 0
        self.dtype = dtype

    def _shown(self) -> np.ndarray:
        return np.full((1, 2), self.t, self.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.t += 1
        over = self.t == self.length
        return self._shown(), float(self.t**2), over and not self.truncate, over and self.truncate, {}


class Chain(gymnasium.Env[Any, Any]):
    """Five states in a row. 1 walks right, past the last state for the prize; 0 walks left, and at the first state it
    stays there for a crumb. An episode begins anywhere and is cut after eight steps."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (STATES,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.at, self.t = 0, 0

    def _shown(self) -> np.ndarray:
        return np.eye(STATES, dtype=np.float32)[self.at]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.t = int(self.np_random.integers(STATES)), 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        over = action == 1 and self.at == STATES - 1
        reward = PRIZE if over else CRUMB if action == 0 and self.at == 0 else 0.0
        self.at = min(self.at + 1, STATES - 1) if action else max(self.at - 1, 0)
        return self._shown(), reward, over, self.t >= 8, {}


def chain_values(gamma: float) -> np.ndarray:
    """Best values [states, 2] of the chain."""
    q = np.zeros((STATES, 2))
    for _ in range(300):
        best = q.max(axis=1)
        for s in range(STATES):
            q[s, 0] = (CRUMB if s == 0 else 0.0) + gamma * best[max(s - 1, 0)]
            q[s, 1] = PRIZE if s == STATES - 1 else gamma * best[s + 1]
    return q


class Still(gymnasium.Env[Any, Any]):
    """One state; every step earns 1 and ends the episode, by termination or by truncation."""

    def __init__(self, *, truncate: bool) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.truncate = truncate

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.ones(1, np.float32), 1.0, not self.truncate, self.truncate, {}


class Lock(gymnasium.Env[Any, Any]):
    """Two branches, counted from 1 and from 5: 1 for each that is at its secret place; an episode is one step."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (3,), np.uint8)
        self.action_space = spaces.MultiDiscrete([3, 2], start=[1, 5])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.array([0, 128, 255], np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        reward = float(action[0] == 3) + float(action[1] == 5)
        return np.array([0, 128, 255], np.uint8), reward, True, False, {}
