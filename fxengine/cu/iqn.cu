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
//   A warp works on one branch of one row at a time, a lane on one quantile at a time against all N' targets in their
//   order. A tile is 8 / warps rows.
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
    int ld_theta;               // elements between rows
    int ld_theta_target;
    int ld_tau;
    int ld_actions;
    int ld_best;
    int ld_dtheta;
    int ld_mean;
    int columns;                // actions of all branches
    int warps;                  // that share a row's branches
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

// Row `row` of a matrix whose rows are `ld` elements, less than 2 GB, apart: one instruction.
template <class T>
__device__ __forceinline__ T* iqn_row(T* matrix, int ld, int row) {
#if FX_DEVICE
    T* place;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(place) : "r"(row), "r"(ld * static_cast<int>(sizeof(T))), "l"(matrix));
    return fx_global(place);
#else
    return matrix + static_cast<long long>(row) * ld;
#endif
}

// Of one quantile over some targets: the sums of tilt huber(delta) and of tilt clamp(delta, -bound, bound).
struct IqnSums {
    float loss;
    float slope;
};

// For bound = 1, goals and value less a number close to them: each side of zero by itself, limited by the adder, and
// from over (goal - value - over / 2), which is huber(delta), the value's part taken out of the sum. Two instructions
// for each of the four sums. Infinities and NaN make the loss a NaN or an infinity, the slope anything.
__device__ __forceinline__ IqnSums iqn_sums(const float* goals, int length, float value, float above, float below) {
    float up = 0.0f, down = 0.0f, rise = 0.0f, fall = 0.0f;
    const auto pair = [&](float goal) {
        const float over = __saturatef(goal - value), under = __saturatef(value - goal);
        up += over;
        down += under;
        rise = fmaf(over, fmaf(-0.5f, over, goal), rise);
        fall = fmaf(under, fmaf(0.5f, under, goal), fall);
    };
    int j = 0;
#pragma unroll 1
    for (; j + 8 <= length; j += 8) {
        const float4 first = *reinterpret_cast<const float4*>(goals + j);
        const float4 second = *reinterpret_cast<const float4*>(goals + j + 4);
        pair(first.x), pair(first.y), pair(first.z), pair(first.w);
        pair(second.x), pair(second.y), pair(second.z), pair(second.w);
    }
#pragma unroll 1
    for (; j < length; ++j) pair(goals[j]);
    return IqnSums{above * (rise - value * up) + below * (value * down - fall), above * up - below * down};
}

// The same for whatever there is.
__device__ __forceinline__ IqnSums iqn_sums(const float* goals, int length, float value, float above, float below,
                                            float bound) {
    IqnSums sums = {};
#pragma unroll 1
    for (int j = 0; j < length; ++j) {
        const float delta = goals[j] - value, limited = iqn_bounded(delta, bound);
        const float tilted = (delta < 0.0f ? below : above) * limited;
        sums.slope += tilted;
        sums.loss += tilted * (delta - 0.5f * limited);  // both branches of the Huber loss
    }
    return sums;
}

