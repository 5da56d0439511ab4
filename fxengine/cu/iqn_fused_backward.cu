// Backward of the quantile networks of iqn_fused.cu, from dtheta and the stored hidden numbers.
//
// fx_iqn_backward_<precision>_<rows>: with slope of relu taken from hidden and from phi, made again from tau:
//   dhidden = (dtheta w_iq2) slope(hidden), dmixed = dhidden w_iq1, dphi = dmixed h2[b] slope(phi)
//   dh2[b]  = or += scale * slope(h2) * sum over the N rows of b of dmixed phi, scale = *weight * *readiness, the slope
//             that of the activation that made h2; a scale of 0 gives an exact 0, or accumulating leaves dh2 untouched
//   partial[slice] = the slice's share of dw_iq1 = dhidden^T mixed, dw_phi = dphi^T cosines, db_phi, db_iq1
//   A block owns 128 columns of h2 and every slices-th run of rows, in tiles of ROWS: nothing of the size
//   [rows, features] is ever in memory. A run is a tile or a sample, whichever is longer; the number of quantiles is a
//   multiple of 8, and it and ROWS one of the other.
//
//   Products are made transposed, columns of h2 by rows of the batch. The sums of phi and of dmixed then lie as operand
//   A of a weight gradient, whose k is the rows, wants them: in the same lane, k in another order (iqn_fused.cuh).
//   Columns are shared out among pairs of warps, 32 each, so that a weight that is read serves 32 of them:
//
//     warp p      phi = w_phi cosines^T        -> mixed = phi h2           -> dw_iq1 += mixed dhidden
//     warp p + 4  dmixed = w_iq1^T dhidden^T   -> dphi = dmixed h2 slope   -> dw_phi += dphi cosines; dh2
//
//   Both make about as many products. Sums of weight gradients and w_iq1 stay in registers; phi goes from the
//   first to the second through shared memory, and the second never waits for it, having twice as much to do before.
//   Cosines and dhidden, which the former and the latter make, have two places in shared memory, so that a warp makes
//   the next tile's while others still multiply: one barrier per tile. Per 32 rows and 128 columns the tensor cores
//   take 1600 products of 1.5 clocks, shared memory 2450 clocks; a warp's registers are full, so what can be found out
//   again is.
//
// fx_iqn_gradients: sums of the slices in their order, = or +=; squares[tile] = sum of squares of the tile's results.
//   Where the backward makes the last layer's gradients too (iqn_warpgroup_backward.cu), theirs have partial sums of
//   their own.
#include "iqn_fused_tile.cuh"
#include "squares.cuh"

struct IqnBackward {
    int first_tile;
    int tiles;
    const float* dtheta;     // [rows, outputs]
    const float* tau;        // [rows]
    const float* h2;         // [rows / quantiles, features]
    const float* hidden;     // [rows, width]
    const float* w_phi;      // [features, cosines]
    const float* b_phi;      // [features]
    const float* w_iq1;      // [width, features]
    const float* w_iq2;      // [outputs, width]
    const float* weight;     // one float; like readiness needed by dh2
    const float* readiness;  // one float
    float* dh2;              // [rows / quantiles, features] or null
    float* partial;          // [slices, width * features + features * cosines + features + width] or null
    int ld_dtheta;           // floats between rows
    int ld_h2;
    int ld_hidden;
    int ld_phi;
    int ld_iq1;
    int ld_iq2;
    int ld_dh2;
    int rows;
    int quantiles;
    int cosines;             // at most 64
    int features;
    int width;               // at most 128
    int outputs;
    int slices;
    int activation;          // FxActivation that made h2
    int accumulate;          // 1 = dh2 +=
};

struct IqnGradients {
    int first_tile;
    int tiles;
    const float* partial;      // as above
    const float* partial_iq2;  // [slices, outputs * width + outputs]: shares of dw_iq2, db_iq2
    float* dw_iq1;             // [width, features]
    float* dw_phi;             // [features, cosines]
    float* db_phi;             // [features]
    float* db_iq1;             // [width]
    float* dw_iq2;             // [outputs, width]
    float* db_iq2;             // [outputs]
    double* squares;           // [tiles] or null
    int ld_iq1;                // floats between rows
    int ld_phi;
    int ld_iq2;
    int cosines;
    int features;
    int width;
    int outputs;               // 0 without the last layer
    int slices;
    int accumulate;
};

