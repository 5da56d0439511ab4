"""Signatures and layouts from .cu text."""

from __future__ import annotations

import numpy as np
import pytest

from fxengine.driver import FxError, parse_source

TEXT = """
#define FX_BLOCK 128
constexpr int kWarps = 4;
// struct Ghost { int x; };
/* extern "C" __global__ void fx_ghost(int a) { } */
struct Linear {  // one record per product
    int first_tile;
    int tiles;
    const float* __restrict__ x;  // [m, k] input
    float *y;
    unsigned long long seed; /* counter */
    float  scale;
    double wide;
    const int **table;
    unsigned flags;
};
struct Pair { int a, b; };
struct Odd {
    float values[2][2];
};
struct Half {
    __half x;
};
extern "C" __global__ void __launch_bounds__(256) fx_linear(const Linear* table, int count) {
    if (count) { }
}
extern "C" __launch_bounds__(FX_BLOCK, 2) __global__ void fx_other(
    const float* __restrict__ x,  // in
    float s,
    unsigned long long q) {}
extern "C" __global__ void fx_empty() {}
extern "C" __global__ void fx_declared(int a);
"""


def test_kernels():
    kernels = parse_source("a.cu", TEXT).kernels
    assert list(kernels) == ["fx_linear", "fx_other", "fx_empty"]
    linear = kernels["fx_linear"]
    assert linear.threads == 256
    assert [(p.name, p.ctype, p.offset, p.pointer) for p in linear.parameters] == [
        ("table", "Linear*", 0, True),
        ("count", "int", 8, False),
    ]
    other = kernels["fx_other"]
    assert other.threads == 128
    assert [(p.name, p.offset) for p in other.parameters] == [("x", 0), ("s", 8), ("q", 16)]
    assert kernels["fx_empty"].threads is None and kernels["fx_empty"].parameters == ()


def test_struct_layout():
    parsed = parse_source("a.cu", TEXT)
    assert "Ghost" not in parsed.struct_names
    layout = parsed.struct("Linear")
    dtype = layout.dtype
    assert dtype.itemsize == 64 and dtype.isalignedstruct
    assert {f.name: f.offset for f in layout.fields} == {n: dtype.fields[n][1] for n in dtype.names}
    assert dtype["x"] == np.dtype("<u8") and dtype["scale"] == np.float32 and dtype["wide"] == np.float64
    assert dtype.fields["flags"][1] == 56
    by_name = {f.name: f for f in layout.fields}
    assert by_name["x"].comment == "[m, k] input" and by_name["x"].ctype == "float*"
    assert by_name["table"].ctype == "int**" and not by_name["flags"].pointer


def test_array_fields():
    """Laid out as C does: aligned like their entries, also after and before odd sizes."""
    body = "int first_tile;\nconst float* __restrict__ adv[8];  // per branch\nint n[3];\ndouble wide;\nfloat w[ 1 ];"
    layout = parse_source("a.cu", f"struct S {{\n{body}\n}};").struct("S")
    dtype = layout.dtype
    assert dtype.isalignedstruct and dtype.itemsize == 104
    assert [f.offset for f in layout.fields] == [0, 8, 72, 88, 96] == [dtype.fields[n][1] for n in dtype.names]
    assert dtype["adv"] == np.dtype(("<u8", (8,))) and dtype["n"] == np.dtype(("<i4", (3,)))
    adv = layout.fields[1]
    assert (adv.ctype, adv.pointer, adv.comment) == ("float*[8]", True, "per branch")


def test_kernels_take_no_arrays():
    with pytest.raises(FxError, match="not understood"):
        parse_source("a.cu", 'extern "C" __global__ void fx_a(int a[3]) {}')


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pair", r"a\.cu:17: struct Pair: 'int a, b'"),
        ("Odd", r"a\.cu:19: struct Odd: 'float values\[2\]\[2\]'"),
        ("Half", r"a\.cu:22: struct Half: .*type '__half'"),
        ("Nothing", r"no struct Nothing; it defines Linear, Pair, Odd, Half"),
    ],
)
def test_structs_that_are_no_records(name: str, message: str):
    parsed = parse_source("a.cu", TEXT)
    with pytest.raises(FxError, match=message):
        parsed.struct(name)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("int a; int b;", "not one field on one line"),
        ("int a", "not one field on one line"),
        ("int a;\nfloat a;", "repeats a"),
        ("", "has no fields"),
        ("int f() { return 1; }", "not one field"),
        ("int a = 3;", "not understood"),
        ("float& r;", "not understood"),
        ("int a[0];", r"'int a\[0\]' is no array"),
        ("int a[];", r"'int a\[\]' is no array"),
        ("int a[N];", r"'int a\[N\]' is no array"),
        ("__half a[2];", "type '__half'"),
    ],
)
def test_bodies_that_are_refused(body: str, message: str):
    with pytest.raises(FxError, match=message):
        parse_source("a.cu", f"struct S {{\n{body}\n}};").struct("S")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extern "C" __global__ void fx_a(short a) {}', "type 'short'"),
        ('extern "C" __global__ void fx_a(int) {}', "not understood"),
        ('extern "C" __global__ void fx_a(int a) {}\nextern "C" __global__ void fx_a(int a) {}', "a.cu:2.*twice"),
        ('extern "C" __global__ void __launch_bounds__(N) fx_a(int a) {}', r"__launch_bounds__\(N\)"),
    ],
)
def test_kernels_that_are_refused(text: str, message: str):
    with pytest.raises(FxError, match=message):
        parse_source("a.cu", text)


def test_headers_count():
    parsed = parse_source(
        "a.cu",
        'extern "C" __global__ void __launch_bounds__(kBlock) fx_a(const R* t) {}',
        [("h.cuh", "constexpr int kBlock = 96;\nstruct R {\n int a;\n};")],
    )
    assert parsed.kernels["fx_a"].threads == 96
    assert parsed.struct("R").dtype.itemsize == 4
