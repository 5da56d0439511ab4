// fx_c51 (up to 64 atoms), fx_c51_wide: the losses of the C51 heads and their gradient, all D branches of a row in one
// pass.
//   z_k        = v_min + k spacing;  top = atoms - 1
//   m          = project(reward + discount z, p'), p' = softmax of branch d's target logits of action best:
//                atom k receives sum_j p'_j max(0, 1 - |u_j - k|), u_j = (reward + discount z_j - v_min) / spacing,
//                limited to [0, top]. A discount of 0 ignores what the target networks hold.
//   c51_d      = -sum_k m_k log p_d[action, k];      td[b] = mean_d c51_d
//   cql_d      = logsumexp_a q_d[a] - q_d[action]
//   distill_d  = (q_d[action] - mean_i theta[i, action])^2 / 2
//   partials   : per tile, sum over its rows of weight[b] td[b], of mean_d cql_d, of mean_d distill_d
// Gradient, with w_c51, w_cql, w_distill read on the device (null = that loss is absent; 0 gives an exact 0, whatever
// the rest holds), all divided by rows * D:
//   dq_d[a]        = w_cql (softmax(q_d)[a] - [a = action]) + w_distill (q_d[action] - mean theta) [a = action]
//   g_d[a, k]      = dq_d[a] p_d[a, k] (z_k - q_d[a]) + w_c51 weight[b] (p_d[a, k] sum(m) - m_k) [a = action]
//   dadv_d[a, k]   = g_d[a, k] - mean_a g_d[a, k];   dv[k] = sum_d sum_a g_d[a, k]      (=, never +=)
//   Heads without a value (v and v_target null) are plain: adv holds the logits, and dadv_d = g_d.
// An infinite reward lands on the outermost atom, as the projection says; a NaN reward makes the row NaN, and so does
// an action outside [0, n_d), which is looked up nowhere.
//
// A warp works on one branch of one row: lane l owns the atoms l, l + 32, ... The softmaxes come ready from fx_dueling
// (log p = logits - lse). A block holds 8 / D rows, so that dv is added up over the branches in their order. Branches
// of up to four actions are read once and kept in registers, larger ones are read again for each pass. The wide kernel
// is one of its own because its registers would cost the other half of its warps.
#include "c51.cuh"

struct C51 {
    int first_tile;
    int tiles;
    const float* v;              // [rows, atoms], online networks at s; null: plain heads
    const float* adv[8];         // per branch [rows, n_d * atoms]
    const float* q;              // [rows, all actions], from fx_dueling
    const float* lse;            // [rows, all actions], from fx_dueling
    const float* v_target;       // [rows, atoms], target networks at s'; null with v
    const float* adv_target[8];  // per branch [rows, n_d * atoms]
    const float* lse_target;     // [rows, all actions]
    const float* theta;          // [rows, quantiles, all actions], IQN at s, or null: no distillation
    const int* actions;          // [rows, branches]
    const int* best;             // [rows, branches], greedy actions at s'
    const float* reward;         // [rows]
    const float* discount;       // [rows]
    const float* weight;         // [rows], importance weights
    const float* w_c51;          // one float or null
    const float* w_cql;          // one float or null
    const float* w_distill;      // one float or null
    float* dadv[8];              // per branch [rows, n_d * atoms], all null: no gradient
    float* dv;                   // [rows, atoms], null without dadv or v
    float* td;                   // [rows] or null
    double* c51_partials;        // [tiles] or null
    double* cql_partials;        // [tiles] or null
    double* distill_partials;    // [tiles] or null
    long long ld_adv[8];         // elements between rows
    long long ld_adv_target[8];
    long long ld_dadv[8];
    long long ld_v;
    long long ld_q;
    long long ld_lse;
    long long ld_v_target;
    long long ld_lse_target;
    long long ld_theta;          // elements between quantiles
    long long ld_actions;
    long long ld_best;
    long long ld_dv;
    int offset[8];               // first column of each branch in arrays over all actions
    int sizes[8];                // n_d
    int branches;                // D, 1 to 8
    int rows;
    int atoms;                   // 2 to 256
    int quantiles;
    float v_min;
    float spacing;               // (v_max - v_min) / (atoms - 1)
    double atoms_per_unit;       // (atoms - 1) / (v_max - v_min)
};

