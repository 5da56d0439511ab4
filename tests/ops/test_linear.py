"""Linear layers: forward, input gradient, weight gradient, in every precision, on every tile, against float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fxengine.driver import Device
from fxengine.graphs import Plan, Program, Tensor
from fxengine.ops import linear
from fxengine.ops.linear import Activation
from fxengine.ops.linear_tiles import served
from tests.support import assert_close, orders_of_threads

Array = NDArray[np.float32]
ACTIVATIONS: tuple[Activation, ...] = ("none", "elu", "relu", "tanh")
TILES = [(precision, tile) for precision, tiles in linear.FORWARD.items() for tile in tiles]
DW_TILES = [(precision, tile) for precision, tiles in linear.DW.items() for tile in tiles]


def dw_tile(tile: str | None) -> str | None:
    """A tile for the weight gradients beside a product with that tile."""
    return {"w64x64": "m64x64", "w64x128": "m128x64"}.get(tile, tile) if tile else None


class Bench:
    """A program under test: matrices with NaN in every gap, run with guard words, and read back with their gaps.

    `aligned`: all rows start at multiples of 16 bytes, whatever gaps are asked for; as tiles need them that read by
    tensor maps.
    """

    def __init__(
        self, device: Device, precision: str = "fp32", seed: int = 0, *, aligned: bool = False, tile: str | None = None
    ) -> None:
        self.device = device
        self.mapped = tile is not None and linear.TILES[precision][tile].mapped
        self.aligned = aligned or self.mapped
        self.unit = 4 if self.mapped else 1  # columns of a first input end at a multiple of it
        self.program = Program(device.target, precision)
        self.random = np.random.default_rng(seed)
        self.count = 0

    def draw(self, *shape: int) -> Array:
        return self.random.uniform(-1, 1, shape).astype(np.float32)

    def rounded(self, values: Array) -> NDArray[np.float64]:
        """As products read them."""
        return linear.reference_rounded(values, self.program.precision, mapped=self.mapped)

    def matrix(self, values: Array, *, lead: int = 0, pad: int = 3) -> Tensor:
        """A matrix with `lead` columns of NaN before it and `pad` after it."""
        rows, columns = values.shape
        if self.aligned:
            lead, pad = 4, 4 + -columns % 4
        whole = np.full((rows, lead + columns + pad), np.nan, np.float32)
        whole[:, lead : lead + columns] = values
        return self._tensor(whole).columns(lead, lead + columns)

    def vector(self, values: Array, *, lead: int = 0) -> Tensor:
        lead = 4 if self.aligned else lead
        whole = np.full(lead + len(values), np.nan, np.float32)
        whole[lead:] = values
        return self._tensor(whole).rows(lead, lead + len(values))

    def result(self, rows: int, columns: int, *, lead: int = 0, pad: int = 3) -> Tensor:
        """A matrix that must be overwritten: it starts as NaN."""
        return self.matrix(np.full((rows, columns), np.nan, np.float32), lead=lead, pad=pad)

    def run(self) -> Plan:
        plan = Plan(self.program, self.device, guard=True)
        with self.device.stream() as stream:
            plan.run(stream=stream)
            stream.synchronize()
        plan.check_guards()
        return plan

    def _tensor(self, whole: Array) -> Tensor:
        self.count += 1
        return self.program.tensor(f"t{self.count}", whole.shape, np.float32, data=whole)


def read(plan: Plan, t: Tensor) -> Array:
    """Values of a view; whatever lies in the same storage beside it must still be NaN."""
    whole = plan.buffer(t.name).read().view(np.float32)
    index = np.arange(t.size) + t.offset
    if len(t.shape) == 2:
        rows = np.arange(t.shape[0])[:, None] * t.ld
        index = (t.offset + rows + np.arange(t.shape[1])[None, :]).reshape(-1)
    outside = np.ones(len(whole), bool)
    outside[index] = False
    assert np.isnan(whole[outside]).all(), f"{t}: something was written beside the result"
    return whole[index].reshape(t.shape)


def forget(plan: Plan, results: list[Tensor]) -> None:
    """Fills overwritten results with NaN again, so that a later run cannot live off an earlier one."""
    for t in results:
        plan.buffer(t.name).fill_u32(0x7FC00000)


def check(actual: Array, reference: NDArray[np.float64], terms: int, name: str) -> None:
    """Sums of `terms` products of numbers below 1: the rounding error grows with the number of terms."""
    assert_close(actual, reference, factor=8.0, atol=2e-7 * (4 + terms), name=name)


# -- one call of each kind, and what it must give ------------------------------------------------------------------


def add_forward(
    bench: Bench, m: int, n: int, k: int, k2: int = 0, *, lead: int = 0, pad: int = 3, **options: Any
) -> tuple[Tensor, NDArray[np.float64], int]:
    bias = options.pop("bias", True)
    x, w = bench.draw(m, k + k2), bench.draw(n, k + k2)
    b = bench.draw(n) if bias else None
    before = bench.draw(m, n)
    parts = [bench.matrix(x[:, :k], lead=lead, pad=pad)]
    if k2:
        parts.append(bench.matrix(x[:, k:], lead=lead + 1, pad=pad))
    accumulate = options.get("accumulate", False)
    y = bench.matrix(before, lead=lead, pad=pad) if accumulate else bench.result(m, n, lead=lead, pad=pad)
    linear.forward(
        bench.program,
        (parts[0], parts[1]) if k2 else parts[0],
        bench.matrix(w, lead=lead, pad=pad),
        None if b is None else bench.vector(b, lead=lead),
        y,
        **options,
    )
    expected = linear.reference_forward(
        bench.rounded(x), bench.rounded(w), b, activation=options.get("activation", "none")
    )
    return y, expected + before if accumulate else expected, k + k2


def add_dx(
    bench: Bench, m: int, n: int, k: int, *others: int, lead: int = 0, pad: int = 3, **options: Any
) -> tuple[Tensor, NDArray[np.float64], int]:
    """One source of width n, and one of every width of `others` that is not 0; `factors` are their scales."""
    widths = [n, *(other for other in others if other)]
    factors = options.pop("factors", None) or [None] * len(widths)
    x, before = bench.draw(m, k), bench.draw(m, k)
    activation = options.get("activation", "none")
    accumulate = options.get("accumulate", False)
    expected = before.astype(np.float64) if accumulate else np.zeros((m, k))
    dys, ws, scales = [], [], []
    for i, (width, factor) in enumerate(zip(widths, factors, strict=True)):
        dy, w = bench.draw(m, width), bench.draw(width, k)
        dys.append(bench.matrix(dy, lead=lead + i % 2, pad=pad))
        ws.append(bench.matrix(w, lead=lead, pad=pad + 2 * (i % 2)))
        scales.append(None if factor is None else bench.vector(np.array([factor], np.float32), lead=lead))
        if factor is not None:  # what is scaled is rounded afterwards
            dy, w = (dy, np.float32(factor) * w) if bench.mapped else (np.float32(factor) * dy, w)
        expected += linear.reference_dx(bench.rounded(dy), bench.rounded(w), x=x, activation=activation)
    dx = bench.matrix(before, lead=lead, pad=pad) if accumulate else bench.result(m, k, lead=lead, pad=pad)
    linear.backward_dx(
        bench.program,
        dys if len(dys) > 1 else dys[0],
        ws if len(ws) > 1 else ws[0],
        dx,
        x=None if activation == "none" else bench.matrix(x, lead=lead, pad=pad),
        scales=scales,
        **options,
    )
    return dx, expected, sum(widths)


def add_dw(
    bench: Bench, m: int, n: int, k: int, k2: int = 0, *, lead: int = 0, pad: int = 3, **options: Any
) -> list[tuple[Tensor, NDArray[np.float64], int]]:
    bias = options.pop("bias", True)
    dy, x = bench.draw(m, n), bench.draw(m, k + k2)
    parts = [bench.matrix(x[:, :k], lead=lead, pad=pad)]
    if k2:
        parts.append(bench.matrix(x[:, k:], lead=lead + 1, pad=pad))
    accumulate = options.get("accumulate", False)
    before_w, before_b = bench.draw(n, k + k2), bench.draw(n)
    nan = np.full(n, np.nan, np.float32)
    dw = bench.matrix(before_w, lead=lead, pad=pad) if accumulate else bench.result(n, k + k2, lead=lead, pad=pad)
    db = bench.vector(before_b if accumulate else nan, lead=lead) if bias else None
    linear.backward_dw(
        bench.program,
        bench.matrix(dy, lead=lead, pad=pad),
        (parts[0], parts[1]) if k2 else parts[0],
        dw,
        db,
        **options,
    )
    tile = options.get("tile")
    mapped = tile is not None and linear.TILES[bench.program.precision][tile].mapped
    read_dy, read_x = (linear.reference_rounded(v, bench.program.precision, mapped=mapped) for v in (dy, x))
    want_w, want_b = linear.reference_dw(read_dy, read_x)[0], dy.astype(np.float64).sum(axis=0)
    if accumulate:
        want_w, want_b = want_w + before_w, want_b + before_b
    found = [(dw, want_w, m)]
    return found if db is None else [*found, (db, want_b, m)]


def verify(bench: Bench, expected: list[tuple[Tensor, NDArray[np.float64], int]]) -> None:
    with bench.run() as plan:
        for t, reference, terms in expected:
            check(read(plan, t), reference, terms, t.name)


# -- every option on every tile ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tile"), TILES)
def test_forward_options(device: Device, precision: str, tile: str) -> None:
    bench = Bench(device, precision, tile=tile)
    shape = linear.TILES[precision][tile]
    m, n, k = shape.rows + 3, shape.columns + 5, shape.depth + 7 // bench.unit * bench.unit
    expected = [
        add_forward(bench, m, n, k, k2, bias=bias, activation=activation, tile=tile)
        for k2, bias, activation in itertools.product((0, 9), (False, True), ACTIVATIONS)
    ]
    expected += [
        add_forward(bench, m, n, k, k2, bias=bias, accumulate=True, tile=tile)
        for k2, bias in itertools.product((0, 1), (False, True))
    ]
    verify(bench, expected)


@pytest.mark.parametrize(("precision", "tile"), TILES)
def test_dx_options(device: Device, precision: str, tile: str) -> None:
    bench = Bench(device, precision, tile=tile)
    shape = linear.TILES[precision][tile]
    m, n, k = shape.rows + 3, shape.depth + 7, shape.columns + 5
    verify(
        bench,
        [
            add_dx(bench, m, n, k, *others, activation=activation, accumulate=accumulate, factors=factors, tile=tile)
            for activation, accumulate in itertools.product(ACTIVATIONS, (False, True))
            for others, factors in (((), None), ((), [0.5]), ((9, 1), [None, 3.0, -0.7]))
        ],
    )


@pytest.mark.parametrize(("precision", "tile"), [*((mode, None) for mode in linear.TILES), ("tf32", "w64x64")])
def test_dx_adds_many_sources(device: Device, precision: str, tile: str | None) -> None:
    """As many heads as a record takes, of all sizes; some of them scaled, one of them off."""
    bench = Bench(device, precision, tile=tile)
    widths = [153, 51, 1, 12, 128, 2, 5, 32, 3, 64, 7, 48, 4, 9, 16, 33]
    factors = [None, 0.1, 0.0, 2.0] * 4
    assert len(widths) == linear.SOURCES
    options = {"activation": "elu", "factors": factors, "tile": tile}
    verify(bench, [add_dx(bench, 37, *[widths[0], 50, *widths[1:]], **options)])


@pytest.mark.parametrize(("precision", "tile"), DW_TILES)
def test_dw_options(device: Device, precision: str, tile: str) -> None:
    bench = Bench(device, precision, tile=tile)
    shape = linear.TILES[precision][tile]
    m, n, k = 3 * shape.depth + 7, shape.rows + 3, shape.columns + 5
    expected = [
        part
        for k2, bias, accumulate, slices in itertools.product((0, 9), (False, True), (False, True), (1, 3))
        for part in add_dw(bench, m, n, k, k2, bias=bias, accumulate=accumulate, slices=slices, tile=tile)
    ]
    verify(bench, expected)


@pytest.mark.parametrize(("precision", "tile"), TILES)
def test_aligned_rows(device: Device, precision: str, tile: str) -> None:
    """Sizes and strides that allow 16-byte accesses, whole tiles only."""
    bench = Bench(device, precision, tile=tile)
    shape = linear.TILES[precision][tile]
    m, n, k = shape.rows, shape.columns, 2 * shape.depth
    expected = [
        add_forward(bench, m, n, k, pad=0, activation="elu", tile=tile),
        add_dx(bench, m, k, n, pad=4, activation="elu", tile=tile),
        *add_dw(bench, k, m, n, pad=0, tile=dw_tile(tile)),
        *add_dw(bench, k, m, n, pad=0, tile=dw_tile(tile), slices=2),
    ]
    verify(bench, expected)


@pytest.mark.parametrize(("precision", "tile"), [t for t in DW_TILES if t[0] != "fp32" and t[1][:2] in ("16", "32")])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("k", "k2"), [(176, 0), (51, 0), (1, 0), (128, 8), (32, 3)])
def test_whole_tiles_have_the_same_bits(
    device: Device, monkeypatch: pytest.MonkeyPatch, precision: str, tile: str, accumulate: bool, k: int, k2: int
) -> None:
    """Where all tiles are whole and all rows aligned, other code runs: with the bits of the code for any sizes."""
    shape = linear.TILES[precision][tile]
    m, n = 2 * shape.rows, 2 * shape.columns
    options: dict[str, Any] = {"tile": tile, "accumulate": accumulate}
    activation = "none" if accumulate else "elu"
    found = []
    for whole in (1, 0):
        if not whole:
            monkeypatch.setattr(linear, "_whole", lambda *_, **__: False)
        bench = Bench(device, precision, aligned=True)
        expected = [
            add_forward(bench, m, n, k, k2, activation=activation, **options),
            add_dx(bench, m, k, n, k2, activation="elu", factors=[0.5, None][: 1 + bool(k2)], **options),
            *add_dw(bench, k, m, n, n if k2 else 0, slices=1, **options),
        ]
        assert [launch.fields["whole"] for launch in bench.program.launches] == [whole] * 3
        with bench.run() as plan:
            for t, reference, terms in expected:
                check(read(plan, t), reference, terms, t.name)
            found.append([read(plan, t) for t, *_ in expected])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("m", "n", "k", "k2"), [(31, 32, 64, 0), (32, 33, 64, 0), (32, 32, 6, 8), (32, 32, 61, 4)])
def test_what_is_not_whole(device: Device, m: int, n: int, k: int, k2: int) -> None:
    """Parts of tiles; and weights of a second input, inside rows of which the first input's columns do not end at 16
    bytes."""
    bench = Bench(device, "tf32", aligned=True)
    verify(bench, [add_forward(bench, m, n, k, k2, tile="16x32")])
    assert bench.program.launches[0].fields["whole"] == 0


def test_rows_that_are_not_aligned_are_not_whole(device: Device) -> None:
    bench = Bench(device, "tf32")
    verify(bench, [add_forward(bench, 32, 32, 64, tile="16x32", lead=3, pad=4)])
    assert bench.program.launches[0].fields["whole"] == 0


# -- any shape -----------------------------------------------------------------------------------------------------

sizes = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 33, 51, 64, 67, 101, 131, 153]))


@settings(max_examples=60)
@given(
    m=sizes,
    n=sizes,
    k=sizes,
    second=st.sampled_from([0, 0, 1, 3, 8, 37]),
    lead=st.integers(0, 4),
    pad=st.integers(0, 5),
    accumulate=st.booleans(),
    tile=st.sampled_from([("fp32", None), ("tf32", None), ("bf16", None), *TILES]),
    slices=st.sampled_from([None, 2, 5]),
)
@example(1, 1, 1, 0, 0, 0, False, ("fp32", None), None)
@example(1, 1, 1, 1, 1, 0, True, ("fp32", "128x128"), 2)
@example(2, 300, 1, 0, 0, 1, False, ("fp32", "64x64"), None)
@example(300, 1, 2, 3, 3, 1, True, ("fp32", "32x32"), 5)
@example(1, 1, 1, 1, 1, 0, True, ("tf32", "128x64"), 2)
@example(2, 300, 1, 0, 0, 1, False, ("bf16", "64x64"), None)
@example(300, 1, 2, 3, 3, 1, True, ("tf32", "32x32"), 5)
def test_any_shape(
    device: Device,
    m: int,
    n: int,
    k: int,
    second: int,
    lead: int,
    pad: int,
    accumulate: bool,
    tile: tuple[str, str | None],
    slices: int | None,
) -> None:
    if tile[1] is not None and tile[1] not in served(device.target, tile[0], "forward") and device.kind == "cuda":
        return  # a tile that this GPU has no instructions for
    bench = Bench(device, tile[0], seed=m * 7 + n * 5 + k, tile=tile[1])
    same = {"lead": lead, "pad": pad, "accumulate": accumulate, "tile": tile[1]}
    first = k if second == 0 else -(-k // bench.unit) * bench.unit
    verify(
        bench,
        [
            add_forward(bench, m, n, first, second, **same),
            add_dx(bench, m, n, k, second, activation="tanh", **same),
            *add_dw(bench, m, n, k, second, slices=slices, **{**same, "tile": dw_tile(tile[1])}),
        ],
    )


# -- promises --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "tile"), TILES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_zero_scale_stops_nan(device: Device, precision: str, tile: str, accumulate: bool) -> None:
    """A source with scale 0 adds an exact 0 whatever it holds; without any other, also where the slope is NaN."""
    bench = Bench(device, precision, tile=tile)
    m, n, k = 19, 7, 21
    dy, y = bench.draw(m, n), bench.draw(m, k)
    dy[3, 2], dy[4, 1], dy[18, 6] = np.nan, np.inf, -np.inf
    y[0, 0] = np.nan
    before = bench.draw(m, k)
    bad, good = bench.matrix(dy), bench.matrix(bench.draw(m, 5))
    w_bad, w_good, x = bench.matrix(bench.draw(n, k)), bench.matrix(bench.draw(5, k)), bench.matrix(y)
    zero, one = (bench.vector(np.array([factor], np.float32)) for factor in (0.0, 1.0))
    found = []
    for dys, ws, scales in (
        (bad, w_bad, [zero]),
        (bad, w_bad, [one]),
        ([bad, good, bad], [w_bad, w_good, w_bad], [zero, None, zero]),
        (good, w_good, [None]),
    ):
        dx = bench.matrix(before) if accumulate else bench.result(m, k)
        linear.backward_dx(
            bench.program, dys, ws, dx, x=x, activation="elu", scales=scales, accumulate=accumulate, tile=tile
        )
        found.append(dx)
    with bench.run() as plan:
        stopped, passed, mixed, alone = (read(plan, dx) for dx in found)
    np.testing.assert_array_equal(stopped, before if accumulate else np.zeros_like(before))
    assert not np.signbit(stopped).any() or accumulate
    assert set(np.flatnonzero(~np.isfinite(passed).all(axis=1))) == {0, 3, 4, 18}
    np.testing.assert_array_equal(mixed, alone)
    assert set(np.argwhere(np.isnan(alone)).flatten()) == {0}


@pytest.mark.parametrize(("precision", "tile"), TILES)
def test_nan_reaches_its_own_outputs_only(device: Device, precision: str, tile: str) -> None:
    """A NaN in row 5 of x shows in row 5 of y whatever the activation, and nowhere else."""
    bench = Bench(device, precision, tile=tile)
    m, n, k = 20, 18, 35
    x = bench.draw(m, k)
    x[5, 33] = np.array(0x7FFFFFFF, np.uint32).view(np.float32)  # the NaN that CUDA makes: rounding must not carry
    results = []
    for activation in ACTIVATIONS:
        y = bench.result(m, n)
        linear.forward(
            bench.program, bench.matrix(x), bench.matrix(bench.draw(n, k)), None, y, activation=activation, tile=tile
        )
        results.append(y)
    with bench.run() as plan:
        for y in results:
            bad = np.isnan(read(plan, y))
            assert bad[5].all() and bad.sum() == n


def _mixed(bench: Bench, which: int | None, tile: str) -> list[Tensor]:
    """Three records of each kind and different sizes; with `which`, only that one of each is launched."""
    results: list[Tensor] = []
    for i, (m, n, k, second) in enumerate(((70, 37, 130, 0), (5, 66, 9, 7), (33, 33, 65, 1))):
        scratch = bench if which in (None, i) else Bench(bench.device, bench.program.precision)
        scratch.random = np.random.default_rng(i)
        common = {"tile": tile}
        found = [add_forward(scratch, m, n, k, second, activation="elu", **common)]
        found.append(add_dx(scratch, m, n, k, second, activation="elu", **common))
        found += add_dw(scratch, m, n, k, second, slices=2, **common)
        results += [t for t, _, _ in found] if scratch is bench else []
    return results


@pytest.mark.parametrize(("precision", "tile"), [("fp32", "32x32"), ("tf32", "64x64"), ("bf16", "16x32")])
def test_batched_equals_single(device: Device, precision: str, tile: str) -> None:
    """A launch over several records gives each of them the bits it gets alone; so does a second run."""
    batch = Bench(device, precision)
    together = _mixed(batch, None, tile)
    with Plan(batch.program, device) as plan, device.stream() as stream:
        assert len([node for node in plan.nodes if node.parts]) == 3
        runs = []
        for _ in range(2):
            plan.run(stream=stream)
            stream.synchronize()
            runs.append([read(plan, t).tobytes() for t in together])
            forget(plan, together)
    assert runs[0] == runs[1]
    alone = []
    for i in range(3):
        bench = Bench(device, precision)
        results = _mixed(bench, i, tile)
        with bench.run() as plan:
            alone += [read(plan, t).tobytes() for t in results]
    assert alone == runs[0]


@pytest.mark.parametrize("precision", linear.TILES)
def test_alignment_does_not_change_bits(device: Device, precision: str) -> None:
    """Vector and scalar accesses of the same numbers give the same bits."""
    found = []
    for lead, pad in ((0, 0), (1, 2)):
        bench = Bench(device, precision, seed=3)
        results = [add_forward(bench, 64, 64, 128, lead=lead, pad=pad, tile="64x64")]
        results.append(add_dx(bench, 64, 128, 64, lead=lead, pad=pad, tile="32x32"))
        results += add_dw(bench, 128, 64, 64, lead=lead, pad=pad, tile="16x32", slices=2)
        with bench.run() as plan:
            found.append([read(plan, t).tobytes() for t, _, _ in results])
    assert found[0] == found[1]


@pytest.mark.parametrize("precision", linear.TILES)
def test_graph_replay_repeats_the_bits(device: Device, precision: str) -> None:
    """A sliced weight gradient leaves its arrival counters at 0 for the next replay."""
    bench = Bench(device, precision)
    results = [t for t, _, _ in add_dw(bench, 200, 37, 50, 3, tile="16x16", slices=3)]
    with Plan(bench.program, device) as plan, device.stream() as stream:
        plan.run(stream=stream)
        stream.synchronize()
        first = [read(plan, t).tobytes() for t in results]
        with plan.capture(stream=stream) as graph:
            for _ in range(3):
                forget(plan, results)
                graph.launch(stream=stream)
                stream.synchronize()
                assert [read(plan, t).tobytes() for t in results] == first


@pytest.mark.parametrize("precision", linear.TILES)
def test_weights_that_the_layer_before_makes(device: Device, precision: str) -> None:
    """Weights and biases are read early, but not before a direct predecessor has written them."""
    bench = Bench(device, precision)
    program, n = bench.program, 96
    weights = [program.tensor(f"w{i}", (n, n), data=bench.draw(n, n) / 8) for i in range(3)]
    made = [program.tensor(f"made{i}", (n, n)) for i in range(8)]
    for i, y in enumerate(made):  # each layer's input, weights and bias are what the one before has made
        x = made[i - 1] if i else weights[0]
        linear.forward(program, weights[1], x, x.rows(1, 2).flat(), y, activation="tanh", tile="16x16")
    back = program.tensor("back", (n, n))
    linear.backward_dx(program, weights[2], made[-1], back, tile="16x16")
    with Plan(program, device) as plan, device.stream() as stream:
        plan.run(stream=stream)
        stream.synchronize()
        expected = [plan.buffer(t).read().tobytes() for t in (*made, back)]
        assert np.isfinite(plan.buffer(back).read()).all()
        with plan.capture(stream=stream) as graph:
            for _ in range(20):
                forget(plan, [*made, back])
                graph.launch(stream=stream)
                stream.synchronize()
                assert [plan.buffer(t).read().tobytes() for t in (*made, back)] == expected


@pytest.mark.parametrize(("precision", "tile"), TILES)
def test_any_order_of_threads_gives_the_same_bits(device: Device, precision: str, tile: str) -> None:
    """A missing barrier, or a sum in order of arrival, would show when threads and blocks run in another order."""
    if device.kind != "sim":
        pytest.skip("only the simulated device can choose the order of threads")
    bench = Bench(device, precision, tile=tile)
    shape = linear.TILES[precision][tile]
    m, n, k = shape.rows + 1, shape.columns + 1, 2 * shape.depth + 3 // bench.unit * bench.unit
    results = [add_forward(bench, m, n, k, 5, tile=tile), add_dx(bench, m, k, n, 5, tile=tile)]
    results += add_dw(bench, k, m, n, 5, tile=dw_tile(tile))
    results += add_dw(bench, k, m, n, 5, slices=3, tile=dw_tile(tile))
    found = set()
    with Plan(bench.program, device) as plan, device.stream() as stream, orders_of_threads(device) as turns:
        for _ in turns:
            plan.run(stream=stream)
            stream.synchronize()
            found.add(b"".join(read(plan, t).tobytes() for t, _, _ in results))
            forget(plan, [t for t, _, _ in results])
    assert len(found) == 1