// Shared memory of a block.
template <int WORD, int TILE_ROWS>
struct IqnBlock {
    static constexpr int COLUMNS = 128, PAIRS = 4, ROWS = TILE_ROWS;
    static constexpr int STEPS = iqn_steps<WORD>;
    static constexpr int PHI = iqn_cosines / 16, MIXED = iqn_width / 16, DOWN = ROWS / 16;  // chunks of k
    static constexpr int GROUPS = ROWS / 8;  // of rows that belong to one sample
    static constexpr int TILE = 2 * ROWS * (iqn_cosines + iqn_width) / WORD + GROUPS * COLUMNS;  // words

    uint4* w_phi;     // [PAIRS][PHI][2][STEPS][32], operand A
    uint4* w_iq2;     // [MIXED][STEPS][32], units for the first 16 outputs
    float4* phi;      // [PAIRS][GROUPS][2][32], as the sums lie in the lanes
    unsigned* tiles;  // two of them
    float* bias;      // [COLUMNS], b_phi

    __device__ __forceinline__ explicit IqnBlock(uint4* shared)
        : w_phi(shared), w_iq2(w_phi + PAIRS * PHI * 2 * STEPS * 32),
          phi(reinterpret_cast<float4*>(w_iq2 + MIXED * STEPS * 32)),
          tiles(reinterpret_cast<unsigned*>(phi + PAIRS * GROUPS * 2 * 32)),
          bias(reinterpret_cast<float*>(tiles + 2 * TILE)) {}
};

// What is made of ROWS rows before they are multiplied.
template <int WORD, int ROWS>
struct IqnTile {
    IqnMatrix<WORD, iqn_cosines, ROWS> cosines;
    IqnMatrix<WORD, iqn_width, ROWS> dhidden;
    float* states;  // [GROUPS][COLUMNS], h2 of the sample of every 8 rows

    __device__ __forceinline__ explicit IqnTile(unsigned* words)
        : cosines(words), dhidden(cosines.down + cosines.WORDS),
          states(reinterpret_cast<float*>(dhidden.down + dhidden.WORDS)) {}
};

// Where a thread stands, found out afresh where it is wanted, so that it takes no registers in between: in warp `pair`
// of the four of its kind. Of the 32 columns of the pair, row 16 i + 8 h + g of operand A, and of the sums, is column
// 4 g + 2 i + h, so that a lane's four lie side by side.
struct IqnPlace {
    int pair, lane, g, t;
    int column;  // the lane's first, of the block's

    __device__ __forceinline__ IqnPlace() : IqnPlace(fx_linear_again(static_cast<int>(threadIdx.x))) {}

private:
    __device__ __forceinline__ explicit IqnPlace(int thread)
        : pair(thread >> 5 & 3), lane(thread & 31), g(lane >> 2), t(lane & 3), column(32 * pair + 4 * g) {}
};

typedef IqnShareOf<1> IqnShare;

// First row of the tile after the one at row0.
template <int ROWS>
__device__ __forceinline__ int iqn_next(const IqnBackward& r, int row0) {
    const int run = iqn_run<ROWS>(r), next = fx_linear_again(row0) + ROWS;
    return next % run == 0 ? next + (r.slices - 1) * run : next;
}

// The four numbers of h2 that chunk i of the tile's rows is mixed with, in this lane: [i][h] like a sum's rows.
template <class Tile>
__device__ __forceinline__ void iqn_state(float (&state)[2][2], const Tile& tile, const IqnPlace& own, int i) {
    const float4 quad = *reinterpret_cast<const float4*>(tile.states + (2 * i + (own.t >> 1)) * 128 + own.column);
    state[0][0] = quad.x;
    state[0][1] = quad.y;
    state[1][0] = quad.z;
    state[1][1] = quad.w;
}

