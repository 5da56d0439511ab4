"""`train` and `Trainer`: what reaches the replay, when what happens, what is learnt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fxengine.driver import Device
from fxengine.rl import DqnAgent, Trainer
from fxengine.rl.settings import ALGORITHMS
from tests.rl.small import config, learn
from tests.rl.worlds import STATES, Chain, Counter, Lock, Still, chain_values

# -- what reaches the replay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_the_replay_holds_what_truly_followed(device: Device, truncate: bool, dtype: Any) -> None:
    lengths = iter((3, 5))
    with Trainer(
        lambda: Counter(next(lengths), truncate=truncate, dtype=dtype),
        total_steps=40,
        envs=2,
        device=device,
        config=config(buffer=24, learning_starts=1000),
    ) as trainer:
        trainer.advance(40)
        held = trainer.engine.state()
        assert trainer.state.updates == 0
        assert sorted(trainer.state.history.returns) == [14.0] * 6 + [55.0] * 4
    newest = np.arange(20)[-12:]  # slots of 2 environments, in the order of their ring
    at = newest % 12
    for e, length in enumerate((3, 5)):
        np.testing.assert_array_equal(held["replay.field.state"][at, e, :2], np.stack([newest % length] * 2, axis=1))
        np.testing.assert_array_equal(held["replay.field.next_state"][at, e, 0], newest % length + 1)
        np.testing.assert_array_equal(held["replay.field.reward"][at, e], (newest % length + 1) ** 2)
        over = newest % length == length - 1
        np.testing.assert_array_equal(held["replay.field.done"][at, e], over * (2 if truncate else 1))


class Failing(Counter):
    """Raises at its sixth step."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 6:
            raise RuntimeError("the environment broke")
        return super().step(action)


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_no_step_is_lost_where_an_environment_fails(device: Device, epsilon: float) -> None:
    settings = config(epsilon_start=epsilon, epsilon_end=epsilon, learning_starts=1000)
    with Trainer(lambda: Failing(100), total_steps=40, device=device, config=settings) as trainer:
        with pytest.raises(RuntimeError, match="the environment broke"):
            trainer.advance(40)
        assert trainer.engine.inserted == trainer.state.steps == 5
        held = trainer.engine.state()["replay.field.state"][:6, 0, 0]
    np.testing.assert_array_equal(held, [0, 1, 2, 3, 4, 0])


