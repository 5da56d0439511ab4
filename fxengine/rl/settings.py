"""How to train an agent: the numbers of `TrainConfig`, and which agent an algorithm's name stands for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fxengine.config import StepConfig

if TYPE_CHECKING:
    from fxengine.rl.agents import Agent

#: Algorithms by name.
ALGORITHMS = ("dqn", "c51", "iqn", "full")
#: A name, or a function that makes the agent from the size of a state and the actions per branch.
Algorithm: TypeAlias = "str | Callable[[int, tuple[int, ...]], Agent]"
#: A gradient norm that nothing reaches: no clipping.
NO_CLIP = 1e30


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters. The defaults are those that CleanRL publishes for DQN and C51 on classic control.

    All intervals are counted in environment steps, summed over all environments.

    Attributes:
        hidden: widths of the layers; `full` takes two, its trunk's.
        lr: learning rate of Adam.
        adam_eps: the constant that Adam adds to the root of its second moment; 0: 1e-8, or 0.01 / batch for C51.
        clip: largest norm of a group's gradient; 0: it is not clipped.
        batch: transitions per update.
        buffer: transitions that the replay holds, a multiple of the number of environments.
        gamma: discount per step.
        n_step: steps that a transition spans.
        prioritized: draw by priority instead of uniformly.
        priority_alpha: exponent of the priorities.
        priority_beta: exponent of the importance weights.
        learning_starts: steps before the first update.
        train_every: steps between rounds of updates.
        updates: updates per round.
        target_every: steps between moves of the target network.
        tau: how far a move goes: 1 copies the network, less is Polyak averaging.
        epsilon_start: probability of a random action at first.
        epsilon_end: the same at last.
        exploration: share of the run over which it falls, along a line.
        loss: of DQN: `mse` or `huber`.
        double: DQN and C51 choose the best next action by the online network.
        atoms: atoms of C51's distribution.
        v_min: value of the first atom.
        v_max: value of the last one.
        quantiles: online quantiles of IQN.
        target_quantiles: target quantiles of IQN.
        act_quantiles: quantiles that IQN acts on.
        cosines: cosine features of a quantile's fraction in IQN.
        iqn_width: hidden width of IQN's quantile network.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    hidden: tuple[int, ...] = (120, 84)
    lr: float = 2.5e-4
    adam_eps: float = 0.0
    clip: float = 0.0
    batch: int = 128
    buffer: int = 10_000
    gamma: float = 0.99
    n_step: int = 1
    prioritized: bool = False
    priority_alpha: float = 0.5
    priority_beta: float = 0.4
    learning_starts: int = 10_000
    train_every: int = 10
    updates: int = 1
    target_every: int = 500
    tau: float = 1.0
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    exploration: float = 0.5
    loss: Literal["mse", "huber"] = "mse"
    double: bool = False
    atoms: int = 101
    v_min: float = -100.0
    v_max: float = 100.0
    quantiles: int = 64
    target_quantiles: int = 64
    act_quantiles: int = 32
    cosines: int = 64
    iqn_width: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(int(n) for n in self.hidden))
        for name in ("batch", "buffer", "n_step", "train_every", "updates", "target_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("lr", "adam_eps", "clip", "learning_starts"):
            self._require(name, 0 <= getattr(self, name) < math.inf, "at least 0 and finite")
        for name in (
            "gamma", "tau", "epsilon_start", "epsilon_end", "exploration", "priority_alpha", "priority_beta",
        ):  # fmt: skip
            self._require(name, 0.0 <= getattr(self, name) <= 1.0, "between 0 and 1")
        self._require("epsilon_end", self.epsilon_end <= self.epsilon_start, "at most epsilon_start")

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ValueError(f"{name} = {getattr(self, name)!r}: it must be {allowed}")

    @classmethod
    def quick(cls, **changes: Any) -> TrainConfig:
        """Settings that learn CartPole-v1 in 20,000 steps, a minute on the simulated device; and what is to differ."""
        return cls(**{**_QUICK, **changes})

    def epsilon(self, step: int, total_steps: int) -> float:
        """Probability of a random action in a step, counted from 0."""
        duration = self.exploration * total_steps
        done = min(1.0, step / duration) if duration else 1.0
        return (1.0 - done) * self.epsilon_start + done * self.epsilon_end

    def signals(self, algorithm: Algorithm) -> dict[str, float]:
        """First values of the engine's signals."""
        return {
            "lr": self.lr,
            "adam_eps": self.adam_eps or (0.01 / self.batch if algorithm == "c51" else 1e-8),
            "clip": self.clip or NO_CLIP,
            "polyak_tau": 0.0,
            "gamma": self.gamma,
            "priority_alpha": self.priority_alpha,
            "priority_beta": self.priority_beta,
        }

    def agent(self, algorithm: Algorithm, state: int, branches: tuple[int, ...]) -> Agent:
        """The agent for states of this size and these actions per branch.

        Raises:
            ValueError: an unknown algorithm.
            ConfigError: the agent cannot be built like that.
        """
        if callable(algorithm):
            return algorithm(state, branches)
        if algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, or make an agent; got {algorithm!r}")
        make: Mapping[str, Callable[[int, tuple[int, ...]], Agent]] = {
            "dqn": self._dqn,
            "c51": self._c51,
            "iqn": self._iqn,
            "full": self._full,
        }
        return make[algorithm](state, branches)

    def _dqn(self, state: int, branches: tuple[int, ...]) -> Agent:
        from fxengine.rl.agents import DqnAgent

        return DqnAgent(state, branches, self.hidden, self.batch, loss=self.loss, double=self.double)

    def _c51(self, state: int, branches: tuple[int, ...]) -> Agent:
        from fxengine.rl.agents import C51Agent

        support = self.atoms, self.v_min, self.v_max
        return C51Agent(state, branches, self.hidden, self.batch, *support, double=self.double)

    def _iqn(self, state: int, branches: tuple[int, ...]) -> Agent:
        from fxengine.rl.agents import IqnAgent

        return IqnAgent(
            state,
            branches,
            self.hidden,
            self.batch,
            cosines=self.cosines,
            quantiles=self.quantiles,
            target_quantiles=self.target_quantiles,
            act_quantiles=self.act_quantiles,
            width=self.iqn_width,
        )

    def _full(self, state: int, branches: tuple[int, ...]) -> Agent:
        """The specified step without what needs market data: no order flow, no labels, no tokens."""
        from fxengine.rl.agents import FullAgent

        if len(self.hidden) != 2:
            raise ValueError(f"hidden = {self.hidden}: the trunk of 'full' has two layers")
        return FullAgent(
            StepConfig(
                batch=self.batch,
                state=state,
                tokens=0,
                ofi=0,
                h1=self.hidden[0],
                h2=self.hidden[1],
                branches=branches,
                atoms=self.atoms,
                v_min=self.v_min,
                v_max=self.v_max,
                iqn_quantiles=self.quantiles,
                iqn_target_quantiles=self.target_quantiles,
                iqn_cos=self.cosines,
                iqn_h=self.iqn_width,
                aux_h=0,
            )
        )

    def to_json(self) -> str:
        """JSON object, in field order."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Inverse of `to_json`.

        Raises:
            ValueError: an unknown field, or a value that is not allowed.
        """
        values: Mapping[str, Any] = json.loads(text)
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"unknown hyperparameters {unknown}; known are {[f.name for f in fields(cls)]}")
        return cls(**values)


_QUICK: Mapping[str, Any] = {
    "hidden": (64, 64), "lr": 1e-3, "batch": 64, "gamma": 0.98, "learning_starts": 500, "train_every": 2,
    "target_every": 200, "exploration": 0.3, "v_min": 0.0, "v_max": 60.0, "atoms": 51, "quantiles": 8,
    "target_quantiles": 8, "act_quantiles": 16, "cosines": 16, "iqn_width": 64,
}  # fmt: skip
