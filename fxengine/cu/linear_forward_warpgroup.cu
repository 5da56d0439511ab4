// linear_forward.cuh in tf32, by the warpgroups of sm_90.
#include "linear_forward.cuh"
#include "linear_warpgroup.cuh"

#if FX_HAS_WARPGROUPS
extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_forward_tf32_w64x128(
    const LinearForward* table, int count) {
    fx_linear_forward<WarpgroupTile<64, 128, 3>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_forward_tf32_w64x64(
    const LinearForward* table, int count) {
    fx_linear_forward<WarpgroupTile<64, 64, 3>>(table, count);
}
#endif
