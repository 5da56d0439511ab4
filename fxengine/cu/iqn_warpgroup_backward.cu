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
//   per tile.
//   What that is made of is under way a tile before, in copies that take no registers.
//   The gradients of the last layer are made of what dhidden is made of, while it is there: dw_iq2 = dtheta^T hidden by
//   the mixing warps, in products of a warp, db_iq2 by the others. All blocks of a slice see the same rows: the first
//   makes outputs 0 to 7 of dw_iq2, the second the others, so that none has more to do than the rest.
//   unmixing holds w_iq1 in registers, and has some that mixing gives away.
//   The network has 32 or 64 cosines, features in 128s, 128 hidden numbers and at most 16 outputs; 8 rows belong to one
//   sample, and of the number of quantiles and 32 one divides the other.
#include "bulk_copy.cuh"
#include "iqn_fused_tile.cuh"
#include "pack.cuh"
#include "wgmma.cuh"

struct IqnWarpgroupBackward {
    int first_tile;
    int tiles;
    const float* dtheta;     // [rows, outputs]
    const float* tau;        // [rows]
    const float* h2;         // [rows / quantiles, features]
    const float* hidden;     // [rows, 128]
    const float* w_phi;      // [features, cosines], packed
    const float* b_phi;      // [features]
    const float* w_iq1;      // [features, 128], the transpose, packed
    const float* w_iq2;      // [outputs, 128]
    const float* weight;     // one float; like readiness needed by dh2
    const float* readiness;  // one float
    float* dh2;              // [rows / quantiles, features] or null
    float* partial;          // as of iqn_fused_backward.cu, or null
    float* partial_iq2;      // [slices, outputs * 128 + outputs], the slice's share of dw_iq2, db_iq2; or null
    int ld_dtheta;           // floats between rows
    int ld_h2;
    int ld_hidden;
    int ld_iq2;
    int ld_dh2;
    int rows;
    int quantiles;
    int cosines;
    int features;
    int width;               // 128
    int outputs;
    int slices;
    int activation;          // FxActivation that made h2
    int accumulate;          // 1 = dh2 +=
};

#if FX_HAS_WARPGROUPS

constexpr int iqn_rows = 32;  // of a tile
constexpr int iqn_columns_of_block = 128;
constexpr int iqn_block = iqn_rows * 128;  // bytes of 32 k of `across`

// Of a thread. Fewer of the latter, and the compiler would wait for every single product.
constexpr int iqn_mixing_registers = 112, iqn_unmixing_registers = 144;
static_assert(iqn_mixing_registers + iqn_unmixing_registers == 2 * 128, "as many as the launch has: 512 threads of 128");

// Shared memory of a block, in bytes.
struct IqnLayout {
    static constexpr int COSINES = 4 * iqn_rows * iqn_cosines, DHIDDEN = 4 * iqn_rows * iqn_width;
    // A tile: the matrices [2 or 4][32 rows][32] across, [64 or 128][32 rows] down.
    static constexpr int COSINES_DOWN = COSINES, DHIDDEN_ACROSS = 2 * COSINES, DHIDDEN_DOWN = DHIDDEN_ACROSS + DHIDDEN;
    static constexpr int TILE = DHIDDEN_DOWN + DHIDDEN;
    static constexpr int OF_PHI = iqn_columns_of_block * 128;  // 32 k of w_phi
    static constexpr int HIDDEN = 4 * iqn_rows * iqn_width, DTHETA = 4 * iqn_rows * 16;
    static constexpr int STATES = iqn_rows / 8 * iqn_columns_of_block * 4, TAU = 4 * iqn_rows;

