// A tile type of the linear kernels (see linear.cuh) on the tensor cores of sm_90, for products with much work per block:
// the instruction reads the weights from shared memory itself, so that only A goes through registers, once. It cannot
// round them: they come from a packed copy (pack.cuh) that the step makes of every weight it needs so. Stages are those
// of linear_staged.cuh; a warpgroup owns 64 rows of the block's outputs.
#pragma once
#include "linear_staged.cuh"
#include "pack.cuh"
#include "wgmma.cuh"

// How packed weights lie in a stage, as wgmma.cuh reads them. Row 8 h + g of each 16 is row 2 g + h of the operand: with
// that a lane holds runs of four outputs (linear_fragments.cuh).
struct PackedStage {
    static constexpr int place(int row, int k, int step) {
        const int at = (row & ~15) | (row & 1) * 8 | (row >> 1 & 7);
        return (at + step) * 32 + (k ^ (at & 7) * 4);
    }
};

template <int BM_, int BN_, int STAGES_>
struct WarpgroupTile {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = 32;
    static constexpr int THREADS = 2 * BM;
    static constexpr int GROUPS = 1;
    static constexpr int STAGES = STAGES_;
    static constexpr int STAGE = 4 * BK * (BM + BN);  // bytes
    static constexpr int PART_A = 4 * BK * BM;         // of them before B
    static constexpr int SHARED = STAGES * STAGE / 4;
    static constexpr int WIDTH = 4;
    static constexpr bool BY_ROWS = true;
    static constexpr bool SINGLE = false;
    static constexpr bool PACKED = true;
    static_assert(BM % 64 == 0 && SHARED >= BM * BN && THREADS / 8 % 16 == 0, "warpgroups");

    struct Sums {
        float acc[1][BN / 8][4];
    };

    static __device__ __forceinline__ int depth_b(int depth) { return fx_packed(depth); }
    static __device__ __forceinline__ void arrived() { fx_warpgroup_publish(); }
    static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / 32 * 16; }  // of the warp

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        static_assert(A_INNER && !SUM, "no weight gradients");
        constexpr bool SCALED = !B_INNER;
        const LinearLane<BM, true> rows(row());
        const auto multiply = [&](FxShared stage, float scale) {
            unsigned a[4][4];
            FX_UNROLL
            for (int panel = 0; panel < 2; ++panel) {
                float v[2][4];
                rows.read(v, stage, 0, panel);
                FX_UNROLL
                for (int h = 0; h < 2; ++h) {
                    FX_UNROLL
                    for (int e = 0; e < 4; ++e) {
                        a[2 * panel + e / 2][h + e % 2 * 2] = fx_tf32(SCALED ? v[h][e] * scale : v[h][e]);
                    }
                }
            }
            fx_warpgroup_mma<BN>(sums.acc[0], a, stage + PART_A);
        };
        typedef LinearStaged<BM, true, THREADS> A;
        typedef LinearStaged<BN, true, THREADS, PackedStage> B;
        fx_linear_stages<WarpgroupTile, A, B, SUM, SCALED>(count, source, fx_shared(shared), ready, multiply);
    }

    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Fetch fetch, Use use) {
        fx_linear_fragments<WarpgroupTile, UNROLL>(sums.acc, 0, row(), 0, shared, fetch, use);
    }
};
