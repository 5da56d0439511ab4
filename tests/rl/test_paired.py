"""An engine and the float64 reference train on the same batches and stay together; wrong runs do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.rl import TrainConfig
from tests.rl import paired
from tests.rl.paired import Curves, Gap, Outcome, limits_of, run_pair
from tests.rl.steps import Tree
from tools import paired_reference

BATCHES = 40
#: The target network is copied after every ten batches.
CONFIG = TrainConfig.quick(target_every=20)


@pytest.mark.parametrize("algorithm", ["dqn", "c51", "iqn", "full"])
def test_the_pair_stays_together(device: Device, algorithm: str) -> None:
    outcome = run_pair(device, algorithm, CONFIG, batches=BATCHES)
    assert outcome.faults(limits_of(algorithm)) == []
    assert (outcome.foreign, outcome.copies) == (0, 4)
    assert [gap.batches for gap in outcome.gaps] == [10, 40]
    assert all(len(curves.engine) == len(curves.reference) == BATCHES for curves in outcome.curves.values())


@pytest.mark.parametrize("algorithm", ["dqn", "c51", "iqn", "full"])
@pytest.mark.parametrize("wrong", [{"lr": 1.05}, {"discount": 0.95}], ids=["lr", "discount"])
def test_a_wrong_reference_does_not(device: Device, algorithm: str, wrong: dict[str, Any]) -> None:
    outcome = run_pair(device, algorithm, CONFIG, batches=BATCHES, **wrong)
    assert outcome.faults(limits_of(algorithm))
    assert outcome.foreign == 0, "what was drawn is right all the same"


def test_rows_that_were_not_inserted_are_seen(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of each batch end elsewhere, and a third one has another fraction."""
    read = paired.read_batch

    def spoilt(engine: Engine) -> Tree:
        batch = read(engine)
        batch["next_state"][:2] += 1.0
        batch["tau"][5, 0] = 0.5
        return batch

    monkeypatch.setattr(paired, "read_batch", spoilt)
    outcome = run_pair(device, "iqn", CONFIG, batches=2)
    assert outcome.foreign == 6
    assert outcome.faults(limits_of("iqn"))[0] == "6 rows are none of the replay's"


def test_numbers_of_a_gap() -> None:
    first: Tree = {"w": np.zeros((1, 2)), "b": np.zeros(1)}
    reference: Tree = {"w": np.array([[3.0, 0.0]]), "b": np.array([4.0])}
    found: Tree = {"w": np.array([[3.0, 0.3]]), "b": np.array([4.4])}
    gap = Gap.between(7, found, reference, first)
    np.testing.assert_allclose([gap.largest, gap.relative, gap.drift], [0.4, 0.1, 0.1])
    assert gap.batches == 7


def test_numbers_of_a_curve() -> None:
    curves = Curves([1.0] * 60 + [2.0] * 100, [1.0] * 60 + [1.6] * 100)
    assert curves.apart == pytest.approx(0.25)
    assert curves.last == pytest.approx(0.25)
    short = Curves([1.0, 2.0], [1.0, 1.0])
    assert short.apart == short.last == pytest.approx(0.5)


def test_what_is_no_number_is_a_fault() -> None:
    outcome = Outcome({"L": Curves([np.nan], [1.0])}, [Gap(1, np.nan, np.nan, np.nan)])
    assert len(outcome.faults(limits_of("dqn"))) == 2


def test_the_tool(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    output, picture = tmp_path / "paired.json", tmp_path / "paired.png"
    arguments = ["--device", device.label, "--batches", "12", "--batch", "8"]
    status = paired_reference.main([*arguments, "--agent", "dqn", "--output", str(output), "--plot", str(picture)])
    assert status == 0
    found = json.loads(output.read_text())
    (row,) = found["agents"]
    assert (row["agent"], row["passed"], row["foreign_rows"], row["faults"]) == ("dqn", True, 0, [])
    assert [gap["batches"] for gap in row["parameters"]] == [10, 12]
    assert len(row["losses"]["L_td"]["engine"]) == len(row["losses"]["L_td"]["reference"]) == 12
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "dqn: 0 copies to the target, 0 foreign rows" in capsys.readouterr().out

    monkeypatch.setattr(paired, "foreign_rows", lambda *_: 1)
    assert paired_reference.main([*arguments, "--agent", "dqn"]) == 1
    assert "12 rows are none of the replay's" in capsys.readouterr().out
