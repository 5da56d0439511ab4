"""`fxengine inspect`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fxengine.driver import Device
from tests.cli.conftest import Run, one_line_error


def test_json(cli: Callable[..., Run], device: Device) -> None:
    run = cli("inspect", "--device", device.label, "--batch", 32, "--json")
    assert run.status == 0
    census = run.json
    assert {"depth", "nodes", "launches", "instantiations", "bytes"} <= set(census)
    assert census["instantiations"] == 1
    assert census["nodes"]["memset"] == 1
    assert set(census["nodes"]) == {"memset", "kernel"}, "no allocation, host or copy nodes"
    assert census["nodes"]["kernel"] == sum(census["launches"].values())
    assert 0 < census["depth"] <= 16
    assert census["bytes"]["params"] == census["bytes"]["adam_m"] == census["bytes"]["adam_v"] > 0
    assert "gather" in census["launches"], "batches are gathered on the device"


def test_the_full_model(cli: Callable[..., Run], device: Device) -> None:
    options = "--model", "full", "--precision", "tf32", "--batch", 16
    census = cli("inspect", "--device", device.label, *options, "--json").json
    assert census["precision"] == "tf32" and any("tf32" in family for family in census["launches"])
    assert 0 < census["depth"] <= 30
    assert census["nodes"]["memset"] == 1
    assert sum(census["nodes"].values()) <= 80
    assert {"attention_forward", "iqn_loss", "gate", "polyak", "spectral"} <= set(census["launches"])
    assert {"c51", "c51_many"} & set(census["launches"])
    assert census["bytes"]["params"] >= 4 * 672_082, "the sizes of the specification"


def test_table_time_and_drawing(cli: Callable[..., Run], device: Device, tmp_path: Path) -> None:
    drawing = tmp_path / "step.dot"
    run = cli("inspect", "--device", device.label, "--batch", 8, "--state", 4, "--time", "--dot", drawing)
    assert run.status == 0
    rows = run.out.splitlines()
    assert rows[0].split()[:4] == ["us", "node", "level", "family"]
    assert all(float(row.split()[0]) > 0.0 for row in rows[1:4])
    assert drawing.read_text().startswith("digraph step {")
    head = next(i for i, row in enumerate(rows) if row.split()[:4] == ["level", "us", "sum", "us"])
    levels = rows[head + 1 : rows.index("", head)]
    assert [int(row.split()[0]) for row in levels] == list(range(len(levels))) and len(levels) > 5
    assert any(row.startswith("floor on an NVIDIA H200: ") for row in rows[head:])


def test_json_times_every_node(cli: Callable[..., Run], device: Device) -> None:
    values = cli("inspect", "--device", device.label, "--batch", 4, "--state", 4, "--time", "--json").json
    assert len(values["node_us"]) == sum(values["nodes"].values())
    assert all(row["us"] > 0.0 for row in values["node_us"])
    levels, floor = values["levels"], values["floor"]
    assert len(levels) == values["depth"]
    nodes = [row["us"] for row in values["node_us"]]
    assert sum(row["total_us"] for row in levels) == pytest.approx(sum(nodes), rel=1e-3)
    for row in levels:
        assert row["us"] == pytest.approx(nodes[row["slowest"]], abs=1e-3)
        assert (row["share"] is None) == (values["name"] != floor["ceilings"])
    assert sum(row["flop"] for row in levels) > 0.0
    assert floor["us"] == pytest.approx(max(floor[f"{part}_us"] for part in ("products", "memory", "chain")) + 2.7)


def test_nothing_is_timed_unasked(cli: Callable[..., Run]) -> None:
    values = cli("inspect", "--device", "sim", "--batch", 4, "--state", 4, "--json").json
    assert not {"node_us", "levels", "floor"} & set(values)


def test_bad_sizes(cli: Callable[..., Run]) -> None:
    assert "batch = 0" in one_line_error(cli("inspect", "--device", "sim", "--batch", 0))


def test_a_drawing_needs_a_folder(cli: Callable[..., Run], tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "step.dot"
    assert str(path) in one_line_error(cli("inspect", "--device", "sim", "--batch", 4, "--state", 4, "--dot", path))
