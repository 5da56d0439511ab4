// linear_dw.cuh in tf32, by the warpgroups of sm_90.
#include "linear_dw.cuh"
#include "linear_transposed.cuh"

#if FX_HAS_WARPGROUPS
extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_dw_tf32_w128x128(const LinearDw* table, int count) {
    fx_linear_dw<TransposedTile<128, 128>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_dw_tf32_w64x128(const LinearDw* table, int count) {
    fx_linear_dw<TransposedTile<64, 128>>(table, count);
}
#endif
