// linear_dw.cuh in tf32.
#include "linear_dw.cuh"
#include "linear_tensor.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_dw_tf32_128x128(const LinearDw* table, int count) {
    fx_linear_dw<Tensor128x128<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_dw_tf32_128x64(const LinearDw* table, int count) {
    fx_linear_dw<Tensor128x64<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dw_tf32_64x64(const LinearDw* table, int count) {
    fx_linear_dw<Tensor64x64<1>>(table, count);
}

// Four warps: a sum over 64 rows has work for no more, and twice as many blocks find places.
extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dw_tf32_32x32(const LinearDw* table, int count) {
    fx_linear_dw<DirectTile<1, 32, 32, 4>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dw_tf32_16x32(const LinearDw* table, int count) {
    fx_linear_dw<DirectTile<1, 16, 32, 4>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dw_tf32_16x16(const LinearDw* table, int count) {
    fx_linear_dw<Tensor16x16<1>>(table, count);
}
