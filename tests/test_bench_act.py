"""The benchmark of acting on the simulated device: its rows, table and file, and peers that are missing or wrong."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from tools import bench_act
from tools.peers import acting


def test_rows_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "act.json"
    arguments = ["--device", "sim", "--model", "dqn", "--batch", "1", "3", "--peers", "--calls", "2"]
    assert bench_act.main([*arguments, "--json", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [(row["model"], row["batch"], row["depth"]) for row in result["act"]] == [("dqn", 1, 1), ("dqn", 3, 1)]
    assert all(0 < row["p50"] <= row["p99"] for row in result["act"])
    assert "times say nothing" in result["note"]
    printed = capsys.readouterr().out
    assert printed.count("fxengine fp32") == printed.count("<- best") == 2


def test_a_stopped_peer_is_left_out_and_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime comes last, and a peer that was stopped is not tried with the next network."""
    path, started = tmp_path / "act.json", []

    def status(command: list[str], environment: object, limit_s: float | None) -> int | None:
        assert limit_s == 7.0
        peer, model, output = command[3], command[4], Path(command[6])
        held = json.loads(path.read_text(encoding="utf-8"))
        started.append((peer, model, [row["by"] for row in held["act"]].count("jax jit")))
        if peer != "jax":
            return None
        output.write_text(json.dumps([{"batch": 1, "by": "jax jit", "p50": 1.0, "p99": 2.0}]), encoding="utf-8")
        return 0

    monkeypatch.setattr(bench_act, "group_status", status)
    arguments = ["--device", "sim", "--model", "dqn", "step", "--batch", "1", "--calls", "1", "--limit-s", "7"]
    assert bench_act.main([*arguments, "--peers", "onnxruntime", "jax", "--json", str(path)]) == 0
    assert started == [("jax", "dqn", 0), ("jax", "step", 1), ("onnxruntime", "dqn", 2)]
    assert json.loads(path.read_text(encoding="utf-8"))["left_out"] == ["onnxruntime, dqn: stopped after 7 s"]
    assert "onnxruntime, dqn: stopped after 7 s" in capsys.readouterr().out


def test_percentiles_of_single_calls() -> None:
    calls = []
    found = bench_act.latencies(lambda: calls.append(1), calls=10, warmup=3)
    assert len(calls) == 13 and set(found) == {"p50", "p99"}


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is there")
def test_a_peer_that_cannot_be_imported_says_so() -> None:
    case = {"tolerance": np.array(1e-4), "1.obs": np.zeros((1, 48), np.float32), "param.b_3": np.zeros(4, np.float32)}
    with pytest.raises(ImportError, match="torch"):
        acting.measure("torch-eager", "dqn", case, "cpu", 1)


def test_a_peer_with_other_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"tolerance": np.array(1e-4), "2.obs": np.zeros((2, 48), np.float32), "2.q": np.zeros((2, 4), np.float32)}
    right = np.zeros((2, 1), np.int32)
    for worst, fails in ((1e-5, False), (1e-3, True), (np.nan, True)):
        values = np.full((2, 4), worst, np.float32)
        monkeypatch.setattr(acting, "make_call", lambda *_, v=values: (lambda: (right, v), "peer"))
        if fails:
            with pytest.raises(RuntimeError, match="values differ by up to"):
                acting.measure("peer", "dqn", case, "cpu", 1)
        else:
            assert acting.measure("peer", "dqn", case, "cpu", 1)[0]["batch"] == 2
