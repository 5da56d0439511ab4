// A tile type for weight gradients (see linear.cuh) on the tensor cores of sm_90. Both operands lie along the rows of
// the result, and the instruction wants them along k: a thread reads patches of 4 k x 4 rows, rounds them, and stores
// them transposed, 16 bytes at a time. Three stages of 32 k: while the products of one are made, the next is stored and
// the one after it is on its way in registers. A warpgroup owns 64 rows of the block's outputs.
#pragma once
#include "linear.cuh"
#include "wgmma.cuh"

// R rows of one operand, read patch by patch. Of a warp's 32 patches four lie along k and eight along the rows. PAIRED:
// row 2 g + h of each 16 has place 8 h + g, with which a lane holds runs of four outputs (linear_fragments.cuh).
// The eight lanes that store together write to different banks.
template <int R, bool PAIRED, int THREADS>
struct LinearPatches {
    static constexpr int UNITS = 2 * R / THREADS;
    const float* next;  // this thread's first patch of the next stage
    int ld;
    int left;    // rows from the thread's first one on that exist
    bool whole;  // all rows exist, and four can be read at once
    static_assert(UNITS * THREADS == 2 * R, "patches of a thread");

    __device__ __forceinline__ LinearPatches() {}
    __device__ __forceinline__ explicit LinearPatches(const LinearView& v) : ld(v.ld) {
        left = v.rows - row(0);
        whole = fx_quads(v.p, ld) && v.rows >= R;
        next = v.p + static_cast<long long>(k()) * ld + row(0);
    }

    // The thread's first k of a stage, and its first row of unit u.
    static __device__ __forceinline__ int k() {
        const int thread = static_cast<int>(threadIdx.x);
        return (thread >> 1 & 3) * 4 + (thread >> 5 & 1) * 16;
    }
    static __device__ __forceinline__ int row(int u) {
        const int thread = static_cast<int>(threadIdx.x), high = thread >> 3 & 3;
        const int quad = PAIRED ? (thread & 1) * 2 + (high & 1) + (high & 2) * 2 : (thread & 1) + high * 2;
        return 32 * ((thread >> 6) + u * (THREADS / 64)) + 4 * quad;
    }

    __device__ __forceinline__ void fetch(float (&held)[UNITS][4][4], int k_left) {
        FX_UNROLL
        for (int u = 0; u < UNITS; ++u) {
            FX_UNROLL
            for (int i = 0; i < 4; ++i) {
                const float* const from = next + static_cast<long long>(i) * ld + (row(u) - row(0));
                if (whole && k_left >= 32) {
                    fx_load(held[u][i], from, 4, true);
                } else {
                    fx_load(held[u][i], from, k() + i < k_left ? left - (row(u) - row(0)) : 0, fx_quads(next, ld));
                }
            }
        }
        next += 32ll * ld;
    }

    __device__ __forceinline__ void stash(float* stage, const float (&held)[UNITS][4][4]) const {
        FX_UNROLL
        for (int u = 0; u < UNITS; ++u) {
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const int own = row(u) + e;
                const int place = PAIRED ? (own & ~15) | (own & 1) * 8 | (own >> 1 & 7) : own;
                float words[4];
                FX_UNROLL
                for (int i = 0; i < 4; ++i) words[i] = __uint_as_float(fx_tf32(held[u][i][e]));
                fx_store(stage + place * 32 + (k() ^ (place & 7) * 4), words, 4, true);
            }
        }
    }
};

template <int BM_, int BN_>
struct TransposedTile {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = 32;
    static constexpr int THREADS = 2 * BM;
    static constexpr int GROUPS = 1;
    static constexpr int STAGES = 3;
    static constexpr int STAGE = BK * (BM + BN);  // floats
    static constexpr int SHARED = STAGES * STAGE;
    static constexpr int WIDTH = 4;
    static constexpr bool BY_ROWS = false;
    static constexpr bool SINGLE = false;
    static constexpr bool ALIGNED = true;
    static constexpr bool ROUNDED = true;
    static_assert(BM % 64 == 0 && BN == 128, "warpgroups");
    typedef LinearPatches<BM, false, THREADS> A;
    typedef LinearPatches<BN, true, THREADS> B;
    static_assert(A::UNITS == 1, "a thread sums up four rows of A");

    struct Sums {
        float acc[BN / 8][4];
        float row[4];  // of the thread's rows of A
    };

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        static_assert(SUM && !A_INNER && !B_INNER, "weight gradients");
        ready();
        if (count == 0) return;
        const LinearSource s = source(0);
        A a(s.a);
        B b(s.b);
        float held_a[A::UNITS][4][4], held_b[B::UNITS][4][4];
        a.fetch(held_a, s.depth);
        b.fetch(held_b, s.depth);
        float* stage = shared;
        const int group = static_cast<int>(threadIdx.x) / 128;
#pragma unroll 1
        for (int depth = s.depth; depth > 0; depth -= BK) {
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                sums.row[e] += (held_a[0][0][e] + held_a[0][1][e]) + (held_a[0][2][e] + held_a[0][3][e]);
            }
            a.stash(stage, held_a);
            b.stash(stage + BK * BM, held_b);
            fx_warpgroup_publish();
            __syncthreads();
            if (depth > BK) {
                a.fetch(held_a, depth - BK);
                b.fetch(held_b, depth - BK);
            }
            fx_warpgroup_begin<BN>(sums.acc, fx_shared(stage + 64 * BK * group), fx_shared(stage + BK * BM));
            fx_warpgroup_wait<BN, 1>(sums.acc);
            stage = stage == shared + (STAGES - 1) * STAGE ? shared : stage + STAGE;
        }
        fx_warpgroup_wait<BN>(sums.acc);
        __syncthreads();
    }

    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float*, Fetch fetch, Use use) {
        const int lane = static_cast<int>(threadIdx.x) & 31, right = 4 * (lane & 3);
        const int down = static_cast<int>(threadIdx.x) / 32 * 16 + (lane >> 2);
        FX_UNROLL
        for (int i = 0; i < BN / 16; ++i) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                const float(&even)[4] = sums.acc[2 * i], (&odd)[4] = sums.acc[2 * i + 1];
                float v[4] = {even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]}, more[4];
                fetch(down + 8 * h, right + 16 * i, more);
                use(down + 8 * h, right + 16 * i, v, more);
            }
        }
    }

    static __device__ __forceinline__ float row_sums(const Sums& sums, float* shared) {
        const int thread = static_cast<int>(threadIdx.x);
        __syncthreads();
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            float sum = sums.row[e];  // over the four lanes that share the rows
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            sum += __shfl_xor_sync(0xffffffffu, sum, 4);
            if ((thread & 6) == 0) shared[(thread >> 5 & 1) * BM + A::row(0) + e] = sum;
        }
        return fx_linear_parts_sum<TransposedTile>(shared, 2);
    }
};
