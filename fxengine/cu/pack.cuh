// Packed weights: a copy of a matrix [rows, k] in the form in which the fused quantile networks read it, rounded to tf32.
//
// Blocks of 32 k, one behind the other, each of all rows (padded to a multiple of 16) x 128 bytes: a tile's share of a
// block is one run of memory, and lies as wgmma.cuh wants it. Row 2 g + h of each 16 has place 8 h + g: with that a lane
// holds runs of four outputs (linear_fragments.cuh). Number 4 t + 2 s + h of each 16 of a row has place 8 s + 4 h + t:
// the instruction meets it when it meets the number of A that a lane has read with three neighbours. Chunks of four
// places are exchanged as wgmma.cuh says. What pads is zero.
#pragma once
#include "mma.cuh"

__device__ __forceinline__ constexpr int fx_packed_rows(int rows) { return (rows + 15) & ~15; }
__device__ __forceinline__ constexpr int fx_packed_depth(int k) { return (k + 31) & ~31; }

// The row and the k of the number at (place of a row, i) of a block.
__device__ __forceinline__ constexpr int fx_packed_row(int place) {
    return (place & ~15) | (place & 7) * 2 | (place >> 3 & 1);
}
__device__ __forceinline__ constexpr int fx_packed_k(int place, int i) {
    const int at = i ^ (place & 7) * 4;
    return (at & 16) | (at & 3) * 4 | (at >> 3 & 1) * 2 | (at >> 2 & 1);
}
