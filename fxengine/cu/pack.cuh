// Packed weights: a copy in the form in which linear_warpgroup.cuh reads them.
//
// Rounded to tf32; rows of a multiple of 16 numbers, zeros behind the last. Of every 16 numbers of a row, place
// 8 s + 4 h + t has number 4 t + 2 s + h: that is where the instruction wants what a lane reads of the other operand,
// four neighbouring numbers (linear_fragments.cuh).
#pragma once
#include "mma.cuh"

// Numbers of a packed row that has so many.
__device__ __forceinline__ constexpr int fx_packed(int columns) { return (columns + 15) & ~15; }

// The number that lies in a place of a packed row.
__device__ __forceinline__ constexpr int fx_packed_number(int place) {
    return (place & ~15) | (place & 3) * 4 | (place >> 3 & 1) * 2 | (place >> 2 & 1);
}