    FxShared w_phi;   // [2][128 columns][32]
    FxShared tiles;   // two of them
    FxShared phi;     // [8 warps][4][32] quads, as the sums lie in the lanes
    FxShared hidden;  // two times [4][256 threads] quads (iqn_place): rows 8 u + g of the thread of `mixing`
    FxShared w_iq2;   // [2][256 threads] quads (iqn_place): units of the thread of `mixing`
    FxShared dtheta;  // two times [32 rows][16], in quads (iqn_place)
    FxShared states;  // two times [4][128], h2 of the sample of every 8 rows
    FxShared bias;    // [128], b_phi
    FxShared tau;     // two times [32 rows]
    FxShared db_iq2;  // [16][16], in quads (iqn_place): sums over every 16th row

    __device__ __forceinline__ explicit IqnLayout(FxShared base)
        : w_phi(base), tiles(w_phi + 2 * OF_PHI), phi(tiles + 2 * TILE), hidden(phi + 8 * 4 * 32 * 16),
          w_iq2(hidden + 2 * HIDDEN), dtheta(w_iq2 + 8 * 2 * 32 * 16), states(dtheta + 2 * DTHETA),
          bias(states + 2 * STATES), tau(bias + iqn_columns_of_block * 4),
          db_iq2(tau + 2 * TAU) {}
};

// Where a thread stands: in warp `warp` of the eight of its kind. Row 8 h + g of the 16 of its fragments is column
// 2 g + h of the warp's 16.
struct IqnPlace {
    int thread, warp, lane, g, t;
    int column;  // the lane's first, of the block's

    __device__ __forceinline__ IqnPlace() : IqnPlace(fx_linear_again(static_cast<int>(threadIdx.x)) & 255) {}

private:
    __device__ __forceinline__ explicit IqnPlace(int of_kind)
        : thread(of_kind), warp(thread >> 5), lane(thread & 31), g(lane >> 2), t(lane & 3), column(16 * warp + 2 * g) {}
};

typedef IqnShareOf<iqn_columns_of_block> IqnShare;

// Where quad number q lies of a matrix of 16 columns, four quads a row: those of a row are exchanged according to its
// number. No access conflicts then where lanes of equal t read along a row, the four of them in four rows.
__device__ __forceinline__ int iqn_place(int q) { return q ^ (q >> 2 & 3); }

// The sum over four lanes, DISTANCE apart, of their number n mod 4, which is the lane's among them.
template <int DISTANCE>
__device__ __forceinline__ float iqn_sum_of_quarter(int n, float a, float b, float c, float d) {
    const bool upper = (n & 2) != 0, odd = (n & 1) != 0;
    const float first = (upper ? c : a) + __shfl_xor_sync(0xffffffffu, upper ? a : c, 2 * DISTANCE);
    const float second = (upper ? d : b) + __shfl_xor_sync(0xffffffffu, upper ? b : d, 2 * DISTANCE);
    return (odd ? second : first) + __shfl_xor_sync(0xffffffffu, odd ? first : second, DISTANCE);
}

// First row of the tile after the one at row0.
__device__ __forceinline__ int iqn_next(const IqnWarpgroupBackward& r, int row0) {
    const int run = iqn_run<iqn_rows>(r), next = row0 + iqn_rows;
    return run == iqn_rows || next % run == 0 ? next + (r.slices - 1) * run : next;
}

// Begins to copy four floats, of which the first `left` exist.
__device__ __forceinline__ void iqn_copy(FxShared to, const float* from, int left, bool quads) {
    if (quads) {
        fx_copy_quad(to, from, left < 0 ? 0 : left < 4 ? left : 4);
    } else {
        FX_UNROLL
        for (int e = 0; e < 4; ++e) fx_copy_word(to + 4 * e, from + e, e < left);
    }
}

