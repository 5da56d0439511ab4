"""Epsilon-greedy exploration on the host: who acts at random, decided ahead, so that most steps only look it up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

#: Rounds whose random numbers are drawn at once.
BLOCK = 512
# Keeps the exploration's random numbers apart from others of the same seed.
_STREAM = 0x65707369


class Exploration:
    """Random numbers of epsilon-greedy actions: a pure function of seed and round, so a resumed run needs no state.

    Args:
        seed: of the run.
        envs: environments E that act in each round.
        branches: actions n_d of each branch.
        epsilon: probability of a random action, by the number of the environment step, counted from 0.
    """

    def __init__(self, seed: int, envs: int, branches: tuple[int, ...], epsilon: Callable[[int], float]) -> None:
        self._seed, self._envs, self._branches, self._epsilon = seed, envs, branches, epsilon
        self._first = -BLOCK  # round of the block that is drawn

    def actions(self, round_: int, greedy: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
        """Actions int32 [E, D] of a round, counted from 0. `greedy` is asked for its own only if any is needed."""
        at = round_ - self._first
        if not 0 <= at < BLOCK:
            self._draw(round_ // BLOCK)
            at = round_ - self._first
        if self._all[at]:
            return self._random[at]
        chosen = greedy()
        if self._any[at]:
            np.copyto(chosen, self._random[at], where=self._explores[at])
        return chosen

    def _draw(self, block: int) -> None:
        first = block * BLOCK * self._envs
        epsilon = np.array([[self._epsilon(first + i * self._envs)] for i in range(BLOCK)])
        coins, self._random = self._numbers(block)
        explores = coins < epsilon
        self._explores = explores[:, :, None]
        self._all: list[bool] = np.all(explores, axis=1).tolist()
        self._any: list[bool] = np.any(explores, axis=1).tolist()
        self._first = block * BLOCK

    def _numbers(self, block: int) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Uniform numbers [BLOCK, E] and random actions [BLOCK, E, D] of the rounds of a block."""
        rng = np.random.Generator(np.random.Philox(key=np.array([self._seed, _STREAM << 32 | block], np.uint64)))
        shape = BLOCK, self._envs
        return rng.random(shape), rng.integers(0, self._branches, (*shape, len(self._branches)), np.int32)
