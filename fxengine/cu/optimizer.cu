// Gradient norms, the non-finite guard, clipping and Adam.
//
// fx_norm: one record per parameter group, all groups of the step in one launch.
//   partials[tile] = sum of squares of 4096 gradients, in double; the block that arrives last adds each group's
//   partials in fixed order (which block that is does not matter to the result) and writes for every group
//     norm  = sqrt(sum)                    float; it may overflow to inf while the norm itself is finite
//     scale = min(1, clip / (norm + 1e-6)) from the norm in double
//   and once: skip = 1 if any norm is not finite, group_mask with bit `group` of those,
//   corrections = {1 - beta1^t, 1 - beta2^t} with t = counters[1] + 1, in double.
//   ticket must be 0 at the first launch and is 0 again after each.
//
// fx_adam: one record per tensor, 1024 elements per tile. Nothing is written when skip is set. Otherwise
//   g' = clamp(scale g, G)    m = clamp(beta1 m + (1 - beta1) g', M)    v = min(beta2 v + (1 - beta2) g'^2, V)
//   w -= lr (m / corrections[0] / (sqrt(v / corrections[1]) + eps) + weight_decay w)
//   decay and the clamp of w to [-W, W] for matrices only. A bound is max(slot, bound_floor); a slot of 0 = no bound.
#include "fx.cuh"

struct Norm {
    int first_tile;
    int tiles;
    const float* grads;                  // [length], 16-byte aligned
    double* partials;                    // [tiles]
    const float* clip;                   // signal
    float* norm;                         // one float
    float* scale;                        // one float
    const unsigned long long* counters;  // 4 counters: see step.cu
    const float* beta1;                  // signal
    const float* beta2;                  // signal
    unsigned* ticket;                    // this and the next three in the first record only, for all
    unsigned* skip;
    unsigned long long* group_mask;
    float* corrections;                  // [2]
    long long length;
    int group;                           // bit of group_mask, below 64
};

struct Adam {
    int first_tile;
    int tiles;
    float* params;              // [length], like the next three
    const float* grads;
    float* m;
    float* v;
    const unsigned* skip;
    const float* corrections;   // [2]
    const float* scale;         // of the group
    const float* lr;            // signals from here on
    const float* beta1;
    const float* beta2;
    const float* eps;
    const float* weight_decay;
    const float* bound_floor;
    const float* weight_bound;  // bound slots of the group
    const float* m_bound;
    const float* v_bound;
    const float* grad_bound;
    long long length;
    int is_matrix;              // 1 = decay and weight bound apply
};

__device__ __forceinline__ double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

__device__ __forceinline__ double norm_tile(const float* grads, long long start, long long length) {
    const float* mine = grads + start + 4 * static_cast<int>(threadIdx.x);
    double sum = 0.0;
    if (start + 4096 <= length) {
        float4 x[4];  // all on their way before the first is used
#pragma unroll
        for (int k = 0; k < 4; ++k) x[k] = *reinterpret_cast<const float4*>(mine + 1024 * k);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum += (square(x[k].x) + square(x[k].y)) + (square(x[k].z) + square(x[k].w));
        return sum;
    }
    for (long long i = start + static_cast<int>(threadIdx.x); i < length; i += 256) sum += square(grads[i]);
    return sum;
}

// One warp per group, by the last block.
__device__ __forceinline__ u64 finish_group(const Norm& record) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    double sum = 0.0;
    for (int i = lane; i < record.tiles; i += 32) sum += fx_load_fresh(record.partials + i);
    sum = fx_warp_sum(sum);
    const double norm = sqrt(sum);
    const double ratio = static_cast<double>(*record.clip) / (norm + 1e-6);
    if (lane == 0) {
        *record.norm = static_cast<float>(norm);
        *record.scale = ratio < 1.0 ? static_cast<float>(ratio) : 1.0f;
    }
    return fx_finite(norm) ? 0ull : 1ull << record.group;
}

