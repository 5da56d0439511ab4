// What the fused quantile networks share: weights in shared memory in the order in which a warp's fragments read them,
// and cosine features made on the spot. WORD (mma.cuh) is 1 for tf32, 2 for bf16.
//
// Everything is counted in chunks of 16. Of a chunk of k, lane 4 g + t has k = 4 t .. 4 t + 3: in tf32 two steps of
// words (4 t, 4 t + 1) and (4 t + 2, 4 t + 3), in bf16 one step of the pairs. Of a chunk of 16 columns, made by two
// fragments f, the lane has the sums of columns 4 t + 2 f and 4 t + 2 f + 1: again 4 t .. 4 t + 3. So the sums of one
// layer are the operand of the next without leaving the lane, and rows are read and written 16 bytes at a time.
//
// A unit is what a step multiplies by for 16 columns: one uint4 per lane, two words of each of both fragments.
#pragma once
#include "linear.cuh"
#include "mma.cuh"

// Steps that a chunk of k takes: units per chunk of k and of columns.
template <int WORD>
constexpr int iqn_steps = 2 / WORD;

// The two words of step q of a chunk, from the lane's four numbers. MADE: arithmetic has made them here (fx_tf32_made).
template <int WORD, bool MADE = false>
__device__ __forceinline__ void iqn_words(unsigned& first, unsigned& second, const float* v, int q) {
    if constexpr (WORD == 1) {
        first = MADE ? fx_tf32_made(v[2 * q]) : fx_tf32(v[2 * q]);
        second = MADE ? fx_tf32_made(v[2 * q + 1]) : fx_tf32(v[2 * q + 1]);
    } else {
        first = fx_bf16x2(v[0], v[1]);
        second = fx_bf16x2(v[2], v[3]);
    }
}

// The operand of step q for 16 rows, from the lane's four numbers v[h] of rows 8 h + g.
template <int WORD, bool MADE = false>
__device__ __forceinline__ void iqn_fragment(unsigned (&a)[4], const float (&v)[2][4], int q) {
    iqn_words<WORD, MADE>(a[0], a[2], v[0], q);
    iqn_words<WORD, MADE>(a[1], a[3], v[1], q);
}

// The same for M x 16 rows.
template <int WORD, int M, bool MADE = false>
__device__ __forceinline__ void iqn_operand(unsigned (&a)[M][1][4], const float (&v)[M][2][4], int q) {
    FX_UNROLL
    for (int i = 0; i < M; ++i) iqn_fragment<WORD, MADE>(a[i][0], v[i], q);
}

// The same for all steps of a chunk.
template <int WORD, int M, bool MADE = false>
__device__ __forceinline__ void iqn_operands(unsigned (&a)[M][iqn_steps<WORD>][4], const float (&v)[M][2][4]) {
    FX_UNROLL
    for (int i = 0; i < M; ++i) {
        FX_UNROLL
        for (int q = 0; q < iqn_steps<WORD>; ++q) iqn_fragment<WORD, MADE>(a[i][q], v[i], q);
    }
}

// sums += a . unit, for 16 columns.
template <int WORD, int M>
__device__ __forceinline__ void iqn_multiply(float (&sums)[M][2][4], const unsigned (&a)[M][1][4], const uint4& unit) {
    const unsigned b[2][1][2] = {{{unit.x, unit.y}}, {{unit.z, unit.w}}};
    fx_mma<WORD, 1, M, 2>(sums, a, b);
}

// The lane's four columns of row 16 i + 8 h + g, from the sums.
template <int M>
__device__ __forceinline__ void iqn_columns(float (&v)[4], const float (&sums)[M][2][4], int i, int h) {
    FX_UNROLL
    for (int e = 0; e < 4; ++e) v[e] = sums[i][e >> 1][2 * h + (e & 1)];
}

// Sums that start at a bias.
template <int M>
__device__ __forceinline__ void iqn_start(float (&sums)[M][2][4], const float4& bias) {
    FX_UNROLL
    for (int i = 0; i < M; ++i) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            sums[i][0][2 * h] = bias.x;
            sums[i][0][2 * h + 1] = bias.y;
            sums[i][1][2 * h] = bias.z;
            sums[i][1][2 * h + 1] = bias.w;
        }
    }
}

// This lane's part of the units of columns 16 * column .. of w [n, k] at chunk `chunk` of k. What does not exist is 0.
template <int WORD>
__device__ __forceinline__ void iqn_unit(uint4* to, const float* w, int ld, int n, int k, int column, int chunk) {
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, at = 16 * chunk + 4 * (lane & 3);
    const bool quads = fx_quads(w, ld);
    float v[2][4];
    FX_UNROLL
    for (int f = 0; f < 2; ++f) {
        const int row = 16 * column + 4 * (g >> 1) + 2 * f + (g & 1);
        fx_load(v[f], w + static_cast<long long>(row) * ld + at, row < n ? k - at : 0, quads);
    }
    FX_UNROLL
    for (int q = 0; q < iqn_steps<WORD>; ++q) {
        uint4 unit;
        iqn_words<WORD>(unit.x, unit.y, v[0], q);
        iqn_words<WORD>(unit.z, unit.w, v[1], q);
        to[q * 32 + lane] = unit;
    }
}

// cos(pi i tau) of half = i / 2, to 1e-6: operands are rounded to 11 bits at most behind it. Whole turns, which the
// addition of 1.5 * 2^23 rounds to, are taken off before i tau is rounded.
__device__ __forceinline__ float iqn_feature(float half, float tau) {
    const float turns = fmaf(half, tau, 12582912.0f) - 12582912.0f;
    return __cosf(6.2831853f * fmaf(half, tau, -turns));
}
