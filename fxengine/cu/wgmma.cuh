// Tensor-core products of a warpgroup: four consecutive warps of a block, the first of which has a number divisible by
// 4 (PTX wgmma.mma_async; sm_90 alone). tf32 with float32 sums.
//
// A [64 rows, 32 k] is in registers: warp w of the group has the rows from 16 w on as fragments of mma.cuh. B [N rows,
// 32 k] is in shared memory, brought there by the copy engine (bulk_copy.cuh), or by threads that have called
// fx_warpgroup_fence before the barrier behind which it is read. The instruction reads it itself and drops what is below
// tf32: it has to be rounded. Its rows are 128 bytes, one behind the other from a multiple of 1,024 on; chunk c of 16
// bytes of row r lies in place c ^ (r & 7). A may lie there likewise. The sums [64, N] are fragments too.
#pragma once
#include "copy_async.cuh"
#include "mma.cuh"

#if !FX_DEVICE || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FX_HAS_WARPGROUPS 1
#else
#define FX_HAS_WARPGROUPS 0
#endif

#if FX_DEVICE && FX_HAS_WARPGROUPS
#define FX_SUMS_8(j)                                                                                    \
    "+f"(sums[j][0]), "+f"(sums[j][1]), "+f"(sums[j][2]), "+f"(sums[j][3]), "+f"(sums[j + 1][0]),       \
        "+f"(sums[j + 1][1]), "+f"(sums[j + 1][2]), "+f"(sums[j + 1][3])
#define FX_SUMS_16(j) FX_SUMS_8(j), FX_SUMS_8(j + 2)
#define FX_SUMS_32(j) FX_SUMS_16(j), FX_SUMS_16(j + 4)
#define FX_STEP_OF_A(s) "r"(a[s][0]), "r"(a[s][1]), "r"(a[s][2]), "r"(a[s][3])
#define FX_STEPS_FROM(at) "l"(at), "l"(at + 2), "l"(at + 4), "l"(at + 6)
#define FX_OPERANDS FX_STEP_OF_A(0), FX_STEP_OF_A(1), FX_STEP_OF_A(2), FX_STEP_OF_A(3), FX_STEPS_FROM(from)
#define FX_OPERANDS_SHARED FX_STEPS_FROM(from_a), FX_STEPS_FROM(from), "r"(scale)
#define FX_WGMMA(SHAPE, SUMS, A, B) \
    "wgmma.mma_async.sync.aligned." SHAPE ".f32.tf32.tf32 {" SUMS "}, {" A "}, " B ", p, 1, 1;\n"
#define FX_WGMMA_SHARED(SHAPE, SUMS, A, B, ADD) \
    "wgmma.mma_async.sync.aligned." SHAPE ".f32.tf32.tf32 {" SUMS "}, " A ", " B ", " ADD ", 1, 1;\n"
#define FX_WGMMA_BEGIN "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\nwgmma.fence.sync.aligned;\n"
#define FX_WGMMA_SHARED_BEGIN(ADD) \
    "{\n.reg .pred p, q;\nsetp.ne.b32 p, " ADD ", 0;\nsetp.eq.b32 q, 0, 0;\nwgmma.fence.sync.aligned;\n"
