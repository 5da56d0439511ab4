// From values to actions, and what acting with quantiles needs besides: fractions, and values from quantiles.
//
// Random numbers are Philox4x32-10, key = (seed low, seed high) with seed = counters[3], counter = (item, stream, count
// low, count high) with count = counters[0]: a number depends on (seed, count, stream, item) alone.
//
// fx_policy: an action for every row and branch, from q [rows, sum of sizes], branches side by side. Overwrites.
//   item = row * branches + branch, (x, y, z, w) = its random bits, u = (x >> 8) * 2^-24 in [0, 1)
//   greedy    : argmax of the branch's values: the lowest index on ties, NaN never wins, all NaN gives 0
//   epsilon   : u < epsilon: the high 64 bits of (z:y) * size, uniform over the branch's actions; else greedy
//   Boltzmann : with weights exp((q - largest q) / temperature), the first action at which their running sum exceeds
//               u * (sum of all). The largest value weighs 1 whatever the temperature, NaN weighs 0, all NaN gives 0.
//   An item is a thread; a tile is 256 items.
//   report, report_q: the actions and the values once more, for the host: 64-bit words in mapped memory, the number in
//   the low half, a tag in the high half. Words are written whole, so a reader that finds its tag in all of them has all
//   of them, without a fence (step.cu does the same).
//
// fx_fractions: out[e] = a random quantile fraction, distorted by risk in [-1, 1]. Overwrites.
//   out[4 i + k] = word k of item i: u in [0, 1), then
//   risk = 0: u.   risk < 0: u * (1 + risk), so [0, 1 + risk); at -1 all are 0.
//   risk > 0: risk + u * (1 - risk), so [risk, 1), rounded down where it would round to 1; at 1 all are 1.
//   A tile is 1024 values, 4 to a thread.
//
// fx_quantile_mean: q[b, a] = mean over i < quantiles of theta[b * quantiles + i, a], added in the order of i.
// Overwrites. A tile is 256 results.
#include "policy.cuh"

struct Policy {
    int first_tile;
    int tiles;
    const float* q;                       // [rows, sum of sizes]
    int* actions;                         // [rows, branches]
    const unsigned long long* counters;   // 4 counters, see step.cu; null for greedy
    const float* scalar;                  // epsilon or temperature; null for greedy
    const unsigned long long* tag;        // its low half is the tag of the reported words; null without report
    unsigned long long* report;           // mapped: [rows * branches] words, or null
    unsigned long long* report_q;         // mapped: [rows * sum of sizes] words, or null
    long long ld_q;                       // elements between rows
    long long ld_actions;
    int sizes[16];                        // actions of each branch
    int offsets[16];                      // first column of each branch
    int items;                            // rows * branches
    int branches;                         // at most 16
    int columns;                          // sum of sizes
    int kind;                             // PolicyKind
    unsigned stream;                      // random stream
};

struct Fractions {
    int first_tile;
    int tiles;
    float* out;                           // [n]
    const unsigned long long* counters;   // 4 counters
    const float* risk;                    // one float
    long long n;                          // at most 2^34
    unsigned stream;                      // random stream
};

struct QuantileMean {
    int first_tile;
    int tiles;
    const float* theta;                   // [rows * quantiles, columns]
    float* q;                             // [rows, columns]
    long long ld_theta;                   // elements between rows
    long long ld_q;
    int results;                          // rows * columns
    int quantiles;
    int columns;
};

extern "C" __global__ void __launch_bounds__(256, 2) fx_policy(const Policy* table, int count) {
    __shared__ Policy place;
    int tile;
    const Policy& record = fx_record(table, count, tile, place);
    const int item = tile * 256 + static_cast<int>(threadIdx.x);
    const int branch = item % record.branches;
    const long long row = item / record.branches;
    fx_wait();
    fx_trigger();
    if (item >= record.items) return;
    const int size = record.sizes[branch], offset = record.offsets[branch];
    const float* q = record.q + row * record.ld_q + offset;
    const int action = record.kind == POLICY_GREEDY
                           ? policy_greedy(q, size)
                           : policy_drawn(record.kind, q, size, *record.scalar,
                                          fx_random_bits(record.counters[3], record.counters[0], record.stream,
                                                      static_cast<unsigned>(item)));
    record.actions[row * record.ld_actions + branch] = action;
    if (record.report == nullptr) return;
    const u64 tag = *record.tag << 32;
    fx_store_through(record.report + item, tag | static_cast<unsigned>(action));
    if (record.report_q == nullptr) return;
    u64* words = record.report_q + row * record.columns + offset;
    for (int a = 0; a < size; ++a) fx_store_through(words + a, tag | __float_as_uint(q[a]));
}

__device__ __forceinline__ float fraction(unsigned bits, float low, float width) {
    const float value = low + fx_random_uniform(bits) * width;
    return width > 0.0f ? fminf(value, 0.99999994f) : value;
}

extern "C" __global__ void __launch_bounds__(256) fx_fractions(const Fractions* table, int count) {
    int tile;
    const Fractions record = fx_record(table, count, tile);
    const long long item = static_cast<long long>(tile) * 256 + threadIdx.x;
    const long long left = record.n - 4 * item;
    fx_wait();
    fx_trigger();
    if (left <= 0) return;
    const float risk = *record.risk;
    const float low = risk > 0.0f ? risk : 0.0f;
    const float width = risk > 0.0f ? 1.0f - risk : 1.0f + risk;
    const FxPhilox bits =
        fx_random_bits(record.counters[3], record.counters[0], record.stream, static_cast<unsigned>(item));
    float* out = record.out + 4 * item;
    out[0] = fraction(bits.x, low, width);
    if (left > 1) out[1] = fraction(bits.y, low, width);
    if (left > 2) out[2] = fraction(bits.z, low, width);
    if (left > 3) out[3] = fraction(bits.w, low, width);
}

extern "C" __global__ void __launch_bounds__(256) fx_quantile_mean(const QuantileMean* table, int count) {
    int tile;
    const QuantileMean record = fx_record(table, count, tile);
    const int result = tile * 256 + static_cast<int>(threadIdx.x);
    const int column = result % record.columns;
    const long long row = result / record.columns;
    fx_wait();
    fx_trigger();
    if (result >= record.results) return;
    const float* theta = record.theta + row * record.quantiles * record.ld_theta + column;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < record.quantiles; ++i) sum += theta[i * record.ld_theta];
    record.q[row * record.ld_q + column] = fx_divide(sum, static_cast<float>(record.quantiles));
}
