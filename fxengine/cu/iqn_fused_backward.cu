// Backward of the quantile networks of iqn_fused.cu, from dtheta and the stored hidden numbers.
//
// fx_iqn_backward_<precision>_<columns>: with slope of relu taken from hidden and from phi, made again from tau:
//   dhidden = (dtheta w_iq2) slope(hidden), dmixed = dhidden w_iq1, dphi = dmixed h2[b] slope(phi)
//   dh2[b]  = or += scale * slope(h2) * sum over the N rows of b of dmixed phi, scale = *weight * *readiness, the slope
//             that of the activation that made h2; a scale of 0 gives an exact 0, or accumulating leaves dh2 untouched
//   partial[slice] = the slice's share of dw_iq1 = dhidden^T mixed, dw_phi = dphi^T cosines, db_phi, db_iq1
//   A block owns COLUMNS columns of h2, whose weights and sums of weight gradients it keeps in shared memory and in
//   registers, and every slices-th tile of ROWS rows: nothing of the size [rows, features] is ever in memory. Per tile:
//   1. cosines and dhidden into shared memory; 2. phi and dmixed, from them mixed and dphi into shared memory, and dh2;
//   3. weight gradients. The number of quantiles is a multiple of 8 and divides ROWS.
//
// fx_iqn_gradients: sums of the slices in their order, = or +=.
#include "iqn_fused_tile.cuh"

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
    const float* partial;  // as above
    float* dw_iq1;         // [width, features]
    float* dw_phi;         // [features, cosines]
    float* db_phi;         // [features]
    float* db_iq1;         // [width]
    int ld_iq1;            // floats between rows
    int ld_phi;
    int cosines;
    int features;
    int width;
    int slices;
    int accumulate;
};

// How a block works: WORD as ever, COLUMNS of h2, ROWS of a tile. The 8 warps share the outputs of each product.
template <int WORD, int COLUMNS, int ROWS>
struct IqnBlock {
    static constexpr int K = 8 * WORD;            // of one step
    static constexpr int PHI = iqn_cosines / K;   // steps
    static constexpr int MIXED = iqn_width / K;
    static constexpr int DOWN = ROWS / K;
    static constexpr int PAIRS = COLUMNS / 16;    // pairs of fragments, each one uint4 per lane and step
    static constexpr int M = ROWS / 32, N = COLUMNS / 32;       // fragments of a warp: phi and dmixed, 2 x 4 warps
    static constexpr int N_IQ1 = COLUMNS / 16;  // dw_iq1: 2 x N_IQ1 of a warp, 4 x 2 warps
    static constexpr int M_PHI = COLUMNS / 64;  // dw_phi: M_PHI x 4 of a warp, likewise
    static constexpr int GROUPS = ROWS / 8;

    IqnTile<WORD, iqn_width> dhidden;
    IqnTile<WORD, iqn_cosines> cosines;
    IqnTile<WORD, COLUMNS> mixed, dphi;
    uint4* w_phi;   // [PHI][PAIRS][32]
    uint4* w_iq1;   // [MIXED][PAIRS][32]
    float* sums;    // [GROUPS][COLUMNS], of dmixed phi over runs of rows
    float* bias;    // [COLUMNS]

    __device__ __forceinline__ explicit IqnBlock(uint4* shared) {
        w_phi = shared;
        w_iq1 = w_phi + PHI * PAIRS * 32;
        dhidden.words = reinterpret_cast<unsigned*>(w_iq1 + MIXED * PAIRS * 32);
        cosines.words = dhidden.words + ROWS * dhidden.LD;
        mixed.words = cosines.words + ROWS * cosines.LD;
        dphi.words = mixed.words + ROWS * mixed.LD;
        sums = reinterpret_cast<float*>(dphi.words + ROWS * dphi.LD);
        bias = sums + GROUPS * COLUMNS;
    }

