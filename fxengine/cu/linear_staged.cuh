// A tile type of the linear kernels (see linear.cuh) on the tensor cores, for products with much work per block:
// operands go through shared memory, fetched AHEAD stages ahead into registers and rounded when they are stored, and a
// warp owns WM x WN outputs. Where GROUPS of warps share outputs they are added in order at the end.
#pragma once
#include "linear_fragments.cuh"

// Where a chunk of four words lies in a stage [panel of 16 words][R rows][16 words]. Rows are swapped in pairs and the
// chunks of a row permuted, so that no access has a bank conflict: fragments read 2 neighbouring rows x 4 chunks at a
// time, LinearStaged stores 2 rows x 4 chunks (INNER), or chunks and words of a chunk for 8 rows, 4 apart.
template <int R>
__device__ __forceinline__ int fx_linear_chunk(int panel, int row, int chunk) {
    return panel * R * 16 + (row ^ ((row >> 4 ^ panel) & 1)) * 16 + ((chunk ^ row >> 2) & 3) * 4;
}

// R rows of one operand, read stage after stage of KW words per row. INNER: a thread reads chunks of four words at rows
// `row`, row + 64, ...; else PART words of four neighbouring rows at chunk, chunk + CHUNK_STEP, ...
template <int WORD, int R, int KW, bool INNER>
struct LinearStaged {
    static constexpr int PART = R * KW >= 2048 ? 2 : 1;
    static constexpr int UNITS = INNER ? R * KW / 1024 : R * KW / (1024 * PART);
    static constexpr int LOADS = INNER ? WORD : PART * WORD;  // of four numbers, in a unit
    static constexpr int CHUNK_STEP = 8 * PART / (R / 32);
    static constexpr int SUM_PARTS = 1024 / R;  // threads that share their rows (not INNER)
    static_assert(UNITS >= 1 && (R == 64 || R == 128) && KW % 16 == 0, "every thread reads the same number of units");
    static_assert(INNER || CHUNK_STEP % 4 == 0, "the units of a thread lie at the same place of their panels");
    const float* next;  // this thread's first number of the next stage
    int ld;
    int left;   // rows from the thread's first one on that exist
    int at;     // of the first unit, in the stage in shared memory
    bool full;  // all rows exist and can be read four numbers at a time

    __device__ __forceinline__ LinearStaged() {}
    __device__ __forceinline__ explicit LinearStaged(const LinearView& v) : ld(v.ld) {
        const int thread = static_cast<int>(threadIdx.x);
        if constexpr (INNER) {
            at = fx_linear_chunk<R>(0, row(), thread & 3);
        } else {
            const int chunk = thread / (8 * (4 / PART)) / (R / 32), part = (thread >> 3) % (4 / PART);
            at = fx_linear_chunk<R>(chunk >> 2, row(), chunk & 3) + PART * part;
        }
        left = v.rows - row();
        full = fx_quads(v.p, ld) && v.rows >= R;
        next = v.p + (INNER ? static_cast<long long>(row()) * ld + k(thread)
                            : static_cast<long long>(k(thread)) * ld + row());
    }

    // The thread's first row.
    static __device__ __forceinline__ int row() {
        const int thread = static_cast<int>(threadIdx.x);
        return INNER ? thread >> 2 : 4 * ((thread & 7) + 8 * (thread / (8 * (4 / PART)) % (R / 32)));
    }

    // The k of its first unit, within the stage.
    static __device__ __forceinline__ int k(int thread) {
        const int chunk = thread / (8 * (4 / PART)) / (R / 32), part = (thread >> 3) % (4 / PART);
        return WORD * (INNER ? 4 * (thread & 3) : 4 * chunk + PART * part);
    }

    // How far unit u lies behind the first: in panels, in k, and (INNER) in rows.
    static __device__ __forceinline__ constexpr int panels(int u) {
        return INNER ? u / (R / 64) : u * (CHUNK_STEP / 4);
    }
    static __device__ __forceinline__ constexpr int ks(int u) { return 16 * WORD * panels(u); }
    static __device__ __forceinline__ constexpr int rows(int u) { return INNER ? u % (R / 64) * 64 : 0; }

    // Where unit u goes: another panel, odd against even, swaps the rows; 64 rows further nothing changes.
    __device__ __forceinline__ int place(int u) const {
        return (at ^ (panels(u) & 1) * 16) + panels(u) * R * 16 + rows(u) * 16;
    }

    // Where load i of all reads its four numbers.
    __device__ __forceinline__ const float* load(int i) const {
        const int u = i / LOADS, l = i % LOADS;
        return INNER ? next + static_cast<long long>(rows(u)) * ld + (ks(u) + 4 * l)
                     : next + static_cast<long long>(ks(u) + l) * ld;
    }

