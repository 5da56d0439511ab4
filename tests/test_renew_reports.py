"""The tool that renews all reports: time limits, failures, and commands that the other tools understand."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.digest import ROOT
from tools.peers import common as peers
from tools.renew_reports import Phase, main, phases, run_all


def phase(name: str, *programs: str, limit_s: float = 60.0) -> Phase:
    return Phase(name, limit_s, tuple(("-c", program) for program in programs), {"FX_SAYS": name})


def test_phases_run_in_order_and_do_not_stop_each_other(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = run_all(
        [
            phase("good", "import os; print(os.environ['FX_SAYS'])", "print('beside')"),
            phase("bad", "raise SystemExit(3)", "pass"),
            phase("last", "pass"),
        ],
        tmp_path,
        60.0,
        said.append,
    )
    assert outcome == {"good": "done", "bad": "failed", "last": "done"}
    assert sorted((tmp_path / "good.log").read_text().split()) == ["beside", "good"]
    assert [line.split(":")[0] for line in said] == ["good", "bad", "last"]


def test_what_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    start = time.monotonic()
    outcome = run_all([phase("slow", parent, limit_s=1.0), phase("next", "pass")], tmp_path, 60.0, lambda _: None)
    assert outcome == {"slow": "stopped", "next": "done"}
    time.sleep(max(0.0, 4.5 - (time.monotonic() - start)))
    assert not mark.exists()


def test_no_phase_begins_when_the_time_is_over(tmp_path: Path) -> None:
    slow = phase("slow", "import time; time.sleep(60)")
    outcome = run_all([slow, phase("next", "pass")], tmp_path, 1.0, lambda _: None)
    assert outcome == {"slow": "stopped", "next": "no time left"}


def test_the_tools_know_the_options_that_they_are_given(tmp_path: Path) -> None:
    commands = {command[0]: command for p in phases("cuda:0", tmp_path, tmp_path) for command in p.commands}
    assert len(commands) == 8
    module, name, *arguments = commands.pop("-m")  # of a peer: this machine need not have its framework
    assert (module, name) == ("-m", "tools.peers.jax_step")
    assert peers.parser("", ("step", "scan")).parse_args(arguments).device == "cuda"
    for name, command in commands.items():
        call = [sys.executable, name, "--help"]
        told = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        options = {word for word in command[1:] if re.fullmatch(r"--[a-z-]+", word)}
        assert options <= set(re.findall(r"--[a-z-]+", told)), name


def test_phases_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "peers", "report"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["peers", "report"]
    with pytest.raises(SystemExit):
        main(["--only", "nothing"])
