// Pieces of dueling.cuh and c51.cu. Lane l of a warp owns the atoms l, l + 32, ..., CHUNKS of them, of GROUP actions at
// a time; further actions go through the same code again. A graph runs a kernel's code once a step, cold: short code is
// worth more than special cases.
#pragma once
#include "fx.cuh"

// exp(x), log(x) and a / b in two instructions, without the care for subnormal numbers, which count as 0.
// Relative error of c51_exp: 2^-22 + |x| 2^-24, of c51_divide: 2^-22; absolute error of c51_log near 1: 2^-22.
__device__ __forceinline__ float c51_exp(float x) {
#if FX_DEVICE
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
#else
    return expf(x);
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

// Stores the lane's atoms of one row. `to` points to the lane's first.
template <int CHUNKS>
__device__ __forceinline__ void c51_store(float* to, const float (&x)[CHUNKS], int atoms) {
    const int left = atoms - static_cast<int>(threadIdx.x & 31u);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (32 * c < left) to[32 * c] = x[c];
    }
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
// probabilities p of the lane's atoms. What falls on the outermost atoms from beyond them is summed over the warp; what
// falls between two atoms is looked for from each: only the j with |u_j - k| < 1 count, one more on both sides in case
// rounding moved them. NaN and tiny discounts look at all. With a discount of 0, whatever p holds, all mass lies at
// `start`. `shared`: 32 * CHUNKS floats of this warp's own.
template <int CHUNKS>
__device__ __forceinline__ void c51_project(int atoms, float start, float disc, const float (&p)[CHUNKS], float* shared,
                                            float (&m)[CHUNKS]) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const float top = static_cast<float>(atoms - 1);
    const bool near = disc >= 0.01f;
    const float inverse = c51_divide(1.0f, disc);
    const int span = near ? static_cast<int>(ceilf(2.0f * inverse)) + 2 : disc == 0.0f ? 1 : atoms;
    float outside[2] = {};  // below, above
    float from[CHUNKS];     // the j that are looked at next
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float k = static_cast<float>(lane + 32 * c);
        const float mass = disc == 0.0f ? (lane + 32 * c == 0 ? 1.0f : 0.0f) : k <= top ? p[c] : 0.0f;
        const float u = fmaf(k, disc, start);
        outside[0] += u <= 0.0f ? mass : 0.0f;
        outside[1] += u >= top ? mass : 0.0f;
        shared[lane + 32 * c] = u <= 0.0f || u >= top ? 0.0f : mass;
        from[c] = near ? fminf(fmaxf(floorf((k - 1.0f - start) * inverse), 0.0f), top) : 0.0f;
        m[c] = 0.0f;
    }
    const float sums = fx_warp_sums(outside);
    const float below = __shfl_sync(0xffffffffu, sums, 0), above = __shfl_sync(0xffffffffu, sums, 31);
    __syncwarp();
    const float* at[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) at[c] = shared + static_cast<int>(from[c]);
#pragma unroll 1
    for (int s = 0; s < span; ++s) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const float hat = 1.0f - fabsf(fmaf(from[c], disc, start) - static_cast<float>(lane + 32 * c));
            if (from[c] <= top && !(hat <= 0.0f)) m[c] += at[c][s] * hat;  // NaN counts
            from[c] += 1.0f;
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
