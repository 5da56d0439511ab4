// fx_gather: a random batch: rows of device-resident data, picked on the device.
//   target[b, :] = source[index_b, :] for b < rows; a row is `words` 4-byte words of any type, copied bit for bit
//   index_b = high 64 bits of (y:x) * population, where (x, y, z, w) = Philox4x32-10 with
//     key     = (seed low, seed high)                          seed = counters[3]
//     counter = (b, stream, replay low, replay high)           replay = counters[0], replays finished before this one
// An index depends on (seed, replay, stream, b) alone: every record of one stream picks the same rows, so states and
// their labels match. Bias below population / 2^64. Overwrites its target.
// With a mask: zeros where mask[index_b] is 0, whatever the row holds (NaN included); a mask of NaN lets it through.
// With codes: target[b, :] = the one-hot code of the number source[index_b], float32; one outside [0, words) has none.
// Tiles: tile_rows rows each (1..256, chosen by the caller so that a tile is about 2048 words, of codes 256).
#include "fx.cuh"

struct Gather {
    int first_tile;
    int tiles;
    const unsigned* source;              // [population, words]
    unsigned* target;                    // [rows, words]
    const unsigned long long* counters;  // 4 counters: see step.cu
    int* index_out;                      // [rows] indices picked, or null
    const float* mask;                   // [population] or null
    long long source_stride;             // words between rows
    long long target_stride;             // words between rows
    long long population;                // rows to pick from, at least 1
    int words;                           // words per row of the target
    int rows;                            // rows to pick
    int tile_rows;                       // rows per tile
    unsigned stream;                     // random stream
    int codes;                           // 1: one-hot codes, without a mask
};

// A thread has all of its loads under way before it stores: rows picked at random come from far away.
template <class Word>
__device__ __forceinline__ void gather_copy(const Gather& record, const u64* picked, int first, int rows) {
    constexpr unsigned BATCH = 8;
    const unsigned width = static_cast<unsigned>(record.words) / (sizeof(Word) / sizeof(unsigned));
    const unsigned all = width * static_cast<unsigned>(rows);
    for (unsigned base = threadIdx.x; base < all; base += 256 * BATCH) {
        Word words[BATCH];
        float mask[BATCH];
#pragma unroll
        for (unsigned j = 0; j < BATCH; ++j) {
            const unsigned i = base + 256 * j, row = i / width;
            if (i >= all) break;
            const unsigned* source = record.source + picked[row] * static_cast<u64>(record.source_stride);
            words[j] = reinterpret_cast<const Word*>(source)[i - row * width];
            mask[j] = record.mask == nullptr ? 1.0f : record.mask[picked[row]];
        }
#pragma unroll
        for (unsigned j = 0; j < BATCH; ++j) {
            const unsigned i = base + 256 * j, row = i / width;
            if (i >= all) break;
            unsigned* target = record.target + static_cast<long long>(first + row) * record.target_stride;
            reinterpret_cast<Word*>(target)[i - row * width] = mask[j] == 0.0f ? Word{} : words[j];
        }
    }
}

__device__ __forceinline__ void gather_codes(const Gather& record, const u64* picked, int first, int rows) {
    const unsigned width = static_cast<unsigned>(record.words), all = width * static_cast<unsigned>(rows);
    for (unsigned i = threadIdx.x; i < all; i += 256) {
        const unsigned row = i / width, column = i - row * width;
        const unsigned number = record.source[picked[row] * static_cast<u64>(record.source_stride)];
        unsigned* target = record.target + static_cast<long long>(first + row) * record.target_stride;
        target[column] = __float_as_uint(number == column ? 1.0f : 0.0f);
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
    if (record.codes != 0) {
        gather_codes(record, picked, first, rows);
    } else if ((odd & 15) == 0) {
        gather_copy<int4>(record, picked, first, rows);
    } else {
        gather_copy<unsigned>(record, picked, first, rows);
    }
}
