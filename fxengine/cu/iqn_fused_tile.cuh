// For the gradients of the fused quantile networks: matrices in shared memory that a product reads along their rows and
// another one along their columns, and what dhidden = (dtheta w_iq2) slope(hidden) is made with.
#pragma once
#include "iqn_fused.cuh"

constexpr int iqn_cosines = 64;
constexpr int iqn_width = 128;

// Two neighbouring columns of a tile in shared memory, as words.
template <int WORD>
__device__ __forceinline__ void iqn_store_pair(unsigned* row, int column, float first, float second) {
    if constexpr (WORD == 1) {
        *reinterpret_cast<uint2*>(row + column) = make_uint2(iqn_tf32(first), iqn_tf32(second));
    } else {
        row[column >> 1] = fx_bf16x2(first, second);
    }
}

template <int WORD>
__device__ __forceinline__ void iqn_store_quad(unsigned* row, int column, const float (&v)[4]) {
    if constexpr (WORD == 1) {
        *reinterpret_cast<uint4*>(row + column) =
            make_uint4(iqn_tf32(v[0]), iqn_tf32(v[1]), iqn_tf32(v[2]), iqn_tf32(v[3]));
    } else {
        *reinterpret_cast<uint2*>(row + (column >> 1)) = make_uint2(fx_bf16x2(v[0], v[1]), fx_bf16x2(v[2], v[3]));
    }
}

// A tile of numbers [rows][COLUMNS] in shared memory. Rows are 8 numbers apart in banks: no access below conflicts but
// for quads, two ways.
template <int WORD, int COLUMNS>
struct IqnTile {
    static constexpr int LD = (COLUMNS + 8) / WORD;  // words between rows
    unsigned* words;

    // Operand A of step s, from rows row.. as they lie: k along the columns.
    template <int M>
    __device__ __forceinline__ void across(unsigned (&a)[M][1][4], int row, int s) const {
        const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
        FX_UNROLL
        for (int i = 0; i < M; ++i) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                const unsigned* from = words + (row + 16 * i + 8 * h + g) * LD + 8 * s;
                if constexpr (WORD == 1) {  // k = 8 s + 2 t, 8 s + 2 t + 1
                    const uint2 pair = *reinterpret_cast<const uint2*>(from + 2 * t);
                    a[i][0][h] = pair.x;
                    a[i][0][2 + h] = pair.y;
                } else {  // k = 16 s + 2 t .., 16 s + 8 + 2 t ..
                    a[i][0][h] = from[t];
                    a[i][0][2 + h] = from[4 + t];
                }
            }
        }
    }

    // Four 8 x 8 blocks of the transpose, k along the rows: block e is of rows 8 * (e & 1) .. and columns
    // 8 * (e >> 1) .. with ROWS_FIRST, the other way round without. bf16 only.
    template <bool ROWS_FIRST>
    __device__ __forceinline__ void blocks(unsigned (&w)[4], int row, int column) const {
        const int lane = static_cast<int>(threadIdx.x) & 31;
#if FX_DEVICE
        const int e = lane >> 3, down = ROWS_FIRST ? e & 1 : e >> 1, right = ROWS_FIRST ? e >> 1 : e & 1;
        const unsigned* from = words + (row + 8 * down + (lane & 7)) * LD + (column + 8 * right) / 2;
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
            : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
            : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from)))
            : "memory");
#else
        const int g = lane >> 2, t = lane & 3;
        for (int e = 0; e < 4; ++e) {
            const int down = ROWS_FIRST ? e & 1 : e >> 1, right = ROWS_FIRST ? e >> 1 : e & 1;
            const int at = column + 8 * right + g, shift = at % 2 * 16;
            const unsigned* from = words + (row + 8 * down + 2 * t) * LD + at / 2;
            w[e] = (from[0] >> shift & 0xffffu) | (from[LD] >> shift & 0xffffu) << 16;
        }
#endif
    }

    // Operand A of step s, of columns column .. of the tile: k along the rows.
    template <int M>
    __device__ __forceinline__ void down_a(unsigned (&a)[M][1][4], int column, int s) const {
        const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
        FX_UNROLL
        for (int i = 0; i < M; ++i) {
            if constexpr (WORD == 1) {
                const unsigned* from = words + (8 * s + t) * LD + column + 16 * i + g;
                a[i][0][0] = from[0];
                a[i][0][1] = from[8];
                a[i][0][2] = from[4 * LD];
                a[i][0][3] = from[4 * LD + 8];
            } else {
                blocks<false>(a[i][0], 16 * s, column + 16 * i);
            }
        }
    }

    // Operand B likewise.
    template <int N>
    __device__ __forceinline__ void down_b(unsigned (&b)[N][1][2], int column, int s) const {
        const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
        FX_UNROLL
        for (int j = 0; j < N; j += 2) {
            if constexpr (WORD == 1) {
                const unsigned* from = words + (8 * s + t) * LD + column + 8 * j + g;
                b[j][0][0] = from[0];
                b[j][0][1] = from[4 * LD];
                b[j + 1][0][0] = from[8];
                b[j + 1][0][1] = from[4 * LD + 8];
            } else {
                unsigned w[4];
                blocks<true>(w, 16 * s, column + 8 * j);
                b[j][0][0] = w[0];
                b[j][0][1] = w[1];
                b[j + 1][0][0] = w[2];
                b[j + 1][0][1] = w[3];
            }
        }
    }
};

// Columns column .. column + 3 of the rows row0 + 16 i + 8 h + g below `end` of a matrix with so many columns. One
// branch, and behind it loads without any: they are all under way at once, and little code.
template <int F>
__device__ __forceinline__ void iqn_fetch(float (&held)[F][2][4], const float* matrix, int ld, int columns, int column,
                                          int row0, int end) {
    const int row = row0 + ((static_cast<int>(threadIdx.x) & 31) >> 2);
    const float* from = matrix + static_cast<long long>(row) * ld + column;
    if (fx_quads(matrix, ld) && columns % 4 == 0) {
        FX_UNROLL
        for (int further = 0; further < 16 * F; further += 8) {
            const bool there = row + further < end && column < columns;
            float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (there) quad = *reinterpret_cast<const float4*>(from + static_cast<long long>(further) * ld);
            float(&v)[4] = held[further / 16][further / 8 % 2];
            v[0] = quad.x;
            v[1] = quad.y;
            v[2] = quad.z;
            v[3] = quad.w;
        }
    } else {
        FX_UNROLL
        for (int further = 0; further < 16 * F; further += 8) {
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const bool there = row + further < end && column + e < columns;
                held[further / 16][further / 8 % 2][e] = there ? from[static_cast<long long>(further) * ld + e] : 0.0f;
            }
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
