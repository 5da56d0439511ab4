"""The peers of the benchmark compute the specified step: the golden files, on a CPU, where the frameworks exist."""

from __future__ import annotations

import json
import time
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
from tools.peers.jax_layout import ROW, Layout

DEFAULT = Config(oracle_every=common.ORACLE_EVERY)


def path_of(name: str) -> Path:
    return golden.DIRECTORY / f"golden_{name}.npz"


def passes(name: str, make: Any) -> None:
    verdict = common.check_file(path_of(name), make, "fp32")
    assert not verdict.faults, verdict


# -- what needs no framework -----------------------------------------------------------------------------------------


CONFIGS = [DEFAULT, *(golden.load(name).config for name in golden.names())]


@pytest.mark.parametrize("config", CONFIGS)
def test_slabs_hold_every_tensor_once(config: Config) -> None:
    layout, start = Layout(config), common.initial_state(config)
    names = [name for slab in layout.slabs.values() for name, _ in slab.parts]
    assert sorted(names) == sorted(param_shapes(config))
    rows = layout.pack(start["params"])
    assert rows.shape == (layout.rows, ROW) and np.count_nonzero(rows) <= layout.sizes.sum()
    for name, x in layout.unpack(rows).items():
        assert np.array_equal(x, start["params"][name]), name
    targets = layout.unpack(layout.pack(start["target"]))  # a prefix
    assert set(targets) == set(start["target"])


def test_rows_belong_to_one_group() -> None:
    layout = Layout(DEFAULT)
    sizes = [sum(int(np.prod(shape)) for shape in group_shapes(DEFAULT)[group].values()) for group in layout.groups]
    assert list(layout.sizes) == sizes and layout.padded.sum() == layout.rows * ROW
    for slab in layout.slabs.values():
        first = slab.start // ROW
        assert set(layout.owner[first : first + slab.rows]) == {slab.group}
        assert set(layout.matrix[first : first + slab.rows]) == {slab.matrix}
        assert {len(param_shapes(DEFAULT)[name]) > 1 for name, _ in slab.parts} == {slab.matrix}


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

    columns = dict.fromkeys(("host_us", "depth", "nodes"), 1) | {"floor": {"us": 10.0}}
    text = bench_step.table([columns | report["bench"][0], columns | row])
    assert "b 200.0" in text and "4.00" in text and "0.20" in text

    owed = {"peer": "c", "batch": 64, "precision": "tf32", "us_per_step": None, "host_us": None, "note": "not measured"}
    assert bench_peers.peers_of([*loaded, owed], 64, "tf32") == {"a": 300.0, "b": 200.0}
    assert bench_peers.table([owed]).endswith("not measured")

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
def test_torch_as_written_for_a_compiler(name: str) -> None:
    torch = pytest.importorskip("torch")
    from tools.peers.torch_step import TorchChecker

    passes(name, lambda config, state: TorchChecker(config, state, "eager", "cpu", torch.float32, fusing=True))


def test_torch_compiles_one_graph_that_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that Inductor gets passes as it is; a wait of the host would have stopped its making."""
    torch = pytest.importorskip("torch")
    from tools.peers import torch_step
    from tools.peers.torch_step import TorchChecker

    traced: list[Any] = []

    def as_it_is(graph: Any, inputs: Any) -> Any:
        traced.append(graph)
        return graph

    monkeypatch.setattr(torch_step, "COMPILER", as_it_is)
    passes("edges", lambda config, state: TorchChecker(config, state, "compiled", "cpu", torch.float32))
    (graph,) = traced
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert names and not [x for x in names if "_local_scalar_dense" in x or "nonzero" in x]


def test_torch_trains() -> None:
    torch = pytest.importorskip("torch")
    from tools.peers.torch_step import TorchTrainer

    small = Config(batch=8, h1=32, h2=32, iqn_quantiles=4, iqn_target_quantiles=4, oracle_every=8)
    start = common.initial_state(small)
    trainer = TorchTrainer(small, start, random_rows(small, rows=32), "eager", "cpu")
    trainer.steps(8)
    trained, bounds = trainer.owner.store.views["params"], trainer.owner.state.bounds
    assert trainer.skipped() == 0 and bool((bounds > 0.0).all())
    moved = [name for name, x in trained.items() if not torch.equal(x, torch.from_numpy(start["params"][name]))]
    assert len(moved) > 0.9 * len(trained)


# -- JAX -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jnp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """jax.numpy on the CPU, hardly optimized: compiling takes longer than computing."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    jax = pytest.importorskip("jax")
    jax.config.update("jax_platforms", "cpu")
    return jax.numpy


@pytest.mark.parametrize("name", ["bare", "edges", "cold_odd"])
def test_jax(name: str, jnp: Any) -> None:
    from tools.peers.jax_step import JaxChecker

    passes(name, lambda config, state: JaxChecker(config, state, jnp.float32, "float32"))


def test_jax_trains_the_same_by_step_and_by_eight(jnp: Any) -> None:
    from tools.peers.jax_step import JaxTrainer

    none = dict.fromkeys(("tokens", "ofi", "ens", "aux_h", "iql_h", "cur_h"), 0)
    small = Config(batch=8, h1=16, h2=16, branches=(3, 2), iqn_quantiles=2, iqn_target_quantiles=2, pred=False, **none)
    start, data = common.initial_state(small), random_rows(small, rows=32)
    found = []
    for variant in ("step", "scan"):
        trainer = JaxTrainer(small, start, data, variant, "float32")
        trainer.steps(16)
        assert trainer.skipped() == 0 and float(trainer.carry["t"]) == 16.0
        assert bool((trainer.carry["bounds"] > 0.0).all())
        found.append({name: np.asarray(x) for name, x in trainer.carry.items()})
    for name in ("params", "m", "target", "bounds", "td"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-6, err_msg=name)
    moved = found[0]["params"] - Layout(small).pack(start["params"])
    assert np.count_nonzero(moved) > 0.8 * sum(x.size for x in start["params"].values())


# -- time limit ------------------------------------------------------------------------------------------------------


def test_a_peer_is_stopped_at_its_limit(tmp_path: Path) -> None:
    endless = tmp_path / "python"  # stands in for an interpreter whose peer does not come to an end
    endless.write_text("#!/bin/sh\nexec sleep 600\n")
    endless.chmod(0o755)
    begin = time.perf_counter()
    rows = bench_peers.run_peer(
        "jax", batches=[64, 256], device="cpu", precision="fp32", python=str(endless), limit_s=0.2
    )
    assert time.perf_counter() - begin < 60.0
    assert [(row["batch"], row["us_per_step"], row["note"]) for row in rows] == [
        (batch, None, bench_peers.NOT_MEASURED) for batch in (64, 256)
    ]
