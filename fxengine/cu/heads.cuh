// One branch of the C51 heads, forward, from its hidden layer to q: the output layers and what dueling.cu does.
//   z      = the wire, p_up - p_down, p = softmax of bar_hidden bar_w^T + bar_b;  or the policy of another branch
//   hidden = relu(hidden + z late^T), in float32; relu(hidden) where none of the layer's columns comes late
//   v      = value_hidden value_w^T + value_b
//   adv    = hidden w^T + b
//   q, lse, policy, best of v and adv, as in dueling.cu
// Everything is overwritten, hidden only where it is kept; results other than q may be null.
//
// A block of 16 warps works on 16, 32 or 64 rows. The rows lie in shared memory, the weights in registers: of the
// products a warp owns 16 columns at a time, and has those for its first ones before fx_wait (Family.early). Before the
// products a warp owns rows, behind them a group of its lanes does. What the launch takes is the chain of a thread's
// instructions, so sizes may be compiled in (HEADS_SIZES, ops/heads.py), and nothing is done twice.
#pragma once
#include "c51.cuh"
#include "copy_async.cuh"
#include "linear_fragments.cuh"

constexpr int heads_warps = 16;
constexpr int heads_depth = 128;  // k that a warp multiplies by at once
constexpr int heads_most = 64;    // rows of a block

struct Heads {
    int first_tile;
    int tiles;
    const float* value_hidden;  // [rows, value_depth]
    const float* value_w;       // [atoms, value_depth]
    const float* value_b;       // [atoms]
    float* v;                   // [rows, atoms] or null
    float* hidden;              // [rows, depth]
    const float* late;          // [depth, columns] or null: the layer is whole
    const float* others;        // [rows, columns], the policy, or null
    const float* bar_hidden;    // [rows, bar_depth] or null
    const float* bar_w;         // [2, bar_depth]
    const float* bar_b;         // [2]
    float* bar_logits;          // [rows, 2] or null
    float* wire;                // [rows], wire_stride apart, or null
    const float* w;             // [actions * atoms, depth]
    const float* b;             // [actions * atoms]
    float* adv;                 // [rows, actions * atoms] or null
    float* q;                   // [rows, actions]
    float* lse;                 // [rows, actions] or null
    float* policy;              // [rows, actions] or null
    int* best;                  // [rows], best_stride apart, or null
    int ld_value_hidden;        // elements between rows
    int ld_value_w;
    int ld_v;
    int ld_hidden;
    int ld_late;
    int ld_others;
    int ld_bar_hidden;
    int ld_bar_w;
    int ld_bar_logits;
    int wire_stride;
    int ld_w;
    int ld_adv;
    int ld_q;
    int ld_lse;
    int ld_policy;
    int best_stride;
    int rows;
    int height;                 // rows of a block: 16, 32 or 64
    int value_depth;
    int bar_depth;
    int depth;
    int atoms;                  // 2 to 64
    int actions;                // 1 to 32
    int columns;                // of z: 0 to 32
    int kept;                   // whether hidden receives what was finished
    int early;                  // whether the rows may be read before fx_wait
    float v_min;
    float spacing;              // (v_max - v_min) / (atoms - 1)
};

// Sizes that the records of a launch share, and whether all rows of operands start at 16 bytes.
struct HeadsSizes {
    int height, value_depth, depth, atoms, actions;
    bool quads;
};

__device__ __forceinline__ HeadsSizes heads_sizes(const Heads& record) {
#ifdef HEADS_SIZES
    return HeadsSizes{HEADS_SIZES, true};
#else
    const bool quads = fx_quads(record.value_hidden, record.ld_value_hidden) &&
                       fx_quads(record.value_w, record.ld_value_w) && fx_quads(record.w, record.ld_w) &&
                       fx_quads(record.hidden, record.ld_hidden) && fx_quads(record.v, record.ld_v) &&
                       fx_quads(record.adv, record.ld_adv);
    return HeadsSizes{record.height, record.value_depth, record.depth, record.atoms, record.actions, quads};
#endif
}