    // Weights of the columns from column0 on, in the order in which fragments read them.
    __device__ __forceinline__ void fill(const IqnBackward& r, int column0) const {
        const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
        const int g = lane >> 2, t = lane & 3;
#pragma unroll 8
        for (int u = warp; u < (PHI + MIXED) * PAIRS; u += 8) {
            const bool phi = u < PHI * PAIRS;
            const int own = phi ? u : u - PHI * PAIRS, s = own / PAIRS, pair = own % PAIRS;
            const int depth = phi ? r.cosines : r.width;
            const float* w = phi ? r.w_phi : r.w_iq1;
            const long long along = phi ? 1 : r.ld_iq1, beside = phi ? r.ld_phi : 1;
            unsigned words[4];
            FX_UNROLL
            for (int f = 0; f < 2; ++f) {
                const int column = column0 + 16 * pair + 8 * f + g;
                float v[4];
                FX_UNROLL
                for (int e = 0; e < 2 * WORD; ++e) {
                    const int k = WORD == 1 ? 8 * s + 2 * t + e : 16 * s + 8 * (e >> 1) + 2 * t + (e & 1);
                    v[e] = column < r.features && k < depth ? w[column * beside + k * along] : 0.0f;
                }
                iqn_words<WORD>(words[2 * f], words[2 * f + 1], v, 0);
            }
            (phi ? w_phi : w_iq1)[own * 32 + lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
        const int column = column0 + static_cast<int>(threadIdx.x);
        if (threadIdx.x < COLUMNS) bias[threadIdx.x] = column < r.features ? r.b_phi[column] : 0.0f;
    }

    // out[i][j] += A . units, for the warp's columns.
    template <int STEPS, int TILE>
    __device__ __forceinline__ void multiply(float (&out)[M][N][4], const IqnTile<WORD, TILE>& a_tile,
                                             const uint4* units, int row, int column) const {
        const uint4* from = units + column / 16 * 32 + (threadIdx.x & 31u);
#pragma unroll 4
        for (int s = 0; s < STEPS; ++s) {
            unsigned a[M][1][4], b[N][1][2];
            a_tile.template across<M>(a, row, s);
            FX_UNROLL
            for (int j = 0; j < N; j += 2) {
                const uint4 unit = from[(s * PAIRS + j / 2) * 32];
                b[j][0][0] = unit.x;
                b[j][0][1] = unit.y;
                b[j + 1][0][0] = unit.z;
                b[j + 1][0][1] = unit.w;
            }
            fx_mma<WORD, 1, M, N>(out, a, b);
        }
    }
};

// The hidden numbers that this thread's part of dhidden needs: columns 16 warp + 4 t .. of rows row0 + 16 i + 8 h + g.
template <int F>
__device__ __forceinline__ void iqn_fetch_hidden(float (&held)[F][2][4], const IqnBackward& r, int row0) {
    const int thread = static_cast<int>(threadIdx.x);
    iqn_fetch<F>(held, r.hidden, r.ld_hidden, r.width, 16 * (thread >> 5) + 4 * (thread & 3), row0, r.rows);
}

// Step 1: cosines, and dhidden = (dtheta w_iq2) slope(held); bias += its sum over the rows.
template <class B, int WORD, int ROWS>
__device__ __forceinline__ void iqn_begin_tile(const B& block, const IqnBackward& r, int row0,
                                               const float (&held)[ROWS / 16][2][4], float (&bias)[4]) {
    constexpr int F = 2;
    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, g = lane >> 2, t = lane & 3;
    FX_UNROLL
    for (int i = 0; i < ROWS / 16; ++i) {
        const int row = 16 * i + (thread >> 4), column = 4 * (thread & 15);
        const float tau = row0 + row < r.rows ? r.tau[row0 + row] : 0.0f;
        float v[4];
        FX_UNROLL
        for (int e = 0; e < 4; ++e) v[e] = iqn_feature(static_cast<float>(column) + static_cast<float>(e), tau);
        iqn_store_quad<WORD>(block.cosines.words + row * block.cosines.LD, column, v);
    }
    const int column = thread / 32 * 16;
    FX_UNROLL
    for (int part = 0; part < ROWS; part += 16 * F) {
        float sums[F][2][4] = {};
#pragma unroll 1
        for (int k = 4 * t; k - 4 * t < r.outputs; k += 16) {
            uint4 units[iqn_steps<WORD>];
            iqn_unit_down<WORD>(units, r.w_iq2, r.ld_iq2, r.width, r.outputs, column, k);
            float v[F][2][4];
            iqn_fetch<F>(v, r.dtheta, r.ld_dtheta, r.outputs, k, row0 + part, r.rows);
            iqn_multiply_chunk<WORD, F>(sums, v, units);
        }
        FX_UNROLL
        for (int i = 0; i < F; ++i) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                float v[4];
                iqn_dhidden<F>(v, sums, held[part / 16 + i][h], i, h);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) bias[e] += v[e];
                const int row = part + 16 * i + 8 * h + g;
                iqn_store_quad<WORD>(block.dhidden.words + row * block.dhidden.LD, column + 4 * t, v);
            }
        }
    }
}

