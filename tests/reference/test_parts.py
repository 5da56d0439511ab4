"""Single parts of the reference by hand-made examples: argmax, projection, Huber, gate, readiness, oracles."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import gate, losses, optimizer
from tests.reference.cases import random_case
from tests.reference.config import DEFAULT_SIGNALS, Config
from tests.reference.forward import argmax
from tests.reference.step import empty_state, scene

SMALL = Config(batch=6, state=4, tokens=0, ofi=0, h1=4, h2=4, branches=(3, 2, 2), atoms=5, v_min=-3.0, v_max=3.0)


def test_argmax_breaks_ties_low_and_never_takes_nan() -> None:
    nan = np.nan
    rows = np.array([[1.0, 1.0, 0.0], [nan, 0.0, 1.0], [nan, -np.inf, nan], [nan, nan, nan], [2.0, nan, 1.0]])
    assert argmax(rows).tolist() == [0, 2, 1, 0, 0]


def test_projection_keeps_mass_and_clamps() -> None:
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(SMALL.atoms), (6, 3))
    m = losses.project(SMALL, rng.normal(0.0, 3.0, 6), np.full(6, 0.9), p)
    assert np.allclose(m.sum(axis=2), 1.0, atol=1e-14)
    m = losses.project(SMALL, np.array([np.inf] + [-99.0] * 5), np.array([0.9] * 5 + [0.0]), p)
    assert np.allclose(m[0, :, -1], 1.0) and np.allclose(m[1:, :, 0], 1.0)


def test_huber_at_the_knee_and_at_infinity() -> None:
    delta = np.array([0.7, -0.7, 1.7, -np.inf])
    assert np.allclose(losses.huber(delta, 0.7)[:3], [0.245, 0.245, 0.7 * (1.7 - 0.35)])
    assert np.isposinf(losses.huber(delta, 0.7)[3])


def test_gate_without_valid_rows() -> None:
    state, batch = random_case(1, SMALL)
    s, _ = scene(SMALL, state, batch)
    unlabelled = s.batch | {"nb_label": np.full(SMALL.batch, -1)}
    cold = empty_state(SMALL) | {"alpha_grad": 0.3}
    assert gate.produce_gate(SMALL, s.signals, cold, s.nets, unlabelled) == cold
    warm = empty_state(SMALL) | {"gate_seen": 1.0, "aux_acc_short": 0.7, "alpha_grad": 0.3}
    after = gate.produce_gate(SMALL, s.signals, warm, s.nets, unlabelled)
    assert after["gate_open"] == 1.0 and after["alpha_grad"] != 0.3
    assert after["aux_acc_short"] == 0.7 and after["disagree_ema"] == 0.0


def test_gate_state_that_is_not_finite_closes_alpha() -> None:
    state, batch = random_case(1, SMALL)
    s, _ = scene(SMALL, state, batch)
    broken = empty_state(SMALL) | {"gate_seen": 1.0, "gate_open": 1.0, "aux_acc_short": 0.7}
    after = gate.produce_gate(SMALL, s.signals, broken | {"aux_acc_var": np.nan}, s.nets, batch)
    assert after["alpha_grad"] == 0.0


def test_readiness_leaves_its_warm_up() -> None:
    signals = DEFAULT_SIGNALS | {"readiness_warmup": 2.0, "readiness_beta": 0.5}
    state = dict.fromkeys(("iqn_seen", "iqn_loss_ema", "iqn_loss_ref", "iqn_readiness"), 0.0)
    for loss in (4.0, 2.0, np.inf):
        state = gate.update_readiness(signals, state, loss)
    assert state == {"iqn_seen": 2.0, "iqn_loss_ema": 3.0, "iqn_loss_ref": 3.0, "iqn_readiness": 0.0}
    state = gate.update_readiness(signals, state, 1.0)
    assert state["iqn_loss_ema"] == 2.0 and state["iqn_readiness"] == pytest.approx(0.5 / 3.0)


@pytest.mark.parametrize(("n", "index"), [(1, 0), (100, 98), (101, 99), (200, 197), (201, 198)])
def test_p99_index(n: int, index: int) -> None:
    values = np.arange(n, dtype=np.float64)
    assert optimizer.p99([-values[: n // 2], values[n // 2 :]]) == float(index)
