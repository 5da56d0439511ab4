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
//                    each warp its rows in turn, then the warps
//
// fx_columnsum: out[c] = (or +=) sum over the rows of x[r, c]. In double: row groups r mod 8 in turn, then the groups.
//   squares[tile] = sum of squares of the tile's 32 columns of out, where it is asked for.
//
// One warp has one row. Lane l has the quads l, l + 32, ... of it whatever the alignment, so that the order of the sums
// depends on the width alone. Rows of up to 256 for which every operand allows 16-byte accesses are read once and kept
// in registers. All others are read again for each pass (from the first-level cache), with the same bits; their code
// stands apart, so that what the usual rows run lies close together.
#include "linear.cuh"  // fx_load, fx_store, fx_quads
#include "squares.cuh"

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
    const float* x;   // [rows, cols]
    float* out;       // [cols]
    double* squares;  // [tiles] or null
    long long ld;     // floats between rows
    int rows;
    int cols;
    int accumulate;   // 1 = out +=
};

// 1 / x, 1 <= x <= 2, to 1 unit in the last place.
__device__ __forceinline__ float glu_reciprocal(float x) {
#if FX_DEVICE
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}

// sigmoid(c) and its derivative, from exp(-|c|): neither overflows nor cancels.
struct GluGate {
    float value, slope;
    __device__ __forceinline__ explicit GluGate(float c) {
        const float power = expf(-fabsf(c));
        const float inverse = glu_reciprocal(1.0f + power);
        value = c >= 0.0f ? inverse : power * inverse;
        slope = power * inverse * inverse;
    }
};

// Chunk i of a row: its columns 128 i ... 128 i + 127, four to a lane.
constexpr int GLU_CHUNK = 128;

// Chunks of a row that stays in registers.
constexpr int GLU_KEPT = 2;
// Quads of a warp's sums over its rows, for the gradients of gain and bias.
constexpr int GLU_SUMS = 2 * GLU_KEPT * 32;

// Four columns of a row, 16-byte aligned; outside it, zeros.
__device__ __forceinline__ void glu_load(float (&v)[4], const float* from, bool inside) {
    float4 quad = {0.0f, 0.0f, 0.0f, 0.0f};
    if (inside) quad = *reinterpret_cast<const float4*>(from);
    v[0] = quad.x, v[1] = quad.y, v[2] = quad.z, v[3] = quad.w;
}

__device__ __forceinline__ void glu_store(float* to, const float (&v)[4]) {
    *reinterpret_cast<float4*>(to) = {v[0], v[1], v[2], v[3]};
}

// A mean from the lanes' sums, rounded: the compiler must not put the product into the arithmetic that follows, which
// differs between the two ways through a row.
__device__ __forceinline__ float glu_mean(float sum, float inverse_width) {
    return __fmul_rn(fx_warp_sum(sum), inverse_width);
}

struct GluNormStats {
    float mean, rstd;
    // The deviations from a rounded mean, `guess`, do not add up to 0; what they add up to is its rounding error.
    __device__ __forceinline__ GluNormStats(const GluNormForward& r, float guess, float rest, float squares) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {  // two fx_warp_sum, side by side
            rest += __shfl_xor_sync(0xffffffffu, rest, offset);
            squares += __shfl_xor_sync(0xffffffffu, squares, offset);
        }
        rest = __fmul_rn(rest, r.inverse_width);
        mean = guess + rest;
        const float variance = __fmul_rn(squares, r.inverse_width) - __fmul_rn(rest, rest);
        rstd = rsqrtf((variance < 0.0f ? 0.0f : variance) + r.eps);  // NaN passes
    }
    __device__ __forceinline__ void store(const GluNormForward& r, long long row) const {
        if (r.stats == nullptr || (threadIdx.x & 31u) != 0) return;
        r.stats[2 * row] = mean;
        r.stats[2 * row + 1] = rstd;
    }
};

