// Quantile networks whose intermediate results stay in registers: tf32 or bf16 products on the tensor cores.
//
// fx_iqn_forward_<precision>_<rows>: of every row r = b N + i, in one pass
//   phi = relu(w_phi cos(pi j tau[r]) + b_phi), hidden = relu(w_iq1 (phi * h2[b]) + b_iq1),
//   theta = w_iq2 hidden + b_iq2.
//   A block holds all weights in shared memory, rounded once. A warp takes groups of 16 or 32 rows, the blocks of a
//   record one after the other; it makes phi 16 columns at a time and adds their products to the hidden sums at once.
//   Shared memory: [chunks of h2] {phi: 4 units x steps, iq1: 8 units x steps}, [chunks of theta] {8 units x steps},
//   biases. At most 64 cosines and 128 hidden numbers; what is missing counts as 0.
#include "iqn_fused.cuh"

struct IqnForward {
    int first_tile;
    int tiles;
    const float* tau;    // [rows]
    const float* h2;     // [rows / quantiles, features]
    const float* w_phi;  // [features, cosines]
    const float* b_phi;  // [features]
    const float* w_iq1;  // [width, features]
    const float* b_iq1;  // [width]
    const float* w_iq2;  // [outputs, width]
    const float* b_iq2;  // [outputs]
    float* hidden;       // [rows, width] or null
    float* theta;        // [rows, outputs]
    int ld_h2;           // floats between rows
    int ld_phi;
    int ld_iq1;
    int ld_iq2;
    int ld_hidden;
    int ld_theta;
    int rows;
    int quantiles;
    int cosines;         // at most 64
    int features;
    int width;           // at most 128
    int outputs;
    int blocks;          // as many as tiles
};

constexpr int iqn_phi_chunks = 4;     // of 16 cosines
constexpr int iqn_hidden_chunks = 8;  // of 16 hidden numbers

// The weights and biases of a record in shared memory.
template <int WORD>
struct IqnWeights {
    static constexpr int STEPS = iqn_steps<WORD>;
    static constexpr int CHUNK = (iqn_phi_chunks + iqn_hidden_chunks) * STEPS * 32;  // uint4 per chunk of features
    static constexpr int LAST = iqn_hidden_chunks * STEPS * 32;                      // uint4 per chunk of outputs
    int chunks, last_chunks;
    uint4* units;
    uint4* last;
    float* biases;  // phi, hidden, theta

    __device__ __forceinline__ IqnWeights(const IqnForward& r, uint4* shared)
        : chunks((r.features + 15) / 16), last_chunks((r.outputs + 15) / 16), units(shared),
          last(shared + chunks * CHUNK), biases(reinterpret_cast<float*>(last + last_chunks * LAST)) {}

    __device__ __forceinline__ void fill(const IqnForward& r) const {
        const int warp = static_cast<int>(threadIdx.x) >> 5;
#pragma unroll 4
        for (int u = warp; u < chunks * iqn_phi_chunks; u += 8) {
            const int c = u / iqn_phi_chunks, k = u % iqn_phi_chunks;
            iqn_unit<WORD>(units + c * CHUNK + k * STEPS * 32, r.w_phi, r.ld_phi, r.features, r.cosines, c, k);
        }
#pragma unroll 8
        for (int u = warp; u < chunks * iqn_hidden_chunks; u += 8) {
            const int c = u / iqn_hidden_chunks, p = u % iqn_hidden_chunks;
            uint4* const to = units + c * CHUNK + (iqn_phi_chunks + p) * STEPS * 32;
            iqn_unit<WORD>(to, r.w_iq1, r.ld_iq1, r.width, r.features, p, c);
        }
        for (int u = warp; u < last_chunks * iqn_hidden_chunks; u += 8) {
            iqn_unit<WORD>(last + u * STEPS * 32, r.w_iq2, r.ld_iq2, r.outputs, r.width, u / iqn_hidden_chunks,
                           u % iqn_hidden_chunks);
        }
        const int first = 16 * chunks, second = first + 16 * iqn_hidden_chunks, all = second + 16 * last_chunks;
        for (int e = static_cast<int>(threadIdx.x); e < all; e += 256) {
            float bias = 0.0f;
            if (e < first) {
                if (e < r.features) bias = r.b_phi[e];
            } else if (e < second) {
                if (e - first < r.width) bias = r.b_iq1[e - first];
            } else if (e - second < r.outputs) {
                bias = r.b_iq2[e - second];
            }
            biases[e] = bias;
        }
    }
};

