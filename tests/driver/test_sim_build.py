"""Building kernels for the simulated device: compilers, messages, cache."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fxengine.driver.errors import CompileError, DeviceNotFound
from fxengine.driver.sim.build import build_shared_object, kernel_facts
from fxengine.driver.sim.compilers import Compiler, find_compiler
from tests.driver.test_sim_support import ADD, source


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FXENGINE_SIM_SANITIZE", raising=False)
    return tmp_path / "cache"


def test_errors_show_the_numbered_source(cache: Path):
    text = '\nextern "C" __global__ void broken(float* x) {\n    x[0] = undeclared;\n}\n'
    with pytest.raises(CompileError) as caught:
        build_shared_object(source(text, "broken.cu"))
    message = str(caught.value)
    assert message.startswith("broken.cu does not compile for the simulated device")
    assert "line 3:" in message
    assert ">    3 |     x[0] = undeclared;" in message
    assert "     2 | extern" in message
    assert "undeclared" in caught.value.log
    assert caught.value.source == "broken.cu"
    assert not list(cache.rglob("*.so"))


@pytest.mark.parametrize(
    "body",
    [
        "atomicAdd(x, 1.0f);",  # the order of the blocks would decide the sum
        "x[0] = __activemask();",
        "x[0] = __shfl_down(x[0], 1);",
    ],
)
def test_what_kernels_must_not_use_does_not_compile(body: str):
    with pytest.raises(CompileError):
        build_shared_object(source(f'extern "C" __global__ void k(float* x) {{ {body} }}'))


def test_kernels_are_found_in_every_spelling():
    text = """
    // extern "C" __global__ void in_a_comment(int x) {}
    /* extern "C" __global__ void in_another(int x) {} */
    const char* text = "// no comment";
    constexpr int sizes[2] = {64, 128};
    extern "C" __global__ void declared(int);
    extern "C" __global__ void declared(int) {}
    extern "C" __global__ void __launch_bounds__(sizes[1], 2) after_void() {}
    extern "C" __global__ __launch_bounds__((32 * 2)) void before_void(
        const float* __restrict__ x,  // (a parenthesis
        int n) {}
    """
    facts = kernel_facts(build_shared_object(source(text)))
    assert facts["kernels"] == {"declared": 0, "after_void": 0, "before_void": 0}
    with pytest.raises(CompileError, match=r"bad\.cu:1: no kernel name follows"):
        build_shared_object(source('extern "C" __global__ (', "bad.cu"))


def test_the_cache_knows_text_headers_and_defines(cache: Path, tmp_path: Path):
    header = tmp_path / "value.cuh"
    header.write_text("#define VALUE 1\n")
    text = '#include "value.cuh"\nextern "C" __global__ void k(int* x) { x[0] = VALUE; }'
    given = source(text)
    given.path = tmp_path / "inline.cu"
    first = build_shared_object(given)
    stamp = first.stat().st_mtime_ns
    assert build_shared_object(given) == first
    assert first.stat().st_mtime_ns == stamp
    others = [build_shared_object(given, defines=["MORE=1"])]
    header.write_text("#define VALUE 2\n")
    others.append(build_shared_object(given))
    given.text += "\n"
    others.append(build_shared_object(given))
    assert len({first, *others}) == 4
    assert [path for path in cache.rglob("*") if "build-" in path.name] == []


def test_other_files_are_no_modules(tmp_path: Path):
    (tmp_path / "x.so").write_bytes(b"short")
    with pytest.raises(ValueError, match="no kernel module"):
        kernel_facts(tmp_path / "x.so")


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceNotFound, match=r"apt-get install g\+\+") as caught:
        build_shared_object(source(ADD))
    for name in ("g++", "clang++", "ziglang", "CXX"):
        assert name in str(caught.value)


def test_cxx_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(DeviceNotFound, match="CXX=/nowhere/c"):
        find_compiler()
    wrapper = tmp_path / "my-c++"
    wrapper.write_text(f'#!/bin/sh\nexec {find_default()} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"{wrapper} -DEXTRA=1")
    assert find_compiler().command == (str(wrapper), "-DEXTRA=1")
    build_shared_object(source('#if EXTRA != 1\n#error no EXTRA\n#endif\nextern "C" __global__ void k() {}'))


def find_default() -> str:
    found = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if found is None:
        pytest.skip("needs a C++ compiler on PATH")
    return found


def test_a_compiler_that_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(DeviceNotFound, match="does not run"):
        find_compiler()


def test_options_suit_the_family():
    gcc, clang, zig = (Compiler(("c",), family, "1") for family in ("gcc", "clang", "zig"))
    assert "-fsanitize=bounds-strict" in gcc.kernel_options(None)
    assert "-fsanitize=bounds" in clang.kernel_options(None)
    assert "-fno-gnu-unique" not in clang.kernel_options(None)
    assert "-fsanitize=address" in gcc.kernel_options("address")
    assert "-nostdlib++" in zig.link_options(None)
    for compiler in (gcc, clang, zig):
        assert {"-ffp-contract=off", "-O2", "-std=c++17"} <= set(compiler.kernel_options(None))


def test_an_unknown_sanitizer():
    with pytest.raises(ValueError, match="expected None or 'address'"):
        build_shared_object(source(ADD), sanitize="memory")
