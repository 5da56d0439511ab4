// For the gradients of the fused quantile networks: matrices in shared memory that a product reads along their rows and
// another one along their columns, what dhidden = (dtheta w_iq2) slope(hidden) is made with, and how the backwards
// share out their work.
#pragma once
#include "iqn_fused.cuh"

constexpr int iqn_cosines = 64;
constexpr int iqn_width = 128;

// A matrix [ROWS][COLUMNS] in shared memory that is operand B of two products: of one with k along the columns, and of
// one with k along the rows. Each has its own copy, in units: of 8 n and a chunk of 16 k a lane has the four numbers
// that it multiplies by, side by side, so that it reads a step (bf16) or two (tf32) at once. n are
// counted in chunks of 16 too, as everywhere (iqn_fused.cuh): fragment f of lane 4 g + t has n = 4 (g >> 1) + 2 f +
// (g & 1).
//
// The unit of the n that is number g of its fragment, and of k = 4 t .., lies at place (4 g + t) ^ 2 (g >> 1) of 32.
// Thus no access conflicts in tf32: a lane that has made four numbers of a row stores them at once in one copy, and one
// by one in the other, where the lanes of a warp together write to eight units that lie in different banks.
template <int WORD, int COLUMNS, int ROWS>
struct IqnMatrix {
    static constexpr int STEPS = iqn_steps<WORD>;
    static constexpr int UNIT = 4 / WORD;                 // words
    static constexpr int WORDS = ROWS * COLUMNS / WORD;  // of a copy
    unsigned* across;  // k along the columns: [COLUMNS / 16][ROWS / 16][2][32] units
    unsigned* down;    // k along the rows: [ROWS / 16][COLUMNS / 16][2][32] units

    __device__ __forceinline__ explicit IqnMatrix(unsigned* words) : across(words), down(words + WORDS) {}

    static __device__ __forceinline__ int place(int n, int quad) { return (4 * n + quad) ^ (n & 6); }

    // Columns 16 c + 4 t .. of row 16 i + 8 h + g.
    __device__ __forceinline__ void store(int lane, const float (&v)[4], int i, int h, int c) const {
        const int g = lane >> 2, t = lane & 3;
        unsigned words[4];
        FX_UNROLL
        for (int q = 0; q < STEPS; ++q) iqn_words<WORD, true>(words[2 * q], words[2 * q + 1], v, q);
        const int block = (c * (ROWS / 16) + i) * 2 + (g >> 1 & 1);
        unsigned* const unit = across + (32 * block + place(4 * h + (g >> 2) * 2 + (g & 1), t)) * UNIT;
        if constexpr (WORD == 1) {
            *reinterpret_cast<uint4*>(unit) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
            *reinterpret_cast<uint2*>(unit) = make_uint2(words[0], words[1]);
        }
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            const int other = (i * (COLUMNS / 16) + c) * 2 + (e >> 1);
            const int at = (32 * other + place(2 * t + (e & 1), 2 * h + (g >> 2))) * 4 + (g & 3);
            if constexpr (WORD == 1) {
                down[at] = words[e];
            } else {
                const unsigned half = words[e >> 1] >> 16 * (e & 1);
                reinterpret_cast<unsigned short*>(down)[at] = static_cast<unsigned short>(half);
            }
        }
    }

    // Operand B of chunk c of the columns, for the rows of fragment f of chunk i.
    __device__ __forceinline__ void load_across(unsigned (&b)[STEPS][2], int c, int i, int f) const {
        load(b, across, (c * (ROWS / 16) + i) * 2 + f);
    }

    // Operand B of chunk i of the rows, for the columns of fragment f of chunk c.
    __device__ __forceinline__ void load_down(unsigned (&b)[STEPS][2], int i, int c, int f) const {
        load(b, down, (i * (COLUMNS / 16) + c) * 2 + f);
    }

private:
    static __device__ __forceinline__ void load(unsigned (&b)[STEPS][2], const unsigned* from, int block) {
        const int lane = static_cast<int>(threadIdx.x) & 31;
        const unsigned* const unit = from + (32 * block + place(lane >> 2, lane & 3)) * UNIT;
        if constexpr (WORD == 1) {
            const uint4 words = *reinterpret_cast<const uint4*>(unit);
            b[0][0] = words.x;
            b[0][1] = words.y;
            b[1][0] = words.z;
            b[1][1] = words.w;
        } else {
            const uint2 words = *reinterpret_cast<const uint2*>(unit);
            b[0][0] = words.x;
            b[0][1] = words.y;
        }
    }
};

