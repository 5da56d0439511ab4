// fx_c51_many: the losses of c51_record.cuh where the rows fill the device. LANES lanes work on one branch of one row,
// so that a warp goes through its instructions for several of them. Sizes are compiled in (ops/c51.py).
//
// Lane l of a group owns the atoms l, l + LANES, ...; what there is once per action each lane makes for itself. A block
// holds GROUPS / D whole rows, so that dv is added up over the branches in their order. A group without a row works on
// the last one for nothing, as a warp stays together in its exchanges.
#include "c51_record.cuh"

#ifndef C51_SIZES
#define C51_SIZES 4, 51, 3, 3, true
#endif

struct C51Sizes {
    int branches;  // D
    int atoms;
    int most;      // actions of a branch
    int fewest;
    bool dueling;  // heads with a value
};

constexpr C51Sizes c51_sizes = {C51_SIZES};
constexpr int LANES = 16, BRANCHES = c51_sizes.branches, ATOMS = c51_sizes.atoms, MOST = c51_sizes.most;
constexpr int CHUNKS = (ATOMS + LANES - 1) / LANES, GROUPS = 256 / LANES, ROWS = GROUPS / BRANCHES;
constexpr int EARLY = 32 / LANES;
constexpr bool DUELING = c51_sizes.dueling;

struct C51ManyShared {
    C51 record;
    float losses[3][GROUPS];  // c51 of each group, cql, distill
    // Of each group: what its projection takes, and later its share of dv, and behind the last atom of td.
    alignas(8) float atoms[GROUPS][2 * LANES * CHUNKS + 4];
};

// Whether a branch of n actions has this one.
__device__ __forceinline__ bool c51_has(int action, int n) { return action < c51_sizes.fewest || action < n; }

// Whether lane l has an atom in this chunk.
__device__ __forceinline__ bool c51_owns(int chunk, int lane) { return lane + LANES * chunk < ATOMS; }

// The lane's atoms of one action, 0 beyond the last and where there is none. `from` points to the lane's first.
__device__ __forceinline__ void c51_read(float (&x)[CHUNKS], const float* from, int lane, bool any) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) x[c] = any && c51_owns(c, lane) ? from[LANES * c] : 0.0f;
}

// One number of an action out of those of all.
template <class At>
__device__ __forceinline__ float c51_choose(int action, At at) {
    float value = at(0);
#pragma unroll
    for (int g = 1; g < MOST; ++g) value = g == action ? at(g) : value;
    return value;
}

// at(0) + ... + at(N - 1).
template <int N, class At>
__device__ __forceinline__ float c51_total(At at) {
    float sum = at(0);
#pragma unroll
    for (int i = 1; i < N; ++i) sum += at(i);
    return sum;
}

