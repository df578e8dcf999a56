// Rows of float32: products with weights in the checkpoint's layout, norms, activations.
//
// A weight [O, I] is read row by row, so an output is a dot product. 16 of them are taken at a time, over one, two or
// four rows of x, and their 16 vectors of partial sums are reduced together. The order of an output's sum depends
// only on the width.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

namespace glm5 {

constexpr int LANES = 16;
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

inline Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

inline Lanes load_some(const float* from, int count) {
    Lanes lanes = {};
    std::memcpy(&lanes, from, count * sizeof(float));
    return lanes;
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline float sum(Lanes lanes) {
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += lanes[lane];
    return total;
}

// Adds lanes that are STEP apart. Lanes of the result whose index has the bit STEP are sums of b, the others of a.
template <int STEP, int... LANE>
inline Lanes add_lanes(Lanes a, Lanes b, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(a, b, ((LANE & ~STEP) + (LANE & STEP ? LANES : 0))...) +
           __builtin_shufflevector(a, b, ((LANE | STEP) + (LANE & STEP ? LANES : 0))...);
}

template <int STEP>
inline Lanes add_lanes(Lanes a, Lanes b) {
    return add_lanes<STEP>(a, b, std::make_integer_sequence<int, LANES>());
}

// Lane i of the result is the sum of all lanes of sums[i].
inline Lanes reduce(const Lanes sums[LANES]) {
    Lanes eight[8], four[4];
    for (int i = 0; i < 8; ++i) eight[i] = add_lanes<1>(sums[2 * i], sums[2 * i + 1]);
    for (int i = 0; i < 4; ++i) four[i] = add_lanes<2>(eight[2 * i], eight[2 * i + 1]);
    return add_lanes<8>(add_lanes<4>(four[0], four[1]), add_lanes<4>(four[2], four[3]));
}

// Keeps the value in a register: compilers would load it again for every product, which is slower.
inline void keep([[maybe_unused]] Lanes& lanes) {
#if defined(__AVX512F__)
    asm("" : "+v"(lanes));
#endif
}

// Adds the products of ROWS x OUTS rows. Expanded at compile time, so that all sums stay in registers.
template <int ROWS, int OUTS, typename Get, int... ROW, int... OUT, int... PAIR>
inline void add_products(Lanes* sums, Get get, const float* x, int64_t x_step, const float* const* weight,
                         std::integer_sequence<int, ROW...>, std::integer_sequence<int, OUT...>,
                         std::integer_sequence<int, PAIR...>) {
    Lanes part[] = {get(x + ROW * x_step)...}, by[] = {get(weight[OUT])...};
    if (ROWS > 1) ((keep(part[ROW]), ...), (keep(by[OUT]), ...));
    ((sums[PAIR] += part[PAIR / OUTS] * by[PAIR % OUTS]), ...);
}

// ROWS rows of x by 16 / ROWS rows of w, of which num_out exist.
template <int ROWS>
inline void tile(const float* x, int64_t x_step, const float* w, int width, int num_out, float* y, int64_t y_step) {
    constexpr int OUTS = LANES / ROWS;
    constexpr std::make_integer_sequence<int, ROWS> rows{};
    constexpr std::make_integer_sequence<int, OUTS> outs{};
    constexpr std::make_integer_sequence<int, LANES> pairs{};
    Lanes sums[LANES] = {};
    const float* weight[OUTS];
    for (int out = 0; out < OUTS; ++out) weight[out] = w + int64_t(out < num_out ? out : 0) * width;
    int at = 0;
    for (; at + LANES <= width; at += LANES)
        add_products<ROWS, OUTS>(sums, [at](const float* from) { return load(from + at); }, x, x_step, weight, rows, outs,
                                 pairs);
    if (int rest = width - at)
        add_products<ROWS, OUTS>(sums, [at, rest](const float* from) { return load_some(from + at, rest); }, x, x_step,
                                 weight, rows, outs, pairs);
    float found[LANES];
    store(found, reduce(sums));
    for (int row = 0; row < ROWS; ++row)
        if (num_out >= OUTS)
            std::memcpy(y + row * y_step, found + row * OUTS, OUTS * sizeof(float));
        else
            std::memcpy(y + row * y_step, found + row * OUTS, num_out * sizeof(float));
}

template <int ROWS>
inline int multiply_rows(int row, int num_rows, const float* x, int64_t x_step, const float* w, int width, int num_out,
                         float* y, int64_t y_step) {
    constexpr int OUTS = LANES / ROWS;
    int end = num_rows - (num_rows - row) % ROWS;
    for (int out = 0; out < num_out && row < end; out += OUTS)
        for (int at = row; at < end; at += ROWS)
            tile<ROWS>(x + at * x_step, x_step, w + int64_t(out) * width, width, num_out - out, y + at * y_step + out,
                       y_step);
    return end;
}

// y[t, o] = x[t] . w[o], for rows of x and y with strides x_step and y_step and w [num_out, width].
inline void multiply(const float* x, int64_t x_step, int num_rows, const float* w, int width, int num_out, float* y,
                     int64_t y_step) {
    int row = multiply_rows<4>(0, num_rows, x, x_step, w, width, num_out, y, y_step);
    row = multiply_rows<2>(row, num_rows, x, x_step, w, width, num_out, y, y_step);
    multiply_rows<1>(row, num_rows, x, x_step, w, width, num_out, y, y_step);
}

// y[c] = sum_n x[n] * w[n, c]: a row times a transposed matrix.
inline void multiply_across(const float* x, int width, const float* w, int num_out, float* y) {
    for (int out = 0; out < num_out; ++out) y[out] = 0;
    for (int at = 0; at < width; ++at) {
        const float by = x[at], *row = w + int64_t(at) * num_out;
        for (int out = 0; out < num_out; ++out) y[out] += by * row[out];
    }
}

inline float dot(const float* a, const float* b, int width) {
    Lanes sums = {};
    int at = 0;
    for (; at + LANES <= width; at += LANES) sums += load(a + at) * load(b + at);
    if (int rest = width - at) sums += load_some(a + at, rest) * load_some(b + at, rest);
    return sum(sums);
}

// y = weight * x / rms(x)
inline void rms_norm(const float* x, const float* weight, int width, float eps, float* y) {
    float inverse = 1 / std::sqrt(dot(x, x, width) / width + eps);
    for (int at = 0; at < width; ++at) y[at] = x[at] * inverse * weight[at];
}

// In place, by the two-pass formula.
inline void layer_norm(float* x, const float* weight, const float* bias, int width, float eps) {
    float mean = 0, square = 0;
    for (int at = 0; at < width; ++at) mean += x[at];
    mean /= width;
    for (int at = 0; at < width; ++at) square += (x[at] - mean) * (x[at] - mean);
    float inverse = 1 / std::sqrt(square / width + eps);
    for (int at = 0; at < width; ++at) x[at] = (x[at] - mean) * inverse * weight[at] + bias[at];
}

// e^x to 2 ulp: x = n ln 2 + r, a polynomial in r, and n added to the exponent. 0 below -87, e^88 above 88.
inline float exponential(float x) {
    float bounded = x < 88.0f ? x : 88.0f;
    bounded = bounded < -88.0f ? -88.0f : bounded;
    float n = std::nearbyint(bounded * 1.44269504f);
    float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1;
    int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    float found = p * power;
    found = x < -87.0f ? 0.0f : found;
    return x == x ? found : x;
}

// Pairs of x rotated by pairs of (cos, sin).
inline void rotate(float* x, const float* cis, int width) {
    for (int at = 0; at < width; at += 2) {
        float even = x[at], odd = x[at + 1];
        x[at] = even * cis[at] - odd * cis[at + 1];
        x[at + 1] = even * cis[at + 1] + odd * cis[at];
    }
}

// gate = silu(gate) * up
inline void gate_by_silu(float* gate, const float* up, int width) {
    for (int at = 0; at < width; ++at) gate[at] = gate[at] / (1 + exponential(-gate[at])) * up[at];
}

}  // namespace glm5
