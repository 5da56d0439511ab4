// Gradient norms, the non-finite guard, clipping, Adam and the targets that follow the parameters.
//
// fx_norm: one record per parameter group, all groups of the step in one launch.
//   partials[tile] = sum of squares of 4096 gradients. A thread adds its 16 squares in float while their sum is far
//   from both ends of float's range, else in double; everything beyond a thread is in double.
//   The last tile of the first record only makes corrections = {1 - beta1^t, 1 - beta2^t}, t = counters[1] + 1, in
//   double: a power takes as long as all the rest.
//
// fx_adam: one record per parameter group, 2048 elements per tile. Every block finishes the norm of its group itself,
//   in one fixed order, while its elements are on their way; so no block of fx_norm has to wait for the others.
//     norm  = sqrt(sum of the group's partials)   float; it may overflow to inf while the norm itself is finite
//     scale = min(1, clip / (norm + 1e-6))        from the norm in double
//   The first tile of a group writes them, the first of all also skip = 1 if some norm is not finite, and group_mask
//   with bit `group` of those. Nothing else is written when skip is set. Otherwise
//   g' = clamp(scale g, G)    m = clamp(beta1 m + (1 - beta1) g', M)    v = min(beta2 v + (1 - beta2) g'^2, V)
//   w -= lr (m / corrections[0] / (sqrt(v / corrections[1]) + eps) + weight_decay w)
//   decay and the clamp of w to [-W, W] for matrices only. A bound is max(slot, bound_floor); a slot of 0 = no bound.
//   target += tau (w - target) with the new w, where the group has targets and `kinds` says so. A tau of 0 leaves the
//   targets every bit, a tau of 1 makes them the new w bit for bit.
//   kinds: bit q of the words [i] is for the elements 128 i + 4 q ... + 3: in the first word, they are part of a
//   matrix; in the second, their target moves here.
//
// Buffers of a group have the length of its tensors and the padding between them: a multiple of 4. The padding is
// treated as a vector; with zero gradients it stays zero (eps > 0).
#include "fx.cuh"

struct Norm {
    int first_tile;
    int tiles;
    const float* grads;                  // [length], 16-byte aligned
    double* partials;                    // [tiles], of the first record one less
    const unsigned long long* counters;  // 4 counters: see step.cu
    const float* beta1;                  // signal
    const float* beta2;                  // signal
    float* corrections;                  // [2] in the first record, else null
    long long length;
};

struct Adam {
    int first_tile;
    int tiles;
    float* params;                  // [length], 16-byte aligned, like the next four
    const float* grads;
    float* m;
    float* v;
    float* targets;                 // or null
    const unsigned* kinds;          // [length / 128 rounded up, 2] bits, see above; constant
    const double* partials;         // of all groups
    const float* scalars[14];       // one float each: see AdamScalar
    float* norm;                    // one float
    float* scale;                   // one float
    unsigned* skip;                 // this and the next in the first record only
    unsigned long long* group_mask;
    long long length;
    int all_partials;
    int first_partial;              // of the group
    int partial_count;
    int group;                      // bit of group_mask, below 64
};

// Order of Adam::scalars. All but the last three are signals: the clip and rate of the group, ..., its bound slots.
enum AdamScalar {
    ADAM_CLIP,
    ADAM_LR,
    ADAM_BETA1,
    ADAM_BETA2,
    ADAM_EPS,
    ADAM_WEIGHT_DECAY,
    ADAM_BOUND_FLOOR,
    ADAM_WEIGHT_BOUND,
    ADAM_M_BOUND,
    ADAM_V_BOUND,
    ADAM_GRAD_BOUND,
    ADAM_TAU,          // null without targets
    ADAM_CORRECTION1,
    ADAM_CORRECTION2,
    ADAM_SCALARS,
};

__device__ __forceinline__ double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

__device__ __forceinline__ double norm_tile(const float* grads, long long start, long long length) {
    const long long first = start + 4 * static_cast<int>(threadIdx.x);
    float4 x[4];  // all on their way before the first is used
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const long long i = first + 1024 * k;
        x[k] = i < length ? *reinterpret_cast<const float4*>(grads + i) : float4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    float part[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) part[k] = (x[k].x * x[k].x + x[k].y * x[k].y) + (x[k].z * x[k].z + x[k].w * x[k].w);
    const float sum = (part[0] + part[1]) + (part[2] + part[3]);
    // Squares that have left float's range weigh nothing in such a sum; NaN and infinities fail.
    if (sum >= 1e-30f && sum <= 1e37f) return sum;
    double exact = 0.0;
#pragma unroll
    for (int k = 0; k < 4; ++k) exact += (square(x[k].x) + square(x[k].y)) + (square(x[k].z) + square(x[k].w));
    return exact;
}