// One branch d of one row; leaves its parts of the sums in the block's shared memory. What goes into an exponential is
// in units of ln 2. exists: the row counts and is stored.
__device__ __forceinline__ void c51_group(C51ManyShared& shared, int group, int row, int d, bool exists) {
    constexpr float BITS = c51_bits;
    const C51& record = shared.record;
    const int lane = static_cast<int>(threadIdx.x % LANES);
    const int n = c51_sizes.fewest == MOST ? MOST : record.sizes[d], offset = record.offset[d];

    const int best = c51_row(record.best, record.ld_best, row)[d];
    const int action = c51_row(record.actions, record.ld_actions, row)[d];
    const float disc = fx_global(record.discount)[row], reward = fx_global(record.reward)[row];
    const float weight = fx_global(record.weight)[row];
    const float w_c51 = c51_signal(record.w_c51), w_cql = c51_signal(record.w_cql);
    const float w_distill = c51_signal(record.w_distill);
    float base[CHUNKS], next[CHUNKS], x[MOST][CHUNKS], target[MOST][CHUNKS], q[MOST], lse[MOST];
    const float* from = c51_row(record.adv_target[d], record.ld_adv_target[d], row) + lane;
#pragma unroll
    for (int g = 0; g < MOST; ++g) c51_read(target[g], from + g * ATOMS, lane, c51_has(g, n));
    c51_read(next, c51_row(record.v_target, record.ld_v_target, row) + lane, lane, DUELING);
    from = c51_row(record.adv[d], record.ld_adv[d], row) + lane;
#pragma unroll
    for (int g = 0; g < MOST; ++g) c51_read(x[g], from + g * ATOMS, lane, c51_has(g, n));
    c51_read(base, c51_row(record.v, record.ld_v, row) + lane, lane, DUELING);
    const float* const from_q = c51_row(record.q, record.ld_q, row) + offset;
    const float* const from_lse = c51_row(record.lse, record.ld_lse, row) + offset;
#pragma unroll
    for (int g = 0; g < MOST; ++g) {
        q[g] = c51_has(g, n) ? from_q[g] : -FX_INF;
        lse[g] = c51_has(g, n) ? BITS * from_lse[g] : 0.0f;
    }
    const int greedy = best >= 0 && best < n ? best : 0;
    const float norm = BITS * (c51_row(record.lse_target, record.ld_lse_target, row) + offset)[greedy];
    const bool known = action >= 0 && action < n;
    const int taken = known ? action : 0;
    const int quantiles = record.theta != nullptr ? record.quantiles : 0;
    const float* quantile = c51_row(record.theta, record.ld_theta, row * quantiles + lane) + (offset + taken);
    const int step = LANES * record.ld_theta;
    float early[EARLY];  // the first quantiles, which are waited for later
#pragma unroll
    for (int i = 0; i < EARLY; ++i) early[i] = lane + LANES * i < quantiles ? *c51_row(quantile, step, i) : 0.0f;

    // As in c51.cu.
    const double low = record.v_min;
    const float start = static_cast<float>(((known ? reward : FX_NAN) + (static_cast<double>(disc) - 1.0) * low) *
                                           record.atoms_per_unit);
    const float inverse = c51_divide(1.0f, static_cast<float>(n));  // of the actions
    float m[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (DUELING) next[c] -= inverse * c51_total<MOST>([&](int g) { return target[g][c]; });
        next[c] += c51_choose(greedy, [&](int g) { return target[g][c]; });
        next[c] = c51_power(fmaf(next[c], BITS, -norm));
    }
    c51_project<LANES>(ATOMS, start, disc, next, shared.atoms[group], m);

    const float lse_taken = c51_choose(taken, [&](int g) { return lse[g]; });
    const float q_taken = known ? c51_choose(taken, [&](int g) { return q[g]; }) : FX_NAN;
    float cross = 0.0f, mass = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (DUELING) base[c] -= inverse * c51_total<MOST>([&](int g) { return x[g][c]; });
        base[c] *= BITS;
        cross -= m[c] * fmaf(c51_choose(taken, [&](int g) { return x[g][c]; }), BITS, base[c] - lse_taken);
        mass += m[c];
    }
    cross = 0.693147181f * fx_lanes_sum<LANES>(cross);
    mass = fx_lanes_sum<LANES>(mass);
    float theta = c51_total<EARLY>([&](int i) { return early[i]; });
#pragma unroll 1
    for (int i = EARLY; lane + LANES * i < quantiles; ++i) theta += *c51_row(quantile, step, i);
    theta = fx_lanes_sum<LANES>(theta);
    float peak = q[0];
#pragma unroll
    for (int g = 1; g < MOST; ++g) peak = fmaxf(peak, q[g]);
    float softmax[MOST];
