// fx_end: the end of a replay; only targets may still move beside it. One block.
//
// It finishes the sums that are reported (losses, shares of right rows), writes one row of the telemetry ring (mapped, pinned), and
// advances the counters.
//   ring row   : [t low][t high][skipped low][skipped high][group mask low][group mask high][n floats][mirrored floats],
//                a u64 word each: the value in the low half, the tag in the high half
//   tag        : low 32 bits of sequence = replays finished, this one included. A reader takes a row only if every word
//                carries the tag that it expects: words are written whole, so no fence is needed and no row can be torn.
//                Fences to host memory would cost more than all the rest of this kernel.
//   sums       : values[targets[i]] = sum of lengths[i] partial results / (divisors[i] * max(1, *denominators[i])), in
//                fixed order: a warp per sum, lane i adds the partials i, i + 32, ... in turn, then one warp sum
//   row index  : (sequence - 1) % rows
//   t, skipped : Adam steps done and steps skipped, after this replay; group mask: bit g = norm of group g not finite
//   head       : sequence of the newest row; it may be seen shortly before the row is
//
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

__device__ __forceinline__ void store_word(u64* word, unsigned value, u64 sequence) {
    fx_store_through(word, (sequence << 32) | value);
}

__device__ __forceinline__ void store_pair(u64* words, u64 value, u64 sequence) {
    store_word(words, static_cast<unsigned>(value), sequence);
    store_word(words + 1, static_cast<unsigned>(value >> 32), sequence);
}

extern "C" __global__ void __launch_bounds__(256) fx_end(const End* table, int count) {
    __shared__ End place;
    int tile;
    const End& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    for (int i = static_cast<int>(threadIdx.x >> 5); i < record.sums; i += 8) {
        const float sum = finish_sum(record, i);
        if ((threadIdx.x & 31u) == 0) record.values[record.targets[i]] = sum;
    }
    const u64 sequence = record.counters[0] + 1;
    __syncthreads();  // the sums are there, and all have read counters[0]
    u64* row = record.ring + ((sequence - 1) % static_cast<u64>(record.rows)) * static_cast<u64>(record.row_words);
    for (int i = static_cast<int>(threadIdx.x); i < record.n + record.mirrored; i += 256) {
        const float value = i < record.n ? record.values[i] : record.signals[record.slots[i - record.n]];
        store_word(row + 6 + i, __float_as_uint(value), sequence);
    }
    if (threadIdx.x == 0) {
        const bool skipped = record.skip != nullptr && *record.skip != 0;
        const bool stepped = record.skip != nullptr && !skipped;
        const u64 t = record.counters[1] + (stepped ? 1ull : 0ull);
        const u64 skips = record.counters[2] + (skipped ? 1ull : 0ull);
        store_pair(row, t, sequence);
        store_pair(row + 2, skips, sequence);
        store_pair(row + 4, record.group_mask != nullptr ? *record.group_mask : 0ull, sequence);
        fx_store_through(record.head, sequence);
        record.counters[0] = sequence;
        record.counters[1] = t;
        record.counters[2] = skips;
    }
}