extern "C" __global__ void __launch_bounds__(256, 4) fx_iqn_loss(const IqnLoss* table, int count) {
    alignas(16) __shared__ float all_goals[8][iqn_goals];
    __shared__ float losses[8];
    __shared__ IqnLoss place;
    int tile;
    const IqnLoss& record = fx_record(table, count, tile, place);
    const int thread = static_cast<int>(threadIdx.x), warp = thread >> 5, lane = thread & 31;
    // Quotients of small whole numbers, half a unit away from where rounding could matter.
    const float part_of = fx_divide(1.0f, static_cast<float>(record.warps));
    const int block_rows = static_cast<int>(8.5f * part_of);
    const int local = static_cast<int>((static_cast<float>(warp) + 0.5f) * part_of);
    const int first_row = tile * block_rows, row = first_row + local;
    const int quantiles = record.quantiles, targets = record.targets;
    const bool exists = local < block_rows && row < record.rows;
    float* const goals = all_goals[warp];
    fx_wait();
    fx_trigger();
    int d = warp - local * record.warps, action = 0, best = 0;
    const int* const actions = iqn_row(record.actions, record.ld_actions, row);
    const int* const greedy = iqn_row(record.best, record.ld_best, row);
    if (exists) {
        action = actions[d];
        best = greedy[d];
    }
    if (record.dtheta != nullptr) {
        // Whole rows of zeros, and later the actions taken into them: fewer stores than one for each action.
        const int rows = (record.rows - first_row < block_rows ? record.rows - first_row : block_rows) * quantiles;
        float* const from = iqn_row(record.dtheta, record.ld_dtheta, first_row * quantiles);
        const int columns = record.columns, size = rows * columns;
        const u64 misfit = (reinterpret_cast<u64>(from) | static_cast<u64>(4 * size)) & 15;
        if (record.ld_dtheta == columns && misfit == 0) {
#pragma unroll 1
            for (int e = 4 * thread; e < size; e += 1024) *reinterpret_cast<float4*>(from + e) = float4{};
        } else {
#pragma unroll 1
            for (int i = warp; i < rows; i += 8) {
#pragma unroll 1
                for (int a = lane; a < columns; a += 32) iqn_row(from, record.ld_dtheta, i)[a] = 0.0f;
            }
        }
        __syncthreads();
    }
    float loss = 0.0f;
    if (exists) {
        const float reward = fx_global(record.reward)[row], discount = fx_global(record.discount)[row];
        const float weight = fx_global(record.weight)[row];
        // Ordinary thresholds become 1.
        const bool ordinary = record.kappa > 1e-6f && record.kappa < 1e6f;
        const float unit = ordinary ? record.kappa : 1.0f, bound = ordinary ? 1.0f : record.kappa;
        const float inverse = fx_divide(1.0f, unit);
#pragma unroll 1
        for (int next = 0; d < record.branches; d = next) {
            const int n = record.sizes[d], offset = record.offset[d];
            const bool known = action >= 0 && action < n, known_best = best >= 0 && best < n;
            const int column = offset + (known ? action : 0);
            const float* const theta_target =
                iqn_row(record.theta_target, record.ld_theta_target, row * targets) + offset + (known_best ? best : 0);
            next = d + record.warps;
            if (next < record.branches) {
                action = actions[next];
                best = greedy[next];
            }
            const auto target_at = [&](int j) { return iqn_row(theta_target, record.ld_theta_target, j)[0]; };
            const auto theta_at = [&](int i) {
                return iqn_row(record.theta, record.ld_theta, row * quantiles + i)[column];
            };
            const auto tau_at = [&](int i) { return iqn_row(record.tau, record.ld_tau, row)[i]; };
            const auto goal = [&](float value) {
                return reward + fx_scaled(discount, known_best ? value : FX_NAN);
            };
            // The first of each lane, all on their way before one is waited for.
            const float early_target = lane < targets ? target_at(lane) : 0.0f;
            const float early_theta = lane < quantiles ? theta_at(lane) : 0.0f;
            const float early_tau = lane < quantiles ? tau_at(lane) : 0.0f;
            const float early = goal(early_target);
            float mean = 0.0f, centre = __shfl_sync(0xffffffffu, early, 0);
            if (!(fabsf(centre) < FX_INF)) centre = 0.0f;
#pragma unroll 1
            for (int i = lane; i - lane < quantiles; i += 32) {
                const bool own = i < quantiles;
                float value = early_theta, tau = early_tau, slope = 0.0f;
                if (i != lane && own) {
                    value = theta_at(i);
                    tau = tau_at(i);
                }
                if (!known) value = FX_NAN;
#pragma unroll 1
                for (int start = 0; start < targets; start += iqn_goals) {
                    const int length = targets - start < iqn_goals ? targets - start : iqn_goals;
                    if (i == lane || targets > iqn_goals) {
                        __syncwarp();  // the lanes are done with the targets that lie there
#pragma unroll 1
                        for (int j = lane; j < length; j += 32) {
                            const float at_j = start + j == lane ? early : goal(target_at(start + j));
                            goals[j] = (at_j - centre) * inverse;
                        }
                        __syncwarp();
                    }
                    const float above = fabsf(tau), below = fabsf(tau - 1.0f);
                    const float from = (value - centre) * inverse;
                    IqnSums sums = iqn_sums(goals, length, from, above, below);
                    if (!ordinary || !(fabsf(sums.loss) < FX_INF)) {
                        sums = iqn_sums(goals, length, from, above, below, bound);
                    }
                    if (own) loss += sums.loss;
                    slope += sums.slope;
                }
                if (!own) continue;
                mean += value;
                if (record.dtheta == nullptr) continue;
                float* const to = iqn_row(record.dtheta, record.ld_dtheta, row * quantiles + i) + column;
                *to = -(weight * record.share * unit) * slope;
            }
            if (record.theta_mean == nullptr) continue;
            mean = fx_warp_sum(mean);
            if (lane != 0) continue;
            iqn_row(record.theta_mean, record.ld_mean, row)[d] = fx_divide(mean, static_cast<float>(quantiles));
        }
        loss = weight * (unit * (unit * fx_warp_sum(loss)));
    }
    if (record.partials == nullptr) return;
    if (lane == 0) losses[warp] = loss;
    __syncthreads();
    if (thread >= 8) return;
    double sum = losses[thread];
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0x000000ffu, sum, offset);
    if (thread == 0) fx_global(record.partials)[tile] = sum;
}