#pragma unroll
    for (int g = 0; g < MOST; ++g) softmax[g] = c51_exp(q[g] - peak);
    const float sum = c51_total<MOST>([&](int g) { return softmax[g]; });
    const float gap = quantiles > 0 ? q_taken - c51_divide(theta, static_cast<float>(quantiles)) : 0.0f;
    if (lane == 0) {
        shared.losses[0][group] = exists ? weight * cross : 0.0f;
        shared.losses[1][group] = exists ? peak + c51_log(sum) - q_taken : 0.0f;
        shared.losses[2][group] = exists ? 0.5f * gap * gap : 0.0f;
    }
    float* const parts = shared.atoms[group];  // every lane has passed the sums, and with them the projection
    if (lane == 0) parts[ATOMS] = cross;
    float* to = record.dadv[d];
    if (to == nullptr || !exists) return;
    to = c51_row(to, record.ld_dadv[d], row) + lane;

    // A loss whose weight is 0 is left out rather than multiplied.
    const float share = c51_divide(1.0f, static_cast<float>(record.rows) * static_cast<float>(BRANCHES));
    const float factor = w_c51 * weight * share;
    const float pull = w_cql * share, chosen = fx_scaled(w_distill, gap) * share;
    const float part = known ? c51_divide(1.0f, sum) : FX_NAN;
    // The actions with a gradient through q, and the one that the distributional loss moves: a bit each.
    const int only = 1 << taken, through = w_cql != 0.0f ? -1 : w_distill != 0.0f ? only : 0;
    const int move = w_c51 != 0.0f ? only : 0;
    float dq[MOST];
#pragma unroll
    for (int g = 0; g < MOST; ++g) {
        dq[g] = fx_scaled(pull, fmaf(softmax[g], part, g == taken ? -1.0f : 0.0f)) + (g == taken ? chosen : 0.0f);
    }
#pragma unroll
    for (int g = 0; g < MOST; ++g) {
        const bool spread = (through >> g & 1) != 0, moved = (move >> g & 1) != 0;
        if (c51_has(g, n) && (spread || moved)) {
            // dq (z_k - q) and what belongs to w_c51, as level + k slope.
            const float slope = dq[g] * record.spacing;
            const float level = (spread ? dq[g] * (record.v_min - q[g]) : 0.0f) + (moved ? factor * mass : 0.0f);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const float p = c51_power(fmaf(x[g][c], BITS, base[c] - lse[g]));
                x[g][c] = p * fmaf(static_cast<float>(lane + LANES * c), slope, level);
                if (moved) x[g][c] -= factor * m[c];
            }
        } else {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) x[g][c] = 0.0f;
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (!c51_owns(c, lane)) continue;
        const float over = c51_total<MOST>([&](int g) { return x[g][c]; });
        const float mean = DUELING ? over * inverse : 0.0f;
        parts[lane + LANES * c] = over;
#pragma unroll
        for (int g = 0; g < MOST; ++g) {
            if (c51_has(g, n)) to[g * ATOMS + LANES * c] = x[g][c] - mean;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_c51_many(const C51* table, int count) {
    __shared__ C51ManyShared shared;
    int tile;
    const C51& record = fx_record(table, count, tile, shared.record);
    const int thread = static_cast<int>(threadIdx.x), lane = static_cast<int>(threadIdx.x % LANES);
    const unsigned place = threadIdx.x / LANES;
    const int group = static_cast<int>(place), d = static_cast<int>(place % BRANCHES);
    int row = tile * ROWS + static_cast<int>(place / BRANCHES);
    const bool exists = group < ROWS * BRANCHES && row < record.rows;
    if (!exists) row = record.rows - 1;
    fx_wait();
    fx_trigger();
    c51_group(shared, group, row, d, exists);
    __syncthreads();
    if (exists) {
        // The groups of a row share its atoms.
#pragma unroll 1
        for (int k = lane + LANES * d; k <= ATOMS; k += LANES * BRANCHES) {
            float sum = shared.atoms[group - d][k];
#pragma unroll
            for (int b = 1; b < BRANCHES; ++b) sum += shared.atoms[group - d + b][k];
            float* const out = k < ATOMS ? record.dv : record.td;
            if (out == nullptr) continue;
            if (k < ATOMS) {
                c51_row(out, record.ld_dv, row)[k] = sum;
            } else {
                fx_global(out)[row] = c51_divide(sum, static_cast<float>(BRANCHES));
            }
        }
    }
    // A warp for each loss.
    if (thread >= 96) return;
    const int loss = thread >> 5, from = thread & 31;
    const double sum = fx_warp_sum(from < GROUPS ? static_cast<double>(shared.losses[loss][from]) : 0.0);
    double* const out = record.partials[loss];
    if (from == 0 && out != nullptr) fx_global(out)[tile] = sum * record.branch_share;
}
