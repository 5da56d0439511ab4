"""Token attention and its gradients against float64, staged in shared memory and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, ProgramError, Tensor
from fxengine.ops import attention
from tests.ops.test_linear import Array, Bench, forget, read
from tests.reference import backward as reference_backward
from tests.reference import forward as reference_forward
from tests.reference.config import Config
from tests.support import assert_close

WEIGHTS = ("w_q", "w_k", "w_val", "w_o")


class Case:
    """Forward with and without what a backward needs, backward, and the gradients of the weights."""

    def __init__(
        self,
        device: Device,
        batch: int,
        tokens: int,
        features: int,
        attn: int,
        *,
        samples: int | None = None,
        lead: int = 0,
        pad: int = 0,
        spread: float = 1.0,
        accumulate: bool = False,
        seed: int = 0,
        poison: dict[int, float] | None = None,
    ) -> None:
        bench = Bench(device, seed=seed)
        program = bench.program
        self.tokens = tokens
        self.state = spread * bench.draw(batch, tokens * features)
        for row, value in (poison or {}).items():
            self.state[row, row % self.state.shape[1]] = value
        self.dx = bench.draw(batch, tokens * features)
        shapes = {name: (features, attn) if name == "w_o" else (attn, features) for name in WEIGHTS}
        self.w = {name: bench.draw(*shape) for name, shape in shapes.items()}
        self.before = {name: bench.draw(*shape) * np.float32(accumulate) for name, shape in shapes.items()}

        state = bench.matrix(self.state, lead=lead, pad=pad)
        dx = bench.matrix(self.dx, lead=lead, pad=pad)
        # Odd offsets: weights are views into the buffer of their group.
        gaps = pad and not attention._by_token(tokens, features, attn)
        w = {
            name: bench.matrix(v, lead=1, pad=pad) if gaps else bench.vector(v.ravel(), lead=3).reshape(*v.shape)
            for name, v in self.w.items()
        }
        self.out: dict[str, Tensor] = {
            name: bench.result(batch, tokens * features, lead=lead, pad=pad) for name in ("x", "x_alone")
        }
        rows = batch * tokens
        parts = {n: bench.result(rows, tokens if n == "p" else attn, pad=0) for n in ("q", "k", "v", "p", "o")}
        grads = {name: bench.result(rows, attn, pad=0) for name in ("dq", "dk", "dv")}
        saved = attention.Saved(**parts)
        self.out |= parts | grads
        forward: dict[str, Any] = {"tokens": tokens, "samples": samples}
        w_q, w_k, w_val, w_o = w.values()
        x, alone = self.out["x"], self.out["x_alone"]
        attention.forward(program, state, w_q, w_k, w_val, w_o, x, saved=saved, **forward)
        attention.forward(program, state, w_q, w_k, w_val, w_o, alone, label="alone", **forward)
        fits = samples is None or sum(attention.backward_floats(tokens, features, attn)) <= attention._SHARED
        attention.backward(program, dx, w_o, saved, *grads.values(), samples=samples if fits else None)
        if lead == pad == 0:
            dw = {
                name: bench.matrix(v, pad=0) if accumulate else bench.result(*shapes[name], pad=0)
                for name, v in self.before.items()
            }
            attention.backward_weights(
                program, dx, state, saved, *grads.values(), *dw.values(), accumulate=accumulate, label="dw"
            )
            self.out |= {f"d{name}": t for name, t in dw.items()}
        with bench.run() as plan:
            self.result = self.read(plan)
            if not accumulate:  # a replay gives the same bits
                forget(plan, list(self.out.values()))
                with device.stream() as stream:
                    plan.run(stream=stream)
                    stream.synchronize()
                for name, again in self.read(plan).items():
                    np.testing.assert_array_equal(again.view(np.uint32), self.result[name].view(np.uint32), name)

    def read(self, plan: Plan) -> dict[str, Array]:
        return {name: read(plan, t) for name, t in self.out.items()}

    def check(self) -> None:
        expected = attention.reference_forward(self.state, *self.w.values(), tokens=self.tokens)
        grads = attention.reference_backward(self.dx, self.state, self.w["w_o"], expected)
        expected |= {name if name.startswith("d") else f"d{name}": value for name, value in grads.items()}
        for name, before in self.before.items():
            expected[f"d{name}"] = expected[f"d{name}"] + before
        expected["x_alone"] = expected["x"]
        for name, result in self.result.items():
            check(result, expected[name].reshape(result.shape), name)


def check(actual: Array, reference: NDArray[np.float64], name: str) -> None:
    """Sums that may cancel: the rounding error goes with the largest entry."""
    atol = 64 * float(np.finfo(np.float32).eps) * float(np.abs(reference).max())
    assert_close(actual, reference, factor=16.0, atol=atol, name=name)


@settings(max_examples=40)
@given(
    batch=st.sampled_from([1, 2, 3, 9]),
    tokens=st.sampled_from([1, 2, 5, 6, 8, 9, 17]),
    features=st.sampled_from([1, 3, 8, 11]),
    attn=st.sampled_from([1, 5, 16, 17]),
    samples=st.sampled_from([None, None, 0, 1]),
    lead=st.sampled_from([0, 0, 1]),
    pad=st.sampled_from([0, 0, 3]),
    accumulate=st.booleans(),
    seed=st.integers(0, 100),
)
@example(batch=17, tokens=6, features=8, attn=16, samples=None, lead=0, pad=0, accumulate=False, seed=0)
@example(batch=3, tokens=33, features=3, attn=31, samples=None, lead=0, pad=0, accumulate=False, seed=0)
def test_against_float64(
    device: Device,
    batch: int,
    tokens: int,
    features: int,
    attn: int,
    samples: int | None,
    lead: int,
    pad: int,
    accumulate: bool,
    seed: int,
) -> None:
    Case(
        device, batch, tokens, features, attn, samples=samples, lead=lead, pad=pad, accumulate=accumulate, seed=seed
    ).check()


def test_the_largest_sizes(device: Device) -> None:
    """Neither weights nor a sample fit into shared memory."""
    assert attention.choose_samples(device.target, 2, *attention.forward_floats(64, 128, 128)) == 0
    Case(device, 2, 64, 128, 128).check()


def test_op_reference_is_the_reference_of_the_step() -> None:
    rng = np.random.default_rng(1)
    config = Config(batch=4, state=15, tokens=5, attn=7)
    p = {name: rng.normal(size=(3, 7) if name == "w_o" else (7, 3)) for name in WEIGHTS}
    state, dx = rng.normal(size=(2, 4, 15))
    cache = reference_forward.attention(config, p, state)
    mine = attention.reference_forward(state, *p.values(), tokens=5)
    for name, theirs in {"x": "x", "q": "q", "k": "k", "v": "v", "p": "weights", "o": "mixed"}.items():
        np.testing.assert_allclose(mine[name], cache[theirs], rtol=1e-12, atol=1e-14)
    grads = attention.reference_backward(dx, state, p["w_o"], mine)
    for name, grad in reference_backward.attention_params(config, p, cache, dx).items():
        np.testing.assert_allclose(grads[name], grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("shape", [(6, 8, 16), (7, 5, 9), (9, 16, 32), (2, 64, 30)])
def test_bits_do_not_depend_on_the_block(device: Device, shape: tuple[int, int, int]) -> None:
    """One sample, as many as fit, or none in shared memory: the last of them fills it to the brim."""
    most = min(
        (attention._SHARED - fixed) // each
        for fixed, each in (attention.forward_floats(*shape), attention.backward_floats(*shape))
    )
    assert most >= 1
    results = [Case(device, most + 1, *shape, samples=samples).result for samples in (0, 1, most)]
    for other in results[1:]:
        for name, value in results[0].items():
            np.testing.assert_array_equal(other[name].view(np.uint32), value.view(np.uint32), name)


def test_large_scores_are_stable(device: Device) -> None:
    case = Case(device, 2, 6, 8, 16, spread=300.0)
    assert all(np.isfinite(v).all() for v in case.result.values())
    np.testing.assert_allclose(case.result["p"].sum(axis=1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("samples", [None, 0])
def test_what_is_not_finite_stays_in_its_sample(device: Device, samples: int | None) -> None:
    poison = {1: np.nan, 3: np.inf, 4: -np.inf}
    clean = Case(device, 6, 3, 4, 5, samples=samples)
    case = Case(device, 6, 3, 4, 5, samples=samples, poison=poison)
    for row in range(6):
        for name in ("x", "q", "k", "v", "p", "o", "dq", "dk", "dv"):
            mine = case.result[name].reshape(6, -1)[row]
            if row not in poison:
                np.testing.assert_array_equal(mine, clean.result[name].reshape(6, -1)[row], name)
            elif name in ("x", "p"):
                assert np.isnan(mine).any(), name
    for name in WEIGHTS:
        assert np.isnan(case.result[f"d{name}"]).any()


@pytest.mark.parametrize("shape", [(6, 8, 16), (3, 4, 5)])
@pytest.mark.parametrize("samples", [None, 0, 1])
def test_dead_samples_read_as_zeros(device: Device, shape: tuple[int, int, int], samples: int | None) -> None:
    """Bit for bit, in x and in all that is kept, whatever a dead sample holds; NaN is no 0."""
    tokens, features, attn = shape
    live = np.array([1.0, 0.0, -0.5, -0.0, np.nan, 0.0, 1e-38], np.float32)
    results = []
    for poison in (False, True):
        bench = Bench(device, seed=1)
        state = bench.draw(7, tokens * features)
        state[live == 0] = [[np.nan], [np.inf], [3.0]] if poison else 0.0
        weights = [bench.matrix(bench.draw(*s), pad=0) for s in [(attn, features)] * 3 + [(features, attn)]]
        rows = 7 * tokens
        parts = {n: bench.result(rows, tokens if n == "p" else attn, pad=0) for n in ("q", "k", "v", "p", "o")}
        x = bench.result(7, tokens * features)
        attention.forward(
            bench.program,
            bench.matrix(state),
            *weights,
            x,
            tokens=tokens,
            live=bench.vector(live) if poison else None,
            saved=attention.Saved(**parts),
            samples=samples,
        )
        with bench.run() as plan:
            results.append({name: read(plan, t) for name, t in {"x": x, **parts}.items()})
    for name, clean in results[0].items():
        np.testing.assert_array_equal(results[1][name].view(np.uint32), clean.view(np.uint32), name)
    assert (results[1]["x"].reshape(7, -1)[live == 0] == 0).all()


def test_a_forward_alone_keeps_nothing(device: Device) -> None:
    program = Program(device.target)
    w, w_o = program.tensor("w", (16, 8)), program.tensor("w_o", (8, 16))
    state, x = program.tensor("state", (4, 48)), program.tensor("x", (4, 48))
    before = set(program.storages)
    record = attention.forward(program, state, w, w, w, w_o, x, tokens=6)
    assert set(program.storages) == before
    assert record.writes == (x,)
    assert all(record.fields[name] == 0 for name in "qkvpo")
    attention.forward(program, state, w, w, w, w_o, x, tokens=6, samples=0)
    assert len(set(program.storages) - before) == 5


def test_online_and_target_share_a_launch(device: Device) -> None:
    bench = Bench(device)
    w_q, w_k, w_val = (bench.matrix(bench.draw(3, 2), pad=0) for _ in range(3))
    w_o = bench.matrix(bench.draw(2, 3), pad=0)
    outs = [bench.result(batch, 8) for batch in (1, 5)]
    for out in outs:
        state = bench.matrix(bench.draw(out.shape[0], 8))
        attention.forward(bench.program, state, w_q, w_k, w_val, w_o, out, tokens=4)
    with bench.run() as plan:
        assert [node.name for node in plan.nodes] == ["attention_forward"]
        assert all(np.isfinite(read(plan, out)).all() for out in outs)


def test_shapes_are_checked(device: Device) -> None:
    program = Program(device.target)
    state, x = program.tensor("state", (4, 48)), program.tensor("x", (4, 48))
    w = program.tensor("w", (16, 8))
    w_o = program.tensor("w_o", (8, 16))
    with pytest.raises(ProgramError, match=r"state is 'state' \[4, 48\].*T = tokens = 5"):
        attention.forward(program, state, w, w, w, w_o, x, tokens=5)
    with pytest.raises(ProgramError, match=r"w_o is 'w' \[16, 8\].*expected float32 \[8, 8\]"):
        attention.forward(program, state, w, w, w, w, x, tokens=6)
    with pytest.raises(ProgramError, match=r"w_k is 'w_o' \[8, 16\].*expected float32 \[16, 8\]"):
        attention.forward(program, state, w, w_o, w, w_o, x, tokens=6)
    with pytest.raises(ProgramError, match=r"live is 'live' \[3\].*expected float32 \[4\]"):
        attention.forward(program, state, w, w, w, w_o, x, tokens=6, live=program.tensor("live", (3,)))
    with pytest.raises(ProgramError, match="overlaps state"):
        attention.forward(program, state, w, w, w, w_o, state, tokens=6)
    with pytest.raises(ProgramError, match=r"samples=99, but a block of these sizes takes 0 to \d+"):
        attention.forward(program, state, w, w, w, w_o, x, tokens=6, samples=99)
    with pytest.raises(ProgramError, match="gaps between its rows"):
        wide = program.tensor("wide", (16, 9)).columns(0, 8)
        attention.forward(program, state, wide, w, w, w_o, x, tokens=6)
    with pytest.raises(ProgramError, match=r"w_q, w_k and w_val have row strides 6, 4 and 4, expected one"):
        narrow, strided = program.tensor("narrow", (3, 4)), program.tensor("strided", (3, 6)).columns(0, 4)
        back = program.tensor("back", (4, 3))
        attention.forward(program, state, strided, narrow, narrow, back, x, tokens=12)
    saved = attention.Saved.declare(program, 4, 6, 16, name="attn")
    with pytest.raises(ProgramError, match=r"saved.q is 'attn.q' \[24, 16\].*expected float32 \[18, 16\]"):
        attention.forward(program, state.rows(0, 3), w, w, w, w_o, x.rows(0, 3), tokens=6, saved=saved)
    with pytest.raises(ProgramError, match=r"dk is 'w' \[16, 8\].*expected float32 \[24, 16\]"):
        attention.backward(program, x, w_o, saved, saved.q, w, saved.v)
