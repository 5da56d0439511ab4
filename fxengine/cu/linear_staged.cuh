// A tile type of the linear kernels (see linear.cuh) on the tensor cores, for products with much work per block:
// operands are copied to shared memory as they are, STAGES - 1 stages of 32 k ahead of their use, and rounded when a
// warp reads its fragments. A warp owns WM x WN outputs. Blocks are small, so that several share a multiprocessor: each
// waits often, for its first stages, for its barriers, for what its results need.
//
// How a stage lies in shared memory, by chunks of four floats, so that no access has a bank conflict. An operand that
// lies along k (INNER) keeps its rows, of 8 chunks; every second pair of rows has the halves of its 32 k exchanged,
// because fragments are read 2 rows, 2 apart, x 4 chunks at a time. The other kind keeps its k, each with a chunk for
// every four rows; they are read 4 k, 4 apart, x 8 rows at a time, so in every fourth k other chunks are exchanged.
#pragma once
#include "copy_async.cuh"
#include "linear_fragments.cuh"

// R rows of one operand, copied stage after stage: a thread copies UNITS chunks of each, at equal distances.
template <int R, bool INNER, int THREADS>
struct LinearStaged {
    static constexpr int BK = 32;
    static constexpr int UNITS = R * BK / (4 * THREADS);
    static constexpr int STEP = INNER ? THREADS / 8 : 4 * THREADS / R;  // from one unit to the next: in rows, or in k
    static_assert((R == 64 || R == 128) && STEP % 4 == 0 && UNITS > 0, "a thread's chunks");
    const float* next;  // this thread's first chunk of the next stage
    int ld;
    int left;    // rows from the thread's first one on that exist
    bool quads;  // chunks can be copied whole
    bool full;   // all rows exist

    __device__ __forceinline__ LinearStaged() {}
    __device__ __forceinline__ explicit LinearStaged(const LinearView& v) : ld(v.ld) {
        left = v.rows - row();
        quads = fx_quads(v.p, ld);
        full = v.rows >= R;
        next = v.p + (INNER ? static_cast<long long>(row()) * ld + k() : static_cast<long long>(k()) * ld + row());
    }

    // The thread's first row and k within a stage.
    static __device__ __forceinline__ int row() {
        const int thread = static_cast<int>(threadIdx.x);
        return INNER ? thread >> 3 : thread % (R / 4) * 4;
    }
    static __device__ __forceinline__ int k() {
        const int thread = static_cast<int>(threadIdx.x);
        return INNER ? (thread & 7) * 4 : thread / (R / 4);
    }

    // Where in a stage it puts unit u, in bytes.
    static __device__ __forceinline__ int place(int u) {
        const int first = INNER ? row() * BK + (k() ^ (row() & 2) * 8) : k() * R + (row() ^ (k() >> 2 & 3) * 8);
        return 4 * ((INNER ? first : first ^ (u * STEP >> 2 & 3) * 8) + u * STEP * (INNER ? BK : R));
    }

    // Copies the next stage, of which k_left values of k exist; what does not exist is 0.
    __device__ __forceinline__ void fetch(FxShared stage, int k_left) {
        if (full && quads && k_left >= BK) {  // the same for all threads: no conditions on single copies
            FX_UNROLL
            for (int u = 0; u < UNITS; ++u) {
                fx_copy_quad(stage + place(u), next + static_cast<long long>(u * STEP) * ld);
            }
        } else {
            fetch_part(stage, k_left - k());
        }
        skip();
    }

    // `further` values of k exist from the thread's first one on.
    __device__ __forceinline__ void fetch_part(FxShared stage, int further) const {
        const float* from = next;
        int rows_left = left;
#pragma unroll 1
        for (int u = 0; u < UNITS; ++u) {
            const int exist = INNER ? (rows_left > 0 ? further : 0) : (further > 0 ? rows_left : 0);
            const FxShared to = stage + place(u);
            if (quads) {
                fx_copy_quad(to, from, exist < 0 ? 0 : exist < 4 ? exist : 4);
            } else {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) fx_copy_word(to + 4 * e, from + e, e < exist);
            }
            from += static_cast<long long>(STEP) * ld;
            (INNER ? rows_left : further) -= STEP;
        }
    }

    // Goes on to the stage behind the next one.
    __device__ __forceinline__ void skip() { next += INNER ? BK : static_cast<long long>(BK) * ld; }
};

// A lane's view of R rows of a stage: v[h] are four neighbouring k of row first + 16 i + 2 g + h.
template <int R, bool INNER>
struct LinearLane {
    int even, odd;  // bytes from the stage to panels (INNER) or runs of 16 rows of an even and of an odd number

