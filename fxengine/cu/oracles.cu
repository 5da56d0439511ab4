// fx_oracle: the exact k-th smallest |x| of a buffer by radix select, and what a bound slot makes of it.
//
// Bit patterns of non-negative floats are in the order of the numbers, so 31 bits are settled in three launches, 11, 10
// and 10 at a time, from the top. One record per buffer and pass, 8192 elements per tile:
//   every block counts the next digit of the elements whose leading bits are those found so far, in shared memory, and
//   adds its counts to the record's histogram (integers: any order gives the same); the block that arrives last finds
//   the digit that holds the rank, writes leading bits and remaining rank to `chosen`, and clears histogram and ticket.
//   The last pass knows all bits: x = the selected |x|. For gradients x becomes min(scale x, G), that of the gradients
//   as Adam took them, since scaling and clamping keep the order; G from the slot as Adam saw it, before its update.
//     raw = headroom x    slot = raw if slot == 0, else slot + beta (raw - slot)
// Padding between tensors and rows is counted with the rest, then taken out again, whatever it holds.
// NaN ranks above infinity. A raw that is not finite leaves the slot as it is.
// Runs when (counters[1] + 1) % every == 0 and skip is 0; otherwise the blocks return at once and nothing is written.
#include "fx.cuh"

struct Oracle {
    int first_tile;
    int tiles;
    const float* values;                 // [length], 16-byte aligned
    const long long* pads;               // [n_pads] elements that do not count
    unsigned long long* histogram;       // [2048], zeros before and after each pass
    unsigned long long* chosen;          // [2] leading bits, rank among the elements that have them
    unsigned* ticket;                    // 0 before and after each pass
    const unsigned* skip;
    const unsigned long long* counters;  // 4 counters: see step.cu
    const float* scale;                  // of the group, for gradients; else null. This and the next: last pass only
    const float* bound_floor;            // signal
    const float* headroom;               // signal
    const float* beta;                   // signal
    float* slot;                         // bound slot
    long long length;                    // a multiple of 4
    long long rank;                      // index in sorted order, of the elements that count
    int n_pads;
    int every;                           // steps between two runs
    int pass;                            // 0, 1, 2
};

// Whether n is a multiple of d, without a 64-bit division (a call, and registers spilled around it): for odd d the
// product q of n and the inverse of d modulo 2^64 is n / d exactly when q d does not leave 64 bits.
__device__ __forceinline__ bool oracle_divides(unsigned d, u64 n) {
    const unsigned even = d & (0u - d);  // the largest power of two in d
    const u64 odd = d / even;
    u64 inverse = odd;  // right in 3 bits; each round doubles them
#pragma unroll
    for (int i = 0; i < 5; ++i) inverse *= 2 - odd * inverse;
    return (n & (even - 1)) == 0 && __umul64hi(n * inverse, odd) == 0;
}

constexpr int ORACLE_BINS = 2048;
constexpr int ORACLE_TILE = 8192;
constexpr unsigned ORACLE_NONE = 0xffffffffu;

// Which bits a pass settles, and which must agree with `prefix` for an element to take part.
struct OracleDigit {
    int shift;
    int above;
    unsigned mask;
    unsigned prefix;
};

// Counts of one thread; equal digits in a row become one atomic (moments that are all zero would queue up otherwise).
struct OracleRun {
    unsigned bin;
    unsigned length;
};

// `bits` without the sign; ORACLE_NONE takes part in no pass.
__device__ __forceinline__ void oracle_count(const OracleDigit& digit, unsigned bits, OracleRun& run,
                                             unsigned* counts) {
    const bool counted = (bits >> digit.above) == digit.prefix;
    const unsigned bin = (bits >> digit.shift) & digit.mask;
    if (counted && bin != run.bin) {
        if (run.length != 0) atomicAdd(counts + run.bin, run.length);
        run.bin = bin;
        run.length = 0;
    }
    run.length += counted ? 1u : 0u;
}

