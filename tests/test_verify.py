"""Verification as a library: what makes it fail, how errors are measured, what each precision is judged by."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fxengine.config import ConfigError
from fxengine.driver import Device
from fxengine.golden import (
    LIMITS,
    Array,
    GoldenFile,
    GoldenFileError,
    array_error,
    clear_choices,
    relative_l2,
    update_error,
)
from fxengine.verify import NOT_IN_FILE, NOT_IN_STEP, Comparison, Result, verify
from tests.reference import golden as reference
from tests.reference import limits as reference_limits
from tests.reference.config import group_shapes

GOLDEN = Path(__file__).parent / "golden"
BARE = GOLDEN / "golden_bare.npz"
FULL = GOLDEN / "golden_full.npz"
EXACT = ("best", "skipped", "step")


def _disturbed(path: Path, folder: Path, **changes: Array | None) -> Path:
    """A copy of a file with arrays replaced or added, or left out where None is given."""
    arrays = {k: v for k, v in np.load(path).items() if changes.get(k, v) is not None}
    arrays.update({k: v for k, v in changes.items() if v is not None})
    copy = folder / "disturbed.npz"
    np.savez(copy, **arrays)
    return copy


class TestDisturbedFiles:
    """On a device: another start or another result must be noticed."""

    @pytest.mark.parametrize(
        "name",
        [
            "step0.out.L_c51", "step1.out.td", "step0.out.h2", "step1.out.q_target", "step0.out.decomposition",
            "step1.out.grad.w_b0fc", "step0.out.grad_norm.trunk", "step1.out.sigma_b0fc", "step1.out.sn_v_b0fc",
            "step1.out.param.w_s1", "step1.out.m.b_s2", "step1.out.v.ln_g", "step1.out.target.w_v2",
            "step0.out.bound.136", "step1.out.step",
        ],
    )  # fmt: skip
    def test_one_array(self, device: Device, tmp_path: Path, name: str) -> None:
        array = np.load(BARE)[name].copy()
        at = np.unravel_index(np.argmax(np.abs(array)), array.shape)
        array[at] += 1 if name.endswith("step") else 2e-4 * array[at]
        outcome = verify(_disturbed(BARE, tmp_path, **{name: array}), device=device)
        # the state after the first step is also what the second step's update is measured from
        assert outcome.failed[0] == name
        assert {n.partition(".out.")[2] for n in outcome.failed} == {name.partition(".out.")[2]}
        assert outcome.worst is not None
        assert outcome.worst.failed

    def test_best(self, device: Device, tmp_path: Path) -> None:
        best = np.load(BARE)["step0.out.best"].copy()
        best[0, 0] = (best[0, 0] + 1) % 3
        assert verify(_disturbed(BARE, tmp_path, **{"step0.out.best": best}), device=device).failed == [
            "step0.out.best"
        ]

    def test_state_of_gate_and_readiness(self, device: Device, tmp_path: Path) -> None:
        names = ["step0.out.state.alpha_grad", "step1.out.state.iqn_readiness"]
        changes = {n: np.load(FULL)[n] * 1.001 for n in names}
        assert verify(_disturbed(FULL, tmp_path, **changes), device=device).failed == names

    @pytest.mark.parametrize(
        "name",
        [
            "in.param.w_b0out", "in.m.w_s1", "in.v.b_v2", "in.target.w_s2", "in.sn_v_b0fc", "in.bound.136",
            "in.signal.w_c51", "in.signal.lr.trunk", "in.signal.clip.value", "in.step", "step1.in.reward",
        ],
    )  # fmt: skip
    def test_the_start_of_the_file_is_used(self, device: Device, tmp_path: Path, name: str) -> None:
        """Another start in the file must break the agreement: nothing comes from a default."""
        array = np.load(BARE)[name]
        changed = array[::-1] if name == "in.sn_v_b0fc" else array * 0.5 if np.any(array) else np.ones_like(array)
        changes = {name: np.array(changed, array.dtype)}
        assert verify(_disturbed(BARE, tmp_path, **changes), device=device).failed

    def test_nothing_is_lent_between_the_steps(self, device: Device, tmp_path: Path) -> None:
        """Results of the first step are only compared: the second one goes on from what the device computed."""
        names = ["step0.out.bound.136", "step0.out.sn_v_b0fc", "step0.out.param.w_s1"]
        outcome = verify(_disturbed(BARE, tmp_path, **{n: np.load(BARE)[n] * 3 for n in names}), device=device)
        second = [r for r in outcome.results if r.name.startswith("step1.")]
        assert max(r.error / r.limit for r in second if r.limit) < 1.0
        assert [r.name for r in second if r.failed] == ["step1.out.param.w_s1"]  # its update, of the reference

    def test_an_update_is_judged_more_closely_than_the_values(self, device: Device, tmp_path: Path) -> None:
        name = "step1.out.param.w_s1"
        moved = np.load(BARE)[name].copy()
        moved[0, 0] += 2e-6
        outcome = verify(_disturbed(BARE, tmp_path, **{name: moved}), device=device)
        assert outcome.failed == [name]
        assert outcome.worst is not None
        assert outcome.worst.limit is not None
        assert outcome.worst.error < outcome.worst.limit
        assert outcome.worst.binding[0] == "update"


class TestIncompleteFiles:
    def test_a_result_that_the_file_lacks(self, device: Device, tmp_path: Path) -> None:
        outcome = verify(_disturbed(BARE, tmp_path, **{"step1.out.td": None}), device=device)
        assert outcome.missing == {"step1.out.td": NOT_IN_FILE}
        assert outcome.failed == []

    def test_a_result_that_the_step_lacks(self, device: Device, tmp_path: Path) -> None:
        outcome = verify(_disturbed(BARE, tmp_path, **{"step0.out.L_iqn": np.array(1.0)}), device=device)
        assert outcome.missing == {"step0.out.L_iqn": NOT_IN_STEP}

    def test_a_component_that_the_configuration_leaves_out(self, device: Device, tmp_path: Path) -> None:
        """Arrays of a component without the component: its results are named, and the rest no longer agrees."""
        config = json.loads(str(np.load(FULL)["config"])) | {"cur_h": 0}
        names = [n for n in np.load(FULL).files if n.startswith("in.signal.") and n.endswith(".curiosity")]
        path = _disturbed(FULL, tmp_path, config=np.array(json.dumps(config)), **dict.fromkeys(names))
        outcome = verify(path, device=device)
        lacking = {"L_curiosity", "grad_norm.curiosity", "bound.143", "bound.151", "bound.159", "bound.167"}
        lacking |= {f"{kind}.{p}" for kind in ("grad", "param", "m", "v") for p in ("w_c1", "b_c1", "w_c2", "b_c2")}
        assert outcome.missing == {f"step{step}.out.{n}": NOT_IN_STEP for step in range(2) for n in lacking}
        assert "step0.out.L_c51" in outcome.failed

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"in.target.w_v1": None}, "'in.target.w_v1' is missing"),
            ({"in.sn_v_b0fc": None}, "'in.sn_v_b0fc' is missing"),
            ({"in.bound.144": None}, "'in.bound.144' is missing"),
            ({"in.signal.sn_max": None}, "'in.signal.sn_max' is missing"),
            ({"in.signal.lr.branches": None}, "'in.signal.lr.branches' is missing"),
            ({"in.signal.w_magic": np.array(1.0)}, r"signals \['w_magic'\] are unknown"),
            ({"step1.in.reward": None}, "'step1.in.reward' is missing"),
            ({"step0.in.state": np.zeros((3, 3))}, r"'step0.in.state' has shape \(3, 3\)"),
            ({"step0.out.m.w_s1": None}, "'step0.out.m.w_s1' is missing"),  # the second step starts from it
        ],
    )
    def test_what_the_steps_need(self, tmp_path: Path, changes: dict[str, Array | None], message: str) -> None:
        with pytest.raises(GoldenFileError, match=message):
            verify(_disturbed(BARE, tmp_path, **changes), device="sim")

    def test_another_configuration_does_not_fit(self, tmp_path: Path) -> None:
        config = json.loads(str(np.load(BARE)["config"]))
        wider = _disturbed(BARE, tmp_path, config=np.array(json.dumps(config | {"h1": config["h1"] + 1})))
        with pytest.raises(GoldenFileError, match=r"'in\.param\.w_s1' has shape .* the step has"):
            verify(wider, device="sim")
        impossible = _disturbed(BARE, tmp_path, config=np.array(json.dumps(config | {"tokens": 5, "state": 7})))
        with pytest.raises((GoldenFileError, ConfigError), match="tokens = 5"):
            verify(impossible, device="sim")

    def test_precision_must_exist(self) -> None:
        with pytest.raises(ValueError, match="fp32, tf32, bf16, got 'fp8'"):
            verify(BARE, device="sim", precision="fp8")


# -- the comparison alone, against a second implementation of its rules --------------------------------------------


def _compare(precision: str, computed: list[dict[str, Array]], name: str = "full") -> Comparison:
    """The comparison of a file with given results."""
    file = GoldenFile(GOLDEN / f"golden_{name}.npz")
    comparison = Comparison(
        file, LIMITS[precision], {g: list(p) for g, p in group_shapes(_golden(name).config).items()}
    )
    for step, found in enumerate(computed):
        before = computed[step - 1] if step else {n[3:]: file[n] for n in np.load(file.path).files if n[:3] == "in."}
        comparison.add(step, before, found)
    return comparison


def _golden(name: str = "full") -> reference.Golden:
    return reference.load(name)


def _noisy(outputs: dict[str, Array], level: float, rng: np.random.Generator) -> dict[str, Array]:
    """Every array with relative noise of one size, integers and counters as they are."""
    return {
        n: x if n in EXACT else x + level * np.sqrt(np.mean(x**2)) * rng.standard_normal(x.shape)
        for n, x in outputs.items()
    }


def _reference_faults(precision: str, stored: reference.Golden, outputs: list[dict[str, Array]]) -> set[str]:
    """What the reference objects to, by the names that verification uses."""
    names = {"median over gradients": "grad[median]", "best differs where the reference is clear": "best"}
    found = set()
    for fault in reference_limits.judge(precision, stored.config, outputs, stored.outputs):
        step, what, *_ = fault.split(": ")
        if what.startswith("gradient of "):
            what = f"grad[{what.removeprefix('gradient of ')}]"
        found.add(f"{step.replace(' ', '')}.out.{names.get(what, what.removesuffix(' differs'))}")
    return found


def _failed(comparison: Comparison) -> set[str]:
    return {r.name for r in (*comparison.results, *comparison.summaries) if r.failed}


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("level", [1e-3, 4e-3, 1e-2, 2e-2, 4e-2, 1e-1, 3e-1, 1.0])
def test_reduced_precisions_are_judged_as_the_reference_does(precision: str, level: float) -> None:
    stored = _golden()
    rng = np.random.default_rng(int(level * 1e3))
    outputs = [_noisy(out, level, rng) for out in stored.outputs]
    expected = _reference_faults(precision, stored, outputs)
    comparison = _compare(precision, outputs)
    assert _failed(comparison) == expected
    assert bool(expected) == (level > LIMITS[precision].spectral * 0.8)
    unjudged = {r.name.split(".")[2] for r in comparison.results if not r.judged}
    assert unjudged == {"state", "bound"}


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("step", [0, 1])
def test_another_choice_ends_the_judgement_of_a_reduced_precision(precision: str, step: int, close: bool) -> None:
    """A close call may fall the other way, a clear one may not; all that depends on the choice is only reported."""
    stored = _golden("edges")
    outputs = [_noisy(out, 0.0, np.random.default_rng(0)) for out in stored.outputs]
    clear = clear_choices(stored.outputs[step]["q_next"], stored.config.branches)
    row, branch = np.argwhere(clear != close)[0]
    outputs[step]["best"] = stored.outputs[step]["best"].copy()
    outputs[step]["best"][row, branch] = (outputs[step]["best"][row, branch] + 1) % 3
    found = _compare(precision, outputs, "edges")
    assert _failed(found) == (set() if close else {f"step{step}.out.best"})
    judged = {r.name.split(".")[2] for r in found.results if r.judged and r.name.startswith(f"step{step}.")}
    assert judged == {"h1", "h2", "wire", "q", "theta", "q_target", "best"}
    assert any(r.judged for r in found.results if r.name.startswith("step1.")) == (step == 1)

    outputs = [{**_noisy(out, 1.0, np.random.default_rng(1)), "best": out["best"]} for out in outputs]
    assert _failed(_compare(precision, outputs, "edges")) == _reference_faults(precision, stored, outputs)


def test_fp32_is_judged_as_the_reference_does() -> None:
    """Errors, updates and verdict of every array, with noise around the limits."""
    stored, start = _golden(), GoldenFile(FULL)
    rng = np.random.default_rng(7)
    outputs = [
        {n: x + 10.0 ** rng.uniform(-8, -3) * rng.standard_normal(x.shape) for n, x in stored.outputs[0].items()}
    ]
    names = {n for n in outputs[0] if n.startswith(reference.UPDATED)}
    before = {n: start[f"in.{n}"] for n in names}
    expected = {d.name: d for d in reference.compare(outputs[0], stored.outputs[0], before, before)}
    results = _compare("fp32", outputs).results
    assert len(results) == len(expected)
    for result in results:
        other = expected[result.name.removeprefix("step0.out.")]
        assert result.error == pytest.approx(other.error, rel=1e-12)
        assert (result.update or 0.0) == pytest.approx(other.update, rel=1e-12)
        exact = other.name in EXACT and other.error > 0
        beyond = other.error > reference.FP32_LIMIT or other.update > reference.FP32_UPDATE_LIMIT
        assert result.failed == (beyond or exact)
    assert 100 < sum(r.failed for r in results) < len(results) - 100


def test_the_limits_are_those_of_the_page() -> None:
    for precision, limits in reference_limits.LIMITS.items():
        mine = LIMITS[precision]
        columns = (limits.forward, limits.grad_median, limits.grad_group, limits.grad_single, limits.norms)
        columns += (limits.m, limits.v, limits.spectral, limits.params)
        assert columns == (
            *(mine.forward, mine.median, mine.group, mine.gradient, mine.norms),
            *(mine.m, mine.v, mine.spectral, mine.params),
        )
        assert mine.slots is mine.update is None
    assert LIMITS["fp32"].update == reference.FP32_UPDATE_LIMIT
    assert {LIMITS["fp32"].of(n) for n in _golden().outputs[0] if n not in EXACT} == {reference.FP32_LIMIT}
    assert {LIMITS["fp32"].of(n) for n in EXACT} == {0.0}


def test_a_decomposed_step_must_not_change_anything() -> None:
    stored = _golden()
    outputs = [{**out, "decomposition[changed arrays]": np.array(step)} for step, out in enumerate(stored.outputs)]
    assert _failed(_compare("fp32", outputs)) == {"step1.out.decomposition[changed arrays]"}


def test_a_skipped_step_must_leave_every_bit() -> None:
    """Measured against the state that it started from, in every precision."""
    stored = _golden("skip")
    outputs = [dict(out) for out in stored.outputs]
    assert _failed(_compare("tf32", outputs, "skip")) == set()
    name = "m.w_s1"
    outputs[0][name] = np.nextafter(outputs[0][name], 1.0)
    for precision in LIMITS:
        assert _failed(_compare(precision, outputs, "skip")) == {f"step0.out.{name}"}


def test_result_without_a_limit() -> None:
    reported = Result("step0.out.state.alpha_grad", 0.5, None)
    assert not reported.judged
    assert not reported.failed
    assert reported.binding == ("error", 0.5, None)
    assert Result("step0.out.best", 0.0, 0.0).ratio == 0.0
    assert Result("step0.out.best", 1.0, 0.0).ratio == np.inf


class TestMeasures:
    def test_error_is_relative_to_the_largest_reference(self) -> None:
        assert array_error(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25
        assert array_error(np.array([1e-9]), np.array([0.0])) == pytest.approx(1e-3)

    def test_relative_l2(self) -> None:
        assert relative_l2(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == pytest.approx(0.2)
        assert relative_l2(np.array([1e-9]), np.array([0.0])) == pytest.approx(1e-3)

    @pytest.mark.parametrize("measure", [array_error, relative_l2])
    @pytest.mark.parametrize(
        ("actual", "same"),
        [([np.nan, np.inf], True), ([np.nan, -np.inf], False), ([0.0, np.inf], False), ([np.nan, 1.0], False)],
    )
    def test_nan_and_infinities_must_stand_where_the_reference_has_them(
        self, measure: Callable[[Array, Array], float], actual: list[float], same: bool
    ) -> None:
        error = measure(np.array([*actual, 1.0]), np.array([np.nan, np.inf, 1.0]))
        assert error == (0.0 if same else np.inf)

    @pytest.mark.parametrize("measure", [array_error, relative_l2])
    def test_a_stray_nan_or_another_shape(self, measure: Callable[[Array, Array], float]) -> None:
        assert measure(np.array([np.nan, 1.0]), np.array([1.0, 1.0])) == np.inf
        assert measure(np.zeros((2, 1)), np.zeros(2)) == np.inf

    def test_update_of_a_stray_nan_or_another_shape(self) -> None:
        zero = np.zeros(2)
        assert update_error(zero, np.array([np.nan, 1.0]), zero, np.ones(2), 1e-6) == np.inf
        assert update_error(zero, np.ones((2, 1)), zero, np.ones(2), 1e-6) == np.inf

    def test_update_forgives_the_rounding_of_storage(self) -> None:
        before, after = np.array([1.0]), np.array([1.0 + 1e-3])
        rounded = after + 2.0**-24
        assert update_error(before, rounded, before, after, 1e-6) == 0.0
        assert update_error(before, after + 1e-6, before, after, 1e-6) == pytest.approx(1e-3, rel=0.2)

    def test_update_of_a_resting_reference(self) -> None:
        zero = np.zeros(1)
        assert update_error(zero, np.array([1e-9]), zero, zero, 1e-6) == pytest.approx(1e-3, rel=1e-3)
        assert update_error(zero, np.array([1e-9]), zero, zero, 1e-12) == pytest.approx(1e3, rel=1e-3)

    def test_clear_choices(self) -> None:
        q = np.array([[1.0, 1.005, 0.0, 3.0, 3.02], [1.0, 2.0, 1.995, -1.0, -1.0]])
        assert clear_choices(q, (3, 2)).tolist() == [[False, True], [False, False]]
