// fx_c51: the losses of the dueling C51 heads and their gradient, all D branches of a row in one pass.
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
// An infinite reward lands on the outermost atom, as the projection says; a NaN reward makes the row NaN, and so does
// an action outside [0, n_d), which is looked up nowhere.
//
// A warp works on one branch of one row: lane l owns the atoms l, l + 32, ... The softmaxes come ready from fx_dueling
// (log p = logits - lse). A block holds 8 / D rows, so that dv is added up over the branches in their order.
#include "fx.cuh"

struct C51 {
    int first_tile;
    int tiles;
    const float* v;              // [rows, atoms], online networks at s
    const float* adv[8];         // per branch [rows, n_d * atoms]
    const float* q;              // [rows, all actions], from fx_dueling
    const float* lse;            // [rows, all actions], from fx_dueling
    const float* v_target;       // [rows, atoms], target networks at s'
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
    float* dv;                   // [rows, atoms], null without dadv
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
    float v_max;
    float spacing;               // (v_max - v_min) / (atoms - 1)
};

// What a warp adds to the losses of its row, before the means.
struct C51Losses {
    float c51;
    float cql;
    float distill;
};

// One branch of one row: what its first loads need, read from the record before fx_wait(), so that no load of a pointer
// stands between the end of the previous kernel and the first load of data. The rest is read where it is used: held in
// registers from the start it would be spilled.
struct C51Branch {
    const float* v;
    const float* adv;  // [n, atoms]
    const float* v_target;
    const float* adv_target;
    const float* lse_target;
    const int* action;
    const int* best;
    int n;
    int atoms;
    int offset;
    float v_min;
    float spacing;

    __device__ __forceinline__ float z(int k) const { return v_min + static_cast<float>(k) * spacing; }
};

__device__ __forceinline__ C51Branch c51_select(const C51& record, long long row, int d) {
    C51Branch b;
    b.offset = record.offset[d];
    b.v = record.v + row * record.ld_v;
    b.adv = record.adv[d] + row * record.ld_adv[d];
    b.v_target = record.v_target + row * record.ld_v_target;
    b.adv_target = record.adv_target[d] + row * record.ld_adv_target[d];
    b.lse_target = record.lse_target + row * record.ld_lse_target + b.offset;
    b.action = record.actions + row * record.ld_actions + d;
    b.best = record.best + row * record.ld_best + d;
    b.n = record.sizes[d];
    b.atoms = record.atoms;
    b.v_min = record.v_min;
    b.spacing = record.spacing;
    return b;
}

__device__ __forceinline__ float c51_signal(const float* signal) { return signal != nullptr ? *signal : 0.0f; }

__device__ __forceinline__ float c51_nan() { return __uint_as_float(0x7fc00000u); }

// The logits of all actions less their own advantages: v - mean_a adv, for the lane's atoms.
template <int CHUNKS>
__device__ __forceinline__ void c51_base(const float* v, const float* adv, int n, int atoms, float (&base)[CHUNKS]) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) base[c] = 0.0f;
    for (int a = 0; a < n; ++a) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int k = lane + 32 * c;
            if (k < atoms) base[c] += adv[a * atoms + k];
        }
    }
    const float share = fx_divide(1.0f, static_cast<float>(n));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int k = lane + 32 * c;
        base[c] = k < atoms ? v[k] - base[c] * share : 0.0f;
    }
}