// sums += a . columns of a matrix, over chunk `chunk` of the rows.
template <int WORD, int WIDE, int FRAGMENTS, class Matrix>
__device__ __forceinline__ void iqn_add_gradient(float (&sums)[FRAGMENTS / WIDE][2][WIDE][4],
                                                 const unsigned (&a)[2][iqn_steps<WORD>][4], const Matrix& matrix,
                                                 int chunk) {
    FX_UNROLL
    for (int part = 0; part < FRAGMENTS / WIDE; ++part) {
        unsigned b[WIDE][iqn_steps<WORD>][2];
        FX_UNROLL
        for (int j = 0; j < WIDE; ++j) {
            const int fragment = part * WIDE + j;
            matrix.load_down(b[j], chunk, fragment >> 1, fragment & 1);
        }
        fx_mma<WORD, iqn_steps<WORD>, 2, WIDE>(sums[part], a, b);
    }
}

// First kind of warp: phi and mixed again, dw_iq1; of the next tile dhidden, 32 columns of it, and h2 for 8 rows.
template <int WORD, int ROWS>
struct IqnMixing {
    typedef IqnBlock<WORD, ROWS> Block;
    typedef IqnTile<WORD, ROWS> Tile;
    static constexpr int STEPS = Block::STEPS, DOWN = Block::DOWN, WIDE = 2;

    const IqnBackward& r;
    const Block block;
    float dw_iq1[iqn_width / 8 / WIDE][2][WIDE][4];
    float db_iq1[2][4];
    // Of the next tile:
    float dtheta[DOWN][2][4];                  // of the first 16 outputs
    unsigned slopes[DOWN];                     // of relu: bit 8 h + 4 c + e is of column 32 pair + 16 c + 4 t + e
    float state[4];                            // h2 for the tile's rows 8 pair ..

