// Sparse latent attention of few rows: x += Wo concat_h(softmax(q_h . latent) latent Wv_h), selected keys.
#pragma once

#include <algorithm>
#include <vector>

#include "layer.h"
#include "rows.h"

namespace glm5 {

constexpr int BLOCK = 64;                // keys scored at a time
constexpr int64_t MAX_SCORES = 1 << 20;  // in memory at a time, except that one row may have more

inline const int32_t* table_of(const Step& step, int row) { return step.table + int64_t(step.request[row]) * step.table_step; }

// Number of visible keys of a row, limited by the page table.
inline int num_visible(const Step& step, int row) { return std::min(step.end[row], step.table_columns * step.page_size); }

// score[s] = sum over heads of w relu(q . key[s]), for up to 64 keys in transposed layout, [index_dim, BLOCK].
inline void score_block(const Layer& layer, const float* q, const float* w, const float* key, float* score) {
    constexpr int PARTS = BLOCK / LANES, HEADS = 4;
    Lanes total[PARTS] = {};
    int head = 0;
    for (; head + HEADS <= layer.index_heads; head += HEADS) {
        Lanes hits[HEADS][PARTS] = {};
        const float* query = q + int64_t(head) * layer.index_dim;
        for (int at = 0; at < layer.index_dim; ++at)
            for (int part = 0; part < PARTS; ++part) {
                Lanes keys = load(key + at * BLOCK + part * LANES);
                for (int j = 0; j < HEADS; ++j) hits[j][part] += keys * query[j * layer.index_dim + at];
            }
        for (int j = 0; j < HEADS; ++j)
            for (int part = 0; part < PARTS; ++part)
                total[part] += (hits[j][part] > 0.0f ? hits[j][part] : Lanes{}) * w[head + j];
    }
    for (; head < layer.index_heads; ++head) {
        Lanes hits[PARTS] = {};
        for (int at = 0; at < layer.index_dim; ++at)
            for (int part = 0; part < PARTS; ++part)
                hits[part] += load(key + at * BLOCK + part * LANES) * q[int64_t(head) * layer.index_dim + at];
        for (int part = 0; part < PARTS; ++part) total[part] += (hits[part] > 0.0f ? hits[part] : Lanes{}) * w[head];
    }
    for (int part = 0; part < PARTS; ++part) store(score + part * LANES, total[part]);
}

// A float as an integer of the same order; NaN has an arbitrary place in it.
inline uint32_t ordered(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (bits == 0x80000000u) bits = 0;  // -0 equals 0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Indices of the `count` highest scores, ascending; among equal scores the first are chosen.
inline void top_k(const float* score, int num_keys, int count, std::vector<uint32_t>& order, int32_t* keys) {
    order.resize(num_keys);
    for (int key = 0; key < num_keys; ++key) order[key] = ordered(score[key]);
    std::nth_element(order.begin(), order.begin() + (count - 1), order.end(), std::greater<uint32_t>());
    uint32_t least = order[count - 1];
    int equal = count;
    for (int at = 0; at < count; ++at) equal -= order[at] > least;
    int found = 0;
    for (int key = 0; found < count; ++key) {
        uint32_t value = ordered(score[key]);
        if (value > least || (value == least && equal-- > 0)) keys[found++] = key;
    }
}

struct Scratch {
    std::vector<float> x, q_latent, q, kv, q_index, w_index, absorbed, out, values, score, key, logits, gate, up;
    std::vector<float> choice, gathered, routed, y;
    std::vector<uint32_t> order;
    std::vector<int32_t> keys, chosen;
    std::vector<float> weight;
};

inline float* sized(std::vector<float>& values, int64_t count) {
    if (int64_t(values.size()) < count) values.resize(count);
    return values.data();
}

// Keys [index_dim, BLOCK] of a block, from rows [*, index_dim]; the block may be shorter.
inline void transpose(const Pool& pool, const Step& step, const int32_t* table, int first, int count, int width,
                      float* key) {
    for (int at = 0; at < count; ++at) {
        const float* row = pool.row(table[(first + at) / step.page_size], (first + at) % step.page_size);
        for (int i = 0; i < width; ++i) key[i * BLOCK + at] = row[i];
    }
    for (int at = count; at < BLOCK; ++at)
        for (int i = 0; i < width; ++i) key[i * BLOCK + at] = 0;
}

// Rows [first, stop) are of one request: the blocks of its keys are transposed once for all of them.
inline void select_of_request(const Layer& layer, const Step& step, const Pool& pool, int first, int stop,
                              Scratch& scratch, int32_t* keys_TK) {
    int most = 0, query_width = layer.index_heads * layer.index_dim;
    for (int row = first; row < stop; ++row) most = std::max(most, num_visible(step, row));
    if (most > layer.index_topk) {
        int64_t stride = (most + BLOCK - 1) / BLOCK * BLOCK;
        float *score = sized(scratch.score, (stop - first) * stride), *key = sized(scratch.key, BLOCK * layer.index_dim);
        for (int at = 0; at < most; at += BLOCK) {
            transpose(pool, step, table_of(step, first), at, std::min(BLOCK, most - at), layer.index_dim, key);
            for (int row = first; row < stop; ++row)
                if (num_visible(step, row) > at && num_visible(step, row) > layer.index_topk)
                    score_block(layer, scratch.q_index.data() + int64_t(row) * query_width,
                                scratch.w_index.data() + int64_t(row) * layer.index_heads, key,
                                score + (row - first) * stride + at);
        }
        for (int row = first; row < stop; ++row)
            if (num_visible(step, row) > layer.index_topk)
                top_k(score + (row - first) * stride, num_visible(step, row), layer.index_topk, scratch.order,
                     keys_TK + int64_t(row) * layer.index_topk);
    }
    for (int row = first; row < stop; ++row)
        if (num_visible(step, row) <= layer.index_topk)
            for (int at = 0; at < layer.index_topk; ++at)
                keys_TK[int64_t(row) * layer.index_topk + at] = at < num_visible(step, row) ? at : -1;
}

// Writes the index keys of the rows, and selects keys for each row.
inline void run_indexer(const Layer& layer, const Step& step, const Pool& pool, const Selection& selection,
                        const float* cis, Scratch& scratch) {
    int T = step.rows, width = layer.index_dim, query_width = layer.index_heads * width;
    float* key = sized(scratch.values, int64_t(T) * width);
    multiply(scratch.x.data(), layer.hidden, T, layer.index_k, layer.hidden, width, key, width);
    for (int row = 0; row < T; ++row) {
        float* one = key + int64_t(row) * width;
        layer_norm(one, layer.index_k_weight, layer.index_k_bias, width, layer.index_eps);
        rotate(one, cis + int64_t(row) * layer.rope, layer.rope);
        std::memcpy(pool.row(step.place[row] / step.page_size, step.place[row] % step.page_size), one, width * sizeof(float));
    }
    if (!selection.keys) return;
    float* q = sized(scratch.q_index, int64_t(T) * query_width);
    multiply(scratch.q_latent.data(), layer.q_rank, T, layer.index_q, layer.q_rank, query_width, q, query_width);
    float* w = sized(scratch.w_index, int64_t(T) * layer.index_heads);
    multiply(scratch.x.data(), layer.hidden, T, layer.index_w, layer.hidden, layer.index_heads, w, layer.index_heads);
    float scale = 1 / std::sqrt(float(layer.index_heads)) / std::sqrt(float(width));
    for (int64_t at = 0; at < int64_t(T) * layer.index_heads; ++at) w[at] *= scale;
    for (int64_t head = 0; head < int64_t(T) * layer.index_heads; ++head)
        rotate(q + head * width, cis + head / layer.index_heads * layer.rope, layer.rope);
    for (int first = 0, stop; first < T; first = stop) {
        int64_t most = num_visible(step, first) + BLOCK;
        for (stop = first + 1; stop < T && step.request[stop] == step.request[first]; ++stop) {
            most = std::max<int64_t>(most, num_visible(step, stop) + BLOCK);
            if ((stop + 1 - first) * most > MAX_SCORES) break;
        }
        select_of_request(layer, step, pool, first, stop, scratch, selection.keys);
    }
}

// out [heads, kv_rank] of one row with absorbed queries q [heads, kv_rank + rope].
inline void attend(const Layer& layer, const Step& step, const Pool& pool, int row, const int32_t* keys, int num_keys,
                   const float* q, Scratch& scratch, float* out) {
    int width = layer.kv_rank + layer.rope;
    const int32_t* table = table_of(step, row);
    float* logits = sized(scratch.logits, int64_t(layer.heads) * num_keys);
    float scale = 1 / std::sqrt(float(layer.nope + layer.rope));
    auto latent = [&](int at) {
        int key = keys ? keys[at] : at;
        return pool.row(table[key / step.page_size], key % step.page_size);
    };
    std::fill(out, out + int64_t(layer.heads) * layer.kv_rank, 0.0f);
    if (!num_keys) return;
    for (int at = 0; at < num_keys; ++at) {
        const float* one = latent(at);
        for (int head = 0; head < layer.heads; ++head)
            logits[int64_t(head) * num_keys + at] = dot(q + head * width, one, width) * scale;
    }
    for (int head = 0; head < layer.heads; ++head) {
        float *p = logits + int64_t(head) * num_keys, top = p[0], total = 0;
        for (int at = 1; at < num_keys; ++at) top = p[at] > top ? p[at] : top;
        for (int at = 0; at < num_keys; ++at) p[at] = exponential(p[at] - top);
        for (int at = 0; at < num_keys; ++at) total += p[at];
        for (int at = 0; at < num_keys; ++at) p[at] /= total;
    }
    for (int at = 0; at < num_keys; ++at) {
        const float* one = latent(at);
        for (int head = 0; head < layer.heads; ++head) {
            float p = logits[int64_t(head) * num_keys + at], *to = out + head * layer.kv_rank;
            for (int i = 0; i < layer.kv_rank; ++i) to[i] += p * one[i];
        }
    }
}

// Writes the latents of the rows, and returns absorbed queries: [heads, kv_rank + rope] a row.
inline float* prepare(const Layer& layer, const Step& step, const Pool& pool, const float* all_cis, Scratch& scratch) {
    int T = step.rows, head_width = layer.nope + layer.rope, width = layer.kv_rank + layer.rope;
    float* q_latent = sized(scratch.q_latent, int64_t(T) * layer.q_rank);
    multiply(scratch.x.data(), layer.hidden, T, layer.q_a, layer.hidden, layer.q_rank, q_latent, layer.q_rank);
    for (int row = 0; row < T; ++row) {
        float* one = q_latent + int64_t(row) * layer.q_rank;
        rms_norm(one, layer.q_a_norm, layer.q_rank, layer.lora_eps, one);
    }
    float* q = sized(scratch.q, int64_t(T) * layer.heads * head_width);
    multiply(q_latent, layer.q_rank, T, layer.q_b, layer.q_rank, layer.heads * head_width, q, layer.heads * head_width);
    float* kv = sized(scratch.kv, int64_t(T) * width);
    multiply(scratch.x.data(), layer.hidden, T, layer.kv_a, layer.hidden, width, kv, width);
    float* absorbed = sized(scratch.absorbed, int64_t(T) * layer.heads * width);
    for (int row = 0; row < T; ++row) {
        const float* cis = all_cis + int64_t(row) * layer.rope;
        float* latent = pool.row(step.place[row] / step.page_size, step.place[row] % step.page_size);
        const float* one = kv + int64_t(row) * width;
        rms_norm(one, layer.kv_a_norm, layer.kv_rank, layer.lora_eps, latent);
        std::memcpy(latent + layer.kv_rank, one + layer.kv_rank, layer.rope * sizeof(float));
        rotate(latent + layer.kv_rank, cis, layer.rope);
        for (int head = 0; head < layer.heads; ++head) {
            const float* from = q + (int64_t(row) * layer.heads + head) * head_width;
            float* to = absorbed + (int64_t(row) * layer.heads + head) * width;
            const float* w_k = layer.kv_b + int64_t(head) * (layer.nope + layer.v_dim) * layer.kv_rank;
            multiply_across(from, layer.nope, w_k, layer.kv_rank, to);
            std::memcpy(to + layer.kv_rank, from + layer.nope, layer.rope * sizeof(float));
            rotate(to + layer.kv_rank, cis, layer.rope);
        }
    }
    return absorbed;
}

// y += attention(scratch.x), the normed input.
inline void run_attention(const Layer& layer, const Step& step, const Pool& latents, const Pool& index_keys,
                          const Selection& selection, const float* cis, Scratch& scratch, float* y) {
    int T = step.rows, width = layer.kv_rank + layer.rope, heads = layer.heads;
    float* absorbed = prepare(layer, step, latents, cis, scratch);
    if (layer.index_q && !selection.is_given) run_indexer(layer, step, index_keys, selection, cis, scratch);
    float* out = sized(scratch.out, int64_t(T) * heads * layer.kv_rank);
    for (int row = 0; row < T; ++row) {
        const int32_t* keys = selection.keys ? selection.keys + int64_t(row) * layer.index_topk : nullptr;
        int num_keys = num_visible(step, row);
        if (keys) {
            num_keys = std::min(num_keys, layer.index_topk);
            while (num_keys > 0 && (keys[num_keys - 1] < 0 || keys[num_keys - 1] >= num_visible(step, row))) --num_keys;
        }
        attend(layer, step, latents, row, keys, num_keys, absorbed + int64_t(row) * heads * width, scratch,
               out + int64_t(row) * heads * layer.kv_rank);
    }
    float* values = sized(scratch.values, int64_t(T) * heads * layer.v_dim);
    for (int head = 0; head < heads; ++head) {
        const float* w_v = layer.kv_b + (int64_t(head) * (layer.nope + layer.v_dim) + layer.nope) * layer.kv_rank;
        multiply(out + head * layer.kv_rank, heads * layer.kv_rank, T, w_v, layer.kv_rank, layer.v_dim,
                 values + head * layer.v_dim, heads * layer.v_dim);
    }
    float* sum = sized(scratch.y, int64_t(T) * layer.hidden);
    multiply(values, heads * layer.v_dim, T, layer.o, heads * layer.v_dim, layer.hidden, sum, layer.hidden);
    for (int64_t at = 0; at < int64_t(T) * layer.hidden; ++at) y[at] += sum[at];
}

}  // namespace glm5
