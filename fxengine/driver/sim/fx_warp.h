// Barriers, warp operations, tensor-core products and atomics of the simulated device, on the primitives of fx_sim.h.
#pragma once

#include "fx_sim.h"

namespace fx_sim {

inline void join(Warp&, unsigned) {}

template <class T>
struct Shuffle {
    T value, result;
    unsigned source;
};

// A lane that is not in the mask, or has returned, gives all-ones: NaN for floats.
template <class T>
inline void shuffle(Warp& warp, unsigned lanes) {
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        Shuffle<T>* mine = static_cast<Shuffle<T>*>(warp.operand[__builtin_ctz(rest)]);
        if (lanes >> mine->source & 1u) {
            mine->result = static_cast<Shuffle<T>*>(warp.operand[mine->source])->value;
        } else {
            __builtin_memset(&mine->result, 0xff, sizeof(T));
        }
    }
}

template <class T>
FX_SIM_INLINE T shuffled(unsigned mask, T value, unsigned source, const char* what, const char* file, int line) {
    Shuffle<T> operand = {value, value, source};
    collective(mask, &operand, &shuffle<T>, what, file, line);
    return operand.result;
}

struct Vote {
    unsigned value, result;
};

inline void ballot(Warp& warp, unsigned lanes) {
    unsigned bits = 0;
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
        if (static_cast<Vote*>(warp.operand[lane])->value) bits |= 1u << lane;
    }
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        static_cast<Vote*>(warp.operand[__builtin_ctz(rest)])->result = bits;
    }
}

FX_SIM_INLINE unsigned voted(unsigned mask, int predicate, const char* what, const char* file, int line) {
    Vote operand = {predicate != 0, 0};
    collective(mask, &operand, &ballot, what, file, line);
    return operand.result;
}

template <class T>
struct Pair {
    T value, result;
};

struct Add { template <class T> static T of(T a, T b) { return a + b; } };
struct Min { template <class T> static T of(T a, T b) { return b < a ? b : a; } };
struct Max { template <class T> static T of(T a, T b) { return a < b ? b : a; } };
struct And { template <class T> static T of(T a, T b) { return a & b; } };
struct Or { template <class T> static T of(T a, T b) { return a | b; } };
struct Xor { template <class T> static T of(T a, T b) { return a ^ b; } };

template <class Operation, class T>
inline void reduce(Warp& warp, unsigned lanes) {
    T total = static_cast<Pair<T>*>(warp.operand[__builtin_ctz(lanes)])->value;
    for (unsigned rest = lanes & (lanes - 1); rest != 0; rest &= rest - 1) {
        total = Operation::of(total, static_cast<Pair<T>*>(warp.operand[__builtin_ctz(rest)])->value);
    }
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        static_cast<Pair<T>*>(warp.operand[__builtin_ctz(rest)])->result = total;
    }
}

template <class Operation, class T>
FX_SIM_INLINE T reduced(unsigned mask, T value, const char* what, const char* file, int line) {
    Pair<T> operand = {value, value};
    collective(mask, &operand, &reduce<Operation, T>, what, file, line);
    return operand.result;
}

template <class T>
inline void match(Warp& warp, unsigned lanes) {
    for (unsigned rest = lanes; rest != 0; rest &= rest - 1) {
        Pair<T>* mine = static_cast<Pair<T>*>(warp.operand[__builtin_ctz(rest)]);
        unsigned bits = 0;
        for (unsigned others = lanes; others != 0; others &= others - 1) {
            const unsigned lane = static_cast<unsigned>(__builtin_ctz(others));
            if (static_cast<Pair<T>*>(warp.operand[lane])->value == mine->value) bits |= 1u << lane;
        }
        mine->result = bits;
    }
}

// The lane a shuffle reads, as CUDA defines it: beyond the segment of `width` lanes a lane reads itself.
FX_SIM_INLINE unsigned lane_index() { return current->index & 31u; }
FX_SIM_INLINE unsigned source_index(int source, int width) {
    const unsigned w = static_cast<unsigned>(width);
    return (lane_index() & ~(w - 1u)) | (static_cast<unsigned>(source) & (w - 1u));
}
FX_SIM_INLINE unsigned source_up(unsigned delta, int width) {
    const unsigned lane = lane_index(), first = lane & ~(static_cast<unsigned>(width) - 1u);
    return lane < first + delta ? lane : lane - delta;
}
FX_SIM_INLINE unsigned source_down(unsigned delta, int width) {
    const unsigned lane = lane_index(), last = lane | (static_cast<unsigned>(width) - 1u);
    return lane + delta > last ? lane : lane + delta;
}
FX_SIM_INLINE unsigned source_xor(int bits, int width) {
    const unsigned lane = lane_index(), w = static_cast<unsigned>(width), other = lane ^ static_cast<unsigned>(bits);
    return other >= (lane & ~(w - 1u)) + w ? lane : other;
}

// -- tensor cores ---------------------------------------------------------------------------------------------------

