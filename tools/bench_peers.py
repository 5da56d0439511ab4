"""Time the same training step in PyTorch and JAX: one process per peer, golden files first.

    python tools/bench_peers.py --device cuda --precision tf32 --batch 64 256 1024 4096 --output peers.json

Prints a table and writes the rows {peer, batch, precision, us_per_step, host_us, setup_s, memory_mib}. A peer that
fails a golden file is not timed. `tools/bench_step.py --peers peers.json` sets our rows beside these,
`tools/gpu_report.py --peers peers.json` puts them into the report.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
BATCHES = (64, 256, 1024, 4096)
#: The model of tools/bench_step.py that the peers compute: the default configuration, everything on.
MODEL = "step"


@dataclass(frozen=True)
class Peer:
    """A module of tools/peers, its variant, and the golden files that it is checked with before it is timed."""

    module: str
    variant: str
    files: tuple[str, ...]


_ALL = tuple(sorted(path.stem.removeprefix("golden_") for path in GOLDEN.glob("golden_*.npz")))
#: Every file is one more compilation of the whole step, a minute or two where torch.compile does it.
PEERS = {
    "torch-eager": Peer("torch_step", "eager", _ALL),
    "torch-captured": Peer("torch_step", "captured", _ALL),
    "torch-compiled": Peer("torch_step", "compiled", ("full",)),
    "jax-flat": Peer("jax_step", "flat", ("edges", "full", "skip")),
    "jax-tree": Peer("jax_step", "tree", ("full",)),
}


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
) -> list[dict[str, Any]]:
    """Rows of one peer, from a process of its own: frameworks neither share a device's memory nor warm each other up.

    Raises:
        PeerError: the peer does not pass its golden files or could not run; its output, printed above, says why.
    """
    peer = PEERS[name]
    paths = [str(GOLDEN / f"golden_{file}.npz") for file in (files or peer.files)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        command = [python, "-m", f"tools.peers.{peer.module}", "--variant", peer.variant, "--device", device]
        command += ["--precision", precision, "--check", *paths, "--time", *map(str, batches)]
        command += ["--output", str(output), *arguments]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status or not output.is_file():
            raise PeerError(f"{name} ended with status {status}; its output above says why")
        rows: list[dict[str, Any]] = json.loads(output.read_text(encoding="utf-8"))
        return rows


def peers_of(rows: Sequence[Mapping[str, Any]], batch: int, precision: str) -> dict[str, float]:
    """µs per step by peer, of one batch size and precision; a peer measured twice counts with its faster time."""
    found: dict[str, float] = {}
    for row in rows:
        if row["batch"] == batch and row["precision"] == precision:
            found[row["peer"]] = min(row["us_per_step"], found.get(row["peer"], row["us_per_step"]))
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
    for row in sorted(rows, key=lambda row: (row["precision"], row["batch"], row["us_per_step"])):
        best = min(peers_of(rows, row["batch"], row["precision"]).values()) == row["us_per_step"]
        cells = " ".join(f"{'-' if row.get(column) is None else row[column]:>15}" for column in columns)
        lines.append(cells + (" <- best" if best else ""))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the training step in PyTorch and JAX.")
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=list(PEERS), help="default: all")
    parser.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    parser.add_argument("--precision", choices=("fp32", "tf32"), default="tf32", help="default: %(default)s")
    parser.add_argument("--files", nargs="+", choices=_ALL, help="golden files to pass (default: by peer)")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the frameworks")
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
