// Tile types of the linear kernels (see linear.cuh) on the tensor cores: float32 in memory, operands rounded to tf32 or
// bf16 on their way into the product, float32 sums. WORD (mma.cuh) is 1 for tf32, 2 for bf16.
//
// A block of 256 threads has 8 warps. StagedTile serves products with much work per block: operands go through shared
// memory, fetched one stage ahead into registers and rounded when they are stored, and a warp owns WM x WN outputs.
// DirectTile serves small products, where a block waits for memory more than it computes: each warp makes the whole
// tile, of the k = 16 warp .. 16 warp + 15 of every 128, from fragments that it loads from global memory itself, so that
// nothing waits for a barrier. Where several warps share outputs they are added in a fixed order at the end. The order
// of a sum therefore depends on the tile type and the sizes alone; within one mma instruction it is the hardware's.
//
// Both number rows and columns so that a thread's outputs are runs of four. Row 16 i + 4 (g / 2) + 2 h + g % 2 of A is
// row g + 8 h of fragment i, and the same column of the outputs is row g of fragment 2 i + h of B; so the thread holds
// columns 4 t .. 4 t + 3 of a pair of fragments. The k of a fragment are permuted too (alike for A and B): a thread gets
// neighbouring words where the instruction speaks of t and t + 4.
#pragma once
#include "linear.cuh"
#include "mma.cuh"

// Two words from the WORD * 2 numbers that a thread read at neighbouring k.
template <int WORD>
__device__ __forceinline__ unsigned fx_linear_word(const float* v) {
    if constexpr (WORD == 1) {
        return fx_tf32(v[0]);
    } else {
        return fx_bf16x2(v[0], v[1]);
    }
}

// -- operands through shared memory ---------------------------------------------------------------------------------

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
    float scale;

    __device__ __forceinline__ LinearStaged() {}
    __device__ __forceinline__ explicit LinearStaged(const LinearView& v) : ld(v.ld), scale(v.scale) {
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

// What StagedTile and DirectTile share: fragments to outputs. A warp's outputs start at (row, column) of the tile.
template <class T, int M, int N, class Use>
__device__ __forceinline__ void fx_linear_fragments(const float (&acc)[M][N][4], int group, int row, int column,
                                                    float* shared, Use use) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    row += 4 * (lane >> 3) + (lane >> 2 & 1);
    column += 4 * (lane & 3);
    FX_UNROLL
    for (int i = 0; i < M; ++i) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            FX_UNROLL
            for (int j = 0; j < N; j += 2) {
                float v[4] = {acc[i][j][2 * h], acc[i][j][2 * h + 1], acc[i][j + 1][2 * h], acc[i][j + 1][2 * h + 1]};
                const int at_row = row + 16 * i + 2 * h, at_column = column + 8 * j;
                if constexpr (T::GROUPS == 1) {
                    use(at_row, at_column, v);
                } else {
                    fx_store(shared + (group * T::BM + at_row) * T::BN + at_column, v, 4, true);
                }
            }
        }
    }
    if constexpr (T::GROUPS > 1) fx_linear_reduce<T>(shared, use);
}

template <int WORD, int BM_, int BN_, int KW, int WM, int WN, int AHEAD>
struct StagedTile {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = KW * WORD;
    static constexpr int THREADS = 256;
    static constexpr int ACROSS = BN / WN;
    static constexpr int WARPS = BM / WM * ACROSS;  // that make the tile together
    static constexpr int GROUPS = 8 / WARPS;        // of warps; each takes its panels of 16 words of a stage
    static constexpr int PANELS = KW / 16;
    static constexpr int STAGE = KW * (BM + BN);
    static constexpr int SUMS = GROUPS > 1 ? GROUPS * BM * BN : 0;
    static constexpr int SHARED = 2 * STAGE > SUMS ? 2 * STAGE : SUMS;
    static constexpr int WIDTH = 4;
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

