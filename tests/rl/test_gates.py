"""The tools that judge and time learning: tools/rl_gates.py, tools/rl_bench.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.rl import TrainConfig, trainer
from tools import rl_bench, rl_gates
from tools.peers import cartpole, dqn
from tools.rl_gates import GATES, Gate, Mark, passes

SMALL = TrainConfig.quick(hidden=(8,), batch=8, buffer=100, learning_starts=20)
END, EARLY = Mark(100, 10.0), Mark(40, 5.0)


@pytest.mark.parametrize(
    ("marks", "every", "evaluations", "passed"),
    [
        ((END,), 0, [(100, 10.0)], True),
        ((END,), 0, [(100, 9.9)], False),
        ((END,), 0, [(50, 99.0), (100, 9.0)], False),
        ((EARLY, END), 20, [(20, 1.0), (40, 5.0), (100, 12.0)], True),
        ((EARLY, END), 20, [(20, 1.0), (60, 50.0), (100, 12.0)], False),
        ((EARLY, END), 20, [(20, 6.0), (80, 11.0), (100, 1.0)], True),
    ],
)
def test_marks(marks: tuple[Mark, ...], every: int, evaluations: list[tuple[int, float]], passed: bool) -> None:
    gate = Gate("CartPole-v1", "dqn", 100, marks, evaluate_every=every)
    assert passes(gate, evaluations, 100) == passed


@pytest.mark.parametrize(
    ("means", "passed"), [([100.0, 150.0, 200.0], True), ([90.0, 150.0, 200.0], False), ([170.0, 170.0, 199.0], False)]
)
def test_a_gate_of_all_seeds(means: list[float], passed: bool) -> None:
    rows = [{"mean": mean, "passed": True} for mean in means]
    assert rl_gates.gate_passed(GATES["lunarlander-dqn"], rows) == passed
    failed = [row | {"passed": False} for row in rows]
    assert not rl_gates.gate_passed(GATES["lunarlander-dqn"], failed)


def test_the_published_settings_are_the_defaults() -> None:
    assert GATES["cartpole-dqn"].config == GATES["cartpole-c51"].config == TrainConfig()
    assert {name for name, gate in GATES.items() if gate.control} == {
        "control-rate", "control-target", "control-stuck",
    }  # fmt: skip


def test_a_seed(device: Device) -> None:
    gate = replace(GATES["cartpole-iqn"], config=SMALL, evaluate_every=30, marks=(Mark(40, 1.0), Mark(60, 5.0)))
    row = rl_gates.run_seed(gate, 3, device=device.label, steps=60, precision="fp32")
    assert row["passed"]
    assert [e["step"] for e in row["evaluations"]] == [30, 60]
    assert (row["seed"], row["updates"], row["skipped"]) == (3, 20, 0)
    assert rl_gates.run_seed(gate, 3, device=device.label, steps=60, precision="fp32")["mean"] == row["mean"]


def test_stuck_random_numbers(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "Exploration", trainer.Exploration)  # so that it is restored
    gate = replace(GATES["control-stuck"], config=SMALL)
    algorithm = rl_gates._stuck(gate, 1)
    with trainer.Trainer("CartPole-v1", algorithm, total_steps=400, device=device, seed=1, config=SMALL) as run:
        drawn = []
        for step in (200, 210, 220):  # the replay is full
            run.advance(step)
            drawn.append(run.engine.output("replay.start"))
        for rows in drawn[1:]:
            assert len(set((rows - drawn[0]) % 100)) == 1, "the same places, as the ring moves on"
        held = run.engine.state()["replay.field.actions"].reshape(100, -1)[:, 0]
        np.testing.assert_array_equal(held, 0)


def test_gates_in_processes_of_their_own(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "gates.json"
    arguments = ["--device", device.label, "--steps", "40", "--jobs", "2", "--output", str(output)]
    status = rl_gates.main([*arguments, "--gate", "control-rate", "--seeds", "1", "2"])
    assert status == 0, "an untrained network does not pass, as it must"
    (outcome,) = json.loads(output.read_text())
    assert (outcome["passed"], outcome["as_expected"], len(outcome["seeds"])) == (False, True, 2)
    assert "not passed as a control must" in capsys.readouterr().out
    assert rl_gates.main([*arguments, "--gate", "cartpole-dqn", "--seeds", "1"]) == 1


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert rl_gates.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in GATES)
    assert "475 within 500,000" in out


def test_bench(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "rl.json"
    arguments = ["--device", device.label, "--steps", "300", "--peers", "--output", str(output)]
    assert rl_bench.main(arguments) == 0
    report: dict[str, Any] = json.loads(output.read_text())
    environment, ours = report["rl"]
    assert report["left_out"] == []
    assert environment["envs"] == ours["envs"] == 1
    assert environment["by"] == "environment"
    assert (ours["steps"], ours["updates"]) == (300, 29)
    assert ours["us_per_step"] > 0.0
    assert ours["by"] in capsys.readouterr().out


def test_bench_of_vector_environments(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All peers get the same work; one that is stopped is no failure, one that fails is."""
    output, work, outcomes = tmp_path / "rl.json", [], {"jax": None, "torch-eager": 3}

    def status(command: list[str], environment: Any, limit_s: float | None) -> int | None:
        work.append((command[3], dict(zip(command[5::2], command[6::2], strict=True))))
        assert limit_s == 2.5
        return outcomes[command[3]]

    monkeypatch.setattr(rl_bench, "group_status", status)
    arguments = ["--device", device.label, "--steps", "300", "--envs", "1", "4", "--vector", "arrays"]
    arguments += ["--limit-s", "2.5", "--output", str(output), "--peers"]
    assert rl_bench.main([*arguments, "jax"]) == 0
    report: dict[str, Any] = json.loads(output.read_text())
    assert [(row["by"].split()[0], row["envs"]) for row in report["rl"]] == [
        ("environment", 1), ("fxengine", 1), ("environment", 4), ("fxengine", 4),
    ]  # fmt: skip
    assert {(row["steps"], row["updates"]) for row in report["rl"] if row["updates"]} == {(300, 29)}
    places = ("cpu",) if device.kind == "sim" else ("cuda", "cpu")
    assert report["left_out"] == [f"jax {p}, envs {n}: stopped after 2.5 s" for p in places for n in (1, 4)]
    assert [(name, options["--envs"], options["--steps"]) for name, options in work] == [
        ("jax", n, "300") for _ in places for n in "14"
    ]
    assert rl_bench.main([*arguments, "torch-eager"]) == 1
    assert "ended with status 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        rl_bench.main([*arguments[:5], "3"])


