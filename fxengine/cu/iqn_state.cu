// Gradient of the quantile networks of iqn_fused.cu into h2 alone: what the rest of a step waits for, while the weight
// gradients (iqn_fused_backward.cu) have time until the optimizer.
//
// fx_iqn_state_<precision>: from dtheta and the stored hidden numbers, with slope of relu and phi made again from tau,
//   dhidden = (dtheta w_iq2) slope(hidden), dmixed = dhidden w_iq1,
//   dh2[b] = or += scale * slope(h2) * sum over the N rows of b of dmixed phi, scale = *weight * *readiness, the slope
//            that of the activation that made h2; a scale of 0 gives an exact 0, or accumulating leaves dh2 untouched
//   A block owns 128 columns of h2 and every slices-th sample. Each warp has 16 of the columns, whose weights it holds
//   in registers, rounded, from before fx_wait() on. Per sample and chunk of 32 rows:
//   1. all warps put cosines and dhidden into shared memory; 2. each multiplies them by its weights and adds up.
//   Chunks alternate between two buffers, so that one barrier each is enough. Rows beyond the sample count as 0.
#include "iqn_fused_tile.cuh"

struct IqnState {
    int first_tile;
    int tiles;
    const float* dtheta;     // [samples * quantiles, outputs]
    const float* tau;        // [samples * quantiles]
    const float* h2;         // [samples, features]; read for its activation's slope only
    const float* hidden;     // [samples * quantiles, width]
    const float* w_phi;      // [features, cosines]
    const float* b_phi;      // [features]
    const float* w_iq1;      // [width, features]
    const float* w_iq2;      // [outputs, width]
    const float* weight;     // one float
    const float* readiness;  // one float
    float* dh2;              // [samples, features]
    int ld_dtheta;           // floats between rows
    int ld_h2;
    int ld_hidden;
    int ld_phi;
    int ld_iq1;
    int ld_iq2;
    int ld_dh2;
    int samples;
    int quantiles;
    int cosines;             // at most 64
    int features;
    int width;               // at most 128
    int outputs;
    int slices;
    int activation;          // FxActivation that made h2
    int accumulate;          // 1 = dh2 +=
};

constexpr int iqn_state_columns = 128;  // of a block
constexpr int iqn_state_rows = 32;      // of a chunk

// A warp's weights. Columns are in another order than iqn_fused.cuh has them: lane 4 g + t reads columns 2 g, 2 g + 1
// of the 16, which lie side by side, one for each fragment f; so of the sums it has columns 4 t + 2 e + f.
template <int WORD>
struct IqnOwn {
    static constexpr int STEPS = iqn_steps<WORD>, PHI = iqn_cosines / 16, MIXED = iqn_width / 16;
    unsigned phi[PHI * STEPS][2][1][2];
    unsigned mixed[MIXED * STEPS][2][1][2];
    uint4 last[STEPS];  // of w_iq2 for the first 16 outputs, and 16 columns of dhidden
    float bias[2][2];   // [f][e]

