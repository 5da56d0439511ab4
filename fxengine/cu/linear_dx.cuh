// dx[m, k] = slope(x) * (sum over sources of scale * dy[m, n] . w[n, k]), or dx += ... with accumulate.
//
// All row-major float32. Sources are the layers that read the same x, up to 16, added in order: the gradient of a trunk
// with many heads is one record. slope is the derivative of the activation that made x, taken from x itself, so dx
// holds the gradient with respect to x before that activation. w points at the columns that belong to x: with a
// two-part input each part has its own record, or none. A source whose scale is 0 is left out: it adds an exact 0
// whatever its gradient holds, NaN and infinities included.
#pragma once
#include "linear.cuh"

struct LinearDx {
    int first_tile;
    int tiles;
    const float* dy[16];     // of each source: [m, n]; for tiles that read by tensor maps the address of its map
    const float* w[16];      // [n, k]; for these that of its transpose, multiplied by the scale
    const float* scale[16];  // one float, null for 1
    int lddy[16];            // elements from one row to the next
    int ldw[16];
    int n[16];
    int sources;
    int m;
    int k;
    int activation;  // FxActivation of x
    const float* x;  // [m, k], null if activation is 0
    float* dx;       // [m, k]
    int ldx;
    int lddx;
    int accumulate;
    int whole;  // see LinearWhole
};

template <int KIND, int W>
__device__ __forceinline__ void fx_slope_run(float (&v)[W], const float (&x)[W]) {
    FX_UNROLL
    for (int e = 0; e < W; ++e) v[e] *= fx_activate_slope(KIND, x[e]);
}

template <class T>
__device__ __forceinline__ void fx_linear_dx_tile(const LinearDx& r, int tile, float* shared) {
    typename T::Sums sums = {};
    const LinearCornerAgain<T> corner(r.k, tile);
    const auto source = [&](int i) {  // its fields are read when it begins: no registers for the others
        const LinearCorner<T> at = corner();
        if constexpr (T::MAPPED) {
            return LinearBoxes{{r.dy[i], at.row, 0}, {r.w[i], at.column, 0}, r.n[i], r.scale[i]};
        } else {
            const int lddy = r.lddy[i];
            const int ldw = r.ldw[i];
            return LinearSource{{fx_global(r.dy[i]) + static_cast<long long>(at.row) * lddy, lddy, r.m - at.row},
                                {fx_global(r.w[i]) + at.column, ldw, r.k - at.column},
                                r.n[i],
                                r.scale[i]};
        }
    };
    float x[T::WIDTH] = {}, factor = 0.0f;
    const auto ready = [&] {
        fx_wait();
        fx_trigger();
        if (r.activation == FX_NONE) return;
        if constexpr (!T::MAPPED) {
            const int lane = static_cast<int>(threadIdx.x) & 31;  // each looks at one source's scale
            if (lane < r.sources) factor = r.scale[lane] ? *r.scale[lane] : 1.0f;
        }
        if constexpr (T::SINGLE) {
            const LinearCorner<T> at = corner();
            const LinearRun<T> run;
            const int row = at.row + run.row, column = at.column + run.column;
            fx_load(x, fx_global(r.x) + static_cast<long long>(row) * r.ldx + column,
                    T::WHOLE ? T::WIDTH : row < r.m ? r.k - column : 0, T::WHOLE || fx_quads(r.x, r.ldx));
        }
    };
    T::template add<false, true, false>(sums, r.sources, source, shared, ready);
    bool any;
    if constexpr (T::MAPPED) {
        any = r.activation != FX_NONE && sums.any;
    } else {
        any = __any_sync(0xffffffffu, factor != 0.0f);
    }
    const LinearCorner<T> at = corner();
    // Out of the record, which would be read again after every store.
    const int rows = r.m - at.row, columns = r.k - at.column, lddx = r.lddx, ldx = r.ldx, activation = r.activation;
    const bool accumulate = r.accumulate != 0, quads = T::WHOLE || fx_quads(r.dx, lddx);
    const bool quads_x = T::WHOLE || fx_quads(r.x, ldx);
    float* const dx = fx_global(r.dx) + static_cast<long long>(at.row) * lddx + at.column;
    const float* const input = fx_global(r.x) + static_cast<long long>(at.row) * ldx + at.column;
    const auto exist = [&](int row, int column) { return T::WHOLE ? T::WIDTH : row < rows ? columns - column : 0; };
    const auto fetch = [&](int row, int column, auto& output) {  // of the activation
        if constexpr (T::SINGLE) {
            FX_UNROLL
            for (int e = 0; e < T::WIDTH; ++e) output[e] = x[e];
        } else if (any) {
            fx_load(output, input + static_cast<long long>(row) * ldx + column, exist(row, column), quads_x);
        }
    };
    T::template outputs<4>(sums, shared, fetch, [&](int row, int column, auto& v, const auto& output) {
        constexpr int W = sizeof(v) / sizeof(float);
        const int left = exist(row, column);
        float* const to = dx + static_cast<long long>(row) * lddx + column;
        if (any) {  // without a source, or without an activation, there is no slope: 0 stays 0 even where x is NaN
            if (activation == FX_ELU) fx_slope_run<FX_ELU>(v, output);
            if (activation == FX_RELU) fx_slope_run<FX_RELU>(v, output);
            if (activation == FX_TANH) fx_slope_run<FX_TANH>(v, output);
        }
        if (accumulate) {
            float before[W];
            fx_load(before, to, left, quads);
            FX_UNROLL
            for (int e = 0; e < W; ++e) v[e] += before[e];
        }
        fx_store(to, v, left, quads);
    });
}

template <class T>
__device__ __forceinline__ void fx_linear_dx(const LinearDx* table, int count) {
    __shared__ LinearDx place;
    int tile;
    const LinearDx& r = fx_record(table, count, tile, place);
    float* const shared = fx_linear_shared<T>();
    if (LinearWhole<T>::EXISTS && r.whole) return fx_linear_dx_tile<typename LinearWhole<T>::Tile>(r, tile, shared);
    fx_linear_dx_tile<T>(r, tile, shared);
}
