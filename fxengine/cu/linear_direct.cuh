// A tile type of the linear kernels (see linear.cuh) on the tensor cores, for small products, where a block waits for
// memory more than it computes: each warp makes the whole tile, from its share of k (16 neighbouring values, then those
// BK further), of fragments that it loads from global memory itself, so that nothing waits for a barrier. The warps' sums
// are added in order at the end.
#pragma once
#include "linear_fragments.cuh"

// R rows of one operand, as one lane of a warp reads them: four neighbouring k of rows 16 i + h + `row`.
// BK: from one step of a warp to its next.
template <int R, int BK, bool INNER, bool WHOLE>
struct LinearDirect {
    static constexpr int ROWS = R / 8;  // of this lane
    const float* p;  // element (row, k)
    int ld;
    int left;  // rows from `row` on that exist
    bool whole;  // all rows exist, and four numbers (INNER) or pairs of rows can be read at once

    __device__ __forceinline__ LinearDirect() {}
    __device__ __forceinline__ LinearDirect(const LinearView& v, int row, int k) : ld(v.ld) {
        left = v.rows - row;
        if constexpr (WHOLE) {
            whole = true;
        } else if constexpr (INNER) {
            whole = fx_quads(v.p, ld) && v.rows >= R;
        } else {
            whole = ((reinterpret_cast<u64>(v.p) | static_cast<u64>(ld) * 4) & 7) == 0 && v.rows >= R;
        }
        p = v.p + (INNER ? static_cast<long long>(row) * ld + k : static_cast<long long>(k) * ld + row);
    }

    static __device__ __forceinline__ constexpr int offset(int i) { return i / 2 * 16 + i % 2; }

    // Reads k_left of the four k, then goes BK further.
    __device__ __forceinline__ void fetch(float (&held)[ROWS][4], int k_left) {
        if (whole && k_left >= 4) {  // no conditions on single loads
            FX_UNROLL
            for (int i = 0; i < ROWS; i += INNER ? 1 : 2) {
                if constexpr (INNER) {
                    fx_load(held[i], p + static_cast<long long>(offset(i)) * ld, 4, true);
                } else {
                    FX_UNROLL
                    for (int e = 0; e < 4; ++e) {
                        const float* from = p + static_cast<long long>(e) * ld + offset(i);
                        const float2 q = *reinterpret_cast<const float2*>(from);
                        held[i][e] = q.x;
                        held[i + 1][e] = q.y;
                    }
                }
            }
        } else {
            const bool quads = INNER && (WHOLE || fx_quads(p, ld));
            FX_UNROLL
            for (int i = 0; i < ROWS; ++i) {
                const int exist = WHOLE || offset(i) < left ? k_left : 0;
                if constexpr (INNER) {
                    fx_load(held[i], p + static_cast<long long>(offset(i)) * ld, exist, quads);
                } else {
                    FX_UNROLL
                    for (int e = 0; e < 4; ++e) {
                        held[i][e] = e < exist ? p[static_cast<long long>(e) * ld + offset(i)] : 0.0f;
                    }
                }
            }
        }
        p += INNER ? BK : static_cast<long long>(BK) * ld;
    }
};

template <int WORD, int BM_, int BN_, int GROUPS_ = 8, bool WHOLE_ = false>
struct DirectTile {
    static constexpr bool WHOLE = WHOLE_;
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int GROUPS = GROUPS_;  // one warp each
    static constexpr int BK = 16 * GROUPS;
    static constexpr int THREADS = 32 * GROUPS;
    static constexpr int AHEAD = BM * BN <= 512 ? 2 : 1;  // steps of a warp that are fetched before they are used
    static constexpr int SHARED = GROUPS * BM * BN;
    static constexpr int WIDTH = BM * BN >= 4 * THREADS ? 4 : BM * BN / THREADS;
    static constexpr bool BY_ROWS = true;
    static constexpr bool SINGLE = BM * BN == THREADS * WIDTH;
    static constexpr bool MAPPED = false;
    static constexpr bool TURNED = false;
    static constexpr bool ROUNDED = true;
    static_assert(BM % 16 == 0 && BN % 16 == 0 && SHARED * 4 <= 48 * 1024, "tile shape");

