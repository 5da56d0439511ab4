// What the replay's kernels share: which row a transition starts at, and where its n steps end.
//
// The replay is a ring of `slots` steps of `envs` environments: row = slot * envs + environment, fewer than 2^31 rows.
// ring: u64 [0] steps inserted so far, [1] the slot that the next one goes to, which is [0] % slots.
#pragma once

#include "fx.cuh"

// The b-th start of a batch, drawn from all rows whose n steps have been inserted, each as likely: index
// fx_random_index(seed, replay, stream, b, rows), counted from the oldest. counters: see step.cu.
__device__ __forceinline__ unsigned replay_draw(const u64* ring, const u64* counters, unsigned stream, int b, int slots,
                                                int envs, int n) {
    const u64 inserted = ring[0];
    const bool full = inserted >= static_cast<u64>(slots);
    const int filled = full ? slots : static_cast<int>(inserted);
    const u64 starts = filled < n ? 0 : static_cast<u64>(filled - n + 1) * static_cast<u64>(envs);
    const unsigned index = static_cast<unsigned>(
        fx_random_index(counters[3], counters[0], stream, static_cast<unsigned>(b), starts));
    const unsigned step = index / static_cast<unsigned>(envs);
    unsigned slot = step + (full ? static_cast<unsigned>(ring[1]) : 0u);
    if (slot >= static_cast<unsigned>(slots)) slot -= static_cast<unsigned>(slots);
    return slot * static_cast<unsigned>(envs) + (index - step * static_cast<unsigned>(envs));
}

// Calls visit(row, done bits) for the steps from `row` on, up to the first that ended its episode, at most n. The loads
// of done do not wait for each other.
template <class Visit>
__device__ __forceinline__ void replay_walk(const int* done, unsigned row, int slots, int envs, int n, Visit visit) {
    const unsigned rows = static_cast<unsigned>(slots) * static_cast<unsigned>(envs);
    bool open = true;
#pragma unroll 4
    for (int k = 0; k < n; ++k) {
        const int bits = done[row];
        if (open) visit(row, bits);
        open = open && bits == 0;
        row += static_cast<unsigned>(envs);
        if (row >= rows) row -= rows;
    }
}
