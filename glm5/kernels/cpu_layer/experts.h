// The gated MLP, and the choice and the sum of experts.
#pragma once

#include "indexer.h"
#include "layer.h"
#include "products.h"
#include "rows.h"

namespace glm5 {

struct MlpRoom {
    std::vector<float> gate_up, gated;
};

// y (+)= down(silu(gate(x)) * up(x)), of rows of x.
inline void run_mlp(const float* x, int rows, int hidden, int width, const float* gate_up, const float* down,
                    MlpRoom& room, float* y, bool adds) {
    float *both = sized(room.gate_up, int64_t(rows) * 2 * width), *gated = sized(room.gated, int64_t(rows) * width);
    multiply({x, hidden}, rows, packed(gate_up, hidden), hidden, 2 * width, both, 2 * width);
    gate_by_silu(both, rows, width, gated);
    multiply({gated, width}, rows, packed(down, width), width, hidden, y, hidden, adds);
}

struct ExpertRoom {
    std::vector<float> score, choice, weight, x, y;
    std::vector<int32_t> order, chosen, start, pairs;
    MlpRoom mlp;
};

inline int32_t* counted(std::vector<int32_t>& values, int64_t count) {
    if (int64_t(values.size()) < count) values.resize(count);
    return values.data();
}

// chosen and weight [rows, active], experts ascending; of equal scores the first.
inline void route(const Layer& layer, const float* x, int rows, ExpertRoom& room) {
    int E = layer.experts, A = layer.active;
    float *scores = sized(room.score, int64_t(rows) * E), *choice = sized(room.choice, E);
    float* weights = sized(room.weight, int64_t(rows) * A);
    int32_t *chosen = counted(room.chosen, int64_t(rows) * A), *order = counted(room.order, E);
    multiply({x, layer.hidden}, rows, packed(layer.router, layer.hidden), layer.hidden, E, scores, E);
    for (int64_t at = 0; at < int64_t(rows) * E; at += LANES) store(scores + at, sigmoid(load(scores + at)));
    for (int64_t row = 0; row < rows; ++row) {
        const float* score = scores + row * E;
        for (int e = 0; e < E; ++e) choice[e] = score[e] + layer.router_bias[e];
        top_k(choice, E, A, order, chosen + row * A);
        float total = 0;
        for (int a = 0; a < A; ++a) total += score[chosen[row * A + a]];
        float scale = layer.norm_weights ? layer.routed_scale / (total + 1e-20f) : layer.routed_scale;
        for (int a = 0; a < A; ++a) weights[row * A + a] = score[chosen[row * A + a]] * scale;
    }
}

// Reports the choice of rows, of which the first is number `first`.
inline void report(const Layer& layer, const ExpertRoom& room, int first, int rows, Routing routing) {
    if (!routing.to) return;
    for (int64_t row = 0; row < rows; ++row)
        for (int a = 0; a < layer.active; ++a)
            routing.to[(first + row) * routing.step + a] = int16_t(room.chosen[row * layer.active + a]);
}

// Pairs (row, choice) by expert: those of expert e are pairs[start[e]] .. pairs[start[e + 1] - 1], ascending.
inline void sort_pairs(const Layer& layer, int num_pairs, ExpertRoom& room) {
    int E = layer.experts;
    int32_t *start = counted(room.start, E + 2), *pairs = counted(room.pairs, num_pairs);
    std::fill(start, start + E + 2, 0);
    for (int pair = 0; pair < num_pairs; ++pair) ++start[room.chosen[pair] + 2];
    for (int e = 0; e < E; ++e) start[e + 2] += start[e + 1];
    for (int pair = 0; pair < num_pairs; ++pair) pairs[start[room.chosen[pair] + 1]++] = pair;
}

// y += the routed experts' sum, expert after expert, each over its rows.
inline void run_experts(const Layer& layer, const float* x, int rows, ExpertRoom& room, float* y) {
    int D = layer.hidden, F = layer.expert_width, A = layer.active;
    int64_t up_size = int64_t(padded(2 * F)) * D, down_size = int64_t(padded(D)) * F;
    route(layer, x, rows, room);
    sort_pairs(layer, rows * A, room);
    for (int e = 0; e < layer.experts; ++e) {
        const int32_t* pairs = room.pairs.data() + room.start[e];
        int count = room.start[e + 1] - room.start[e];
        if (!count) continue;
        float *mine = sized(room.x, int64_t(count) * D), *out = sized(room.y, int64_t(count) * D);
        for (int i = 0; i < count; ++i)
            std::memcpy(mine + int64_t(i) * D, x + int64_t(pairs[i] / A) * D, D * sizeof(float));
        const float *gate_up = layer.experts_gate_up + e * up_size, *down = layer.experts_down + e * down_size;
        run_mlp(mine, count, D, F, gate_up, down, room.mlp, out, false);
        for (int i = 0; i < count; ++i) {
            float *to = y + int64_t(pairs[i] / A) * D, weight = room.weight[pairs[i]];
            for (int at = 0; at < D; ++at) to[at] += weight * out[int64_t(i) * D + at];
        }
    }
}

}  // namespace glm5
