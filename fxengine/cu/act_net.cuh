// The record of act_net.cu, and the tasks of its own steps. Operations, for each row (columns at x, y, ... of the row):
//   NET_LINEAR  : y[j] = act(b[j] + sum_i w[j, i] x[i]), j < n, i < k
//   NET_SMALL   : y[g n + j] = act(b[j] + sum_i w[j, i] x[g k + i] + add[g n + j]), g < groups; b, add optional
//   NET_MIX     : attention of `groups` tokens (at most 32), width k: y[t] = sum_s softmax_s(scale x[t] . x2[s]) x3[s]
//   NET_GATE    : y[j] = add[j] + x[j] sigmoid(x[n + j]), j < n
//   NET_NORM    : y = LayerNorm(x[0..n)) * w + b, eps = scale
//   NET_WIRE    : y[0] = p_1 - p_0 of the logits x[0], x[1]
//   NET_DUELING : n actions of k atoms (at most 64): logits = x2 + x - mean over actions x, or x alone where x2 < 0;
//                 y[a] = sum_i z_i softmax_i(logits), z_i = low + i scale
//   NET_SOFTMAX : y = softmax of x[0..n), n at most 32
// A task is a part of one row: `chunk` elements of NET_SMALL, NET_GATE and NET_NORM, a token, four actions, or the whole
// row. A warp may compute what another computes too, for a later task of its own: both write the same bits.
#pragma once
#include "cluster.cuh"
#include "policy.cuh"

enum NetKind {
    NET_LINEAR = 0,
    NET_SMALL = 1,
    NET_MIX = 2,
    NET_GATE = 3,
    NET_NORM = 4,
    NET_WIRE = 5,
    NET_DUELING = 6,
    NET_SOFTMAX = 7,
};

struct ActNet {
    int first_tile;
    int tiles;
    const unsigned* input;         // mapped: 4 counters as in step.cu ([1] = the tag), the policy's scalar, inputs
    unsigned long long* report;    // mapped: [rows * branches] words
    unsigned long long* report_q;  // mapped: [rows * columns] words, or null
    const float* w[48];            // of an operation: weights [n, k]
    const float* b[48];            // [n] or null
    int kind[48];                  // NetKind
    int x[48];                     // first columns in the row
    int x2[48];
    int x3[48];
    int add[48];                   // -1: nothing to add
    int y[48];
    int n[48];
    int k[48];
    int groups[48];
    int chunk[48];                 // elements of a task; at most 32, but for NET_NORM
    int inverse[48];               // i / n = i * inverse >> 20 wherever it is needed
    int ld[48];                    // floats between rows of w
    int activation[48];            // FxActivation
    int staged[48];                // place of a copy of w and b in shared memory
    float low[48];
    float scale[48];
    int sent[32];                  // floats per row that a shared step sends to each block; of step 0 the inputs
    int sizes[16];                 // of the policy's branches
    int offsets[16];
    int source[4];                 // inputs: first word, floats per row, first column
    int width[4];
    int column[4];
    int inputs;
    int steps;                     // own and shared ones, step 0 included; at most 32
    int unit_length;               // entries per warp
    int task_length;
    int staged_floats;
    int row_floats;
    int rows;
    int q;                         // first column of the values
    int columns;
    int policy;                    // PolicyKind
    int branches;                  // R times branches must not exceed the threads
    unsigned stream;
    int units[2048];               // [warps of the cluster, unit_length] four outputs in a shared step, -1 behind the last
    int tasks[1024];               // [warps of a block, task_length] tasks of own steps, likewise
};

constexpr int NET_WARPS = 16;
constexpr int NET_THREADS = 32 * NET_WARPS;
// Bytes of the record in front of its lists; they are copied by 16 bytes.
constexpr int NET_HEAD = 4224;
static_assert(sizeof(ActNet) == NET_HEAD + 8192 + 4096 && NET_HEAD % 16 == 0, "the lists are the last fields");

// An entry of a list: 7 bits step, 6 bits operation, 18 bits argument: the first output of four; or 4 bits row and 14 bits
// part of the row.
__device__ __forceinline__ int net_step(int entry) { return entry >> 24; }
__device__ __forceinline__ int net_op(int entry) { return entry >> 18 & 63; }
__device__ __forceinline__ int net_argument(int entry) { return entry & 0x3ffff; }

