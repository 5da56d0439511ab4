// Included before a .cu file that a C++ compiler builds for the simulated device: CUDA's words, built-in variables
// and functions. 16-bit floating-point types and tensor-core operations would be further headers included here.
#pragma once

#define FX_HOST 1

#include <utility>

#include "fx_math.h"
#include "fx_sim.h"
#include "fx_warp.h"

static constexpr int warpSize = 32;

namespace fx_sim {

// The address of some thread-local object of this module: asking for it makes the module's __shared__ exist on this
// OS thread, so that the runtime can find and poison it.
#ifdef FX_SIM_SANITIZED
static void* (*const shared_anchor)() = nullptr;
#else
static thread_local char anchor_byte;
static void* shared_anchor() { return &anchor_byte; }
#endif

template <auto Function>
struct Export;

// What the runtime knows of a kernel comes from its C++ type, so argument sizes cannot disagree with the code.
template <class... Arguments, void (*Function)(Arguments...)>
struct Export<Function> {
    struct Layout {
        unsigned sizes[sizeof...(Arguments) + 1];
        unsigned offsets[sizeof...(Arguments) + 1];
    };
    static constexpr Layout layout() {
        Layout result = {{sizeof(Arguments)..., 0}, {}};
        const size_t align[] = {alignof(Arguments)..., 1};
        size_t offset = 0;
        for (size_t i = 0; i < sizeof...(Arguments); ++i) {
            offset = (offset + align[i] - 1) / align[i] * align[i];
            result.offsets[i] = static_cast<unsigned>(offset);
            offset += result.sizes[i];
        }
        return result;
    }
    static constexpr Layout table = layout();
    template <size_t... I>
    static FX_SIM_INLINE void call(void* const* arguments, std::index_sequence<I...>) {
        (void)arguments;
        Function(*static_cast<Arguments*>(arguments[I])...);
    }
    static void invoke(void* const* arguments) { call(arguments, std::index_sequence_for<Arguments...>()); }
    static constexpr Kernel kernel(const char* name, unsigned max_threads) {
        return {name, &invoke, table.sizes, table.offsets, sizeof...(Arguments), max_threads, shared_anchor};
    }
};

}  // namespace fx_sim

// Appended to a source for each of its kernels.
#define FX_SIM_EXPORT(name, max_threads)                                              \
    extern "C" __attribute__((visibility("default"))) const fx_sim::Kernel fx_sim_kernel_##name = \
        fx_sim::Export<&name>::kernel(#name, static_cast<unsigned>(max_threads));

// CUDA's words come after every system header: libstdc++ itself uses some of them as attribute names.
#define threadIdx (::fx_sim::current->position)
#define blockIdx (::fx_sim::block->index)
#define blockDim (::fx_sim::block->size)
#define gridDim (::fx_sim::block->grid)

#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __constant__
#ifdef FX_SIM_SANITIZED
#define __shared__ static  // AddressSanitizer puts no red zones around thread-local arrays; one worker runs then
#else
#define __shared__ static thread_local
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

// Dynamic shared memory: `T* name`. (`extern __shared__ T name[]` cannot be mapped onto thread-local storage.)
#define FX_DYN_SHARED(T, name) T* name = reinterpret_cast<T*>(::fx_sim::block->dynamic_shared)
