// Implicit quantile networks: cosine features, the product with the state's features, and the quantile-Huber loss.
//
// fx_iqn_cosines: out[r, i] = cos(pi i tau[r]), i = 0 .. cols - 1. A tile is tile_rows rows, about 2048 elements.
//
// fx_iqn_mix: x[b N + i, :] = phi[b N + i, :] * h2[b, :].
// fx_iqn_mix_backward, from dx, the gradient of x, with phi = relu(...):
//   dphi[b N + i, :] = dx[b N + i, :] * h2[b, :] where phi > 0, else 0    (=; may be dx itself)
//   dh2[b, :]        = or += scale * sum_i dx[b N + i, :] * phi[b N + i, :] * slope,  scale = *weight * *readiness,
//                      slope that of the activation that made h2
//   A scale of 0 gives an exact 0, whatever dx and phi hold; accumulating, it leaves dh2 untouched.
//   A tile of both is one b and 128 columns: a lane owns 4 columns, a warp every eighth quantile; the sums of the eight
//   warps are added in their order.
//
// fx_iqn_loss: delta_ij = reward + discount theta'_j[best_d] - theta_i[action_d], tilt = |tau_i - [delta_ij < 0]|
//   partials[tile]      = sum over the tile's (b, d) of weight[b] sum_ij tilt huber(delta_ij)
//   dtheta[b N + i, a]  = -weight[b] share sum_j tilt clamp(delta_ij, -kappa, kappa) for a = action_d, 0 for the others
//   theta_mean[b, d]    = mean_i theta_i[action_d]
//   share = 1 / (rows D N' kappa). A discount of 0 ignores theta'; infinite differences have a slope of kappa; NaN
//   passes. An action or best outside [0, n_d) is looked up nowhere and counts as a NaN.
//   A warp works on one branch of one row, a lane on one quantile at a time against all N' targets in their order.
//   A tile is 8 (row, branch) pairs.
#include "fx.cuh"

struct IqnCosines {
    int first_tile;
    int tiles;
    const float* tau;  // [rows]
    float* out;        // [rows, cols]
    long long ld_out;  // floats between rows
    int rows;
    int cols;
    int tile_rows;
};

struct IqnMix {
    int first_tile;
    int tiles;
    const float* phi;  // [rows * quantiles, cols]
    const float* h2;   // [rows, cols]
    float* x;          // [rows * quantiles, cols]
    long long ld_phi;  // floats between rows
    long long ld_h2;
    long long ld_x;
    int rows;
    int quantiles;
    int cols;
};

struct IqnMixBackward {
    int first_tile;
    int tiles;
    const float* dx;         // [rows * quantiles, cols]
    const float* phi;        // [rows * quantiles, cols]
    const float* h2;         // [rows, cols]
    const float* weight;     // one float; like readiness needed by dh2
    const float* readiness;  // one float
    float* dphi;             // [rows * quantiles, cols]
    float* dh2;              // [rows, cols] or null
    long long ld_dx;         // floats between rows
    long long ld_phi;
    long long ld_h2;
    long long ld_dphi;
    long long ld_dh2;
    int rows;
    int quantiles;
    int cols;
    int activation;          // FxActivation that made h2
    int accumulate;          // 1 = dh2 +=
};

struct IqnLoss {
    int first_tile;
    int tiles;
    const float* theta;         // [rows * quantiles, all actions], online networks at s
    const float* theta_target;  // [rows * targets, all actions], target networks at s'
    const float* tau;           // [rows, quantiles]
    const int* actions;         // [rows, branches]
    const int* best;            // [rows, branches], greedy actions at s'
    const float* reward;        // [rows]
    const float* discount;      // [rows]
    const float* weight;        // [rows], importance weights
    float* dtheta;              // [rows * quantiles, all actions] or null
    float* theta_mean;          // [rows, branches] or null
    double* partials;           // [tiles] or null
    long long ld_theta;         // elements between rows
    long long ld_theta_target;
    long long ld_tau;
    long long ld_actions;
    long long ld_best;
    long long ld_dtheta;
    long long ld_mean;
    int offset[8];              // first column of each branch
    int sizes[8];               // n_d
    int branches;               // D, 1 to 8
    int rows;
    int quantiles;              // N
    int targets;                // N'
    float kappa;
    float share;                // 1 / (rows D N' kappa)
};

// Four neighbouring columns of a row.
struct alignas(16) IqnQuad {
    float at[4];
};

__device__ __forceinline__ bool iqn_aligned(const float* base, long long ld) {
    return ((reinterpret_cast<u64>(base) | static_cast<u64>(4 * ld)) & 15) == 0;
}

// Columns beyond the `left` that the row still has read as 0 and are not written. `quads`: 16-byte accesses are
// possible, which also means that left is a multiple of 4.
__device__ __forceinline__ IqnQuad iqn_load(const float* from, int left, bool quads) {
    IqnQuad value = {};
    if (quads) {
        if (left > 0) {
            const float4 all = *reinterpret_cast<const float4*>(from);
            value = IqnQuad{all.x, all.y, all.z, all.w};
        }
        return value;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (k < left) value.at[k] = from[k];
    }
    return value;
}

