// The functions of attend.cuh on a CPU: loads of tiles and conversions.

#include "hopper_on_cpu.h"

static u32 __byte_perm(u32 a, u32 b, u32 which) { return byte_perm(a, b, which); }
static u32 to_f16x2(float low, float high) { return float16_of(low) | (u32)float16_of(high) << 16; }

static void widen(u32 codes, u32& low, u32& high) {
    low = to_f16x2(of_e4m3(codes), of_e4m3(codes >> 8));
    high = to_f16x2(of_e4m3(codes >> 16), of_e4m3(codes >> 24));
}

static float2 from_f16x2(u32 pair) { return {of_float16(pair), of_float16(pair >> 16)}; }

static void cp_async_or_zero(u32 to, const u8* from, bool is) {
    if (is) return cp_async_16(to, from);
    memset(memory + to, 0, 16);
}

// Four matrices of 8 rows of 16 bytes, each of which eight lanes name: a lane has of row lane / 4 bytes 4 (lane % 4) and
// on.
static void ldmatrix_x4(u32 (&x)[4], u32 at) {
    if (at % 16) abort();
    u32(*all)[MAX_WORDS] = warp_exchange(&at, 1);
    for (int i = 0; i < 4; ++i)
        memcpy(&x[i], memory + all[8 * i + current % 32 / 4][0] + 4 * (current % 4), 4);
    __syncwarp();
}

// The same, transposed: of rows 2 (lane % 4) and the next, bytes 2 (lane / 4) and the next.
static void ldmatrix_x4_transposed(u32 (&x)[4], u32 at) {
    if (at % 16) abort();
    u32(*all)[MAX_WORDS] = warp_exchange(&at, 1);
    for (int i = 0; i < 8; ++i)
        memcpy((u16*)x + i, memory + all[8 * (i / 2) + current % 4 * 2 + i % 2][0] + 2 * (current % 32 / 4), 2);
    __syncwarp();
}
