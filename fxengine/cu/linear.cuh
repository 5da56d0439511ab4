// The product behind the linear kernels (linear_forward.cuh, linear_dx.cuh, linear_dw.cuh):
//
//     acc[i, j] = sum over k of A[i, k] * B[j, k]
//
// The kernels are written once, over a tile type that brings its own product; here are what the tile types share and
// the one of fp32 on the CUDA cores. linear_tensor.cuh has those of the tensor cores; linear_warpgroup.cuh and
// linear_mapped.cuh have those that read by tensor maps. A tile type T has
//
//     T::BM, T::BN, T::BK       outputs of a block, elements of the sum per step
//     T::THREADS, T::GROUPS     of the block; groups of threads that have parts of the same sums
//     T::WIDTH                  neighbouring outputs that a thread handles at once
//     T::SHARED                 floats of shared memory
//     T::Sums                   what a thread holds of the sums; starts as {}, zeros for who adds to them
//     T::BY_ROWS                whether the runs of WIDTH outputs of a thread lie below each other, from LinearRun on
//     T::SINGLE                 whether, moreover, there is but one
//     T::WHOLE                  whether all tiles of the record are whole and all rows aligned (LinearWhole)
//     T::MAPPED                 whether operands are read by tensor maps (bulk_copy.cuh): then sources are LinearBoxes,
//                               and none is scaled (backward_dx scales the weights). In forward and dx both are INNER,
//                               and after `add` the Sums say by `any` whether a source was not left out
//     T::TURNED                 whether fragments lie in shared memory as those of the transpose do (fx_linear_place)
//     T::ROUNDED                whether operands are rounded: then activations may be as inexact
//     T::add<SUM, A_INNER, B_INNER>(sums, count, source, shared, ready)
//                               adds the products of the LinearSources source(0) .. source(count - 1), which all
//                               threads ask for alike; with SUM (A not inner, count <= 1, no scale) also the row sums
//                               of A. It calls ready() once, before it reads A or a scale. Without SUM, B are weights,
//                               which no direct predecessor writes (Family.early): they may be read earlier
//     T::outputs<UNROLL>(sums, shared, fetch, use)
//                               calls use(row, column, values, more) for every run of neighbouring outputs of the
//                               thread; more is what fetch(row, column, more) has read, for UNROLL runs at once
//     T::row_sums(sums, shared)      the sum over k of row threadIdx.x of A, 0 for threads from BM on
//
// Every thread of the block calls the three functions. `shared` is free again when `add` returns; the others may leave
// it in use and begin with a barrier where they must.
//
// fp32.
// A block of 256 threads owns BM x BN outputs. It stages BK values of k at a time in shared memory as [k][row],
// fetching the next stage into registers while it computes on this one: one barrier per stage. A tile that has fewer
// than 256 register tiles (TM x TN outputs of a thread) divides the threads into GROUPS; group g takes k = g,
// g + GROUPS, ... of each stage, and the groups are added in the order 0, 1, 2, ... at the end. The order of a sum
// therefore depends on the tile shape and on the sizes alone: not on alignment, the grid or other records.
//
// Rows and columns beyond the matrix read as 0 and are never stored; gaps between rows are never read. Any size >= 1
// and any row stride work; 16-byte accesses are used where address and stride allow.
//
// Kernels carry __launch_bounds__(256, 2): at most 128 registers, so that two blocks share a multiprocessor; the
// 128 x 128 tile, whose sums alone take 64, is bounded to (256, 1). Without the bound ptxas spills a register or two on
// some architectures to fit a third block.
#pragma once
#include "fx.cuh"

// g++ does not know `#pragma unroll`, and vectorises the loops over register tiles only once they are unrolled: that
// makes the simulated device several times faster.
#if !FX_DEVICE && defined(__GNUC__) && !defined(__clang__)
#define FX_UNROLL _Pragma("GCC unroll 16")
#else
#define FX_UNROLL _Pragma("unroll")
#endif

