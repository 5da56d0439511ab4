"""The loop between environments and an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fxengine.acting import Acting
from fxengine.checkpoint import Checkpoint
from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.rl.checkpoints import (
    RunSettings,
    RunState,
    acting_state,
    cut_episodes,
    read_environments,
    write_environments,
)
from fxengine.rl.envs import RESTART, TRAINING, Source, maker, open_environments, seed_of
from fxengine.rl.exploration import Exploration
from fxengine.rl.outcome import RECENT, Evaluation, Progress, TrainResult, mean
from fxengine.rl.playing import play
from fxengine.rl.replay import Field, Memory, Replay
from fxengine.rl.settings import Algorithm, TrainConfig
from fxengine.telemetry import Report

_NO_INPUTS: Mapping[str, NDArray[np.float32]] = {}


class Trainer:
    """Environments, an engine with a replay, and the loop between them; `train` is what most programs call.

    Per environment step of all environments there is one launch that inserts it, and, unless all of them explore, one
    that acts; per update there is one of the training step. The host waits for the device only to act.

    Args:
        env: id (`module:id` imports the module first), function that makes an environment, environment, or vector
            environment that resets by SAME_STEP or DISABLED.
        algorithm: `dqn`, `c51`, `iqn`, `full`, or a function (size of a state, actions per branch) -> agent.
        total_steps: environment steps of the whole run, of all environments together.
        envs: environments; of an environment given there is one, of a vector environment its own number.
        seed: of the parameters, environments, exploration, batches.
        device: `auto`, `cuda:N`, `sim`, or an open Device.
        precision: `fp32`, `tf32` or `bf16`.
        config: hyperparameters.
        resume: checkpoint to go on from. Then everything but `env`, `total_steps` and `device` is what it says, and may
            be left out; `env` too, if it was an id.

    Attributes:
        engine: the engine.
        environments: the environments.
        source: what they were made from.
        acting: the greedy actions of training.
        agent: the agent.
        state: where the run stands.
        exact: whether the run began, or was resumed, in the middle of its episodes: nothing was lost.
        interrupted: whether `stop` was called.

    Raises:
        ValueError: an argument is out of range, contradicts the checkpoint, or a space cannot be handled.
        FxError: Gymnasium or the device is missing.
    """

    def __init__(
        self,
        env: Source | None = None,
        algorithm: Algorithm | None = None,
        *,
        total_steps: int | None = None,
        envs: int | None = None,
        seed: int | None = None,
        device: str | Device = "auto",
        precision: str | None = None,
        config: TrainConfig | None = None,
        resume: str | Path | None = None,
    ) -> None:
        held = Checkpoint.load(resume) if resume is not None else None
        given = {"total_steps": total_steps, "envs": envs, "seed": seed, "precision": precision, "config": config}
        if held is not None:
            assert resume is not None
            self.state = RunState.of(held, resume)
            self.state.adopt(given)
            self.source = self.state.source(env)
            algorithm = self.state.settings.chosen(algorithm)
        else:
            if env is None:
                raise ValueError("env is missing: an id, a function that makes an environment, or an environment")
            self.source, algorithm = env, "dqn" if algorithm is None else algorithm
            self.state = RunState(RunSettings.of(env, algorithm, given))
        self.interrupted = False
        self.exact = True
        self._seconds, self._from, self._updates_from = 0.0, self.state.steps, self.state.updates
        self._loss_read = self.state.updates
        # Number of the update that copied the network, until it is known not to have been skipped; 0 if none.
        self._copied = 0
        settings = self.state.settings
        self.environments = open_environments(self.source, settings.envs)
        try:
            self._check(settings)
            self._build(algorithm, device)
            self._begin(held, Path(resume) if resume is not None else None)
        except BaseException:
            self.close()
            raise

    # -- running ------------------------------------------------------------------------------------------------------

    def advance(self, until: int) -> None:
        """Take environment steps and train on them until so many are taken, or `stop` is called."""
        state, environments, count = self.state, self.environments, self.environments.count
        choose, greedy, step = self._exploration.actions, self._greedy, environments.step
        start = time.perf_counter()
        while state.steps < until and not self.interrupted:
            actions = choose(state.steps // count, greedy)
            self._insert()
            step(actions)
            self._owed = True
            state.steps += count
            if environments.finished:
                self._note_episodes()
            if state.steps >= self._next_round:
                self._insert()
                while state.steps >= self._next_round:
                    self._train()
        self._insert()
        self.engine.synchronize()
        self._seconds += time.perf_counter() - start

    def stop(self) -> None:
        """Ask `advance` to return after its present step. May be called from another thread or a signal handler."""
        self.interrupted = True

    def progress(self, evaluation: Evaluation | None = None) -> Progress:
        """Where the run stands; the loss is noted in the history."""
        state, settings = self.state, self.state.settings
        reports = self.engine.telemetry_since(self._loss_read)
        self._loss_read = state.updates
        loss = mean([report[self._loss] for report in reports])
        if reports:
            state.history.losses.append((state.steps, loss))
        return Progress(
            step=state.steps,
            total_steps=settings.total_steps,
            episodes=len(state.history.returns),
            recent_return=mean(state.history.returns[-RECENT:]),
            loss=loss,
            epsilon=settings.config.epsilon(state.steps, settings.total_steps),
            steps_per_s=self._speed(state.steps - self._from),
            evaluation=evaluation,
        )

    def evaluate(self, episodes: int, make: Source | None = None) -> Evaluation:
        """Play greedy episodes in other environments, always from the same beginnings; training is not touched.

        Args:
            episodes: how many, at least 1.
            make: id or function for these environments; by default those of training.

        Raises:
            ValueError: there is no function to make environments with.
        """
        maker_ = maker(self.source if make is None else make)
        self._judge.count = 0  # the same random numbers in every evaluation
        returns = play(
            lambda obs: self._judge.act(obs, greedy=True),
            maker_,
            self.environments.spaces,
            episodes=episodes,
            seed=self.state.settings.seed,
        )
        evaluation = Evaluation(self.state.steps, tuple(returns))
        self.state.history.evaluations.append(evaluation)
        return evaluation

    def result(self, checkpoint: Path | None = None) -> TrainResult:
        """The outcome so far."""
        state, settings, device = self.state, self.state.settings, self.engine.device
        self.engine.synchronize()
        report = self.engine.telemetry()
        return TrainResult(
            env=settings.env,
            algorithm=settings.algorithm,
            steps=state.steps,
            updates=state.updates,
            skipped=report.skipped if report is not None else 0,
            returns=tuple(state.history.returns),
            lengths=tuple(state.history.lengths),
            ends=tuple(state.history.ends),
            evaluations=tuple(state.history.evaluations),
            losses=tuple(state.history.losses),
            seconds=self._seconds,
            steps_per_s=self._speed(state.steps - self._from),
            updates_per_s=self._speed(state.updates - self._updates_from),
            interrupted=self.interrupted,
            checkpoint=checkpoint,
            exact_resume=checkpoint is not None and bool(state.environments),
            params={name: self.engine.params[name] for name in self.engine.params},
            census=self.engine.graph.census(),
            device=device.label,
            device_name=device.name,
        )

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, and beside it the environments if they can be pickled."""
        self._insert()
        if self._copied:
            self.state.repeat_copy = self._skipped(self._copied)
            self._copied = 0
        self.state.environments = write_environments(Path(path), self.environments.snapshot())
        self.engine.save(path, extra=self.state.arrays(self.acting.state()["acting"]))

    def close(self) -> None:
        """Close engine and environments. Idempotent."""
        self.environments.close()
        engine = self.__dict__.get("engine")
        if engine is not None:
            engine.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- construction -------------------------------------------------------------------------------------------------

    def _check(self, settings: RunSettings) -> None:
        config, count = settings.config, self.environments.count
        if config.buffer % count or config.buffer // count < config.n_step:
            raise ValueError(
                f"buffer = {config.buffer} must be a multiple of envs = {count} and hold at least "
                f"n_step = {config.n_step} steps of each"
            )

    def _build(self, algorithm: Algorithm, device: str | Device) -> None:
        settings, spaces, count = self.state.settings, self.environments.spaces, self.environments.count
        config = settings.config
        self.agent = agent = config.agent(algorithm, spaces.size, spaces.branches)
        replay = Replay(
            slots=config.buffer // count,
            envs=count,
            fields={
                "state": Field(spaces.size, spaces.dtype.name, spaces.scale),
                "actions": Field(len(spaces.branches), "int32"),
            },
            n_step=config.n_step,
            prioritized=config.prioritized,
        )
        self.engine = Engine(
            agent.train,
            device=device,
            seed=settings.seed,
            precision=settings.precision,
            groups=agent.groups,
            replay=replay,
            signals=config.signals(algorithm),
        )
        environments = self.environments
        self._owed = False  # whether the newest step is still to be inserted
        self._memory = Memory(self.engine)
        self._insert_newest = self._memory.bind(
            state=environments.state,
            next_state=environments.next_state,
            actions=environments.actions,
            reward=environments.reward,
            terminated=environments.terminated,
            truncated=environments.truncated,
        )
        self.acting, self._judge = (
            Acting(self.engine, agent.values, branches=agent.branches, policy="greedy") for _ in range(2)
        )
        self.acting.prepare(count)
        self._exploration: Exploration = Exploration(
            settings.seed, count, spaces.branches, lambda step: config.epsilon(step, settings.total_steps)
        )
        self._loss = next((name for name in self.engine.builder.reported if name.startswith("L_")), "")

    def _begin(self, held: Checkpoint | None, path: Path | None) -> None:
        """Start the episodes, and what counts on from the checkpoint."""
        state, config, count = self.state, self.state.settings.config, self.environments.count
        start = max(config.learning_starts, config.n_step * count - config.train_every)
        self._next_round = start + config.train_every * (state.updates // config.updates + 1)
        if held is None:
            state.next_copy = _after(start, config.target_every)
            self.environments.reset(self._seeds(TRAINING))
        else:
            assert path is not None
            self._resume(held, path)
        self._tau = self.engine.signals["polyak_tau"]

    def _resume(self, held: Checkpoint, path: Path) -> None:
        state = self.state
        state.check_parameters({n: self.engine.params[n].shape for n in self.engine.params}, held)
        snapshot = read_environments(path, state.environments)
        arrays = dict(held.state)
        if snapshot is None:
            self.exact = False
            cut_episodes(arrays)
            self.environments.reset(self._seeds(RESTART, state.steps))
        else:
            self.environments.restore(snapshot)
        self.engine.load_state(arrays)
        self.acting.load_state(acting_state(held))

    def _seeds(self, *stream: int) -> list[int]:
        return [seed_of(self.state.settings.seed, *stream, i) for i in range(self.environments.count)]

    # -- the loop's parts ---------------------------------------------------------------------------------------------

    def _greedy(self) -> NDArray[np.int32]:
        """The greedy actions. The step before is inserted while the device acts, if that has not been done."""
        observations = self.environments.spaces.readable(self.environments.current)
        finish = self.acting.begin(observations, "greedy", False, _NO_INPUTS)
        self._insert()
        actions = finish()
        assert not isinstance(actions, tuple)  # no values were asked for
        return actions

    def _insert(self) -> None:
        """Insert the newest step into the replay, if that has not been done."""
        if self._owed:
            self._owed = False
            self._insert_newest()

    def _train(self) -> None:
        """One round of updates."""
        state, config = self.state, self.state.settings.config
        for _ in range(config.updates):
            tau = config.tau if self._copy_due() else 0.0
            if tau != self._tau:
                self.engine.signals["polyak_tau"] = self._tau = tau
            self.engine.step()
            state.updates += 1
            if tau == 1.0:
                self._copied = state.updates
        self._next_round += config.train_every

    def _copy_due(self) -> bool:
        """Whether the next update moves the target network: it is time, or the last copy was skipped."""
        state = self.state
        repeat = self._skipped(self._copied) if self._copied else state.repeat_copy
        self._copied, state.repeat_copy = 0, False
        if state.steps < state.next_copy:
            return repeat
        state.next_copy = _after(state.steps, state.settings.config.target_every)
        return True

    def _skipped(self, update: int) -> bool:
        """Whether an update left everything as it was, because a gradient was not finite."""
        return bool(self._report(update).nonfinite_groups)

    def _report(self, update: int) -> Report:
        """The report of one of the newest updates; waits for it if it is not there yet."""
        reports = self.engine.telemetry_since(update - 1)
        if not reports:
            self.engine.synchronize()
            reports = self.engine.telemetry_since(update - 1)
        return reports[0]

    def _note_episodes(self) -> None:
        history = self.state.history
        for episode in self.environments.finished:
            history.returns.append(episode.total)
            history.lengths.append(episode.length)
            history.ends.append(self.state.steps)
        self.environments.finished.clear()

    def _speed(self, count: int) -> float:
        return count / self._seconds if self._seconds else 0.0


def _after(step: int, interval: int) -> int:
    """The first multiple of an interval after a step."""
    return (step // interval + 1) * interval
