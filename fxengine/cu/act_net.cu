// fx_act_net_<R>: a whole acting program in one launch, for few rows: observations from mapped host memory, the layers of
// a network, a policy, actions to mapped host memory. What a launch per layer costs is the hand-off between launches and
// the way of a few numbers through the second-level cache; here a cluster of blocks shares the weights and hands
// activations over in shared memory.
//
// A cluster works on R rows. Every block of it has all activations of these rows in shared memory, `row_floats` floats
// per row, in which each operation (act_net.cuh) reads and writes columns. The host has cut up the work
// (ops/act_schedule.py): every warp has a list of what it does, sorted by step, and a step is of one sort:
//   shared step : linear layers; their outputs are spread over all warps of the cluster, four outputs to a warp, and sent
//                 to every block, which waits until it has got all of them. Weights depend on no activation, so a warp
//                 asks for those of its next outputs before it needs them.
//   own step    : everything else, computed by every block for itself. Ends with the barrier of the block. What these
//                 operations read of the parameters lies in shared memory, copied there by step 0.
// A lane sums the columns lane + 32 c of a layer, then the lanes are summed, in fixed order. At the end the policy of
// policy.cu and its report, by the first block of the cluster. Rows beyond `rows` are computed from zeros and not
// reported. All in float32. Tiles: FX_CLUSTER (cluster.cuh) for every R rows. 512 threads: what a step takes is latency,
// and with twice the warps most steps are done in one go.
#include "act_net.cuh"

constexpr int NET_OUTPUTS = 4;  // of a warp at a time
constexpr int NET_CHUNKS = 8;   // columns lane, lane + 32, ... whose weights are asked for ahead
constexpr int NET_HEADER = 16;  // words of the input in front of everything else
constexpr int NET_SCALAR = 8;   // of them: the policy's scalar, behind the counters

struct NetWeights {
    float w[NET_OUTPUTS][NET_CHUNKS];
    float bias;
};

// Which of a warp's 4 R sums a lane ends up with (net_reduce).
template <int R>
__device__ __forceinline__ int net_owned() {
    return net_lane() / (32 / (NET_OUTPUTS * R));
}

// Outputs behind the last one are computed like the last one, and not sent.
template <int R>
__device__ __forceinline__ void net_load(const ActNet& net, int entry, NetWeights& weights) {
    if (entry < 0) return;
    const int op = net_op(entry), first = net_argument(entry), n = net.n[op], k = net.k[op], ld = net.ld[op];
    const float* w = net.w[op] + net_lane();
#pragma unroll
    for (int o = 0; o < NET_OUTPUTS; ++o) {
        const float* row = w + static_cast<long long>(first + o < n ? first + o : n - 1) * ld;
#pragma unroll
        for (int c = 0; c < NET_CHUNKS; ++c) weights.w[o][c] = net_lane() + 32 * c < k ? row[32 * c] : 0.0f;
    }
    const int own = first + net_owned<R>() / R;
    weights.bias = net.b[op] != nullptr ? net.b[op][own < n ? own : n - 1] : 0.0f;
}

// Sums of N values over the lanes; lane l gets value number l / (32 / N). Each halving sends away the half that the lane
// will not own.
template <int N, int OFFSET>
__device__ __forceinline__ float net_reduce(float (&values)[N]) {
    if constexpr (OFFSET == 0) {
        return values[0];
    } else if constexpr (N == 1) {
        values[0] += __shfl_xor_sync(0xffffffffu, values[0], OFFSET);
        return net_reduce<1, OFFSET / 2>(values);
    } else {
        const bool upper = (net_lane() & OFFSET) != 0;
        float half[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const float away = upper ? values[i] : values[i + N / 2];
            const float kept = upper ? values[i + N / 2] : values[i];
            half[i] = kept + __shfl_xor_sync(0xffffffffu, away, OFFSET);
        }
        return net_reduce<N / 2, OFFSET / 2>(half);
    }
}

