// Copies of weights: of a matrix or of its transpose, packed (pack.cuh), or of its transpose, in rows.
#include "linear.cuh"
#include "pack.cuh"

struct Pack {
    int first_tile;
    int tiles;
    const float* w;      // [n, k]
    const float* scale;  // one float that multiplies the copy in rows, null for 1
    float* out;
    int ldw;             // elements from one row to the next
    int ldout;           // the same of the copy; 0 if it is packed
    int n;
    int k;
    int transposed;
};

// One block packs 32 rows x 128 columns of w, by way of shared memory so that both sides are read and written in rows.
// A thread has four quads, all under way at once.
extern "C" __global__ void __launch_bounds__(256, 4) fx_pack(const Pack* table, int count) {
    constexpr int ROWS = 32, COLUMNS = 128, LD = COLUMNS + 4, UNITS = ROWS * COLUMNS / (4 * 256);
    __shared__ float4 quads[ROWS * LD / 4];
    float* const tile = reinterpret_cast<float*>(quads);
    int index;
    const Pack r = fx_record(table, count, index);
    const int thread = static_cast<int>(threadIdx.x);
    const int width = fx_packed_depth(r.k);  // columns, with what pads them
    const int across = (width + COLUMNS - 1) / COLUMNS;
    const int n0 = index / across * ROWS, k0 = index % across * COLUMNS;
    fx_wait();
    fx_trigger();
    float v[UNITS][4];
    FX_UNROLL
    for (int u = 0; u < UNITS; ++u) {
        const int n = n0 + thread / 32 + 8 * u, k = k0 + thread % 32 * 4;
        const float* const from = fx_global(r.w) + static_cast<long long>(n) * r.ldw + k;
        fx_load(v[u], from, n < r.n ? r.k - k : 0, fx_quads(from, 4));
    }
    const float scale = r.scale ? *r.scale : 1.0f;
    FX_UNROLL
    for (int u = 0; u < UNITS; ++u) fx_store(tile + (thread / 32 + 8 * u) * LD + thread % 32 * 4, v[u], 4, true);
    __syncthreads();
    const int rows = fx_packed_rows(r.transposed ? r.k : r.n);
    FX_UNROLL
    for (int u = 0; u < UNITS; ++u) {
        // 32 numbers of a row of a block: 128 rows of one block, or 32 rows of four
        const int line = thread / 8 + 32 * u, chunk = thread % 8 * 4;
        if (r.ldout > 0) {
            if (k0 + line >= r.k) continue;
            float numbers[4];
            FX_UNROLL
            for (int e = 0; e < 4; ++e) numbers[e] = scale * tile[(chunk + e) * LD + line];
            float* const to = fx_global(r.out) + static_cast<long long>(k0 + line) * r.ldout + n0 + chunk;
            fx_store(to, numbers, r.n - n0 - chunk, true);
            continue;
        }
        const int place = r.transposed ? line : line % ROWS, block = r.transposed ? 0 : line / ROWS;
        const int to_row = (r.transposed ? k0 : n0) + place, to_block = (r.transposed ? n0 : k0) / 32 + block;
        if (to_row >= rows || (!r.transposed && 32 * to_block >= width)) continue;
        const int row = fx_packed_row(place);
        float numbers[4];
        FX_UNROLL
        for (int e = 0; e < 4; ++e) {
            const int k = fx_packed_k(place, chunk + e) + 32 * block;
            numbers[e] = __uint_as_float(fx_tf32(r.transposed ? tile[k * LD + row] : tile[row * LD + k]));
        }
        float* const to = fx_global(r.out) + (static_cast<long long>(to_block) * rows + to_row) * 32 + chunk;
        fx_store(to, numbers, 4, true);
    }
}
