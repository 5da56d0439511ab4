// fx_c51 (up to 64 atoms), fx_c51_wide: the losses of c51_record.cuh, a warp for each branch of each row.
//
// Lane l owns the atoms l, l + 32, ..., and of what there is once per action, the actions l, l + 32, ... The softmaxes
// come ready from fx_dueling (log p = logits - lse). A block holds 8 / D rows, so that dv is added up over the branches
// in their order. The wide kernel is one of its own because its registers would cost the other half of its warps.
#include "c51_record.cuh"

template <int ATOMS>
struct C51Shared {
    C51 record;
    float losses[24];  // c51 of each warp, cql, distill
    // Of each warp: what its projection takes, and later its share of dv, and behind the last atom of td.
    alignas(8) float atoms[8][2 * ATOMS + 4];
};

// A number of one action. Lane l holds that of action l, of further actions it is in `memory()`.
template <class Memory>
__device__ __forceinline__ float c51_pick(float own, Memory memory, int actions, int action) {
    float value = __shfl_sync(0xffffffffu, own, action & 31);
    if (actions > 32) value = memory()[action];
    return value;
}

// One branch d of one row; leaves its parts of the sums in the block's shared memory.
template <int CHUNKS, int GROUP, int ATOMS>
__device__ __forceinline__ void c51_branch(C51Shared<ATOMS>& shared, int row, int d) {
    const C51& record = shared.record;
    const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31u);
    const int n = record.sizes[d], atoms = record.atoms, offset = record.offset[d];
    const bool dueling = record.v != nullptr;

    // Everything that can be on its way at once.
    const int best = c51_row(record.best, record.ld_best, row)[d];
    const int action = c51_row(record.actions, record.ld_actions, row)[d];
    const float disc = fx_global(record.discount)[row];
    float reward = fx_global(record.reward)[row];
    const float weight = fx_global(record.weight)[row];
    // Made anew where they are needed again, which is seldom: as variables they would take up registers.
    const auto q = [&]() { return c51_row(record.q, record.ld_q, row) + offset; };
    const auto lse = [&]() { return c51_row(record.lse, record.ld_lse, row) + offset; };
    const auto lse_target = [&]() { return c51_row(record.lse_target, record.ld_lse_target, row) + offset; };
    const float *first_q = q(), *first_lse = lse(), *first_lse_target = lse_target();
    float own_q = lane < n ? first_q[lane] : -FX_INF, own_lse = lane < n ? first_lse[lane] : 0.0f;
    const float own_lse_target = lane < n ? first_lse_target[lane] : 0.0f;
    const float w_c51 = c51_signal(record.w_c51), w_cql = c51_signal(record.w_cql);
    const float w_distill = c51_signal(record.w_distill);
    const float* adv = c51_row(record.adv[d], record.ld_adv[d], row) + lane;
    const float* adv_target = c51_row(record.adv_target[d], record.ld_adv_target[d], row) + lane;
    float base[CHUNKS], next[CHUNKS], x[GROUP][CHUNKS], target[GROUP][CHUNKS];
    c51_load(target, adv_target, 0, n, atoms);
    c51_load(next, c51_row(record.v_target, record.ld_v_target, row) + lane, dueling ? atoms : 0);
    c51_load(x, adv, 0, n, atoms);
    c51_load(base, c51_row(record.v, record.ld_v, row) + lane, dueling ? atoms : 0);

    const bool known = action >= 0 && action < n;
    const int taken = known ? action : 0;
    // u_j = start + discount j, start = (reward + discount v_min - v_min) / spacing: in double, as the two multiples
    // of v_min nearly cancel.
    const double low = record.v_min;
    if (!known) reward = FX_NAN;
    const float start = static_cast<float>((reward + (static_cast<double>(disc) - 1.0) * low) * record.atoms_per_unit);
    float m[CHUNKS], picked[CHUNKS];
    if (dueling) c51_center(next, target, adv_target, n, atoms);
    c51_take(picked, target, adv_target, best, n, atoms);
    // Not earlier, since these addresses have to wait for the action. The first 32 quantiles; the rest, if any, is read
    // where the sum is needed.
    const int quantiles = record.theta != nullptr ? record.quantiles : 0;
    const auto quantile = [&](int i) { return c51_row(record.theta, record.ld_theta, row * quantiles + i) + offset; };
    float theta = lane < quantiles ? quantile(lane)[taken] : 0.0f;
    const float norm = c51_pick(own_lse_target, lse_target, n, best);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) next[c] = c51_exp(next[c] + picked[c] - norm);
    c51_project<32>(atoms, start, disc, next, shared.atoms[warp], m);

    c51_take(picked, x, adv, taken, n, atoms);
    if (dueling) c51_center(base, x, adv, n, atoms);
    float q_taken = c51_pick(own_q, q, n, taken);
    if (!known) q_taken = FX_NAN;
    const float lse_taken = c51_pick(own_lse, lse, n, taken);
    float peak = own_q;