    // The next stage, of which k_left values of k exist.
    __device__ __forceinline__ void fetch(float (&held)[UNITS][LOADS][4], int k_left) {
        if (full && k_left >= KW * WORD) {  // the same for all threads: no conditions on single loads
            FX_UNROLL
            for (int i = 0; i < UNITS * LOADS; ++i) fx_load(held[i / LOADS][i % LOADS], load(i), 4, true);
        } else {
            const bool quads = fx_quads(next, ld);  // as for the first stage: 16 bytes from there, or ld says no
            const int k0 = k(fx_linear_again(static_cast<int>(threadIdx.x)));  // rarely needed: not worth a register
            FX_UNROLL
            for (int i = 0; i < UNITS * LOADS; ++i) {
                const int u = i / LOADS, further = k_left - k0 - ks(u) - i % LOADS * (INNER ? 4 : 1);
                const int exist = INNER ? (rows(u) < left ? further : 0) : (further > 0 ? left : 0);
                fx_load(held[u][i % LOADS], load(i), exist, quads);
            }
        }
        next += INNER ? KW * WORD : static_cast<long long>(KW * WORD) * ld;
    }

    // Rounds what was fetched and stores it. The scale is that of the source it was fetched from.
    __device__ __forceinline__ void stash(unsigned* stage, const float (&held)[UNITS][LOADS][4], float scale) const {
        FX_UNROLL
        for (int u = 0; u < UNITS; ++u) {
            if constexpr (INNER) {
                float v[4 * WORD];
                FX_UNROLL
                for (int e = 0; e < 4 * WORD; ++e) v[e] = scale * held[u][e / 4][e % 4];
                *reinterpret_cast<uint4*>(stage + place(u)) =
                    make_uint4(fx_linear_word<WORD>(v), fx_linear_word<WORD>(v + WORD),
                               fx_linear_word<WORD>(v + 2 * WORD), fx_linear_word<WORD>(v + 3 * WORD));
            } else {
                FX_UNROLL
                for (int r = 0; r < 4; ++r) {
                    float v[LOADS];
                    FX_UNROLL
                    for (int l = 0; l < LOADS; ++l) v[l] = held[u][l][r];
                    unsigned* to = stage + (place(u) ^ 16 * r);
                    if constexpr (PART == 2) {
                        *reinterpret_cast<uint2*>(to) =
                            make_uint2(fx_linear_word<WORD>(v), fx_linear_word<WORD>(v + WORD));
                    } else {
                        *to = fx_linear_word<WORD>(v);
                    }
                }
            }
        }
    }

    // Which of the SUM_PARTS shares of the sum over k this thread has.
    static __device__ __forceinline__ int sum_part() {
        const int thread = static_cast<int>(threadIdx.x);
        return thread / (8 * (4 / PART)) / (R / 32) * (4 / PART) + (thread >> 3) % (4 / PART);
    }
};

template <int WORD, int BM_, int BN_, int KW, int WM, int WN, int AHEAD>
struct StagedTile {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = KW * WORD;
    static constexpr int THREADS = 256;
    static constexpr bool PAIRS = false;
    static constexpr int ACROSS = BN / WN;
    static constexpr int WARPS = BM / WM * ACROSS;  // that make the tile together
    static constexpr int GROUPS = 8 / WARPS;        // of warps; each takes its panels of 16 words of a stage
    static constexpr int PANELS = KW / 16;
    static constexpr int STAGE = KW * (BM + BN);
    static constexpr int SUMS = GROUPS > 1 ? GROUPS * BM * BN : 0;
    static constexpr int SHARED = 2 * STAGE > SUMS ? 2 * STAGE : SUMS;
    static constexpr int WIDTH = 4;
    static constexpr bool SINGLE = false;
    static_assert(GROUPS * WARPS == 8 && PANELS % GROUPS == 0 && WM % 16 == 0 && WN % 16 == 0, "warp tiles");
    static_assert(SHARED * 4 <= 48 * 1024, "static shared memory");