def test_a_step_waits_for_its_actions_alone(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step before is inserted while the device acts, but never behind an update that may draw it."""
    queued: list[str] = []
    settings = config(epsilon_start=0.0, epsilon_end=0.0, learning_starts=4, train_every=4)
    with Trainer(Chain, total_steps=12, device=device, config=settings) as trainer:
        insert, begin, step = trainer._insert_newest, trainer.acting.begin, trainer.engine.step

        def told(name: str, function: Any) -> Any:
            return lambda *arguments: (queued.append(name), function(*arguments))[1]

        monkeypatch.setattr(trainer, "_insert_newest", told("i", insert))
        monkeypatch.setattr(trainer.acting, "begin", told("a", begin))
        monkeypatch.setattr(trainer.engine, "step", told("u", step))
        trainer.advance(9)
        assert "".join(queued) == "a" + "ai" * 7 + "iuai"
        assert trainer.engine.inserted == 9


# -- when what happens -------------------------------------------------------------------------------------------------


def target_of(trainer: Trainer, name: str) -> np.ndarray:
    trainer.engine.synchronize()
    return trainer.engine.plan.buffer(trainer.engine.builder.target_parameters[name]).read()


@pytest.mark.parametrize(
    ("changes", "envs", "expected"),
    [
        ({}, 1, (200 - 40) // 4),
        ({"updates": 3}, 1, 3 * (200 - 40) // 4),
        ({"train_every": 2}, 6, (204 - 40) // 2),
        ({"learning_starts": 0, "n_step": 3, "train_every": 1}, 2, 200 - 6 + 1),
    ],
)
def test_number_of_updates(device: Device, changes: dict[str, Any], envs: int, expected: int) -> None:
    result = learn(Chain, device, config=config(**changes), envs=envs)
    assert result.updates == expected
    assert result.steps == -(-200 // envs) * envs


def test_the_target_network_is_copied_at_its_time(device: Device) -> None:
    with Trainer(Chain, total_steps=200, device=device, config=config()) as trainer:
        first = target_of(trainer, "w_out")
        copied = []
        for step in range(44, 121, 4):
            trainer.advance(step)
            now = trainer.engine.params["w_out"]
            if (target_of(trainer, "w_out") == now).all():
                copied.append(step)
                first = now
            np.testing.assert_array_equal(target_of(trainer, "w_out"), first)
    assert copied == [60, 80, 100, 120]


def test_the_target_network_can_stay_or_follow_slowly(device: Device) -> None:
    with Trainer(Chain, total_steps=200, device=device, config=config(tau=0.0)) as trainer:
        first = target_of(trainer, "w_out")
        trainer.advance(200)
        np.testing.assert_array_equal(target_of(trainer, "w_out"), first)
    with Trainer(Chain, total_steps=200, device=device, config=config(tau=0.25, target_every=4)) as trainer:
        trainer.advance(44)
        online = trainer.engine.params["w_out"]
        np.testing.assert_allclose(target_of(trainer, "w_out"), first + 0.25 * (online - first), rtol=1e-5, atol=1e-7)


def test_a_copy_that_was_skipped_is_repeated(device: Device) -> None:
    with Trainer(Chain, total_steps=200, device=device, config=config()) as trainer:
        trainer.advance(56)
        good = trainer.engine.params["b_out"]
        trainer.engine.params["b_out"] = np.full_like(good, np.nan)
        trainer.advance(60)  # the step that would copy: its gradient is not finite
        trainer.engine.params["b_out"] = good
        assert not np.isnan(target_of(trainer, "b_out")).any()
        trainer.advance(64)
        np.testing.assert_array_equal(target_of(trainer, "w_out"), trainer.engine.params["w_out"])
        trainer.advance(68)
        assert (target_of(trainer, "w_out") != trainer.engine.params["w_out"]).any(), "once"
        assert trainer.result().skipped == 1


def test_nothing_is_learnt_at_rate_0(device: Device) -> None:
    with Trainer(Chain, total_steps=80, device=device, config=config(lr=0.0)) as trainer:
        before = {name: trainer.engine.params[name] for name in trainer.engine.params}
        trainer.advance(80)
        assert trainer.state.updates == 10
        for name, value in before.items():
            np.testing.assert_array_equal(trainer.engine.params[name], value)


# -- what is learnt ----------------------------------------------------------------------------------------------------


def values(trainer: Trainer, states: np.ndarray) -> np.ndarray:
    _, q = trainer.acting.act(states, greedy=True, values=True)
    return q


@pytest.mark.parametrize("options", [{}, {"n_step": 3, "prioritized": True, "double": True}], ids=["plain", "rainbow"])
def test_dqn_solves_the_chain(device: Device, options: dict[str, Any]) -> None:
    """To the values that iteration finds; at random throughout, so that every pair is seen."""
    settings = config(
        hidden=(16,), lr=5e-3, batch=32, buffer=1000, gamma=0.8, train_every=2, epsilon_end=1.0, **options
    )
    with Trainer(Chain, total_steps=4000, device=device, seed=1, config=settings) as trainer:
        trainer.advance(3000)
        for lr in (2e-3, 5e-4):
            trainer.engine.signals["lr"] = lr
            trainer.advance(trainer.state.steps + 500)
        q = values(trainer, np.eye(STATES, dtype=np.float32))
        best = chain_values(0.8)
        np.testing.assert_array_equal(q.argmax(axis=1), best.argmax(axis=1))
        if not options:  # n steps at random are no longer those of the best policy
            np.testing.assert_allclose(q, best, atol=0.02)


@pytest.mark.parametrize(("truncate", "value"), [(False, 1.0), (True, 5.0)])
def test_a_truncated_episode_still_has_a_future(device: Device, truncate: bool, value: float) -> None:
    settings = config(hidden=(8,), lr=0.02, gamma=0.8, buffer=100, train_every=1, target_every=5)
    with Trainer(lambda: Still(truncate=truncate), total_steps=600, device=device, config=settings) as trainer:
        trainer.advance(600)
        np.testing.assert_allclose(values(trainer, np.ones((1, 1), np.float32)), value, atol=0.05)


def test_several_branches_and_bytes(device: Device) -> None:
    result = learn(Lock, device, total_steps=600, config=config(lr=5e-3, train_every=1), evaluation_episodes=3, envs=2)
    assert result.evaluations[-1].returns == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_trains(device: Device, algorithm: str) -> None:
    settings = config(prioritized=True, n_step=2, buffer=120)
    result = learn(Chain, device, algorithm=algorithm, total_steps=120, config=settings, envs=2, evaluation_episodes=2)
    assert result.algorithm == algorithm
    assert result.updates == 20
    assert result.skipped == 0
    assert result.census.instantiations == 1
    assert all(np.isfinite(loss) for _, loss in result.losses)
    assert [step for step, _ in result.losses] == sorted({step for step, _ in result.losses})
    assert len(result.evaluations) == 1
    assert len(result.evaluations[0].returns) == 2


def test_an_agent_of_ones_own(device: Device) -> None:
    def mine(state: int, branches: tuple[int, ...]) -> DqnAgent:
        return DqnAgent(state, branches, hidden=(5,), batch=8, loss="huber")

    result = learn(Chain, device, algorithm=mine)
    assert result.algorithm == "mine"
    assert result.params["w_out"].shape == (2, 5)


def test_an_environment_given_as_an_object(device: Device) -> None:
    result = learn(Chain(), device)
    assert result.env == "Chain"
    with pytest.raises(ValueError, match="cannot make further environments"):
        learn(Chain(), device, evaluation_episodes=1)
    result = learn(Chain(), device, evaluation_episodes=2, evaluation_env=Chain)
    assert len(result.evaluations[0].returns) == 2
