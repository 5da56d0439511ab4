// fx_spectral: one power iteration on w [rows, cols] (row-major) and, if it is too long, its rescaling.
//   u = normalize(w v)   v = normalize(w^T u)   sigma = u^T w v   w *= sn_max / sigma if sigma is finite and > sn_max
//   normalize(x) = x / max(|x|, 1e-12). sigma is that of w before it is scaled. Nothing is written when skip is set.
// A cluster of blocks per matrix, all matrices in one launch. Up to 128 x 288 elements stay in registers after one
// reading, an equal share of the rows in each block, and the blocks exchange one message; a larger w is read twice by
// one block, a third time to scale it. Dot products in float, the norms in double, every sum in fixed order.
// A matrix that is not finite gives a NaN sigma and NaN in v, and stays as it is. Tiles: FX_CLUSTER (cluster.cuh) for
// every matrix.
#include "cluster.cuh"

struct Spectral {
    int first_tile;
    int tiles;
    float* w;               // [rows, cols]
    float* v;               // [cols], right singular vector; kept from step to step
    float* u;               // [rows], left singular vector; written where w is large
    float* sigma;           // one float
    const float* sn_max;    // signal
    const unsigned* skip;
    int rows;
    int cols;
    int ld;                 // elements from one row of w to the next
};

constexpr int SPECTRAL_THREADS = 512;
constexpr int SPECTRAL_WARPS = 16;
// Columns per round of w^T u: 9 per lane, since the matrices are a little wider than a power of two: h2 and a few more.
constexpr int SPECTRAL_LANE = 9;
constexpr int SPECTRAL_ROUND = 32 * SPECTRAL_LANE;
// Rows that a warp keeps in registers.
constexpr int SPECTRAL_KEPT = FX_CLUSTER > 1 ? 1 : 8;

// What the blocks of a cluster send each other.
struct SpectralParts {
    float column[FX_CLUSTER][SPECTRAL_ROUND];
    float square[FX_CLUSTER][2];  // a double each
};

// Rows of a block.
__device__ __forceinline__ int spectral_share(const Spectral& record) {
    return (record.rows + FX_CLUSTER - 1) / FX_CLUSTER;
}

// Sum over the block of one number per warp: each warp adds the same numbers in the same order.
__device__ __forceinline__ double spectral_sum_warps(double value, double* scratch) {
    __syncthreads();  // an earlier use of scratch is over
    if ((threadIdx.x & 31u) == 0) scratch[threadIdx.x >> 5] = value;
    __syncthreads();
    return fx_lanes_sum<SPECTRAL_WARPS>(scratch[threadIdx.x & (SPECTRAL_WARPS - 1u)]);
}

// Sum over the block of one number per thread.
__device__ __forceinline__ double spectral_sum(double value, double* scratch) {
    return spectral_sum_warps(fx_warp_sum(value), scratch);
}

// 1 / max(norm, 1e-12) from the norm's square; lets NaN through.
__device__ __forceinline__ double spectral_inverse(double square) { return square < 1e-24 ? 1e12 : rsqrt(square); }

// u = w v, a warp per row; four rows at a time, so that their loads overlap.
__device__ __forceinline__ void spectral_rows(const Spectral& record) {
    const int lane = static_cast<int>(threadIdx.x & 31u), warp = static_cast<int>(threadIdx.x >> 5);
    for (int row = warp; row < record.rows; row += 4 * SPECTRAL_WARPS) {
        const float* line[4];
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int k = 0; k < 4; ++k) {  // a row past the end becomes the last one: read again, not written
            const int r = row + k * SPECTRAL_WARPS;
            line[k] = record.w + static_cast<long long>(r < record.rows ? r : record.rows - 1) * record.ld;
        }
#pragma unroll 2
        for (int c = lane; c < record.cols; c += 32) {
            const float x = record.v[c];
#pragma unroll
            for (int k = 0; k < 4; ++k) sum[k] += line[k][c] * x;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int r = row + k * SPECTRAL_WARPS;
            const float dot = fx_warp_sum(sum[k]);
            if (lane == 0 && r < record.rows) record.u[r] = dot;
        }
    }
}