    __device__ __forceinline__ IqnMixing(const IqnBackward& record, const Block& shared)
        : r(record), block(shared), dw_iq1{}, db_iq1{} {
        const IqnPlace own;
        const int column = IqnShare(r).column0 + own.column;
        const bool quads = fx_quads(r.w_phi, r.ld_phi);
#pragma unroll 1
        for (int c = 0; c < Block::PHI; ++c) {
            const int k = 16 * c + 4 * own.t;
            float v[2][2][4];
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const int left = column + e < r.features ? r.cosines - k : 0;
                fx_load(v[e >> 1][e & 1], r.w_phi + static_cast<long long>(column + e) * r.ld_phi + k, left, quads);
            }
            unsigned a[2][STEPS][4];
            iqn_operands<WORD, 2>(a, v);
            FX_UNROLL
            for (int u = 0; u < 2 * STEPS; ++u) {
                const unsigned(&word)[4] = a[u / STEPS][u % STEPS];
                weights(own, c)[32 * u] = make_uint4(word[0], word[1], word[2], word[3]);
            }
        }
        FX_UNROLL
        for (int e = 0; e < 4; ++e) block.bias[own.column + e] = column + e < r.features ? r.b_phi[column + e] : 0.0f;
        FX_UNROLL
        for (int c = 0; c < 2; ++c) {
            uint4 units[STEPS];
            iqn_unit_down<WORD>(units, r.w_iq2, r.ld_iq2, r.width, r.outputs, 32 * own.pair + 16 * c, 4 * own.t);
            FX_UNROLL
            for (int q = 0; q < STEPS; ++q) last(own, c)[32 * q] = units[q];
        }
    }

    // This lane's part of w_phi and w_iq2; only the warp itself reads it.
    __device__ __forceinline__ uint4* weights(const IqnPlace& own, int c) const {
        return block.w_phi + (own.pair * Block::PHI + c) * 2 * STEPS * 32 + own.lane;
    }
    __device__ __forceinline__ uint4* last(const IqnPlace& own, int c) const {
        return block.w_iq2 + (2 * own.pair + c) * STEPS * 32 + own.lane;
    }

    __device__ __forceinline__ void fetch(int row0) {
        fetch_state(row0);
        FX_UNROLL
        for (int i = 0; i < DOWN; ++i) {
            float hidden[2][1][2][4];
            fetch_rows(hidden, row0, i);
            note_slopes(hidden, i);
        }
    }

    __device__ __forceinline__ void fetch_state(int row0) {
        const IqnPlace own;
        const int row = row0 + 8 * own.pair, column = IqnShare(r).column0 + 4 * own.lane;
        const float* const from = r.h2 + static_cast<long long>(row / r.quantiles) * r.ld_h2 + column;
        const bool there = own.pair < Block::GROUPS && row < r.rows;
        fx_load(state, from, there ? r.features - column : 0, fx_quads(r.h2, r.ld_h2));
    }

    // dtheta and hidden of chunk i of the rows.
    __device__ __forceinline__ void fetch_rows(float (&hidden)[2][1][2][4], int row0, int i) {
        const IqnPlace own;
        float(&first)[1][2][4] = *reinterpret_cast<float(*)[1][2][4]>(&dtheta[i]);
        iqn_fetch<1>(first, r.dtheta, r.ld_dtheta, r.outputs, 4 * own.t, row0 + 16 * i, r.rows);
        FX_UNROLL
        for (int c = 0; c < 2; ++c) {
            const int column = 32 * own.pair + 16 * c + 4 * own.t;
            iqn_fetch<1>(hidden[c], r.hidden, r.ld_hidden, r.width, column, row0 + 16 * i, r.rows);
        }
    }

    __device__ __forceinline__ void note_slopes(const float (&hidden)[2][1][2][4], int i) {
        slopes[i] = 0;
        FX_UNROLL
        for (int e = 0; e < 16; ++e) {
            if (hidden[e >> 2 & 1][0][e >> 3][e & 3] > 0.0f) slopes[i] |= 1u << e;
        }
    }

    __device__ __forceinline__ void multiply(const Tile& tile, int row0) {
        const IqnPlace own;
        const int next = iqn_next<ROWS>(r, row0);
        const float4 quad = *reinterpret_cast<const float4*>(block.bias + own.column);
        const float bias[2][2] = {{quad.x, quad.y}, {quad.z, quad.w}};
        float phi[2][2 * DOWN][4];
        FX_UNROLL
        for (int i = 0; i < 2; ++i) {
            FX_UNROLL
            for (int j = 0; j < 2 * DOWN; ++j) {
                FX_UNROLL
                for (int e = 0; e < 4; ++e) phi[i][j][e] = bias[i][e >> 1];
            }
        }
        FX_UNROLL
        for (int c = 0; c < Block::PHI; ++c) {
            unsigned a[2][STEPS][4], b[2 * DOWN][STEPS][2];
            FX_UNROLL
            for (int u = 0; u < 2 * STEPS; ++u) {
                const uint4 word = weights(own, c)[32 * u];
                unsigned(&to)[4] = a[u / STEPS][u % STEPS];
                to[0] = word.x;
                to[1] = word.y;
                to[2] = word.z;
                to[3] = word.w;
            }
            FX_UNROLL
            for (int j = 0; j < 2 * DOWN; ++j) tile.cosines.load_across(b[j], c, j >> 1, j & 1);
            fx_mma<WORD, STEPS, 2, 2 * DOWN>(phi, a, b);
        }
        float4* const handed = block.phi + own.pair * Block::GROUPS * 2 * 32 + own.lane;
        FX_UNROLL
        for (int i = 0; i < 2; ++i) {
            FX_UNROLL
            for (int j = 0; j < 2 * DOWN; ++j) {
                float(&p)[4] = phi[i][j];
                FX_UNROLL
                for (int e = 0; e < 4; ++e) p[e] = fx_activate(FX_RELU, p[e]);
                handed[(2 * j + i) * 32] = make_float4(p[0], p[1], p[2], p[3]);
            }
        }
        iqn_hand_over<64, false>(own.pair);
        FX_UNROLL
        for (int chunk = 0; chunk < DOWN; ++chunk) {
            float hidden[2][1][2][4];
            fetch_rows(hidden, next, chunk);
            if (chunk == DOWN - 1) fetch_state(next);
            float h2[2][2], mixed[2][2][4];
            iqn_state(h2, tile, own, chunk);
            FX_UNROLL
            for (int e = 0; e < 16; ++e) {
                const int i = e >> 3, h = e >> 2 & 1, row = e & 3;  // 4 t + row of the chunk
                mixed[i][h][row] = phi[i][2 * chunk + (row >> 1)][2 * h + (row & 1)] * h2[i][h];
            }
            unsigned a[2][STEPS][4];
            iqn_operands<WORD, 2, true>(a, mixed);
            if (r.partial != nullptr) iqn_add_gradient<WORD, WIDE, iqn_width / 8>(dw_iq1, a, tile.dhidden, chunk);
            note_slopes(hidden, chunk);
            __syncwarp();  // so that the compiler does not fetch what the next chunk wants here already
        }
    }

    __device__ __forceinline__ void make(const Tile& tile, int row0) {
        const IqnPlace own;
        float sums[2][DOWN][2][4] = {};
#pragma unroll 1
        for (int k = 0; k < r.outputs; k += 16) {
            if (k > 0) iqn_fetch<DOWN>(dtheta, r.dtheta, r.ld_dtheta, r.outputs, k + 4 * own.t, row0, r.rows);
            FX_UNROLL
            for (int c = 0; c < 2; ++c) {
                uint4 units[STEPS];
                if (k > 0) {
                    const int column = 32 * own.pair + 16 * c;
                    iqn_unit_down<WORD>(units, r.w_iq2, r.ld_iq2, r.width, r.outputs, column, k + 4 * own.t);
                } else {
                    FX_UNROLL
                    for (int q = 0; q < STEPS; ++q) units[q] = last(own, c)[32 * q];
                }
                iqn_multiply_chunk<WORD, DOWN>(sums[c], dtheta, units);
            }
        }
        FX_UNROLL
        for (int u = 0; u < 4 * DOWN; ++u) {
            const int i = u >> 2, h = u >> 1 & 1, c = u & 1;
            float v[4];
            iqn_columns<DOWN>(v, sums[c], i, h);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                v[e] *= slopes[i] >> (8 * h + 4 * c + e) & 1u ? 1.0f : 0.0f;
                db_iq1[c][e] += v[e];
            }
            tile.dhidden.store(own.lane, v, i, h, 2 * own.pair + c);
        }
        if (own.pair < Block::GROUPS) {
            float4* const to = reinterpret_cast<float4*>(tile.states + own.pair * Block::COLUMNS) + own.lane;
            *to = make_float4(state[0], state[1], state[2], state[3]);
        }
    }

    __device__ __forceinline__ void end(float* to_iq1, float*, float* to_bias) const {
        const IqnPlace own;
        const bool quads = fx_quads(to_iq1, r.features);
        const int column0 = IqnShare(r).column0, column = column0 + own.column;
        FX_UNROLL
        for (int u = 0; u < iqn_width / 4; ++u) {
            const int fragment = u >> 1, e = u & 1;
            const int row = 16 * (fragment >> 1) + 4 * own.t + 2 * (fragment & 1) + e;
            float v[4];
            FX_UNROLL
            for (int d = 0; d < 4; ++d) v[d] = dw_iq1[fragment / WIDE][d >> 1][fragment % WIDE][2 * (d & 1) + e];
            fx_store(to_iq1 + row * r.features + column, v, row < r.width ? r.features - column : 0, quads);
        }
        FX_UNROLL
        for (int e = 0; e < 8; ++e) {
            const float sum = iqn_rows_sum(db_iq1[e >> 2][e & 3]);
            const int at = 32 * own.pair + 16 * (e >> 2) + 4 * own.t + (e & 3);
            if (column0 == 0 && own.g == 0 && at < r.width) to_bias[r.features + at] = sum;
        }
    }
};