// The units of a warp in one shared step. `weights` belong to the list's current entry, on entry and at the end.
template <int R>
__device__ __forceinline__ void net_shared_step(const ActNet& net, float* rows, FxMailbox* box, int step,
                                                const int*& list, NetWeights& weights) {
    const int lane = net_lane(), floats = net.row_floats;
    for (int entry = *list; net_step(entry) == step; entry = *list) {
        const int op = net_op(entry), first = net_argument(entry), n = net.n[op], k = net.k[op];
        float sums[NET_OUTPUTS * R];
#pragma unroll
        for (int i = 0; i < NET_OUTPUTS * R; ++i) sums[i] = 0.0f;
        const float* x = rows + net.x[op] + lane;
#pragma unroll
        for (int c = 0; c < NET_CHUNKS; ++c) {
            if (32 * c >= k) break;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float value = lane + 32 * c < k ? x[r * floats + 32 * c] : 0.0f;
#pragma unroll
                for (int o = 0; o < NET_OUTPUTS; ++o) sums[o * R + r] += weights.w[o][c] * value;
            }
        }
        for (int i = 32 * NET_CHUNKS; i < k; i += 32) {
#pragma unroll
            for (int o = 0; o < NET_OUTPUTS; ++o) {
                const float* row = net.w[op] + static_cast<long long>(first + o < n ? first + o : n - 1) * net.ld[op];
                const float w = lane + i < k ? row[lane + i] : 0.0f;
#pragma unroll
                for (int r = 0; r < R; ++r) sums[o * R + r] += w * (lane + i < k ? x[r * floats + i] : 0.0f);
            }
        }
        const float bias = weights.bias;
        const bool another = net_step(*++list) == step;
        if (another) net_load<R>(net, *list, weights);

        constexpr int COPIES = 32 / (NET_OUTPUTS * R);  // lanes with the same sum
        const float sum = net_reduce<NET_OUTPUTS * R, 16>(sums);
        const int owned = net_owned<R>(), output = first + owned / R;
        if (output < n) {
            const float value = fx_activate(net.activation[op], sum + bias);
            float* place = rows + (owned % R) * floats + net.y[op] + output;
            for (int rank = lane % COPIES; rank < FX_CLUSTER; rank += COPIES) fx_cluster_send(place, box, rank, value);
        }
        __syncwarp();
        if (!another) net_load<R>(net, *list, weights);  // now that the others have what they wait for
    }
    fx_mailbox_wait(box);
}

// Word number i of the inputs of R rows, from the host, and its place in the rows; false where there is none.
template <int R>
__device__ __forceinline__ bool net_input(const ActNet& net, int first_row, int i, int& place, float& value) {
    for (int input = 0; input < net.inputs; ++input) {
        const int width = net.width[input];
        if (i < R * width) {
            const int row = i / width;
            place = row * net.row_floats + net.column[input] + i - row * width;
            const unsigned* word = net.input + net.source[input] + static_cast<long long>(first_row) * width + i;
            value = first_row + row < net.rows ? __uint_as_float(fx_load_fresh(word)) : 0.0f;
            return true;
        }
        i -= R * width;
    }
    return false;
}

// A thread per row and branch.
template <int R>
__device__ __forceinline__ void net_report(const ActNet& net, const float* rows, const unsigned* header,
                                           int first_row) {
    const int thread = static_cast<int>(threadIdx.x), branches = net.branches;
    if (thread >= R * branches) return;
    const int local = thread / branches, branch = thread - local * branches, row = first_row + local;
    if (row >= net.rows) return;
    const u64* counters = reinterpret_cast<const u64*>(header);
    const u64 tag = counters[1] << 32;
    const int size = net.sizes[branch], offset = net.offsets[branch], item = row * branches + branch;
    const float* q = rows + local * net.row_floats + net.q + offset;
    const int action = net.policy == POLICY_GREEDY
                           ? policy_greedy(q, size)
                           : policy_drawn(net.policy, q, size, __uint_as_float(header[NET_SCALAR]),
                                          fx_random_bits(counters[3], counters[0], net.stream, static_cast<unsigned>(item)));
    fx_store_through(net.report + item, tag | static_cast<unsigned>(action));
    if (net.report_q == nullptr) return;
    u64* words = net.report_q + static_cast<long long>(row) * net.columns + offset;
    for (int a = 0; a < size; ++a) fx_store_through(words + a, tag | __float_as_uint(q[a]));
}