// What a warp adds to the losses of its row, before the means; the weight is that of the row.
struct C51Losses {
    float c51;
    float cql;
    float distill;
    float weight;
};

__device__ __forceinline__ float c51_signal(const float* signal) { return signal != nullptr ? *signal : 0.0f; }

__device__ __forceinline__ float c51_nan() { return __uint_as_float(0x7fc00000u); }

// Gradients of the logits of one action. A loss whose weight is 0 is left out rather than multiplied.
struct C51Slope {
    bool spread;   // through q
    bool cross;    // the cross-entropy
    float dq;
    float q;
    float lse;
    float factor;  // w_c51 weight / (rows D)
    float mass;    // sum(m)

    __device__ __forceinline__ float operator()(float logit, float z, float m) const {
        float g = 0.0f;
        if (spread || cross) {
            const float p = expf(logit - lse);
            if (spread) g = dq * (p * (z - q));
            if (cross) g += factor * (p * mass - m);
        }
        return g;
    }
};

template <int CHUNKS, int KEEP>
__device__ __forceinline__ C51Losses c51_branch(const C51& record, long long row, int d, float* shared) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int n = record.sizes[d], atoms = record.atoms, offset = record.offset[d];
    const bool dueling = record.v != nullptr;

    // Everything that can be on its way at once.
    const int action = record.actions[row * record.ld_actions + d];
    const int best = record.best[row * record.ld_best + d];
    const float disc = record.discount[row];
    float reward = record.reward[row];
    C51Losses losses = {};
    losses.weight = record.weight[row];
    float base[CHUNKS], next[CHUNKS];
    c51_load(base, record.v + row * record.ld_v, dueling ? atoms : 0);
    c51_load(next, record.v_target + row * record.ld_v_target, dueling ? atoms : 0);
    const C51Advantages<CHUNKS, KEEP> adv(record.adv[d] + row * record.ld_adv[d], n, atoms);
    const C51Advantages<CHUNKS, KEEP> target(record.adv_target[d] + row * record.ld_adv_target[d], n, atoms);
    const C51Actions<KEEP> q(record.q + row * record.ld_q + offset, n);
    const C51Actions<KEEP> lse(record.lse + row * record.ld_lse + offset, n);
    const C51Actions<KEEP> lse_target(record.lse_target + row * record.ld_lse_target + offset, n);
    const float w_c51 = c51_signal(record.w_c51), w_cql = c51_signal(record.w_cql);
    const float w_distill = c51_signal(record.w_distill);
    const bool known = action >= 0 && action < n;
    const int taken = known ? action : 0;
    if (!known) reward = c51_nan();
    // The first 32 quantiles; the rest, if any, is read where the sum is needed.
    const int quantiles = record.theta != nullptr ? record.quantiles : 0;
    const float* quantile = record.theta + row * quantiles * record.ld_theta + offset + taken;
    float theta = lane < quantiles ? quantile[lane * record.ld_theta] : 0.0f;

    // u_j = start + discount j, start = (reward + discount v_min - v_min) / spacing: in double, as the two multiples
    // of v_min nearly cancel.
    const double low = record.v_min;
    const float start = static_cast<float>((reward + (static_cast<double>(disc) - 1.0) * low) * record.atoms_per_unit);
    float m[CHUNKS];
    if (disc == 0.0f) {
        c51_point(atoms, start, m);
    } else {
        if (dueling) target.center(next);
        const float norm = lse_target.pick(best);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) next[c] = expf(next[c] + target.pick(best, c) - norm);
        c51_spread(atoms, start, disc, next, shared, m);
    }

    if (dueling) adv.center(base);
    float entropy = 0.0f, mass = 0.0f;
    const float lse_taken = lse.pick(taken);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (lane + 32 * c < atoms) entropy -= m[c] * (base[c] + adv.pick(taken, c) - lse_taken);
        mass += m[c];
    }
    losses.c51 = fx_warp_sum(entropy);
    mass = fx_warp_sum(mass);

    const float q_taken = known ? q.pick(taken) : c51_nan();
    float peak = -FX_INF, sum = 0.0f;
    if constexpr (KEEP > 0) {  // every lane by itself: cheaper than to share
#pragma unroll
        for (int a = 0; a < KEEP; ++a) peak = a < n ? fmaxf(peak, q(a)) : peak;
#pragma unroll
        for (int a = 0; a < KEEP; ++a) sum += a < n ? expf(q(a) - peak) : 0.0f;
    } else {
        for (int a = lane; a < n; a += 32) peak = fmaxf(peak, q(a));
#pragma unroll
        for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, step));
        for (int a = lane; a < n; a += 32) sum += expf(q(a) - peak);
        sum = fx_warp_sum(sum);
    }
    const float q_lse = peak + logf(sum);
    losses.cql = q_lse - q_taken;

    float gap = 0.0f;
    if (quantiles > 0) {
        for (int i = lane + 32; i < quantiles; i += 32) theta += quantile[i * record.ld_theta];
        gap = q_taken - fx_divide(fx_warp_sum(theta), static_cast<float>(quantiles));
        losses.distill = 0.5f * gap * gap;
    }
    float* dadv = record.dadv[d];
    if (dadv == nullptr) return losses;
    dadv += row * record.ld_dadv[d] + lane;

    const float share = fx_divide(1.0f, static_cast<float>(record.rows) * static_cast<float>(record.branches));
    const float factor = w_c51 * losses.weight * share;
    const float chosen = fx_scaled(w_distill, gap);
    const float v_min = record.v_min, spacing = record.spacing;
    const auto slope = [&](int a) {
        const bool here = a == taken;
        const float excess = known ? expf(q(a) - q_lse) - (here ? 1.0f : 0.0f) : c51_nan();
        const float dq = (fx_scaled(w_cql, excess) + (here ? chosen : 0.0f)) * share;
        const bool spread = w_cql != 0.0f || (here && w_distill != 0.0f);
        return C51Slope{spread, here && w_c51 != 0.0f, dq, q(a), lse(a), factor, mass};
    };
    // Without room for every gradient, twice over the actions: their mean must be known before the first is stored.
    const auto gradient = [&](const C51Slope& at, int a, int c) {
        return at(base[c] + adv(a, c), v_min + static_cast<float>(lane + 32 * c) * spacing, m[c]);
    };
    float over[CHUNKS] = {}, kept[KEEP > 0 ? KEEP : 1][CHUNKS];
