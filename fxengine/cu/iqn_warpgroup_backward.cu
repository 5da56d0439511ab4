// Backward of the quantile networks (iqn_fused_backward.cu) in tf32 by the warpgroups of sm_90.
//
// fx_iqn_warpgroup_backward: a block owns 128 columns of h2 and every slices-th run of rows, as there, in tiles of 32
//   rows; what it makes, and where it writes it, is the same. Two pairs of warpgroups share the columns, 64 each:
//
//     mixing    phi^T = w_phi cosines^T      -> mixed^T = phi^T h2           -> dw_iq1^T += mixed^T dhidden
//     unmixing  dmixed^T = w_iq1^T dhidden^T -> dphi^T = dmixed^T h2 slope   -> dw_phi += dphi^T cosines; dh2
//
//   The sums of the first product are, for a second one whose k are the rows in another order, in the lanes that want
//   them as operand A; phi goes from one group to the other through shared memory. B is always there: cosines and
//   dhidden lie in it twice, `across` with k along their columns, `down` with k along their rows. While the tensor
//   cores work, a warp makes its part of the next tile, of dhidden (mixing) or of the cosines (unmixing): one barrier
//   per tile. The copy engine brings what they are made of, and rounds dtheta and the hidden numbers.
//   The tensor cores are not what this waits for: a tile takes as long as the instructions of its warps, one after the
//   other. So whatever can is done once, by one thread, or by the choice of what lies where.
//   The gradients of the last layer are made of what dhidden is made of, while it is there: dw_iq2 = dtheta^T hidden by
//   the mixing warps, in products of a warp, db_iq2 by the others. All blocks of a slice see the same rows: the first
//   makes outputs 0 to 7 of dw_iq2, the second the others, so that none has more to do than the rest.
//   Sums of rounded numbers are db_iq2, and db_phi, which is what dw_phi has for the cosine of nothing, 1.
//   unmixing holds w_iq1 in registers, and has some that mixing gives away.
//   The network has 32 or 64 cosines, features in 128s, 128 hidden numbers and at most 16 outputs; 8 rows belong to one
//   sample, and of the number of quantiles and 32 one divides the other. Rows of dtheta, hidden and h2, and tau, start
//   at multiples of 16 bytes.
#include "bulk_copy.cuh"
#include "iqn_fused_tile.cuh"
#include "pack.cuh"
#include "wgmma.cuh"

struct IqnWarpgroupBackward {
    int first_tile;
    int tiles;
    const FxTensorMap* dtheta;  // [rows, outputs], boxes of 32 rows, rounded
    const FxTensorMap* hidden;  // [rows, 128], likewise
    const float* tau;           // [rows]
    const float* h2;            // [rows / quantiles, features]
    const float* w_phi;         // [features, cosines], packed
    const float* b_phi;         // [features]
    const float* w_iq1;         // [features, 128], the transpose, packed
    const float* w_iq2;         // [outputs, 128]
    const float* weight;        // one float; like readiness needed by dh2
    const float* readiness;     // one float
    float* dh2;                 // [rows / quantiles, features] or null
    float* partial;             // as of iqn_fused_backward.cu, or null
    float* partial_iq2;         // [slices, outputs * 128 + outputs], the slice's share of dw_iq2, db_iq2; or null
    int ld_h2;                  // floats between rows
    int ld_iq2;
    int ld_dh2;
    int rows;
    int quantiles;
    int cosines;
    int features;
    int width;                  // 128
    int outputs;
    int slices;
    int activation;             // FxActivation that made h2
    int accumulate;             // 1 = dh2 +=
};

#if FX_HAS_WARPGROUPS

constexpr int iqn_rows = 32;  // of a tile
constexpr int iqn_columns_of_block = 128;
constexpr int iqn_block = iqn_rows * 128;  // bytes of 32 k of `across`

// Of a thread. Fewer of the latter, and the compiler would wait for every single product.
constexpr int iqn_mixing_registers = 112, iqn_unmixing_registers = 144;
static_assert(iqn_mixing_registers + iqn_unmixing_registers == 2 * 128, "as many as 512 threads of 128 have");

