// The host's arguments: sizes and weights of one layer, and rows of one step. structs.py has the same fields.
#pragma once

#include <cstdint>

namespace glm5 {

// Weights as in the checkpoint, [out, in] each. Null: the layer has no such part.
struct Layer {
    int32_t hidden, heads, q_rank, kv_rank, nope, rope, v_dim;
    int32_t index_heads, index_dim, index_topk;
    int32_t dense_width;                                  // of the gated MLP, or of the shared expert
    int32_t experts, active, expert_width, norm_weights;  // experts 0: a dense layer
    float eps, lora_eps, index_eps, routed_scale;
    const float *input_norm, *q_a, *q_a_norm, *q_b, *kv_a, *kv_a_norm, *kv_b, *o;
    const float *index_q, *index_k, *index_k_weight, *index_k_bias, *index_w;
    const float *post_norm, *gate, *up, *down;
    const float *router, *router_bias, *experts_gate_up, *experts_down;
};

// T rows. Logical key s of the request of row t lies on page table[request[t] * table_step + s / page_size], at offset
// s % page_size; the row sees keys 0 .. end[t] - 1 and its own key goes to slot place[t] = page * page_size + offset.
struct Step {
    int32_t rows, page_size, table_step, table_columns;
    const int32_t *table, *request, *end;
    const int64_t* place;
};

// A layer's part of the pages: row s of page p at base + p * page_step + s * row_step, in floats.
struct Pool {
    float* base;
    int64_t page_step, row_step;

    float* row(int64_t page, int64_t offset) const { return base + page * page_step + offset * row_step; }
};

// Keys that a row reads: [T, index_topk], ascending, then -1. Null: all visible keys.
struct Selection {
    int32_t* keys;
    int32_t is_given;  // by an earlier layer
};

}  // namespace glm5
