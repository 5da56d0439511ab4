"""What it costs to use the engine: import, first step, installed size, device memory; and the same of its peers.

    python tools/bench_cost.py --device cuda:0 --peers peers.json --output cost.json

Prints a table and, with --json, one JSON object last:

    import_ms        `import fxengine` in a fresh process, median of five; `heavy` names what it must not load
    engine_ms        the same of `from fxengine import Engine`, which loads all of the engine
    warm_s           from the start of a process to the end of its first step, with kernels in the cache on disk; median
                     of three
    cold_s           the same with an empty cache: every kernel is compiled
    installed_mib    the package and all that it requires; PyTorch's and JAX's likewise, where they are installed
    memory_mib       device memory of the step: its arenas, and on a GPU by how much the free memory fell

--peers takes the file that tools/bench_peers.py wrote: memory and setup time of the peers at the same batch size.
"""

from __future__ import annotations

import argparse
import importlib.metadata as metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

import fxengine
from fxengine import Device, DeviceNotFound, Engine
from tools.bench_peers import load_peers
from tools.bench_step import MODELS, PRECISIONS, SIMULATED
from tools.digest import ROOT, origin, source_digest
from tools.peers.data import random_rows

#: Limits that the costs are to stay under.
GOALS = {"import_ms": 100.0, "warm_s": 1.5, "cold_s": 20.0}
#: What importing the package must not load: without the bindings there can be no driver call.
HEAVY = ("cuda.bindings", "numpy", "pandas", "matplotlib", "pynvml", "safetensors", "torch", "jax")
#: Distributions whose requirements are the peers' installed size, by peer.
PEER_ROOTS = {"torch": ("torch",), "jax": ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")}

_IMPORT = """
import sys, time
start = time.perf_counter()
{statement}
elapsed = time.perf_counter() - start
print(elapsed, *(name for name in {heavy!r} if name in sys.modules))
"""
_FIRST_STEP = """
import sys
from fxengine import Engine
from tools.bench_step import MODELS
from tools.peers.data import random_rows
config = MODELS[sys.argv[1]](int(sys.argv[2]))
with Engine(config, device=sys.argv[3], precision=sys.argv[4], data=random_rows(config)) as engine:
    engine.step()
    engine.synchronize()
    print("stepped", flush=True)
"""


def _child(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Python code in a process of its own, with its output to be read."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = {**os.environ, "PYTHONPATH": paths, **(environment or {})}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, env=made, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def import_cost(statement: str = "import fxengine", samples: int = 5) -> tuple[float, list[str]]:
    """Median time of an import in ms, and which of `HEAVY` it loads."""
    code = _IMPORT.format(statement=statement, heavy=HEAVY)
    runs = [_child(code).communicate()[0].split() for _ in range(samples)]
    return round(1e3 * median(float(run[0]) for run in runs), 2), runs[0][1:]


def first_step_s(model: str, batch: int, device: str, precision: str, cache: Path | None = None) -> float:
    """Seconds from the start of a process to the end of its first step; with another cache folder if one is given."""
    environment = {} if cache is None else {"FXENGINE_CACHE": str(cache), "XDG_CACHE_HOME": str(cache)}
    start = time.perf_counter()
    with _child(_FIRST_STEP, model, str(batch), device, precision, environment=environment) as process:
        assert process.stdout is not None
        stepped = process.stdout.readline()
        elapsed = time.perf_counter() - start
    if process.returncode or not stepped:
        raise RuntimeError(f"the first step failed with status {process.returncode}; the output above says why")
    return elapsed


def startup(model: str, batch: int, device: str, precision: str, *, cold: bool = True) -> dict[str, float]:
    """warm_s and, if wanted, cold_s."""
    first_step_s(model, batch, device, precision)  # fills the cache
    warm = median(first_step_s(model, batch, device, precision) for _ in range(3))
    found = {"warm_s": round(warm, 3)}
    if cold:
        with tempfile.TemporaryDirectory() as folder:
            found["cold_s"] = round(first_step_s(model, batch, device, precision, Path(folder)), 3)
    return found


def requirements() -> list[str]:
    """Names of what the package requires, from the project's own file: a checkout need not be installed."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return re.findall(r'"([A-Za-z0-9._-]+)', listed[1])


def closure(roots: Iterable[str]) -> dict[str, metadata.Distribution]:
    """Installed distributions that the roots require, themselves included, by normalised name; extras are left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(roots)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform or another Python
        for requirement in found[name].requires or ():
            needed = re.match(r"[A-Za-z0-9._-]+", requirement)
            if needed and "extra ==" not in requirement.partition(";")[2]:
                waiting.append(needed[0])
    return found


def installed_mib(roots: Iterable[str]) -> dict[str, float]:
    """MiB by distribution of a closure, as their lists of files say."""
    sizes = {}
    for name, distribution in closure(roots).items():
        sizes[name] = _mib(Path(str(distribution.locate_file(file))) for file in distribution.files or ())
    return dict(sorted(sizes.items()))


def core_mib() -> dict[str, float]:
    """MiB of the package, from where it runs, and of all that it requires."""
    # The bindings by name too: they may be installed without cuda-python, which only gathers them.
    required = installed_mib([*requirements(), "cuda-bindings"])
    return {"fxengine": _mib(Path(fxengine.__file__).parent.rglob("*")), **required}


def _mib(files: Iterable[Path]) -> float:
    kept = {file.resolve() for file in files if "__pycache__" not in file.parts and file.is_file()}
    return round(sum(file.stat().st_size for file in kept) / 2**20, 2)


def memory(model: str, batch: int, device: Device, precision: str) -> dict[str, Any]:
    """MiB by arena of a step's plan and, on a GPU, what the whole engine took of the free memory."""

    def free() -> int:
        with device.activate():
            return int(device.driver.cuMemGetInfo()[0])

    config = MODELS[model](batch)
    before = free() if device.kind == "cuda" else None
    with Engine(config, device=device, precision=precision, data=random_rows(config)) as engine:
        engine.step()
        engine.synchronize()
        arenas = {name: round(n / 2**20, 3) for name, n in engine.plan.arena_bytes().items()}
        taken = None if before is None else round((before - free()) / 2**20, 1)
    return {"arenas": arenas, "arenas_mib": round(sum(arenas.values()), 2), "taken_mib": taken}


def peer_costs(rows: Sequence[Mapping[str, Any]], batch: int, precision: str) -> dict[str, dict[str, Any]]:
    """Memory and setup time by peer, of rows of tools/bench_peers.py."""
    chosen = [row for row in rows if (row["batch"], row["precision"]) == (batch, precision)]
    return {row["peer"]: {key: row.get(key) for key in ("memory_mib", "setup_s")} for row in chosen}


def table(costs: Mapping[str, Any]) -> str:
    """The costs as text, with the goals."""
    rows: list[tuple[str, str, str]] = []
    for name in ("import_ms", "engine_ms", "warm_s", "cold_s"):
        if name in costs:
            goal = GOALS.get(name)
            verdict = "" if goal is None else f"{'met' if costs[name] <= goal else 'MISSED'}: at most {goal:g}"
            rows.append((name, f"{costs[name]:.2f}", verdict))
    rows.append(("heavy", ", ".join(costs["heavy"]) or "none", "MISSED: none" if costs["heavy"] else "met: none"))
    for name, sizes in costs["installed"].items():
        rows.append((f"installed_mib {name}", f"{sum(sizes.values()):.1f}", f"{len(sizes)} distributions"))
    used = costs["memory"]
    taken = "" if used["taken_mib"] is None else f"free memory fell by {used['taken_mib']:.1f}"
    rows.append(("memory_mib", f"{used['arenas_mib']:.1f}", taken))
    for name, peer in costs["peers"].items():
        rows.append((f"memory_mib {name}", str(peer["memory_mib"]), f"setup {peer['setup_s']} s"))
    return "\n".join(f"{name:<28} {value:>12}   {note}".rstrip() for name, value, note in rows)


def measure(
    model: str,
    batch: int,
    device: Device,
    precision: str,
    *,
    cold: bool = True,
    peers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """All costs."""
    import_ms, heavy = import_cost()
    costs: dict[str, Any] = {"model": model, "batch": batch, "precision": precision}
    costs |= {"import_ms": import_ms, "heavy": heavy, "engine_ms": import_cost("from fxengine import Engine")[0]}
    costs |= startup(model, batch, device.label, precision, cold=cold)
    sizes = {name: installed_mib(roots) for name, roots in PEER_ROOTS.items()}
    costs["installed"] = {"fxengine": core_mib()} | {name: found for name, found in sizes.items() if found}
    costs["memory"] = memory(model, batch, device, precision)
    costs["peers"] = peer_costs(peers, batch, precision)
    return costs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What it costs to use the engine.")
    parser.add_argument("--model", choices=sorted(MODELS), default="step", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="default: %(default)s")
    parser.add_argument("--no-cold", action="store_true", help="leave out the start with an empty cache")
    parser.add_argument("--peers", type=Path, metavar="FILE", help="rows of tools/bench_peers.py")
    parser.add_argument("--device", default="auto", help="auto, cuda:N or sim (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--output", type=Path, help="write the JSON to this file as well")
    options = parser.parse_args(argv)
    peers = load_peers(options.peers) if options.peers else []
    try:
        device = Device.open(options.device)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with device:
        costs = measure(options.model, options.batch, device, options.precision, cold=not options.no_cold, peers=peers)
        note = SIMULATED if device.kind == "sim" else None
        result = {"digest": source_digest(), **origin(device), "note": note, "goals": GOALS, "cost": costs}
    print(f"{result['device']['name']}: {options.model}, batch {options.batch}, {options.precision}")
    print(table(costs))
    if note:
        print(f"note: {note}")
    text = json.dumps(result, indent=1)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