// Second kind of warp: dmixed and dphi, dw_phi, dh2; of the next tile 16 of the cosines.
template <int WORD, int ROWS>
struct IqnUnmixing {
    typedef IqnBlock<WORD, ROWS> Block;
    typedef IqnTile<WORD, ROWS> Tile;
    static constexpr int STEPS = Block::STEPS, DOWN = Block::DOWN, WIDE = 2;

    const IqnBackward& r;
    const Block block;
    unsigned w_iq1[Block::MIXED][2][STEPS][4];
    float dw_phi[iqn_cosines / 8 / WIDE][2][WIDE][4];
    float db_phi[2][2], total[2][2];  // total: of dmixed phi over the sample's rows so far
    float tau;                        // of the next tile's row with the lane's number

    __device__ __forceinline__ IqnUnmixing(const IqnBackward& record, const Block& shared)
        : r(record), block(shared), dw_phi{}, db_phi{}, total{} {
        const IqnPlace own;
        const int column = IqnShare(r).column0 + own.column, left = r.features - column;
        const float* const from = r.w_iq1 + static_cast<long long>(4 * own.t) * r.ld_iq1 + column;
        float v[Block::MIXED][2][2][4];
        if (fx_quads(r.w_iq1 + column, r.ld_iq1) && left >= 4) {
            FX_UNROLL
            for (int e = 0; e < 4 * Block::MIXED; ++e) {
                const int c = e >> 2, k = 16 * c + (e & 3);
                float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (k + 4 * own.t < r.width) {
                    quad = *reinterpret_cast<const float4*>(from + static_cast<long long>(k) * r.ld_iq1);
                }
                v[c][0][0][e & 3] = quad.x;
                v[c][0][1][e & 3] = quad.y;
                v[c][1][0][e & 3] = quad.z;
                v[c][1][1][e & 3] = quad.w;
            }
        } else {
            FX_UNROLL
            for (int e = 0; e < 16 * Block::MIXED; ++e) {
                const int c = e >> 4, d = e >> 2 & 3, k = 16 * c + (e & 3);
                const bool there = k + 4 * own.t < r.width && d < left;
                v[c][d >> 1][d & 1][e & 3] = there ? from[static_cast<long long>(k) * r.ld_iq1 + d] : 0.0f;
            }
        }
        FX_UNROLL
        for (int c = 0; c < Block::MIXED; ++c) iqn_operands<WORD, 2>(w_iq1[c], v[c]);
    }

