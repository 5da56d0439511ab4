// Records of attention.cu, and its path for the usual sizes: eight lanes per token.
//
// Lane l of a token has the columns l and l + 8 of its vectors of 16, its feature l and its score for the sample's l-th
// token. Weights stay in registers over all tokens of the lane; what the other lanes of the token need goes through
// shared memory. The loops over tokens are not unrolled: a step runs each kernel once, and code that has to be fetched
// costs more than a jump.
#pragma once
#include "copy_async.cuh"

struct AttentionForward {
    int first_tile;
    int tiles;
    const float* state;   // [batch, tokens * features]
    const float* live;    // [batch]: a sample whose entry is 0 reads as zeros, whatever it holds; null = all live
    const float* w_q;     // [attn, features]
    const float* w_k;     // [attn, features]
    const float* w_v;     // [attn, features]
    const float* w_o;     // [features, attn]
    float* x;             // [batch, tokens * features]
    float* q;             // [batch * tokens, attn]; this and the next four may be null unless in memory
    float* k;
    float* v;
    float* p;             // [batch * tokens, tokens]
    float* o;             // [batch * tokens, attn]
    long long ld_state;   // floats between samples
    long long ld_x;
    int ld_w;             // floats between rows of w_q, w_k and w_v
    int ld_o;             // of w_o
    int batch;
    int tokens;
    int features;
    int attn;
    int samples;          // of a block; 1 in memory
    int path;             // AttentionPath
    float scale;          // 1 / sqrt(attn)
};

struct AttentionBackward {
    int first_tile;
    int tiles;
    const float* dx;      // [batch, tokens * features]
    const float* w_o;     // [features, attn]
    const float* q;       // [batch * tokens, attn], like k and v
    const float* k;
    const float* v;
    const float* p;       // [batch * tokens, tokens]
    float* dq;            // [batch * tokens, attn], like dk and dv
    float* dk;
    float* dv;
    float* mixed_grad;    // do [batch * tokens, attn]; this and the next are null unless in memory
    float* scores_grad;   // ds [batch * tokens, tokens]
    long long ld_dx;      // floats between samples
    int ld_o;             // floats between rows of w_o
    int batch;
    int tokens;
    int features;
    int attn;
    int samples;
    int path;
    float scale;
};

enum AttentionPath {
    ATTENTION_MEMORY = 0,  // operands and results in global memory
    ATTENTION_STAGED = 1,  // in shared memory
    ATTENTION_TOKENS = 2,  // eight lanes per token: 8 features, a width of 16, up to 8 tokens; weights without gaps
};

// Floats of shared memory of a block; ops/attention.py computes what fits.
constexpr int ATTENTION_SHARED = 8192;
// Lanes that share a row of scores.
constexpr unsigned ATTENTION_LANES = 8;

constexpr int TOKEN_FEATURES = 8;
constexpr int TOKEN_ATTN = 16;
constexpr int TOKEN_LANES = 8;
constexpr int TOKEN_MOST = TOKEN_LANES;  // tokens of a sample
constexpr int TOKEN_STEP = 256 / TOKEN_LANES;  // tokens that a block works on at a time
// Floats between rows whose 16-byte pieces the lanes of a token read side by side: the eight hit different banks.
constexpr int TOKEN_LD = 20;
constexpr int TOKEN_LD_WEIGHTS = 12;

static_assert(TOKEN_FEATURES == TOKEN_LANES && TOKEN_ATTN == 2 * TOKEN_LANES, "what a lane has");

// The tokens of a block.
struct TokenBlock {
    int lane;         // of the thread's token
    int tokens;       // of a sample
    int first;        // sample
    int rows;         // tokens of the block
    unsigned magic;   // row / tokens = row * magic >> 16, exact below 8,192

