// L2 norms of slices of a gradient: a slice is several tensors, its norm one number.
//
// fx_slice_squares   : partials[tile] = sum of squares of 4096 elements of one tensor, in double. One record per tensor.
// fx_slice_norm: out = scale * sqrt(sum of n partials), the partials of all tensors of a slice side by side; a scale of
//                0 gives an exact 0, no scale counts as 1. One block per record. Fixed order throughout.
#include "fx.cuh"

struct SliceSquares {
    int first_tile;
    int tiles;
    const float* x;    // [length]
    double* partials;  // [tiles]
    long long length;
};

struct SliceNorm {
    int first_tile;
    int tiles;
    const double* partials;  // [n]
    const float* scale;      // one float, or null
    float* out;              // one float
    int n;
};

extern "C" __global__ void __launch_bounds__(256) fx_slice_squares(const SliceSquares* table, int count) {
    __shared__ double scratch[8];
    int tile;
    const SliceSquares record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const long long start = static_cast<long long>(tile) * 4096;
    double sum = 0.0;
#pragma unroll 4
    for (int k = 0; k < 16; ++k) {
        const long long i = start + 256 * k + static_cast<int>(threadIdx.x);
        const double x = i < record.length ? static_cast<double>(record.x[i]) : 0.0;
        sum += x * x;
    }
    sum = fx_block_sum(sum, scratch);
    if (threadIdx.x == 0) record.partials[tile] = sum;
}

extern "C" __global__ void __launch_bounds__(256) fx_slice_norm(const SliceNorm* table, int count) {
    __shared__ double scratch[8];
    int tile;
    const SliceNorm record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    double sum = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < record.n; i += 256) sum += record.partials[i];
    sum = fx_block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const float norm = static_cast<float>(sqrt(sum));
        *record.out = record.scale != nullptr ? fx_scaled(*record.scale, norm) : norm;
    }
}
