"""Training runs in pairs: an engine that draws its batches on the device, and the float64 reference on the same ones.

Both begin with the same parameters. From then on all that passes between them are the batches, read off the device
after each step; parameters, moments, targets and step counts of the reference are its own. What a step drew is also
compared with what the host inserted, at the rows and with the fractions that the twins of its random numbers say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fxengine import Engine
from fxengine.driver import Device
from fxengine.nets.sampling import BATCH_STREAM
from fxengine.nets.step import TAU_STREAM, TAU_TARGET_STREAM
from fxengine.ops.random import reference_uniform
from fxengine.ops.replay import reference_starts, reference_transitions
from fxengine.rl.agents import FullAgent
from fxengine.rl.envs import open_environments
from fxengine.rl.replay import Field, Memory, Replay
from fxengine.rl.settings import TrainConfig
from tests.nets.whole import snapshot
from tests.reference import step as whole
from tests.reference.config import FAMILIES, Config, bound_slot, group_shapes
from tests.reference.golden import error, under
from tests.rl import steps
from tests.rl.steps import PerceptronAgent, State, Tree

ENVIRONMENT = "CartPole-v1"
#: Environments and steps of each that are played once, before the first batch: 4,000 transitions.
ENVS, SLOTS = 8, 500
#: Random inputs that a step may draw, and their Philox streams.
FRACTIONS = {"tau": TAU_STREAM, "tau_target": TAU_TARGET_STREAM}
#: Batches of a moving average of the loss, and the last ones that are looked at apart.
WINDOW, LAST = 50, 100
#: Batches after which parameters are compared, besides the last one.
MARKS = (10, 100)
#: A loss below it counts as this much where a difference is taken relative to it.
_FLOOR = 1e-6


# -- the limits --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """How far a pair may come apart.

    Attributes:
        curve: largest relative difference of the moving averages of a loss.
        growth: by how much the drift of the parameters (see `Gap`) may grow in a batch.
        most: largest drift after however many batches.
    """

    curve: float
    growth: float
    most: float

    def drift(self, batches: int) -> float:
        """Largest drift after so many batches."""
        return min(self.growth * batches, self.most)


# Two right runs come apart by rounding, and in kicks rather than by degrees. A ReLU that a single row reaches within
# rounding of 0 is open in one run and shut in the other; Adam divides by the root of the second moment, so the gradient
# of that row moves its weights as far as any other would, up to 30 learning rates in all, however small it is (above
# adam_eps). The same goes for a best action that is better by less than rounding. Hence the largest difference of a
# parameter tells of one kick or none and has no limit; the drift tells how much of the way is another one. With the
# settings that CleanRL publishes it was, on the simulated device after 10, 100 and 1,000 batches,
#
#     dqn, c51, iqn   at most 3e-5, 4e-4 and 2e-2, the loss curves apart by at most 4e-4 (six, four and two seeds, and
#                     three more of iqn for 100 batches)
#     full            at most 9e-5, 5e-3 and 4e-2, the loss curves apart by at most 3e-2 (two seeds, and one more for
#                     100 batches): its best actions are those of one network and their values another's, its adam_eps
#                     is smaller than that of C51, and its smallest losses are 1 % of what they began with
#
# A learning rate that is wrong by 5 % is a drift of 3e-2 to 6e-2 from the first batch on, several times what 10 and 100
# batches are allowed. A wrong discount shows in the curves of DQN and IQN, and at once in the drift of C51 and `full`.
#
# Rounded to tf32 or bf16, gradients near 0 have another sign in the first step already, which Adam makes a whole step
# of: the drift is up to 0.1 from the beginning on, and was 0.25 after 1,000 batches. These limits notice gross faults
# alone; what a step does with such products is tested step by step.
_LIMITS = {
    "fp32": Limits(curve=2e-3, growth=1e-4, most=5e-2),
    "tf32": Limits(curve=5e-2, growth=0.2, most=0.3),
    "bf16": Limits(curve=1e-1, growth=0.2, most=0.6),
}
_FULL_LIMITS = {
    "fp32": Limits(curve=1e-1, growth=2e-4, most=1e-1),
    "tf32": Limits(curve=2e-1, growth=0.2, most=0.3),
    "bf16": Limits(curve=2e-1, growth=0.2, most=0.6),
}


def limits_of(algorithm: str, precision: str = "fp32") -> Limits:
    """Those of an algorithm."""
    return (_FULL_LIMITS if algorithm == "full" else _LIMITS)[precision]


# -- what came of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """How far the parameters are apart after so many batches.

    Attributes:
        batches: how many.
        largest: largest difference of a parameter.
        relative: largest difference relative to the largest parameter of its tensor.
        drift: distance between both sets of parameters over the distance that the reference has come, both L2.
    """

    batches: int
    largest: float
    relative: float
    drift: float

    @classmethod
    def between(cls, batches: int, found: Tree, reference: Tree, first: Tree) -> Gap:
        """That of the engine's parameters `found` and the reference's; `first`: where both began."""
        apart = {name: found[name] - x for name, x in reference.items()}
        come = {name: x - first[name] for name, x in reference.items()}
        largest = float(np.max([np.abs(x).max() for x in apart.values()]))
        relative = max(error(found[name], x) for name, x in reference.items())
        return cls(batches, largest, relative, _length(apart) / _length(come))


def _length(tree: Tree) -> float:
    return float(np.sqrt(sum((x**2).sum() for x in tree.values())))


@dataclass(frozen=True)
class Curves:
    """One loss of every batch, by the engine and by the reference."""

    engine: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)

    def averages(self, window: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Both as moving averages."""
        ones = np.ones(window) / window
        return np.convolve(self.engine, ones, "valid"), np.convolve(self.reference, ones, "valid")

    @property
    def apart(self) -> float:
        """Largest relative difference of the moving averages."""
        found, expected = self.averages(min(WINDOW, len(self.engine)))
        return float(np.max(np.abs(found - expected) / np.maximum(np.abs(expected), _FLOOR)))

    @property
    def last(self) -> float:
        """Relative difference of the means over the last batches."""
        found, expected = np.mean(self.engine[-LAST:]), np.mean(self.reference[-LAST:])
        return float(abs(found - expected) / max(abs(expected), _FLOOR))


