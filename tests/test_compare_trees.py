"""The comparison of source trees, on the simulated device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import compare_trees


def test_two_trees_are_timed_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each by a process that has its own sources; one that cannot be timed is named and left out."""
    other, broken = tmp_path / "other", tmp_path / "broken"
    shutil.copytree(compare_trees.ROOT / "fxengine", other / "fxengine", ignore=shutil.ignore_patterns("__pycache__"))
    broken.mkdir()
    trees = [compare_trees.ROOT, other, broken]
    rows = compare_trees.compare(trees, "sim", [4], "fp32", steps=1, rounds=2)
    assert [row["tree"] for row in rows] == [compare_trees.ROOT.name, "other"]
    assert all(row["us"]["4"] > 0 <= row["spread_us"]["4"] for row in rows)
    assert rows[0]["nodes"] == rows[1]["nodes"] and rows[0]["nodes"]["4"] > 1
    assert "the process of tree 'broken' ended with status 1" in capsys.readouterr().err
    with pytest.raises(compare_trees.TreeError, match="tree 'broken'"):
        compare_trees.compare(trees[::-1], "sim", [4], "fp32", steps=1, rounds=1)


def test_rows_as_text() -> None:
    rounds = [{"64": 2.0, "256": 5.0}, {"64": 4.0, "256": 5.0}, {"64": 2.5, "256": 5.5}]
    base = compare_trees.row("base", rounds, {"64": 57, "256": 58})
    assert base["us"] == {"64": 2.5, "256": 5.0} and base["spread_us"] == {"64": 2.0, "256": 0.5}
    other = compare_trees.row("other", [{"64": 2.0, "256": 6.0}], {"64": 57, "256": 58})
    lines = compare_trees.table([base, other]).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == 3
    assert "2.5 ± 1.0   +0.0" in lines[1] and "-0.5" in lines[2] and "+1.0" in lines[2]


def test_a_first_tree_that_cannot_be_timed_ends_the_tool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_trees.main([str(tmp_path), "--device", "sim", "--batch", "4"]) == 1
    assert f"tree '{tmp_path.name}' ended with status" in capsys.readouterr().err