#pragma unroll 1
    for (int a = lane + 32; a < n; a += 32) peak = fmaxf(peak, q()[a]);
    peak = c51_warp_max(fmaxf(peak, -FX_INF));
    float sums[4] = {};  // -sum m log p, sum m, sum of the exponentials of q, sum of the quantiles
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        picked[c] = base[c] + picked[c] - lse_taken;  // log p of the action taken
        sums[0] -= m[c] * picked[c];
        sums[1] += m[c];
    }
    sums[2] = c51_exp(own_q - peak);
#pragma unroll 1
    for (int a = lane + 32; a < n; a += 32) sums[2] += c51_exp(q()[a] - peak);
#pragma unroll 1
    for (int i = lane + 32; i < quantiles; i += 32) theta += quantile(i)[taken];
    sums[3] = theta;
    const float sum = fx_warp_sums(sums);  // eight lanes each
    const float mass = __shfl_sync(0xffffffffu, sum, 8);
    const float q_lse = peak + c51_log(__shfl_sync(0xffffffffu, sum, 16));
    theta = __shfl_sync(0xffffffffu, sum, 24);
    const float gap = quantiles > 0 ? q_taken - c51_divide(theta, static_cast<float>(quantiles)) : 0.0f;
    if (lane == 0) {
        shared.losses[warp] = weight * sum;
        shared.losses[8 + warp] = q_lse - q_taken;
        shared.losses[16 + warp] = 0.5f * gap * gap;
        shared.atoms[warp][atoms] = sum;
    }
    float* dadv = record.dadv[d];
    if (dadv == nullptr) return;
    dadv = c51_row(dadv, record.ld_dadv[d], row) + lane;

    // A loss whose weight is 0 is left out rather than multiplied.
    const float share = c51_divide(1.0f, static_cast<float>(record.rows) * static_cast<float>(record.branches));
    const float factor = w_c51 * weight * share;
    const float pull = w_cql * share, chosen = fx_scaled(w_distill, gap) * share;
    const int spread_all = w_cql != 0.0f ? n : 0;           // so many actions have a gradient through q,
    const int spread_one = w_distill != 0.0f ? taken : -1;  // and this one
    float z[CHUNKS], over[CHUNKS] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        z[c] = record.v_min + static_cast<float>(lane + 32 * c) * record.spacing;
        // of the cross-entropy, to the logits of the action taken
        picked[c] = w_c51 != 0.0f ? factor * (c51_exp(picked[c]) * mass - m[c]) : 0.0f;
    }
    const float inverse = c51_divide(1.0f, static_cast<float>(n));
    // The mean over the actions must be known before the first is stored: up through the groups, and down again. The
    // last group is stored on the way up, so that a single one is gone through once.
    const int last = (n - 1) / GROUP * GROUP;
    int stride = GROUP;
#pragma unroll 1
    for (int first = 0; first >= 0; first += stride) {
        const int a = (first & ~31) + lane;
        if (last > 0) {
            c51_load(x, adv, first, n, atoms);
            own_q = a < n ? q()[a] : 0.0f;
            own_lse = a < n ? lse()[a] : 0.0f;
        }
        const float excess = known ? c51_exp(own_q - q_lse) - (a == taken ? 1.0f : 0.0f) : FX_NAN;
        const float own_dq = fx_scaled(pull, excess) + (a == taken ? chosen : 0.0f);
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
            const float dq = __shfl_sync(0xffffffffu, own_dq, (first + g) & 31);
            const float at_q = __shfl_sync(0xffffffffu, own_q, (first + g) & 31);
            const float at_lse = __shfl_sync(0xffffffffu, own_lse, (first + g) & 31);
            const bool spread = first + g < spread_all || first + g == spread_one;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                const float p = c51_exp(base[c] + x[g][c] - at_lse);
                x[g][c] = spread ? dq * (p * (z[c] - at_q)) : 0.0f;
                if (first + g == taken) x[g][c] += picked[c];
            }
        }
        if (stride > 0) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
                for (int g = 0; g < GROUP; ++g) over[c] += x[g][c];
            }
        }
        if (first == last) stride = -GROUP;  // `over` is complete
        if (stride > 0) continue;
        float mean[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) mean[c] = dueling ? over[c] * inverse : 0.0f;
        float* to = dadv + first * atoms;
