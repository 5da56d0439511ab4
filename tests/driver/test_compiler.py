"""NVRTC, which needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxengine.driver import (
    KERNEL_FOLDER,
    CompileError,
    FxError,
    KernelSource,
    compile_cubin,
    compile_report,
    compiler,
    parse_source,
    resource_usage,
    supported_archs,
)
from fxengine.driver.elf import sections
from tests.driver.kernels import KERNELS

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXENGINE_CACHE", str(tmp_path / "cache"))


def _source(text: str, name: str = "probe.cu") -> KernelSource:
    return KernelSource.from_text(text, Path("/nowhere") / name)


@pytest.mark.parametrize("arch", ARCHS)
def test_cubin_of_exactly_this_architecture(arch: str):
    content = compile_cubin(_source(KERNELS), arch).read_bytes()
    assert content[:4] == b"\x7fELF"
    # e_flags of a CUDA ELF: the architecture number in bits 8..15 (in bits 0..7 in older versions of the format)
    flags = int.from_bytes(content[48:52], "little")
    assert int(arch.removeprefix("sm_")) in (flags >> 8 & 0xFF, flags & 0xFF)
    assert b"fx_scale" in content


def test_second_compile_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch):
    first = compile_cubin(_source(KERNELS), "sm_90")
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_cubin(_source(KERNELS), "sm_90") == first


def test_macros_make_a_source_of_its_own(tmp_path: Path):
    """With a name and a cubin of its own; errors still tell lines of the file."""
    path = tmp_path / "a.cu"
    path.write_text('extern "C" __global__ void fx_a(int* x) {\n    *x = VALUE;\n}\n')
    sources = [KernelSource.defining(path, {"VALUE": value, "OTHER": "1, 2"}) for value in ("1", "2", "nothing")]
    assert sources[0].name == "a[VALUE=1,OTHER=1,2].cu"
    assert len({source.name for source in sources}) == 3
    assert compile_cubin(sources[0], "sm_90") != compile_cubin(sources[1], "sm_90")
    with pytest.raises(CompileError, match=r"\(2\): error: identifier \"nothing\" is undefined"):
        compile_cubin(sources[2], "sm_90")


def test_cache_key_covers_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = '#include "own.cuh"\nextern "C" __global__ void fx_a(int* x) { *x = VALUE; }\n'
    (tmp_path / "own.cuh").write_text("#define VALUE 1\n")
    path = tmp_path / "a.cu"
    path.write_text(text)
    keys = {compile_cubin(KernelSource.load(path), "sm_90"), compile_cubin(KernelSource.load(path), "sm_80")}
    keys.add(compile_cubin(KernelSource.load(path), "sm_90", ["-DX=1"]))
    (tmp_path / "own.cuh").write_text("#define VALUE 2\n")
    keys.add(compile_cubin(KernelSource.load(path), "sm_90"))
    path.write_text(text + "\n")
    keys.add(compile_cubin(KernelSource.load(path), "sm_90"))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    keys.add(compile_cubin(KernelSource.load(path), "sm_90"))
    assert len(keys) == 6


def test_error_shows_numbered_lines():
    text = 'int one;\n\nextern "C" __global__ void fx_a(int* x) {\n    *x = missing;\n}\n'
    with pytest.raises(CompileError) as caught:
        compile_cubin(_source(text), "sm_90")
    message = str(caught.value)
    assert ">    4 |     *x = missing;" in message
    assert '"missing" is undefined' in caught.value.log
    assert caught.value.source == "probe.cu"
    assert "NVRTC_ERROR_COMPILATION" in message and "--gpu-architecture=sm_90" in message


def test_error_in_a_header(tmp_path: Path):
    (tmp_path / "own.cuh").write_text("\nint f() { return wrong; }\n")
    (tmp_path / "a.cu").write_text('#include "own.cuh"\n')
    with pytest.raises(CompileError, match=r">    2 \| int f\(\) \{ return wrong; \}"):
        compile_cubin(KernelSource.load(tmp_path / "a.cu"), "sm_90")


def test_unknown_architecture():
    with pytest.raises(CompileError, match="does not compile for sm_42; it knows sm_"):
        compile_cubin(_source(KERNELS), "sm_42")
    assert set(ARCHS) <= set(supported_archs())


def test_half_headers_are_found():
    text = """#include <cuda_bf16.h>
    extern "C" __global__ void fx_a(__nv_bfloat16* x) { *x = __float2bfloat16(1.0f); }
    """
    assert compile_cubin(_source(text), "sm_90").is_file()


def test_missing_header_and_file(tmp_path: Path):
    with pytest.raises(FxError, match=r'includes "absent\.cuh"'):
        KernelSource.from_text('#include "absent.cuh"\n', tmp_path / "a.cu")
    with pytest.raises(FxError, match=r"absent\.cu"):
        KernelSource.load("absent.cu")


def test_source_names_do_not_depend_on_the_checkout():
    assert KernelSource.from_text("", KERNEL_FOLDER / "linear.cu").name == "fxengine/cu/linear.cu"
    assert _source("").name == "probe.cu"


def test_include_closure(tmp_path: Path):
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n  #  include "a.cuh"\n')
    source = KernelSource.from_text('#include "a.cuh"\n#include "fx.cuh"\n', tmp_path / "x.cu")
    assert [name for name, _ in source.headers] == ["a.cuh", "b.cuh", "fx.cuh"]
    assert source.system_headers == ("cuda_fp16.h",)


def test_report():
    text = """
    extern "C" __global__ void __launch_bounds__(256) fx_small(float* x) {
        __shared__ float s[64];
        s[threadIdx.x & 63] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = s[(threadIdx.x + 1) & 63];
    }
    extern "C" __global__ void fx_array(float* x, int n) {
        float a[100];
        for (int i = 0; i < n; ++i) a[i % 100] = x[i];
        for (int i = 0; i < n; ++i) x[i] = a[(i * 7) % 100];
    }
    """
    array, small = compile_report(_source(text), "sm_90")
    assert (small.kernel, small.shared, small.spill_stores, small.stack) == ("fx_small", 256, 0, 0)
    assert 0 < small.registers <= 32 and small.barriers == 1
    assert array.kernel == "fx_array" and array.stack == 400
    assert small.code > 0 and array.code > 0


def test_code_is_what_the_cubin_has():
    """That of each kernel by itself, in instructions of 16 bytes; ptxas's report alone does not say it."""
    text = """
    extern "C" __global__ void fx_copy(float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
    extern "C" __global__ void fx_many(float* x, float* y) {
    #pragma unroll
        for (int i = 0; i < 100; ++i) y[threadIdx.x + i * i] = x[threadIdx.x + i * i * i];
    }
    """
    source = _source(text)
    copy, many = compile_report(source, "sm_90")
    assert 0 < copy.code < 100 * 16 and many.code > 200 * 16
    assert copy.code % 16 == many.code % 16 == 0
    cubin = compile_cubin(source, "sm_90").read_bytes()
    found = {section.name: section for section in sections(cubin)}
    assert [found[f".text.{use.kernel}"].size for use in (copy, many)] == [copy.code, many.code]
    assert resource_usage("ptxas info    : Compiling entry function 'fx_a' for 'sm_80'\n")[0].code == 0