// Shared memory of a block, in bytes.
struct IqnLayout {
    static constexpr int COSINES = 4 * iqn_rows * iqn_cosines, DHIDDEN = 4 * iqn_rows * iqn_width;
    // A tile: the matrices [2 or 4][32 rows][32] across, [64 or 128][32 rows] down.
    static constexpr int COSINES_DOWN = COSINES, DHIDDEN_ACROSS = 2 * COSINES, DHIDDEN_DOWN = DHIDDEN_ACROSS + DHIDDEN;
    static constexpr int TILE = DHIDDEN_DOWN + DHIDDEN;
    static constexpr int OF_PHI = iqn_columns_of_block * 128;  // 32 k of w_phi
    static constexpr int HIDDEN = 4 * iqn_block, DTHETA = iqn_block;
    static constexpr int SAMPLE = iqn_columns_of_block * 4, STATES = iqn_rows / 8 * SAMPLE, TAU = 4 * iqn_rows;

    FxShared w_phi;   // [2][128 columns][32]
    FxShared tiles;   // two of them
    FxShared phi;     // [8 warps][4][32] quads, as the sums lie in the lanes
    FxShared hidden;  // two times four boxes [32 rows][32]
    FxShared dtheta;  // two times a box [32 rows][32], of which 16 numbers count
    FxShared w_iq2;   // [2][256 threads] quads: operand A of a step, of the thread of `mixing`
    FxShared states;  // two times [4 samples][128], of h2
    FxShared bias;    // [128], b_phi
    FxShared tau;     // two times [32 rows]
    FxShared db_iq2;  // [16][16]: sums over every 16th row

    __device__ __forceinline__ explicit IqnLayout(FxShared base)
        : w_phi(base), tiles(w_phi + 2 * OF_PHI), phi(tiles + 2 * TILE), hidden(phi + 8 * 4 * 32 * 16),
          dtheta(hidden + 2 * HIDDEN), w_iq2(dtheta + 2 * DTHETA), states(w_iq2 + 256 * 2 * 16),
          bias(states + 2 * STATES), tau(bias + iqn_columns_of_block * 4), db_iq2(tau + 2 * TAU) {}
};

// What a block finds out once.
struct IqnConstants {
    const float* h2;  // of its columns, like dh2, which may be null
    float* dh2;
    float scale;      // of dh2
    int output0;      // the first of its eight of dw_iq2, 0 or 8
    int shift;        // 8 << shift rows of a tile belong to one sample: 0, 1 or 2

    __device__ __forceinline__ void find(const IqnWarpgroupBackward& r, int column0) {
        h2 = fx_global(r.h2) + column0;
        dh2 = r.dh2 != nullptr ? fx_global(r.dh2) + column0 : nullptr;
        scale = r.dh2 != nullptr ? *fx_global(r.weight) * *fx_global(r.readiness) : 0.0f;
        output0 = column0 / 16 & 8;
        shift = r.quantiles == 8 ? 0 : r.quantiles == 16 ? 1 : 2;
    }

    // The sample that has row `row`, the first of a tile.
    __device__ __forceinline__ int sample(const IqnWarpgroupBackward& r, int row) const {
        return r.quantiles > iqn_rows ? row / r.quantiles : row >> (3 + shift);
    }
};

// What the copies of a block arrive at: w_phi; of tile n, at number n mod 2, what it is made of, and its samples of h2.
struct IqnArrivals {
    u64 w_phi, made_of[2], states[2];
};

// What the warps of a block have in common besides.
struct IqnShared {
    IqnWarpgroupBackward record;
    IqnConstants constants;
    IqnArrivals arrivals;
};

// Where a thread stands: in warp `warp` of the eight of its kind. Row 8 h + g of the 16 of its fragments is column
// 2 g + h of the warp's 16.
struct IqnPlace {
    int thread, warp, lane, g, t;
    int column;  // the lane's first, of the block's

    __device__ __forceinline__ IqnPlace() : IqnPlace(fx_linear_again(static_cast<int>(threadIdx.x)) & 255) {}

    // Of eight rows the one whose quads the lane reads or writes. Neighbours' rows lie in different halves of a line:
    // the eight lanes that do so together meet in no bank.
    __device__ __forceinline__ int row() const { return g ^ (g & 1) * 4; }

private:
    __device__ __forceinline__ explicit IqnPlace(int of_kind)
        : thread(of_kind), warp(thread >> 5), lane(thread & 31), g(lane >> 2), t(lane & 3), column(16 * warp + 2 * g) {}
};

