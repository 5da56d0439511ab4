// linear_forward.cuh in bf16.
#include "linear_forward.cuh"
#include "linear_tensor.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_forward_bf16_128x128(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor128x128<2>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_forward_bf16_128x64(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor128x64<2>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_forward_bf16_64x64(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor64x64<2>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_bf16_32x32(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor32x32<2>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_bf16_16x32(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor16x32<2>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_bf16_16x16(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor16x16<2>>(table, count);
}
