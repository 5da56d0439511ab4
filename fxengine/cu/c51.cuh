// Pieces of dueling.cu, heads.cuh, c51.cu and c51_many.cu. Where a warp works together, its lane l owns the atoms l,
// l + 32, ..., CHUNKS of them, of GROUP actions at a time; further actions go through the same code again. A graph runs a
// kernel's code once a step, cold: short code is worth more than special cases.
#pragma once
#include "fx.cuh"

constexpr float c51_bits = 1.44269504f;  // 1 / ln 2

// exp(x), 2^x, log(x) and a / b in one or two instructions, without the care for subnormal numbers, which count as 0.
// Relative error of c51_exp: 2^-22 + |x| 2^-24, of c51_power and c51_divide: 2^-22; absolute error of c51_log near 1:
// 2^-22.
__device__ __forceinline__ float c51_exp(float x) {
#if FX_DEVICE
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * c51_bits));
    return y;
#else
    return expf(x);
#endif
}

__device__ __forceinline__ float c51_power(float x) {
#if FX_DEVICE
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}

__device__ __forceinline__ float c51_log(float x) {
#if FX_DEVICE
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y * 0.693147181f;
#else
    return logf(x);
#endif
}

__device__ __forceinline__ float c51_divide(float a, float b) {
#if FX_DEVICE
    float y;
    asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
#else
    return a / b;
#endif
}

// Row `row` of a matrix whose rows are `ld` elements, less than 2 GB, apart. Written out, because the compiler would
// make sums of 64-bit indices, four instructions for each address derived from it, and keep more of them than it has
// registers for.
template <class T>
__device__ __forceinline__ T* c51_row(T* matrix, int ld, int row) {
#if FX_DEVICE
    T* place;
    const int bytes = ld * static_cast<int>(sizeof(T));
    asm volatile("mad.wide.s32 %0, %1, %2, %3;" : "=l"(place) : "r"(row), "r"(bytes), "l"(matrix));
    return fx_global(place);
#else
    return matrix + static_cast<long long>(row) * ld;
#endif
}

// Largest x of the warp, none of which is NaN. One instruction for whole numbers: a float's bits are ordered as one
// once those of negative numbers are turned round. Zeros of both signs pass as they are, 0 above -0.
__device__ __forceinline__ float c51_warp_max(float x) {
    const auto turned = [](int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
    return __int_as_float(turned(__reduce_max_sync(0xffffffffu, turned(__float_as_int(x)))));
}

// The lane's atoms of one row, 0 beyond the last. `from` points to the lane's first.
template <int CHUNKS>
__device__ __forceinline__ void c51_load(float (&x)[CHUNKS], const float* from, int atoms) {
    const int left = atoms - static_cast<int>(threadIdx.x & 31u);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) x[c] = 32 * c < left ? from[32 * c] : 0.0f;
}

// The lane's atoms of the actions first, first + 1, ..., 0 beyond the last. `from` points to its first of action 0.
template <int CHUNKS, int GROUP>
__device__ __forceinline__ void c51_load(float (&x)[GROUP][CHUNKS], const float* from, int first, int actions,
                                         int atoms) {
    from += first * atoms;
#pragma unroll
    for (int g = 0; g < GROUP; ++g, from += atoms) c51_load(x[g], from, first + g < actions ? atoms : 0);
}

// v becomes the logits of all actions less their own advantages: v - mean_a adv. `x`: those of the first group.
template <int CHUNKS, int GROUP>
__device__ __forceinline__ void c51_center(float (&v)[CHUNKS], const float (&x)[GROUP][CHUNKS], const float* adv,
                                           int actions, int atoms) {
    float sum[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        sum[c] = x[0][c];
#pragma unroll
        for (int g = 1; g < GROUP; ++g) sum[c] += x[g][c];
    }
#pragma unroll 1
    for (int first = GROUP; first < actions; first += GROUP) {
        float more[GROUP][CHUNKS];
        c51_load(more, adv, first, actions, atoms);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) sum[c] += more[g][c];
        }
    }
    const float share = c51_divide(1.0f, static_cast<float>(actions));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) v[c] -= sum[c] * share;
}