// A row of up to GLU_KEPT chunks, 16-byte aligned. All warps call it; it waits itself, with gain and bias in registers.
__device__ __forceinline__ void glunorm_forward_kept(const GluNormForward& r, long long row) {
    const int lane = 4 * static_cast<int>(threadIdx.x & 31u);
    float gain[GLU_KEPT][4], bias[GLU_KEPT][4];
    bool inside[GLU_KEPT];
#pragma unroll
    for (int k = 0; k < GLU_KEPT; ++k) {
        inside[k] = lane + k * GLU_CHUNK < r.width;
        glu_load(gain[k], r.gain + lane + k * GLU_CHUNK, inside[k]);
        glu_load(bias[k], r.bias + lane + k * GLU_CHUNK, inside[k]);
    }
    fx_wait();
    fx_trigger();
    if (row >= r.rows) return;

    const float* const a = r.g + row * r.ldg + lane;
    const float* const skip = r.skip + row * r.ld_skip + lane;
    float y[GLU_KEPT][4], va[GLU_KEPT][4], vc[GLU_KEPT][4];
#pragma unroll
    for (int k = 0; k < GLU_KEPT; ++k) {  // all on their way before the first is used
        glu_load(vc[k], a + r.width + k * GLU_CHUNK, inside[k]);
        glu_load(va[k], a + k * GLU_CHUNK, inside[k]);
        glu_load(y[k], skip + k * GLU_CHUNK, inside[k]);
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < GLU_KEPT; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) y[k][e] += va[k][e] * GluGate(vc[k][e]).value;
        sum += (y[k][0] + y[k][1]) + (y[k][2] + y[k][3]);
    }
    const float guess = glu_mean(sum, r.inverse_width);
    float rest = 0.0f, squares = 0.0f;
#pragma unroll
    for (int k = 0; k < GLU_KEPT; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float deviation = inside[k] ? y[k][e] - guess : 0.0f;
            rest += deviation;
            squares += deviation * deviation;
        }
    }
    const GluNormStats stats(r, guess, rest, squares);
    float* const h = r.h + row * r.ldh + lane;
#pragma unroll
    for (int k = 0; k < GLU_KEPT; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) y[k][e] = (y[k][e] - stats.mean) * stats.rstd * gain[k][e] + bias[k][e];
        if (inside[k]) glu_store(h + k * GLU_CHUNK, y[k]);
    }
    stats.store(r, row);
}

__device__ __forceinline__ void glunorm_forward_row(const GluNormForward& r, long long row, bool quads) {
    const int lane = 4 * static_cast<int>(threadIdx.x & 31u);
    const float* const a = r.g + row * r.ldg + lane;
    const float* const skip = r.skip + row * r.ld_skip + lane;
    const int left = r.width - lane;
    const auto make = [&](float (&y)[4], int i) {
        float va[4], vc[4];
        fx_load(y, skip + i, left - i, quads);
        fx_load(va, a + i, left - i, quads);
        fx_load(vc, a + r.width + i, left - i, quads);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] += va[e] * GluGate(vc[e]).value;
    };

    float sum = 0.0f;
#pragma unroll 2
    for (int i = 0; i < r.width; i += GLU_CHUNK) {
        float y[4];
        make(y, i);  // 0 beyond the row
        sum += (y[0] + y[1]) + (y[2] + y[3]);
    }
    const float guess = glu_mean(sum, r.inverse_width);
    float rest = 0.0f, squares = 0.0f;
#pragma unroll 1
    for (int i = 0; i < r.width; i += GLU_CHUNK) {
        float y[4];
        make(y, i);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float deviation = e < left - i ? y[e] - guess : 0.0f;
            rest += deviation;
            squares += deviation * deviation;
        }
    }
    const GluNormStats stats(r, guess, rest, squares);
    float* const h = r.h + row * r.ldh + lane;