// How rows are shared out. Before the products a warp has ROWS of them. Behind them a row has LANES lanes, as many as
// there are for each of a block's rows where sizes are compiled in; a lane has the atoms lane, lane + LANES, ..., up to
// CHUNKS of them, of GROUP actions at a time.
#ifdef HEADS_SIZES
struct HeadsShare {
    static constexpr HeadsSizes SIZES{HEADS_SIZES, true};
    static constexpr int ROWS = SIZES.height / heads_warps;
    static constexpr int LANES = 32 / ROWS;
    static constexpr int CHUNKS = (SIZES.atoms + LANES - 1) / LANES;
    static constexpr int SURE = SIZES.atoms / LANES;  // chunks that every lane has
    static constexpr int GROUP = SIZES.actions < 4 ? SIZES.actions : 4;
};
#else
struct HeadsShare {
    static constexpr int ROWS = heads_most / heads_warps, LANES = 32 / ROWS, CHUNKS = 64 / LANES, SURE = 0, GROUP = 4;
};
#endif

__device__ __forceinline__ constexpr int heads_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// A block's shared memory (ops/heads.py adds it up). Strides are such that no access of a product meets a bank twice.
// Rows are copied as they are and turned into words in place: two bf16 numbers share one.
template <int WORD>
struct HeadsLayout {
    float* value_hidden;  // [height, value_stride]
    float* hidden;        // [height, stride]
    float* v;             // [height, v_stride]
    float* adv;           // [height, adv_stride]
    float* late;          // [columns, depth up to 128]
    int value_stride, stride, v_stride, adv_stride;

    __device__ __forceinline__ HeadsLayout(const HeadsSizes& sizes, float* shared) {
        constexpr int GAP = WORD == 2 ? 8 : 16;
        value_stride = heads_up(sizes.value_depth, heads_depth) + GAP;
        stride = heads_up(sizes.depth, heads_depth) + GAP;
        v_stride = heads_up(sizes.atoms, 16) + 4;
        adv_stride = heads_up(sizes.actions * sizes.atoms, 16) + 4;
        value_hidden = shared;
        hidden = value_hidden + sizes.height * value_stride;
        v = hidden + sizes.height * stride;
        adv = v + sizes.height * v_stride;
        late = adv + sizes.height * adv_stride;
    }
};

// Which product a warp makes: 16 columns of adv or, behind those, of v.
struct HeadsUnit {
    const float* w;
    const float* b;
    int ld;
    int rows;    // of w, of which 16 from `column` on count
    int depth;
    int column;
    bool value;

    __device__ __forceinline__ HeadsUnit(const Heads& record, const HeadsSizes& sizes, int unit) {
        const int adv = sizes.actions * sizes.atoms, first = heads_up(adv, 16) / 16;
        value = unit >= first;
        w = fx_global(value ? record.value_w : record.w);
        b = fx_global(value ? record.value_b : record.b);
        ld = value ? record.ld_value_w : record.ld_w;
        rows = value ? sizes.atoms : adv;
        depth = value ? sizes.value_depth : sizes.depth;
        column = 16 * (value ? unit - first : unit);
    }

    static __device__ __forceinline__ int count(const HeadsSizes& sizes) {
        return (heads_up(sizes.actions * sizes.atoms, 16) + heads_up(sizes.atoms, 16)) / 16;
    }
};

// Weights of a unit for 128 k, in panels of 16: of lane 4 g + t those of columns 2 g + h (beyond the last, that one
// again) and of the four k from 4 t on. On the tensor cores they are operand A, in float32 they lie as [h][k]. And the
// biases of these columns.
template <int WORD>
struct HeadsWeights {
    static constexpr int PANELS = heads_depth / 16;
    static constexpr int WORDS = WORD == 2 ? 4 : 8;
    float raw[PANELS][2][4];  // as they are in memory, until they are needed
    unsigned words[PANELS][WORDS];
    float bias[2];

    __device__ __forceinline__ void fetch(const HeadsUnit& unit, int k0, bool quads) {
        const int lane = static_cast<int>(threadIdx.x) & 31, k = k0 + 4 * (lane & 3);
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {
            const int column = min(unit.column + 2 * (lane >> 2) + h, unit.rows - 1);
            const float* const from = unit.w + static_cast<long long>(column) * unit.ld + k;
            bias[h] = unit.b[column];
            if (quads && k0 + heads_depth <= unit.depth) {
                FX_UNROLL
                for (int p = 0; p < PANELS; ++p) fx_load(raw[p][h], from + 16 * p, 4, true);
            } else {
                FX_UNROLL
                for (int p = 0; p < PANELS; ++p) fx_load(raw[p][h], from + 16 * p, unit.depth - k - 16 * p, false);
            }
        }
    }