    __device__ __forceinline__ void fetch(int row0) {
        const IqnPlace own;
        tau = own.lane < ROWS && row0 + own.lane < r.rows ? r.tau[row0 + own.lane] : 0.0f;
    }

    __device__ __forceinline__ void multiply(const Tile& tile, int row0) {
        const IqnPlace own;
        FX_UNROLL
        for (int chunk = 0; chunk < DOWN; ++chunk) {
            if (chunk == DOWN - 1) fetch(iqn_next<ROWS>(r, row0));
            float dmixed[2][2][4] = {};
            FX_UNROLL
            for (int c = 0; c < Block::MIXED; ++c) {
                unsigned b[2][STEPS][2];
                FX_UNROLL
                for (int f = 0; f < 2; ++f) tile.dhidden.load_across(b[f], c, chunk, f);
                fx_mma<WORD, STEPS, 2, 2>(dmixed, w_iq1[c], b);
            }
            if (chunk == 0) iqn_hand_over<64, true>(own.pair);
            float mixer[2][2], dphi[2][2][4];
            iqn_state(mixer, tile, own, chunk);
            const float4* const handed = block.phi + (own.pair * DOWN + chunk) * 4 * 32 + own.lane;
            FX_UNROLL
            for (int i = 0; i < 2; ++i) {
                FX_UNROLL
                for (int f = 0; f < 2; ++f) {
                    const float4 quad = handed[(2 * f + i) * 32];
                    const float phi[4] = {quad.x, quad.y, quad.z, quad.w};
                    FX_UNROLL
                    for (int e = 0; e < 4; ++e) {
                        const int h = e >> 1;
                        const float dm = dmixed[i][f][e], d = phi[e] <= 0.0f ? 0.0f : dm * mixer[i][h];
                        total[i][h] += dm * phi[e];
                        db_phi[i][h] += d;
                        dphi[i][h][2 * f + (e & 1)] = d;
                    }
                }
            }
            unsigned a[2][STEPS][4];
            iqn_operands<WORD, 2, true>(a, dphi);
            iqn_add_gradient<WORD, WIDE, iqn_cosines / 8>(dw_phi, a, tile.cosines, chunk);
            const int end = row0 + 16 * (chunk + 1);
            if (r.quantiles < 16 || end % r.quantiles == 0) finish(mixer, end - 16);
        }
    }

