// The forward pass of a quantile network (iqn_fused.cu) in tf32 by the warpgroups of sm_90.
//
// fx_iqn_warpgroup: of every row r = b N + i, in one pass
//   phi = relu(w_phi cos(pi j tau[r]) + b_phi), hidden = relu(w_iq1 (phi * h2[b]) + b_iq1),
//   theta = w_iq2 hidden + b_iq2.
//   A block holds all weights in shared memory, packed (pack.cuh). A warpgroup takes groups of 64 rows, the blocks of a
//   record one after the other; it makes phi 64 columns at a time and multiplies them on at once. Operand A is always in
//   registers: the sums of a product with packed rows are, for a product with packed k, in the lanes that want them.
//   A warp's 16 rows belong to one sample, whose h2 the copy engine brings while the warp ends the rows before.
//   The network has 32 or 64 cosines, features in 64s and 128 hidden numbers; 16 rows belong to one sample. Rows of h2
//   and hidden start at multiples of 16 bytes.
#include "bulk_copy.cuh"
#include "iqn_fused.cuh"
#include "pack.cuh"
#include "wgmma.cuh"

struct IqnWarpgroup {
    int first_tile;
    int tiles;
    const float* tau;    // [rows]
    const float* h2;     // [rows / quantiles, features]
    const float* w_phi;  // [features, cosines], packed like all weights
    const float* b_phi;  // [features]
    const float* w_iq1;  // [128, features]
    const float* b_iq1;  // [128]
    const float* w_iq2;  // [outputs, 128]
    const float* b_iq2;  // [outputs]
    float* hidden;       // [rows, 128] or null
    float* theta;        // [rows, outputs]
    int ld_h2;           // floats between rows
    int ld_hidden;
    int ld_theta;
    int rows;
    int quantiles;
    int cosines;
    int features;
    int width;           // 128
    int outputs;
    int blocks;          // as many as tiles
};

#if FX_HAS_WARPGROUPS

constexpr int iqn_groups = 3;  // warpgroups of a block
constexpr int iqn_wide = 128;  // hidden numbers
constexpr int iqn_part = 64;   // features of a chunk
constexpr int iqn_most = 8;    // chunks that have a barrier
constexpr int iqn_warps = 4 * iqn_groups;

// The shared memory of a block: packed weights, biases, h2 of a sample for each warp.
struct IqnResident {
    int chunks, last_rows, phi_blocks;
    FxShared phi, iq1, iq2;
    float* biases;  // phi, hidden, theta
    float* states;  // of the warp

    __device__ __forceinline__ IqnResident(const IqnWarpgroup& r, float* shared)
        : chunks(r.features / iqn_part), last_rows(fx_packed_rows(r.outputs)), phi_blocks(r.cosines / 32) {
        phi = fx_shared(shared);
        iq1 = phi + phi_blocks * r.features * 128;
        iq2 = iq1 + r.features * iqn_wide * 4;
        biases = shared + r.features * (32 * phi_blocks + iqn_wide) + iqn_wide * last_rows;
        states = biases + r.features + iqn_wide + last_rows + (static_cast<int>(threadIdx.x) >> 5) * r.features;
    }

    // By one thread. What chunk c of the features needs comes in phase 0 of barrier c; w_iq2 comes with the last.
    __device__ __forceinline__ void fill(const IqnWarpgroup& r, u64* barriers) const {
        for (int c = 0; c < chunks; ++c) fx_bulk_barrier(barriers + c);
        const int last = iqn_wide * last_rows * 4, of_phi = iqn_part * 32, of_iq1 = iqn_part * iqn_wide;
        for (int c = 0; c < chunks; ++c) {
            fx_bulk_expect(barriers + c, 4 * (phi_blocks * of_phi + of_iq1) + (c == chunks - 1 ? last : 0));
            for (int k = 0; k < phi_blocks; ++k) {
                const int at = k * r.features * 32 + c * of_phi;
                fx_bulk_copy(phi + 4 * at, r.w_phi + at, 4 * of_phi, barriers + c);
            }
            fx_bulk_copy(iq1 + 4 * c * of_iq1, r.w_iq1 + c * of_iq1, 4 * of_iq1, barriers + c);
        }
        fx_bulk_copy(iq2, r.w_iq2, last, barriers + chunks - 1);
    }
};

