// fx_dqn: the temporal-difference loss of heads that hold expected values, and its gradient, all D branches of a row.
//   next       = argmax of q_next_d[b, :], or of q_target_d[b, :] where q_next is null: the lowest index on ties, NaN
//                never wins, all NaN gives 0
//   delta_d    = q_d[b, action_d] - (reward[b] + discount[b] q_target_d[b, next]); a discount of 0 ignores q_target
//   loss_d     = delta^2, or with huber: delta^2 / 2 where |delta| <= 1, else |delta| - 1 / 2
//   td[b]      = mean_d |delta_d|;   best[b, d] = next
//   dq_d[b, a] = weight[b] loss_d' / (rows D) for a = action_d, 0 for the others            (=, never +=)
//   partials   : per tile, sum over its rows of weight[b] mean_d loss_d, and of mean_d q_d[b, action_d]
// An action outside [0, n_d) is looked up nowhere and makes its row NaN. Every output may be null.
// A warp works on one branch of one row, a block on 8 / D rows, so that the branches of a row meet in one block.
#include "fx.cuh"

struct Dqn {
    int first_tile;
    int tiles;
    const float* q;          // [rows, all actions], online networks at s
    const float* q_target;   // [rows, all actions], target networks at s'
    const float* q_next;     // [rows, all actions], online networks at s', or null
    const int* actions;      // [rows, branches]
    const float* reward;     // [rows]
    const float* discount;   // [rows]
    const float* weight;     // [rows], importance weights
    float* dq;               // [rows, all actions]
    float* td;               // [rows]
    int* best;               // [rows, branches]
    double* loss_partials;   // [tiles]
    double* value_partials;  // [tiles]
    long long ld_q;          // elements between rows
    long long ld_target;
    long long ld_next;
    long long ld_actions;
    long long ld_dq;
    long long ld_best;
    int offset[8];           // first column of each branch
    int sizes[8];            // n_d
    int branches;            // D, 1 to 8
    int rows;
    int huber;               // 0 = squares
};

// What one branch of one row adds to the results of its row, before the means.
struct DqnPart {
    float loss;
    float td;
    float value;
};

// The same index in every lane.
__device__ __forceinline__ int dqn_argmax(const float* values, int n) {
    const int none = 0x7fffffff;
    int best = none;
    float top = 0.0f;
    for (int a = static_cast<int>(threadIdx.x & 31u); a < n; a += 32) {
        const float value = values[a];
        if (value == value && (best == none || value > top)) {
            best = a;
            top = value;
        }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const int other = __shfl_xor_sync(0xffffffffu, best, step);
        const float value = __shfl_xor_sync(0xffffffffu, top, step);
        if (other != none && (best == none || value > top || (value == top && other < best))) {
            best = other;
            top = value;
        }
    }
    return best == none ? 0 : best;
}

__device__ __forceinline__ DqnPart dqn_branch(const Dqn& record, long long row, int d) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int n = record.sizes[d], offset = record.offset[d];
    const int action = record.actions[row * record.ld_actions + d];
    const float reward = record.reward[row], discount = record.discount[row], weight = record.weight[row];
    const bool known = action >= 0 && action < n;
    const float value = known ? record.q[row * record.ld_q + offset + action] : FX_NAN;
    const float* target = record.q_target + row * record.ld_target + offset;
    const float* chooser = record.q_next != nullptr ? record.q_next + row * record.ld_next + offset : target;
    const int next = dqn_argmax(chooser, n);
    const float delta = value - (reward + fx_scaled(discount, target[next]));
    const float size = fabsf(delta);
    const float limit = record.huber != 0 ? 1.0f : FX_INF, factor = record.huber != 0 ? 1.0f : 2.0f;
    DqnPart part;
    part.loss = size > limit ? size - 0.5f : 0.5f * factor * (delta * delta);  // NaN stays with the squares
    part.td = size;
    part.value = value;
    if (record.best != nullptr && lane == 0) record.best[row * record.ld_best + d] = next;
    if (record.dq != nullptr) {
        const float slope = factor * (delta > limit ? limit : delta < -limit ? -limit : delta);
        const float share = fx_divide(weight, static_cast<float>(record.rows) * static_cast<float>(record.branches));
        const float gradient = share * slope;
        float* dq = record.dq + row * record.ld_dq + offset;
        for (int a = lane; a < n; a += 32) dq[a] = a == action || !known ? gradient : 0.0f;
    }
    return part;
}

extern "C" __global__ void __launch_bounds__(256) fx_dqn(const Dqn* table, int count) {
    __shared__ Dqn place;
    __shared__ DqnPart parts[8];
    int tile;
    const Dqn& record = fx_record(table, count, tile, place);
    const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5;
    const int branches = record.branches;
    const int block_rows = 8 / branches;
    const long long first = static_cast<long long>(tile) * block_rows;
    const long long left = record.rows - first;
    const int rows = static_cast<int>(left < block_rows ? left : block_rows);
    fx_wait();
    fx_trigger();
    if (warp / branches < rows) {
        const DqnPart part = dqn_branch(record, first + warp / branches, warp % branches);
        if ((thread & 31) == 0) parts[warp] = part;
    }
    __syncthreads();
    if (warp != 0) return;
    double loss = 0.0, value = 0.0;
    if (thread < rows) {
        DqnPart sum = parts[thread * branches];
        for (int d = 1; d < branches; ++d) {
            const DqnPart& next = parts[thread * branches + d];
            sum.loss += next.loss;
            sum.td += next.td;
            sum.value += next.value;
        }
        const float share = static_cast<float>(branches);
        if (record.td != nullptr) record.td[first + thread] = fx_divide(sum.td, share);
        loss = static_cast<double>(record.weight[first + thread]) * fx_divide(sum.loss, share);
        value = fx_divide(sum.value, share);
    }
    loss = fx_lanes_sum<8>(loss);
    value = fx_lanes_sum<8>(value);
    if (thread != 0) return;
    if (record.loss_partials != nullptr) record.loss_partials[tile] = loss;
    if (record.value_partials != nullptr) record.value_partials[tile] = value;
}
