// The heads in bf16 (heads.cuh).
#include "heads.cuh"

extern "C" __global__ void __launch_bounds__(512, 1) fx_heads_bf16(const Heads* table, int count) {
    FX_DYN_SHARED(float, shared);
    heads_block<2>(table, count, shared);
}