    __device__ __forceinline__ TokenBlock(int tile, int samples, int batch, int of_sample)
        : lane(static_cast<int>(threadIdx.x % TOKEN_LANES)), tokens(of_sample), first(tile * samples),
          rows((batch - first < samples ? batch - first : samples) * of_sample),
          magic(65536u / static_cast<unsigned>(of_sample) + 1u) {}

    // The first row of the thread, and of its warp.
    __device__ __forceinline__ int row() const { return static_cast<int>(threadIdx.x / TOKEN_LANES); }
    __device__ __forceinline__ int warp_row() const { return static_cast<int>(threadIdx.x / 32 * (32 / TOKEN_LANES)); }
    __device__ __forceinline__ int sample(int row) const {
        return static_cast<int>(static_cast<unsigned>(row) * magic >> 16);
    }
    // Of a row in arrays of all tokens with so many columns.
    __device__ __forceinline__ long long at(int row, int columns) const {
        return (static_cast<long long>(first) * tokens + row) * columns;
    }
    // Of a row's feature `lane` in arrays of whole samples that lie ld apart.
    __device__ __forceinline__ long long feature(int row, long long ld) const {
        const int local = sample(row);
        return (first + local) * ld + (row - local * tokens) * TOKEN_FEATURES + lane;
    }
};

__device__ __forceinline__ float attention_lanes_max(float x) {
#pragma unroll
    for (unsigned offset = ATTENTION_LANES / 2; offset > 0; offset /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, offset);
        x = other > x ? other : x;
    }
    return x;
}

// A row in shared memory, 16-byte aligned.
template <int N>
__device__ __forceinline__ void token_load(float (&x)[N], const float* row) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

// x . row, in index order.
template <int N>
__device__ __forceinline__ float token_dot(const float (&x)[N], const float* row) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + i);
        sum += x[i] * four.x;
        sum += x[i + 1] * four.y;
        sum += x[i + 2] * four.z;
        sum += x[i + 3] * four.w;
    }
    return sum;
}

