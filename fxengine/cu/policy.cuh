// How one branch of one row becomes an action; policy.cu says what each kind draws.
#pragma once
#include "fx.cuh"

enum PolicyKind { POLICY_GREEDY = 0, POLICY_EPSILON = 1, POLICY_BOLTZMANN = 2 };

__device__ __forceinline__ int policy_greedy(const float* q, int size) {
    int best = 0;
    float top = q[0];
    for (int a = 1; a < size; ++a) {
        const float value = q[a];
        if (value > top || (top != top && value == value)) {
            top = value;
            best = a;
        }
    }
    return best;
}

// exp((value - top) / temperature), without the NaN of inf - inf, and 0 for NaN.
__device__ __forceinline__ float policy_weight(float value, float top, float temperature) {
    if (value != value) return 0.0f;
    return value == top ? 1.0f : expf((value - top) / temperature);
}

__device__ __forceinline__ int policy_boltzmann(const float* q, int size, float temperature, float u) {
    const float top = q[policy_greedy(q, size)];
    if (top != top) return 0;
    float sum = 0.0f;
#pragma unroll 1
    for (int a = 0; a < size; ++a) sum += policy_weight(q[a], top, temperature);
    const float goal = u * sum;
    float running = 0.0f;
    int chosen = 0;
#pragma unroll 1
    for (int a = 0; a < size; ++a) {
        const float weight = policy_weight(q[a], top, temperature);
        if (weight > 0.0f) {
            chosen = a;  // the last one that can be drawn, should rounding leave the sum below the goal
            running += weight;
            if (running > goal) break;
        }
    }
    return chosen;
}

// The action of an epsilon-greedy or Boltzmann policy: scalar is epsilon or the temperature.
__device__ __forceinline__ int policy_drawn(int kind, const float* q, int size, float scalar, const FxPhilox& bits) {
    const float u = fx_random_uniform(bits.x);
    if (kind == POLICY_BOLTZMANN) return policy_boltzmann(q, size, scalar, u);
    if (!(u < scalar)) return policy_greedy(q, size);
    return static_cast<int>(__umul64hi((static_cast<u64>(bits.z) << 32) | bits.y, static_cast<u64>(size)));
}