def test_sections_of_other_files():
    assert sections(b"") == sections(b"#!/bin/sh\n") == []
    assert sections(b"\x7fELF\x02\x01" + bytes(58)) == []  # no section table


def test_usage_of_both_log_formats():
    log = (
        "ptxas info    : Compiling entry function 'fx_a' for 'sm_80'\n"
        "ptxas info    : Function properties for fx_a\n"
        "    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem, 368 bytes cmem[0]\n"
    )
    (usage,) = resource_usage(log)
    assert (usage.kernel, usage.registers, usage.stack) == ("fx_a", 255, 16)
    assert (usage.spill_stores, usage.spill_loads, usage.shared) == (12, 8, 4096)
    assert not usage.serialized
    assert resource_usage("ptxas info : 0 bytes gmem") == []
    remark = (
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non "
        "wgmma instructions defining accumulator registers in the function 'fx_a' in line 9\n"
    )
    assert resource_usage(remark + log)[0].serialized
    assert not resource_usage(remark.replace("fx_a", "fx_b") + log)[0].serialized


@pytest.mark.skipif(compiler.nvrtc_version() < (13, 3), reason="NVRTC before 13.3 has no offsetof")
def test_parsed_layout_is_the_compilers():
    """The offsets that were parsed, asserted by the compiler itself."""
    text = """struct Mixed {
        int a;
        double b;
        float c;
        const char* d;
        unsigned e;
        long long f;
        float g;
    };
    """
    layout = parse_source("probe.cu", text).struct("Mixed")
    checks = [f'static_assert(sizeof(Mixed) == {layout.dtype.itemsize}, "size");']
    checks += [f'static_assert(__builtin_offsetof(Mixed, {f.name}) == {f.offset}, "{f.name}");' for f in layout.fields]
    compile_cubin(_source(text + "\n".join(checks)), "sm_90")
