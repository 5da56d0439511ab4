"""Time the same training step in PyTorch and JAX: one process per peer, golden files first.

    python tools/bench_peers.py --device cuda --precision tf32 --batch 64 256 1024 4096 --output peers.json

Prints a table and writes the rows {peer, batch, precision, us_per_step, host_us, setup_s, memory_mib}. A peer that
fails a golden file is not timed. With --limit-s a peer is stopped after so many seconds; the rows that it owes then say
so in `note` and have no times. `tools/bench_step.py --peers peers.json` sets our rows beside these,
`tools/gpu_report.py --peers peers.json` puts them into the report.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
BATCHES = (64, 256, 1024, 4096)
#: The model of tools/bench_step.py that the peers compute: the default configuration, everything on.
MODEL = "step"


@dataclass(frozen=True)
class Peer:
    """A way to compute the step in another framework.

    Attributes:
        module: of tools/peers.
        variant: of the module.
        files: golden files that it is checked with before it is timed.
        note: what to know of its times.
        xla_flags: for JAX, unless XLA_FLAGS is set already.
    """

    module: str
    variant: str
    files: tuple[str, ...]
    note: str = ""
    xla_flags: str = ""


_ALL = tuple(sorted(path.stem.removeprefix("golden_") for path in GOLDEN.glob("golden_*.npz")))
#: Every file is one more compilation of the whole step where there is one.
PEERS = {
    "torch-eager": Peer("torch_step", "eager", _ALL),
    "torch-captured": Peer("torch_step", "captured", _ALL),
    "torch-compiled": Peer("torch_step", "compiled", ("full",)),
    "jax": Peer("jax_step", "step", ("edges", "full")),
    "jax-scan": Peer("jax_step", "scan", ("full",), "eight steps per call"),
}
#: Files whose batch is so thin that a ReLU which rounding flips moves a gradient beyond the limits: not for tf32. (The
#: engine passes them, because it computes the networks in question in float32.)
THIN = ("cold_odd",)
#: Note of a row that a peer owes.
NOT_MEASURED = "not measured (limit)"


class PeerError(RuntimeError):
    """A peer failed its golden files, or its process ended without rows."""


def run_peer(
    name: str,
    *,
    batches: Sequence[int],
    device: str,
    precision: str,
    python: str = sys.executable,
    files: Sequence[str] | None = None,
    arguments: Sequence[str] = (),
    limit_s: float | None = None,
) -> list[dict[str, Any]]:
    """Rows of one peer, from a process of its own: frameworks neither share a device's memory nor warm each other up.

    Args:
        name: a key of `PEERS`.
        batches: batch sizes.
        device: "cpu" or "cuda".
        precision: of products.
        python: interpreter that has the framework.
        files: golden files instead of the peer's own.
        arguments: further arguments of its module.
        limit_s: stop it after so many seconds; batch sizes that it owes then get a row without times.

    Raises:
        PeerError: the peer does not pass its golden files or could not run; its output, printed above, says why.
    """
    peer = PEERS[name]
    chosen = files or [file for file in peer.files if precision == "fp32" or file not in THIN]
    paths = [str(GOLDEN / f"golden_{file}.npz") for file in chosen]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [python, "-m", f"tools.peers.{peer.module}", "--variant", peer.variant, "--device", device]
        command += ["--precision", precision, "--check", *paths, "--time", *map(str, batches)]
        command += ["--output", str(output), *arguments]
        environment = dict(os.environ)
        if peer.xla_flags:
            environment.setdefault("XLA_FLAGS", peer.xla_flags)
        status = group_status(command, environment, limit_s)
        if status or (status == 0 and not output.is_file()):
            raise PeerError(f"{name} ended with status {status}; its output above says why")
        rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else []
    measured = {row["batch"] for row in rows}
    owed = {"peer": name, "precision": precision, "us_per_step": None, "host_us": None, "note": NOT_MEASURED}
    noted = [row | ({"note": peer.note} if peer.note else {}) for row in rows]
    return noted + [{**owed, "batch": batch} for batch in batches if batch not in measured]


def group_status(command: Sequence[str], environment: Mapping[str, str], limit_s: float | None) -> int | None:
    """Exit status of a process; None: it was stopped at the limit, with all that it started."""
    process = start_group(command, environment)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop_group(process)


def start_group(
    command: Sequence[str], environment: Mapping[str, str], output: IO[str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that leads a group of its own, so that it can be stopped with all that it starts."""
    return subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=output, stderr=output, start_new_session=True
    )


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def peers_of(rows: Sequence[Mapping[str, Any]], batch: int, precision: str) -> dict[str, float]:
    """µs per step by peer, of one batch size and precision; a peer measured twice counts with its faster time."""
    found: dict[str, float] = {}
    for row in rows:
        us = row["us_per_step"]
        if us is not None and row["batch"] == batch and row["precision"] == precision:
            found[row["peer"]] = min(us, found.get(row["peer"], us))
    return found


def load_peers(path: Path) -> list[dict[str, Any]]:
    """Rows of a file that this tool wrote.

    Raises:
        ValueError: the file is not one.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))
    wanted = {"peer", "batch", "precision", "us_per_step", "host_us"}
    if not isinstance(rows, list) or any(not wanted <= set(row) for row in rows):
        raise ValueError(f"{path}: expected a list of rows with {sorted(wanted)}, as tools/bench_peers.py writes it")
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text, the fastest of each batch size marked."""
    columns = ("peer", "batch", "precision", "us_per_step", "host_us", "launches", "setup_s", "memory_mib")
    lines = [" ".join(f"{column:>15}" for column in columns)]
    order = sorted(rows, key=lambda row: (row["precision"], row["batch"], row["us_per_step"] or float("inf")))
    for row in order:
        best = row["us_per_step"] == min(peers_of(rows, row["batch"], row["precision"]).values(), default=-1.0)
        cells = " ".join(f"{'-' if row.get(column) is None else row[column]:>15}" for column in columns)
        note = f"  {row['note']}" if row.get("note") else ""
        lines.append(cells + (" <- best" if best else "") + note)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the training step in PyTorch and JAX.")
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=list(PEERS), help="default: all")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    parser.add_argument("--precision", choices=("fp32", "tf32"), default="tf32", help="default: %(default)s")
    parser.add_argument("--files", nargs="+", choices=_ALL, help="golden files to pass (default: by peer)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the frameworks")
    parser.add_argument("--limit-s", type=float, metavar="S", help="stop a peer after so many seconds")
    parser.add_argument("--output", type=Path, help="write the rows as JSON, after every peer")
    options, further = parser.parse_known_args(argv)

    rows: list[dict[str, Any]] = []
    failed = []
    for name in options.peers:
        start = time.perf_counter()
        try:
            rows += run_peer(
                name,
                batches=options.batch,
                device=options.device,
                precision=options.precision,
                python=options.python,
                files=options.files,
                arguments=further,
                limit_s=options.limit_s,
            )
        except PeerError as error:
            print(f"error: {error}", file=sys.stderr)
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        # After every peer: one that fails or is stopped must not take the others' times with it.
        if options.output:
            options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
