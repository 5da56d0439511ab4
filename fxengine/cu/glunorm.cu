// Gated residual with layer norm, forward and backward, and sums of columns.
//
// fx_glunorm_forward: with g = [a, c],
//   y = skip + a sigmoid(c)    h = (y - mean) rstd gain + bias    mean, rstd = 1 / sqrt(var + eps) over the row
//   writes h [rows, width], and stats [rows, 2] = mean, rstd where they are asked for. Overwrites.
//
// fx_glunorm_backward: from dh, with n = (y - mean) rstd made again from g, skip and stats and dn = dh gain,
//   dy    = rstd (dn - mean(dn) - n mean(dn n))
//   dg    = [dy sigmoid(c), dy a sigmoid'(c)]                         (=)
//   dskip = dy act'(skip), act being the activation that made skip    (= or +=, or not at all)
//   partials[tile] = [sum over the tile's rows of dh n | of dh]       (=, or not at all): fx_columnsum adds the tiles
//
// fx_columnsum: out[c] = (or +=) sum over the rows of x[r, c]. In double: row groups r mod 8 in turn, then the groups.
//
// One warp has one row. Lane l has the quads l, l + 32, ... of it whatever the alignment, so that the order of the sums
// depends on the width alone; 16-byte accesses are used where every operand allows them. Rows of up to 256 are read
// once and kept in registers, longer ones are read again for each pass (from the first-level cache).
#include "linear.cuh"  // fx_load, fx_store, fx_quads

struct GluNormForward {
    int first_tile;
    int tiles;
    const float* g;       // [rows, 2 * width]
    const float* skip;    // [rows, width]
    const float* gain;    // [width]
    const float* bias;    // [width]
    float* h;             // [rows, width]
    float* stats;         // [rows, 2] or null
    int ldg;              // floats between rows
    int ld_skip;
    int ldh;
    int rows;
    int width;
    float inverse_width;
    float eps;
};

struct GluNormBackward {
    int first_tile;
    int tiles;
    const float* dh;      // [rows, width]
    const float* g;       // [rows, 2 * width]
    const float* skip;    // [rows, width]
    const float* gain;    // [width]
    const float* stats;   // [rows, 2]
    float* dg;            // [rows, 2 * width]
    float* dskip;         // [rows, width] or null
    float* partials;      // [tiles, 2 * width] or null
    int lddh;             // floats between rows
    int ldg;
    int ld_skip;
    int lddg;
    int ld_dskip;
    int rows;
    int width;
    int tile_rows;
    int activation;       // FxActivation that made skip
    int accumulate;       // 1 = dskip +=
    float inverse_width;
};

struct ColumnSum {
    int first_tile;
    int tiles;
    const float* x;  // [rows, cols]
    float* out;      // [cols]
    long long ld;    // floats between rows
    int rows;
    int cols;
    int accumulate;  // 1 = out +=
};

// sigmoid(c) and its derivative, from exp(-|c|): neither overflows nor cancels.
struct GluGate {
    float value, slope;
    __device__ __forceinline__ explicit GluGate(float c) {
        const float power = expf(-fabsf(c));
        const float inverse = fx_divide(1.0f, 1.0f + power);
        value = c >= 0.0f ? inverse : power * inverse;
        slope = power * inverse * inverse;
    }
};

// Chunk i of a row: its columns 128 i ... 128 i + 127, four to a lane.
constexpr int GLU_CHUNK = 128;