// What tile types have in common whose operands pass through STAGES stages of 32 k in dynamic shared memory.
template <int BM_, int BN_, int STAGES>
struct LinearStages {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = 32;
    static constexpr int GROUPS = 1;
    static constexpr int STAGE = 4 * BK * (BM + BN);  // bytes
    static constexpr int PART_A = 4 * BK * BM;         // of them before B
    static constexpr int SHARED = STAGES * STAGE / 4;
    static constexpr int WIDTH = 4;
    static constexpr bool BY_ROWS = true;
    static constexpr bool SINGLE = false;
    static constexpr bool WHOLE = false;
    static constexpr bool TURNED = false;
    static constexpr bool ROUNDED = true;
    static_assert(SHARED >= BM * BN, "the results pass through it too");
};

// The tile type to take for records whose results are whole tiles, with all rows of all matrices starting at 16 bytes
// (`whole`, ops/linear.py): that asks for no bounds, which is half of what a thread of a small tile does.
template <class T>
struct LinearWhole {
    typedef T Tile;
    static constexpr bool EXISTS = false;
};

// Whether rows that start at p, ld elements apart, can be read four floats at a time.
__device__ __forceinline__ bool fx_quads(const float* p, int ld) {
    return ((reinterpret_cast<u64>(p) | (static_cast<u64>(ld) * 4)) & 15) == 0;
}

// The first `left` of W neighbouring floats; the rest read as 0. quads: p may be read 16 bytes at a time.
template <int W>
__device__ __forceinline__ void fx_load(float (&v)[W], const float* p, int left, bool quads) {
    if constexpr (W == 4) {
        if (quads && left >= 4) {
            const float4 q = *reinterpret_cast<const float4*>(p);
            v[0] = q.x;
            v[1] = q.y;
            v[2] = q.z;
            v[3] = q.w;
            return;
        }
    }
    FX_UNROLL
    for (int e = 0; e < W; ++e) v[e] = e < left ? p[e] : 0.0f;
}

template <int W>
__device__ __forceinline__ void fx_store(float* p, const float (&v)[W], int left, bool quads) {
    if constexpr (W == 4) {
        if (quads && left >= 4) {
            *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
            return;
        }
    }
    FX_UNROLL
    for (int e = 0; e < W; ++e) {
        if (e < left) p[e] = v[e];
    }
}

