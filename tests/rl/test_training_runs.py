"""Runs of `train` as a whole: the same bits again, resumed ones, evaluations, logs, ends, arguments."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxengine.checkpoint import Checkpoint
from fxengine.driver import Device
from fxengine.driver.errors import FxError
from fxengine.rl import Progress, Trainer, TrainResult, evaluate, train
from fxengine.rl.checkpoints import environments_path
from fxengine.rl.logs import progress_bar
from tests.rl.small import CONFIG, config, learn
from tests.rl.worlds import Chain, Counter, Lock

CARTPOLE = "CartPole-v1"


def arrays(path: Path | None) -> dict[str, np.ndarray]:
    assert path is not None
    return Checkpoint.load(path).state


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array.view(np.uint8), other[name].view(np.uint8), err_msg=name)


# -- reproducible runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["dqn", "iqn"])
def test_the_same_seed_gives_the_same_bits(device: Device, tmp_path: Path, algorithm: str) -> None:
    def run(name: str, seed: int, **options: Any) -> TrainResult:
        return learn(CARTPOLE, device, algorithm=algorithm, seed=seed, envs=2, out=tmp_path / name, **options)

    one, two, other = run("one", 3), run("two", 3), run("other", 4)
    judged = run("judged", 3, evaluation_episodes=2, evaluate_every=70, log_every=13)
    for again in (two, judged):
        assert_same(arrays(one.checkpoint), arrays(again.checkpoint))
        assert (one.returns, one.lengths, one.ends) == (again.returns, again.lengths, again.ends)
    assert other.returns != one.returns
    assert (other.params["w_fc1"] != one.params["w_fc1"]).any()


def stopping(at: int) -> Callable[[Progress], bool]:
    return lambda progress: progress.step >= at


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("dqn", {}), ("iqn", {"prioritized": True, "n_step": 3, "epsilon_end": 0.3}), ("c51", {"train_every": 1})],
)
@pytest.mark.parametrize("at", [20, 110])
def test_a_resumed_run_is_an_uninterrupted_one(
    device: Device, tmp_path: Path, algorithm: str, changes: dict[str, Any], at: int
) -> None:
    """Before the first update and later, in the middle of episodes."""
    options: dict[str, Any] = {"algorithm": algorithm, "config": config(**changes), "envs": 2, "log_every": 10}
    whole = learn(CARTPOLE, device, out=tmp_path / "whole", **options)
    first = learn(CARTPOLE, device, out=tmp_path / "parts", callbacks=[stopping(at)], **options)
    assert (first.interrupted, first.steps, first.exact_resume) == (True, at, True)
    second = train(device=device, resume=first.checkpoint, out=tmp_path / "parts", log_every=10, evaluation_episodes=0)
    assert not second.interrupted
    assert_same(arrays(whole.checkpoint), arrays(second.checkpoint))
    assert (whole.returns, whole.lengths, whole.ends) == (second.returns, second.lengths, second.ends)
    np.testing.assert_array_equal(whole.losses, second.losses)
    assert whole.updates == second.updates
    events = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert [e["exact"] for e in events if e["event"] == "resume"] == [True]
    assert [e["return"] for e in events if e["event"] == "episode"] == list(whole.returns)


@pytest.mark.parametrize("missing", ["removed", "other"])
def test_without_its_environments_a_run_begins_new_episodes(device: Device, tmp_path: Path, missing: str) -> None:
    first = learn(lambda: Counter(7), device, out=tmp_path, total_steps=60, envs=2, config=config(n_step=2))
    assert first.checkpoint is not None
    if missing == "removed":
        environments_path(first.checkpoint).unlink()
    else:
        environments_path(first.checkpoint).write_bytes(b"nothing to unpickle")
    with Trainer(lambda: Counter(7), total_steps=100, device=device, resume=first.checkpoint) as trainer:
        assert not trainer.exact
        before = arrays(first.checkpoint)["replay.field.done"]
        after = trainer.engine.state()["replay.field.done"]
        newest = (60 // 2 - 1) % len(before)
        np.testing.assert_array_equal(before[newest], 0)
        np.testing.assert_array_equal(after[newest], 2, err_msg="the episode ends there, by truncation")
        np.testing.assert_array_equal(np.delete(after, newest, 0), np.delete(before, newest, 0))
        trainer.advance(64)
        np.testing.assert_array_equal(trainer.environments.state, 1.0)
        assert trainer.state.updates > first.updates


def test_what_contradicts_a_checkpoint(device: Device, tmp_path: Path) -> None:
    path = learn(Chain, device, out=tmp_path, total_steps=50, seed=2).checkpoint
    for options, message in (
        ({"seed": 3}, "made with seed = 2, not 3"),
        ({"envs": 2}, "made with envs = 1, not 2"),
        ({"config": config(lr=0.5)}, "made with config"),
        ({"algorithm": "c51"}, "trained with algorithm 'dqn', not 'c51'"),
        ({"env": None}, "give it as env="),
        ({"env": Lock}, "does not fit this environment"),
    ):
        with pytest.raises(ValueError, match=message):
            train(**{"env": Chain, "device": device, "resume": path, "evaluation_episodes": 0, **options})
    longer = train(Chain, device=device, resume=path, total_steps=90, seed=2, evaluation_episodes=0)
    assert longer.steps == 90
    with pytest.raises(ValueError, match="no checkpoint of a run in environments"):
        Checkpoint({}, {}).save(tmp_path / "engine.safetensors")
        train(Chain, device=device, resume=tmp_path / "engine.safetensors")


# -- evaluations, logs, ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["dqn", "iqn"])
def test_evaluate_repeats_the_evaluation_of_the_run(device: Device, tmp_path: Path, algorithm: str) -> None:
    result = learn(CARTPOLE, device, algorithm=algorithm, out=tmp_path, evaluation_episodes=20, seed=5)
    assert result.checkpoint is not None
    returns = evaluate(result.checkpoint, episodes=20, seed=5, device=device)
    assert tuple(returns) == result.evaluations[-1].returns
    assert evaluate(result.checkpoint, episodes=3, seed=5, device=device) == returns[:3]
    with pytest.raises(ValueError, match="episodes must be at least 1"):
        evaluate(result.checkpoint, episodes=0)
    with pytest.raises(ValueError, match="does not fit this environment"):
        evaluate(result.checkpoint, Lock, device=device)


def test_what_is_logged(device: Device, tmp_path: Path) -> None:
    told: list[Progress] = []
    result = learn(
        Chain, device, out=tmp_path, log_every=50, evaluate_every=80, checkpoint_every=100, evaluation_episodes=2,
        callbacks=[told.append],
    )  # fmt: skip
    events = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "start"
    assert (events[0]["lr"], events[0]["total_steps"], events[0]["device"]) == (CONFIG.lr, 200, device.label)

    def steps(kind: str) -> list[int]:
        return [e["step"] for e in events if e["event"] == kind]

    assert steps("progress") == [50, 80, 100, 150, 160, 200]
    assert steps("evaluation") == [80, 160, 200]
    assert steps("checkpoint") == [100, 200]
    assert steps("episode") == list(result.ends)
    assert [p.step for p in told] == [50, 80, 100, 150, 160, 200, 200]
    assert told[0].epsilon == CONFIG.epsilon(50, 200)
    assert [p.evaluation is not None for p in told] == [False, True, False, False, True, False, True]


def test_a_folder_is_not_overwritten_silently(device: Device, tmp_path: Path) -> None:
    learn(Chain, device, out=tmp_path, total_steps=10)
    with pytest.raises(ValueError, match=r"already holds checkpoint\.safetensors, metrics\.jsonl"):
        learn(Chain, device, out=tmp_path)
    assert learn(Chain, device, out=tmp_path, total_steps=20, overwrite=True).steps == 20
    other = learn(Chain, device, out=tmp_path / "other", total_steps=10)
    with pytest.raises(ValueError, match="already holds"):
        train(Chain, device=device, resume=other.checkpoint, out=tmp_path, total_steps=30, evaluation_episodes=0)


def test_ctrl_c_leaves_a_checkpoint(device: Device, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)

    def interrupt(progress: Progress) -> None:
        if progress.step == 100:
            os.kill(os.getpid(), signal.SIGINT)

    result = learn(Chain, device, out=tmp_path, log_every=10, callbacks=[interrupt], evaluation_episodes=1)
    assert result.interrupted
    assert 100 <= result.steps <= 110
    assert result.checkpoint is not None
    assert result.checkpoint.is_file()
    assert result.evaluations == ()
    assert signal.getsignal(signal.SIGINT) is before


def test_tensorboard_is_not_left_out_silently(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(FxError, match=r"pip install 'fxengine\[tensorboard\]'"):
        learn(Chain, device, out=tmp_path, tensorboard=True)
    with pytest.raises(ValueError, match="give out="):
        learn(Chain, device, tensorboard=True)


def test_tensorboard(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None: ...

        def close(self) -> None: ...

    module = type(sys)("tensorboardX")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    result = learn(Chain, device, out=tmp_path, tensorboard=True)
    returns = [(value, step) for name, value, step in written if name == "episode/return"]
    assert returns == list(zip(result.returns, result.ends, strict=True))
    assert any(name == "progress/loss" for name, _, _ in written)


def test_progress_bar() -> None:
    pytest.importorskip("rich")
    out = io.StringIO()
    with progress_bar(out) as show:
        show(Progress(50, 200, 3, 12.5, 0.25, 0.9, 1234.0))
    assert "50/200" in out.getvalue()
    assert "return 12.5" in out.getvalue()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
        ({"total_steps": None}, "total_steps must be at least 1, got None"),
        ({"envs": 7}, "buffer = 240 must be a multiple of envs = 7"),
        ({"config": config(buffer=2, n_step=3)}, "hold at least n_step = 3"),
        ({"evaluation_episodes": -1}, "evaluation_episodes must be at least 0"),
        ({"log_every": -1}, "log_every must be at least 0"),
        ({"algorithm": "ppo"}, "algorithm must be one of"),
        ({"env": None}, "env is missing"),
        ({"env": "Pendulum-v1"}, r"Box\(-2.0, 2.0, \(1,\), float32\)"),
        ({"precision": "fp8"}, "precision must be one of"),
    ],
)
def test_bad_arguments(device: Device, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        learn(options.pop("env", Chain), device, **options)


def test_forex_of_gym_anytrading(device: Device) -> None:
    pytest.importorskip("gym_anytrading")
    result = learn("gym_anytrading:forex-v0", device, total_steps=120)
    assert result.env == "gym_anytrading:forex-v0"
    assert result.params["w_fc1"].shape == (16, 24 * 2)
    assert result.updates == 20
    assert result.skipped == 0
