// linear_forward.cuh in fp32.
#include "linear_forward.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_forward_128x128(const LinearForward* table, int count) {
    fx_linear_forward<Tile128x128>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_64x64(const LinearForward* table, int count) {
    fx_linear_forward<Tile64x64>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_32x32(const LinearForward* table, int count) {
    fx_linear_forward<Tile32x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_16x32(const LinearForward* table, int count) {
    fx_linear_forward<Tile16x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_forward_16x16(const LinearForward* table, int count) {
    fx_linear_forward<Tile16x16>(table, count);
}