// By a warp: begins to copy h2 of the sample that its rows from `row` on belong to. What was copied before is no longer
// read.
__device__ __forceinline__ void iqn_fetch_states(const IqnWarpgroup& r, const IqnResident& weights, u64* barrier,
                                                 int row) {
    __syncwarp();
    if ((threadIdx.x & 31) != 0 || row >= r.rows) return;
    fx_bulk_expect(barrier, 4 * r.features);
    fx_bulk_copy(fx_shared(weights.states), fx_global(r.h2) + static_cast<long long>(row / r.quantiles) * r.ld_h2,
                 4 * r.features, barrier);
}

// tau of the lane's two of 16 rows.
__device__ __forceinline__ void iqn_load_tau(float (&tau)[2], const IqnWarpgroup& r, int row0) {
    FX_UNROLL
    for (int h = 0; h < 2; ++h) {
        const int row = row0 + 8 * h + (static_cast<int>(threadIdx.x) >> 2 & 7);
        tau[h] = row < r.rows ? fx_global(r.tau)[row] : 0.0f;
    }
}

// The lane's four numbers of 16 columns of row 8 h + g, from the sums of two fragments.
__device__ __forceinline__ void iqn_quad(float (&v)[4], const float (&even)[4], const float (&odd)[4], int h) {
    v[0] = even[2 * h];
    v[1] = odd[2 * h];
    v[2] = even[2 * h + 1];
    v[3] = odd[2 * h + 1];
}

// Operand A for 16 k, two steps, from the lane's four numbers of rows 8 h + g.
__device__ __forceinline__ void iqn_steps_of(unsigned (&even)[4], unsigned (&odd)[4], const float (&v)[2][4]) {
    FX_UNROLL
    for (int h = 0; h < 2; ++h) {
        even[h] = fx_tf32_even(v[h][0]);
        even[2 + h] = fx_tf32_even(v[h][1]);
        odd[h] = fx_tf32_even(v[h][2]);
        odd[2 + h] = fx_tf32_even(v[h][3]);
    }
}

// 64 rows of a warpgroup, of which the warp has the 16 from row0 on; the first that it takes, number 0, wait for the
// weights, all for h2, which arrives at `arrival`. `next`: the first of its rows of the following round, whose tau it
// leaves behind and whose h2 it begins to copy.
__device__ __forceinline__ void iqn_rows_of_group(const IqnWarpgroup& r, const IqnResident& weights, u64* barriers,
                                                  u64* arrival, float (&tau)[2], int row0, int next, int number) {
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    const int row = row0 + g;  // and 8 below it
    unsigned cosines[2][4][4] = {};
    {
        const float first = static_cast<float>(fx_linear_again(2 * t));  // else a register for every factor
        FX_UNROLL
        for (int c = 0; c < 4; ++c) {
            if (16 * c >= r.cosines) break;
            float v[2][4];
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) {
                    v[h][e] = iqn_feature(first + 0.5f * static_cast<float>(16 * c + e), tau[h]);
                }
            }
            iqn_steps_of(cosines[c / 2][c % 2 * 2], cosines[c / 2][c % 2 * 2 + 1], v);
        }
    }
    float hidden[iqn_wide / 8][4] = {};
    const FxShared states = fx_shared(weights.states) + 16 * t;
