// The heads in tf32 (heads.cuh).
#include "heads.cuh"

extern "C" __global__ void __launch_bounds__(512, 1) fx_heads_tf32(const Heads* table, int count) {
    FX_DYN_SHARED(float, shared);
    heads_block<1>(table, count, shared);
}
