// Proportional prioritized sampling over the rows of a replay.
//
// leaves: float [nodes * 1024], one for each row of the replay, 0 where no transition can start (behind the last row,
//   nothing inserted yet, fewer than n steps inserted since); a row's probability is leaf / sum of all.
// sums: double [nodes], sums[k] = leaves 1024 k .. 1024 k + 1023: thread t of a block adds leaves 4 t .. 4 t + 3 from
//   the left, then fx_block_sum. Who changes a leaf computes the sum anew.
// maximum: float [1], the largest leaf ever set by a priority; new transitions take it, or 1 if that is more.
//
// fx_priority_sample: transition b of the batch is the leaf that holds the place (b + u) / rows of the line on which all
//   leaves lie end to end, u uniform in [0, 1) from Philox (key = seed, counter = (b, stream, replay)). A block adds up
//   all sums; then a warp for each transition looks among the threads' shares, among the share's sums, among the node's
//   leaves. Never a leaf of 0, whatever rounding does to a place. A tile is tile_rows transitions.
// fx_priority_update: leaf = max((|td| + eps)^alpha, 2^-126) for the rows of a batch. A td that is not finite is left
//   out; of several for one row the one of the lowest b counts. Nothing is written when skip is set. A tile is a
//   transition: its block works if no lower b is in the same node, then for all of the node's transitions.
// fx_priority_insert: the leaves when a step of all environments goes to the next slot: 0 for the n - 1 newest steps,
//   `maximum` for the step whose n-th one this is. To come before the slot advances. Tiles: the nodes that a slot can
//   touch, for each of the two steps (one step when n is 1).
#include "fx.cuh"

constexpr int PRIORITY_NODE = 1024;
constexpr float PRIORITY_LEAST = 1.17549435e-38f;  // 2^-126: a row that was drawn can be drawn again

struct PrioritySample {
    int first_tile;
    int tiles;
    const float* leaves;                 // [nodes * 1024]
    const double* sums;                  // [nodes]
    const unsigned long long* counters;  // 4 counters: see step.cu
    int* starts;                         // [rows]
    float* chosen;                       // [rows] their leaves
    int nodes;
    int share;                           // nodes per thread, ceil(nodes / 256)
    int rows;
    int tile_rows;
    unsigned stream;                     // random stream
};

// Which of the lanes' weights, laid end to end, holds `place`; place becomes the distance into it. Behind the end, where
// rounding may put it: the last positive weight.
__device__ __forceinline__ int priority_lane(double weight, double& place) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    double reach = weight;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const double below = __shfl_up_sync(0xffffffffu, reach, offset);
        if (lane >= offset) reach += below;
    }
    const unsigned holds = __ballot_sync(0xffffffffu, weight > 0.0 && place < reach);
    const unsigned positive = __ballot_sync(0xffffffffu, weight > 0.0);
    const int chosen = holds != 0 ? __ffs(static_cast<int>(holds)) - 1 : 31 - __clz(static_cast<int>(positive | 1u));
    double before = __shfl_up_sync(0xffffffffu, reach, 1);
    if (lane == 0) before = 0.0;
    place -= __shfl_sync(0xffffffffu, before, chosen);
    return chosen;
}

// The same among 32 rounds weights, weight(r) being this lane's of round r.
template <class Weight>
__device__ __forceinline__ int priority_item(int rounds, Weight weight, double& place) {
    int chosen = 0;
    double into = place;
    bool found = false;
#pragma unroll 4
    for (int r = 0; r < rounds; ++r) {
        const double total = fx_warp_sum(weight(r));
        if (found || !(total > 0.0)) continue;
        chosen = r;
        into = place;
        found = place < total;
        place -= total;
    }
    place = into;
    return 32 * chosen + priority_lane(weight(chosen), place);
}

__device__ __forceinline__ double priority_sum(float4 quad) {
    return ((static_cast<double>(quad.x) + quad.y) + quad.z) + quad.w;
}


