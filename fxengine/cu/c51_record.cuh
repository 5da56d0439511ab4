// The losses of the C51 heads and their gradient, all D branches of a row in one pass: the record of c51.cu and
// c51_many.cu.
//   z_k        = v_min + k spacing;  top = atoms - 1
//   m          = project(reward + discount z, p'), p' = softmax of branch d's target logits of action best:
//                atom k receives sum_j p'_j max(0, 1 - |u_j - k|), u_j = (reward + discount z_j - v_min) / spacing,
//                limited to [0, top]. A discount of 0 ignores what the target networks hold.
//   c51_d      = -sum_k m_k log p_d[action, k];      td[b] = mean_d c51_d
//   cql_d      = logsumexp_a q_d[a] - q_d[action]
//   distill_d  = (q_d[action] - mean_i theta[i, action])^2 / 2
//   partials   : per tile, sum over its rows of weight[b] td[b], of mean_d cql_d, of mean_d distill_d
// Gradient, with w_c51, w_cql, w_distill read on the device (null = that loss is absent; 0 gives an exact 0, whatever
// the rest holds), all divided by rows * D:
//   dq_d[a]        = w_cql (softmax(q_d)[a] - [a = action]) + w_distill (q_d[action] - mean theta) [a = action]
//   g_d[a, k]      = dq_d[a] p_d[a, k] (z_k - q_d[a]) + w_c51 weight[b] (p_d[a, k] sum(m) - m_k) [a = action]
//   dadv_d[a, k]   = g_d[a, k] - mean_a g_d[a, k];   dv[k] = sum_d sum_a g_d[a, k]      (=, never +=)
//   Heads without a value (v and v_target null) are plain: adv holds the logits, and dadv_d = g_d.
// An infinite reward lands on the outermost atom, as the projection says; a NaN reward makes the row NaN, and so does
// an action outside [0, n_d), which is looked up nowhere.
#pragma once
#include "c51.cuh"

struct C51 {
    int first_tile;
    int tiles;
    const float* v;              // [rows, atoms], online networks at s; null: plain heads
    const float* adv[8];         // per branch [rows, n_d * atoms]
    const float* q;              // [rows, all actions], from fx_dueling
    const float* lse;            // [rows, all actions], from fx_dueling
    const float* v_target;       // [rows, atoms], target networks at s'; null with v
    const float* adv_target[8];  // per branch [rows, n_d * atoms]
    const float* lse_target;     // [rows, all actions]
    const float* theta;          // [rows, quantiles, all actions], IQN at s, or null: no distillation
    const int* actions;          // [rows, branches]
    const int* best;             // [rows, branches], greedy actions at s'
    const float* reward;         // [rows]
    const float* discount;       // [rows]
    const float* weight;         // [rows], importance weights
    const float* w_c51;          // one float or null
    const float* w_cql;          // one float or null
    const float* w_distill;      // one float or null
    float* dadv[8];              // per branch [rows, n_d * atoms], all null: no gradient
    float* dv;                   // [rows, atoms], null without dadv or v
    float* td;                   // [rows] or null
    double* partials[3];         // of c51, cql and distill: [tiles] or null
    int ld_adv[8];               // elements between rows
    int ld_adv_target[8];
    int ld_dadv[8];
    int ld_v;
    int ld_q;
    int ld_lse;
    int ld_v_target;
    int ld_lse_target;
    int ld_theta;                // elements between quantiles
    int ld_actions;
    int ld_best;
    int ld_dv;
    int offset[8];               // first column of each branch in arrays over all actions
    int sizes[8];                // n_d
    int branches;                // D, 1 to 8
    int rows;
    int atoms;                   // 2 to 256
    int quantiles;
    float v_min;
    float spacing;               // (v_max - v_min) / (atoms - 1)
    double atoms_per_unit;       // (atoms - 1) / (v_max - v_min)
    double branch_share;         // 1 / D
};

__device__ __forceinline__ float c51_signal(const float* signal) {
    return signal != nullptr ? *fx_global(signal) : 0.0f;
}
