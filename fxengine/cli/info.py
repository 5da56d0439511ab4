"""`fxengine info`: what there is to run on, and with which versions."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fxengine.cli.options import add_device, add_json, print_json, report_stream, size, table


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "info",
        help="show device, driver, NVRTC, cache, compiler and versions",
        description="Show what fxengine finds on this machine. Fails only if a device named with --device is missing.",
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(command=_info)


def _info(arguments: argparse.Namespace) -> int:
    from fxengine.driver.cache import cache_root
    from fxengine.driver.versions import versions

    found = versions()
    cache = cache_root()
    files, nbytes = _usage(cache)
    device = _device(arguments.device)
    values = {
        "device": device,
        "driver": {"version": found.pop("driver"), "cuda": found.pop("driver-cuda"), "gpu": found.pop("gpu")},
        "nvrtc": found.pop("nvrtc"),
        "cache": {"folder": str(cache), "files": files, "bytes": nbytes},
        "compiler": found.pop("compiler"),
        "versions": {**found, **_demo_versions()},
    }
    print(_describe(values), file=report_stream(arguments.json))
    if arguments.json:
        sys.stderr.flush()
        print_json(values)
    return 0


def _device(spec: str) -> dict[str, Any]:
    """What `--device` opens; with `auto`, why nothing could be opened is part of the answer, not an error."""
    from fxengine.driver import Device
    from fxengine.driver.errors import FxError

    try:
        device = Device.open(spec)
    except FxError as error:
        if spec != "auto":
            raise
        return {"label": None, "error": " ".join(str(error).split())}
    with device:
        facts = device.properties
        values: dict[str, Any] = {"label": device.label, "kind": device.kind, "name": device.name, "arch": device.arch}
        if device.kind == "cuda":
            values.update(
                compute_capability=".".join(map(str, facts.compute_capability)),
                sm_count=facts.sm_count,
                memory_bytes=facts.total_memory,
                l2_bytes=facts.l2_bytes,
                shared_memory_per_block_bytes=facts.shared_memory_per_block_optin,
            )
        return values


def _usage(folder: Path) -> tuple[int, int]:
    """Number and bytes of the files under a folder that other processes may be writing to."""
    files = nbytes = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        try:
            if path.is_file():
                files, nbytes = files + 1, nbytes + path.stat().st_size
        except OSError:  # replaced or removed meanwhile
            continue
    return files, nbytes


def _demo_versions() -> dict[str, str | None]:
    from importlib import metadata

    found: dict[str, str | None] = {}
    for package in ("safetensors", "pandas", "matplotlib", "rich", "gym-anytrading"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _describe(values: dict[str, Any]) -> str:
    device, driver, cache = values["device"], values["driver"], values["cache"]
    rows: dict[str, object] = {}
    if device["label"] is None:
        rows["device"] = f"none: {device['error']}"
    elif device["kind"] == "sim":
        rows["device"] = "sim (simulated: the same kernels, compiled for this CPU)"
    else:
        rows["device"] = (
            f"{device['label']} {device['name']}, {device['arch']}, {device['sm_count']} multiprocessors, "
            f"{size(device['memory_bytes'])}"
        )
    rows["driver"] = (
        f"{driver['version'] or '?'}, up to CUDA {driver['cuda']}" if driver["cuda"] else "no NVIDIA driver found"
    )
    rows["nvrtc"] = values["nvrtc"] or "not found"
    rows["compiler"] = values["compiler"] or "none (the simulated device needs a C++ compiler)"
    rows["cache"] = f"{cache['folder']} ({cache['files']} files, {size(cache['bytes'])})"
    rows.update({name: version or "not installed" for name, version in values["versions"].items()})
    return table(rows)
