"""Greedy episodes, to judge a policy by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fxengine.acting import Acting
from fxengine.checkpoint import Checkpoint
from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.rl.checkpoints import RunState
from fxengine.rl.envs import EVALUATION, Source, Spaces, maker, seed_of
from fxengine.rl.settings import Algorithm

if TYPE_CHECKING:
    from gymnasium import Env

#: Episodes that are played side by side, so that one launch acts for all of them.
TOGETHER = 16


def play(
    act: Callable[[NDArray[np.float32]], NDArray[np.int32]],
    make: Callable[[], Env[Any, Any]],
    spaces: Spaces,
    *,
    episodes: int,
    seed: int,
) -> list[float]:
    """Returns of episodes, each with a seed of its own, in order.

    Args:
        act: actions [rows, D] of observations [rows, S]; always of the same number of rows.
        make: makes an environment; several are open at a time.
        spaces: of the environment.
        episodes: how many.
        seed: episode k of a seed begins in the same state, whatever the policy.
    """
    envs = [make() for _ in range(min(episodes, TOGETHER))]
    shown = np.zeros((len(envs), *spaces.shape), spaces.dtype)
    totals, begun = [0.0] * episodes, 0
    playing: dict[int, int] = {}  # environment: episode

    def begin(i: int) -> None:
        nonlocal begun
        if begun < episodes:
            spaces.put(shown[i], envs[i].reset(seed=seed_of(seed, EVALUATION, begun))[0])
            playing[i] = begun
            begun += 1

    try:
        for i in range(len(envs)):
            begin(i)
        while playing:
            actions = spaces.taken(act(spaces.readable(shown.reshape(len(envs), -1))))
            for i, episode in list(playing.items()):
                observation, reward, terminated, truncated, _ = envs[i].step(actions[i])
                spaces.put(shown[i], observation)
                totals[episode] += float(reward)
                if terminated or truncated:
                    del playing[i]
                    begin(i)
    finally:
        for env in envs:
            env.close()
    return totals


def evaluate(
    checkpoint: str | Path,
    env: Source | None = None,
    *,
    episodes: int = 100,
    seed: int = 0,
    device: str | Device = "auto",
    algorithm: Algorithm | None = None,
) -> list[float]:
    """Returns of greedy episodes of a trained agent.

    Args:
        checkpoint: file of a run.
        env: id of the environment or a function that makes it; by default the id that the run was given.
        episodes: how many.
        seed: episode k of a seed begins in the same state, whatever the agent.
        device: `auto`, `cuda:N`, `sim`, or an open Device.
        algorithm: the function that made the agent, if it was made by one.

    Raises:
        ValueError: the file is no checkpoint of a run, or belongs to other spaces; `env` is an environment, or missing
            and not named by the run; `episodes` is below 1.
    """
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    held = Checkpoint.load(checkpoint)
    run = RunState.of(held, checkpoint)
    make = maker(run.source(env))
    first = make()
    spaces = Spaces.of(first.observation_space, first.action_space)
    first.close()
    agent = run.settings.config.agent(run.settings.chosen(algorithm), spaces.size, spaces.branches)
    with Engine(agent.train, device=device, groups=agent.groups, precision=run.settings.precision) as engine:
        run.check_parameters({name: engine.params[name].shape for name in engine.params}, held)
        for name in engine.params:
            engine.params[name] = held.state[f"param.{name}"]
        acting = Acting(engine, agent.values, branches=agent.branches, seed=seed)
        return play(lambda obs: acting.act(obs, greedy=True), make, spaces, episodes=episodes, seed=seed)
