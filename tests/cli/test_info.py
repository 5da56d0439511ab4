"""`fxengine info`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import fxengine
from fxengine.driver import Device
from tests.cli.conftest import Run, one_line_error


def test_json(cli: Callable[..., Run], device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXENGINE_CACHE", str(tmp_path))
    (tmp_path / "entry").write_bytes(b"12345")
    run = cli("info", "--json", "--device", device.label)
    assert run.status == 0
    values = run.json
    assert set(values) == {"device", "driver", "nvrtc", "cache", "compiler", "versions"}
    assert values["device"]["label"] == device.label
    assert values["cache"] == {"folder": str(tmp_path), "files": 1, "bytes": 5}
    assert values["versions"]["fxengine"] == fxengine.__version__
    if device.kind == "cuda":
        assert values["driver"]["cuda"]
        assert values["device"]["memory_bytes"] == device.properties.total_memory


def test_text(cli: Callable[..., Run]) -> None:
    run = cli("info", "--device", "sim")
    assert run.status == 0
    assert [line.split()[0] for line in run.out.splitlines()][:5] == ["device", "driver", "nvrtc", "compiler", "cache"]


def test_a_named_device_must_exist(cli: Callable[..., Run]) -> None:
    one_line_error(cli("info", "--device", "cuda:99"))