typedef IqnShareOf<iqn_columns_of_block> IqnShare;

// The sum over four neighbouring lanes of their number n mod 4, which is the lane's among them.
__device__ __forceinline__ float iqn_sum_of_quarter(int n, float a, float b, float c, float d) {
    const bool upper = (n & 2) != 0, odd = (n & 1) != 0;
    const float first = (upper ? c : a) + __shfl_xor_sync(0xffffffffu, upper ? a : c, 2);
    const float second = (upper ? d : b) + __shfl_xor_sync(0xffffffffu, upper ? b : d, 2);
    return (odd ? second : first) + __shfl_xor_sync(0xffffffffu, odd ? first : second, 1);
}

// First row of the tile after the one at row0.
__device__ __forceinline__ int iqn_next(const IqnWarpgroupBackward& r, int row0) {
    const int run = iqn_run<iqn_rows>(r), next = row0 + iqn_rows;
    return run == iqn_rows || next % run == 0 ? next + (r.slices - 1) * run : next;
}

// A tile: where it lies and where the next does, in places `slot` and the other; their first rows, and that of the one
// after.
struct IqnTurn {
    FxShared tile, other;
    int slot, row0, next, after;
    bool more;  // the next exists
};

// mixing: of the next tile dhidden, 16 columns of it per warp, and what it gives to dw_iq2.
struct IqnMixing {
    const IqnWarpgroupBackward& r;
    const IqnLayout block;
    IqnShared& shared;
    float dw_iq1[iqn_width / 8][4];
    float db_iq1[2];        // of hidden numbers 2 g and 2 g + 1 of the warp's, over the lane's rows
    float dw_iq2[1][1][4];  // of the warp's hidden numbers, by outputs output0 .. + 7

