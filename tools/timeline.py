"""When the nodes of one replay begin, on a GPU: what the sum of node times cannot show.

    python tools/timeline.py --batch 64 256
    python tools/timeline.py --batch 64 --json

The kernels are built with a log in `fx.cuh`: the first block of every launch notes the global timer when it enters and
when its wait for its predecessors ends. Of a node the line shows both, in µs from the first entry; it is over about
when the nodes behind it begin. A block that entered long before it began held its place meanwhile. The log costs a few
per cent, and the timer of some devices counts in steps of 32 ns or 1 µs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout that is not installed

from fxengine import Device, DeviceNotFound, Engine
from fxengine.driver import Arena, source
from tools.bench_step import BATCHES, MODELS, PRECISIONS, random_rows

#: Events that the log has room for; a replay has two per launch.
EVENTS = 4096
#: Replays before the one that is shown.
WARM = 25

_LOG = """
// Entry of the first block of a launch (tag: its table), and the end of its wait (tag 1).
__device__ u64* fx_log_events;  // their number, then tag, place on the device and time of each
__device__ __forceinline__ void fx_log(u64 tag) {
    if (threadIdx.x != 0 || blockIdx.x != 0 || fx_log_events == nullptr) return;
    unsigned sm, warp;
    u64 now;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    const u64 i = atomicAdd(fx_log_events, 1ull);
    if (i >= EVENTSull) return;
    fx_log_events[3 * i + 1] = tag;
    fx_log_events[3 * i + 2] = sm * 256ull + warp;
    fx_log_events[3 * i + 3] = now;
}

""".replace("EVENTS", str(EVENTS))
# Where the log goes into fx.cuh: the text before which it stands, and the texts behind which calls of it do.
_BEFORE = "// A launch covers a table of records of one kind."
_CALLS = {
    "fx_record(const Record* table, int count, int& tile) {\n": "    fx_log(reinterpret_cast<u64>(table));\n",
    '    asm volatile("griddepcontrol.wait;" ::: "memory");\n': "    fx_log(1);\n",
}


def logging(text: str) -> str:
    """`fx.cuh` with the log. Raises ValueError if it has changed too much for that."""
    for anchor in (_BEFORE, *_CALLS):
        if text.count(anchor) != 1:
            raise ValueError(f"fx.cuh has {text.count(anchor)} times {anchor!r}, where the log belongs; expected once")
    text = text.replace(_BEFORE, _LOG + _BEFORE)
    for anchor, call in _CALLS.items():
        text = text.replace(anchor, anchor + call)
    return text


@contextmanager
def logged() -> Iterator[None]:
    """Kernels that are compiled meanwhile have the log."""
    read = source._read

    def with_log(path: Path, what: str) -> str:
        text = read(path, what)
        return logging(text) if path.name == "fx.cuh" else text

    with patch.object(source, "_read", with_log):
        yield


@dataclass(frozen=True)
class Row:
    """A node of a replay.

    Attributes:
        node: its index in the plan.
        level: longest path from a root.
        entered_us: when its first block came onto a multiprocessor.
        began_us: when that block's wait for the predecessors ended.
        blocks: of the launch.
        family: names of its families.
        after: nodes that it begins behind.
        label: of its records.
    """

    node: int
    level: int
    entered_us: float
    began_us: float
    blocks: int
    family: str
    after: tuple[int, ...]
    label: str


def pairs(events: NDArray[np.uint64]) -> dict[int, tuple[int, int]]:
    """(entry, end of the wait) of each table's last launch, from events [n, 3] of tag, place and time.

    A block's two events have one place, and no other block is there between them.
    """
    entered: dict[int, tuple[int, int]] = {}
    found = {}
    for tag, place, time in events.tolist():
        if tag != 1:
            entered[place] = tag, time
        elif place in entered:
            table, begun = entered.pop(place)
            found[table] = begun, time
    return found


def timeline(engine: Engine, log: Arena) -> list[Row]:
    """The last of some replays, whose kernels were compiled with the log; in order of beginning."""
    whole = log.whole
    with engine.device.activate():
        for module in engine.device._modules.values():
            address, _ = engine.device.driver.cuModuleGetGlobal(module.handle, b"fx_log_events")
            engine.device.driver.cuMemcpyHtoD(address, np.array([log.address], np.uint64).ctypes.data, 8)
    for step in range(WARM + 1):
        if step == WARM:
            engine.synchronize()
            whole.fill_u32(0)
        engine.step()
    engine.synchronize()
    words = whole.read().view(np.uint64)
    count = min(int(words[0]), EVENTS)
    found = pairs(words[1 : 1 + 3 * count].reshape(-1, 3))
    start = min((entry for entry, _ in found.values()), default=0)
    rows = []
    for i, step_ in enumerate(engine.plan._steps):
        node, arguments = step_.node, step_.arguments
        if arguments is None or int(arguments.values[0]) not in found:
            continue
        entry, begun = ((time - start) / 1e3 for time in found[int(arguments.values[0])])
        rows.append(Row(i, node.level, entry, begun, node.blocks, node.name, node.after, node.label))
    return sorted(rows, key=lambda row: row.began_us)


def table(rows: Sequence[Row]) -> str:
    """The rows as text."""
    lines = [f"{'began':>8} {'entered':>8} {'node':>5} {'level':>5} {'blocks':>6}  {'family':<30} {'after':<20} for"]
    for row in rows:
        after = ",".join(map(str, row.after)) or "-"
        lines.append(
            f"{row.began_us:>8.2f} {row.entered_us:>8.2f} {row.node:>5} {row.level:>5} {row.blocks:>6}  "
            f"{row.family:<30.30} {after:<20} {row.label:.60}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="When the nodes of one replay begin, on a GPU.")
    parser.add_argument("--model", choices=sorted(MODELS), default="step")
    parser.add_argument(
        "--batch", nargs="+", type=int, default=list(BATCHES), help="batch sizes (default: %(default)s)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="tf32", help="default: %(default)s")
    parser.add_argument("--device", default="cuda:0", help="cuda:N (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    if not options.device.startswith("cuda"):
        parser.error(f"--device {options.device}: only a GPU has a timer to read and launches that overlap")
    found: dict[str, list[Mapping[str, Any]]] = {}
    try:
        with Device.open(options.device) as device, logged():
            for batch in options.batch:
                config = MODELS[options.model](batch)
                with (
                    Engine(config, device=device, precision=options.precision, data=random_rows(config)) as engine,
                    Arena(device, "log", 8 * (3 * EVENTS + 1)) as log,
                ):
                    rows = timeline(engine, log)
                found[str(batch)] = [asdict(row) for row in rows]
                if not options.json:
                    print(f"batch {batch}\n{table(rows)}\n", flush=True)
    except DeviceNotFound as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