template <int KEEP>
__device__ __forceinline__ void glunorm_forward_row(const GluNormForward& r, long long row, bool quads) {
    const int lane = 4 * static_cast<int>(threadIdx.x & 31u);
    const float* a = r.g + row * r.ldg + lane;
    const float* c = a + r.width;
    const float* skip = r.skip + row * r.ld_skip + lane;
    const int left = r.width - lane;
    const int stop = KEEP > 0 ? KEEP * GLU_CHUNK : r.width;
    float kept[KEEP > 0 ? KEEP : 1][4];

    const auto make = [&](float (&y)[4], int i) {
        float va[4], vc[4];
        fx_load(y, skip + i, left - i, quads);
        fx_load(va, a + i, left - i, quads);
        fx_load(vc, c + i, left - i, quads);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] += va[e] * GluGate(vc[e]).value;
    };
    const auto fetch = [&](float (&y)[4], int i) {
        if constexpr (KEEP > 0) {
#pragma unroll
            for (int e = 0; e < 4; ++e) y[e] = kept[i / GLU_CHUNK][e];
        } else {
            make(y, i);
        }
    };

    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < stop; i += GLU_CHUNK) {
        float y[4];
        make(y, i);  // 0 beyond the row
        sum += (y[0] + y[1]) + (y[2] + y[3]);
        if constexpr (KEEP > 0) {
#pragma unroll
            for (int e = 0; e < 4; ++e) kept[i / GLU_CHUNK][e] = y[e];
        }
    }
    const float guess = fx_warp_sum(sum) * r.inverse_width;

    // The deviations from a rounded mean do not add up to 0; what they add up to is its rounding error.
    float rest = 0.0f, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < stop; i += GLU_CHUNK) {
        float y[4];
        fetch(y, i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float deviation = e < left - i ? y[e] - guess : 0.0f;
            rest += deviation;
            squares += deviation * deviation;
        }
    }
    rest = fx_warp_sum(rest) * r.inverse_width;
    const float mean = guess + rest;
    const float variance = fx_warp_sum(squares) * r.inverse_width - rest * rest;
    const float rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + r.eps);  // NaN passes
    if (r.stats != nullptr && lane == 0) {
        r.stats[2 * row] = mean;
        r.stats[2 * row + 1] = rstd;
    }

    float* h = r.h + row * r.ldh + lane;
#pragma unroll
    for (int i = 0; i < stop; i += GLU_CHUNK) {
        float y[4], gain[4], bias[4];
        fetch(y, i);
        fx_load(gain, r.gain + lane + i, left - i, quads);
        fx_load(bias, r.bias + lane + i, left - i, quads);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = (y[e] - mean) * rstd * gain[e] + bias[e];
        fx_store(h + i, y, left - i, quads);
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_glunorm_forward(const GluNormForward* table, int count) {
    __shared__ GluNormForward place;
    int tile;
    const GluNormForward& r = fx_record(table, count, tile, place);
    const bool quads = r.width % 4 == 0 && fx_quads(r.g, r.ldg) && fx_quads(r.skip, r.ld_skip) &&
                       fx_quads(r.h, r.ldh) && fx_quads(r.gain, 0) && fx_quads(r.bias, 0);
    fx_wait();
    fx_trigger();
    const long long row = static_cast<long long>(tile) * 8 + static_cast<int>(threadIdx.x >> 5);
    if (row >= r.rows) return;
    if (r.width <= 2 * GLU_CHUNK) {
        glunorm_forward_row<2>(r, row, quads);
    } else {
        glunorm_forward_row<0>(r, row, quads);
    }
}

// What the backward of four neighbouring columns is made of.
struct GluNormQuad {
    float dn[4], n[4], a[4], gate[4], gate_slope[4], skip[4];
};

template <int KEEP>
__device__ __forceinline__ void glunorm_backward_row(const GluNormBackward& r, long long row, bool quads) {
    const int lane = 4 * static_cast<int>(threadIdx.x & 31u);
    const float* a = r.g + row * r.ldg + lane;
    const float* c = a + r.width;
    const float* skip = r.skip + row * r.ld_skip + lane;
    const float* dh = r.dh + row * r.lddh + lane;
    const int left = r.width - lane;
    const int stop = KEEP > 0 ? KEEP * GLU_CHUNK : r.width;
    const float mean = r.stats[2 * row];
    const float rstd = r.stats[2 * row + 1];
    GluNormQuad kept[KEEP > 0 ? KEEP : 1];

    const auto make = [&](GluNormQuad& quad, int i) {
        float gain[4], vc[4];
        fx_load(quad.dn, dh + i, left - i, quads);
        fx_load(gain, r.gain + lane + i, left - i, quads);
        fx_load(quad.skip, skip + i, left - i, quads);
        fx_load(quad.a, a + i, left - i, quads);
        fx_load(vc, c + i, left - i, quads);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const GluGate gate(vc[e]);
            quad.gate[e] = gate.value;
            quad.gate_slope[e] = gate.slope;
            quad.dn[e] *= gain[e];
            quad.n[e] = (quad.skip[e] + quad.a[e] * gate.value - mean) * rstd;
        }
    };

    float sum = 0.0f, along = 0.0f;
#pragma unroll
    for (int i = 0; i < stop; i += GLU_CHUNK) {
        GluNormQuad& quad = kept[KEEP > 0 ? i / GLU_CHUNK : 0];
        make(quad, i);  // dn is 0 beyond the row
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sum += quad.dn[e];
            along += quad.dn[e] * quad.n[e];
        }
    }
    sum = fx_warp_sum(sum) * r.inverse_width;
    along = fx_warp_sum(along) * r.inverse_width;

    float* da = r.dg + row * r.lddg + lane;
    float* dc = da + r.width;
    float* dskip = r.dskip != nullptr ? r.dskip + row * r.ld_dskip + lane : nullptr;