// Step 2: phi and dmixed of the warp's rows and columns; mixed, dphi and the sums for dh2. bias += sum of dphi.
template <class B, int WORD, int COLUMNS, int ROWS>
__device__ __forceinline__ void iqn_middle(const B& block, const IqnBackward& r, int row0, int column0, int span,
                                           float (&bias)[B::N][2]) {
    constexpr int M = B::M, N = B::N;
    const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
    const int g = lane >> 2, t = lane & 3, row = warp / 4 * 16 * M, column = warp % 4 * 8 * N;
    float phi[M][N][4], dmixed[M][N][4] = {};
    FX_UNROLL
    for (int j = 0; j < N; ++j) {
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            const float b = block.bias[column + 8 * j + 2 * t + (e & 1)];
            FX_UNROLL
            for (int i = 0; i < M; ++i) phi[i][j][e] = b;
        }
    }
    block.template multiply<B::PHI>(phi, block.cosines, block.w_phi, row, column);
    block.template multiply<B::MIXED>(dmixed, block.dhidden, block.w_iq1, row, column);
    float state[N][2], total[N][2];
    FX_UNROLL
    for (int group = 0; group < 2 * M; ++group) {  // 8 rows, of one sample
        const int i = group / 2, h = group % 2, first = row + 8 * group;
        if (group % span == 0) {
            const int left = row0 + first < r.rows ? r.features - column0 - column - 2 * t : 0;
            const long long sample = (row0 + first) / r.quantiles;
            const float* h2 = r.h2 + sample * r.ld_h2 + column0 + column + 2 * t;
            FX_UNROLL
            for (int j = 0; j < N; ++j) {
                FX_UNROLL
                for (int e = 0; e < 2; ++e) {
                    state[j][e] = 8 * j + e < left ? h2[8 * j + e] : 0.0f;
                    total[j][e] = 0.0f;
                }
            }
        }
        FX_UNROLL
        for (int j = 0; j < N; ++j) {
            float x[2], d[2];
            FX_UNROLL
            for (int e = 0; e < 2; ++e) {
                const float p = fx_activate(FX_RELU, phi[i][j][2 * h + e]), dm = dmixed[i][j][2 * h + e];
                x[e] = p * state[j][e];
                d[e] = p <= 0.0f ? 0.0f : dm * state[j][e];
                total[j][e] += dm * p;
                bias[j][e] += d[e];
            }
            iqn_store_pair<WORD>(block.mixed.words + (first + g) * block.mixed.LD, column + 8 * j + 2 * t, x[0], x[1]);
            iqn_store_pair<WORD>(block.dphi.words + (first + g) * block.dphi.LD, column + 8 * j + 2 * t, d[0], d[1]);
        }
        if ((group + 1) % span == 0 && r.dh2 != nullptr) {
            FX_UNROLL
            for (int j = 0; j < N; ++j) {
                FX_UNROLL
                for (int e = 0; e < 2; ++e) {
                    const float sum = iqn_rows_sum(total[j][e]);
                    if (g == 0) block.sums[first / (8 * span) * COLUMNS + column + 8 * j + 2 * t + e] = sum;
                }
            }
        }
    }
}