// tf32: round to nearest, ties away from zero; NaN stays NaN. bf16: round to nearest even, in the low 16 bits.
FX_SIM_INLINE unsigned tf32(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, 4);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffe000u : (bits + 0x1000u) & 0xffffe000u;
}
FX_SIM_INLINE unsigned bf16(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, 4);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// What a tensor core reads of a word (fragments: mma.cuh): of tf32 the upper 19 bits, so that a number that was not
// rounded before is truncated here as it is there.
template <int WORD>
FX_SIM_INLINE void words(float* to, unsigned word) {
    const unsigned halves[2] = {WORD == 1 ? word & 0xffffe000u : word << 16, word & 0xffff0000u};
    __builtin_memcpy(to, halves, WORD * sizeof(float));
}

template <int STEPS, int M, int N>
struct Product {
    float (*sums)[N][4];
    const unsigned (*a)[STEPS][4];
    const unsigned (*b)[STEPS][2];
};

// One warp-wide product for all its fragments: gathered as plain matrices, multiplied (products of rounded operands are
// exact in float), scattered.
template <int WORD, int STEPS, int M, int N>
inline void product(Warp& warp, unsigned lanes) {
    if (lanes != 0xffffffffu) fx_sim_fail("a tensor-core product needs all lanes of the warp; 0x%08x take part", lanes);
    constexpr int K = 8 * WORD * STEPS;
    float a[M * 16][K], b[K][N * 8], c[M * 16][N * 8];
    for (int lane = 0; lane < 32; ++lane) {
        const Product<STEPS, M, N>& own = *static_cast<Product<STEPS, M, N>*>(warp.operand[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int s = 0; s < STEPS; ++s) {
            for (int half = 0; half < 2; ++half) {
                const int k = WORD * (8 * s + 4 * half + t);
                for (int i = 0; i < M; ++i) {
                    words<WORD>(&a[16 * i + g][k], own.a[i][s][2 * half]);
                    words<WORD>(&a[16 * i + g + 8][k], own.a[i][s][2 * half + 1]);
                }
                for (int j = 0; j < N; ++j) {
                    float value[2];
                    words<WORD>(value, own.b[j][s][half]);
                    for (int e = 0; e < WORD; ++e) b[k + e][8 * j + g] = value[e];
                }
            }
        }
        for (int i = 0; i < M; ++i) {
            for (int j = 0; j < N; ++j) {
                for (int e = 0; e < 4; ++e) c[16 * i + g + e / 2 * 8][8 * j + 2 * t + e % 2] = own.sums[i][j][e];
            }
        }
    }
    for (int i = 0; i < M * 16; ++i) {
        for (int k = 0; k < K; ++k) {
            for (int j = 0; j < N * 8; ++j) c[i][j] += a[i][k] * b[k][j];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        const Product<STEPS, M, N>& own = *static_cast<Product<STEPS, M, N>*>(warp.operand[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < M; ++i) {
            for (int j = 0; j < N; ++j) {
                for (int e = 0; e < 4; ++e) own.sums[i][j][e] = c[16 * i + g + e / 2 * 8][8 * j + 2 * t + e % 2];
            }
        }
    }
}

template <int WORD, int STEPS, int M, int N>
FX_SIM_INLINE void multiply(float (*sums)[N][4], const unsigned (*a)[STEPS][4], const unsigned (*b)[STEPS][2],
                            FX_SIM_SITE) {
    Product<STEPS, M, N> operand = {sums, a, b};
    collective(0xffffffffu, &operand, &product<WORD, STEPS, M, N>, "a tensor-core product", file, line);
}

}  // namespace fx_sim

FX_SIM_INLINE void __syncthreads(FX_SIM_SITE) { fx_sim::barrier(0, "__syncthreads", file, line); }
FX_SIM_INLINE int __syncthreads_count(int predicate, FX_SIM_SITE) {
    return fx_sim::block->sum[fx_sim::barrier(predicate, "__syncthreads_count", file, line)];
}
FX_SIM_INLINE int __syncthreads_or(int predicate, FX_SIM_SITE) {
    return fx_sim::block->any[fx_sim::barrier(predicate, "__syncthreads_or", file, line)];
}
FX_SIM_INLINE int __syncthreads_and(int predicate, FX_SIM_SITE) {
    return fx_sim::block->all[fx_sim::barrier(predicate, "__syncthreads_and", file, line)];
}
FX_SIM_INLINE void __syncwarp(unsigned mask = 0xffffffffu, FX_SIM_SITE) {
    fx_sim::collective(mask, nullptr, &fx_sim::join, "__syncwarp", file, line);
}

FX_SIM_INLINE unsigned __ballot_sync(unsigned mask, int predicate, FX_SIM_SITE) {
    return fx_sim::voted(mask, predicate, "__ballot_sync", file, line);
}
FX_SIM_INLINE int __any_sync(unsigned mask, int predicate, FX_SIM_SITE) {
    return fx_sim::voted(mask, predicate, "__any_sync", file, line) != 0;
}
FX_SIM_INLINE int __all_sync(unsigned mask, int predicate, FX_SIM_SITE) {
    return fx_sim::voted(mask, !predicate, "__all_sync", file, line) == 0;
}

#define FX_SIM_SHUFFLES(T)                                                                                     \
    FX_SIM_INLINE T __shfl_sync(unsigned mask, T value, int source, int width = 32, FX_SIM_SITE) {             \
        return fx_sim::shuffled<T>(mask, value, fx_sim::source_index(source, width), "__shfl_sync", file, line); \
    }                                                                                                          \
    FX_SIM_INLINE T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, FX_SIM_SITE) {      \
        return fx_sim::shuffled<T>(mask, value, fx_sim::source_up(delta, width), "__shfl_up_sync", file, line);  \
    }                                                                                                          \
    FX_SIM_INLINE T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, FX_SIM_SITE) {    \
        return fx_sim::shuffled<T>(mask, value, fx_sim::source_down(delta, width), "__shfl_down_sync", file,   \
                                   line);                                                                      \
    }                                                                                                          \
    FX_SIM_INLINE T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, FX_SIM_SITE) {           \
        return fx_sim::shuffled<T>(mask, value, fx_sim::source_xor(bits, width), "__shfl_xor_sync", file, line); \
    }