extern "C" __global__ void __launch_bounds__(256, 2) fx_priority_sample(const PrioritySample* table, int count) {
    __shared__ double shares[256];
    __shared__ double scratch[8];
    int tile;
    const PrioritySample record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31;
    double mine = 0.0;
    for (int i = 0; i < record.share; ++i) {
        const long long node = static_cast<long long>(thread) * record.share + i;
        if (node < record.nodes) mine += record.sums[node];
    }
    shares[thread] = mine;
    const double stratum = fx_block_sum(mine, scratch) / record.rows;
    const u64 seed = record.counters[3], replay = record.counters[0];
    const int first = tile * record.tile_rows;
    const int end = record.rows - first < record.tile_rows ? record.rows : first + record.tile_rows;
    for (int b = first + thread / 32; b < end; b += 8) {
        const FxPhilox bits = fx_random_bits(seed, replay, record.stream, static_cast<unsigned>(b));
        const u64 word = (static_cast<u64>(bits.y) << 32) | bits.x;
        double place = stratum * (b + static_cast<double>(word >> 11) * 1.1102230246251565e-16);  // 2^-53

        const int owner = priority_item(8, [&](int r) { return shares[32 * r + lane]; }, place);
        const long long begin = static_cast<long long>(owner) * record.share;
        const int nodes = record.nodes - begin < record.share ? static_cast<int>(record.nodes - begin) : record.share;
        const double* sums = record.sums + begin;
        const auto sum = [&](int r) { return 32 * r + lane < nodes ? sums[32 * r + lane] : 0.0; };
        const long long node = begin + priority_item((record.share + 31) / 32, sum, place);
        const float4* quads = reinterpret_cast<const float4*>(record.leaves + node * PRIORITY_NODE);
        const auto four = [&](int r) { return priority_sum(quads[32 * r + lane]); };
        const int quad = priority_item(PRIORITY_NODE / 128, four, place);

        const float4 last = quads[quad];
        const float leaves[4] = {last.x, last.y, last.z, last.w};
        int leaf = 0;
        float chosen = leaves[0];
        bool found = false;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (found || !(leaves[i] > 0.0f)) continue;
            leaf = i;
            chosen = leaves[i];
            found = place < leaves[i];
            place -= leaves[i];
        }
        if (lane == 0) {
            record.starts[b] = static_cast<int>(node * PRIORITY_NODE + 4 * quad + leaf);
            record.chosen[b] = chosen;
        }
    }
}

// Writes this thread's four leaves of a node, and the node's sum.
__device__ __forceinline__ void priority_store(float* leaves, double* sums, int node, float4 quad, double* scratch) {
    reinterpret_cast<float4*>(leaves + static_cast<long long>(node) * PRIORITY_NODE)[threadIdx.x] = quad;
    const double sum = fx_block_sum(priority_sum(quad), scratch);
    if (threadIdx.x == 0) sums[node] = sum;
}

__device__ __forceinline__ float4 priority_load(const float* leaves, int node) {
    return reinterpret_cast<const float4*>(leaves + static_cast<long long>(node) * PRIORITY_NODE)[threadIdx.x];
}

struct PriorityUpdate {
    int first_tile;
    int tiles;
    float* leaves;         // [nodes * 1024]
    double* sums;          // [nodes]
    float* maximum;        // [1]
    const int* starts;     // [rows] of the batch
    const float* td;       // [rows]
    const float* alpha;    // signal
    const float* eps;      // signal
    const unsigned* skip;
    int rows;
};

constexpr int PRIORITY_NOBODY = 0x7fffffff;

// The new leaf of the transition that a leaf belongs to, or the old one where there is none.
__device__ __forceinline__ float priority_new(const PriorityUpdate& record, int b, float old, float& peak) {
    if (b == PRIORITY_NOBODY) return old;
    const float leaf = fmaxf(powf(fabsf(record.td[b]) + *record.eps, *record.alpha), PRIORITY_LEAST);
    peak = fmaxf(peak, leaf);
    return leaf;
}