// x, of which the compiler does not know that it is x: what is derived from it is computed afresh.
__device__ __forceinline__ int fx_linear_again(int x) {
#if FX_DEVICE
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// The first row and column of tile `index` of a matrix with so many columns.
template <class T>
struct LinearCorner {
    int row, column;
    __device__ __forceinline__ LinearCorner(int columns, int index) {
        const int across = (columns + T::BN - 1) / T::BN;
        row = index / across * T::BM;
        column = index % across * T::BN;
    }
};

// One operand as a kernel hands it over, from the tile's first row and the first k on. INNER: element (row, k) lies at
// p[row * ld + k], else at p[k * ld + row].
struct LinearView {
    const float* p;
    int ld;
    int rows;  // that exist, from p on
};

// A product to be added, of `depth` values of k. Where it has a scale, that multiplies every element of A (which is
// INNER then); a scale of 0 leaves it out.
template <class View>
struct LinearSourceOf {
    View a, b;
    int depth;
    const float* scale = nullptr;

    __device__ __forceinline__ float factor() const { return scale != nullptr ? *scale : 1.0f; }
};
typedef LinearSourceOf<LinearView> LinearSource;

struct FxTensorMap;

// An operand that is read by a tensor map, from the tile's first row and the first k on. The record has the map's
// address in the place of the matrix's.
struct LinearBox {
    const FxTensorMap* map;
    int row, k;
    __device__ __forceinline__ LinearBox() {}
    __device__ __forceinline__ LinearBox(const float* map_, int row_, int k_)
        : map(reinterpret_cast<const FxTensorMap*>(map_)), row(row_), k(k_) {}
};
typedef LinearSourceOf<LinearBox> LinearBoxes;

// The first multiple of 1,024 in dynamic shared memory, from which on operands lie that tensor maps bring: the copy
// engine exchanges chunks by address (wgmma.cuh). A sum, so that the compiler still knows which memory it is.
__device__ __forceinline__ float* fx_linear_aligned(float4* dynamic) {
    return reinterpret_cast<float*>(dynamic + (-reinterpret_cast<u64>(dynamic) & 1023) / sizeof(float4));
}

// A tile's shared memory: static, or above 44 KiB (Tile.shared) the launch's dynamic, for operands that tensor maps
// bring from a multiple of 1,024 on.
template <class T>
__device__ __forceinline__ float* fx_linear_shared() {
    if constexpr (T::SHARED * sizeof(float) <= 44 * 1024) {
        static_assert(!T::MAPPED, "aligned in dynamic shared memory alone");
        FX_POOL(float4, shared, T::SHARED / 4);
        return reinterpret_cast<float*>(shared);
    } else {
        FX_DYN_SHARED(float4, shared);
        return T::MAPPED ? fx_linear_aligned(shared) : reinterpret_cast<float*>(shared);
    }
}

// The corner of a block's tile, on demand: kept through a large product it would cost registers that the product needs,
// so there it is worked out again, unless tensor maps leave registers over.
template <class T>
struct LinearCornerAgain {
    int columns, tile;
    LinearCorner<T> kept;
    __device__ __forceinline__ LinearCornerAgain(int columns_, int tile_)
        : columns(columns_), tile(tile_), kept(columns_, tile_) {}
    __device__ __forceinline__ LinearCorner<T> operator()() const {
        if constexpr (T::SINGLE || T::MAPPED) return kept;
        return LinearCorner<T>(columns, fx_linear_again(tile));
    }
};

// The first run of outputs of a thread where they are dealt out by rows; the others lie below it.
template <class T>
struct LinearRun {
    int row, column;
    __device__ __forceinline__ LinearRun() {
        const int first = static_cast<int>(threadIdx.x) * T::WIDTH;
        row = first / T::BN;
        column = first % T::BN;
    }
};

// R rows of one operand, read stage after stage. A thread always works on the same row (INNER) or the same four rows,
// on the quads k, k + STEP, ... of a stage.
template <int R, int BK, bool INNER>
struct LinearOperand {
    static constexpr int LD = R + 4;
    static constexpr int UNITS = R * BK / (4 * 256);
    static constexpr int STEP = 1024 / R;
    static_assert(UNITS * 4 * 256 == R * BK, "every thread fetches the same number of quads");
    static_assert(R <= 128 && 1024 % R == 0, "quads of a thread share their rows");
    const float* next;  // this thread's first quad of the next stage
    int ld;
    int row, k;
    int left;  // rows from `row` on that exist
    bool quads;
    float scale;

    // INNER: a warp covers 16 rows x 8 values of k, whole 32-byte sectors of global memory.
    __device__ __forceinline__ explicit LinearOperand(const LinearView& v, float factor = 1.0f)
        : ld(v.ld), scale(factor) {
        const int thread = static_cast<int>(threadIdx.x);
        row = INNER ? (thread >> 1) % R : 4 * (thread % (R / 4));
        k = INNER ? 4 * ((thread & 1) + 2 * (thread / (2 * R))) : thread / (R / 4);
        left = v.rows - row;
        quads = fx_quads(v.p, ld);
        next = v.p + static_cast<long long>(INNER ? row : k) * ld + (INNER ? k : row);
    }

    // The next stage, of which k_left values of k exist.
    __device__ __forceinline__ void fetch(float (&held)[UNITS][4], int k_left) {
        FX_UNROLL
        for (int u = 0; u < UNITS; ++u) {
            if constexpr (INNER) {
                fx_load(held[u], next + u * STEP, left > 0 ? k_left - k - u * STEP : 0, quads);
            } else {
                fx_load(held[u], next + static_cast<long long>(u * STEP) * ld, k + u * STEP < k_left ? left : 0, quads);
            }
        }
        next += INNER ? BK : static_cast<long long>(BK) * ld;
    }

    __device__ __forceinline__ void stash(float* stage, const float (&held)[UNITS][4]) const {
        FX_UNROLL
        for (int u = 0; u < UNITS; ++u) {
            float* to = stage + (k + u * STEP) * LD + row;
            if constexpr (INNER) {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) to[e * LD] = scale * held[u][e];
            } else {
                fx_store(to, held[u], 4, true);
            }
        }
    }
};

