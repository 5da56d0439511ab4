// y[m, n] = activation([x, x2][m, k + k2] . w[n, k + k2]^T + b), or y += ... with accumulate (then activation is 0).
//
// All row-major float32. The input is one matrix, or two that are read side by side as its columns (k2 > 0): nothing
// has to be concatenated. One block makes one tile of y; kernels differ in the tile type alone, the name says which.
#pragma once
#include "linear.cuh"

struct LinearForward {
    int first_tile;
    int tiles;
    const float* x;   // [m, k]; for tiles that read by tensor maps, here and in the next two, the address of its map
    const float* x2;  // [m, k2], null if k2 is 0
    const float* w;   // [n, k + k2]
    const float* b;   // [n] or null
    float* y;         // [m, n]
    int ldx;          // elements from one row to the next
    int ldx2;
    int ldw;
    int ldy;
    int m;
    int n;
    int k;
    int k2;
    int activation;  // FxActivation
    int accumulate;
    int whole;  // see LinearWhole
};

template <int KIND, bool FAST, int W>
__device__ __forceinline__ void fx_activate_run(float (&v)[W]) {
    FX_UNROLL
    for (int e = 0; e < W; ++e) v[e] = fx_activate<FAST>(KIND, v[e]);
}

template <class T>
__device__ __forceinline__ void fx_linear_forward_tile(const LinearForward& r, int tile, float* shared) {
    typename T::Sums sums = {};
    const LinearCornerAgain<T> corner(r.n, tile);
    const auto segment = [&](int i) {
        const LinearCorner<T> at = corner();
        if constexpr (T::MAPPED) {
            return LinearBoxes{{i ? r.x2 : r.x, at.row, 0}, {r.w, at.column, i ? r.k : 0}, i ? r.k2 : r.k};
        } else {
            const int ldx = i ? r.ldx2 : r.ldx;
            const float* x = fx_global(i ? r.x2 : r.x) + static_cast<long long>(at.row) * ldx;
            const float* w = fx_global(r.w) + static_cast<long long>(at.column) * r.ldw + (i ? r.k : 0);
            return LinearSource{{x, ldx, r.m - at.row}, {w, r.ldw, r.n - at.column}, i ? r.k2 : r.k};
        }
    };
    float bias[T::WIDTH] = {};  // of the thread's columns
    const auto fetch_bias = [&] {
        const int column = corner().column + LinearRun<T>().column;
        if (r.b) fx_load(bias, fx_global(r.b) + column, T::WHOLE ? T::WIDTH : r.n - column, T::WHOLE);
    };
    __shared__ float4 bias_quads[T::BY_ROWS ? 1 : T::BN / 4];  // of the tile's columns; the product begins with a barrier
    float* const biases = reinterpret_cast<float*>(bias_quads);
    if constexpr (!T::BY_ROWS) {
        for (int i = static_cast<int>(threadIdx.x); i < T::BN; i += T::THREADS) {
            const int column = corner().column + i;
            biases[i] = r.b && column < r.n ? fx_global(r.b)[column] : 0.0f;
        }
    }
    // Where it would cost registers that the product needs, behind it.
    constexpr bool bias_first = T::SINGLE || T::MAPPED;
    if constexpr (bias_first) fetch_bias();
    const auto ready = [&] {
        fx_wait();
        fx_trigger();
    };
    T::template add<false, true, true>(sums, r.k2 > 0 ? 2 : 1, segment, shared, ready);
    if constexpr (T::BY_ROWS && !bias_first) fetch_bias();
    const LinearCorner<T> at = corner();
    // Out of the record, which would be read again after every store.
    const int rows = r.m - at.row, columns = r.n - at.column, ldy = r.ldy, activation = r.activation;
    const bool accumulate = r.accumulate != 0, quads = T::WHOLE || fx_quads(r.y, ldy);
    float* const y = fx_global(r.y) + static_cast<long long>(at.row) * ldy + at.column;
    const auto place = [&](int row, int column) { return y + static_cast<long long>(row) * ldy + column; };
    const auto exist = [&](int row, int column) { return T::WHOLE ? T::WIDTH : row < rows ? columns - column : 0; };
    const auto fetch = [&](int row, int column, auto& before) {
        if (accumulate) fx_load(before, place(row, column), exist(row, column), quads);
    };
    T::template outputs<2>(sums, shared, fetch, [&](int row, int column, auto& v, const auto& before) {
        constexpr int W = sizeof(v) / sizeof(float);
        if constexpr (!T::BY_ROWS) fx_load(bias, biases + column, W, true);
        FX_UNROLL
        for (int e = 0; e < W; ++e) v[e] += bias[e];
        if (accumulate) {
            FX_UNROLL
            for (int e = 0; e < W; ++e) v[e] += before[e];
        }
        if (activation == FX_ELU) fx_activate_run<FX_ELU, T::ROUNDED>(v);
        if (activation == FX_RELU) fx_activate_run<FX_RELU, T::ROUNDED>(v);
        if (activation == FX_TANH) fx_activate_run<FX_TANH, T::ROUNDED>(v);
        fx_store(place(row, column), v, exist(row, column), quads);
    });
}

template <class T>
__device__ __forceinline__ void fx_linear_forward(const LinearForward* table, int count) {
    __shared__ LinearForward place;
    int tile;
    const LinearForward& r = fx_record(table, count, tile, place);
    float* const shared = fx_linear_shared<T>();
    if (LinearWhole<T>::EXISTS && r.whole) return fx_linear_forward_tile<typename LinearWhole<T>::Tile>(r, tile, shared);
    fx_linear_forward_tile<T>(r, tile, shared);
}
