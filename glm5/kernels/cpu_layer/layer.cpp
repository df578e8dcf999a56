// Decoder layers in one call: x += attention(norm(x)); x += mlp(norm(x)). And the norms and products around them.
//
// A row is computed in the same order whatever stands beside it: its bits depend neither on the batch nor on threads.

#include <new>

#include "attention.h"
#include "experts.h"
#include "indexer.h"
#include "team.h"

namespace glm5 {

constexpr int PART = 96;           // rows that go through a layer together: what lies between its products stays near
constexpr int TILE = 6;            // rows of a tile of a product; a part has whole ones, but for the last
constexpr double WORTH = 4e6;      // multiplications that are worth another thread: some 100 us
constexpr int PARTS_A_THREAD = 2;  // the other threads may be late

struct Scratch {
    std::vector<float> inputs, x, q, q_index, absorbed, queries, out, values, logits, scores;
    std::vector<int32_t> order;
    Gathered gathered;
    MlpRoom mlp;
    ExpertRoom experts;
};

static Scratch& scratch() {
    static thread_local Scratch own;
    return own;
}

// Runs work(first, end) over parts of the rows. False: out of memory.
template <typename Work>
static bool over_rows(int rows, int threads, double products_a_row, Work work) {
    threads = std::min<double>(threads, 1 + rows * products_a_row / WORTH);
    int parts = std::max((rows + PART - 1) / PART, threads > 1 ? threads * PARTS_A_THREAD : 1);
    int each = ((rows + parts - 1) / parts + TILE - 1) / TILE * TILE;
    parts = (rows + each - 1) / each;
    std::atomic<bool> fails{false};
    Team::run(parts, threads, [&](int part) {
        try {
            work(part * each, std::min(rows, (part + 1) * each));
        } catch (const std::bad_alloc&) {
            fails = true;
        }
    });
    return !fails;
}

static void norm_rows(const float* x, const float* weight, int rows, int width, float eps, float* y) {
    for (int64_t row = 0; row < rows; ++row) rms_norm(x + row * width, weight, width, eps, y + row * width);
}

class Call {
   public:
    Call(const Layer& layer, const Step& step, const Pool& latents, const Pool& index_keys, Selection selection,
         Routing routing, const float* cis, const float* x, float* y)
        : layer(layer), step(step), latents(latents), index_keys(index_keys), selection(selection), routing(routing),
          cis(cis), x(x), y(y) {
        selects = layer.index_q && !selection.is_given;
        input_width = layer.q_rank + layer.kv_rank + layer.rope + (selects ? layer.index_dim + layer.index_heads : 0);
    }

    bool run() {
        inputs = sized(scratch().inputs, int64_t(step.rows) * input_width);
        // All keys are written before any is read.
        double before = double(input_width) * layer.hidden, behind = products_behind_keys();
        return over_rows(step.rows, step.threads, before, [&](int first, int end) { write_keys(first, end); }) &&
               over_rows(step.rows, step.threads, behind, [&](int first, int end) { finish(first, end); });
    }

   private:
    const Layer& layer;
    const Step& step;
    const Pool& latents;
    const Pool& index_keys;
    const Selection selection;
    const Routing routing;
    const float *cis, *x;
    float* y;
    bool selects;
    int input_width;
    float* inputs;  // [T, input_width]: normed query latents, key latents, index keys, weights of index heads

    double products_behind_keys() const {
        double head = layer.nope + layer.rope + (layer.nope + layer.v_dim) * double(layer.kv_rank) / layer.q_rank;
        double index = selects ? layer.index_heads * layer.index_dim : 0;
        return layer.q_rank * (layer.heads * head + index) + double(layer.heads) * layer.v_dim * layer.hidden +
               3.0 * layer.hidden * (layer.dense_width + layer.active * layer.expert_width * (layer.experts > 0));
    }

