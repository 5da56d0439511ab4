// Pieces of c51.cu: what a warp keeps of a branch, and the categorical projection. Lane l owns the atoms l, l + 32, ...
#pragma once
#include "fx.cuh"

// One number per action: in registers if there are at most KEEP, else (KEEP = 0) in memory.
template <int KEEP>
struct C51Actions {
    const float* memory;
    int n;
    float kept[KEEP > 0 ? KEEP : 1];

    __device__ __forceinline__ C51Actions(const float* from, int actions) : memory(from), n(actions) {
#pragma unroll
        for (int a = 0; a < KEEP; ++a) kept[a] = a < n ? memory[a] : 0.0f;
    }
    // For an index that is known only now.
    __device__ __forceinline__ float pick(int action) const {
        if constexpr (KEEP == 0) return memory[action];
        float value = kept[0];
#pragma unroll
        for (int a = 1; a < KEEP; ++a) value = a == action ? kept[a] : value;
        return value;
    }
    __device__ __forceinline__ float operator()(int a) const { return KEEP > 0 ? kept[KEEP > 0 ? a : 0] : memory[a]; }
};

// The lane's atoms of the advantages of all actions, likewise; 0 beyond the last atom.
template <int CHUNKS, int KEEP>
struct C51Advantages {
    const float* memory;
    int n, atoms;
    float kept[KEEP > 0 ? KEEP : 1][CHUNKS];

    __device__ __forceinline__ C51Advantages(const float* from, int actions, int count)
        : memory(from + (threadIdx.x & 31u)), n(actions), atoms(count) {
#pragma unroll
        for (int a = 0; a < KEEP; ++a) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) kept[a][c] = a < n ? load(a, c) : 0.0f;
        }
    }
    __device__ __forceinline__ float load(int a, int c) const {
        return static_cast<int>(threadIdx.x & 31u) + 32 * c < atoms ? memory[a * atoms + 32 * c] : 0.0f;
    }
    __device__ __forceinline__ float pick(int action, int c) const {
        if constexpr (KEEP == 0) return load(action, c);
        float value = kept[0][c];
#pragma unroll
        for (int a = 1; a < KEEP; ++a) value = a == action ? kept[a][c] : value;
        return value;
    }
    __device__ __forceinline__ float operator()(int a, int c) const {
        return KEEP > 0 ? kept[KEEP > 0 ? a : 0][c] : load(a, c);
    }
    // v becomes the logits of all actions less their own advantages: v - mean_a adv.
    __device__ __forceinline__ void center(float (&v)[CHUNKS]) const {
        float sum[CHUNKS] = {};
#pragma unroll (KEEP > 0 ? KEEP : 1)
        for (int a = 0; a < (KEEP > 0 ? KEEP : n); ++a) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) sum[c] += (*this)(a, c);
        }
        const float share = fx_divide(1.0f, static_cast<float>(n));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) v[c] -= sum[c] * share;
    }
};

// The lane's atoms of one row.
template <int CHUNKS>
__device__ __forceinline__ void c51_load(float (&x)[CHUNKS], const float* from, int atoms) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) x[c] = lane + 32 * c < atoms ? from[lane + 32 * c] : 0.0f;
}

// m of a row whose discount is 0: the mass lies at `start`.
template <int CHUNKS>
__device__ __forceinline__ void c51_point(int atoms, float start, float (&m)[CHUNKS]) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const float top = static_cast<float>(atoms - 1);
    const float u = start < 0.0f ? 0.0f : start > top ? top : start;  // NaN passes
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float hat = 1.0f - fabsf(u - static_cast<float>(lane + 32 * c));
        m[c] = lane + 32 * c >= atoms || hat < 0.0f ? 0.0f : hat;
    }
}

// m of any other row, from the probabilities p of the lane's atoms. What falls on the outermost atoms from beyond them
// is summed over the warp; what falls between two atoms is looked for from each: only the j with |u_j - k| < 1 count,
// one more on both sides in case rounding moved them. NaN and tiny discounts look at all.
// `shared`: 32 * CHUNKS floats of this warp's own.
template <int CHUNKS>
__device__ __forceinline__ void c51_spread(int atoms, float start, float disc, const float (&p)[CHUNKS], float* shared,
                                           float (&m)[CHUNKS]) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const float top = static_cast<float>(atoms - 1);
    const bool near = disc >= 0.01f;
    const float inverse = fx_divide(1.0f, disc);
    const int span = near ? static_cast<int>(ceilf(2.0f * inverse)) + 2 : atoms;
    float below = 0.0f, above = 0.0f;
    int from[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int k = lane + 32 * c;
        shared[k] = p[c];
        const float u = fmaf(static_cast<float>(k), disc, start);
        below += k < atoms && u <= 0.0f ? p[c] : 0.0f;
        above += k < atoms && u >= top ? p[c] : 0.0f;
        const float first = floorf((static_cast<float>(k) - 1.0f - start) * inverse);
        from[c] = near ? static_cast<int>(fminf(fmaxf(first, 0.0f), top)) : 0;
        m[c] = 0.0f;
    }
    below = fx_warp_sum(below);
    above = fx_warp_sum(above);
    __syncwarp();
    for (int s = 0; s < span; ++s) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int j = from[c] + s;
            const float u = fmaf(static_cast<float>(j), disc, start);
            const float hat = 1.0f - fabsf(u - static_cast<float>(lane + 32 * c));
            const bool counts = j < atoms && !(u <= 0.0f) && !(u >= top) && !(hat <= 0.0f);  // NaN does
            if (counts) m[c] += shared[j] * hat;
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int k = lane + 32 * c;
        if (k == 0) m[c] += below;
        if (k == atoms - 1) m[c] += above;
        if (k >= atoms) m[c] = 0.0f;
    }
}
