"""Running the command line inside and outside the test's process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fxengine.cli import main

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


@dataclass(frozen=True)
class Run:
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout, which must be the only one."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"stdout must hold the JSON object alone, got {lines}"
        return json.loads(lines[0], parse_constant=_no_constant)


def _no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """`cli("verify", path, ...)` runs `main` in this process."""
    monkeypatch.delenv("FXENGINE_DEBUG", raising=False)

    def run(*arguments: object) -> Run:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Run(status, captured.out, captured.err)

    return run


@pytest.fixture
def command() -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that start the command line as its own process."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {k: v for k, v in os.environ.items() if k != "FXENGINE_DEBUG"}
    return [sys.executable, "-m", "fxengine.cli"], {**environment, "PYTHONPATH": path}


def one_line_error(run: Run) -> str:
    """The error line of a run that ended with status 2; there must be no other and no traceback."""
    assert run.status == 2, (run.status, run.err)
    lines = [line for line in run.err.splitlines() if not line.startswith("fxengine: note:")]
    assert len(lines) == 1, run.err
    assert lines[0].startswith("fxengine: error: "), lines
    return lines[0]