extern "C" __global__ void __launch_bounds__(256) fx_norm(const Norm* table, int count) {
    __shared__ double scratch[8];
    __shared__ u64 masks[8];
    __shared__ int last;
    int tile;
    const Norm record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const double sum =
        fx_block_sum(norm_tile(record.grads, static_cast<long long>(tile) * 4096, record.length), scratch);
    const Norm& shared = table[0];
    if (threadIdx.x == 0) {
        record.partials[tile] = sum;
        __threadfence();  // the partial is visible before the ticket says so
        last = atomicAdd(shared.ticket, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last == 0) return;
    __threadfence();
    const int warp = static_cast<int>(threadIdx.x >> 5);
    u64 mask = 0;
    for (int i = warp; i < count; i += 8) mask |= finish_group(table[i]);
    if ((threadIdx.x & 31u) == 0) masks[warp] = mask;
    __syncthreads();
    if (threadIdx.x < 2) {
        const double beta = *(threadIdx.x == 0 ? shared.beta1 : shared.beta2);
        const double t = static_cast<double>(shared.counters[1] + 1);
        shared.corrections[threadIdx.x] = static_cast<float>(1.0 - pow(beta, t));
    }
    if (threadIdx.x == 0) {
        u64 all = 0;
        for (int i = 0; i < 8; ++i) all |= masks[i];
        *shared.group_mask = all;
        *shared.skip = all != 0 ? 1u : 0u;
        *shared.ticket = 0;
    }
}

// What a step applies to every element of a tensor.
struct AdamStep {
    float scale, lr, beta1, beta2, eps, decay, inverse1, inverse2;
    float weight_bound, m_bound, v_bound, grad_bound;
};

__device__ __forceinline__ float adam_bound(float slot, float floor) {
    return slot == 0.0f ? FX_INF : fmaxf(slot, floor);
}

__device__ __forceinline__ void adam_element(const AdamStep& step, float grad, float& w, float& m, float& v) {
    const float g = fx_limit(step.scale * grad, step.grad_bound);
    m = fx_limit(step.beta1 * m + (1.0f - step.beta1) * g, step.m_bound);
    v = fminf(step.beta2 * v + (1.0f - step.beta2) * (g * g), step.v_bound);
    const float direction = fx_divide(m * step.inverse1, fx_root(v * step.inverse2) + step.eps);
    w = fx_limit(w - step.lr * (direction + step.decay * w), step.weight_bound);
    // A target copy of w would be moved here, in the same pass over memory.
}

extern "C" __global__ void __launch_bounds__(256) fx_adam(const Adam* table, int count) {
    int tile;
    const Adam record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const long long i = (static_cast<long long>(tile) * 256 + static_cast<int>(threadIdx.x)) * 4;
    const u64 addresses = reinterpret_cast<u64>(record.params) | reinterpret_cast<u64>(record.grads) |
                          reinterpret_cast<u64>(record.m) | reinterpret_cast<u64>(record.v);
    const bool whole = i + 4 <= record.length && (addresses & 15) == 0;
    float4 w = {0.0f, 0.0f, 0.0f, 0.0f}, g = w, m = w, v = w;
    if (whole) {  // loaded before the scalars are needed, so that the latencies overlap
        w = *reinterpret_cast<const float4*>(record.params + i);
        g = *reinterpret_cast<const float4*>(record.grads + i);
        m = *reinterpret_cast<const float4*>(record.m + i);
        v = *reinterpret_cast<const float4*>(record.v + i);
    }
    AdamStep step;
    const float floor = *record.bound_floor;
    step.scale = *record.scale;
    step.lr = *record.lr;
    step.beta1 = *record.beta1;
    step.beta2 = *record.beta2;
    step.eps = *record.eps;
    step.decay = record.is_matrix != 0 ? *record.weight_decay : 0.0f;
    step.inverse1 = fx_divide(1.0f, record.corrections[0]);
    step.inverse2 = fx_divide(1.0f, record.corrections[1]);
    step.weight_bound = record.is_matrix != 0 ? adam_bound(*record.weight_bound, floor) : FX_INF;
    step.m_bound = adam_bound(*record.m_bound, floor);
    step.v_bound = adam_bound(*record.v_bound, floor);
    step.grad_bound = adam_bound(*record.grad_bound, floor);
    if (*record.skip != 0) return;
    if (whole) {
        adam_element(step, g.x, w.x, m.x, v.x);
        adam_element(step, g.y, w.y, m.y, v.y);
        adam_element(step, g.z, w.z, m.z, v.z);
        adam_element(step, g.w, w.w, m.w, v.w);
        *reinterpret_cast<float4*>(record.params + i) = w;
        *reinterpret_cast<float4*>(record.m + i) = m;
        *reinterpret_cast<float4*>(record.v + i) = v;
        return;
    }
    for (long long j = i; j < i + 4 && j < record.length; ++j) {
        adam_element(step, record.grads[j], record.params[j], record.m[j], record.v[j]);
    }
}
