// Packed copies of weights (pack.cuh), of a matrix or of its transpose.
#include "pack.cuh"

struct Pack {
    int first_tile;
    int tiles;
    const float* w;  // [n, k], or [n, k + k2]: then the parts of the rows are packed one behind the other
    float* out;      // [n, packed(k) + packed(k2)], of the transpose [k, packed(n)]
    int ldw;         // elements from one row to the next
    int ldo;
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
    const Pack& r = fx_record(table, count, index);
    const int thread = static_cast<int>(threadIdx.x);
    fx_wait();
    fx_trigger();
    // Columns of out that this block writes, in numbers of w: the parts begin at multiples of 16.
    const int first = fx_packed(r.k), width = first + fx_packed(r.k2);
    const int across = (width + COLUMNS - 1) / COLUMNS;
    const int n0 = index / across * ROWS, k0 = index % across * COLUMNS;
#pragma unroll 4
    for (int i = thread; i < ROWS * COLUMNS; i += 256) {
        const int n = n0 + i / COLUMNS, place = k0 + i % COLUMNS;
        const int k = place < first ? place : r.k + place - first;  // of w
        const bool exists = n < r.n && (place < first ? k < r.k : k < r.k + r.k2);
        tile[i / COLUMNS][i % COLUMNS] = exists ? r.w[static_cast<long long>(n) * r.ldw + k] : 0.0f;
    }
    __syncthreads();
    if (r.transposed) {
#pragma unroll 4
        for (int i = thread; i < ROWS * COLUMNS; i += 256) {
            const int k = i / ROWS, place = i % ROWS;
            if (k0 + k < r.k && n0 + place < r.ldo) {
                r.out[static_cast<long long>(k0 + k) * r.ldo + n0 + place] =
                    __uint_as_float(fx_tf32(tile[fx_packed_number(place)][k]));
            }
        }
    } else {
#pragma unroll 4
        for (int i = thread; i < ROWS * COLUMNS; i += 256) {
            const int n = i / COLUMNS, place = i % COLUMNS;
            if (n0 + n < r.n && k0 + place < width) {
                r.out[static_cast<long long>(n0 + n) * r.ldo + k0 + place] =
                    __uint_as_float(fx_tf32(tile[n][fx_packed_number(place)]));
            }
        }
    }
}
