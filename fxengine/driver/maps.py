"""Tensor maps: how a matrix lies in memory, for the copy engine of an sm_90 or newer (CUDA driver API, "Tensor Map").

A kernel is given the address of a map in device memory and asks for boxes of the matrix by their first row and column
(`bulk_copy.cuh`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from cuda.bindings import driver as cu
from numpy.typing import NDArray

from fxengine.driver.api import Driver
from fxengine.driver.errors import FxError
from fxengine.driver.memory import Arena, Buffer

if TYPE_CHECKING:
    from fxengine.driver.device import Device

__all__ = ["BOX_COLUMNS", "MAP_BYTES", "TensorMaps", "tensor_map"]

#: Bytes of a map; its address is a multiple of 64.
MAP_BYTES = 128
#: Columns of a box: rows of 128 bytes, whose chunks of 16 the copy engine exchanges as warpgroups want them.
BOX_COLUMNS = 32
_MOST_ROWS = 256
_QUAD_BYTES = 16
_PAGE = 512  # maps


def tensor_map(
    driver: Driver, address: int, shape: tuple[int, int], *, stride: int, box_rows: int, rounded: bool = True
) -> NDArray[np.uint64]:
    """The map of a float32 matrix, uint64 [16], to be copied to device memory.

    What lies outside of the matrix arrives as 0.

    Args:
        driver: of the device.
        address: of the first element.
        shape: rows and columns.
        stride: bytes from one row to the next.
        box_rows: rows of a box, 1 to 256.
        rounded: boxes are rounded to tf32 on their way, to nearest, ties to even.

    Raises:
        FxError: address or stride are no multiples of 16, or there is no such box.
        CudaError: the driver refuses.
    """
    if address % _QUAD_BYTES or stride % _QUAD_BYTES:
        raise FxError(
            f"a tensor map needs rows that start at multiples of {_QUAD_BYTES} bytes, "
            f"got address {address:#x} and {stride} bytes from one row to the next; pad the rows"
        )
    if not 1 <= box_rows <= _MOST_ROWS:
        raise FxError(f"a box of {box_rows} rows, expected 1 to {_MOST_ROWS}")
    rows, columns = shape
    kinds = driver.CUtensorMapDataType
    encoded = driver.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 if rounded else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        2,
        address,
        [cu.cuuint64_t(columns), cu.cuuint64_t(rows)],
        [cu.cuuint64_t(stride)],
        [cu.cuuint32_t(BOX_COLUMNS), cu.cuuint32_t(box_rows)],
        [cu.cuuint32_t(1), cu.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return np.array([int(word) for word in encoded.opaque], np.uint64)


class TensorMaps:
    """The maps of a device in its memory, each once, in a place that is never written again while the device is open.

    A multiprocessor keeps maps that it has used, and learns that one was written anew only from a fence in each block,
    which takes longer than the copies. What never changes needs none.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._places: dict[bytes, int] = {}
        self._pages: list[Buffer] = []  # all of them: one that nobody holds would be freed under its maps
        self._left = 0  # places in the last one

    def place(self, maps: Sequence[NDArray[np.uint64]]) -> list[int]:
        """Device addresses of maps (uint64 [16], from `tensor_map`); those that are new are copied. Waits.

        Raises CudaError (CUDA_ERROR_OUT_OF_MEMORY) where the device is full.
        """
        keys = [words.tobytes() for words in maps]
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._places]
            while new:
                page = self._room()
                first, now = _PAGE - self._left, new[: self._left]
                run = page.view(first * MAP_BYTES, (len(now) * MAP_BYTES,), np.uint8)
                run.write(np.frombuffer(b"".join(now), np.uint8))
                self._places |= {key: run.address + i * MAP_BYTES for i, key in enumerate(now)}
                self._left -= len(now)
                new = new[len(now) :]
            return [self._places[key] for key in keys]

    def _room(self) -> Buffer:
        """The page that has places left."""
        if self._left == 0:
            arena = Arena(self._device, f"tensor maps from {len(self._places)} on", _PAGE * MAP_BYTES)
            self._pages.append(arena.place("maps", (_PAGE * MAP_BYTES,), np.uint8))
            self._left = _PAGE
        return self._pages[-1]