// Shared memory: w_q, w_k, w_v with TOKEN_LD_WEIGHTS and w_o with TOKEN_LD between rows, then of every token t, q
// (later o), v, k with TOKEN_LD, and its sample's `live`.
__device__ __forceinline__ void attention_forward_tokens(const AttentionForward& r, int tile, float* shared) {
    constexpr int F = TOKEN_FEATURES, A = TOKEN_ATTN, LANES = TOKEN_LANES;
    const TokenBlock block(tile, r.samples, r.batch, r.tokens);
    const int lane = block.lane, T = block.tokens, rows = block.rows;
    float* const w_out = shared + 3 * A * TOKEN_LD_WEIGHTS;
    float* const tokens = w_out + F * TOKEN_LD;
    float* const queries = tokens + rows * F;
    float* const values = queries + rows * A;
    float* const keys = values + rows * A;
    float* const live = keys + rows * TOKEN_LD;
    const auto dead = [&](int row) { return r.live != nullptr && live[row] == 0.0f; };

    // Weights, before the wait: one half of the threads has w_q and w_v, the other w_k and w_o.
    const unsigned e = threadIdx.x % (F * A);
    const bool low = threadIdx.x < F * A;
    const float weight = (low ? r.w_q : r.w_k)[e], other = (low ? r.w_v : r.w_o)[e];
    float* const place = shared + e / F * TOKEN_LD_WEIGHTS + e % F;
    place[low ? 0 : A * TOKEN_LD_WEIGHTS] = weight;
    *(low ? place + 2 * A * TOKEN_LD_WEIGHTS : w_out + e / A * TOKEN_LD + e % A) = other;
    __syncthreads();
    float w[3][2][F];
#pragma unroll
    for (int kind = 0; kind < 3; ++kind) {
#pragma unroll
        for (int c = 0; c < 2; ++c) token_load(w[kind][c], shared + (kind * A + c * LANES + lane) * TOKEN_LD_WEIGHTS);
    }
    fx_wait();
    fx_trigger();

#pragma unroll 1
    for (int row = block.row(); row < rows; row += TOKEN_STEP) {
        fx_copy_word(fx_shared(tokens + row * F + lane), r.state + block.feature(row, r.ld_state), true);
        if (r.live != nullptr && lane == 0) {
            fx_copy_word(fx_shared(live + row), r.live + block.first + block.sample(row), true);
        }
    }
    fx_copy_commit();
    fx_copy_wait<0>();
    __syncwarp();  // the lanes of a token have its features

#pragma unroll 1
    for (int row = block.row(); row < rows; row += TOKEN_STEP) {
        float t[F];
        token_load(t, tokens + row * F);
        if (dead(row)) {
#pragma unroll
            for (int f = 0; f < F; ++f) t[f] = 0.0f;
        }
#pragma unroll
        for (int kind = 0; kind < 3; ++kind) {
            float* const to = kind == 0 ? queries + row * A : kind == 1 ? keys + row * TOKEN_LD : values + row * A;
            float* saved = kind == 0 ? r.q : kind == 1 ? r.k : r.v;
            if (saved != nullptr) saved += block.at(row, A);
#pragma unroll
            for (int a = lane, c = 0; c < 2; a += LANES, ++c) {
                float sum = 0.0f;
#pragma unroll
                for (int f = 0; f < F; ++f) sum += t[f] * w[kind][c][f];
                to[a] = sum;
                if (saved != nullptr) saved[a] = sum;
            }
        }
    }
    __syncthreads();

    float w_o[A];
    token_load(w_o, w_out + lane * TOKEN_LD);
#pragma unroll 1
    for (int first = block.warp_row(); first < rows; first += TOKEN_STEP) {
        const int own = first + static_cast<int>(threadIdx.x % 32 / LANES);
        const bool works = own < rows;  // the others still take part in the shuffles
        const int row = works ? own : rows - 1;
        const int begin = block.sample(row) * T;  // first token of the sample
        float vector[A];
        token_load(vector, queries + row * A);
        const bool scores = lane < T;
        const float score = __fmul_rn(token_dot(vector, keys + (begin + (scores ? lane : 0)) * TOKEN_LD), r.scale);
        const float peak = attention_lanes_max(scores && score > -FX_INF ? score : -FX_INF);
        const float power = scores ? expf(score - peak) : 0.0f;
        const float p = power * fx_divide(1.0f, fx_lanes_sum<LANES>(power));
        if (r.p != nullptr && works && scores) r.p[block.at(row, T) + lane] = p;
        float o[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < TOKEN_MOST; ++j) {
            const float weight_j = __shfl_sync(0xffffffffu, p, j, LANES);
            if (j >= T) continue;
            const float* const value = values + (begin + j) * A + lane;
            o[0] += weight_j * value[0];
            o[1] += weight_j * value[LANES];
        }
        float* const mixed = queries + row * A;
        if (works) mixed[lane] = o[0], mixed[lane + LANES] = o[1];
        __syncwarp();
        if (works && r.o != nullptr) {
            float* const saved = r.o + block.at(row, A) + lane;
            saved[0] = o[0], saved[LANES] = o[1];
        }
        const float token = dead(row) ? 0.0f : tokens[row * F + lane];
        const float x = token + token_dot(w_o, mixed);
        if (works) r.x[block.feature(row, r.ld_x)] = x;
    }
}