    __device__ __forceinline__ void fill(const IqnState& r, int column0) {
        const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
        const int t = lane & 3, first = column0 + 16 * warp, column = first + 2 * (lane >> 2);
        const int left = r.features - column;
        fill_mixed(r.w_iq1 + column, r.ld_iq1, left, r.width, 4 * t);
        fill_phi(r.w_phi + static_cast<long long>(column) * r.ld_phi, r.ld_phi, left, r.cosines, 4 * t);
        iqn_unit_down<WORD>(last, r.w_iq2, r.ld_iq2, r.width, r.outputs, 16 * warp, 4 * t);
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            bias[e & 1][e >> 1] = first + 4 * t + e < r.features ? r.b_phi[first + 4 * t + e] : 0.0f;
        }
    }

    // Two columns, of which `left` exist, at the rows 16 c + at .. 16 c + at + 3 below `depth`.
    __device__ __forceinline__ void fill_mixed(const float* w, int ld, int left, int depth, int at) {
        const int depths[2] = {left > 0 ? depth : 0, left > 1 ? depth : 0};
        float v[MIXED][2][4];
        if (((reinterpret_cast<u64>(w) | (static_cast<u64>(ld) * 4)) & 7) == 0 && left >= 2) {
            FX_UNROLL
            for (int e = 0; e < 4 * MIXED; ++e) {
                const int k = 16 * (e >> 2) + at + (e & 3);
                float2 pair = make_float2(0.0f, 0.0f);
                if (k < depth) pair = *reinterpret_cast<const float2*>(w + static_cast<long long>(k) * ld);
                v[e >> 2][0][e & 3] = pair.x;
                v[e >> 2][1][e & 3] = pair.y;
            }
        } else {
            FX_UNROLL
            for (int e = 0; e < 8 * MIXED; ++e) {
                const int c = e >> 3, f = e >> 2 & 1, k = 16 * c + at + (e & 3);
                v[c][f][e & 3] = k < depths[f] ? w[static_cast<long long>(k) * ld + f] : 0.0f;
            }
        }
        FX_UNROLL
        for (int c = 0; c < MIXED; ++c) words(mixed + c * STEPS, v[c]);
    }

    // Two rows, of which `left` exist, at the columns 16 c + at .. 16 c + at + 3 below `depth`.
    __device__ __forceinline__ void fill_phi(const float* w, int ld, int left, int depth, int at) {
        const int depths[2] = {left > 0 ? depth : 0, left > 1 ? depth : 0};
        float v[PHI][2][4];
        if (fx_quads(w, ld) && depth % 4 == 0) {
            FX_UNROLL
            for (int e = 0; e < 2 * PHI; ++e) {
                const int c = e >> 1, f = e & 1, k = 16 * c + at;
                float4 quad = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (k < depths[f]) quad = *reinterpret_cast<const float4*>(w + f * ld + k);
                v[c][f][0] = quad.x;
                v[c][f][1] = quad.y;
                v[c][f][2] = quad.z;
                v[c][f][3] = quad.w;
            }
        } else {
            FX_UNROLL
            for (int e = 0; e < 8 * PHI; ++e) {
                const int c = e >> 3, f = e >> 2 & 1, k = 16 * c + at + (e & 3);
                v[c][f][e & 3] = k < depths[f] ? w[f * ld + k] : 0.0f;
            }
        }
        FX_UNROLL
        for (int c = 0; c < PHI; ++c) words(phi + c * STEPS, v[c]);
    }

    static __device__ __forceinline__ void words(unsigned (*to)[2][1][2], const float (&v)[2][4]) {
        FX_UNROLL
        for (int q = 0; q < STEPS; ++q) {
            FX_UNROLL
            for (int f = 0; f < 2; ++f) iqn_words<WORD>(to[q][f][0][0], to[q][f][0][1], v[f], q);
        }
    }
};

// What a thread reads of a chunk, while the one before is computed.
struct IqnHeld {
    float dtheta[2][2][4];  // of the first 16 outputs
    float hidden[2][2][4];
    float tau[2];           // of the two rows whose cosines it makes
    float weight, readiness;

    __device__ __forceinline__ void fetch(const IqnState& r, int row0, int end) {
        const int warp = static_cast<int>(threadIdx.x) >> 5, lane = static_cast<int>(threadIdx.x) & 31;
        const int column = 4 * (lane & 3);
        iqn_fetch<2>(dtheta, r.dtheta, r.ld_dtheta, r.outputs, column, row0, end);
        iqn_fetch<2>(hidden, r.hidden, r.ld_hidden, r.width, 16 * warp + column, row0, end);
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            const int row = row0 + 16 * (warp & 1) + 8 * h + (lane >> 2);
            tau[h] = row < end ? r.tau[row] : 0.0f;
        }
        weight = *r.weight;
        readiness = *r.readiness;
    }
};