    // dh2 of the sample, or of the two samples, whose last rows are the 16 from row on.
    __device__ __forceinline__ void finish(const float (&mixer)[2][2], int row) {
        const IqnPlace own;
        const float scale = r.dh2 != nullptr ? *r.weight * *r.readiness : 0.0f;
        float v[4];
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            v[e] = fx_lanes_sum<2>(total[e >> 1][e & 1]);
            const float other = __shfl_xor_sync(0xffffffffu, v[e], 2);
            if (r.quantiles > 8) v[e] += other;
            total[e >> 1][e & 1] = 0.0f;
        }
        row += 4 * own.t;
        const bool writes = own.t == 0 || (own.t == 2 && r.quantiles == 8);
        if (r.dh2 == nullptr || !writes || row >= r.rows || (scale == 0.0f && r.accumulate != 0)) return;
        const int column = IqnShare(r).column0 + own.column;
        float* const to = r.dh2 + static_cast<long long>(row / r.quantiles) * r.ld_dh2 + column;
        const bool quads = fx_quads(r.dh2, r.ld_dh2);
        float before[4] = {};
        if (r.accumulate != 0) fx_load(before, to, r.features - column, quads);
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            if (r.activation != FX_NONE) v[e] *= fx_activate_slope(r.activation, mixer[e >> 1][e & 1]);
            const float value = fx_scaled(scale, v[e]);
            v[e] = r.accumulate != 0 ? before[e] + value : value;
        }
        fx_store(to, v, r.features - column, quads);
    }

    __device__ __forceinline__ void make(const Tile& tile, int) {
        const IqnPlace own;
        const float first = 0.5f * static_cast<float>(16 * own.pair + 4 * own.t);
#pragma unroll 2
        for (int u = 0; u < 2 * DOWN; ++u) {
            const float x = __shfl_sync(0xffffffffu, tau, 8 * u + own.g);
            float v[4];
            FX_UNROLL
            for (int e = 0; e < 4; ++e) v[e] = iqn_feature(first + 0.5f * static_cast<float>(e), x);
            tile.cosines.store(own.lane, v, u >> 1, u & 1, own.pair);
        }
    }

    __device__ __forceinline__ void end(float*, float* to_phi, float* to_bias) const {
        const IqnPlace own;
        const bool quads = fx_quads(to_phi, r.cosines);
        const int column = IqnShare(r).column0 + own.column;
        FX_UNROLL
        for (int u = 0; u < 4 * Block::PHI; ++u) {
            const int c = u >> 2, i = u >> 1 & 1, h = u & 1, row = column + 2 * i + h, first = 16 * c + 4 * own.t;
            float v[4];
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const int fragment = 2 * c + (e >> 1);
                v[e] = dw_phi[fragment / WIDE][i][fragment % WIDE][2 * h + (e & 1)];
            }
            fx_store(to_phi + row * r.cosines + first, v, row < r.features ? r.cosines - first : 0, quads);
        }
        float sums[4];
        FX_UNROLL
        for (int e = 0; e < 4; ++e) sums[e] = fx_lanes_sum<4>(db_phi[e >> 1][e & 1]);
        if (own.t == 0) fx_store(to_bias + column, sums, r.features - column, false);
    }
};