// Columns 16 c + 4 t .. of rows 16 i + 8 h + g of a matrix, into both of its copies. No access conflicts: lanes of the
// upper t begin with their third number, else two of them would meet in a bank.
__device__ __forceinline__ void iqn_store(FxShared across, FxShared down, const IqnPlace& own, const float (&v)[2][4],
                                          int i, int c) {
    unsigned words[2][4];
    FX_UNROLL
    for (int h = 0; h < 2; ++h) {
        FX_UNROLL
        for (int e = 0; e < 4; ++e) words[h][e] = fx_tf32_made(v[h][e]);
    }
    const int to = c / 2 * iqn_block + own.g * 128 + (own.g ^ c % 2 * 4) * 16 + own.t * 4;
    FX_UNROLL
    for (int e = 0; e < 4; ++e) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) fx_shared_store(across + (to ^ e * 16) + (16 * i + 8 * h) * 128, words[h][e]);
    }
    const int swap = own.t & 2;
    const int row = 16 * c + 4 * own.t + swap, chunk = (row & 7) ^ (own.g & 1);
    const int at = row * 128 + chunk * 16 + (fx_linear_again(own.g) >> 1) * 4;  // kept, half of g costs a register
    FX_UNROLL
    for (int e = 0; e < 4; ++e) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            // number e ^ swap, of row e ^ swap behind 16 c + 4 t
            fx_shared_store(down + (at ^ e * 144 ^ (4 * i + 2 * h) * 16), swap != 0 ? words[h][e ^ 2] : words[h][e]);
        }
    }
}

// mixing: of the next tile dhidden, 16 columns of it per warp, and what it gives to dw_iq2.
struct IqnMixing {
    const IqnWarpgroupBackward& r;
    const IqnLayout block;
    float dw_iq1[iqn_width / 8][4];
    float db_iq1;           // of column 4 t + (g & 3) of the warp's
    float dw_iq2[1][1][4];  // of the warp's hidden numbers, by outputs output0 .. + 7
    int output0;            // 0 or 8

    __device__ __forceinline__ IqnMixing(const IqnWarpgroupBackward& record, const IqnLayout& layout)
        : r(record), block(layout), dw_iq1{}, db_iq1(0.0f), dw_iq2{}, output0(IqnShare(record).column0 / 16 & 8) {
        const IqnPlace own;
        if (own.thread < iqn_columns_of_block) {
            fx_shared_store(block.bias + 4 * own.thread,
                            __float_as_uint(fx_global(r.b_phi)[IqnShare(r).column0 + own.thread]));
        }
        uint4 units[2];
        iqn_unit_down<1>(units, fx_global(r.w_iq2), r.ld_iq2, iqn_width, r.outputs, 16 * own.warp, 4 * own.t);
        FX_UNROLL
        for (int q = 0; q < 2; ++q) {
            const float v[4] = {__uint_as_float(units[q].x), __uint_as_float(units[q].y), __uint_as_float(units[q].z),
                                __uint_as_float(units[q].w)};
            fx_shared_store(block.w_iq2 + (256 * q + iqn_place(own.thread)) * 16, v);
        }
    }

    __device__ __forceinline__ void start(int) const {}

