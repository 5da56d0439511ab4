"""The NumPy reference against the golden files, against complex-step derivatives, and against the stop-gradients."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import backward, golden, limits
from tests.reference.cases import random_case, random_config
from tests.reference.config import (
    DEFAULT_SIGNALS,
    Config,
    Tree,
    bound_slot,
    group_shapes,
    param_shapes,
)
from tests.reference.golden import Difference, error
from tests.reference.step import State, empty_state, group_gradients, scene, state_outputs, step
from tests.reference.step import backward as step_backward
from tests.reference.surrogate import Surrogate

TIGHT = 1e-12
TIGHT_UPDATE = 1e-10
AUX_GROUPS = {"aux_trunk", "aux_heads"}

SMALL = Config(
    batch=6,
    state=6,
    tokens=3,
    attn=3,
    ofi=2,
    ofi_embed=2,
    h1=5,
    h2=4,
    value_h=4,
    adv_h=4,
    branches=(3, 2, 2),
    atoms=5,
    v_min=-3.0,
    v_max=3.0,
    iqn_quantiles=3,
    iqn_target_quantiles=2,
    iqn_cos=4,
    iqn_h=4,
    ens=2,
    aux_h=4,
    aux_out=3,
    aux_head=3,
    regimes=3,
    iql_h=3,
    cur_h=3,
    huber=0.7,
)
BARE = replace(SMALL, tokens=0, ofi=0, branches=(4,), iqn_quantiles=0, ens=0, aux_h=0, iql_h=0, cur_h=0)
BARE = replace(BARE, rec=False, pred=False)
EQUAL_WIDTHS = replace(SMALL, h1=4, branches=(2, 3, 1, 2, 2), batch=3)
NO_AUX = replace(SMALL, aux_h=0, tokens=0, branches=(3, 2), batch=5)
SHAPES = {"small": SMALL, "bare": BARE, "equal_widths": EQUAL_WIDTHS, "no_aux": NO_AUX}


def run_golden(name: str, rounding: float = 0.0) -> tuple[list[Tree], list[list[Difference]]]:
    """Outputs and differences of a golden file's steps, one step feeding the next."""
    case = golden.load(name)
    state, outputs, found = case.state, [], []
    before: Any = state_outputs(case.config, state)
    ref_before: Any = before
    for batch, reference in zip(case.batches, case.outputs, strict=True):
        state, out = step(case.config, state, batch)
        found.append(golden.compare(out, reference, before, ref_before, rounding))
        assert set(out) == set(reference)
        outputs.append(out)
        before, ref_before = out, reference
    return outputs, found


def gradients_of(config: Config, state: State, batch: Tree) -> Tree:
    """The total gradient of a step."""
    s, _ = scene(config, state, batch)
    return step_backward(s, Surrogate(config, state, batch).alpha)[1]


def encoder_groups(config: Config) -> list[str]:
    """Parameters outside the aux nets."""
    return [n for g, table in group_shapes(config).items() if g not in AUX_GROUPS for n in table]


@pytest.mark.parametrize("name", golden.names())
def test_golden_both_steps(name: str) -> None:
    outputs, found = run_golden(name)
    for i, differences in enumerate(found):
        worst = golden.worst(differences)
        print(f"{name} step {i}: worst error {worst.error:.2e}, worst update {worst.update:.2e} ({worst.name})")
        beyond = [d for d in differences if d.error > TIGHT or d.update > TIGHT_UPDATE]
        assert not beyond, beyond[:5]
        golden.assert_fp32(differences)
    case = golden.load(name)
    for mode in limits.LIMITS:
        assert limits.judge(mode, case.config, outputs, case.outputs) == []


def test_golden_skip_is_bitwise() -> None:
    case = golden.load("skip")
    state, out = step(case.config, case.state, case.batches[0])
    assert out["skipped"] == 1.0
    assert not any(name.startswith(("grad_norm.", "sigma_")) for name in out)
    for part in ("params", "m", "v", "target", "sn_v"):
        for name, x in case.state[part].items():
            assert state[part][name].tobytes() == x.tobytes(), (part, name)
    assert state["bounds"] == case.state["bounds"] and state["step"] == case.state["step"]
    assert state["state"] != case.state["state"]