// Cosines and dhidden of a chunk of 32 rows in shared memory, as the lanes need them: [chunks of k][steps][2][32].
template <int WORD>
struct IqnChunk {
    static constexpr int STEPS = iqn_steps<WORD>, PHI = IqnOwn<WORD>::PHI, MIXED = IqnOwn<WORD>::MIXED;
    static constexpr int UNITS = (PHI + MIXED) * STEPS * 2 * 32;
    uint4* cosines;  // this lane's
    uint4* dhidden;

    __device__ __forceinline__ explicit IqnChunk(uint4* shared)
        : cosines(shared + (threadIdx.x & 31u)), dhidden(cosines + PHI * STEPS * 2 * 32) {}

    static __device__ __forceinline__ void store(uint4* to, const unsigned (&a)[4]) {
        *to = make_uint4(a[0], a[1], a[2], a[3]);
    }

    static __device__ __forceinline__ void load(unsigned (&a)[2][1][4], const uint4* from) {
        FX_UNROLL
        for (int i = 0; i < 2; ++i) {
            const uint4 unit = from[i * 32];
            a[i][0][0] = unit.x;
            a[i][0][1] = unit.y;
            a[i][0][2] = unit.z;
            a[i][0][3] = unit.w;
        }
    }

    // Step 1.
    __device__ __forceinline__ void fill(const IqnState& r, const IqnOwn<WORD>& own, const IqnHeld& held, int row0,
                                         int end) const {
        const int warp = static_cast<int>(threadIdx.x) >> 5, t = static_cast<int>(threadIdx.x) & 3;
        const float first = 0.5f * static_cast<float>(16 * (warp >> 1) + 4 * t);
        float made[1][2][4];
        FX_UNROLL
        for (int e = 0; e < 8; ++e) {
            made[0][e >> 2][e & 3] = iqn_feature(first + 0.5f * static_cast<float>(e & 3), held.tau[e >> 2]);
        }
        FX_UNROLL
        for (int q = 0; q < STEPS; ++q) {
            unsigned a[1][1][4];
            iqn_operand<WORD, 1, true>(a, made, q);
            store(cosines + (((warp >> 1) * STEPS + q) * 2 + (warp & 1)) * 32, a[0][0]);
        }
        float v[2][2][4], sums[2][2][4] = {};
        iqn_multiply_chunk<WORD, 2>(sums, held.dtheta, own.last);
#pragma unroll 1
        for (int k = 16 + 4 * t; k - 4 * t < r.outputs; k += 16) {
            uint4 units[STEPS];
            iqn_unit_down<WORD>(units, r.w_iq2, r.ld_iq2, r.width, r.outputs, 16 * warp, k);
            iqn_fetch<2>(v, r.dtheta, r.ld_dtheta, r.outputs, k, row0, end);
            iqn_multiply_chunk<WORD, 2>(sums, v, units);
        }
        FX_UNROLL
        for (int e = 0; e < 4; ++e) iqn_dhidden<2>(v[e >> 1][e & 1], sums, held.hidden[e >> 1][e & 1], e >> 1, e & 1);
        FX_UNROLL
        for (int q = 0; q < STEPS; ++q) {
            unsigned a[2][1][4];
            iqn_operand<WORD, 2, true>(a, v, q);
            FX_UNROLL
            for (int i = 0; i < 2; ++i) store(dhidden + ((warp * STEPS + q) * 2 + i) * 32, a[i][0]);
        }
    }

