// fx_act_read: what the host wrote for this call, from mapped memory to the device, before anything else of an acting
// program. Several records share the launch.
//   target[i] = source[i], or target[slots[i]] = source[i] with slots, for i < words; words of 4 bytes of any type
// Host memory is read past the caches. One block gets at most a 32-byte sector of it every 0.1 us, so a tile is small
// (tile_words, a multiple of 32, chosen by the caller) and long inputs are read by many blocks. Overwrites its target.
#include "fx.cuh"

struct ActRead {
    int first_tile;
    int tiles;
    const unsigned* source;  // mapped: [words]
    unsigned* target;        // [words], or any length with slots
    const int* slots;        // [words] places in target, or null
    long long words;
    int tile_words;
};

extern "C" __global__ void __launch_bounds__(256) fx_act_read(const ActRead* table, int count) {
    int tile;
    const ActRead record = fx_record(table, count, tile);
    const long long first = static_cast<long long>(tile) * record.tile_words;
    const long long left = record.words - first;
    const int words = left < record.tile_words ? static_cast<int>(left) : record.tile_words;
    fx_wait();
    fx_trigger();
    for (int i = static_cast<int>(threadIdx.x); i < words; i += 256) {
        const unsigned value = fx_load_fresh(record.source + first + i);
        record.target[record.slots != nullptr ? record.slots[first + i] : first + i] = value;
    }
}
