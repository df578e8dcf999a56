// The search of reference.py. All steps of a row are done before the next row, so that it stays in the L1 cache.
//
// A row is padded with zeros and summed in LANES partial sums, which are added in order: its bits depend on no other row.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int LANES = 32;

template <class T> struct Search {
    const T *w, *h, *starts;  // w [rows, width]; h [matrices or 1, groups, width] or null
    int64_t rows, width, rows_per_matrix, groups, one_h;
    int num_starts, steps, refine;
    T quant_min, quant_max;
    T* out;  // [rows]
};

// Adding and subtracting 1.5 * 2^(bits of the fraction - 1) rounds small numbers to nearest even.
template <class T> constexpr T ROUND = T(1.5) * T(int64_t(1) << (std::numeric_limits<T>::digits - 1));

template <class T, bool WEIGHTED>
void step(const T* w, const T* hw, const T* h, int64_t padded, T scale, T quant_min, T quant_max, T& found, T& explained) {
    T inverse = T(1) / scale, wq[LANES] = {}, qq[LANES] = {};
    for (int64_t at = 0; at < padded; at += LANES)
        for (int l = 0; l < LANES; ++l) {
            T near = w[at + l] * inverse;
            near = near > quant_min ? near : quant_min;
            near = near < quant_max ? near : quant_max;
            T q = (near + ROUND<T>) - ROUND<T>;
            wq[l] += hw[at + l] * q;
            qq[l] += WEIGHTED ? h[at + l] * (q * q) : q * q;
        }
    T sum_wq = 0, sum_qq = 0;
    for (int l = 0; l < LANES; ++l) sum_wq += wq[l], sum_qq += qq[l];
    T best = sum_wq / std::max(sum_qq, T(1e-30));
    found = best > 0 ? best : T(1);
    explained = best * sum_wq;
}

template <class T, bool WEIGHTED> T search(const Search<T>& of, const T* w, const T* hw, const T* h, int64_t padded) {
    T amax = 0;
    for (int64_t i = 0; i < of.width; ++i) amax = std::max(amax, w[i] < 0 ? -w[i] : w[i]);
    T first = amax / of.quant_max;
    if (first == 0) first = 1;
    T best = first, most = -std::numeric_limits<T>::infinity(), explained;
    for (int s = 0; s < of.num_starts; ++s) {
        T scale = first * of.starts[s];
        for (int i = 0; i < of.steps; ++i) {
            step<T, WEIGHTED>(w, hw, h, padded, scale, of.quant_min, of.quant_max, scale, explained);
            if (explained > most) most = explained, best = scale;
        }
    }
    for (int i = 0; i < of.refine; ++i) {
        T scale;
        step<T, WEIGHTED>(w, hw, h, padded, best, of.quant_min, of.quant_max, scale, explained);
        if (!(explained > most)) break;  // more steps would change nothing
        most = explained, best = scale;
    }
    return most > 0 ? best : first;
}

// `w`: scratch for three padded rows, zeros.
template <class T> void search_rows(const Search<T>& of, int64_t start, int64_t stop, T* w) {
    int64_t padded = (of.width + LANES - 1) / LANES * LANES;
    T *hw = w + padded, *h = hw + padded;
    for (int64_t row = start; row < stop; ++row) {
        std::memcpy(w, of.w + row * of.width, of.width * sizeof(T));
        if (of.h) {
            int64_t matrix = of.one_h ? 0 : row / of.rows_per_matrix;
            std::memcpy(h, of.h + (matrix * of.groups + row % of.groups) * of.width, of.width * sizeof(T));
            for (int64_t i = 0; i < of.width; ++i) hw[i] = w[i] * h[i];
            of.out[row] = search<T, true>(of, w, hw, h, padded);
        } else {
            of.out[row] = search<T, false>(of, w, w, w, padded);
        }
    }
}

template <class T> int run(const Search<T>& of, int num_threads) {
    int64_t each = (of.rows + num_threads - 1) / num_threads;
    int64_t row_scratch = 3 * ((of.width + LANES - 1) / LANES * LANES);
    std::vector<std::thread> others;
    try {
        std::vector<T> scratch(row_scratch * num_threads);
        others.reserve(num_threads);
        auto part = [&](int t) {
            search_rows(of, std::min(of.rows, t * each), std::min(of.rows, (t + 1) * each), scratch.data() + t * row_scratch);
        };
        int t = 1;
        try {
            for (; t < num_threads && t * each < of.rows; ++t) others.emplace_back(part, t);
        } catch (const std::system_error&) {  // no more threads: this one computes the rest
        }
        part(0);
        for (; t < num_threads; ++t) part(t);
        for (std::thread& other : others) other.join();
        return 0;
    } catch (const std::bad_alloc&) {  // before any thread was started
        return 1;
    }
}

}  // namespace

extern "C" int glm5_ssz_f32(const Search<float>* of, int num_threads) { return run(*of, num_threads); }
extern "C" int glm5_ssz_f64(const Search<double>* of, int num_threads) { return run(*of, num_threads); }
