// dw[n, k + k2] = dy[m, n]^T . [x, x2][m, k + k2] and db[n] = sum over m of dy, or += with accumulate.
//
// All row-major float32. A tile of dw never spans x and x2. The sum over the m rows is cut into `slices` of equal
// length, one block each: with many rows and a small dw there would otherwise be too few blocks. Each block stores its
// partial tile; the block that arrives last adds all partial tiles in slice order, whoever it is, so the bits never
// depend on timing. `arrived` must be 0 before the first launch; that block sets it back to 0. With one slice neither
// is touched.
//
// squares[tile of dw] = sum of squares of the tile and of the part of db that goes with it, as they are stored. What
// does not exist is made of zeros and counts as such; where it is NaN, for a zero has met an infinity, so is something
// that exists.
#pragma once
#include "linear.cuh"
#include "squares.cuh"

struct LinearDw {
    int first_tile;
    int tiles;
    const float* dy;    // [m, n]; for tiles that read by tensor maps, here and in the next two, the address of its map
    const float* x;     // [m, k]
    const float* x2;    // [m, k2], null if k2 is 0
    float* dw;          // [n, k + k2]
    float* db;          // [n] or null
    float* partial;     // [tiles of dw, slices, BM * (BN + 1)]: tile, then its part of db; null with one slice
    unsigned* arrived;  // [tiles of dw]; null with one slice
    double* squares;    // [tiles of dw] or null
    int lddy;           // elements from one row to the next
    int ldx;
    int ldx2;
    int lddw;
    int m;
    int n;
    int k;
    int k2;
    int slices;
    int accumulate;
    int whole;  // see LinearWhole; slices is 1 then
};

// One tile of dw: where it starts, what it reads and which part of it exists.
template <class T>
struct LinearDwTile {
    int index, slice, n0, column0, columns;
    const float* x;  // from column `from` on
    int ldx, from;

    __device__ __forceinline__ LinearDwTile(const LinearDw& r, int tile) {
        const int first = (r.k + T::BN - 1) / T::BN;
        const int across = first + (r.k2 + T::BN - 1) / T::BN;
        const int all = (r.n + T::BM - 1) / T::BM * across;
        index = tile % all;
        slice = tile / all;
        n0 = index / across * T::BM;
        const bool second = index % across >= first;
        from = (index % across - (second ? first : 0)) * T::BN;
        columns = (second ? r.k2 : r.k) - from;
        x = second ? r.x2 : r.x;
        ldx = second ? r.ldx2 : r.ldx;
        column0 = from + (second ? r.k : 0);
    }
};

// Stores W neighbouring results of the tile at (row, column).
template <class T, int W>
__device__ __forceinline__ void fx_linear_dw_store(const LinearDw& r, const LinearDwTile<T>& t, int row, int column,
                                                   float (&v)[W], FxSquares& squares) {
    const int left = T::WHOLE ? W : t.n0 + row < r.n ? t.columns - column : 0;
    float* tile = fx_global(r.dw) + static_cast<long long>(t.n0) * r.lddw + t.column0;
    float* dw = tile + static_cast<long long>(row) * r.lddw + column;
    const bool quads = T::WHOLE || fx_quads(tile, r.lddw);
    if (r.accumulate) {
        float before[W];
        fx_load(before, dw, left, quads);
        FX_UNROLL
        for (int e = 0; e < W; ++e) v[e] += before[e];
    }
    fx_store(dw, v, left, quads);
    squares.add(v);
}

template <class T>
__device__ __forceinline__ void fx_linear_db_store(const LinearDw& r, const LinearDwTile<T>& t, float sum,
                                                   FxSquares& squares) {
    const int row = static_cast<int>(threadIdx.x);
    if (row >= T::BM || t.n0 + row >= r.n) return;
    if (r.accumulate) sum += r.db[t.n0 + row];
    r.db[t.n0 + row] = sum;
    squares.add(sum);
}

// Tells whether this block is the last of its tile to arrive; what the others stored before is then visible to it.
__device__ __forceinline__ bool fx_linear_last(unsigned* arrived, int slices) {
    __threadfence();
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived, 1u) == static_cast<unsigned>(slices) - 1u;
        if (last) *arrived = 0u;
    }
    if (!__syncthreads_or(last)) return false;
    __threadfence();
    return true;
}

