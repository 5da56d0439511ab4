// Sums of squares of a gradient, by the kernels that write it: fx_adam makes norms of them. A record that is asked for
// them has `double* squares`, one for every tile of the gradient; else it is null.
#pragma once
#include "fx.cuh"

// A thread's share: in float where the squares of a run are far from both ends of float's range, else in double. So no
// square is lost that counts, and what is not finite shows.
struct FxSquares {
    float sum = 0.0f;  // at most some hundred runs
    double exact = 0.0;

    template <int W>
    __device__ __forceinline__ void add(const float (&v)[W]) {
        float squares = v[0] * v[0];
#pragma unroll
        for (int e = 1; e < W; ++e) squares += v[e] * v[e];
        if (squares >= 1e-30f && squares <= 1e33f) {
            sum += squares;
            return;
        }
        unsigned bits = 0;
#pragma unroll
        for (int e = 0; e < W; ++e) bits |= __float_as_uint(v[e]);
        if ((bits << 1) == 0) return;  // zeros are many
#pragma unroll
        for (int e = 0; e < W; ++e) exact += static_cast<double>(v[e]) * static_cast<double>(v[e]);
    }

    __device__ __forceinline__ void add(float v) {
        const float run[1] = {v};
        add(run);
    }
};

// Stores the sum over a block of THREADS threads, in fixed order, as squares[tile]; nothing if squares is null. All of
// them call it.
template <int THREADS>
__device__ __forceinline__ void fx_squares_store(double* squares, int tile, const FxSquares& share) {
    __shared__ double parts[THREADS / 32];
    if (squares == nullptr) return;
    const double part = fx_warp_sum(static_cast<double>(share.sum) + share.exact);
    if ((threadIdx.x & 31u) == 0) parts[threadIdx.x >> 5] = part;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double total = parts[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; ++warp) total += parts[warp];
    squares[tile] = total;
}