#pragma unroll 1
    for (int i = 0; i < r.width; i += GLU_CHUNK) {
        float y[4], gain[4], bias[4];
        make(y, i);
        fx_load(gain, r.gain + lane + i, left - i, quads);
        fx_load(bias, r.bias + lane + i, left - i, quads);
#pragma unroll
        for (int e = 0; e < 4; ++e) y[e] = (y[e] - stats.mean) * stats.rstd * gain[e] + bias[e];
        fx_store(h + i, y, left - i, quads);
    }
    stats.store(r, row);
}

// With a bound on the blocks ptxas leaves the loads in front; without, it saves registers by putting arithmetic between
// them, and each load waits for the one before.
extern "C" __global__ void __launch_bounds__(256, 3) fx_glunorm_forward(const GluNormForward* table, int count) {
    __shared__ GluNormForward place;
    int tile;
    const GluNormForward& r = fx_record(table, count, tile, place);
    const bool quads = r.width % 4 == 0 && fx_quads(r.g, r.ldg) && fx_quads(r.skip, r.ld_skip) &&
                       fx_quads(r.h, r.ldh) && fx_quads(r.gain, 0) && fx_quads(r.bias, 0);
    const long long row = static_cast<long long>(tile) * 8 + static_cast<int>(threadIdx.x >> 5);
    if (quads && r.width <= GLU_KEPT * GLU_CHUNK) {
        glunorm_forward_kept(r, row);
        return;
    }
    fx_wait();
    fx_trigger();
    if (row < r.rows) glunorm_forward_row(r, row, quads);
}

// What the backward of four neighbouring columns is made of.
struct GluNormQuad {
    float dn[4], n[4], a[4], gate[4], gate_slope[4], skip[4];

    // From dn = dh, skip, a and c.
    __device__ __forceinline__ void make(const float (&gain)[4], const float (&c)[4], float mean, float rstd) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const GluGate both(c[e]);
            gate[e] = both.value;
            gate_slope[e] = both.slope;
            dn[e] *= gain[e];
            n[e] = (skip[e] + a[e] * both.value - mean) * rstd;
        }
    }
    __device__ __forceinline__ void add(float& sum, float& along) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            sum += dn[e];
            along += dn[e] * n[e];
        }
    }
    // dskip: what it was before, or zeros.
    __device__ __forceinline__ void grads(float sum, float along, float rstd, int activation, float (&da)[4],
                                          float (&dc)[4], float (&dskip)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float dy = rstd * (dn[e] - sum - n[e] * along);
            da[e] = dy * gate[e];
            dc[e] = dy * a[e] * gate_slope[e];
            dskip[e] += dy * fx_activate_slope(activation, skip[e]);
        }
    }
};

