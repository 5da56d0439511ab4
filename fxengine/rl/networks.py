"""What the agents are made of: the batch they read, fully connected layers that start as in PyTorch, one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from fxengine.config import ConfigError
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.ops.dqn import MAX_BRANCHES
from fxengine.train.groups import ParamSpec, linear_specs

#: The one parameter group of the agents on a perceptron.
NETWORK = "network"


@dataclass(frozen=True)
class Batch:
    """Inputs of a training step.

    Rows whose discount is 0 may hold anything in next_state, NaN included: nothing there mixes rows, and every loss
    leaves out what a dead row's next state led to.

    Attributes:
        state, next_state: float32 [B, S].
        reward, discount, weight: float32 [B]; discount = γᵐ, 0 where the episode ended; importance weights.
        actions: int32 [B, D].
    """

    state: Tensor
    next_state: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor
    actions: Tensor

    @classmethod
    def declare(cls, step: StepBuilder, *, rows: int, state: int, branches: int) -> Batch:
        """The inputs, named like the attributes."""
        return cls(
            step.input("state", (rows, state)),
            step.input("next_state", (rows, state)),
            step.input("reward", (rows,)),
            step.input("discount", (rows,)),
            step.input("weight", (rows,)),
            step.input("actions", (rows, branches), np.int32),
        )


def perceptron_specs(inputs: int, hidden: Sequence[int]) -> list[ParamSpec]:
    """Parameters of the layers fc1, fc2, ... of the widths `hidden` on so many inputs."""
    widths = [inputs, *hidden]
    return [
        spec
        for i, width in enumerate(hidden)
        for spec in linear_specs(f"fc{i + 1}", width, widths[i], random_bias=True)
    ]


def perceptron(p: Pass, x: Tensor, layers: int, *, out: str | None = None) -> Tensor:
    """The ReLU layers fc1, fc2, ... on x [B, S].

    Args:
        p: the pass; its step has the parameters `perceptron_specs`.
        x: what the first layer reads.
        layers: how many there are.
        out: name of the result of the linear layer `out` on the last of them; None: return that one's.
    """
    for i in range(layers):
        x = p.linear(x, f"fc{i + 1}", activation="relu", name=f"h{i + 1}")
    return p.linear(x, "out", name=out) if out else x


def check_state(state: Tensor, size: int) -> None:
    """Raise ConfigError unless an agent for states of this size can act on these."""
    if len(state.shape) != 2 or state.shape[1] != size or state.dtype != np.float32:
        raise ConfigError(f"the agent acts on float32 [rows, {size}], got {state.dtype} {state.shape}")


@dataclass(frozen=True)
class PerceptronAgent:
    """What the agents with a ReLU perceptron have in common.

    Attributes:
        state: size S of a state.
        branches: actions n_d per branch.
        hidden: widths of the perceptron; (): the heads read the state.
        batch: rows B of a training step.
    """

    state: int
    branches: tuple[int, ...]
    hidden: tuple[int, ...] = (120, 84)
    batch: int = 128

    def __post_init__(self) -> None:
        for name in ("branches", "hidden"):
            object.__setattr__(self, name, tuple(int(n) for n in getattr(self, name)))
        self._require("state", self.state >= 1, "at least 1")
        self._require("batch", self.batch >= 1, "at least 1")
        self._require("branches", 1 <= len(self.branches) <= MAX_BRANCHES, f"1 to {MAX_BRANCHES} branches")
        self._require("branches", all(n >= 2 for n in self.branches), "at least 2 actions in each branch")
        self._require("hidden", all(n >= 1 for n in self.hidden), "widths of at least 1, or ()")

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ConfigError(f"{type(self).__name__}: {name} = {getattr(self, name)!r}: it must be {allowed}")

    @property
    def groups(self) -> Mapping[int, str]:
        """One group: the whole network."""
        return {0: NETWORK}

    @property
    def extra(self) -> Mapping[str, int]:
        """Nothing but the state is read."""
        return {}

    @property
    def _features(self) -> int:
        """Columns that the heads read."""
        return self.hidden[-1] if self.hidden else self.state

    @property
    def _offsets(self) -> tuple[int, ...]:
        """First column of each branch in q."""
        return tuple(accumulate(self.branches[:-1], initial=0))

    def _head_specs(self) -> list[ParamSpec]:
        """Parameters of what stands on the perceptron."""
        raise NotImplementedError

    def _declare(self, step: StepBuilder) -> None:
        step.group(NETWORK, [*perceptron_specs(self.state, self.hidden), *self._head_specs()], target=True)

    def _begin(self, step: StepBuilder) -> Batch:
        """Parameters, the signals of the policies, inputs."""
        self._declare(step)
        step.signals.include("policy")
        return Batch.declare(step, rows=self.batch, state=self.state, branches=len(self.branches))

    def _priority(self, step: StepBuilder) -> Tensor:
        return step.output("td", step.program.tensor("td", (self.batch,)))

    def _acting(self, step: StepBuilder, state: Tensor) -> Pass:
        """A pass without a gradient, its tensors named after the state that it reads."""
        check_state(state, self.state)
        if NETWORK in step.absent_groups:
            self._declare(step)
        return Pass(step, f".{state.name}")
