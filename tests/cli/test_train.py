"""`fxengine train`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fxengine.checkpoint import Checkpoint
from fxengine.data import demo_bars, save_bars
from fxengine.driver import Device
from fxengine.engine import Engine
from tests.cli.conftest import Run, one_line_error

KEYS = {
    "steps", "loss_first", "loss_last", "next_bar_accuracy", "next_bar_baseline", "regime_accuracy", "regime_baseline",
    "steps_per_s", "device", "census",
}  # fmt: skip
FULL_KEYS = {
    "loss_c51_first", "loss_c51_last", "gate_open_share", "iqn_readiness", "iqn_share_first", "iqn_share_last",
}  # fmt: skip
COMPONENTS = {"iqn", "ens", "c51", "cql", "distill", "rec", "pred", "cql_sx", "c51_bs"}


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bars") / "eurusd.csv"
    save_bars(demo_bars()[:700], path)
    return path


def test_json_and_files(cli: Callable[..., Run], device: Device, bars: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = cli(
        "train", "--data", bars, "--device", device.label, "--steps", 30, "--batch", 16, "--out", folder, "--json"
    )
    assert run.status == 0
    values = run.json
    assert set(values) >= KEYS
    assert values["steps"] == 30
    assert values["device"] == device.label
    assert values["loss_last"] < values["loss_first"]
    assert values["census"]["instantiations"] == 1
    assert values["census"]["nodes"]["memset"] == 1
    assert "majority baseline" in run.err, "text for people goes to stderr"

    assert json.loads((folder / "report.json").read_text()) == values
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 31))
    assert rows[-1]["validation"]["regime_accuracy"] == values["regime_accuracy"]
    with Engine.load(folder / "checkpoint.safetensors", device=device) as engine:
        assert engine.config is not None
        assert engine.config.batch == 16


def test_the_full_model(cli: Callable[..., Run], device: Device, bars: Path, tmp_path: Path) -> None:
    arguments = ("--model", "full", "--sizes", "small", "--steps", 12, "--batch", 8, "--health-every", 4)
    run = cli("train", "--data", bars, "--device", device.label, *arguments, "--out", tmp_path, "--json")
    assert run.status == 0, run.err
    values = run.json
    assert set(values) >= KEYS | FULL_KEYS
    assert (values["model"], values["sizes"], values["steps"], values["batch"]) == ("full", "small", 12, 8)
    assert values["census"]["nodes"]["memset"] == 1
    assert values["iqn_share_first"] == 0.0, "the readiness is in its warm-up"

    health = [line for line in run.err.splitlines() if line.startswith("health")]
    for word in ("gate ", "readiness", "grad_split_bwd", "grad_split_aux", "grad_trunk", "bounds"):
        assert len([line for line in health if word in line]) == 4, word
    assert "logged demonstration policy" in run.err
    assert "small sizes: h1 128" in run.err
    assert "C51 loss" in run.err

    assert json.loads((tmp_path / "report.json").read_text()) == values
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))
    assert not [name for name in rows[0] if name.startswith(("split.", "bound."))], "those belong into the health"
    told = {row["step"]: row["health"] for row in rows if "health" in row}
    assert list(told) == [1, 4, 8, 12]
    for group in ("grad_split_bwd", "grad_split_aux", "grad_trunk"):
        assert set(told[8][group]) == COMPONENTS
    assert set(told[8]) >= {"gate", "readiness", "bounds", "trunk_shares"}
    assert told[8]["bounds"]["weight"]["trunk"] > 0.0, "the oracles ran at step 8"
    assert rows[-1]["validation"]["c51_loss"] == values["validation_loss_c51"]
    with Engine.load(tmp_path / "checkpoint.safetensors", device=device) as engine:
        assert engine.config is not None
        assert (engine.config.h1, engine.config.batch) == (128, 8)


def test_a_full_run_without_a_health_report(cli: Callable[..., Run], bars: Path, tmp_path: Path) -> None:
    """What was never measured is null in the report, not a number."""
    from fxengine.session import TrainingSession

    def stopped(self: TrainingSession, watch: object = None) -> object:
        self.stop()
        return run(self, watch)  # type: ignore[arg-type]

    run = TrainingSession.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingSession, "run", stopped)
        arguments = ("--model", "full", "--device", "sim", "--data", bars, "--out", tmp_path, "--json")
        done = cli("train", *arguments)
    assert done.status == 130
    values = done.json
    assert values["steps"] == 0
    assert values["iqn_share_first"] is None
    assert values["loss_c51_first"] is None


def test_the_report_is_plain_about_the_next_bar(cli: Callable[..., Run], bars: Path, tmp_path: Path) -> None:
    run = cli("train", "--data", bars, "--device", "sim", "--steps", 3, "--batch", 8, "--out", tmp_path / "run")
    assert run.status == 0
    line = next(line for line in run.out.splitlines() if line.startswith("next bar  "))
    assert any(words in line for words in ("does NOT beat", "no evidence of skill", "more than two standard errors"))
    assert "no forecast" in next(line for line in run.out.splitlines() if line.startswith("regime  "))
    assert "step      3: validation loss" in run.out


@pytest.mark.parametrize(
    ("accuracy", "words"), [(0.50, "does NOT beat"), (0.52, "no evidence of skill"), (0.60, "more than two standard")]
)
def test_verdict(accuracy: float, words: str) -> None:
    from fxengine.cli.report import next_bar_verdict
    from fxengine.session import TrainResult, Validation

    validation = Validation(1, 1.0, 1.0, 1.0, accuracy, 0.5, 1000)
    result = TrainResult(1, False, 0, 1.0, 1.0, validation, 0.51, 0.4, 1000, 1.0)
    assert words in next_bar_verdict(result)


def test_signals_are_set(cli: Callable[..., Run], bars: Path, tmp_path: Path) -> None:
    arguments = ("train", "--data", bars, "--device", "sim", "--steps", 2, "--batch", 4, "--signal", "w_nb=0")
    assert cli(*arguments, "--signal", "w_regime=3", "--out", tmp_path).status == 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert row["loss"] == pytest.approx(3.0 * row["L_regime"])


def test_results_are_not_overwritten_silently(cli: Callable[..., Run], bars: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"precious")
    arguments = ("train", "--data", bars, "--device", "sim", "--steps", 1, "--batch", 2, "--out", tmp_path)
    assert "already holds checkpoint.safetensors" in one_line_error(cli(*arguments))
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == b"precious"
    assert cli(*arguments, "--overwrite").status == 0
    assert Checkpoint.load(tmp_path / "checkpoint.safetensors").extra["lookahead"] == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.csv"), "nowhere.csv: no such file"),
        (("--steps", -1), "steps is -1"),
        (("--batch", -1), "batch is -1"),
        (("--health-every", 5), "health_every is a setting of the full model"),
        (("--model", "full", "--gamma", 1), "gamma is 1.0"),
        (("--lookahead", 0), "lookahead"),
        (("--validation", 1.5), "validation is 1.5"),
        (("--signal", "clip"), "expected NAME=NUMBER"),
        (("--signal", "clip=low"), "expected NAME=NUMBER"),
        (("--signal", "clap=1"), "did you mean clip"),
        (("--signal", "clip=-1"), "must be in [0, inf]"),
        (("--device", "cuda:99"), "cuda"),
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
    device = () if "--device" in arguments else ("--device", "sim")
    assert message in one_line_error(cli("train", *device, *arguments))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_bad_row_is_named(cli: Callable[..., Run], bars: Path, tmp_path: Path) -> None:
    lines = bars.read_text().splitlines()
    lines[41] = lines[41].replace(lines[41].split(",")[1], "-1.0", 1)
    (tmp_path / "bad.csv").write_text("\n".join(lines) + "\n")
    line = one_line_error(cli("train", "--device", "sim", "--data", tmp_path / "bad.csv"))
    assert "row 42, column 'open'" in line


def test_a_missing_extra_is_named(cli: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name, *a))
    line = one_line_error(cli("train", "--device", "sim", "--out", tmp_path / "run"))
    assert "needs matplotlib" in line
    assert "pip install 'fxengine[demo]'" in line
    assert not (tmp_path / "run").exists()


def test_ctrl_c_leaves_a_checkpoint(
    command: tuple[list[str], dict[str, str]], device: Device, bars: Path, tmp_path: Path
) -> None:
    program, environment = command
    folder = tmp_path / "run"
    arguments = ["train", "--data", str(bars), "--device", device.label, "--steps", "1000000", "--batch", "4"]
    arguments += ["--validate-every", "5", "--out", str(folder), "--json"]
    with subprocess.Popen(
        [*program, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = ""
        while "validation loss" not in said:  # training is under way
            line = process.stderr.readline()
            assert line, f"ended early: {said}"
            said += line
        os.kill(process.pid, signal.SIGINT)
        started = time.perf_counter()
        out, err = process.communicate(timeout=60)
        assert time.perf_counter() - started < 30.0
    assert process.returncode == 130, err
    assert "Traceback" not in err
    values = json.loads(out)
    assert values["interrupted"]
    assert 5 <= values["steps"] < 1000000
    assert f"stopped by Ctrl-C after {values['steps']} of 1000000 steps" in err
    checkpoint = Checkpoint.load(folder / "checkpoint.safetensors")
    assert checkpoint.state["counters"][1] == values["steps"]
    assert all(np.isfinite(array).all() for name, array in checkpoint.state.items() if name.startswith("param."))
    with Engine.load(folder / "checkpoint.safetensors", device=device) as engine:
        assert engine.params["w_a1"].shape == (128, 256)
