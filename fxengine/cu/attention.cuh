// Records of attention.cu, and its path for the usual sizes: a thread per token, in registers.
#pragma once
#include "fx.cuh"

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
    ATTENTION_TOKENS = 2,  // a thread per token: 8 features, a width of 16, up to 8 tokens
};

// Floats of shared memory of a block; ops/attention.py computes what fits.
constexpr int ATTENTION_SHARED = 8192;
// Lanes that share a row of scores.
constexpr unsigned ATTENTION_LANES = 8;

constexpr int TOKEN_FEATURES = 8;
constexpr int TOKEN_ATTN = 16;
constexpr int TOKEN_MOST = 8;
// Floats between rows of queries, keys, ... in shared memory: neighbouring tokens' 16-byte reads hit different banks.
constexpr int TOKEN_LD = 20;

__device__ __forceinline__ bool token_aligned(u64 addresses, long long ld) {
    return ((addresses | static_cast<u64>(4 * ld)) & 15) == 0;
}

template <class T>
__device__ __forceinline__ u64 token_address(T* pointer) {
    return reinterpret_cast<u64>(pointer);
}

template <int N>
__device__ __forceinline__ void token_load(float (&x)[N], const float* from, bool quads) {
    if (quads) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = from[i];
    }
}

template <int N>
__device__ __forceinline__ void token_store(float* to, const float (&x)[N], bool quads) {
    if (quads) {
#pragma unroll
        for (int i = 0; i < N; i += 4) *reinterpret_cast<float4*>(to + i) = {x[i], x[i + 1], x[i + 2], x[i + 3]};
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = x[i];
    }
}

// x . row, in index order; the row lies in shared memory, 16-byte aligned.
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

// y += scale row, element by element.
template <int N>
__device__ __forceinline__ void token_add(float (&y)[N], float scale, const float* row) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + i);
        y[i] += scale * four.x;
        y[i + 1] += scale * four.y;
        y[i + 2] += scale * four.z;
        y[i + 3] += scale * four.w;
    }
}

// As fx_lanes_sum<8> adds up one number per lane.
__device__ __forceinline__ float token_sum(const float (&x)[TOKEN_MOST]) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// What a thread of the token path works on.
struct TokenPlace {
    bool works;
    int sample;            // in the batch
    int token;
    const float* siblings; // row of its sample's first token, in an array of TOKEN_LD floats per row
    long long row;         // in arrays of all tokens

    __device__ __forceinline__ TokenPlace(int tile, int samples, int batch, int tokens, const float* rows) {
        const int local = static_cast<int>(threadIdx.x) / tokens;
        sample = tile * samples + local;
        works = local < samples && sample < batch;
        token = static_cast<int>(threadIdx.x) - local * tokens;
        siblings = rows + local * tokens * TOKEN_LD;
        row = static_cast<long long>(sample) * tokens + token;
    }
};

__device__ __forceinline__ void attention_forward_tokens(const AttentionForward& r, int tile, float* shared) {
    constexpr int F = TOKEN_FEATURES, A = TOKEN_ATTN;
    const int thread = static_cast<int>(threadIdx.x), T = r.tokens;
    float* const weights = shared;  // w_q, w_k, w_v, w_o
    float* const keys = weights + 4 * F * A;
    float* const values = keys + r.samples * T * TOKEN_LD;
    const TokenPlace place(tile, r.samples, r.batch, T, keys);
    const float* const state = r.state + place.sample * r.ld_state + place.token * F;
    float t[F] = {};
    if (place.works && (r.live == nullptr || r.live[place.sample] != 0.0f)) {
        token_load(t, state, token_aligned(token_address(r.state), r.ld_state));
    }
    if (thread < F * A) {
        weights[thread] = r.w_q[thread];
        weights[2 * F * A + thread] = r.w_v[thread];
    } else if (thread < 2 * F * A) {
        weights[thread] = r.w_k[thread - F * A];
        weights[2 * F * A + thread] = r.w_o[thread - F * A];
    }
    __syncthreads();

    const bool quads = token_aligned(
        token_address(r.q) | token_address(r.k) | token_address(r.v) | token_address(r.o), 0);
    float q[A];
    if (place.works) {
        float other[A];
#pragma unroll
        for (int a = 0; a < A; ++a) q[a] = token_dot(t, weights + a * F);
#pragma unroll
        for (int a = 0; a < A; ++a) other[a] = token_dot(t, weights + (A + a) * F);
        token_store(keys + thread * TOKEN_LD, other, true);
        if (r.q != nullptr) token_store(r.q + place.row * A, q, quads);
        if (r.k != nullptr) token_store(r.k + place.row * A, other, quads);
#pragma unroll
        for (int a = 0; a < A; ++a) other[a] = token_dot(t, weights + (2 * A + a) * F);
        token_store(values + thread * TOKEN_LD, other, true);
        if (r.v != nullptr) token_store(r.v + place.row * A, other, quads);
    }
    __syncthreads();
    if (!place.works) return;

    float p[TOKEN_MOST], peak = -FX_INF;
#pragma unroll
    for (int j = 0; j < TOKEN_MOST; ++j) {
        p[j] = 0.0f;
        if (j >= T) continue;
        p[j] = __fmul_rn(token_dot(q, place.siblings + j * TOKEN_LD), r.scale);
        peak = p[j] > peak ? p[j] : peak;
    }
#pragma unroll
    for (int j = 0; j < TOKEN_MOST; ++j) p[j] = j < T ? expf(p[j] - peak) : 0.0f;
    const float inverse = fx_divide(1.0f, token_sum(p));
    float o[A] = {};
#pragma unroll
    for (int j = 0; j < TOKEN_MOST; ++j) {
        if (j >= T) continue;
        p[j] *= inverse;
        if (r.p != nullptr) r.p[place.row * T + j] = p[j];
        token_add(o, p[j], place.siblings + (values - keys) + j * TOKEN_LD);
    }
    if (r.o != nullptr) token_store(r.o + place.row * A, o, quads);
    float x[F];
#pragma unroll
    for (int f = 0; f < F; ++f) x[f] = t[f] + token_dot(o, weights + 3 * F * A + f * A);
    token_store(r.x + place.sample * r.ld_x + place.token * F, x, token_aligned(token_address(r.x), r.ld_x));
}

