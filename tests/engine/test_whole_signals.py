"""Every host-owned scalar of the specification moves the whole step, without a recapture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.graphs import Plan
from fxengine.signals import HOST_SLOTS, SignalMap
from tests.nets.whole import EVERYTHING, changed, feed, in_groups, load, make, restore, snapshot
from tests.reference.cases import random_batch, random_case
from tests.reference.config import DEFAULT_SIGNALS, GROUPS, Tree, bound_slot, group_signals

STEPS = 4
#: Where the defaults would hide a scalar: clamps that bind, a limit below sigma, a bonus beyond its cap.
BASE = {
    **DEFAULT_SIGNALS,
    **group_signals(EVERYTHING),
    "w_curiosity": 0.3,
    "curiosity_cap": 0.2,
    "sn_max": 0.5,
    "eps_clamp_floor": 1e-3,
    "readiness_warmup": 3.0,
    "gate_close_margin": 0.0,
}
#: Device-owned state to begin with: a gate about to open, a readiness that leaves its warm-up.
WARM = {
    "aux_acc_short": 0.6,
    "aux_acc_long": 0.55,
    "aux_acc_var": 0.01,
    "disagree_ema": 0.3,
    "gate_open": 0.0,
    "gate_seen": 1.0,
    "alpha_grad": 0.4,
    "iqn_seen": 1.0,
    "iqn_loss_ema": 0.9,
    "iqn_loss_ref": 1.5,
    "iqn_readiness": 0.3,
}
BOUNDS = {"weight": 0.7, "adam_m": 0.01, "adam_v": 3e-4, "grad": 0.05}
#: The value each scalar takes instead of its base value.
CHANGES = {
    "w_c51": 0.5, "w_cql": 0.3, "w_distill": 0.2, "w_iqn": 0.5, "w_ens": 0.5, "w_rec": 0.3, "w_pred": 0.3, "w_nb": 0.5,
    "w_regime": 0.9, "iql_tau_high": 0.7, "iql_tau_low": 0.3, "w_curiosity": 0.1, "curiosity_cap": 0.1,
    "polyak_tau": 0.02, "sn_max": 0.6, "beta1": 0.8, "beta2": 0.99, "adam_eps": 1e-3, "weight_decay": 0.1,
    "acc_beta_short": 0.3, "acc_beta_long": 0.05, "gate_margin": 0.05, "gate_gain": 4.0, "gate_open_margin": 0.4,
    "gate_close_margin": 0.4, "alpha_beta": 0.5, "disagree_beta": 0.3, "readiness_beta": 0.2, "readiness_warmup": 2.0,
    "oracle_headroom": 2.0, "oracle_beta": 0.3, "eps_clamp_floor": 0.5,
    **{f"lr.{group}": 1e-3 for group in GROUPS}, **{f"clip.{group}": 1e-3 for group in GROUPS},
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What the host can see of some steps: everything kept between steps, and the reports."""

    state: Tree
    reports: Tree


@dataclass
class Bench:
    """An engine, where every run begins, and runs from there."""

    engine: Engine
    start: Tree
    runs: dict[tuple[int, tuple[tuple[str, float], ...]], Outcome]

    def run(self, steps: int = STEPS, **signals: float) -> Outcome:
        key = steps, tuple(sorted(signals.items()))
        if key not in self.runs:
            restore(self.engine, self.start)
            self.engine.signals.update({**BASE, **signals})
            reports: Tree = {}
            for i in range(steps):
                self.engine.step()
                self.engine.synchronize()
                report = self.engine.telemetry()
                assert report is not None and not report.nonfinite_groups
                reports |= {f"{i}.{name}": np.float32(x) for name, x in report.items()}
            state = snapshot(self.engine)
            del state["counters"]  # of replays
            state["slots"] = state.pop("signals.device")[HOST_SLOTS:]  # those before only repeat what the host wrote
            self.runs[key] = Outcome(state, reports)
        return self.runs[key]


