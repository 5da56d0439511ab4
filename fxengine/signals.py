"""Named float32 signals: what the host may change between replays without recapture, and what the device owns.

Every kernel reads signals from a snapshot on the device. Before a launch `Signals.publish` writes what the host has
changed since the last one to a row of a ring of pinned memory, and enqueues its copy to the snapshot on the stream of
the replays: a value set before a launch is what that launch sees, no replay still in flight ever sees it, and a launch
before which nothing changed copies nothing. Device-owned slots (gate and readiness state, oracle bounds) live in the
same snapshot; the host changes one only through `Signals.override`, applied at the next launch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxengine.waiting import wait_for

#: Float32 slots of the device snapshot.
SLOTS = 512
#: Slots of the host, the first ones of the snapshot.
HOST_SLOTS = 128
#: Device-owned slots that one launch can override.
MAX_OVERRIDES = 63
#: Floats of a row: the host's slots, the values of overrides, one unused.
ROW = HOST_SLOTS + MAX_OVERRIDES + 1
#: Rows of the ring: so many replays may be queued before `step()` waits for the oldest.
RING_ROWS = 64
#: Most parameter groups a step can have (slots are reserved for so many).
MAX_GROUPS = 16

#: Parameter groups of the specified step, in the order of their index.
GROUPS = (
    "trunk", "value", "branches", "iqn", "iql_high", "iql_low", "attn", "curiosity", "aux_trunk", "aux_heads",
    "decoders",
)  # fmt: skip

#: Families of the param-group oracles, in the order of their slots.
BOUND_FAMILIES = ("weight", "adam_m", "adam_v", "grad")

_INF = math.inf
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
# name: (slot, default, lowest, highest)
_HOST: dict[str, tuple[int, float, float, float]] = {
    "w_c51": (0, 1.0, 0.0, _INF),
    "w_cql": (1, 0.1, 0.0, _INF),
    "w_distill": (2, 0.05, 0.0, _INF),
    "w_iqn": (3, 1.0, 0.0, _INF),
    "w_ens": (4, 0.2, 0.0, _INF),
    "w_rec": (5, 0.1, 0.0, _INF),
    "w_pred": (6, 0.1, 0.0, _INF),
    "w_nb": (7, 1.0, 0.0, _INF),
    "w_regime": (8, 0.5, 0.0, _INF),
    "iql_tau_high": (9, 0.9, 0.0, 1.0),
    "iql_tau_low": (10, 0.1, 0.0, 1.0),
    "w_curiosity": (11, 0.01, 0.0, _INF),
    "curiosity_cap": (12, 1.0, 0.0, _INF),
    "polyak_tau": (13, 0.005, 0.0, 1.0),
    "sn_max": (14, 3.0, 0.0, _INF),
    "beta1": (15, 0.9, 0.0, 0.9999999),
    "beta2": (16, 0.999, 0.0, 0.9999999),
    "adam_eps": (17, 1e-8, 0.0, _INF),
    "weight_decay": (18, 0.0, 0.0, _INF),
    "acc_beta_short": (19, 0.1, 0.0, 1.0),
    "acc_beta_long": (20, 0.01, 0.0, 1.0),
    "gate_margin": (21, 0.02, -1.0, 1.0),
    "gate_gain": (22, 2.0, 0.0, _INF),
    "gate_open_margin": (23, 0.03, -1.0, 1.0),
    "gate_close_margin": (24, 0.01, -1.0, 1.0),
    "alpha_beta": (25, 0.05, 0.0, 1.0),
    "disagree_beta": (26, 0.05, 0.0, 1.0),
    "readiness_beta": (27, 0.01, 0.0, 1.0),
    "readiness_warmup": (28, 64.0, 0.0, _INF),
    "oracle_headroom": (29, 4.0, 0.0, _INF),
    "oracle_beta": (30, 0.05, 0.0, 1.0),
    "eps_clamp_floor": (31, 1.0, 0.0, _INF),
}
# Parts that a step may add: {part: {name: (slot, default, lowest, highest)}}.
_PARTS: dict[str, dict[str, tuple[int, float, float, float]]] = {
    "policy": {
        "epsilon": (64, 0.05, 0.0, 1.0),
        "temperature": (65, 1.0, 1e-6, _INF),
        "risk": (66, 0.0, -1.0, 1.0),
    },
    "replay": {
        "gamma": (67, 0.99, 0.0, 1.0),
        "priority_alpha": (68, 0.5, 0.0, 1.0),
        "priority_beta": (69, 0.4, 0.0, 1.0),
        "priority_eps": (70, 1e-6, 0.0, _INF),
    },
    "market": {
        "market_fee": (72, 0.0, 0.0, 1.0),
        "market_spread": (73, 0.0, 0.0, 1.0),
        "market_urgency_cost": (74, 0.0, 0.0, 1.0),
    },
}
#: Names of all of them: the specified step has none.
OPTIONAL = frozenset(name for part in _PARTS.values() for name in part)
_PER_GROUP = {"lr": (32, 3e-4), "clip": (48, 1.0)}
_STATE = {
    "aux_acc_short": 384, "aux_acc_long": 385, "aux_acc_var": 386, "disagree_ema": 387, "gate_open": 388,
    "gate_seen": 389, "alpha_grad": 393, "iqn_seen": 394, "iqn_loss_ema": 395, "iqn_loss_ref": 396,
    "iqn_readiness": 397,
}  # fmt: skip


def bound_slot(group: int, family: str) -> int:
    """Slot of an oracle bound: 136 + 8·family + group for the first eight groups, 400 + 8·family + group − 8 after."""
    f = BOUND_FAMILIES.index(family)
    return 136 + 8 * f + group if group < 8 else 400 + 8 * f + (group - 8)


@dataclass(frozen=True)
class Slot:
    """One signal. `low` and `high` bound what the host may write; device-owned slots start at 0."""

    name: str
    index: int
    default: float
    low: float
    high: float
    device_owned: bool


class SignalMap:
    """Which name has which slot. Slots of the specified step are fixed; groups of a user's network get theirs by index.

    Args:
        groups: group name by index (0..15). Defaults to the groups of the specified step.
    """

    def __init__(self, groups: Mapping[int, str] | None = None) -> None:
        self.groups = dict(enumerate(GROUPS)) if groups is None else dict(groups)
        if not all(0 <= g < MAX_GROUPS for g in self.groups) or len(set(self.groups.values())) != len(self.groups):
            raise ValueError(f"group indices must be in 0..{MAX_GROUPS - 1} and names distinct, got {self.groups}")
        slots = [Slot(name, *spec, device_owned=False) for name, spec in _HOST.items()]
        for g, group in sorted(self.groups.items()):
            for prefix, (base, default) in _PER_GROUP.items():
                slots.append(Slot(f"{prefix}.{group}", base + g, default, 0.0, _INF, device_owned=False))
            for family in BOUND_FAMILIES:
                slots.append(Slot(f"bound.{family}.{group}", bound_slot(g, family), 0.0, 0.0, _INF, device_owned=True))
        slots += [Slot(name, index, 0.0, -_INF, _INF, device_owned=True) for name, index in _STATE.items()]
        self.slots: dict[str, Slot] = {s.name: s for s in slots}
        self._families = {
            prefix: tuple(self.slots[f"{prefix}.{group}"] for group in self.groups.values()) for prefix in _PER_GROUP
        }

    def include(self, part: str) -> None:
        """Add the host-owned signals of an optional part of a step: `policy`, `replay` or `market`. Idempotent.

        Raises:
            KeyError: no such part.
        """
        if part not in _PARTS:
            raise KeyError(f"no signals for '{part}'; there are parts {sorted(_PARTS)}")
        for name, spec in _PARTS[part].items():
            self.slots[name] = Slot(name, *spec, device_owned=False)

    def slot(self, name: str) -> Slot:
        """The slot of a name. Raises KeyError naming the nearest known signals."""
        try:
            return self.slots[name]
        except KeyError:
            import difflib

            near = difflib.get_close_matches(name, [*self.slots, *_PER_GROUP], n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise KeyError(f"no signal '{name}'{hint}") from None

    def expand(self, name: str) -> Sequence[Slot]:
        """The slots a name stands for: `lr` and `clip` stand for those of every group."""
        return self._families.get(name) or (self.slot(name),)

    @property
    def host_names(self) -> list[str]:
        """Names of the host-owned signals."""
        return [s.name for s in self.slots.values() if not s.device_owned]


class RingFullError(RuntimeError):
    """No replay finished although the device is idle: the queue and the device have lost step."""


class Signals:
    """The host's side of the signals: set values at any time, from any thread; the next launch sees them.

    Args:
        slots: the signal map.
        rows: float32 [rows, ROW], in pinned memory.
        send: `staging.SignalRows.send`.
        finished: returns the number of replays that have finished (read from mapped memory, never blocks).
        idle: returns True when nothing is queued on the stream; raises what the device raises.
    """

    def __init__(
        self,
        slots: SignalMap,
        rows: NDArray[np.float32],
        send: Callable[[int, int, int, int], None],
        *,
        finished: Callable[[], int],
        idle: Callable[[], bool],
    ) -> None:
        self.map = slots
        self._rows = rows
        self._send = send
        self._finished = finished
        self._idle = idle
        self._lock = threading.Lock()
        self._values = np.zeros(HOST_SLOTS, np.float32)
        self._overrides: dict[int, float] = {}
        for slot in slots.slots.values():
            if not slot.device_owned:
                self._values[slot.index] = slot.default
        self._version = 1  # of the values
        self._sent = 0  # the version that the device has, once it has caught up
        self._known_finished = 0

    def __getitem__(self, name: str) -> float:
        """Value of a host-owned signal as the next launch will see it."""
        slot = self.map.slot(name)
        if slot.device_owned:
            raise KeyError(f"'{name}' is owned by the device; read it from telemetry()")
        with self._lock:
            return float(self._values[slot.index])

    def __setitem__(self, name: str, value: float) -> None:
        self.update({name: value})

    def update(self, values: Mapping[str, float]) -> None:
        """Set several signals at once: no launch sees only some of them. `lr` and `clip` set all groups.

        Raises:
            KeyError: no such signal, or it is owned by the device.
            ValueError: a value is not finite in float32 or outside its signal's range; nothing is set then.
        """
        writes = []
        for name, value in values.items():
            slots = self.map.expand(name)  # the slots of one family share their range
            if slots[0].device_owned:
                raise KeyError(f"'{name}' is owned by the device; use override() to set it at the next launch")
            writes.append((slots, _checked(slots[0], value)))
        with self._lock:
            before = self._values.tobytes()
            for slots, number in writes:
                for slot in slots:
                    self._values[slot.index] = number
            if self._values.tobytes() != before:  # a loop may set the same rate before every step
                self._version += 1

    def override(self, name: str, value: float) -> None:
        """Set a device-owned slot at the next launch, once; the device goes on from there.

        Raises:
            KeyError: no such signal, or it is host-owned.
            ValueError: the value is not finite in float32 or out of range, or too many slots are overridden at once.
        """
        slot = self.map.slot(name)
        if not slot.device_owned:
            raise KeyError(f"'{name}' is owned by the host; set it with signals['{name}'] = value")
        checked = _checked(slot, value)
        with self._lock:
            if slot.index not in self._overrides and len(self._overrides) == MAX_OVERRIDES:
                raise ValueError(f"at most {MAX_OVERRIDES} slots can be overridden per launch; call step() first")
            self._overrides[slot.index] = checked

    def current(self) -> NDArray[np.float32]:
        """The slots that the host owns [HOST_SLOTS], as the next launch will see them."""
        with self._lock:
            return self._values.copy()

    def as_dict(self) -> dict[str, float]:
        """Every host-owned signal."""
        with self._lock:
            return {n: float(self._values[self.map.slots[n].index]) for n in self.map.host_names}

    def __iter__(self) -> Iterator[str]:
        return iter(self.map.host_names)

    def publish(self, replay: int) -> None:
        """Let replay number `replay` (counted from 0) see all that was set so far.

        Waits for the oldest replay when all rows are in use; never overwrites a row that may still have to be copied.
        """
        count = len(self._rows)
        if replay - self._known_finished >= count:
            self._wait(replay - count + 1)
        if self._sent == self._version and not self._overrides:
            return
        row = replay % count
        with self._lock:
            if self._sent != self._version:
                self._rows[row, :HOST_SLOTS] = self._values
                self._send(row, 0, HOST_SLOTS, 0)
                self._sent = self._version
            for i, (slot, value) in enumerate(self._overrides.items(), HOST_SLOTS):
                self._rows[row, i] = value
                self._send(row, i, 1, slot)
            self._overrides.clear()

    def restart(self, replays: int) -> None:
        """So many replays have been launched, and all have finished: the next one is another than was expected."""
        self._known_finished = replays

    def _wait(self, needed: int) -> None:
        self._known_finished = wait_for(
            needed,
            self._finished,
            self._idle,
            lambda found: RingFullError(
                f"the device is idle but has finished {found} replays, {needed} expected; "
                "a replay was launched outside this engine, or its counters were overwritten"
            ),
        )


def _checked(slot: Slot, value: float) -> float:
    """The value, rounded to float32."""
    number = float(value)
    if not -_MAX_FLOAT32 <= number <= _MAX_FLOAT32:  # NaN fails too
        raise ValueError(f"signal '{slot.name}' must be finite in float32, got {value!r}")
    if not slot.low <= number <= slot.high:
        raise ValueError(f"signal '{slot.name}' must be in [{slot.low:g}, {slot.high:g}], got {value!r}")
    return float(np.float32(number))
