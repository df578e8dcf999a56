// The functions of prompt_attention/attend.cu on a CPU: products of bfloat16.

#include "hopper_on_cpu.h"

static float number_at(u64 matrix, u32 byte) {
    u16 bits;
    memcpy(&bits, memory + ((matrix & 0x3FFF) << 4 & ~1023u) + place_of(((matrix & 0x3FFF) << 4 & 1023) + byte), 2);
    return of_bfloat16(bits);
}

// Warp w has rows 16 w and on; a lane of them lane / 4 and 8 further, of every eight columns 2 (lane % 4) and the next.
static void add_logits(float (&d)[32], u64 q, u64 k, int more) {
    if (q >> 62 != 1 || (q >> 32 & 0x3FFF) != 64 || k >> 32 != q >> 32) abort();
    for (int i = 0; i < 32; ++i) {
        const int row = current % 128 / 32 * 16 + current % 32 / 4 + i % 4 / 2 * 8;
        const int column = i / 4 * 8 + current % 4 * 2 + i % 2;
        if (!more) d[i] = 0;
        for (int n = 0; n < 16; ++n) d[i] += number_at(q, 128 * row + 2 * n) * number_at(k, 128 * column + 2 * n);
    }
}

// p: rows as above; of 16 columns 2 (lane % 4) and the next, for both rows, then those 8 behind.
static void add_values(float (&d)[128], const u32* p, u64 v) {
    if (v >> 62 != 1 || (v & 63) || (v >> 32 & 0x3FFF) != 64) abort();
    u32(*all)[MAX_WORDS] = warp_exchange(p, 4);
    for (int i = 0; i < 128; ++i) {
        const int column = i / 4 * 8 + current % 4 * 2 + i % 2, boxes = column / 64 * (v >> 16 & 0x3FFF);
        for (int n = 0; n < 16; ++n) {
            const u32 pair = all[current % 32 / 4 * 4 + n % 8 / 2][i % 4 / 2 + n / 8 * 2];
            d[i] += of_bfloat16(n % 2 ? pair >> 16 : pair) * number_at(v + boxes, 128 * n + column % 64 * 2);
        }
    }
}

template <int N> static void warpgroup_fence_registers(u32 (&)[N]) {}
static void compute_now(float, u32) {}
