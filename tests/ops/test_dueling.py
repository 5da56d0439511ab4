"""The C51 heads, dueling and plain, forward, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops import dueling
from fxengine.ops.dueling import reference_dueling
from tests.reference.config import Config
from tests.reference.forward import argmax, heads
from tests.support import assert_close

OUTPUTS = ("q", "lse", "policy", "best")


def _given(program: Program, name: str, data: np.ndarray, pad: int = 0) -> Tensor:
    wide = np.full((data.shape[0], data.shape[1] + pad), 77, data.dtype)
    wide[:, : data.shape[1]] = data
    return program.tensor(name, wide.shape, data.dtype, arena="inputs", data=wide).columns(0, data.shape[1])


def _read(plan: Plan, tensor: Tensor) -> np.ndarray:
    """A view's elements, after a check that what lies beside them is untouched."""
    whole = plan.buffer(tensor.name).read().view(tensor.dtype).reshape(-1, tensor.ld)
    first = tensor.offset
    beside = np.delete(whole, np.s_[first : first + tensor.shape[1]], axis=1)
    assert (beside == 77).all(), f"{tensor.name}: written beside columns {first}..{first + tensor.shape[1]}"
    return whole[:, first : first + tensor.shape[1]]


def _run(
    device: Device,
    v: np.ndarray | None,
    adv: np.ndarray,
    *,
    atoms: int = 0,
    v_min: float = -10.0,
    v_max: float = 10.0,
    pad: int = 0,
    outputs: tuple[str, ...] = OUTPUTS,
) -> dict[str, np.ndarray]:
    """Without v the heads are plain, of so many atoms."""
    rows, n = adv.shape[0], adv.shape[1] // (atoms if v is None else v.shape[1])
    program = Program(device.target)
    tensors: dict[str, Tensor] = {}
    for name in outputs:
        width, dtype = (1, np.int32) if name == "best" else (n, np.float32)
        data = np.full((rows, width + 2 * pad), 77, dtype)
        tensors[name] = program.tensor(name, data.shape, dtype, arena="out", data=data).columns(pad, pad + width)
    optional: dict[str, Any] = {name: t for name, t in tensors.items() if name != "q"}
    dueling.forward(
        program,
        None if v is None else _given(program, "v", v.astype(np.float32), pad),
        _given(program, "adv", adv.astype(np.float32), 2 * pad),
        tensors["q"],
        v_min=v_min,
        v_max=v_max,
        label="head",
        **optional,
    )
    with device.stream() as stream, Plan(program, device, guard=True) as plan:
        plan.run(stream=stream)
        stream.synchronize()
        plan.check_guards()
        return {name: _read(plan, t) for name, t in tensors.items()}


def _logits(seed: int, rows: int, n: int, atoms: int, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    v, adv = rng.normal(size=(rows, atoms)) * scale, rng.normal(size=(rows, n * atoms)) * scale
    return v.astype(np.float32), adv.astype(np.float32)


@settings(max_examples=50)
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 33]),
    n=st.sampled_from([1, 2, 3, 4, 5, 8, 9, 32, 35]),
    atoms=st.sampled_from([2, 3, 31, 32, 33, 51, 64, 65, 128, 129, 200, 256]),
    pad=st.sampled_from([0, 0, 1, 3]),
    scale=st.sampled_from([0.1, 1.0, 20.0]),
    span=st.sampled_from([(-10.0, 10.0), (0.0, 1.0), (-3.0, 50.0)]),
    plain=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_forward(
    device: Device,
    rows: int,
    n: int,
    atoms: int,
    pad: int,
    scale: float,
    span: tuple[float, float],
    plain: bool,
    seed: int,
) -> None:
    value, adv = _logits(seed, rows, n, atoms, scale)
    v = None if plain else value
    result = _run(device, v, adv, atoms=atoms, v_min=span[0], v_max=span[1], pad=pad)
    expected = reference_dueling(v, adv, *span, atoms=atoms)
    size = max(map(abs, span))
    # Logits of size s are known to about s eps; what follows from them, to that relative error.
    loose = 4e-7 * (1 + 10 * scale)
    assert_close(result["lse"], expected.lse, atol=loose, name="lse")
    assert_close(result["q"], expected.q, atol=loose * size, name="q")
    assert_close(result["policy"], expected.policy, atol=loose * size, name="policy")
    np.testing.assert_array_equal(result["best"][:, 0], argmax(result["q"]))


def test_agrees_with_the_reference_of_the_step(device: Device) -> None:
    """Value and advantages as the whole step's reference makes them."""
    config = Config(state=4, h2=5, value_h=6, adv_h=7, branches=(3, 4), atoms=21, aux_h=0, ofi=0, iqn_quantiles=0)
    rng = np.random.default_rng(3)
    names = {"v1": (6, 5), "v2": (21, 6), "b0fc": (7, 5), "b0out": (63, 7), "b1fc": (7, 8), "b1out": (84, 7)}
    p = {f"w_{name}": rng.normal(size=shape) for name, shape in names.items()}
    p |= {f"b_{name}": rng.normal(size=shape[0]) for name, shape in names.items()}
    cache = heads(config, p, rng.normal(size=(9, 5)), None, None)
    v = cache["vh"] @ p["w_v2"].T + p["b_v2"]
    for d in range(2):
        result = _run(device, v, cache[f"hidden{d}"] @ p[f"w_b{d}out"].T + p[f"b_b{d}out"])
        assert_close(result["q"], cache[f"q{d}"], atol=1e-4, name=f"q{d}")
        np.testing.assert_array_equal(result["best"][:, 0], argmax(cache[f"q{d}"]))


