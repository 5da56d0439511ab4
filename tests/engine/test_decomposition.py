"""The gradient decomposition: same training bits, components that add up, nothing when not asked for."""

from __future__ import annotations

import numpy as np
import pytest

from fxengine import Engine, StepConfig
from fxengine.driver import Device
from fxengine.train.decomposition import COMPONENTS, SLICES

from .common import make

CONFIG = StepConfig(
    batch=9, state=12, tokens=3, attn=4, ofi=3, ofi_embed=4, h1=14, h2=12, value_h=6, adv_h=6, branches=(3, 2, 2),
    atoms=7, iqn_quantiles=4, iqn_target_quantiles=3, iqn_cos=5, iqn_h=6, ens=2, aux_h=6, aux_out=5, aux_head=4,
    regimes=3, iql_h=5, cur_h=5, oracle_every=2,
)  # fmt: skip


def rows(n: int, config: StepConfig = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random transitions for a configuration with every component."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal((n, *shape)).astype(np.float32)  # noqa: E731
    return {
        "state": normal(config.state),
        "next_state": normal(config.state),
        "reward": normal(),
        "discount": np.where(rng.random(n) < 0.2, 0.0, 0.97).astype(np.float32),
        "weight": rng.uniform(0.5, 1.0, n).astype(np.float32),
        "actions": np.stack([rng.integers(0, a, n) for a in config.branches], axis=1).astype(np.int32),
        "nb_label": rng.integers(-1, 2, n).astype(np.int32),
        "regime_label": rng.integers(-1, config.regimes, n).astype(np.int32),
        "ofi": normal(config.ofi),
        "next_ofi": normal(config.ofi),
    }


def test_training_has_the_same_bits_with_and_without(device: Device) -> None:
    with Engine(CONFIG, device=device, data=rows(40)) as plain, Engine(CONFIG, device=device, data=rows(40)) as split:
        for i in range(6):
            plain.step()
            split.step(decompose=i % 2 == 1)
        assert plain.state_hash() == split.state_hash()
        assert plain.graph.census() == split.graph.census()
        plain.step(captured=False, decompose=True)
        split.step(decompose=True)
        assert plain.state_hash() == split.state_hash()
        first, second = plain.telemetry(), split.telemetry()
        assert first is not None and second is not None
        np.testing.assert_array_equal(first.decomposition, second.decomposition)


def test_components_add_up_to_the_trunk_gradient(device: Device) -> None:
    with Engine(CONFIG, device=device, data=rows(40), signals={"w_c51": 0.8, "w_cql": 0.3}, guard=True) as engine:
        engine.signals.override("iqn_readiness", 0.6)
        engine.step(decompose=True)
        engine.check_guards()
        plan = engine._variants[True, False].plan
        scales = {"c51": np.float32(0.8), "cql": np.float32(0.3)}
        report = engine.telemetry()
        assert report is not None and report.decomposition is not None
        table = {
            name: dict(zip(SLICES, row, strict=True))
            for name, row in zip(COMPONENTS, report.decomposition, strict=True)
        }
        squares = dict.fromkeys(COMPONENTS, 0.0)
        for p in next(g for g in engine.builder.groups if g.name == "trunk").parameters:
            total = np.zeros(p.shape)
            for component in ("iqn", "ens", "c51", "cql", "distill", "rec", "pred"):
                part = plan.buffer(f"split.{component}.grad.{p.name}").read().view(np.float32).reshape(p.shape)
                total += scales.get(component, 1.0) * part.astype(np.float64)
                squares[component] += float((part.astype(np.float64) ** 2).sum())
            gradient = engine.plan.buffer(p.grad).read()
            assert np.abs(total - gradient).max() <= 2e-5 * max(np.abs(gradient).max(), 1e-6), p.name
        for component, row in (("iqn", "iqn"), ("c51", "c51_bs"), ("cql", "cql"), ("pred", "pred")):
            assert table[row]["trunk"] == pytest.approx(np.sqrt(squares[component]), rel=1e-5)
        assert table["c51"]["trunk"] == pytest.approx(0.8 * table["c51_bs"]["trunk"], rel=1e-6)
        assert table["cql_sx"]["direction"] == pytest.approx(0.3 * table["cql"]["direction"], rel=1e-6)
        assert table["iqn"]["magnitude"] == table["rec"]["direction"] == 0.0


def test_a_step_without_it_reports_none_and_pays_nothing(device: Device) -> None:
    with Engine(CONFIG, device=device, data=rows(40)) as engine:
        engine.step(decompose=True)
        engine.step()
        engine.synchronize()
        report = engine.telemetry()
        assert report is not None and report.decomposition is None
        assert not [name for name in engine.graph.census().launches if name.startswith("slice")]


def test_a_step_without_a_q_network_says_so(device: Device) -> None:
    with make(device) as engine, pytest.raises(ValueError, match="no Q network"):
        engine.step(decompose=True)