    // Half i of dhidden of a tile, from dtheta and hidden in place `slot`.
    __device__ __forceinline__ void make(FxShared tile, int slot, int i) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) add(slot, 2 * i + h);
        const IqnPlace own;
        const int quad = iqn_place(own.thread) * 16;
        float sums[1][2][4] = {};
        FX_UNROLL
        for (int q = 0; q < 2; ++q) {
            float v[4];
            unsigned a[1][1][4];
            fx_shared_load(v, block.w_iq2 + 256 * 16 * q + quad);
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                float x, y;
                const int row = 16 * i + 8 * h;
                fx_shared_load(x, y, block.dtheta + slot * IqnLayout::DTHETA + row * 64 + quad % 512 + q * 8);
                a[0][0][h] = fx_tf32(x);
                a[0][0][2 + h] = fx_tf32(y);
            }
            iqn_multiply<1, 1>(sums, a, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
                                                   __float_as_uint(v[3])));
        }
        float v[2][4];
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            float hidden[4];
            fx_shared_load(hidden, block.hidden + slot * IqnLayout::HIDDEN + 256 * 16 * (2 * i + h) + quad);
            iqn_dhidden<1>(v[h], sums, hidden, 0, h);
        }
        db_iq1 += iqn_sum_of_quarter<4>(own.g, v[0][0] + v[1][0], v[0][1] + v[1][1], v[0][2] + v[1][2],
                                        v[0][3] + v[1][3]);
        iqn_store(tile + IqnLayout::DHIDDEN_ACROSS, tile + IqnLayout::DHIDDEN_DOWN, own, v, i, own.warp);
    }

    // Adds what rows 8 u .. of a tile give to dw_iq2. Word t of k is row t, word t + 4 row t + 4. Arithmetic has made
    // hidden.
    __device__ __forceinline__ void add(int slot, int u) {
        const IqnPlace own;
        const int row = own.t * 80;  // and of its quads the first (iqn_place)
        const int of_hidden = row ^ own.g * 8, of_dtheta = row ^ own.g * 4 ^ output0 * 4;
        const FxShared hidden = block.hidden + slot * IqnLayout::HIDDEN + (256 * u + 32 * own.warp) * 16 + of_hidden;
        const FxShared dtheta = block.dtheta + slot * IqnLayout::DTHETA + 8 * u * 64 + of_dtheta;
        unsigned a[1][1][4], b[1][1][2];
        FX_UNROLL
        for (int half = 0; half < 2; ++half) {
            float x, y, z;
            fx_shared_load(x, y, hidden + half * 256);
            fx_shared_load(z, dtheta + half * 256);
            a[0][0][2 * half] = fx_tf32_made(x);
            a[0][0][2 * half + 1] = fx_tf32_made(y);
            b[0][0][half] = fx_tf32(z);
        }
        fx_mma<1, 1, 1, 1>(dw_iq2, a, b);
    }

    __device__ __forceinline__ void prepare(FxShared tile, int, int) {
        make(tile, 0, 0);
        make(tile, 0, 1);
    }

    __device__ __forceinline__ void arrive() const {}

    __device__ __forceinline__ void turn(FxShared tile, FxShared other, int slot, int, int next, int) {
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
            fx_warpgroup_begin<32>(phi, w_phi, tile);
            if (r.cosines > 32) fx_warpgroup_begin<32>(phi, w_phi + IqnLayout::OF_PHI, tile + iqn_block);
        }
        if (next < r.rows) make(other, slot ^ 1, 0);
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
            const FxShared states = block.states + slot * IqnLayout::STATES + own.column * 4;
            FX_UNROLL
            for (int j = 0; j < 4; ++j) {
                float state[2];
                fx_shared_load(state[0], state[1], states + j * iqn_columns_of_block * 4);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) mixed[j][2 * (e & 1) + (e >> 1)] = fx_tf32_made(phi[j][e] * state[e >> 1]);
            }
        }
        fx_warpgroup_begin<iqn_width>(dw_iq1, mixed, tile + IqnLayout::DHIDDEN_DOWN);
        if (next < r.rows) make(other, slot ^ 1, 1);
        fx_warpgroup_wait<iqn_width>(dw_iq1);
    }

    __device__ __forceinline__ void end(float* to_iq1, float*, float* to_bias) const {
        const IqnPlace own;
        const int column0 = IqnShare(r).column0;
        if (r.partial_iq2 != nullptr && column0 <= iqn_columns_of_block) end_last();
        float* to = to_iq1 + 2 * own.t * r.features + column0 + own.column;
        FX_UNROLL
        for (int j = 0; j < iqn_width / 8; ++j, to += 8 * r.features) {
            FX_UNROLL
            for (int e = 0; e < 2; ++e) {
                *reinterpret_cast<float2*>(to + e * r.features) = make_float2(dw_iq1[j][e], dw_iq1[j][2 + e]);
            }
        }
        const float sum = db_iq1 + __shfl_xor_sync(0xffffffffu, db_iq1, 16);
        if (column0 == 0 && own.g < 4) to_bias[r.features + 16 * own.warp + 4 * own.t + own.g] = sum;
    }

    // The slice's share of the last layer's gradients. A barrier lies behind the last addition to db_iq2.
    __device__ __forceinline__ void end_last() const {
        const IqnPlace own;
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
            const int quad = iqn_place(4 * row + own.thread / 4);
            fx_shared_load(x, block.db_iq2 + quad * 16 + own.thread % 4 * 4);
            sum += x;
        }
        to[r.outputs * iqn_width + own.thread] = sum;
    }
};