#pragma unroll 1
    for (int c = 0; c < weights.chunks; ++c) {
        float phi[iqn_part / 8][4];
        FX_UNROLL
        for (int q = 0; q < iqn_part / 16; ++q) {
            const float4 bias = *reinterpret_cast<const float4*>(weights.biases + iqn_part * c + 16 * q + 4 * t);
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                phi[2 * q][2 * h] = bias.x;
                phi[2 * q + 1][2 * h] = bias.y;
                phi[2 * q][2 * h + 1] = bias.z;
                phi[2 * q + 1][2 * h + 1] = bias.w;
            }
        }
        if (number == 0) fx_bulk_wait(barriers + c, 0);
        const FxShared w_phi = weights.phi + c * iqn_part * 128;
        fx_warpgroup_begin<iqn_part>(phi, cosines[0], w_phi);
        if (weights.phi_blocks > 1) fx_warpgroup_begin<iqn_part>(phi, cosines[1], w_phi + r.features * 128);
        fx_warpgroup_wait<iqn_part>(phi);
        if (c == 0 && row0 < r.rows) fx_bulk_wait(arrival, number & 1);
        unsigned mixed[iqn_part / 32][4][4];
        FX_UNROLL
        for (int q = 0; q < iqn_part / 16; ++q) {
            float state[4];
            fx_shared_load(state, states + 4 * (iqn_part * c + 16 * q));
            float v[2][4];
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                iqn_quad(v[h], phi[2 * q], phi[2 * q + 1], h);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) v[h][e] = state[e] * fx_activate(FX_RELU, v[h][e]);
            }
            iqn_steps_of(mixed[q / 2][q % 2 * 2], mixed[q / 2][q % 2 * 2 + 1], v);
        }
        FX_UNROLL
        for (int k = 0; k < iqn_part / 32; ++k) {
            const FxShared w_iq1 = weights.iq1 + (c * (iqn_part / 32) + k) * iqn_wide * 128;
            fx_warpgroup_begin<iqn_wide>(hidden, mixed[k], w_iq1);
        }
        fx_warpgroup_wait<iqn_wide>(hidden);
    }

    iqn_fetch_states(r, weights, arrival, next);
    iqn_load_tau(tau, r, next);
    unsigned words[iqn_wide / 32][4][4];
    const float* const biases = weights.biases + r.features + 4 * t;
    float* const kept = fx_global(r.hidden) + static_cast<long long>(row) * r.ld_hidden + 4 * t;
    float* const below = kept + 8 * r.ld_hidden;
    const bool keeps = r.hidden != nullptr && row < r.rows, keeps_below = r.hidden != nullptr && row + 8 < r.rows;
    FX_UNROLL
    for (int p = 0; p < iqn_wide / 16; ++p) {
        const float4 quad = *reinterpret_cast<const float4*>(biases + 16 * p);
        const float bias[4] = {quad.x, quad.y, quad.z, quad.w};
        float v[2][4];
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            iqn_quad(v[h], hidden[2 * p], hidden[2 * p + 1], h);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) v[h][e] = fx_activate(FX_RELU, v[h][e] + bias[e]);
            if (h == 0 ? keeps : keeps_below) fx_store((h == 0 ? kept : below) + 16 * p, v[h], 4, true);
        }
        iqn_steps_of(words[p / 2][p % 2 * 2], words[p / 2][p % 2 * 2 + 1], v);
    }
    const bool quads_theta = fx_quads(r.theta, r.ld_theta);
#pragma unroll 1
    for (int o = 0; o < weights.last_rows; o += 16) {
        float theta[2][4] = {};
        FX_UNROLL
        for (int k = 0; k < iqn_wide / 32; ++k) {
            fx_warpgroup_begin<16>(theta, words[k], weights.iq2 + (k * weights.last_rows + o) * 128);
        }
        const float4 quad = *reinterpret_cast<const float4*>(biases + iqn_wide + o);
        const float bias[4] = {quad.x, quad.y, quad.z, quad.w};
        fx_warpgroup_wait<16>(theta);
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            float v[4];
            iqn_quad(v, theta[0], theta[1], h);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) v[e] += bias[e];
            const int column = o + 4 * t;
            fx_store(fx_global(r.theta) + static_cast<long long>(row + 8 * h) * r.ld_theta + column, v,
                     row + 8 * h < r.rows ? r.outputs - column : 0, quads_theta);
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) fx_iqn_warpgroup(const IqnWarpgroup* table, int count) {
    FX_DYN_SHARED(float4, dynamic);
    __shared__ IqnWarpgroup place;
    __shared__ u64 barriers[iqn_most], arrivals[iqn_warps];
    int tile;
    const IqnWarpgroup& record = fx_record(table, count, tile, place);
    const IqnResident weights(record, fx_linear_aligned(dynamic));
    u64* const arrival = arrivals + (threadIdx.x >> 5);
    if ((threadIdx.x & 31) == 0) fx_bulk_barrier(arrival);
    if (threadIdx.x == 0) weights.fill(record, barriers);
    const int first = record.features, second = first + iqn_wide, all = second + weights.last_rows;
    for (int e = static_cast<int>(threadIdx.x); e < all; e += 128 * iqn_groups) {
        float bias = 0.0f;
        if (e < first) {
            bias = fx_global(record.b_phi)[e];
        } else if (e < second) {
            bias = fx_global(record.b_iq1)[e - first];
        } else if (e - second < record.outputs) {
            bias = fx_global(record.b_iq2)[e - second];
        }
        weights.biases[e] = bias;
    }
    fx_wait();
    fx_trigger();
    const int group = static_cast<int>(threadIdx.x) / 128, step = 64 * iqn_groups * record.tiles;
    const int own = (static_cast<int>(threadIdx.x) >> 5 & 3) * 16;
    int row0 = 64 * (group * record.tiles + tile);
    iqn_fetch_states(record, weights, arrival, row0 + own);
    float tau[2];
    iqn_load_tau(tau, record, row0 + own);
    __syncthreads();
    for (int number = 0; row0 < record.rows; ++number, row0 += step) {
        iqn_rows_of_group(record, weights, barriers, arrival, tau, row0 + own, row0 + own + step, number);
    }
}

#endif