@pytest.fixture(scope="module")
def bench(device: Device) -> Iterator[Bench]:
    state, _ = random_case(2, EVERYTHING)
    state["state"] |= WARM
    state["bounds"] = {bound_slot(group, family): x for group in GROUPS for family, x in BOUNDS.items()}
    state["signals"] = BASE
    batch = random_batch(np.random.default_rng(1), EVERYTHING, poison=False)
    batch["nb_label"] = np.arange(EVERYTHING.batch, dtype=np.int32) % 2
    with make(device) as engine:
        load(engine, state)
        feed(engine, batch)
        yield Bench(engine, snapshot(engine), {})


def test_the_table_names_every_scalar() -> None:
    slots = SignalMap().slots.values()
    assert set(CHANGES) == {s.name for s in slots if not s.device_owned}
    assert set(BASE) == set(CHANGES)
    assert all(CHANGES[name] != BASE[name] for name in CHANGES)


def test_the_documented_defaults_are_those_of_the_engine(bench: Bench) -> None:
    defaults = {s.name: s.default for s in SignalMap().slots.values() if not s.device_owned}
    assert defaults == {**DEFAULT_SIGNALS, **group_signals(EVERYTHING)}


@pytest.mark.parametrize("name", CHANGES)
def test_no_scalar_is_inert(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bench.run()
    monkeypatch.setattr(Plan, "capture", lambda *args, **options: pytest.fail("captured again"))
    after = bench.run(**{name: CHANGES[name]})
    assert changed(before.state, after.state) | changed(before.reports, after.reports), f"{name} changes nothing"


def test_the_same_scalars_give_the_same_bits(bench: Bench) -> None:
    """Without this every difference above could be noise."""
    before = bench.run()
    bench.runs.clear()
    again = bench.run()
    assert changed(before.state, again.state) == changed(before.reports, again.reports) == set()


@pytest.mark.parametrize("group", GROUPS)
def test_a_learning_rate_moves_its_group_alone(bench: Bench, group: str) -> None:
    before, after = (bench.run(1, **s).state for s in ({}, {f"lr.{group}": 1e-3}))
    moved = {n for n in changed(before, after) if n.startswith(("param.", "m.", "v.", "grad."))}
    assert moved == {f"param.{n}" for n in in_groups(bench.engine, group)}


@pytest.mark.parametrize("group", GROUPS)
def test_a_clip_scales_the_moments_of_its_group_alone(bench: Bench, group: str) -> None:
    before, after = (bench.run(1, **s).state for s in ({}, {f"clip.{group}": 1e-3}))
    moved = {n for n in changed(before, after) if n.startswith(("m.", "v.", "grad."))}
    assert {n.split(".", 1)[1] for n in moved} == set(in_groups(bench.engine, group))
    assert not [n for n in moved if n.startswith("grad.")], "the gradient itself is kept as it was"


@pytest.mark.parametrize("family", ["lr", "clip"])
def test_a_family_stands_for_all_its_groups(bench: Bench, family: str) -> None:
    every = {f"{family}.{group}": 1e-3 for group in GROUPS}
    before, after = bench.run(**every), bench.run(**{family: 1e-3})
    assert changed(before.state, after.state) == changed(before.reports, after.reports) == set()


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("polyak_tau", ("target.",)),
        ("w_iqn", ("param.", "m.", "v.", "grad.", "target.", "sn_v_", "slots")),
        ("oracle_headroom", ("slots",)),
        ("readiness_beta", ("slots",)),
        ("alpha_beta", ("slots", "grad.", "param.", "m.", "v.")),
        ("iql_tau_high", ("param.w_iqlhigh", "param.b_iqlhigh", "m.", "v.", "grad.", "slots")),
    ],
)
def test_a_scalar_moves_what_it_is_for_and_nothing_else_in_the_first_step(
    bench: Bench, name: str, prefixes: tuple[str, ...]
) -> None:
    before, after = (bench.run(1, **s).state for s in ({}, {name: CHANGES[name]}))
    moved = changed(before, after)
    assert moved and all(n.startswith(prefixes) for n in moved), sorted(moved)
    if name == "iql_tau_high":
        assert all("iqlhigh" in n for n in moved - {"slots"})
    if name == "w_iqn":  # iqn itself learns at full scale; only what lies behind h2 is scaled
        scaled = {f"grad.{n}" for n in in_groups(bench.engine, "trunk", "attn")}
        assert {n for n in moved if n.startswith("grad.")} == scaled