extern "C" __global__ void __launch_bounds__(256) fx_norm(const Norm* table, int count) {
    __shared__ double scratch[8];
    int tile;
    const Norm record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    if (record.corrections != nullptr && tile == record.tiles - 1) {
        if (threadIdx.x < 2) {
            const double beta = *(threadIdx.x == 0 ? record.beta1 : record.beta2);
            const double t = static_cast<double>(record.counters[1] + 1);
            record.corrections[threadIdx.x] = static_cast<float>(1.0 - pow(beta, t));
        }
        return;
    }
    const double sum =
        fx_block_sum(norm_tile(record.grads, static_cast<long long>(tile) * 4096, record.length), scratch);
    if (threadIdx.x == 0) record.partials[tile] = sum;
}

// What a step applies to every element of a group.
struct AdamStep {
    float scale, lr, beta1, beta2, eps, decay, inverse1, inverse2;
    float weight_bound, m_bound, v_bound, grad_bound;
};

__device__ __forceinline__ float adam_bound(float slot, float floor) {
    return slot == 0.0f ? FX_INF : fmaxf(slot, floor);
}

__device__ __forceinline__ AdamStep adam_step(const float* scalars, float scale) {
    const float floor = scalars[ADAM_BOUND_FLOOR];
    AdamStep step;
    step.scale = scale;
    step.lr = scalars[ADAM_LR];
    step.beta1 = scalars[ADAM_BETA1];
    step.beta2 = scalars[ADAM_BETA2];
    step.eps = scalars[ADAM_EPS];
    step.decay = scalars[ADAM_WEIGHT_DECAY];
    step.inverse1 = fx_divide(1.0f, scalars[ADAM_CORRECTION1]);
    step.inverse2 = fx_divide(1.0f, scalars[ADAM_CORRECTION2]);
    step.weight_bound = adam_bound(scalars[ADAM_WEIGHT_BOUND], floor);
    step.m_bound = adam_bound(scalars[ADAM_M_BOUND], floor);
    step.v_bound = adam_bound(scalars[ADAM_V_BOUND], floor);
    step.grad_bound = adam_bound(scalars[ADAM_GRAD_BOUND], floor);
    return step;
}

__device__ __forceinline__ void adam_element(
    const AdamStep& step, bool matrix, float grad, float& w, float& m, float& v) {
    const float g = fx_limit(step.scale * grad, step.grad_bound);
    m = fx_limit(step.beta1 * m + (1.0f - step.beta1) * g, step.m_bound);
    v = fminf(step.beta2 * v + (1.0f - step.beta2) * (g * g), step.v_bound);
    const float direction = fx_divide(m * step.inverse1, fx_root(v * step.inverse2) + step.eps);
    w = fx_limit(w - step.lr * (direction + (matrix ? step.decay : 0.0f) * w), matrix ? step.weight_bound : FX_INF);
}

// Norm and clip factor of the block's group, by one warp, from the group's partial sums.
__device__ __forceinline__ float adam_scale(
    const Adam& record, const double* partials, int count, float clip, bool first) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    double sum = 0.0;
    for (int i = lane; i < count; i += 32) sum += partials[i];
    const double norm = sqrt(fx_warp_sum(sum));
    const double ratio = static_cast<double>(clip) / (norm + 1e-6);
    const float scale = ratio < 1.0 ? static_cast<float>(ratio) : 1.0f;
    if (first && lane == 0) {
        *record.norm = static_cast<float>(norm);
        *record.scale = scale;
    }
    return scale;
}

// The guard's flag, and which groups have raised it, by the first warp of the first block. `bad`: some group has.
__device__ __forceinline__ void adam_report(const Adam* table, int count, bool bad) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    u64 mask = 0;
    for (int g = 0; bad && g < count; ++g) {
        const double* partials = table[g].partials + table[g].first_partial;
        bool mine = false;
        for (int i = lane; i < table[g].partial_count; i += 32) mine |= !fx_finite(partials[i]);
        if (__any_sync(0xffffffffu, mine)) mask |= 1ull << table[g].group;
    }
    if (lane != 0) return;
    *table->skip = bad ? 1u : 0u;
    *table->group_mask = mask;
}

