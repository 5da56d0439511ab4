"""DQN on CartPole-v1 in PyTorch and JAX, with the settings that CleanRL publishes: the peers of tools/rl_bench.py.

    python -m tools.peers.dqn torch-captured row.json --device cuda --steps 100000
    python -m tools.peers.dqn jax row.json --device cuda --steps 100000 --envs 16

Writes a row {by, envs, steps, updates, seconds, ...}, or a line that says what cannot be imported. The loop is the same
for all: one environment or a vector environment, a replay in NumPy arrays, an update of 128 transitions every 10 steps.
Several environments take their actions from one call, and their transitions enter the replay as slices. What differs is
how the network is run:

    torch-eager     operation by operation
    torch-captured  one CUDA graph per action and one per update, copies from and to page-locked memory included
    jax             one compiled function per action and one per update
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import numpy as np
from numpy.typing import NDArray

from fxengine.rl.settings import TrainConfig

#: Observations and actions of CartPole-v1.
STATE, ACTIONS = 4, 2
Arrays = Mapping[str, NDArray[np.float32]]


class Learner(Protocol):
    """A framework's side of the loop."""

    def act(self, observation: NDArray[np.float32]) -> int:
        """The greedy action of one environment."""

    def act_all(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """The greedy actions [E] of all environments; overwritten by the next call."""

    def update(self, batch: Arrays) -> None:
        """One step of Adam on the mean of δ²; it need not be over when this returns."""

    def copy(self) -> None:
        """The target network becomes the network."""

    def finish(self) -> None:
        """Wait for everything."""


def loop(learner: Learner, config: TrainConfig, steps: int, seed: int) -> dict[str, Any]:
    """Train; returns the row."""
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(seed)
    shapes = {"state": (STATE,), "next_state": (STATE,), "action": (), "reward": (), "discount": ()}
    replay = {name: np.zeros((config.buffer, *shape), np.float32) for name, shape in shapes.items()}
    observation, _ = env.reset(seed=seed)
    returns, total, updates = [], 0.0, 0
    start = time.perf_counter()
    for step in range(steps):
        explores = rng.random() < config.epsilon(step, steps)
        action = int(rng.integers(ACTIONS)) if explores else learner.act(observation)
        following, reward, terminated, truncated, _ = env.step(action)
        total += float(reward)
        row = step % config.buffer
        replay["state"][row], replay["next_state"][row] = observation, following
        replay["action"][row], replay["reward"][row] = action, reward
        replay["discount"][row] = 0.0 if terminated else config.gamma
        observation = following
        if terminated or truncated:
            returns.append(total)
            total = 0.0
            observation, _ = env.reset()
        taken = step + 1
        if taken > config.learning_starts and (taken - config.learning_starts) % config.train_every == 0:
            rows = rng.integers(0, min(taken, config.buffer), config.batch)
            learner.update({name: array[rows] for name, array in replay.items()})
            updates += 1
            if taken % config.target_every == 0:
                learner.copy()
    learner.finish()
    return _row(steps, updates, time.perf_counter() - start, returns)


def loop_together(learner: Learner, config: TrainConfig, steps: int, seed: int, env: Any) -> dict[str, Any]:
    """Train in a vector environment that resets in the same step; returns the row."""
    count = env.num_envs
    rng = np.random.default_rng(seed)
    shapes = {"state": (STATE,), "next_state": (STATE,), "action": (), "reward": (), "discount": ()}
    replay = {name: np.zeros((config.buffer, *shape), np.float32) for name, shape in shapes.items()}
    observations, _ = env.reset(seed=seed)
    returns: list[float] = []
    totals, taken, updates = np.zeros(count), 0, 0
    next_update, next_copy = config.learning_starts + config.train_every, _after(config.learning_starts, config)
    start = time.perf_counter()
    while taken < steps:
        explores, actions = rng.random(count) < config.epsilon(taken, steps), rng.integers(ACTIONS, size=count)
        if not explores.all():
            actions = np.where(explores, actions, learner.act_all(observations))
        following, rewards, terminated, truncated, infos = env.step(actions)
        rows = slice(taken % config.buffer, taken % config.buffer + count)
        replay["state"][rows], replay["next_state"][rows] = observations, following
        replay["action"][rows], replay["reward"][rows] = actions, rewards
        replay["discount"][rows] = np.where(terminated, 0.0, config.gamma)
        totals += rewards
        observations = following
        ended = terminated | truncated
        if ended.any():
            which = np.flatnonzero(ended)
            replay["next_state"][rows.start + which] = np.stack([infos["final_obs"][i] for i in which])
            returns += totals[which].tolist()
            totals[which] = 0.0
        taken += count
        while taken >= next_update:
            drawn = rng.integers(0, min(taken, config.buffer), config.batch)
            learner.update({name: array[drawn] for name, array in replay.items()})
            updates += 1
            next_update += config.train_every
            if taken >= next_copy:
                learner.copy()
                next_copy = _after(taken, config)
    learner.finish()
    return _row(taken, updates, time.perf_counter() - start, returns)


def _after(step: int, config: TrainConfig) -> int:
    """The first step after this one at which the target network is copied."""
    return (step // config.target_every + 1) * config.target_every


def _row(steps: int, updates: int, seconds: float, returns: list[float]) -> dict[str, Any]:
    recent = returns[-20:]
    mean = math.fsum(recent) / len(recent) if recent else None
    return {"steps": steps, "updates": updates, "seconds": seconds, "return_last_20": mean}


# -- PyTorch -------------------------------------------------------------------------------------------------------


class TorchEager:
    """Operation by operation."""

    def __init__(self, config: TrainConfig, device: str, seed: int, envs: int = 1, *, capturable: bool = False) -> None:
        import torch

        torch.manual_seed(seed)
        torch.backends.cuda.matmul.allow_tf32 = False
        self.torch, self.device = torch, device
        self.net, self.target = (self._network(config) for _ in range(2))
        self.target.load_state_dict(self.net.state_dict())
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=config.lr, capturable=capturable, **({"fused": True} if device == "cuda" else {})
        )

    def _network(self, config: TrainConfig) -> Any:
        nn = self.torch.nn
        one, two = config.hidden
        layers = nn.Linear(STATE, one), nn.ReLU(), nn.Linear(one, two), nn.ReLU(), nn.Linear(two, ACTIONS)
        return nn.Sequential(*layers).to(self.device)

    def act(self, observation: NDArray[np.float32]) -> int:
        """The greedy action."""
        with self.torch.inference_mode():
            return int(self.net(self.torch.from_numpy(observation).to(self.device)).argmax())

    def act_all(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """The greedy actions."""
        with self.torch.inference_mode():
            actions = self.net(self.torch.from_numpy(observations).to(self.device)).argmax(1)
        return np.asarray(actions.cpu().numpy())

    def update(self, batch: Arrays) -> None:
        """One step of Adam."""
        self.learn({name: self.torch.from_numpy(array).to(self.device) for name, array in batch.items()})

    def learn(self, batch: Mapping[str, Any]) -> None:
        """One step of Adam on tensors."""
        with self.torch.no_grad():
            goal = batch["reward"] + batch["discount"] * self.target(batch["next_state"]).amax(1)
        q = self.net(batch["state"]).gather(1, batch["action"].long()[:, None])[:, 0]
        loss = (q - goal).square().mean()
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()
        self.optimizer.step()

    def copy(self) -> None:
        """The target network becomes the network."""
        with self.torch.no_grad():
            for target, value in zip(self.target.parameters(), self.net.parameters(), strict=True):
                target.copy_(value)

    def finish(self) -> None:
        """Wait for everything."""
        if self.device == "cuda":
            self.torch.cuda.synchronize()


class TorchCaptured(TorchEager):
    """One graph per action, one per update."""

    def __init__(self, config: TrainConfig, device: str, seed: int, envs: int = 1) -> None:
        super().__init__(config, device, seed, capturable=True)
        torch = self.torch
        shapes = {"state": (STATE,), "next_state": (STATE,), "action": (), "reward": (), "discount": ()}
        self.pinned = {name: torch.zeros(config.batch, *shape).pin_memory() for name, shape in shapes.items()}
        rows = () if envs == 1 else (envs,)
        self.shown = torch.zeros(*rows, STATE).pin_memory()
        self.chosen = torch.zeros(*rows, 1, dtype=torch.int64).pin_memory()
        self.rows = {name: tensor.numpy() for name, tensor in self.pinned.items()}
        self.stream = torch.cuda.Stream()
        inputs = {name: tensor.to(device) for name, tensor in self.pinned.items()}
        observation = self.shown.to(device)

        def update() -> None:
            for name, tensor in inputs.items():
                tensor.copy_(self.pinned[name], non_blocking=True)
            self.learn(inputs)

        @torch.no_grad()
        def act() -> None:
            observation.copy_(self.shown, non_blocking=True)
            self.chosen.copy_(self.net(observation).argmax(-1, keepdim=True), non_blocking=True)

        parameters = [tensor.clone() for tensor in self.net.state_dict().values()]
        self._update, self._act = self._capture(update), self._capture(act)
        with torch.no_grad():  # the warm-up has trained on zeros
            for tensor, before in zip(self.net.state_dict().values(), parameters, strict=True):
                tensor.copy_(before)
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        torch.cuda.synchronize()

    def _capture(self, work: Callable[[], None]) -> Any:
        torch = self.torch
        with torch.cuda.stream(self.stream):
            for _ in range(3):
                work()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            work()
        return graph

    def act(self, observation: NDArray[np.float32]) -> int:
        """The greedy action."""
        self.shown.numpy()[:] = observation
        with self.torch.cuda.stream(self.stream):
            self._act.replay()
        self.stream.synchronize()
        return int(self.chosen[0])

    def act_all(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """The greedy actions."""
        self.shown.numpy()[:] = observations
        with self.torch.cuda.stream(self.stream):
            self._act.replay()
        self.stream.synchronize()
        return np.asarray(self.chosen.numpy()[:, 0])

    def update(self, batch: Arrays) -> None:
        """One step of Adam; waits until the one before has read its batch."""
        self.stream.synchronize()
        for name, array in batch.items():
            self.rows[name][...] = array
        with self.torch.cuda.stream(self.stream):
            self._update.replay()

    def copy(self) -> None:
        """The target network becomes the network."""
        with self.torch.cuda.stream(self.stream):
            super().copy()


# -- JAX -------------------------------------------------------------------------------------------------------------


class Jax:
    """One compiled function per action, one per update."""

    def __init__(self, config: TrainConfig, device: str, seed: int, envs: int = 1) -> None:
        import jax
        import jax.numpy as jnp

        self.jax = jax
        jax.config.update("jax_default_device", jax.devices("gpu" if device == "cuda" else "cpu")[0])
        rng = np.random.default_rng(seed)
        widths = [STATE, *config.hidden, ACTIONS]
        self.params = [
            tuple(jnp.asarray(rng.uniform(-1, 1, s) / math.sqrt(k), jnp.float32) for s in ((n, k), (n,)))
            for k, n in pairwise(widths)
        ]
        self.target = self.params
        zeros = jax.tree.map(jnp.zeros_like, self.params)
        self.moments = (zeros, zeros, jnp.zeros((), jnp.int32))

        def forward(params: Any, x: Any) -> Any:
            for w, b in params[:-1]:
                x = jax.nn.relu(x @ w.T + b)
            w, b = params[-1]
            return x @ w.T + b

        def learn(params: Any, target: Any, moments: Any, batch: Any) -> Any:
            goal = batch["reward"] + batch["discount"] * forward(target, batch["next_state"]).max(1)

            def loss(params: Any) -> Any:
                q = forward(params, batch["state"])
                chosen = jnp.take_along_axis(q, batch["action"].astype(jnp.int32)[:, None], 1)[:, 0]
                return jnp.square(chosen - goal).mean()

            gradient = jax.grad(loss)(params)
            m, v, t = moments
            m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, gradient)
            v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, gradient)
            t = t + 1
            scale = config.lr * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            params = jax.tree.map(
                lambda p, m, v: p - scale * m / (jnp.sqrt(v) + 1e-8 * jnp.sqrt(1 - 0.999**t)), params, m, v
            )
            return params, (m, v, t)

        self._act = jax.jit(lambda params, x: forward(params, x).argmax(-1))
        self._learn = jax.jit(learn)
        shapes = {"state": (STATE,), "next_state": (STATE,), "action": (), "reward": (), "discount": ()}
        batch = {name: np.zeros((config.batch, *shape), np.float32) for name, shape in shapes.items()}
        shown = np.zeros(STATE if envs == 1 else (envs, STATE), np.float32)
        self._act(self.params, shown).block_until_ready()
        jax.block_until_ready(self._learn(self.params, self.target, self.moments, batch))

    def act(self, observation: NDArray[np.float32]) -> int:
        """The greedy action."""
        return int(self._act(self.params, observation))

    def act_all(self, observations: NDArray[np.float32]) -> NDArray[Any]:
        """The greedy actions."""
        return np.asarray(self._act(self.params, observations))

    def update(self, batch: Arrays) -> None:
        """One step of Adam."""
        self.params, self.moments = self._learn(self.params, self.target, self.moments, batch)

    def copy(self) -> None:
        """The target network becomes the network."""
        self.target = self.params

    def finish(self) -> None:
        """Wait for everything."""
        self.jax.block_until_ready(self.params)


LEARNERS: Mapping[str, Callable[[TrainConfig, str, int, int], Learner]] = {
    "torch-eager": TorchEager,
    "torch-captured": TorchCaptured,
    "jax": Jax,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="DQN on CartPole-v1 in one framework.")
    parser.add_argument("name", choices=sorted(LEARNERS))
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-starts", type=int, default=TrainConfig.learning_starts)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--envs", type=int, default=1)
    parser.add_argument("--vector", default="sync", help="kind of the vector environment of tools/peers/cartpole.py")
    options = parser.parse_args()
    config = TrainConfig(learning_starts=options.learning_starts)
    start = time.perf_counter()
    try:
        learner = LEARNERS[options.name](config, options.device, options.seed, options.envs)
    except ImportError as error:
        options.output.write_text(json.dumps(f"left out: {error}") + "\n", encoding="utf-8")
        return 0
    setup = time.perf_counter() - start
    row: dict[str, Any] = {"by": f"{options.name} {options.device}", "envs": options.envs, "setup_s": setup}
    if options.envs == 1:
        row |= loop(learner, config, options.steps, options.seed)
    else:
        from tools.peers.cartpole import make

        row |= loop_together(learner, config, options.steps, options.seed, make(options.envs, options.vector))
    options.output.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
