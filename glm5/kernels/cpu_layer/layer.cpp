// One decoder layer in one call: x += attention(norm(x)); x += mlp(norm(x)). And the norms and products around it.
//
// The operations of a row and their order do not depend on other rows, so its bits do not depend on the batch.

#include <new>

#include "attention.h"

namespace glm5 {

// sum [T, hidden] = down(silu(gate(x)) * up(x)), of the rows in x.
static void run_mlp(const float* x, int T, int hidden, int width, const float* gate_w, const float* up_w,
                    const float* down_w, Scratch& scratch, float* sum) {
    float *gate = sized(scratch.gate, int64_t(T) * width), *up = sized(scratch.up, int64_t(T) * width);
    multiply(x, hidden, T, gate_w, hidden, width, gate, width);
    multiply(x, hidden, T, up_w, hidden, width, up, width);
    gate_by_silu(gate, up, T * width);
    multiply(gate, width, T, down_w, width, hidden, sum, hidden);
}

// chosen and weight [T, active], experts ascending; among equal scores the first.
static void route(const Layer& layer, int T, Scratch& scratch) {
    int E = layer.experts, A = layer.active;
    float *p = sized(scratch.choice, int64_t(T) * E), *weight = sized(scratch.weight, int64_t(T) * A);
    if (int64_t(scratch.chosen.size()) < int64_t(T) * A) scratch.chosen.resize(int64_t(T) * A);
    multiply(scratch.x.data(), layer.hidden, T, layer.router, layer.hidden, E, p, E);
    for (int row = 0; row < T; ++row) {
        float* score = p + int64_t(row) * E;
        float* choice = sized(scratch.score, E);
        int32_t* chosen = scratch.chosen.data() + int64_t(row) * A;
        for (int e = 0; e < E; ++e) score[e] = 1 / (1 + exponential(-score[e]));
        for (int e = 0; e < E; ++e) choice[e] = score[e] + layer.router_bias[e];
        top_k(choice, E, A, scratch.order, chosen);
        float total = 0;
        for (int a = 0; a < A; ++a) total += score[chosen[a]];
        float scale = layer.norm_weights ? layer.routed_scale / (total + 1e-20f) : layer.routed_scale;
        for (int a = 0; a < A; ++a) weight[int64_t(row) * A + a] = score[chosen[a]] * scale;
    }
}

// y += the sum of the routed experts: each is computed over its rows, in order.
static void run_experts(const Layer& layer, int T, Scratch& scratch, float* y) {
    int D = layer.hidden, F = layer.expert_width, A = layer.active;
    route(layer, T, scratch);
    std::vector<int32_t>& pairs = scratch.keys;
    for (int e = 0; e < layer.experts; ++e) {
        pairs.clear();
        for (int pair = 0; pair < T * A; ++pair)
            if (scratch.chosen[pair] == e) pairs.push_back(pair);
        int count = int(pairs.size());
        if (!count) continue;
        float *x = sized(scratch.gathered, int64_t(count) * D), *out = sized(scratch.routed, int64_t(count) * D);
        for (int i = 0; i < count; ++i)
            std::memcpy(x + int64_t(i) * D, scratch.x.data() + int64_t(pairs[i] / A) * D, D * sizeof(float));
        const float* gate_up = layer.experts_gate_up + int64_t(e) * 2 * F * D;
        run_mlp(x, count, D, F, gate_up, gate_up + int64_t(F) * D, layer.experts_down + int64_t(e) * F * D, scratch, out);
        for (int i = 0; i < count; ++i) {
            float *to = y + int64_t(pairs[i] / A) * D, weight = scratch.weight[pairs[i]];
            for (int at = 0; at < D; ++at) to[at] += weight * out[int64_t(i) * D + at];
        }
    }
}

static void norm_rows(const float* x, const float* weight, int T, int width, float eps, Scratch& scratch) {
    float* y = sized(scratch.x, int64_t(T) * width);
    for (int64_t row = 0; row < T; ++row) rms_norm(x + row * width, weight, width, eps, y + row * width);
}

static void run_layer(const Layer& layer, const Step& step, const Pool& latents, const Pool& index_keys,
                      const Selection& selection, const float* cis, const float* x, float* y) {
    static thread_local Scratch scratch;
    int T = step.rows, D = layer.hidden;
    std::memcpy(y, x, int64_t(T) * D * sizeof(float));
    norm_rows(y, layer.input_norm, T, D, layer.eps, scratch);
    run_attention(layer, step, latents, index_keys, selection, cis, scratch, y);
    norm_rows(y, layer.post_norm, T, D, layer.eps, scratch);
    if (layer.experts) run_experts(layer, T, scratch, y);
    float* sum = sized(scratch.y, int64_t(T) * D);
    run_mlp(scratch.x.data(), T, D, layer.dense_width, layer.gate, layer.up, layer.down, scratch, sum);
    for (int64_t at = 0; at < int64_t(T) * D; ++at) y[at] += sum[at];
}

}  // namespace glm5

// x [T, hidden] to y [T, hidden]. Rows are written to the pools; `selection` is read or filled. 1: out of memory.
extern "C" int glm5_layer(const glm5::Layer* layer, const glm5::Step* step, const glm5::Pool* latents,
                          const glm5::Pool* index_keys, const glm5::Selection* selection, const float* cis,
                          const float* x, float* y) {
    try {
        glm5::run_layer(*layer, *step, *latents, *index_keys, *selection, cis, x, y);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// y [T, O] = x [T, I] w^T
extern "C" void glm5_linear(const float* x, const float* w, int32_t T, int32_t I, int32_t O, float* y) {
    glm5::multiply(x, I, T, w, I, O, y, O);
}

extern "C" void glm5_norm(const float* x, const float* weight, int32_t T, int32_t width, float eps, float* y) {
    for (int64_t row = 0; row < T; ++row) glm5::rms_norm(x + row * width, weight, width, eps, y + row * width);
}