// The tile's rows, of up to GLU_KEPT chunks and 16-byte aligned. Waits itself, with the gain in registers.
__device__ __forceinline__ void glunorm_backward_kept(const GluNormBackward& r, int tile, long long row0,
                                                      long long stop, float4* sums) {
    const int lane = 4 * static_cast<int>(threadIdx.x & 31u), warp = static_cast<int>(threadIdx.x >> 5);
    float gain[GLU_KEPT][4], dgain[GLU_KEPT][4] = {}, dbias[GLU_KEPT][4] = {};
    bool inside[GLU_KEPT];
#pragma unroll
    for (int k = 0; k < GLU_KEPT; ++k) {
        inside[k] = lane + k * GLU_CHUNK < r.width;
        glu_load(gain[k], r.gain + lane + k * GLU_CHUNK, inside[k]);
    }
    fx_wait();
    fx_trigger();
#pragma unroll 1
    for (long long row = row0 + warp; row < stop; row += 8) {
        const float* const a = r.g + row * r.ldg + lane;
        const float* const skip = r.skip + row * r.ld_skip + lane;
        const float* const dh = r.dh + row * r.lddh + lane;
        float* const dskip = r.dskip + row * r.ld_dskip + lane;
        GluNormQuad quad[GLU_KEPT];
        float c[GLU_KEPT][4], out[GLU_KEPT][4];
#pragma unroll
        for (int k = 0; k < GLU_KEPT; ++k) {  // all on their way before the first is used
            glu_load(c[k], a + r.width + k * GLU_CHUNK, inside[k]);
            glu_load(quad[k].a, a + k * GLU_CHUNK, inside[k]);
            glu_load(quad[k].skip, skip + k * GLU_CHUNK, inside[k]);
            glu_load(quad[k].dn, dh + k * GLU_CHUNK, inside[k]);
            glu_load(out[k], dskip + k * GLU_CHUNK, inside[k] && r.accumulate != 0);
        }
        const float mean = r.stats[2 * row], rstd = r.stats[2 * row + 1];
        float sum = 0.0f, along = 0.0f;
#pragma unroll
        for (int k = 0; k < GLU_KEPT; ++k) {
#pragma unroll
            for (int e = 0; e < 4; ++e) dbias[k][e] += quad[k].dn[e];
            float before[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) before[e] = quad[k].dn[e];
            quad[k].make(gain[k], c[k], mean, rstd);
#pragma unroll
            for (int e = 0; e < 4; ++e) dgain[k][e] += before[e] * quad[k].n[e];
            quad[k].add(sum, along);  // dn is 0 beyond the row
        }
        sum = glu_mean(sum, r.inverse_width);
        along = glu_mean(along, r.inverse_width);
        float* const da = r.dg + row * r.lddg + lane;
#pragma unroll
        for (int k = 0; k < GLU_KEPT; ++k) {
            float first[4], second[4];
            quad[k].grads(sum, along, rstd, r.activation, first, second, out[k]);
            if (!inside[k]) continue;
            glu_store(da + k * GLU_CHUNK, first);
            glu_store(da + r.width + k * GLU_CHUNK, second);
            if (r.dskip != nullptr) glu_store(dskip + k * GLU_CHUNK, out[k]);
        }
    }
    if (r.partials == nullptr) return;
#pragma unroll
    for (int k = 0; k < GLU_KEPT; ++k) {
        float4* const to = sums + warp * GLU_SUMS + k * 32 + lane / 4;
        to[0] = {dgain[k][0], dgain[k][1], dgain[k][2], dgain[k][3]};
        to[GLU_SUMS / 2] = {dbias[k][0], dbias[k][1], dbias[k][2], dbias[k][3]};
    }
    __syncthreads();
    const int column = static_cast<int>(threadIdx.x);
    if (column >= r.width) return;
    float* const partials = r.partials + static_cast<long long>(tile) * 2 * r.width + column;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
        const float* const from = reinterpret_cast<const float*>(sums + half * (GLU_SUMS / 2)) + column;
        float total = from[0];
#pragma unroll
        for (int other = 1; other < 8; ++other) total += from[other * 4 * GLU_SUMS];
        partials[half * r.width] = total;
    }
}

