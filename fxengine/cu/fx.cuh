// Helpers shared by every kernel family. Compiles with NVRTC (FX_DEVICE) and with a C++ compiler for the simulated
// device, whose header is included before this file and supplies CUDA's words.
#pragma once

#ifndef FX_DEVICE
#define FX_DEVICE 0
#endif

typedef unsigned long long u64;

// Dynamic shared memory as `T* name`. The simulated device, whose header defines it there, cannot map
// `extern __shared__ T name[]`.
#if FX_DEVICE
#define FX_DYN_SHARED(T, name)                                  \
    extern __shared__ __align__(16) unsigned char fx_dynamic[]; \
    T* name = reinterpret_cast<T*>(fx_dynamic)
#endif

// A kernel's large shared array, `T name[n]`. In a kernel that several families share (FX_FUSED) the arrays of all of
// them lie in the launch's dynamic shared memory: a block works for one family only, so they may overlap.
#ifdef FX_FUSED
#define FX_POOL(T, name, n) FX_DYN_SHARED(T, name)
#else
#define FX_POOL(T, name, n) __shared__ T name[n]
#endif

// A launch covers a table of records of one kind. Every record starts with `int first_tile; int tiles;`: block b
// works for the record with first_tile <= b < first_tile + tiles. The search runs before fx_wait(), since nothing in a
// table changes after capture; the lanes of a warp look at 32 records at once, because a chain of dependent loads over
// the tens of records of the optimizer would cost more than its arithmetic.
template <class Record>
__device__ __forceinline__ const Record& fx_record(const Record* table, int count, int& tile) {
    const int block = static_cast<int>(blockIdx.x);
    int i = 0;
#if FX_DEVICE
    const int lane = static_cast<int>(threadIdx.x & 31u);
    int begun = 0;  // records that begin at or before this block
#pragma unroll 1  // code that is never run would still be fetched
    for (int base = 0; count > 1 && base < count; base += 32) {
        const bool mine = base + lane < count && block >= table[base + lane].first_tile;
        begun += __popc(__ballot_sync(0xffffffffu, mine));
    }
    i = begun > 0 ? begun - 1 : 0;
#else
    while (i + 1 < count && block >= table[i + 1].first_tile) ++i;
#endif
    tile = block - table[i].first_tile;
    return table[i];
}

// The same, from shared memory, for who reads the record again and again: behind fx_wait() global memory would have to
// be fetched anew. All threads of the block call it.
template <class Record>
__device__ __forceinline__ const Record& fx_record(const Record* table, int count, int& tile, Record& place) {
    const unsigned* const from = reinterpret_cast<const unsigned*>(&fx_record(table, count, tile));
    unsigned* const to = reinterpret_cast<unsigned*>(&place);
    for (unsigned i = threadIdx.x; i < sizeof(Record) / sizeof(unsigned); i += blockDim.x) to[i] = from[i];
    __syncthreads();
    return place;
}

// The block's tile of its record, found out afresh.
template <class Record>
__device__ __forceinline__ int fx_tile(const Record& record) {
    return static_cast<int>(blockIdx.x) - record.first_tile;
}

// A pointer out of a record in shared memory: the compiler cannot know by itself that it points to global memory.
template <class T>
__device__ __forceinline__ T* fx_global(T* pointer) {
#if FX_DEVICE
    __builtin_assume(__isGlobal(pointer));
#endif
    return pointer;
}

