// The wire gate and the IQN readiness: device-owned state, kept in float32 slots and worked on in double.
//
// fx_gate: one block per record; all rows are counted, then one thread updates the state.
//   valid = rows whose label is 0 or 1;  acc = share of them with argmax(logits) = label
//   dis   = share of all rows with (2 argmax(logits) - 1) (argmax(q) - 1) < 0; 0 without q
//   seen = 0 and nothing valid: nothing changes. Otherwise
//   first valid step   short = long = acc, var = acc (1 - acc) / valid, disagree = dis, seen = 1
//   later valid steps  short += beta_short (acc - short);  dev = acc - long;  long += beta_long dev
//                      var += beta_long (dev^2 - var);     disagree += disagree_beta (dis - disagree)
//   open = 1 if short > 0.5 + open_margin;  open = 0 if short < 0.5 + close_margin;  else unchanged
//   raw = open sigmoid(gain (short - 0.5 - margin) / sqrt(var + 1e-4)) (1 - disagree)
//   alpha += alpha_beta (raw - alpha), limited to [0, 1]; not finite: 0
//   argmax: lowest index on ties, NaN never wins, all NaN gives 0.
//
// fx_readiness: one thread; a loss that is not finite changes nothing.
//   seen < warmup: ref += (loss - ref) / (seen + 1), ema = ref, raw = 0
//   after:         ema += beta (loss - ema), ref = max(ref, ema), raw = 1 - ema / ref limited to [0, 1], 0 if ref <= 0
//   seen += 1;  readiness += beta (raw - readiness), limited to [0, 1]
//
// fx_wire_backward: dlogits[b, 1] += g, dlogits[b, 0] -= g, g = alpha dwire[b] 2 p_up p_down: what arrives at
//   wire = p_up - p_down = softmax(logits)[1] - softmax(logits)[0], gated. With alpha = 0 nothing is touched, whatever
//   dwire holds. A tile is 256 rows.
#include "fx.cuh"

struct Gate {
    int first_tile;
    int tiles;
    const float* logits;      // [rows, 2], next-bar logits: down, up
    const int* labels;        // [rows]
    const float* q;           // [rows, 3], direction q at s: short, flat, long; or null
    float* state[7];          // see GateValue
    const float* signals[8];  // see GateValue
    int ld_logits;            // floats between rows
    int ld_q;
    int rows;
};

struct Readiness {
    int first_tile;
    int tiles;
    const float* loss;    // one float
    const float* beta;    // signal
    const float* warmup;  // signal
    float* seen;          // state from here on
    float* ema;
    float* ref;
    float* readiness;
};

struct WireBackward {
    int first_tile;
    int tiles;
    const float* logits;  // [rows, 2], next-bar logits: down, up
    const float* dwire;   // [rows], dwire_stride apart
    const float* alpha;   // one float
    float* dlogits;       // [rows, 2], accumulated into
    int ld_logits;        // floats between rows
    int ld_dlogits;
    int dwire_stride;
    int rows;
};

// Places of the state, then of the signals, in the order of the record's pointers.
enum GateValue {
    GATE_SHORT,
    GATE_LONG,
    GATE_VAR,
    GATE_DISAGREE,
    GATE_OPEN,
    GATE_SEEN,
    GATE_ALPHA,
    GATE_STATES,
    GATE_BETA_SHORT = GATE_STATES,
    GATE_BETA_LONG,
    GATE_DISAGREE_BETA,
    GATE_OPEN_MARGIN,
    GATE_CLOSE_MARGIN,
    GATE_GAIN,
    GATE_MARGIN,
    GATE_ALPHA_BETA,
    GATE_VALUES,
};

// Whether x takes the maximum from an earlier entry.
__device__ __forceinline__ bool gate_wins(float x, float top) { return x > top || (top != top && x == x); }

__device__ __forceinline__ double gate_unit(double x) { return x < 0.0 ? 0.0 : x > 1.0 ? 1.0 : x; }

// New state in place of the old. `s`: GATE_VALUES numbers.
__device__ __forceinline__ void gate_update(double* s, int valid, int right, double dis) {
    if (valid > 0) {
        const double acc = static_cast<double>(right) / valid;
        if (s[GATE_SEEN] == 0.0) {
            s[GATE_SHORT] = acc;
            s[GATE_LONG] = acc;
            s[GATE_VAR] = acc * (1.0 - acc) / valid;
            s[GATE_DISAGREE] = dis;
            s[GATE_SEEN] = 1.0;
        } else {
            const double dev = acc - s[GATE_LONG];
            s[GATE_SHORT] += s[GATE_BETA_SHORT] * (acc - s[GATE_SHORT]);
            s[GATE_LONG] += s[GATE_BETA_LONG] * dev;
            s[GATE_VAR] += s[GATE_BETA_LONG] * (dev * dev - s[GATE_VAR]);
            s[GATE_DISAGREE] += s[GATE_DISAGREE_BETA] * (dis - s[GATE_DISAGREE]);
        }
    }
    const double lead = s[GATE_SHORT] - 0.5;
    if (s[GATE_SHORT] > 0.5 + s[GATE_OPEN_MARGIN]) s[GATE_OPEN] = 1.0;
    if (s[GATE_SHORT] < 0.5 + s[GATE_CLOSE_MARGIN]) s[GATE_OPEN] = 0.0;
    const double score = s[GATE_GAIN] * (lead - s[GATE_MARGIN]) / sqrt(s[GATE_VAR] + 1e-4);
    const double raw = s[GATE_OPEN] / (1.0 + exp(-score)) * (1.0 - s[GATE_DISAGREE]);
    const double alpha = s[GATE_ALPHA] + s[GATE_ALPHA_BETA] * (raw - s[GATE_ALPHA]);
    s[GATE_ALPHA] = fx_finite(alpha) ? gate_unit(alpha) : 0.0;
}

