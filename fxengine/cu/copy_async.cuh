// Shared memory by address, and copies from global memory to it that go on beside their thread (PTX cp.async, since
// sm_80). A thread closes the copies that it began into a group with fx_copy_commit; after fx_copy_wait<N> all of its
// groups but the newest N have arrived: for itself, and for the others of the block after a barrier. The simulated
// device makes them as late as that allows.
#pragma once
#include "fx.cuh"

// An address in shared memory, in bytes: half the registers of a pointer, and never worked out afresh.
#if FX_DEVICE
typedef unsigned FxShared;
#else
typedef char* FxShared;
#endif

__device__ __forceinline__ FxShared fx_shared(float* p) {
#if FX_DEVICE
    unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(p));
    asm volatile("" : "+r"(address));
    return address;
#else
    return reinterpret_cast<char*>(p);
#endif
}

// The same address, and what is worked out from it is worked out again: kept, it would cost registers.
__device__ __forceinline__ FxShared fx_shared_again(FxShared at) {
#if FX_DEVICE
    asm volatile("" : "+r"(at));
#endif
    return at;
}

__device__ __forceinline__ void fx_shared_load(float (&v)[4], FxShared from) {
#if FX_DEVICE
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "r"(from));
#else
    for (int e = 0; e < 4; ++e) v[e] = reinterpret_cast<const float*>(from)[e];
#endif
}

__device__ __forceinline__ void fx_shared_load(float& x, FxShared from) {
#if FX_DEVICE
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from));
#else
    x = *reinterpret_cast<const float*>(from);
#endif
}

__device__ __forceinline__ void fx_shared_load(float& x, float& y, FxShared from) {
#if FX_DEVICE
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(from));
#else
    x = reinterpret_cast<const float*>(from)[0];
    y = reinterpret_cast<const float*>(from)[1];
#endif
}

__device__ __forceinline__ void fx_shared_store(FxShared to, const float (&v)[4]) {
#if FX_DEVICE
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
        :: "r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
#else
    for (int e = 0; e < 4; ++e) reinterpret_cast<float*>(to)[e] = v[e];
#endif
}

__device__ __forceinline__ void fx_shared_store(FxShared to, float x, float y) {
#if FX_DEVICE
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" :: "r"(to), "f"(x), "f"(y) : "memory");
#else
    reinterpret_cast<float*>(to)[0] = x;
    reinterpret_cast<float*>(to)[1] = y;
#endif
}

__device__ __forceinline__ void fx_shared_store(FxShared to, unsigned word) {
#if FX_DEVICE
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(to), "r"(word) : "memory");
#else
    *reinterpret_cast<unsigned*>(to) = word;
#endif
}

// Four neighbouring floats, of which the first `count` (0 to 4) are read and the rest are zeros. Both addresses are
// multiples of 16.
__device__ __forceinline__ void fx_copy_quad(FxShared to, const float* from, int count = 4) {
#if FX_DEVICE
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(4 * count));
#else
    float quad[4];
    for (int e = 0; e < 4; ++e) quad[e] = e < count ? from[e] : 0.0f;
    fx_sim::fx_sim_copy(to, quad, sizeof quad);
#endif
}

// One float, or a zero.
__device__ __forceinline__ void fx_copy_word(FxShared to, const float* from, bool exists) {
#if FX_DEVICE
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
        :: "r"(to), "l"(__cvta_generic_to_global(from)), "r"(exists ? 4 : 0));
#else
    const float word = exists ? *from : 0.0f;
    fx_sim::fx_sim_copy(to, &word, sizeof word);
#endif
}

__device__ __forceinline__ void fx_copy_commit() {
#if FX_DEVICE
    asm volatile("cp.async.commit_group;");
#else
    fx_sim::fx_sim_copy_commit();
#endif
}

template <int N>
__device__ __forceinline__ void fx_copy_wait() {
#if FX_DEVICE
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#else
    fx_sim::fx_sim_copy_wait(N);
#endif
}