    __device__ __forceinline__ IqnMixing(const IqnWarpgroupBackward& record, const IqnLayout& layout, IqnShared& s)
        : r(record), block(layout), shared(s), dw_iq1{}, db_iq1{}, dw_iq2{} {
        const IqnPlace own;
        if (own.thread < iqn_columns_of_block) {
            fx_shared_store(block.bias + 4 * own.thread,
                            __float_as_uint(fx_global(r.b_phi)[IqnShare(r).column0 + own.thread]));
        }
        FX_UNROLL
        for (int q = 0; q < 2; ++q) {
            float a[4];
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const int output = 4 * own.t + 2 * q + (e >> 1);
                const float* const from = fx_global(r.w_iq2) + output * r.ld_iq2 + own.column + (e & 1);
                a[e] = output < r.outputs ? __uint_as_float(fx_tf32_even(*from)) : 0.0f;
            }
            fx_shared_store(block.w_iq2 + (256 * q + own.thread) * 16, a);
        }
    }

    __device__ __forceinline__ void begin(int, int) const {}

    // Half i of dhidden^T = w_iq2^T dtheta^T slope of a tile, from what lies in place `slot`: the lane has hidden
    // numbers 2 g and 2 g + 1 of rows 2 t and 2 t ^ 5 of each eight. No access conflicts. What it reads of the hidden
    // numbers is operand A for dw_iq2 as well.
    __device__ __forceinline__ void make(FxShared tile, int slot, int i) {
        const IqnPlace own;
        const FxShared dtheta = block.dtheta + slot * IqnLayout::DTHETA + 2 * i * 1024;
        float sums[2][1][1][4] = {};
        {
            unsigned a[1][2][4];
            FX_UNROLL
            for (int q = 0; q < 2; ++q) {
                float v[4];
                fx_shared_load(v, block.w_iq2 + (256 * q + own.thread) * 16);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) a[0][q][e] = __float_as_uint(v[e]);
            }
            FX_UNROLL
            for (int u = 0; u < 2; ++u) {
                float v[4];
                unsigned b[1][2][2];
                fx_shared_load(v, dtheta + own.row() * 128 + (own.t ^ own.row()) * 16 + u * 1024);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) b[0][e >> 1][e & 1] = __float_as_uint(v[e]);
                fx_mma<1, 2, 1, 1>(sums[u], a, b);
            }
        }
        const int line = 2 * own.t * 128, quad = (own.warp & 1) * 4 + (own.g >> 1);
        const int at = line + (quad ^ 2 * own.t) * 16 + (own.g & 1) * 8;  // of 32 columns; in row 2 t ^ 5 at ^ 5 * 144
        const int of_output = line + ((shared.constants.output0 / 4 + (own.g >> 2)) ^ 2 * own.t) * 16 + (own.g & 3) * 4;
        const FxShared hidden =
            block.hidden + slot * IqnLayout::HIDDEN + (own.warp >> 1) * iqn_block + 2 * i * 1024;
        const FxShared across = tile + IqnLayout::DHIDDEN_ACROSS + (own.warp >> 1) * iqn_block + 2 * i * 1024;
        // Of 8 k down place x is row 2 x, place x + 4 row 2 x + 1, as the sums of the first products lie; row g of the
        // warp's is hidden number 2 g, row g + 8 number 2 g + 1.
        const FxShared down = tile + IqnLayout::DHIDDEN_DOWN + (16 * own.warp + own.g) * 128;
        FX_UNROLL
        for (int u = 0; u < 2; ++u) {
            float numbers[2][2], outputs[2];
            unsigned a[1][1][4], b[1][1][2];
            FX_UNROLL
            for (int p = 0; p < 2; ++p) {
                fx_shared_load(numbers[p][0], numbers[p][1], hidden + (at ^ p * 5 * 144) + u * 1024);
                fx_shared_load(outputs[p], dtheta + (of_output ^ p * 5 * 144) + u * 1024);
            }
            FX_UNROLL
            for (int p = 0; p < 2; ++p) {
                b[0][0][p] = __float_as_uint(outputs[p]);
                float words[2];
                FX_UNROLL
                for (int m = 0; m < 2; ++m) {
                    const float number = numbers[p][m];
                    a[0][0][2 * p + m] = __float_as_uint(number);
                    const float v = sums[u][0][0][2 * m + p] * fx_activate_slope(FX_RELU, number);
                    db_iq1[m] += v;
                    words[m] = __uint_as_float(fx_tf32_even(v));
                    fx_shared_store(down + ((4 * i + 2 * u + p) ^ own.g) * 16 + (own.t ^ 2 * p) * 4 + m * 1024,
                                    __float_as_uint(words[m]));
                }
                fx_shared_store(across + (at ^ p * 5 * 144) + u * 1024, words[0], words[1]);
            }
            fx_mma<1, 1, 1, 1>(dw_iq2, a, b);
        }
    }

    __device__ __forceinline__ void prepare(FxShared tile) {
        fx_bulk_wait(&shared.arrivals.w_phi, 0);
        make(tile, 0, 0);
        make(tile, 0, 1);
    }

    __device__ __forceinline__ void turn(const IqnTurn& now) {
        float phi[4][4];
        {
            float bias[2];
            fx_shared_load(bias[0], bias[1], block.bias + 4 * IqnPlace().column);
            FX_UNROLL
            for (int j = 0; j < 4; ++j) {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) phi[j][e] = bias[e >> 1];
            }
            const FxShared w_phi = block.w_phi + (IqnPlace().warp >> 2) * 64 * 128;
            fx_warpgroup_begin<32>(phi, w_phi, now.tile);
            if (r.cosines > 32) fx_warpgroup_begin<32>(phi, w_phi + IqnLayout::OF_PHI, now.tile + iqn_block);
        }
        if (now.more) make(now.other, now.slot ^ 1, 0);
        fx_warpgroup_wait<32>(phi);
        unsigned mixed[4][4];
        {
            const IqnPlace own;
            const FxShared to = block.phi + (own.warp * 4 * 32 + own.lane) * 16;
            FX_UNROLL
            for (int j = 0; j < 4; ++j) {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) phi[j][e] = fx_activate(FX_RELU, phi[j][e]);
                fx_shared_store(to + j * 32 * 16, phi[j]);
            }
            iqn_hand_over<256, false>(own.warp >> 2);
            const FxShared states = block.states + now.slot * IqnLayout::STATES + own.column * 4;
            const int shift = shared.constants.shift;
            FX_UNROLL
            for (int j = 0; j < 4; ++j) {
                float state[2];
                fx_shared_load(state[0], state[1], states + (j >> shift) * IqnLayout::SAMPLE);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) mixed[j][2 * (e & 1) + (e >> 1)] = fx_tf32_even(phi[j][e] * state[e >> 1]);
            }
        }
        fx_warpgroup_begin<iqn_width>(dw_iq1, mixed, now.tile + IqnLayout::DHIDDEN_DOWN);
        if (now.more) make(now.other, now.slot ^ 1, 1);
        fx_warpgroup_wait<iqn_width>(dw_iq1);
    }

    __device__ __forceinline__ void end(float* to_iq1, float*, float* to_bias) const {
        const IqnPlace own;
        const int column0 = IqnShare(r).column0;
        if (r.partial_iq2 != nullptr && column0 <= iqn_columns_of_block) end_last();
        // Row 8 j + 2 t + e of `down` is hidden number 16 (j / 2) + 4 t + 2 e + j mod 2.
        float* const to = to_iq1 + 4 * own.t * r.features + column0 + own.column;
        FX_UNROLL
        for (int j = 0; j < iqn_width / 8; ++j) {
            FX_UNROLL
            for (int e = 0; e < 2; ++e) {
                const int number = 16 * (j >> 1) + 2 * e + (j & 1);
                *reinterpret_cast<float2*>(to + number * r.features) = make_float2(dw_iq1[j][e], dw_iq1[j][2 + e]);
            }
        }
        FX_UNROLL
        for (int m = 0; m < 2; ++m) {
            const float sum = fx_lanes_sum<4>(db_iq1[m]);
            if (column0 == 0 && own.t == m) to_bias[r.features + own.column + m] = sum;
        }
    }

    // The slice's share of the last layer's gradients. A barrier lies behind the last addition to db_iq2.
    __device__ __forceinline__ void end_last() const {
        const IqnPlace own;
        const int output0 = shared.constants.output0;
        const long long all = r.outputs * (iqn_width + 1);
        float* const to = fx_global(r.partial_iq2) + IqnShare(r).slice * all;
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            const int output = output0 + 2 * own.t + (e & 1);
            if (output < r.outputs) to[output * iqn_width + own.column + (e >> 1)] = dw_iq2[0][0][e];
        }
        if (output0 != 0 || own.thread >= r.outputs) return;
        float sum = 0.0f;
        FX_UNROLL
        for (int row = 0; row < 16; ++row) {
            float x;
            fx_shared_load(x, block.db_iq2 + (16 * row + own.thread) * 4);
            sum += x;
        }
        to[r.outputs * iqn_width + own.thread] = sum;
    }
};