#define FX_WGMMA_END "wgmma.commit_group.sync.aligned;\n}"
#define FX_SUMS_OF_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FX_SUMS_OF_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FX_SUMS_OF_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FX_SUMS_OF_128 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// The descriptor of an operand in shared memory: its address, rows in groups of 8 x 128 bytes, chunks exchanged within
// each group.
__device__ __forceinline__ u64 fx_warpgroup_operand(FxShared at) {
    return static_cast<u64>((at & 0x3ffffu) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#endif

// By each thread that has written to an operand in shared memory, before the barrier behind which it is read.
__device__ __forceinline__ void fx_warpgroup_fence() {
#if FX_DEVICE && FX_HAS_WARPGROUPS
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The registers that a thread of the warpgroup has from here on, a multiple of 8: fewer than before, or more, of those
// that others have given away.
template <int REGISTERS>
__device__ __forceinline__ void fx_warpgroup_give() {
#if FX_DEVICE && FX_HAS_WARPGROUPS
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
}
template <int REGISTERS>
__device__ __forceinline__ void fx_warpgroup_take() {
#if FX_DEVICE && FX_HAS_WARPGROUPS
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
}

// Begins sums += A . B^T. All four warps of the group take part. Neither the sums nor B may be touched until
// fx_warpgroup_wait. Where ordinary instructions set other sums meanwhile, the compiler makes every product wait for the
// one before (its remark C7515).
template <int N>
__device__ __forceinline__ void fx_warpgroup_begin(float (&sums)[N / 8][4], const unsigned (&a)[4][4], FxShared b) {
    static_assert(N == 16 || N == 32 || N == 64 || N == 128, "columns of the instruction");
#if !FX_DEVICE
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    unsigned words[N / 8][4][2];
    for (int j = 0; j < N / 8; ++j) {
        for (int s = 0; s < 4; ++s) {
            for (int half = 0; half < 2; ++half) {
                words[j][s][half] = reinterpret_cast<const unsigned*>(b)[(8 * j + g) * 32 + ((2 * s + half) ^ g) * 4 + t];
            }
        }
    }
    fx_mma<1, 4, 1>(reinterpret_cast<float(&)[1][N / 8][4]>(sums),
                    reinterpret_cast<const unsigned(&)[1][4][4]>(a), words);
#elif FX_HAS_WARPGROUPS
    const u64 from = fx_warpgroup_operand(b);
    if constexpr (N == 16) {
        asm volatile(FX_WGMMA_BEGIN
            FX_WGMMA("m64n16k8", FX_SUMS_OF_16, "%8, %9, %10, %11", "%24")
            FX_WGMMA("m64n16k8", FX_SUMS_OF_16, "%12, %13, %14, %15", "%25")
            FX_WGMMA("m64n16k8", FX_SUMS_OF_16, "%16, %17, %18, %19", "%26")
            FX_WGMMA("m64n16k8", FX_SUMS_OF_16, "%20, %21, %22, %23", "%27")
            FX_WGMMA_END : FX_SUMS_8(0) : FX_OPERANDS : "memory");
    } else if constexpr (N == 32) {
        asm volatile(FX_WGMMA_BEGIN
            FX_WGMMA("m64n32k8", FX_SUMS_OF_32, "%16, %17, %18, %19", "%32")
            FX_WGMMA("m64n32k8", FX_SUMS_OF_32, "%20, %21, %22, %23", "%33")
            FX_WGMMA("m64n32k8", FX_SUMS_OF_32, "%24, %25, %26, %27", "%34")
            FX_WGMMA("m64n32k8", FX_SUMS_OF_32, "%28, %29, %30, %31", "%35")
            FX_WGMMA_END : FX_SUMS_16(0) : FX_OPERANDS : "memory");
    } else if constexpr (N == 64) {
        asm volatile(FX_WGMMA_BEGIN
            FX_WGMMA("m64n64k8", FX_SUMS_OF_64, "%32, %33, %34, %35", "%48")
            FX_WGMMA("m64n64k8", FX_SUMS_OF_64, "%36, %37, %38, %39", "%49")
            FX_WGMMA("m64n64k8", FX_SUMS_OF_64, "%40, %41, %42, %43", "%50")
            FX_WGMMA("m64n64k8", FX_SUMS_OF_64, "%44, %45, %46, %47", "%51")
            FX_WGMMA_END : FX_SUMS_32(0) : FX_OPERANDS : "memory");
    } else {
        asm volatile(FX_WGMMA_BEGIN
            FX_WGMMA("m64n128k8", FX_SUMS_OF_128, "%64, %65, %66, %67", "%80")
            FX_WGMMA("m64n128k8", FX_SUMS_OF_128, "%68, %69, %70, %71", "%81")
            FX_WGMMA("m64n128k8", FX_SUMS_OF_128, "%72, %73, %74, %75", "%82")
            FX_WGMMA("m64n128k8", FX_SUMS_OF_128, "%76, %77, %78, %79", "%83")
            FX_WGMMA_END : FX_SUMS_32(0), FX_SUMS_32(8) : FX_OPERANDS : "memory");
    }
#endif
}

// The same with A [64 rows, 32 k] in shared memory. add: false makes sums = A . B^T, whatever they were before.
template <int N>
__device__ __forceinline__ void fx_warpgroup_begin(float (&sums)[N / 8][4], FxShared a, FxShared b, bool add = true) {
    static_assert(N == 32 || N == 64 || N == 128, "columns of the instruction");
#if !FX_DEVICE
    const int thread = static_cast<int>(threadIdx.x), g = (thread & 31) >> 2, t = thread & 3;
    unsigned words[4][4];
    for (int s = 0; s < 4; ++s) {
        for (int e = 0; e < 4; ++e) {
            const int row = (thread >> 5 & 3) * 16 + (e & 1) * 8 + g;
            words[s][e] = reinterpret_cast<const unsigned*>(a)[row * 32 + ((2 * s + (e >> 1)) ^ g) * 4 + t];
        }
    }
    for (int j = 0; j < N / 8; ++j) {
        for (int e = 0; e < 4 && !add; ++e) sums[j][e] = 0.0f;
    }
    fx_warpgroup_begin<N>(sums, words, b);
#elif FX_HAS_WARPGROUPS
    const int scale = add;
    const u64 from_a = fx_warpgroup_operand(a), from = fx_warpgroup_operand(b);
    if constexpr (N == 32) {
        asm volatile(FX_WGMMA_SHARED_BEGIN("%24")
            FX_WGMMA_SHARED("m64n32k8", FX_SUMS_OF_32, "%16", "%20", "p")
            FX_WGMMA_SHARED("m64n32k8", FX_SUMS_OF_32, "%17", "%21", "q")
            FX_WGMMA_SHARED("m64n32k8", FX_SUMS_OF_32, "%18", "%22", "q")
            FX_WGMMA_SHARED("m64n32k8", FX_SUMS_OF_32, "%19", "%23", "q")
            FX_WGMMA_END : FX_SUMS_16(0) : FX_OPERANDS_SHARED : "memory");
    } else if constexpr (N == 64) {
        asm volatile(FX_WGMMA_SHARED_BEGIN("%40")
            FX_WGMMA_SHARED("m64n64k8", FX_SUMS_OF_64, "%32", "%36", "p")
            FX_WGMMA_SHARED("m64n64k8", FX_SUMS_OF_64, "%33", "%37", "q")
            FX_WGMMA_SHARED("m64n64k8", FX_SUMS_OF_64, "%34", "%38", "q")
            FX_WGMMA_SHARED("m64n64k8", FX_SUMS_OF_64, "%35", "%39", "q")
            FX_WGMMA_END : FX_SUMS_32(0) : FX_OPERANDS_SHARED : "memory");
    } else {
        asm volatile(FX_WGMMA_SHARED_BEGIN("%72")
            FX_WGMMA_SHARED("m64n128k8", FX_SUMS_OF_128, "%64", "%68", "p")
            FX_WGMMA_SHARED("m64n128k8", FX_SUMS_OF_128, "%65", "%69", "q")
            FX_WGMMA_SHARED("m64n128k8", FX_SUMS_OF_128, "%66", "%70", "q")
            FX_WGMMA_SHARED("m64n128k8", FX_SUMS_OF_128, "%67", "%71", "q")
            FX_WGMMA_END : FX_SUMS_32(0), FX_SUMS_32(8) : FX_OPERANDS_SHARED : "memory");
    }
#endif
}

// Returns when all products that this warpgroup has begun are made.
template <int N>
__device__ __forceinline__ void fx_warpgroup_wait(float (&sums)[N / 8][4]) {
#if FX_DEVICE && FX_HAS_WARPGROUPS
    if constexpr (N == 16) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : FX_SUMS_8(0) :: "memory");
    } else if constexpr (N == 32) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : FX_SUMS_16(0) :: "memory");
    } else if constexpr (N == 64) {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : FX_SUMS_32(0) :: "memory");
    } else {
        asm volatile("wgmma.wait_group.sync.aligned 0;" : FX_SUMS_32(0), FX_SUMS_32(8) :: "memory");
    }
#endif
}

// Returns when all but the newest product are made: what the others have read may be written again.
__device__ __forceinline__ void fx_warpgroup_wait_but_one() {
#if FX_DEVICE && FX_HAS_WARPGROUPS
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
#endif
}