extern "C" __global__ void __launch_bounds__(256) fx_priority_update(const PriorityUpdate* table, int count) {
    __shared__ int owners[PRIORITY_NODE];  // of each leaf, the lowest b that sets it
    __shared__ double scratch[8];
    __shared__ int lowest;
    __shared__ unsigned highest;
    __shared__ PriorityUpdate place;
    int tile;
    const PriorityUpdate& record = fx_record(table, count, tile, place);
    const int thread = static_cast<int>(threadIdx.x);
    fx_wait();
    fx_trigger();
    if (*record.skip != 0) return;
    for (int i = thread; i < PRIORITY_NODE; i += 256) owners[i] = PRIORITY_NOBODY;
    if (thread == 0) {
        lowest = PRIORITY_NOBODY;
        highest = 0u;
    }
    const int node = record.starts[tile] / PRIORITY_NODE;
    const float eps = *record.eps;
    __syncthreads();
    for (int b = thread; b < record.rows; b += 256) {
        const int row = record.starts[b];
        if (row / PRIORITY_NODE != node) continue;
        atomicMin(&lowest, b);
        if (fx_finite(fabsf(record.td[b]) + eps)) atomicMin(owners + row % PRIORITY_NODE, b);
    }
    __syncthreads();
    if (lowest != tile) return;
    float4 quad = priority_load(record.leaves, node);
    float peak = 0.0f;
    quad.x = priority_new(record, owners[4 * thread], quad.x, peak);
    quad.y = priority_new(record, owners[4 * thread + 1], quad.y, peak);
    quad.z = priority_new(record, owners[4 * thread + 2], quad.z, peak);
    quad.w = priority_new(record, owners[4 * thread + 3], quad.w, peak);
    // Bit patterns of non-negative floats are in the order of the numbers, and a maximum knows no order.
    if (peak > 0.0f) atomicMax(&highest, __float_as_uint(peak));
    priority_store(record.leaves, record.sums, node, quad, scratch);
    if (thread == 0 && highest != 0u) atomicMax(reinterpret_cast<unsigned*>(record.maximum), highest);
}

struct PriorityInsert {
    int first_tile;
    int tiles;
    float* leaves;                   // [nodes * 1024]
    double* sums;                    // [nodes]
    const float* maximum;            // [1]
    const unsigned long long* ring;  // steps inserted, next slot: see replay.cuh
    int slots;
    int envs;
    int n;
    int span;                        // nodes that a slot can touch
};

// Rows of a step, and the nodes that hold their leaves.
struct PriorityStep {
    int first;
    int last;

    __device__ __forceinline__ PriorityStep(int slot, int envs) : first(slot * envs), last(slot * envs + (envs - 1)) {}
    __device__ __forceinline__ bool holds(int row) const { return row >= first && row <= last; }
    __device__ __forceinline__ bool touches(int node) const {
        return node >= first / PRIORITY_NODE && node <= last / PRIORITY_NODE;
    }
};

extern "C" __global__ void __launch_bounds__(256) fx_priority_insert(const PriorityInsert* table, int count) {
    __shared__ double scratch[8];
    __shared__ PriorityInsert place;
    int tile;
    const PriorityInsert& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    const int head = static_cast<int>(record.ring[1]), back = record.n - 1;
    const bool ripe = record.ring[0] >= static_cast<u64>(back);  // the step that this one completes exists
    const int slot = head >= back ? head - back : head - back + record.slots;
    const PriorityStep fresh(head, record.envs), complete(slot, record.envs);
    const bool second = tile >= record.span;
    const PriorityStep& mine = second ? complete : fresh;
    const int node = mine.first / PRIORITY_NODE + (second ? tile - record.span : tile);
    if (!mine.touches(node) || (second && (!ripe || fresh.touches(node)))) return;
    float4 quad = priority_load(record.leaves, node);
    const float leaf = fmaxf(1.0f, *record.maximum);
    const int row = node * PRIORITY_NODE + 4 * static_cast<int>(threadIdx.x);
    const auto set = [&](int i, float old) {
        if (ripe && complete.holds(row + i)) return leaf;
        return fresh.holds(row + i) ? 0.0f : old;
    };
    quad = {set(0, quad.x), set(1, quad.y), set(2, quad.z), set(3, quad.w)};
    priority_store(record.leaves, record.sums, node, quad, scratch);
}