    // Waits for them.
    __device__ __forceinline__ void round() {
        FX_UNROLL
        for (int p = 0; p < PANELS; ++p) {
            FX_UNROLL
            for (int h = 0; h < 2; ++h) {
                if constexpr (WORD == 0) {
                    FX_UNROLL
                    for (int e = 0; e < 4; ++e) words[p][4 * h + e] = __float_as_uint(raw[p][h][e]);
                } else {
                    unsigned own[4 / WORD];
                    fx_linear_words<WORD>(own, raw[p][h]);
                    FX_UNROLL
                    for (int e = 0; e < 4 / WORD; ++e) words[p][h + 2 * e] = own[e];
                }
            }
        }
    }
};

// A unit's columns for 16 rows, over 128 k, on the tensor cores, weights by rows: to `out` [16, out_stride] with the
// bias, from the second time on to what it holds. `rows`: [16, stride] words.
template <int WORD>
__device__ __forceinline__ void heads_multiply(float* out, int out_stride, const float* rows, int stride, int k0,
                                               const HeadsWeights<WORD>& weights) {
    constexpr int STEPS = 2 / WORD, WORDS = 4 / WORD, PANELS = HeadsWeights<WORD>::PANELS;
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
    const float* const from = rows + g * stride + (k0 + 4 * t) / WORD;
    float sums[1][2][4] = {};
    FX_UNROLL
    for (int p = 0; p < PANELS; ++p) {
        unsigned a[1][STEPS][4], b[2][STEPS][2];
        FX_UNROLL
        for (int e = 0; e < 4 * STEPS; ++e) a[0][e / 4][e % 4] = weights.words[p][e];
        FX_UNROLL
        for (int i = 0; i < 2; ++i) {
            const float* const at = from + 8 * i * stride + 16 * p / WORD;
            float held[WORDS];
            if constexpr (WORD == 1) {
                fx_load(held, at, 4, true);
            } else {
                const float2 pair = *reinterpret_cast<const float2*>(at);
                held[0] = pair.x;
                held[1] = pair.y;
            }
            FX_UNROLL
            for (int e = 0; e < WORDS; ++e) b[i][e / 2][e % 2] = __float_as_uint(held[e]);
        }
        fx_mma<WORD, STEPS, 1>(sums, a, b);
    }
    FX_UNROLL
    for (int i = 0; i < 2; ++i) {
        FX_UNROLL
        for (int h = 0; h < 2; ++h) {  // row 8 i + 2 t + h, columns 2 g and 2 g + 1
            float2* const to = reinterpret_cast<float2*>(out + (8 * i + 2 * t + h) * out_stride + 2 * g);
            const float2 before = k0 > 0 ? *to : make_float2(weights.bias[0], weights.bias[1]);
            *to = make_float2(sums[0][i][h] + before.x, sums[0][i][2 + h] + before.y);
        }
    }
}

// The same in float32: two rows at a time, whose sums over a lane's own k are added over the four lanes that share the
// columns, a row and column for each.
__device__ __forceinline__ void heads_multiply(float* out, int out_stride, const float* rows, int stride, int k0,
                                               const HeadsWeights<0>& weights) {
    const int lane = static_cast<int>(threadIdx.x) & 31, t = lane & 3;
    const float* from = rows + k0 + 4 * t;
    float* to = out + (t >> 1) * out_stride + 2 * (lane >> 2) + (t & 1);
    const float bias = (t & 1) != 0 ? weights.bias[1] : weights.bias[0];
#pragma unroll 1
    for (int row = 0; row < 16; row += 2, from += 2 * stride, to += 2 * out_stride) {
        float sums[4] = {};
        FX_UNROLL
        for (int p = 0; p < HeadsWeights<0>::PANELS; ++p) {
            FX_UNROLL
            for (int r = 0; r < 2; ++r) {
                float v[4];
                fx_load(v, from + r * stride + 16 * p, 4, true);
                FX_UNROLL
                for (int e = 0; e < 8; ++e) {
                    float& sum = sums[2 * r + e / 4];
                    sum = fmaf(v[e % 4], __uint_as_float(weights.words[p][e]), sum);
                }
            }
        }
        FX_UNROLL
        for (int half = 2; half > 0; half /= 2) {
            const bool upper = (t & half) != 0;
            FX_UNROLL
            for (int s = 0; s < half; ++s) {
                const float sent = upper ? sums[s] : sums[s + half];
                sums[s] = (upper ? sums[s + half] : sums[s]) + __shfl_xor_sync(0xffffffffu, sent, half);
            }
        }
        *to = sums[0] + (k0 > 0 ? *to : bias);
    }
}

