// What the losses beside the Q heads take from the batch: expectile regression of the state values, one-hot actions.
//
// fx_expectile: u[b] = mean_d q[b, offset_d + action_d] - v[b], tilt = |tau - [u < 0]|, tau read on the device.
//   dv[b]          = -2 tilt u / rows                                  (=, never +=; nothing flows into q)
//   partials[tile] = sum over the tile of tilt u^2; fx_sum divides by rows
// An action outside [0, n_d) makes its row NaN. A thread works on a row; a tile has 256.
//
// fx_onehots: out[b, :] = the one-hot codes of all D actions side by side; an action outside [0, n_d) has none.
// A tile is 1024 elements.
//
// Every output may be null.
#include "fx.cuh"

struct Expectile {
    int first_tile;
    int tiles;
    const float* q;      // [rows, all actions]
    const int* actions;  // [rows, branches]
    const float* v;      // [rows], v_stride apart
    const float* tau;    // one float
    float* dv;           // [rows], dv_stride apart, or null
    double* partials;    // [tiles] or null
    long long ld_q;      // elements between rows
    long long ld_actions;
    long long v_stride;
    long long dv_stride;
    int offset[8];       // first column of each branch in q
    int sizes[8];        // n_d
    int branches;        // D, 1 to 8
    int rows;
};

struct Onehots {
    int first_tile;
    int tiles;
    const int* actions;  // [rows, branches]
    float* out;          // [rows, all actions]
    long long ld_actions;
    long long ld_out;
    int offset[8];       // first column of each branch
    int branches;        // D, 1 to 8
    int rows;
    int cols;            // sum of n_d
};

extern "C" __global__ void __launch_bounds__(256) fx_expectile(const Expectile* table, int count) {
    __shared__ double scratch[8];
    __shared__ Expectile place;
    int tile;
    const Expectile& record = fx_record(table, count, tile, place);
    const int rows = record.rows, branches = record.branches;
    const long long row = static_cast<long long>(tile) * 256 + threadIdx.x;
    fx_wait();
    fx_trigger();
    double loss = 0.0;
    if (row < rows) {
        float q = 0.0f;
        for (int d = 0; d < branches; ++d) {
            const int action = record.actions[row * record.ld_actions + d];
            const bool known = action >= 0 && action < record.sizes[d];
            q += known ? record.q[row * record.ld_q + record.offset[d] + action] : FX_NAN;
        }
        const float u = fx_divide(q, static_cast<float>(branches)) - record.v[row * record.v_stride];
        const float slope = fabsf(*record.tau - (u < 0.0f ? 1.0f : 0.0f)) * u;
        loss = static_cast<double>(slope) * u;
        if (record.dv != nullptr) record.dv[row * record.dv_stride] = fx_divide(-2.0f * slope, static_cast<float>(rows));
    }
    if (record.partials == nullptr) return;
    loss = fx_block_sum(loss, scratch);
    if (threadIdx.x == 0) record.partials[tile] = loss;
}

extern "C" __global__ void __launch_bounds__(256) fx_onehots(const Onehots* table, int count) {
    __shared__ Onehots place;
    int tile;
    const Onehots& record = fx_record(table, count, tile, place);
    const int cols = record.cols, branches = record.branches;
    const long long end = static_cast<long long>(record.rows) * cols;
    fx_wait();
    fx_trigger();
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const long long i = static_cast<long long>(tile) * 1024 + part * 256 + threadIdx.x;
        if (i >= end) return;
        const long long row = i / cols;
        const int column = static_cast<int>(i - row * cols);
        int d = 0;
        while (d + 1 < branches && column >= record.offset[d + 1]) ++d;
        const int action = record.actions[row * record.ld_actions + d];
        record.out[row * record.ld_out + column] = action == column - record.offset[d] ? 1.0f : 0.0f;
    }
}
