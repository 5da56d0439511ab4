"""What the trainer sees of environments: the end of an episode, spaces, exploration, settings. No device is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from fxengine.rl.envs import Environments, Spaces, open_environments, seed_of
from fxengine.rl.exploration import BLOCK, Exploration
from fxengine.rl.settings import TrainConfig
from tests.rl.worlds import Chain, Counter, Lock
from tools.peers import cartpole


def vector(mode: AutoresetMode) -> SyncVectorEnv[Any, Any]:
    lengths = (3, 5)
    return SyncVectorEnv([lambda n=n: Counter(n, truncate=n == 5) for n in lengths], autoreset_mode=mode)


def pair() -> Environments:
    made = iter([Counter(3), Counter(5, truncate=True)])
    return open_environments(lambda: next(made), 2)


WAYS: dict[str, Callable[[], Environments]] = {
    "separate": pair,
    "same_step": lambda: open_environments(vector(AutoresetMode.SAME_STEP), 2),
    "disabled": lambda: open_environments(vector(AutoresetMode.DISABLED), 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_true_next_observation_is_kept(way: str) -> None:
    """The first counts to 3 and terminates, the second to 5 and is truncated, whatever way they are reset."""
    environments = WAYS[way]()
    environments.reset([1, 2])
    counts = np.zeros(2)
    for _ in range(16):
        environments.step(np.zeros((2, 1), np.int32))
        np.testing.assert_array_equal(environments.state[:, 0], counts)
        np.testing.assert_array_equal(environments.next_state[:, 1], counts + 1)
        np.testing.assert_array_equal(environments.reward, (counts + 1) ** 2)
        over = counts + 1 == [3, 5]
        np.testing.assert_array_equal(environments.terminated, [over[0], False])
        np.testing.assert_array_equal(environments.truncated, [False, over[1]])
        counts = np.where(over, 0, counts + 1)
        np.testing.assert_array_equal(environments.current[:, 0], counts)
    assert sorted((e.total, e.length) for e in environments.finished) == [(14.0, 3)] * 5 + [(55.0, 5)] * 3
    environments.close()


def test_a_vector_environment_that_loses_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SAME_STEP or DISABLED, got .*NEXT_STEP"):
        open_environments(vector(AutoresetMode.NEXT_STEP), 2)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_vector_environment_takes_its_actions(mode: AutoresetMode) -> None:
    environments = open_environments(SyncVectorEnv([Lock, Lock], autoreset_mode=mode), 2)
    environments.reset([1, 2])
    actions = np.array([[2, 0], [0, 1]], np.int32)
    environments.step(actions)
    np.testing.assert_array_equal(environments.reward, [2.0, 0.0])
    np.testing.assert_array_equal(environments.actions, actions)
    environments.close()


def test_discrete_actions_of_a_vector_environment() -> None:
    found = Spaces.of(BOX, spaces.Discrete(3, start=-1))
    np.testing.assert_array_equal(found.taken_together(np.array([[0], [2]], np.int32)), [-1, 1])
    found = Spaces.of(BOX, spaces.MultiDiscrete([3, 2], start=[1, 5]))
    np.testing.assert_array_equal(found.taken_together(np.array([[0, 1], [2, 0]], np.int32)), [[1, 6], [3, 5]])


class Altered(gymnasium.vector.VectorWrapper):
    """What a vector environment returns, altered."""

    def __init__(self, **altered: Callable[[Any], Any]) -> None:
        super().__init__(vector(AutoresetMode.SAME_STEP))
        self.altered = altered

    def step(self, actions: Any) -> Any:
        observations, rewards, *rest = super().step(actions)
        for name, change in self.altered.items():
            if name == "observations":
                observations = change(observations)
            else:
                rewards = change(rewards)
        return observations, rewards, *rest


@pytest.mark.parametrize(
    ("altered", "message"),
    [
        ({"observations": lambda x: x.astype(np.float64)}, r"float64 \(1, 2\); its space says float32"),
        ({"observations": lambda x: x[:, 0]}, r"float32 \(2,\); its space says float32 \(1, 2\)"),
        ({"rewards": lambda x: x[:1]}, r"rewards \(1,\), expected \(2,\)"),
        ({"rewards": lambda x: np.array([1.0, np.nan])}, "environment 1 returned a reward of nan"),
        ({"rewards": lambda x: np.array([np.inf, 1.0])}, "environment 0 returned a reward of inf"),
        ({"observations": tuple, "rewards": lambda x: np.full(2, 1e308)}, ""),
    ],
)
def test_what_a_vector_environment_may_return(altered: dict[str, Any], message: str) -> None:
    """Observations may be any sequence of arrays, and finite rewards may be as large as they like."""
    environments = open_environments(Altered(**altered), 2)
    environments.reset([1, 2])
    if message:
        with pytest.raises(ValueError, match=message):
            environments.step(np.zeros((2, 1), np.int32))
    else:
        with np.errstate(over="ignore"):
            environments.step(np.zeros((2, 1), np.int32))
        np.testing.assert_array_equal(environments.next_state, 1.0)


BOX, TWO = spaces.Box(0.0, 1.0, (3,), np.float32), spaces.Discrete(2)


@pytest.mark.parametrize(
    ("observation", "action", "named"),
    [
        (spaces.Box(0.0, 1.0, (3,), np.float64), TWO, "float64"),
        (spaces.Discrete(4), TWO, r"Discrete\(4\)"),
        (spaces.Dict({"x": BOX}), TWO, "Dict"),
        (spaces.Box(0.0, 1.0, (0,), np.float32), TWO, r"\(0,\)"),
        (BOX, spaces.Box(-1.0, 1.0, (2,), np.float32), "Box"),
        (BOX, spaces.MultiDiscrete([[2, 2], [2, 2]]), "MultiDiscrete"),
        (BOX, spaces.MultiBinary(3), "MultiBinary"),
    ],
)
def test_other_spaces_are_refused_by_name(
    observation: spaces.Space[Any], action: spaces.Space[Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        Spaces.of(observation, action)


def test_actions_as_the_environment_takes_them() -> None:
    found = Spaces.of(BOX, spaces.Discrete(3, start=-1))
    assert found.branches == (3,)
    assert found.taken(np.array([[0], [2]], np.int32)) == [-1, 1]
    found = Spaces.of(BOX, spaces.MultiDiscrete([3, 2], start=[1, 5]))
    assert found.branches == (3, 2)
    np.testing.assert_array_equal(found.taken(np.array([[0, 1], [2, 0]], np.int32)), [[1, 6], [3, 5]])


def test_observations_as_a_network_reads_them() -> None:
    found = Spaces.of(spaces.Box(0, 255, (2, 2), np.uint8), TWO)
    assert found.size == 4
    read = found.readable(np.array([[0, 1, 128, 255]], np.uint8))
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, np.array([[0, 1, 128, 255]], np.float32) * np.float32(1 / 255))


class Wrong(Counter):
    """Goes wrong at its second step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        if self.t == 2:
            observation = {"dtype": observation.astype(np.float64), "shape": observation[0], "list": [[2.0, 2.0]]}.get(
                self.how, observation
            )
            reward = float(self.how) if self.how in ("nan", "inf") else reward
        return observation, reward, *rest


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dtype", r"float64 \(1, 2\); its space says float32 \(1, 2\)"),
        ("shape", r"float32 \(2,\)"),
        ("list", "list"),
        ("nan", "reward of nan"),
        ("inf", "reward of inf"),
    ],
)
def test_what_is_not_of_the_space_is_refused(how: str, message: str) -> None:
    environments = open_environments(lambda: Wrong(how), 1)
    environments.reset([0])
    environments.step(np.zeros((1, 1), np.int32))
    with pytest.raises(ValueError, match=message):
        environments.step(np.zeros((1, 1), np.int32))


