// Products of rows with matrices: y[t, o] = sum over k of x[t, k] w[k, o], where neighbours in o lie side by side.
//
// A tile of outputs, some rows by some vectors of columns, is held in registers while k runs. Every output is one sum
// in the order of k, whatever the tile: so its bits depend neither on the number of rows nor on the place of a row.
//
// Weights are packed once for this (cpu_layer/packed.py): panels of PANEL columns, each [width, PANEL].
#pragma once

#include <algorithm>

#include "vectors.h"

namespace glm5 {

// x[t, k] = at[t * row + k * step]
struct Rows {
    const float* at;
    int64_t row, step = 1;
};

// w[k, o] = at[o / PANEL * panel + k * step + o % PANEL]. Vectors are read whole: there is memory behind the last one.
struct Matrix {
    const float* at;
    int64_t panel, step = PANEL;
};

constexpr int padded(int outs) { return (outs + PANEL - 1) / PANEL * PANEL; }

inline Matrix packed(const float* weight, int width) { return {weight, int64_t(width) * PANEL}; }

// A matrix [*, outs] as it lies, `step` apart.
inline Matrix plain(const float* at, int64_t step) { return {at, PANEL, step}; }

// The products of ROWS numbers by VECTORS vectors. Written out by the compiler, so that all sums stay in registers.
template <int... VECTOR, int... PAIR>
inline void add_products(Lanes* sums, const float* const* x, int64_t k, const float* const* panels,
                         std::integer_sequence<int, VECTOR...>, std::integer_sequence<int, PAIR...>) {
    constexpr int VECTORS = sizeof...(VECTOR);
    const Lanes by[] = {load(panels[VECTOR / PANEL_VECTORS] + VECTOR % PANEL_VECTORS * LANES)...};
    ((sums[PAIR] = multiply_add(by[PAIR % VECTORS], spread(x[PAIR / VECTORS][k]), sums[PAIR])), ...);
}

template <int ROWS, int VECTORS>
inline void tile(Rows x, Matrix w, int width, int count, float* y, int64_t y_row, bool adds) {
    constexpr std::make_integer_sequence<int, VECTORS> vectors{};
    constexpr std::make_integer_sequence<int, ROWS * VECTORS> pairs{};
    constexpr int PANELS = (VECTORS + PANEL_VECTORS - 1) / PANEL_VECTORS;
    Lanes sums[ROWS * VECTORS] = {};
    const float *rows[ROWS], *panels[PANELS];
    for (int row = 0; row < ROWS; ++row) rows[row] = x.at + row * x.row;
    for (int panel = 0; panel < PANELS; ++panel) panels[panel] = w.at + panel * w.panel;
    for (int64_t k = 0, end = width * x.step; k != end; k += x.step) {
        add_products(sums, rows, k, panels, vectors, pairs);
        for (int panel = 0; panel < PANELS; ++panel) panels[panel] += w.step;
    }
    for (int row = 0; row < ROWS; ++row)
        for (int vector = 0; vector < VECTORS; ++vector) {
            float* to = y + row * y_row + vector * LANES;
            Lanes found = sums[row * VECTORS + vector];
            int rest = count - vector * LANES;
            if (rest >= LANES)
                store(to, adds ? load(to) + found : found);
            else
                store_some(to, adds ? load_some(to, rest) + found : found, rest);
        }
}

struct Product {
    Rows x;
    Matrix w;
    int width, outs;
    float* y;
    int64_t y_row;
    bool adds;
};

// Rows [first, end), ROWS at a time, by columns from `out` on, VECTORS at a time, then half as many.
template <int ROWS, int VECTORS>
inline void columns(const Product& p, int first, int end, int out) {
    for (; p.outs - out > (VECTORS - 1) * LANES; out += VECTORS * LANES) {
        Matrix w = p.w;
        w.at += out / PANEL * w.panel + out % PANEL;
        int count = std::min(p.outs - out, VECTORS * LANES);
        for (int row = first; row < end; row += ROWS)
            tile<ROWS, VECTORS>({p.x.at + row * p.x.row, p.x.row, p.x.step}, w, p.width, count,
                                p.y + row * p.y_row + out, p.y_row, p.adds);
    }
    if constexpr (VECTORS > 1)
        if (out < p.outs) columns<ROWS, VECTORS / 2>(p, first, end, out);
}

template <int ROWS>
inline int rows_from(const Product& p, int first, int rows) {
    constexpr int MOST = ROWS == 1 ? 8 : MOST_SUMS / ROWS, VECTORS = ROWS == 12 ? 1 : MOST >= 8 ? 8 : MOST >= 4 ? 4 : 2;
    int end = rows - (rows - first) % ROWS;
    if (first < end) columns<ROWS, VECTORS>(p, first, end, 0);
    return end;
}

// y[t, o] = sum over k, for `rows` rows and `outs` columns; or y += that, if it `adds`. In one place: it is long.
__attribute__((noinline)) inline void multiply(Rows x, int rows, Matrix w, int width, int outs, float* y, int64_t y_row,
                                               bool adds = false) {
    Product p{x, w, width, outs, y, y_row, adds};
    int row = outs <= LANES ? rows_from<12>(p, 0, rows) : 0;  // sums of six rows alone would wait for each other
    row = rows_from<6>(p, row, rows);
    row = rows_from<4>(p, row, rows);
    row = rows_from<3>(p, row, rows);
    row = rows_from<2>(p, row, rows);
    rows_from<1>(p, row, rows);
}

}  // namespace glm5
