// fx_elementwise: y (= or +=) act(alpha a + beta b), and the way back through an activation, over [rows, cols].
//   forward    : y = act(alpha a + beta b)
//   through    : y = (alpha a + beta b) act'(output), where `output` is what the activation returned; a is then the
//                gradient with respect to the output and y the one with respect to the pre-activation
//   b may be null. alpha = alpha_constant * (*alpha_signal, or 1 without one), beta likewise. A scale of 0 gives an
//   exact 0 for its term, whatever a, b or output hold. accumulate: y += instead of y =.
//   y may be a or b itself; other overlaps may not be.
// Tiles: tile_rows x tile_cols elements, about 2048, tile_cols a multiple of 4; column tiles run fastest.
#include "fx.cuh"

struct Elementwise {
    int first_tile;
    int tiles;
    const float* a;             // [rows, cols]
    const float* b;             // [rows, cols] or null
    const float* output;        // [rows, cols]: multiply by act'(output); null = forward
    float* y;                   // [rows, cols]
    const float* alpha_signal;  // or null
    const float* beta_signal;   // or null
    long long ld_a;             // floats between rows
    long long ld_b;
    long long ld_output;
    long long ld_y;
    long long cols;
    int rows;
    int tile_rows;
    int tile_cols;
    float alpha;
    float beta;
    int activation;             // FxActivation
    int accumulate;             // 1 = y +=
};

struct Vector1 {
    float at[1];
};
struct alignas(16) Vector4 {
    float at[4];
};

template <class Vector>
__device__ __forceinline__ Vector elementwise_load(const float* base, long long offset) {
    return *reinterpret_cast<const Vector*>(base + offset);
}

template <class Vector>
__device__ __forceinline__ void elementwise_tile(const Elementwise& record, int tile, float alpha, float beta) {
    constexpr int width = sizeof(Vector) / sizeof(float);
    const long long column_tiles = (record.cols + record.tile_cols - 1) / record.tile_cols;
    const long long row0 = tile / column_tiles * record.tile_rows;
    const long long column0 = tile % column_tiles * record.tile_cols;
    const int rows = static_cast<int>(record.rows - row0 < record.tile_rows ? record.rows - row0 : record.tile_rows);
    const int cols =
        static_cast<int>(record.cols - column0 < record.tile_cols ? record.cols - column0 : record.tile_cols);
    const unsigned vectors = static_cast<unsigned>(cols) / width;
    for (unsigned i = threadIdx.x; i < vectors * static_cast<unsigned>(rows); i += 256) {
        const long long row = row0 + i / vectors;
        const long long column = column0 + static_cast<long long>(i % vectors) * width;
        const Vector zero = {};
        const Vector a = elementwise_load<Vector>(record.a, row * record.ld_a + column);
        const Vector b =
            record.b != nullptr ? elementwise_load<Vector>(record.b, row * record.ld_b + column) : zero;
        const Vector output = record.output != nullptr
                                  ? elementwise_load<Vector>(record.output, row * record.ld_output + column)
                                  : zero;
        Vector* target = reinterpret_cast<Vector*>(record.y + row * record.ld_y + column);
        Vector y = record.accumulate != 0 ? *target : zero;
#pragma unroll
        for (int k = 0; k < width; ++k) {
            float value;
            if (record.output != nullptr) {
                const float slope = fx_activate_slope(record.activation, output.at[k]);
                value = fx_scaled(alpha, a.at[k] * slope) + fx_scaled(beta, b.at[k] * slope);
            } else {
                value = fx_activate(record.activation, fx_scaled(alpha, a.at[k]) + fx_scaled(beta, b.at[k]));
            }
            y.at[k] = record.accumulate != 0 ? y.at[k] + value : value;
        }
        *target = y;
    }
}

extern "C" __global__ void __launch_bounds__(256) fx_elementwise(const Elementwise* table, int count) {
    int tile;
    const Elementwise record = fx_record(table, count, tile);
    fx_wait();
    fx_trigger();
    const float alpha = record.alpha * (record.alpha_signal != nullptr ? *record.alpha_signal : 1.0f);
    const float beta =
        record.b == nullptr ? 0.0f : record.beta * (record.beta_signal != nullptr ? *record.beta_signal : 1.0f);
    u64 odd = reinterpret_cast<u64>(record.a) | reinterpret_cast<u64>(record.b) |
              reinterpret_cast<u64>(record.output) | reinterpret_cast<u64>(record.y);
    odd |= static_cast<u64>(4 * (record.ld_a | record.ld_y | record.cols));
    if (record.b != nullptr) odd |= static_cast<u64>(4 * record.ld_b);
    if (record.output != nullptr) odd |= static_cast<u64>(4 * record.ld_output);
    if ((odd & 15) == 0) {
        elementwise_tile<Vector4>(record, tile, alpha, beta);
    } else {
        elementwise_tile<Vector1>(record, tile, alpha, beta);
    }
}
