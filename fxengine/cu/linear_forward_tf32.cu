// linear_forward.cuh in tf32.
#include "linear_forward.cuh"
#include "linear_tensor.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_forward_tf32_128x128(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor128x128<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 3) fx_linear_forward_tf32_128x64(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor128x64<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(128, 4) fx_linear_forward_tf32_64x64(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor64x64<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_tf32_32x32(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor32x32<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_tf32_16x32(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor16x32<1>>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_tf32_16x16(
    const LinearForward* table, int count) {
    fx_linear_forward<Tensor16x16<1>>(table, count);
}
