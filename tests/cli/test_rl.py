"""`fxengine rl`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from fxengine.checkpoint import Checkpoint
from fxengine.driver import Device
from tests.cli.conftest import Run, one_line_error

SMALL = ("--hidden", "8,8", "--batch", 8, "--learning-starts", 40, "--train-every", 4, "--evaluation-episodes", 2)
KEYS = {
    "env", "algorithm", "steps", "updates", "episodes", "return_first", "return_last", "evaluations", "loss_last",
    "steps_per_s", "updates_per_s", "device", "census", "exact_resume",
}  # fmt: skip


def test_json_and_files(cli: Callable[..., Run], device: Device, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = cli("rl", "CartPole-v1", "--device", device.label, "--steps", 300, *SMALL, "--out", folder, "--json")
    assert run.status == 0, run.err
    values = run.json
    assert set(values) >= KEYS
    assert (values["env"], values["algorithm"], values["device"]) == ("CartPole-v1", "dqn", device.label)
    assert (values["steps"], values["updates"]) == (300, 65)
    assert values["evaluations"][-1]["episodes"] == 2
    assert values["exact_resume"]
    assert "mean of the first 20" in run.err, "text for people goes to stderr"
    assert "step     300: return" in run.err

    assert json.loads((folder / "report.json").read_text()) == values
    assert (folder / "returns.png").read_bytes().startswith(b"\x89PNG")
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert events[0]["hidden"] == [8, 8]
    assert len([e for e in events if e["event"] == "episode"]) == values["episodes"]


def test_settings(cli: Callable[..., Run], tmp_path: Path) -> None:
    """Quick ones where the device is simulated, the published ones on demand, options on top of either."""
    for choice, gamma in (("auto", 0.98), ("published", 0.99)):
        arguments = (
            "--device",
            "sim",
            "--steps",
            8,
            "--settings",
            choice,
            "--buffer",
            64,
            "--double",
            "--loss",
            "huber",
        )
        run = cli("rl", "CartPole-v1", *arguments, "--evaluation-episodes", 0, "--out", tmp_path / choice)
        assert run.status == 0, run.err
        start = json.loads((tmp_path / choice / "metrics.jsonl").read_text().splitlines()[0])
        assert start["gamma"] == gamma
        assert (start["buffer"], start["double"], start["loss"], start["prioritized"]) == (64, True, "huber", False)


def test_resume(cli: Callable[..., Run], device: Device, tmp_path: Path) -> None:
    place = ("--device", device.label)
    assert cli("rl", "CartPole-v1", *place, "--steps", 100, *SMALL, "--out", tmp_path).status == 0
    file = tmp_path / "checkpoint.safetensors"
    run = cli("rl", "--resume", file, *place, "--steps", 160, "--json")
    assert run.status == 0, run.err
    assert run.json["steps"] == 160
    assert run.json["out"] == str(tmp_path)
    error = one_line_error(cli("rl", "--resume", file, *place, "--lr", 0.1))
    assert "leave out --lr" in error


def test_forex(cli: Callable[..., Run], tmp_path: Path) -> None:
    pytest.importorskip("gym_anytrading")
    arguments = ("--device", "sim", "--steps", 80, *SMALL, "--evaluation-episodes", 0, "--out", tmp_path, "--json")
    run = cli("rl", "gym_anytrading:forex-v0", *arguments)
    assert run.status == 0, run.err
    assert (run.json["env"], run.json["updates"]) == ("gym_anytrading:forex-v0", 10)
    assert run.json["return_last"] is None, "its first episode is not over"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "env is missing"),
        (("Fly-v0",), "environment 'Fly-v0'"),
        (("forex-v7",), "name the package too, like gym_anytrading:forex-v0"),
        (("Pendulum-v1",), "actions are Discrete or one-dimensional MultiDiscrete spaces, got Box"),
        (("CartPole-v1", "--algorithm", "ppo"), "algorithm must be one of"),
        (("CartPole-v1", "--steps", 0), "total_steps must be at least 1"),
        (("CartPole-v1", "--gamma", 2), "gamma = 2.0: it must be between 0 and 1"),
        (("CartPole-v1", "--envs", 0), "envs must be at least 1"),
        (("--resume", "nowhere.safetensors"), "nowhere.safetensors"),
    ],
)
def test_bad_input(
    cli: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in one_line_error(cli("rl", *arguments, "--device", "sim"))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("widths", ["a", "8,,"])
def test_bad_widths(cli: Callable[..., Run], widths: str) -> None:
    run = cli("rl", "CartPole-v1", "--hidden", widths)
    assert run.status == 2
    assert "--hidden" in run.err


def test_results_are_not_overwritten_silently(cli: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"precious")
    arguments = ("rl", "CartPole-v1", "--device", "sim", "--steps", 5, "--evaluation-episodes", 0, "--out", tmp_path)
    assert "already holds checkpoint.safetensors" in one_line_error(cli(*arguments))
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == b"precious"
    assert cli(*arguments, "--overwrite").status == 0


def test_ctrl_c_leaves_a_checkpoint(command: tuple[list[str], dict[str, str]], device: Device, tmp_path: Path) -> None:
    program, environment = command
    arguments = ["rl", "CartPole-v1", "--device", device.label, "--steps", "1000000", *map(str, SMALL)]
    with subprocess.Popen(
        [*program, *arguments, "--out", str(tmp_path), "--checkpoint-every", "50", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not (tmp_path / "checkpoint.safetensors").exists():  # training is under way
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    values = json.loads(out)
    assert values["interrupted"]
    assert 50 <= values["steps"] < 1000000
    assert f"stopped by Ctrl-C after {values['steps']} steps" in err
    checkpoint = Checkpoint.load(tmp_path / "checkpoint.safetensors")
    assert checkpoint.state["counters"][0] == values["updates"]
