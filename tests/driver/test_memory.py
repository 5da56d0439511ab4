"""Arenas, buffers and mapped memory."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from fxengine.driver import Arena, ClosedError, CudaError, Device, FxError, MappedBuffer, StridedBuffer
from tests.driver.kernels import recorded


def test_places_are_aligned_and_apart(device: Device):
    with Arena(device, "a", Arena.required([4, 400, 0, 12])) as arena:
        one = arena.place("one", (), np.float32)
        two = arena.place("two", (10, 10), np.float32)
        none = arena.place("none", (0, 3), np.float32)
        three = arena.place("three", (3,), np.int32)
        assert one.nbytes == 4 and two.shape == (10, 10) and none.nbytes == 0
        offsets = [b.address - arena.address for b in (one, two, three)]
        assert offsets == [0, 256, 768]
        assert list(arena.buffers) == ["one", "two", "none", "three"]
        assert none.read().shape == (0, 3)
        none.write(np.zeros((0, 3), np.float32))


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u8", "u1", "f2"])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_written_is_read(device: Device, dtype: str, ordered: bool):
    values = np.arange(77).reshape(7, 11).astype(dtype)
    with Arena(device, "a", 4096) as arena, device.stream() as stream:
        chosen = stream if ordered else None
        buffer = arena.place("x", (7, 11), dtype)
        buffer.write(np.asfortranarray(values), stream=chosen)
        back = buffer.read(stream=chosen)
        assert back.dtype == values.dtype
        np.testing.assert_array_equal(back, values)


def test_write_checks_both_sides(device: Device):
    with Arena(device, "a", 4096) as arena:
        buffer = arena.place("weights", (2, 3), np.float32)
        with pytest.raises(FxError, match=r"'weights' is float32 \[2, 3\].*is float64 \[2, 3\]"):
            buffer.write(np.zeros((2, 3)))
        with pytest.raises(FxError, match=r"'weights' is float32 \[2, 3\].*is float32 \[3, 2\]"):
            buffer.write(np.zeros((3, 2), np.float32))


def test_fill_and_copy(device: Device):
    with Arena(device, "a", 4096) as arena, device.stream() as stream:
        a, b = arena.place("a", (33,), np.uint32), arena.place("b", (33,), np.float32)
        a.fill_u32(0x3F800000)
        b.fill_u32(0)
        b.copy_from(a, stream=stream)
        assert (b.read(stream=stream) == 1.0).all()
        a.fill_u32(0xFFFFFFFF, stream=stream)
        stream.synchronize()
        assert (a.read() == 0xFFFFFFFF).all()
        with pytest.raises(FxError, match="no unsigned 32-bit"):
            a.fill_u32(-1)
        with pytest.raises(FxError, match="not a whole number"):
            arena.place("odd", (3,), np.uint8).fill_u32(0)
        with pytest.raises(FxError, match="'a' has 132 bytes; 'odd'"):
            a.copy_from(arena.buffers["odd"], stream=stream)


def test_views(device: Device):
    with Arena(device, "a", 4096) as arena:
        buffer = arena.place("x", (4, 4), np.float32)
        buffer.write(np.arange(16, dtype=np.float32).reshape(4, 4))
        row = buffer.view(16, (4,), np.float32, "row 1")
        np.testing.assert_array_equal(row.read(), [4, 5, 6, 7])
        assert row.name == "row 1" and row.view(8, (1,), np.float32).read()[0] == 6
        with pytest.raises(FxError, match="reaches out of buffer 'x' of 64 bytes"):
            buffer.view(16, (13,), np.float32)
        with pytest.raises(FxError, match="reaches out"):
            buffer.view(-4, (1,), np.float32)
        with pytest.raises(FxError, match="not aligned for float32"):
            buffer.view(2, (1,), np.float32)


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_with_gaps_between_them(device: Device, ordered: bool):
    with Arena(device, "a", 4096) as arena, device.stream() as stream:
        chosen = stream if ordered else None
        whole = arena.place("w", (4, 8), np.float32)
        whole.write(np.arange(32, dtype=np.float32).reshape(4, 8))
        part = StridedBuffer(whole.view(8, (2 * 8 + 5,), np.float32), (3, 5), 8)  # rows 0 to 2, columns 2 to 6
        assert part.shape == (3, 5) and part.nbytes == 60
        expected = np.arange(32, dtype=np.float32).reshape(4, 8)
        np.testing.assert_array_equal(part.read(stream=chosen), expected[:3, 2:7])
        part.write(np.full((3, 5), -1, np.float32), stream=chosen)
        expected[:3, 2:7] = -1
        np.testing.assert_array_equal(whole.read(), expected)
        with pytest.raises(FxError, match=r"'w' is float32 \[3, 5\].*is float32 \[3, 8\]"):
            part.write(np.zeros((3, 8), np.float32))
        for refused in (
            lambda: part.address,
            lambda: part.view(0, (5,), np.float32),
            lambda: part.fill_u32(0),
            lambda: part.copy_from(part, stream=stream),
            lambda: arena.place("y", (15,), np.float32).copy_from(part, stream=stream),
        ):
            with pytest.raises(FxError, match="gaps between its rows"):
                refused()
        with pytest.raises(FxError, match="3 rows of 5 elements, 9 apart, do not fill"):
            StridedBuffer(whole.view(8, (2 * 8 + 5,), np.float32), (3, 5), 9)


def test_arena_refuses(device: Device):
    with pytest.raises(FxError, match="0 bytes requested"):
        Arena(device, "none", 0)
    with Arena(device, "small", 300) as arena:
        arena.place("a", (10,), np.float32)
        with pytest.raises(FxError, match="already has a buffer 'a'"):
            arena.place("a", (1,), np.float32)
        with pytest.raises(FxError, match="'small' of 300 bytes is full: 40 used, buffer 'b'"):
            arena.place("b", (20,), np.float32)
        with pytest.raises(FxError, match="without guard=True"):
            arena.check_guards()


def test_out_of_memory(device: Device):
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        Arena(device, "huge", 1 << 56)
    assert "smaller batch" in caught.value.hint


def test_use_after_close(device: Device):
    arena = Arena(device, "params", 1024)
    buffer = arena.place("w", (4,), np.float32)
    arena.close()
    arena.close()
    uses = (buffer.read, lambda: buffer.address, lambda: arena.address, lambda: arena.place("x", (), "f4"))
    for use in uses:
        with pytest.raises(ClosedError, match="arena 'params' is closed"):
            use()


@pytest.mark.parametrize("guard_byte", [0xFD, 0])
def test_guards_name_the_neighbours(device: Device, guard_byte: int):
    sizes = [40, 8, 100]
    with Arena(device, "g", Arena.required(sizes, guard=True), guard=True, guard_byte=guard_byte) as arena:
        for name, size in zip("abc", sizes, strict=True):
            arena.place(name, (size,), np.uint8).write(np.full(size, 7, np.uint8))
        arena.check_guards()
        whole = arena.whole

        def poke(address: int) -> None:
            content = whole.read().view(np.uint8)
            content[address - arena.address] = 1
            whole.write(content.view(np.uint32))

        def message() -> str:
            with pytest.raises(FxError) as caught:
                arena.check_guards()
            return str(caught.value)

        clean = whole.read()
        b = arena.buffers["b"]
        poke(b.address + 8)
        assert "1 guard byte(s) between b and c were overwritten, first 0 bytes behind b" in message()
        whole.write(clean)
        poke(b.address - 1)
        assert "between a and b" in message() and "last 1 before b" in message()
        whole.write(clean)
        poke(arena.address)
        assert "between the start of the arena and a" in message()
        whole.write(clean)
        poke(arena.address + arena.nbytes - 1)
        assert "between c and the end of the arena" in message()
        whole.write(clean)
        arena.check_guards()


def test_mapped_memory_is_shared(device: Device):
    with MappedBuffer(device, (4, 8), np.float32, "signals") as mapped, device.stream() as stream:
        assert (mapped.array == 0).all() and mapped.array.shape == (4, 8)
        mapped.array[1] = 3.0
        np.testing.assert_array_equal(mapped.buffer.read(), mapped.array)
        with Arena(device, "a", 1024) as arena:
            target = arena.place("x", (8,), np.float32)
            target.copy_from(mapped.buffer.view(32, (8,), np.float32), stream=stream)
            assert (target.read(stream=stream) == 3.0).all()
        mapped.buffer.fill_u32(0, stream=stream)
        stream.synchronize()
        assert (mapped.array == 0).all()
    with pytest.raises(ClosedError, match="mapped buffer 'signals' is closed"):
        _ = mapped.array
    with pytest.raises(ClosedError, match="mapped buffer 'signals' is closed"):
        _ = mapped.address
    mapped.close()
    with pytest.raises(FxError, match="has no elements"):
        MappedBuffer(device, (0,), np.float32, "none")


@pytest.mark.sim
def test_views_keep_mapped_memory():
    device = Device.open("sim")
    mapped = MappedBuffer(device, (1000,), np.float32, "row")
    view = mapped.array[10:20]
    device.close()
    view[...] = 5.0
    assert view.sum() == 50.0


def test_mapped_memory_is_freed_with_the_last_view(monkeypatch: pytest.MonkeyPatch):
    device, raw = recorded()
    kept = (np.ctypeslib.ctypes.c_ubyte * 4096)()
    address = np.ctypeslib.ctypes.addressof(kept)
    monkeypatch.setattr(raw, "cuMemHostAlloc", lambda n, flags: (device.driver.CUresult.CUDA_SUCCESS, address), False)
    mapped = MappedBuffer(device, (16,), np.float32, "row")
    view = mapped.array
    mapped.close()
    with device.activate():
        assert "cuMemFreeHost" not in raw.names()
    del view
    gc.collect()
    with device.activate():
        assert "cuMemFreeHost" in raw.names()