// Begins to copy `count` numbers of a row, and zeros up to a whole quad; by one warp.
__device__ __forceinline__ void heads_copy(float* to, const float* from, bool quads, int count) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const FxShared place = fx_shared(to);
    if (quads) {
#pragma unroll 1
        for (int k = 4 * lane; k < count; k += 128) fx_copy_quad(place + 4 * k, from + k, min(count - k, 4));
    } else {
#pragma unroll 1
        for (int k = lane; k < heads_up(count, 4); k += 32) {
            fx_copy_word(place + 4 * k, from + (k < count ? k : 0), k < count);
        }
    }
}

// The lane's four numbers of a row as words, in place: two bf16 numbers share one.
template <int WORD>
__device__ __forceinline__ void heads_store(float* row, int k, float (&v)[4]) {
    if constexpr (WORD == 2) {
        unsigned words[2];
        fx_linear_words<2>(words, v);
        *reinterpret_cast<uint2*>(row + k / 2) = make_uint2(words[0], words[1]);
    } else {
        FX_UNROLL
        for (int e = 0; e < 4 && WORD == 1; ++e) v[e] = __uint_as_float(fx_tf32(v[e]));
        fx_store(row + k, v, 4, true);
    }
}

// Finishes row i of the hidden layer and turns it and that of the value head into words, in place, up to their padded
// depths; by the warp that copied them. `z`: of lane c the last columns' number c; `kept`: where to store the row, or
// null.
template <int WORD>
__device__ __forceinline__ void heads_finish(const HeadsSizes& sizes, const HeadsLayout<WORD>& at, int i, float z,
                                             int columns, float* kept) {
    const int lane = static_cast<int>(threadIdx.x) & 31, depth = sizes.depth, value_depth = sizes.value_depth;
    const int padded = heads_up(depth, heads_depth), value_padded = heads_up(value_depth, heads_depth);
    float *const row = at.hidden + i * at.stride, *const value_row = at.value_hidden + i * at.value_stride;
#pragma unroll 1
    for (int first = 0; first < max(padded, value_padded); first += heads_depth) {
        const int k = first + 4 * lane;
        float v[4] = {}, value[4] = {};
        if (k < depth) fx_load(v, row + k, 4, true);
        if (k < value_depth) fx_load(value, value_row + k, 4, true);
        const float* w = at.late + k;
#pragma unroll 1
        for (int c = 0; c < columns; ++c, w += padded) {
            const float factor = __shfl_sync(0xffffffffu, z, c);
            float own[4] = {};
            if (first < padded) fx_load(own, w, 4, true);
            FX_UNROLL
            for (int e = 0; e < 4; ++e) v[e] = fmaf(factor, own[e], v[e]);
        }
        FX_UNROLL
        for (int e = 0; e < 4; ++e) v[e] = k + e < depth ? fx_activate(FX_RELU, v[e]) : 0.0f;  // an infinite z gave NaN
        if (kept != nullptr) fx_store(fx_global(kept) + k, v, depth - k, sizes.quads);
        if constexpr (WORD == 2) __syncwarp();  // the rows are read as far as this overwrites them
        if (first < padded) heads_store<WORD>(row, k, v);
        if (first < value_padded) heads_store<WORD>(value_row, k, value);
    }
}

