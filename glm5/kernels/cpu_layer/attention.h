// Sparse latent attention of rows: out = concat_h(softmax(q_h . latent) latent), of the keys that a row reads.
#pragma once

#include "layer.h"
#include "products.h"
#include "rows.h"

namespace glm5 {

// Latents [count, kv_rank + rope] one after the other. Rows of one request that see all of their keys share them.
struct Gathered {
    std::vector<float> latents;
    int count = 0, request = -1;  // -1: not all keys of a request

    const float* get(const Step& step, const Pool& pool, int row, const int32_t* keys, int num_keys, int width) {
        int request_now = keys ? -1 : step.request[row];
        if (request_now < 0 || request_now != request) count = 0;
        request = request_now;
        if (int64_t need = int64_t(num_keys) * width + PANEL; int64_t(latents.size()) < need) latents.resize(2 * need);
        const int32_t* table = step.table_of(row);
        for (; count < num_keys; ++count) {
            int key = keys ? keys[count] : count;
            const float* from = pool.row(table[key / step.page_size], key % step.page_size);
            std::memcpy(latents.data() + int64_t(count) * width, from, width * sizeof(float));
        }
        return latents.data();
    }
};

// In place, over keys, of logits [num_keys, lanes] times `scale`, by heads.
inline void softmax(float* logits, int num_keys, int lanes, float scale) {
    for (int lane = 0; lane < lanes; lane += LANES) {
        Lanes top = load(logits + lane), total = {};
        for (int at = 1; at < num_keys; ++at) {
            Lanes one = load(logits + int64_t(at) * lanes + lane);
            top = one > top ? one : top;
        }
        for (int at = 0; at < num_keys; ++at) {
            float* place = logits + int64_t(at) * lanes + lane;
            Lanes p = exponential((load(place) - top) * scale);
            total += p;
            store(place, p);
        }
        Lanes inverse = 1.0f / total;
        for (int at = 0; at < num_keys; ++at) {
            float* place = logits + int64_t(at) * lanes + lane;
            store(place, load(place) * inverse);
        }
    }
}

// out [heads, kv_rank] of a row, with absorbed queries q [kv_rank + rope, lanes] by heads.
inline void attend(const Layer& layer, const float* latents, int num_keys, const float* q, std::vector<float>& room,
                   float* out) {
    int width = layer.kv_rank + layer.rope, lanes = whole_lanes(layer.heads);
    std::fill(out, out + int64_t(layer.heads) * layer.kv_rank, 0.0f);
    if (!num_keys) return;
    float* logits = sized(room, int64_t(num_keys) * lanes);
    multiply({latents, width}, num_keys, plain(q, lanes), width, lanes, logits, lanes);
    softmax(logits, num_keys, lanes, 1 / std::sqrt(float(layer.nope + layer.rope)));
    multiply({logits, 1, lanes}, layer.heads, plain(latents, width), num_keys, layer.kv_rank, out, layer.kv_rank);
}

}  // namespace glm5