__device__ __forceinline__ void iqn_store(float* to, const IqnQuad& value, int left, bool quads) {
    if (quads) {
        if (left > 0) *reinterpret_cast<float4*>(to) = {value.at[0], value.at[1], value.at[2], value.at[3]};
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (k < left) to[k] = value.at[k];
    }
}

// cos(pi i tau). The whole turns are taken off before i tau is rounded, so that large i lose nothing.
__device__ __forceinline__ float iqn_cosine(int i, float tau) {
    const float factor = static_cast<float>(i);
    return cospif(fmaf(factor, tau, -2.0f * rintf(0.5f * factor * tau)));
}

extern "C" __global__ void __launch_bounds__(256) fx_iqn_cosines(const IqnCosines* table, int count) {
    int tile;
    const IqnCosines record = fx_record(table, count, tile);
    const unsigned width = (static_cast<unsigned>(record.cols) + 3u) / 4u;
    const long long first = static_cast<long long>(tile) * record.tile_rows;
    const int rows = static_cast<int>(record.rows - first < record.tile_rows ? record.rows - first : record.tile_rows);
    const bool quads = record.cols % 4 == 0 && iqn_aligned(record.out, record.ld_out);
    fx_wait();
    fx_trigger();
    for (unsigned e = threadIdx.x; e < width * static_cast<unsigned>(rows); e += 256) {
        const long long row = first + e / width;
        const int column = static_cast<int>(e % width) * 4;
        const float tau = record.tau[row];
        IqnQuad value;
#pragma unroll
        for (int k = 0; k < 4; ++k) value.at[k] = iqn_cosine(column + k, tau);
        iqn_store(record.out + row * record.ld_out + column, value, record.cols - column, quads);
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_iqn_mix(const IqnMix* table, int count) {
    int tile;
    const IqnMix record = fx_record(table, count, tile);
    const int parts = (record.cols + 127) / 128;
    const long long row = tile / parts;
    const int column = tile % parts * 128 + static_cast<int>(threadIdx.x & 31u) * 4;
    const int left = record.cols - column;
    const bool whole = record.cols % 4 == 0;
    const bool quads_h2 = whole && iqn_aligned(record.h2, record.ld_h2);
    const bool quads = whole && iqn_aligned(record.phi, record.ld_phi) && iqn_aligned(record.x, record.ld_x);
    fx_wait();
    fx_trigger();
    const IqnQuad h2 = iqn_load(record.h2 + row * record.ld_h2 + column, left, quads_h2);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x >> 5); i < record.quantiles; i += 8) {
        const long long at = row * record.quantiles + i;
        IqnQuad value = iqn_load(record.phi + at * record.ld_phi + column, left, quads);
#pragma unroll
        for (int k = 0; k < 4; ++k) value.at[k] *= h2.at[k];
        iqn_store(record.x + at * record.ld_x + column, value, left, quads);
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_iqn_mix_backward(const IqnMixBackward* table, int count) {
    __shared__ IqnQuad sums[8][32];
    int tile;
    const IqnMixBackward record = fx_record(table, count, tile);
    const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31u);
    const int parts = (record.cols + 127) / 128;
    const long long row = tile / parts;
    const int column = tile % parts * 128 + lane * 4;
    const int left = record.cols - column;
    const bool whole = record.cols % 4 == 0;
    const bool quads_h2 = whole && iqn_aligned(record.h2, record.ld_h2);
    const bool quads = whole && iqn_aligned(record.phi, record.ld_phi) && iqn_aligned(record.dx, record.ld_dx) &&
                       iqn_aligned(record.dphi, record.ld_dphi);
    fx_wait();
    fx_trigger();
    const IqnQuad h2 = iqn_load(record.h2 + row * record.ld_h2 + column, left, quads_h2);
    IqnQuad sum = {};
#pragma unroll 4
    for (int i = warp; i < record.quantiles; i += 8) {
        const long long at = row * record.quantiles + i;
        const IqnQuad dx = iqn_load(record.dx + at * record.ld_dx + column, left, quads);
        const IqnQuad phi = iqn_load(record.phi + at * record.ld_phi + column, left, quads);
        IqnQuad dphi;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            sum.at[k] += dx.at[k] * phi.at[k];
            dphi.at[k] = phi.at[k] <= 0.0f ? 0.0f : dx.at[k] * h2.at[k];
        }
        iqn_store(record.dphi + at * record.ld_dphi + column, dphi, left, quads);
    }
    if (record.dh2 == nullptr) return;
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0) return;
    const float scale = *record.weight * *record.readiness;
    if (scale == 0.0f && record.accumulate != 0) return;
    const bool quads_dh2 = whole && iqn_aligned(record.dh2, record.ld_dh2);
    float* dh2 = record.dh2 + row * record.ld_dh2 + column;
    IqnQuad result = {};
    if (record.accumulate != 0) result = iqn_load(dh2, left, quads_dh2);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float total = sum.at[k];
