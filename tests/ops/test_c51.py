"""Losses of the C51 heads, dueling and plain, and their gradient, against float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device, Target
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops import c51, dueling
from fxengine.ops.c51 import Reference, Transition, reference_losses, reference_project
from fxengine.ops.dueling import Heads
from tests.reference import gradients
from tests.reference.cases import random_case
from tests.reference.config import Config
from tests.reference.forward import heads, trunk
from tests.reference.losses import losses, project, td_errors
from tests.reference.step import scene
from tests.support import assert_close

LOSSES = ("loss_c51", "loss_cql", "loss_distill")
WEIGHTS = {"w_c51": 0.7, "w_cql": 0.3, "w_distill": 0.4}


@pytest.fixture(params=["warp", "many"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp for each branch of a row, or half a one, whatever the number of rows."""
    monkeypatch.setattr(c51, "_MANY", 0 if request.param == "many" else 1 << 30)


@dataclass
class Case:
    """Inputs of one call, as NumPy arrays."""

    sizes: tuple[int, ...]
    atoms: int
    v_min: float
    v_max: float
    v: np.ndarray | None
    adv: list[np.ndarray]
    v_target: np.ndarray | None
    adv_target: list[np.ndarray]
    actions: np.ndarray
    best: np.ndarray
    reward: np.ndarray
    discount: np.ndarray
    weight: np.ndarray
    theta: np.ndarray | None = None
    weights: dict[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    pad: int = 0

    @property
    def batch(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in ("actions", "best", "reward", "discount", "weight")}


def _case(
    seed: int,
    rows: int,
    sizes: tuple[int, ...],
    atoms: int = 51,
    *,
    quantiles: int = 5,
    span: tuple[float, float] = (-10.0, 10.0),
    pad: int = 0,
    plain: bool = False,
) -> Case:
    """`plain`: heads without a value."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    width = span[1] - span[0]
    index = [np.stack([rng.integers(0, n, rows) for n in sizes], axis=1).astype(np.int32) for _ in range(2)]
    return Case(
        sizes,
        atoms,
        *span,
        v=None if plain else normal(rows, atoms),
        adv=[normal(rows, n * atoms) for n in sizes],
        v_target=None if plain else normal(rows, atoms),
        adv_target=[normal(rows, n * atoms) for n in sizes],
        actions=index[0],
        best=index[1],
        reward=(normal(rows) * width / 4 + span[0] / 20).astype(np.float32),
        discount=rng.choice([0.0, 1e-4, 0.3, 0.9, 0.97, 1.0, 1.3], rows).astype(np.float32),
        weight=rng.uniform(0.5, 1.5, rows).astype(np.float32),
        theta=normal(rows, quantiles, sum(sizes)) if quantiles else None,
        weights=dict(WEIGHTS) if quantiles else {k: w for k, w in WEIGHTS.items() if k != "w_distill"},
        pad=pad,
    )


def _reference(case: Case) -> Reference:
    online, target = (case.v, case.adv), (case.v_target, case.adv_target)
    return reference_losses(
        online,
        target,
        *case.batch.values(),
        v_min=case.v_min,
        v_max=case.v_max,
        theta=case.theta,
        atoms=case.atoms,
        **case.weights,
    )


def _build(
    device: Device, case: Case, *, gradient: bool, outputs: tuple[str, ...]
) -> tuple[Program, dict[str, Tensor]]:
    program = Program(device.target)

    def put(name: str, data: np.ndarray) -> Tensor:
        """With matrices `pad` columns wider than they seem."""
        if data.ndim != 2:
            return program.tensor(name, data.shape, data.dtype, arena="inputs", data=np.ascontiguousarray(data))
        wide = np.full((data.shape[0], data.shape[1] + case.pad), 77, data.dtype)
        wide[:, : data.shape[1]] = data
        return program.tensor(name, wide.shape, data.dtype, arena="inputs", data=wide).columns(0, data.shape[1])

    def make_heads(side: str, v: np.ndarray | None, advs: list[np.ndarray]) -> Heads:
        shape = (len(advs[0]), sum(case.sizes))
        branches = tuple(put(f"{side}.adv{d}", adv) for d, adv in enumerate(advs))
        q, lse = program.tensor(f"{side}.q", shape), program.tensor(f"{side}.lse", shape)
        made = Heads(None if v is None else put(f"{side}.v", v), branches, q, lse)
        for d, (adv, first, n) in enumerate(zip(branches, made.offsets, made.sizes, strict=True)):
            dueling.forward(
                program,
                made.v,
                adv,
                q.columns(first, first + n),
                lse=lse.columns(first, first + n),
                v_min=case.v_min,
                v_max=case.v_max,
                label=f"{side}.q{d}",
            )
        return made

    online = make_heads("online", case.v, case.adv)
    target = make_heads("target", case.v_target, case.adv_target)
    results = {name: program.tensor(name, case.reward.shape if name == "td" else (1,)) for name in outputs}
    optional: dict[str, Any] = dict(results)
    if gradient:
        if case.v is not None:
            results["dv"] = put("dv", np.full(case.v.shape, 5.0, np.float32))
        for d, adv in enumerate(case.adv):
            results[f"dadv{d}"] = put(f"dadv{d}", np.full(adv.shape, 5.0, np.float32))
        optional |= {"dv": results.get("dv"), "dadv": [results[f"dadv{d}"] for d in range(len(case.sizes))]}
        optional |= {name: put(name, np.array([w], np.float32)) for name, w in case.weights.items()}
    if case.theta is not None:
        flat = case.theta.reshape(-1, case.theta.shape[2]) if case.pad else case.theta
        optional["theta"] = put("theta", flat)
    batch = Transition(**{name: put(name, data) for name, data in case.batch.items()})
    c51.losses(program, online, target, batch, v_min=case.v_min, v_max=case.v_max, name="q", **optional)
    return program, results


def _run(
    device: Device, case: Case, *, gradient: bool = True, outputs: tuple[str, ...] | None = None
) -> dict[str, np.ndarray]:
    if outputs is None:
        outputs = ("td", *(name for name in LOSSES if case.theta is not None or name != "loss_distill"))
    program, results = _build(device, case, gradient=gradient, outputs=outputs)
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        read = {}
        for name, tensor in results.items():
            whole = plan.buffer(name).read().view(np.float32).reshape(-1, tensor.ld)
            read[name] = whole[:, : tensor.shape[-1]].reshape(tensor.shape)
            if len(tensor.shape) > 1:
                np.testing.assert_array_equal(whole[:, tensor.shape[1] :], 77.0)
        return read


def _compare(result: dict[str, np.ndarray], expected: Reference, loose: float = 1e-5) -> None:
    """Arrays to `loose` of their largest element: an atom's share of the projection is a difference of positions."""

    def close(name: str, reference: np.ndarray) -> None:
        size = np.abs(reference[np.isfinite(reference)]).max(initial=0.0)
        assert_close(result[name], reference, atol=max(loose * size, 1e-9), name=name)

    close("td", expected.td)
    for name in LOSSES:
        if name in result:
            close(name, np.array([getattr(expected, name)]))
    assert ("dv" in result) == ("dadv0" in result and expected.dv is not None)
    if "dv" in result and expected.dv is not None:
        close("dv", expected.dv)
    for d, dadv in enumerate(expected.dadv if "dadv0" in result else []):
        close(f"dadv{d}", dadv)


@settings(max_examples=50)
@given(
    rows=st.sampled_from([1, 2, 3, 8, 9]),
    sizes=st.one_of(
        st.lists(st.integers(1, 5), min_size=1, max_size=8).map(tuple),
        st.sampled_from([(3, 3, 3, 3), (32,), (2, 33), (1,), (2,) * 8]),
    ),
    atoms=st.sampled_from([2, 3, 31, 32, 33, 51, 64, 65, 128, 129, 256]),
    quantiles=st.sampled_from([0, 1, 32, 35]),
    span=st.sampled_from([(-10.0, 10.0), (0.0, 1.0), (-3.0, 50.0)]),
    pad=st.sampled_from([0, 0, 3]),
    plain=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_losses_and_gradient(
    device: Device,
    rows: int,
    sizes: tuple[int, ...],
    atoms: int,
    quantiles: int,
    span: tuple[float, float],
    pad: int,
    plain: bool,
    seed: int,
) -> None:
    case = _case(seed, rows, sizes, atoms, quantiles=quantiles, span=span, pad=pad, plain=plain)
    _compare(_run(device, case), _reference(case), loose=3e-5)


@pytest.mark.parametrize(
    ("rows", "sizes", "atoms", "plain"),
    [
        (33, (3, 3, 3, 3), 51, False),  # whole warps, and a last block of which most is idle
        (11, (2, 4, 1), 51, False),  # a block with lanes that have no row
        (5, (3, 1, 2, 1, 3), 33, False),
        (3, (2,) * 8, 64, False),
        (9, (8,), 31, True),
        (2, (1, 1), 2, False),
        (70, (4,), 9, True),
    ],
    ids=str,
)
def test_fewer_lanes_for_each_branch(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    sizes: tuple[int, ...],
    atoms: int,
    plain: bool,
) -> None:
    monkeypatch.setattr(c51, "_MANY", 0)
    for seed, (quantiles, pad) in enumerate([(5, 0), (0, 3), (33, 3)]):
        case = _case(seed, rows, sizes, atoms, quantiles=quantiles, pad=pad, plain=plain)
        if seed == 2:  # neighbours in a warp that look at many atoms, at one, and at none
            case.discount[::3], case.reward[1::3] = 0.02, 1e30
        _compare(_run(device, case), _reference(case), loose=3e-5)
        assert {launch.family.name for launch in _build(device, case, gradient=True, outputs=())[0].launches} >= {
            "c51_many"
        }


@pytest.mark.usefixtures("kernels")
def test_what_is_not_finite_stays_in_its_row(device: Device) -> None:
    """Whoever else the warp works for."""
    case = _case(14, 21, (3, 2, 4))
    bad = [1, 4, 6, 9, 12, 15, 19]
    assert case.v is not None and case.v_target is not None and case.theta is not None
    case.discount[bad] = 0.9
    clean = _run(device, case)
    case.reward[1], case.discount[4], case.weight[6], case.v[9, 3] = [np.nan] * 4
    case.adv_target[1][12], case.actions[15, 2], case.theta[19] = np.nan, 4, np.nan
    dirty = _run(device, case)
    good = np.setdiff1d(np.arange(21), bad)
    for name in ("td", "dv", "dadv0", "dadv1", "dadv2"):
        np.testing.assert_array_equal(dirty[name][good], clean[name][good])
        assert np.isfinite(dirty[name][good]).all()
    np.testing.assert_array_equal(np.isnan(dirty["dv"]).any(axis=1).nonzero()[0], bad)


def test_the_rows_and_the_device_choose_the_lanes() -> None:
    for arch, rows, sizes, atoms, kernel in [
        ("sm_90", 64, (3, 3, 3, 3), 51, "fx_c51"),
        ("sm_90", 132, (3, 3, 3, 3), 51, "fx_c51"),
        ("sm_90", 133, (3, 3, 3, 3), 51, "fx_c51_many"),
        ("sm_90", 4096, (3, 3, 3, 3), 65, "fx_c51_wide"),
        ("sm_90", 4096, (9,), 16, "fx_c51"),
        ("sim", 33, (2, 3), 51, "fx_c51_many"),
    ]:
        assert c51._family(Target.of(arch), rows, sizes, atoms, True).kernel == kernel
    family = c51._family(Target.of("sm_90"), 4096, (3, 3), 51, False)
    assert family.defines == (("C51_SIZES", "2, 51, 3, 3, false"),)
    assert family.tiles({"rows": 4096, "branches": 2}) == 512


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", sorted(WEIGHTS))
def test_each_loss_alone(device: Device, name: str) -> None:
    case = _case(11, 9, (3, 2, 4))
    case.weights = {name: 0.6}
    _compare(_run(device, case), _reference(case))


@pytest.mark.usefixtures("kernels")
def test_plain_heads_move_the_action_that_was_taken(device: Device) -> None:
    """The distributional loss alone: exact zeros for all other actions, and the softmax's slope for this one."""
    case = _case(12, 7, (3, 2), 51, quantiles=0, plain=True)
    case.weights = {"w_c51": 1.0}
    result = _run(device, case)
    _compare(result, _reference(case))
    for d, n in enumerate(case.sizes):
        moved = np.abs(result[f"dadv{d}"].reshape(7, n, 51)).sum(axis=2) > 0.0
        np.testing.assert_array_equal(moved, case.actions[:, d : d + 1] == np.arange(n))


def test_the_reference_of_plain_heads_is_the_derivative() -> None:
    case = _case(13, 3, (3, 2), 7, quantiles=2, plain=True)
    online, step = [adv.astype(np.float64) for adv in case.adv], 1e-6

    def weighted(adv: list[np.ndarray]) -> float:
        case.adv = adv
        found = _reference(case)
        return sum(w * getattr(found, name.replace("w_", "loss_")) for name, w in case.weights.items())

    case.adv = online
    gradient = _reference(case).dadv
    for d, adv in enumerate(online):
        for index in np.ndindex(adv.shape):
            ends = []
            for sign in (1, -1):
                shifted = [x.copy() for x in online]
                shifted[d][index] += sign * step
                ends.append(weighted(shifted))
            np.testing.assert_allclose((ends[0] - ends[1]) / (2 * step), gradient[d][index], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("branches", [(3, 3, 3, 3), (1,), (4, 1, 3)])
def test_agrees_with_the_reference_of_the_step(device: Device, branches: tuple[int, ...]) -> None:
    """Losses and priorities of a whole step; its head gradients by way of the output layers' bias gradients."""
    config = Config(
        batch=9,
        state=8,
        h1=6,
        h2=6,
        branches=branches,
        **dict.fromkeys(("tokens", "ofi", "aux_h", "cur_h", "iql_h", "ens"), 0),
    )
    state, batch = random_case(5, config)
    s, after = scene(config, state, batch)
    target = state["target"]
    target_heads = heads(config, target, trunk(target, s.batch["next_state"])["h2"], None, None)

    def outputs(p: dict[str, np.ndarray], cache: dict[str, np.ndarray]) -> list[np.ndarray]:
        value = cache["vh"] @ p["w_v2"].T + p["b_v2"]
        advs = [cache[f"hidden{d}"] @ p[f"w_b{d}out"].T + p[f"b_b{d}out"] for d in range(len(branches))]
        return [x.astype(np.float32) for x in (value, *advs)]

    v, *adv = outputs(state["params"], s.nets["heads"])
    v_target, *adv_target = outputs(target, target_heads)
    case = Case(
        branches,
        config.atoms,
        config.v_min,
        config.v_max,
        v,
        adv,
        v_target,
        adv_target,
        batch["actions"],
        after["best"],
        *(batch[name].astype(np.float32) for name in ("reward", "discount", "weight")),
        theta=s.nets["iqn"]["theta"].astype(np.float32),
        weights={name: s.signals[name] for name in WEIGHTS},
    )
    result = _run(device, case)
    expected = losses(config, s.signals, s.batch, s.nets, s.goal)
    assert_close(result["td"], td_errors(config, s.batch, s.nets, s.goal), atol=1e-5, name="td")
    for name in ("c51", "cql", "distill"):
        assert_close(result[f"loss_{name}"][0], expected[f"L_{name}"], atol=1e-5, name=name)
    merged = [maker(s).merged() for maker in (gradients.c51, gradients.cql, gradients.distill)]
    for tensor, bias in {"dv": "b_v2", **{f"dadv{d}": f"b_b{d}out" for d in range(len(branches))}}.items():
        total = sum(component[bias] for component in merged)
        assert_close(result[tensor].sum(axis=0), total, atol=2e-6, name=bias)


def test_projection_reference_agrees_with_the_one_of_the_step() -> None:
    config = Config(atoms=17, v_min=-2.0, v_max=3.0)
    rng = np.random.default_rng(0)
    r, disc, p = rng.normal(size=20) * 3, rng.choice([0.0, 0.2, 0.9], 20), rng.dirichlet(np.ones(17), 20)
    expected = project(config, r, disc, p[:, None, :])[:, 0]
    assert_close(reference_project(r, disc, p, -2.0, 3.0), expected, atol=1e-14)
    assert_close(expected.sum(axis=1), np.ones(20), atol=1e-14)


@pytest.mark.usefixtures("kernels")
def test_a_weight_of_zero_is_an_exact_zero(device: Device) -> None:
    """Whatever the row holds; the losses themselves are not scaled."""
    case = _case(2, 6, (3, 2))
    assert case.v is not None and case.v_target is not None and case.theta is not None
    case.v[0], case.reward[1], case.adv[1][2, 5] = np.nan, np.nan, np.inf
    case.v_target[:] = np.nan
    case.theta[3] = np.inf
    case.weights = dict.fromkeys(WEIGHTS, 0.0)
    result = _run(device, case)
    for name in ("dv", "dadv0", "dadv1"):
        np.testing.assert_array_equal(result[name], 0.0)
    assert all(np.isnan(result[name][0]) for name in ("loss_c51", "loss_cql", "loss_distill"))

    case = _case(2, 6, (3, 2))
    assert case.theta is not None
    case.theta[:] = np.nan  # poisons distillation alone
    case.v_target[:] = np.inf  # poisons the distributional loss alone
    case.weights = {"w_c51": 0.0, "w_cql": 0.5, "w_distill": 0.0}
    clean = _case(2, 6, (3, 2))
    clean.weights = {"w_cql": 0.5}
    expected = _run(device, clean)
    for name, array in _run(device, case).items():
        if name.startswith("d"):
            np.testing.assert_array_equal(array, expected[name])

    case = _case(2, 6, (3,))
    case.actions[:], case.weights = 0, {"w_cql": 0.0, "w_distill": 0.5}
    case.adv[0][0, 60] = np.inf  # q of action 1 is NaN, and with it the conservative term of the row
    result = _run(device, case)
    assert np.isnan(result["loss_cql"][0]) and np.isfinite(result["dv"]).all() and np.isfinite(result["dadv0"]).all()


@pytest.mark.usefixtures("kernels")
def test_dead_rows_ignore_the_target_networks(device: Device) -> None:
    case = _case(3, 8, (3, 4))
    case.discount[:] = [0.0, 0.9] * 4
    clean = _run(device, case)
    _compare(clean, _reference(case))
    case.v_target[::2], case.adv_target[1][::2] = np.nan, np.inf
    dirty = _run(device, case)
    for name, array in dirty.items():
        np.testing.assert_array_equal(array, clean[name])


@pytest.mark.usefixtures("kernels")
def test_rewards_that_are_not_finite(device: Device) -> None:
    """An infinite one lands on the outermost atom, as the projection says; NaN reaches loss and gradient."""
    case = _case(4, 6, (3, 2))
    case.discount[:] = [0.9, 0.0, 0.9, 0.0, 0.9, 0.9]
    case.reward[:4] = [np.inf, np.inf, -np.inf, -np.inf]
    result = _run(device, case)
    _compare(result, _reference(case))
    assert all(np.isfinite(array).all() for array in result.values())

    case.reward[4] = np.nan
    result = _run(device, case)
    _compare(result, _reference(case))
    bad = np.arange(6) == 4
    np.testing.assert_array_equal(np.isnan(result["td"]), bad)
    np.testing.assert_array_equal(np.isnan(result["dv"]).all(axis=1), bad)
    assert np.isnan(result["loss_c51"][0]) and np.isfinite(result["loss_cql"][0])


@pytest.mark.usefixtures("kernels")
def test_networks_that_are_not_finite(device: Device) -> None:
    """A NaN anywhere in a live row is in its priority and its gradient."""
    case = _case(6, 5, (3, 2))
    case.discount[:] = 0.9
    case.v[0, 7], case.adv[1][1, 60], case.v_target[2, 3], case.adv_target[0][3, 100] = [np.nan] * 4
    result = _run(device, case)
    for name in ("td", "dv"):
        bad = np.isnan(result[name]).reshape(5, -1).any(axis=1)
        np.testing.assert_array_equal(bad, [True, True, True, True, False], err_msg=name)


@pytest.mark.usefixtures("kernels")
def test_an_unknown_action_makes_its_row_nan(device: Device) -> None:
    case = _case(7, 4, (3, 2))
    clean = _run(device, case)
    case.actions[1, 0], case.actions[2, 1] = 3, -1
    dirty = _run(device, case)
    np.testing.assert_array_equal(np.isnan(dirty["td"]), [False, True, True, False])
    assert np.isnan(dirty["dv"][1:3]).all() and np.isnan(dirty["dadv0"][1]).all() and np.isnan(dirty["dadv1"][2]).all()
    for name in ("td", "dv", "dadv0", "dadv1"):
        np.testing.assert_array_equal(dirty[name][[0, 3]], clean[name][[0, 3]])
    for name in WEIGHTS:  # each loss by itself
        case.weights = {name: 0.5}
        np.testing.assert_array_equal(np.isnan(_run(device, case)["dv"]).all(axis=1), [False, True, True, False])


@pytest.mark.usefixtures("kernels")
def test_huge_rewards_and_any_discount_keep_the_mass(device: Device) -> None:
    """The range of atoms that the projection looks at never loses one."""
    for discount in (1e-6, 0.0099, 0.01, 0.5, 1.0, 4.0, -0.5):
        case = _case(8, 12, (3,), 33, quantiles=0)
        case.discount[:] = discount
        case.reward[:] = [-1e30, -1e4, -20, -10, -9.99, -0.3, 0.0, 0.3, 9.99, 10, 20, 1e30]
        case.weights = {"w_c51": 1.0}
        _compare(_run(device, case), _reference(case), loose=2e-5)


@pytest.mark.usefixtures("kernels")
def test_bits_do_not_depend_on_the_outputs_nor_on_the_place_in_the_batch(device: Device) -> None:
    case = _case(9, 11, (3, 3, 3))
    full = _run(device, case)
    again = _run(device, case)
    for name, array in full.items():
        np.testing.assert_array_equal(array, again[name])
    for outputs in ((), ("td",), ("loss_cql", "loss_distill")):
        part = _run(device, case, outputs=outputs)
        assert set(part) == {*outputs, "dv", "dadv0", "dadv1", "dadv2"}
        for name, array in part.items():
            np.testing.assert_array_equal(array, full[name])
    alone = _run(device, case, gradient=False)
    assert set(alone) == {"td", *LOSSES}
    np.testing.assert_array_equal(alone["td"], full["td"])
    rows = np.r_[10, 3, 3, 0:11]
    for name in ("v", "v_target", "theta", "actions", "best", "reward", "discount", "weight"):
        setattr(case, name, getattr(case, name)[rows])
    case.adv, case.adv_target = [x[rows] for x in case.adv], [x[rows] for x in case.adv_target]
    np.testing.assert_array_equal(_run(device, case)["td"], full["td"][rows])


def test_what_does_not_fit_is_refused(device: Device) -> None:
    def build(case: Case, **options: Any) -> None:
        _build(device, case, **{"gradient": True, "outputs": ("td",), **options})

    case = _case(0, 4, (3, 2))
    case.reward = case.reward[:3]
    with pytest.raises(ProgramError, match=r"reward must be float32 \(4,\), got float32 \(3,\)"):
        build(case)
    case = _case(0, 4, (3, 2))
    case.actions = case.actions[:, :1]
    with pytest.raises(ProgramError, match=r"actions must be int32 \(4, 2\), got int32 \(4, 1\)"):
        build(case)
    case = _case(0, 4, (3, 2))
    case.adv_target = case.adv_target[:1]
    with pytest.raises(ProgramError, match="2 online branches, but 1 target branches"):
        build(case)
    case = _case(0, 4, (3, 2), quantiles=0)
    with pytest.raises(ProgramError, match="w_distill and loss_distill need theta"):
        build(case, outputs=("loss_distill",))
    case = _case(0, 4, (3, 2))
    case.theta = case.theta[:, :, :4] if case.theta is not None else None
    with pytest.raises(ProgramError, match=r"theta must be float32 \(4, N, 5\)"):
        build(case)
    case = _case(0, 4, (3, 2))
    case.weights = {}
    with pytest.raises(ProgramError, match="at least one of w_c51, w_cql, w_distill"):
        build(case)
    case = _case(0, 4, (3, 2))
    case.v_target = None
    with pytest.raises(ProgramError, match="must both be dueling or both plain"):
        build(case)
    case = _case(0, 4, (3, 2), plain=True)
    program, results = _build(device, case, gradient=False, outputs=("td",))
    heads_ = Heads(None, (results["td"].reshape(4, 1),), results["td"].reshape(4, 1), results["td"].reshape(4, 1))
    with pytest.raises(ProgramError, match="1 atoms; the kernels take 2 to 256"):
        batch = Transition(*[results["td"]] * 5)
        c51.losses(program, heads_, heads_, batch, v_min=0.0, v_max=1.0, name="few")
    with pytest.raises(ProgramError, match="9 branches; the kernel takes 1 to 8"):
        build(_case(0, 4, (2,) * 9))