    void write_keys(int first, int end) {
        int rows = end - first, D = layer.hidden, K = layer.kv_rank, R = layer.rope;
        float *normed = sized(scratch().x, int64_t(rows) * D), *found = inputs + int64_t(first) * input_width;
        norm_rows(x + int64_t(first) * D, layer.input_norm, rows, D, layer.eps, normed);
        multiply({normed, D}, rows, packed(layer.of_input, D), D, input_width, found, input_width);
        for (int row = first; row < end; ++row) {
            const float* turned_by = cis + int64_t(row) * R;
            float *q = inputs + int64_t(row) * input_width, *kv = q + layer.q_rank, *index_key = kv + K + R;
            rms_norm(q, layer.q_a_norm, layer.q_rank, layer.lora_eps, q);
            float* latent = latents.place(step, row);
            rms_norm(kv, layer.kv_a_norm, K, layer.lora_eps, latent);
            std::memcpy(latent + K, kv + K, R * sizeof(float));
            rotate(latent + K, turned_by, R);
            if (!selects) continue;
            float* key = index_keys.place(step, row);
            layer_norm(index_key, layer.index_k_weight, layer.index_k_bias, layer.index_dim, layer.index_eps, key);
            rotate(key, turned_by, R);
        }
    }

    void finish(int first, int end) {
        int rows = end - first, D = layer.hidden;
        Scratch& room = scratch();
        if (selects && selection.keys) select(first, end, room);
        float* to = y + int64_t(first) * D;
        if (x != y) std::memcpy(to, x + int64_t(first) * D, int64_t(rows) * D * sizeof(float));
        attention(first, end, room, to);
        float* normed = sized(room.x, int64_t(rows) * D);
        norm_rows(to, layer.post_norm, rows, D, layer.eps, normed);
        if (layer.experts) {
            run_experts(layer, normed, rows, room.experts, to);
            report(layer, room.experts, first, rows, routing);
        }
        run_mlp(normed, rows, D, layer.dense_width, layer.gate_up, layer.down, room.mlp, to, true);
    }

    void select(int first, int end, Scratch& room) {
        int lanes = whole_lanes(layer.index_heads), width = layer.index_dim * lanes;
        float *q = sized(room.q_index, int64_t(end - first) * width), *w = sized(room.scores, lanes);
        float scale = 1 / std::sqrt(float(layer.index_heads)) / std::sqrt(float(layer.index_dim));
        multiply({inputs + int64_t(first) * input_width, input_width}, end - first, packed(layer.index_q, layer.q_rank),
                 layer.q_rank, width, q, width);
        for (int row = first; row < end; ++row, q += width) {
            rotate_lanes(q, cis + int64_t(row) * layer.rope, layer.rope, lanes);
            const float* weight = inputs + int64_t(row + 1) * input_width - layer.index_heads;
            for (int head = 0; head < lanes; ++head) w[head] = head < layer.index_heads ? weight[head] * scale : 0;
            select_keys(layer, step, index_keys, row, q, w, room.logits, room.order,
                        selection.keys + int64_t(row) * layer.index_topk);
        }
    }

    // Queries as they meet latents: [kv_rank + rope, lanes] of each row, by heads.
    float* absorb(int first, int end, Scratch& room) {
        int rows = end - first, H = layer.heads, N = layer.nope, R = layer.rope, K = layer.kv_rank;
        int lanes = whole_lanes(H), q_width = H * (N + R);
        int64_t width = int64_t(K + R) * lanes;
        float *q = sized(room.q, int64_t(rows) * q_width), *absorbed = sized(room.absorbed, int64_t(rows) * K);
        float* queries = sized(room.queries, rows * width);
        multiply({inputs + int64_t(first) * input_width, input_width}, rows, packed(layer.q_b, layer.q_rank),
                 layer.q_rank, q_width, q, q_width);
        std::fill(queries, queries + rows * width, 0.0f);
        for (int head = 0; head < H; ++head) {
            float* own = q + head * (N + R);
            const float* key_weight = layer.key_of_heads + int64_t(head) * padded(K) * N;
            multiply({own, q_width}, rows, packed(key_weight, N), N, K, absorbed, K);
            for (int64_t row = 0; row < rows; ++row) {
                float *to = queries + row * width + head, *turned = own + row * q_width + N;
                rotate(turned, cis + (first + row) * R, R);
                for (int at = 0; at < K; ++at) to[at * lanes] = absorbed[row * K + at];
                for (int at = 0; at < R; ++at) to[(K + at) * lanes] = turned[at];
            }
        }
        return queries;
    }