// The record into shared memory, in one go: its head, the units of this block's warps, the tasks.
__device__ __forceinline__ void net_copy(const ActNet& record, int4* to, int rank) {
    constexpr int HEAD = NET_HEAD / 16, UNITS = 2048 / FX_CLUSTER / 4, TASKS = 1024 / 4;
    const int4* head = reinterpret_cast<const int4*>(&record);
    const int4* units = reinterpret_cast<const int4*>(record.units) + rank * UNITS;
    const int4* tasks = reinterpret_cast<const int4*>(record.tasks);
#pragma unroll
    for (int base = 0; base < HEAD + UNITS + TASKS; base += NET_THREADS) {
        const int i = base + static_cast<int>(threadIdx.x);
        if (i < HEAD + UNITS + TASKS) {
            to[i] = i < HEAD ? head[i] : i < HEAD + UNITS ? units[i - HEAD] : tasks[i - HEAD - UNITS];
        }
    }
}

template <int R>
__device__ __forceinline__ void act_net(const ActNet* table, int count) {
    FX_DYN_SHARED(float, shared);
    int tile;
    const ActNet& record = fx_record(table, count, tile);
    const int thread = static_cast<int>(threadIdx.x), rank = fx_cluster_rank();
    net_copy(record, reinterpret_cast<int4*>(shared), rank);
    __syncthreads();
    const ActNet& net = *reinterpret_cast<const ActNet*>(shared);  // units and tasks are not where it says
    const int* units = reinterpret_cast<const int*>(shared) + NET_HEAD / 4;
    const int* tasks = units + 2048 / FX_CLUSTER;
    FxMailbox* boxes = reinterpret_cast<FxMailbox*>(shared + NET_HEAD / 4 + 2048 / FX_CLUSTER + 1024);
    unsigned* header = reinterpret_cast<unsigned*>(boxes + 32);
    float* staged = reinterpret_cast<float*>(header + NET_HEADER);
    float* rows = staged + net.staged_floats;
    const int first_row = tile / FX_CLUSTER * R;
    if (thread < net.steps && net.sent[thread] > 0) fx_mailbox_open(boxes + thread, 4 * R * net.sent[thread]);
    fx_cluster_arrive();
    fx_wait();
    fx_trigger();

    // Host memory is far away: its words are asked for first, and everything that needs none of them is done meanwhile.
    // Lines of 128 bytes go round the blocks of the cluster, so that each is read once and by one warp.
    int i = (thread / 32 * FX_CLUSTER + rank) * 32 + thread % 32, place = 0;
    float value = 0.0f;
    bool there = net_input<R>(net, first_row, i, place, value);
    const unsigned word = rank == 0 && thread < NET_HEADER ? fx_load_fresh(net.input + thread) : 0u;
    const int* unit_list = units + thread / 32 * net.unit_length;
    const int* task_list = tasks + thread / 32 * net.task_length;
    NetWeights weights;
    net_load<R>(net, *unit_list, weights);
    net_own_step(net, rows, staged, 0, task_list);
    fx_cluster_wait();
    while (there) {
        for (int to = 0; to < FX_CLUSTER; ++to) fx_cluster_send(rows + place, boxes, to, value);
        i += NET_THREADS * FX_CLUSTER;
        there = net_input<R>(net, first_row, i, place, value);
    }
    if (thread < NET_HEADER) header[thread] = word;
    fx_copies_wait();
    __syncthreads();
    fx_mailbox_wait(boxes);

    for (int step = 1; step < net.steps; ++step) {
        if (net.sent[step] > 0) {
            net_shared_step<R>(net, rows, boxes + step, step, unit_list, weights);
        } else {
            net_own_step(net, rows, staged, step, task_list);
            __syncthreads();
        }
    }
    if (rank == 0) net_report<R>(net, rows, header, first_row);
}

FX_CLUSTER_KERNEL(fx_act_net_1, ActNet)
extern "C" __global__ void __launch_bounds__(512, 1) fx_act_net_1(const ActNet* table, int count) {
    act_net<1>(table, count);
}

FX_CLUSTER_KERNEL(fx_act_net_2, ActNet)
extern "C" __global__ void __launch_bounds__(512, 1) fx_act_net_2(const ActNet* table, int count) {
    act_net<2>(table, count);
}

FX_CLUSTER_KERNEL(fx_act_net_4, ActNet)
extern "C" __global__ void __launch_bounds__(512, 1) fx_act_net_4(const ActNet* table, int count) {
    act_net<4>(table, count);
}

FX_CLUSTER_KERNEL(fx_act_net_8, ActNet)
extern "C" __global__ void __launch_bounds__(512, 1) fx_act_net_8(const ActNet* table, int count) {
    act_net<8>(table, count);
}