    struct Sums {
        float acc[BM / 16][BN / 8][4];
        float row[BM / 8];
    };

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float*, Ready ready) {
        typedef LinearDirect<BM, BK, A_INNER, WHOLE> A;
        typedef LinearDirect<BN, BK, B_INNER, WHOLE> B;
        const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
        const int row = 2 * (lane >> 2), k = 4 * (lane & 3);
        A a;
        B b;
        int depth = 0;  // what is left of the source from this warp's next step on; the same for all its lanes
        int begun = 0;  // sources
        int steps = 0;  // of 16 values of k, of the sources that have begun: the next one's first goes to the next warp
        LinearSource s;  // the one that a and b read
        float factor = 1.0f;
        const auto begin = [&] {
            s = source(begun++);
            const int first = 16 * ((warp - steps) & (GROUPS - 1));
            steps += (s.depth + 15) / 16;
            depth = s.depth - first;
            a = A(s.a, row, first + k);
            b = B(s.b, row, first + k);
        };
        const auto settle = [&] {
            factor = s.factor();
            if (factor == 0.0f) depth = 0;
        };
        // Makes a and b ready to read this warp's next step; false if there is none.
        const auto advance = [&] {
            depth -= BK;
            if constexpr (!SUM) {
                while (depth <= 0 && begun < count) {
                    begin();
                    settle();
                }
            }
            return depth > 0;
        };
        float held_a[AHEAD][A::ROWS][4], held_b[AHEAD][B::ROWS][4], scale[AHEAD];
        bool more[AHEAD];
        if constexpr (SUM) ready();
        bool waits = !SUM;
#pragma unroll 1
        do {  // the first weights, then the rest of the first step
            while (depth <= 0 && begun < count) begin();
            if (depth > 0) b.fetch(held_b[0], depth - k);
            if (waits) ready();
            waits = false;
            if (depth > 0) settle();
        } while (depth <= 0 && begun < count);
        more[0] = depth > 0;
        if (more[0]) a.fetch(held_a[0], depth - k);
        scale[0] = factor;
        FX_UNROLL
        for (int i = 1; i < AHEAD; ++i) {
            more[i] = advance();
            if (more[i]) {
                a.fetch(held_a[i], depth - k);
                b.fetch(held_b[i], depth - k);
                scale[i] = factor;
            }
        }
#pragma unroll 1
        while (true) {
            FX_UNROLL
            for (int n = 0; n < AHEAD; ++n) {
                if (!more[n]) return;
                if constexpr (SUM) {
                    FX_UNROLL
                    for (int i = 0; i < A::ROWS * 4; ++i) sums.row[i % A::ROWS] += held_a[n][i % A::ROWS][i / A::ROWS];
                }
                fx_linear_panel<WORD>(
                    sums.acc,
                    [&](int i, float(&v)[2][4]) {
                        FX_UNROLL
                        for (int e = 0; e < 8; ++e) {
                            const float held = held_a[n][2 * i + e / 4][e % 4];
                            v[e / 4][e % 4] = SUM ? held : scale[n] * held;
                        }
                    },
                    [&](int j, float(&v)[2][4]) {
                        FX_UNROLL
                        for (int e = 0; e < 8; ++e) v[e / 4][e % 4] = held_b[n][2 * j + e / 4][e % 4];
                    });
                more[n] = advance();
                if (more[n]) {
                    a.fetch(held_a[n], depth - k);
                    b.fetch(held_b[n], depth - k);
                    scale[n] = factor;
                }
            }
        }
    }

    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Fetch fetch, Use use) {
        fx_linear_fragments<DirectTile, UNROLL>(sums.acc, static_cast<int>(threadIdx.x) >> 5, 0, 0, shared, fetch, use);
    }

    static __device__ __forceinline__ float row_sums(const Sums& sums, float* shared) {
        const int thread = static_cast<int>(threadIdx.x), lane = thread & 31;
        float* part = shared + (thread >> 5 << 2 | (lane & 3)) * BM + 2 * (lane >> 2);
        __syncthreads();
        FX_UNROLL
        for (int i = 0; i < BM / 8; ++i) part[LinearDirect<BM, BK, false, WHOLE>::offset(i)] = sums.row[i];
        return fx_linear_parts_sum<DirectTile>(shared, 4 * GROUPS);
    }
};

template <int WORD, int BM, int BN, int GROUPS>
struct LinearWhole<DirectTile<WORD, BM, BN, GROUPS>> {
    typedef DirectTile<WORD, BM, BN, GROUPS, true> Tile;
    static constexpr bool EXISTS = true;
};