// m for the lane's atoms. `shared`: 32 * CHUNKS floats of this warp's own.
template <int CHUNKS>
__device__ __forceinline__ void c51_project(
    const C51Branch& b, float reward, float disc, float v_max, float* shared, float (&m)[CHUNKS]) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const float top = static_cast<float>(b.atoms - 1);
    const bool dead = disc == 0.0f;
    // u_j = start + discount j, start = (reward + discount v_min - v_min) / spacing: in double, as the two multiples
    // of v_min nearly cancel.
    const double low = b.v_min;
    const float start = static_cast<float>((reward + (static_cast<double>(disc) - 1.0) * low) *
                                           ((b.atoms - 1) / (static_cast<double>(v_max) - low)));
    if (!dead) {
        const int best = *b.best;
        const float lse = b.lse_target[best];
        float base[CHUNKS];
        c51_base<CHUNKS>(b.v_target, b.adv_target, b.n, b.atoms, base);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int k = lane + 32 * c;
            if (k < b.atoms) shared[k] = expf(base[c] + b.adv_target[best * b.atoms + k] - lse);
        }
        __syncwarp();
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int k = lane + 32 * c;
        const float at = static_cast<float>(k);
        m[c] = 0.0f;
        if (k >= b.atoms) continue;
        // Only the j with |u_j - k| < 1, and on the outermost atoms those beyond the ends, contribute. The range takes
        // in its ends, which add nothing unless rounding moved them; NaN and tiny discounts get all of it.
        int from = 0, to = dead ? 0 : b.atoms - 1;
        if (disc >= 0.01f) {
            const float inverse = fx_divide(1.0f, disc);
            if (k > 0) from = static_cast<int>(fminf(fmaxf(floorf((at - 1.0f - start) * inverse), 0.0f), top));
            if (k < b.atoms - 1) {
                to = static_cast<int>(fmaxf(fminf(ceilf((at + 1.0f - start) * inverse), top), 0.0f));
            }
        }
        for (int j = from; j <= to; ++j) {
            float u = dead ? start : fmaf(static_cast<float>(j), disc, start);
            u = u < 0.0f ? 0.0f : u > top ? top : u;  // NaN passes
            const float hat = 1.0f - fabsf(u - at);
            m[c] += (dead ? 1.0f : shared[j]) * (hat < 0.0f ? 0.0f : hat);
        }
    }
}

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

template <int CHUNKS>
__device__ __forceinline__ C51Losses c51_branch(const C51& record, const C51Branch& b, long long row, int d, float* shared) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int n = b.n, atoms = b.atoms;
    const int action = *b.action;
    const bool known = action >= 0 && action < n;
    const int taken = known ? action : 0;
    const float reward = record.reward[row];
    const float* q = record.q + row * record.ld_q + b.offset;
    const float* lse = record.lse + row * record.ld_lse + b.offset;

    float base[CHUNKS], m[CHUNKS];
    c51_base<CHUNKS>(b.v, b.adv, n, atoms, base);
    c51_project<CHUNKS>(b, known ? reward : c51_nan(), record.discount[row], record.v_max, shared, m);
    float entropy = 0.0f, mass = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int k = lane + 32 * c;
        if (k >= atoms) continue;
        entropy -= m[c] * (base[c] + b.adv[taken * atoms + k] - lse[taken]);
        mass += m[c];
    }
    C51Losses losses = {};
    losses.c51 = fx_warp_sum(entropy);
    mass = fx_warp_sum(mass);

    const float q_taken = known ? q[taken] : c51_nan();
    float peak = -FX_INF, sum = 0.0f;
    for (int a = lane; a < n; a += 32) peak = fmaxf(peak, q[a]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, step));
    for (int a = lane; a < n; a += 32) sum += expf(q[a] - peak);
    const float q_lse = peak + logf(fx_warp_sum(sum));
    losses.cql = q_lse - q_taken;

    float gap = 0.0f;
    if (record.theta != nullptr) {
        const long long ld = record.ld_theta;
        const int quantiles = record.quantiles;
        const float* theta = record.theta + row * quantiles * ld + b.offset + taken;
        float total = 0.0f;
        for (int i = lane; i < quantiles; i += 32) total += theta[i * ld];
        gap = q_taken - fx_divide(fx_warp_sum(total), static_cast<float>(quantiles));
        losses.distill = 0.5f * gap * gap;
    }
    float* dadv = record.dadv[d];
    if (dadv == nullptr) return losses;
    dadv += row * record.ld_dadv[d];

    const float w_c51 = c51_signal(record.w_c51), w_cql = c51_signal(record.w_cql);
    const float w_distill = c51_signal(record.w_distill);
    const float share = fx_divide(1.0f, static_cast<float>(record.rows) * static_cast<float>(record.branches));
    const float factor = w_c51 * record.weight[row] * share;
    const float chosen = fx_scaled(w_distill, gap);
    const auto slope = [&](int a) {
        const bool here = a == taken;
        const float excess = known ? expf(q[a] - q_lse) - (here ? 1.0f : 0.0f) : c51_nan();
        const float dq = (fx_scaled(w_cql, excess) + (here ? chosen : 0.0f)) * share;
        const bool spread = w_cql != 0.0f || (here && w_distill != 0.0f);
        return C51Slope{spread, here && w_c51 != 0.0f, dq, q[a], lse[a], factor, mass};
    };
    // Twice over the actions, rather than once with every gradient kept: their mean must be known before the first
    // one is stored, and the second look finds the advantages in the cache.
    float over[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) over[c] = 0.0f;
    for (int a = 0; a < n; ++a) {
        const C51Slope at = slope(a);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int k = lane + 32 * c;
            if (k < atoms) over[c] += at(base[c] + b.adv[a * atoms + k], b.z(k), m[c]);
        }
    }
    const float inverse = fx_divide(1.0f, static_cast<float>(n));
    for (int a = 0; a < n; ++a) {
        const C51Slope at = slope(a);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int k = lane + 32 * c, i = a * atoms + k;
            if (k < atoms) dadv[i] = at(base[c] + b.adv[i], b.z(k), m[c]) - over[c] * inverse;
        }
    }
    __syncwarp();  // every lane has read the projected probabilities
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) shared[lane + 32 * c] = over[c];
    return losses;
}

