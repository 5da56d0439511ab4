// Softmax cross-entropy over valid rows, forward and backward in one pass.
//
// fx_crossentropy: logits [rows, classes], labels [rows]; a label outside [0, classes) masks its row.
//   probabilities[b, :] = softmax(logits[b, :])                       (every row, masked or not)
//   wire[b]             = p[b, 1] - p[b, 0], two classes only         (every row)
//   dlogits[b, :]       = weight (p - onehot(label)) / max(1, valid)  (=, never +=)
//                         exact 0 in a masked row, and everywhere when weight is 0, whatever the logits hold
//   loss_partials[tile] = sum over the valid rows of the tile of -log p[b, label]; fx_sum divides by max(1, valid)
//   correct_partials[tile] = number of valid rows whose argmax is the label (lowest index on ties, NaN never wins,
//                         all NaN gives 0)
// Every output may be null; without labels all rows count as masked. A row is worked on by 2, 8 or 32 lanes, so a tile
// has 128, 32 or 8 rows. A lane keeps the first of its classes and reads the others, if any, three times: any number of
// classes fits, and the second and third reads hit the first-level cache. The number of lanes is known only to the
// launch and no loop is unrolled, because code that is run for the first time costs more than its instructions.
#include "fx.cuh"

struct CrossEntropy {
    int first_tile;
    int tiles;
    const float* logits;    // [rows, classes]
    const int* labels;      // [rows] or null
    int* valid;             // receives the number of valid rows; null with labels = null
    const float* weight;    // weight of the loss; needed by dlogits
    float* dlogits;         // [rows, classes] or null
    float* probabilities;   // [rows, classes] or null
    float* wire;            // [rows], wire_stride apart, or null
    double* loss_partials;  // [tiles] or null
    int* correct_partials;  // [tiles] or null
    int ld_logits;          // floats between rows
    int ld_dlogits;
    int ld_probabilities;
    int wire_stride;
    int rows;
    int classes;
    int lanes;              // per row: 2, 8 or 32
};

// Every block counts all labels for itself: that is cheaper than a launch that only counts, and the order of a sum of
// whole numbers does not matter. Eight loads are under way at a time.
__device__ __forceinline__ int count_valid(const CrossEntropy& record, int* scratch) {
    const int thread = static_cast<int>(threadIdx.x), rows = record.rows;
    const unsigned classes = static_cast<unsigned>(record.classes);
    int valid = 0;
#pragma unroll 1
    for (int first = thread; first < rows; first += 8 * 256) {
        const int* labels = fx_global(record.labels) + first;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int label = first + 256 * i < rows ? labels[256 * i] : -1;
            valid += static_cast<unsigned>(label) < classes;  // a negative one is large
        }
    }
    valid = __reduce_add_sync(0xffffffffu, valid);
    if ((thread & 31) == 0) scratch[thread >> 5] = valid;
    __syncthreads();
    int total = scratch[0];
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) total += scratch[warp];
    return total;
}