@pytest.mark.parametrize(
    ("source", "count", "message"),
    [
        ("Fly-v0", 1, "environment 'Fly-v0': .*name the package too"),
        ("nowhere:Fly-v0", 1, "nowhere"),
        ("CartPole-v1", 0, "envs must be at least 1, got 0"),
        (Counter(), 2, "envs = 2 of one environment"),
    ],
)
def test_what_cannot_be_opened(source: Any, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_environments(source, count)


def test_different_environments_are_refused() -> None:
    made = iter([Counter(), Chain()])
    with pytest.raises(ValueError, match="environments differ"):
        open_environments(lambda: next(made), 2)


@pytest.mark.parametrize("kind", ["separate", "vector"])
def test_a_snapshot_goes_on_in_the_middle_of_an_episode(kind: str) -> None:
    def course(environments: Environments, steps: int) -> np.ndarray:
        rows = []
        for t in range(steps):
            environments.step(np.array([[t % 2], [t % 3 == 0]], np.int32))
            rows.append(np.concatenate([environments.next_state.ravel(), environments.current.ravel()]))
        return np.array(rows)

    def opened() -> Environments:
        return open_environments("CartPole-v1" if kind == "separate" else cartpole.make(2, "arrays"), 2)

    first, second = opened(), opened()
    first.reset([1, 2])
    second.reset([3, 4])
    course(first, 17)
    snapshot = first.snapshot()
    assert snapshot is not None
    second.restore(snapshot)
    first.finished.clear()
    np.testing.assert_array_equal(course(second, 60), course(first, 60))
    assert second.finished == first.finished != []


def test_what_cannot_be_pickled_has_no_snapshot() -> None:
    env = Counter()
    env.secret = lambda: 0  # type: ignore[attr-defined]
    assert open_environments(env, 1).snapshot() is None


def test_seeds_do_not_overlap() -> None:
    seeds = [seed_of(s, stream, i) for s in range(20) for stream in range(3) for i in range(20)]
    assert len(set(seeds)) == len(seeds)


# -- exploration -------------------------------------------------------------------------------------------------------


def unexpected() -> np.ndarray:
    raise AssertionError("nobody acts greedily")


def test_exploration_asks_for_greedy_actions_only_if_needed() -> None:
    always = Exploration(1, 3, (4, 2), lambda step: 1.0)
    drawn = np.array([always.actions(t, unexpected) for t in range(2 * BLOCK)])
    assert drawn.shape == (2 * BLOCK, 3, 2)
    for branch, n in enumerate((4, 2)):
        share = np.bincount(drawn[:, :, branch].ravel(), minlength=n) / (6 * BLOCK)
        np.testing.assert_allclose(share, 1 / n, atol=0.03)
    never = Exploration(1, 3, (4, 2), lambda step: 0.0)
    greedy = np.full((3, 2), 1, np.int32)
    assert all((never.actions(t, greedy.copy) == 1).all() for t in range(50))


def test_exploration_depends_on_seed_and_round_alone() -> None:
    def greedy() -> np.ndarray:
        return np.full((5, 1), 7, np.int32)

    def falling(step: int) -> float:
        return 1.0 - step / (5 * 2 * BLOCK)

    one, other = Exploration(3, 5, (2,), falling), Exploration(3, 5, (2,), falling)
    course = [one.actions(t, greedy).copy() for t in range(2 * BLOCK)]
    for t in (2 * BLOCK - 1, 3, BLOCK, BLOCK - 1):  # as a resumed run would, from anywhere
        np.testing.assert_array_equal(other.actions(t, greedy), course[t])
    random = np.array(course)[:, :, 0] != 7
    np.testing.assert_allclose(random.reshape(4, -1).mean(axis=1), [0.875, 0.625, 0.375, 0.125], atol=0.04)
    assert any(0 < row.sum() < 5 for row in random), "each environment decides for itself"
    different = Exploration(4, 5, (2,), falling)
    assert any((different.actions(t, greedy) != course[t]).any() for t in range(20))


# -- settings ----------------------------------------------------------------------------------------------------------


def test_epsilon_falls_along_a_line() -> None:
    config = TrainConfig(epsilon_start=1.0, epsilon_end=0.2, exploration=0.5)
    np.testing.assert_allclose([config.epsilon(t, 1000) for t in (0, 250, 500, 1000)], [1.0, 0.6, 0.2, 0.2])
    assert TrainConfig(exploration=0.0).epsilon(0, 1000) == 0.05


def test_epsilon_of_adam_is_the_published_one() -> None:
    assert TrainConfig().signals("dqn")["adam_eps"] == 1e-8
    assert TrainConfig().signals("c51")["adam_eps"] == 0.01 / 128
    assert TrainConfig(adam_eps=1e-3).signals("c51")["adam_eps"] == 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch = 0: it must be at least 1"),
        ({"lr": -1.0}, "lr = -1.0"),
        ({"lr": float("nan")}, "lr = nan"),
        ({"gamma": 1.5}, "gamma = 1.5: it must be between 0 and 1"),
        ({"epsilon_end": 0.5, "epsilon_start": 0.1}, "epsilon_end = 0.5: it must be at most epsilon_start"),
        ({"target_every": 0}, "target_every = 0"),
    ],
)
def test_bad_hyperparameters(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**changes)


def test_bad_agents() -> None:
    with pytest.raises(ValueError, match="algorithm must be one of dqn, c51, iqn, full"):
        TrainConfig().agent("ppo", 4, (2,))
    with pytest.raises(ValueError, match="the trunk of 'full' has two layers"):
        TrainConfig(hidden=(8,)).agent("full", 4, (2,))
    with pytest.raises(ValueError, match="at least 2 actions"):
        TrainConfig().agent("dqn", 4, (1,))


def test_every_exported_name_resolves() -> None:
    import fxengine.rl

    for name in fxengine.rl.__all__:
        assert getattr(fxengine.rl, name).__module__.startswith("fxengine."), name


def test_gymnasium_registers_what_the_gates_use() -> None:
    assert {"CartPole-v1", "Acrobot-v1", "LunarLander-v3"} <= set(gymnasium.registry)
