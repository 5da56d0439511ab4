// Squared errors on the rows of a batch: the decoders, the ensemble heads, the curiosity model.
//
// fx_count_live: live = number of rows with discount > 0. One block per record.
//
// fx_squares: y [rows, cols] against target [rows, cols]; with a discount only the live rows (discount > 0) count, and
// their number stands below the fraction, without one all rows do.
//   dy[b, :]       = (y - target) / (cols max(1, live))             (=, never +=; exact 0 in a dead row)
//   partials[tile] = sum over the tile's live rows and their columns of (y - target)^2; fx_sum divides
//   shaped[b]      = reward[b] + bonus live_b min(mean_cols (y - target)^2 / 2, cap)       (bonus 0: the bare reward)
// A warp works on a row; a tile has 8 rows. A dead row is not read.
//
// fx_ensemble: y [rows, heads, actions]; err = y[b, e, action_b] - (reward + discount value[b, best_b])
//   dy[b, e, a]    = weight[b] err / (rows heads) where a = action_b, else 0                (=, never +=)
//   partials[tile] = sum over the tile of weight[b] err^2 / 2; fx_sum divides by rows heads
// A discount of 0 gives an exact 0 for the second term, whatever value holds. An action outside [0, actions) makes its
// row NaN. An infinite reward gives infinite gradients, so that the optimizer's guard sees it. A tile has tile_rows
// rows; a thread works on every 256th element of a tile.
//
// Every output may be null.
#include "fx.cuh"

struct CountLive {
    int first_tile;
    int tiles;
    const float* discount;  // [n]
    int* live;              // number of live rows
    int n;
};

struct Squares {
    int first_tile;
    int tiles;
    const float* y;         // [rows, cols]
    const float* target;    // [rows, cols]
    const float* discount;  // [rows] or null: every row is live
    const int* live;        // number of live rows; needed with a discount
    const float* reward;    // [rows]; needed by shaped
    const float* bonus;     // one float; needed by shaped
    const float* cap;       // one float; needed by shaped
    float* dy;              // [rows, cols] or null
    float* shaped;          // [rows] or null
    double* partials;       // [tiles] or null
    long long ld_y;         // elements between rows
    long long ld_target;
    long long ld_dy;
    int rows;
    int cols;
};

struct Ensemble {
    int first_tile;
    int tiles;
    const float* y;         // [rows, heads * actions]
    const int* action;      // [rows], action_stride apart
    const int* best;        // [rows], best_stride apart: greedy actions at s'
    const float* value;     // [rows, actions], of the target networks at s'
    const float* reward;    // [rows]
    const float* discount;  // [rows]
    const float* weight;    // [rows], importance weights
    float* dy;              // [rows, heads * actions] or null
    double* partials;       // [tiles] or null
    long long ld_y;         // elements between rows
    long long ld_value;
    long long ld_dy;
    long long action_stride;
    long long best_stride;
    int rows;
    int heads;
    int actions;
    int tile_rows;
};

extern "C" __global__ void __launch_bounds__(256) fx_count_live(const CountLive* table, int count) {
    __shared__ int scratch[8];
    int tile;
    const CountLive record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    int live = 0;
    for (int i = static_cast<int>(threadIdx.x); i < record.n; i += 256) live += record.discount[i] > 0.0f;
    live = fx_block_sum(live, scratch);
    if (threadIdx.x == 0) *record.live = live;
}

// The smaller of two; NaN if either is.
__device__ __forceinline__ float squares_min(float a, float b) { return a <= b ? a : a > b ? b : a + b; }

extern "C" __global__ void __launch_bounds__(256) fx_squares(const Squares* table, int count) {
    __shared__ double scratch[8];
    int tile;
    const Squares record = fx_record(table, count, tile);
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const long long row = static_cast<long long>(tile) * 8 + (threadIdx.x >> 5);
    const bool there = row < record.rows;
    fx_wait();
    fx_trigger();
    const bool live = there && (record.discount == nullptr || record.discount[row] > 0.0f);
    const int total = record.discount == nullptr ? record.rows : *record.live;  // 0 only where no row uses it
    const float scale = fx_divide(1.0f, static_cast<float>(record.cols) * static_cast<float>(total));
    float* dy = there && record.dy != nullptr ? record.dy + row * record.ld_dy : nullptr;
    float sum = 0.0f;
    if (live) {
        const float* y = record.y + row * record.ld_y;
        const float* target = record.target + row * record.ld_target;
        for (int i = lane; i < record.cols; i += 32) {
            const float gap = y[i] - target[i];
            sum += gap * gap;
            if (dy != nullptr) dy[i] = gap * scale;
        }
    } else if (dy != nullptr) {
        for (int i = lane; i < record.cols; i += 32) dy[i] = 0.0f;
    }
    sum = fx_warp_sum(sum);
    if (record.shaped != nullptr && there && lane == 0) {
        const float half_mean = 0.5f * fx_divide(sum, static_cast<float>(record.cols));
        const float bonus = live ? *record.bonus : 0.0f;
        record.shaped[row] = record.reward[row] + fx_scaled(bonus, squares_min(half_mean, *record.cap));
    }
    if (record.partials == nullptr) return;
    const double squares = fx_block_sum(lane == 0 ? static_cast<double>(sum) : 0.0, scratch);
    if (threadIdx.x == 0) record.partials[tile] = squares;
}

extern "C" __global__ void __launch_bounds__(256) fx_ensemble(const Ensemble* table, int count) {
    __shared__ double scratch[8];
    int tile;
    const Ensemble record = fx_record(table, count, tile);
    const int cols = record.heads * record.actions;
    const long long first = static_cast<long long>(tile) * record.tile_rows;
    const int rows = static_cast<int>(record.rows - first < record.tile_rows ? record.rows - first : record.tile_rows);
    const float share = fx_divide(1.0f, static_cast<float>(record.rows) * static_cast<float>(record.heads));
    fx_wait();
    fx_trigger();
    double loss = 0.0;
    for (int i = static_cast<int>(threadIdx.x); i < rows * cols; i += 256) {
        const int local = i / cols, column = i - local * cols;
        const long long row = first + local;
        const int action = record.action[row * record.action_stride];
        const bool known = action >= 0 && action < record.actions;
        float gradient = 0.0f;
        if (column % record.actions == (known ? action : 0)) {
            const float value = record.value[row * record.ld_value + record.best[row * record.best_stride]];
            const float target = record.reward[row] + fx_scaled(record.discount[row], value);
            const float y = known ? record.y[row * record.ld_y + column] : FX_NAN;
            const float gap = y - target, weighted = record.weight[row] * gap;
            gradient = weighted * share;
            loss += 0.5 * static_cast<double>(weighted) * gap;
        }
        if (record.dy != nullptr) record.dy[row * record.ld_dy + column] = gradient;
    }
    if (record.partials == nullptr) return;
    loss = fx_block_sum(loss, scratch);
    if (threadIdx.x == 0) record.partials[tile] = loss;
}
