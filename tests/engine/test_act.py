"""Acting: actions against the float64 reference, policies, signals, freshness, and that training is not touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fxengine import Engine, StepConfig
from fxengine.actgraph import ACT_STREAM, ActingGraph
from fxengine.driver import Device
from fxengine.driver.errors import ClosedError, CudaError, FxError
from fxengine.graphs import Plan
from fxengine.ops import policy as ops
from tests.nets.whole import BARE, EVERYTHING, feed, load, make, step_config
from tests.reference.cases import random_batch, random_case
from tests.reference.config import Config, Tree
from tests.reference.forward import online
from tests.support import assert_close

BRANCHES = EVERYTHING.branches
#: One launch, up to eight clusters of rows; beyond 64 rows a launch per layer.
ROWS = (1, 4, 33, 70)


@pytest.fixture(scope="module")
def engine(device: Device) -> Iterator[Engine]:
    """The whole step in small, in a state of the reference; no test leaves it trained."""
    with make(device, guard=True, seed=5) as made:
        load(made, random_case(2, EVERYTHING)[0])
        yield made
        made.check_guards()


def observations(rows: int, config: Config = EVERYTHING, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Observations as `act` takes them, order flow included."""
    rng = np.random.default_rng(seed)
    found = {"obs": rng.standard_normal((rows, config.state)).astype(np.float32)}
    if config.has_ofi:
        found["ofi"] = rng.standard_normal((rows, config.ofi)).astype(np.float32)
    return found


