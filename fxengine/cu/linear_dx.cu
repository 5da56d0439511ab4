// dx[m, k] = scale * slope(x) * (dy[m, n] . w[n, k] + dy2[m, n2] . w2[n2, k]), or dx += ... with accumulate.
//
// All row-major float32. slope is the derivative of the activation that made x, taken from x itself, so dx holds the
// gradient with respect to x before that activation. The second product is there for two layers that read the same x
// (n2 > 0). w points at the columns that belong to x: with a two-part input each part has its own record, or none.
// A scale of 0 gives an exact 0 whatever the gradient holds, NaN and infinities included.
#include "linear.cuh"

struct LinearDx {
    int first_tile;
    int tiles;
    const float* dy;     // [m, n]
    const float* w;      // [n, k]
    const float* dy2;    // [m, n2], null if n2 is 0
    const float* w2;     // [n2, k], null if n2 is 0
    const float* x;      // [m, k], null if activation is 0
    const float* scale;  // one float, null for 1
    float* dx;           // [m, k]
    int lddy;            // elements from one row to the next
    int ldw;
    int lddy2;
    int ldw2;
    int ldx;
    int lddx;
    int m;
    int n;
    int n2;
    int k;
    int activation;  // FxActivation of x
    int accumulate;
};

template <int KIND, int W>
__device__ __forceinline__ void fx_slope_run(float (&v)[W], const float (&x)[W]) {
    FX_UNROLL
    for (int e = 0; e < W; ++e) v[e] *= fx_activate_slope(KIND, x[e]);
}

template <class T>
__device__ __forceinline__ void fx_linear_dx_tile(const LinearDx& r, int tile, float* shared) {
    const int columns = (r.k + T::BN - 1) / T::BN;
    const int m0 = tile / columns * T::BM;
    const int k0 = tile % columns * T::BN;
    const float scale = r.scale ? *r.scale : 1.0f;
    float acc[T::TM][T::TN] = {};
    float unused[4] = {};
#pragma unroll 1
    for (int source = 0; source < 2; ++source) {
        const float* dy = source ? r.dy2 : r.dy;
        const int lddy = source ? r.lddy2 : r.lddy;
        const LinearOperand<T::BM, T::BK, true> a(dy + static_cast<long long>(m0) * lddy, lddy, r.m - m0, 0);
        const LinearOperand<T::BN, T::BK, false> b((source ? r.w2 : r.w) + k0, source ? r.ldw2 : r.ldw, r.k - k0, 0);
        fx_linear_product<T, false>(acc, unused, a, b, source ? r.n2 : r.n, shared);
    }
    const bool quads = fx_quads(r.dx, r.lddx);
    const bool quads_x = fx_quads(r.x, r.ldx);
    fx_linear_outputs<T>(acc, shared, [&](int row, int column, auto& v) {
        constexpr int W = sizeof(v) / sizeof(float);
        const int left = m0 + row < r.m ? r.k - k0 - column : 0;
        float* dx = r.dx + static_cast<long long>(m0 + row) * r.lddx + k0 + column;
        float more[W];
        if (r.activation != FX_NONE) {
            fx_load(more, r.x + static_cast<long long>(m0 + row) * r.ldx + k0 + column, left, quads_x);
            if (r.activation == FX_ELU) fx_slope_run<FX_ELU>(v, more);
            if (r.activation == FX_RELU) fx_slope_run<FX_RELU>(v, more);
            if (r.activation == FX_TANH) fx_slope_run<FX_TANH>(v, more);
        }
        if (r.scale) {
            FX_UNROLL
            for (int e = 0; e < W; ++e) v[e] = scale == 0.0f ? 0.0f : scale * v[e];
        }
        if (r.accumulate) {
            fx_load(more, dx, left, quads);
            FX_UNROLL
            for (int e = 0; e < W; ++e) v[e] += more[e];
        }
        fx_store(dx, v, left, quads);
    });
}

template <class T>
__device__ __forceinline__ void fx_linear_dx(const LinearDx* table, int count) {
    __shared__ float4 shared[T::SHARED / 4];
    int tile;
    const LinearDx& r = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    fx_linear_dx_tile<T>(r, tile, reinterpret_cast<float*>(shared));
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_dx_128x128(const LinearDx* table, int count) {
    fx_linear_dx<Tile128x128>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_64x64(const LinearDx* table, int count) {
    fx_linear_dx<Tile64x64>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_32x32(const LinearDx* table, int count) {
    fx_linear_dx<Tile32x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_16x32(const LinearDx* table, int count) {
    fx_linear_dx<Tile16x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_16x16(const LinearDx* table, int count) {
    fx_linear_dx<Tile16x16>(table, count);
}
