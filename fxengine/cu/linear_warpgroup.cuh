// A tile type of the linear kernels (see linear.cuh) on the tensor cores of sm_90, for products with much work per
// block: the copy engine brings both operands to shared memory, rounded, and the instruction reads them there, so that
// threads have nothing to do with them. A warpgroup owns 64 rows of the block's outputs; blocks are small, so that
// several share a multiprocessor and one computes while another waits.
#pragma once
#include "bulk_copy.cuh"
#include "linear.cuh"
#include "wgmma.cuh"

template <int BM_, int BN_, int STAGES>
struct WarpgroupTile : LinearStages<BM_, BN_, STAGES> {
    typedef LinearStages<BM_, BN_, STAGES> Stages;
    using Stages::BK, Stages::BM, Stages::BN, Stages::PART_A, Stages::STAGE;
    static constexpr int THREADS = 2 * BM;
    static constexpr bool MAPPED = true;
    static_assert(BM % 64 == 0, "warpgroups");

    // Not zeros at first: they would have to be set, and then products wait for each other (fx_warpgroup_begin).
    struct Sums {
        float acc[BN / 8][4];
        bool any;  // set by add: a source was not left out
        __device__ __forceinline__ Sums() {}
    };

    // The stages of all sources, one after another, as one thread asks for them.
    struct Feed {
        LinearBox a, b;
        int left = 0;          // of the depth of the source that a and b read
        unsigned waiting = 0;  // sources that have not begun, a bit each

        template <class Source>
        __device__ __forceinline__ bool next(Source source) {
            a.k += BK;
            b.k += BK;
            left -= BK;
            if (left <= 0 && waiting != 0) {
                const LinearBoxes s = source(__ffs(static_cast<int>(waiting)) - 1);
                waiting &= waiting - 1;
                a = s.a;
                b = s.b;
                left = s.depth;
            }
            return left > 0;
        }
        __device__ __forceinline__ void fetch_a(FxShared stage, u64* barrier) const {
            fx_bulk_copy_box(stage, a.map, a.row, a.k, barrier);
        }
        __device__ __forceinline__ void fetch_b(FxShared stage, u64* barrier) const {
            fx_bulk_expect(barrier, STAGE);
            fx_bulk_copy_box(stage + PART_A, b.map, b.row, b.k, barrier);
        }
    };

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        static_assert(A_INNER && !SUM, "no weight gradients");
        __shared__ u64 barriers[STAGES];  // of the stages' copies
        const FxShared stages = fx_shared(shared);
        const bool feeds = threadIdx.x == 0;
        Feed feed;
        int early = 0;  // stages whose B is under way already
        if (feeds) {
            FX_UNROLL
            for (int i = 0; i < STAGES; ++i) fx_bulk_barrier(barriers + i);
            if (count > 0) {
                const LinearBoxes first = source(0);
                fx_bulk_prefetch_map(first.a.map);
#pragma unroll 1
                for (; first.scale == nullptr && early < STAGES && early * BK < first.depth; ++early) {
                    feed.b = first.b;
                    feed.b.k += early * BK;
                    feed.fetch_b(stages + early * STAGE, barriers + early);
                }
            }
        }
        ready();
        // Each lane looks at one source (at most 16): all scales are under way at once.
        const int lane = static_cast<int>(threadIdx.x) & 31;
        int steps = 0;
        if (lane < count) {
            const LinearBoxes s = source(lane);
            if (s.factor() != 0.0f) steps = (s.depth + BK - 1) / BK;
        }
        feed.waiting = __ballot_sync(0xffffffffu, steps > 0);
        if (feeds) {
#pragma unroll 1
            for (int i = 0; i < STAGES && feed.next(source); ++i) {
                if (i >= early) feed.fetch_b(stages + i * STAGE, barriers + i);
                feed.fetch_a(stages + i * STAGE, barriers + i);
            }
        }
        steps = __reduce_add_sync(0xffffffffu, steps);
        sums.any = steps > 0;
        __syncthreads();
        const int rows = static_cast<int>(threadIdx.x) / 128 * 64 * 4 * BK;  // of the warpgroup, in bytes
        int use = 0, parity = 0;  // the stage that is used next
        int used = 0;             // the one before, whose product may still be under way
#pragma unroll 1
        for (int n = 0; n < steps; ++n) {
            const FxShared stage = stages + use * STAGE;
            fx_bulk_wait(barriers + use, parity);
            fx_warpgroup_begin<BN>(sums.acc, stage + rows, stage + PART_A, n > 0);
            fx_warpgroup_wait_but_one();
            __syncthreads();
            if (feeds && n > 0 && feed.next(source)) {
                feed.fetch_b(stages + used * STAGE, barriers + used);
                feed.fetch_a(stages + used * STAGE, barriers + used);
            }
            used = use;
            if (use == STAGES - 1) parity ^= 1;
            use = use < STAGES - 1 ? use + 1 : 0;
        }
        fx_warpgroup_wait<BN>(sums.acc);
        __syncthreads();  // no product reads its operands any more
        if (steps > 0) return;
        FX_UNROLL
        for (int i = 0; i < BN / 2; ++i) sums.acc[i / 4][i % 4] = 0.0f;
    }

    // Through shared memory: from registers, each run of outputs would have code of its own.
    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Fetch fetch, Use use) {
        const int lane = static_cast<int>(threadIdx.x) & 31;
        const int row = static_cast<int>(threadIdx.x) / 32 * 16 + (lane >> 2), column = 2 * (lane & 3);
        FX_UNROLL
        for (int j = 0; j < BN / 8; ++j) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                float* const to = shared + fx_linear_place<WarpgroupTile>(row + 8 * h, column + 8 * j);
                *reinterpret_cast<float2*>(to) = make_float2(sums.acc[j][2 * h], sums.acc[j][2 * h + 1]);
            }
        }
        fx_linear_reduce<WarpgroupTile, UNROLL>(shared, fetch, use);
    }
};
