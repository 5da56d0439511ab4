// fx_sum: out = sum of n partial results / (divisor * max(1, *denominator)). One block per record.
//   The partials are doubles (losses) or ints (counts). Fixed order: thread i adds the partials i, i + 256, ... in turn,
//   then one block sum. Overwrites out.
#include "fx.cuh"

struct Sum {
    int first_tile;
    int tiles;
    const double* values;    // [n], or null when the partials are counts
    const int* counts;       // [n], or null when the partials are values
    const int* denominator;  // null = 1
    float* out;              // one float
    double divisor;          // constant part of the denominator, such as a batch size
    int n;
};

extern "C" __global__ void __launch_bounds__(256) fx_sum(const Sum* table, int count) {
    __shared__ double scratch[8];
    int tile;
    const Sum record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    double sum = 0.0;
    if (record.values != nullptr) {
        for (int i = static_cast<int>(threadIdx.x); i < record.n; i += 256) sum += record.values[i];
    } else {  // whole numbers below 2^53: exact in any order
        for (int i = static_cast<int>(threadIdx.x); i < record.n; i += 256) sum += record.counts[i];
    }
    sum = fx_block_sum(sum, scratch);
    if (threadIdx.x == 0) {
        const int denominator = record.denominator != nullptr ? *record.denominator : 1;
        *record.out = static_cast<float>(sum / (record.divisor * (denominator > 1 ? denominator : 1)));
    }
}
