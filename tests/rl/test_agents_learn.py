"""The agents on a small world whose values are known: a chain of states with a prize at its end."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.rl.agents import Agent, C51Agent, DqnAgent, IqnAgent
from tests.rl.engines import Forward

STATES, GAMMA, PRIZE, CRUMB = 5, 0.8, 1.0, 0.1
#: Steps between copies of the network.
COPY = 8
SHAPE: dict[str, Any] = {"hidden": (16,), "batch": 32}


def chain(branches: tuple[int, ...] = (2,)) -> dict[str, np.ndarray]:
    """All transitions, as rows. The first branch walks: 1 to the right, past the last state for the prize; 0 to the
    left, and at the first state it stays there for a crumb. Any other branch earns a tenth of its action's number."""
    rows = []
    for s, actions in product(range(STATES), product(*map(range, branches))):
        right = actions[0] == 1
        ends = right and s == STATES - 1
        after = min(s + 1, STATES - 1) if right else max(s - 1, 0)
        reward = (PRIZE if ends else CRUMB if not right and s == 0 else 0.0) + 0.1 * sum(actions[1:])
        rows.append((s, after, reward, 0.0 if ends else GAMMA, actions))
    s, after, reward, discount, actions = (np.array(x) for x in zip(*rows, strict=True))
    eye = np.eye(STATES, dtype=np.float32)
    return {
        "state": eye[s],
        "next_state": eye[after],
        "reward": reward.astype(np.float32),
        "discount": discount.astype(np.float32),
        "weight": np.ones(len(s), np.float32),
        "actions": actions.astype(np.int32),
    }


def optimum(branches: tuple[int, ...] = (2,)) -> np.ndarray:
    """What expected values become [states, Σn_d], by iteration: each branch by itself, the others at random."""
    rows, total = chain(branches), sum(branches)
    q = np.zeros((STATES, total))
    state, after = rows["state"].argmax(axis=1), rows["next_state"].argmax(axis=1)
    reward, discount = rows["reward"].astype(np.float64), rows["discount"].astype(np.float64)
    for _ in range(200):
        for d, (first, n) in enumerate(zip(accumulate(branches, initial=0), branches, strict=False)):
            goal = reward + discount * q[after, first : first + n].max(axis=1)
            for s, a in product(range(STATES), range(n)):
                q[s, first + a] = goal[(state == s) & (rows["actions"][:, d] == a)].mean()
    return q


def learn(device: Device, agent: Agent, steps: int, lr: float, *, precision: str = "fp32") -> np.ndarray:
    """Values of all states after some steps on the chain, the rate falling to 0."""
    extra = {"act_tau": agent.act_quantiles} if isinstance(agent, IqnAgent) else {}
    with Engine(
        agent.train,
        device=device,
        groups=agent.groups,
        data=chain(agent.branches),
        signals={"clip": 1e30},
        precision=precision,
    ) as engine:
        for i in range(steps):
            engine.signals.update({"lr": lr * (1 - i / steps), "polyak_tau": float(i % COPY == COPY - 1)})
            engine.step()
        engine.synchronize()
        report = engine.telemetry()
        assert report is not None and not report.nonfinite_groups
        midpoints = {n: np.tile((np.arange(k, dtype=np.float32) + 0.5) / k, (STATES, 1)) for n, k in extra.items()}
        with Forward(engine, agent, STATES, extra) as forward:
            (q,) = forward(state0=np.eye(STATES, dtype=np.float32), **midpoints)
    return q


def test_the_chain_is_a_choice() -> None:
    """Where the prize is far it is better to take the crumb again and again."""
    q = optimum()
    np.testing.assert_array_equal(q.argmax(axis=1), [0, 1, 1, 1, 1])
    np.testing.assert_allclose(q[0, 0], CRUMB / (1 - GAMMA), rtol=1e-6)
    np.testing.assert_allclose(q[:, 1], PRIZE * GAMMA ** np.arange(4, -1, -1), rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"double": True, "loss": "huber"}], ids=["squares", "double_huber"])
def test_dqn_finds_the_values(device: Device, options: dict[str, Any]) -> None:
    q = learn(device, DqnAgent(STATES, (2,), **SHAPE, **options), 400, 0.02)
    np.testing.assert_allclose(q, optimum(), atol=2e-3)


def test_every_branch_finds_its_values(device: Device) -> None:
    q = learn(device, DqnAgent(STATES, (2, 3), **SHAPE), 500, 0.02)
    np.testing.assert_allclose(q, optimum((2, 3)), atol=0.05)
    np.testing.assert_array_equal(q[:, 2:].argmax(axis=1), 2)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_dqn_learns_on_tensor_cores(device: Device, precision: str) -> None:
    q = learn(device, DqnAgent(STATES, (2,), **SHAPE), 300, 0.02, precision=precision)
    np.testing.assert_array_equal(q.argmax(axis=1), optimum().argmax(axis=1))


@pytest.mark.parametrize(
    "agent",
    [
        C51Agent(STATES, (2,), **SHAPE, atoms=21, v_min=0.0, v_max=1.0),
        IqnAgent(STATES, (2,), **SHAPE, cosines=8, quantiles=8, target_quantiles=8, act_quantiles=8, width=16),
    ],
    ids=["c51", "iqn"],
)
def test_distributions_find_the_best_actions(device: Device, agent: C51Agent | IqnAgent) -> None:
    q = learn(device, agent, 400, 0.02)
    np.testing.assert_array_equal(q.argmax(axis=1), optimum().argmax(axis=1))
    np.testing.assert_allclose(q, optimum(), atol=0.02)