// v = w^T u, not normalised; returns this thread's share of the sum of squares. Every warp adds up its rows for a round
// of columns, then one thread per column adds the warps.
__device__ __forceinline__ double spectral_columns(const Spectral& record, float* partial) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread & 31, warp = thread >> 5;
    double squares = 0.0;
    for (int base = 0; base < record.cols; base += SPECTRAL_ROUND) {
        float sum[SPECTRAL_LANE] = {};
#pragma unroll 1
        for (int row = warp; row < record.rows; row += SPECTRAL_WARPS) {
            const float scale = record.u[row];
            const float* line = record.w + static_cast<long long>(row) * record.ld;
#pragma unroll
            for (int k = 0; k < SPECTRAL_LANE; ++k) {
                const int c = base + lane + 32 * k;
                if (c < record.cols) sum[k] += line[c] * scale;
            }
        }
        __syncthreads();  // the sums of the round before have been read
#pragma unroll
        for (int k = 0; k < SPECTRAL_LANE; ++k) partial[warp * SPECTRAL_ROUND + lane + 32 * k] = sum[k];
        __syncthreads();
        if (thread < SPECTRAL_ROUND && base + thread < record.cols) {
            float total = 0.0f;
#pragma unroll 4
            for (int w = 0; w < SPECTRAL_WARPS; ++w) total += partial[w * SPECTRAL_ROUND + thread];
            record.v[base + thread] = total;
            squares += static_cast<double>(total) * static_cast<double>(total);
        }
    }
    return squares;
}

__device__ __forceinline__ void spectral_scale(const Spectral& record, float factor) {
    const int lane = static_cast<int>(threadIdx.x & 31u), warp = static_cast<int>(threadIdx.x >> 5);
    for (int row = warp; row < record.rows; row += SPECTRAL_WARPS) {
        float* const line = record.w + static_cast<long long>(row) * record.ld;
#pragma unroll 4
        for (int c = lane; c < record.cols; c += 32) line[c] *= factor;
    }
}

// The whole step in global memory.
__device__ __forceinline__ void spectral_large(const Spectral& record, float* partial, double* scratch) {
    const int thread = static_cast<int>(threadIdx.x);
    if (*record.skip != 0) return;
    spectral_rows(record);
    __syncthreads();
    double squares = 0.0;
    for (int r = thread; r < record.rows; r += SPECTRAL_THREADS) {
        squares += static_cast<double>(record.u[r]) * static_cast<double>(record.u[r]);
    }
    double inverse = spectral_inverse(spectral_sum(squares, scratch));
    for (int r = thread; r < record.rows; r += SPECTRAL_THREADS) {
        record.u[r] = static_cast<float>(record.u[r] * inverse);
    }
    __syncthreads();

    // u^T w v = (w^T u)^T v: the product that v is made from gives sigma too.
    squares = spectral_sum(spectral_columns(record, partial), scratch);
    inverse = spectral_inverse(squares);
    if (thread < SPECTRAL_ROUND) {
        for (int c = thread; c < record.cols; c += SPECTRAL_ROUND) {
            record.v[c] = static_cast<float>(record.v[c] * inverse);
        }
    }
    const double sigma = squares * inverse;
    const double limit = static_cast<double>(*record.sn_max);
    if (thread == 0) *record.sigma = static_cast<float>(sigma);
    if (fx_finite(sigma) && sigma > limit) spectral_scale(record, static_cast<float>(limit / sigma));
}