    __device__ __forceinline__ explicit LinearLane(int first) {
        const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
        if constexpr (INNER) {
            even = 4 * ((first + 2 * g) * 32 + 4 * t + g % 2 * 16);
            odd = even ^ 64;
        } else {
            even = 4 * (4 * t * R + (first + 2 * g ^ t * 8));
            odd = even ^ 64;
        }
    }

    __device__ __forceinline__ void read(float (&v)[2][4], FxShared stage, int i, int panel) const {
        if constexpr (INNER) {
            const FxShared from = stage + (panel % 2 == 0 ? even : odd) + i * 2048;
            fx_shared_load(v[0], from);
            fx_shared_load(v[1], from + 128);
        } else {
            const FxShared from = stage + (i % 2 == 0 ? even : odd) + (i / 2 * 128 + panel * 64 * R);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) fx_shared_load(v[0][e], v[1][e], from + 4 * e * R);
        }
    }
};

template <int WORD, int BM_, int BN_, int WM, int WN, int STAGES>
struct StagedTile : LinearWarps<BM_, BN_, WM, WN, STAGES> {
    typedef LinearWarps<BM_, BN_, WM, WN, STAGES> Warps;
    using Warps::BK, Warps::BM, Warps::BN, Warps::PART_A, Warps::STAGE, Warps::THREADS;
    using typename Warps::Place;
    static constexpr bool MAPPED = false;
    static constexpr int AHEAD = STAGES - 1;

    struct Sums {
        float acc[WM / 16][WN / 8][4];
        float row[WM / 16][2];  // of the rows of the lane's fragments; warps of the first columns alone
    };

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        constexpr bool SCALED = A_INNER && !B_INNER;  // others have no scales
        typedef LinearStaged<BM, A_INNER, THREADS> A;
        typedef LinearStaged<BN, B_INNER, THREADS> B;
        const FxShared stages = fx_shared(shared);
        A a;
        B b;
        int depth = 0;  // what is left of the source that a and b read
        int begun = 0;  // sources
        float factor = 1.0f;  // of the source that a and b read
        int early = 0;  // stages whose B is under way already
        float scale[STAGES] = {};  // of the stages under way, the one to be used first
        if constexpr (!SUM) {
            if (count > 0) {
                const LinearSource first = source(0);
                b = B(first.b);
#pragma unroll 1
                for (; first.scale == nullptr && early < AHEAD && early * BK < first.depth; ++early) {
                    b.fetch(stages + early * STAGE + PART_A, first.depth - early * BK);
                }
            }
        }
        ready();
        const Place at;
        const LinearLane<BM, A_INNER> rows(at.row);
        const LinearLane<BN, B_INNER> columns(at.column);
        int left = 0;            // stages under way
        int use = 0, fill = 0;   // where the next stage to be used, and to be filled, begins
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
                a = A(s.a);
                b = B(s.b);
            }
            if (depth > 0) {
                a.fetch(stages + fill, depth);
                if (n + AHEAD < early) {
                    b.skip();
                } else {
                    b.fetch(stages + fill + PART_A, depth);
                }
                ++left;
            }
            fx_copy_commit();
            fill = fill < AHEAD * STAGE ? fill + STAGE : 0;
            if constexpr (SCALED) {
                FX_UNROLL
                for (int i = 0; i < AHEAD; ++i) scale[i] = scale[i + 1];
                scale[AHEAD] = factor;
            }
            if (n < 0) continue;

#pragma unroll(SUM ? 1 : 2)  // the sums of A take registers too
            for (int panel = 0; panel < 2; ++panel) {
                fx_linear_panel<WORD>(
                    sums.acc,
                    [&](int i, float(&v)[2][4]) {
                        rows.read(v, stages + use, i, panel);
                        if constexpr (SUM) {
                            if (at.column == 0) fx_linear_add_rows(sums.row[i], v);
                        }
                        if constexpr (SCALED) {
                            if (scale[0] != 1.0f) {
                                FX_UNROLL
                                for (int e = 0; e < 8; ++e) v[e / 4][e % 4] *= scale[0];
                            }
                        }
                    },
                    [&](int j, float(&v)[2][4]) { columns.read(v, stages + use + PART_A, j, panel); });
            }
            use = use < AHEAD * STAGE ? use + STAGE : 0;
            --left;
        }
        fx_copy_wait<0>();
        __syncthreads();
    }

    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Fetch fetch, Use use) {
        const Place at;
        fx_linear_fragments<StagedTile, UNROLL>(sums.acc, 0, at.row, at.column, shared, fetch, use);
    }

    static __device__ __forceinline__ float row_sums(const Sums& sums, float* shared) {
        return Warps::warp_rows(sums.row, shared);
    }
};