#pragma unroll
        for (int g = 0; g < GROUP; ++g, to += atoms) {
            const int stored = first + g < n ? atoms - lane : 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) {
                if (32 * c < stored) to[32 * c] = x[g][c] - mean[c];
            }
        }
    }
    // The projection's numbers are no longer needed: every lane has passed the sum over the warp.
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (lane + 32 * c < atoms) shared.atoms[warp][lane + 32 * c] = over[c];
    }
}

// Sums over the branches of a row and over the rows of a block, once all warps have left their parts. `row`, `d`: what
// this warp worked on; row < 0: nothing.
template <int ATOMS>
__device__ __forceinline__ void c51_finish(const C51Shared<ATOMS>& shared, int row, int d) {
    const C51& record = shared.record;
    const int branches = record.branches, atoms = record.atoms;
    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
    if (row >= 0) {
        // The warps of a row share its atoms.
#pragma unroll 1
        for (int k = lane + 32 * d; k <= atoms; k += 32 * branches) {
            float sum = 0.0f;
#pragma unroll
            for (int b = 0; b < 8; ++b) sum += b < branches ? shared.atoms[warp - d + b][k] : 0.0f;
            if (k == atoms) sum = c51_divide(sum, static_cast<float>(branches));
            float* out = k < atoms ? record.dv : record.td;
            if (out != nullptr) c51_row(out, k < atoms ? record.ld_dv : 1, row)[k < atoms ? k : 0] = sum;
        }
    }
    if (thread >= 24) return;
    // Eight lanes per loss.
    double sum = shared.losses[thread];
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0x00ffffffu, sum, offset);
    double* out = (thread & 7) == 0 ? record.partials[thread >> 3] : nullptr;
    if (out != nullptr) fx_global(out)[fx_tile(record)] = sum * record.branch_share;
}

// `branch(shared, row, d)` works on one branch of one row.
template <int ATOMS, class Branch>
__device__ __forceinline__ void c51_block(const C51* table, int count, C51Shared<ATOMS>& shared, Branch branch) {
    int tile;
    const C51& record = fx_record(table, count, tile, shared.record);
    const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31u);
    // Quotients of small whole numbers, half a unit away from where rounding could matter.
    const float branches = static_cast<float>(record.branches);
    const int block_rows = static_cast<int>(c51_divide(8.5f, branches));
    const int local = static_cast<int>(c51_divide(static_cast<float>(warp) + 0.5f, branches));
    const int d = warp - local * record.branches;
    int row = tile * block_rows + local;
    if (local >= block_rows || row >= record.rows) row = -1;
    fx_wait();
    fx_trigger();
    if (row >= 0) {
        branch(shared, row, d);
    } else if (lane < 3) {
        shared.losses[8 * lane + warp] = 0.0f;
    }
    __syncthreads();
    c51_finish(shared, row, d);
}

extern "C" __global__ void __launch_bounds__(256, 4) fx_c51(const C51* table, int count) {
    __shared__ C51Shared<64> shared;
    c51_block(table, count, shared, [](C51Shared<64>& block, int row, int d) { c51_branch<2, 4>(block, row, d); });
}

extern "C" __global__ void __launch_bounds__(256) fx_c51_wide(const C51* table, int count) {
    __shared__ C51Shared<256> shared;
    c51_block(table, count, shared, [](C51Shared<256>& block, int row, int d) {
        if (block.record.atoms <= 128) {
            c51_branch<4, 2>(block, row, d);
        } else {
            c51_branch<8, 1>(block, row, d);
        }
    });
}
