// linear_dw.cuh in fp32.
#include "linear_dw.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_dw_128x128(const LinearDw* table, int count) {
    fx_linear_dw<Tile128x128>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dw_64x64(const LinearDw* table, int count) {
    fx_linear_dw<Tile64x64>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dw_32x32(const LinearDw* table, int count) {
    fx_linear_dw<Tile32x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dw_16x32(const LinearDw* table, int count) {
    fx_linear_dw<Tile16x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dw_16x16(const LinearDw* table, int count) {
    fx_linear_dw<Tile16x16>(table, count);
}
