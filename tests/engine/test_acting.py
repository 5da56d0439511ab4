"""Acting of engines made from a function: forwards of their own, signals and inputs that they read, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fxengine import Engine
from fxengine.actgraph import ACT_STREAM
from fxengine.acting import Acting
from fxengine.driver import Device
from fxengine.graphs import ProgramError, Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.ops import policy as ops
from fxengine.train.groups import linear_specs
from tests.support import assert_close

LAYERS = (("one", 8, 5), ("two", 7, 8))
QUANTILES = 4


def classifier(step: StepBuilder, *, policy: bool = True) -> None:
    """Two layers that learn to tell two classes; acting reads its seven outputs as branches of three and four."""
    if policy:
        step.signals.include("policy")
    step.group("net", [spec for name, n, k in LAYERS for spec in linear_specs(name, n, k)])
    logits = outputs(step, step.input("state", (6, 5)))
    step.tape.crossentropy(
        logits, step.input("labels", (6,), np.int32), weight=step.signal("w_nb"), loss="loss", name="loss"
    )


def outputs(step: StepBuilder, state: Tensor) -> Tensor:
    hidden = step.tape.linear(state, "w_one", "b_one", activation="relu", name="hidden")
    return step.tape.linear(hidden, "w_two", "b_two", name="outputs")


def forward(step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
    step.group("net", [spec for name, n, k in LAYERS for spec in linear_specs(name, n, k)])
    return outputs(step, state)


def network(device: Device, **options: Any) -> Engine:
    return Engine(classifier, device=device, groups={0: "net"}, **options)


def mlp(params: Mapping[str, Any], x: NDArray[Any]) -> NDArray[np.float64]:
    p = {name: np.asarray(v, np.float64) for name, v in params.items()}
    result: NDArray[np.float64] = np.maximum(x @ p["w_one"].T + p["b_one"], 0) @ p["w_two"].T + p["b_two"]
    return result


def test_a_call_in_two_halves(device: Device) -> None:
    """What is queued between them runs behind the call: the actions are those of the parameters before."""
    rng = np.random.default_rng(0)
    obs, state = (rng.standard_normal((rows, 5)).astype(np.float32) for rows in (3, 6))
    with network(device, signals={"lr": 0.5}) as engine:
        engine.write(state=state, labels=np.zeros(6, np.int32))
        acting = Acting(engine, forward, branches=(3, 4), policy="boltzmann", seed=8)
        before, q = acting.act(obs, values=True)
        acting.count = 0
        finish = acting.begin(obs, "boltzmann", True, {})
        engine.step()
        assert acting.count == 0
        actions, values = finish()
        assert acting.count == 1
        np.testing.assert_array_equal(actions, before)
        np.testing.assert_array_equal(values, q)
        assert (acting.act(obs, values=True)[1] != q).any()
        with pytest.raises(ValueError, match="observations must be"):
            acting.begin(obs[:, :4], "greedy", False, {})


def test_a_function_acts(device: Device) -> None:
    obs = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    with network(device) as engine:
        acting = Acting(engine, forward, branches=(3, 4), rows=(1, 3), policy="boltzmann", seed=8)
        actions, q = acting.act(obs, greedy=True, values=True)
        assert_close(q, mlp(engine.params, obs), atol=2e-6)
        np.testing.assert_array_equal(actions, ops.reference_greedy(q, (3, 4)))
        engine.signals["temperature"] = 0.5
        drawn, margins = ops.reference_boltzmann(q, (3, 4), 0.5, seed=8, count=1, stream=ACT_STREAM)
        assert margins.min() > 1e-5
        np.testing.assert_array_equal(acting.act(obs), drawn)


def test_a_function_draws_fractions_by_the_risk_as_set_by_now(device: Device) -> None:
    """The signal reaches what the forward itself declares; the mean over the quantiles is q."""

    def quantile_values(step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        step.group("net", [spec for name, n, k in LAYERS for spec in linear_specs(name, n, k)])
        tau = step.program.tensor("tau", (3 * QUANTILES, 5))
        ops.fractions(step.program, tau, risk=step.signal("risk"), counters=step.counters, stream=40)
        q = step.program.tensor("q", (3, 7))
        ops.quantile_mean(step.program, outputs(step, tau), q, quantiles=QUANTILES)
        return q

    obs = np.zeros((3, 5), np.float32)
    with network(device) as engine:
        acting = Acting(engine, quantile_values, branches=(7,), policy="greedy")
        for count, risk in enumerate((0.0, -0.5, 0.25, -1.0)):
            engine.signals["risk"] = risk
            tau = ops.reference_fractions(0, count, 40, 15 * QUANTILES, risk).reshape(-1, 5)
            expected = ops.reference_quantile_mean(mlp(engine.params, tau), QUANTILES)
            assert_close(acting.act(obs, values=True)[1], expected, atol=2e-6)


def test_a_function_has_no_act_of_its_own(device: Device) -> None:
    with network(device) as function, pytest.raises(ValueError, match=r"acts through fxengine\.acting\.Acting"):
        function.act(np.zeros((1, 5), np.float32))


def test_a_declaration_that_cannot_act_is_refused(device: Device) -> None:
    def with_signal(name: str) -> Any:
        def values(step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
            tau = step.program.tensor("tau", (1, 4))
            ops.fractions(step.program, tau, risk=step.signal(name), counters=step.counters, stream=0)
            return forward(step, state, extra)

        return values

    def with_input(step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        step.input("labels", (1,), np.int32)
        return forward(step, state, extra)

    with network(device) as engine:
        with pytest.raises(ProgramError, match="signal 'gate_open', which only a training step has"):
            Acting(engine, with_signal("gate_open"), branches=(7,), rows=1)
        with pytest.raises(ProgramError, match=r"reads inputs \['labels'\]"):
            Acting(engine, with_input, branches=(7,), rows=1)
        with pytest.raises(ValueError, match=r"q must be float32 \(1, 6\)"):
            Acting(engine, forward, branches=(3, 3), rows=1)
        with pytest.raises(ValueError, match="no input volume; it has"):
            Acting(engine, forward, branches=(7,), extra=("volume",))
        with pytest.raises(ValueError, match="seed"):
            Acting(engine, forward, branches=(7,), seed=-1)
    with Engine(lambda step: classifier(step, policy=False), device=device, groups={0: "net"}) as plain:
        Acting(plain, forward, branches=(7,), rows=1, policy="greedy")
        with pytest.raises(ProgramError, match=r"'epsilon', which the step does not have.*include\('policy'\)"):
            Acting(plain, forward, branches=(7,), rows=1)
