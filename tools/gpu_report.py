"""Run the benchmark and the tests on a GPU and write down what came of it, with a digest of the sources.

    python tools/gpu_report.py                 # on a machine with a GPU: writes reports/h200.json
    python tools/gpu_report.py --tests-only    # adds the tests to the report of these sources that is there already
    python tools/gpu_report.py --check         # anywhere: warns if that report is not about these sources

The tests are those of the GPU and all that need no device; the simulated device's own run where there is no GPU (add
them with --sim). Exit status 1 if a test failed or none passed, 2 if the device is missing. The report is written in
either case, and without tests first: a benchmark whose tests were stopped can be completed later (--tests-only).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from fxengine import Device, DeviceNotFound
from tools.bench_peers import load_peers
from tools.bench_step import BATCHES, MODELS, PRECISIONS, bench, peer_times, table, with_peers
from tools.digest import ROOT, origin, source_digest

REPORT = ROOT / "reports" / "h200.json"
#: Lines of a failure that the report keeps: the end, where the error is.
_FAILURE_LINES = 40
# A test is in a junit file twice if its teardown fails as well: the worse outcome counts.
_SEVERITY = ("passed", "skipped", "failed")
#: What the tests import besides the core's dependencies (extra `test`).
_NEEDED = (
    *("pytest", "xdist", "pytest_timeout", "hypothesis", "pandas", "pyarrow", "matplotlib", "rich", "sklearn"),
    *("gymnasium", "gym_anytrading"),
)


def parse_junit(text: str) -> dict[str, Any]:
    """Counts, outcome per test and text of failures, from pytest's junit XML (family xunit1).

    Returns:
        `passed`, `failed`, `skipped` (numbers), `per_test` (pytest's node id -> outcome), `failures` (id -> text).

    Raises:
        ValueError: the text is not such a file.
    """
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"not a junit XML file: {error}") from error
    outcomes: dict[str, str] = {}
    failures: dict[str, str] = {}
    for case in root.iter("testcase"):
        name = _node_id(case)
        broken = [child for child in case if child.tag in ("failure", "error")]
        outcome = "failed" if broken else "skipped" if case.find("skipped") is not None else "passed"
        if _SEVERITY.index(outcome) >= _SEVERITY.index(outcomes.get(name, "passed")):
            outcomes[name] = outcome
        for child in broken:
            lines = (child.text or child.get("message") or "").splitlines()
            failures[name] = "\n".join(lines[-_FAILURE_LINES:])
    counts = Counter(outcomes.values())
    return {
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "per_test": dict(sorted(outcomes.items())),
        "failures": dict(sorted(failures.items())),
    }


def _node_id(case: ElementTree.Element) -> str:
    file, owner, name = case.get("file"), case.get("classname", ""), case.get("name", "")
    if file is None:  # a file that could not be collected
        return owner or name
    classes = owner.removeprefix(file.removesuffix(".py").replace("/", ".")).strip(".")
    return "::".join(part for part in (file, classes.replace(".", "::"), name) if part)


def missing(packages: Sequence[str] = _NEEDED) -> list[str]:
    """Those of the packages that cannot be imported here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def run_tests(markers: str, arguments: Sequence[str] = ()) -> tuple[dict[str, Any], int]:
    """Run pytest in a process of its own; returns (what `parse_junit` gives, pytest's exit status).

    Raises:
        RuntimeError: pytest ended without a result (a crash of the process, a wrong argument).
    """
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", f"--junitxml={junit}"]
        # Unbuffered inheritance of stdout: what a crash printed last must not be lost.
        status = subprocess.run([*command, "-m", markers, *arguments], cwd=ROOT, check=False).returncode
        if not junit.is_file():
            raise RuntimeError(f"pytest ended with status {status} and no result; its output above says why")
        return parse_junit(junit.read_text(encoding="utf-8")), status


def report_row(row: Mapping[str, Any], peers: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A row of the benchmark with the µs per step of other engines; `best_ratio` is the fastest of them over ours."""
    return with_peers(row, peers or {})


def build_report(
    digest: str,
    place: Mapping[str, Any],
    tests: Mapping[str, Any] | None,
    rows: Sequence[Mapping[str, Any]],
    peers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The report: digest, date, device, driver, versions, tests (None: not run), bench, the latter beside its peers."""
    return {
        "digest": digest,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **place,
        "tests": tests,
        "bench": [report_row(row, peer_times(row, peers)) for row in rows],
    }


def check(path: Path, digest: str) -> str | None:
    """What is wrong with the report at `path` for the tree of this digest; None if it is about this tree and whole."""
    again = "run python tools/gpu_report.py on a GPU"
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        found, tests, rows = report["digest"], report["tests"], report["bench"]
    except FileNotFoundError:
        return f"{path} is missing; {again}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{path} is not a report ({type(error).__name__}: {error}); {again}"
    if found != digest:
        return f"{path} is about other sources ({found[:12]}, the tree is {digest[:12]}); {again}"
    if tests is None or not rows:
        return f"{path} was made without {'tests' if tests is None else 'a benchmark'}; {again}"
    if tests["failed"]:
        return f"{path}: {tests['failed']} tests failed on {report['device']['name']}"
    return None


def benchmarked(path: Path, digest: str, place: Mapping[str, Any]) -> dict[str, Any]:
    """The report at `path`, to which tests of this tree on this device can be added.

    Raises:
        ValueError: there is none, or it is about other sources or another device; both sides are named.
    """
    again = "run without --tests-only"
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found, name = report["digest"], report["device"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no report ({type(error).__name__}: {error}); {again}") from error
    if found != digest:
        raise ValueError(f"{path} is about other sources ({found[:12]}, the tree is {digest[:12]}); {again}")
    if name != place["device"]["name"]:
        raise ValueError(f"{path} is of {name}, this is {place['device']['name']}; {again}")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Test and time this tree on a GPU and write a report.")
    parser.add_argument("--check", action="store_true", help="only compare the report with the tree (always status 0)")
    parser.add_argument("--output", type=Path, help="report to write or check (default: reports/h200.json)")
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or sim to try the tool (default: %(default)s)")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="batch sizes of the benchmark")
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["aux"], help="what to benchmark")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of the benchmark")
    parser.add_argument(
        "--peers", type=Path, help="times of other engines, as tools/bench_peers.py --output wrote them"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--skip-tests", action="store_true", help="benchmark only")
    which.add_argument("--tests-only", action="store_true", help="tests only, into the report that is there already")
    parser.add_argument("--sim", action="store_true", help="also run the tests of the simulated device")
    parser.add_argument("pytest", nargs="*", help="further arguments for pytest, after --")
    options = parser.parse_args(argv)

    output = options.output or REPORT
    if options.check:
        warning = check(output, source_digest())
        print(f"warning: {warning}" if warning else f"{output} is about this tree")
        return 0
    if not options.device.startswith("cuda") and options.output is None:
        parser.error(f"--device {options.device}: {REPORT.name} is for a GPU; name another file with --output")
    return _make(options, output)


def _make(options: argparse.Namespace, output: Path) -> int:
    if options.tests_only and options.peers:
        print("error: --tests-only adds tests to a report; times of peers go in with its benchmark", file=sys.stderr)
        return 2
    absent = [] if options.skip_tests else missing()
    if absent:  # before minutes are spent on tests that cannot run
        print(f"error: the tests need {', '.join(absent)}: pip install '.[test]', or --skip-tests", file=sys.stderr)
        return 2
    digest = source_digest()
    peers = load_peers(options.peers) if options.peers else []
    try:
        with Device.open(options.device) as device:
            place = origin(device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    if options.tests_only:
        try:
            report = benchmarked(output, digest, place)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    else:
        # The benchmark first: right after the tests, with their many processes, the host's times are not those of a
        # quiet machine. Written twice: tests that are stopped must not take its results with them.
        with Device.open(options.device) as device:
            rows = bench(device, options.model, options.batch, precision=options.precision)
        report = build_report(digest, place, None, rows, peers)
        _write(output, report)
    tests, status = None, 0
    if not options.skip_tests:
        simulated = place["device"]["kind"] == "sim"
        markers = "" if options.sim else "not gpu" if simulated else "not sim"
        tests, status = run_tests(markers, options.pytest)
    if source_digest() != digest:
        raise RuntimeError("the sources changed while they were measured; run again")
    report = {**report, "tests": tests}
    _write(output, report)
    print(table(report["bench"]))
    print(f"wrote {output} for {place['device']['name']}, sources {digest[:12]}")
    if tests is None:
        return 0
    for name in tests["failures"]:
        print(f"failed: {name}")
    print(f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped")
    return 1 if status or tests["failed"] or not tests["passed"] else 0


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
