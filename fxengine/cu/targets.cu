// fx_polyak: targets += tau (params - targets), element by element; one record per group, 1024 elements per tile.
//   In place on the targets. When skip is set or tau is 0 nothing is written: the targets keep every bit. A tau of 1
//   copies the parameters bit for bit, which the formula does not: its difference and its sum are rounded.
#include "fx.cuh"

struct Polyak {
    int first_tile;
    int tiles;
    float* targets;        // [length]
    const float* params;   // [length]
    const float* tau;      // signal
    const unsigned* skip;
    long long length;
};

extern "C" __global__ void __launch_bounds__(256) fx_polyak(const Polyak* table, int count) {
    int tile;
    const Polyak record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const long long i = (static_cast<long long>(tile) * 256 + static_cast<int>(threadIdx.x)) * 4;
    const u64 addresses = reinterpret_cast<u64>(record.targets) | reinterpret_cast<u64>(record.params);
    const bool whole = i + 4 <= record.length && (addresses & 15) == 0;
    float4 target = {0.0f, 0.0f, 0.0f, 0.0f}, param = target;
    if (whole) {  // loaded before the scalars are needed, so that the latencies overlap
        target = *reinterpret_cast<const float4*>(record.targets + i);
        param = *reinterpret_cast<const float4*>(record.params + i);
    }
    const float tau = *record.tau;
    if (*record.skip != 0 || tau == 0.0f) return;
    if (whole) {
        target.x = fx_follow(target.x, param.x, tau);
        target.y = fx_follow(target.y, param.y, tau);
        target.z = fx_follow(target.z, param.z, tau);
        target.w = fx_follow(target.w, param.w, tau);
        *reinterpret_cast<float4*>(record.targets + i) = target;
        return;
    }
    for (long long j = i; j < i + 4 && j < record.length; ++j) {
        record.targets[j] = fx_follow(record.targets[j], record.params[j], tau);
    }
}
