// What the tile types of `mma.sync` share (linear_staged.cuh, linear_direct.cuh, linear_mapped.cuh): rounding, and how
// the rows of operands and outputs are dealt out to the lanes of a warp.
//
// Row g + 8 h of fragment i of A, and row g of fragment 2 i + h of B, is row 16 i + 2 g + h of the operand: a lane
// reads pairs of rows, and holds columns 4 t .. 4 t + 3 of the outputs of a pair of fragments, a run of four. The k of
// a fragment are permuted too (alike for A and B): a lane has the four neighbouring k from 4 t on of a panel of 16.
#pragma once
#include "linear.cuh"
#include "mma.cuh"

// The word of the WORD numbers at v, neighbouring k of one row.
template <int WORD, bool ROUND = true>
__device__ __forceinline__ unsigned fx_linear_word(const float* v) {
    if constexpr (!ROUND) {
        static_assert(WORD == 1, "one number");
        return __float_as_uint(v[0]);
    } else if constexpr (WORD == 1) {
        return fx_tf32(v[0]);
    } else {
        return fx_bf16x2(v[0], v[1]);
    }
}

// The lane's four k of one row, as words.
template <int WORD, bool ROUND = true>
__device__ __forceinline__ void fx_linear_words(unsigned (&w)[4 / WORD], const float (&v)[4]) {
    FX_UNROLL
    for (int e = 0; e < 4 / WORD; ++e) w[e] = fx_linear_word<WORD, ROUND>(v + e * WORD);
}

// acc += the product over a panel of 16 k. a(i, v) and b(i, v) give the lane's numbers of rows 16 i + 2 g + h of an
// operand, v[h][k]. ROUND: they are not rounded yet.
template <int WORD, bool ROUND = true, int M, int N, class A, class B>
__device__ __forceinline__ void fx_linear_panel(float (&acc)[M][N][4], A a, B b) {
    constexpr int STEPS = 2 / WORD;
    unsigned fb[N][STEPS][2];
    FX_UNROLL
    for (int j = 0; j < N; j += 2) {
        float v[2][4];
        b(j / 2, v);
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            unsigned w[4 / WORD];
            fx_linear_words<WORD, ROUND>(w, v[h]);
            FX_UNROLL
            for (int e = 0; e < 4 / WORD; ++e) fb[j + h][e / 2][e % 2] = w[e];
        }
    }
    FX_UNROLL
    for (int i = 0; i < M; ++i) {  // one fragment of A at a time, for the sake of registers
        float v[2][4];
        a(i, v);
        unsigned fa[1][STEPS][4];
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            unsigned w[4 / WORD];
            fx_linear_words<WORD, ROUND>(w, v[h]);
            FX_UNROLL
            for (int e = 0; e < 4 / WORD; ++e) fa[0][e / 2][h + e % 2 * 2] = w[e];
        }
        fx_mma<WORD, STEPS, 1>(reinterpret_cast<float(&)[1][N][4]>(acc[i]), fa, fb);
    }
}

// The outputs that a warp holds in its fragments from (row, column) of the tile on, dealt out anew through shared
// memory.
template <class T, int UNROLL, int M, int N, class Fetch, class Use>
__device__ __forceinline__ void fx_linear_fragments(const float (&acc)[M][N][4], int group, int row, int column,
                                                    float* shared, Fetch fetch, Use use) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    row += 2 * (lane >> 2);
    column += 4 * (lane & 3);
    float* mine = shared + group * T::BM * T::BN;
    FX_UNROLL
    for (int i = 0; i < M; ++i) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            FX_UNROLL
            for (int j = 0; j < N; j += 2) {
                const float v[4] = {acc[i][j][2 * h], acc[i][j + 1][2 * h], acc[i][j][2 * h + 1],
                                    acc[i][j + 1][2 * h + 1]};
                fx_store(mine + fx_linear_place<T>(row + 16 * i + h, column + 8 * j), v, 4, true);
            }
        }
    }
    fx_linear_reduce<T, UNROLL>(shared, fetch, use);
}

// Adds four k of rows 2 g + h to their sums.
__device__ __forceinline__ void fx_linear_add_rows(float (&sums)[2], const float (&v)[2][4]) {
    FX_UNROLL
    for (int h = 0; h < 2; ++h) sums[h] += (v[h][0] + v[h][1]) + (v[h][2] + v[h][3]);
}

// What tile types have in common of which a warp owns WM x WN outputs.
template <int BM, int BN, int WM, int WN, int STAGES>
struct LinearWarps : LinearStages<BM, BN, STAGES> {
    static constexpr int ACROSS = BN / WN;  // warps
    static constexpr int THREADS = BM / WM * ACROSS * 32;
    static_assert(WM % 32 == 0 && WN % 32 == 0, "warp tiles");

    struct Place {
        int row, column;
        __device__ __forceinline__ Place() {
            const int warp = static_cast<int>(threadIdx.x) >> 5;
            row = warp / ACROSS * WM;
            column = warp % ACROSS * WN;
        }
    };

    // The sum over k of row threadIdx.x of A. Warps of the first columns have the sums over their lanes' k of the rows
    // of their fragments.
    static __device__ __forceinline__ float warp_rows(const float (&sums)[WM / 16][2], float* shared) {
        const Place at;
        const int lane = static_cast<int>(threadIdx.x) & 31;
        __syncthreads();
        if (at.column == 0) {
            float* part = shared + (lane & 3) * BM + at.row + 2 * (lane >> 2);
            FX_UNROLL
            for (int i = 0; i < WM / 16; ++i) {
                FX_UNROLL
                for (int h = 0; h < 2; ++h) part[16 * i + h] = sums[i][h];
            }
        }
        return fx_linear_parts_sum<LinearWarps>(shared, 4);
    }
};
