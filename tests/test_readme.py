"""The README's Python runs as printed, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxengine.cli import main

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
@pytest.mark.filterwarnings("ignore::fxengine.driver.errors.SimulatedDeviceWarning")
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {})


def test_there_is_python_to_run() -> None:
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("command", sorted(set(re.findall(r"fxengine (train|rl|trade|inspect|verify|info)\b", README))))
def test_commands_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"fxengine {command}" in capsys.readouterr().out