// unmixing: of the next tile 16 of the cosines for 16 rows per warp, and what it gives to db_iq2. It begins all copies.
struct IqnUnmixing {
    const IqnWarpgroupBackward& r;
    const IqnLayout block;
    IqnShared& shared;
    unsigned w_iq1[iqn_width / 32][4][4];
    float dw_phi[iqn_cosines / 8][4];
    float total[2];  // of dmixed phi over the sample's rows so far

    __device__ __forceinline__ IqnUnmixing(const IqnWarpgroupBackward& record, const IqnLayout& layout, IqnShared& s)
        : r(record), block(layout), shared(s), dw_phi{}, total{} {
        const IqnPlace own;
        fx_shared_store(block.db_iq2 + own.thread * 4, 0u);
        const float* const from = fx_global(r.w_iq1) + (IqnShare(r).column0 + 16 * own.warp + own.g) * 32;
        FX_UNROLL
        for (int b = 0; b < iqn_width / 32; ++b) {
            FX_UNROLL
            for (int s = 0; s < 4; s += 2) {
                FX_UNROLL
                for (int h = 0; h < 2; ++h) {
                    // Numbers 8 s + t + {0, 4, 8, 12} of the block: the packed order has them side by side.
                    const int at = (b * r.features + 8 * h) * 32 + ((2 * s + own.t) ^ own.g) * 4;
                    const uint4 quad = *reinterpret_cast<const uint4*>(from + at);
                    w_iq1[b][s][h] = quad.x;
                    w_iq1[b][s][2 + h] = quad.y;
                    w_iq1[b][s + 1][h] = quad.z;
                    w_iq1[b][s + 1][2 + h] = quad.w;
                }
            }
        }
    }

