"""Cache of compiled kernels on disk, shared by all processes of a user."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fxengine.driver.errors import FxError

__all__ = ["SCHEMA", "DiskCache", "cache_root"]

SCHEMA = 1
"""Raised when the meaning of a key or the content of a file changes: older entries are then never read."""


def cache_root() -> Path:
    """$FXENGINE_CACHE, else $XDG_CACHE_HOME/fxengine, else ~/.cache/fxengine; not created here."""
    chosen = os.environ.get("FXENGINE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says that a relative path is to be ignored.
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "fxengine"


class DiskCache:
    """Files named by a hash over everything that went into them.

    `folder` is a subfolder of `cache_root()` ("cubin"), or an absolute path. Entries are written under a
    temporary name and moved into place: processes that build the same entry at once never see half a file.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @property
    def folder(self) -> Path:
        """The absolute folder (follows the environment, so that a test may redirect it)."""
        return self._folder if self._folder.is_absolute() else cache_root() / self._folder

    def path(self, key_parts: Sequence[str | bytes], suffix: str) -> Path:
        """Where the entry of this key lies, whether it exists or not."""
        digest = hashlib.sha256(f"schema {SCHEMA}\0{suffix}\0{len(key_parts)}".encode())
        for part in key_parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little"))  # so that ("ab", "c") and ("a", "bc") differ
            digest.update(data)
        name = digest.hexdigest()
        return self.folder / name[:2] / (name[2:] + suffix)

    def get_or_build(self, key_parts: Sequence[str | bytes], suffix: str, build: Callable[[Path], None]) -> Path:
        """The file of this key; where there is none, `build(path)` writes it first.

        `build` gets a path that does not exist and must create it. What it raises passes through and leaves
        nothing behind. Raises FxError where the folder cannot be written or `build` wrote nothing.
        """
        final = self.path(key_parts, suffix)
        if final.is_file():
            return final
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix="build-", dir=final.parent))
        except OSError as error:
            raise FxError(
                f"the cache folder {self.folder} cannot be written: {error}. Set FXENGINE_CACHE to a folder that can."
            ) from error
        # A folder of its own for every build: compilers drop further files beside their output.
        temporary = scratch / f"entry{suffix}"
        try:
            build(temporary)
            if not temporary.is_file():
                raise FxError(f"the build of a {suffix} file for {self.folder} wrote nothing to {temporary}")
            os.replace(temporary, final)
        finally:
            for leftover in scratch.iterdir():
                leftover.unlink(missing_ok=True)
            scratch.rmdir()
        return final
