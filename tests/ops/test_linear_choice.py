"""Linear layers: which tile they choose, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fxengine.driver import Target
from fxengine.graphs import Program, ProgramError, Tensor
from fxengine.ops import linear
from fxengine.ops.linear_tiles import has_instructions, has_tensor_maps, has_warpgroups, served

# -- choice of tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", linear.TILES)
def test_tile_choice_follows_the_size(precision: str) -> None:
    h200, tiles = Target.of("sm_90"), linear.TILES[precision]
    small = tiles[linear.choose_tile(h200, 64, 256, 256, precision=precision)]
    large = tiles[linear.choose_tile(h200, 131_072, 256, 64, precision=precision)]
    assert small.rows * small.columns <= 16 * 32
    assert large.rows * large.columns >= 128 * 64
    assert linear.choose_tile(Target.of("sim"), 64, 256, 256, precision=precision) in tiles


@pytest.mark.parametrize("precision", linear.TILES)
def test_only_long_sums_are_cut(precision: str) -> None:
    h200 = Target.of("sm_90")
    assert linear.choose_dw(h200, 128, (256,), 256, precision=precision)[1] == 1
    assert linear.choose_dw(h200, 128, (256,), 131_072, precision=precision)[1] >= 16
    assert linear.choose_dw(h200, 128, (256, 1), 131_072, tile="32x32", precision=precision)[0] == "32x32"
    assert linear.choose_dw(h200, 4096, (4096,), 131_072, precision=precision)[1] == 1


def test_a_sum_that_has_the_device_for_itself_is_cut_sooner() -> None:
    h200 = Target.of("sm_90")
    assert linear.choose_dw(h200, 16, (8,), 1536, precision="tf32") == ("16x16", 1)
    assert linear.choose_dw(h200, 16, (8,), 1536, precision="tf32", siblings=4) == ("16x16", 4)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("depth", [64, 256, 1024, 4096])
def test_weight_gradients_of_a_step_share_a_tile(precision: str, arch: str, depth: int) -> None:
    """Whatever their shape, but for those that would fill less than half of it."""

    def chosen(rows: int, columns: int) -> tuple[str, int]:
        return linear.choose_dw(Target.of(arch), rows, (columns,), depth, precision=precision, outputs=600_000)

    assert len({chosen(512, 256), chosen(256, 256), chosen(153, 128), chosen(128, 257)}) == 1
    small = linear.TILES[precision][chosen(2, 32)[0]]
    assert small.rows * small.columns <= 16 * 32


def test_few_weights_have_small_tiles() -> None:
    h200 = Target.of("sm_90")
    few = linear.TILES["tf32"][linear.choose_dw(h200, 84, (120,), 256, precision="tf32", outputs=16_000)[0]]
    many = linear.TILES["tf32"][linear.choose_dw(h200, 512, (512,), 256, precision="tf32", outputs=4_000_000)[0]]
    assert few.rows * few.columns < many.rows * many.columns


@pytest.mark.parametrize(("rows", "shares"), [(64, True), (4096, False)])
def test_a_small_product_takes_the_tile_of_another_unless_that_is_large(rows: int, shares: bool) -> None:
    program = Program(Target.of("sm_90"), "tf32")
    x, w, y = program.tensor("x", (rows, 48)), program.tensor("w", (16, 48)), program.tensor("y", (rows, 16))
    apart = linear.forward(program, x, w, None, y).family
    other = linear.FORWARD["tf32"][linear.choose_tile(program.target, rows, 256, 48, precision="tf32")]
    assert other is not apart
    assert linear.forward(program, x, w, None, y, beside=(256, 48)).family is (other if shares else apart)


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [("sm_80", ""), ("sm_89", ""), ("sm_90", "wm"), ("sm_90a", "wm"), ("sm_100", "m"), ("sm_120", "m"), ("sim", "")],
)
def test_tiles_that_not_all_devices_have(arch: str, kinds: str) -> None:
    target, tiles = Target.of(arch), linear.TILES["tf32"]
    assert (has_warpgroups(target), has_tensor_maps(target)) == ("w" in kinds, "m" in kinds)
    assert has_instructions(target, tiles["64x64"])
    assert has_instructions(target, tiles["w64x64"]) == ("w" in kinds)
    assert has_instructions(target, tiles["m64x64"]) == ("m" in kinds)
    special = {"w": {"w64x128", "w64x64"}, "m": {"m128x64", "m64x64"}}
    for kind, its in (("forward", "w"), ("dx", "w"), ("dw", "m")):
        expected = special[its] if its in kinds else set()
        assert {name for name in served(target, "tf32", kind) if name[0] in "wm"} == expected
        assert not [name for name in served(target, "tf32", kind, aligned=False) if name[0] in "wm"]
        assert not [name for name in served(target, "bf16", kind) if name[0] in "wm"]


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
@pytest.mark.parametrize("depth", [64, 256, 1024, 4096])
def test_rows_that_are_not_aligned_choose_no_tensor_maps(arch: str, depth: int) -> None:
    def mapped(**options: Any) -> bool:
        name, _ = linear.choose_dw(Target.of(arch), 512, (512,), depth, precision="tf32", **options)
        return linear.TILES["tf32"][name].mapped

    assert mapped(outputs=4_000_000)
    assert not any(mapped(aligned=False, **other) for other in ({}, {"outputs": 4_000_000}, {"siblings": 1}))


# -- errors ------------------------------------------------------------------------------------------------------------


def _errors() -> list[tuple[str, Any]]:
    def t(p: Program, *shape: int, dtype: Any = np.float32) -> Tensor:
        return p.tensor(f"t{len(p.storages)}", shape, dtype)

    def inside(p: Program) -> Any:
        whole = t(p, 4, 10)
        return linear.forward(p, whole.columns(0, 6), t(p, 5, 6), None, whole.columns(5, 10))

    return [
        (
            r"w is 't0' \[5, 7\], expected \[5, 6\]: x is 't1' \[4, 6\] and y is 't2' \[4, 5\]",
            lambda p: linear.forward(p, w=t(p, 5, 7), x=t(p, 4, 6), y=t(p, 4, 5), b=None),
        ),
        (
            r"x2 is 't1' \[3, 2\], expected \[4, 2\]: y is 't3'",
            lambda p: linear.forward(p, (t(p, 4, 6), t(p, 3, 2)), t(p, 5, 8), None, t(p, 4, 5)),
        ),
        (
            r"b is 't2' \[4\], expected \[5\]: y is 't3'",
            lambda p: linear.forward(p, t(p, 4, 6), t(p, 5, 6), t(p, 4), t(p, 4, 5)),
        ),
        (
            r"of float64, expected float32",
            lambda p: linear.forward(p, t(p, 4, 6, dtype=float), t(p, 5, 6), None, t(p, 4, 5)),
        ),
        (r"x is 't0' \[6\], expected a matrix", lambda p: linear.forward(p, t(p, 6), t(p, 5, 6), None, t(p, 4, 5))),
        (r"y 't0' \[4, 5\] overlaps x 't0' \[4, 6\]", inside),
        (
            r"accumulate=True cannot go with activation='elu'",
            lambda p: linear.forward(p, t(p, 4, 6), t(p, 5, 6), None, t(p, 4, 5), activation="elu", accumulate=True),
        ),
        (
            r"unknown activation 'gelu', expected one of",
            lambda p: linear.forward(p, t(p, 4, 6), t(p, 5, 6), None, t(p, 4, 5), activation="gelu"),  # type: ignore[arg-type]
        ),
        (
            r"unknown tile '8x8', expected one of \['128x128', .*\] in fp32",
            lambda p: linear.forward(p, t(p, 4, 6), t(p, 5, 6), None, t(p, 4, 5), tile="8x8"),
        ),
        (
            r"1 dy \('t0' \[4, 5\]\), 2 w \('t1' \[5, 6\] beside 't2' \[5, 6\]\) and 1 scales; give one of each",
            lambda p: linear.backward_dx(p, t(p, 4, 5), (t(p, 5, 6), t(p, 5, 6)), t(p, 4, 6)),
        ),
        (
            r"w\[1\] is 't3' \[3, 6\], expected \[2, 6\]: dy\[1\] is 't1' \[4, 2\]",
            lambda p: linear.backward_dx(p, (t(p, 4, 5), t(p, 4, 2)), (t(p, 5, 6), t(p, 3, 6)), t(p, 4, 6)),
        ),
        (
            r"activation='relu' is the one that made x; pass x as well",
            lambda p: linear.backward_dx(p, t(p, 4, 5), t(p, 5, 6), t(p, 4, 6), activation="relu"),
        ),
        (
            r"scale is 't3' \[2\], expected \[1\]",
            lambda p: linear.backward_dx(p, t(p, 4, 5), t(p, 5, 6), t(p, 4, 6), scale=t(p, 2)),
        ),
        (
            r"17 sources, expected 1 to 16; give the others to a record of their own",
            lambda p: linear.backward_dx(p, [t(p, 4, 5)] * 17, [t(p, 5, 6)] * 17, t(p, 4, 6)),
        ),
        (
            r"1 dy .* 1 w .* and 2 scales; give one of each for every source",
            lambda p: linear.backward_dx(p, t(p, 4, 5), t(p, 5, 6), t(p, 4, 6), scales=[None, None]),
        ),
        (
            r"scale and scales are both given",
            lambda p: linear.backward_dx(p, t(p, 4, 5), t(p, 5, 6), t(p, 4, 6), scale=t(p, 1), scales=[None]),
        ),
        (
            r"dx 't0' \[4, 5\] overlaps dy\[1\] 't0' \[4, 5\]",
            lambda p: (lambda dx: linear.backward_dx(p, [t(p, 4, 5), dx], [t(p, 5, 5), t(p, 5, 5)], dx))(t(p, 4, 5)),
        ),
        (
            r"slices=0, expected at least 1",
            lambda p: linear.backward_dw(p, t(p, 4, 5), t(p, 4, 6), t(p, 5, 6), slices=0),
        ),
        (
            r"dw is 't2' \[6, 5\], expected \[5, 6\]: dy is 't0' \[4, 5\] and x is 't1' \[4, 6\]",
            lambda p: linear.backward_dw(p, t(p, 4, 5), t(p, 4, 6), t(p, 6, 5)),
        ),
        (
            r"db is 't3' \[6\], expected \[5\]",
            lambda p: linear.backward_dw(p, t(p, 4, 5), t(p, 4, 6), t(p, 5, 6), t(p, 6)),
        ),
    ]


@pytest.mark.parametrize(("message", "call"), _errors())
def test_errors_name_both_sides(message: str, call: Any) -> None:
    program = Program(Target.of("sm_90"))
    with pytest.raises(ProgramError, match=message):
        call(program)
    assert not program.launches


@pytest.mark.parametrize(
    ("precision", "arch", "message"),
    [
        ("fp16", "sm_90", "unknown precision 'fp16', expected one of \\['fp32', 'tf32', 'bf16'\\]"),
        ("tf32", "sm_75", "precision 'tf32' needs an sm_80 or newer, not sm_75; use 'fp32'"),
        ("bf16", "sm_75", "precision 'bf16' needs an sm_80 or newer"),
    ],
)
def test_precision_must_exist(precision: str, arch: str, message: str) -> None:
    program = Program(Target.of(arch), precision)
    x, w, y = (program.tensor(name, shape) for name, shape in (("x", (4, 6)), ("w", (5, 6)), ("y", (4, 5))))
    for call in (
        lambda: linear.forward(program, x, w, None, y),
        lambda: linear.backward_dx(program, y, w, x),
        lambda: linear.backward_dw(program, y, x, w),
    ):
        with pytest.raises(ProgramError, match=message):
            call()
    assert not program.launches
