// Tensor-core products of one warp, in tf32 or bf16 with float32 sums (PTX mma.sync, since sm_80).
//
// Operands are 32-bit words: one tf32 number, or two neighbouring bf16 numbers (the lower k in the low half). In words
// both modes have the same fragments: lane = 4 g + t holds of A [16 rows, 8 words] the words t and t + 4 of the rows g
// and g + 8, of B [8 rows, 8 words] the words t and t + 4 of row g, and of the sums [16, 8] the columns 2 t, 2 t + 1 of
// the rows g and g + 8. WORD is the number of k that a word holds: 1 selects tf32, 2 bf16.
#pragma once
#include "fx.cuh"

// Round to nearest, ties away from zero: half of the last place that counts is added, and the product drops what lies
// below. For a number that arithmetic has made: the maximum keeps its NaN, 0x7fffffff, for which the sum overflows.
__device__ __forceinline__ unsigned fx_tf32_made(float x) {
#if FX_DEVICE
    const int bits = __float_as_int(x);
    return static_cast<unsigned>(max(static_cast<int>(static_cast<unsigned>(bits) + 0x1000u), bits));
#else
    return fx_sim::tf32(x);
#endif
}

// The same for any number: NaNs from 0xfffff000 on are kept too.
__device__ __forceinline__ unsigned fx_tf32(float x) {
    return max(fx_tf32_made(x), __float_as_uint(x));
}

// Round to nearest, ties to even, as the copy engine does (bulk_copy.cuh), since sm_90 by one instruction.
__device__ __forceinline__ unsigned fx_tf32_even(float x) {
#if FX_DEVICE && __CUDA_ARCH__ >= 900
    unsigned word;
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
    return word;
#else
    const unsigned word = __float_as_uint(x);
    return (word & 0x7f800000u) == 0x7f800000u ? word : (word + 0xfffu + (word >> 13 & 1)) & ~0x1fffu;
#endif
}

// Round to nearest even, both.
__device__ __forceinline__ unsigned fx_bf16x2(float low, float high) {
#if FX_DEVICE
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return fx_sim::bf16(low) | fx_sim::bf16(high) << 16;
#endif
}

// sums[i][j] += A_i . B_j^T over STEPS times 8 words of k, for M x N fragments. All lanes of the warp take part.
//   a[i][s]: row g word t, row g + 8 word t, row g word t + 4, row g + 8 word t + 4;  b[j][s]: word t, word t + 4;
//   sums[i][j]: row g columns 2 t, 2 t + 1, then row g + 8.
template <int WORD, int STEPS, int M, int N>
__device__ __forceinline__ void fx_mma(float (&sums)[M][N][4], const unsigned (&a)[M][STEPS][4],
                                       const unsigned (&b)[N][STEPS][2]) {
#if FX_DEVICE
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
        for (int i = 0; i < M; ++i) {
#pragma unroll
            for (int j = 0; j < N; ++j) {
                float(&c)[4] = sums[i][j];
                if constexpr (WORD == 1) {
                    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                        : "r"(a[i][s][0]), "r"(a[i][s][1]), "r"(a[i][s][2]), "r"(a[i][s][3]), "r"(b[j][s][0]),
                          "r"(b[j][s][1]));
                } else {
                    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                        : "r"(a[i][s][0]), "r"(a[i][s][1]), "r"(a[i][s][2]), "r"(a[i][s][3]), "r"(b[j][s][0]),
                          "r"(b[j][s][1]));
                }
            }
        }
    }
#else
    fx_sim::multiply<WORD, STEPS, M, N>(&sums[0], &a[0], &b[0]);
#endif
}
