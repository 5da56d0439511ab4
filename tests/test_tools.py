"""The tools (digests, the GPU report, kernel compilation, the benchmark) and the page that describes the step."""

from __future__ import annotations

import ast
import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fxengine import StepConfig
from fxengine.driver import Device
from fxengine.driver.compiler import KernelUsage
from fxengine.signals import BOUND_FAMILIES, SignalMap, bound_slot
from tools import bench_cost, bench_step, ceilings, compile_kernels, digest, gpu_report

KERNEL = """
extern "C" __global__ void __launch_bounds__(256) fx_double(float* x, int n) {
    __shared__ float stage[256];
    const int i = blockIdx.x * 256 + threadIdx.x;
    stage[threadIdx.x] = i < n ? x[i] : 0.0f;
    __syncthreads();
    if (i < n) x[i] = 2.0f * stage[255 - threadIdx.x];
}
"""

JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest">
<testcase file="tests/ops/test_a.py" classname="tests.ops.test_a" name="test_good[cuda:0]" time="0.1"/>
<testcase file="tests/ops/test_a.py" classname="tests.ops.test_a.TestGroup" name="test_bad" time="0.1">
  <failure message="assert 1 == 2">line 1
AssertionError: assert 1 == 2</failure></testcase>
<testcase file="tests/ops/test_a.py" classname="tests.ops.test_a" name="test_left_out" time="0">
  <skipped type="pytest.skip" message="no GPU"/></testcase>
<testcase file="tests/ops/test_a.py" classname="tests.ops.test_a" name="test_torn_down" time="0.1"/>
<testcase file="tests/ops/test_a.py" classname="tests.ops.test_a" name="test_torn_down" time="0.1">
  <error message="failed on teardown">CudaError</error></testcase>
<testcase classname="" name="tests.ops.test_c" time="0">
  <error message="collection failure">ImportError</error></testcase>
