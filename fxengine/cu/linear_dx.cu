// linear_dx.cuh in fp32.
#include "linear_dx.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) fx_linear_dx_128x128(const LinearDx* table, int count) {
    fx_linear_dx<Tile128x128>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_64x64(const LinearDx* table, int count) {
    fx_linear_dx<Tile64x64>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_32x32(const LinearDx* table, int count) {
    fx_linear_dx<Tile32x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_16x32(const LinearDx* table, int count) {
    fx_linear_dx<Tile16x32>(table, count);
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_linear_dx_16x16(const LinearDx* table, int count) {
    fx_linear_dx<Tile16x16>(table, count);
}
