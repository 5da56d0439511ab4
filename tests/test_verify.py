"""Verification as a library: what is checked, what not and why, and how errors are measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.golden import GoldenFile, array_error, update_error
from fxengine.verify import GATE_OPEN, NO_AUX, NOT_BUILT, NOT_IN_FILE, SKIPPED, verify

GOLDEN = Path(__file__).parent / "golden"
CLOSED = GOLDEN / "golden_aux_closed.npz"
TENSORS = [f"{kind}_{layer}" for layer in ("a1", "a2", "a3", "nb1", "nb2", "rg1", "rg2") for kind in "wb"]


def _disturbed(folder: Path, **changes: np.ndarray | None) -> Path:
    """A copy of the file with arrays replaced, or left out where None is given."""
    arrays = {k: v for k, v in np.load(CLOSED).items() if changes.get(k, v) is not None}
    arrays.update({k: v for k, v in changes.items() if v is not None})
    path = folder / "disturbed.npz"
    np.savez(path, **arrays)
    return path


def test_the_auxiliary_nets_agree_with_the_reference(device: Device) -> None:
    outcome = verify(CLOSED, device=device)
    assert outcome.failed == []
    expected = {"wire", "L_nb", "L_regime", "step", "skipped", "grad_norm.aux_trunk", "grad_norm.aux_heads"}
    expected |= {f"{kind}.{name}" for kind in ("grad", "param", "m", "v") for name in TENSORS}
    assert set(outcome.checked) == {f"step{step}.out.{name}" for step in (0, 1) for name in expected}
    with_update = {r.name.split(".")[2] for r in outcome.results if r.update is not None}
    assert with_update == {"param", "m", "v"}
    assert outcome.worst is not None
    assert outcome.worst.ratio == max(r.ratio for r in outcome.results)


def test_every_result_is_checked_or_named(device: Device) -> None:
    outcome = verify(CLOSED, device=device)
    file = GoldenFile(CLOSED)
    names = {f"step{step}.out.{name}" for step in range(file.steps) for name in file.results(step)}
    assert set(outcome.checked) | set(outcome.missing) == names
    assert set(outcome.missing.values()) == {NOT_BUILT}


@pytest.mark.parametrize(
    ("name", "reason"), [("full", GATE_OPEN), ("edges", GATE_OPEN), ("cold_odd", GATE_OPEN), ("skip", SKIPPED)]
)
def test_only_what_q_cannot_reach_is_judged(device: Device, name: str, reason: str) -> None:
    outcome = verify(GOLDEN / f"golden_{name}.npz", device=device)
    assert outcome.checked == ["step0.out.L_nb", "step0.out.L_regime", "step0.out.wire"]
    assert outcome.failed == []
    assert outcome.missing["step0.out.grad.w_a1"] == outcome.missing["step1.out.wire"] == reason
    assert outcome.missing["step0.out.L_c51"] == NOT_BUILT


def test_a_step_without_auxiliary_nets(device: Device) -> None:
    outcome = verify(GOLDEN / "golden_bare.npz", device=device)
    assert outcome.results == ()
    assert outcome.worst is None
    assert set(outcome.missing.values()) == {NO_AUX}


def test_an_update_is_judged_more_closely_than_the_values(device: Device, tmp_path: Path) -> None:
    name = "step1.out.param.w_a1"
    moved = np.load(CLOSED)[name]
    moved[0, 0] += 2e-6
    outcome = verify(_disturbed(tmp_path, **{name: moved}), device=device)
    assert outcome.failed == [name]
    assert outcome.worst is not None
    assert outcome.worst.error < outcome.worst.limits.error
    assert outcome.worst.binding[0] == "update"


@pytest.mark.parametrize(
    "name", ["in.signal.w_regime", "in.signal.lr.aux_heads", "in.signal.clip.aux_trunk", "in.step"]
)
def test_the_start_of_the_file_is_used(device: Device, tmp_path: Path, name: str) -> None:
    """Another start in the file must break the agreement: nothing comes from a default."""
    changed = np.asarray(np.load(CLOSED)[name] * 0.5)
    assert verify(_disturbed(tmp_path, **{name: changed.astype(np.load(CLOSED)[name].dtype)}), device=device).failed


def test_bounds_before_the_second_step_come_from_the_file(device: Device, tmp_path: Path) -> None:
    """A bound (with the floor of 1 lowered) that binds in the second step only."""
    changes = {"in.signal.eps_clamp_floor": np.array(0.0), "step0.out.bound.416": np.array(1e-12)}
    outcome = verify(_disturbed(tmp_path, **changes), device=device)
    assert {name.split(".")[0] for name in outcome.failed} == {"step1"}
    assert any(name.startswith("step1.out.v.") for name in outcome.failed)


def test_a_result_that_the_file_lacks_is_named(device: Device, tmp_path: Path) -> None:
    outcome = verify(_disturbed(tmp_path, **{"step1.out.wire": None}), device=device)
    assert outcome.missing["step1.out.wire"] == NOT_IN_FILE
    assert outcome.failed == []


def test_precision_must_exist() -> None:
    with pytest.raises(ValueError, match="'fp8' is not built"):
        verify(CLOSED, device="sim", precision="fp8")


class TestMeasures:
    def test_error_is_relative_to_the_largest_reference(self) -> None:
        assert array_error(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25
        assert array_error(np.array([1e-9]), np.array([0.0])) == pytest.approx(1e-3)

    @pytest.mark.parametrize(
        ("actual", "same"),
        [([np.nan, np.inf], True), ([np.nan, -np.inf], False), ([0.0, np.inf], False), ([np.nan, 1.0], False)],
    )
    def test_nan_and_infinities_must_stand_where_the_reference_has_them(self, actual: list[float], same: bool) -> None:
        error = array_error(np.array([*actual, 1.0]), np.array([np.nan, np.inf, 1.0]))
        assert error == (0.0 if same else np.inf)

    def test_a_stray_nan(self) -> None:
        assert array_error(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) == np.inf
        zero = np.zeros(2)
        assert update_error(zero, np.array([np.nan, 1.0]), zero, np.ones(2), 1e-6) == np.inf

    def test_another_shape(self) -> None:
        assert array_error(np.zeros((2, 1)), np.zeros(2)) == np.inf

    def test_update_forgives_the_rounding_of_storage(self) -> None:
        before, after = np.array([1.0]), np.array([1.0 + 1e-3])
        rounded = after + 2.0**-24
        assert update_error(before, rounded, before, after, 1e-6) == 0.0
        assert update_error(before, after + 1e-6, before, after, 1e-6) == pytest.approx(1e-3, rel=0.2)

    def test_update_of_a_resting_reference(self) -> None:
        zero = np.zeros(1)
        assert update_error(zero, np.array([1e-9]), zero, zero, 1e-6) == pytest.approx(1e-3, rel=1e-3)
        assert update_error(zero, np.array([1e-9]), zero, zero, 1e-12) == pytest.approx(1e3, rel=1e-3)
