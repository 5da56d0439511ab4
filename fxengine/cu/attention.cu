// Single-head attention over the feature tokens of a sample, forward and backward.
//
// A sample is T tokens of F features, A is the width of queries, keys and values. With t = state as [T, F]:
//   q, k, v = t w_q^T, t w_k^T, t w_v^T                                [T, A]
//   p       = softmax over j of (q_i . k_j) / sqrt(A)                  [T, T]
//   o       = p v                                                      [T, A]
//   x       = t + o w_o^T                                              [T, F]
// fx_attention_forward writes x, and q, k, v, p, o where they are asked for (they are what the backward reads).
//
// fx_attention_backward: from dx, the gradient of x,
//   do = dx w_o   dp_ij = do_i . v_j   ds = p (dp - sum_j dp p) / sqrt(A)
//   dq = ds k     dk = ds^T q          dv = p^T do                     [T, A] each
// The state needs no gradient. The weights' gradients are matrix products over all tokens of the batch: dq^T t, dk^T t,
// dv^T t and dx^T o (linear_dw.cu).
//
// Everything overwrites. A block takes `samples` samples. Staged: weights and samples lie in shared memory, rows padded
// to an odd length so that threads on neighbouring rows hit different banks. Sizes that do not fit there are worked on
// in global memory by the same code, one sample per block; then every intermediate has to have its buffer. The usual
// sizes have a path of their own (attention.cuh). Each output is one sum in index order, so that its bits depend
// neither on `samples` nor on the path.
#include "attention.cuh"

__device__ __forceinline__ float attention_dot(const float* a, const float* b, unsigned n) {
    float sum = 0.0f;
#pragma unroll 4
    for (unsigned i = 0; i < n; ++i) sum += a[i] * b[i];
    return sum;
}

// rows x cols floats into rows `ld` apart; the source rows are `from_ld` apart. Rows that are not live become zeros.
__device__ __forceinline__ void attention_stage(float* to, unsigned ld, const float* from, long long from_ld,
                                                unsigned rows, unsigned cols, const float* live = nullptr) {
    for (unsigned i = threadIdx.x; i < rows * cols; i += 256) {
        const unsigned row = i / cols;
        const unsigned col = i - row * cols;
        to[row * ld + col] = live == nullptr || live[row] != 0.0f ? from[row * from_ld + col] : 0.0f;
    }
}