// The way of a warp of either kind through the rows of its slice. What the next tile is made of is fetched while this
// one is multiplied.
template <class Warp>
__device__ __forceinline__ void iqn_walk(const IqnBackward& r, uint4* shared) {
    typedef typename Warp::Block Block;
    const Block block(shared);
    Warp warp(r, block);
    fx_wait();
    fx_trigger();
    int row0 = IqnShare(r).slice * iqn_run<Block::ROWS>(r);
    unsigned* words = block.tiles;
    warp.fetch(row0);
#pragma unroll 1
    while (row0 < r.rows) {
        const typename Warp::Tile tile(words);
        warp.make(tile, row0);
        __syncthreads();
        warp.multiply(tile, row0);
        words = words == block.tiles ? block.tiles + Block::TILE : block.tiles;
        row0 = iqn_next<Block::ROWS>(r, row0);
    }
    if (r.partial == nullptr) return;
    const int slice = IqnShare(r).slice;
    float* const to_iq1 = r.partial + slice * (static_cast<long long>(r.width + r.cosines + 1) * r.features + r.width);
    float* const to_phi = to_iq1 + r.width * r.features;
    warp.end(to_iq1, to_phi, to_phi + r.features * r.cosines);
}

template <int WORD, int ROWS>
__device__ __forceinline__ void iqn_backward(const IqnBackward* table, int count, uint4* shared) {
    __shared__ IqnBackward place;
    int tile;
    const IqnBackward& r = fx_record(table, count, tile, place);
    if (threadIdx.x < 128) {
        iqn_walk<IqnMixing<WORD, ROWS>>(r, shared);
    } else {
        iqn_walk<IqnUnmixing<WORD, ROWS>>(r, shared);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_tf32_32(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<1, 32>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_tf32_16(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<1, 16>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_bf16_32(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<2, 32>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_bf16_16(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<2, 16>(table, count, shared);
}

// Sum of the slices' numbers `at`, of `all`.
__device__ __forceinline__ float iqn_sum_of_slices(const float* partial, int slices, int all, int at) {
    float total = 0.0f;
#pragma unroll 11
    for (int slice = 0; slice < slices; ++slice) total += partial[static_cast<long long>(slice) * all + at];
    return total;
}

// Number `at` of the gradients, in the order of `partial` and then of `partial_iq2`.
__device__ __forceinline__ float iqn_gradient(const IqnGradients& r, int at, int first, int last) {
    const int iq1 = r.width * r.features, phi = r.features * r.cosines, iq2 = r.outputs * r.width;
    const bool is_last = at >= first;
    float total = iqn_sum_of_slices(is_last ? r.partial_iq2 : r.partial, r.slices, is_last ? last : first,
                                    is_last ? at - first : at);
    float* to;
    if (at < iq1) {
        to = r.dw_iq1 + static_cast<long long>(at / r.features) * r.ld_iq1 + at % r.features;
    } else if (at < iq1 + phi) {
        to = r.dw_phi + static_cast<long long>((at - iq1) / r.cosines) * r.ld_phi + (at - iq1) % r.cosines;
    } else if (at < iq1 + phi + r.features) {
        to = r.db_phi + (at - iq1 - phi);
    } else if (at < first) {
        to = r.db_iq1 + (at - iq1 - phi - r.features);
    } else if (at < first + iq2) {
        to = r.dw_iq2 + static_cast<long long>((at - first) / r.width) * r.ld_iq2 + (at - first) % r.width;
    } else {
        to = r.db_iq2 + (at - first - iq2);
    }
    if (r.accumulate != 0) total += *to;
    *to = total;
    return total;
}

// A tile is 256 numbers of the gradients.
extern "C" __global__ void __launch_bounds__(256) fx_iqn_gradients(const IqnGradients* table, int count) {
    int tile;
    const IqnGradients r = fx_record(table, count, tile);
    const int first = r.width * r.features + r.features * r.cosines + r.features + r.width;
    const int last = r.outputs * (r.width + 1);
    const int at = tile * 256 + static_cast<int>(threadIdx.x);
    FxSquares squares;
    fx_wait();
    fx_trigger();
    if (at < first + last) squares.add(iqn_gradient(r, at, first, last));
    fx_squares_store<256>(r.squares, tile, squares);
}
