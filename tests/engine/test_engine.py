"""The engine: determinism, guard, checkpoints, inputs, evaluation, lifetime."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fxengine import Engine, StepConfig
from fxengine.config import ConfigError
from fxengine.driver import Device
from fxengine.driver.errors import ClosedError
from fxengine.ops.gather import reference_indices

from .common import CONFIG, make, rows


def run(engine: Engine, steps: int, *, captured: bool = True) -> str:
    for _ in range(steps):
        engine.step(captured=captured)
    return engine.state_hash()


def test_graph_uncaptured_and_again_give_the_same_bits(device: Device) -> None:
    with make(device) as a, make(device) as b, make(device) as c:
        assert run(a, 6) == run(b, 6) == run(c, 6, captured=False)
    with make(device, seed=1) as d:
        assert run(d, 6) != run(make(device), 6)


def test_run_queues_steps(device: Device) -> None:
    with make(device) as one, make(device) as other:
        one.run(9)
        one.synchronize()
        assert one.state_hash() == run(other, 9)


@pytest.mark.parametrize("made", [True, False], ids=["after", "before"])
def test_an_interrupt_around_a_launch_loses_no_count(
    device: Device, monkeypatch: pytest.MonkeyPatch, made: bool
) -> None:
    """Ctrl-C may come when the launch is made and not counted yet; signals must still reach the steps they are for."""
    with make(device) as one, make(device) as other:
        one.run(3)
        plain = one._plain
        replay = plain.replay

        def interrupted() -> None:
            if made:
                replay()
            raise KeyboardInterrupt

        monkeypatch.setattr(one, "_plain", replace(plain, replay=interrupted))
        with pytest.raises(KeyboardInterrupt):
            one.step()
        monkeypatch.setattr(one, "_plain", plain)
        other.run(4 if made else 3)
        for engine in (one, other):
            engine.signals["lr"] = 1e-2
            engine.run(2)
            engine.synchronize()
        assert one.state_hash() == other.state_hash()


def test_training_lowers_the_loss(device: Device) -> None:
    with make(device, signals={"lr": 3e-3}) as engine:
        losses = []
        for _ in range(60):
            engine.step()
            engine.synchronize()
            report = engine.telemetry()
            assert report is not None
            losses.append(report["L_nb"] + 0.5 * report["L_regime"])
        assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


def test_batches_are_gathered_by_the_documented_indices(device: Device) -> None:
    data = rows(100)
    with make(device, data=data, seed=7) as engine:
        for replay in range(3):
            engine.step()
            index = reference_indices(7, replay, 1, CONFIG.batch, 100)
            np.testing.assert_array_equal(engine.output("state"), data["state"][index])
            np.testing.assert_array_equal(engine.output("nb_label"), data["nb_label"][index])


def test_written_batches_equal_gathered_ones(device: Device) -> None:
    data = rows(100)
    with make(device, data=data) as gathered, make(device, data=None) as written:
        for replay in range(5):
            index = reference_indices(0, replay, 1, CONFIG.batch, 100)
            gathered.step()
            written.write(**{name: array[index] for name, array in data.items()})
            written.step()
        for name in gathered.params:
            assert gathered.params[name].tobytes() == written.params[name].tobytes()


def test_telemetry_reports_every_replay_in_order(device: Device) -> None:
    with make(device) as engine:
        assert engine.telemetry() is None
        run(engine, 10)
        reports = engine.telemetry_since(4)
        assert [r.replay for r in reports] == [5, 6, 7, 8, 9, 10]
        latest = engine.telemetry()
        assert latest == reports[-1]
        assert (latest.step, latest.skipped, latest.nonfinite_groups) == (10, 0, ())
        assert set(latest) >= {"L_nb", "L_regime", "accuracy_nb", "grad_norm.aux_trunk", "grad_norm.aux_heads"}


@pytest.mark.parametrize(
    ("where", "poison"),
    [(where, poison) for where in ("state", "w_a2") for poison in (np.nan, np.inf, -np.inf)]
    + [("b_nb2", np.nan), ("b_nb2", np.inf)],  # a logit of -inf is a probability of 0: its gradient is finite
)
def test_a_nonfinite_gradient_skips_the_update_bit_for_bit(device: Device, where: str, poison: float) -> None:
    with make(device, data=None) as engine:
        batch = rows(CONFIG.batch)
        engine.write(**batch)
        engine.step()
        good = engine.params[where] if where != "state" else None
        if where == "state":
            batch["state"][3, 2] = poison
            batch["nb_label"][3] = 1
            engine.write(**batch)
        else:
            bad = engine.params[where]
            bad.reshape(-1)[1] = poison
            engine.params[where] = bad
        before = engine.state()
        engine.step()
        after = engine.state()
        changed = [n for n in before if before[n].tobytes() != after[n].tobytes()]
        assert changed == ["counters"]
        report = engine.telemetry()
        assert report is not None
        assert (report.replay, report.step, report.skipped) == (2, 1, 1)
        assert report.nonfinite_groups
        if good is not None:
            engine.params[where] = good
        engine.write(**rows(CONFIG.batch))
        engine.step()
        engine.synchronize()
        report = engine.telemetry()
        assert report is not None
        assert (report.step, report.skipped, report.nonfinite_groups) == (2, 1, ())
        assert np.isfinite(engine.params["w_a2"]).all()


def test_a_resumed_run_has_the_same_bits(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    with make(device) as engine:
        engine.signals["lr"] = 2e-3
        run(engine, 5)
        engine.save(path, extra={"mean": np.arange(3.0)})
        straight = run(engine, 5)
    with Engine.load(path, device=device, data=rows(100)) as resumed:
        assert resumed.config == CONFIG
        assert resumed.telemetry() is None, "the replays so far were another engine's"
        assert run(resumed, 5) == straight


def test_checkpoints_that_do_not_fit_are_refused_whole(device: Device, tmp_path: Path) -> None:
    with make(device) as engine:
        state = engine.state()
        before = engine.state_hash()
        state["param.w_a1"] = state["param.w_a1"][:1] + 1
        del state["m.w_a2"]
        with pytest.raises(ValueError, match=r"m\.w_a2 is missing; param\.w_a1 is float32 \(1, 20\), expected"):
            engine.load_state(state)
        assert engine.state_hash() == before
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Engine.load(tmp_path / "text", device=device)


def test_evaluation_sees_the_present_parameters_and_changes_nothing(device: Device) -> None:
    data = rows(77, seed=3)
    with make(device) as engine:
        run(engine, 2)
        before = engine.state_hash()
        first = engine.evaluate(data)
        assert engine.state_hash() == before
        again = engine.evaluate(data)
        assert first == again
        run(engine, 5)
        assert engine.evaluate(data) != first
        assert engine.graph.census().instantiations == 1
        with pytest.raises(ValueError, match="equally many rows"):
            engine.evaluate({**data, "nb_label": data["nb_label"][:5]})


def test_guard_words_stay_intact(device: Device) -> None:
    with make(device, guard=True) as engine:
        run(engine, 3)
        engine.check_guards()


def test_inputs_are_checked_and_named(device: Device) -> None:
    with make(device, data=None) as engine:
        with pytest.raises(ValueError, match=r"'state' is float32 \(24, 10\), got float64 \(24, 10\)"):
            engine.write(state=np.zeros((24, 10)))
        with pytest.raises(KeyError, match="no input 'price'"):
            engine.write(price=np.zeros(3))
        with pytest.raises(ValueError, match=r"'w_a1' is float32 \(16, 20\)"):
            engine.params["w_a1"] = np.zeros(3, np.float32)
    with make(device) as engine, pytest.raises(ValueError, match="device-resident"):
        engine.write(state=np.zeros((24, 10), np.float32))
    with pytest.raises(ValueError, match="precision must be one of fp32, tf32, bf16, got 'fp8'"):
        make(device, precision="fp8")


def test_configurations_are_checked(device: Device) -> None:
    with pytest.raises(ConfigError, match="batch = 0"):
        StepConfig(batch=0)
    with pytest.raises(ConfigError, match="divisor of state = 48"):
        StepConfig(tokens=5)
    with pytest.raises(ConfigError, match="unknown configuration fields"):
        StepConfig.from_json('{"batches": 3}')
    assert StepConfig.from_json(CONFIG.to_json()) == CONFIG


def test_a_closed_engine_says_so(device: Device) -> None:
    engine = make(device)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.step()


def test_import_is_light_and_silent() -> None:
    """No driver call, nothing heavy: neither bindings nor pandas nor NumPy are loaded by `import fxengine`."""
    code = (
        "import sys, fxengine; "
        "heavy = {'numpy', 'cuda', 'cuda.bindings', 'pandas', 'safetensors', 'matplotlib', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