// Sum over groups of `lanes` neighbouring lanes, as fx_lanes_sum.
__device__ __forceinline__ float lanes_sum(float value, int lanes) {
#pragma unroll 1
    for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

extern "C" __global__ void __launch_bounds__(256) fx_crossentropy(const CrossEntropy* table, int count) {
    constexpr int NONE = 0x7fffffff;
    __shared__ double losses[8];
    __shared__ int hits[8];
    __shared__ int labelled[8];
    __shared__ CrossEntropy place;
    int tile;
    const CrossEntropy& record = fx_record(table, count, tile, place);
    const int thread = static_cast<int>(threadIdx.x), lanes = record.lanes, lane = thread & (lanes - 1);
    const int shift = 31 - __clz(lanes), row = tile * (256 >> shift) + (thread >> shift);
    const bool live = row < record.rows;  // lanes past the last row still take part in the shuffles
    const int classes = live ? record.classes : 0;
    const float* logits = fx_global(record.logits);
    if (live) logits += static_cast<long long>(row) * record.ld_logits;
    fx_wait();
    fx_trigger();
    const int label = live && record.labels != nullptr ? fx_global(record.labels)[row] : -1;
    const float own_logit = lane < classes ? logits[lane] : -FX_INF;
    const float weight = record.dlogits != nullptr ? *fx_global(record.weight) : 0.0f;
    const int total = record.labels != nullptr ? count_valid(record, labelled) : 0;
    if (tile == 0 && thread == 0 && record.valid != nullptr) *fx_global(record.valid) = total;
    const bool valid = label >= 0 && label < classes;

    float peak = -FX_INF;
    int best = NONE;
    if (own_logit > peak || (own_logit == peak && lane < classes)) {
        peak = own_logit;
        best = lane;
    }
#pragma unroll 1
    for (int i = lane + lanes; i < classes; i += lanes) {
        const float x = logits[i];
        if (x > peak || (x == peak && i < best)) {
            peak = x;
            best = i;
        }
    }
#pragma unroll 1
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
        const float other_peak = __shfl_xor_sync(0xffffffffu, peak, offset);
        const int other_best = __shfl_xor_sync(0xffffffffu, best, offset);
        if (other_peak > peak || (other_peak == peak && other_best < best)) {
            peak = other_peak;
            best = other_best;
        }
    }
    // The label's own share is kept apart: 1 - p and -log p of a row that is nearly right are made of the rest alone,
    // and would vanish in the rounding of the whole.
    const float own_exp = expf(own_logit - peak);
    float rest = lane == label || lane >= classes ? 0.0f : own_exp;
#pragma unroll 1
    for (int i = lane + lanes; i < classes; i += lanes) rest += i == label ? 0.0f : expf(logits[i] - peak);
    rest = lanes_sum(rest, lanes);
    const float distance = valid ? logits[label] - peak : 0.0f;
    const float sum = valid ? rest + expf(distance) : rest;
    const float inverse = fx_divide(1.0f, sum);

    if (record.wire != nullptr) {  // two classes, in the first two lanes
        float* out = fx_global(record.wire) + static_cast<long long>(row) * record.wire_stride;
        const float other = __shfl_xor_sync(0xffffffffu, own_exp, 1);
        if (live && lane == 0) *out = (other - own_exp) * inverse;
    }
    if (const bool asked = record.probabilities != nullptr, trained = record.dlogits != nullptr; asked || trained) {
        float* probabilities = record.probabilities + static_cast<long long>(row) * record.ld_probabilities;
        float* dlogits = record.dlogits + static_cast<long long>(row) * record.ld_dlogits;
        const float scale = fx_divide(weight, static_cast<float>(total > 1 ? total : 1));
        const bool flows = valid && weight != 0.0f;
#pragma unroll 1
        for (int i = lane; i < classes; i += lanes) {
            const float p = (i == lane ? own_exp : expf(logits[i] - peak)) * inverse;
            if (asked) fx_global(probabilities)[i] = p;
            if (trained) fx_global(dlogits)[i] = flows ? scale * (i == label ? -(rest * inverse) : p) : 0.0f;
        }
    }

    if (record.loss_partials == nullptr && record.correct_partials == nullptr) return;
    const bool counts = valid && lane == 0;
    double loss = 0.0;
    if (counts) loss = distance == 0.0f ? log1pf(rest) : logf(sum) - distance;
    loss = fx_warp_sum(loss);
    const unsigned right = __ballot_sync(0xffffffffu, counts && label == (best == NONE ? 0 : best));
    if ((thread & 31) == 0) {
        losses[thread >> 5] = loss;
        hits[thread >> 5] = __popc(right);
    }
    __syncthreads();
    if (thread != 0) return;
    int correct = hits[0];
    loss = losses[0];
#pragma unroll
    for (int warp = 1; warp < 8; ++warp) {
        loss += losses[warp];
        correct += hits[warp];
    }
    if (record.loss_partials != nullptr) fx_global(record.loss_partials)[tile] = loss;
    if (record.correct_partials != nullptr) fx_global(record.correct_partials)[tile] = correct;
}