__device__ __forceinline__ int net_lane() { return static_cast<int>(threadIdx.x & 31u); }

// Step 0: asks for 128 words of the parameters of an own operation, a matrix as [k, n], then its bias.
__device__ __forceinline__ void net_stage(const ActNet& net, int op, float* staged, int part) {
    const bool matrix = net.kind[op] == NET_SMALL;
    const int n = net.n[op], k = matrix ? net.k[op] : 1, inverse = net.inverse[op];
    const long long ld = matrix ? net.ld[op] : 1;
    const float* w = net.w[op];
    const float* b = net.b[op];
    float* to = staged + net.staged[op];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        const int at = 128 * part + 32 * c + net_lane(), i = at * inverse >> 20, j = at - i * n;
        if (i < k) {
            fx_copy_word(to + at, w + j * ld + i);
        } else if (i == k && b != nullptr) {
            fx_copy_word(to + at, b + j);
        } else if (i == k) {
            to[at] = 0.0f;
        }
    }
}

__device__ __forceinline__ void net_small(const ActNet& net, int op, float* row, const float* staged, int part) {
    const int n = net.n[op], k = net.k[op], at = net.chunk[op] * part + net_lane();
    if (net_lane() >= net.chunk[op] || at >= net.groups[op] * n) return;
    const int group = at * net.inverse[op] >> 20, j = at - group * n, add = net.add[op];
    const float* w = staged + net.staged[op] + j;
    const float* x = row + net.x[op] + group * k;
    float sum = w[k * n];
    if (add >= 0) sum += row[add + at];
#pragma unroll 4
    for (int i = 0; i < k; ++i) sum += w[i * n] * x[i];
    row[net.y[op] + at] = fx_activate(net.activation[op], sum);
}

__device__ __forceinline__ float net_warp_max(float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// Lanes are keys, then columns of the result.
__device__ __forceinline__ void net_mix(const ActNet& net, int op, float* row, int token) {
    const int tokens = net.groups[op], width = net.k[op], lane = net_lane();
    const float* query = row + net.x[op] + token * width;
    const float* key = row + net.x2[op] + (lane < tokens ? lane : 0) * width;
    float score = 0.0f;
#pragma unroll 4
    for (int i = 0; i < width; ++i) score += query[i] * key[i];
    score = lane < tokens ? score * net.scale[op] : -FX_INF;
    const float peak = net_warp_max(score);
    const float p = lane < tokens ? expf(score - peak) : 0.0f;
    const float inverse = fx_divide(1.0f, fx_warp_sum(p));
    for (int base = 0; base < width; base += 32) {
        const int i = base + lane < width ? base + lane : 0;
        const float* value = row + net.x3[op] + i;
        float sum = 0.0f;
#pragma unroll 2
        for (int s = 0; s < tokens; ++s) sum += __shfl_sync(0xffffffffu, p, s) * value[s * width];
        if (base + lane < width) row[net.y[op] + token * width + i] = sum * inverse;
    }
}

__device__ __forceinline__ void net_gate(const ActNet& net, int op, float* row, int part) {
    const int n = net.n[op], j = 32 * part + net_lane();
    if (j >= n) return;
    const float* x = row + net.x[op] + j;
    row[net.y[op] + j] = row[net.add[op] + j] + fx_divide(x[0], 1.0f + expf(-x[n]));  // an infinite exponential gives 0
}

// Every part finds mean and variance for itself.
__device__ __forceinline__ void net_norm(const ActNet& net, int op, float* row, const float* staged, int part) {
    const int n = net.n[op], lane = net_lane(), chunk = net.chunk[op];
    const float* x = row + net.x[op];
    const float share = fx_divide(1.0f, static_cast<float>(n));
    float sum = 0.0f, squares = 0.0f;
#pragma unroll 4
    for (int i = lane; i < n; i += 32) sum += x[i];
    const float mean = fx_warp_sum(sum) * share;
#pragma unroll 4
    for (int i = lane; i < n; i += 32) squares += (x[i] - mean) * (x[i] - mean);
    const float rstd = fx_divide(1.0f, fx_root(fx_warp_sum(squares) * share + net.scale[op]));
    const float* gain = staged + net.staged[op];  // [n], then the bias [n]
    const int end = (part + 1) * chunk < n ? (part + 1) * chunk : n;
    for (int i = part * chunk + lane; i < end; i += 32) {
        row[net.y[op] + i] = (x[i] - mean) * rstd * gain[i] + gain[n + i];
    }
}

// Four actions side by side: their reductions do not wait for each other.
__device__ __forceinline__ void net_dueling(const ActNet& net, int op, float* row, int part) {
    const int actions = net.n[op], atoms = net.k[op], lane = net_lane(), first = 4 * part, v = net.x2[op];
    const float* adv = row + net.x[op];
    const bool there[2] = {lane < atoms, lane + 32 < atoms};
    float base[2] = {0.0f, 0.0f}, x[4][2], peak[4], sum[4], moment[4];
    if (v >= 0) {
        const float share = fx_divide(1.0f, static_cast<float>(actions));
#pragma unroll 2
        for (int a = 0; a < actions; ++a) {
#pragma unroll
            for (int c = 0; c < 2; ++c) base[c] += there[c] ? adv[a * atoms + lane + 32 * c] : 0.0f;
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) base[c] = there[c] ? row[v + lane + 32 * c] - base[c] * share : 0.0f;
    }
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        const float* own = adv + (first + g < actions ? first + g : first) * atoms + lane;
#pragma unroll
        for (int c = 0; c < 2; ++c) x[g][c] = there[c] ? base[c] + own[32 * c] : -FX_INF;
        peak[g] = fmaxf(x[g][0], x[g][1]);
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
        for (int g = 0; g < 4; ++g) peak[g] = fmaxf(peak[g], __shfl_xor_sync(0xffffffffu, peak[g], offset));
    }
    const float z = net.low[op] + static_cast<float>(lane) * net.scale[op];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        const float e0 = expf(x[g][0] - peak[g]), e1 = expf(x[g][1] - peak[g]);  // 0 beyond the last atom
        sum[g] = e0 + e1;
        moment[g] = z * e0 + (z + 32.0f * net.scale[op]) * e1;
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            sum[g] += __shfl_xor_sync(0xffffffffu, sum[g], offset);
            moment[g] += __shfl_xor_sync(0xffffffffu, moment[g], offset);
        }
    }
