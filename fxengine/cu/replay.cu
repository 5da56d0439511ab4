// A replay of transitions in device memory: steps in, random n-step transitions out.
//
// Rows of a field lie `ld` elements apart, a multiple of 4 (the rest of a row is padding), or 1 apart where a row is one
// 4-byte word. Kinds of fields: 0 = 4-byte words of any type, copied bit for bit; 1 = bytes, served as float scale * x;
// 2 = bf16, served as float, rounded to nearest even when inserted from float.
//
// fx_replay_sample: what each transition of the batch amounts to (a thread each, 256 to a tile). From the start row, m =
//   number of steps up to the first done one, at most n:
//     reward = sum_{k<m} gamma^k r_k (in double)    discount = gamma^m, or 0 where the last step terminated
//     weight = (smallest leaf of the batch / leaf)^beta, or 1 without leaves
// fx_replay_gather: target[b, :] = the row of one field at the start of transition b, or at its last step (done given).
//   Where no starts are given, every block draws them anew: cheaper than a launch that it would have to wait for.
//   A tile is tile_rows transitions of tile_columns columns.
// fx_replay_insert: one step of all environments of one field, into the next slot. A tile is 256 groups of 4 columns.
// fx_replay_advance: the slot is filled: next one. One block.
// All overwrite.
#include "replay.cuh"

struct ReplaySample {
    int first_tile;
    int tiles;
    const unsigned long long* counters;  // 4 counters: see step.cu
    const unsigned long long* ring;      // steps inserted, next slot
    const int* done;                     // [slots * envs] bit 0 = terminated, bit 1 = truncated
    const float* rewards;                // [slots * envs]
    const float* gamma;                  // signal
    const float* beta;                   // signal, or null
    const int* starts;                   // [rows], or null: drawn here
    const float* leaves;                 // [rows] leaves that the starts were drawn by, or null
    int* start_out;                      // [rows], or null
    int* end_out;                        // [rows]
    float* reward;                       // [rows]
    float* discount;                     // [rows]
    float* weight;                       // [rows]
    int slots;
    int envs;
    int n;
    int rows;
    unsigned stream;                     // random stream
};

// The smallest leaf of the batch. Leaves are positive, so their bit patterns are in the order of the numbers.
__device__ __forceinline__ float replay_smallest(const float* leaves, int rows, unsigned* least) {
    if (threadIdx.x == 0) *least = 0x7f800000u;
    __syncthreads();
    unsigned mine = 0x7f800000u;
    for (int b = static_cast<int>(threadIdx.x); b < rows; b += 256) {
        const unsigned bits = __float_as_uint(leaves[b]);
        mine = bits < mine ? bits : mine;
    }
    atomicMin(least, mine);
    __syncthreads();
    return __uint_as_float(*least);
}

extern "C" __global__ void __launch_bounds__(256) fx_replay_sample(const ReplaySample* table, int count) {
    __shared__ unsigned least;
    __shared__ ReplaySample place;
    int tile;
    const ReplaySample& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    const float smallest = record.leaves != nullptr ? replay_smallest(record.leaves, record.rows, &least) : 1.0f;
    const int b = tile * 256 + static_cast<int>(threadIdx.x);
    if (b >= record.rows) return;
    const int slots = record.slots, envs = record.envs, n = record.n;
    const unsigned start = record.starts != nullptr
                               ? static_cast<unsigned>(record.starts[b])
                               : replay_draw(record.ring, record.counters, record.stream, b, slots, envs, n);
    const double gamma = *record.gamma;
    double factor = 1.0, reward = 0.0;
    unsigned end = start;
    int last = 0;
    replay_walk(record.done, start, slots, envs, n, [&](unsigned row, int bits) {
        reward += factor * record.rewards[row];
        factor *= gamma;
        end = row;
        last = bits;
    });
    if (record.start_out != nullptr) record.start_out[b] = static_cast<int>(start);
    record.end_out[b] = static_cast<int>(end);
    record.reward[b] = static_cast<float>(reward);
    record.discount[b] = (last & 1) != 0 ? 0.0f : static_cast<float>(factor);
    record.weight[b] = record.leaves != nullptr ? powf(smallest / record.leaves[b], *record.beta) : 1.0f;
}