def test_golden_edges_has_a_poisoned_row_and_a_batch_without_labels() -> None:
    case = golden.load("edges")
    dead = case.batches[0]["discount"] == 0.0
    assert np.isnan(case.batches[0]["next_state"][dead]).any()
    assert (case.batches[1]["nb_label"] == -1).all() and (case.batches[1]["regime_label"] == -1).all()


def test_limits_notice_faults() -> None:
    case = golden.load("full")
    outputs = [dict(x) for x in case.outputs]
    outputs[1]["grad.w_s1"] = outputs[1]["grad.w_s1"] * 1.7
    outputs[1]["v.w_v1"] = np.full_like(outputs[1]["v.w_v1"], np.nan)
    faults = limits.judge("bf16", case.config, outputs, case.outputs)
    assert {fault.split(":")[1].strip() for fault in faults} >= {"grad.w_s1", "v.w_v1"}
    outputs[0]["best"] = (outputs[0]["best"] + 1) % 3
    assert limits.judge("tf32", case.config, outputs, case.outputs) == [
        "step 0: best differs where the reference is clear"
    ]


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_match_complex_step(shape: str, seed: int) -> None:
    """Every entry of every gradient array, of each component and of the total."""
    config = SHAPES[shape]
    state, batch = random_case(seed, config)
    surrogate = Surrogate(config, state, batch)
    components, grads = step_backward(surrogate.scene, surrogate.alpha)
    merged = {name: component.merged() for name, component in components.items()}
    outside = set(encoder_groups(config))
    for name, total in grads.items():
        expected = surrogate.gradient(name)
        assert error(total, expected["total"]) <= 1e-10, name
        for component, tree in merged.items():
            if name in outside:
                mine = tree.get(name, np.zeros_like(total))
                assert error(mine, expected[component]) <= 1e-10, (component, name)


@settings(max_examples=25, deadline=None)
@given(config=random_config(), seed=st.integers(0, 10_000))
def test_gradients_match_on_random_configurations(config: Config, seed: int) -> None:
    """One random direction per tensor, scaled to the gradient's own size."""
    state, batch = random_case(seed, config)
    surrogate = Surrogate(config, state, batch)
    _, grads = step_backward(surrogate.scene, surrogate.alpha)
    assert {name: g.shape for name, g in grads.items()} == param_shapes(config)
    rng = np.random.default_rng(seed)
    for name, g in grads.items():
        direction = rng.standard_normal(g.shape)
        expected = surrogate.derivative({name: direction})["total"]
        scale = max(float(np.sum(np.abs(g * direction))), 1e-6)
        assert abs(float(np.sum(g * direction)) - expected) <= 1e-9 * scale, name


@pytest.mark.parametrize("seed", [1, 2])
def test_gradients_match_central_differences(seed: int) -> None:
    """Where no path is stopped or scaled, plain real differences tell the same."""
    state, batch = random_case(seed, BARE)
    surrogate = Surrogate(BARE, state, batch)
    _, grads = step_backward(surrogate.scene, 0.0)
    rng, h = np.random.default_rng(seed), 1e-6
    for name, g in grads.items():
        direction, p = rng.standard_normal(g.shape), surrogate.scene.p
        up, down = (float(surrogate.total(p | {name: p[name] + sign * h * direction})) for sign in (1.0, -1.0))
        scale = max(float(np.sum(np.abs(g * direction))), 1e-6)
        assert abs((up - down) / (2.0 * h) - float(np.sum(g * direction))) <= 1e-6 * scale, name


@settings(max_examples=20, deadline=None)
@given(config=random_config(), seed=st.integers(0, 10_000))
def test_step_runs_on_random_configurations(config: Config, seed: int) -> None:
    state, batch = random_case(seed, config)
    for _ in range(2):
        state, out = step(config, state, batch)
        assert out["skipped"] == 0.0
        assert all(np.isfinite(x).all() for x in out.values())


def test_default_configuration_has_the_documented_size() -> None:
    assert sum(int(np.prod(shape)) for shape in param_shapes(Config()).values()) == 672_082


