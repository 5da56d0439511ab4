// fx_gather: a random batch: rows of device-resident data, picked on the device.
//   target[b, :] = source[index_b, :] for b < rows; a row is `words` 4-byte words of any type, copied bit for bit
//   index_b = high 64 bits of (y:x) * population, where (x, y, z, w) = Philox4x32-10 with
//     key     = (seed low, seed high)                          seed = counters[3]
//     counter = (b, stream, replay low, replay high)           replay = counters[0], replays finished before this one
// An index depends on (seed, replay, stream, b) alone: every record of one stream picks the same rows, so states and
// their labels match. Bias below population / 2^64. Overwrites its target.
// Tiles: tile_rows rows each (1..256, chosen by the caller so that a tile is about 2048 words).
#include "fx.cuh"

struct Gather {
    int first_tile;
    int tiles;
    const unsigned* source;              // [population, words]
    unsigned* target;                    // [rows, words]
    const unsigned long long* counters;  // 4 counters: see step.cu
    int* index_out;                      // [rows] indices picked, or null
    long long source_stride;             // words between rows
    long long target_stride;             // words between rows
    long long population;                // rows to pick from, at least 1
    int words;                           // words per row
    int rows;                            // rows to pick
    int tile_rows;                       // rows per tile
    unsigned stream;                     // random stream
};

// A thread has all of its loads under way before it stores: rows picked at random come from far away.
template <class Word>
__device__ __forceinline__ void gather_copy(const Gather& record, const u64* picked, int first, int rows) {
    constexpr unsigned BATCH = 8;
    const unsigned width = static_cast<unsigned>(record.words) / (sizeof(Word) / sizeof(unsigned));
    const unsigned all = width * static_cast<unsigned>(rows);
    for (unsigned base = threadIdx.x; base < all; base += 256 * BATCH) {
        Word words[BATCH];
#pragma unroll
        for (unsigned j = 0; j < BATCH; ++j) {
            const unsigned i = base + 256 * j, row = i / width;
            if (i >= all) break;
            const unsigned* source = record.source + picked[row] * static_cast<u64>(record.source_stride);
            words[j] = reinterpret_cast<const Word*>(source)[i - row * width];
        }
#pragma unroll
        for (unsigned j = 0; j < BATCH; ++j) {
            const unsigned i = base + 256 * j, row = i / width;
            if (i >= all) break;
            unsigned* target = record.target + static_cast<long long>(first + row) * record.target_stride;
            reinterpret_cast<Word*>(target)[i - row * width] = words[j];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_gather(const Gather* table, int count) {
    __shared__ u64 picked[256];
    int tile;
    const Gather record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const int first = tile * record.tile_rows;
    const int rows = record.rows - first < record.tile_rows ? record.rows - first : record.tile_rows;
    const int b = static_cast<int>(threadIdx.x);
    if (b < rows) {
        const u64 index = fx_random_index(record.counters[3], record.counters[0], record.stream,
                                          static_cast<unsigned>(first + b), static_cast<u64>(record.population));
        picked[b] = index;
        if (record.index_out != nullptr) record.index_out[first + b] = static_cast<int>(index);
    }
    __syncthreads();
    const u64 odd = reinterpret_cast<u64>(record.source) | reinterpret_cast<u64>(record.target) |
                    static_cast<u64>(4 * (record.source_stride | record.target_stride | record.words));
    if ((odd & 15) == 0) {
        gather_copy<int4>(record, picked, first, rows);
    } else {
        gather_copy<unsigned>(record, picked, first, rows);
    }
}
