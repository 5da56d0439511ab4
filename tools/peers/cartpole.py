"""CartPole-v1 as a Gymnasium vector environment that loses no step where an episode ends."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

#: `sync` steps single environments one after the other, `arrays` computes all of them in NumPy arrays.
KINDS = ("sync", "arrays")


class SameStepCartPole(CartPoleVectorEnv):
    """Gymnasium's CartPole in arrays, reset in the step in which an episode ends instead of the one after it.

    As its metadata say: observations are those to act on, `final_obs` of the infos the rows that ended their episodes.
    """

    metadata = {**CartPoleVectorEnv.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Begin episodes everywhere, from one stream of random numbers: of several seeds the first counts."""
        return super().reset(seed=seed[0] if isinstance(seed, list) else seed, options=options)

    def step(self, action: NDArray[Any]) -> Any:
        """A step of all environments, with the resets that follow from it."""
        observations, reward, terminated, truncated, infos = super().step(action)
        ended, count = self.prev_done, int(np.count_nonzero(self.prev_done))
        if count:
            infos = {**infos, "final_obs": observations, "_final_obs": ended}
            assert self.state is not None
            self.state[:, ended] = self.np_random.uniform(low=self.low, high=self.high, size=(4, count))
            self.steps[ended] = 0
            self.prev_done = np.zeros_like(ended)  # nothing is left to do for the next step
            observations = self.state.T.astype(np.float32)
        return observations, reward, terminated, truncated, infos


def make(envs: int, kind: str = "sync") -> VectorEnv[Any, Any, Any]:
    """A vector environment of a kind."""
    if kind == "arrays":
        return SameStepCartPole(num_envs=envs)
    options = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return gymnasium.make_vec("CartPole-v1", envs, vectorization_mode="sync", vector_kwargs=options)