def test_slots() -> None:
    assert [bound_slot("trunk", f) for f in ("weight", "adam_m", "adam_v", "grad")] == [136, 144, 152, 160]
    assert bound_slot("curiosity", "grad") == 167
    assert bound_slot("aux_trunk", "weight") == 400 and bound_slot("decoders", "grad") == 426


@pytest.mark.parametrize("seed", range(3))
def test_components_sum_to_the_trunk_gradient(seed: int) -> None:
    state, batch = random_case(seed, SMALL)
    surrogate = Surrogate(SMALL, state, batch)
    components, grads = step_backward(surrogate.scene, surrogate.alpha)
    for name in group_shapes(SMALL)["trunk"]:
        assert error(sum(c.merged()[name] for c in components.values()), grads[name]) <= TIGHT


def test_aux_losses_do_not_reach_the_encoder() -> None:
    """Labels and aux weights move aux gradients only; the aux backward has no input gradient."""
    state, batch = random_case(1, SMALL)
    other = batch | {"nb_label": 1 - batch["nb_label"], "regime_label": np.zeros_like(batch["regime_label"])}
    signals = state["signals"] | {"w_nb": 7.0, "w_regime": 5.0}
    base = gradients_of(SMALL, state, batch)
    moved = gradients_of(SMALL, state | {"signals": signals}, other)
    assert all(np.array_equal(base[name], moved[name]) for name in encoder_groups(SMALL))
    assert not np.array_equal(base["w_a1"], moved["w_a1"])
    assert inspect.signature(backward.aux).return_annotation == "Tree"


def test_shut_gate_leaves_the_aux_nets_their_own_losses() -> None:
    state, batch = random_case(1, SMALL)
    shut = empty_state(SMALL) | {"gate_seen": 1.0, "iqn_readiness": 0.5}
    state |= {"state": shut}
    base = gradients_of(SMALL, state, batch)
    strange = batch | {"reward": batch["reward"] + 1.0, "weight": batch["weight"] * np.inf}
    moved = gradients_of(SMALL, state, strange)
    aux_names = set(param_shapes(SMALL)) - set(encoder_groups(SMALL))
    assert all(np.array_equal(base[name], moved[name]) for name in aux_names)
    assert not np.isfinite(moved["w_s1"]).all()


def test_gate_scales_what_flows_back_but_not_the_wire_column() -> None:
    state, batch = random_case(1, SMALL)
    s, _ = scene(SMALL, state, batch)
    closed, half, full = (step_backward(s, alpha)[1] for alpha in (0.0, 0.5, 1.0))
    for name in encoder_groups(SMALL):
        assert np.array_equal(closed[name], full[name]), name
    assert np.abs(closed["w_b0fc"][:, -1]).max() > 0.0
    assert error(half["w_a1"] - closed["w_a1"], 0.5 * (full["w_a1"] - closed["w_a1"])) <= 1e-12


def test_direction_logits_get_nothing_from_the_magnitude_branch() -> None:
    """c_1 = [h2, sg(softmax(q_0))]: branch 1's logits move h2 and its own tensors, none of branch 0."""
    state, batch = random_case(1, SMALL)
    s, _ = scene(SMALL, state, batch)
    dlogits = [np.zeros((SMALL.batch, n, SMALL.atoms)) for n in SMALL.branches]
    dlogits[1][:, 0, 0] = 1.0
    dh2, dwire, grads = backward.heads(SMALL, s.p, s.nets["heads"], dlogits)
    assert dwire is not None and not dwire.any() and dh2.any() and grads["w_b1fc"].any()
    assert not any(grads[f"{kind}_b0{layer}"].any() for kind in "wb" for layer in ("fc", "out"))


@pytest.mark.parametrize(("signal", "component"), [("w_ens", "ens"), ("w_rec", "rec"), ("w_pred", "pred")])
def test_heads_outside_the_total_learn_at_full_scale(signal: str, component: str) -> None:
    """A scale of 0 is an exact 0 on the trunk, even of NaN, and leaves the head's own gradient alone."""
    state, batch = random_case(1, SMALL)
    off = state | {"signals": state["signals"] | {signal: 0.0}}
    base, moved = gradients_of(SMALL, state, batch), gradients_of(SMALL, off, batch)
    assert np.array_equal(base[f"w_{component}"], moved[f"w_{component}"])
    assert not np.array_equal(base["w_s1"], moved["w_s1"])
    s, _ = scene(SMALL, off, batch)
    s.goal["ens"], s.goal["pred"] = s.goal["ens"] * np.nan, s.goal["pred"] * np.nan
    s.batch = s.batch | {"state": s.batch["state"] * (np.nan if component == "rec" else 1.0)}
    merged = step_backward(s, 0.0)[0][component].merged()
    assert np.isnan(merged[f"w_{component}"]).any()
    assert all(not merged[name].any() for name in group_shapes(SMALL)["trunk"])


