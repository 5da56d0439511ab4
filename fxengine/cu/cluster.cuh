// Blocks that work together: a cluster of FX_CLUSTER blocks that write into each other's shared memory (thread block
// clusters, since sm_90). Before sm_90 and on the simulated device a cluster is one block.
//
// A kernel of clusters is declared once before its definition, so that the definition looks like any other:
//   FX_CLUSTER_KERNEL(fx_name, Record)
//   extern "C" __global__ void __launch_bounds__(512) fx_name(const Record* table, int count) { ... }
// Its grid is a multiple of FX_CLUSTER blocks.
//
// Data and their arrival travel together: a mailbox in every block knows how many bytes it is to get, every word sent to
// the block counts against it, and who waits for the mailbox sees all of them. The cluster's own barrier costs several
// times as much, because it makes every earlier access of every thread visible.
#pragma once
#include "fx.cuh"

#if FX_DEVICE && __CUDA_ARCH__ >= 900
#define FX_CLUSTER 8
#define FX_CLUSTER_KERNEL(name, Record) \
    extern "C" __global__ void __cluster_dims__(8, 1, 1) name(const Record* table, int count);
#else
#define FX_CLUSTER 1
#define FX_CLUSTER_KERNEL(name, Record)
#endif

typedef u64 FxMailbox;  // in shared memory

template <class T>
__device__ __forceinline__ unsigned fx_shared_address(const T* place) {
#if FX_DEVICE
    return static_cast<unsigned>(__cvta_generic_to_shared(place));
#else
    return 0;
#endif
}

// Number of this block in its cluster.
__device__ __forceinline__ int fx_cluster_rank() {
#if FX_CLUSTER > 1
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return static_cast<int>(rank);
#else
    return 0;
#endif
}

// One thread opens a mailbox for so many bytes, before fx_cluster_arrive().
__device__ __forceinline__ void fx_mailbox_open(FxMailbox* box, int bytes) {
#if FX_CLUSTER > 1
    const unsigned at = fx_shared_address(box);
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
#endif
}

// All threads, in two halves: once waited, the mailboxes of all blocks are open.
__device__ __forceinline__ void fx_cluster_arrive() {
#if FX_CLUSTER > 1
    __syncwarp();  // the lanes arrive together
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void fx_cluster_wait() {
#if FX_CLUSTER > 1
    __syncwarp();
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// A word to the place in block `rank` that `place` is in this one, counted by the mailbox there.
__device__ __forceinline__ void fx_cluster_send(float* place, FxMailbox* box, int rank, float value) {
#if FX_CLUSTER > 1
    unsigned to, counted;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(fx_shared_address(place)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(counted) : "r"(fx_shared_address(box)), "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
                 "r"(__float_as_uint(value)), "r"(counted)
                 : "memory");
#else
    *place = value;
#endif
}

// All threads: wait until the mailbox has got everything, and see what other blocks have put there.
__device__ __forceinline__ void fx_mailbox_wait(FxMailbox* box) {
#if FX_CLUSTER > 1
    const unsigned at = fx_shared_address(box);
    unsigned done = 0;
    while (done == 0) {
        asm volatile(
            "{\n\t.reg .pred full;\n\t"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 full, [%1], 0;\n\t"
            "selp.u32 %0, 1, 0, full;\n\t}"
            : "=r"(done)
            : "r"(at)
            : "memory");
    }
    __syncwarp();
#else
    __syncthreads();
#endif
}

// A 4-byte copy from global to shared memory that nobody waits for before fx_copies_wait().
__device__ __forceinline__ void fx_copy_word(float* to, const float* from) {
#if FX_DEVICE
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(fx_shared_address(to)), "l"(from) : "memory");
#else
    *to = *from;
#endif
}

__device__ __forceinline__ void fx_copies_wait() {
#if FX_DEVICE
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