@dataclass
class Outcome:
    """What came of a pair of runs.

    Attributes:
        curves: losses by name.
        gaps: parameters, after `MARKS` and at the end.
        foreign: rows of all batches that are not what was inserted at the places drawn.
        copies: moves of the target network.
    """

    curves: dict[str, Curves] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    foreign: int = 0
    copies: int = 0

    def faults(self, limits: Limits) -> list[str]:
        """What is beyond the limits, in words; none where the pair agrees."""
        found = [f"{self.foreign} rows are none of the replay's"] if self.foreign else []
        # Written so that NaN is a fault.
        for name, curves in self.curves.items():
            if not curves.apart <= limits.curve:
                found.append(f"{name}: averages differ by {curves.apart:.1e}, limit {limits.curve:.0e}")
        for gap in self.gaps:
            limit = limits.drift(gap.batches)
            if not gap.drift <= limit:
                found.append(f"parameters after {gap.batches} batches: drift {gap.drift:.1e}, limit {limit:.0e}")
        return found


# -- the batches -------------------------------------------------------------------------------------------------------


def random_play(seed: int) -> Tree:
    """What `Memory.add` takes, of every step of random actions: arrays [SLOTS, ENVS, ...]."""
    environments = open_environments(ENVIRONMENT, ENVS)
    environments.reset(range(ENVS * seed, ENVS * (seed + 1)))
    actions = np.random.default_rng(seed).integers(0, 2, (SLOTS, ENVS, 1), dtype=np.int32)
    played: dict[str, list[NDArray[Any]]] = {}
    for taken in actions:
        environments.step(taken)
        for name in ("state", "next_state", "reward", "terminated", "truncated"):
            played.setdefault(name, []).append(getattr(environments, name).copy())
    environments.close()
    return {"actions": actions, **{name: np.stack(arrays) for name, arrays in played.items()}}


def read_batch(engine: Engine) -> Tree:
    """The batch of the last step, off the device."""
    batch = {name: engine.output(name) for name in engine.builder.inputs}
    rows = len(batch["state"])
    for name in set(FRACTIONS) & set(engine.builder.program.storages):
        batch[name] = engine.plan.buffer(name).read().view(np.float32).reshape(rows, -1)
    return batch


def foreign_rows(batch: Tree, play: Tree, engine: Engine, replay: int) -> int:
    """Rows of the batch of a replay that are not what was inserted at the places drawn, bit for bit."""
    rows = len(batch["state"])
    start = reference_starts(SLOTS, SLOTS, ENVS, 1, seed=engine.seed, replay=replay, stream=BATCH_STREAM, batch=rows)
    done = play["terminated"] + 2 * play["truncated"]
    gamma = engine.signals["gamma"]
    reward, discount, end = reference_transitions(play["reward"], done, start, gamma=gamma, n_step=1)
    held = {name: array.reshape(SLOTS * ENVS, -1) for name, array in play.items()}
    expected = {
        "state": held["state"][start],
        "actions": held["actions"][start],
        "next_state": held["next_state"][end],
        "reward": reward,
        "discount": discount,
        "weight": np.ones(rows),
    }
    for name, stream in FRACTIONS.items():
        if name in batch:
            expected[name] = reference_uniform(engine.seed, replay, stream, batch[name].size)
    differs = [(batch[n].reshape(rows, -1) != expected[n].reshape(rows, -1)).any(axis=1) for n in batch]
    return int(np.logical_or.reduce(differs).sum())