// Columns column .. column + 3 of the rows row0 + 16 i + 8 h + g below `end` of a matrix with so many columns. One
// branch, and behind it loads without any: they are all under way at once, and little code.
template <int F>
__device__ __forceinline__ void iqn_fetch(float (&held)[F][2][4], const float* matrix, int ld, int columns, int column,
                                          int row0, int end) {
    int row = row0 + ((static_cast<int>(threadIdx.x) & 31) >> 2);
    const float* from = matrix + static_cast<long long>(row) * ld + column;
    if (fx_quads(matrix, ld) && columns % 4 == 0) {
        FX_UNROLL
        for (int u = 0; u < 2 * F; ++u, row += 8, from += 8 * ld) {
            float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < end && column < columns) quad = *reinterpret_cast<const float4*>(from);
            float(&v)[4] = held[u / 2][u % 2];
            v[0] = quad.x;
            v[1] = quad.y;
            v[2] = quad.z;
            v[3] = quad.w;
        }
    } else {
        FX_UNROLL
        for (int u = 0; u < 2 * F; ++u, row += 8, from += 8 * ld) {
            FX_UNROLL
            for (int e = 0; e < 4; ++e) held[u / 2][u % 2][e] = row < end && column + e < columns ? from[e] : 0.0f;
        }
    }
}

// This lane's part of the units of columns column .. of w [k, n], k = at .. at + 3. What does not exist is 0.
template <int WORD>
__device__ __forceinline__ void iqn_unit_down(uint4 (&units)[iqn_steps<WORD>], const float* w, int ld, int n, int k,
                                              int column, int at) {
    const int g = (static_cast<int>(threadIdx.x) & 31) >> 2;
    float v[2][4];
    FX_UNROLL
    for (int f = 0; f < 2; ++f) {
        const int own = column + 4 * (g >> 1) + 2 * f + (g & 1);
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            v[f][e] = own < n && at + e < k ? w[static_cast<long long>(at + e) * ld + own] : 0.0f;
        }
    }
    FX_UNROLL
    for (int q = 0; q < iqn_steps<WORD>; ++q) {
        iqn_words<WORD>(units[q].x, units[q].y, v[0], q);
        iqn_words<WORD>(units[q].z, units[q].w, v[1], q);
    }
}

// sums += v . units over a chunk of k.
template <int WORD, int F>
__device__ __forceinline__ void iqn_multiply_chunk(float (&sums)[F][2][4], const float (&v)[F][2][4],
                                                   const uint4 (&units)[iqn_steps<WORD>]) {
    FX_UNROLL
    for (int q = 0; q < iqn_steps<WORD>; ++q) {
        unsigned a[F][1][4];
        iqn_operand<WORD, F>(a, v, q);
        iqn_multiply<WORD, F>(sums, a, units[q]);
    }
}

// The lane's four numbers of dhidden of row 16 i + 8 h + g, from the sums of dtheta w_iq2 and the hidden numbers.
template <int F>
__device__ __forceinline__ void iqn_dhidden(float (&v)[4], const float (&sums)[F][2][4], const float (&hidden)[4],
                                            int i, int h) {
    iqn_columns<F>(v, sums, i, h);
    FX_UNROLL
    for (int e = 0; e < 4; ++e) v[e] *= fx_activate_slope(FX_RELU, hidden[e]);
}

// Sum over the lanes of equal t.
__device__ __forceinline__ float iqn_rows_sum(float v) {
    FX_UNROLL
    for (int other = 4; other < 32; other *= 2) v += __shfl_xor_sync(0xffffffffu, v, other);
    return v;
}

// What of the work is the block's, found out afresh where it is wanted, so that it takes no registers in between: 128
// columns from column0 on, and a slice of the rows. The number of features is a multiple of STEP.
template <int STEP>
struct IqnShareOf {
    int column0, slice;

    template <class Record>
    __device__ __forceinline__ explicit IqnShareOf(const Record& r) {
        const int tile = fx_linear_again(fx_tile(r));
        const int parts = (r.features + 128 - STEP) / 128;
        column0 = tile % parts * 128;
        slice = tile / parts;
    }
};

// Rows of a run.
template <int ROWS, class Record>
__device__ __forceinline__ int iqn_run(const Record& r) {
    return r.quantiles > ROWS ? r.quantiles : ROWS;
}

// phi of a pair is there, which has so many threads: those that made it go on at once, the others wait.
template <int THREADS, bool WAITS>
__device__ __forceinline__ void iqn_hand_over(int pair) {
#if FX_DEVICE
    if constexpr (WAITS) {
        asm volatile("barrier.sync %0, %1;" :: "r"(1 + pair), "n"(THREADS) : "memory");
    } else {
        asm volatile("barrier.arrive %0, %1;" :: "r"(1 + pair), "n"(THREADS) : "memory");
    }
#else
    __syncthreads();
#endif
}
