"""The agents' training steps and values against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxengine import Engine, StepBuilder, StepConfig
from fxengine.config import ConfigError
from fxengine.driver import Device
from fxengine.initialise import initial_value
from fxengine.ops.policy import reference_fractions
from fxengine.rl.agents import ACT_TAU_STREAM, C51Agent, DqnAgent, FullAgent, IqnAgent
from tests.reference.golden import FP32_LIMIT, error
from tests.reference.limits import LIMITS, relative_l2
from tests.rl import steps
from tests.rl.engines import AGENTS, DQN, IQN, SIGNALS, Forward, a_batch, an_engine, read, start
from tests.rl.steps import PerceptronAgent, State, Tree
from tests.support import assert_close


def is_clear(agent: PerceptronAgent, state: State, batch: Tree) -> bool:
    """Whether rounding cannot change the choice of the next action: the two best values lie apart."""
    online = isinstance(agent, DqnAgent | C51Agent) and agent.double
    tau = batch.get("tau_target")
    q = steps.values(agent, state.params if online else state.target, steps.living(batch), tau)
    for part in np.split(q, np.cumsum(agent.branches)[:-1], axis=1):
        ordered = np.sort(part, axis=1)
        if (ordered[:, -1] - ordered[:, -2] < 1e-3).any():
            return False
    return True


#: Below these, a gradient and its mean are the difference of terms near 1 that all but cancel (probabilities and their
#: target, say): what rounding leaves of it is relative to those terms, not to the difference.
FLOORS = {"grad": 1e-2, "m": 1e-3}


def compare(engine: Engine, expected: steps.Result, state: State) -> None:
    """Everything that a step leaves, by the limit of float32."""
    engine.synchronize()
    report = engine.telemetry()
    assert report is not None and not report.nonfinite_groups
    for name, value in expected.losses.items():
        assert error(np.array(report[name]), np.array(value)) <= FP32_LIMIT, name
    norm = np.sqrt(sum((g**2).sum() for g in expected.grads.values()))
    assert error(np.array(report["grad_norm.network"]), np.array(norm), FLOORS["grad"]) <= FP32_LIMIT
    assert error(engine.output("td"), expected.td) <= FP32_LIMIT
    assert error(engine.output("q"), expected.q) <= FP32_LIMIT
    found = read(engine)
    parts = {"grad": expected.grads, "params": state.params, "target": state.target, "m": state.m, "v": state.v}
    for part, arrays in parts.items():
        for name, array in arrays.items():
            assert error(found[part][name], array, FLOORS.get(part, 1e-6)) <= FP32_LIMIT, f"{part}.{name}"


widths = st.lists(st.integers(2, 33), max_size=3).map(tuple)
shapes = {
    "state": st.integers(1, 17),
    "branches": st.one_of(st.integers(2, 18).map(lambda n: (n,)), st.lists(st.integers(2, 4), min_size=2, max_size=8)),
    "hidden": widths,
    "batch": st.sampled_from([1, 2, 9, 16, 33]),
}
agents = st.one_of(
    st.builds(DqnAgent, **shapes, loss=st.sampled_from(["mse", "huber"]), double=st.booleans()),
    st.builds(
        C51Agent,
        **shapes,
        atoms=st.sampled_from([2, 11, 51, 101]),
        v_min=st.just(-3.0),
        v_max=st.sampled_from([2.0, 5.0]),
        double=st.booleans(),
    ),
    st.builds(
        IqnAgent,
        **shapes,
        cosines=st.integers(1, 9),
        quantiles=st.integers(1, 9),
        target_quantiles=st.integers(1, 9),
        width=st.integers(2, 17),
        kappa=st.sampled_from([0.5, 1.0]),
    ),
)


@settings(max_examples=30)
@given(agent=agents, seed=st.integers(0, 1000))
def test_three_steps_against_float64(device: Device, agent: PerceptronAgent, seed: int) -> None:
    with an_engine(device, agent, signals=SIGNALS) as engine:
        state = start(engine, seed)
        signals = {name: float(np.float32(value)) for name, value in SIGNALS.items()}
        for number in range(3):
            batch = a_batch(agent, seed + number)
            assume(is_clear(agent, state, batch))
            engine.write(**batch)
            engine.step()
            expected = steps.train(agent, state, batch, signals)
            compare(engine, expected, state)


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_the_reference_is_the_derivative(device: Device, agent: PerceptronAgent) -> None:
    rng = np.random.default_rng(3)
    with an_engine(device, agent) as engine:
        state = start(engine)
    batch = {name: x.astype(np.float64) if x.dtype == np.float32 else x for name, x in a_batch(agent, 4).items()}
    params = {name: x.astype(np.float64) for name, x in state.params.items()}
    result = steps.losses(agent, params, state.target, batch)
    (loss,) = [name for name in result.losses if name.startswith("L_")]
    for name, value in params.items():
        for index in rng.integers(0, value.size, 6):
            ends = []
            for sign in (1, -1):
                moved = value.copy()
                moved.flat[index] += sign * 1e-6
                ends.append(steps.losses(agent, params | {name: moved}, state.target, batch).losses[loss])
            numeric = (ends[0] - ends[1]) / 2e-6
            assert abs(numeric - result.grads[name].flat[index]) <= 1e-6, f"{name}[{index}]"


WIDE: dict[str, Any] = {"hidden": (24, 16), "batch": 16}
#: Sizes that the quantile networks of single launches serve.
WIDE_IQN = IqnAgent(6, (3, 2), **WIDE, quantiles=8, target_quantiles=8, width=16, cosines=8)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize(
    ("agent", "kernel"),
    [
        (DqnAgent(6, (3, 2), **WIDE, double=True), "dqn"),
        (C51Agent(6, (3, 2), **WIDE, atoms=21, v_min=-2.0, v_max=2.0), "c51"),
        (WIDE_IQN, "iqn_backward"),
        (replace(WIDE_IQN, quantiles=7), "iqn_mix_backward"),
    ],
    ids=["dqn", "c51", "iqn_fused", "iqn_layers"],
)
def test_tensor_cores(device: Device, precision: str, agent: PerceptronAgent, kernel: str) -> None:
    """Limits of docs/step.md, whichever way a quantile network is made."""
    limits = LIMITS[precision]
    with an_engine(device, agent, precision=precision, signals=SIGNALS) as engine:
        state = start(engine, 5)
        batch = a_batch(agent, 5)
        engine.write(**batch)
        engine.step()
        expected = steps.losses(agent, state.params, state.target, batch)
        found, report = read(engine)["grad"], engine.telemetry()
        assert report is not None
        for name, value in expected.losses.items():
            if name.startswith("L_"):
                assert relative_l2(report[name], value) <= limits.forward, name
        assert relative_l2(engine.output("td"), expected.td) <= limits.forward
        flat = [np.concatenate([g[name].ravel() for name in expected.grads]) for g in (found, expected.grads)]
        assert relative_l2(*flat) <= limits.grad_group
        assert any(record.family.name.startswith(kernel) for record in engine.builder.program.launches)


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_what_follows_a_dead_row_changes_no_bit(device: Device, agent: PerceptronAgent) -> None:
    states = []
    for filler in (0.0, np.nan, np.inf):
        with an_engine(device, agent, signals=SIGNALS) as engine:
            start(engine)
            batch = a_batch(agent, 6)
            dead = batch["discount"] == 0.0
            assert 0 < dead.sum() < agent.batch
            batch["next_state"][dead] = filler
            engine.write(**batch)
            engine.step()
            states.append((engine.output("td").tobytes(), engine.state_hash()))
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_hard_copies_are_exact(device: Device, agent: PerceptronAgent) -> None:
    with an_engine(device, agent, signals={**SIGNALS, "polyak_tau": 0.0}) as engine:
        start(engine)
        engine.write(**a_batch(agent, 7))
        before = read(engine)["target"]
        engine.step()
        kept = read(engine)
        engine.signals["polyak_tau"] = 1.0
        engine.step()
        copied = read(engine)
        for name, array in before.items():
            assert kept["target"][name].tobytes() == array.tobytes()
            assert copied["target"][name].tobytes() == copied["params"][name].tobytes()
            assert copied["params"][name].tobytes() != kept["params"][name].tobytes()


def test_a_huge_clip_does_not_clip(device: Device) -> None:
    """Gradients are not scaled at all: bit for bit what the first moment makes of them."""
    with an_engine(device, DQN, signals={**SIGNALS, "clip": 3e38, "beta1": 0.0}) as engine:
        start(engine)
        engine.write(**a_batch(DQN, 8))
        engine.step()
        found = read(engine)
        assert engine.plan.buffer("optimizer.scales").read().view(np.float32)[0] == 1.0
        for name, grad in found["grad"].items():
            np.testing.assert_array_equal(found["m"][name], grad)
        engine.signals["clip"] = 1e-3
        engine.step()
        assert engine.plan.buffer("optimizer.scales").read().view(np.float32)[0] < 1.0


@pytest.mark.parametrize("agent", [DqnAgent(4, (2,)), C51Agent(4, (2,)), IqnAgent(4, (2,), batch=2)])
def test_parameters_start_as_in_pytorch(device: Device, agent: PerceptronAgent) -> None:
    """Weights and biases uniform in ±1/√inputs, and the target a copy."""
    with an_engine(device, agent) as engine:
        found = read(engine)
        for name, value in found["params"].items():
            bound = 1.0 / np.sqrt(found["params"][name.replace("b_", "w_")].shape[1])
            assert np.abs(value).max() <= bound
            if value.size >= 80:
                assert np.abs(value).max() > 0.9 * bound and abs(value.std() * np.sqrt(3) / bound - 1.0) < 0.2
            assert value.any()
            assert found["target"][name].tobytes() == value.tobytes()
    weight = initial_value("w_fc1", (8, 4), 0)  # the rule for weights is that of PyTorch, for biases it is not
    np.testing.assert_array_equal(weight, initial_value("w_fc1", (8, 4), 0, bound=0.5))
    assert not initial_value("b_fc1", (8,), 0).any()


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_values_of_any_number_of_rows(device: Device, agent: PerceptronAgent, rows: int) -> None:
    rng = np.random.default_rng(9)
    x = rng.normal(size=(rows, agent.state)).astype(np.float32)
    extra = {"act_tau": agent.act_quantiles} if isinstance(agent, IqnAgent) else {}
    tau = rng.random((rows, agent.act_quantiles)).astype(np.float32) if isinstance(agent, IqnAgent) else None
    with an_engine(device, agent, signals=SIGNALS) as engine:
        state = start(engine)
        forward = Forward(engine, agent, rows, extra)
        inputs = {"state0": x} if tau is None else {"state0": x, "act_tau": tau}
        (q,) = forward(**inputs)
        assert error(q, steps.values(agent, state.params, x, tau)) <= FP32_LIMIT
        engine.write(**a_batch(agent, 10))
        engine.step()  # the parameters as they are now
        (after,) = forward(**inputs)
        assert error(after, steps.values(agent, read(engine)["params"], x, tau)) <= FP32_LIMIT
        assert (after != q).any()
        forward.plan.close()


def test_fractions_to_act_on_are_drawn_and_bent_by_risk(device: Device) -> None:
    rng = np.random.default_rng(11)
    x = rng.normal(size=(3, IQN.state)).astype(np.float32)
    with an_engine(device, IQN) as engine:
        state = start(engine)
        forward = Forward(engine, IQN, 3, {})
        slots = engine.plan.buffer(engine.builder.snapshot)
        snapshot = slots.read()
        found = []
        for risk in (0.0, -0.6):
            snapshot[engine.builder.signals.slot("risk").index] = risk
            slots.write(snapshot)
            (q,) = forward(state0=x, **{"act.counters": np.array([5, 0, 0, 77], np.uint64).view(np.uint8)})
            tau = reference_fractions(77, 5, ACT_TAU_STREAM, 3 * IQN.act_quantiles, risk).reshape(3, -1)
            assert error(q, steps.values(IQN, state.params, x, tau)) <= FP32_LIMIT
            found.append(q)
        assert (found[0] != found[1]).all()
        forward.plan.close()
        builder = StepBuilder(device.target, groups=IQN.groups, evaluation=True)
        with pytest.raises(ConfigError, match="no counters to draw fractions with"):
            IQN.values(builder, builder.input("state", (3, IQN.state)), {})


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_values_of_several_states_in_one_program(device: Device, agent: PerceptronAgent) -> None:
    """As a program that acts several times in a row needs them; the same row gets the same bits."""
    x = np.random.default_rng(12).normal(size=(2, 6, agent.state)).astype(np.float32)
    extra = {"act_tau": agent.act_quantiles} if isinstance(agent, IqnAgent) else {}
    with an_engine(device, agent) as engine:
        forward = Forward(engine, agent, 6, extra, times=2)
        tau = {name: np.full((6, columns), 0.25, np.float32) for name, columns in extra.items()}
        first, second = forward(state0=x[0], state1=x[1], **tau)
        swapped = forward(state0=x[1], state1=x[0], **tau)
        np.testing.assert_array_equal(swapped[0], second)
        np.testing.assert_array_equal(swapped[1], first)
        assert (first != second).any()
        forward.plan.close()


FULL = StepConfig(
    batch=6, state=6, tokens=3, attn=3, ofi=2, ofi_embed=2, h1=7, h2=5, value_h=6, adv_h=6, branches=(3, 2, 4), atoms=7,
    iqn_quantiles=3, iqn_target_quantiles=2, iqn_cos=4, iqn_h=4, ens=2, aux_h=5, aux_out=4, aux_head=3, regimes=3,
    iql_h=3, cur_h=3,
)  # fmt: skip


def test_the_full_agent_is_the_specified_step(device: Device) -> None:
    agent, rng = FullAgent(FULL), np.random.default_rng(13)
    assert (agent.state, agent.branches, agent.batch, agent.groups, agent.extra) == (6, (3, 2, 4), 6, None, {"ofi": 2})
    with an_engine(device, agent, seed=3) as engine, Engine(FULL, device=device, seed=3) as plain:
        assert engine.state_hash() == plain.state_hash()  # the same parameters at first
        assert engine.builder.outputs["td"].shape == (6,)
        inputs = {
            name: rng.normal(size=t.shape).astype(np.float32) if t.dtype == np.float32 else np.zeros(t.shape, t.dtype)
            for name, t in engine.builder.inputs.items()
        }
        engine.write(**inputs)
        forward = Forward(engine, agent, 6, agent.extra)
        (q,) = forward(state0=inputs["state"], ofi=inputs["ofi"])
        engine.step()  # its values at s are those of the parameters before
        assert_close(q, engine.output("q"), atol=2e-6)
        forward.plan.close()
        builder = StepBuilder(device.target, evaluation=True)
        with pytest.raises(ConfigError, match=r"also read \['ofi'\], got \[\]"):
            agent.values(builder, builder.input("state", (6, 6)), {})
    with pytest.raises(ConfigError, match=r"config.branches = \(\): it must have branches"):
        FullAgent(StepConfig.aux_only())


def test_evaluation_of_a_batch(device: Device) -> None:
    """`Engine.evaluate` declares the training step without training."""
    with an_engine(device, DQN) as engine:
        state, batch = start(engine), a_batch(DQN, 14)
        found = engine.evaluate(batch, definition=DQN.train)
        expected = steps.losses(DQN, state.params, state.target, batch).losses
        assert error(np.array(found["L_td"]), np.array(expected["L_td"])) <= FP32_LIMIT


def test_what_cannot_be_built_is_refused(device: Device) -> None:
    for make, message in (
        (lambda: DqnAgent(0, (2,)), "DqnAgent: state = 0: it must be at least 1"),
        (lambda: DqnAgent(4, (2,), batch=0), "batch = 0: it must be at least 1"),
        (lambda: DqnAgent(4, ()), r"branches = \(\): it must be 1 to 8 branches"),
        (lambda: C51Agent(4, (2, 1)), r"C51Agent: branches = \(2, 1\): it must be at least 2 actions"),
        (lambda: DqnAgent(4, (2,), hidden=(8, 0)), r"hidden = \(8, 0\): it must be widths of at least 1"),
        (lambda: DqnAgent(4, (2,), loss="l1"), "loss = 'l1': it must be one of mse, huber"),  # type: ignore[arg-type]
        (lambda: C51Agent(4, (2,), atoms=257), "atoms = 257: it must be 2 to 256"),
        (lambda: C51Agent(4, (2,), v_min=3.0, v_max=3.0), "v_min = 3.0: it must be finite and below v_max = 3.0"),
        (lambda: IqnAgent(4, (2,), quantiles=0), "IqnAgent: quantiles = 0: it must be at least 1"),
        (lambda: IqnAgent(4, (2,), kappa=0.0), "kappa = 0.0: it must be above 0 and finite"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()
    builder = StepBuilder(device.target, groups=DQN.groups, evaluation=True)
    with pytest.raises(ConfigError, match=r"acts on float32 \[rows, 5\], got float32 \(3, 4\)"):
        DQN.values(builder, builder.input("state", (3, 4)), {})
