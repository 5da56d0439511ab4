"""Train an agent in Gymnasium environments: `train`.

from fxengine.rl import TrainConfig, train

result = train("CartPole-v1", "dqn", total_steps=500_000, seed=1, out="runs/cartpole")
print(result.last_return, result.evaluations[-1].mean)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fxengine.driver import Device
from fxengine.interrupt import interruptible
from fxengine.rl.envs import Source, maker
from fxengine.rl.logs import CHECKPOINT, METRICS, JsonLog, TensorBoard, progress_bar
from fxengine.rl.outcome import Evaluation, Progress, TrainResult
from fxengine.rl.settings import Algorithm, TrainConfig
from fxengine.rl.trainer import Trainer

#: Looks at what happens; a result of True ends the run.
Callback: TypeAlias = Callable[[Progress], object]
#: Log entries over a run where no interval is asked for.
_ENTRIES = 200


@dataclass(frozen=True)
class Schedule:
    """What happens beside training, in environment steps between two times; 0: not before the end.

    Attributes:
        log: a log entry and the callbacks.
        evaluate: an evaluation, besides the one at the end.
        checkpoint: a checkpoint, besides the one at the end.
    """

    log: int
    evaluate: int
    checkpoint: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 0:
                raise ValueError(f"{name}_every must be at least 0, got {value}")

    def next(self, step: int, last: int) -> int:
        """The next step after this one at which something is due."""
        return min([last, *((step // every + 1) * every for every in vars(self).values() if every)])

    @staticmethod
    def due(every: int, before: int, now: int) -> bool:
        """Whether an interval ended between two steps."""
        return bool(every) and now // every > before // every


def train(
    env: Source | None = None,
    algorithm: Algorithm | None = None,
    *,
    total_steps: int | None = None,
    envs: int | None = None,
    seed: int | None = None,
    device: str | Device = "auto",
    precision: str | None = None,
    config: TrainConfig | None = None,
    evaluation_episodes: int = 10,
    evaluation_env: Source | None = None,
    evaluate_every: int = 0,
    checkpoint_every: int = 0,
    log_every: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    resume: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    tensorboard: bool = False,
) -> TrainResult:
    """Train an agent in Gymnasium environments.

    The run is a function of its arguments: the same seed on the same device gives the same parameters and returns, bit
    for bit. The first Ctrl-C ends it after its present step, with everything that is due at the end; the second one
    interrupts it.

    A resumed run goes on in the middle of its episodes and ends with the same bits as one that was never interrupted,
    if its environments could be pickled (classic control can). Else its episodes start anew, which the log says.
    Pickled environments run code when they are read: resume only from files that you trust.

    Args:
        env: an id (`module:id` imports the module first, such as `gym_anytrading:forex-v0`), a function that makes an
            environment, an environment, or a vector environment that resets by SAME_STEP or DISABLED. Observations are
            float32 or uint8 boxes, actions Discrete or MultiDiscrete. May be left out of a resumed run that had an id.
        algorithm: `dqn` (the default), `c51`, `iqn`, `full` (the specified step without what needs market data), or a
            function (size of a state, actions per branch) -> agent.
        total_steps: environment steps of the whole run, of all environments together; rounded up to whole steps of all.
        envs: environments that step together (default: 1).
        seed: of everything random (default: 0).
        device: `auto`, `cuda:N`, `sim`, or an open Device.
        precision: of linear products, `fp32` (the default), `tf32` or `bf16`.
        config: hyperparameters (default: `TrainConfig()`).
        evaluation_episodes: greedy episodes of an evaluation; 0: no evaluations.
        evaluation_env: id or function that makes the environments of evaluations; by default `env`.
        evaluate_every: environment steps between evaluations, besides the one at the end; 0: none.
        checkpoint_every: environment steps between checkpoints, besides the one at the end; 0: none.
        log_every: environment steps between log entries; 0: 200 over the run.
        out: folder for `metrics.jsonl` and `checkpoint.safetensors`; None: neither is written. A resumed run goes on
            with the files of its own folder.
        overwrite: replace what `out` holds.
        resume: checkpoint to go on from.
        callbacks: called with the progress at every log entry and evaluation; one that returns True ends the run.
        progress: show a progress bar on stderr if that is a terminal.
        tensorboard: also write event files for TensorBoard into `out`.

    Raises:
        ValueError: an argument is out of range or contradicts the checkpoint, a space cannot be handled, or `out` holds
            a run already.
        FxError: Gymnasium, tensorboardX, rich or the device is missing.
    """
    if evaluation_episodes < 0:
        raise ValueError(f"evaluation_episodes must be at least 0, got {evaluation_episodes}")
    if tensorboard and out is None:
        raise ValueError("tensorboard=True needs a folder: give out=")
    folder = Path(out) if out is not None else None
    goes_on = folder is not None and resume is not None and folder.resolve() == Path(resume).resolve().parent
    if folder is not None and not overwrite and not goes_on:
        _check_free(folder)
    with Trainer(
        env,
        algorithm,
        total_steps=total_steps,
        envs=envs,
        seed=seed,
        device=device,
        precision=precision,
        config=config,
        resume=resume,
    ) as trainer:
        judged = evaluation_env if evaluation_env is not None else trainer.source
        if evaluation_episodes:
            maker(judged)  # now, and not after hours
        steps = trainer.state.settings.total_steps
        schedule = Schedule(log_every or max(1, steps // _ENTRIES), evaluate_every, checkpoint_every)
        with contextlib.ExitStack() as stack:
            run = _Run(trainer, schedule, folder, [*callbacks])
            stack.enter_context(interruptible(trainer.stop))
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                run.logs.append(JsonLog(folder / METRICS, append=goes_on))
                stack.callback(run.logs[-1].close)
                if tensorboard:
                    run.logs.append(TensorBoard(folder))
                    stack.callback(run.logs[-1].close)
            if progress and sys.stderr.isatty():
                run.callbacks.append(stack.enter_context(progress_bar(sys.stderr)))
            return run.run(evaluation_episodes, judged)


class _Run:
    """A run with what happens beside training."""

    def __init__(self, trainer: Trainer, schedule: Schedule, folder: Path | None, callbacks: list[Callback]) -> None:
        self._trainer, self._schedule = trainer, schedule
        self._path = folder / CHECKPOINT if folder is not None else None
        self.callbacks = callbacks
        self.logs: list[JsonLog | TensorBoard] = []
        self._told, self._told_at = len(trainer.state.history.returns), -1

    def run(self, episodes: int, judged: Source) -> TrainResult:
        """Train to the end, or until something stops it: then there is a checkpoint, but no evaluation."""
        trainer, schedule, state = self._trainer, self._schedule, self._trainer.state
        last = state.settings.total_steps
        self._start()
        while state.steps < last and not trainer.interrupted:
            before = state.steps
            trainer.advance(schedule.next(before, last))
            now = state.steps
            if schedule.due(schedule.log, before, now):
                self._tell()
            if now < last and not trainer.interrupted:
                if episodes and schedule.due(schedule.evaluate, before, now):
                    self._tell(trainer.evaluate(episodes, judged))
                if schedule.due(schedule.checkpoint, before, now):
                    self._save()
        if episodes and not trainer.interrupted:
            self._tell(trainer.evaluate(episodes, judged))
        elif self._told_at != state.steps:
            self._tell()
        self._save()
        return trainer.result(self._path)

    def _start(self) -> None:
        settings = self._trainer.state.settings
        if self._trainer.state.steps:
            self._log("resume", exact=self._trainer.exact)
        values = {name: value for name, value in vars(settings).items() if name != "config"}
        self._log("start", **values, **vars(settings.config), device=self._trainer.engine.device.label)

    def _tell(self, evaluation: Evaluation | None = None) -> None:
        """Log the episodes since the last time and where the run stands, and call the callbacks."""
        trainer, history = self._trainer, self._trainer.state.history
        for i in range(self._told, len(history.returns)):
            for log in self.logs:
                log.write("episode", history.ends[i], **{"return": history.returns[i], "length": history.lengths[i]})
        self._told = len(history.returns)
        progress = trainer.progress(evaluation)
        if self._told_at != progress.step:
            numbers = {k: v for k, v in vars(progress).items() if k not in ("step", "total_steps", "evaluation")}
            self._log("progress", **numbers, updates=trainer.state.updates)
        self._told_at = progress.step
        if evaluation is not None:
            self._log("evaluation", mean=evaluation.mean, std=evaluation.std, returns=list(evaluation.returns))
        for log in self.logs:
            log.flush()
        for callback in self.callbacks:
            if callback(progress) is True:
                trainer.stop()

    def _save(self) -> None:
        if self._path is not None:
            self._trainer.save(self._path)
            self._log("checkpoint", file=self._path.name, exact=bool(self._trainer.state.environments))

    def _log(self, event: str, **values: object) -> None:
        for log in self.logs:
            log.write(event, self._trainer.state.steps, **values)


def _check_free(folder: Path) -> None:
    held = [name for name in (CHECKPOINT, METRICS) if (folder / name).exists()]
    if held:
        raise ValueError(f"{folder} already holds {', '.join(held)}; choose another folder, overwrite=True or resume=")
