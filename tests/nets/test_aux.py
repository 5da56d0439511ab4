"""The auxiliary network: gradients against float64 and finite differences, and the structural stop-gradient."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fxengine import Engine, StepBuilder, StepConfig
from fxengine.driver import Device, Target
from fxengine.nets.step import specified_step
from fxengine.ops.crossentropy import reference_crossentropy
from tests.engine.common import CONFIG, rows
from tests.support import assert_close

Array = NDArray[np.float64]
W_NB, W_REGIME = 0.7, 0.4
LAYERS = ("s1", "a1", "a2", "a3", "nb1", "nb2", "rg1", "rg2")


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _slope(y: Array) -> Array:
    return np.where(y > 0, 1.0, y + 1.0)


def forward(p: dict[str, Array], state: Array) -> dict[str, Array]:
    """Every activation of the auxiliary nets, float64."""
    y: dict[str, Array] = {"x": state}
    for name, source, elu in (
        ("s1", "x", True), ("a1", "s1", True), ("a2", "a1", True), ("a3", "a2", False),
        ("nb1", "a3", True), ("nb2", "nb1", False), ("rg1", "a3", True), ("rg2", "rg1", False),
    ):  # fmt: skip
        out = y[source] @ p[f"w_{name}"].T + p[f"b_{name}"]
        y[name] = _elu(out) if elu else out
    return y


def loss(p: dict[str, Array], batch: dict[str, NDArray]) -> float:
    """The total that the gradients belong to."""
    y = forward(p, batch["state"])
    nb = reference_crossentropy(y["nb2"], batch["nb_label"])
    regime = reference_crossentropy(y["rg2"], batch["regime_label"])
    return W_NB * nb.loss + W_REGIME * regime.loss


def gradients(p: dict[str, Array], batch: dict[str, NDArray]) -> dict[str, Array]:
    """Hand-written backward, float64."""
    y = forward(p, batch["state"])
    d = {
        "nb2": reference_crossentropy(y["nb2"], batch["nb_label"], W_NB).dlogits,
        "rg2": reference_crossentropy(y["rg2"], batch["regime_label"], W_REGIME).dlogits,
    }
    for head in ("nb", "rg"):
        d[f"{head}1"] = d[f"{head}2"] @ p[f"w_{head}2"] * _slope(y[f"{head}1"])
    d["a3"] = d["nb1"] @ p["w_nb1"] + d["rg1"] @ p["w_rg1"]
    d["a2"] = d["a3"] @ p["w_a3"] * _slope(y["a2"])
    d["a1"] = d["a2"] @ p["w_a2"] * _slope(y["a1"])
    source = {"a1": "s1", "a2": "a1", "a3": "a2", "nb1": "a3", "nb2": "nb1", "rg1": "a3", "rg2": "rg1"}
    return {
        f"{kind}_{name}": d[name].T @ y[source[name]] if kind == "w" else d[name].sum(0)
        for name in source
        for kind in "wb"
    }


def parameters(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    c = CONFIG
    widths = {
        "s1": (c.h1, c.state), "a1": (c.aux_h, c.h1), "a2": (c.aux_h, c.aux_h), "a3": (c.aux_out, c.aux_h),
        "nb1": (c.aux_head, c.aux_out), "nb2": (2, c.aux_head), "rg1": (c.aux_head, c.aux_out),
        "rg2": (c.regimes, c.aux_head),
    }  # fmt: skip
    p = {f"w_{n}": rng.standard_normal(shape) / np.sqrt(shape[1]) for n, shape in widths.items()}
    p |= {f"b_{n}": 0.1 * rng.standard_normal(shape[0]) for n, shape in widths.items()}
    return {n: a.astype(np.float32).astype(np.float64) for n, a in p.items()}


def test_finite_differences_confirm_the_float64_gradients() -> None:
    p, batch = parameters(0), rows(CONFIG.batch, seed=1)
    for name, gradient in gradients(p, batch).items():
        numeric = np.zeros_like(gradient)
        for i in np.ndindex(gradient.shape):
            h = 1e-5 * max(1.0, abs(p[name][i]))
            kept = p[name][i]
            values = []
            for step in (h, -h):
                p[name][i] = kept + step
                values.append(loss(p, batch))
            p[name][i] = kept
            numeric[i] = (values[0] - values[1]) / (2 * h)
        error = np.abs(numeric - gradient).max() / np.abs(gradient).max()
        assert error <= 1e-6, f"{name}: {error:.2e}"


def test_kernels_give_the_float64_gradients(device: Device) -> None:
    p, batch = parameters(2), rows(CONFIG.batch, seed=3)
    with Engine(CONFIG, device=device, signals={"w_nb": W_NB, "w_regime": W_REGIME, "lr": 0.0}, guard=True) as engine:
        for name in engine.params:
            engine.params[name] = p[name].astype(np.float32)
        engine.write(**batch)
        engine.step()
        engine.check_guards()
        for name, gradient in gradients(p, batch).items():
            error = np.abs(engine.plan.buffer(engine.builder.groups[name].grad).read() - gradient).max()
            assert error <= 5e-5 * max(np.abs(gradient).max(), 1e-6), name
        y = forward(p, batch["state"])
        assert_close(engine.output("h1"), y["s1"], name="h1", factor=64)
        report = engine.telemetry()
        assert report is not None
        assert_close(np.float32(W_NB * report["L_nb"] + W_REGIME * report["L_regime"]), loss(p, batch), factor=64)


def _program(config: StepConfig = CONFIG) -> StepBuilder:
    builder = StepBuilder(Target.of("sm_90"))
    specified_step(builder, config)
    builder.finish()
    return builder


def test_no_gradient_of_h1_exists() -> None:
    """The first layer is fixed and sg(h1) feeds the trunk: nothing could carry a gradient to either."""
    program = _program().program
    assert "d.h1" not in program.storages
    assert not any("s1" in name for name in program.storages if name.startswith(("grads", "adam", "d.")))
    h1 = program.storages["h1"]
    touching = {r.label: r.family.name for r in program.launches if any(t.storage is h1 for t in r.reads)}
    assert set(touching) == {"a1.fwd", "a1.dw"}
    assert [r.label for r in program.launches if any(t.storage is h1 for t in r.writes)] == ["h1.fwd"]


def test_the_trunk_s_backward_kernel_has_no_dx_argument(device: Device) -> None:
    """Checked on the kernel's record: the family that runs a1's backward has no field for an input gradient."""
    record = next(r for r in _program().program.launches if r.label == "a1.dw")
    assert record.family.name.startswith("linear_dw")
    names = device.module(record.family.source).struct(record.family.struct).names
    assert names is not None and "dw" in names
    assert not [n for n in names if n.startswith("dx")]
    assert not [r for r in _program().program.launches if r.label.startswith("h1.d")]


def test_the_fixed_layer_and_its_neighbours_stay_untouched(device: Device) -> None:
    """Weights of the fixed layer keep their bits while everything else trains; guard words around it survive."""
    with Engine(CONFIG, device=device, data=rows(60), guard=True) as engine:
        before = {n: engine.params[n].tobytes() for n in engine.params}
        for _ in range(3):
            engine.step()
        engine.check_guards()
        changed = {n for n in engine.params if engine.params[n].tobytes() != before[n]}
        assert changed == set(engine.params) - {"w_s1", "b_s1"}


def test_both_heads_are_summed_in_one_launch() -> None:
    records = [r for r in _program().program.launches if any(t.name == "d.h_aux" for t in r.writes)]
    assert len(records) == 1
    assert {t.name for t in records[0].reads} >= {"d.nb1", "d.rg1"}


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_any_batch_size(device: Device, batch: int) -> None:
    config = StepConfig.aux_only(batch=batch, state=5, h1=9, aux_h=7, aux_out=3, aux_head=2, regimes=2)
    with Engine(config, device=device, data=rows(50, state=5, regimes=2)) as engine:
        for _ in range(2):
            engine.step()
        engine.synchronize()
        report = engine.telemetry()
        assert report is not None and report.step == 2
        assert all(np.isfinite(v) for v in report.values())