// Where a thread's register tile lies: `row`, `column` of its first quad; further quads follow ROW_STEP, COLUMN_STEP
// apart. A warp covers a patch of 8 x 4 register tiles, so that its shared-memory reads need one pass each.
template <class T>
struct LinearPlace {
    static constexpr int ROW_STEP = T::BM / (T::TM / 4);
    static constexpr int COLUMN_STEP = T::BN / (T::TN / 4);
    int group, row, column;

    __device__ __forceinline__ LinearPlace() {
        constexpr int across = T::BN / T::TN;
        constexpr int down = T::BM / T::TM;
        constexpr int wide = across < 8 ? across : 8;
        constexpr int high = down < 4 ? down : 4;
        const int thread = static_cast<int>(threadIdx.x) % (across * down);
        const int patch = thread / (wide * high);
        const int lane = thread % (wide * high);
        group = static_cast<int>(threadIdx.x) / (across * down);
        row = 4 * (patch / (across / wide) * high + lane / wide);
        column = 4 * (patch % (across / wide) * wide + lane % wide);
    }
};

// acc += the outer product of one k: a and b point at this thread's first quad of the staged row k.
template <class T>
__device__ __forceinline__ void fx_linear_step(float (&acc)[T::TM][T::TN], const float* a, const float* b) {
    float va[T::TM / 4][4], vb[T::TN / 4][4];
    FX_UNROLL
    for (int i = 0; i < T::TM / 4; ++i) fx_load(va[i], a + i * LinearPlace<T>::ROW_STEP, 4, true);
    FX_UNROLL
    for (int j = 0; j < T::TN / 4; ++j) fx_load(vb[j], b + j * LinearPlace<T>::COLUMN_STEP, 4, true);
    FX_UNROLL
    for (int i = 0; i < T::TM; ++i) {
        FX_UNROLL
        for (int j = 0; j < T::TN; ++j) acc[i][j] += va[i / 4][i % 4] * vb[j / 4][j % 4];
    }
}

// acc += the sum of A[., k] B[., k] over `depth` values of k. With SUM, row_sum also receives the sums over k of the
// quads of A that this thread fetched (A not INNER).
template <class T, bool SUM, class A, class B>
__device__ __forceinline__ void fx_linear_product(float (&acc)[T::TM][T::TN], float (&row_sum)[4], A a, B b, int depth,
                                                  float* shared) {
    if (depth <= 0) return;
    const LinearPlace<T> at;
    float held_a[A::UNITS][4], held_b[B::UNITS][4];
    float* now = shared;
    float* next = shared + T::STAGE;
    a.fetch(held_a, depth);
    b.fetch(held_b, depth);
#pragma unroll 1
    for (; depth > 0; depth -= T::BK) {
        if (SUM) {
            FX_UNROLL
            for (int u = 0; u < A::UNITS; ++u) {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) row_sum[e] += held_a[u][e];
            }
        }
        a.stash(now, held_a);
        b.stash(now + T::BK * T::LDA, held_b);
        __syncthreads();
        if (depth > T::BK) {
            a.fetch(held_a, depth - T::BK);
            b.fetch(held_b, depth - T::BK);
        }
        const float* pa = now + at.group * T::LDA + at.row;
        const float* pb = now + T::BK * T::LDA + at.group * T::LDB + at.column;
        if (depth >= T::BK) {
#pragma unroll
            for (int k = 0; k < T::BK / T::GROUPS; ++k) {
                fx_linear_step<T>(acc, pa + k * T::GROUPS * T::LDA, pb + k * T::GROUPS * T::LDB);
            }
        } else {
#pragma unroll 1
            for (int k = at.group; k < depth; k += T::GROUPS) {
                fx_linear_step<T>(acc, pa, pb);
                pa += T::GROUPS * T::LDA;
                pb += T::GROUPS * T::LDB;
            }
        }
        float* swap = now;
        now = next;
        next = swap;
    }
    __syncthreads();
}

