// Rows of float32: norms, activations, rotation.
#pragma once

#include <cmath>

#include "vectors.h"

namespace glm5 {

// y = weight * x / rms(x)
inline void rms_norm(const float* x, const float* weight, int width, float eps, float* y) {
    float inverse = 1 / std::sqrt(dot(x, x, width) / width + eps);
    for (int at = 0; at < width; ++at) y[at] = x[at] * inverse * weight[at];
}

// By the two-pass formula.
inline void layer_norm(const float* x, const float* weight, const float* bias, int width, float eps, float* y) {
    float mean = 0, square = 0;
    for (int at = 0; at < width; ++at) mean += x[at];
    mean /= width;
    for (int at = 0; at < width; ++at) square += (x[at] - mean) * (x[at] - mean);
    float inverse = 1 / std::sqrt(square / width + eps);
    for (int at = 0; at < width; ++at) y[at] = (x[at] - mean) * inverse * weight[at] + bias[at];
}

// Pairs of x turned by pairs of (cos, sin).
inline void rotate(float* x, const float* cis, int width) {
    for (int at = 0; at < width; at += 2) {
        float even = x[at], odd = x[at + 1];
        x[at] = even * cis[at] - odd * cis[at + 1];
        x[at + 1] = even * cis[at + 1] + odd * cis[at];
    }
}

// The same of vectors, [width, lanes].
inline void rotate_lanes(float* x, const float* cis, int width, int lanes) {
    for (int at = 0; at < width; at += 2)
        for (int lane = 0; lane < lanes; lane += LANES) {
            float *even_at = x + at * lanes + lane, *odd_at = even_at + lanes;
            Lanes even = load(even_at), odd = load(odd_at);
            store(even_at, even * cis[at] - odd * cis[at + 1]);
            store(odd_at, even * cis[at + 1] + odd * cis[at]);
        }
}

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

// Rows [gate, up] of twice the width become rows of silu(gate) * up.
inline void gate_by_silu(const float* gate_up, int rows, int width, float* y) {
    for (int64_t row = 0; row < rows; ++row) {
        const float *gate = gate_up + row * 2 * width, *up = gate + width;
        float* to = y + row * width;
        int at = 0;
        for (; at + LANES <= width; at += LANES) {
            Lanes one = load(gate + at);
            store(to + at, one * sigmoid(one) * load(up + at));
        }
        if (int rest = width - at) {
            Lanes one = load_some(gate + at, rest);
            store_some(to + at, one * sigmoid(one) * load_some(up + at, rest), rest);
        }
    }
}

}  // namespace glm5