#pragma unroll
        for (int other = 1; other < 8; ++other) total += sums[other][lane].at[k];
        result.at[k] += fx_scaled(scale, total * fx_activate_slope(record.activation, h2.at[k]));
    }
    iqn_store(dh2, result, left, quads_dh2);
}

constexpr int iqn_goals = 128;  // targets of a warp that lie in shared memory at a time

// x limited to [-bound, bound]; unlike fx_limit it lets NaN through.
__device__ __forceinline__ float iqn_bounded(float x, float bound) {
#if FX_DEVICE
    asm("{ .reg .f32 low; neg.f32 low, %1; max.NaN.f32 %0, %0, low; min.NaN.f32 %0, %0, %1; }" : "+f"(x) : "f"(bound));
    return x;
#else
    return x > bound ? bound : x < -bound ? -bound : x;
#endif
}

// One branch of one row. Returns weight[row] times the sum over all pairs, the same in every lane.
__device__ __forceinline__ double iqn_pairs(const IqnLoss& record, long long row, int d, float* goals) {
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int n = record.sizes[d], offset = record.offset[d];
    const int quantiles = record.quantiles, targets = record.targets;
    const int action = record.actions[row * record.ld_actions + d];
    const int best = record.best[row * record.ld_best + d];
    const float reward = record.reward[row], discount = record.discount[row], weight = record.weight[row];
    const float kappa = record.kappa;
    const bool known = action >= 0 && action < n, known_best = best >= 0 && best < n;
    const int taken = known ? action : 0;
    const float* theta = record.theta + row * quantiles * record.ld_theta + offset + taken;
    const float* theta_target =
        record.theta_target + row * targets * record.ld_theta_target + offset + (known_best ? best : 0);
    double loss = 0.0;
    float mean = 0.0f;
    for (int first = 0; first < quantiles; first += 32) {
        const int i = first + lane;
        const bool own = i < quantiles;
        const float value = !own ? 0.0f : known ? theta[i * record.ld_theta] : FX_NAN;
        const float tau = own ? record.tau[row * record.ld_tau + i] : 0.0f;
        float sum = 0.0f, slope = 0.0f;
        for (int start = 0; start < targets; start += iqn_goals) {
            const int length = targets - start < iqn_goals ? targets - start : iqn_goals;
            if (first == 0 || targets > iqn_goals) {
                __syncwarp();  // the lanes are done with the targets that lie there
#pragma unroll 1
                for (int j = lane; j < length; j += 32) {
                    const float next = known_best ? theta_target[(start + j) * record.ld_theta_target] : FX_NAN;
                    goals[j] = reward + fx_scaled(discount, next);
                }
                __syncwarp();
            }
            // The tilt where delta is not, and is, negative; made here, so that the targets are on their way before tau
            // is waited for.
            const float above = fabsf(tau), below = fabsf(tau - 1.0f);
#pragma unroll 4
            for (int j = 0; j < length; ++j) {
                const float delta = goals[j] - value;
                const float tilt = delta < 0.0f ? below : above;
                const float bounded = iqn_bounded(delta, kappa);
                slope += tilt * bounded;
                sum += tilt * bounded * (delta - 0.5f * bounded);  // both branches of the Huber loss
            }
        }
        mean += value;
        if (!own) continue;
        loss += sum;
        if (record.dtheta == nullptr) continue;
        float* dtheta = record.dtheta + (row * quantiles + i) * record.ld_dtheta + offset;
        const float grad = -(weight * record.share) * slope;
#pragma unroll 4
        for (int a = 0; a < n; ++a) dtheta[a] = a == taken ? grad : 0.0f;
    }
    if (record.theta_mean != nullptr) {
        mean = fx_warp_sum(mean);
        if (lane == 0) record.theta_mean[row * record.ld_mean + d] = fx_divide(mean, static_cast<float>(quantiles));
    }
    return weight * fx_warp_sum(loss);
}

extern "C" __global__ void __launch_bounds__(256, 4) fx_iqn_loss(const IqnLoss* table, int count) {
    __shared__ float goals[8][iqn_goals];
    __shared__ double losses[8];
    __shared__ IqnLoss place;
    int tile;
    const IqnLoss& record = fx_record(table, count, tile, place);
    const int warp = static_cast<int>(threadIdx.x >> 5);
    const unsigned branches = static_cast<unsigned>(record.branches);
    const unsigned item = static_cast<unsigned>(tile) * 8u + static_cast<unsigned>(warp);
    const int row = static_cast<int>(item / branches), branch = static_cast<int>(item % branches);
    fx_wait();
    fx_trigger();
    double loss = 0.0;
    if (row < record.rows) loss = iqn_pairs(record, row, branch, goals[warp]);
    if (record.partials == nullptr) return;
    if ((threadIdx.x & 31u) == 0) losses[warp] = loss;
    __syncthreads();
    if (threadIdx.x != 0) return;
    double sum = losses[0];
    for (int i = 1; i < 8; ++i) sum += losses[i];
    record.partials[tile] = sum;
}