// Where a group leaves its sum of (row, column) in its tile in shared memory. Every second pair of rows has the halves
// of its 32 columns exchanged; where fragments are turned (MappedTile), every second four rows have neighbouring
// quarters exchanged and every second eight the halves: no access has a bank conflict, whether a warp stores its
// fragments or reads rows.
template <class T>
__device__ __forceinline__ int fx_linear_place(int row, int column) {
    if constexpr (T::TURNED) return row * T::BN + (column ^ (row & 12) * 2);
    return row * T::BN + (T::BN >= 32 ? column ^ (row & 2) * 8 : column);
}

// Calls use(row, column, values, more) with the sum of the tiles that the GROUPS groups left in shared memory one
// behind the other, added in that order; fetch(row, column, more) has read what the result needs besides, for UNROLL
// runs at once. A loop, because code that is run once must be fetched for it.
template <class T, int UNROLL, class Fetch, class Use>
__device__ __forceinline__ void fx_linear_reduce(const float* shared, Fetch fetch, Use use) {
    constexpr int RUNS = T::BM * T::BN / (T::THREADS * T::WIDTH), N = UNROLL < RUNS ? UNROLL : RUNS;
    constexpr int STEP = T::THREADS * T::WIDTH / T::BN;  // rows between the runs of a thread
    static_assert(RUNS % N == 0, "runs in equal parts");
    const LinearRun<T> run;
    float more[N][T::WIDTH];
#pragma unroll 1
    for (int row = run.row; row < T::BM; row += N * STEP) {
        FX_UNROLL
        for (int i = 0; i < N; ++i) fetch(row + i * STEP, run.column, more[i]);
        if (row == run.row) __syncthreads();  // the tiles are there
        FX_UNROLL
        for (int i = 0; i < N; ++i) {
            const float* from = shared + fx_linear_place<T>(row + i * STEP, run.column);
            float v[T::WIDTH];
            fx_load(v, from, T::WIDTH, true);
            FX_UNROLL
            for (int g = 1; g < T::GROUPS; ++g) {
                float other[T::WIDTH];
                fx_load(other, from + g * T::BM * T::BN, T::WIDTH, true);
                FX_UNROLL
                for (int e = 0; e < T::WIDTH; ++e) v[e] += other[e];
            }
            use(row + i * STEP, run.column, v, more[i]);
        }
    }
}

// Calls fetch and use for every run of neighbouring outputs of this thread, the groups added in order.
template <class T, int UNROLL, class Fetch, class Use>
__device__ __forceinline__ void fx_linear_outputs(const float (&acc)[T::TM][T::TN], float* shared, Fetch fetch,
                                                  Use use) {
    const LinearPlace<T> at;
    if constexpr (T::GROUPS == 1) {
        FX_UNROLL
        for (int i = 0; i < T::TM; ++i) {
            FX_UNROLL
            for (int j = 0; j < T::TN; j += 4) {
                float v[4] = {acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]};
                const int row = at.row + i / 4 * at.ROW_STEP + i % 4, column = at.column + j / 4 * at.COLUMN_STEP;
                float more[4];
                fetch(row, column, more);
                use(row, column, v, more);
            }
        }
    } else {
        float* mine = shared + at.group * T::BM * T::BN;
        FX_UNROLL
        for (int i = 0; i < T::TM; ++i) {
            FX_UNROLL
            for (int j = 0; j < T::TN; j += 4) {
                const float v[4] = {acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]};
                const int row = at.row + i / 4 * at.ROW_STEP + i % 4, column = at.column + j / 4 * at.COLUMN_STEP;
                fx_store(mine + fx_linear_place<T>(row, column), v, 4, true);
            }
        }
        fx_linear_reduce<T, UNROLL>(shared, fetch, use);
    }
}