__device__ __forceinline__ void attention_backward_tokens(const AttentionBackward& r, int tile, float* shared) {
    constexpr int F = TOKEN_FEATURES, A = TOKEN_ATTN;
    const int thread = static_cast<int>(threadIdx.x), T = r.tokens;
    const int part = r.samples * T * TOKEN_LD;
    float* const w_o = shared;
    float* const rows = w_o + F * A;  // q, k, v, do
    float* const scores_grad = rows + 4 * part;
    float* const probabilities = scores_grad + r.samples * T * TOKEN_MOST;
    const TokenPlace place(tile, r.samples, r.batch, T, rows);
    const bool quads = token_aligned(token_address(r.q) | token_address(r.k) | token_address(r.v) |
                                     token_address(r.dq) | token_address(r.dk) | token_address(r.dv), 0);
    float p[TOKEN_MOST] = {}, mixed[A] = {}, dx[F] = {};
    float* const mine = rows + thread * TOKEN_LD;
    if (place.works) {
        float q[A], k[A], v[A];
        token_load(dx, r.dx + place.sample * r.ld_dx + place.token * F, token_aligned(token_address(r.dx), r.ld_dx));
        token_load(q, r.q + place.row * A, quads);
        token_load(k, r.k + place.row * A, quads);
        token_load(v, r.v + place.row * A, quads);
#pragma unroll
        for (int j = 0; j < TOKEN_MOST; ++j) p[j] = j < T ? r.p[place.row * T + j] : 0.0f;
        token_store(mine, q, true);
        token_store(mine + part, k, true);
        token_store(mine + 2 * part, v, true);
        token_store(probabilities + thread * TOKEN_MOST, p, true);
    }
    if (thread < F * A) w_o[thread] = r.w_o[thread];
    __syncthreads();
    if (place.works) {
#pragma unroll
        for (int f = 0; f < F; ++f) token_add(mixed, dx[f], w_o + f * A);
        token_store(mine + 3 * part, mixed, true);
    }
    __syncthreads();
    if (place.works) {
        float ds[TOKEN_MOST], along[TOKEN_MOST];
#pragma unroll
        for (int j = 0; j < TOKEN_MOST; ++j) {
            ds[j] = j < T ? token_dot(mixed, place.siblings + 2 * part + j * TOKEN_LD) : 0.0f;
            along[j] = __fmul_rn(ds[j], p[j]);
        }
        const float sum = token_sum(along);
        float dq[A] = {};
#pragma unroll
        for (int j = 0; j < TOKEN_MOST; ++j) {
            ds[j] = p[j] * (ds[j] - sum) * r.scale;
            if (j < T) token_add(dq, ds[j], place.siblings + part + j * TOKEN_LD);
        }
        token_store(scores_grad + thread * TOKEN_MOST, ds, true);
        token_store(r.dq + place.row * A, dq, quads);
    }
    __syncthreads();
    if (!place.works) return;
    // Down the columns of ds and p: those of the sample's tokens.
    const float* const ds = scores_grad + (thread - place.token) * TOKEN_MOST + place.token;
    const float* const weights = probabilities + (thread - place.token) * TOKEN_MOST + place.token;
    float dk[A] = {}, dv[A] = {};
#pragma unroll
    for (int j = 0; j < TOKEN_MOST; ++j) {
        if (j >= T) continue;
        token_add(dk, ds[j * TOKEN_MOST], place.siblings + j * TOKEN_LD);
        token_add(dv, weights[j * TOKEN_MOST], place.siblings + 3 * part + j * TOKEN_LD);
    }
    token_store(r.dk + place.row * A, dk, quads);
    token_store(r.dv + place.row * A, dv, quads);
}
