// fx_dueling: one branch of the C51 heads, forward, from the outputs of its layers (dueling.cuh; heads.cuh makes those
// too). Its backward is in c51.cu, where the loss is. Everything is overwritten; lse, policy and best may be null. A
// warp works on a row; a tile has 8 rows.
#include "dueling.cuh"

struct Dueling {
    int first_tile;
    int tiles;
    const float* v;       // [rows, atoms], or null: adv holds the logits
    const float* adv;     // [rows, actions * atoms]
    float* q;             // [rows, actions]
    float* lse;           // [rows, actions] or null
    float* policy;        // [rows, actions] or null
    int* best;            // [rows], best_stride apart, or null
    int ld_v;             // elements between rows
    int ld_adv;
    int ld_q;
    int ld_lse;
    int ld_policy;
    int best_stride;
    int rows;
    int actions;
    int atoms;            // 2 to 256
    float v_min;
    float spacing;        // (v_max - v_min) / (atoms - 1)
};

struct DuelingRow {
    const Dueling& record;
    int row, lane;
    int actions, atoms;
    float v_min, spacing;

    __device__ __forceinline__ DuelingRow(const Dueling& of, int which)
        : record(of), row(which), lane(static_cast<int>(threadIdx.x & 31u)), actions(of.actions), atoms(of.atoms),
          v_min(of.v_min), spacing(of.spacing) {}
    __device__ __forceinline__ const float* v() const {
        return record.v != nullptr ? c51_row(record.v, record.ld_v, row) + lane : nullptr;
    }
    __device__ __forceinline__ const float* adv() const { return c51_row(record.adv, record.ld_adv, row) + lane; }
    __device__ __forceinline__ float* q() const { return c51_row(record.q, record.ld_q, row); }
    __device__ __forceinline__ float* lse() const { return dueling_at(record.lse, record.ld_lse, row); }
    __device__ __forceinline__ float* policy() const { return dueling_at(record.policy, record.ld_policy, row); }
    __device__ __forceinline__ int* best() const { return dueling_at(record.best, record.best_stride, row); }
};

extern "C" __global__ void __launch_bounds__(256) fx_dueling(const Dueling* table, int count) {
    int tile;
    const Dueling record = fx_record(table, count, tile);
    const int row = tile * 8 + static_cast<int>(threadIdx.x >> 5);
    fx_wait();
    fx_trigger();
    if (row >= record.rows) return;
    const DuelingRow place(record, row);
    if (record.atoms <= 64) {
        dueling_row<2, 4>(place);
    } else if (record.atoms <= 128) {
        dueling_row<4, 2>(place);
    } else {
        dueling_row<8, 1>(place);
    }
}
