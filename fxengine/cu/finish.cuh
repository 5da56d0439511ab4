// Layers that are finished by the kernel that makes the last columns of their input. The first columns are there
// earlier, and so is their product with the bias, y. With the others, z [rows, columns], and their weights w:
//   y[row, j] = relu(y[row, j] + sum_c z[row, c] w[j, c])  in place, in float32, c upwards
// A tile has 8 rows, a warp each. Weights are on their way to shared memory before fx_wait() (Family.early), rows
// beside the kernel's own loads.
#pragma once
#include "copy_async.cuh"

// Shared memory for all layers of a record (FLOATS of ops/finish.py).
constexpr int FINISH_FLOATS = 4608;

// What a layer takes of it: its weights, the columns one after another, and the rows.
__device__ __forceinline__ int finish_floats(int hidden, int columns) { return (columns + 8) * hidden; }

// Begins to copy the weights, together with the other threads of the block.
__device__ __forceinline__ void finish_weights(float* shared, const float* w, int ld_w, int hidden, int columns) {
    const FxShared to = fx_shared(shared);
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x); j < hidden; j += 256) {
        const float* from = fx_global(w) + static_cast<long long>(j) * ld_w;
#pragma unroll 1
        for (int c = 0; c < columns; ++c) fx_copy_word(to + 4 * (c * hidden + j), from + c, true);
    }
    fx_copy_commit();
}

// Begins to copy the warp's row.
__device__ __forceinline__ void finish_begin(float* shared, const float* y, int hidden, int columns) {
    const FxShared to = fx_shared(shared + (columns + static_cast<int>(threadIdx.x >> 5)) * hidden);
#pragma unroll 1
    for (int j = static_cast<int>(threadIdx.x & 31u); j < hidden; j += 32) {
        fx_copy_word(to + 4 * j, fx_global(y) + j, true);
    }
    fx_copy_commit();
}

// Waits for all copies of the block.
__device__ __forceinline__ void finish_wait() {
    fx_copy_wait<0>();
    __syncthreads();
}

// Finishes the warp's row, four numbers of a lane side by side. `z`: its last columns, the same in every lane.
__device__ __forceinline__ void finish_row(const float* shared, float* y, int hidden, int columns, const float* z) {
    const float* row = shared + (columns + static_cast<int>(threadIdx.x >> 5)) * hidden;
#pragma unroll 1
    for (int first = static_cast<int>(threadIdx.x & 31u); first < hidden; first += 128) {
        const int left = hidden - first;
        const float* w = shared + first;
        float sum[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] = 32 * i < left ? row[first + 32 * i] : 0.0f;
#pragma unroll 1
        for (int c = 0; c < columns; ++c, w += hidden) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = fmaf(z[c], 32 * i < left ? w[32 * i] : 0.0f, sum[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (32 * i < left) fx_global(y)[first + 32 * i] = fx_activate(FX_RELU, sum[i]);
        }
    }
}