// theta of 16 M rows, from the operands that their hidden numbers make.
template <int WORD, int M>
__device__ __forceinline__ void iqn_outputs(const IqnForward& r, uint4* shared,
                                            const unsigned (&hidden)[iqn_hidden_chunks][iqn_steps<WORD>][M][1][4],
                                            int row0) {
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    const IqnWeights<WORD> weights(r, shared);
    const float* biases = weights.biases + 16 * (weights.chunks + iqn_hidden_chunks);
    const bool quads = fx_quads(r.theta, r.ld_theta);
#pragma unroll 1
    for (int o = 0; o < weights.last_chunks; ++o) {
        float theta[M][2][4];
        iqn_start<M>(theta, *reinterpret_cast<const float4*>(biases + 16 * o + 4 * t));
        FX_UNROLL
        for (int p = 0; p < iqn_hidden_chunks; ++p) {
            FX_UNROLL
            for (int q = 0; q < iqn_steps<WORD>; ++q) {
                iqn_multiply<WORD, M>(theta, hidden[p][q],
                                      weights.last[((o * iqn_hidden_chunks + p) * iqn_steps<WORD> + q) * 32 + lane]);
            }
        }
        FX_UNROLL
        for (int i = 0; i < M; ++i) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                const int row = row0 + 16 * i + 8 * h + g, column = 16 * o + 4 * t;
                float v[4];
                iqn_columns<M>(v, theta, i, h);
                fx_store(r.theta + static_cast<long long>(row) * r.ld_theta + column, v,
                         row < r.rows ? r.outputs - column : 0, quads);
            }
        }
    }
}

// 16 M rows from row0 on.
template <int WORD, int M>
__device__ __forceinline__ void iqn_rows(const IqnForward& r, uint4* shared, int row0) {
    constexpr int STEPS = iqn_steps<WORD>;
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    const IqnWeights<WORD> weights(r, shared);
    const bool quads = fx_quads(r.h2, r.ld_h2), same = M == 2 || r.quantiles % 16 == 0;
    unsigned features[iqn_phi_chunks * STEPS][M][1][4];
    const float first = static_cast<float>(fx_linear_again(2 * t));  // else a register for every factor, all the time
    FX_UNROLL
    for (int i = 0; i < M; ++i) {
        float tau[2];
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            const int row = row0 + 16 * i + 8 * h + g;
            tau[h] = row < r.rows ? r.tau[row] : 0.0f;
        }
        FX_UNROLL
        for (int c = 0; c < iqn_phi_chunks; ++c) {
            float v[2][4];
            FX_UNROLL
            for (int e = 0; e < 4; ++e) {
                const float half = first + 0.5f * static_cast<float>(16 * c + e);
                v[0][e] = iqn_feature(half, tau[0]);
                v[1][e] = iqn_feature(half, tau[1]);
            }
            FX_UNROLL
            for (int q = 0; q < STEPS; ++q) iqn_fragment<WORD, true>(features[c * STEPS + q][i][0], v, q);
        }
    }
    float hidden[iqn_hidden_chunks][M][2][4] = {};  // starting at the biases would cost registers
    const float* h2 = r.h2 + static_cast<long long>(row0 / r.quantiles) * r.ld_h2 + 4 * t;
    const float* bias = weights.biases + 4 * t;
    const uint4* units = weights.units + lane;
    int left = r.features - 4 * t;