#pragma unroll (KEEP > 0 ? KEEP : 1)
    for (int a = 0; a < (KEEP > 0 ? KEEP : n); ++a) {
        if (a >= n) break;
        const C51Slope at = slope(a);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const float g = gradient(at, a, c);
            over[c] += g;
            if constexpr (KEEP > 0) kept[a][c] = g;
        }
    }
    const float inverse = fx_divide(1.0f, static_cast<float>(n));
#pragma unroll (KEEP > 0 ? KEEP : 1)
    for (int a = 0; a < (KEEP > 0 ? KEEP : n); ++a) {
        if (a >= n) break;
        C51Slope at = {};
        if constexpr (KEEP == 0) at = slope(a);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (lane + 32 * c >= atoms) continue;
            const float g = KEEP > 0 ? kept[KEEP > 0 ? a : 0][c] : gradient(at, a, c);
            dadv[a * atoms + 32 * c] = dueling ? g - over[c] * inverse : g;
        }
    }
    __syncwarp();  // every lane has read the projected probabilities
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) shared[lane + 32 * c] = over[c];
    return losses;
}

template <int ATOMS>
struct C51Shared {
    C51 record;
    C51Losses losses[8];
    float atoms[8][ATOMS];
};

// Sums over the branches of a row and over the rows of a block, once all warps have left their parts.
template <int ATOMS>
__device__ __forceinline__ void c51_finish(const C51Shared<ATOMS>& shared, int tile, int rows, long long first) {
    const C51& record = shared.record;
    const int branches = record.branches, atoms = record.atoms;
    if (float* dv = record.dv; dv != nullptr) {
        for (int i = static_cast<int>(threadIdx.x); i < rows * atoms; i += 256) {
            const int r = i / atoms, k = i - r * atoms;
            float sum = 0.0f;
            for (int b = 0; b < branches; ++b) sum += shared.atoms[r * branches + b][k];
            dv[(first + r) * record.ld_dv + k] = sum;
        }
    }
    if (threadIdx.x >= 32) return;
    const int r = static_cast<int>(threadIdx.x);
    double c51 = 0.0, cql = 0.0, distill = 0.0;
    if (r < rows) {
        C51Losses sum = shared.losses[r * branches];
        for (int b = 1; b < branches; ++b) {
            const C51Losses& next = shared.losses[r * branches + b];
            sum.c51 += next.c51;
            sum.cql += next.cql;
            sum.distill += next.distill;
        }
        const float td = fx_divide(sum.c51, static_cast<float>(branches));
        if (record.td != nullptr) record.td[first + r] = td;
        c51 = static_cast<double>(sum.weight) * td;
        cql = sum.cql;
        distill = sum.distill;
    }
    c51 = fx_lanes_sum<8>(c51);
    cql = fx_lanes_sum<8>(cql);
    distill = fx_lanes_sum<8>(distill);
    if (r != 0) return;
    const double share = 1.0 / branches;
    if (record.c51_partials != nullptr) record.c51_partials[tile] = c51;
    if (record.cql_partials != nullptr) record.cql_partials[tile] = cql * share;
    if (record.distill_partials != nullptr) record.distill_partials[tile] = distill * share;
}

