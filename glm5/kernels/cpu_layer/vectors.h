// Vectors of the processor's width, and functions of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

namespace glm5 {

// LANES floats fill a register. A tile of a product keeps MOST_SUMS registers of sums and needs a few more.
#if defined(__AVX512F__)
constexpr int LANES = 16, MOST_SUMS = 24, PANEL_VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, MOST_SUMS = 12, PANEL_VECTORS = 2;
#else
constexpr int LANES = 4, MOST_SUMS = 12, PANEL_VECTORS = 2;
#endif
constexpr int PANEL = PANEL_VECTORS * LANES;

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Ints __attribute__((vector_size(LANES * sizeof(int32_t))));

constexpr int whole_lanes(int count) { return (count + LANES - 1) / LANES * LANES; }

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

// The number in every lane. Less nothing: that is no operation, and more nothing is one, for -0.
inline Lanes spread(float number) { return number - Lanes{}; }

// a * b + c with one rounding, or with two where the processor has no such instruction. Which of the two is said here and
// not left to the compiler (-ffp-contract=off): it may choose differently for tiles of one row and of six.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return Lanes(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__AVX__) && defined(__FMA__)
    return Lanes(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__ARM_FEATURE_FMA)
    return Lanes(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
    return a * b + c;
#endif
}

inline void store(float* to, Lanes lanes) { std::memcpy(to, &lanes, sizeof lanes); }

inline void store_some(float* to, Lanes lanes, int count) { std::memcpy(to, &lanes, count * sizeof(float)); }

// Room for at least `count` floats, and a vector behind them.
inline float* sized(std::vector<float>& values, int64_t count) {
    if (int64_t(values.size()) < count + PANEL) values.resize(count + PANEL);
    return values.data();
}

// Lanes that are STEP apart are added; those of b come to lie where the result has the bit STEP.
template <int STEP, int... LANE>
inline Lanes add_lanes(Lanes a, Lanes b, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(a, b, ((LANE & ~STEP) + (LANE & STEP ? LANES : 0))...) +
           __builtin_shufflevector(a, b, ((LANE | STEP) + (LANE & STEP ? LANES : 0))...);
}

// Lane i of the result is the sum of all lanes of sums[i]; sums are overwritten.
template <int STEP = 1>
inline Lanes sums_of(Lanes* sums) {
    constexpr std::make_integer_sequence<int, LANES> lanes{};
    for (int i = 0; i < LANES / (2 * STEP); ++i) sums[i] = add_lanes<STEP>(sums[2 * i], sums[2 * i + 1], lanes);
    if constexpr (2 * STEP < LANES) return sums_of<2 * STEP>(sums);
    return sums[0];
}

inline float sum(Lanes lanes) {
    float part[LANES];
    store(part, lanes);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) part[lane] += part[lane + half];
    return part[0];
}

inline float dot(const float* a, const float* b, int width) {
    Lanes sums = {};
    int at = 0;
    for (; at + LANES <= width; at += LANES) sums = multiply_add(load(a + at), load(b + at), sums);
    if (int rest = width - at) sums = multiply_add(load_some(a + at, rest), load_some(b + at, rest), sums);
    return sum(sums);
}

// e^x to 2 ulp: x = n ln 2 + r, a polynomial in r, and n added to the exponent. 0 below -87, e^88 above 88.
inline Lanes exponential(Lanes x) {
    constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: what is added to it loses its fraction
    Lanes bounded = x < 88.0f ? x : Lanes{} + 88.0f;
    bounded = bounded < -88.0f ? Lanes{} - 88.0f : bounded;
    Lanes n = (bounded * 1.44269504f + ROUND) - ROUND;
    Lanes r = multiply_add(n, spread(2.12194440e-4f), bounded - n * 0.693359375f);
    Lanes p = spread(1.9875691500e-4f);
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = multiply_add(p, r, spread(next));
    p = multiply_add(p * r, r, r) + 1.0f;
    Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    Lanes power;
    std::memcpy(&power, &bits, sizeof power);
    Lanes found = x < -87.0f ? Lanes{} : p * power;
    return x == x ? found : x;
}

}  // namespace glm5