// unmixing: of the next tile 16 of the cosines for 16 rows per warp, and what it gives to db_iq2; what tiles are made
// of.
struct IqnUnmixing {
    const IqnWarpgroupBackward& r;
    const IqnLayout block;
    unsigned w_iq1[iqn_width / 32][4][4];
    float dw_phi[iqn_cosines / 8][4];
    float db_phi[2], total[2];  // total: of dmixed phi over the sample's rows so far

    __device__ __forceinline__ IqnUnmixing(const IqnWarpgroupBackward& record, const IqnLayout& layout)
        : r(record), block(layout), dw_phi{}, db_phi{}, total{} {
        const IqnPlace own;
        fx_shared_store(block.db_iq2 + own.thread * 4, 0u);
        const float* const from = fx_global(r.w_iq1) + (IqnShare(r).column0 + 16 * own.warp + own.g) * 32 + own.t;
        FX_UNROLL
        for (int b = 0; b < iqn_width / 32; ++b) {
            FX_UNROLL
            for (int s = 0; s < 4; ++s) {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) {
                    const int at = (b * r.features + 8 * (e & 1)) * 32 + ((2 * s + (e >> 1)) ^ own.g) * 4;
                    w_iq1[b][s][e] = __float_as_uint(from[at]);
                }
            }
        }
    }

    // Begins to copy dtheta, hidden and tau of the tile at row0 into places `slot`, and h2 of the one before, at row1,
    // into the other.
    __device__ __forceinline__ void fetch(int row0, int row1, int slot) const {
        const IqnPlace own;
        {
            const bool quads = fx_quads(r.hidden, r.ld_hidden);
            int row = row0 + own.g;
            const float* from = fx_global(r.hidden) + static_cast<long long>(row) * r.ld_hidden;
            from += 16 * own.warp + 4 * own.t;
            const FxShared to = block.hidden + slot * IqnLayout::HIDDEN + iqn_place(own.thread) * 16;
            FX_UNROLL
            for (int u = 0; u < 4; ++u, row += 8, from += 8 * r.ld_hidden) {
                iqn_copy(to + 256 * 16 * u, from, row < r.rows ? 4 : 0, quads);
            }
        }
        const bool states = own.thread >= 128;
        const int quad = own.thread & 127;
        const int row = states ? row1 + quad / 32 * 8 : row0 + quad / 4;
        const int column = states ? quad % 32 * 4 : quad % 4 * 4;
        const int line = states ? row / r.quantiles : row, ld = states ? r.ld_h2 : r.ld_dtheta;
        const float* const matrix = states ? fx_global(r.h2) + IqnShare(r).column0 : fx_global(r.dtheta);
        const int left = states ? 4 : r.outputs - column;
        const FxShared to = block.dtheta + (states ? 2 * IqnLayout::DTHETA + (slot ^ 1) * IqnLayout::STATES
                                                   : slot * IqnLayout::DTHETA);
        iqn_copy(to + (states ? quad : iqn_place(quad)) * 16, matrix + static_cast<long long>(line) * ld + column,
                 row < r.rows ? left : 0, fx_quads(matrix, ld));
        if (own.warp == 0) {
            const int at = row0 + own.lane;
            fx_copy_word(block.tau + slot * IqnLayout::TAU + 4 * own.lane, fx_global(r.tau) + at, at < r.rows);
        }
        fx_copy_commit();
    }

    __device__ __forceinline__ void start(int row0) {
        fetch(row0, r.rows, 0);
        arrive();
    }

    // Adds what a tile gives to db_iq2, two rows of an output each thread. No register is left for the sum.
    __device__ __forceinline__ void add(const IqnPlace& own, int slot) const {
        const FxShared from = block.dtheta + slot * IqnLayout::DTHETA + own.thread * 4;
        const FxShared to = block.db_iq2 + own.thread * 4;
        float sum, x, y;
        fx_shared_load(x, from);
        fx_shared_load(y, from + 16 * 64);
        fx_shared_load(sum, to);
        fx_shared_store(to, __float_as_uint(sum + (x + y)));
    }

    // The cosines of a tile, from what lies in place `slot`.
    __device__ __forceinline__ void make(FxShared tile, int slot) const {
        const IqnPlace own;
        add(own, slot);
        const int c = own.warp & 3, i = own.warp >> 2;
        const float first = static_cast<float>(16 * c + 4 * own.t);
        float v[2][4];
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            float x;
            fx_shared_load(x, block.tau + slot * IqnLayout::TAU + (16 * i + 8 * h + own.g) * 4);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) v[h][e] = iqn_feature(first + static_cast<float>(e), x);
        }
        iqn_store(tile, tile + IqnLayout::COSINES_DOWN, own, v, i, c);
    }

    __device__ __forceinline__ void prepare(FxShared tile, int row0, int next) {
        fetch(next, row0, 1);
        make(tile, 0);
    }

    __device__ __forceinline__ void arrive() const { fx_copy_wait<0>(); }

    __device__ __forceinline__ void turn(FxShared tile, FxShared other, int slot, int row0, int next, int after) {
        float dmixed[4][4] = {};
        FX_UNROLL
        for (int b = 0; b < iqn_width / 32; ++b) {
            fx_warpgroup_begin<32>(dmixed, w_iq1[b], tile + IqnLayout::DHIDDEN_ACROSS + b * iqn_block);
        }
        fetch(after, next, slot);
        if (next < r.rows) make(other, slot ^ 1);
        fx_warpgroup_wait<32>(dmixed);
        float shares[4][2] = {};
        unsigned dphi[4][4];
        {
            const IqnPlace own;
            iqn_hand_over<256, true>(own.warp >> 2);
            const FxShared from = block.phi + (own.warp * 4 * 32 + own.lane) * 16;
            const FxShared states = block.states + slot * IqnLayout::STATES + own.column * 4;
            FX_UNROLL
            for (int j = 0; j < 4; ++j) {
                float phi[4], state[2];
                fx_shared_load(phi, from + j * 32 * 16);
                fx_shared_load(state[0], state[1], states + j * iqn_columns_of_block * 4);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) {
                    const int h = e >> 1;
                    const float dm = dmixed[j][e], d = phi[e] <= 0.0f ? 0.0f : dm * state[h];
                    shares[j][h] += dm * phi[e];
                    db_phi[h] += d;
                    dphi[j][2 * (e & 1) + h] = fx_tf32_made(d);
                }
            }
        }
        fx_warpgroup_begin<iqn_cosines>(dw_phi, dphi, tile + IqnLayout::COSINES_DOWN);
        finish(shares, block.states + slot * IqnLayout::STATES, row0);
        fx_warpgroup_wait<iqn_cosines>(dw_phi);
    }

    // dh2 of the samples whose last rows are in the tile at row0: lane t writes that of the rows from row0 + 8 t on.
    __device__ __forceinline__ void finish(float (&shares)[4][2], FxShared states, int row0) {
        const IqnPlace own;
        const bool whole = r.quantiles <= iqn_rows || (row0 + iqn_rows) % r.quantiles == 0;
        FX_UNROLL
        for (int j = 0; j < 4; ++j) {
            const bool ends = whole && (8 * (j + 1) % iqn_rows & (r.quantiles - 1)) == 0;
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                shares[j][h] += total[h];
                total[h] = ends ? 0.0f : shares[j][h];
            }
        }
        if (!whole) return;
        float v[2];
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            v[h] = iqn_sum_of_quarter<1>(own.t, shares[0][h], shares[1][h], shares[2][h], shares[3][h]);
        }
        const float scale = r.dh2 != nullptr ? *fx_global(r.weight) * *fx_global(r.readiness) : 0.0f;
        const int row = row0 + 8 * own.t;
        const bool ends = (8 * (own.t + 1) % iqn_rows & (r.quantiles - 1)) == 0;
        if (r.dh2 == nullptr || !ends || row >= r.rows || (scale == 0.0f && r.accumulate != 0)) return;
        float* const to = fx_global(r.dh2) + static_cast<long long>(row / r.quantiles) * r.ld_dh2 +
                          IqnShare(r).column0 + own.column;
        float state[2];
        fx_shared_load(state[0], state[1], states + (own.t * iqn_columns_of_block + own.column) * 4);
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            if (r.activation != FX_NONE) v[h] *= fx_activate_slope(r.activation, state[h]);
            const float value = fx_scaled(scale, v[h]);
            to[h] = r.accumulate != 0 ? to[h] + value : value;
        }
    }

    __device__ __forceinline__ void end(float*, float* to_phi, float* to_bias) const {
        const IqnPlace own;
        const int column = IqnShare(r).column0 + own.column;
        FX_UNROLL
        for (int u = 0; u < iqn_cosines / 4; ++u) {
            const int j = u >> 1, h = u & 1, at = 8 * j + 2 * own.t;
            if (at < r.cosines) {
                *reinterpret_cast<float2*>(to_phi + (column + h) * r.cosines + at) =
                    make_float2(dw_phi[j][2 * h], dw_phi[j][2 * h + 1]);
            }
        }
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            const float sum = fx_lanes_sum<4>(db_phi[h]);
            if (own.t == 0) to_bias[column + h] = sum;
        }
    }
};