# -- the references ----------------------------------------------------------------------------------------------------


class Reference(Protocol):
    """A float64 training run."""

    @property
    def params(self) -> Tree:
        """Parameters by name, as they are now."""
        ...

    def step(self, batch: Tree, polyak_tau: float) -> Mapping[str, Any]:
        """Train on a batch; returns what it reports, losses among it by their names."""
        ...


class PerceptronReference:
    """DQN, C51 and IQN, by `tests.rl.steps`.

    Args:
        agent: the agent.
        engine: before its first step; the first parameters are read from it.
        signals: by name.
    """

    def __init__(self, agent: PerceptronAgent, engine: Engine, signals: Mapping[str, float]) -> None:
        params = {name: x.astype(np.float64) for name, x in engine.params.items()}
        zeros = {name: np.zeros(x.shape) for name, x in params.items()}
        self._agent = agent
        self._state = State(params, dict(params), zeros, dict(zeros))
        self._signals = {**signals, "lr": signals["lr.network"], "clip": signals["clip.network"]}

    @property
    def params(self) -> Tree:
        return self._state.params

    def step(self, batch: Tree, polyak_tau: float) -> Mapping[str, Any]:
        return steps.train(self._agent, self._state, batch, {**self._signals, "polyak_tau": polyak_tau}).losses


class WholeReference:
    """The specified step, by `tests.reference`; arguments as above."""

    def __init__(self, agent: FullAgent, engine: Engine, signals: Mapping[str, float]) -> None:
        self._config = config = Config(**asdict(agent.config))
        found = {name: x.astype(np.float64) for name, x in snapshot(engine).items()}
        self._state: whole.State = {
            "params": under(found, "param."),
            **{part: under(found, f"{part}.") for part in ("m", "v", "target")},
            "sn_v": under(found, "sn_v_"),
            "state": whole.empty_state(config),
            "signals": dict(signals),
            "bounds": {bound_slot(group, family): 0.0 for group in group_shapes(config) for family in FAMILIES},
            "step": 0,
        }

    @property
    def params(self) -> Tree:
        params: Tree = self._state["params"]
        return params

    def step(self, batch: Tree, polyak_tau: float) -> Mapping[str, Any]:
        self._state["signals"]["polyak_tau"] = polyak_tau
        self._state, outputs = whole.step(self._config, self._state, batch)
        return outputs


# -- the pair ----------------------------------------------------------------------------------------------------------


def run_pair(
    device: Device,
    algorithm: str,
    config: TrainConfig,
    *,
    batches: int,
    seed: int = 0,
    precision: str = "fp32",
    lr: float = 1.0,
    discount: float = 1.0,
) -> Outcome:
    """Train an engine and the reference on the same batches from a replay of random play.

    The target network moves as often as with `train`: every `target_every` environment steps, one batch to every
    `train_every` of them.

    Args:
        device: an open device.
        algorithm: its name.
        config: hyperparameters.
        batches: how many.
        seed: of parameters, play and draws.
        precision: of the engine.
        lr: factor by which the reference's learning rate is wrong: the outcome must have faults then.
        discount: the same of its discounts.
    """
    play = random_play(seed)
    every = max(1, config.target_every // config.train_every)
    agent: Any = config.agent(algorithm, play["state"].shape[-1], (2,))
    outcome = Outcome()
    with (
        Engine(
            agent.train,
            device=device,
            seed=seed,
            precision=precision,
            groups=agent.groups,
            replay=Replay(SLOTS, ENVS, {"state": Field(agent.state), "actions": Field(1, "int32")}),
            signals=config.signals(algorithm),
        ) as engine,
        Memory(engine) as memory,
    ):
        for t in range(SLOTS):
            memory.add(**{name: array[t] for name, array in play.items()})
        signals = {n: x * lr if n.startswith("lr.") else x for n, x in engine.signals.as_dict().items()}
        make = WholeReference if isinstance(agent, FullAgent) else PerceptronReference
        reference: Reference = make(agent, engine, signals)
        first = reference.params.copy()
        for done in range(1, batches + 1):
            tau = config.tau if done % every == 0 else 0.0
            outcome.copies += tau > 0.0
            engine.signals["polyak_tau"] = tau
            engine.step()
            batch = read_batch(engine)
            report = engine.telemetry()
            assert report is not None and report.replay == done
            outcome.foreign += foreign_rows(batch, play, engine, done - 1)
            exact = {name: x if x.dtype == np.int32 else x.astype(np.float64) for name, x in batch.items()}
            exact["discount"] *= discount
            for name, value in reference.step(exact, tau).items():
                if name.startswith("L_"):
                    curves = outcome.curves.setdefault(name, Curves())
                    curves.engine.append(report[name])
                    curves.reference.append(float(value))
            if done in (*MARKS, batches):
                outcome.gaps.append(Gap.between(done, dict(engine.params.items()), reference.params, first))
    return outcome
