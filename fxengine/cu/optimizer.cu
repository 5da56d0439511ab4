// Gradient norms, the non-finite guard, clipping, Adam and the targets that follow the parameters.
//
// fx_norm: one record per parameter group, for those whose gradients come from elsewhere than kernels that report sums
//   of squares themselves (squares.cuh).
//   partials[tile] = sum of squares of 4096 gradients. A thread adds its 16 squares in float while their sum is far
//   from both ends of float's range, else in double; everything beyond a thread is in double.
//
// fx_adam: one record per parameter group, 2048 elements per tile. Every block finishes the norm of its group itself,
//   in one fixed order, while its elements are on their way; so nobody who makes partial sums waits for the others.
//     norm  = sqrt(sum of the group's partials)   float; it may overflow to inf while the norm itself is finite
//     scale = min(1, clip / (norm + 1e-6))        from the norm in double
//   The first tile of a group writes them, the first of all also skip = 1 if some norm is not finite, and group_mask
//   with bit `group` of those. Nothing else is written when skip is set. Otherwise
//   g' = clamp(scale g, G)    m = clamp(beta1 m + (1 - beta1) g', M)    v = min(beta2 v + (1 - beta2) g'^2, V)
//   w -= lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay w)    t = counters[1] + 1
//   The powers are made in double by every block, beside the norm.
//   decay and the clamp of w to [-W, W] for matrices only. A bound is max(slot, bound_floor); a slot of 0 = no bound.
//   target += tau (w - target) with the new w, where the group has targets and `kinds` says so. A tau of 0 leaves the
//   targets every bit, a tau of 1 makes them the new w bit for bit.
//   kinds: bit q of the words [i] is for the elements 128 i + 4 q ... + 3: in the first word, they are part of a
//   matrix; in the second, their target moves here.
//
// Buffers of a group have the length of its tensors and the padding between them and between rows: a multiple of 4. The
// padding is treated as its quad is; with zero gradients it stays zero (eps > 0).
#include "copy_async.cuh"

struct Norm {
    int first_tile;
    int tiles;
    const float* grads;  // [length], 16-byte aligned
    double* partials;    // [tiles]
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
    const u64* counters;            // 4 counters: see step.cu
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

// Order of Adam::scalars, all of them signals: the clip and rate of the group, ..., its bound slots, ...
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
    ADAM_CORRECTION1,  // beta1 and beta2 again: their powers
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
    const double sum =
        fx_block_sum(norm_tile(record.grads, static_cast<long long>(tile) * 4096, record.length), scratch);
    if (threadIdx.x == 0) record.partials[tile] = sum;
}

// A thread of fx_adam has four elements: its code is short. They arrive in shared memory: registers for all that is on
// its way would keep the third block from a multiprocessor, and 800,000 parameters from being one wave on 132 of them.
constexpr int ADAM_THREADS = 512;
// Partial sums that a thread fetches at once.
constexpr int ADAM_AHEAD = 2;

// What a step applies to every element of a group.
struct AdamStep {
    float scale, lr, beta1, beta2, eps, decay, inverse1, inverse2;
    float weight_bound, m_bound, v_bound, grad_bound;
};

// base^exponent by squaring: an error of about exponent * 2^-53, relative, in a fraction of the code and time of pow().
// Where that is much, the power is small beside the 1 that it is taken from.
__device__ __forceinline__ double adam_power(double base, u64 exponent) {
    double power = 1.0;
#pragma unroll 1
    for (; exponent != 0; exponent >>= 1) {
        if ((exponent & 1) != 0) power *= base;
        base *= base;
    }
    return power;
}

// Scalar `lane` as the elements of step t want it: a bound above its floor, a correction as a factor. All lanes of a
// warp call.
__device__ __forceinline__ float adam_scalar(int lane, float value, u64 t) {
    const float floor = __shfl_sync(0xffffffffu, value, ADAM_BOUND_FLOOR);
    if (lane >= ADAM_WEIGHT_BOUND && lane <= ADAM_GRAD_BOUND) return value == 0.0f ? FX_INF : fmaxf(value, floor);
    if (lane != ADAM_CORRECTION1 && lane != ADAM_CORRECTION2) return value;
    return fx_divide(1.0f, static_cast<float>(1.0 - adam_power(value, t)));
}