    // How many keys a row reads: those of its list that it sees, or all that it sees.
    int num_read(int row, const int32_t* keys) const {
        int seen = step.num_visible(row);
        if (!keys) return seen;
        int count = std::min(seen, layer.index_topk);
        while (count > 0 && (keys[count - 1] < 0 || keys[count - 1] >= seen)) --count;
        return count;
    }

    void attention(int first, int end, Scratch& room, float* to) {
        int rows = end - first, H = layer.heads, V = layer.v_dim, K = layer.kv_rank, width = K + layer.rope;
        const float* queries = absorb(first, end, room);
        float* out = sized(room.out, int64_t(rows) * H * K);
        room.gathered.count = 0;
        for (int row = first; row < end; ++row) {
            const int32_t* keys = selection.keys ? selection.keys + int64_t(row) * layer.index_topk : nullptr;
            int count = num_read(row, keys);
            const float* read = room.gathered.get(step, latents, row, keys, count, width);
            attend(layer, read, count, queries + int64_t(row - first) * width * whole_lanes(H), room.logits,
                   out + int64_t(row - first) * H * K);
        }
        float* values = sized(room.values, int64_t(rows) * H * V);
        for (int head = 0; head < H; ++head) {
            const float* weight = layer.value_of_heads + int64_t(head) * padded(V) * K;
            multiply({out + head * K, H * K}, rows, packed(weight, K), K, V, values + head * V, H * V);
        }
        multiply({values, H * V}, rows, packed(layer.o, H * V), H * V, layer.hidden, to, layer.hidden, true);
    }
};

}  // namespace glm5

// Columns of a panel of packed weights (products.h).
extern "C" int glm5_panel() { return glm5::PANEL; }

// Lanes of a vector.
extern "C" int glm5_lanes() { return glm5::LANES; }

// Layers one after the other, x [T, hidden] to y [T, hidden]. Rows are written to the pools, of which the first layer's
// is number `first`. `selected` is filled by layers with an indexer and read by those without; by the first one, too,
// if it `is_given`. `experts`, if not null, gets those of each row: [T, layers with experts, active]. 1: out of memory.
extern "C" int glm5_layers(const glm5::Layer* layers, int32_t count, const glm5::Step* step, const glm5::Pool* latents,
                           const glm5::Pool* index_keys, int32_t first, int32_t* selected, int32_t is_given,
                           int16_t* experts, const float* cis, const float* x, float* y) {
    try {
        int active = layers[count - 1].active, num_moe = 0;
        for (int at = 0; at < count; ++at) num_moe += layers[at].experts > 0;
        int64_t step_of_experts = int64_t(num_moe) * active;
        for (int at = 0; at < count; ++at) {
            glm5::Selection selection{selected, at ? !layers[at].index_q : bool(is_given)};
            const float* from = at ? y : x;
            glm5::Call call(layers[at], *step, latents[first + at], index_keys[first + at], selection,
                            {experts, step_of_experts}, cis, from, y);
            if (!call.run()) return 1;
            if (experts && layers[at].experts) experts += active;
        }
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// y [T, O] = x [T, I] w, with packed weights.
extern "C" void glm5_linear(const float* x, const float* w, int32_t T, int32_t I, int32_t O, int32_t threads,
                            float* y) {
    glm5::over_rows(T, threads, double(I) * O, [&](int first, int end) {
        glm5::multiply({x + int64_t(first) * I, I}, end - first, glm5::packed(w, I), I, O, y + int64_t(first) * O, O);
    });
}

extern "C" void glm5_norm(const float* x, const float* weight, int32_t T, int32_t width, float eps, float* y) {
    glm5::norm_rows(x, weight, T, width, eps, y);
}