extern "C" __global__ void __launch_bounds__(256) fx_gate(const Gate* table, int count) {
    __shared__ double values[GATE_VALUES];
    __shared__ int counts[3][8];
    __shared__ Gate place;
    int tile;
    const Gate& record = fx_record(table, count, tile, place);
    const int thread = static_cast<int>(threadIdx.x);
    const int rows = record.rows;
    const float* source = nullptr;
    if (thread < GATE_STATES) {
        source = record.state[thread];
    } else if (thread < GATE_VALUES) {
        source = record.signals[thread - GATE_STATES];
    }
    fx_wait();
    fx_trigger();
    if (source != nullptr) values[thread] = *source;
    int valid = 0, right = 0, against = 0;
#pragma unroll 1
    for (int first = thread; first < rows; first += 2 * 256) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // without branches, so that the loads of both rows are under way together
            const bool there = first + 256 * i < rows;
            const long long b = there ? first + 256 * i : first;
            const float* logits = record.logits + b * record.ld_logits;
            const int guess = gate_wins(logits[1], logits[0]) ? 1 : 0;
            const int label = there ? record.labels[b] : -1;
            valid += label == 0 || label == 1;
            right += label == guess;
            if (record.q == nullptr) continue;
            const float* q = record.q + b * record.ld_q;
            const bool flat = gate_wins(q[1], q[0]), high = gate_wins(q[2], flat ? q[1] : q[0]);
            const int side = high ? 1 : flat ? 0 : -1;
            against += there && (2 * guess - 1) * side < 0;
        }
    }
    // Whole numbers: exact in any order.
    valid = __reduce_add_sync(0xffffffffu, valid);
    right = __reduce_add_sync(0xffffffffu, right);
    against = __reduce_add_sync(0xffffffffu, against);
    if ((thread & 31) == 0) {
        counts[0][thread >> 5] = valid;
        counts[1][thread >> 5] = right;
        counts[2][thread >> 5] = against;
    }
    __syncthreads();
    if (thread != 0) return;
    for (int warp = 1; warp < 8; ++warp) {
        valid += counts[0][warp];
        right += counts[1][warp];
        against += counts[2][warp];
    }
    if (valid == 0 && values[GATE_SEEN] == 0.0) return;
    gate_update(values, valid, right, static_cast<double>(against) / rows);
    for (int i = 0; i < GATE_STATES; ++i) *record.state[i] = static_cast<float>(values[i]);
}

extern "C" __global__ void __launch_bounds__(256) fx_readiness(const Readiness* table, int count) {
    __shared__ Readiness place;
    int tile;
    const Readiness& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    if (threadIdx.x != 0) return;
    const double loss = *record.loss, beta = *record.beta, warmup = *record.warmup;
    const double seen = *record.seen, readiness = *record.readiness;
    double ema = *record.ema, ref = *record.ref, raw = 0.0;
    if (!fx_finite(loss)) return;
    if (seen < warmup) {
        ref += (loss - ref) / (seen + 1.0);
        ema = ref;
    } else {
        ema += beta * (loss - ema);
        ref = ema > ref ? ema : ref;
        raw = ref > 0.0 ? gate_unit(1.0 - ema / ref) : 0.0;
    }
    *record.seen = static_cast<float>(seen + 1.0);
    *record.ema = static_cast<float>(ema);
    *record.ref = static_cast<float>(ref);
    *record.readiness = static_cast<float>(gate_unit(readiness + beta * (raw - readiness)));
}

extern "C" __global__ void __launch_bounds__(256) fx_wire_backward(const WireBackward* table, int count) {
    int tile;
    const WireBackward record = fx_record(table, count, tile);
    const long long row = static_cast<long long>(tile) * 256 + threadIdx.x;
    fx_wait();
    fx_trigger();
    if (row >= record.rows) return;
    const float alpha = *record.alpha;
    if (alpha == 0.0f) return;
    const float* logits = record.logits + row * record.ld_logits;
    float* dlogits = record.dlogits + row * record.ld_dlogits;
    // p_up p_down from the smaller of the two: no difference of nearly equal numbers where the head is sure.
    const float odds = expf(-fabsf(logits[1] - logits[0]));
    const float both = fx_divide(odds, (1.0f + odds) * (1.0f + odds));
    const float g = alpha * record.dwire[row * record.dwire_stride] * (2.0f * both);
    dlogits[0] -= g;
    dlogits[1] += g;
}
