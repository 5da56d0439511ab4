// fx_end: the last node of a replay. One block.
//
// It finishes the sums that are reported (losses, shares of right rows), writes one row of the telemetry ring (mapped, pinned), and
// advances the counters.
//   ring row   : [u64 sequence][u64 t][u64 skipped][u64 group mask][n floats][mirrored floats], row_words words from row to row
//   sums       : values[targets[i]] = sum of lengths[i] partial results / (divisors[i] * max(1, *denominators[i])), in
//                fixed order: a warp per sum, lane i adds the partials i, i + 32, ... in turn, then one warp sum
//   row index  : (sequence - 1) % rows; sequence = replays finished, this one included
//   t, skipped : Adam steps done and steps skipped, after this replay; group mask: bit g = norm of group g not finite
//   head       : sequence of the newest complete row
//   A row's sequence is 0 while it is being written. A reader compares the sequence before and after its copy with
//   the one that it expects: a mismatch is a torn row.
//
// counters: u64 [0] replays finished, [1] t, [2] skipped, [3] seed.
#include "fx.cuh"

struct End {
    int first_tile;
    int tiles;
    float* values;                        // telemetry values, n floats
    unsigned long long* counters;         // 4 counters
    const unsigned* skip;                 // 1 = the optimizer skipped; null = this program has no optimizer
    const unsigned long long* group_mask; // groups whose norm is not finite, or null
    unsigned long long* ring;             // mapped telemetry ring
    unsigned long long* head;             // mapped: sequence of the newest complete row
    const double* values_of[32];          // partial results of each sum, null where they are counts
    const int* counts_of[32];             // partial counts, null where they are values
    const int* denominators[32];          // null = 1
    double divisors[32];                  // constant part of the denominator
    int lengths[32];                      // number of partial results
    int targets[32];                      // place of the sum among the values
    const float* signals;                 // snapshot, or null
    const int* slots;                     // slots of the snapshot that are mirrored, or null
    int sums;                             // number of sums, at most 32
    int mirrored;                         // number of mirrored slots
    int n;                                // number of values
    int row_words;                        // u64 words between rows
    int rows;                             // length of the ring
};

// One warp.
__device__ __forceinline__ float finish_sum(const End& record, int i) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    double sum = 0.0;
    if (const double* values = record.values_of[i]; values != nullptr) {
        for (int k = lane; k < record.lengths[i]; k += 32) sum += values[k];
    } else {  // whole numbers below 2^53: exact in any order
        for (int k = lane; k < record.lengths[i]; k += 32) sum += record.counts_of[i][k];
    }
    sum = fx_warp_sum(sum);
    const int denominator = record.denominators[i] != nullptr ? *record.denominators[i] : 1;
    return static_cast<float>(sum / (record.divisors[i] * (denominator > 1 ? denominator : 1)));
}

extern "C" __global__ void __launch_bounds__(256) fx_end(const End* table, int count) {
    int tile;
    const End& record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const u64 finished = record.counters[0];
    u64* row = record.ring + (finished % static_cast<u64>(record.rows)) * static_cast<u64>(record.row_words);
    float* values = reinterpret_cast<float*>(row + 4);
    for (int i = static_cast<int>(threadIdx.x >> 5); i < record.sums; i += 8) {
        const float sum = finish_sum(record, i);
        if ((threadIdx.x & 31u) == 0) record.values[record.targets[i]] = sum;
    }
    if (threadIdx.x == 0) {
        fx_store_through(row, 0ull);
        __threadfence_system();
    }
    __syncthreads();  // the sums are there, the row is marked as being written, and all have read counters[0]
    for (int i = static_cast<int>(threadIdx.x); i < record.n; i += 256) fx_store_through(values + i, record.values[i]);
    for (int i = static_cast<int>(threadIdx.x); i < record.mirrored; i += 256) {
        fx_store_through(values + record.n + i, record.signals[record.slots[i]]);
    }
    if (threadIdx.x == 0) {
        const bool skipped = record.skip != nullptr && *record.skip != 0;
        const bool stepped = record.skip != nullptr && !skipped;
        const u64 t = record.counters[1] + (stepped ? 1ull : 0ull);
        const u64 skips = record.counters[2] + (skipped ? 1ull : 0ull);
        fx_store_through(row + 1, t);
        fx_store_through(row + 2, skips);
        fx_store_through(row + 3, record.group_mask != nullptr ? *record.group_mask : 0ull);
        record.counters[0] = finished + 1;
        record.counters[1] = t;
        record.counters[2] = skips;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        fx_store_through(row, finished + 1);
        __threadfence_system();
        fx_store_through(record.head, finished + 1);
    }
}
