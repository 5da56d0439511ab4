"""Tensor maps, and the copies of boxes by them: rounding, edges, order in shared memory, refusals."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import driver as cu
from numpy.typing import NDArray

from fxengine.driver import MAP_BYTES, Arena, CudaError, Device, FxError, tensor_map
from fxengine.ops.linear import reference_rounded
from tests.driver.kernels import load

KERNEL = """
#include "bulk_copy.cuh"

extern "C" __global__ void __launch_bounds__(128) fx_copy_boxes(
    const FxTensorMap* map, float* out, int rows, int row, int column) {
    FX_DYN_SHARED(float4, shared);
    float* const box = reinterpret_cast<float*>((reinterpret_cast<u64>(shared) + 1023) & ~1023ull);
    __shared__ u64 barrier;
    if (threadIdx.x == 0) {
        fx_bulk_barrier(&barrier);
        fx_bulk_expect(&barrier, 128 * rows);
        fx_bulk_copy_box(fx_shared(box), map, row, column, &barrier);
    }
    __syncthreads();
    fx_bulk_wait(&barrier, 0);
    for (int i = threadIdx.x; i < 32 * rows; i += 128) {
        const int r = i / 32, c = i % 32;
        out[i] = box[32 * r + (c ^ (r & 7) * 4)];
    }
}
"""


def boxes(
    device: Device,
    folder: Path,
    matrix: NDArray[np.float32],
    columns: int,
    box_rows: int,
    row: int,
    column: int,
    rounded: bool = True,
) -> NDArray[np.float32]:
    """A box of the first `columns` columns of a matrix, as it arrives in shared memory."""
    kernel = load(device, folder, KERNEL).kernel("fx_copy_boxes")
    rows, ld = matrix.shape
    with Arena(device, "boxes", Arena.required([matrix.nbytes, 128 * box_rows])) as arena, device.stream() as stream:
        x = arena.place("x", matrix.shape, np.float32)
        x.write(matrix)
        with device.activate():
            words = tensor_map(
                device.driver, x.address, (rows, columns), stride=4 * ld, box_rows=box_rows, rounded=rounded
            )
        (place,) = device.tensor_maps.place([words])
        out = arena.place("out", (box_rows, 32), np.float32)
        shared = 128 * box_rows + 1024
        kernel.set_dynamic_shared(shared)
        arguments = kernel.bind(place, out, box_rows, row, column)
        kernel.launch(1, 128, arguments, stream=stream, shared=shared)
        return out.read(stream=stream)


@pytest.mark.parametrize(
    ("shape", "columns", "box_rows", "row", "column"),
    [
        ((64, 64), 64, 64, 0, 32),
        ((70, 36), 33, 64, 64, 4),  # beyond the last row and column
        ((3, 4), 1, 8, 0, 0),
        ((300, 40), 39, 256, 40, 8),
        ((9, 8), 7, 1, 8, 4),
    ],
)
def test_boxes_are_rounded_and_end_with_the_matrix(
    tensor_maps: Device, tmp_path: Path, shape: tuple[int, int], columns: int, box_rows: int, row: int, column: int
) -> None:
    matrix = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    bits = matrix.view(np.uint32)
    bits[::3] = bits[::3] & np.uint32(0xFFFFE000) | np.uint32(0x1000)  # ties
    matrix[1, 0], matrix[2, 0] = np.inf, np.nan
    whole = np.zeros((row + box_rows, column + 32))
    inside = whole[: shape[0], :columns]
    inside[...] = reference_rounded(matrix, "tf32", mapped=True)[: len(inside), : inside.shape[1]]
    found = boxes(tensor_maps, tmp_path, matrix, columns, box_rows, row, column)
    kept = (found.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)  # what a product reads of it
    np.testing.assert_array_equal(kept, whole[row:, column:])
    inside[...] = matrix[: len(inside), : inside.shape[1]]
    found = boxes(tensor_maps, tmp_path, matrix, columns, box_rows, row, column, rounded=False)
    np.testing.assert_array_equal(found, whole[row:, column:])


def test_a_map_has_one_place_that_no_other_gets(device: Device) -> None:
    maps = [np.full(16, i, np.uint64) for i in range(1_500)]  # some pages of them
    before = device.tensor_maps.place(maps[:700])
    again = device.tensor_maps.place([*maps[::-1], maps[3]])
    assert again[-2::-1][:700] == before and again[-1] == before[3]
    assert len(set(again)) == len(maps)
    assert all(place % 64 == 0 for place in again)
    gc.collect()  # what nobody holds is freed
    with device.activate():
        for i in (0, 511, 512, 699, 700, 1_499):
            found = np.empty(16, np.uint64)
            device.driver.cuMemcpyDtoH(found.ctypes.data, again[len(maps) - 1 - i], MAP_BYTES)
            np.testing.assert_array_equal(found, maps[i])


def test_what_no_map_describes_is_refused(device: Device) -> None:
    for address, stride in ((0x1004, 64), (0x1000, 68)):
        with pytest.raises(FxError, match="rows that start at multiples of 16 bytes"):
            tensor_map(device.driver, address, (4, 16), stride=stride, box_rows=4)
    for box_rows in (0, 257):
        with pytest.raises(FxError, match=f"a box of {box_rows} rows, expected 1 to 256"):
            tensor_map(device.driver, 0x1000, (4, 16), stride=64, box_rows=box_rows)


def test_the_simulated_device_refuses_other_maps_and_boxes_between_quads(tmp_path: Path) -> None:
    with Device.open("sim") as device, device.activate():
        with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
            tensor_map(device.driver, 0x1000, (0, 16), stride=64, box_rows=4)
        kinds = cu.CUtensorMapDataType
        given = (
            2, 0x1000, [cu.cuuint64_t(16)] * 2, [cu.cuuint64_t(64)], [cu.cuuint32_t(32)] * 2, [cu.cuuint32_t(1)] * 2,
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )  # fmt: skip
        for kind in (kinds.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32):
            device.driver.cuTensorMapEncodeTiled(kind, *given)
        with pytest.raises(CudaError, match="no tensor maps of this kind"):
            device.driver.cuTensorMapEncodeTiled(kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT64, *given)
    with pytest.raises(CudaError, match="between multiples of 16 bytes"), Device.open("sim") as device:
        boxes(device, tmp_path, np.ones((8, 64), np.float32), 64, 8, 0, 2)