FX_SIM_SHUFFLES(int)
FX_SIM_SHUFFLES(unsigned)
FX_SIM_SHUFFLES(long)
FX_SIM_SHUFFLES(unsigned long)
FX_SIM_SHUFFLES(long long)
FX_SIM_SHUFFLES(unsigned long long)
FX_SIM_SHUFFLES(float)
FX_SIM_SHUFFLES(double)
#undef FX_SIM_SHUFFLES

#define FX_SIM_REDUCE(name, operation, T)                                            \
    FX_SIM_INLINE T name(unsigned mask, T value, FX_SIM_SITE) {                      \
        return fx_sim::reduced<fx_sim::operation, T>(mask, value, #name, file, line); \
    }
FX_SIM_REDUCE(__reduce_add_sync, Add, unsigned)
FX_SIM_REDUCE(__reduce_add_sync, Add, int)
FX_SIM_REDUCE(__reduce_min_sync, Min, unsigned)
FX_SIM_REDUCE(__reduce_min_sync, Min, int)
FX_SIM_REDUCE(__reduce_max_sync, Max, unsigned)
FX_SIM_REDUCE(__reduce_max_sync, Max, int)
FX_SIM_REDUCE(__reduce_and_sync, And, unsigned)
FX_SIM_REDUCE(__reduce_or_sync, Or, unsigned)
FX_SIM_REDUCE(__reduce_xor_sync, Xor, unsigned)
#undef FX_SIM_REDUCE

template <class T>
FX_SIM_INLINE unsigned __match_any_sync(unsigned mask, T value, FX_SIM_SITE) {
    fx_sim::Pair<unsigned long long> operand = {0, 0};
    static_assert(sizeof(T) <= 8, "32 or 64 bit values");
    __builtin_memcpy(&operand.value, &value, sizeof(T));
    fx_sim::collective(mask, &operand, &fx_sim::match<unsigned long long>, "__match_any_sync", file, line);
    return static_cast<unsigned>(operand.result);
}

FX_SIM_INLINE void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
FX_SIM_INLINE void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
FX_SIM_INLINE void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// Integers only: sums of floats by atomics depend on the order of the blocks.
#define FX_SIM_ATOMICS(T)                                                                                             \
    FX_SIM_INLINE T atomicAdd(T* p, T value) { return __atomic_fetch_add(p, value, __ATOMIC_SEQ_CST); }               \
    FX_SIM_INLINE T atomicSub(T* p, T value) { return __atomic_fetch_sub(p, value, __ATOMIC_SEQ_CST); }               \
    FX_SIM_INLINE T atomicAnd(T* p, T value) { return __atomic_fetch_and(p, value, __ATOMIC_SEQ_CST); }               \
    FX_SIM_INLINE T atomicOr(T* p, T value) { return __atomic_fetch_or(p, value, __ATOMIC_SEQ_CST); }                 \
    FX_SIM_INLINE T atomicXor(T* p, T value) { return __atomic_fetch_xor(p, value, __ATOMIC_SEQ_CST); }               \
    FX_SIM_INLINE T atomicExch(T* p, T value) { return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST); }             \
    FX_SIM_INLINE T atomicCAS(T* p, T expected, T value) {                                                            \
        __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                  \
        return expected;                                                                                              \
    }                                                                                                                 \
    FX_SIM_INLINE T atomicMax(T* p, T value) {                                                                        \
        T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                 \
        while (old < value && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) { \
        }                                                                                                             \
        return old;                                                                                                   \
    }                                                                                                                 \
    FX_SIM_INLINE T atomicMin(T* p, T value) {                                                                        \
        T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                 \
        while (value < old && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) { \
        }                                                                                                             \
        return old;                                                                                                   \
    }
FX_SIM_ATOMICS(int)
FX_SIM_ATOMICS(unsigned)
FX_SIM_ATOMICS(unsigned long long)
#undef FX_SIM_ATOMICS
float atomicAdd(float*, float) = delete;
double atomicAdd(double*, double) = delete;
