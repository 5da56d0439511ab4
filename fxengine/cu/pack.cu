// Packed copies of weights (pack.cuh), of a matrix or of its transpose.
#include "pack.cuh"

struct Pack {
    int first_tile;
    int tiles;
    const float* w;  // [n, k], or [n, k + k2]: the parts of the rows then begin with blocks of their own
    float* out;
    int ldw;         // elements from one row to the next
    int n;
    int k;
    int k2;          // 0 for the transpose
    int transposed;
};

// One block packs 32 rows x 128 columns of w, by way of shared memory so that both sides are read and written in rows.
extern "C" __global__ void __launch_bounds__(256, 4) fx_pack(const Pack* table, int count) {
    constexpr int ROWS = 32, COLUMNS = 128;
    __shared__ float tile[ROWS][COLUMNS + 1];
    int index;
    const Pack& record = fx_record(table, count, index);
    const Pack r = record;
    const int thread = static_cast<int>(threadIdx.x);
    const int first = fx_packed_depth(r.k), width = first + fx_packed_depth(r.k2);  // columns, with what pads them
    const int across = (width + COLUMNS - 1) / COLUMNS;
    const int n0 = index / across * ROWS, k0 = index % across * COLUMNS;
    fx_wait();
    fx_trigger();
#pragma unroll 4
    for (int i = thread; i < ROWS * COLUMNS; i += 256) {
        const int n = n0 + i / COLUMNS, column = k0 + i % COLUMNS;
        const int k = column < first ? column : r.k + column - first;
        const bool exists = n < r.n && k < (column < first ? r.k : r.k + r.k2);
        tile[i / COLUMNS][i % COLUMNS] = exists ? r.w[static_cast<long long>(n) * r.ldw + k] : 0.0f;
    }
    __syncthreads();
    const int rows = fx_packed_rows(r.transposed ? r.k : r.n);
#pragma unroll 4
    for (int i = thread; i < ROWS * COLUMNS; i += 256) {
        // 32 numbers of a row of a block: 128 rows of one block, or 32 rows of four
        const int line = i / 32, place = r.transposed ? line : line % ROWS, block = r.transposed ? 0 : line / ROWS;
        const int row = fx_packed_row(place), k = fx_packed_k(place, i % 32) + 32 * block;
        const int to_row = (r.transposed ? k0 : n0) + place, to_block = (r.transposed ? n0 : k0) / 32 + block;
        if (to_row < rows && (r.transposed || 32 * to_block < width)) {
            const float number = r.transposed ? tile[k][row] : tile[row][k];
            r.out[(static_cast<long long>(to_block) * rows + to_row) * 32 + i % 32] = __uint_as_float(fx_tf32(number));
        }
    }
}
