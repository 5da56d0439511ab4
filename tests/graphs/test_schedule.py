"""The planner: dependencies, levels, batching, exact edges. No device needed."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Target
from fxengine.graphs import ZEROED, Family, Program, ProgramError, Tensor, depth, schedule

from .chains import CHAIN, EARLY, LATE, OTHER, WHOLE, chain

FAMILIES = (CHAIN, OTHER, LATE, EARLY, WHOLE, replace(OTHER, name="alone", alone=True))


@pytest.fixture
def program() -> Program:
    return Program(Target.of("sm_90"))


def vectors(program: Program, names: str, n: int = 8) -> list[Tensor]:
    return [program.tensor(name, (n,)) for name in names]


def join(program: Program, path: list[Tensor], branches: list[Tensor], y: Tensor, a: Tensor) -> None:
    """Append branches off a path, each a node of its own, and the node that waits for all of them and the path."""
    for i, branch in enumerate(branches):
        chain(program, path[i], branch, a, family=replace(OTHER, name=f"branch {i}"))
    program.launch(
        OTHER,
        {"x": path[-1], "y": y, "a": branches[0], "b": 0.0, "n": 8, "accumulate": 0},
        reads=[path[-1], *branches], writes=[y], label="joint",
    )  # fmt: skip


def test_independent_records_of_one_family_share_a_launch(program: Program) -> None:
    a, x, y, z, w = vectors(program, "axyzw")
    chain(program, x, y, a)
    chain(program, x, z, a)
    chain(program, y, w, a)
    nodes = schedule(program)
    assert [len(n.records) for n in nodes] == [2, 1]
    assert nodes[1].after == (0,)
    assert depth(nodes) == 2


def test_families_are_not_mixed(program: Program) -> None:
    a, x, y, z = vectors(program, "axyz")
    chain(program, x, y, a)
    chain(program, x, z, a, family=OTHER)
    assert [n.name for n in schedule(program)] == ["chain", "other"]


@pytest.mark.parametrize("hazard", ["read after write", "write after read", "write after write"])
def test_hazards_keep_program_order(program: Program, hazard: str) -> None:
    a, x, y, z = vectors(program, "axyz")
    first, second = {
        "read after write": ((x, y), (y, z)),
        "write after read": ((x, y), (z, x)),
        "write after write": ((x, y), (z, y)),
    }[hazard]
    chain(program, *first, a)
    chain(program, *second, a)
    nodes = schedule(program)
    assert [n.level for n in nodes] == [0, 1]
    assert nodes[1].after == (0,)


def test_disjoint_columns_and_rows_of_one_matrix_are_independent(program: Program) -> None:
    (a,) = vectors(program, "a", 1)
    m = program.tensor("m", (4, 10))
    assert not m.columns(0, 5).region().overlaps(m.columns(5, 10).region())
    assert m.columns(0, 6).region().overlaps(m.columns(5, 10).region())
    assert not m.rows(0, 2).region().overlaps(m.rows(2, 4).region())
    assert m.rows(0, 3).region().overlaps(m.rows(2, 4).region())
    assert m.columns(2, 4).region().overlaps(m.rows(1, 2).region())
    assert a.region().overlaps(a.region())
    later = program.tensor("later", (48,)).rows(3, 43).reshape(4, 10)  # begins within what would be a row
    assert not later.columns(0, 8).region().overlaps(later.columns(8, 10).region())
    assert not later.columns(8, 10).region().overlaps(later.columns(0, 8).region())
    assert later.columns(0, 8).region().overlaps(later.columns(7, 10).region())
    assert later.columns(7, 10).region().overlaps(later.columns(0, 8).region())


def test_a_node_does_not_begin_before_who_writes_what_it_reads_early(program: Program) -> None:
    a, x, y, z = vectors(program, "axyz")
    chain(program, x, y, a)
    chain(program, y, z, a, family=EARLY)  # waits before it reads y, but not before it reads a
    chain(program, z, a.rows(2, 3), x.rows(0, 1), family=OTHER)
    chain(program, x, y, a, family=EARLY)
    nodes = schedule(program)
    assert [n.name for n in nodes] == ["chain", "early", "other", "early"]
    assert [n.overlaps for n in nodes] == [True, True, True, False]


def test_nodes_that_have_time_leave_the_places_to_others(program: Program) -> None:
    a, *rest = vectors(program, "abcdefgh")
    for x, y in itertools.pairwise(rest[:5]):
        chain(program, x, y, a)
    chain(program, rest[1], rest[5], a, family=OTHER)  # ready with the second of four, and nobody waits for it
    chain(program, rest[2], rest[6], a, family=replace(OTHER, name="another"))  # one level less
    nodes = schedule(program)
    assert {n.label: n.overlaps for n in nodes if n.name != "chain"} == {"c->g": False, "d->h": True}
    assert all(n.overlaps for n in nodes if n.name == "chain")


@pytest.mark.parametrize("needed", [(), ("g",), ("f",)])
def test_what_has_time_joins_the_next_launch_of_its_family(program: Program, needed: tuple[str, ...]) -> None:
    """Unless one of its records is read at once."""
    a, *path = vectors(program, "abcde")
    side = dict(zip("fghxy", vectors(program, "fghxy"), strict=True))
    for x, y in itertools.pairwise(path):
        chain(program, x, y, a)
    for name in "fg":
        chain(program, path[0], side[name], a, family=OTHER)
    chain(program, path[1], side["h"], a, family=OTHER)
    for name in needed:
        chain(program, side[name], side["x"], a, family=replace(OTHER, name="at once"))
    chain(program, side["g"], side["y"], side["h"], family=replace(OTHER, name="reader"))
    nodes = schedule(program)
    found = {n.label: n.level for n in nodes if n.name == "other"}
    assert found == ({"b->f, b->g": 0, "c->h": 1} if needed else {"b->f, b->g, c->h": 1})


@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("levels", [0, 1, 2])
def test_who_can_wait_lets_the_longest_path_not_wait_for_more(program: Program, other: bool, levels: int) -> None:
    """A record that waits for another launch besides and can wait a level gets a launch of its own."""
    a, x, y, z, w, v, u, p, q, r = vectors(program, "axyzwvupqr")
    chain(program, x, y, a)
    chain(program, x, z, a, family=OTHER if other else CHAIN)
    chain(program, y, w, a, label="hurried")
    chain(program, z, v, a, label="waits")
    chain(program, w, u, a)
    chain(program, u, p, a)
    if levels == 0:  # needed at once: both are on a longest path
        chain(program, v, q, a, family=OTHER)
        chain(program, q, r, a, family=OTHER)
    elif levels == 1:
        chain(program, v, p, a, family=OTHER)
    nodes = schedule(program)
    apart = [{"hurried"}, {"waits"}] if other and levels else [{"hurried", "waits"}]
    assert [labels for n in nodes if (labels := {r.label for r in n.records} & {"hurried", "waits"})] == apart
    (hurried,) = (n for n in nodes if "hurried" in n.label)
    assert len(hurried.after) == (2 if other and not levels else 1)


@pytest.mark.parametrize("needed", [False, True])
def test_roots_wait_for_that_of_the_longest_path_if_all_have_time(program: Program, needed: bool) -> None:
    """One that is needed second has no time: then none waits but the memset."""
    a, g, h, i, *path = vectors(program, "aghibcdef")
    sums = program.tensor("sums", (8,), arena=ZEROED)
    chain(program, path[0], path[1], a)
    chain(program, g, h, a, family=OTHER)
    chain(program, i, sums, a, accumulate=True, family=replace(OTHER, name="sums"))
    chain(program, path[1], path[2], h if needed else a)
    for x, y in itertools.pairwise(path[2:]):
        chain(program, x, y, a)
    nodes = schedule(program)
    assert depth(nodes) == 4
    assert {n.label: n.after for n in nodes[:3]} == {
        "b->c": (),
        "clear the zeroed arena": (0,),
        "g->h": () if needed else (0,),
    }


@pytest.mark.parametrize(
    ("branches", "side_level", "moved"), [(3, 0, True), (2, 0, False), (3, 3, True), (3, 4, True), (3, 5, False)]
)
def test_a_node_further_before_that_waits_for_many_waits_instead(
    program: Program, branches: int, side_level: int, moved: bool
) -> None:
    """Of four that it waits for, one more does not matter; to the last node of the chain it would. Not if the other one
    comes but one level before."""
    a, *rest = vectors(program, "abcdefghijklmnopqrs")
    start, path, joined = rest[0], rest[1:7], rest[7]
    for x, y in itertools.pairwise([start, *path]):
        chain(program, x, y, a, label=f"path {y.name}")
    join(program, path, rest[8 : 8 + branches], joined, a)
    side, last = rest[12:14]
    chain(program, [start, *path][side_level], side, a, family=replace(OTHER, name="side"), label="side")
    chain(program, joined, last, side, label="last")
    nodes = schedule(program)
    names = {n.label: i for i, n in enumerate(nodes)}
    joint = nodes[names["joint"]]
    assert (joint.level, len(joint.after)) == (6, branches + 1 + moved)
    assert (names["side"] in joint.after) == moved and (names["side"] in nodes[names["last"]].after) != moved


def test_the_memset_is_not_waited_for_instead(program: Program) -> None:
    """That would cost the node further before its early start."""
    a, *rest = vectors(program, "abcdefghijkl")
    path, joined, last = rest[:6], rest[6], rest[7]
    for x, y in itertools.pairwise(path):
        chain(program, x, y, a, label=f"path {y.name}")
    join(program, path, rest[8:11], joined, a)
    chain(program, joined, last, a, label="last")
    zeroed = program.tensor("zeroed", (8,), arena=ZEROED)
    chain(program, joined, zeroed, last, accumulate=True, family=EARLY, label="cleared")  # waits for `last` in any case
    planned = schedule(program)
    nodes, clear = {n.label: n for n in planned}, [n.name for n in planned].index("memset")
    assert nodes["joint"].overlaps and clear not in nodes["joint"].after
    assert clear in nodes["cleared"].after


def test_the_memset_lengthens_no_path(program: Program) -> None:
    """A node that cannot begin early, but has no time, does not wait for the memset beside it."""
    tensors = vectors(program, "auvwxy", 133 * 256)
    a, *path = tensors
    for i, (x, y) in enumerate(itertools.pairwise(path)):
        chain(program, x, y, a, family=WHOLE if i == 1 else CHAIN)
    zeroed = program.tensor("zeroed", (133 * 256,), arena=ZEROED)
    chain(program, path[-1], zeroed, a, accumulate=True, family=OTHER)
    nodes = schedule(program)
    assert [n.name for n in nodes] == ["chain", "memset", "whole", "chain", "chain", "other"]
    assert [n.level for n in nodes] == [0, 1, 1, 2, 3, 4]
    assert [n.after for n in nodes] == [(), (0,), (0,), (2,), (3,), (1, 4)]


@pytest.mark.parametrize(("blocks", "overlaps"), [(132, True), (133, False)])
def test_whole_multiprocessors_are_not_held_before_a_launch_that_needs_all(
    program: Program, blocks: int, overlaps: bool
) -> None:
    assert program.target.sm_count == 132
    a, x, y = vectors(program, "axy", blocks * 256)
    chain(program, a, x, a)
    chain(program, x, y, a, family=WHOLE)
    assert [n.overlaps for n in schedule(program)] == [True, overlaps]


@given(st.data())
def test_overlap_is_never_missed(data: st.DataObject) -> None:
    """Any two views that share an element overlap; disjoint column or row ranges of one matrix do not."""
    program = Program(Target.of("sm_90"))
    rows, cols = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    m = program.tensor("m", (rows, cols))

    def view() -> tuple[Tensor, set[tuple[int, int]]]:
        r0 = data.draw(st.integers(0, rows - 1))
        r1 = data.draw(st.integers(r0 + 1, rows))
        c0 = data.draw(st.integers(0, cols - 1))
        c1 = data.draw(st.integers(c0 + 1, cols))
        return m.rows(r0, r1).columns(c0, c1), {(r, c) for r in range(r0, r1) for c in range(c0, c1)}

    (one, cells), (two, others) = view(), view()
    if cells & others:
        assert one.region().overlaps(two.region())
        assert two.region().overlaps(one.region())


def test_edges_are_transitively_reduced(program: Program) -> None:
    a, x, y, z = vectors(program, "axyz")
    chain(program, x, y, a)
    chain(program, y, z, a, family=OTHER)
    chain(program, y, z, a, accumulate=True)  # needs z, and y, which z's writer already waited for
    nodes = schedule(program)
    assert [n.after for n in nodes] == [(), (0,), (1,)]


def test_late_families_wait_and_share_a_launch(program: Program) -> None:
    a, x, p, q, r, g, h, out = vectors(program, "axpqrghO")
    chain(program, x, p, a)
    chain(program, p, g, a, family=LATE)  # could run early
    chain(program, p, q, a)
    chain(program, q, r, a)
    chain(program, r, h, a, family=LATE)
    chain(program, g, out, h, family=OTHER)  # reads both
    nodes = schedule(program)
    late = [n for n in nodes if n.name == "late"]
    assert [len(n.records) for n in late] == [2]


def test_one_memset_before_everything_that_touches_the_zeroed_arena(program: Program) -> None:
    a, x, y = vectors(program, "axy")
    z = program.tensor("z", (8,), arena=ZEROED)
    chain(program, x, y, a)
    chain(program, x, z, a, accumulate=True, family=OTHER)
    nodes = schedule(program)
    assert [n.name for n in nodes] == ["memset", "chain", "other"]
    assert [n.after for n in nodes] == [(), (), (0,)]


@pytest.mark.parametrize("branch", [True, False])
def test_the_memset_holds_up_a_node_that_has_time(program: Program, branch: bool) -> None:
    """Rather than one that could begin early."""
    a, *path, side = vectors(program, "atuvwxyz")
    z = program.tensor("zeroed", (8,), arena=ZEROED)
    for x, y in itertools.pairwise(path):
        chain(program, x, y, a)
    if branch:
        chain(program, path[2], side, a, family=OTHER)
    chain(program, path[-1], z, side, accumulate=True, family=OTHER)
    nodes = schedule(program)
    clear = [n.name for n in nodes].index("memset")
    assert clear == 1 and nodes[clear].after == (0,)  # it has time itself
    cleared = [(n.label, n.overlaps) for n in nodes if clear in n.after]
    assert cleared == [("v->z", False) if branch else ("y->zeroed", False)]
    assert nodes[-1].overlaps == branch
    assert [n.level for n in nodes if n.name == "chain"] == [0, 1, 2, 3, 4]
    assert nodes[-1].level == 5


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 7), st.sampled_from(FAMILIES), st.booleans()),
        max_size=24,
    )
)
@settings(max_examples=200)
def test_any_schedule_keeps_every_hazard(records: list[tuple[int, int, int, Family, bool]]) -> None:
    """Random programs: each hazard pair is ordered by a path of edges, nodes come in topological order, the memset
    before all that is cleared, levels are those of the longest paths, and nothing that a direct predecessor writes is
    read early."""
    program = Program(Target.of("sm_90"))
    tensors = [*vectors(program, "uvwxyz"), *(program.tensor(f"zeroed{i}", (8,), arena=ZEROED) for i in range(2))]
    for i, (source, target, factor, family, accumulate) in enumerate(records):
        chain(
            program, tensors[source], tensors[target], tensors[factor], accumulate=accumulate, family=family,
            label=str(i),
        )  # fmt: skip
    nodes = schedule(program)
    longest: list[int] = []
    for node in nodes:
        longest.append(1 + max((longest[d] for d in node.after), default=-1))
        assert node.level >= longest[-1]
        if node.overlaps and node.after:
            early = [t.region() for r in node.records for t in r.early]
            written = [t.region() for d in node.after for r in nodes[d].records for t in r.writes]
            assert not any(e.overlaps(w) for e in early for w in written)
    assert max(longest, default=-1) < depth(nodes)
    node_of = {record.label: i for i, node in enumerate(nodes) for record in node.records}
    assert len(node_of) == len(records)
    reach: list[set[int]] = []
    for i, node in enumerate(nodes):
        assert all(d < i for d in node.after)
        reach.append(set(node.after).union(*(reach[d] for d in node.after)))
        if any(t.storage.arena == ZEROED for r in node.records for t in (*r.reads, *r.writes)):
            assert any(not nodes[d].parts for d in reach[-1])
    for j, later in enumerate(program.launches):
        for i, earlier in enumerate(program.launches[:j]):
            written = {t.name for t in earlier.writes}
            touched = {t.name for t in earlier.reads} | written
            if written & {t.name for t in later.reads} or touched & {t.name for t in later.writes}:
                assert node_of[str(i)] in reach[node_of[str(j)]]


def test_bad_declarations_name_both_sides(program: Program) -> None:
    a, x, y = vectors(program, "axy")
    with pytest.raises(ProgramError, match="'x' is taken"):
        program.tensor("x", (3,))
    with pytest.raises(ProgramError, match=r"shape \(0,\)"):
        program.tensor("empty", (0,))
    with pytest.raises(ProgramError, match=r"float32 \(4,\), but its data is float64 \(3,\)"):
        program.tensor("data", (4,), data=np.zeros(3))
    with pytest.raises(ProgramError, match="belongs to another program"):
        chain(Program(Target.of("sm_90")), x, y, a)
    with pytest.raises(ProgramError, match="neither reads nor writes"):
        program.launch(CHAIN, {"x": x, "y": y}, reads=[x], writes=[], label="r")
    with pytest.raises(ProgramError, match="columns 3:9"):
        program.tensor("m", (2, 8)).columns(3, 9)
    with pytest.raises(ProgramError, match="gaps"):
        program.tensor("n", (2, 8)).columns(0, 4).flat()


def test_what_is_derived_of_a_tensor_is_made_anew_after_a_write(program: Program) -> None:
    a, x, y, z = vectors(program, "axyz")
    made: list[Tensor] = []

    def copy_of(tensor: Tensor) -> Tensor:
        def make() -> Tensor:
            made.append(program.tensor(f"copy{len(made)}", tensor.shape))
            return made[-1]

        return program.derived([tensor], "copy", make)

    first = copy_of(x)
    assert copy_of(x) is first
    assert copy_of(x.rows(0, 4)) is not first  # another view, another copy
    chain(program, x, y, a)
    assert copy_of(x) is first  # it was only read
    record = chain(program, y, z, a)
    program.amend(record, {}, writes=[x])
    assert copy_of(x) is not first
    second = copy_of(x)
    chain(program, y, x.rows(0, 4), a)  # a part of it
    assert copy_of(x) is not second


def test_amending_takes_a_record_of_the_program_once(program: Program) -> None:
    a, x, y, z = vectors(program, "axyz")
    record = chain(program, x, y, a)
    new = program.amend(record, {"b": 2.0}, writes=[z])
    assert program.launches == [new]
    assert new.fields == {**record.fields, "b": 2.0} and new.writes == (y, z)
    with pytest.raises(ProgramError, match="'x->y' is no record of this program, or was amended before"):
        program.amend(record, {"b": 3.0}, writes=[])
    other = Program(Target.of("sm_90"))
    with pytest.raises(ProgramError, match="belongs to another program"):
        program.amend(new, {}, writes=[other.tensor("w", (8,))])
    with pytest.raises(ProgramError, match="field a is tensor 'u', which the record neither reads nor writes"):
        program.amend(new, {"a": program.tensor("u", (8,))}, writes=[])
    assert program.launches == [new]