class Batches:
    """A learner that keeps what it is shown."""

    def __init__(self) -> None:
        self.batches: list[dict[str, np.ndarray]] = []
        self.copies = 0

    def act_all(self, observations: np.ndarray) -> np.ndarray:
        return (observations[:, 2] > 0).astype(np.int64)

    def update(self, batch: dict[str, np.ndarray]) -> None:
        self.batches.append(batch)

    def copy(self) -> None:
        self.copies += 1

    def finish(self) -> None: ...


@pytest.mark.parametrize("kind", cartpole.KINDS)
def test_the_vector_loop_of_the_peers(kind: str) -> None:
    """Every transition is one of CartPole's, also where an episode ended."""
    settings = TrainConfig(learning_starts=40, buffer=400, target_every=100)
    learner = Batches()
    row = dqn.loop_together(learner, settings, 1000, 1, cartpole.make(4, kind))
    assert (row["steps"], row["updates"], learner.copies) == (1000, 96, 10)
    seen = {name: np.concatenate([batch[name] for batch in learner.batches]) for name in learner.batches[0]}
    state, following = seen["state"], seen["next_state"]
    np.testing.assert_allclose(following[:, 0], state[:, 0] + 0.02 * state[:, 1], atol=1e-6)
    np.testing.assert_allclose(following[:, 2], state[:, 2] + 0.02 * state[:, 3], atol=1e-6)
    beyond = (np.abs(following[:, 2]) > 12 * 2 * np.pi / 360) | (np.abs(following[:, 0]) > 2.4)
    np.testing.assert_array_equal(seen["discount"] == 0.0, beyond)
    assert 0.0 < beyond.mean() < 0.2
    assert 9 < row["return_last_20"] < 200


def test_table_puts_the_fastest_first() -> None:
    rows = [rl_bench.rated({"by": by, "steps": 100, "updates": 10, "seconds": s}) for by, s in (("b", 2.0), ("a", 1.0))]
    assert rows[1]["steps_per_s"] == 100.0
    assert [line.split()[0] for line in rl_bench.table(rows).splitlines()] == ["by", "a", "b"]
    np.testing.assert_allclose(rows[0]["us_per_step"], 2e4)