// dh2 of the tile's samples.
template <class B, int COLUMNS, int ROWS>
__device__ __forceinline__ void iqn_states(const B& block, const IqnBackward& r, int row0, int column0, int span,
                                           float scale) {
    if (r.dh2 == nullptr || (scale == 0.0f && r.accumulate != 0)) return;
    const int parts = r.quantiles / (8 * span);
    for (int e = static_cast<int>(threadIdx.x); e < ROWS / r.quantiles * COLUMNS; e += 256) {
        const int sample = e / COLUMNS, column = e % COLUMNS;
        const int row = row0 + sample * r.quantiles;
        if (row >= r.rows || column0 + column >= r.features) continue;
        float total = 0.0f;
        for (int part = 0; part < parts; ++part) total += block.sums[(sample * parts + part) * COLUMNS + column];
        float* to = r.dh2 + static_cast<long long>(row / r.quantiles) * r.ld_dh2 + column0 + column;
        if (r.activation != FX_NONE) {
            const long long at = static_cast<long long>(row / r.quantiles) * r.ld_h2 + column0 + column;
            total *= fx_activate_slope(r.activation, r.h2[at]);
        }
        const float value = fx_scaled(scale, total);
        *to = r.accumulate != 0 ? *to + value : value;
    }
}

template <int WORD, int COLUMNS, int ROWS>
__device__ __forceinline__ void iqn_backward(const IqnBackward* table, int count, uint4* shared) {
    typedef IqnBlock<WORD, COLUMNS, ROWS> B;
    __shared__ IqnBackward place;
    int tile;
    const IqnBackward& r = fx_record(table, count, tile, place);
    const B block(shared);
    const int parts = (r.features + COLUMNS - 1) / COLUMNS;
    const int column0 = tile % parts * COLUMNS, slice = tile / parts;
    block.fill(r, column0);
    fx_wait();
    fx_trigger();
    const float scale = r.dh2 != nullptr ? *r.weight * *r.readiness : 0.0f;
    const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
    const int g = lane >> 2, t = lane & 3;
    const int span = (r.quantiles < 16 * B::M ? r.quantiles : 16 * B::M) / 8;  // groups of 8 rows that a warp adds up
    float held[ROWS / 16][2][4];
    iqn_fetch_hidden(held, r, slice * ROWS);
    float dw_iq1[2][B::N_IQ1][4] = {}, dw_phi[B::M_PHI][4][4] = {}, db_phi[B::N][2] = {}, db_iq1[4] = {};
    const int down = warp / 2, right = warp % 2;  // of the warp among the 4 x 2 that share the weight gradients
    for (int row0 = slice * ROWS; row0 < r.rows; row0 += r.slices * ROWS) {
        iqn_begin_tile<B, WORD, ROWS>(block, r, row0, held, db_iq1);
        __syncthreads();
        iqn_middle<B, WORD, COLUMNS, ROWS>(block, r, row0, column0, span, db_phi);
        __syncthreads();
        iqn_fetch_hidden(held, r, row0 + r.slices * ROWS);
        iqn_states<B, COLUMNS, ROWS>(block, r, row0, column0, span, scale);
        if (r.partial != nullptr) {
#pragma unroll 2
            for (int s = 0; s < B::DOWN; ++s) {
                unsigned a[2][1][4], b[B::N_IQ1][1][2];
                block.dhidden.template down_a<2>(a, 32 * down, s);
                block.mixed.template down_b<B::N_IQ1>(b, 8 * B::N_IQ1 * right, s);
                fx_mma<WORD, 1, 2, B::N_IQ1>(dw_iq1, a, b);
            }
#pragma unroll 2
            for (int s = 0; s < B::DOWN; ++s) {
                unsigned a[B::M_PHI][1][4], b[4][1][2];
                block.dphi.template down_a<B::M_PHI>(a, 16 * B::M_PHI * down, s);
                block.cosines.template down_b<4>(b, 32 * right, s);
                fx_mma<WORD, 1, B::M_PHI, 4>(dw_phi, a, b);
            }
        }
        __syncthreads();
    }
    if (r.partial == nullptr) return;
    float* to_iq1 = r.partial + slice * (static_cast<long long>(r.width + r.cosines + 1) * r.features + r.width);
    FX_UNROLL
    for (int e = 0; e < 4 * 2 * B::N_IQ1; ++e) {
        const int i = e / (4 * B::N_IQ1), j = e / 4 % B::N_IQ1;
        const int row = 32 * down + 16 * i + 8 * (e % 4 / 2) + g;
        const int column = column0 + 8 * B::N_IQ1 * right + 8 * j + 2 * t + e % 2;
        if (row < r.width && column < r.features) to_iq1[row * r.features + column] = dw_iq1[i][j][e % 4];
    }
    float* to_phi = to_iq1 + r.width * r.features;
    FX_UNROLL
    for (int e = 0; e < 4 * B::M_PHI * 4; ++e) {
        const int i = e / 16, j = e / 4 % 4;
        const int row = column0 + 16 * B::M_PHI * down + 16 * i + 8 * (e % 4 / 2) + g;
        const int column = 32 * right + 8 * j + 2 * t + e % 2;
        if (row < r.features && column < r.cosines) to_phi[row * r.cosines + column] = dw_phi[i][j][e % 4];
    }
    float* to_bias = to_phi + r.features * r.cosines;
    FX_UNROLL
    for (int e = 0; e < 4; ++e) {
        const float sum = iqn_rows_sum(db_iq1[e]);
        const int at = 16 * warp + 4 * t + e;
        if (column0 == 0 && g == 0 && at < r.width) to_bias[r.features + at] = sum;
    }
    // The two warps that share columns have the sums of other rows: the upper ones hand theirs over.
    FX_UNROLL
    for (int e = 0; e < 2 * B::N; ++e) {
        const int column = warp % 4 * 8 * B::N + 8 * (e / 2) + 2 * t + e % 2;
        db_phi[e / 2][e % 2] = iqn_rows_sum(db_phi[e / 2][e % 2]);
        if (warp >= 4 && g == 0) block.sums[column] = db_phi[e / 2][e % 2];
    }
    __syncthreads();
    FX_UNROLL
    for (int e = 0; e < 2 * B::N; ++e) {
        const int column = warp % 4 * 8 * B::N + 8 * (e / 2) + 2 * t + e % 2;
        if (warp < 4 && g == 0 && column0 + column < r.features) {
            to_bias[column0 + column] = db_phi[e / 2][e % 2] + block.sums[column];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_tf32_128(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<1, 128, 64>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_tf32_64(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<1, 64, 32>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_bf16_128(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<2, 128, 64>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_backward_bf16_64(const IqnBackward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_backward<2, 64, 32>(table, count, shared);
}

// A tile is 256 numbers of the gradients, in the order of `partial`.
extern "C" __global__ void __launch_bounds__(256) fx_iqn_gradients(const IqnGradients* table, int count) {
    int tile;
    const IqnGradients r = fx_record(table, count, tile);
    const int iq1 = r.width * r.features, phi = r.features * r.cosines, all = iq1 + phi + r.features + r.width;
    const int at = tile * 256 + static_cast<int>(threadIdx.x);
    fx_wait();
    fx_trigger();
    if (at >= all) return;
    float total = 0.0f;
#pragma unroll 11
    for (int slice = 0; slice < r.slices; ++slice) total += r.partial[static_cast<long long>(slice) * all + at];
    float* to;
    if (at < iq1) {
        to = r.dw_iq1 + static_cast<long long>(at / r.features) * r.ld_iq1 + at % r.features;
    } else if (at < iq1 + phi) {
        to = r.dw_phi + static_cast<long long>((at - iq1) / r.cosines) * r.ld_phi + (at - iq1) % r.cosines;
    } else if (at < iq1 + phi + r.features) {
        to = r.db_phi + (at - iq1 - phi);
    } else {
        to = r.db_iq1 + (at - iq1 - phi - r.features);
    }
    *to = r.accumulate != 0 ? *to + total : total;
}
