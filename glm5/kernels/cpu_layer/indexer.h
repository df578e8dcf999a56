// Which keys a row reads: score[s] = sum over heads of w relu(q . key[s]), and the best of them.
#pragma once

#include "layer.h"
#include "products.h"
#include "rows.h"

namespace glm5 {

constexpr int BLOCK = 64;  // keys that are scored at a time

// Scores of keys [first, first + count) that lie one after the other. q [index_dim, lanes], w [lanes], by heads.
inline void score_keys(const Layer& layer, const float* q, const float* w, const float* key, int64_t key_row, int count,
                       float* hits, float* score) {
    int lanes = whole_lanes(layer.index_heads);
    multiply({key, key_row}, count, plain(q, lanes), layer.index_dim, lanes, hits, lanes);
    for (int first = 0; first < count; first += LANES) {
        Lanes sums[LANES] = {};
        for (int at = 0; at < LANES && first + at < count; ++at)
            for (int lane = 0; lane < lanes; lane += LANES) {
                Lanes hit = load(hits + (first + at) * lanes + lane);
                sums[at] = multiply_add(hit > 0.0f ? hit : Lanes{}, load(w + lane), sums[at]);
            }
        store_some(score + first, sums_of(sums), std::min(LANES, count - first));
    }
}

// A float as an integer of the same order; NaN, of either sign, is some number.
inline int32_t ordered(float value) {
    int32_t bits;
    value += 0.0f;  // -0 becomes 0
    std::memcpy(&bits, &value, sizeof bits);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// The `count` best of more scores, ascending; of equal ones those that come first. `order` has room for the scores.
inline void top_k(const float* score, int num_keys, int count, int32_t* order, int32_t* keys) {
    for (int key = 0; key < num_keys; ++key) order[key] = ordered(score[key]);
    // Bit by bit, the largest number that `count` of them reach.
    int32_t least = INT32_MIN;
    int reached = num_keys;
    for (int bit = 31; bit >= 0 && reached > count; --bit) {
        int32_t tried = int32_t(uint32_t(least) + (1u << bit));
        int found = 0;
        for (int key = 0; key < num_keys; ++key) found += order[key] >= tried;
        if (found >= count) least = tried, reached = found;
    }
    int equal = count;  // how many of those that are equal to it are taken
    for (int key = 0; key < num_keys; ++key) equal -= order[key] > least;
    for (int key = 0, found = 0; found < count; ++key) {
        bool takes = order[key] > least || (order[key] == least && equal-- > 0);
        keys[found] = key;
        found += takes;
    }
}

// A row's keys [index_topk], by its q [index_dim, lanes] and w [lanes].
inline void select_keys(const Layer& layer, const Step& step, const Pool& pool, int row, const float* q, const float* w,
                        std::vector<float>& room, std::vector<int32_t>& order, int32_t* keys) {
    int seen = step.num_visible(row);
    if (seen <= layer.index_topk) {
        for (int at = 0; at < layer.index_topk; ++at) keys[at] = at < seen ? at : -1;
        return;
    }
    float *hits = sized(room, int64_t(BLOCK) * whole_lanes(layer.index_heads) + seen), *score = hits;
    hits += seen;
    const int32_t* table = step.table_of(row);
    for (int at = 0, count; at < seen; at += count) {
        int offset = at % step.page_size;
        count = std::min({BLOCK, seen - at, step.page_size - offset});
        score_keys(layer, q, w, pool.row(table[at / step.page_size], offset), pool.row_step, count, hits, score + at);
    }
    if (int(order.size()) < seen) order.resize(seen);
    top_k(score, seen, layer.index_topk, order.data(), keys);
}

}  // namespace glm5
