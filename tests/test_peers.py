"""The peers of the benchmark compute the specified step: the golden files, on a CPU, where the frameworks exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxengine import StepConfig
from tests.reference import golden
from tests.reference.config import Config, group_shapes, param_shapes
from tools import bench_peers, bench_step, gpu_report
from tools.peers import common
from tools.peers.data import random_rows

DEFAULT = Config(oracle_every=common.ORACLE_EVERY)


def path_of(name: str) -> Path:
    return golden.DIRECTORY / f"golden_{name}.npz"


def passes(name: str, make: Any) -> None:
    verdict = common.check_file(path_of(name), make, "fp32")
    assert not verdict.faults, verdict


# -- what needs no framework -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tree", "group"])
def test_blocks_hold_every_tensor_once(layout: str) -> None:
    blocks = common.blocks_of(DEFAULT, layout)
    names = [entry.name for block in blocks for entry in block.entries]
    assert sorted(names) == sorted(param_shapes(DEFAULT)) and len(set(names)) == len(names)
    for block in blocks:
        assert {(e.group, e.matrix, e.target) for e in block.entries} == {(block.group, block.matrix, block.target)}
    if layout == "group":
        assert len(blocks) < 2 * len(group_shapes(DEFAULT)) + 1
    targets = [block.target for block in blocks]
    assert targets == sorted(targets, reverse=True)  # a prefix


def test_peers_start_with_the_parameters_of_the_default_step() -> None:
    state = common.initial_state(DEFAULT)
    assert sum(x.size for x in state["params"].values()) == 672_082
    assert set(state["sn_v"]) == {f"b{d}fc" for d in range(4)}
    assert common.bound_table(DEFAULT, state).shape == (4, len(group_shapes(DEFAULT)))
    assert {name: x.shape for name, x in state["params"].items()} == param_shapes(DEFAULT)


def test_peers_and_engine_train_on_the_same_rows() -> None:
    ours, theirs = random_rows(StepConfig(), rows=64), random_rows(DEFAULT, rows=64)
    assert set(ours) == set(theirs) and all(np.array_equal(x, theirs[name]) for name, x in ours.items())
    assert set(random_rows(StepConfig.aux_only(), rows=64)) == {"state", "nb_label", "regime_label"}
    assert (theirs["discount"] == 0.0).any() and (theirs["discount"] > 0.0).any()


def test_a_wrong_peer_fails_its_golden_file() -> None:
    class Still:
        """Repeats the reference of the first step, but for one value."""

        def __init__(self, config: Config, state: Any) -> None:
            self.outputs = [dict(x) for x in golden.load("bare").outputs]
            self.outputs[0]["td"] = self.outputs[0]["td"] + 1e-3

        def check_step(self, batch: Any) -> Any:
            return self.outputs.pop(0)

    verdict = common.check_file(path_of("bare"), Still, "fp32")
    assert verdict.worst == "td" and len(verdict.faults) == 1 and "td" in verdict.faults[0]
    assert common.check_file(path_of("bare"), Still, "tf32").faults == []


def test_a_golden_file_has_to_be_one_of_the_projects(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected one of"):
        common.check_file(tmp_path / "golden_full.npz", lambda config, state: None, "fp32")  # type: ignore[arg-type]


def test_effort_counts_whole_periods_of_the_oracles() -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        common.Effort(steps=50)


def test_rows_of_peers_reach_table_and_report(tmp_path: Path) -> None:
    peers = [
        {"peer": "a", "batch": 64, "precision": "tf32", "us_per_step": 300.0, "host_us": 9.0},
        {"peer": "b", "batch": 64, "precision": "tf32", "us_per_step": 200.0, "host_us": 9.0},
        {"peer": "b", "batch": 64, "precision": "fp32", "us_per_step": 100.0, "host_us": 9.0},
        {"peer": "b", "batch": 256, "precision": "tf32", "us_per_step": 100.0, "host_us": 9.0},
    ]
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(peers))
    loaded = bench_peers.load_peers(file)
    assert bench_peers.peers_of(loaded, 64, "tf32") == {"a": 300.0, "b": 200.0}
    assert bench_peers.table(loaded).count("<- best") == 3

    row = {"model": "step", "batch": 64, "precision": "tf32", "us_per_step": 50.0}
    assert bench_step.peer_times(row, loaded) == {"a": 300.0, "b": 200.0}
    assert bench_step.peer_times({**row, "model": "aux"}, loaded) == {}
    report = gpu_report.build_report("abc", {}, None, [row], loaded)
    assert report["bench"] == [{**row, "peers": {"a": 300.0, "b": 200.0}, "best_ratio": 4.0}]

    columns = dict.fromkeys(("uncaptured_us", "host_us", "launch_us", "depth", "nodes"), 1)
    text = bench_step.table([columns | report["bench"][0], columns | row])
    assert "b 200.0" in text and "4.00" in text

    file.write_text("[{}]")
    with pytest.raises(ValueError, match="bench_peers"):
        bench_peers.load_peers(file)


# -- PyTorch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", golden.names())
def test_torch_eager(name: str) -> None:
    torch = pytest.importorskip("torch")
    from tools.peers.torch_step import TorchChecker

    passes(name, lambda config, state: TorchChecker(config, state, "eager", "cpu", torch.float32))


@pytest.mark.parametrize("name", ["cold_odd", "edges", "skip"])
@pytest.mark.parametrize("layout", ["tree", "group"])
def test_torch_foreach(name: str, layout: str) -> None:
    torch = pytest.importorskip("torch")
    from tools.peers.torch_step import TorchChecker

    def make(config: Config, state: Any) -> TorchChecker:
        return TorchChecker(config, state, "eager", "cpu", torch.float32, layout=layout, fusing=True)

    passes(name, make)


def test_torch_compiles_one_graph_that_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that torch.compile gets passes as it is; a wait of the host would have stopped its making."""
    torch = pytest.importorskip("torch")
    from tools.peers.torch_step import TorchChecker

    traced: list[Any] = []

    def as_it_is(graph: Any, **options: Any) -> Any:
        traced.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", as_it_is)
    passes("edges", lambda config, state: TorchChecker(config, state, "compiled", "cpu", torch.float32))
    (graph,) = traced
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert names and not [x for x in names if "_local_scalar_dense" in x or "nonzero" in x]


def test_torch_trains() -> None:
    torch = pytest.importorskip("torch")
    from tools.peers.torch_step import TorchTrainer

    small = Config(batch=8, h1=32, h2=32, iqn_quantiles=4, iqn_target_quantiles=4, oracle_every=8)
    start = common.initial_state(small)
    trainer = TorchTrainer(small, start, random_rows(small, rows=32), "eager", "cpu", "default")
    trainer.steps(8)
    trained, bounds = trainer.owner.store.views["params"], trainer.owner.state.bounds
    assert trainer.skipped() == 0 and bool((bounds > 0.0).all())
    moved = [name for name, x in trained.items() if not torch.equal(x, torch.from_numpy(start["params"][name]))]
    assert len(moved) > 0.9 * len(trained)


# -- JAX -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "variant"), [("bare", "flat"), ("edges", "flat"), ("cold_odd", "tree")])
def test_jax(name: str, variant: str) -> None:
    jnp = pytest.importorskip("jax.numpy")
    from tools.peers.jax_step import JaxChecker

    passes(name, lambda config, state: JaxChecker(config, state, variant, jnp.float32, "float32"))