// Of the group's elements; those outside matrices neither decay nor have a bound.
__device__ __forceinline__ AdamStep adam_step(const float* scalars, float scale, bool matrix) {
    AdamStep step;
    step.scale = scale;
    step.lr = scalars[ADAM_LR];
    step.beta1 = scalars[ADAM_BETA1];
    step.beta2 = scalars[ADAM_BETA2];
    step.eps = scalars[ADAM_EPS];
    step.decay = matrix ? scalars[ADAM_WEIGHT_DECAY] : 0.0f;
    step.inverse1 = scalars[ADAM_CORRECTION1];
    step.inverse2 = scalars[ADAM_CORRECTION2];
    step.weight_bound = matrix ? scalars[ADAM_WEIGHT_BOUND] : FX_INF;
    step.m_bound = scalars[ADAM_M_BOUND];
    step.v_bound = scalars[ADAM_V_BOUND];
    step.grad_bound = scalars[ADAM_GRAD_BOUND];
    return step;
}

__device__ __forceinline__ void adam_element(const AdamStep& step, float grad, float& w, float& m, float& v) {
    const float g = fx_limit(step.scale * grad, step.grad_bound);
    m = fx_limit(step.beta1 * m + (1.0f - step.beta1) * g, step.m_bound);
    v = fminf(step.beta2 * v + (1.0f - step.beta2) * (g * g), step.v_bound);
    const float direction = fx_divide(m * step.inverse1, fx_root(v * step.inverse2) + step.eps);
    w = fx_limit(w - step.lr * (direction + step.decay * w), step.weight_bound);
}

// Norm and clip factor of the block's group from the sum of its partial sums.
__device__ __forceinline__ float adam_scale(const Adam& record, double sum, float clip, bool report) {
    const double norm = sqrt(sum);
    const double ratio = static_cast<double>(clip) / (norm + 1e-6);
    const float scale = ratio < 1.0 ? static_cast<float>(ratio) : 1.0f;
    if (report) {
        *record.norm = static_cast<float>(norm);
        *record.scale = scale;
    }
    return scale;
}

// The guard's flag, and which groups have raised it, by the first warp of the first block. `bad`: some group has.
__device__ __forceinline__ void adam_report(const Adam* table, int count, bool bad) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    u64 mask = 0;
#pragma unroll 1
    for (int g = 0; bad && g < count; ++g) {
        const double* partials = table[g].partials + table[g].first_partial;
        bool mine = false;
#pragma unroll 1
        for (int i = lane; i < table[g].partial_count; i += 32) mine |= !fx_finite(partials[i]);
        if (__any_sync(0xffffffffu, mine)) mask |= 1ull << table[g].group;
    }
    if (lane != 0) return;
    *table->skip = bad ? 1u : 0u;
    *table->group_mask = mask;
}