extern "C" __global__ void __launch_bounds__(256) fx_c51(const C51* table, int count) {
    __shared__ float atoms_of[8][256];
    __shared__ C51Losses losses_of[8];
    int tile;
    const C51& record = fx_record(table, count, tile);
    const int warp = static_cast<int>(threadIdx.x >> 5);
    const int branches = record.branches, atoms = record.atoms;
    const int block_rows = 8 / branches;
    const long long first = static_cast<long long>(tile) * block_rows;
    const int local = warp / branches, d = warp - local * branches;
    const int rows = static_cast<int>(record.rows - first < block_rows ? record.rows - first : block_rows);
    const bool works = local < rows;
    const long long row = works ? first + local : 0;
    const C51Branch branch = c51_select(record, row, d);
    fx_wait();
    fx_trigger();
    if (works) {
        C51Losses losses;
        if (atoms <= 32) {
            losses = c51_branch<1>(record, branch, row, d, atoms_of[warp]);
        } else if (atoms <= 64) {
            losses = c51_branch<2>(record, branch, row, d, atoms_of[warp]);
        } else if (atoms <= 128) {
            losses = c51_branch<4>(record, branch, row, d, atoms_of[warp]);
        } else {
            losses = c51_branch<8>(record, branch, row, d, atoms_of[warp]);
        }
        if ((threadIdx.x & 31u) == 0) losses_of[warp] = losses;
    }
    __syncthreads();
    if (float* dv = record.dv; dv != nullptr) {
        for (int i = static_cast<int>(threadIdx.x); i < rows * atoms; i += 256) {
            const int r = i / atoms, k = i - r * atoms;
            float sum = 0.0f;
            for (int b = 0; b < branches; ++b) sum += atoms_of[r * branches + b][k];
            dv[(first + r) * record.ld_dv + k] = sum;
        }
    }
    if (threadIdx.x != 0) return;
    double c51 = 0.0, cql = 0.0, distill = 0.0;
    for (int r = 0; r < rows; ++r) {
        C51Losses sum = losses_of[r * branches];
        for (int b = 1; b < branches; ++b) {
            const C51Losses& next = losses_of[r * branches + b];
            sum = C51Losses{sum.c51 + next.c51, sum.cql + next.cql, sum.distill + next.distill};
        }
        const float td = fx_divide(sum.c51, static_cast<float>(branches));
        if (record.td != nullptr) record.td[first + r] = td;
        c51 += static_cast<double>(record.weight[first + r]) * td;
        cql += static_cast<double>(sum.cql) / branches;
        distill += static_cast<double>(sum.distill) / branches;
    }
    if (record.c51_partials != nullptr) record.c51_partials[tile] = c51;
    if (record.cql_partials != nullptr) record.cql_partials[tile] = cql;
    if (record.distill_partials != nullptr) record.distill_partials[tile] = distill;
}