#pragma unroll 1
    do {  // 16 features
        float state[4];
        fx_load(state, h2, left, quads);
        float phi[M][2][4];
        iqn_start<M>(phi, *reinterpret_cast<const float4*>(bias));
        FX_UNROLL
        for (int k = 0; k < iqn_phi_chunks * STEPS; ++k) {
            iqn_multiply<WORD, M>(phi, features[k], units[k * 32]);
        }
        float mixed[M][2][4];
        FX_UNROLL
        for (int i = 0; i < M; ++i) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                if (!same) {  // the rows are of several samples
                    const int row = row0 + 16 * i + 8 * h + g;
                    const int sample = (row < r.rows ? row : r.rows - 1) / r.quantiles;
                    fx_load(state, r.h2 + static_cast<long long>(sample) * r.ld_h2 + r.features - left, left,
                            quads);
                }
                iqn_columns<M>(mixed[i][h], phi, i, h);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) mixed[i][h][e] = state[e] * fx_activate(FX_RELU, mixed[i][h][e]);
            }
        }
        FX_UNROLL
        for (int q = 0; q < STEPS; ++q) {
            unsigned a[M][1][4];
            iqn_operand<WORD, M, true>(a, mixed, q);
            FX_UNROLL
            for (int p = 0; p < iqn_hidden_chunks; ++p) {
                iqn_multiply<WORD, M>(hidden[p], a, units[((iqn_phi_chunks + p) * STEPS + q) * 32]);
            }
        }
        h2 += 16;
        bias += 16;
        left -= 16;
        units += IqnWeights<WORD>::CHUNK;
    } while (left + 4 * t > 0);
    __syncwarp();  // what the stores need is computed here, not carried through the loop above
    const int again = fx_linear_again(row0), row1 = again + fx_linear_again(g), column = fx_linear_again(4 * t);
    const float* biases = IqnWeights<WORD>(r, shared).biases + 16 * ((r.features + 15) / 16) + column;
    const bool quads_hidden = fx_quads(r.hidden, r.ld_hidden);
    float* to = r.hidden + static_cast<long long>(row1) * r.ld_hidden + column;
    const long long step = 8LL * r.ld_hidden;
    const int rows_left = r.hidden != nullptr ? r.rows - row1 : 0, columns_left = r.width - column;
    unsigned words[iqn_hidden_chunks][STEPS][M][1][4];
    FX_UNROLL
    for (int p = 0; p < iqn_hidden_chunks; ++p) {
        const float4 quad = *reinterpret_cast<const float4*>(biases + 16 * p);
        const float own[4] = {quad.x, quad.y, quad.z, quad.w};
        float v[M][2][4];
        FX_UNROLL
        for (int i = 0; i < M; ++i) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                iqn_columns<M>(v[i][h], hidden[p], i, h);
                FX_UNROLL
                for (int e = 0; e < 4; ++e) v[i][h][e] = fx_activate(FX_RELU, v[i][h][e] + own[e]);
                if (16 * i + 8 * h < rows_left) {
                    fx_store(to + (2 * i + h) * step + 16 * p, v[i][h], columns_left - 16 * p, quads_hidden);
                }
            }
        }
        FX_UNROLL
        for (int q = 0; q < STEPS; ++q) iqn_operand<WORD, M, true>(words[p][q], v, q);
    }
    iqn_outputs<WORD, M>(r, shared, words, again);
}

template <int WORD, int M>
__device__ __forceinline__ void iqn_forward(const IqnForward* table, int count, uint4* shared) {
    __shared__ IqnForward place;
    int tile;
    const IqnForward& record = fx_record(table, count, tile, place);
    IqnWeights<WORD>(record, shared).fill(record);
    fx_wait();
    fx_trigger();
    __syncthreads();
    const int warp = static_cast<int>(threadIdx.x) >> 5;
    for (int row0 = (warp * record.tiles + tile) * 16 * M; row0 < record.rows; row0 += 8 * 16 * M * record.tiles) {
        iqn_rows<WORD, M>(record, shared, row0);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_forward_tf32_16(const IqnForward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_forward<1, 1>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_forward_tf32_32(const IqnForward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_forward<1, 2>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_forward_bf16_16(const IqnForward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_forward<2, 1>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_forward_bf16_32(const IqnForward* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_forward<2, 2>(table, count, shared);
}