</testsuite></testsuites>
"""

ROW: dict[str, Any] = {
    "model": "aux",
    "batch": 256,
    "precision": "fp32",
    "us_per_step": 20.0,
    "host_us": 5.0,
    "depth": 12,
    "nodes": 14,
}
PLACE: dict[str, Any] = {"device": {"name": "GPU"}, "driver": "580.1", "versions": {"fxengine": "0"}}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    (folder / "cu").mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "cu" / "b.cu").write_text("// b\n")
    return folder


def test_digest_is_that_of_paths_and_contents(tree: Path, tmp_path: Path) -> None:
    before = digest.source_digest(tree)
    assert before == digest.source_digest(tree) and len(before) == 64

    moved = tree.rename(tmp_path / "elsewhere")
    assert digest.source_digest(moved) == before

    (moved / "__pycache__").mkdir()
    for generated in ("__pycache__/a.cpython-312.pyc", "a.pyc", ".hidden", "cu/b.so", "a.py~"):
        (moved / generated).write_bytes(b"x")
    assert digest.source_digest(moved) == before


@pytest.mark.parametrize("change", ["content", "rename", "new file", "boundary"])
def test_digest_sees_every_change(tree: Path, change: str) -> None:
    before = digest.source_digest(tree)
    if change == "content":
        (tree / "cu" / "b.cu").write_text("// c\n")
    elif change == "rename":
        (tree / "a.py").rename(tree / "c.py")
    elif change == "new file":
        (tree / "py.typed").touch()
    else:  # the same bytes, cut elsewhere between name and content
        (tree / "a.py").rename(tree / "a.pya")
        (tree / "a.pya").write_text(" = 1\n")
    assert digest.source_digest(tree) != before


def test_digest_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no sources"):
        digest.source_digest(tmp_path / "missing")


def test_junit_results_per_test() -> None:
    results = gpu_report.parse_junit(JUNIT)
    assert results["per_test"] == {
        "tests.ops.test_c": "failed",
        "tests/ops/test_a.py::TestGroup::test_bad": "failed",
        "tests/ops/test_a.py::test_good[cuda:0]": "passed",
        "tests/ops/test_a.py::test_left_out": "skipped",
        "tests/ops/test_a.py::test_torn_down": "failed",
    }
    assert (results["passed"], results["failed"], results["skipped"]) == (1, 3, 1)
    assert results["failures"]["tests/ops/test_a.py::TestGroup::test_bad"].endswith("assert 1 == 2")
    with pytest.raises(ValueError, match="junit"):
        gpu_report.parse_junit("no xml")


def test_tests_run_in_a_process_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "test_two.py"
    file.write_text("def test_good(): pass\ndef test_bad(): assert False, 'planted'\n")
    results, status = gpu_report.run_tests("", ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(file)])
    assert status == 1
    assert {name.rpartition("::")[2]: outcome for name, outcome in results["per_test"].items()} == {
        "test_good": "passed",
        "test_bad": "failed",
    }
    (failure,) = results["failures"].values()
    assert "planted" in failure


def test_report_schema() -> None:
    report = gpu_report.build_report("abc", PLACE, gpu_report.parse_junit(JUNIT), [ROW])
    assert set(report) == {"digest", "date", "device", "driver", "versions", "tests", "bench"}
    assert set(report["tests"]) == {"passed", "failed", "skipped", "per_test", "failures"}
    (row,) = report["bench"]
    assert row == {**ROW, "peers": {}, "best_ratio": None}
    assert json.loads(json.dumps(report)) == report


def test_best_ratio_is_the_fastest_peer_over_ours() -> None:
    row = gpu_report.report_row(ROW, {"slow": 400.0, "fast": 50.0})
    assert row["best_ratio"] == 2.5


def test_check_says_what_is_wrong_with_a_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    assert "is missing" in str(gpu_report.check(path, "abc"))
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        assert "is not a report" in str(gpu_report.check(path, "abc"))

    def verdict(digest: str, tests: dict[str, Any] | None, rows: list[dict[str, Any]]) -> str | None:
        path.write_text(json.dumps(gpu_report.build_report("abc", PLACE, tests, rows)))
        return gpu_report.check(path, digest)

    good = {"passed": 3, "failed": 0, "skipped": 0, "per_test": {}, "failures": {}}
    assert verdict("abc", good, [ROW]) is None
    assert "other sources" in str(verdict("def", good, [ROW]))
    assert "without tests" in str(verdict("abc", None, [ROW]))
    assert "without a benchmark" in str(verdict("abc", good, []))
    assert "2 tests failed on GPU" in str(verdict("abc", {**good, "failed": 2}, [ROW]))


def test_tests_are_added_to_the_report_of_the_same_tree_and_device_only(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(ValueError, match="is no report"):
        gpu_report.benchmarked(path, "abc", PLACE)
    report = gpu_report.build_report("abc", PLACE, None, [ROW])
    path.write_text(json.dumps(report))
    assert gpu_report.benchmarked(path, "abc", PLACE) == report
    with pytest.raises(ValueError, match="other sources \\(abc, the tree is def"):
        gpu_report.benchmarked(path, "def", PLACE)
    elsewhere = {**PLACE, "device": {**PLACE["device"], "name": "another"}}
    with pytest.raises(ValueError, match=f"is of {PLACE['device']['name']}, this is another"):
        gpu_report.benchmarked(path, "abc", elsewhere)


def test_tests_only_completes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sim.json"
    common = ["--device", "sim", "--output", str(path)]
    assert gpu_report.main([*common, "--tests-only"]) == 2
    monkeypatch.setattr(gpu_report, "bench", lambda *_, **__: [ROW])
    assert gpu_report.main([*common, "--skip-tests"]) == 0
    bare = json.loads(path.read_text())
    assert bare["tests"] is None
    monkeypatch.setattr(gpu_report, "run_tests", lambda *_: (gpu_report.parse_junit(JUNIT), 1))
    assert gpu_report.main([*common, "--tests-only"]) == 1
    assert json.loads(path.read_text()) == {**bare, "tests": gpu_report.parse_junit(JUNIT)}


def test_tests_that_cannot_run_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_report.missing() == []
    assert gpu_report.missing(["json", "no_such_package"]) == ["no_such_package"]
    monkeypatch.setattr(gpu_report, "missing", lambda: ["hypothesis", "pandas"])
    monkeypatch.setattr(gpu_report, "run_tests", lambda *_: pytest.fail("ran"))
    assert gpu_report.main(["--device", "sim", "--output", str(tmp_path / "sim.json")]) == 2
    assert "the tests need hypothesis, pandas: pip install '.[test]'" in capsys.readouterr().err


def test_check_warns_and_succeeds(tmp_path: Path) -> None:
    command = [sys.executable, "tools/gpu_report.py", "--check", "--output", str(tmp_path / "none.json")]
    done = subprocess.run(command, cwd=digest.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("warning: ") and "is missing" in done.stdout


def test_the_simulated_device_cannot_write_the_gpu_report(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_report.main(["--device", "sim", "--skip-tests"])
    assert "--output" in capsys.readouterr().err


def test_kernels_compile_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.cu", tmp_path / "bad.cu"
    good.write_text(KERNEL)
    bad.write_text(KERNEL.replace("blockIdx", "blockIndex"))
    assert compile_kernels.main([str(good), "--arch", "sm_80", "sm_90", "--jobs", "1"]) == 0
    shown = capsys.readouterr()
    assert "fx_double" in shown.out and "1024" in shown.out and not shown.err

    assert compile_kernels.main([str(good), str(bad), "--arch", "sm_90", "--jobs", "1", "--json"]) == 1
    shown = capsys.readouterr()
    assert "bad.cu for sm_90" in shown.err and "blockIndex" in shown.err
    results = json.loads(shown.out)["results"]
    assert [len(result["kernels"]) for result in results] == [1, 0]
    code = results[0]["kernels"][0]["code"]
    assert code > 0 and f"{code / 1024:.1f}" in compile_kernels.table([compile_kernels.compile_one(str(good), "sm_90")])


def test_spills_fail_unless_a_reason_is_written() -> None:
    def usage(kernel: str, spill: int) -> KernelUsage:
        return KernelUsage(kernel, 255, 0, spill, spill, 2 * spill, 0)

    results = [compile_kernels.Result("x.cu", "sm_90", (usage("fx_a", 0), usage("fx_b", 8)))]
    (problem,) = compile_kernels.problems(results)
    assert "fx_b spills (8 bytes stored, 16 loaded" in problem
    assert "8/16" in compile_kernels.table(results)
    sized = compile_kernels.Result("x.cu", "sm_90", (replace(usage("fx_a", 0), code=47_104),))
    head, _, row = compile_kernels.table([sized, compile_kernels.Result("x.cu", "sm_80", ())]).splitlines()
    assert row.split("|")[1].split() == ["255", "0", "0/0", "46.0"]
    assert head.index("| sm_80") == row.rindex("|")
    assert compile_kernels.problems(results, {("fx_b", "sm_90"): "measured: faster"}) == []
    assert compile_kernels.problems(results, {("fx_b", "sm_80"): "another architecture"}) == [problem]
    assert len(compile_kernels.problems([compile_kernels.Result("empty.cu", "sm_90", ())])) == 1
    slow = compile_kernels.Result("x.cu", "sm_90", (replace(usage("fx_a", 0), serialized=True),))
    assert "fx_a has its products of warpgroups serialized" in compile_kernels.problems([slow])[0]
    dealt = compile_kernels.Result("x.cu", "sm_90", (usage("fx_iqn_warpgroup_backward", 0),))
    assert "takes 255 registers, not 128" in compile_kernels.problems([dealt])[0]
    (other,) = set(compile_kernels.ONLY) & {"linear_dx_warpgroup.cu"}
    assert compile_kernels.problems([compile_kernels.Result(other, "sm_80", ())]) == []
    assert len(compile_kernels.problems([compile_kernels.Result(other, "sm_90", ())])) == 1


def test_bench_row(device: Device) -> None:
    row = bench_step.bench_row("aux", 16, device, bench_step.QUICK)
    assert row["nodes"] == sum(row["nodes_by_type"].values()) >= row["depth"] > 1
    for column in ("us_per_step", "uncaptured_us", "host_us", "launch_us"):
        assert row[column] > 0.0, column
    floor = row["floor"]
    assert floor["us"] == pytest.approx(max(floor[f"{part}_us"] for part in ("products", "memory", "chain")) + 2.7)
    assert floor["chain_us"] == pytest.approx(0.9 * row["depth"]) and floor["flop"] > 0 and floor["bytes"] > 0
    heads, cells = (line.split() for line in bench_step.table([row]).splitlines())
    assert dict(zip(heads, cells, strict=True))["floor_us"] == f"{floor['us']:.2f}"


def test_bench_never_waits_for_the_ring() -> None:
    with pytest.raises(ValueError, match="queued"):
        bench_step.Effort(queued=64)


def test_ceilings_are_rates(device: Device) -> None:
    with device.stream() as stream:
        assert ceilings.own_rate(device, stream, "fp32", (64, 32, 16)) > 0.0
        assert ceilings.copy_bandwidth(device, stream, 1 << 16) > 0.0


def test_ceilings_are_not_those_of_a_simulation() -> None:
    with Device.open("sim") as device, pytest.raises(ValueError, match="simulated"):
        ceilings.measure(device, "tf32")


def test_importing_the_package_is_cheap() -> None:
    milliseconds, heavy = bench_cost.import_cost(samples=3)
    assert 0.0 < milliseconds < bench_cost.GOALS["import_ms"] and heavy == []
    assert "numpy" in bench_cost.import_cost("from fxengine import Engine", samples=1)[1]


def test_first_step_in_a_process_of_its_own(device: Device) -> None:
    assert 0.0 < bench_cost.first_step_s("aux", 8, device.label, "fp32") < 60.0
    with pytest.raises(RuntimeError, match="status 1"):
        bench_cost.first_step_s("aux", 0, device.label, "fp32")


def test_installed_size_counts_what_is_required() -> None:
    assert {"numpy", "cuda-python", "nvidia-cuda-nvrtc"} <= set(bench_cost.requirements())
    sizes = bench_cost.core_mib()
    assert {"fxengine", "numpy", "cuda-bindings"} <= set(sizes) and "pytest" not in sizes
    assert sizes["numpy"] > 5.0 and 0.5 < sizes["fxengine"] < 20.0
    assert bench_cost.installed_mib(["no-such-distribution"]) == {}


def test_costs_as_a_table(device: Device) -> None:
    memory = bench_cost.memory("aux", 8, device, "fp32")
    assert memory["arenas"]["params"] > 0.0 and memory["arenas_mib"] >= memory["arenas"]["params"]
    assert (memory["taken_mib"] is None) == (device.kind == "sim")
    rows = [{"peer": "a", "batch": 8, "precision": "fp32", "memory_mib": 270.0, "setup_s": 2.0}]
    costs = {
        "import_ms": 200.0,
        "warm_s": 1.0,
        "heavy": [],
        "installed": {"fxengine": {"numpy": 1.5}},
        "memory": memory,
    }
    text = bench_cost.table({**costs, "peers": bench_cost.peer_costs(rows, 8, "fp32")})
    assert "MISSED: at most 100" in text and "met: at most 1.5" in text and "270.0" in text
    assert bench_cost.peer_costs(rows, 16, "fp32") == {}


def _table_pairs(page: str, header: str) -> dict[str, str]:
    """First and second column of every pair of columns of the Markdown table under `header`."""
    lines = page[page.index(header) :].splitlines()[2:]
    pairs: dict[str, str] = {}
    for line in lines:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        pairs |= {cells[at]: cells[at + 1] for at in range(0, len(cells), 3) if cells[at]}
    return pairs


def test_the_page_of_the_step_states_the_defaults_of_the_code() -> None:
    page = (digest.ROOT / "docs" / "step.md").read_text(encoding="utf-8")
    stated = {name: float(value) for name, value in _table_pairs(page, "| signal | default |").items()}
    slots = SignalMap().slots.values()
    coded = {slot.name.partition(".")[0]: slot.default for slot in slots if not slot.device_owned}
    assert stated == coded

    fields = _table_pairs(page, "| field | default |")
    values = {name: ast.literal_eval(text.replace("−", "-").title()) for name, text in fields.items()}
    assert values == {f.name: f.default for f in dataclasses.fields(StepConfig) if f.name != "oracle_every"}


def test_the_page_of_the_step_states_the_slots_of_the_bounds() -> None:
    page = (digest.ROOT / "docs" / "step.md").read_text(encoding="utf-8")
    for f, family in enumerate(BOUND_FAMILIES):
        row = f"| {family} | {f} | {bound_slot(0, family)}+g | {bound_slot(8, family)}+(g−8) |"
        assert row in page, row
