"""A branch of the C51 heads from its hidden layer to q in one launch, against float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fxengine.driver import Device
from fxengine.driver.target import Target
from fxengine.graphs import Plan, Program, ProgramError, Tensor, schedule
from fxengine.ops import heads, linear
from fxengine.ops.dueling import reference_dueling
from fxengine.ops.heads import reference_finish
from tests.reference.forward import argmax
from tests.support import assert_close

Array = NDArray[np.float32]
RESULTS = ("v", "adv", "q", "lse", "policy", "best", "wire", "logits")


@dataclass
class Case:
    """Operands of a branch.

    Matrices have `pad` columns of 77 on both sides, which nothing may touch or use; or with `gaps`, as in a step, rows
    that start at multiples of four numbers.
    """

    rows: int = 5
    depth: int = 24
    value_depth: int = 20
    atoms: int = 11
    actions: int = 3
    late: str = "none"
    columns: int = 3
    bar_depth: int = 6
    pad: int = 0
    gaps: bool = False
    seed: int = 0
    arrays: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        if self.late == "wire":
            self.columns = 1
        out = self.actions * self.atoms
        shapes = {
            "value_hidden": (self.rows, self.value_depth), "value_w": (self.atoms, self.value_depth),
            "value_b": (self.atoms,), "hidden": (self.rows, self.depth), "w": (out, self.depth), "b": (out,),
            "late": (self.depth, self.columns), "others": (self.rows, self.columns),
            "bar_hidden": (self.rows, self.bar_depth), "bar_w": (2, self.bar_depth), "bar_b": (2,),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.arrays.setdefault(name, (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32))
        if self.late == "none":
            self.arrays["hidden"] = np.maximum(self.arrays["hidden"], 0)
        self.arrays["value_hidden"] = np.maximum(self.arrays["value_hidden"], 0)

    @property
    def sizes(self) -> heads.Sizes:
        late = 0 if self.late == "none" else self.columns
        return heads.Sizes(self.depth, self.value_depth, self.atoms, self.actions, late)

    def reference(self, precision: str) -> dict[str, Any]:
        """Results in float64, with operands rounded as the precision says."""
        a, z = self.arrays, None
        found: dict[str, Any] = {}
        if self.late == "wire":
            logits = a["bar_hidden"].astype(np.float64) @ a["bar_w"].T + a["bar_b"]
            z = np.tanh((logits[:, 1:] - logits[:, :1]) / 2)
            found |= {"logits": logits, "wire": z}
        elif self.late == "others":
            z = a["others"]
        found["hidden"] = a["hidden"] if z is None else reference_finish(a["hidden"], z, a["late"])

        def product(x: Any, w: Array, b: Array) -> NDArray[np.float64]:
            rounded = [linear.reference_rounded(np.asarray(m, np.float32), precision) for m in (x, w)]
            return rounded[0].astype(np.float64) @ rounded[1].T.astype(np.float64) + b

        found["v"] = product(a["value_hidden"], a["value_w"], a["value_b"])
        found["adv"] = product(found["hidden"], a["w"], a["b"])
        head = reference_dueling(found["v"], found["adv"], -10.0, 10.0)
        return found | {"q": head.q, "lse": head.lse, "policy": head.policy}


class Bench:
    """Programs over cases, and what they left."""

    def __init__(self, device: Device, precision: str) -> None:
        self.device = device
        self.program = Program(device.target, precision)
        self.wide: dict[str, Tensor] = {}
        self.widths: dict[str, int] = {}

    def add(self, case: Case, results: tuple[str, ...] = RESULTS, **options: Any) -> None:
        """Append the record of a case, with some of its results."""
        self.case = case

        def matrix(name: str, data: NDArray[Any], arena: str = "inputs") -> Tensor:
            if data.ndim == 1:
                return self.program.tensor(name, data.shape, data.dtype, arena=arena, data=data)
            columns = heads._up(data.shape[1], 4) if case.gaps else data.shape[1] + 2 * case.pad
            wide = np.full((data.shape[0], columns), 77, data.dtype)
            self.widths[name] = data.shape[1]
            wide[:, case.pad : case.pad + data.shape[1]] = data
            self.wide[name] = self.program.tensor(name, wide.shape, data.dtype, arena=arena, data=wide)
            return self.wide[name].columns(case.pad, case.pad + data.shape[1])

        given = {name: matrix(name, data) for name, data in case.arrays.items()}
        widths = {"v": case.atoms, "adv": case.actions * case.atoms, "wire": 1, "best": 1, "logits": 2}
        out = {
            name: matrix(
                name,
                np.zeros((case.rows, widths.get(name, case.actions)), np.int32 if name == "best" else np.float32),
                "out",
            )
            for name in results
            if case.late == "wire" or name not in ("wire", "logits")
        }
        beside: heads.Wire | Tensor | None = None
        if case.late == "wire":
            wire, logits = out.get("wire"), out.get("logits")
            beside = heads.Wire(given["bar_hidden"], given["bar_w"], given["bar_b"], logits, wire)
        elif case.late == "others":
            beside = given["others"]
        optional = {name: out.get(name) for name in ("adv", "lse", "policy", "best")}
        heads.forward(
            self.program,
            heads.Value(given["value_hidden"], given["value_w"], given["value_b"], out.get("v")),
            heads.Branch(
                given["hidden"], given["w"], given["b"], out["q"], given["late"] if beside else None, **optional
            ),
            beside=beside,
            v_min=-10.0,
            v_max=10.0,
            label="head",
            **{"compiled": False, **options},
        )

    def run(self) -> dict[str, NDArray[Any]]:
        """What lies in all matrices, after a check that nothing else was touched."""
        with self.device.stream() as stream, Plan(self.program, self.device, guard=True) as plan:
            plan.run(stream=stream)
            stream.synchronize()
            plan.check_guards()
            found, pad = {}, self.case.pad
            for name, tensor in self.wide.items():
                whole = plan.buffer(tensor).read()
                last = pad + self.widths[name]
                assert (np.delete(whole, np.s_[pad:last], axis=1) == 77).all(), f"{name}: written beside its columns"
                found[name] = whole[:, pad:last]
            return found


def run(device: Device, precision: str, case: Case, **options: Any) -> dict[str, NDArray[Any]]:
    bench = Bench(device, precision)
    bench.add(case, **options)
    return bench.run()


def check(case: Case, precision: str, found: dict[str, NDArray[Any]]) -> None:
    expected = case.reference(precision)
    # A number of the hidden layer that is made here may be rounded to its other neighbour than in the reference.
    rounded = case.late != "none" and precision != "fp32"
    loose = {"tf32": 2e-4, "bf16": 2e-3}[precision] if rounded else 0.0
    for name in ("hidden", "wire", "logits"):
        if name in expected:
            assert_close(found[name], expected[name], atol=2e-6, factor=64, name=name)
    for name in ("v", "adv", "lse"):
        assert_close(found[name], expected[name], atol=4e-6 + loose, factor=64, name=name)
    assert_close(found["q"], expected["q"], atol=4e-5 + 20 * loose, name="q")
    assert_close(found["policy"], expected["policy"], atol=4e-5 + 20 * loose, name="policy")
    np.testing.assert_array_equal(found["best"][:, 0], argmax(found["q"]))


SIZES = st.sampled_from([1, 3, 4, 16, 17, 31, 64, 100, 128, 129, 200])


@settings(max_examples=60)
@given(
    rows=st.sampled_from([1, 7, 15, 16, 17, 40, 70]),
    depth=SIZES,
    value_depth=SIZES,
    atoms=st.sampled_from([2, 3, 16, 17, 31, 32, 33, 51, 64]),
    actions=st.sampled_from([1, 2, 3, 4, 5, 9]),
    late=st.sampled_from(["none", "wire", "others"]),
    columns=st.sampled_from([1, 2, 3, 5]),
    bar_depth=st.sampled_from([1, 6, 32, 33, 70]),
    pad=st.sampled_from([0, 1, 4]),
    gaps=st.booleans(),
    precision=st.sampled_from(["fp32", "tf32", "bf16"]),
    seed=st.integers(0, 1000),
)
def test_forward(device: Device, precision: str, pad: int, gaps: bool, **sizes: Any) -> None:
    case = Case(pad=0 if gaps else pad, gaps=gaps, **sizes)
    assume(heads.fits(device.target, precision, case.sizes))
    check(case, precision, run(device, precision, case))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("late", "depth", "value_depth"), [("wire", 128, 128), ("others", 129, 10)])
def test_sizes_that_are_compiled_in_change_no_bit(
    device: Device, precision: str, late: str, depth: int, value_depth: int
) -> None:
    """Rows start at multiples of 16 bytes then; 129 columns do not end there."""
    case = Case(70, depth, value_depth, atoms=51, late=late, bar_depth=32, gaps=True)
    found = [run(device, precision, case, compiled=compiled) for compiled in (False, True)]
    check(case, precision, found[1])
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


@pytest.mark.parametrize(("atoms", "actions"), [(51, 3), (51, 2), (7, 5), (64, 1), (33, 9), (2, 32), (16, 4)])
def test_bits_do_not_depend_on_the_lanes_of_a_row(
    device: Device, atoms: int, actions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those follow from the rows of a block where sizes are compiled in. Rows 1 and 2 and action 0 are not finite."""
    case = Case(69, 8, 12, atoms, actions, late="wire", bar_depth=40, gaps=True)
    check(case, "fp32", run(device, "fp32", case))
    case.arrays["hidden"][1, 3] = np.nan
    case.arrays["value_hidden"][2] = np.inf
    case.arrays["b"][atoms - 1] = np.inf
    expected, rooms = run(device, "fp32", case), dict(heads._SHARED)
    heights = heads._heights(device.target, "fp32", case.sizes)
    assert np.isnan(expected["q"][:3, 0]).all() and np.isfinite(expected["q"][3:, 1:]).all()
    assert len(heights) >= 2
    for height in heights:
        monkeypatch.setattr(heads, "_SHARED", {height: rooms[height]})
        found = run(device, "fp32", case, compiled=True)
        for name in expected:
            np.testing.assert_array_equal(expected[name], found[name], err_msg=f"{name} with {height} rows")