#pragma unroll
    for (int g = 0; g < 4; ++g) {
        if (lane == g && first + g < actions) row[net.y[op] + first + g] = fx_divide(moment[g], sum[g]);
    }
}

__device__ __forceinline__ void net_softmax(const ActNet& net, int op, float* row) {
    const int lane = net_lane(), n = net.n[op];
    const float value = lane < n ? row[net.x[op] + lane] : -FX_INF;
    const float peak = net_warp_max(value);
    const float e = lane < n ? expf(value - peak) : 0.0f;
    const float inverse = fx_divide(1.0f, fx_warp_sum(e));
    if (lane < n) row[net.y[op] + lane] = e * inverse;
}

// The tasks of a warp in one own step; step 0 only asks for copies.
__device__ __forceinline__ void net_own_step(const ActNet& net, float* rows, float* staged, int step,
                                             const int*& list) {
    for (int entry = *list; net_step(entry) == step; entry = *++list) {
        const int op = net_op(entry), part = net_argument(entry) & 0x3fff, kind = net.kind[op];
        float* row = rows + (net_argument(entry) >> 14) * net.row_floats;
        if (step == 0) {
            net_stage(net, op, staged, part);
        } else if (kind == NET_SMALL) {
            net_small(net, op, row, staged, part);
        } else if (kind == NET_DUELING) {
            net_dueling(net, op, row, part);
        } else if (kind == NET_MIX) {
            net_mix(net, op, row, part);
        } else if (kind == NET_GATE) {
            net_gate(net, op, row, part);
        } else if (kind == NET_NORM) {
            net_norm(net, op, row, staged, part);
        } else if (kind == NET_SOFTMAX) {
            net_softmax(net, op, row);
        } else if (net_lane() == 0) {
            row[net.y[op]] = tanhf(0.5f * (row[net.x[op] + 1] - row[net.x[op]]));
        }
        __syncwarp();  // the next task may read this one's result
    }
}
