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
    const float* dy[16];     // of each source: [m, n]
    const float* w[16];      // [n, k]; for tiles that want it packed (pack.cuh) its transpose
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
        const int lddy = r.lddy[i];
        const int ldw = r.ldw[i];
        const LinearCorner<T> at = corner();
        return LinearSource{{fx_global(r.dy[i]) + static_cast<long long>(at.row) * lddy, lddy, r.m - at.row},
                            {fx_global(r.w[i]) + (T::PACKED ? static_cast<long long>(at.column) * ldw : at.column), ldw,
                             r.k - at.column},
                            r.n[i],
                            r.scale[i]};
    };
    float x[T::WIDTH] = {}, factor = 0.0f;
    const auto ready = [&] {
        fx_wait();
        fx_trigger();
        if (r.activation == FX_NONE) return;
        const int lane = static_cast<int>(threadIdx.x) & 31;  // each looks at one source's scale
        if (lane < r.sources) factor = r.scale[lane] ? *r.scale[lane] : 1.0f;
        if constexpr (T::SINGLE) {
            const LinearCorner<T> at = corner();
            const LinearRun<T> run;
            const int row = at.row + run.row, column = at.column + run.column;
            fx_load(x, fx_global(r.x) + static_cast<long long>(row) * r.ldx + column, row < r.m ? r.k - column : 0,
                    fx_quads(r.x, r.ldx));
        }
    };
    T::template add<false, true, false>(sums, r.sources, source, shared, ready);
    const bool any = __any_sync(0xffffffffu, factor != 0.0f);
    const LinearCorner<T> at = corner();
    const int m0 = at.row, k0 = at.column;
    const bool quads = fx_quads(r.dx, r.lddx);
    const bool quads_x = fx_quads(r.x, r.ldx);
    const auto exist = [&](int row, int column) { return m0 + row < r.m ? r.k - k0 - column : 0; };
    const auto fetch = [&](int row, int column, auto& output) {  // of the activation
        if constexpr (T::SINGLE) {
            FX_UNROLL
            for (int e = 0; e < T::WIDTH; ++e) output[e] = x[e];
        } else if (any) {
            const float* from = fx_global(r.x) + static_cast<long long>(m0 + row) * r.ldx + k0 + column;
            fx_load(output, from, exist(row, column), quads_x);
        }
    };
    T::template outputs<4>(sums, shared, fetch, [&](int row, int column, auto& v, const auto& output) {
        constexpr int W = sizeof(v) / sizeof(float);
        const int left = exist(row, column);
        float* dx = fx_global(r.dx) + static_cast<long long>(m0 + row) * r.lddx + k0 + column;
        if (any) {  // without a source, or without an activation, there is no slope: 0 stays 0 even where x is NaN
            if (r.activation == FX_ELU) fx_slope_run<FX_ELU>(v, output);
            if (r.activation == FX_RELU) fx_slope_run<FX_RELU>(v, output);
            if (r.activation == FX_TANH) fx_slope_run<FX_TANH>(v, output);
        }
        if (r.accumulate) {
            float before[W];
            fx_load(before, dx, left, quads);
            FX_UNROLL
            for (int e = 0; e < W; ++e) v[e] += before[e];
        }
        fx_store(dx, v, left, quads);
    });
}

template <class T>
__device__ __forceinline__ void fx_linear_dx(const LinearDx* table, int count) {
    __shared__ LinearDx place;
    int tile;
    const LinearDx& r = fx_record(table, count, tile, place);
    fx_linear_dx_tile<T>(r, tile, fx_linear_shared<T>());
}
