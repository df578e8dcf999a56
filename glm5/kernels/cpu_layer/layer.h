// What the host hands over: one layer's sizes and weights, and one step's rows. structs.py has the same fields.
#pragma once

#include <cstdint>

namespace glm5 {

// Norms as in the checkpoint, matrices packed (products.h; packed.py packs them). Null: the layer has no such part.
struct Layer {
    int32_t hidden, heads, q_rank, kv_rank, nope, rope, v_dim;
    int32_t index_heads, index_dim, index_topk;
    int32_t dense_width;                                  // of the gated MLP, or of the shared expert
    int32_t experts, active, expert_width, norm_weights;  // experts 0: a dense layer
    float eps, lora_eps, index_eps, routed_scale;
    const float *input_norm, *q_a_norm, *kv_a_norm, *index_k_weight, *index_k_bias, *post_norm, *router_bias;
    // Side by side: q_a, kv_a, and of an indexer its key and the weights of its heads.
    const float* of_input;
    const float *q_b, *key_of_heads, *value_of_heads, *o;  // kv_b by heads: [kv_rank, nope] and [v_dim, kv_rank] each
    const float* index_q;                                  // columns [index_dim, whole_lanes(index_heads)]
    const float *gate_up, *down, *router, *experts_gate_up, *experts_down;
};

// T rows. Logical key s of the request of row t lies on page table[request[t] * table_step + s / page_size], at offset
// s % page_size; the row sees keys 0 .. end[t] - 1 and its own key goes to slot place[t] = page * page_size + offset.
// As many threads as there are may be used.
struct Step {
    int32_t rows, page_size, table_step, table_columns, threads;
    const int32_t *table, *request, *end;
    const int64_t* place;

    const int32_t* table_of(int row) const { return table + int64_t(request[row]) * table_step; }

    // Keys that a row sees, none beyond the page table.
    int num_visible(int row) const {
        return end[row] < table_columns * page_size ? end[row] : table_columns * page_size;
    }
};

// A layer's part of the pages: row s of page p at base + p * page_step + s * row_step, in floats.
struct Pool {
    float* base;
    int64_t page_step, row_step;

    float* row(int64_t page, int64_t offset) const { return base + page * page_step + offset * row_step; }

    float* place(const Step& step, int row) const {
        return this->row(step.place[row] / step.page_size, step.place[row] % step.page_size);
    }
};

// Where the experts of rows are reported: those of row t from to[t * step] on. Null: nowhere.
struct Routing {
    int16_t* to;
    int64_t step;
};

// Keys that a row reads: [T, index_topk], ascending, -1 behind them. Null: all that it sees.
struct Selection {
    int32_t* keys;
    bool is_given;  // by an earlier layer
};

}  // namespace glm5
