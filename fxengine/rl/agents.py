"""Agents: which networks learn from a batch of transitions, and which values they act on.

    agent = DqnAgent(state=4, branches=(2,))
    engine = Engine(agent.train, groups=agent.groups, signals={"lr": 2.5e-4, "clip": 1e9, "polyak_tau": 0.0})

An agent declares its whole training step, and apart from it, in another program over the same parameters, the forward
that it acts by. All are made of the same parts; `DqnAgent`, `C51Agent` and `IqnAgent` have one parameter group, named
`network`, which is clipped as a whole, with a target copy that polyak_tau moves: a step with polyak_tau 1 copies the
network exactly, one with 0 leaves the copy alone. Parameters start as in PyTorch.

Sources: Mnih et al. 2015, "Human-level control through deep reinforcement learning"; van Hasselt, Guez & Silver 2016,
"Deep reinforcement learning with double Q-learning"; Bellemare, Dabney & Munos 2017, "A distributional perspective on
reinforcement learning"; Dabney, Ostrovski, Silver & Munos 2018, "Implicit quantile networks for distributional
reinforcement learning"; several branches: Tavakoli, Pardo & Kormushev 2018, "Action branching architectures for deep
reinforcement learning".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from fxengine.config import ConfigError
from fxengine.graphs import Tensor
from fxengine.nets import iqn
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.nets.step import TAU_STREAM, TAU_TARGET_STREAM
from fxengine.ops import c51, dqn, dueling, policy
from fxengine.ops import iqn as quantile_losses
from fxengine.ops.iqn_fused import Sizes
from fxengine.rl.full import FullAgent
from fxengine.rl.networks import PerceptronAgent, perceptron
from fxengine.train.groups import ParamSpec, linear_specs

__all__ = ["Agent", "C51Agent", "DqnAgent", "FullAgent", "IqnAgent"]

#: Philox stream of the fractions that are acted on.
ACT_TAU_STREAM = 4

Loss = Literal["mse", "huber"]


class Agent(Protocol):
    """What a trainer asks of an agent."""

    @property
    def state(self) -> int:
        """Size S of a state."""
        ...

    @property
    def branches(self) -> tuple[int, ...]:
        """Actions n_d per branch."""
        ...

    @property
    def batch(self) -> int:
        """Rows B of a training step."""
        ...

    @property
    def groups(self) -> Mapping[int, str] | None:
        """Parameter groups by index, as `Engine` takes them; None for those of the specified step."""
        ...

    @property
    def extra(self) -> Mapping[str, int]:
        """Columns of what `values` reads beside the state, by name."""
        ...

    def train(self, step: StepBuilder) -> None:
        """Declare the whole training step: inputs, networks, losses, and the output `td` [B], the replay priority.

        It has the signals of the policies (`epsilon`, `temperature`, `risk`), which acting reads.
        """
        ...

    def values(self, step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """Declare the values that the agent acts on: q [rows, Σn_d] of the online networks, without a gradient.

        Args:
            step: usually the builder of an evaluation; it gets the parameter groups if it does not have them.
            state: float32 [rows, S]; rows may differ from the batch. Its name ends those of the tensors made here.
            extra: float32 [rows, columns] by name, see the property.
        """
        ...


@dataclass(frozen=True)
class DqnAgent(PerceptronAgent):
    """Expected values: a ReLU perceptron with one linear head, and the temporal-difference loss.

    y_d = reward + discount·q_target,d(s')[best_d]; the loss is the mean over the batch of weight·mean_d of the squares
    (or Huber's function) of δ_d = q_d[a_d] − y_d. Output td = mean_d |δ_d|; reports L_td and q_mean, the mean of
    q_d[a_d].

    Attributes:
        state: size S of a state.
        branches: actions n_d per branch.
        hidden: widths of the perceptron; (): the head reads the state.
        batch: rows B of a training step.
        loss: `mse` for δ², `huber` for δ²/2 within 1 and |δ| − 1/2 beyond.
        double: best_d is the online network's choice at s' instead of the target network's.
    """

    loss: Loss = "mse"
    double: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("loss", self.loss in get_args(Loss), f"one of {', '.join(get_args(Loss))}")

    def _head_specs(self) -> list[ParamSpec]:
        return linear_specs("out", sum(self.branches), self._features, random_bias=True)

    def _q(self, p: Pass, state: Tensor) -> Tensor:
        return perceptron(p, state, len(self.hidden), out="q")

    def train(self, step: StepBuilder) -> None:
        """Declare the training step; see `Agent`."""
        batch = self._begin(step)
        q = self._q(Pass(step, trained=step.train), batch.state)
        q_target = self._q(Pass(step, ".target", target=True), batch.next_state)
        q_next = self._q(Pass(step, ".next"), batch.next_state) if self.double else None
        dqn.losses(
            step.program,
            q,
            q_target,
            actions=batch.actions,
            reward=batch.reward,
            discount=batch.discount,
            weight=batch.weight,
            branches=self.branches,
            q_next=q_next,
            huber=self.loss == "huber",
            dq=step.loss_gradient(q),
            td=self._priority(step),
            loss=step.report("L_td"),
            q_mean=step.report("q_mean"),
            name="dqn",
        )
        step.output("q", q)

    def values(self, step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """Declare the values to act on; see `Agent`."""
        return self._q(self._acting(step, state), state)


@dataclass(frozen=True)
class C51Agent(PerceptronAgent):
    """Distributions over fixed atoms: a ReLU perceptron with one linear layer of logits, not dueling.

    The loss is the mean over the batch of weight·mean_d of the cross-entropy between the projected target distribution
    of the best action at s' and that of a_d. Output td = mean_d of the cross-entropy; reports L_c51. The signal w_c51
    multiplies the gradient.

    Attributes:
        state: size S of a state.
        branches: actions n_d per branch.
        hidden: widths of the perceptron; (): the logits are read off the state.
        batch: rows B of a training step.
        atoms: atoms K of a distribution, 2 to 256.
        v_min: value of the first atom.
        v_max: value of the last one.
        double: the best action is the online network's choice at s' instead of the target network's.
    """

    atoms: int = 101
    v_min: float = -100.0
    v_max: float = 100.0
    double: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("atoms", 2 <= self.atoms <= dueling.MAX_ATOMS, f"2 to {dueling.MAX_ATOMS}")
        finite = math.isfinite(self.v_min) and math.isfinite(self.v_max)
        self._require("v_min", finite and self.v_min < self.v_max, f"finite and below v_max = {self.v_max!r}")

    def _head_specs(self) -> list[ParamSpec]:
        return linear_specs("out", sum(self.branches) * self.atoms, self._features, random_bias=True)

    def _branch(self, logits: Tensor, d: int) -> Tensor:
        """The columns of branch d in the logits or their gradient."""
        first = self._offsets[d]
        return logits.columns(first * self.atoms, (first + self.branches[d]) * self.atoms)

    def _heads(self, p: Pass, logits: Tensor, *, greedy: bool = False) -> tuple[dueling.Heads, Tensor | None]:
        """Heads of the logits [B, Σn_d·K] of a pass, and the best actions [B, D] if asked for."""
        rows, total = logits.shape[0], sum(self.branches)
        q, lse = p.tensor("q", rows, total), p.tensor("lse", rows, total)
        best = p.tensor("best", rows, len(self.branches), dtype=np.int32) if greedy else None
        branches = tuple(self._branch(logits, d) for d in range(len(self.branches)))
        for d, (first, n) in enumerate(zip(self._offsets, self.branches, strict=True)):
            dueling.forward(
                p.program,
                None,
                branches[d],
                q.columns(first, first + n),
                lse=lse.columns(first, first + n),
                best=best.columns(d, d + 1) if best else None,
                v_min=self.v_min,
                v_max=self.v_max,
                label=f"q{d}{p.suffix}",
            )
        return dueling.Heads(None, branches, q, lse), best

    def _logits(self, p: Pass, state: Tensor) -> Tensor:
        return perceptron(p, state, len(self.hidden), out="logits")

    def train(self, step: StepBuilder) -> None:
        """Declare the training step; see `Agent`."""
        batch = self._begin(step)
        at_s, target = Pass(step, trained=step.train), Pass(step, ".target", target=True)
        logits = self._logits(at_s, batch.state)
        heads, _ = self._heads(at_s, logits)
        goal, best = self._heads(target, self._logits(target, batch.next_state), greedy=not self.double)
        if self.double:
            after = Pass(step, ".next")
            _, best = self._heads(after, self._logits(after, batch.next_state), greedy=True)
        assert best is not None
        dlogits = step.loss_gradient(logits)
        c51.losses(
            step.program,
            heads,
            goal,
            c51.Transition(batch.actions, best, batch.reward, batch.discount, batch.weight),
            v_min=self.v_min,
            v_max=self.v_max,
            w_c51=step.signal("w_c51") if dlogits else None,
            dadv=[self._branch(dlogits, d) for d in range(len(self.branches))] if dlogits else (),
            td=self._priority(step),
            loss_c51=step.report("L_c51"),
            name="c51",
        )
        step.output("q", heads.q)

    def values(self, step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """Declare the values to act on, the means of the distributions; see `Agent`."""
        p = self._acting(step, state)
        return self._heads(p, self._logits(p, state))[0].q


@dataclass(frozen=True)
class IqnAgent(PerceptronAgent):
    """Implicit quantiles: a ReLU perceptron, and a quantile network on its features.

    The loss is the quantile Huber loss of all pairs of an online and a target quantile, at the actions whose target
    quantiles have the highest mean. Output td = mean_d |mean_i θ_i[a_d] − (reward + discount·mean_j θ'_j[best_d])|;
    reports L_iqn and q_mean, the mean over quantiles, rows and branches of θ[a_d].

    Attributes:
        state: size S of a state.
        branches: actions n_d per branch.
        hidden: widths of the perceptron; (): the quantile network reads the state.
        batch: rows B of a training step.
        cosines: cosine features M of a fraction.
        quantiles: online quantiles N.
        target_quantiles: target quantiles N'.
        act_quantiles: quantiles whose mean is acted on.
        width: hidden width I of the quantile network.
        kappa: threshold κ of the Huber loss.
    """

    cosines: int = 64
    quantiles: int = 64
    target_quantiles: int = 64
    act_quantiles: int = 32
    width: int = 128
    kappa: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cosines", "quantiles", "target_quantiles", "act_quantiles", "width"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("kappa", 0.0 < self.kappa < math.inf, "above 0 and finite")

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.cosines, self._features, self.width, sum(self.branches))

    def _head_specs(self) -> list[ParamSpec]:
        return iqn.specs(self._sizes, random_bias=True)

    def _mean(self, p: Pass, theta: Tensor, quantiles: int) -> Tensor:
        q = p.tensor("q", theta.shape[0] // quantiles, sum(self.branches))
        policy.quantile_mean(p.program, theta, q, quantiles=quantiles, label=q.name)
        return q

    def train(self, step: StepBuilder) -> None:
        """Declare the training step; see `Agent`."""
        batch = self._begin(step)
        tau = step.noise("tau", (self.batch, self.quantiles), stream=TAU_STREAM)
        tau_target = step.noise("tau_target", (self.batch, self.target_quantiles), stream=TAU_TARGET_STREAM)
        at_s, target = Pass(step, trained=step.train), Pass(step, ".target", target=True)
        net, layers = iqn.Network(self._sizes, self.quantiles, self.target_quantiles), len(self.hidden)
        theta = iqn.quantiles(at_s, net, perceptron(at_s, batch.state, layers), tau)
        theta_target = iqn.quantiles(target, net, perceptron(target, batch.next_state, layers), tau_target)
        q = self._mean(at_s, theta, self.quantiles)
        best = step.program.tensor("best", (self.batch, len(self.branches)), np.int32)
        dqn.losses(
            step.program,
            q,
            self._mean(target, theta_target, self.target_quantiles),
            actions=batch.actions,
            reward=batch.reward,
            discount=batch.discount,
            weight=batch.weight,
            branches=self.branches,
            td=self._priority(step),
            best=best,
            q_mean=step.report("q_mean"),
            name="choice",
        )
        quantile_losses.loss(
            step.program,
            theta,
            theta_target,
            tau,
            actions=batch.actions,
            best=best,
            reward=batch.reward,
            discount=batch.discount,
            weight=batch.weight,
            branches=self.branches,
            kappa=self.kappa,
            dtheta=step.loss_gradient(theta),
            loss=step.report("L_iqn"),
            name="iqn",
        )
        step.output("q", q)

    def values(self, step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """Declare the values to act on, the mean over quantiles at random fractions; see `Agent`.

        They are drawn with the counters of the step and distorted by the signal risk, unless `extra` has fractions
        act_tau [rows, act_quantiles].
        """
        p = self._acting(step, state)
        tau = extra["act_tau"] if "act_tau" in extra else self._fractions(p, state.shape[0])
        shape = state.shape[0], self.act_quantiles
        if tau.shape != shape:
            raise ConfigError(f"IqnAgent: act_tau is {tau.shape}, expected {shape}: state is {state.shape}")
        h = perceptron(p, state, len(self.hidden))
        theta = iqn.quantiles(p, iqn.Network(self._sizes, self.act_quantiles), h, tau)
        return self._mean(p, theta, self.act_quantiles)

    def _fractions(self, p: Pass, rows: int) -> Tensor:
        if not hasattr(p.step, "counters"):
            raise ConfigError(
                "IqnAgent: this step has no counters to draw fractions with; give values() act_tau in extra"
            )
        p.step.signals.include("policy")
        tau = p.tensor("act_tau", rows, self.act_quantiles, padded=False)
        policy.fractions(p.program, tau, risk=p.step.signal("risk"), counters=p.step.counters, stream=ACT_TAU_STREAM)
        return tau
