"""The training session as a library: the loop, its curves, validation, checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fxengine.checkpoint import Checkpoint
from fxengine.data import Dataset, Normalizer, demo_bars, make_dataset
from fxengine.driver import Device
from fxengine.session import Progress, TrainingSession, TrainSettings
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
        monkeypatch.setattr("fxengine.session._CHUNK_ROWS", 50)
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
        ({"batch": 0}, "batch is 0, expected at least 1"),
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
