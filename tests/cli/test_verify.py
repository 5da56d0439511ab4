"""`fxengine verify`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fxengine.driver import Device
from tests.cli.conftest import GOLDEN, Run, one_line_error

CLOSED = GOLDEN / "golden_aux_closed.npz"


def test_a_good_device_passes(cli: Callable[..., Run], device: Device) -> None:
    run = cli("verify", "--device", device.label, "--all", CLOSED)
    assert run.status == 0
    lines = run.out.splitlines()
    results = [n for n in np.load(CLOSED).files if ".out." in n]
    rows = {line.split()[0] for line in lines if " error " in line and line.startswith("  ")}
    assert rows >= set(results)
    assert f"checked {len(results)} arrays: all within the limits" in run.out
    assert "NOT CHECKED" not in run.out
    assert lines[-1].startswith("worst: step")


def test_json(cli: Callable[..., Run], device: Device) -> None:
    run = cli("verify", "--device", device.label, "--json", CLOSED)
    assert run.status == 0
    values = run.json
    assert values["failed"] == values["missing"] == values["unjudged"] == []
    assert set(values["checked"]) == {n for n in np.load(CLOSED).files if ".out." in n}
    assert values["worst"]["name"] in values["checked"]
    assert 0.0 < values["worst"]["error"] <= values["worst"]["limit"]


def test_a_disturbed_array_fails(cli: Callable[..., Run], device: Device, tmp_path: Path) -> None:
    arrays = dict(np.load(CLOSED))
    arrays["step0.out.grad.w_a1"][3, 5] += 1e-3 * np.abs(arrays["step0.out.grad.w_a1"]).max()
    del arrays["step0.out.td"]
    np.savez(tmp_path / "bad.npz", **arrays)
    run = cli("verify", "--device", device.label, "--json", tmp_path / "bad.npz")
    assert run.status == 1
    assert run.json["failed"] == ["step0.out.grad.w_a1"]
    assert run.json["missing"] == ["step0.out.td"]
    assert run.json["worst"]["name"] == "step0.out.grad.w_a1"
    assert "1 beyond the limits" in run.err
    assert "FAILED step0.out.grad.w_a1" in run.err
    assert "NOT CHECKED step0.out.td: the step has it, the file does not" in run.err


def test_several_files_tell_their_arrays_apart(cli: Callable[..., Run], device: Device) -> None:
    paths = [GOLDEN / "golden_bare.npz", GOLDEN / "golden_cold_odd.npz"]
    run = cli("verify", "--device", device.label, "--json", *paths)
    assert run.status == 0
    values = run.json
    names = [f"{path.name}:{n}" for path in paths for n in np.load(path).files if ".out." in n]
    assert values["checked"] == names
    assert values["worst"]["name"] in names
    assert [len(f["checked"]) for f in values["files"]] == [218, 704]
    assert [f["worst"]["limit"] for f in values["files"]] == [5e-5, 5e-5]


def _text(path: Path) -> None:
    path.write_text("no archive")


def _other_archive(path: Path) -> None:
    np.savez(path, a=np.zeros(3))


def _no_results(path: Path) -> None:
    arrays = {k: v for k, v in np.load(CLOSED).items() if ".out." not in k}
    np.savez(path, **arrays)


def _bad_config(path: Path) -> None:
    np.savez(path, **{**dict(np.load(CLOSED)), "config": np.array('{"batch": 0}')})


def _no_weight(path: Path) -> None:
    arrays = dict(np.load(CLOSED))
    del arrays["in.param.w_a2"]
    np.savez(path, **arrays)


def _bad_shape(path: Path) -> None:
    np.savez(path, **{**dict(np.load(CLOSED)), "in.m.b_a1": np.zeros(3)})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: path.mkdir(), "cannot be read"),
        (_text, "is not a golden file"),
        (lambda path: path.write_bytes(b""), "is not a golden file"),
        (lambda path: path.write_bytes(CLOSED.read_bytes()[:5000]), "is not a golden file"),
        (_other_archive, "no arrays 'config' and 'in.step'"),
        (_no_results, "no results step0.out"),
        (_bad_config, "batch = 0"),
        (_no_weight, "'in.param.w_a2' is missing"),
        (_bad_shape, "'in.m.b_a1' has shape (3,), the step has (16,)"),
    ],
)
def test_bad_files(cli: Callable[..., Run], tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "file.npz"
    make(path)
    line = one_line_error(cli("verify", "--device", "sim", path))
    assert message in line
    assert str(path) in line


def test_an_unknown_precision(cli: Callable[..., Run]) -> None:
    run = cli("verify", "--precision", "fp8", CLOSED)
    assert run.status == 2
    assert all(name in run.err for name in ("fp32", "tf32", "bf16"))
