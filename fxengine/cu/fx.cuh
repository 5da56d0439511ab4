// Helpers shared by every kernel family. Compiles with NVRTC (FX_DEVICE) and with a C++ compiler for the simulated
// device, whose header is included before this file and supplies CUDA's words.
#pragma once

#ifndef FX_DEVICE
#define FX_DEVICE 0
#endif

typedef unsigned long long u64;

// A launch covers a table of records of one kind. Every record starts with `int first_tile; int tiles;`: block b
// works for the record with first_tile <= b < first_tile + tiles. Tables are short (tens of records), so a scan is
// cheapest, and it runs before fx_wait(): nothing in a table changes after capture.
template <class Record>
__device__ __forceinline__ const Record& fx_record(const Record* table, int count, int& tile) {
    const int block = static_cast<int>(blockIdx.x);
    int i = 0;
    while (i + 1 < count && block >= table[i + 1].first_tile) ++i;
    tile = block - table[i].first_tile;
    return table[i];
}

// Programmatic dependent launch: wait until all that this launch depends on has finished and is visible. Every kernel
// calls it before it touches anything a previous node wrote (without the launch attribute it returns at once).
__device__ __forceinline__ void fx_wait() {
#if FX_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the dependent launches start their prologue. Called after fx_wait(), so that "my predecessor has finished"
// also means that its predecessors have.
__device__ __forceinline__ void fx_trigger() {
#if FX_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

enum FxActivation { FX_NONE = 0, FX_ELU = 1, FX_RELU = 2, FX_TANH = 3 };

__device__ __forceinline__ float fx_activate(int kind, float x) {
    if (kind == FX_ELU) return x > 0.0f ? x : expm1f(x);
    if (kind == FX_RELU) return x <= 0.0f ? 0.0f : x;  // NaN passes
    if (kind == FX_TANH) return tanhf(x);
    return x;
}

// Derivative with respect to the pre-activation, from the stored output y.
__device__ __forceinline__ float fx_activate_slope(int kind, float y) {
    if (kind == FX_ELU) return y > 0.0f ? 1.0f : y + 1.0f;
    if (kind == FX_RELU) return y > 0.0f ? 1.0f : 0.0f;
    if (kind == FX_TANH) return 1.0f - y * y;
    return 1.0f;
}