// The wires of a warp's rows, which are heads_warps apart from `row` on; `left` rows of the block follow from there on.
// Lane l gets that of number l / (16 / ROWS) % ROWS. `x`: the lane's first number of each; `w`, `b`: the lane's first
// weights, the biases.
template <int ROWS>
__device__ __forceinline__ float heads_wires(const Heads& record, int row, int left, const float (&x)[ROWS],
                                             const float (&w)[2], const float (&b)[2]) {
    const int lane = static_cast<int>(threadIdx.x) & 31, depth = record.bar_depth;
    float logits[2 * ROWS];
    FX_UNROLL
    for (int r = 0; r < ROWS; ++r) {
        logits[r] = x[r] * w[0];
        logits[ROWS + r] = x[r] * w[1];
    }
#pragma unroll 1
    for (int k = lane + 32; k < depth; k += 32) {
        const float* const more = fx_global(record.bar_w) + k;
        FX_UNROLL
        for (int r = 0; r < ROWS; ++r) {
            const int which = min(row + heads_warps * r, record.rows - 1);
            const float own = c51_row(record.bar_hidden, record.ld_bar_hidden, which)[k];
            logits[r] = fmaf(own, more[0], logits[r]);
            logits[ROWS + r] = fmaf(own, more[record.ld_bar_w], logits[ROWS + r]);
        }
    }
    const float own = fx_warp_sums(logits), other = __shfl_xor_sync(0xffffffffu, own, 16);
    const float down = (lane < 16 ? own : other) + b[0], up = (lane < 16 ? other : own) + b[1];
    const float peak = fmaxf(down, up), low = expf(down - peak), high = expf(up - peak);
    const float wire = fx_divide(high - low, high + low);
    const int further = heads_warps * (lane / (16 / ROWS) % ROWS);
    if ((lane & (16 | (16 / ROWS - 1))) == 0 && further < left) {
        if (record.wire != nullptr) *c51_row(record.wire, record.wire_stride, row + further) = wire;
        if (record.bar_logits != nullptr) {
            float* const to = c51_row(record.bar_logits, record.ld_bar_logits, row + further);
            to[0] = down;
            to[1] = up;
        }
    }
    return wire;
}

// Whether the lane has an atom number c.
__device__ __forceinline__ bool heads_owns(int c, int lane, int atoms) {
    return c < HeadsShare::SURE || HeadsShare::LANES * c + lane < atoms;
}

// Largest x of the lanes of a row; anything where one of them is NaN.
__device__ __forceinline__ float heads_max(float x) {
    if constexpr (HeadsShare::LANES == 32) return c51_warp_max(x);
    FX_UNROLL
    for (int offset = HeadsShare::LANES / 2; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    }
    return x;
}

// The lane's atoms of a row, 0 beyond the last and of a row that does not exist. `from` points to its first.
template <int CHUNKS>
__device__ __forceinline__ void heads_atoms(float (&x)[CHUNKS], const float* from, int lane, int atoms, bool exists) {
    FX_UNROLL
    for (int c = 0; c < CHUNKS; ++c) {
        x[c] = exists && heads_owns(c, lane, atoms) ? from[HeadsShare::LANES * c] : 0.0f;
    }
}

// Of the exponentials of an action's logits x, given -peak log2 e, the sum over the lane's atoms, to sums[0], and the
// moment, to sums[4]. What lies 32 atoms apart is added first, then 16, 8, ..., here or by heads_sums, so that bits do
// not depend on LANES.
template <int CHUNKS>
__device__ __forceinline__ void heads_exponentials(float* sums, const float (&x)[CHUNKS], const float (&z)[CHUNKS],
                                                   float shift) {
    constexpr int NEAR = 32 / HeadsShare::LANES;
    float sum[CHUNKS], moment[CHUNKS];
    FX_UNROLL
    for (int c = 0; c < CHUNKS; ++c) {
        const float e = c51_power(fmaf(x[c], c51_bits, shift));
        sum[c] = e;
        moment[c] = __fmul_rn(z[c], e);  // not part of a later sum, whatever CHUNKS is
        if (c < NEAR) continue;
        sum[c - NEAR] += e;
        moment[c - NEAR] = fmaf(z[c], e, moment[c - NEAR]);
    }
    FX_UNROLL
    for (int half = NEAR / 2; half > 0; half /= 2) {
        FX_UNROLL
        for (int c = 0; c < half && c + half < CHUNKS; ++c) {
            sum[c] += sum[c + half];
            moment[c] += moment[c + half];
        }
    }
    sums[0] = sum[0];
    sums[4] = moment[0];
}