// The sum over parts of element threadIdx.x of [parts][BM] in shared memory, in that order; 0 for threads from BM on.
// Starts with a barrier, so that every thread may have written its part just before.
template <class T>
__device__ __forceinline__ float fx_linear_parts_sum(const float* shared, int parts) {
    __syncthreads();
    float sum = 0.0f;
    if (static_cast<int>(threadIdx.x) < T::BM) {
        for (int part = 0; part < parts; ++part) sum += shared[part * T::BM + threadIdx.x];
    }
    return sum;
}

template <int BM_, int BN_, int BK_, int TM_, int TN_>
struct LinearTile {
    static constexpr int BM = BM_;
    static constexpr int BN = BN_;
    static constexpr int BK = BK_;
    static constexpr int TM = TM_;
    static constexpr int TN = TN_;
    static constexpr int THREADS = 256;
    static constexpr int GROUPS = THREADS * TM * TN / (BM * BN);
    // Rows of 4 mod 8 words: the transposing stores of LinearOperand then hit 32 different banks.
    static constexpr int LDA = BM + 4;
    static constexpr int LDB = BN + 4;
    static constexpr int STAGE = BK * (LDA + LDB);
    static constexpr int SUMS = GROUPS > 1 ? GROUPS * BM * BN : 0;
    static constexpr int SHARED = 2 * STAGE > SUMS ? 2 * STAGE : SUMS;  // floats
    // Neighbouring outputs that a thread handles at once after the groups are added.
    static constexpr int WIDTH = BM * BN >= 4 * THREADS ? 4 : BM * BN / THREADS;
    static constexpr bool BY_ROWS = GROUPS > 1;
    static constexpr bool SINGLE = BY_ROWS && BM * BN == THREADS * WIDTH;
    static constexpr bool WHOLE = false;
    static constexpr bool MAPPED = false;
    static constexpr bool TURNED = false;
    static constexpr bool ROUNDED = false;
    static_assert(GROUPS >= 1 && GROUPS * BM * BN == THREADS * TM * TN, "register tiles must fill the block");
    static_assert(BK % GROUPS == 0 && BK % 8 == 0 && BM % 16 == 0 && BN % 16 == 0, "stage shape");
    static_assert(SHARED * 4 <= 48 * 1024, "static shared memory");

    struct Sums {
        float acc[TM][TN];
        float row[4];
    };

    template <bool SUM, bool A_INNER, bool B_INNER, class Source, class Ready>
    static __device__ __forceinline__ void add(Sums& sums, int count, Source source, float* shared, Ready ready) {
        ready();
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const LinearSource s = source(i);
            const float factor = s.factor();
            fx_linear_product<LinearTile, SUM>(sums.acc, sums.row, LinearOperand<BM, BK, A_INNER>(s.a, factor),
                                               LinearOperand<BN, BK, B_INNER>(s.b), factor != 0.0f ? s.depth : 0,
                                               shared);
        }
    }

    template <int UNROLL, class Fetch, class Use>
    static __device__ __forceinline__ void outputs(const Sums& sums, float* shared, Fetch fetch, Use use) {
        fx_linear_outputs<LinearTile, UNROLL>(sums.acc, shared, fetch, use);
    }

    static __device__ __forceinline__ float row_sums(const Sums& sums, float* shared) {
        __syncthreads();
        fx_store(shared + 4 * threadIdx.x, sums.row, 4, true);  // one row of BM per k of the first quads
        return fx_linear_parts_sum<LinearTile>(shared, 1024 / BM);
    }
};

typedef LinearTile<128, 128, 16, 8, 8> Tile128x128;
typedef LinearTile<64, 64, 32, 8, 4> Tile64x64;   // 2 groups
typedef LinearTile<32, 32, 64, 4, 4> Tile32x32;   // 4 groups
typedef LinearTile<16, 32, 64, 4, 4> Tile16x32;   // 8 groups
typedef LinearTile<16, 16, 128, 4, 4> Tile16x16;  // 16 groups