def test_iqn_reaches_the_trunk_by_readiness_only() -> None:
    state, batch = random_case(1, SMALL)
    s, _ = scene(SMALL, state, batch)
    s.readiness = 0.0
    cold = step_backward(s, 0.0)[0]["iqn"].merged()
    s.readiness = 0.5
    warm = step_backward(s, 0.0)[0]["iqn"].merged()
    assert not cold["w_s1"].any() and warm["w_s1"].any()
    assert np.array_equal(cold["w_phi"], warm["w_phi"])


@pytest.mark.parametrize("seed", range(3))
def test_dead_rows_may_hold_anything(seed: int) -> None:
    state, batch = random_case(seed, SMALL)
    dead = batch["discount"] == 0.0
    clean = batch | {n: np.where(dead[:, None], 5.0, batch[n]) for n in ("next_state", "next_ofi")}
    a, b = step(SMALL, state, batch)[1], step(SMALL, state, clean)[1]
    assert all(np.array_equal(a[name], b[name]) for name in a)


def signal_case(signal: str) -> tuple[State, float]:
    """A state in which the signal counts, and another value of it."""
    state, _ = random_case(1, SMALL)
    state["state"] |= {"gate_open": 1.0, "gate_seen": 1.0, "aux_acc_short": 0.7, "aux_acc_long": 0.6}
    state["state"] |= {"alpha_grad": 0.5, "iqn_seen": 100.0, "iqn_loss_ema": 2.0, "iqn_loss_ref": 3.0}
    if signal == "gate_open_margin":
        state["state"]["gate_open"] = 0.0
    special = {"gate_open_margin": 0.4, "gate_close_margin": 0.4, "readiness_warmup": 1000.0}
    special |= {"sn_max": 0.1, "eps_clamp_floor": 1e-9, "curiosity_cap": 0.01}
    return state, special.get(signal, 0.5 * state["signals"][signal])


@pytest.mark.parametrize("signal", DEFAULT_SIGNALS)
def test_no_signal_is_inert(signal: str) -> None:
    _, batch = random_case(1, SMALL)
    state, value = signal_case(signal)
    base = step(SMALL, state, batch)[1]
    moved = step(SMALL, state | {"signals": state["signals"] | {signal: value}}, batch)[1]
    assert any(not np.array_equal(base[name], moved[name]) for name in base)


@pytest.mark.parametrize("kind", ["lr", "clip"])
def test_lr_and_clip_act_on_their_group_alone(kind: str) -> None:
    state, batch = random_case(1, SMALL)
    base = step(SMALL, state, batch)[0]["params"]
    for group, names in group_shapes(SMALL).items():
        signals = state["signals"] | {f"{kind}.{group}": 1e-6}
        moved = step(SMALL, state | {"signals": signals}, batch)[0]["params"]
        assert {n for n in base if not np.array_equal(base[n], moved[n])} <= set(names)
        assert any(not np.array_equal(base[n], moved[n]) for n in names)


def test_group_gradients_are_flat_in_buffer_order() -> None:
    state, batch = random_case(1, SMALL)
    out = step(SMALL, state, batch)[1]
    for group, flat in group_gradients(SMALL, out).items():
        assert np.isclose(np.linalg.norm(flat), out[f"grad_norm.{group}"], rtol=1e-14)


def test_oracle_every_lets_bounds_stand() -> None:
    state, batch = random_case(1, SMALL)
    state["step"] = 14
    config = replace(SMALL, oracle_every=8)
    between = step(config, state, batch)[0]
    assert between["bounds"] == state["bounds"]
    assert step(config, between, batch)[0]["bounds"] != state["bounds"]
