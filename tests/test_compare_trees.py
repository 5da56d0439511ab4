"""The comparison of source trees, on the simulated device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools import compare_trees

# At the end of a tree's engine.py: its process ends in the second round, of two steps each.
FALL = """
import os, sys
_calls, _step = [], Engine.step
def _falling(self):
    _calls.append(1)
    if len(_calls) > 2:
        print("it fell", file=sys.stderr, flush=True)
        os._exit(3)
    _step(self)
Engine.step = _falling
"""


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


def test_a_tree_that_ends_in_a_round_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With what it said; the others go on, also where it is the first."""
    falling = tmp_path / "falling"
    shutil.copytree(compare_trees.ROOT / "fxengine", falling / "fxengine", ignore=shutil.ignore_patterns("__pycache__"))
    with (falling / "fxengine" / "engine.py").open("a", encoding="utf-8") as file:
        file.write(FALL)
    trees = [falling, compare_trees.ROOT]
    (row,) = compare_trees.compare(trees, "sim", [4], "fp32", steps=1, rounds=3)
    assert row["tree"] == compare_trees.ROOT.name and row["us"]["4"] > 0
    assert "the process of tree 'falling' ended with status 3:\nit fell" in capsys.readouterr().err
    with pytest.raises(compare_trees.TreeError, match="no tree could be timed"):
        compare_trees.compare(trees[:1], "sim", [4], "fp32", steps=1, rounds=3)


def test_trees_of_one_folder_name_are_told_apart() -> None:
    trees = [Path("/a/main"), Path("/b/main"), Path("/b/other")]
    assert compare_trees.names(trees) == ["/a/main", "/b/main", "other"]
    assert compare_trees.names([*trees[1:], trees[2]]) == ["main", "/b/other #1", "/b/other #2"]


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
