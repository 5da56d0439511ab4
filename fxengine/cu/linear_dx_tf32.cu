// linear_dx.cuh in tf32.
#include "linear_dx.cuh"
#include "linear_tensor.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_dx_tf32_128x128(const LinearDx* table, int count) {
    fx_linear_dx<Tensor128x128<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_dx_tf32_128x64(const LinearDx* table, int count) {
    fx_linear_dx<Tensor128x64<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_dx_tf32_64x64(const LinearDx* table, int count) {
    fx_linear_dx<Tensor64x64<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_tf32_32x32(const LinearDx* table, int count) {
    fx_linear_dx<Tensor32x32<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_tf32_16x32(const LinearDx* table, int count) {
    fx_linear_dx<Tensor16x32<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_tf32_16x16(const LinearDx* table, int count) {
    fx_linear_dx<Tensor16x16<1>>(table, count);
}