__device__ __forceinline__ unsigned oracle_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ void oracle_tile(const Oracle& record, const OracleDigit& digit, int tile,
                                            unsigned* counts) {
    const long long start = static_cast<long long>(tile) * ORACLE_TILE, length = record.length;
    const float* values = record.values;
    OracleRun run = {0u, 0u};
    for (int part = 0; part < ORACLE_TILE; part += 4096) {
        const long long first = start + part + 4 * static_cast<int>(threadIdx.x);
        unsigned bits[16];
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // all on their way before the first is used
            const long long i = first + 1024 * k;
            const bool inside = i < length;
            const float4 x = inside ? *reinterpret_cast<const float4*>(values + i) : float4{};
            bits[4 * k] = inside ? oracle_bits(x.x) : ORACLE_NONE;
            bits[4 * k + 1] = inside ? oracle_bits(x.y) : ORACLE_NONE;
            bits[4 * k + 2] = inside ? oracle_bits(x.z) : ORACLE_NONE;
            bits[4 * k + 3] = inside ? oracle_bits(x.w) : ORACLE_NONE;
        }
#pragma unroll
        for (int k = 0; k < 16; ++k) oracle_count(digit, bits[k], run, counts);
    }
    if (run.length != 0) atomicAdd(counts + run.bin, run.length);
    for (int i = static_cast<int>(threadIdx.x); i < record.n_pads; i += 256) {
        const long long pad = record.pads[i];
        if (pad < start || pad >= start + ORACLE_TILE) continue;
        OracleRun one = {0u, 0u};
        oracle_count(digit, oracle_bits(values[pad]), one, counts);
        if (one.length != 0) atomicSub(counts + one.bin, 1u);
    }
}

__device__ __forceinline__ void oracle_update(const Oracle& record, unsigned bits) {
    const float slot = *record.slot;
    float x = __uint_as_float(bits);
    if (record.scale != nullptr) {  // as adam_element and adam_bound of optimizer.cu
        const float bound = slot == 0.0f ? FX_INF : fmaxf(slot, *record.bound_floor);
        x = fminf(*record.scale * x, bound);
    }
    const float raw = *record.headroom * x;
    if (!fx_finite(raw)) return;
    *record.slot = slot == 0.0f ? raw : slot + *record.beta * (raw - slot);
}

// By the last block: which digit holds the rank. `totals`: 8 values of shared memory.
__device__ __forceinline__ void oracle_choose(const Oracle& record, const OracleDigit& digit, u64 rank, u64* totals) {
    const int lane = static_cast<int>(threadIdx.x & 31u), warp = static_cast<int>(threadIdx.x >> 5);
    const int first = 8 * static_cast<int>(threadIdx.x);
    u64 counts[8];
    u64 total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        counts[i] = fx_load_fresh(record.histogram + first + i);
        record.histogram[first + i] = 0;
        total += counts[i];
    }
    u64 upto = total;  // inclusive
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const u64 other = __shfl_up_sync(0xffffffffu, upto, delta);
        if (lane >= delta) upto += other;
    }
    if (lane == 31) totals[warp] = upto;
    __syncthreads();
    for (int w = 0; w < warp; ++w) upto += totals[w];
    if (threadIdx.x == 0) *record.ticket = 0;
    if (rank >= upto || rank < upto - total) return;

    u64 left = rank - (upto - total);
    unsigned bin = static_cast<unsigned>(first);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (bin == static_cast<unsigned>(first + i) && left >= counts[i]) {
            left -= counts[i];
            ++bin;
        }
    }
    const unsigned bits = digit.prefix << (digit.above - digit.shift) | bin;
    if (record.pass == 2) {
        oracle_update(record, bits);
    } else {
        record.chosen[0] = bits;
        record.chosen[1] = left;
    }
}

// Four blocks per SM are asked for to leave 64 registers: the compiler would spill for more.
extern "C" __global__ void __launch_bounds__(256, 4) fx_oracle(const Oracle* table, int count) {
    __shared__ unsigned counts[ORACLE_BINS];
    __shared__ u64 totals[8];
    __shared__ int last;
    __shared__ Oracle place;
    int tile;
    const Oracle& record = fx_record(table, count, tile, place);
    const unsigned* skip = record.skip;  // what decides is read ahead of the wait; most steps need no more
    const u64* counters = record.counters;
    const unsigned every = static_cast<unsigned>(record.every);
    fx_wait();
    fx_trigger();
    if (*skip != 0 || !oracle_divides(every, counters[1] + 1)) return;

    OracleDigit digit = {20, 31, 2047u, 0u};
    u64 rank = static_cast<u64>(record.rank);
    if (record.pass > 0) {
        digit = {record.pass == 1 ? 10 : 0, record.pass == 1 ? 20 : 10, 1023u, static_cast<unsigned>(record.chosen[0])};
        rank = record.chosen[1];
    }
    for (int i = static_cast<int>(threadIdx.x); i < ORACLE_BINS; i += 256) counts[i] = 0;
    __syncthreads();
    oracle_tile(record, digit, tile, counts);
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < ORACLE_BINS; i += 256) {
        if (counts[i] != 0) atomicAdd(record.histogram + i, static_cast<u64>(counts[i]));
    }
    __threadfence();  // the counts are visible before the ticket says so
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(record.ticket, 1u) == static_cast<unsigned>(record.tiles) - 1;
    __syncthreads();
    if (last == 0) return;
    __threadfence();
    oracle_choose(record, digit, rank, totals);
}