@pytest.mark.parametrize(("actions", "alike"), [(3, [1, 2]), (3, [0, 1, 2]), (9, [3, 4, 7]), (9, [8])])
def test_the_first_of_equal_actions_wins(device: Device, actions: int, alike: list[int]) -> None:
    case = Case(rows=18, atoms=51, actions=actions, gaps=True)
    w = case.arrays["w"].reshape(actions, 51, -1)
    b = case.arrays["b"].reshape(actions, 51)
    w[alike] = w[alike[0]]
    b[:] = 0
    b[alike, -1] = 8.0
    for compiled in (False, True):
        found = run(device, "fp32", case, compiled=compiled)
        assert (found["q"][:, alike] == found["q"].max(axis=1, keepdims=True)).all()
        np.testing.assert_array_equal(found["best"], alike[0])


@pytest.mark.parametrize("gaps", [False, True])
def test_sizes_are_compiled_in_only_where_rows_start_at_16_bytes(device: Device, gaps: bool) -> None:
    """Rows of results too: 11 and 33 columns of v and adv."""
    case, bench = Case(gaps=gaps), Bench(device, "fp32")
    bench.add(case, compiled=True)
    assert bool(bench.program.launches[0].family.defines) == gaps
    check(case, "fp32", bench.run())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_bits_do_not_depend_on_the_rows_of_a_block(
    device: Device, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, found = Case(rows=37, late="wire"), []
    for height, room in list(heads._SHARED.items()):
        if room + heads._STATIC > device.target.shared_memory_optin:
            continue
        monkeypatch.setattr(heads, "_SHARED", {height: room})
        found.append(run(device, precision, case))
    assert len(found) >= 2
    for other in found[1:]:
        for name in found[0]:
            np.testing.assert_array_equal(found[0][name], other[name], err_msg=name)


def test_results_are_optional_and_bits_do_not_depend_on_them(device: Device) -> None:
    """Nor on where in the batch a row stands."""
    case = Case(rows=19, late="others", actions=5)
    full = run(device, "tf32", case)
    alone = run(device, "tf32", case, results=("q",), keep=False)
    np.testing.assert_array_equal(full["q"], alone["q"])
    np.testing.assert_array_equal(alone["hidden"], case.arrays["hidden"])  # not kept
    tail = {name: a[5:] if a.shape[0] == 19 else a for name, a in case.arrays.items()}
    for name, result in run(device, "tf32", Case(rows=14, late="others", actions=5, arrays=tail)).items():
        if name in RESULTS:
            np.testing.assert_array_equal(full[name][5:], result, err_msg=name)


def test_what_is_not_finite_stays_in_its_row(device: Device) -> None:
    """NaN passes the ReLU and never wins; all NaN gives 0."""
    case = Case(rows=4, late="wire", actions=4)
    case.arrays["hidden"][1, 3] = np.nan
    case.arrays["bar_hidden"][2] = np.nan
    case.arrays["b"][5] = np.inf  # of action 0: NaN in its own softmax, no probability for the others' atom
    found = run(device, "fp32", case)
    assert np.isnan(found["q"][1]).all() and np.isnan(found["hidden"][2]).all() and np.isnan(found["wire"][2])
    np.testing.assert_array_equal(found["best"][1:3], 0)
    for row in (0, 3):
        assert np.isnan(found["q"][row]).tolist() == [True, False, False, False]
        assert found["best"][row] == np.nanargmax(found["q"][row])


@pytest.mark.parametrize("depth", [24, 30, 128])
def test_an_infinite_late_column_is_like_any_number(device: Device, depth: int) -> None:
    """Whatever stands behind the layer's last column to fill it up."""
    case = Case(rows=2, depth=depth, late="others", columns=1)
    case.arrays["late"][:] = 1.0
    case.arrays["others"][0] = -np.inf
    found = run(device, "fp32", case)
    np.testing.assert_array_equal(found["hidden"][0], 0.0)
    check(case, "fp32", found)


@pytest.mark.parametrize("made_there", [False, True])
def test_a_policy_goes_on_to_the_next_branch_which_begins_early(made_there: bool) -> None:
    """Its rows were there before the policy: they are read while the policy is made, unless that launch makes them."""
    program = Program(Target.of("sm_90"), "tf32")
    value = heads.Value(program.tensor("vh", (64, 16)), program.tensor("vw", (11, 16)), program.tensor("vb", (11,)))
    w, b, late = program.tensor("w", (33, 16)), program.tensor("b", (33,)), program.tensor("late", (16, 3))
    hidden = [program.tensor(f"hidden{i}", (64, 16)) for i in range(2)]
    policy, adv = program.tensor("policy", (64, 3)), program.tensor("adv", (64, 33))
    for i in range(2):
        linear.forward(program, value.hidden, program.tensor(f"w{i}", (16, 16)), None, hidden[i], tile="16x16")
    q = [program.tensor(f"q{i}", (64, 3)) for i in range(2)]
    first = heads.Branch(hidden[0], w, b, q[0], policy=policy, adv=adv)
    second = heads.Branch(hidden[1], w, b, q[1], late)
    heads.forward(program, value, first, v_min=-1.0, v_max=1.0, label="head0")
    if made_there:
        value = replace(value, hidden=adv.columns(0, 16))
    heads.forward(program, value, second, beside=policy, v_min=-1.0, v_max=1.0, label="head1")
    nodes = {record.label: node for node in schedule(program) for record in node.records}
    assert nodes["hidden0"] is nodes["hidden1"]
    assert [nodes[f"head{i}"].level for i in range(2)] == [1, 2]
    records = [nodes[f"head{i}"].records[0] for i in range(2)]
    assert [r.fields["early"] for r in records] == [0, 1]
    assert hidden[1] in records[1].early and hidden[0] not in records[0].early
    assert nodes["head1"].overlaps == (not made_there)


def test_fits_says_what_a_device_has_room_for() -> None:
    sizes = heads.Sizes(128, 128, 51, 3, late=3)
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120", "sim"):
        assert heads.fits(Target.of(arch), "tf32", sizes)
    target = Target.of("sm_90")
    assert not heads.fits(target, "tf32", heads.Sizes(128, 128, 65, 3))
    assert not heads.fits(target, "tf32", heads.Sizes(128, 128, 2, 33))
    assert not heads.fits(target, "tf32", heads.Sizes(1024, 1024, 51, 3))
    assert heads._heights(target, "tf32", sizes) == [16, 32, 64]
    assert heads._heights(Target.of("sm_120"), "tf32", sizes) == [16, 32]


def test_what_does_not_fit_is_refused(device: Device) -> None:
    program = Program(device.target)
    value = heads.Value(program.tensor("vh", (4, 6)), program.tensor("vw", (5, 6)), program.tensor("vb", (5,)))
    hidden, w, b, q = (
        program.tensor(name, shape) for name, shape in (("hidden", (4, 8)), ("w", (15, 8)), ("b", (15,)), ("q", (4, 3)))
    )
    late = program.tensor("late", (8, 2))

    def forward(beside: Any = None, v_max: float = 1.0, late: Tensor | None = None, **changed: Tensor) -> None:
        branch = heads.Branch(**{"hidden": hidden, "w": w, "b": b, "q": q, "late": late, **changed})
        heads.forward(program, value, branch, beside=beside, v_min=-1.0, v_max=v_max, label="head")

    with pytest.raises(ProgramError, match=r"'head': w must be float32 \(15, 8\), as q has 3 actions.*got.*\(14, 8\)"):
        forward(w=program.tensor("w14", (14, 8)))
    with pytest.raises(ProgramError, match=r"'head': adv must be float32 \(4, 15\)"):
        forward(adv=program.tensor("adv", (4, 14)))
    with pytest.raises(ProgramError, match="columns come late exactly if there are weights for them"):
        forward(late=late)
    with pytest.raises(ProgramError, match=r"'head': late must be float32 \(8, 3\), got float32 \(8, 2\)"):
        forward(program.tensor("policy", (4, 3)), late=late)
    both = program.tensor("both", (8, 8))
    with pytest.raises(ProgramError, match=r"'head': hidden 'both' \[4, 8\] overlaps late 'both' \[8, 2\]"):
        forward(program.tensor("two", (4, 2)), hidden=both.rows(0, 4), late=both.columns(0, 2))
    with pytest.raises(ProgramError, match=r"v_min -1\.0 must be finite and below v_max -1\.0"):
        forward(v_max=-1.0)
    wide = program.tensor("wide", (4, 5000))
    with pytest.raises(ProgramError, match=r"'head': no block of this device has room for Sizes\(depth=5000"):
        forward(hidden=wide, w=program.tensor("w_wide", (15, 5000)))
    assert not program.launches
