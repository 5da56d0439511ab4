"""Where a report comes from: digest of the sources, device, versions.

    python tools/digest.py

prints the digest of fxengine/.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxengine.driver import Device

ROOT = Path(__file__).resolve().parents[1]
# So that every tool runs from a checkout that is not installed.
sys.path.insert(0, str(ROOT))

#: Files that a run, a build or an editor leaves behind: never part of the sources.
_GENERATED = (".pyc", ".pyo", ".so", "~")


def source_files(folder: Path) -> list[Path]:
    """Every source file under `folder`, in order of its relative path: all but caches, hidden and generated files."""
    files = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        if any(part.startswith(".") or part == "__pycache__" for part in parts):
            continue
        if path.is_file() and not path.name.endswith(_GENERATED):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def source_digest(folder: Path = ROOT / "fxengine") -> str:
    """SHA-256 over relative paths and contents of the sources: equal exactly when the trees are, wherever they lie.

    Raises:
        FileNotFoundError: the folder is missing or holds no source.
    """
    files = source_files(folder)
    if not files:
        raise FileNotFoundError(f"no sources under {folder}; expected the package fxengine")
    digest = hashlib.sha256()
    for path in files:
        for part in (path.relative_to(folder).as_posix().encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little"))  # so that moving bytes from name to content shows
            digest.update(part)
    return digest.hexdigest()


def origin(device: Device) -> dict[str, Any]:
    """What a report says of the place it was made at: `device`, `driver` and `versions`."""
    from fxengine.driver.versions import versions

    limits = device.properties
    found = versions()
    driver = found.pop("driver", None)
    found.pop("gpu", None)  # the first GPU, not necessarily the open one
    return {
        "device": {
            "name": device.name,
            "kind": device.kind,
            "arch": device.arch,
            "sm_count": limits.sm_count,
            "total_memory": limits.total_memory,
        },
        "driver": driver if device.kind == "cuda" else None,
        "versions": found,
    }


if __name__ == "__main__":
    print(source_digest())
