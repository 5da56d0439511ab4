// y[m, n] = activation([x, x2][m, k + k2] . w[n, k + k2]^T + b), or y += ... with accumulate (then activation is 0).
//
// All row-major float32. The input is one matrix, or two that are read side by side as its columns (k2 > 0): nothing
// has to be concatenated. One block makes one tile of y; kernels differ in the tile alone, the name says which.
#include "linear.cuh"

struct LinearForward {
    int first_tile;
    int tiles;
    const float* x;   // [m, k]
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
};

template <int KIND, int W>
__device__ __forceinline__ void fx_activate_run(float (&v)[W]) {
    FX_UNROLL
    for (int e = 0; e < W; ++e) v[e] = fx_activate(KIND, v[e]);
}

template <class T>
__device__ __forceinline__ void fx_linear_forward_tile(const LinearForward& r, int tile, float* shared) {
    const int columns = (r.n + T::BN - 1) / T::BN;
    const int m0 = tile / columns * T::BM;
    const int n0 = tile % columns * T::BN;
    float acc[T::TM][T::TN] = {};
    float unused[4] = {};
#pragma unroll 1
    for (int segment = 0; segment < 2; ++segment) {
        const float* x = segment ? r.x2 : r.x;
        const int ldx = segment ? r.ldx2 : r.ldx;
        const LinearOperand<T::BM, T::BK, true> a(x + static_cast<long long>(m0) * ldx, ldx, r.m - m0, 0);
        const LinearOperand<T::BN, T::BK, true> b(r.w + static_cast<long long>(n0) * r.ldw + (segment ? r.k : 0), r.ldw,
                                                  r.n - n0, 0);
        fx_linear_product<T, false>(acc, unused, a, b, segment ? r.k2 : r.k, shared);
    }
    const bool quads = fx_quads(r.y, r.ldy);
    fx_linear_outputs<T>(acc, shared, [&](int row, int column, auto& v) {
        constexpr int W = sizeof(v) / sizeof(float);
        const int left = m0 + row < r.m ? r.n - n0 - column : 0;
        float* y = r.y + static_cast<long long>(m0 + row) * r.ldy + n0 + column;
        float more[W];
        if (r.b) {
            fx_load(more, r.b + n0 + column, left, false);
            FX_UNROLL
            for (int e = 0; e < W; ++e) v[e] += more[e];
        }
        if (r.accumulate) {
            fx_load(more, y, left, quads);
            FX_UNROLL
            for (int e = 0; e < W; ++e) v[e] += more[e];
        }
        if (r.activation == FX_ELU) fx_activate_run<FX_ELU>(v);
        if (r.activation == FX_RELU) fx_activate_run<FX_RELU>(v);
        if (r.activation == FX_TANH) fx_activate_run<FX_TANH>(v);
        fx_store(y, v, left, quads);
    });
}

template <class T>
__device__ __forceinline__ void fx_linear_forward(const LinearForward* table, int count) {
    __shared__ float4 shared[T::SHARED / 4];
    int tile;
    const LinearForward& r = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    fx_linear_forward_tile<T>(r, tile, reinterpret_cast<float*>(shared));
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_forward_128x128(const LinearForward* table, int count) {
    fx_linear_forward<Tile128x128>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_64x64(const LinearForward* table, int count) {
    fx_linear_forward<Tile64x64>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_32x32(const LinearForward* table, int count) {
    fx_linear_forward<Tile32x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_16x32(const LinearForward* table, int count) {
    fx_linear_forward<Tile16x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_16x16(const LinearForward* table, int count) {
    fx_linear_forward<Tile16x16>(table, count);
}