def test_plain_heads_are_dueling_heads_without_value_and_mean(device: Device) -> None:
    _, adv = _logits(4, 5, 3, 51)
    wide = adv.reshape(5, 3, 51)
    plain = _run(device, None, adv, atoms=51)
    dueling_heads = _run(device, wide.mean(axis=1), adv)
    for name in ("q", "lse", "policy"):
        assert_close(plain[name], dueling_heads[name], atol=1e-5, name=name)
    single = _run(device, None, adv[:, :51], atoms=51)
    np.testing.assert_array_equal(single["q"], plain["q"][:, :1])  # no action sees another


def test_argmax_takes_the_lowest_of_equals(device: Device) -> None:
    adv = np.zeros((3, 6, 11), np.float32)
    adv[1, 3:, 10] = 2.0  # actions 3, 4, 5 share the top
    adv[2, 1, 10] = adv[2, 4, 10] = 2.0
    result = _run(device, np.zeros((3, 11), np.float32), adv.reshape(3, -1))
    np.testing.assert_array_equal(result["best"][:, 0], [0, 3, 1])


def test_nan_never_wins(device: Device) -> None:
    """An infinite advantage makes its own action NaN (inf - inf) and leaves the others' atom without probability."""
    v, adv = _logits(0, 4, 5, 40)
    wide = adv.reshape(4, 5, 40)
    wide[0, 0, 7] = np.inf
    wide[1, 4, 0] = np.inf
    wide[2, 2, 3] = np.nan
    v[3, 1] = np.inf
    result = _run(device, v, adv)
    expected = reference_dueling(v, adv, -10.0, 10.0)
    assert np.isnan(expected.q[0]).tolist() == [True, False, False, False, False] and np.isnan(expected.q[2:]).all()
    assert_close(result["q"], expected.q, atol=1e-5)
    assert_close(result["policy"], expected.policy, atol=1e-5)
    np.testing.assert_array_equal(result["best"][:, 0], expected.best)
    np.testing.assert_array_equal(np.isnan(result["lse"]), np.isnan(expected.lse))


def test_outputs_are_optional_and_bits_do_not_depend_on_them(device: Device) -> None:
    """Nor on where in the batch a row stands."""
    v, adv = _logits(1, 19, 3, 51)
    full = _run(device, v, adv)
    np.testing.assert_array_equal(full["q"], _run(device, v, adv, outputs=("q",))["q"])
    for name, result in _run(device, v[5:], adv[5:], pad=1).items():
        np.testing.assert_array_equal(full[name][5:], result)


def test_branches_share_a_launch(device: Device) -> None:
    program = Program(device.target)
    v, q = program.tensor("v", (4, 5)), program.tensor("q", (4, 6))
    for d, n in enumerate((2, 4)):
        adv = program.tensor(f"adv{d}", (4, 5 * n))
        columns = q.columns(2 * d, 2 * d + n)
        dueling.forward(program, v, adv, columns, v_min=-1.0, v_max=1.0, label=f"q{d}")
    with Plan(program, device) as plan:
        assert [len(node.records) for node in plan.nodes] == [2]


def test_what_does_not_fit_is_refused(device: Device) -> None:
    program = Program(device.target)
    v, adv, q = program.tensor("v", (4, 5)), program.tensor("adv", (4, 15)), program.tensor("q", (4, 3))

    def forward(v: Tensor, adv: Tensor, q: Tensor, v_min: float = -1.0, v_max: float = 1.0, **optional: Tensor) -> None:
        dueling.forward(program, v, adv, q, v_min=v_min, v_max=v_max, label="head", **optional)

    with pytest.raises(ProgramError, match=r"'head': adv must have actions x 5 columns.*\(4, 14\)"):
        forward(v, program.tensor("short", (4, 14)), q)
    with pytest.raises(ProgramError, match=r"'head': adv must have 2 x atoms columns for q \(4, 2\), got \(4, 15\)"):
        dueling.forward(program, None, adv, program.tensor("q1", (4, 2)), v_min=-1.0, v_max=1.0, label="head")
    with pytest.raises(ProgramError, match=r"q must be float32 \(4, 3\), got float32 \(4, 2\)"):
        forward(v, adv, program.tensor("q2", (4, 2)))
    with pytest.raises(ProgramError, match=r"best must be int32 \(4,\), got float32"):
        forward(v, adv, q, best=program.tensor("b", (4,)))
    with pytest.raises(ProgramError, match=r"best must be int32 \(4, 1\), got int32 \(4, 2\)"):
        forward(v, adv, q, best=program.tensor("b2", (4, 2), np.int32))
    with pytest.raises(ProgramError, match=r"v_min 1\.0 must be finite and below v_max 1\.0"):
        forward(v, adv, q, v_min=1.0)
    with pytest.raises(ProgramError, match="257 atoms; the kernels take 2 to 256"):
        forward(program.tensor("v257", (1, 257)), program.tensor("adv257", (1, 514)), program.tensor("q257", (1, 2)))
    assert not program.launches