struct ReplayGather {
    int first_tile;
    int tiles;
    const void* data;                    // [slots * envs, ld]
    unsigned* target;                    // [rows, width]
    const unsigned long long* counters;  // 4 counters: see step.cu
    const unsigned long long* ring;      // steps inserted, next slot
    const int* starts;                   // [rows], or null: drawn here
    const int* done;                     // null: the row at the start; else at the last step
    long long ld;                        // elements between rows of data
    long long target_stride;             // elements between rows of target
    float scale;                         // of bytes
    int kind;
    int width;                           // elements per row
    int rows;                            // batch
    int tile_rows;                       // at most 256
    int tile_columns;                    // a multiple of 4
    int slots;
    int envs;
    int n;
    unsigned stream;                     // random stream
};

__device__ __forceinline__ uint4 replay_served(uint4 quad, float) { return quad; }

__device__ __forceinline__ uint4 replay_served(uchar4 quad, float scale) {
    return {__float_as_uint(scale * quad.x), __float_as_uint(scale * quad.y), __float_as_uint(scale * quad.z),
            __float_as_uint(scale * quad.w)};
}

__device__ __forceinline__ uint4 replay_served(ushort4 quad, float) {
    return {static_cast<unsigned>(quad.x) << 16, static_cast<unsigned>(quad.y) << 16,
            static_cast<unsigned>(quad.z) << 16, static_cast<unsigned>(quad.w) << 16};
}

// The first `left` of four words, in one store where they are aligned.
__device__ __forceinline__ void replay_store(unsigned* target, uint4 words, int left, bool aligned) {
    if (aligned && left >= 4) {
        *reinterpret_cast<uint4*>(target) = words;
        return;
    }
    target[0] = words.x;
    if (left > 1) target[1] = words.y;
    if (left > 2) target[2] = words.z;
    if (left > 3) target[3] = words.w;
}

