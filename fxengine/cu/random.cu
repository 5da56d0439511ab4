// fx_uniform: out[e] = uniform in [0, 1), a multiple of 2^-24, drawn on the device.
//   out[4 i + k] = (word k of Philox4x32-10) >> 8, times 2^-24, with
//     key     = (seed low, seed high)                          seed = counters[3]
//     counter = (i, stream, replay low, replay high)           replay = counters[0], replays finished before this one
// A value depends on (seed, replay, stream, e) alone. A stream that also picks rows (gather.cu) is not independent of
// them: give numbers of other meaning another stream. A tile is 1024 values, 4 to a thread. Overwrites out.
#include "fx.cuh"

struct Uniform {
    int first_tile;
    int tiles;
    float* out;                          // [n]
    const unsigned long long* counters;  // 4 counters: see step.cu
    long long n;                         // at most 2^34
    unsigned stream;                     // random stream
};

extern "C" __global__ void __launch_bounds__(256) fx_uniform(const Uniform* table, int count) {
    int tile;
    const Uniform record = fx_record(table, count, tile);
    const long long item = static_cast<long long>(tile) * 256 + threadIdx.x;
    const long long left = record.n - 4 * item;
    fx_wait();
    fx_trigger();
    if (left <= 0) return;
    const FxPhilox bits =
        fx_random_bits(record.counters[3], record.counters[0], record.stream, static_cast<unsigned>(item));
    const float4 value = {fx_random_uniform(bits.x), fx_random_uniform(bits.y), fx_random_uniform(bits.z),
                          fx_random_uniform(bits.w)};
    float* out = record.out + 4 * item;
    if (left >= 4 && (reinterpret_cast<u64>(out) & 15) == 0) {
        *reinterpret_cast<float4*>(out) = value;
        return;
    }
    out[0] = value.x;
    if (left > 1) out[1] = value.y;
    if (left > 2) out[2] = value.z;
    if (left > 3) out[3] = value.w;
}