extern "C" __global__ void __launch_bounds__(256) fx_adam(const Adam* table, int count) {
    constexpr int QUADS = 2;  // of a thread
    __shared__ float scalars[ADAM_SCALARS];
    __shared__ float scale;
    __shared__ Adam place;
    int tile;
    const Adam& record = fx_record(table, count, tile, place);
    const int lane = static_cast<int>(threadIdx.x & 31u), warp = static_cast<int>(threadIdx.x >> 5);
    const long long start = static_cast<long long>(tile) * (1024 * QUADS) + 4 * static_cast<int>(threadIdx.x);
    float* const params = record.params;
    float* const moments = record.m;
    float* const squares = record.v;
    float* const targets = record.targets;
    const float* const grads = record.grads;
    const double* const partials = record.partials;
    const int all_partials = record.all_partials;
    const long long length = record.length;
    const int first_partial = record.first_partial, partial_count = record.partial_count;
    const float* scalar = nullptr;
    if (warp == 0) scalar = record.scalars[ADAM_CLIP];
    if (warp == 1 && lane < ADAM_SCALARS) scalar = record.scalars[lane];
    bool inside[QUADS], matrix[QUADS], follows[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const long long i = start + 1024 * k;
        inside[k] = i < length;
        const uint2 kind = inside[k] ? reinterpret_cast<const uint2*>(record.kinds)[i / 128] : uint2{0u, 0u};
        matrix[k] = (kind.x >> lane & 1u) != 0;
        follows[k] = targets != nullptr && (kind.y >> lane & 1u) != 0;
    }
    fx_wait();
    fx_trigger();

    const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
    float4 w[QUADS], g[QUADS], m[QUADS], v[QUADS], target[QUADS];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {  // all on their way before the first is used
        const long long i = start + 1024 * k;
        g[k] = inside[k] ? *reinterpret_cast<const float4*>(grads + i) : zero;
        m[k] = inside[k] ? *reinterpret_cast<const float4*>(moments + i) : zero;
        v[k] = inside[k] ? *reinterpret_cast<const float4*>(squares + i) : zero;
        w[k] = inside[k] ? *reinterpret_cast<const float4*>(params + i) : zero;
        target[k] = follows[k] ? *reinterpret_cast<const float4*>(targets + i) : zero;
    }
    bool bad = false;
    for (int i = static_cast<int>(threadIdx.x); i < all_partials; i += 256) bad |= !fx_finite(partials[i]);
    if (warp == 0) {
        const float factor = adam_scale(record, partials + first_partial, partial_count, *scalar, tile == 0);
        if (lane == 0) scale = factor;
    } else if (warp == 1 && lane < ADAM_SCALARS) {
        scalars[lane] = scalar != nullptr ? *scalar : 0.0f;
    }
    const bool skip = __syncthreads_or(bad ? 1 : 0) != 0;
    if (blockIdx.x == 0 && warp == 0) adam_report(table, count, skip);
    if (skip) return;

    const AdamStep step = adam_step(scalars, scale);
    const float tau = scalars[ADAM_TAU];
#pragma unroll
    for (int k = 0; k < QUADS; ++k) {
        const long long i = start + 1024 * k;
        if (!inside[k]) break;
        adam_element(step, matrix[k], g[k].x, w[k].x, m[k].x, v[k].x);
        adam_element(step, matrix[k], g[k].y, w[k].y, m[k].y, v[k].y);
        adam_element(step, matrix[k], g[k].z, w[k].z, m[k].z, v[k].z);
        adam_element(step, matrix[k], g[k].w, w[k].w, m[k].w, v[k].w);
        *reinterpret_cast<float4*>(params + i) = w[k];
        *reinterpret_cast<float4*>(moments + i) = m[k];
        *reinterpret_cast<float4*>(squares + i) = v[k];
        if (!follows[k] || tau == 0.0f) continue;
        target[k].x = fx_follow(target[k].x, w[k].x, tau);
        target[k].y = fx_follow(target[k].y, w[k].y, tau);
        target[k].z = fx_follow(target[k].z, w[k].z, tau);
        target[k].w = fx_follow(target[k].w, w[k].w, tau);
        *reinterpret_cast<float4*>(targets + i) = target[k];
    }
}
