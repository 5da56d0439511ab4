// Test kernels: y[i] (= or +=) a * x[i] + b, one record per vector; and a kernel that overruns its buffer.
#include "fx.cuh"

struct Chain {
    int first_tile;
    int tiles;
    const float* x;
    float* y;
    const float* a;    // one float on the device
    float b;
    int n;
    int accumulate;
};

extern "C" __global__ void __launch_bounds__(256) fx_chain(const Chain* table, int count) {
    int tile;
    const Chain r = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const int i = tile * 256 + static_cast<int>(threadIdx.x);
    if (i >= r.n) return;
    const float value = *r.a * r.x[i] + r.b;
    r.y[i] = r.accumulate ? r.y[i] + value : value;
}

// The same, under another name: a second family.
extern "C" __global__ void __launch_bounds__(256) fx_other(const Chain* table, int count) {
    int tile;
    const Chain r = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const int i = tile * 256 + static_cast<int>(threadIdx.x);
    if (i < r.n) r.y[i] = *r.a * r.x[i] + r.b;
}

// Writes one element past the end of y.
extern "C" __global__ void __launch_bounds__(256) fx_overrun(const Chain* table, int count) {
    int tile;
    const Chain r = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const int i = tile * 256 + static_cast<int>(threadIdx.x);
    if (i <= r.n) r.y[i] = r.b;
}