extern "C" __global__ void __launch_bounds__(ADAM_THREADS, 3) fx_adam(const Adam* table, int count) {
    __shared__ float4 arrived[5][ADAM_THREADS];
    __shared__ double sums[ADAM_THREADS / 32];
    __shared__ float scalars[ADAM_SCALARS];
    __shared__ float scale;
    __shared__ Adam place;
    int tile;
    const Adam& record = fx_record(table, count, tile, place);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = static_cast<int>(threadIdx.x & 31u), warp = static_cast<int>(threadIdx.x >> 5);
    const long long at = static_cast<long long>(tile) * (4 * ADAM_THREADS) + 4 * thread;  // the thread's elements
    const bool inside = at < record.length;
    const float* scalar = nullptr;
    if (warp == 0) scalar = record.scalars[ADAM_CLIP];
    if (warp == 1 && lane < ADAM_SCALARS) scalar = record.scalars[lane];
    uint2 kind = {0u, 0u};
    if (inside) kind = reinterpret_cast<const uint2*>(record.kinds)[at >> 7];
    const bool matrix = (kind.x >> lane & 1u) != 0;
    const bool follows = record.targets != nullptr && (kind.y >> lane & 1u) != 0;
    // All loads are on their way before the first is used. Of the elements only gradients are made by those it waits for.
    const FxShared to = fx_shared(&arrived[0][thread].x);
    constexpr int APART = static_cast<int>(sizeof(arrived[0]));
    if (inside) {
        const float* const from[4] = {record.m, record.v, record.params, record.targets};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k < 3 || follows) fx_copy_quad(to + (k + 1) * APART, from[k] + at);
        }
    }
    fx_wait();
    fx_trigger();

    // The partial sums, which everything waits for, go first.
    const double* const partials = record.partials;
    double part[ADAM_AHEAD];
#pragma unroll
    for (int k = 0; k < ADAM_AHEAD; ++k) {
        const int i = thread + k * ADAM_THREADS;
        part[k] = i < record.all_partials ? partials[i] : 0.0;
    }
    const float value = scalar != nullptr ? *scalar : 0.0f;
    const u64 steps = warp == 1 ? record.counters[1] : 0;
    if (inside) fx_copy_quad(to, record.grads + at);
    fx_copy_commit();
    double sum = 0.0;  // of those of the group
    bool bad = false;  // some group's
    const auto add = [&](int i, double squares) {
        if (i >= record.first_partial && i - record.first_partial < record.partial_count) sum += squares;
        bad |= !fx_finite(squares);
    };
#pragma unroll
    for (int k = 0; k < ADAM_AHEAD; ++k) add(thread + k * ADAM_THREADS, part[k]);
#pragma unroll 1
    for (int i = thread + ADAM_AHEAD * ADAM_THREADS; i < record.all_partials; i += ADAM_THREADS) add(i, partials[i]);
    if (__any_sync(0xffffffffu, sum != 0.0)) sum = fx_warp_sum(sum);  // most warps have none of the group's
    if (lane == 0) sums[warp] = sum;
    if (warp == 1) {
        const float made = adam_scalar(lane, value, steps + 1);
        if (lane < ADAM_SCALARS) scalars[lane] = made;
    }
    const bool skip = __syncthreads_or(bad ? 1 : 0) != 0;
    if (warp == 0) {
        const double squares = fx_lanes_sum<16>(sums[lane & 15]);
        if (lane == 0) scale = adam_scale(record, squares, value, tile == 0);
        if (blockIdx.x == 0) adam_report(table, count, skip);
    }
    fx_copy_wait<0>();  // no block ends while copies are on their way into its memory
    __syncthreads();
    if (skip || !inside) return;

    const AdamStep step = adam_step(scalars, scale, matrix);
    const float4 g = arrived[0][thread];
    float4 m = arrived[1][thread], v = arrived[2][thread], w = arrived[3][thread];
    adam_element(step, g.x, w.x, m.x, v.x);
    adam_element(step, g.y, w.y, m.y, v.y);
    adam_element(step, g.z, w.z, m.z, v.z);
    adam_element(step, g.w, w.w, m.w, v.w);
    *reinterpret_cast<float4*>(record.params + at) = w;
    *reinterpret_cast<float4*>(record.m + at) = m;
    *reinterpret_cast<float4*>(record.v + at) = v;
    const float tau = scalars[ADAM_TAU];
    if (!follows || tau == 0.0f) return;
    float4 target = arrived[4][thread];
    target.x = fx_follow(target.x, w.x, tau);
    target.y = fx_follow(target.y, w.y, tau);
    target.z = fx_follow(target.z, w.z, tau);
    target.w = fx_follow(target.w, w.w, tau);
    *reinterpret_cast<float4*>(record.targets + at) = target;
}
