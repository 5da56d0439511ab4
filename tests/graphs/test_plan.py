"""Plan, capture, replay on a device: same bits with and without a graph, exact counts, clean failures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fxengine.driver import CudaError, Device
from fxengine.driver.errors import ClosedError, FxError
from fxengine.graphs import ZEROED, Plan, Program, ProgramError, Tensor, node_times

from .chains import CHAIN, OTHER, OVERRUN, chain


def sample(device: Device, n: int = 700) -> tuple[Program, dict[str, Tensor]]:
    """x -> y, z (one launch); y, z -> w, accumulated; total accumulates into the zeroed arena."""
    program = Program(device.target)
    t = {name: program.tensor(name, (n,)) for name in ("y", "z", "w")}
    t["x"] = program.tensor("x", (n,), arena="constants", data=np.linspace(-1, 1, n, dtype=np.float32))
    t["a"] = program.tensor("a", (1,), arena="constants", data=np.float32([1.5]))
    t["sum"] = program.tensor("sum", (n,), arena=ZEROED)
    chain(program, t["x"], t["y"], t["a"], 1.0)
    chain(program, t["x"], t["z"], t["a"], 2.0)
    chain(program, t["y"], t["w"], t["a"], family=OTHER)
    chain(program, t["z"], t["w"], t["a"], accumulate=True)
    chain(program, t["w"], t["sum"], t["a"], accumulate=True)
    return program, t


def expected(x: np.ndarray) -> np.ndarray:
    a = np.float32(1.5)
    w = a * (a * x + np.float32(1)) + a * (a * x + np.float32(2))
    return a * w


def test_graph_and_uncaptured_give_the_same_bits(device: Device) -> None:
    program, t = sample(device)
    with device.stream() as stream, Plan(program, device) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        first = plan.buffer(t["sum"]).read()
        np.testing.assert_allclose(first, expected(plan.buffer(t["x"]).read()), rtol=1e-6, atol=1e-6)
        with plan.capture(stream=stream) as graph:
            for _ in range(3):  # the memset makes every replay start from zero
                graph.launch(stream=stream)
            stream.synchronize()
            assert plan.buffer(t["sum"]).read().tobytes() == first.tobytes()


def test_census_is_read_from_the_captured_graph(device: Device) -> None:
    program, _ = sample(device)
    with device.stream() as stream, Plan(program, device) as plan, plan.capture(stream=stream) as graph:
        census = graph.census()
        assert census.nodes == {"kernel": 4, "memset": 1}
        assert census.launches == {"chain": 3, "other": 1}
        assert census.records == {"chain": 4, "other": 1}
        assert census.depth == 4
        assert census.edges == 5  # the memset has time, and waits for the first kernel
        assert census.instantiations == 1
        assert census.bytes["zeroed"] >= 700 * 4
        assert "x->y, x->z" in graph.table()
        assert "n0 -> n2" in graph.dot()


def test_captured_edges_are_the_planned_ones(device: Device) -> None:
    program, _ = sample(device)
    with device.stream() as stream, Plan(program, device) as plan, plan.capture(stream=stream) as graph:
        planned = sum(len(node.after) for node in plan.nodes)
        assert graph.census().edges == planned


def test_replays_read_memory_not_arguments(device: Device) -> None:
    """A value that changes between replays is read through a pointer: no recapture."""
    program, t = sample(device)
    with device.stream() as stream, Plan(program, device) as plan, plan.capture(stream=stream) as graph:
        plan.buffer(t["a"]).write(np.float32([2.0]))
        graph.launch(stream=stream)
        stream.synchronize()
        x = plan.buffer(t["x"]).read()
        np.testing.assert_allclose(plan.buffer(t["y"]).read(), 2 * x + 1, rtol=1e-6, atol=1e-6)
        assert graph.census().instantiations == 1


def test_a_failed_capture_leaves_the_next_one_working(device: Device) -> None:
    program, t = sample(device)
    with device.stream() as stream, Plan(program, device) as plan:
        steps = plan._steps
        plan._steps = (*steps[:2], None)  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            plan.capture(stream=stream)
        plan._steps = steps
        with plan.capture(stream=stream) as graph:
            graph.launch(stream=stream)
            stream.synchronize()
        assert np.isfinite(plan.buffer(t["sum"]).read()).all()


def test_allocation_inside_a_capture_is_refused_and_recoverable(device: Device) -> None:
    from fxengine.driver import Arena, capture

    with device.stream() as stream:
        with pytest.raises(CudaError, match="CAPTURE"), device.activate(), capture(stream):
            Arena(device, "inside", 1024).place("x", (16,), np.float32)
        program, _ = sample(device)
        with Plan(program, device) as plan, plan.capture(stream=stream) as graph:
            graph.launch(stream=stream)
            stream.synchronize()


def test_guard_words_find_an_overrun(device: Device) -> None:
    program = Program(device.target)
    x = program.tensor("x", (64,), arena="constants", data=np.ones(64, np.float32))
    a = program.tensor("a", (1,), arena="constants", data=np.ones(1, np.float32))
    y = program.tensor("y", (64,))
    chain(program, x, y, a, 3.0, family=OVERRUN)
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.check_guards()
        plan.run(stream=stream)
        stream.synchronize()
        with pytest.raises(FxError, match=r"\by\b"):
            plan.check_guards()


def test_fields_must_match_the_struct(device: Device) -> None:
    program, t = sample(device)
    program.launch(CHAIN, {"x": t["x"], "scale": 1.0}, reads=[t["x"]], writes=[], label="odd")
    with pytest.raises(ProgramError, match=r"'odd'.*missing \['a', 'accumulate', 'b', 'n', 'y'\], unknown \['scale'\]"):
        Plan(program, device)


def test_a_closed_plan_says_so(device: Device) -> None:
    program, t = sample(device)
    plan = Plan(program, device)
    plan.close()
    plan.close()
    with device.stream() as stream, pytest.raises(ClosedError, match="plan is closed"):
        plan.run(stream=stream)
    with pytest.raises(ClosedError):
        plan.buffer(t["x"])


def test_matrices_with_gaps_are_read_and_written_as_without(device: Device) -> None:
    program, _ = sample(device)
    padded = program.tensor("padded", (3, 5), padded=True)
    narrow = program.tensor("narrow", (3, 4), padded=True)
    one, vector = program.tensor("one", (1, 5), padded=True), program.tensor("vector", (5,), padded=True)
    assert [t.ld for t in (padded, narrow, one, vector)] == [8, 4, 8, 1]
    assert [t.storage.nbytes for t in (padded, narrow, one, vector)] == [96, 48, 32, 20]
    with pytest.raises(ProgramError, match="'full' cannot have both data and gaps"):
        program.tensor("full", (2, 5), data=np.zeros((2, 5), np.float32), padded=True)
    with Plan(program, device, guard=True) as plan:
        plan.buffer("padded").fill_u32(0)
        values = np.arange(1, 16, dtype=np.float32).reshape(3, 5)
        plan.buffer(padded).write(values)
        expected = np.zeros((3, 8), np.float32)
        expected[:, :5] = values
        np.testing.assert_array_equal(plan.buffer("padded").read().view(np.float32).reshape(3, 8), expected)
        np.testing.assert_array_equal(plan.buffer(padded).read(), values)
        np.testing.assert_array_equal(plan.buffer(padded.columns(1, 3).rows(1, 3)).read(), values[1:, 1:3])
        plan.buffer(one).write(values[:1])
        np.testing.assert_array_equal(plan.buffer(one).read(), values[:1])
        plan.check_guards()


def test_node_times_measure_every_node(device: Device) -> None:
    program, _ = sample(device)
    with device.stream() as stream, Plan(program, device) as plan:
        times = node_times(plan, stream=stream, chain=3, repeats=3)
        assert len(times) == len(plan.nodes)
        assert all(t > 0 for t in times)


def test_fused_launches_have_the_same_bits(device: Device) -> None:
    """Parts of two families share a generated kernel; a family whose kernel looks at the grid would stay alone."""
    program, t = sample(device)
    second = replace(OTHER, name="second")
    with device.stream() as stream, Plan(program, device, fuse=False) as apart, Plan(program, device, fuse=True) as one:
        assert [n.name for n in apart.nodes] == ["chain", "memset", "other", "chain", "chain"]
        program_names = [n.name for n in one.nodes]
        assert program_names == [n.name for n in apart.nodes], "no level of this program has two families"
        chain(program, t["x"], program.tensor("v", (700,)), t["a"], 3.0, family=second)
    with device.stream() as stream, Plan(program, device, fuse=False) as apart, Plan(program, device, fuse=True) as one:
        assert [n.name for n in one.nodes] == ["chain+second", "memset", "other", "chain", "chain"]
        assert len(apart.nodes) == len(one.nodes) + 1
        results = []
        for plan in (apart, one):
            with plan.capture(stream=stream) as graph:
                graph.launch(stream=stream)
                stream.synchronize()
                assert graph.census().records == {"chain": 4, "other": 1, "second": 1}
            results.append([plan.buffer(name).read().tobytes() for name in ("y", "z", "w", "v", "sum")])
        assert results[0] == results[1]
