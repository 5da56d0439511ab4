// fx_mask_rows: y[b, :] = mask[b] == 0 ? 0 : x[b, :], bit for bit, whatever a masked row holds (NaN included).
// y may be x itself: then only the masked rows are written. Overwrites. Tiles: tile_rows rows, about 2048 elements.
#include "fx.cuh"

struct MaskRows {
    int first_tile;
    int tiles;
    const float* x;     // [rows, cols]
    const float* mask;  // [rows]
    float* y;           // [rows, cols]
    long long ldx;      // floats between rows
    long long ldy;
    int rows;
    int cols;
    int tile_rows;
};

template <class Vector>
__device__ __forceinline__ void mask_rows(const MaskRows& r, int tile) {
    constexpr int width = sizeof(Vector) / sizeof(float);
    const long long row0 = static_cast<long long>(tile) * r.tile_rows;
    const int rows = static_cast<int>(r.rows - row0 < r.tile_rows ? r.rows - row0 : r.tile_rows);
    const unsigned vectors = static_cast<unsigned>(r.cols / width);
    for (unsigned i = threadIdx.x; i < vectors * static_cast<unsigned>(rows); i += 256) {
        const long long row = row0 + i / vectors;
        const long long column = static_cast<long long>(i % vectors) * width;
        const bool masked = r.mask[row] == 0.0f;
        if (!masked && r.x == r.y) continue;
        Vector value = {};
        if (!masked) value = *reinterpret_cast<const Vector*>(r.x + row * r.ldx + column);
        *reinterpret_cast<Vector*>(r.y + row * r.ldy + column) = value;
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_mask_rows(const MaskRows* table, int count) {
    __shared__ MaskRows place;
    int tile;
    const MaskRows& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    const u64 odd = reinterpret_cast<u64>(record.x) | reinterpret_cast<u64>(record.y) |
                    static_cast<u64>(4 * (record.ldx | record.ldy | record.cols));
    if ((odd & 15) == 0) {
        mask_rows<float4>(record, tile);
    } else {
        mask_rows<float>(record, tile);
    }
}