// The lane's atoms of one action. `x`: those of the first group.
template <int CHUNKS, int GROUP>
__device__ __forceinline__ void c51_take(float (&y)[CHUNKS], const float (&x)[GROUP][CHUNKS], const float* adv,
                                         int action, int actions, int atoms) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        y[c] = x[0][c];
#pragma unroll
        for (int g = 1; g < GROUP; ++g) y[c] = g == action ? x[g][c] : y[c];
    }
    if (actions > GROUP) c51_load(y, adv + action * atoms, atoms);
}

// Categorical projection: m_k = sum_j p_j max(0, 1 - |u_j - k|), u_j = start + disc j limited to [0, top], from the
// probabilities p of the atoms l, l + LANES, ... of lane l of each group of LANES lanes. What falls on the outermost
// atoms from beyond them is summed over the group; what falls between two atoms is looked for from each: only the j
// with |u_j - k| < 1 count, and 1/128 of a j on both sides is more than rounding moves them. Tiny and negative
// discounts look at all. With a discount of 0, whatever p holds, all mass lies at `start`. A NaN of start or disc is
// one of m.
// `shared`: 2 LANES CHUNKS + 4 floats of this group's own, in pairs: what lies at u_j, and u_j.
template <int LANES, int CHUNKS>
__device__ __forceinline__ void c51_project(int atoms, float start, float disc, const float (&p)[CHUNKS], float* shared,
                                            float (&m)[CHUNKS]) {
    constexpr int STEPS = 3;  // enough for discounts above 0.68
    const int lane = static_cast<int>(threadIdx.x) & (LANES - 1);
    float2* const places = reinterpret_cast<float2*>(shared);
    const float top = static_cast<float>(atoms - 1);
    const bool near = disc >= 0.01f;
    const float inverse = near ? c51_divide(1.0f, disc) : 0.0f;
    int span = near ? static_cast<int>(ceilf(fmaf(2.0f, inverse, 0.015625f))) : disc == 0.0f ? 1 : atoms;
    span = span < atoms ? span : atoms;
    const float last = static_cast<float>(atoms - span), before = start + 1.0f;
    float below = 0.0f, above = 0.0f;
    const float2* at[CHUNKS];  // the first j that counts
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int k = lane + LANES * c;
        const float place = static_cast<float>(k), u = fmaf(place, disc, start);
        const float mass = disc == 0.0f ? (k == 0 ? 1.0f : 0.0f) : k < atoms ? p[c] : 0.0f;
        const bool low = u <= 0.0f, high = u >= top;
        if (low) below += mass;
        if (high) above += mass;
        places[k] = float2{low || high ? 0.0f : fmaf(u, 0.0f, mass), u};  // NaN where u is
        at[c] = places + static_cast<int>(fminf(fmaxf(fmaf(place - before, inverse, 0.9921875f), 0.0f), last));
        m[c] = 0.0f;
    }
    // The last step may look at two j too many.
    if (lane < STEPS - 1) places[LANES * CHUNKS + lane] = float2{0.0f, 0.0f};
    below = fx_lanes_sum<LANES>(below);
    above = fx_lanes_sum<LANES>(above);
    __syncwarp();
#pragma unroll 1
    for (int s = 0; s < span; s += STEPS) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int j = 0; j < STEPS; ++j) {
                const float2 from = at[c][j];
                m[c] = fmaf(from.x, __saturatef(1.0f - fabsf(from.y - static_cast<float>(lane + LANES * c))), m[c]);
            }
            at[c] += STEPS;
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int k = lane + LANES * c;
        if (k == 0) m[c] += below;
        if (k == atoms - 1) m[c] += above;
    }
}