def reference_q(config: Config, params: Mapping[str, Any], inputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """q of the float64 reference with these parameters."""
    batch: Tree = random_batch(np.random.default_rng(0), config)
    rows = len(inputs["obs"])
    batch = {name: np.resize(x, (rows, *x.shape[1:])) for name, x in batch.items()}
    batch |= {"state": inputs["obs"].astype(np.float64)}
    if config.has_ofi:
        batch["ofi"] = inputs["ofi"].astype(np.float64)
    wide = {name: np.asarray(x, np.float64) for name, x in params.items()}
    q: NDArray[np.float64] = online(config, wide, batch)["heads"]["q"]
    return q


# -- values and greedy actions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
def test_values_and_actions_are_those_of_the_reference(engine: Engine, rows: int) -> None:
    inputs = observations(rows)
    actions, q = engine.act(**inputs, greedy=True, values=True)
    expected = reference_q(EVERYTHING, engine.params, inputs)
    assert actions.dtype == np.int32 and q.dtype == np.float32
    assert_close(q, expected, factor=64, atol=3e-6)
    np.testing.assert_array_equal(actions, ops.reference_greedy(expected, BRANCHES))
    np.testing.assert_array_equal(actions, ops.reference_greedy(q, BRANCHES))


@pytest.mark.parametrize(
    ("precision", "rows", "atol"), [("tf32", 7, 1e-5), ("bf16", 7, 1e-5), ("tf32", 70, 2e-3), ("bf16", 70, 2e-2)]
)
def test_a_bare_step_acts_in_every_precision(device: Device, precision: str, rows: int, atol: float) -> None:
    """In one launch always in float32."""
    with make(device, BARE, precision=precision) as bare:
        inputs = observations(rows, BARE)
        actions, q = bare.act(**inputs, policy="greedy", values=True)
        np.testing.assert_allclose(q, reference_q(BARE, bare.params, inputs), atol=atol)
        np.testing.assert_array_equal(actions, ops.reference_greedy(q, BARE.branches))


def test_the_shape_of_the_default_step_acts(device: Device) -> None:
    """Real widths, in one launch and layer by layer."""
    config = Config(batch=4)
    with Engine(step_config(config), device=device) as wide:
        for rows in (1, 19, 66):
            inputs = observations(rows, config)
            _, q = wide.act(**inputs, values=True)
            assert_close(q, reference_q(config, wide.params, inputs), factor=256, atol=2e-5)
            nodes = wide.prepare_act(rows, values=True).census().nodes
            assert (nodes == {"kernel": 1}) == (rows < 65), nodes


def test_one_row_may_come_without_its_dimension(engine: Engine) -> None:
    inputs = observations(1)
    whole = engine.act(**inputs, greedy=True, values=True)
    single = engine.act(inputs["obs"][0], ofi=inputs["ofi"][0], greedy=True, values=True)
    for a, b in zip(whole, single, strict=True):
        np.testing.assert_array_equal(a, b)
        assert len(a) == 1


def test_rows_do_not_see_each_other(engine: Engine) -> None:
    """A row with NaN leaves its neighbours as they are, and acts all the same."""
    inputs = observations(4)
    _, clean = engine.act(**inputs, values=True)
    inputs["obs"][2] = np.nan
    actions, q = engine.act(**inputs, greedy=True, values=True)
    np.testing.assert_array_equal(q[[0, 1, 3]], clean[[0, 1, 3]])
    assert np.isnan(q[2]).all() and not actions[2].any()


def test_results_belong_to_the_caller(engine: Engine) -> None:
    first, again = observations(4), observations(4, seed=9)
    kept, kept_q = engine.act(**first, greedy=True, values=True)
    copies = kept.copy(), kept_q.copy()
    engine.act(**again, greedy=True, values=True)
    np.testing.assert_array_equal(kept, copies[0])
    np.testing.assert_array_equal(kept_q, copies[1])
    assert kept.flags.c_contiguous and kept.flags.writeable


def test_strided_observations_are_taken(engine: Engine) -> None:
    inputs = observations(8)
    every_other = {name: x[::2] for name, x in inputs.items()}
    whole = {name: np.ascontiguousarray(x) for name, x in every_other.items()}
    np.testing.assert_array_equal(
        engine.act(**every_other, greedy=True, values=True)[1], engine.act(**whole, greedy=True, values=True)[1]
    )


# -- policies ----------------------------------------------------------------------------------------------------


def test_exploration_equals_the_twin(engine: Engine) -> None:
    """The counter of calls, the seed and the stream are those that are documented."""
    engine.signals["epsilon"] = 0.5
    for rows in (4, 1, 4):
        count = engine.acting.count
        actions, q = engine.act(**observations(rows), values=True)
        expected = ops.reference_epsilon_greedy(q, BRANCHES, 0.5, seed=5, count=count, stream=ACT_STREAM)
        np.testing.assert_array_equal(actions, expected)
        assert engine.acting.count == count + 1


def test_a_signal_holds_at_the_next_call(engine: Engine) -> None:
    """No step publishes anything in between."""
    inputs = observations(33)
    greedy = engine.act(**inputs, greedy=True)
    for epsilon in (0.0, 1.0, 0.0):
        engine.signals["epsilon"] = epsilon
        same = (engine.act(**inputs) == greedy).mean()
        assert same == 1.0 if epsilon == 0.0 else same < 0.7
    for temperature, low, high in ((1e-6, 1.0, 1.0), (1e6, 0.0, 0.7), (1e-6, 1.0, 1.0)):
        engine.signals["temperature"] = temperature
        assert low <= (engine.act(**inputs, policy="boltzmann") == greedy).mean() <= high


@pytest.mark.parametrize(
    ("policy", "signals"), [("epsilon_greedy", {"epsilon": 0.3}), ("boltzmann", {"temperature": 0.2})]
)
def test_frequencies_of_a_policy(engine: Engine, policy: Any, signals: dict[str, float]) -> None:
    """Many calls on one observation: frequencies of the direction against its probabilities."""
    engine.signals.update(signals)
    inputs = {name: np.repeat(x, 33, axis=0) for name, x in observations(1).items()}
    _, q = engine.act(**inputs, values=True)
    n, value = BRANCHES[0], q[0, : BRANCHES[0]].astype(np.float64)
    if policy == "epsilon_greedy":
        p = np.full(n, 0.3 / n) + 0.7 * (np.arange(n) == value.argmax())
    else:
        p = np.exp((value - value.max()) / 0.2) / np.exp((value - value.max()) / 0.2).sum()
    drawn = np.concatenate([engine.act(**inputs, policy=policy)[:, 0] for _ in range(60)])
    expected = p * len(drawn)
    assert ((np.bincount(drawn, minlength=n) - expected) ** 2 / expected).sum() < 13.8  # once in a thousand


def test_the_highest_epsilon_is_uniform_in_every_branch(engine: Engine) -> None:
    engine.signals["epsilon"] = 1.0
    inputs = observations(33)
    drawn = np.concatenate([engine.act(**inputs) for _ in range(40)])
    for d, n in enumerate(BRANCHES):
        expected = len(drawn) / n
        assert ((np.bincount(drawn[:, d], minlength=n) - expected) ** 2 / expected).sum() < 16.3


def test_seed_and_counter_can_be_kept(engine: Engine) -> None:
    engine.signals["epsilon"] = 1.0
    inputs = observations(33)
    kept = engine.acting.state()
    drawn = [engine.act(**inputs) for _ in range(3)]
    engine.acting.load_state(kept)
    for expected in drawn:
        np.testing.assert_array_equal(engine.act(**inputs), expected)
    engine.acting.load_state({"acting": kept["acting"] + np.array([0, 1], np.uint64)})
    assert (engine.act(**inputs) == drawn[0]).mean() < 0.7
    engine.acting.load_state(kept)
    with pytest.raises(ValueError, match=r"uint64 \(2,\), got int64 \(3,\)"):
        engine.acting.load_state({"acting": np.zeros(3, np.int64)})


def test_counters_cross_32_bits(engine: Engine) -> None:
    """Of the random numbers, and of the tags by which a result is known."""
    engine.signals["epsilon"] = 0.5
    kept = engine.acting.state()
    engine.acting.load_state({"acting": np.array([2**32 - 2, 5], np.uint64)})
    inputs = observations(4)
    engine.prepare_act(4, values=True)
    graph = engine.acting._graphs[(4, EVERYTHING.state), "epsilon_greedy", True]
    graph._sequence = 2**32 - 3
    for count in range(2**32 - 2, 2**32 + 2):
        inputs["obs"] += np.float32(0.1)
        actions, q = engine.act(**inputs, values=True)
        expected = ops.reference_epsilon_greedy(q, BRANCHES, 0.5, seed=5, count=count, stream=ACT_STREAM)
        np.testing.assert_array_equal(actions, expected)
        assert_close(q, reference_q(EVERYTHING, engine.params, inputs), factor=64, atol=3e-6)
    assert graph._sequence == 2**32 + 1
    engine.acting.load_state(kept)


# -- beside training ---------------------------------------------------------------------------------------------


def test_a_call_sees_the_newest_parameters(device: Device) -> None:
    """After steps that are only queued; to the bit what an engine sees that was given these parameters."""
    state, batch = random_case(2, EVERYTHING)
    inputs = observations(4)
    with make(device) as trained, make(device) as copy:
        load(trained, state)
        feed(trained, batch)
        seen = [trained.act(**inputs, values=True)[1]]
        for _ in range(3):
            trained.step()
            trained.step()
            seen.append(trained.act(**inputs, values=True)[1])
            assert (seen[-1] != seen[-2]).any()
            for name, value in trained.params.items():
                copy.params[name] = value
            np.testing.assert_array_equal(copy.act(**inputs, values=True)[1], seen[-1])
        np.testing.assert_array_equal(trained.act(**inputs, values=True)[1], seen[-1])


def test_acting_does_not_change_training_by_one_bit(device: Device) -> None:
    state, batch = random_case(3, EVERYTHING)

    def train(acts: bool) -> tuple[str, list[Any]]:
        with make(device) as engine:
            load(engine, state)
            feed(engine, batch)
            before = engine.state_hash()
            reports = []
            for rows in (1, 4, 4, 33):
                if acts:
                    engine.act(**observations(rows))
                    engine.act(**observations(rows), policy="boltzmann", values=True)
                engine.step()
                engine.synchronize()
                reports.append(engine.telemetry())
            assert engine.state_hash() != before
            return engine.state_hash(), reports

    assert train(acts=True) == train(acts=False)


def test_a_graph_is_captured_once_per_rows_and_policy(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(device) as engine:
        engine.prepare_act(4)
        engine.prepare_act(1, greedy=True)
        engine.act(**observations(9), values=True)
        monkeypatch.setattr(Plan, "capture", lambda *args, **options: pytest.fail("captured again"))
        engine.act(**observations(4))
        engine.act(**observations(1), greedy=True)
        single = {name: x[0] for name, x in observations(1).items()}
        engine.act(**single, policy="greedy")
        for epsilon in (0.1, 0.9):
            engine.signals["epsilon"] = epsilon
            engine.act(**observations(9), values=True)


def test_two_engines_act_side_by_side(device: Device) -> None:
    first, second = random_case(2, EVERYTHING)[0], random_case(4, EVERYTHING)[0]
    with make(device) as a, make(device) as b:
        load(a, first)
        load(b, second)
        for _ in range(3):
            for engine in (a, b):
                inputs = observations(4)
                q = engine.act(**inputs, values=True)[1]
                assert_close(q, reference_q(EVERYTHING, engine.params, inputs), factor=64, atol=3e-6)


# -- errors ------------------------------------------------------------------------------------------------------


def test_arrays_are_checked_and_never_converted(engine: Engine) -> None:
    inputs = observations(4)
    obs, ofi = inputs["obs"], inputs["ofi"]
    cases: list[tuple[Any, Any, str]] = [
        (obs.astype(np.float64), ofi, "observations must be float32, got float64; convert"),
        (obs[:, :-1], ofi, r"\[rows, 6\] or \[6\], got shape \(4, 5\)"),
        (obs[:0], ofi, r"got shape \(0, 6\)"),
        (obs.tolist(), ofi, "float32 array .*, got list"),
        (obs[None], ofi, r"got shape \(1, 4, 6\)"),
        (obs, ofi.astype(np.float16), "input 'ofi' must be float32, got float16"),
        (obs, ofi[:-1], r"input 'ofi' must be a float32 array \(4, 2\), got shape \(3, 2\)"),
        (obs, ofi.tolist(), "got list"),
    ]
    count = engine.acting.count
    for given, flow, message in cases:
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                engine.act(given, ofi=flow)
    with pytest.raises(ValueError, match=r"acting reads \['state', 'ofi'\], got \['state'\]"):
        engine.act(obs)
    with pytest.raises(ValueError, match="policy must be one of greedy, epsilon_greedy, boltzmann, got 'best'"):
        engine.act(obs, ofi=ofi, policy="best")
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        engine.prepare_act(0)
    assert engine.acting.count == count


def test_steps_without_actions_do_not_act(device: Device) -> None:
    config = StepConfig.aux_only(batch=4, state=5, h1=4, aux_h=4, aux_out=3, aux_head=3)
    with Engine(config, device=device) as aux, pytest.raises(ValueError, match="auxiliary nets alone has no actions"):
        aux.act(np.zeros((1, 5), np.float32))


def test_a_closed_engine_does_not_act(device: Device) -> None:
    inputs = observations(1, BARE)
    with make(device, BARE) as engine:
        engine.act(**inputs)
        acting = engine.acting
    for call in (engine.act, acting.act):
        with pytest.raises(ClosedError, match="the engine is closed"):
            call(**inputs)
    with pytest.raises(ClosedError, match="the engine is closed"):
        engine.prepare_act(3)
    acting.close()


def test_a_failure_on_the_device_is_raised_instead_of_waited_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that never writes its result: the stream is asked, and its error raised."""
    error = CudaError("cuStreamQuery", (), "CUDA_ERROR_ILLEGAL_ADDRESS")
    answers = iter([False, False, error])

    def query() -> bool:
        answer = next(answers)
        if isinstance(answer, CudaError):
            raise answer
        return answer

    inputs = observations(1, BARE)
    with make(device, BARE) as engine:
        engine.act(**inputs)
        graph = engine.acting._graphs[(1, BARE.state), "epsilon_greedy", False]
        monkeypatch.setattr(graph, "_launch", lambda: None)
        monkeypatch.setattr(engine, "_idle", query)
        with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            engine.act(**inputs)
        monkeypatch.setattr(engine, "_idle", lambda: True)
        with pytest.raises(FxError, match="its result did not arrive"):
            engine.act(**inputs)
        monkeypatch.undo()
        engine.signals["epsilon"] = 0.0
        np.testing.assert_array_equal(engine.act(**inputs), engine.act(**inputs, greedy=True))


def test_an_interrupted_call_does_not_answer_a_later_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the host waits: the launch may still read its observations, which the next call must not replace."""
    first, second = observations(4, seed=1), observations(4, seed=2)
    expected = engine.act(**second, greedy=True, values=True)[1]
    waits: list[bool] = []
    synchronize = engine.synchronize

    def arrived(self: object, tags: bytes) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ActingGraph, "_arrived", arrived)
        with pytest.raises(KeyboardInterrupt):
            engine.act(**first, greedy=True, values=True)
    monkeypatch.setattr(engine, "synchronize", lambda: (waits.append(True), synchronize()))
    np.testing.assert_array_equal(engine.act(**second, greedy=True, values=True)[1], expected)
    assert waits == [True]
    engine.act(**second, greedy=True)
    assert waits == [True]
