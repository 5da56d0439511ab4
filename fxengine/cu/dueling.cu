// fx_dueling: one branch of the C51 heads, forward, from the outputs of its layers (heads.cuh makes those too).
//   logits[a, k] = v[k] + adv[a, k] - mean_a adv[a, k], or adv[a, k] where v is null
//   p            = softmax of the logits over the atoms k; z_k = v_min + k spacing
//   q[a]         = sum_k z_k p[a, k]
//   lse[a]       = log of the softmax's denominator: log p = logits - lse, all that the losses need of the softmax
//   policy       = softmax of q over the actions
//   best         = argmax of q: the lowest index on ties, NaN never wins, all NaN gives 0
// Lane l owns the atoms l, l + 32, ..., held in registers, of several actions at a time, whose loads and reductions do
// not wait for each other.
// Its backward is in c51.cu, where the loss is. Everything is overwritten; lse, policy and best may be null. A warp works
// on a row; a tile has 8 rows.
#include "c51.cuh"

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
};

// Row `row` of a matrix, or null where there is none.
template <class T>
__device__ __forceinline__ T* dueling_at(T* matrix, int ld, int row) {
    return matrix != nullptr ? c51_row(matrix, ld, row) : nullptr;
}

// Where a row is read and what becomes of it: asked when that is needed, because pointers kept would take up registers.
// Those of v and adv are the lane's first atom.
struct DuelingRow {
    const Dueling& record;
    int row, lane;
    int actions, atoms;
    float v_min, spacing;

    __device__ __forceinline__ DuelingRow(const Dueling& of, int which)
        : record(of), row(which), lane(static_cast<int>(threadIdx.x & 31u)), actions(of.actions), atoms(of.atoms),
          v_min(of.v_min), spacing(of.spacing) {}
    __device__ __forceinline__ const float* v() const {
        return record.v != nullptr ? c51_row(record.v, record.ld_v, row) + lane : nullptr;
    }
    __device__ __forceinline__ const float* adv() const { return c51_row(record.adv, record.ld_adv, row) + lane; }
    __device__ __forceinline__ float* q() const { return c51_row(record.q, record.ld_q, row); }
    __device__ __forceinline__ float* lse() const { return dueling_at(record.lse, record.ld_lse, row); }
    __device__ __forceinline__ float* policy() const { return dueling_at(record.policy, record.ld_policy, row); }
    __device__ __forceinline__ int* best() const { return dueling_at(record.best, record.best_stride, row); }
};

// CHUNKS atoms per lane, GROUP actions at a time.
template <int CHUNKS, int GROUP>
__device__ __forceinline__ void dueling_row(const DuelingRow& row) {
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

extern "C" __global__ void __launch_bounds__(256) fx_dueling(const Dueling* table, int count) {
    int tile;
    const Dueling record = fx_record(table, count, tile);
    const int row = tile * 8 + static_cast<int>(threadIdx.x >> 5);
    fx_wait();
    fx_trigger();
    if (row >= record.rows) return;
    const DuelingRow place(record, row);
    if (record.atoms <= 64) {
        dueling_row<2, 4>(place);
    } else if (record.atoms <= 128) {
        dueling_row<4, 2>(place);
    } else {
        dueling_row<8, 1>(place);
    }
}
