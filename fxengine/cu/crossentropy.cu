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
// has 128, 32 or 8 rows. The row is read three times rather than kept: any number of classes fits, and the second and
// third reads hit the first-level cache.
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
    long long ld_logits;    // floats between rows
    long long ld_dlogits;
    long long ld_probabilities;
    long long wire_stride;
    int rows;
    int classes;
    int lanes;              // lanes per row: 2, 8 or 32
};

// Every block counts all labels for itself: that is cheaper than a launch that only counts, and the order of a sum of
// whole numbers does not matter.
__device__ __forceinline__ int count_valid(const CrossEntropy& record, int* scratch) {
    int valid = 0;
    for (int i = static_cast<int>(threadIdx.x); i < record.rows; i += 256) {
        const int label = record.labels[i];
        valid += label >= 0 && label < record.classes;
    }
    return fx_block_sum(valid, scratch);
}

// The outputs' fields are read where they are used: held in registers from the start they would be spilled.
template <int LANES>
__device__ __forceinline__ void crossentropy_rows(const CrossEntropy& record, int tile, int total, double* losses, int* hits) {
    constexpr int none = 0x7fffffff;
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const long long row = static_cast<long long>(tile) * (256 / LANES) + static_cast<int>(threadIdx.x) / LANES;
    const bool live = row < record.rows;  // lanes past the last row still take part in the shuffles
    const int classes = live ? record.classes : 0;
    const float* logits = record.logits + (live ? row * record.ld_logits : 0);
    const int label = live && record.labels != nullptr ? record.labels[row] : -1;
    const bool valid = label >= 0 && label < classes;

    float peak = -FX_INF;
    int best = none;
    for (int i = lane; i < classes; i += LANES) {
        const float x = logits[i];
        if (x > peak || (x == peak && i < best)) {
            peak = x;
            best = i;
        }
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) {
        const float other_peak = __shfl_xor_sync(0xffffffffu, peak, offset);
        const int other_best = __shfl_xor_sync(0xffffffffu, best, offset);
        if (other_peak > peak || (other_peak == peak && other_best < best)) {
            peak = other_peak;
            best = other_best;
        }
    }
    // The label's own share is kept apart: 1 - p and -log p of a row that is nearly right are made of the rest alone,
    // and would vanish in the rounding of the whole.
    float rest = 0.0f;
    for (int i = lane; i < classes; i += LANES) rest += i == label ? 0.0f : expf(logits[i] - peak);
    rest = fx_lanes_sum<LANES>(rest);
    const float distance = valid ? logits[label] - peak : 0.0f;
    const float own = valid ? expf(distance) : 0.0f;
    const float sum = rest + own;
    const float inverse = fx_divide(1.0f, sum);

    const bool counts = valid && lane == 0;
    if (double* out = record.loss_partials; out != nullptr) {
        const float loss = distance == 0.0f ? log1pf(rest) : logf(sum) - distance;
        const double sum_of_tile = fx_block_sum(counts ? static_cast<double>(loss) : 0.0, losses);
        if (threadIdx.x == 0) out[tile] = sum_of_tile;
    }
    if (int* out = record.correct_partials; out != nullptr) {
        const int right = fx_block_sum(counts && label == (best == none ? 0 : best) ? 1 : 0, hits);
        if (threadIdx.x == 0) out[tile] = right;
    }

    if (float* out = record.probabilities; out != nullptr) {
        out += row * record.ld_probabilities;
        for (int i = lane; i < classes; i += LANES) out[i] = expf(logits[i] - peak) * inverse;
    }
    if (float* out = record.wire; out != nullptr && live && lane == 0) {
        out[row * record.wire_stride] = (expf(logits[1] - peak) - expf(logits[0] - peak)) * inverse;
    }
    if (float* out = record.dlogits; out != nullptr) {
        out += row * record.ld_dlogits;
        const float weight = *record.weight;
        const float scale = fx_divide(weight, static_cast<float>(total > 1 ? total : 1));
        const bool flows = valid && weight != 0.0f;
        for (int i = lane; i < classes; i += LANES) {
            const float slope = i == label ? -(rest * inverse) : expf(logits[i] - peak) * inverse;
            out[i] = flows ? scale * slope : 0.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_crossentropy(const CrossEntropy* table, int count) {
    __shared__ double losses[8];
    __shared__ int hits[8];
    __shared__ int labelled[8];
    __shared__ CrossEntropy place;
    int tile;
    const CrossEntropy& record = fx_record(table, count, tile, place);
    const int lanes = record.lanes;
    fx_wait();
    fx_trigger();
    const int valid = record.labels != nullptr ? count_valid(record, labelled) : 0;
    if (tile == 0 && threadIdx.x == 0 && record.valid != nullptr) *record.valid = valid;
    if (lanes == 2) {
        crossentropy_rows<2>(record, tile, valid, losses, hits);
    } else if (lanes == 8) {
        crossentropy_rows<8>(record, tile, valid, losses, hits);
    } else {
        crossentropy_rows<32>(record, tile, valid, losses, hits);
    }
}