// The sums and moments of GROUP actions over the lanes of a row: lane l gets number l / (LANES / 8). Each exchange
// halves what is left to add, as in fx_warp_sums; x is used up.
__device__ __forceinline__ float heads_sums(float (&x)[8], int lane) {
    constexpr int LANES = HeadsShare::LANES, GROUP = HeadsShare::GROUP;
    FX_UNROLL
    for (int half = 4; half > 0; half /= 2) {
        const int offset = LANES / 8 * half;
        const bool upper = (lane & offset) != 0;
        FX_UNROLL
        for (int i = 0; i < half && i < GROUP; ++i) {
            const float other = half == 4 || i + half < GROUP ? x[i + half] : 0.0f;
            const float sent = upper ? x[i] : other;
            x[i] = (upper ? other : x[i]) + __shfl_xor_sync(0xffffffffu, sent, offset);
        }
    }
    return fx_lanes_sum<LANES / 8>(x[0]);
}

// q, lse, policy and best of the block's rows (dueling.cu), LANES lanes for each. The rows of a warp lie so far apart
// that no access meets a bank twice; those that do not exist are worked on without results.
template <int WORD>
__device__ __forceinline__ void heads_softmax(const Heads& record, const HeadsSizes& sizes,
                                              const HeadsLayout<WORD>& at, int first_row) {
    constexpr int LANES = HeadsShare::LANES, CHUNKS = HeadsShare::CHUNKS, GROUP = HeadsShare::GROUP;
    constexpr int WARPS = LANES / 4;  // that share eight rows
    constexpr int NONE = 0x7fffffff;
    const unsigned thread = threadIdx.x, warp = thread >> 5;
    const int lane = static_cast<int>(thread % LANES), octet = static_cast<int>(warp / WARPS * 8);
    const int i = octet + static_cast<int>(warp % WARPS + thread % 32 / LANES * WARPS);
    if (heads_warps * 32 / LANES > sizes.height && octet >= sizes.height) return;
    const int row = first_row + i, atoms = sizes.atoms, actions = sizes.actions;
    const float* const adv = at.adv + i * at.adv_stride + lane;

    float x[GROUP][CHUNKS], base[CHUNKS], total[CHUNKS], z[CHUNKS];
    heads_atoms(base, at.v + i * at.v_stride + lane, lane, atoms, true);
#pragma unroll 1
    for (int first = 0; first < actions; first += GROUP) {
        FX_UNROLL
        for (int g = 0; g < GROUP; ++g) {
            heads_atoms(x[g], adv + (first + g) * atoms, lane, atoms, first + g < actions);
            FX_UNROLL
            for (int c = 0; c < CHUNKS; ++c) total[c] = first + g > 0 ? total[c] + x[g][c] : x[g][c];
        }
    }
    const float share = c51_divide(1.0f, static_cast<float>(actions));
    FX_UNROLL
    for (int c = 0; c < CHUNKS; ++c) {
        base[c] = heads_owns(c, lane, atoms) ? fmaf(-share, total[c], base[c]) : -FX_INF;  // else no probability
        z[c] = fmaf(static_cast<float>(lane) + static_cast<float>(LANES * c), record.spacing, record.v_min);
    }

    const int mine = lane / (LANES / 8) & 3;
    const bool has_moment = (lane & (LANES / 2)) != 0;
    const bool exists = row < record.rows, stores = exists && !has_moment && lane % (LANES / 8) == 0;
    float value = 0.0f, top = -FX_INF;  // of the lane's own actions
    int best = NONE;
#pragma unroll 1
    for (int first = 0; first < actions; first += GROUP) {
        float peak[GROUP], sums[8];
        FX_UNROLL
        for (int g = 0; g < GROUP; ++g) {
            if (actions > GROUP) heads_atoms(x[g], adv + (first + g) * atoms, lane, atoms, first + g < actions);
            FX_UNROLL
            for (int c = 0; c < CHUNKS; ++c) {
                x[g][c] += base[c];
                peak[g] = c > 0 ? fmaxf(peak[g], x[g][c]) : x[g][c];
            }
        }
        FX_UNROLL
        for (int g = 0; g < GROUP; ++g) {
            peak[g] = heads_max(peak[g]);
            heads_exponentials(sums + g, x[g], z, -c51_bits * peak[g]);
        }
        const float own = heads_sums(sums, lane), other = __shfl_xor_sync(0xffffffffu, own, LANES / 2);
        const float sum = has_moment ? other : own;
        const int a = first + mine;
        value = c51_divide(has_moment ? own : other, sum);
        if (a < actions && value > top) {
            top = value;
            best = a;
        }
        if (a >= actions || !stores) continue;
        c51_row(record.q, record.ld_q, row)[a] = value;
        if (record.lse != nullptr) {
            float shift = peak[0];
            FX_UNROLL
            for (int g = 1; g < GROUP; ++g) shift = g == mine ? peak[g] : shift;
            c51_row(record.lse, record.ld_lse, row)[a] = shift + c51_log(sum);
        }
    }

    if (record.best == nullptr && record.policy == nullptr) return;
    float highest = top;
    FX_UNROLL
    for (int offset = LANES / 4; offset >= LANES / 8; offset /= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, offset));
    }
    if (record.best != nullptr) {
        best = top == highest ? best : NONE;
        FX_UNROLL
        for (int offset = LANES / 4; offset >= LANES / 8; offset /= 2) {
            best = min(best, __shfl_xor_sync(0xffffffffu, best, offset));
        }
        if (stores && mine == 0) *c51_row(record.best, record.best_stride, row) = best == NONE ? 0 : best;
    }
    if (record.policy == nullptr) return;
    // A single group is still in registers.
    const bool stored = actions > GROUP;
    if (stored) __syncwarp();
    const auto weigh = [&](int a) {
        return c51_exp((stored ? c51_row(record.q, record.ld_q, row)[a] : value) - highest);
    };
    float weight = 0.0f, sum = 0.0f;
