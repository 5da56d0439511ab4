"""The cache of compiled kernels."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from fxengine.driver import DiskCache, FxError, cache_root


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache")


def _one(path: Path) -> None:
    path.write_bytes(b"1")


def _never(_: Path) -> None:
    raise AssertionError("built again")


def test_builds_once(cache: DiskCache):
    path = cache.get_or_build(["a", b"b"], ".bin", _one)
    assert path.read_bytes() == b"1" and path.suffix == ".bin"
    assert cache.get_or_build(["a", b"b"], ".bin", _never) == path


def test_every_part_counts(cache: DiskCache):
    keys = [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["ab", "c", ""]]
    assert len({cache.path(key, ".x") for key in keys}) == len(keys)
    assert cache.path(["a"], ".x") != cache.path(["a"], ".y")


def test_text_and_bytes_are_one(cache: DiskCache):
    assert cache.path(["ä"], ".x") == cache.path(["ä".encode()], ".x")


def test_failed_build_leaves_nothing(cache: DiskCache):
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        (path.parent / "further.o").write_bytes(b"")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_build(["k"], ".bin", fail)
    assert [p for p in cache.folder.rglob("*") if p.is_file()] == []
    assert cache.get_or_build(["k"], ".bin", lambda p: p.touch()).is_file()
    assert list(cache.folder.rglob("build-*")) == []


def test_build_that_writes_nothing(cache: DiskCache):
    with pytest.raises(FxError, match="wrote nothing"):
        cache.get_or_build(["k"], ".bin", lambda _: None)


def test_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(FxError, match="FXENGINE_CACHE"):
        DiskCache(tmp_path / "file" / "cache").get_or_build(["k"], ".bin", lambda p: p.touch())


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FXENGINE_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert DiskCache("cubin").folder == tmp_path / "own" / "cubin"
    monkeypatch.delenv("FXENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "fxengine"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "fxengine"


def _build(folder: Path) -> bytes:
    content = bytes(range(256)) * 4096
    return DiskCache(folder).get_or_build(["shared"], ".bin", lambda p: p.write_bytes(content) and None).read_bytes()


def test_many_processes(tmp_path: Path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(_build, [tmp_path / "cache"] * 8)
    assert set(results) == {bytes(range(256)) * 4096}
    assert len([p for p in (tmp_path / "cache").rglob("*") if p.is_file()]) == 1