template <bool STAGED>
__device__ __forceinline__ void attention_forward(const AttentionForward& r, int tile, float* shared) {
    const unsigned T = static_cast<unsigned>(r.tokens);
    const unsigned F = static_cast<unsigned>(r.features);
    const unsigned A = static_cast<unsigned>(r.attn);
    const int first = tile * r.samples;
    const unsigned samples = static_cast<unsigned>(r.batch - first < r.samples ? r.batch - first : r.samples);
    const unsigned rows = samples * T;
    const unsigned ld = STAGED ? A | 1u : A;  // of q, k, v, o
    const unsigned ld_w = STAGED ? F | 1u : static_cast<unsigned>(r.ld_w);  // of w_q, w_k, w_v
    const unsigned ld_o = STAGED ? ld : static_cast<unsigned>(r.ld_o);      // of w_o
    const long long row0 = static_cast<long long>(first) * T;
    float* const saved_q = r.q != nullptr ? r.q + row0 * A : nullptr;
    float* const saved_k = r.k != nullptr ? r.k + row0 * A : nullptr;
    float* const saved_v = r.v != nullptr ? r.v + row0 * A : nullptr;
    float* const saved_p = r.p != nullptr ? r.p + row0 * T : nullptr;
    float* const saved_o = r.o != nullptr ? r.o + row0 * A : nullptr;

    const float* state = r.state + first * r.ld_state;
    const bool dead = !STAGED && r.live != nullptr && r.live[first] == 0.0f;  // staged, its tokens are zeros
    const float* w_q = r.w_q;
    const float* w_k = r.w_k;
    const float* w_v = r.w_v;
    const float* w_o = r.w_o;
    float* q = saved_q;
    float* k = saved_k;
    float* v = saved_v;
    float* p = saved_p;
    float* o = saved_o;
    if constexpr (STAGED) {
        float* weights = shared;
        float* tokens = weights + 3 * A * ld_w + F * ld_o;
        attention_stage(weights, ld_w, w_q, r.ld_w, A, F);
        attention_stage(weights + A * ld_w, ld_w, w_k, r.ld_w, A, F);
        attention_stage(weights + 2 * A * ld_w, ld_w, w_v, r.ld_w, A, F);
        attention_stage(weights + 3 * A * ld_w, ld_o, w_o, r.ld_o, F, A);
        const float* live = r.live != nullptr ? r.live + first : nullptr;
        attention_stage(tokens, T * F, state, r.ld_state, samples, T * F, live);
        w_q = weights;
        w_k = w_q + A * ld_w;
        w_v = w_k + A * ld_w;
        w_o = w_v + A * ld_w;
        state = tokens;
        q = tokens + rows * F;
        k = q + rows * ld;
        v = k + rows * ld;
        p = v + rows * ld;
        o = q;  // nobody reads q once the scores are made
        __syncthreads();
    }

    for (unsigned i = threadIdx.x; i < rows * 3 * A; i += 256) {
        const unsigned row = i / (3 * A);
        const unsigned column = i - row * 3 * A;
        const unsigned kind = column >= 2 * A ? 2 : column >= A ? 1 : 0;
        const unsigned a = column - kind * A;
        const float* w = (kind == 0 ? w_q : kind == 1 ? w_k : w_v) + a * ld_w;
        const float sum = dead ? 0.0f : attention_dot(state + row * F, w, F);
        (kind == 0 ? q : kind == 1 ? k : v)[row * ld + a] = sum;
        if constexpr (STAGED) {
            float* saved = kind == 0 ? saved_q : kind == 1 ? saved_k : saved_v;
            if (saved != nullptr) saved[row * A + a] = sum;
        }
    }
    __syncthreads();

    for (unsigned base = 0; base < rows * ATTENTION_LANES; base += 256) {
        const unsigned row = (base + threadIdx.x) / ATTENTION_LANES;
        const unsigned lane = threadIdx.x % ATTENTION_LANES;
        const unsigned stop = row < rows ? T : 0;  // lanes past the last row still take part in the shuffles
        const float* keys = k + row / T * T * ld;
        float* scores = p + row * T;
        float peak = -FX_INF;
        for (unsigned j = lane; j < stop; j += ATTENTION_LANES) {
            const float score = attention_dot(q + row * ld, keys + j * ld, A) * r.scale;
            scores[j] = score;
            peak = score > peak ? score : peak;
        }
        peak = attention_lanes_max(peak);
        float sum = 0.0f;
        for (unsigned j = lane; j < stop; j += ATTENTION_LANES) {
            const float power = expf(scores[j] - peak);
            scores[j] = power;
            sum += power;
        }
        const float inverse = fx_divide(1.0f, fx_lanes_sum<ATTENTION_LANES>(sum));
        for (unsigned j = lane; j < stop; j += ATTENTION_LANES) {
            const float probability = scores[j] * inverse;
            scores[j] = probability;
            if constexpr (STAGED) {
                if (saved_p != nullptr) saved_p[row * T + j] = probability;
            }
        }
    }
    __syncthreads();

    for (unsigned i = threadIdx.x; i < rows * A; i += 256) {
        const unsigned row = i / A;
        const unsigned a = i - row * A;
        const float* values = v + row / T * T * ld + a;
        float sum = 0.0f;
#pragma unroll 4
        for (unsigned j = 0; j < T; ++j) sum += p[row * T + j] * values[j * ld];
        o[row * ld + a] = sum;
        if constexpr (STAGED) {
            if (saved_o != nullptr) saved_o[i] = sum;
        }
    }
    __syncthreads();

    float* x = r.x + first * r.ld_x;
    for (unsigned i = threadIdx.x; i < rows * F; i += 256) {
        const unsigned row = i / F;
        const unsigned feature = i - row * F;
        const unsigned sample = row / T;
        const float token = dead ? 0.0f : state[i];
        x[sample * r.ld_x + (i - sample * T * F)] = token + attention_dot(o + row * ld, w_o + feature * ld_o, A);
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) fx_attention_forward(const AttentionForward* table, int count) {
    FX_POOL(float4, pool, ATTENTION_SHARED / 4);  // read in 16-byte pieces
    float* const shared = reinterpret_cast<float*>(pool);
    __shared__ AttentionForward place;
    int tile;
    const AttentionForward& record = fx_record(table, count, tile, place);
    if (record.path == ATTENTION_TOKENS) {
        attention_forward_tokens(record, tile, shared);  // waits with its weights in registers
        return;
    }
    fx_wait();
    fx_trigger();
    if (record.path == ATTENTION_STAGED) {
        attention_forward<true>(record, tile, shared);
    } else {
        attention_forward<false>(record, tile, shared);
    }
}

template <bool STAGED>
__device__ __forceinline__ void attention_backward(const AttentionBackward& r, int tile, float* shared) {
    const unsigned T = static_cast<unsigned>(r.tokens);
    const unsigned F = static_cast<unsigned>(r.features);
    const unsigned A = static_cast<unsigned>(r.attn);
    const int first = tile * r.samples;
    const unsigned samples = static_cast<unsigned>(r.batch - first < r.samples ? r.batch - first : r.samples);
    const unsigned rows = samples * T;
    const unsigned ld = STAGED ? A | 1u : A;  // of q, k, v, do
    const unsigned ld_o = STAGED ? A : static_cast<unsigned>(r.ld_o);  // of w_o
    const long long row0 = static_cast<long long>(first) * T;

    const float* dx = r.dx + first * r.ld_dx;
    const float* w_o = r.w_o;
    const float* q = r.q + row0 * A;
    const float* k = r.k + row0 * A;
    const float* v = r.v + row0 * A;
    const float* p = r.p + row0 * T;
    float* mixed_grad = STAGED ? shared : r.mixed_grad + row0 * A;
    float* scores_grad = STAGED ? mixed_grad + rows * ld : r.scores_grad + row0 * T;
    if constexpr (STAGED) {
        float* staged = scores_grad + rows * T;
        attention_stage(staged, T * F, dx, r.ld_dx, samples, T * F);
        dx = staged;
        staged += rows * F;
        attention_stage(staged, ld_o, w_o, r.ld_o, F, A);
        w_o = staged;
        staged += F * A;
        attention_stage(staged, ld, q, A, rows, A);
        q = staged;
        staged += rows * ld;
        attention_stage(staged, ld, k, A, rows, A);
        k = staged;
        staged += rows * ld;
        attention_stage(staged, ld, v, A, rows, A);
        v = staged;
        staged += rows * ld;
        attention_stage(staged, T, p, T, rows, T);
        p = staged;
        __syncthreads();
    }

    for (unsigned i = threadIdx.x; i < rows * A; i += 256) {
        const unsigned row = i / A;
        const unsigned a = i - row * A;
        float sum = 0.0f;
#pragma unroll 4
        for (unsigned f = 0; f < F; ++f) sum += dx[row * F + f] * w_o[f * ld_o + a];
        mixed_grad[row * ld + a] = sum;
    }
    __syncthreads();

    for (unsigned base = 0; base < rows * ATTENTION_LANES; base += 256) {
        const unsigned row = (base + threadIdx.x) / ATTENTION_LANES;
        const unsigned lane = threadIdx.x % ATTENTION_LANES;
        const unsigned stop = row < rows ? T : 0;
        const float* values = v + row / T * T * ld;
        const float* probabilities = p + row * T;
        float* grads = scores_grad + row * T;
        float along = 0.0f;
        for (unsigned j = lane; j < stop; j += ATTENTION_LANES) {
            const float grad = attention_dot(mixed_grad + row * ld, values + j * ld, A);
            grads[j] = grad;
            along += grad * probabilities[j];
        }
        along = fx_lanes_sum<ATTENTION_LANES>(along);
        for (unsigned j = lane; j < stop; j += ATTENTION_LANES) {
            grads[j] = probabilities[j] * (grads[j] - along) * r.scale;
        }
    }
    __syncthreads();

    float* const dq = r.dq + row0 * A;
    float* const dk = r.dk + row0 * A;
    float* const dv = r.dv + row0 * A;
    for (unsigned i = threadIdx.x; i < rows * 3 * A; i += 256) {
        const unsigned row = i / (3 * A);
        const unsigned column = i - row * 3 * A;
        const unsigned kind = column >= 2 * A ? 2 : column >= A ? 1 : 0;
        const unsigned a = column - kind * A;
        const unsigned begin = row / T * T;  // first token of the sample
        // dq sums along a row of ds, dk and dv down a column of ds and p.
        const unsigned at = kind == 0 ? row * T : begin * T + (row - begin);
        const unsigned step = kind == 0 ? 1 : T;
        const float* factors = (kind == 2 ? p : scores_grad) + at;
        const float* vectors = (kind == 0 ? k : kind == 1 ? q : mixed_grad) + begin * ld + a;
        float sum = 0.0f;
#pragma unroll 4
        for (unsigned j = 0; j < T; ++j) sum += factors[j * step] * vectors[j * ld];
        (kind == 0 ? dq : kind == 1 ? dk : dv)[row * A + a] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(256, 3) fx_attention_backward(const AttentionBackward* table, int count) {
    FX_POOL(float4, pool, ATTENTION_SHARED / 4);  // read in 16-byte pieces
    float* const shared = reinterpret_cast<float*>(pool);
    __shared__ AttentionBackward place;
    int tile;
    const AttentionBackward& record = fx_record(table, count, tile, place);
    if (record.path == ATTENTION_TOKENS) {
        attention_backward_tokens(record, tile, shared);  // waits with its weights in registers
        return;
    }
    fx_wait();
    fx_trigger();
    if (record.path == ATTENTION_STAGED) {
        attention_backward<true>(record, tile, shared);
    } else {
        attention_backward<false>(record, tile, shared);
    }
}