#pragma unroll 1
    for (int a = mine; a < actions && exists; a += 4) {
        weight = weigh(a);
        sum += weight;
        if (!stored) break;
    }
    FX_UNROLL
    for (int offset = LANES / 4; offset >= LANES / 8; offset /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    const float inverse = c51_divide(1.0f, sum);
#pragma unroll 1
    for (int a = mine; a < actions && stores; a += 4) {
        if (stored) weight = weigh(a);
        c51_row(record.policy, record.ld_policy, row)[a] = weight * inverse;
        if (!stored) break;
    }
}

// Copies the block's rows, `exist` of `count` numbers, to a result that may be null, whose rows start at 16 bytes where
// `quads` says so.
__device__ __forceinline__ void heads_keep(float* to, int ld, int first_row, int exist, const float* from, int stride,
                                           int count, bool quads) {
    const int lane = static_cast<int>(threadIdx.x & 31u), whole = quads ? count & ~3 : 0;
    if (to == nullptr) return;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x >> 5); i < exist; i += heads_warps) {
        float* const row = c51_row(to, ld, first_row + i);
        const float* const own = from + i * stride;
#pragma unroll 2
        for (int first = 0; first < whole; first += 128) {
            const int k = first + 4 * lane;
            if (k < whole) *reinterpret_cast<float4*>(row + k) = *reinterpret_cast<const float4*>(own + k);
        }
#pragma unroll 1
        for (int k = whole + lane; k < count; k += 32) row[k] = own[k];
    }
}

