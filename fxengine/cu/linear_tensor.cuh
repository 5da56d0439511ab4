// The tiles of the linear kernels on the tensor cores, since sm_80: float32 in memory, operands rounded to tf32
// (WORD 1) or bf16 (WORD 2) on their way into the product, float32 sums. The order of a sum depends on the tile type
// and the sizes alone; within one mma instruction it is the hardware's. Tiles that read by tensor maps are apart:
// linear_warpgroup.cuh for forward and dx on sm_90, linear_mapped.cuh for weight gradients since sm_90.
#pragma once
#include "linear_direct.cuh"
#include "linear_staged.cuh"

template <int WORD>
using Tensor128x128 = StagedTile<WORD, 128, 128, 64, 32, 3>;
template <int WORD>
using Tensor128x64 = StagedTile<WORD, 128, 64, 64, 32, 3>;
template <int WORD>
using Tensor64x64 = StagedTile<WORD, 64, 64, 32, 32, 3>;
template <int WORD>
using Tensor32x32 = DirectTile<WORD, 32, 32>;
template <int WORD>
using Tensor16x32 = DirectTile<WORD, 16, 32>;
template <int WORD>
using Tensor16x16 = DirectTile<WORD, 16, 16>;