template <class T>
__device__ __forceinline__ void fx_linear_dw_sums(const LinearDw& r, int tile, typename T::Sums& sums, float* shared) {
    const LinearDwTile<T> t(r, tile);
    // Slices are whole stages long; the last ones may be short or empty.
    const int slices = T::WHOLE ? 1 : r.slices;
    const int length = ((r.m + slices - 1) / slices + T::BK - 1) / T::BK * T::BK;
    const long long from = static_cast<long long>(T::WHOLE ? 0 : t.slice) * length;
    const int begin = from < r.m ? static_cast<int>(from) : r.m;
    const int end = r.m - begin < length ? r.m : begin + length;
    const auto slice = [&](int) {
        if constexpr (T::MAPPED) {
            return LinearBoxes{{r.dy, t.n0, begin}, {t.x, t.from, begin}, end - begin};
        } else {
            const float* const x = fx_global(t.x) + static_cast<long long>(begin) * t.ldx + t.from;
            return LinearSource{{fx_global(r.dy) + static_cast<long long>(begin) * r.lddy + t.n0, r.lddy, r.n - t.n0},
                                {x, t.ldx, t.columns},
                                end - begin};
        }
    };
    const auto ready = [] {
        fx_wait();
        fx_trigger();
    };
    T::template add<true, false, false>(sums, begin < end ? 1 : 0, slice, shared, ready);
}

// Stores the tile of a sum that is not cut; or the block's slice of it and, if the others are there, the tile. Tells
// whether the tile is stored.
template <class T>
__device__ __forceinline__ bool fx_linear_dw_results(const LinearDw& r, const LinearDwTile<T>& t,
                                                     const typename T::Sums& sums, float* shared, FxSquares& squares) {
    const bool with_bias = r.db && t.column0 == 0;
    const auto nothing = [](int, int, auto&) {};
    if (T::WHOLE || r.slices == 1) {
        T::template outputs<1>(sums, shared, nothing, [&](int row, int column, auto& v, const auto&) {
            fx_linear_dw_store(r, t, row, column, v, squares);
        });
        if (with_bias) fx_linear_db_store(r, t, T::row_sums(sums, shared), squares);
        return true;
    }
    constexpr int PART = T::BM * (T::BN + 1);
    float* parts = fx_global(r.partial) + static_cast<long long>(t.index) * r.slices * PART;
    float* mine = parts + static_cast<long long>(t.slice) * PART;
    T::template outputs<1>(sums, shared, nothing, [&](int row, int column, auto& v, const auto&) {
        fx_store(mine + row * T::BN + column, v, T::WIDTH, true);
    });
    if (with_bias) {
        const float sum = T::row_sums(sums, shared);
        if (threadIdx.x < T::BM) mine[T::BM * T::BN + threadIdx.x] = sum;
    }
    if (!fx_linear_last(r.arrived + t.index, r.slices)) return false;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) * T::WIDTH; i < T::BM * T::BN; i += T::THREADS * T::WIDTH) {
        float v[T::WIDTH] = {};
#pragma unroll 4
        for (int s = 0; s < r.slices; ++s) {
            float part[T::WIDTH];
            fx_load(part, parts + static_cast<long long>(s) * PART + i, T::WIDTH, true);
            FX_UNROLL
            for (int e = 0; e < T::WIDTH; ++e) v[e] += part[e];
        }
        fx_linear_dw_store(r, t, i / T::BN, i % T::BN, v, squares);
    }
    if (with_bias && threadIdx.x < T::BM) {
        float sum = 0.0f;
        for (int s = 0; s < r.slices; ++s) {
            sum += parts[static_cast<long long>(s) * PART + T::BM * T::BN + threadIdx.x];
        }
        fx_linear_db_store(r, t, sum, squares);
    }
    return true;
}

template <class T>
__device__ __forceinline__ void fx_linear_dw_tile(const LinearDw& r, int tile, float* shared) {
    typename T::Sums sums = {};
    fx_linear_dw_sums<T>(r, tile, sums, shared);
    // What follows from `tile` is worked out again: kept, it would cost registers that the product needs.
    const LinearDwTile<T> t(r, fx_linear_again(tile));
    FxSquares squares;
    if (fx_linear_dw_results(r, t, sums, shared, squares)) fx_squares_store<T::THREADS>(r.squares, t.index, squares);
}

template <class T>
__device__ __forceinline__ void fx_linear_dw(const LinearDw* table, int count) {
    __shared__ LinearDw place;
    int tile;
    const LinearDw& r = fx_record(table, count, tile, place);
    float* const shared = fx_linear_shared<T>();
    if (LinearWhole<T>::EXISTS && r.whole) return fx_linear_dw_tile<typename LinearWhole<T>::Tile>(r, tile, shared);
    fx_linear_dw_tile<T>(r, tile, shared);
}
