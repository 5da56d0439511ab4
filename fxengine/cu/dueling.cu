// fx_dueling: one branch of the C51 heads, forward. Its backward is in c51.cu, where the loss is.
//   logits[b, a, k] = v[b, k] + adv[b, a, k] - mean_a adv[b, a, k], or adv[b, a, k] where v is null
//   p               = softmax of the logits over the atoms k; z_k = v_min + k spacing
//   q[b, a]         = sum_k z_k p[b, a, k]
//   lse[b, a]       = log of the softmax's denominator: log p = logits - lse, all that the losses need of the softmax
//   policy[b, :]    = softmax of q[b, :] over the actions
//   best[b]         = argmax of q[b, :]: the lowest index on ties, NaN never wins, all NaN gives 0
// Everything overwrites; lse, policy and best may be null. A warp works on a row: lane l owns the atoms l, l + 32, ...,
// held in registers, so up to 256 of them; several actions at a time, because each takes three warp reductions and
// those of different actions do not wait for each other. A tile has 8 rows.
#include "fx.cuh"

struct Dueling {
    int first_tile;
    int tiles;
    const float* v;       // [rows, atoms], or null: adv holds the logits
    const float* adv;     // [rows, actions * atoms]
    float* q;             // [rows, actions]
    float* lse;           // [rows, actions] or null
    float* policy;        // [rows, actions] or null
    int* best;            // [rows], best_stride apart, or null
    long long ld_v;       // elements between rows
    long long ld_adv;
    long long ld_q;
    long long ld_lse;
    long long ld_policy;
    long long best_stride;
    int rows;
    int actions;
    int atoms;            // 2 to 256
    float v_min;
    float spacing;        // (v_max - v_min) / (atoms - 1)
};

// CHUNKS atoms per lane, GROUP actions at a time.
template <int CHUNKS, int GROUP>
__device__ __forceinline__ void dueling_row(const Dueling& record, long long row) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int atoms = record.atoms, actions = record.actions;
    const float* adv = record.adv + row * record.ld_adv;
    float* q = record.q + row * record.ld_q;

    float base[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) base[c] = 0.0f;
    if (record.v != nullptr) {
        const float* v = record.v + row * record.ld_v;
        for (int a = 0; a < actions; ++a) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int k = lane + 32 * c;
                if (k < atoms) base[c] += adv[a * atoms + k];
            }
        }
        const float share = fx_divide(1.0f, static_cast<float>(actions));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int k = lane + 32 * c;
            base[c] = k < atoms ? v[k] - base[c] * share : 0.0f;
        }
    }

    int best = 0;
    float top = 0.0f;
    for (int first = 0; first < actions; first += GROUP) {
        float x[GROUP][CHUNKS], peak[GROUP], sum[GROUP], moment[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            peak[g] = -FX_INF;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const int k = lane + 32 * c;
                const bool there = first + g < actions && k < atoms;
                x[g][c] = there ? base[c] + adv[(first + g) * atoms + k] : -FX_INF;
                peak[g] = fmaxf(peak[g], x[g][c]);
            }
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) peak[g] = fmaxf(peak[g], __shfl_xor_sync(0xffffffffu, peak[g], offset));
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            sum[g] = moment[g] = 0.0f;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const float e = expf(x[g][c] - peak[g]);  // 0 beyond the last atom
                sum[g] += e;
                moment[g] += (record.v_min + static_cast<float>(lane + 32 * c) * record.spacing) * e;
            }
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                sum[g] += __shfl_xor_sync(0xffffffffu, sum[g], offset);
                moment[g] += __shfl_xor_sync(0xffffffffu, moment[g], offset);
            }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const int a = first + g;
            if (a >= actions) break;
            const float value = fx_divide(moment[g], sum[g]);
            if (a == 0 || value > top || (top != top && value == value)) {
                top = value;
                best = a;
            }
            if (lane == (a & 31)) {
                q[a] = value;
                if (record.lse != nullptr) record.lse[row * record.ld_lse + a] = peak[g] + logf(sum[g]);
            }
        }
    }

    if (record.best != nullptr && lane == 0) record.best[row * record.best_stride] = best;
    if (record.policy != nullptr) {  // top is the largest q; a lane reads back what it wrote itself
        float* policy = record.policy + row * record.ld_policy;
        float sum = 0.0f;
        for (int a = lane; a < actions; a += 32) sum += expf(q[a] - top);
        const float inverse = fx_divide(1.0f, fx_warp_sum(sum));
        for (int a = lane; a < actions; a += 32) policy[a] = expf(q[a] - top) * inverse;
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_dueling(const Dueling* table, int count) {
    int tile;
    const Dueling record = fx_record(table, count, tile);
    const long long row = static_cast<long long>(tile) * 8 + (threadIdx.x >> 5);
    const int rows = record.rows, atoms = record.atoms;
    fx_wait();
    fx_trigger();
    if (row >= rows) return;
    if (atoms <= 32) {
        dueling_row<1, 4>(record, row);
    } else if (atoms <= 64) {
        dueling_row<2, 4>(record, row);
    } else if (atoms <= 128) {
        dueling_row<4, 2>(record, row);
    } else {
        dueling_row<8, 1>(record, row);
    }
}
