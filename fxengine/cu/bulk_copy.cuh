// Copies of runs and of boxes of global memory to shared memory by the copy engine (PTX cp.async.bulk, since sm_90): one
// thread begins them, a barrier in shared memory counts their bytes. Addresses and sizes are multiples of 16.
//
// A barrier is in phase 0 first. Who begins a phase says how many bytes it will have; when they are there, the next phase
// begins, and all who wait for the one before go on. Copies of a phase may begin, by other threads too, before its bytes
// are announced, if the phase before has ended: it does not end until then. The simulated device copies at once, as
// early as that allows, and fails where a thread waits for a phase that nobody has begun.
#pragma once
#include "copy_async.cuh"
#include "mma.cuh"

// By one thread; the others may use the barrier behind the next barrier of the block.
__device__ __forceinline__ void fx_bulk_barrier(u64* barrier) {
#if !FX_DEVICE
    *barrier = 0;
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;"
        :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))) : "memory");
#endif
}

// Begins a phase of so many bytes.
__device__ __forceinline__ void fx_bulk_expect(u64* barrier, int bytes) {
#if !FX_DEVICE
    ++*barrier;
#elif __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
        :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(bytes) : "memory");
#endif
}

// A copy of the phase that has begun.
__device__ __forceinline__ void fx_bulk_copy(FxShared to, const float* from, int bytes, u64* barrier) {
#if !FX_DEVICE
    memcpy(to, from, static_cast<unsigned long>(bytes));
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes),
           "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))) : "memory");
#endif
}

// How a float32 matrix lies in memory and how boxes of it, so many rows of 32 numbers, are to be copied (driver/maps.py):
// rounded to tf32, ties to even, or as they are; as wgmma.cuh wants an operand; what lies outside of the matrix as 0. On a
// GPU a CUtensorMap.
struct alignas(64) FxTensorMap {
#if FX_DEVICE
    u64 opaque[16];
#else
    const char* base;
    u64 stride;  // bytes from one row to the next
    unsigned columns, rows;
    unsigned box;  // rows of it
    unsigned rounded;
#endif
};

// Fetches a map that will be used soon.
__device__ __forceinline__ void fx_bulk_prefetch_map(const FxTensorMap* map) {
#if FX_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory");
#endif
}

// A copy of the phase that has begun: of the box whose first row and column are these, the column a multiple of 4, to a
// multiple of 1,024.
__device__ __forceinline__ void fx_bulk_copy_box(FxShared to, const FxTensorMap* map, int row, int column, u64* barrier) {
#if !FX_DEVICE
    if (column % 4 != 0) fx_sim::fx_sim_fail("a box that begins between multiples of 16 bytes");
    for (unsigned r = 0; r < map->box; ++r) {
        for (unsigned c = 0; c < 32; ++c) {
            const unsigned i = static_cast<unsigned>(row) + r, j = static_cast<unsigned>(column) + c;
            unsigned word = 0;
            if (i < map->rows && j < map->columns) {
                memcpy(&word, map->base + i * map->stride + 4 * j, 4);
                if (map->rounded != 0) word = fx_tf32_even(__uint_as_float(word));
            }
            memcpy(to + 128 * r + 4 * (c ^ (r & 7) * 4), &word, 4);
        }
    }
#elif __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"(map), "r"(column), "r"(row),
           "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))) : "memory");
#endif
}

// Waits for the end of a phase of that parity.
__device__ __forceinline__ void fx_bulk_wait(u64* barrier, int parity) {
#if !FX_DEVICE
    if ((*barrier & 1) == static_cast<u64>(parity)) fx_sim::fx_sim_fail("a wait for a bulk copy that nobody has begun");
#elif __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}"
        :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(parity) : "memory");
#endif
}
