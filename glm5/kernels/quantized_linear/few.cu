// Linear layer of few tokens with int8 codes and one scale per row on Hopper; tokens are the columns of the MMA tile.
//
// A program has 16 rows of weights, and its warps split the inputs. A lane loads 16 bytes of two rows of each chunk of 64
// inputs, and the same bytes of a token; the order of inputs in a product is arbitrary if both agree. A warp requests all
// of its weights before the kernel that quantizes the tokens has ended.
//
// Compiled with K (inputs, a multiple of 128), TILES (of 8 tokens, 1 or 2) and BLOCKS (programs that a multiprocessor has
// room for).

#include "few_tokens.cuh"

constexpr int CHUNK = 64, WARPS = 8;
constexpr int CHUNKS = K / CHUNK, A_WARP = (CHUNKS + WARPS - 1) / WARPS;
constexpr int STEP = A_WARP < 12 ? A_WARP : 12;  // chunks that a warp loads ahead
constexpr int COLUMNS = 8 * TILES;
constexpr int PITCH = K + 64;  // of tokens in shared memory, padded to avoid bank conflicts

// For CPU tests, tests/support/cuda_on_cpu.h defines these functions.
#ifndef ON_CPU
static __device__ u16 to_bfloat16(float x) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

static __device__ void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// out [T, O] in bfloat16, of x [T, K] with scales [T], and codes [O, K] with scales [O].
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
few(const u8* x, const float* x_scales, const u8* codes, const float* scales, u16* out, int num_tokens, int num_rows) {
    __shared__ int part[WARPS][16][COLUMNS + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int o = 16 * blockIdx.x, start = warp * A_WARP;
    const u8* const first = codes + (u64)min(o + group, num_rows - 1) * K + quarter * 16;
    const u8* const second = codes + (u64)min(o + group + 8, num_rows - 1) * K + quarter * 16;
    const int row = threadIdx.x % 16, column = threadIdx.x / 16;  // of a result
    const float scale = load_scale(scales + min(o + row, num_rows - 1));
    int sum[TILES][4] = {};
    for (int base = 0; base < A_WARP; base += STEP) {
        Vector16 w[STEP][2];
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            const int chunk = start + base + i;
            if ((A_WARP % STEP == 0 || base + i < A_WARP) && (CHUNKS % WARPS == 0 || chunk < CHUNKS)) {
                w[i][0] = load_no_allocate(first + chunk * CHUNK);
                w[i][1] = load_no_allocate(second + chunk * CHUNK);
            }
        }
        if (base == 0) {
            pdl_wait();
            pdl_launch_dependents();
            // A warp loads the part of the tokens that it multiplies.
            const int offset = start * CHUNK, size = min(A_WARP * CHUNK, K - offset);
            for (int c = 0; c < num_tokens; ++c)
                for (int i = 16 * lane; i < size; i += 512)
                    cp_async(memory + c * PITCH + offset + i, x + (u64)c * K + offset + i);
            cp_async_wait();
            __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < STEP; ++i) {
            const int chunk = start + base + i;
            if ((A_WARP % STEP && base + i >= A_WARP) || (CHUNKS % WARPS && chunk >= CHUNKS)) break;
            const u32 low[4] = {w[i][0].x[0], w[i][1].x[0], w[i][0].x[1], w[i][1].x[1]};
            const u32 high[4] = {w[i][0].x[2], w[i][1].x[2], w[i][0].x[3], w[i][1].x[3]};
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                Vector16 b = {0, 0, 0, 0};
                if (8 * n + group < num_tokens)
                    b = *(const Vector16*)(memory + (8 * n + group) * PITCH + chunk * CHUNK + quarter * 16);
                mma(sum[n], low, b.x[0], b.x[1]);
                mma(sum[n], high, b.x[2], b.x[3]);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) part[warp][k / 2 * 8 + group][8 * n + 2 * quarter + k % 2] = sum[n][k];
    __syncthreads();
    if (column < min(COLUMNS, num_tokens) && o + row < num_rows) {
        int total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) total += part[i][row][column];
        out[(u64)column * num_rows + o + row] = to_bfloat16((float)total * scale * x_scales[column]);
    }
}
