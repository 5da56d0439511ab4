// What the tile types of the tensor cores share (linear_staged.cuh, linear_direct.cuh): rounding, and how the rows of
// operands and outputs are dealt out to the lanes of a warp.
//
// Row g + 8 h of fragment i of A, and row g of fragment 2 i + h of B, is row 16 i + 4 (g / 2) + 2 h + g % 2 of the
// operand or, with PAIRS, 16 i + 2 g + h: either way a thread holds columns 4 t .. 4 t + 3 of the outputs of a pair of
// fragments, a run of four. Without PAIRS neighbouring lanes read neighbouring rows, which lie in different banks of
// shared memory; with PAIRS a lane reads pairs of rows from global memory. The k of a fragment are permuted too (alike
// for A and B): a thread gets neighbouring words where the instruction speaks of t and t + 4.
#pragma once
#include "linear.cuh"
#include "mma.cuh"

// The word of the WORD numbers at v, neighbouring k of one row.
template <int WORD>
__device__ __forceinline__ unsigned fx_linear_word(const float* v) {
    if constexpr (WORD == 1) {
        return fx_tf32(v[0]);
    } else {
        return fx_bf16x2(v[0], v[1]);
    }
}

// The first of a lane's rows of an operand; the second is 1 (PAIRS) or 2 further, and so on every 16 rows.
template <bool PAIRS>
__device__ __forceinline__ int fx_linear_lane_row(int lane) {
    return PAIRS ? 2 * (lane >> 2) : 4 * (lane >> 3) + (lane >> 2 & 1);
}

// The outputs that a thread holds in its fragments. Those of the warp start at (row, column) of the tile.
template <class T, int M, int N, class Use>
__device__ __forceinline__ void fx_linear_fragments(const float (&acc)[M][N][4], int group, int row, int column,
                                                    float* shared, Use use) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    row += fx_linear_lane_row<T::PAIRS>(lane);
    column += 4 * (lane & 3);
    FX_UNROLL
    for (int i = 0; i < M; ++i) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            FX_UNROLL
            for (int j = 0; j < N; j += 2) {
                float v[4] = {acc[i][j][2 * h], acc[i][j][2 * h + 1], acc[i][j + 1][2 * h], acc[i][j + 1][2 * h + 1]};
                if constexpr (T::PAIRS) {
                    v[1] = acc[i][j + 1][2 * h];
                    v[2] = acc[i][j][2 * h + 1];
                }
                const int at_row = row + 16 * i + (T::PAIRS ? h : 2 * h), at_column = column + 8 * j;
                if constexpr (T::GROUPS == 1) {
                    use(at_row, at_column, v);
                } else {
                    fx_store(shared + (group * T::BM + at_row) * T::BN + at_column, v, 4, true);
                }
            }
        }
    }
    if constexpr (T::GROUPS > 1) fx_linear_reduce<T>(shared, use);
}