    // By one thread of each warp, which begins to copy a part of what the tile at `row` is made of into place `slot`.
    __device__ __forceinline__ void fetch_made_of(int warp, int row, int slot) const {
        if (warp > 5 || row >= r.rows) return;
        const IqnLayout to(fx_shared_again(block.w_phi));
        u64* const barrier = shared.arrivals.made_of + slot;
        const int of_tau = 4 * (r.rows - row < iqn_rows ? r.rows - row : iqn_rows);
        if (warp < 4) {
            if (warp == 0) fx_bulk_expect(barrier, IqnLayout::HIDDEN + IqnLayout::DTHETA + of_tau);
            fx_bulk_copy_box(to.hidden + slot * IqnLayout::HIDDEN + warp * iqn_block, r.hidden, row, 32 * warp,
                             barrier);
        } else if (warp == 4) {
            fx_bulk_copy_box(to.dtheta + slot * IqnLayout::DTHETA, r.dtheta, row, 0, barrier);
        } else {
            fx_bulk_copy(to.tau + slot * IqnLayout::TAU, r.tau + row, of_tau, barrier);
        }
    }

    // By one thread of each warp, of which that of warp 7 begins to copy h2 of the samples of the tile at `row` into
    // place `slot`.
    __device__ __forceinline__ void fetch_states(int warp, int row, int slot) const {
        if (warp != 7 || row >= r.rows) return;
        u64* const barrier = shared.arrivals.states + slot;
        const IqnConstants& constants = shared.constants;
        const int samples = 4 >> constants.shift, rows_of_sample = 8 << constants.shift;
        fx_bulk_expect(barrier, samples * IqnLayout::SAMPLE);
        const float* from = constants.h2 + static_cast<long long>(constants.sample(r, row)) * r.ld_h2;
        FxShared to = block.states + slot * IqnLayout::STATES;
#pragma unroll 1
        for (int s = 0; s < samples; ++s, to += IqnLayout::SAMPLE) {
            fx_bulk_copy(to, from, IqnLayout::SAMPLE, barrier);
            row += rows_of_sample;
            if (row < r.rows) from += r.ld_h2;  // of samples that do not exist the last
        }
    }

    // Begins the first copies, behind fx_wait.
    __device__ __forceinline__ void begin(int row0, int next) const {
        const IqnPlace own;
        if (own.lane != 0) return;
        if (own.warp == 5) {
            for (int i = 0; i < 2 * iqn_rows; ++i) fx_shared_store(block.tau + 4 * i, 0u);  // rows that do not exist
            fx_warpgroup_fence();
        }
        if (own.warp == 7) shared.constants.find(r, IqnShare(r).column0);
        fetch_made_of(own.warp, row0, 0);
        fetch_made_of(own.warp, next, 1);
        fetch_states(own.warp, row0, 0);
    }

    // Adds what a tile gives to db_iq2, two rows of an output each thread. No register is left for the sum.
    __device__ __forceinline__ void add(const IqnPlace& own, int slot) const {
        const int row = own.thread >> 4, output = own.thread & 15;
        const FxShared from = block.dtheta + slot * IqnLayout::DTHETA + row * 128 + (output / 4 ^ row & 7) * 16 +
                              output % 4 * 4;
        const FxShared to = block.db_iq2 + own.thread * 4;
        float sum, x, y;
        fx_shared_load(x, from);
        fx_shared_load(y, from + 16 * 128);
        fx_shared_load(sum, to);
        fx_shared_store(to, __float_as_uint(sum + (x + y)));
    }

