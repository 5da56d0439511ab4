"""Every array of every golden file, on every device and in every precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxengine.driver import Device, Target
from fxengine.golden import GoldenFile
from fxengine.graphs.program import Family, Launch, Program
from fxengine.ops import linear
from fxengine.ops.linear_tiles import choose_dw, choose_tile
from fxengine.verify import Outcome, verify
from tests.support import planned_for

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("aux_closed", "bare", "cold_odd", "edges", "full", "skip")


def _verify(name: str, device: Device, precision: str) -> Outcome:
    """The outcome of a file, which must have been compared as a whole."""
    path = GOLDEN / f"golden_{name}.npz"
    outcome = verify(path, device=device, precision=precision)
    file = GoldenFile(path)
    assert file.steps == 2
    assert outcome.missing == {}
    assert set(outcome.checked) == {f"step{step}.out.{n}" for step in range(2) for n in file.results(step)}
    assert len(outcome.checked) == len(outcome.results)
    return outcome


def _worst(outcome: Outcome) -> str:
    assert outcome.worst is not None
    return f"{len(outcome.failed)} failed, worst {outcome.worst}"


def test_the_files_are_those_that_the_page_names() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.npz")) == [f"golden_{name}" for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_fp32(device: Device, name: str) -> None:
    outcome = _verify(name, device, "fp32")
    assert outcome.failed == [], _worst(outcome)
    assert outcome.unjudged == []
    updated = {r.name.split(".")[2] for r in outcome.results if r.update is not None}
    assert updated >= {"param", "m", "v", "target"}


def test_a_skipped_step_is_judged_bit_for_bit(device: Device) -> None:
    outcome = _verify("skip", device, "fp32")
    kept = [r for r in outcome.results if r.name.startswith("step0.") and r.update is not None]
    assert {r.name.split(".")[2].split("_b")[0] for r in kept} == {"param", "m", "v", "target", "sn_v", "bound"}
    assert all(r.update == 0.0 and r.update_limit == 0.0 for r in kept)
    assert all(r.update_limit == 1e-3 for r in outcome.results if r.name.startswith("step1.out.param."))


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_reduced_precision(device: Device, name: str, precision: str) -> None:
    if device.kind == "sim" and name not in ("bare", "cold_odd"):
        pytest.skip("on the simulated device the two smallest files stand for all")
    outcome = _verify(name, device, precision)
    assert outcome.failed == [], _worst(outcome)
    assert outcome.summaries
    assert {n.split(".")[2] for n in outcome.unjudged} <= {"state", "bound"} or _another_choice(outcome)


@pytest.mark.parametrize("name", ["cold_odd", "full"])
def test_warpgroups_in_every_layer(warpgroups: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of warpgroups, which large batches alone would choose, and weight gradients by tensor maps: of all sizes,
    with all that a step does."""

    def choose(*sizes: Any, precision: str, aligned: bool, **options: Any) -> str:
        if precision == "tf32" and aligned:
            return "w64x64"
        return choose_tile(*sizes, precision=precision, aligned=aligned, **options)

    def choose_weights(*sizes: Any, precision: str, aligned: bool, **options: Any) -> tuple[str, int]:
        name, slices = choose_dw(*sizes, precision=precision, aligned=aligned, **options)
        return ("m64x64" if precision == "tf32" and aligned else name), slices

    planned = set[str]()
    launch = Program.launch

    def noting(program: Program, family: Family, *arguments: Any, **options: Any) -> Launch:
        planned.add(family.name)
        return launch(program, family, *arguments, **options)

    monkeypatch.setattr(Program, "launch", noting)
    monkeypatch.setattr(linear, "choose_tile", choose)
    monkeypatch.setattr(linear, "choose_dw", choose_weights)
    outcome = _verify(name, warpgroups, "tf32")
    assert outcome.failed == [], _worst(outcome)
    kinds = ("forward_tf32_w64x64", "dx_tf32_w64x64", "dw_tf32_m64x64")
    assert {f"linear_{kind}" for kind in kinds} <= planned


@pytest.mark.parametrize(("arch", "precision"), [("sm_80", "fp32"), ("sm_90", "tf32"), ("sm_120", "bf16")])
def test_as_planned_for_a_gpu(arch: str, precision: str) -> None:
    """Tiles, fusions and launches that a GPU of some generation would be given, on the simulated device."""
    with planned_for(Target.of(arch)) as device:
        outcome = _verify("full", device, precision)
    assert outcome.failed == [], _worst(outcome)


def _another_choice(outcome: Outcome) -> bool:
    """Whether an action at s' differs, after which nothing is judged."""
    return any(r.name.endswith(".q_next") and not r.judged for r in outcome.results)