// WORD: 0 float32, 1 tf32, 2 bf16.
template <int WORD>
__device__ __forceinline__ void heads_block(const Heads* table, int count, float* shared) {
    __shared__ Heads place;
    int tile;
    const Heads& record = fx_record(table, count, tile, place);
    const HeadsSizes sizes = heads_sizes(record);
    const HeadsLayout<WORD> at(sizes, shared);
    const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp = thread >> 5;
    const int first_row = tile * sizes.height, exist = min(sizes.height, record.rows - first_row);
    const int columns = record.columns, units = HeadsUnit::count(sizes);

    HeadsWeights<WORD> weights;
    if (warp < units) weights.fetch(HeadsUnit(record, sizes, warp), 0, sizes.quads);
    const int padded = heads_up(sizes.depth, heads_depth);
#pragma unroll 1
    for (int c = 0; c < columns; ++c) {
#pragma unroll 1
        for (int k = thread; k < padded; k += 32 * heads_warps) {
            const float* const from = c51_row(record.late, record.ld_late, min(k, sizes.depth - 1)) + c;
            fx_copy_word(fx_shared(at.late + c * padded + k), from, k < sizes.depth);
        }
    }
    const auto copy_rows = [&] {
#pragma unroll 1
        for (int first = 0; first < sizes.height; first += heads_warps) {
            const int i = first + warp, row = first_row + i;
            if (i >= exist) continue;
            heads_copy(at.value_hidden + i * at.value_stride,
                       c51_row(record.value_hidden, record.ld_value_hidden, row), sizes.quads, sizes.value_depth);
            heads_copy(at.hidden + i * at.stride, c51_row(record.hidden, record.ld_hidden, row), sizes.quads,
                       sizes.depth);
        }
    };
    // Nothing that is under way is waited for before that: a block may enter when its predecessors are through.
    if (record.early) copy_rows();
    fx_wait();
    fx_trigger();
    if (!record.early) copy_rows();
    fx_copy_commit();
    const bool has_wire = record.bar_hidden != nullptr;
    float bar_w[2] = {}, bar_b[2] = {};
    FX_UNROLL
    for (int h = 0; h < 2; ++h) {
        if (has_wire && lane < record.bar_depth) bar_w[h] = fx_global(record.bar_w)[h * record.ld_bar_w + lane];
        if (has_wire) bar_b[h] = fx_global(record.bar_b)[h];
    }
    // What the last columns are made of, or they themselves: on its way for all rows of the warp at once.
    float z[HeadsShare::ROWS] = {};
    FX_UNROLL
    for (int r = 0; r < HeadsShare::ROWS; ++r) {
        if (heads_warps * r >= sizes.height) break;
        const int row = min(first_row + heads_warps * r + warp, record.rows - 1);
        const float* const from = has_wire ? c51_row(record.bar_hidden, record.ld_bar_hidden, row)
                                           : c51_row(record.others, record.ld_others, row);
        z[r] = lane < (has_wire ? record.bar_depth : columns) ? fx_global(from)[lane] : 0.0f;
    }
    if (warp < units) weights.round();
    fx_copy_wait<0>();
    __syncthreads();
    if (has_wire) {
        z[0] = heads_wires(record, first_row + warp, exist - warp, z, bar_w, bar_b);
        FX_UNROLL
        for (int r = 1; r < HeadsShare::ROWS; ++r) z[r] = __shfl_sync(0xffffffffu, z[0], 16 / HeadsShare::ROWS * r);
    }
    FX_UNROLL
    for (int r = 0; r < HeadsShare::ROWS; ++r) {
        if (heads_warps * r >= sizes.height) break;
        const int i = heads_warps * r + warp;
        const bool keeps = record.kept && i < exist;
        float* const kept = keeps ? c51_row(record.hidden, record.ld_hidden, first_row + i) : nullptr;
        heads_finish<WORD>(sizes, at, i, z[r], columns, kept);
    }
    __syncthreads();
#pragma unroll 1
    for (int begun = 0; begun < units; begun += heads_warps) {
        const int unit = begun + warp;
        if (unit >= units) break;
        const HeadsSizes sizes = heads_sizes(record);  // found out afresh: kept, they would take up registers
        const HeadsLayout<WORD> at(sizes, shared);
        const HeadsUnit now(record, sizes, unit);
        const float* const rows = now.value ? at.value_hidden : at.hidden;
        const int stride = now.value ? at.value_stride : at.stride;
        const int out_stride = now.value ? at.v_stride : at.adv_stride;
        float* const out = (now.value ? at.v : at.adv) + now.column;
#pragma unroll 1
        for (int k0 = 0; k0 < now.depth; k0 += heads_depth) {
            if (begun > 0 || k0 > 0) {
                weights.fetch(now, k0, sizes.quads);
                weights.round();
            }
#pragma unroll 1
            for (int i = 0; i < sizes.height; i += 16) {
                heads_multiply(out + i * out_stride, out_stride, rows + i * stride, stride, k0, weights);
            }
        }
    }
    __syncthreads();
    {
        const HeadsSizes sizes = heads_sizes(record);
        const HeadsLayout<WORD> at(sizes, shared);
        heads_keep(record.v, record.ld_v, first_row, exist, at.v, at.v_stride, sizes.atoms, sizes.quads);
        heads_keep(record.adv, record.ld_adv, first_row, exist, at.adv, at.adv_stride, sizes.actions * sizes.atoms,
                   sizes.quads);
        heads_softmax(record, sizes, at, first_row);
    }
}