    // The cosines of a tile, from what lies in place `slot`: numbers t, t + 4, t + 8 and t + 12 of the warp's sixteen,
    // which packed weights have side by side.
    __device__ __forceinline__ void make(FxShared tile, int slot) const {
        const IqnPlace own;
        add(own, slot);
        const int c = own.warp & 3, i = own.warp >> 2, row = own.row();
        const float first = 0.5f * static_cast<float>(16 * c + own.t);
        const FxShared across = tile + c / 2 * iqn_block + row * 128 + ((c % 2 * 4 + own.t) ^ row) * 16;
        // Numbers e of the lane are rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the warp's sixteen down.
        const int at = (16 * c + 2 * own.t) * 128 + ((row & 1) ^ 2 * own.t) * 16 + (row >> 1) * 4;
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            float x, words[4];
            fx_shared_load(x, block.tau + slot * IqnLayout::TAU + (16 * i + 8 * h + row) * 4);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const float cosine = iqn_feature(first + static_cast<float>(2 * e), x);
                words[e] = __uint_as_float(fx_tf32_even(cosine));
                fx_shared_store(tile + IqnLayout::COSINES_DOWN + (at ^ (4 * i + 2 * h) * 16 ^ (e & 1) * 144) +
                                    (e >> 1) * 1024, __float_as_uint(words[e]));
            }
            fx_shared_store(across + (16 * i + 8 * h) * 128, words);
        }
    }

    __device__ __forceinline__ void prepare(FxShared tile) { make(tile, 0); }

    __device__ __forceinline__ void turn(const IqnTurn& now) {
        float dmixed[4][4] = {};
        FX_UNROLL
        for (int b = 0; b < iqn_width / 32; ++b) {
            fx_warpgroup_begin<32>(dmixed, w_iq1[b], now.tile + IqnLayout::DHIDDEN_ACROSS + b * iqn_block);
        }
        if (const IqnPlace own; own.lane == 0) {
            fetch_made_of(own.warp, now.after, now.slot);
            fetch_states(own.warp, now.next, now.slot ^ 1);
        }
        if (now.more) make(now.other, now.slot ^ 1);
        fx_warpgroup_wait<32>(dmixed);
        float shares[4][2] = {};
        unsigned dphi[4][4];
        {
            const IqnPlace own;
            iqn_hand_over<256, true>(own.warp >> 2);
            const FxShared from = block.phi + (own.warp * 4 * 32 + own.lane) * 16;
            const FxShared states = block.states + now.slot * IqnLayout::STATES + own.column * 4;
            const int shift = shared.constants.shift;
            FX_UNROLL
            for (int j = 0; j < 4; ++j) {
                float phi[4], state[2];
                fx_shared_load(phi, from + j * 32 * 16);
                fx_shared_load(state[0], state[1], states + (j >> shift) * IqnLayout::SAMPLE);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) {
                    const int h = e >> 1;
                    const float dm = dmixed[j][e], d = phi[e] <= 0.0f ? 0.0f : dm * state[h];
                    shares[j][h] += dm * phi[e];
                    dphi[j][2 * (e & 1) + h] = fx_tf32_even(d);
                }
            }
        }
        float v[2];
        reduce(v, shares);
        fx_warpgroup_begin<iqn_cosines>(dw_phi, dphi, now.tile + IqnLayout::COSINES_DOWN);
        finish(v, now.slot, now.row0);
        fx_warpgroup_wait<iqn_cosines>(dw_phi);
    }

    // What the rows from 8 t on give to dh2, up to the end of the sample or of the tile.
    __device__ __forceinline__ void reduce(float (&v)[2], const float (&shares)[4][2]) {
        const IqnPlace own;
        const int shift = shared.constants.shift;
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            if (shift == 2) {
                v[h] = fx_lanes_sum<4>((shares[0][h] + shares[1][h]) + (shares[2][h] + shares[3][h]));
            } else {
                v[h] = iqn_sum_of_quarter(own.t, shares[0][h], shares[1][h], shares[2][h], shares[3][h]);
                if (shift == 1) v[h] += __shfl_xor_sync(0xffffffffu, v[h], 1);
            }
        }
    }

    // dh2 of the samples whose last rows are in the tile at row0: a lane writes that of the rows from row0 + 8 t on, if
    // a sample begins there. h2 lies in place `slot`.
    __device__ __forceinline__ void finish(float (&v)[2], int slot, int row0) {
        const IqnConstants& constants = shared.constants;
        const IqnPlace own;
        const int shift = constants.shift;
        if (r.quantiles > iqn_rows) {
            const bool whole = (row0 + iqn_rows) % r.quantiles == 0;
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                v[h] += total[h];
                total[h] = whole ? 0.0f : v[h];
            }
            if (!whole) return;
        }
        const bool begins = (own.t & ((1 << shift) - 1)) == 0;
        const bool wanted = constants.dh2 != nullptr && (constants.scale != 0.0f || r.accumulate == 0);
        if (!wanted || !begins || row0 + 8 * own.t >= r.rows) return;
        const int number = own.t >> shift;
        const long long sample = constants.sample(r, row0) + number;
        float* const to = constants.dh2 + sample * r.ld_dh2 + own.column;
        float state[2];
        fx_shared_load(state[0], state[1], block.states + slot * IqnLayout::STATES + number * IqnLayout::SAMPLE +
                                               own.column * 4);
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            if (r.activation != FX_NONE) v[h] *= fx_activate_slope(r.activation, state[h]);
            const float value = fx_scaled(constants.scale, v[h]);
            to[h] = r.accumulate != 0 ? to[h] + value : value;
        }
    }

    __device__ __forceinline__ void end(float*, float* to_phi, float* to_bias) const {
        const IqnPlace own;
        const int column = IqnShare(r).column0 + own.column;
        // Row 8 j + 2 t + e of `down` is cosine 8 j + t + 4 e.
        FX_UNROLL
        for (int j = 0; j < iqn_cosines / 8; ++j) {
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const int cosine = 8 * j + own.t + 4 * (e & 1);
                if (cosine < r.cosines) to_phi[(column + (e >> 1)) * r.cosines + cosine] = dw_phi[j][e];
            }
        }
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            if (own.t == 0) to_bias[column + h] = dw_phi[0][2 * h];
        }
    }
};

