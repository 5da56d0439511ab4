// A tile type of the linear kernels (see linear.cuh) on the tensor cores of sm_90, for products with much work per block:
// the instruction reads the weights from shared memory itself, so that only A goes through registers, once. It cannot
// round them: they come from a packed copy (pack.cuh), of which one thread fetches a stage by a single copy. A is staged
// as in linear_staged.cuh. A warpgroup owns 64 rows of the block's outputs; blocks are small, so that several share a
// multiprocessor and one computes while another waits.
#pragma once
#include "bulk_copy.cuh"
#include "linear_staged.cuh"
#include "pack.cuh"
#include "wgmma.cuh"

// The packed rows of a tile, stage after stage.
template <int BN>
struct PackedStaged {
    const float* next;
    long long block;  // numbers from one block to the next
    int bytes;        // of a stage, as far as rows exist

    __device__ __forceinline__ PackedStaged() {}
    __device__ __forceinline__ explicit PackedStaged(const LinearView& v) : next(v.p), block(32ll * v.ld) {
        const int rows = fx_packed_rows(v.rows);
        bytes = 128 * (rows < BN ? rows : BN);
    }
    __device__ __forceinline__ void fetch(FxShared stage, u64* barrier) const {
        if (threadIdx.x != 0) return;
        fx_bulk_expect(barrier, bytes);
        fx_bulk_copy(stage, next, bytes, barrier);
    }
    __device__ __forceinline__ void skip() { next += block; }
};

template <int BM_, int BN_, int STAGES>
struct WarpgroupTile {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = 32;
    static constexpr int THREADS = 2 * BM;
    static constexpr int GROUPS = 1;
    static constexpr int AHEAD = STAGES - 1;
    static constexpr int STAGE = 4 * BK * (BM + BN);  // bytes
    static constexpr int PART_A = 4 * BK * BM;         // of them before B
    static constexpr int SHARED = STAGES * STAGE / 4;
    static constexpr int WIDTH = 4;
    static constexpr bool BY_ROWS = false;
    static constexpr bool SINGLE = false;
    static constexpr bool WHOLE = false;
    static constexpr bool PACKED = true;
    static constexpr bool ROUNDED = true;
    static_assert(BM % 64 == 0, "warpgroups");

    struct Sums {
        float acc[BN / 8][4];
    };

    static __device__ __forceinline__ int row() { return static_cast<int>(threadIdx.x) / 32 * 16; }  // of the warp

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        static_assert(A_INNER && !SUM, "no weight gradients");
        constexpr bool SCALED = !B_INNER;  // others have no scales
        __shared__ u64 barriers[STAGES];   // of the copies of B
        const FxShared stages = fx_shared(shared);
        if (threadIdx.x == 0) {
            FX_UNROLL
            for (int i = 0; i < STAGES; ++i) fx_bulk_barrier(barriers + i);
        }
        LinearStaged<BM, true, THREADS> a;
        PackedStaged<BN> b;
        int depth = 0;             // what is left of the source that a and b read
        int begun = 0;             // sources
        float factor = 1.0f;       // of the source that a and b read
        int early = 0;             // stages whose B is under way already
        float scale[STAGES] = {};  // of the stages under way, the one to be used first
        if (count > 0) {
            const LinearSource first = source(0);
            b = PackedStaged<BN>(first.b);
#pragma unroll 1
            for (; first.scale == nullptr && early < AHEAD && early * BK < first.depth; ++early) {
                b.fetch(stages + early * STAGE + PART_A, barriers + early);
                b.skip();
            }
        }
        ready();
        const LinearLane<BM, true> rows(row());
        int left = 0;           // stages under way
        int use = 0, fill = 0;  // which stage is used, and filled, next
        int parity = 0;         // of the stage that is used next
#pragma unroll 1
        for (int n = -AHEAD; n < 0 || left > 0; ++n) {
            if (n >= 0) {
                fx_copy_wait<AHEAD - 1>();
                __syncthreads();
            }
            depth -= BK;
            while (depth <= 0 && begun < count) {
                const LinearSource s = source(begun++);
                factor = s.factor();
                depth = factor != 0.0f ? s.depth : 0;
                a = LinearStaged<BM, true, THREADS>(s.a);
                b = PackedStaged<BN>(s.b);
            }
            if (depth > 0) {
                a.fetch(stages + fill * STAGE, depth);
                if (n + AHEAD >= early) b.fetch(stages + fill * STAGE + PART_A, barriers + fill);
                b.skip();
                ++left;
            }
            fx_copy_commit();
            fill = fill < AHEAD ? fill + 1 : 0;
            if constexpr (SCALED) {
                FX_UNROLL
                for (int i = 0; i < AHEAD; ++i) scale[i] = scale[i + 1];
                scale[AHEAD] = factor;
            }
            if (n < 0) continue;

            const FxShared stage = stages + use * STAGE;
            unsigned words[4][4];
            FX_UNROLL
            for (int panel = 0; panel < 2; ++panel) {
                float v[2][4];
                rows.read(v, stage, 0, panel);
                FX_UNROLL
                for (int h = 0; h < 2; ++h) {
                    FX_UNROLL
                    for (int e = 0; e < 4; ++e) {
                        words[2 * panel + e / 2][h + e % 2 * 2] = fx_tf32(SCALED ? v[h][e] * scale[0] : v[h][e]);
                    }
                }
            }
            fx_bulk_wait(barriers + use, parity);
            fx_warpgroup_begin<BN>(sums.acc, words, stage + PART_A);
            fx_warpgroup_wait<BN>(sums.acc);
            if (use == AHEAD) parity ^= 1;
            use = use < AHEAD ? use + 1 : 0;
            --left;
        }
        fx_copy_wait<0>();
    }

    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float*, Fetch fetch, Use use) {
        const int lane = static_cast<int>(threadIdx.x) & 31;
        const int down = row() + 2 * (lane >> 2), right = 4 * (lane & 3);
        FX_UNROLL
        for (int first = 0; first < BN / 16; first += UNROLL) {
            float more[UNROLL][2][4];
            FX_UNROLL
            for (int i = 0; i < UNROLL; ++i) {
                FX_UNROLL
                for (int h = 0; h < 2; ++h) fetch(down + h, right + 16 * (first + i), more[i][h]);
            }
            FX_UNROLL
            for (int i = 0; i < UNROLL; ++i) {
                FX_UNROLL
                for (int h = 0; h < 2; ++h) {
                    const float(&even)[4] = sums.acc[2 * (first + i)], (&odd)[4] = sums.acc[2 * (first + i) + 1];
                    float v[4] = {even[2 * h], odd[2 * h], even[2 * h + 1], odd[2 * h + 1]};
                    use(down + h, right + 16 * (first + i), v, more[i][h]);
                }
            }
        }
    }
};