// The whole step with w in registers: warp i of a block has the rows KEPT i, ... of the block's, lane l of it the columns
// l, l + 32, .... A block brings its rows of u to length 1 by themselves, so that no product leaves float's range, and
// sends its part of w^T u and the square of that length; what the parts are to be scaled by, each block then knows.
__device__ __forceinline__ void spectral_small(const Spectral& record, float* partial, double* scratch,
                                               SpectralParts& parts, FxMailbox* box) {
    constexpr int PER_ROW = 32 / SPECTRAL_KEPT;  // lanes that have the same u
    const int thread = static_cast<int>(threadIdx.x), rank = fx_cluster_rank();
    const int lane = thread & 31, warp = thread >> 5;
    const int cols = record.cols, left = cols - lane, last = record.rows - 1;
    const int share = spectral_share(record), begin = rank * share + SPECTRAL_KEPT * warp;
    const int end = (rank + 1) * share <= last ? (rank + 1) * share : last + 1;
    float w[SPECTRAL_KEPT][SPECTRAL_LANE];
#pragma unroll
    for (int r = 0; r < SPECTRAL_KEPT; ++r) {  // a row past the end becomes the last one, and gets a u of 0
        const float* const line = record.w + static_cast<long long>(begin + r < last ? begin + r : last) * record.ld + lane;
#pragma unroll
        for (int k = 0; k < SPECTRAL_LANE; ++k) w[r][k] = 32 * k < left ? line[32 * k] : 0.0f;
    }
    const bool skip = *record.skip != 0;
    const float limit = *record.sn_max;
    float dot[SPECTRAL_KEPT] = {};
#pragma unroll
    for (int k = 0; k < SPECTRAL_LANE; ++k) {
        const float x = 32 * k < left ? record.v[lane + 32 * k] : 0.0f;
#pragma unroll
        for (int r = 0; r < SPECTRAL_KEPT; ++r) dot[r] += w[r][k] * x;
    }
    if (skip) return;
    float u = fx_warp_sums(dot);
    if (begin + lane / PER_ROW >= end) u = 0.0f;
    double squares = static_cast<double>(u) * static_cast<double>(u);
#pragma unroll
    for (int offset = 16; offset >= PER_ROW; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
    squares = spectral_sum_warps(squares, scratch);
    u = static_cast<float>(u * spectral_inverse(squares));

    float sum[SPECTRAL_LANE] = {};
#pragma unroll
    for (int r = 0; r < SPECTRAL_KEPT; ++r) {
        const float scale = __shfl_sync(0xffffffffu, u, PER_ROW * r);
#pragma unroll
        for (int k = 0; k < SPECTRAL_LANE; ++k) sum[k] += w[r][k] * scale;
    }
#pragma unroll
    for (int k = 0; k < SPECTRAL_LANE; ++k) partial[warp * SPECTRAL_ROUND + lane + 32 * k] = sum[k];
    __syncthreads();
    if (thread < cols) {
        float part = 0.0f;  // of column `thread`
#pragma unroll
        for (int i = 0; i < SPECTRAL_WARPS; ++i) part += partial[i * SPECTRAL_ROUND + thread];
#pragma unroll
        for (int to = 0; to < FX_CLUSTER; ++to) fx_cluster_send(&parts.column[rank][thread], box, to, part);
    } else if (thread >= SPECTRAL_ROUND && thread < SPECTRAL_ROUND + 2 * FX_CLUSTER) {
        const int word = thread % 2, to = (thread - SPECTRAL_ROUND) / 2;  // two words are a square
        const u64 bits = static_cast<u64>(__double_as_longlong(squares));
        fx_cluster_send(&parts.square[rank][word], box, to, __uint_as_float(static_cast<unsigned>(bits >> 32 * word)));
    }
    fx_mailbox_wait(box);

    const float* const mine = parts.square[lane % FX_CLUSTER];
    const u64 high = __float_as_uint(mine[1]);
    const double square = __longlong_as_double(static_cast<long long>(high << 32 | __float_as_uint(mine[0])));
    const double whole = spectral_inverse(fx_lanes_sum<FX_CLUSTER>(square));
    const float factor = static_cast<float>(whole / spectral_inverse(square));  // of the part that block `lane` sent
    float v = 0.0f;  // of column `thread`
#pragma unroll
    for (int from = 0; from < FX_CLUSTER; ++from) {
        const float scale = __shfl_sync(0xffffffffu, factor, from);
        if (thread < cols) v += scale * parts.column[from][thread];
    }
    squares = spectral_sum(static_cast<double>(v) * static_cast<double>(v), scratch);
    const double inverse = spectral_inverse(squares), sigma = squares * inverse;
    if (rank == 0) {
        if (thread < cols) record.v[thread] = static_cast<float>(v * inverse);
        if (thread == 0) *record.sigma = static_cast<float>(sigma);
    }
    if (!fx_finite(sigma) || !(sigma > static_cast<double>(limit))) return;
    const float shrink = static_cast<float>(static_cast<double>(limit) / sigma);
#pragma unroll
    for (int r = 0; r < SPECTRAL_KEPT; ++r) {
        if (begin + r >= end) break;
        float* const line = record.w + static_cast<long long>(begin + r) * record.ld + lane;
#pragma unroll
        for (int k = 0; k < SPECTRAL_LANE; ++k) {
            if (32 * k < left) line[32 * k] = w[r][k] * shrink;
        }
    }
}

FX_CLUSTER_KERNEL(fx_spectral, Spectral)
extern "C" __global__ void __launch_bounds__(SPECTRAL_THREADS, 1) fx_spectral(const Spectral* table, int count) {
    __shared__ float partial[SPECTRAL_WARPS * SPECTRAL_ROUND];
    __shared__ double scratch[SPECTRAL_WARPS];
    __shared__ SpectralParts parts;
    __shared__ FxMailbox box;
    __shared__ Spectral place;
    int tile;
    const Spectral& record = fx_record(table, count, tile, place);
    const int share = spectral_share(record);
    const bool small = share <= SPECTRAL_KEPT * SPECTRAL_WARPS && record.cols <= SPECTRAL_ROUND;
    if (threadIdx.x == 0 && small) fx_mailbox_open(&box, 4 * FX_CLUSTER * (record.cols + 2));
    fx_cluster_arrive();
    fx_cluster_wait();
    fx_wait();
    fx_trigger();
    if (small) {
        spectral_small(record, partial, scratch, parts, &box);
    } else if (fx_cluster_rank() == 0) {
        spectral_large(record, partial, scratch);
    }
}