// The way of a warpgroup of either kind through the rows of its slice. Tile n lies in place n mod 2, and so does what
// it is made of.
template <class Group>
__device__ __forceinline__ void iqn_walk(const IqnWarpgroupBackward& r, const IqnLayout& block, IqnShared& shared) {
    Group group(r, block, shared);
    int row0 = IqnShare(r).slice * iqn_run<iqn_rows>(r), next = iqn_next(r, row0);
    fx_wait();
    group.begin(row0, next);
    fx_trigger();
    __syncthreads();
    fx_bulk_wait(shared.arrivals.made_of, 0);
    group.prepare(block.tiles);
#pragma unroll 1
    for (int n = 0;; ++n) {
        const int after = iqn_next(r, next), slot = n & 1;
        const bool more = next < r.rows;
        fx_bulk_wait(shared.arrivals.states + slot, n >> 1 & 1);
        if (more) fx_bulk_wait(shared.arrivals.made_of + (slot ^ 1), (n + 1) >> 1 & 1);
        fx_warpgroup_fence();
        __syncthreads();
        group.turn({block.tiles + slot * IqnLayout::TILE, block.tiles + (slot ^ 1) * IqnLayout::TILE, slot, row0, next,
                    after, more});
        if (!more) break;
        row0 = next;
        next = after;
    }
    if (r.partial == nullptr) return;
    const int slice = IqnShare(r).slice;
    const long long all = static_cast<long long>(iqn_width + r.cosines + 1) * r.features + iqn_width;
    float* const to_iq1 = fx_global(r.partial) + slice * all;
    float* const to_phi = to_iq1 + iqn_width * r.features;
    group.end(to_iq1, to_phi, to_phi + r.features * r.cosines);
}

extern "C" __global__ void __launch_bounds__(512, 1) fx_iqn_warpgroup_backward(const IqnWarpgroupBackward* table,
                                                                              int count) {
    FX_DYN_SHARED(float4, dynamic);
    __shared__ IqnShared shared;
    int tile;
    const IqnWarpgroupBackward& r = fx_record(table, count, tile, shared.record);
    const IqnLayout block(fx_shared(fx_linear_aligned(dynamic)));
    if (threadIdx.x == 0) {
        const int blocks = r.cosines / 32, column0 = IqnShare(r).column0;
        IqnArrivals& arrivals = shared.arrivals;
        fx_bulk_barrier(&arrivals.w_phi);
        for (int slot = 0; slot < 2; ++slot) {
            fx_bulk_barrier(arrivals.made_of + slot);
            fx_bulk_barrier(arrivals.states + slot);
        }
        fx_bulk_expect(&arrivals.w_phi, blocks * IqnLayout::OF_PHI);
        for (int k = 0; k < blocks; ++k) {
            fx_bulk_copy(block.w_phi + k * IqnLayout::OF_PHI, r.w_phi + (k * r.features + column0) * 32,
                         IqnLayout::OF_PHI, &arrivals.w_phi);
        }
    }
    __syncthreads();
    if (threadIdx.x < 256) {
        fx_warpgroup_give<iqn_mixing_registers>();
        iqn_walk<IqnMixing>(r, block, shared);
    } else {
        fx_warpgroup_take<iqn_unmixing_registers>();
        iqn_walk<IqnUnmixing>(r, block, shared);
    }
}

#endif
