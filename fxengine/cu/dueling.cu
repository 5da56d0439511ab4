// fx_dueling: one branch of the C51 heads, forward. Its backward is in c51.cu, where the loss is.
//   logits[b, a, k] = v[b, k] + adv[b, a, k] - mean_a adv[b, a, k], or adv[b, a, k] where v is null
//   p               = softmax of the logits over the atoms k; z_k = v_min + k spacing
//   q[b, a]         = sum_k z_k p[b, a, k]
//   lse[b, a]       = log of the softmax's denominator: log p = logits - lse, all that the losses need of the softmax
//   policy[b, :]    = softmax of q[b, :] over the actions
//   best[b]         = argmax of q[b, :]: the lowest index on ties, NaN never wins, all NaN gives 0
//   y               = relu(y + policy w^T), the layer that reads the policy (finish.cuh)
// All but y is overwritten; lse, policy, best and y may be null. A warp works on a row: lane l owns the atoms l,
// l + 32, ..., held in registers, so up to 256 of them; several actions at a time, whose loads and reductions do not
// wait for each other. A tile has 8 rows.
#include "c51.cuh"
#include "finish.cuh"

struct Dueling {
    int first_tile;
    int tiles;
    const float* v;       // [rows, atoms], or null: adv holds the logits
    const float* adv;     // [rows, actions * atoms]
    float* q;             // [rows, actions]
    float* lse;           // [rows, actions] or null
    float* policy;        // [rows, actions] or null
    int* best;            // [rows], best_stride apart, or null
    int ld_v;             // elements between rows
    int ld_adv;
    int ld_q;
    int ld_lse;
    int ld_policy;
    int best_stride;
    int rows;
    int actions;
    int atoms;            // 2 to 256
    float v_min;
    float spacing;        // (v_max - v_min) / (atoms - 1)
    float* y;             // [rows, hidden] or null
    const float* w;       // [hidden, actions]
    int ld_y;
    int ld_w;
    int hidden;
};

// CHUNKS atoms per lane, GROUP actions at a time. The policy goes to `shared` as well, unless that is null.
template <int CHUNKS, int GROUP>
__device__ __forceinline__ void dueling_row(const Dueling& record, int row, float* shared) {
    constexpr int LANES = 32 / GROUP;  // that finish one action of a group
    constexpr int NONE = 0x7fffffff;
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int mine = lane / LANES;
    const int atoms = record.atoms, actions = record.actions;
    const float* adv = c51_row(record.adv, record.ld_adv, row) + lane;
    float* q = c51_row(record.q, record.ld_q, row);

    float x[GROUP][CHUNKS], base[CHUNKS] = {}, z[CHUNKS];
    c51_load(x, adv, 0, actions, atoms);
    if (record.v != nullptr) {
        c51_load(base, c51_row(record.v, record.ld_v, row) + lane, atoms);
        c51_center(base, x, adv, actions, atoms);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (lane + 32 * c >= atoms) base[c] = -FX_INF;  // no probability beyond the last atom
        z[c] = record.v_min + static_cast<float>(lane + 32 * c) * record.spacing;
    }

    float value = 0.0f, top = -FX_INF;  // of the lane's own actions
    int best = NONE;
#pragma unroll 1
    for (int first = 0; first < actions; first += GROUP) {
        if (first > 0) c51_load(x, adv, first, actions, atoms);
        float peak[GROUP], sums[2 * GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            peak[g] = -FX_INF;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                x[g][c] += base[c];
                peak[g] = fmaxf(peak[g], x[g][c]);
            }
            peak[g] = c51_warp_max(peak[g]);
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const float e = c51_exp(x[g][0] - peak[g]);
            float sum = e, moment = z[0] * e;
#pragma unroll
            for (int c = 1; c < CHUNKS; ++c) {
                const float e = c51_exp(x[g][c] - peak[g]);
                sum += e;
                moment += z[c] * e;
            }
            sums[2 * g] = sum;
            sums[2 * g + 1] = moment;
        }
        // Half of an action's lanes get its sum, the others its moment.
        const float own = fx_warp_sums(sums), other = __shfl_xor_sync(0xffffffffu, own, LANES / 2);
        const bool has_moment = (lane & (LANES / 2)) != 0;
        const float sum = has_moment ? other : own, moment = has_moment ? own : other;
        const int a = first + mine;
        value = c51_divide(moment, sum);
        if (a >= actions) continue;
        if (value > top) {
            top = value;
            best = a;
        }
        if (lane % LANES != 0) continue;
        q[a] = value;
        if (record.lse != nullptr) {
            float shift = peak[0];
#pragma unroll
            for (int g = 1; g < GROUP; ++g) shift = g == mine ? peak[g] : shift;
            c51_row(record.lse, record.ld_lse, row)[a] = shift + c51_log(sum);
        }
    }

    if (record.best == nullptr && record.policy == nullptr) return;
    const float highest = c51_warp_max(top);
    if (record.best != nullptr) {
        best = __reduce_min_sync(0xffffffffu, top == highest ? best : NONE);
        if (lane == 0) *c51_row(record.best, record.best_stride, row) = best == NONE ? 0 : best;
    }
    if (record.policy != nullptr) {
        // A single group is still in registers, in the lanes that stored it.
        const bool stored = actions > GROUP;
        const int from = stored ? lane : lane % LANES == 0 ? mine : actions;
        float* policy = c51_row(record.policy, record.ld_policy, row);
        __syncwarp();
        float sum = 0.0f;
#pragma unroll 1
        for (int a = from; a < actions; a += 32) sum += c51_exp((stored ? q[a] : value) - highest);
        const float inverse = c51_divide(1.0f, fx_warp_sum(sum));
#pragma unroll 1
        for (int a = from; a < actions; a += 32) {
            const float p = c51_exp((stored ? q[a] : value) - highest) * inverse;
            policy[a] = p;
            if (shared != nullptr) shared[a] = p;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_dueling(const Dueling* table, int count) {
    FX_POOL(float, pool, FINISH_FLOATS);
    int tile;
    const Dueling record = fx_record(table, count, tile);
    const int warp = static_cast<int>(threadIdx.x >> 5), row = tile * 8 + warp;
    const int atoms = record.atoms, actions = record.actions, hidden = record.hidden;
    const bool exists = row < record.rows;
    float* policy = nullptr;  // the row's, in shared memory
    if (hidden > 0) {
        policy = pool + finish_floats(hidden, actions) + warp * actions;
        finish_weights(pool, record.w, record.ld_w, hidden, actions);
        if (exists) finish_begin(pool, c51_row(record.y, record.ld_y, row), hidden, actions);
    }
    fx_wait();
    fx_trigger();
    if (exists && atoms <= 64) {
        dueling_row<2, 4>(record, row, policy);
    } else if (exists && atoms <= 128) {
        dueling_row<4, 2>(record, row, policy);
    } else if (exists) {
        dueling_row<8, 1>(record, row, policy);
    }
    if (hidden == 0) return;
    finish_wait();
    if (exists) finish_row(pool, c51_row(record.y, record.ld_y, row), hidden, actions, policy);
}