#pragma unroll
    for (int i = 0; i < stop; i += GLU_CHUNK) {
        GluNormQuad& quad = kept[KEEP > 0 ? i / GLU_CHUNK : 0];
        if constexpr (KEEP == 0) make(quad, i);
        float dy[4], out[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dy[e] = rstd * (quad.dn[e] - sum - quad.n[e] * along);
            out[e] = dy[e] * quad.gate[e];
        }
        fx_store(da + i, out, left - i, quads);
#pragma unroll
        for (int e = 0; e < 4; ++e) out[e] = dy[e] * quad.a[e] * quad.gate_slope[e];
        fx_store(dc + i, out, left - i, quads);
        if (dskip == nullptr) continue;
        float before[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (r.accumulate != 0) fx_load(before, dskip + i, left - i, quads);
#pragma unroll
        for (int e = 0; e < 4; ++e) out[e] = before[e] + dy[e] * fx_activate_slope(r.activation, quad.skip[e]);
        fx_store(dskip + i, out, left - i, quads);
    }
}

// Columns go to threads here, and the rows are read again: no sums of other warps have to be collected.
__device__ __forceinline__ void glunorm_partials(const GluNormBackward& r, int tile, long long row0, long long stop) {
    float* partials = r.partials + static_cast<long long>(tile) * 2 * r.width;
    for (int column = static_cast<int>(threadIdx.x); column < r.width; column += 256) {
        float dgain = 0.0f, dbias = 0.0f;
#pragma unroll 4
        for (long long row = row0; row < stop; ++row) {
            const float* g = r.g + row * r.ldg + column;
            const float y = r.skip[row * r.ld_skip + column] + g[0] * GluGate(g[r.width]).value;
            const float dh = r.dh[row * r.lddh + column];
            dgain += dh * ((y - r.stats[2 * row]) * r.stats[2 * row + 1]);
            dbias += dh;
        }
        partials[column] = dgain;
        partials[r.width + column] = dbias;
    }
}

// At most 128 registers: without the bound ptxas spills a few to fit a third block on a multiprocessor.
extern "C" __global__ void __launch_bounds__(256, 2) fx_glunorm_backward(const GluNormBackward* table, int count) {
    __shared__ GluNormBackward place;
    int tile;
    const GluNormBackward& r = fx_record(table, count, tile, place);
    const bool quads = r.width % 4 == 0 && fx_quads(r.dh, r.lddh) && fx_quads(r.g, r.ldg) &&
                       fx_quads(r.skip, r.ld_skip) && fx_quads(r.gain, 0) && fx_quads(r.dg, r.lddg) &&
                       fx_quads(r.dskip, r.ld_dskip);
    fx_wait();
    fx_trigger();
    const long long row0 = static_cast<long long>(tile) * r.tile_rows;
    const long long stop = row0 + r.tile_rows < r.rows ? row0 + r.tile_rows : r.rows;
    for (long long row = row0 + static_cast<int>(threadIdx.x >> 5); row < stop; row += 8) {
        if (r.width <= 2 * GLU_CHUNK) {
            glunorm_backward_row<2>(r, row, quads);
        } else {
            glunorm_backward_row<0>(r, row, quads);
        }
    }
    if (r.partials != nullptr) glunorm_partials(r, tile, row0, stop);
}

extern "C" __global__ void __launch_bounds__(256) fx_columnsum(const ColumnSum* table, int count) {
    __shared__ double sums[8][32];
    __shared__ ColumnSum place;
    int tile;
    const ColumnSum& r = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    const int lane = static_cast<int>(threadIdx.x & 31u);
    const int group = static_cast<int>(threadIdx.x >> 5);
    const int column = tile * 32 + lane;
    double sum = 0.0;
    if (column < r.cols) {
#pragma unroll 4
        for (int row = group; row < r.rows; row += 8) sum += r.x[row * r.ld + column];
    }
    sums[group][lane] = sum;
    __syncthreads();
    if (group != 0 || column >= r.cols) return;
#pragma unroll
    for (int other = 1; other < 8; ++other) sum += sums[other][lane];
    if (r.accumulate != 0) sum += r.out[column];
    r.out[column] = static_cast<float>(sum);
}
