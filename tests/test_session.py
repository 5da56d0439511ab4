"""The training session as a library: the loop, its curves, validation, checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fxengine.checkpoint import Checkpoint
from fxengine.config import StepConfig
from fxengine.data import Dataset, Normalizer, demo_bars, make_dataset
from fxengine.driver import Device
from fxengine.engine import Engine
from fxengine.health import COMPONENTS, GRADIENT_GROUPS, MERGED, Health
from fxengine.models import make_model
from fxengine.session import Progress, TrainingSession, TrainResult, TrainSettings
from fxengine.telemetry import RING_ROWS


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return make_dataset(demo_bars()[:900], lookahead=2, regimes=3)


def _session(dataset: Dataset, device: Device, **settings: object) -> TrainingSession:
    return TrainingSession(dataset, TrainSettings(**{"batch": 8, "steps": 20, **settings}), device=device)  # type: ignore[arg-type]


def test_no_report_is_lost(dataset: Dataset, device: Device) -> None:
    """More steps than the ring has rows: every step is in the curves and is shown once, in order."""
    steps = 2 * RING_ROWS + 7
    seen: list[int] = []
    with _session(dataset, device, steps=steps, batch=2, validate_every=1000) as session:
        result = session.run(lambda progress: seen.extend(r.replay for r in progress.reports))
        assert seen == list(range(1, steps + 1))
        assert list(session.curves["step"]) == seen
        assert all(len(curve) == steps for curve in session.curves.values())
        assert session.curves["lr"][0] == session.learning_rate(0)
        assert session.engine.graph.instantiations == 1
    assert result.steps == steps
    assert not result.interrupted


def test_it_learns_the_regime(dataset: Dataset, device: Device) -> None:
    with _session(dataset, device, steps=80, batch=32) as session:
        result = session.run()
    assert result.loss_last < 0.8 * result.loss_first
    assert result.validation.regime_accuracy > result.regime_baseline + 0.1
    assert result.skipped == 0
    assert result.steps_per_s > 0.0


def test_losses_are_those_of_the_telemetry(dataset: Dataset, device: Device) -> None:
    with _session(dataset, device, signals={"w_nb": 0.25, "w_regime": 2.0}) as session:
        result = session.run()
        curves = {name: np.asarray(curve) for name, curve in session.curves.items()}
    np.testing.assert_array_equal(curves["loss"], 0.25 * curves["L_nb"] + 2.0 * curves["L_regime"])
    assert result.loss_first == curves["loss"][0]
    assert result.loss_last == curves["loss"][-1]


def test_the_learning_rate_reaches_the_device(dataset: Dataset, device: Device) -> None:
    """With a learning rate that is next to nothing the parameters stand still; the schedule drives them otherwise."""
    with _session(dataset, device, steps=2, lr=1e-30) as resting, _session(dataset, device, steps=2, lr=1e-2) as moving:
        start = resting.engine.params["w_a1"]
        resting.run()
        moving.run()
        np.testing.assert_array_equal(resting.engine.params["w_a1"], start)
        assert np.abs(moving.engine.params["w_a1"] - start).max() > 1e-3


def test_schedule(dataset: Dataset) -> None:
    with TrainingSession(dataset, TrainSettings(steps=200, batch=2, lr=1.0, lr_end=0.1), device="sim") as session:
        rates = [session.learning_rate(n) for n in range(200)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert int(np.argmax(rates)) == 9, "the warm-up takes 5 % of the steps"
    assert rates[-1] == pytest.approx(0.1)
    assert (np.diff(rates[9:]) < 0.0).all()


def test_same_seed_same_bits(dataset: Dataset, device: Device) -> None:
    hashes = []
    for seed in (3, 3, 4):
        with _session(dataset, device, seed=seed) as session:
            session.run()
            hashes.append(session.engine.state_hash())
    assert hashes[0] == hashes[1] != hashes[2]


def test_watching_and_validating_change_nothing(dataset: Dataset, device: Device) -> None:
    hashes = []
    for every in (3, 1000):
        with _session(dataset, device, validate_every=every) as session:
            session.run((lambda progress: None) if every == 3 else None)
            assert len(session.validations) == (7 if every == 3 else 1)
            hashes.append(session.engine.state_hash())
    assert hashes[0] == hashes[1]


def test_validation_in_chunks_equals_validation_at_once(
    dataset: Dataset, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _session(dataset, device, steps=5) as session:
        session.run()
        whole = session.validate()
        monkeypatch.setattr(session, "model", dataclasses.replace(session.model, chunk=50))
        chunked = session.validate()
        part = session.validate(10)
    assert whole.rows == chunked.rows == len(dataset.validation)
    assert part.rows == 10
    for name in ("loss", "next_bar_loss", "regime_loss", "next_bar_accuracy", "regime_accuracy"):
        assert getattr(chunked, name) == pytest.approx(getattr(whole, name), rel=1e-5), name
    assert whole.loss == pytest.approx(whole.next_bar_loss + 0.5 * whole.regime_loss)


def test_accuracy_is_the_share_of_right_rows(dataset: Dataset, device: Device) -> None:
    """The same from the parameters with NumPy."""
    with _session(dataset, device, steps=30, batch=32) as session:
        session.run()
        validation = session.validate()
        p = {name: session.engine.params[name].astype(np.float64) for name in session.engine.params}
    part = dataset.validation

    def layer(x: np.ndarray, name: str) -> np.ndarray:
        return x @ p[f"w_{name}"].T + p[f"b_{name}"]

    def elu(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0)))

    x = layer(elu(layer(elu(layer(elu(layer(part.states.astype(np.float64), "s1")), "a1")), "a2")), "a3")
    regime = layer(elu(layer(x, "rg1")), "rg2").argmax(axis=1)
    next_bar = layer(elu(layer(x, "nb1")), "nb2").argmax(axis=1)
    valid = part.next_bar >= 0
    assert validation.regime_accuracy == pytest.approx(np.mean(regime == part.regime), abs=1e-6)
    assert validation.next_bar_accuracy == pytest.approx(np.mean((next_bar == part.next_bar)[valid]), abs=1e-6)


def test_stop_ends_the_run_and_it_can_go_on(dataset: Dataset, device: Device) -> None:
    with _session(dataset, device, steps=12, validate_every=1) as session:

        def watch(progress: Progress) -> None:
            if progress.validation is not None and progress.step == 5:
                session.stop()

        first = session.run(watch)
        assert (first.steps, first.interrupted) == (5, True)
        second = session.run()
        assert (second.steps, second.interrupted) == (12, False)
        stopped = session.engine.state_hash()
    with _session(dataset, device, steps=12) as session:
        session.run()
        assert session.engine.state_hash() == stopped


def test_a_run_stopped_before_its_first_step(dataset: Dataset, device: Device) -> None:
    with _session(dataset, device) as session:
        session.stop()
        result = session.run()
    assert (result.steps, result.interrupted) == (0, True)
    assert math.isnan(result.loss_first)
    assert result.steps_per_s == 0.0


def test_checkpoint_holds_what_new_bars_need(dataset: Dataset, device: Device, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    with _session(dataset, device, steps=3) as session:
        session.run()
        session.save(path)
        state = session.engine.state()
    checkpoint = Checkpoint.load(path)
    for name, array in state.items():
        np.testing.assert_array_equal(checkpoint.state[name], array, err_msg=name)
    prefix = "normalizer."
    normalizer = Normalizer.from_dict(
        {k[len(prefix) :]: v for k, v in checkpoint.extra.items() if k.startswith(prefix)}
    )
    np.testing.assert_array_equal(normalizer.mean, dataset.normalizer.mean)
    np.testing.assert_array_equal(checkpoint.extra["regime_edges"], dataset.edges)
    assert checkpoint.extra["lookahead"] == [2]


def test_the_standard_error_is_that_of_a_share(dataset: Dataset) -> None:
    with TrainingSession(dataset, TrainSettings(steps=2, batch=2), device="sim") as session:
        result = session.run()
    p = result.validation.next_bar_accuracy
    assert result.next_bar_error == pytest.approx(math.sqrt(p * (1 - p) / result.next_bar_rows))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": -1}, "steps is -1, expected at least 0"),
        ({"batch": -1}, "batch is -1, expected at least 0"),
        ({"model": "ppo"}, "model is 'ppo', expected aux or full"),
        ({"model": "full", "sizes": "huge"}, "sizes is 'huge', expected auto or spec or small"),
        ({"model": "full", "gamma": 1.0}, "gamma is 1.0"),
        ({"health_every": 5}, "health_every is a setting of the full model"),
        ({"sizes": "small"}, "sizes is a setting of the full model"),
        ({"lr": 0.0}, "lr is 0.0, expected a positive number"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr_end": 1.5}, "lr_end is 1.5"),
        ({"signals": {"w_nbb": 1.0}}, "no signal 'w_nbb'; did you mean w_nb"),
        ({"signals": {"lr": 1.0}}, "follows the schedule"),
        ({"signals": {"lr.aux_heads": 1.0}}, "follows the schedule"),
        ({"signals": {"alpha_grad": 1.0}}, "owned by the device"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings(**settings)  # type: ignore[arg-type]


# -- the full model ----------------------------------------------------------------------------------------------

FULL = {"model": "full", "sizes": "small"}
TINY = {
    "h1": 64, "h2": 64, "value_h": 32, "adv_h": 32, "iqn_quantiles": 8, "iqn_target_quantiles": 8, "iqn_cos": 16,
    "iqn_h": 32,
}  # fmt: skip
WARMUP = 16


@pytest.fixture(scope="module")
def full(device: Device) -> Iterator[tuple[TrainingSession, TrainResult]]:
    """200 steps of the full model in tiny sizes, with a short warm-up of the readiness."""
    settings = TrainSettings(
        **FULL,  # type: ignore[arg-type]
        steps=200,
        batch=32,
        validate_every=40,
        health_every=10,
        signals={"readiness_warmup": WARMUP, "readiness_beta": 0.03},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxengine.models.SMALL", TINY)
        session = TrainingSession(make_dataset(demo_bars()), settings, device=device)
    with session:
        yield session, session.run()


def _curves(session: TrainingSession) -> dict[str, np.ndarray]:
    return {name: np.asarray(curve) for name, curve in session.curves.items()}


def test_every_value_of_the_full_model_is_finite(full: tuple[TrainingSession, TrainResult]) -> None:
    session, result = full
    curves = _curves(session)
    losses = {name for name in curves if name.startswith("L_")}
    assert losses == {
        "L_c51", "L_cql", "L_distill", "L_iqn", "L_ens", "L_rec", "L_pred", "L_nb", "L_regime", "L_iql_high",
        "L_iql_low", "L_curiosity",
    }  # fmt: skip
    for name, curve in curves.items():
        assert len(curve) == 200 and np.isfinite(curve).all(), name
    assert (result.steps, result.skipped) == (200, 0)
    assert all(np.isfinite(h.decomposition).all() for h in session.health)
    weights = {"w_c51": "L_c51", "w_cql": "L_cql", "w_distill": "L_distill", "w_nb": "L_nb", "w_regime": "L_regime"}
    total = sum(session.engine.signals[w] * curves[loss] for w, loss in weights.items())
    np.testing.assert_allclose(curves["loss"], total, rtol=1e-12)


def test_the_full_model_learns(full: tuple[TrainingSession, TrainResult]) -> None:
    session, result = full
    assert result.full is not None
    curves = _curves(session)
    assert curves["accuracy_regime"][-20:].mean() > curves["accuracy_regime"][:20].mean() + 0.2
    assert result.validation.regime_accuracy > result.regime_baseline + 0.15
    assert result.full.loss_c51_first == pytest.approx(curves["L_c51"][:10].mean())
    assert result.full.loss_c51_last == pytest.approx(curves["L_c51"][-10:].mean())
    assert result.full.loss_c51_last < result.full.loss_c51_first - 0.02
    judged = [v.c51_loss for v in session.validations]
    assert len(judged) == 5 and judged[-1] is not None and judged[0] is not None and judged[-1] < judged[0]
    for name in ("L_rec", "L_pred", "L_curiosity", "L_iqn"):
        assert curves[name][-20:].mean() < curves[name][:20].mean(), name


def test_the_gate_does_as_its_inputs_say(full: tuple[TrainingSession, TrainResult]) -> None:
    """Trigger and alpha of every step, by the formulas, from the accuracies and averages reported."""
    session, result = full
    curves = _curves(session)
    signal = session.engine.signals
    short, opened, alpha = float("nan"), 0.0, 0.0
    for step, accuracy in enumerate(curves["accuracy_nb"]):
        short = accuracy if step == 0 else short + signal["acc_beta_short"] * (accuracy - short)
        assert curves["aux_acc_short"][step] == pytest.approx(short, abs=1e-5)
        edges = (0.5 + signal["gate_open_margin"], 0.5 + signal["gate_close_margin"])
        opened = 1.0 if short > edges[0] else 0.0 if short < edges[1] else opened
        if min(abs(short - edge) for edge in edges) > 1e-5:
            assert curves["gate_open"][step] == opened, step
        opened = curves["gate_open"][step]
        certainty = (short - 0.5 - signal["gate_margin"]) / math.sqrt(curves["aux_acc_var"][step] + 1e-4)
        raw = opened / (1.0 + math.exp(-signal["gate_gain"] * certainty)) * (1.0 - curves["disagree_ema"][step])
        alpha += signal["alpha_beta"] * (raw - alpha)
        assert curves["alpha_grad"][step] == pytest.approx(alpha, abs=1e-4)
    assert result.full is not None
    assert 0.0 < result.full.gate_open_share < 1.0, "it has been open and shut"
    assert result.full.gate_open_share == pytest.approx(curves["gate_open"].mean())
    assert result.full.gate_changes == np.count_nonzero(np.diff(curves["gate_open"], prepend=0.0)) >= 1


def test_the_share_of_iqn_rises_with_its_readiness(full: tuple[TrainingSession, TrainResult]) -> None:
    session, result = full
    readiness = _curves(session)["iqn_readiness"]
    assert (readiness[:WARMUP] == 0.0).all() and readiness[-1] > 0.02
    steps = [h.step for h in session.health]
    assert steps == [1, *range(10, 201, 10)]
    shares = [h.shares["iqn"] for h in session.health]
    for health, share in zip(session.health, shares, strict=True):
        # A step reads the readiness that the step before it has left.
        assert (share > 0.0) == (health.step > 1 and readiness[health.step - 2] > 0.0), health.step
    assert np.mean(shares[-5:]) > np.mean(shares[3:8]) > shares[0] == 0.0
    assert result.full is not None
    assert (result.full.iqn_share_first, result.full.iqn_share_last) == (shares[0], shares[-1])
    assert result.full.iqn_readiness == readiness[-1]


def test_health_holds_what_the_step_reported(full: tuple[TrainingSession, TrainResult]) -> None:
    session, _ = full
    health, curves = session.health[-1], _curves(session)
    assert health.decomposition.shape == (len(COMPONENTS), len(GRADIENT_GROUPS))
    trunk = dict(zip(COMPONENTS, health.decomposition[:, 2].tolist(), strict=True))
    assert all(trunk[name] > 0.0 for name in COMPONENTS)
    assert trunk["cql_sx"] == pytest.approx(0.1 * trunk["cql"], rel=1e-4)
    assert sum(trunk[name] for name in MERGED) >= curves["grad_norm.trunk"][-1] * (1.0 - 1e-4), "triangle inequality"
    assert sum(health.shares.values()) == pytest.approx(1.0)
    only_heads = health.decomposition[[COMPONENTS.index(name) for name in ("iqn", "ens", "rec", "pred")], :2]
    assert (only_heads == 0.0).all(), "these losses do not reach the branches"
    for name, value in {**health.gate, **health.readiness}.items():
        assert value == curves[name][health.step - 1], name
    assert set(health.bounds) == {"weight", "adam_m", "adam_v", "grad"}
    assert all(len(values) == 11 and min(values.values()) > 0.0 for values in health.bounds.values())
    text = str(health)
    assert all(word in text for word in (*GRADIENT_GROUPS, "gate ", "readiness", "bounds", "health    200"))
    values = health.as_dict()
    assert set(values["grad_trunk"]) == set(COMPONENTS)
    assert values["grad_split_bwd"]["c51"] == health.decomposition[2, 0]
    assert values["grad_split_aux"]["c51"] == health.decomposition[2, 1]


def test_a_step_that_was_not_decomposed_has_no_health(full: tuple[TrainingSession, TrainResult]) -> None:
    session, _ = full
    report = session.engine.telemetry()
    assert report is not None
    plain = dataclasses.replace(report, readings={**report.readings, "decomposed": 0.0})
    with pytest.raises(ValueError, match="step 200 was not decomposed"):
        Health.of(plain)


def test_the_checkpoint_of_the_full_model(full: tuple[TrainingSession, TrainResult], tmp_path: Path) -> None:
    session, _ = full
    path = tmp_path / "checkpoint.safetensors"
    session.save(path)
    extra = Checkpoint.load(path).extra
    assert session.model.transitions is not None
    assert extra["reward_scale"] == [session.model.transitions.scale]
    assert "order_flow.mean" in extra and "normalizer.mean" in extra
    with Engine.load(path, device=session.engine.device) as engine:
        assert engine.state_hash() == session.engine.state_hash()


def test_health_and_validation_of_the_full_model_change_nothing(dataset: Dataset, device: Device) -> None:
    hashes = []
    for every in (2, 1000):
        settings = {"steps": 7, "batch": 4, "health_every": every, "validate_every": every, **FULL}
        with TrainingSession(dataset, TrainSettings(**settings), device=device) as session:  # type: ignore[arg-type]
            session.run()
            assert [h.step for h in session.health] == ([1, 2, 4, 6, 7] if every == 2 else [1, 7])
            hashes.append(session.engine.state_hash())
    assert hashes[0] == hashes[1]


def test_sizes_follow_the_device(dataset: Dataset) -> None:
    def config(kind: str, **settings: object) -> StepConfig:
        return make_model(dataset, TrainSettings(model="full", **settings), kind).config  # type: ignore[arg-type]

    spec = StepConfig(regimes=3)
    assert config("cuda") == config("sim", sizes="spec") == spec
    small = config("sim")
    assert small == config("cuda", sizes="small")
    assert (small.batch, small.h1, small.iqn_quantiles) == (64, 128, 16)
    absent = [f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) and not getattr(small, f.name)]
    assert absent == [], "every component is still there"
    assert config("sim", batch=8).batch == 8
    assert TrainSettings(model="full").step_count("sim") == 200
    assert TrainSettings(model="full").step_count("cuda") == 2000