// Groups of four columns, four at a time: their loads are all under way before the first is stored.
template <class Quad>
__device__ __forceinline__ void replay_copy(const ReplayGather& record, const unsigned* picked, int first, int rows,
                                            int column, int columns) {
    const unsigned across = static_cast<unsigned>(columns + 3) / 4, all = across * static_cast<unsigned>(rows);
    const Quad* data = static_cast<const Quad*>(record.data);
    const float scale = record.scale;
    const bool aligned =
        ((reinterpret_cast<u64>(record.target) | static_cast<u64>(4 * record.target_stride)) & 15) == 0;
    for (unsigned base = threadIdx.x; base < all; base += 1024) {
        Quad quads[4];
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            const unsigned i = base + 256 * j, row = i / across;
            if (i >= all) break;
            const long long place = static_cast<long long>(picked[row]) * record.ld + column;
            quads[j] = data[place / 4 + (i - row * across)];
        }
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
            const unsigned i = base + 256 * j, row = i / across;
            if (i >= all) break;
            const int at = column + 4 * static_cast<int>(i - row * across);
            unsigned* target = record.target + (first + static_cast<long long>(row)) * record.target_stride + at;
            replay_store(target, replay_served(quads[j], scale), record.width - at, aligned);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_replay_gather(const ReplayGather* table, int count) {
    __shared__ unsigned picked[256];
    __shared__ ReplayGather place;
    int tile;
    const ReplayGather& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    const int across = (record.width + record.tile_columns - 1) / record.tile_columns;
    const int first = tile / across * record.tile_rows, column = tile % across * record.tile_columns;
    const int rows = record.rows - first < record.tile_rows ? record.rows - first : record.tile_rows;
    const int left = record.width - column, columns = left < record.tile_columns ? left : record.tile_columns;
    const int thread = static_cast<int>(threadIdx.x), slots = record.slots, envs = record.envs, n = record.n;
    if (thread < rows) {
        const int b = first + thread;
        unsigned row = record.starts != nullptr
                           ? static_cast<unsigned>(record.starts[b])
                           : replay_draw(record.ring, record.counters, record.stream, b, slots, envs, n);
        if (record.done != nullptr) {
            replay_walk(record.done, row, slots, envs, n, [&](unsigned end, int) { row = end; });
        }
        picked[thread] = row;
    }
    __syncthreads();
    if (record.ld == 1) {
        if (thread < rows) {
            record.target[(first + thread) * record.target_stride] =
                static_cast<const unsigned*>(record.data)[picked[thread]];
        }
    } else if (record.kind == 0) {
        replay_copy<uint4>(record, picked, first, rows, column, columns);
    } else if (record.kind == 1) {
        replay_copy<uchar4>(record, picked, first, rows, column, columns);
    } else {
        replay_copy<ushort4>(record, picked, first, rows, column, columns);
    }
}

struct ReplayInsert {
    int first_tile;
    int tiles;
    const void* source;              // [envs, width]; of kind 2: float
    void* data;                      // [slots * envs, ld]
    const unsigned long long* ring;  // steps inserted, next slot
    const unsigned long long* turn;  // the step comes from row turn % turns of a staging ring; null: there is none
    long long source_stride;         // elements between rows of source
    long long turn_stride;           // elements between rows of the staging ring
    long long ld;                    // elements between rows of data
    int turns;
    int kind;
    int width;                       // elements per row
    int envs;
};

// Four bf16 numbers, each the nearest to a float; ties go to the even one, NaN stays NaN.
__device__ __forceinline__ unsigned short replay_bf16(unsigned bits) {
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const unsigned rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return static_cast<unsigned short>((nan ? bits | 0x00400000u : rounded) >> 16);
}

__device__ __forceinline__ void replay_put(void* data, long long quad, uint4 words, int kind) {
    if (kind == 0) {
        static_cast<uint4*>(data)[quad] = words;
    } else if (kind == 1) {
        static_cast<uchar4*>(data)[quad] = {static_cast<unsigned char>(words.x), static_cast<unsigned char>(words.y),
                                            static_cast<unsigned char>(words.z), static_cast<unsigned char>(words.w)};
    } else {
        static_cast<ushort4*>(data)[quad] = {replay_bf16(words.x), replay_bf16(words.y), replay_bf16(words.z),
                                             replay_bf16(words.w)};
    }
}

// Up to four elements from `place` on, `left` of which exist; the others are zeros.
template <class Element>
__device__ __forceinline__ uint4 replay_take(const Element* source, long long place, int left) {
    uint4 words = {0u, 0u, 0u, 0u};
    words.x = source[place];
    if (left > 1) words.y = source[place + 1];
    if (left > 2) words.z = source[place + 2];
    if (left > 3) words.w = source[place + 3];
    return words;
}

// A staging row is written before the launch that reads it, and a launch begins with an empty first-level cache: plain
// loads see it.
extern "C" __global__ void __launch_bounds__(256) fx_replay_insert(const ReplayInsert* table, int count) {
    int tile;
    const ReplayInsert record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const long long slot = static_cast<long long>(record.ring[1]);
    long long base = 0;
    if (record.turn != nullptr) {
        base = static_cast<long long>(*record.turn % static_cast<u64>(record.turns)) * record.turn_stride;
    }
    const int quads = (record.width + 3) / 4, all = quads * record.envs;
    const unsigned char* bytes = static_cast<const unsigned char*>(record.source);
    const unsigned* words = static_cast<const unsigned*>(record.source);
    const u64 size = record.kind == 1 ? 1 : 4;
    const bool whole = ((reinterpret_cast<u64>(record.source) |
                         size * static_cast<u64>(record.source_stride | record.turn_stride | record.width)) &
                        (4 * size - 1)) == 0;
    const int i = tile * 256 + static_cast<int>(threadIdx.x);
    if (i >= all) return;
    const int env = i / quads, column = 4 * (i - env * quads), left = record.width - column;
    const long long from = base + env * record.source_stride + column;
    const long long to = (slot * record.envs + env) * record.ld + column;
    if (record.ld == 1) {
        static_cast<unsigned*>(record.data)[to] = words[from];
    } else if (whole && record.kind == 1) {
        static_cast<unsigned*>(record.data)[to / 4] = words[from / 4];
    } else if (whole) {
        replay_put(record.data, to / 4, reinterpret_cast<const uint4*>(words)[from / 4], record.kind);
    } else {
        const uint4 taken = record.kind == 1 ? replay_take(bytes, from, left) : replay_take(words, from, left);
        replay_put(record.data, to / 4, taken, record.kind);
    }
}

struct ReplayAdvance {
    int first_tile;
    int tiles;
    unsigned long long* ring;  // steps inserted, next slot
    unsigned long long* turn;  // of a staging ring, or null
    unsigned long long* head;  // mapped: rows of the staging ring that have been read, or null
    int slots;
};

extern "C" __global__ void __launch_bounds__(256) fx_replay_advance(const ReplayAdvance* table, int count) {
    __shared__ ReplayAdvance place;
    int tile;
    const ReplayAdvance& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    if (threadIdx.x != 0) return;
    const u64 next = record.ring[1] + 1;
    record.ring[0] += 1;
    record.ring[1] = next == static_cast<u64>(record.slots) ? 0 : next;
    if (record.turn == nullptr) return;
    const u64 read = *record.turn + 1;
    *record.turn = read;
    fx_store_through(record.head, read);
}