// Shared memory of every token: dx (later ds), p, q, k, do, and v with TOKEN_LD.
__device__ __forceinline__ void attention_backward_tokens(const AttentionBackward& r, int tile, float* shared) {
    constexpr int F = TOKEN_FEATURES, A = TOKEN_ATTN, LANES = TOKEN_LANES;
    const TokenBlock block(tile, r.samples, r.batch, r.tokens);
    const int lane = block.lane, T = block.tokens, rows = block.rows;
    float* const grads = shared;
    float* const weights = grads + rows * F;
    float* const queries = weights + rows * LANES;
    float* const keys = queries + rows * A;
    float* const mixed = keys + rows * A;
    float* const values = mixed + rows * A;
    float w_o[F][2];
#pragma unroll
    for (int f = 0; f < F; ++f) w_o[f][0] = r.w_o[f * A + lane], w_o[f][1] = r.w_o[f * A + LANES + lane];
    fx_wait();
    fx_trigger();

#pragma unroll 1
    for (int row = block.row(); row < rows; row += TOKEN_STEP) {
        const long long from = block.at(row, A) + lane;
        fx_copy_word(fx_shared(grads + row * F + lane), r.dx + block.feature(row, r.ld_dx), true);
        if (lane < T) fx_copy_word(fx_shared(weights + row * LANES + lane), r.p + block.at(row, T) + lane, true);
#pragma unroll
        for (int c = 0; c < A; c += LANES) {
            fx_copy_word(fx_shared(queries + row * A + lane + c), r.q + from + c, true);
            fx_copy_word(fx_shared(keys + row * A + lane + c), r.k + from + c, true);
            fx_copy_word(fx_shared(values + row * TOKEN_LD + lane + c), r.v + from + c, true);
        }
    }
    fx_copy_commit();
    fx_copy_wait<0>();
    __syncthreads();

#pragma unroll 1
    for (int first = block.warp_row(); first < rows; first += TOKEN_STEP) {
        const int own = first + static_cast<int>(threadIdx.x % 32 / LANES);
        const bool works = own < rows;  // the others still take part in the shuffles
        const int row = works ? own : rows - 1;
        const int begin = block.sample(row) * T;  // first token of the sample
        const bool scores = lane < T;
        float dx[F], vector[A], grad[2] = {0.0f, 0.0f};
        token_load(dx, grads + row * F);
#pragma unroll
        for (int f = 0; f < F; ++f) grad[0] += dx[f] * w_o[f][0], grad[1] += dx[f] * w_o[f][1];
        if (works) mixed[row * A + lane] = grad[0], mixed[row * A + LANES + lane] = grad[1];
        __syncwarp();
        token_load(vector, mixed + row * A);
        const float p = scores ? weights[row * LANES + lane] : 0.0f;
        const float dp = scores ? token_dot(vector, values + (begin + lane) * TOKEN_LD) : 0.0f;
        const float ds = p * (dp - fx_lanes_sum<LANES>(__fmul_rn(dp, p))) * r.scale;
        if (works) grads[row * F + lane] = ds;
        float dq[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < TOKEN_MOST; ++j) {
            const float ds_j = __shfl_sync(0xffffffffu, ds, j, LANES);
            if (j >= T) continue;
            const float* const key = keys + (begin + j) * A + lane;
            dq[0] += ds_j * key[0];
            dq[1] += ds_j * key[LANES];
        }
        if (works) {
            float* const to = r.dq + block.at(row, A) + lane;
            to[0] = dq[0], to[LANES] = dq[1];
        }
    }
    __syncthreads();

    // Down the columns of ds and p: those of the sample's tokens.
#pragma unroll 1
    for (int row = block.row(); row < rows; row += TOKEN_STEP) {
        const int begin = block.sample(row) * T;
        const int token = row - begin;
        float dk[2] = {0.0f, 0.0f}, dv[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < TOKEN_MOST; ++i) {
            if (i >= T) continue;
            const int other = begin + i;
            const float ds = grads[other * F + token], p = weights[other * LANES + token];
            const float* const query = queries + other * A + lane;
            const float* const grad = mixed + other * A + lane;
            dk[0] += ds * query[0], dk[1] += ds * query[LANES];
            dv[0] += p * grad[0], dv[1] += p * grad[LANES];
        }
        const long long to = block.at(row, A) + lane;
        r.dk[to] = dk[0], r.dk[to + LANES] = dk[1];
        r.dv[to] = dv[0], r.dv[to + LANES] = dv[1];
    }
}