    // Step 2: total += sum over the lane's rows of dmixed phi.
    __device__ __forceinline__ void add(float (&total)[2][2], const IqnOwn<WORD>& own) const {
        float phi[2][2][4], dmixed[2][2][4] = {};
        unsigned a[2][1][4];
        FX_UNROLL
        for (int e = 0; e < 16; ++e) phi[e >> 3][e >> 2 & 1][e & 3] = own.bias[e >> 2 & 1][e & 1];
        FX_UNROLL
        for (int s = 0; s < PHI * STEPS; ++s) {
            load(a, cosines + s * 2 * 32);
            fx_mma<WORD, 1, 2, 2>(phi, a, own.phi[s]);
        }
        FX_UNROLL
        for (int s = 0; s < MIXED * STEPS; ++s) {
            load(a, dhidden + s * 2 * 32);
            fx_mma<WORD, 1, 2, 2>(dmixed, a, own.mixed[s]);
        }
        FX_UNROLL
        for (int e = 0; e < 16; ++e) {
            const float p = fx_activate(FX_RELU, phi[e >> 3][e >> 2 & 1][e & 3]);
            total[e >> 2 & 1][e & 1] += dmixed[e >> 3][e >> 2 & 1][e & 3] * p;
        }
    }
};

template <int WORD>
__device__ __forceinline__ void iqn_state(const IqnState* table, int count, uint4* shared) {
    __shared__ IqnState place;
    int tile;
    const IqnState& r = fx_record(table, count, tile, place);
    const int parts = (r.features + iqn_state_columns - 1) / iqn_state_columns;
    const int column0 = tile % parts * iqn_state_columns, slice = tile / parts;
    IqnOwn<WORD> own;
    own.fill(r, column0);
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    // Of the 16 columns a lane writes the one whose sum it has at hand: 4 t + g.
    const int column = column0 + static_cast<int>(threadIdx.x) / 32 * 16 + 4 * t + g;
    const bool writes = g < 4 && column < r.features;
    IqnHeld held;
    float total[2][2] = {};
    int sample = slice, row = 0;  // of the chunk that is fetched
    int begun = -1;               // sample of the chunk that lies in shared memory
    uint4* words = shared;
#pragma unroll 1
    while (true) {  // fetches a chunk, computes the one before, puts the fetched one into shared memory
        if (begun < 0) {  // in here, where the compiler puts off nothing that could be done before
            fx_wait();
            fx_trigger();
        }
        const bool more = sample < r.samples;
        const int end = (sample + 1) * r.quantiles, row0 = end - r.quantiles + row;
        if (more) held.fetch(r, row0, end);
        if (begun >= 0) {
            float* const to = r.dh2 + static_cast<long long>(begun) * r.ld_dh2 + column;
            const float* const from = r.h2 + static_cast<long long>(begun) * r.ld_h2 + column;
            const float state = writes && r.activation != FX_NONE ? *from : 0.0f;
            const float before = writes && r.accumulate != 0 ? *to : 0.0f;
            IqnChunk<WORD>(words).add(total, own);
            if (row == 0) {  // it was the sample's last
                FX_UNROLL
                for (int e = 0; e < 4; ++e) total[e & 1][e >> 1] = iqn_rows_sum(total[e & 1][e >> 1]);
                const float even = g & 2 ? total[0][1] : total[0][0], odd = g & 2 ? total[1][1] : total[1][0];
                const float scale = held.weight * held.readiness;
                float sum = g & 1 ? odd : even;
                if (r.activation != FX_NONE) sum *= fx_activate_slope(r.activation, state);
                const float value = fx_scaled(scale, sum);
                if (writes && (scale != 0.0f || r.accumulate == 0)) *to = r.accumulate != 0 ? before + value : value;
                FX_UNROLL
                for (int e = 0; e < 4; ++e) total[e & 1][e >> 1] = 0.0f;
            }
        }
        if (!more) break;
        words = words == shared ? shared + IqnChunk<WORD>::UNITS : shared;
        IqnChunk<WORD>(words).fill(r, own, held, row0, end);
        __syncthreads();
        begun = sample;
        row += iqn_state_rows;
        if (row >= r.quantiles) {
            row = 0;
            sample += r.slices;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_state_tf32(const IqnState* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_state<1>(table, count, shared);
}

extern "C" __global__ void __launch_bounds__(256, 1) fx_iqn_state_bf16(const IqnState* table, int count) {
    FX_DYN_SHARED(uint4, shared);
    iqn_state<2>(table, count, shared);
}
