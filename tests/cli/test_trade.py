"""`fxengine trade`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fxengine.data import demo_bars, save_bars
from fxengine.driver import Device
from tests.cli.conftest import Run, one_line_error

FIGURES = {"total_return", "sharpe", "max_drawdown", "turnover", "trades", "exposure"}
QUICK = ("--agent", "dqn", "--updates", 3, "--batch", 4, "--environments", 2, "--episode-bars", 20)


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bars") / "eurusd.csv"
    save_bars(demo_bars()[:420], path)
    return path


def test_json_and_files(cli: Callable[..., Run], device: Device, bars: Path, tmp_path: Path) -> None:
    costs = ("--fee", 1e-5, "--spread", 2e-4)
    run = cli("trade", "--data", bars, "--device", device.label, *QUICK, *costs, "--out", tmp_path / "run", "--json")
    assert run.status == 0, run.err
    values = run.json
    assert (values["agent"], values["seeds"], values["updates"], values["batch"]) == ("dqn", 5, 3, 4)
    assert (values["fee"], values["spread"], values["device"]) == (1e-5, 2e-4, device.label)
    assert len(values["accounts"]) == 5 and set(values["accounts"][0]) == FIGURES
    assert set(values["baselines"]) == set(values["verdicts"]) == {"buy and hold", "flat", "random"}
    for figures in (values, *values["baselines"].values()):
        assert all(set(figures[name]) == {"mean", "deviation", "error"} for name in FIGURES)
    returns = [account["total_return"] for account in values["accounts"]]
    assert values["total_return"]["mean"] == pytest.approx(sum(returns) / 5)
    assert values["baselines"]["flat"]["trades"]["mean"] == 0.0
    assert json.loads((tmp_path / "run" / "report.json").read_text()) == values
    assert (tmp_path / "run" / "trading.png").read_bytes().startswith(b"\x89PNG")
    assert "seed 4: return" in run.err, "text for people goes to stderr"


def test_the_report_is_plain(cli: Callable[..., Run], bars: Path, tmp_path: Path) -> None:
    run = cli("trade", "--data", bars, "--device", "sim", *QUICK, "--seeds", 6, "--out", tmp_path / "run")
    assert run.status == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    lines = {line.split("  ")[0]: line for line in run.out.splitlines()}
    for name, verdict in report["verdicts"].items():
        assert verdict in lines[f"against {name}"]
        assert verdict.count("does NOT beat it") == list(report["beats"][name].values()).count(False)
    beaten = [name for name, beats in report["beats"].items() if all(beats.values())]
    missed = [name for name in report["beats"] if name not in beaten]
    assert report["conclusion"] in lines["verdict"]
    assert ("do NOT beat " + ", ".join(missed) in report["conclusion"]) == bool(missed)
    assert "a demonstration on the simulated device" in lines["note"]
    assert "seed 5: return" in run.out and "6 seeds" in run.out


def test_results_are_not_overwritten_silently(cli: Callable[..., Run], bars: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("precious")
    arguments = ("trade", "--data", bars, "--device", "sim", *QUICK, "--out", tmp_path)
    assert "already holds report.json" in one_line_error(cli(*arguments))
    assert (tmp_path / "report.json").read_text() == "precious"
    assert cli(*arguments, "--overwrite").status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere.csv"), "nowhere.csv: no such file"),
        (("--seeds", 3), "seeds is 3, expected at least 5"),
        (("--updates", -1), "updates is -1"),
        (("--fee", 2), "fee must be in [0, 1]"),
        (("--episode-bars", 100_000), "an episode of 100000 steps needs 100001 bars"),
    ],
)
def test_bad_input(
    cli: Callable[..., Run],
    bars: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[object, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    data = () if "--data" in arguments else ("--data", bars)
    assert message in one_line_error(cli("trade", "--device", "sim", *data, *arguments))
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