// The way of a warpgroup of either kind through the rows of its slice. Tile n lies in place n & 1, and so do its dtheta
// and h2.
template <class Group>
__device__ __forceinline__ void iqn_walk(const IqnWarpgroupBackward& r, const IqnLayout& block, u64* barrier) {
    Group group(r, block);
    fx_bulk_wait(barrier, 0);
    fx_wait();
    fx_trigger();
    int row0 = IqnShare(r).slice * iqn_run<iqn_rows>(r), next = iqn_next(r, row0), slot = 0;
    group.start(row0);
    __syncthreads();
    group.prepare(block.tiles, row0, next);
#pragma unroll 1
    while (row0 < r.rows) {
        const int after = iqn_next(r, next);
        group.arrive();
        fx_warpgroup_fence();
        __syncthreads();
        group.turn(block.tiles + slot * IqnLayout::TILE, block.tiles + (slot ^ 1) * IqnLayout::TILE, slot, row0, next,
                   after);
        row0 = next;
        next = after;
        slot ^= 1;
    }
    group.arrive();
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
    __shared__ IqnWarpgroupBackward place;
    __shared__ u64 barrier;
    int tile;
    const IqnWarpgroupBackward& r = fx_record(table, count, tile, place);
    const IqnLayout block(fx_shared(fx_linear_aligned(dynamic)));
    if (threadIdx.x == 0) {
        const int blocks = r.cosines / 32, column0 = IqnShare(r).column0;
        fx_bulk_barrier(&barrier);
        fx_bulk_expect(&barrier, blocks * IqnLayout::OF_PHI);
        for (int k = 0; k < blocks; ++k) {
            fx_bulk_copy(block.w_phi + k * IqnLayout::OF_PHI, r.w_phi + (k * r.features + column0) * 32,
                         IqnLayout::OF_PHI, &barrier);
        }
    }
    __syncthreads();
    if (threadIdx.x < 256) {
        fx_warpgroup_give<iqn_mixing_registers>();
        iqn_walk<IqnMixing>(r, block, &barrier);
    } else {
        fx_warpgroup_take<iqn_unmixing_registers>();
        iqn_walk<IqnUnmixing>(r, block, &barrier);
    }
}

#endif