    struct Sums {
        float acc[WM / 16][WN / 8][4];
        float row[4];
    };
    struct Place {
        int group, row, column;
        __device__ __forceinline__ Place() {
            const int warp = static_cast<int>(threadIdx.x) >> 5;
            group = warp / WARPS;
            row = warp % WARPS / ACROSS * WM;
            column = warp % ACROSS * WN;
        }
    };
    typedef LinearStaged<WORD, BM, KW, false> SummedA;

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        typedef LinearStaged<WORD, BM, KW, A_INNER> A;
        typedef LinearStaged<WORD, BN, KW, B_INNER> B;
        A a;
        B b;
        int depth = 0;  // what is left of the source that a and b read
        int begun = 0;  // sources
        float factor = 1.0f;  // of the source that a and b read
        const auto begin = [&] {
            const LinearSource s = source(begun++);
            factor = s.factor();
            depth = factor != 0.0f ? s.depth : 0;
            a = A(s.a);
            b = B(s.b);
        };
        // Makes a and b ready to read the next stage; false if there is none.
        const auto advance = [&] {
            depth -= BK;
            if constexpr (!SUM) {  // with SUM there is but one source, and nothing of it is to be kept
                while (depth <= 0 && begun < count) begin();
            }
            return depth > 0;
        };
        const Place at;
        const int lane = static_cast<int>(threadIdx.x) & 31;
        const int row = fx_linear_lane_row<PAIRS>(lane);
        // Where the lane's chunk lies in 16 rows of an even and of an odd panel; 16 rows further odd and even change.
        const int even_a = fx_linear_chunk<BM>(0, at.row + row, lane & 3);
        const int even_b = fx_linear_chunk<BN>(0, at.column + row, lane & 3);
        const int odd_a = even_a ^ 16, odd_b = even_b ^ 16;
        unsigned* const stages = reinterpret_cast<unsigned*>(shared);
        int now = 0;  // where the current one of the two stages begins
        const auto compute = [&] {
            FX_UNROLL
            for (int p = 0; p < PANELS / GROUPS; ++p) {
                const int panel = p * GROUPS + at.group;
                const bool odd = GROUPS > 1 ? at.group & 1 : p & 1;
                unsigned fa[WM / 16][2][4], fb[WN / 8][2][2];
                FX_UNROLL
                for (int j = 0; j < WN / 8; ++j) {
                    const int from = odd != (j / 2 % 2 == 1) ? odd_b : even_b;
                    const uint4 q = *reinterpret_cast<const uint4*>(stages + now + from + BM * KW + panel * BN * 16 +
                                                                    j / 2 * 256 + j % 2 * 32);
                    fb[j][0][0] = q.x;
                    fb[j][0][1] = q.y;
                    fb[j][1][0] = q.z;
                    fb[j][1][1] = q.w;
                }
                FX_UNROLL
                for (int i = 0; i < WM / 16; ++i) {
                    FX_UNROLL
                    for (int h = 0; h < 2; ++h) {
                        const int from = odd != (i % 2 == 1) ? odd_a : even_a;
                        const uint4 q =
                            *reinterpret_cast<const uint4*>(stages + now + from + panel * BM * 16 + i * 256 + h * 32);
                        fa[i][0][h] = q.x;
                        fa[i][0][h + 2] = q.y;
                        fa[i][1][h] = q.z;
                        fa[i][1][h + 2] = q.w;
                    }
                }
                fx_mma<WORD, 2>(sums.acc, fa, fb);
            }
        };
        float held_a[AHEAD][A::UNITS][A::LOADS][4], held_b[AHEAD][B::UNITS][B::LOADS][4], scale[AHEAD];
        bool more[AHEAD];
        ready();
        if (SUM && count > 0) begin();
        FX_UNROLL
        for (int n = 0; n < AHEAD; ++n) {
            more[n] = SUM && n == 0 ? depth > 0 : advance();
            if (more[n]) {
                a.fetch(held_a[n], depth);
                b.fetch(held_b[n], depth);
                scale[n] = factor;
            }
        }
        const auto run = [&] {
#pragma unroll 1
            while (true) {
                FX_UNROLL
                for (int n = 0; n < AHEAD; ++n) {
                    if (!more[n]) return;
                    if constexpr (SUM) {
                        FX_UNROLL
                        for (int i = 0; i < A::UNITS * A::LOADS * 4; ++i) {
                            sums.row[i % 4] += held_a[n][i / 4 / A::LOADS][i / 4 % A::LOADS][i % 4];
                        }
                    }
                    a.stash(stages + now, held_a[n], scale[n]);
                    b.stash(stages + now + BM * KW, held_b[n], 1.0f);
                    __syncthreads();
                    more[n] = advance();
                    if (more[n]) {
                        a.fetch(held_a[n], depth);
                        b.fetch(held_b[n], depth);
                        scale[n] = factor;
                    }
                    compute();
                    now = STAGE - now;
                }
            }
        };
        run();
        __syncthreads();
    }

    template <class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Use use) {
        const Place at;
        fx_linear_fragments<StagedTile>(sums.acc, at.group, at.row, at.column, shared, use);
    }

    static __device__ __forceinline__ float row_sums(const Sums& sums, float* shared) {
        __syncthreads();
        fx_store(shared + SummedA::sum_part() * BM + SummedA::row(), sums.row, 4, true);
        return fx_linear_parts_sum<StagedTile>(shared, SummedA::SUM_PARTS);
    }
};
