// One row of one branch of the C51 heads, forward, by a warp.
//   logits[a, k] = v[k] + adv[a, k] - mean_a adv[a, k], or adv[a, k] where v is null
//   p            = softmax of the logits over the atoms k; z_k = v_min + k spacing
//   q[a]         = sum_k z_k p[a, k]
//   lse[a]       = log of the softmax's denominator: log p = logits - lse, all that the losses need of the softmax
//   policy       = softmax of q over the actions
//   best         = argmax of q: the lowest index on ties, NaN never wins, all NaN gives 0
// Lane l owns the atoms l, l + 32, ..., held in registers, of several actions at a time, whose loads and reductions do
// not wait for each other.
#pragma once
#include "c51.cuh"

// Row `row` of a matrix, or null where there is none.
template <class T>
__device__ __forceinline__ T* dueling_at(T* matrix, int ld, int row) {
    return matrix != nullptr ? c51_row(matrix, ld, row) : nullptr;
}

// CHUNKS atoms per lane, GROUP actions at a time. Row says where a row is read and what becomes of it; it is asked when
// that is needed, because pointers kept would take up registers. Those of v and adv are the lane's first atom.
//   v()          [atoms], or null: adv holds the logits     adv()        [actions, atoms]
//   q()          [actions]                                  lse()        [actions] or null
//   policy()     [actions] or null                          best()       one number or null
//   actions, atoms, v_min, spacing
template <int CHUNKS, int GROUP, class Row>
__device__ __forceinline__ void dueling_row(const Row& row) {
    constexpr int LANES = 32 / GROUP;  // that finish one action of a group
    constexpr int NONE = 0x7fffffff;
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int mine = lane / LANES;
    const int atoms = row.atoms, actions = row.actions;

    float x[GROUP][CHUNKS], base[CHUNKS] = {}, z[CHUNKS];
    c51_load(x, row.adv(), 0, actions, atoms);
    if (const float* const v = row.v(); v != nullptr) {
        c51_load(base, v, atoms);
        c51_center(base, x, row.adv(), actions, atoms);
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (lane + 32 * c >= atoms) base[c] = -FX_INF;  // no probability beyond the last atom
        z[c] = row.v_min + static_cast<float>(lane + 32 * c) * row.spacing;
    }

    float value = 0.0f, top = -FX_INF;  // of the lane's own actions
    int best = NONE;
#pragma unroll 1
    for (int first = 0; first < actions; first += GROUP) {
        if (first > 0) c51_load(x, row.adv(), first, actions, atoms);
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
        if (a < actions && value > top) {
            top = value;
            best = a;
        }
        float* const q = row.q();
        if (a >= actions || lane % LANES != 0) continue;
        fx_global(q)[a] = value;
        if (float* const lse = row.lse(); lse != nullptr) {
            float shift = peak[0];
#pragma unroll
            for (int g = 1; g < GROUP; ++g) shift = g == mine ? peak[g] : shift;
            fx_global(lse)[a] = shift + c51_log(sum);
        }
    }

    int* const greedy = row.best();
    float* const policy = row.policy();
    if (greedy == nullptr && policy == nullptr) return;
    const float highest = c51_warp_max(top);
    if (greedy != nullptr) {
        best = __reduce_min_sync(0xffffffffu, top == highest ? best : NONE);
        if (lane == 0) *fx_global(greedy) = best == NONE ? 0 : best;
    }
    if (policy == nullptr) return;
    // A single group is still in registers, in the lanes that stored it.
    const bool stored = actions > GROUP;
    const int from = stored ? lane : lane % LANES == 0 ? mine : actions;
    const float* const q = row.q();
    __syncwarp();
    float sum = 0.0f;
#pragma unroll 1
    for (int a = from; a < actions; a += 32) sum += c51_exp((stored ? q[a] : value) - highest);
    const float inverse = c51_divide(1.0f, fx_warp_sum(sum));
#pragma unroll 1
    for (int a = from; a < actions; a += 32) fx_global(policy)[a] = c51_exp((stored ? q[a] : value) - highest) * inverse;
}
