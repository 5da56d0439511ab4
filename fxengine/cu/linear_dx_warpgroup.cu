// linear_dx.cuh in tf32, by the warpgroups of sm_90.
#include "linear_dx.cuh"
#include "linear_warpgroup.cuh"

#if FX_HAS_WARPGROUPS
extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_dx_tf32_w64x128(
    const LinearDx* table, int count) {
    fx_linear_dx<WarpgroupTile<64, 128, 3>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dx_tf32_w64x64(
    const LinearDx* table, int count) {
    fx_linear_dx<WarpgroupTile<64, 64, 3>>(table, count);
}
#endif
