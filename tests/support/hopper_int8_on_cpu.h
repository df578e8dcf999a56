// hopper_on_cpu.h, and the int8 products of quantized_linear/tiles.cu.

#include "hopper_on_cpu.h"

template <int N> struct IntegerWgmma {
    static void run(int (&d)[N / 2], u64 w, u64 x) {
        if (w >> 62 != 1 || (w >> 32 & 0x3FFF) != 64 || x >> 32 != w >> 32) abort();
        const auto number = [](u64 matrix, int row, int k) {
            const u32 at = (matrix & 0x3FFF) << 4, start = at & ~1023u;
            return (int)(signed char)memory[start + place_of(at - start + 128 * row + k)];
        };
        for (int i = 0; i < N / 2; ++i) {
            const int row = current % 128 / 32 * 16 + current % 32 / 4 + i % 4 / 2 * 8;
            const int column = i / 4 * 8 + current % 4 * 2 + i % 2;
            for (int k = 0; k < 32; ++k) d[i] += number(w, row, k) * number(x, column, k);
        }
    }
};

template <int N> static void warpgroup_fence_operand(int (&)[N]) {}
