"""Signals: one consistent row per replay, no recapture, nothing inert, clear errors."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.signals import (
    GROUPS,
    HOST_SLOTS,
    MAX_OVERRIDES,
    RING_ROWS,
    ROW,
    SLOTS,
    RingFullError,
    SignalMap,
    Signals,
    bound_slot,
)

from .common import make

#: Every host-owned scalar that the auxiliary step reads, with a value other than its default.
AUX_SCALARS = {
    "w_nb": 0.3, "w_regime": 0.9, "lr.aux_trunk": 1e-3, "lr.aux_heads": 1e-3, "clip.aux_trunk": 1e-3,
    "clip.aux_heads": 1e-3, "beta1": 0.5, "beta2": 0.9, "adam_eps": 1e-3, "weight_decay": 0.1, "eps_clamp_floor": 0.01,
}  # fmt: skip


def test_64_queued_replays_see_64_learning_rates(device: Device) -> None:
    rates = [1e-4 * (i + 1) for i in range(64)]
    with make(device) as queued, make(device) as waited:
        for lr in rates:
            queued.signals["lr"] = lr
            queued.step()
        for lr in rates:
            waited.signals["lr"] = lr
            waited.step()
            waited.synchronize()
        assert queued.state_hash() == waited.state_hash()
        assert queued.graph.census().instantiations == 1


def test_more_replays_than_rows_wait_instead_of_overwriting(device: Device) -> None:
    rates = [1e-4 * (1 + i % 7) for i in range(3 * RING_ROWS + 5)]
    with make(device) as queued, make(device) as waited:
        for lr in rates:
            queued.signals["lr"] = lr
            queued.step()
        for lr in rates:
            waited.signals["lr"] = lr
            waited.step()
            waited.synchronize()
        assert queued.state_hash() == waited.state_hash()


def _train(device: Device, **signals: float) -> str:
    """Parameters after three steps, as bytes, with bounds low enough that the clamps bind."""
    with make(device, signals=signals) as engine:
        for family, bound in (("weight", 0.15), ("adam_m", 1e-4), ("adam_v", 1e-8), ("grad", 1e-3)):
            for group in ("aux_trunk", "aux_heads"):
                engine.signals.override(f"bound.{family}.{group}", bound)
        for _ in range(3):
            engine.step()
        return b"".join(engine.params[n].tobytes() for n in engine.params).hex()


@pytest.mark.parametrize("name", AUX_SCALARS)
def test_no_scalar_is_inert(device: Device, name: str) -> None:
    """Changing one scalar alone changes the parameters, without a recapture."""
    floor = {"eps_clamp_floor": 0.0} if name != "eps_clamp_floor" else {}
    assert _train(device, **floor) != _train(device, **{**floor, name: AUX_SCALARS[name]})


def test_an_override_holds_for_one_launch(device: Device) -> None:
    with make(device) as engine:
        engine.signals.override("alpha_grad", 0.25)
        engine.signals.override("bound.grad.aux_trunk", 2.0)
        engine.step()
        engine.synchronize()
        owned = engine.plan.buffer("signals").view(4 * HOST_SLOTS, (SLOTS - HOST_SLOTS,), np.float32)
        owned.write(np.zeros(owned.shape, np.float32))
        engine.step()
        state = engine.state()["signals.device"]
        assert state[393] == 0.0
        assert state[bound_slot(GROUPS.index("aux_trunk"), "grad")] == 0.0


def test_slots_are_those_of_the_specification() -> None:
    slots = SignalMap().slots
    assert slots["alpha_grad"].index == 393
    assert slots["bound.weight.trunk"].index == 136
    assert slots["bound.adam_m.curiosity"].index == 151
    assert slots["bound.adam_v.value"].index == 153
    assert slots["bound.grad.curiosity"].index == 167
    assert slots["bound.weight.aux_trunk"].index == 400
    assert slots["bound.grad.decoders"].index == 426
    indices = [s.index for s in slots.values()]
    assert len(set(indices)) == len(indices)
    assert max(indices) < SLOTS


def test_bad_writes_are_refused_and_change_nothing(device: Device) -> None:
    with make(device) as engine:
        before = engine.signals.as_dict()
        for name, value, error, message in (
            ("lr", float("nan"), ValueError, "finite"),
            ("lr", 1e39, ValueError, "finite"),
            ("lr", -1.0, ValueError, r"in \[0, inf\], got -1.0"),
            ("beta1", 1.0, ValueError, "beta1"),
            ("lr.aux_tronk", 1.0, KeyError, "did you mean lr.aux_trunk"),
            ("alpha_grad", 0.5, KeyError, "override"),
        ):
            with pytest.raises(error, match=message):
                engine.signals.update({"w_nb": 0.5, name: value})
        with pytest.raises(KeyError, match="owned by the host"):
            engine.signals.override("w_nb", 1.0)
        with pytest.raises(KeyError, match="telemetry"):
            engine.signals["alpha_grad"]
        assert engine.signals.as_dict() == before


class Snapshot:
    """Signals whose copies are made at once; without a device."""

    def __init__(self, finished: list[int] | None = None, idle: bool = False, slots: SignalMap | None = None) -> None:
        self.rows = np.zeros((4, ROW), np.float32)
        self.values = np.zeros(SLOTS, np.float32)
        self.copies: list[tuple[int, int]] = []
        counted = [100] if finished is None else finished
        self.signals = Signals(
            slots or SignalMap(), self.rows, self._send, finished=lambda: counted[0], idle=lambda: idle
        )

    def _send(self, row: int, first: int, count: int, slot: int) -> None:
        self.copies.append((row, count))
        self.values[slot : slot + count] = self.rows[row, first : first + count]

    def __getitem__(self, name: str) -> float:
        return float(self.values[self.signals.map.slot(name).index])


def test_what_has_not_changed_is_not_sent() -> None:
    device = Snapshot()
    device.signals.publish(0)
    assert device.copies == [(0, HOST_SLOTS)]
    assert (device["w_nb"], device["lr.trunk"]) == (1.0, np.float32(3e-4))
    device.signals.publish(1)
    assert len(device.copies) == 1
    device.signals["w_nb"] = 0.5
    device.signals["w_pred"] = 0.25
    device.signals.publish(6)
    assert device.copies[1:] == [(2, HOST_SLOTS)]
    assert (device["w_nb"], device["w_pred"]) == (0.5, 0.25)
    device.signals.update({"w_nb": 0.5, "lr": 3e-4})  # as they are
    device.signals.publish(7)
    assert len(device.copies) == 2


def test_publish_waits_for_the_replay_that_reads_the_row() -> None:
    finished = [0]
    signals = Snapshot(finished).signals
    for replay in range(4):
        signals.publish(replay)
    thread = threading.Thread(target=signals.publish, args=(4,))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    finished[0] = 1
    thread.join(5)
    assert not thread.is_alive()


def test_an_idle_device_that_never_finished_the_replay_is_an_error() -> None:
    signals = Snapshot([0], idle=True).signals
    with pytest.raises(RingFullError, match="0 replays, 1 expected"):
        signals.publish(4)


def test_replays_are_counted_anew_after_a_restart(device: Device) -> None:
    """Else rows would be overwritten whose copies are still to be made."""
    finished = [100]
    signals = Snapshot(finished, idle=True).signals
    signals.publish(100)
    finished[0] = 0
    signals.restart(0)
    with pytest.raises(RingFullError):
        signals.publish(4)
    with make(device) as engine:
        state = engine.state()
        engine.run(2 * RING_ROWS)
        engine.load_state(state)
        assert engine.signals._known_finished == 0


def test_overrides_are_sent_once() -> None:
    device = Snapshot()
    device.signals.publish(0)
    device.signals.override("alpha_grad", 0.5)
    device.signals.override("alpha_grad", 0.75)
    device.signals.override("gate_open", 1.0)
    device.signals.publish(1)
    assert device.copies[1:] == [(1, 1), (1, 1)]
    assert (device["alpha_grad"], device["gate_open"]) == (0.75, 1.0)
    device.signals.publish(2)
    assert len(device.copies) == 3
    assert all(s.index < HOST_SLOTS for s in SignalMap().slots.values() if not s.device_owned)


def test_more_overrides_than_a_row_holds_are_refused() -> None:
    names = [s.name for s in SignalMap({g: f"g{g}" for g in range(16)}).slots.values() if s.device_owned]
    assert len(names) > MAX_OVERRIDES
    device = Snapshot(slots=SignalMap({g: f"g{g}" for g in range(16)}))
    wide = device.signals
    for name in names[:MAX_OVERRIDES]:
        wide.override(name, 1.0)
    with pytest.raises(ValueError, match="at most 63"):
        wide.override(names[MAX_OVERRIDES], 1.0)
    wide.override(names[0], 2.0)  # one of those already pending
    wide.publish(0)
    assert len(device.copies) == 1 + MAX_OVERRIDES
    wide.override(names[MAX_OVERRIDES], 1.0)
