// fx_begin, fx_end: the two ends of a replay. One block per record; a program has one of each.
//
// fx_begin copies one row of the host's signal ring (mapped, pinned) to the device snapshot that all kernels read.
//   ring row   : [slots floats][slots/32 unsigned mask words], row_stride floats from row to row; slots % 32 == 0
//   row index  : replays finished % rows
//   snapshot   : signals[i] = row[i] where bit i % 32 of mask word i / 32 is set, else unchanged
//   The host always sets the bits of the slots it owns; those that the device owns only to override them once.
//
// fx_end writes one row of the telemetry ring (mapped, pinned), then advances the counters.
//   ring row   : [u64 sequence][u64 t][u64 skipped][u64 group mask][n floats], row_words u64 words from row to row
//   row index  : (sequence - 1) % rows; sequence = replays finished, this one included
//   t, skipped : Adam steps done and steps skipped, after this replay; group mask: bit g = norm of group g not finite
//   head       : sequence of the newest complete row
//   A row's sequence is 0 while it is being written. A reader compares the sequence before and after its copy with
//   the one that it expects: a mismatch is a torn row.
//
// counters: u64 [0] replays finished, [1] t, [2] skipped, [3] seed.
#include "fx.cuh"

struct Begin {
    int first_tile;
    int tiles;
    const float* ring;                   // mapped signal ring
    const unsigned long long* counters;  // 4 counters
    float* signals;                      // snapshot, `slots` floats
    int row_stride;                      // floats between rows
    int rows;                            // length of the ring
    int slots;                           // number of slots, a multiple of 32
};

struct End {
    int first_tile;
    int tiles;
    const float* values;                  // telemetry values, n floats
    unsigned long long* counters;         // 4 counters
    const unsigned* skip;                 // 1 = the optimizer skipped; null = this program has no optimizer
    const unsigned long long* group_mask; // groups whose norm is not finite, or null
    unsigned long long* ring;             // mapped telemetry ring
    unsigned long long* head;             // mapped: sequence of the newest complete row
    int n;                                // number of values
    int row_words;                        // u64 words between rows
    int rows;                             // length of the ring
};

extern "C" __global__ void __launch_bounds__(256) fx_begin(const Begin* table, int count) {
    int tile;
    const Begin record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const u64 row = record.counters[0] % static_cast<u64>(record.rows);
    const float* values = record.ring + row * static_cast<u64>(record.row_stride);
    const unsigned* masks = reinterpret_cast<const unsigned*>(values + record.slots);
    // A load from the host takes over a microsecond: all of a thread's loads are issued before the first is used.
    for (int base = static_cast<int>(threadIdx.x); base < record.slots; base += 4 * 256) {
        float value[4];
        unsigned mask[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int slot = base + 256 * k;
            value[k] = slot < record.slots ? fx_load_fresh(values + slot) : 0.0f;
            mask[k] = slot < record.slots ? fx_load_fresh(masks + (slot >> 5)) : 0u;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int slot = base + 256 * k;
            if ((mask[k] >> (slot & 31)) & 1u) record.signals[slot] = value[k];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_end(const End* table, int count) {
    int tile;
    const End record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const u64 finished = record.counters[0];
    u64* row = record.ring + (finished % static_cast<u64>(record.rows)) * static_cast<u64>(record.row_words);
    float* values = reinterpret_cast<float*>(row + 4);
    if (threadIdx.x == 0) {
        fx_store_through(row, 0ull);
        __threadfence_system();
    }
    __syncthreads();  // nobody writes data before the row is marked as being written; all have read counters[0]
    for (int i = static_cast<int>(threadIdx.x); i < record.n; i += 256) {
        fx_store_through(values + i, record.values[i]);
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
