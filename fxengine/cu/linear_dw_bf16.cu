// linear_dw.cuh in bf16.
#include "linear_dw.cuh"
#include "linear_tensor.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_dw_bf16_128x128(const LinearDw* table, int count) {
    fx_linear_dw<Tensor128x128<2>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_dw_bf16_128x64(const LinearDw* table, int count) {
    fx_linear_dw<Tensor128x64<2>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dw_bf16_64x64(const LinearDw* table, int count) {
    fx_linear_dw<Tensor64x64<2>>(table, count);
}

// Four warps: a sum over 64 rows has work for no more, and twice as many blocks find places.
extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dw_bf16_32x32(const LinearDw* table, int count) {
    fx_linear_dw<DirectTile<2, 32, 32, 4>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dw_bf16_16x32(const LinearDw* table, int count) {
    fx_linear_dw<DirectTile<2, 16, 32, 4>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dw_bf16_16x16(const LinearDw* table, int count) {
    fx_linear_dw<Tensor16x16<2>>(table, count);
}