// `branch(record, row, d, atoms)` works on one branch of one row.
template <int ATOMS, class Branch>
__device__ __forceinline__ void c51_block(const C51* table, int count, C51Shared<ATOMS>& shared, Branch branch) {
    int tile;
    fx_record(table, count, tile, shared.record);
    const int warp = static_cast<int>(threadIdx.x >> 5);
    const int branches = shared.record.branches;
    const int block_rows = 8 / branches;
    const long long first = static_cast<long long>(tile) * block_rows;
    const int local = warp / branches, d = warp - local * branches;
    const long long left = shared.record.rows - first;
    const int rows = static_cast<int>(left < block_rows ? left : block_rows);
    fx_wait();
    fx_trigger();
    if (local < rows) {
        const C51Losses losses = branch(shared.record, first + local, d, shared.atoms[warp]);
        if ((threadIdx.x & 31u) == 0) shared.losses[warp] = losses;
    }
    __syncthreads();
    c51_finish(shared, tile, rows, first);
}

extern "C" __global__ void __launch_bounds__(256) fx_c51(const C51* table, int count) {
    __shared__ C51Shared<64> shared;
    c51_block(table, count, shared, [](const C51& record, long long row, int d, float* atoms) {
        return record.sizes[d] <= 4 ? c51_branch<2, 4>(record, row, d, atoms) : c51_branch<2, 0>(record, row, d, atoms);
    });
}

extern "C" __global__ void __launch_bounds__(256) fx_c51_wide(const C51* table, int count) {
    __shared__ C51Shared<256> shared;
    c51_block(table, count, shared, [](const C51& record, long long row, int d, float* atoms) {
        return record.atoms <= 128 ? c51_branch<4, 0>(record, row, d, atoms) : c51_branch<8, 0>(record, row, d, atoms);
    });
}