__device__ __forceinline__ void glunorm_backward_row(const GluNormBackward& r, long long row, bool quads) {
    const int lane = 4 * static_cast<int>(threadIdx.x & 31u);
    const float* const a = r.g + row * r.ldg + lane;
    const float* const skip = r.skip + row * r.ld_skip + lane;
    const float* const dh = r.dh + row * r.lddh + lane;
    const int left = r.width - lane;
    const float mean = r.stats[2 * row], rstd = r.stats[2 * row + 1];
    const auto make = [&](GluNormQuad& quad, int i) {
        float gain[4], c[4];
        fx_load(quad.dn, dh + i, left - i, quads);
        fx_load(gain, r.gain + lane + i, left - i, quads);
        fx_load(quad.skip, skip + i, left - i, quads);
        fx_load(quad.a, a + i, left - i, quads);
        fx_load(c, a + r.width + i, left - i, quads);
        quad.make(gain, c, mean, rstd);
    };

    float sum = 0.0f, along = 0.0f;
#pragma unroll 2
    for (int i = 0; i < r.width; i += GLU_CHUNK) {
        GluNormQuad quad;
        make(quad, i);
        quad.add(sum, along);  // dn is 0 beyond the row
    }
    sum = glu_mean(sum, r.inverse_width);
    along = glu_mean(along, r.inverse_width);

    float* const da = r.dg + row * r.lddg + lane;
    float* const dskip = r.dskip != nullptr ? r.dskip + row * r.ld_dskip + lane : nullptr;
#pragma unroll 1
    for (int i = 0; i < r.width; i += GLU_CHUNK) {
        GluNormQuad quad;
        float first[4], second[4], out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        make(quad, i);
        if (r.accumulate != 0) fx_load(out, dskip + i, left - i, quads);
        quad.grads(sum, along, rstd, r.activation, first, second, out);
        fx_store(da + i, first, left - i, quads);
        fx_store(da + r.width + i, second, left - i, quads);
        if (dskip != nullptr) fx_store(dskip + i, out, left - i, quads);
    }
}

// Columns go to threads here, and the rows are read again.
__device__ __forceinline__ void glunorm_partials(const GluNormBackward& r, int tile, long long row0, long long stop) {
    float* const partials = r.partials + static_cast<long long>(tile) * 2 * r.width;
    for (int column = static_cast<int>(threadIdx.x); column < r.width; column += 256) {
        float dgain = 0.0f, dbias = 0.0f;
#pragma unroll 1
        for (int warp = 0; warp < 8; ++warp) {
            float along = 0.0f, sum = 0.0f;
#pragma unroll 1
            for (long long row = row0 + warp; row < stop; row += 8) {
                const float* g = r.g + row * r.ldg + column;
                const float y = r.skip[row * r.ld_skip + column] + g[0] * GluGate(g[r.width]).value;
                const float dh = r.dh[row * r.lddh + column];
                along += dh * ((y - r.stats[2 * row]) * r.stats[2 * row + 1]);
                sum += dh;
            }
            dgain += along;
            dbias += sum;
        }
        partials[column] = dgain;
        partials[r.width + column] = dbias;
    }
}

// At most 128 registers: without the bound ptxas spills a few to fit a third block on a multiprocessor.
extern "C" __global__ void __launch_bounds__(256, 2) fx_glunorm_backward(const GluNormBackward* table, int count) {
    FX_POOL(float4, sums, 8 * GLU_SUMS);
    __shared__ GluNormBackward place;
    int tile;
    const GluNormBackward& r = fx_record(table, count, tile, place);
    const bool quads = r.width % 4 == 0 && fx_quads(r.dh, r.lddh) && fx_quads(r.g, r.ldg) &&
                       fx_quads(r.skip, r.ld_skip) && fx_quads(r.gain, 0) && fx_quads(r.dg, r.lddg) &&
                       fx_quads(r.dskip, r.ld_dskip);
    const long long row0 = static_cast<long long>(tile) * r.tile_rows;
    const long long stop = row0 + r.tile_rows < r.rows ? row0 + r.tile_rows : r.rows;
    if (quads && r.width <= GLU_KEPT * GLU_CHUNK) {
        glunorm_backward_kept(r, tile, row0, stop, sums);
        return;
    }
    fx_wait();
    fx_trigger();
    for (long long row = row0 + static_cast<int>(threadIdx.x >> 5); row < stop; row += 8) {
        glunorm_backward_row(r, row, quads);
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
    FxSquares squares;
    if (group == 0 && column < r.cols) {
#pragma unroll
        for (int other = 1; other < 8; ++other) sum += sums[other][lane];
        if (r.accumulate != 0) sum += r.out[column];
        const float total = static_cast<float>(sum);
        r.out[column] = total;
        squares.add(total);
    }
    fx_squares_store<256>(r.squares, tile, squares);
}