    template <bool SUM, bool A_INNER, bool B_INNER, class Source>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared) {
        typedef LinearStaged<WORD, BM, KW, A_INNER> A;
        typedef LinearStaged<WORD, BN, KW, B_INNER> B;
        A a;
        B b;
        int depth = 0;  // what is left of the source that a and b read
        int begun = 0;  // sources
        const auto begin = [&] {
            const LinearSource s = source(begun++);
            depth = s.live ? s.depth : 0;
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
        const int row = 4 * (lane >> 3) + (lane >> 2 & 1);
        // Where the lane's chunk lies in 16 rows of an even and of an odd panel; a further 16 rows turn one into the other.
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
        if (SUM && count > 0) begin();
        FX_UNROLL
        for (int n = 0; n < AHEAD; ++n) {
            more[n] = SUM && n == 0 ? depth > 0 : advance();
            if (more[n]) {
                a.fetch(held_a[n], depth);
                b.fetch(held_b[n], depth);
                scale[n] = a.scale;
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
                        scale[n] = a.scale;
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

// -- operands straight into registers -------------------------------------------------------------------------------

// R rows of one operand, as one lane of a warp reads them: four neighbouring k of rows 16 i + 2 h + `row`.
template <int WORD, int R, bool INNER>
struct LinearDirect {
    static constexpr int ROWS = R / 8;  // of this lane
    static constexpr int STEPS = 2 / WORD;
    const float* p;  // element (row, k)
    int ld;
    int left;  // rows from `row` on that exist
    bool quads, full;
    float scale;

    __device__ __forceinline__ LinearDirect() {}
    __device__ __forceinline__ LinearDirect(const LinearView& v, int row, int k) : ld(v.ld), scale(v.scale) {
        left = v.rows - row;
        quads = fx_quads(v.p, ld);
        full = v.rows >= R;
        p = v.p + (INNER ? static_cast<long long>(row) * ld + k : static_cast<long long>(k) * ld + row);
    }

    static __device__ __forceinline__ constexpr int offset(int i) { return i / 2 * 16 + i % 2 * 2; }

    // Reads k_left of the four k, then goes 128 further.
    __device__ __forceinline__ void fetch(float (&held)[ROWS][4], int k_left) {
        if constexpr (INNER) {
            FX_UNROLL
            for (int i = 0; i < ROWS; ++i) {
                fx_load(held[i], p + static_cast<long long>(offset(i)) * ld, offset(i) < left ? k_left : 0, quads);
            }
            p += 128;
        } else {
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const float* from = p + static_cast<long long>(e) * ld;
                FX_UNROLL
                for (int i = 0; i < ROWS; ++i) {
                    held[i][e] = e < k_left && (full || offset(i) < left) ? from[offset(i)] : 0.0f;
                }
            }
            p += static_cast<long long>(128) * ld;
        }
    }

    // The words of one row, in order of k, from what was fetched.
    static __device__ __forceinline__ void words(unsigned (&w)[4 / WORD], const float (&held)[4], float scale) {
        float v[4];
        FX_UNROLL
        for (int e = 0; e < 4; ++e) v[e] = scale * held[e];
        FX_UNROLL
        for (int e = 0; e < 4 / WORD; ++e) w[e] = fx_linear_word<WORD>(v + e * WORD);
    }
};

template <int WORD, int BM_, int BN_>
struct DirectTile {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = 128;
    static constexpr int THREADS = 256;
    static constexpr int GROUPS = 8;  // one warp each
    static constexpr int AHEAD = BM * BN <= 512 ? 2 : 1;  // steps of a warp that are fetched before they are used
    static constexpr int SHARED = GROUPS * BM * BN;
    static constexpr int WIDTH = BM * BN >= 4 * THREADS ? 4 : BM * BN / THREADS;
    static_assert(BM % 16 == 0 && BN % 16 == 0 && SHARED * 4 <= 48 * 1024, "tile shape");

    struct Sums {
        float acc[BM / 16][BN / 8][4];
        float row[BM / 8];
    };

    template <bool SUM, bool A_INNER, bool B_INNER, class Source>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float*) {
        typedef LinearDirect<WORD, BM, A_INNER> A;
        typedef LinearDirect<WORD, BN, B_INNER> B;
        const int lane = static_cast<int>(threadIdx.x) & 31, warp = static_cast<int>(threadIdx.x) >> 5;
        const int row = 4 * (lane >> 3) + (lane >> 2 & 1), k = 4 * (lane & 3);
        A a;
        B b;
        int depth = 0;  // what is left of the source from this warp's next step on; the same for all its lanes
        int begun = 0;  // sources
        int steps = 0;  // of 16 values of k, of the sources that have begun: the next one's first goes to the next warp
        // Makes a and b ready to read this warp's next step; false if there is none.
        const auto advance = [&] {
            depth -= BK;
            while (depth <= 0 && begun < count) {
                const LinearSource s = source(begun++);
                const int first = 16 * ((warp - steps) & 7);
                steps += (s.depth + 15) / 16;
                depth = s.live ? s.depth - first : 0;
                a = A(s.a, row, first + k);
                b = B(s.b, row, first + k);
            }
            return depth > 0;
        };
        float held_a[AHEAD][A::ROWS][4], held_b[AHEAD][B::ROWS][4], scale[AHEAD];
        bool more[AHEAD];
        FX_UNROLL
        for (int i = 0; i < AHEAD; ++i) {
            more[i] = advance();
            if (more[i]) {
                a.fetch(held_a[i], depth - k);
                b.fetch(held_b[i], depth - k);
                scale[i] = a.scale;
            }
        }
#pragma unroll 1
        while (true) {
            FX_UNROLL
            for (int n = 0; n < AHEAD; ++n) {
                if (!more[n]) return;
                unsigned fa[BM / 16][A::STEPS][4], fb[BN / 8][B::STEPS][2];
                FX_UNROLL
                for (int i = 0; i < A::ROWS; ++i) {
                    unsigned w[4 / WORD];
                    const float(&v)[4] = held_a[n][i];
                    A::words(w, v, scale[n]);
                    FX_UNROLL
                    for (int e = 0; e < 4 / WORD; ++e) fa[i / 2][e / 2][i % 2 + e % 2 * 2] = w[e];
                    if constexpr (SUM) sums.row[i] += v[0] + v[1] + v[2] + v[3];
                }
                FX_UNROLL
                for (int j = 0; j < B::ROWS; ++j) {
                    unsigned w[4 / WORD];
                    B::words(w, held_b[n][j], 1.0f);
                    FX_UNROLL
                    for (int e = 0; e < 4 / WORD; ++e) fb[j][e / 2][e % 2] = w[e];
                }
                fx_mma<WORD, A::STEPS>(sums.acc, fa, fb);
                more[n] = advance();
                if (more[n]) {
                    a.fetch(held_a[n], depth - k);
                    b.fetch(held_b[n], depth - k);
                    scale[n] = a.scale;
                }
            }
        }
    }

    template <class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Use use) {
        fx_linear_fragments<DirectTile>(sums.acc, static_cast<int>(threadIdx.x) >> 5, 0, 0, shared, use);
    }

    static __device__ __forceinline__ float row_sums(const Sums& sums, float* shared) {
        const int thread = static_cast<int>(threadIdx.x), lane = thread & 31;
        float* part = shared + (thread >> 5 << 2 | (lane & 3)) * BM + 4 * (lane >> 3) + (lane >> 2 & 1);
        __syncthreads();
        FX_UNROLL
        for (int i = 0; i < BM / 8; ++i) part[LinearDirect<WORD, BM, false>::offset(i)] = sums.row[i];
        return fx_linear_parts_sum<DirectTile>(shared, 32);
    }
};

template <int WORD>
using Tensor128x128 = StagedTile<WORD, 128, 128, 16, 64, 32, 2>;
template <int WORD>
using Tensor128x64 = StagedTile<WORD, 128, 64, WORD == 1 ? 32 : 16, 64, 16, 1>;
template <int WORD>
using Tensor64x64 = StagedTile<WORD, 64, 64, 32, WORD == 1 ? 32 : 16, 32, 1>;  // tf32: 2 groups
template <int WORD>
using Tensor32x32 = DirectTile<WORD, 32, 32>;
template <int WORD>
using Tensor16x32 = DirectTile<WORD, 16, 32>;
template <int WORD>
using Tensor16x16 = DirectTile<WORD, 16, 16>;
