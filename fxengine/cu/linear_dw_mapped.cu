// linear_dw.cuh in tf32, with operands brought by the copy engine.
#include "linear_dw.cuh"
#include "linear_mapped.cuh"

#if !FX_DEVICE || __CUDA_ARCH__ >= 900
// Blocks of the larger tile on a multiprocessor: an sm_120 has shared memory for one.
#if FX_DEVICE && __CUDA_ARCH__ >= 1200
constexpr int mapped_blocks = 1;
#else
constexpr int mapped_blocks = 3;
#endif

extern "C" __global__ void __launch_bounds__(128, mapped_blocks) fx_linear_dw_tf32_m128x64(
    const LinearDw* table, int count) {
    fx_linear_dw<MappedTile<128, 64, 64, 32, 3>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dw_tf32_m64x64(const LinearDw* table, int count) {
    fx_linear_dw<MappedTile<64, 64, 32, 32, 3>>(table, count);
}

#endif
