// A tile type of the linear kernels (see linear.cuh) for large weight gradients, on sm_90 and newer: the copy engine
// brings stages of both operands to shared memory as they lie, k after k, and warps read their fragments there
// (mma.cuh). B arrives rounded to tf32; A as it is, since its sums are the gradient of the bias, and is rounded
// likewise when it is read.
//
// A stage is boxes of 32 k x 32 rows of an operand. A k has 128 bytes there, in which chunk c of 16 lies in place
// c ^ (k & 7). A lane reads two neighbouring rows of the k 2 t and 2 t + 1 of eight: no access has a bank conflict.
//
// What is made is B . A^T, turned when it goes through shared memory. Of a left operand two neighbouring rows are
// registers of one fragment, in the order in which they are read; of a right operand they belong to two fragments and
// would be moved. Rounding writes registers anew anyway, so the operand that is rounded is the right one.
#pragma once
#include "bulk_copy.cuh"
#include "linear_fragments.cuh"

template <int BM_, int BN_, int WM, int WN, int STAGES>
struct MappedTile : LinearWarps<BM_, BN_, WM, WN, STAGES> {
    typedef LinearWarps<BM_, BN_, WM, WN, STAGES> Warps;
    using Warps::BK, Warps::BM, Warps::BN, Warps::PART_A, Warps::STAGE;
    using typename Warps::Place;
    static constexpr bool MAPPED = true;
    static constexpr bool TURNED = true;
    static constexpr int BOX = 4 * BK * 32;  // bytes

    struct Sums {
        float acc[WM / 16][WN / 16][2][4];  // of fragments 2 j and 2 j + 1 of the rows by fragment i of the columns
        float row[WM / 16][2];              // of the rows of the lane's fragments; warps of the first columns alone
    };

    // A lane's view of the rows of a stage from `first` on.
    struct Lane {
        int even, odd;  // bytes from the stage to the first two rows of its even and of its odd k

        __device__ __forceinline__ explicit Lane(int first) {
            const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, k = 2 * (lane & 3);
            const int boxes = first / 32 * BOX + g % 2 * 8;
            even = boxes + k * 128 + (g >> 1 ^ k) * 16;
            odd = boxes + (k + 1) * 128 + (g >> 1 ^ k + 1) * 16;
        }

        // v[h]: four k of row 16 i + 2 g + h, alike for both operands.
        __device__ __forceinline__ void read(float (&v)[2][4], FxShared stage, int i, int panel) const {
            const FxShared from = stage + (i / 2 * BOX + panel * 16 * 128);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const int at = (e % 2 == 0 ? even : odd) ^ i % 2 * 64;
                fx_shared_load(v[0][e], v[1][e], from + at + e / 2 * 8 * 128);
            }
        }
    };

    // By one thread: stage n of the source.
    static __device__ __forceinline__ void fetch(const LinearBoxes& s, int n, FxShared stage, u64* barrier) {
        fx_bulk_expect(barrier, STAGE);
#pragma unroll 1
        for (int u = 0; u < (BM + BN) / 32; ++u) {
            const bool second = u >= BM / 32;
            const LinearBox box = second ? s.b : s.a;
            const int row = box.row + (second ? u - BM / 32 : u) * 32;
            fx_bulk_copy_box(stage + u * BOX, box.map, box.k + n * BK, row, barrier);
        }
    }

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        static_assert(SUM && !A_INNER && !B_INNER, "weight gradients alone");
        __shared__ u64 barriers[STAGES];  // of the stages' copies
        const FxShared stages = fx_shared(shared);
        const bool feeds = threadIdx.x == 0;
        const LinearBoxes s = source(0);
        const int steps = count > 0 ? (s.depth + BK - 1) / BK : 0;
        if (feeds) {
            FX_UNROLL
            for (int i = 0; i < STAGES; ++i) fx_bulk_barrier(barriers + i);
            fx_bulk_prefetch_map(s.a.map);
            fx_bulk_prefetch_map(s.b.map);
        }
        ready();
        if (feeds) {
#pragma unroll 1
            for (int i = 0; i < STAGES && i < steps; ++i) fetch(s, i, stages + i * STAGE, barriers + i);
        }
        __syncthreads();
        const Place at;
        const Lane rows(at.row), columns(at.column);
        int use = 0, parity = 0;  // the stage that is used next
#pragma unroll 1
        for (int n = 0; n < steps; ++n) {
            const FxShared stage = stages + use * STAGE;
            fx_bulk_wait(barriers + use, parity);
#pragma unroll
            for (int panel = 0; panel < BK / 16; ++panel) {
                unsigned left[WN / 16][2][4], right[2][2][2];
                FX_UNROLL
                for (int i = 0; i < WN / 16; ++i) {
                    float v[2][4];
                    columns.read(v, stage + PART_A, i, panel);
                    FX_UNROLL
                    for (int e = 0; e < 8; ++e) left[i][e / 4][e % 4] = __float_as_uint(v[e % 2][e / 2]);
                }
                FX_UNROLL
                for (int j = 0; j < WM / 16; ++j) {  // two fragments at a time, for the sake of registers
                    float v[2][4];
                    rows.read(v, stage, j, panel);
                    if (at.column == 0) fx_linear_add_rows(sums.row[j], v);
                    FX_UNROLL
                    for (int e = 0; e < 8; ++e) right[e / 4][e / 2 % 2][e % 2] = fx_tf32_even(v[e / 4][e % 4]);
                    fx_mma<1, 2, WN / 16, 2>(sums.acc[j], left, right);
                }
            }
            __syncthreads();
            if (feeds && n + STAGES < steps) fetch(s, n + STAGES, stage, barriers + use);
            if (use == STAGES - 1) parity ^= 1;
            use = use < STAGES - 1 ? use + 1 : 0;
        }
    }

    // Fragment i of the columns has columns 16 i + 2 g + h; fragments 2 j and 2 j + 1 of the rows have rows 16 j + 4 t
    // to 16 j + 4 t + 3.
    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Fetch fetch, Use use) {
        const Place at;
        const int lane = static_cast<int>(threadIdx.x) & 31;
        const int row = at.row + 4 * (lane & 3), column = at.column + 2 * (lane >> 2);
        FX_UNROLL
        for (int j = 0; j < WM / 16; ++j) {
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                FX_UNROLL
                for (int i = 0; i < WN / 16; ++i) {
                    const float(&acc)[4] = sums.acc[j][i][e & 1];
                    float* const to = shared + fx_linear_place<MappedTile>(row + 16 * j + e, column + 16 * i);
                    *reinterpret_cast<float2*>(to) = make_float2(acc[e >> 1], acc[2 + (e >> 1)]);
                }
            }
        }
        fx_linear_reduce<MappedTile, UNROLL>(shared, fetch, use);
    }

    static __device__ __forceinline__ float row_sums(const Sums& sums, float* shared) {
        return Warps::warp_rows(sums.row, shared);
    }
};