// Programmatic dependent launch: wait until all that this launch depends on has finished and is visible. Every kernel
// calls it before it touches anything that may be new in this graph (all but constants and Family.early). Without the
// launch attribute it returns at once.
__device__ __forceinline__ void fx_wait() {
#if FX_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the dependent launches start their prologue. Called after fx_wait(), so that "my predecessor has finished"
// also means that its predecessors have.
__device__ __forceinline__ void fx_trigger() {
#if FX_DEVICE && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

enum FxActivation { FX_NONE = 0, FX_ELU = 1, FX_RELU = 2, FX_TANH = 3 };

// e^x - 1 for x <= 0, to 1 unit in the last place; anything for x > 0, NaN for NaN. Without a branch, so that values
// of a thread are worked out side by side: x = n ln 2 + f, e^x - 1 = 2^n (e^f - 1) + (2^n - 1), Taylor's series of
// e^f - 1.
__device__ __forceinline__ float fx_expm1(float x) {
    x = x < -64.0f ? -64.0f : x;
    const float shifted = fmaf(x, 1.44269504f, 12582912.0f);  // n in its low bits
    const float n = shifted - 12582912.0f;
    const float f = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
    float p = fmaf(f, 1.98412698e-4f, 1.38888889e-3f);
    p = fmaf(p, f, 8.33333333e-3f);
    p = fmaf(p, f, 4.16666667e-2f);
    p = fmaf(p, f, 1.66666667e-1f);
    p = fmaf(p, f, 0.5f);
    return fmaf(power, fmaf(p, f * f, f), power - 1.0f);
}

// The same to 2^-23 of 1, for what follows a product of rounded operands: a quarter of the instructions.
__device__ __forceinline__ float fx_expm1_fast(float x) {
#if FX_DEVICE
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
    return power - 1.0f;
#else
    return exp2f(x * 1.44269504f) - 1.0f;
#endif
}

// FAST: see fx_expm1_fast.
template <bool FAST = false>
__device__ __forceinline__ float fx_activate(int kind, float x) {
    if (kind == FX_ELU) {
        const float below = FAST ? fx_expm1_fast(x) : fx_expm1(x);
        return x > 0.0f ? x : below;
    }
    if (kind == FX_RELU) return x <= 0.0f ? 0.0f : x;  // NaN passes
    if (kind == FX_TANH) return tanhf(x);
    return x;
}

// Derivative with respect to the pre-activation, from the stored output y.
__device__ __forceinline__ float fx_activate_slope(int kind, float y) {
    if (kind == FX_ELU) return y > 0.0f ? 1.0f : y + 1.0f;
    if (kind == FX_RELU) return y > 0.0f ? 1.0f : 0.0f;
    if (kind == FX_TANH) return 1.0f - y * y;
    return 1.0f;
}

#define FX_INF __uint_as_float(0x7f800000u)
#define FX_NAN __uint_as_float(0x7fc00000u)

// False for infinities and NaN.
__device__ __forceinline__ bool fx_finite(double x) { return x - x == 0.0; }

// The exact zero that a scale of zero owes, whatever x holds (NaN and infinities included).
__device__ __forceinline__ float fx_scaled(float scale, float x) { return scale == 0.0f ? 0.0f : scale * x; }

// A target network's number after it has moved towards its parameter. A tau of 1 copies the parameter bit for bit, which
// the formula does not: its difference and its sum are rounded.
__device__ __forceinline__ float fx_follow(float target, float param, float tau) {
    return tau == 1.0f ? param : target + tau * (param - target);
}

// x limited to [-bound, bound]; a bound of FX_INF changes nothing.
__device__ __forceinline__ float fx_limit(float x, float bound) { return fminf(fmaxf(x, -bound), bound); }

// Quotient and square root to 2 units in the last place, without the slow path (a call, and registers spilled around
// it) that correct rounding needs. fx_divide: |b| <= 2^126. fx_root: x >= 0.
__device__ __forceinline__ float fx_divide(float a, float b) {
#if FX_DEVICE
    return __fdividef(a, b);
#else
    return a / b;
#endif
}

__device__ __forceinline__ float fx_root(float x) {
#if FX_DEVICE
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return root;
#else
    return sqrtf(x);
#endif
}

// Memory that changes behind the kernel's back (mapped host memory, partial sums of other blocks): a volatile access
// goes past the first-level cache and is never served by the read-only path.
template <class T>
__device__ __forceinline__ T fx_load_fresh(const T* address) {
    return *static_cast<const volatile T*>(address);
}

template <class T>
__device__ __forceinline__ void fx_store_through(T* address, T value) {
    *static_cast<volatile T*>(address) = value;
}

// Sum over groups of LANES neighbouring lanes (a power of two up to 32), the same bits in every lane of the group: the
// butterfly has one fixed order. All lanes of the warp take part.
template <int LANES, class T>
__device__ __forceinline__ T fx_lanes_sum(T value) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

template <class T>
__device__ __forceinline__ T fx_warp_sum(T value) {
    return fx_lanes_sum<32>(value);
}

// Sums of N numbers over the warp, N a power of two: lane l gets that of number l * N / 32; x is used up. Each exchange
// halves what is left to add, where N butterflies would take log2(32) N shuffles.
template <int N>
__device__ __forceinline__ float fx_warp_sums(float (&x)[N]) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        const int offset = 32 * half / N;
        const bool upper = (lane & offset) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float sent = upper ? x[i] : x[i + half];
            x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(0xffffffffu, sent, offset);
        }
    }
    return fx_lanes_sum<32 / N>(x[0]);
}

// Sum over a block of 256 threads in fixed order, returned to every thread. `scratch`: 8 values of shared memory.
template <class T>
__device__ __forceinline__ T fx_block_sum(T value, T* scratch) {
    value = fx_warp_sum(value);
    __syncthreads();  // an earlier use of scratch is over
    if ((threadIdx.x & 31u) == 0) scratch[threadIdx.x >> 5] = value;
    __syncthreads();
    T total = scratch[0];
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) total += scratch[warp];
    return total;
}

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011): 128 random bits
// that are a pure function of a 64-bit key and a 128-bit counter.
struct FxPhilox {
    unsigned x, y, z, w;
};

__device__ __forceinline__ FxPhilox fx_philox(u64 key, unsigned c0, unsigned c1, unsigned c2, unsigned c3) {
    unsigned k0 = static_cast<unsigned>(key), k1 = static_cast<unsigned>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return FxPhilox{c0, c1, c2, c3};
}

// The random bits of an item. The package's streams: key = seed, counter = (item, stream, replay low, replay high).
__device__ __forceinline__ FxPhilox fx_random_bits(u64 seed, u64 replay, unsigned stream, unsigned item) {
    return fx_philox(seed, item, stream, static_cast<unsigned>(replay), static_cast<unsigned>(replay >> 32));
}

// A number in [0, 1) from 32 random bits.
__device__ __forceinline__ float fx_random_uniform(unsigned bits) {
    return static_cast<float>(bits >> 8) * 5.9604644775390625e-8f;  // both factors and the product are exact
}

// An integer in [0, population) from 64 random bits: the high half of their product. Its bias is below
// population / 2^64.
__device__ __forceinline__ u64 fx_random_index(u64 seed, u64 replay, unsigned stream, unsigned item, u64 population) {
    const FxPhilox bits = fx_random_bits(seed, replay, stream, item);
    return __umul64hi((static_cast<u64>(bits.y) << 32) | bits.x, population);
}
