// Experts of few tokens with int4 codes on Hopper. Each needed weight is read once; tokens are the columns of the MMA tile.
//
// A lane loads 16 bytes of a row, 32 codes. The order of inputs in a product is arbitrary if codes and activations agree, so
// no shuffles are needed: codes are unpacked by masks, and `prepare` permutes activations to their order. A warp requests
// all of its weights before the first product, and before the previous kernel, whose result it multiplies, has ended.
//
//     ACT   rows                     operands of the matrix units
//     0     bfloat16, as they are    bfloat16: 136 + code, assembled from bits, minus 136
//     1     int8, a scale each       int8: 16 * code, a nibble shifted to the upper half of its byte
//     2     e4m3, a scale each       float16, which represents them: 1032 + code, or 16 * code, minus the offset
//
// Compiled with ACT, GROUP (inputs that share a scale, a multiple of 128; 0: all of a row), D, F, A (experts a token),
// MANY (tokens may share an expert), ROWS (of x, held at a time), TILES (of 16 outputs, of a program of the second
// kernel), UP_BLOCKS and DOWN_BLOCKS (programs that a multiprocessor has room for).

#include "few_tokens.cuh"

constexpr int BYTES = ACT == 1 ? 1 : 2;       // of a value of a row
constexpr int CHUNK = 128;                    // inputs of which a lane has a quarter of 64 bytes
constexpr int WARPS = 8;                      // of the first kernel, which split the inputs
constexpr int CHUNKS = D / CHUNK, A_WARP = (CHUNKS + WARPS - 1) / WARPS;
constexpr int DOWN_CHUNKS = F / CHUNK;
constexpr int PITCH = D * BYTES + 64;         // of rows in shared memory, padded to avoid bank conflicts
constexpr int UP_SCALES = GROUP ? (D + GROUP - 1) / GROUP : 1, DOWN_SCALES = GROUP ? (F + GROUP - 1) / GROUP : 1;
constexpr float UNIT = ACT == 1 ? 0.0625f : 1.0f;
constexpr float QUANT_MAX = ACT == 1 ? 127.0f : 448.0f;

// For CPU tests, tests/support/cuda_on_cpu.h defines these functions.
#ifndef ON_CPU
static __device__ Vector16 load_row(const u8* at) {
    Vector16 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3]) : "l"(at) : "memory");
    return v;
}

// (a and mask) xor bits
static __device__ u32 mask_xor(u32 a, u32 mask, u32 bits) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

static __device__ u32 byte_perm(u32 a, u32 b, u32 which) { return __byte_perm(a, b, which); }

static __device__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

static __device__ u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Two numbers rounded to e4m3, as float16.
static __device__ u32 through_e4m3x2(float low, float high) {
    u32 d;
    asm("{\n.reg .b16 c;\ncvt.rn.satfinite.e4m3x2.f32 c, %2, %1;\ncvt.rn.f16x2.e4m3x2 %0, c;\n}"
        : "=r"(d) : "f"(low), "f"(high));
    return d;
}

static __device__ u16 to_bfloat16(float x) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(x));
    return d;
}

static __device__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ACT == 2
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
#endif
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#if ACT == 1
typedef int Sum;
#else
typedef float Sum;
#endif

// sum += the products of a word of codes of rows r and r + 8 with eight inputs.
static __device__ void add_word(Sum (&sum)[4], u32 first, u32 second, const u32* b) {
#if ACT == 1
    const u32 a[4] = {(first << 4) & 0xF0F0F0F0, (second << 4) & 0xF0F0F0F0, first & 0xF0F0F0F0, second & 0xF0F0F0F0};
    mma(sum, a, b[0], b[1]);
#else
    u32 v[2][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const u32 w = r ? second : first;
#if ACT == 2
        const u32 higher = w >> 8;
        v[r][0] = fma_f16x2(mask_xor(w, 0x000F000F, 0x64086408), 0x3C003C00, 0xE408E408);       // less 1032
        v[r][1] = fma_f16x2(mask_xor(w, 0x00F000F0, 0x64806480), 0x2C002C00, 0xD480D480);       // a 16th, less 72
        v[r][2] = fma_f16x2(mask_xor(higher, 0x000F000F, 0x64086408), 0x3C003C00, 0xE408E408);
        v[r][3] = fma_f16x2(mask_xor(higher, 0x00F000F0, 0x64806480), 0x2C002C00, 0xD480D480);
#else
#pragma unroll
        for (int i = 0; i < 4; ++i)
            v[r][i] = fma_bf16x2(mask_xor(w >> 4 * i, 0x000F000F, 0x43084308), 0x3F803F80, 0xC308C308);  // less 136
#endif
    }
    const u32 low[4] = {v[0][0], v[1][0], v[0][1], v[1][1]}, high[4] = {v[0][2], v[1][2], v[0][3], v[1][3]};
    mma(sum, low, b[0], b[1]);
    mma(sum, high, b[2], b[3]);
#endif
}

// total += sum times the scales of rows r and r + 8; sum = 0.
static __device__ void add_scaled(float (&total)[4], Sum (&sum)[4], const float (&scale)[2]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        total[k] += (float)sum[k] * scale[k / 2];
        sum[k] = 0;
    }
}

// Where eight values of a row, `unit` of them, lie: as lanes read them, 16 bytes of four lanes side by side.
static __device__ int place(int unit) {
    const int chunk = unit / 16, lane = unit / 4 % 4, word = unit % 4;
    if (BYTES == 1) return chunk * 128 + word / 2 * 64 + lane * 16 + word % 2 * 8;
    return chunk * 256 + word * 64 + lane * 16;
}

// Index of the scale of a chunk.
static __device__ int group_of(int chunk) { return GROUP ? chunk * CHUNK / (GROUP ? GROUP : 1) : 0; }

static __device__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
static __device__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }

static __device__ float max_abs(const Vector16& x) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) most = fmaxf(most, fmaxf(fabsf(low_of(x.x[i])), fabsf(high_of(x.x[i]))));
    return most;
}

static __device__ float max_abs(const float (&of_warp)[WARPS]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = fmaxf(most, of_warp[i]);
    return most;
}

static __device__ float scale_of(float most) {
    const float scale = most / QUANT_MAX;
    return scale == 0 ? 1.0f : scale;
}

// x / scale, rounded correctly without a division of its own.
static __device__ float quotient(float x, float scale, float inverse) {
    const float near = x * inverse;
    return fmaf(fmaf(-near, scale, x), inverse, near);
}

static __device__ u32 to_int8x4(float a, float b, float c, float d) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to nearest even
    const u32 low = byte_perm(__float_as_uint(a + magic), __float_as_uint(b + magic), 0x0040);
    return byte_perm(low, byte_perm(__float_as_uint(c + magic), __float_as_uint(d + magic), 0x0040), 0x5410);
}

// Stores eight consecutive values, quantized, in a row.
static __device__ void store_quantized(u8* row, int unit, const Vector16& x, float scale, float inverse) {
    u8* const to = row + place(unit);
#if ACT == 0
    *(Vector16*)to = {byte_perm(x.x[0], x.x[2], 0x5410), byte_perm(x.x[0], x.x[2], 0x7632),
                  byte_perm(x.x[1], x.x[3], 0x5410), byte_perm(x.x[1], x.x[3], 0x7632)};
#else
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        q[i] = quotient(i % 2 ? high_of(x.x[i / 2]) : low_of(x.x[i / 2]), scale, inverse);
#if ACT == 1
    ((u32*)to)[0] = to_int8x4(q[0], q[2], q[4], q[6]);
    ((u32*)to)[1] = to_int8x4(q[1], q[3], q[5], q[7]);
#else
    *(Vector16*)to = {through_e4m3x2(q[0], q[4]), through_e4m3x2(q[1], q[5]),
                      through_e4m3x2(q[2], q[6]), through_e4m3x2(q[3], q[7])};
#endif
#endif
}

// A lane's activations of a chunk, for four words of codes; zeros without a row.
struct Inputs {
    u32 x[4][2 * BYTES];

    __device__ Inputs(const u8* row, int chunk, int quarter, bool here) {
#pragma unroll
        for (int i = 0; i < 2 * BYTES; ++i) {
            Vector16 v = {0, 0, 0, 0};
            if (here) v = *(const Vector16*)(row + chunk * (CHUNK * BYTES) + i * 64 + quarter * 16);
#pragma unroll
            for (int k = 0; k < 4; ++k) (&x[0][0])[4 * i + k] = v.x[k];
        }
    }
};

// rows [T, D] in the order of the products, and their scales.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
prepare(const u8* x, u8* rows, float* row_scales) {
    __shared__ float most[WARPS];
    constexpr int UNITS = (D / 8 + 32 * WARPS - 1) / (32 * WARPS);
    const u64 t = blockIdx.x;
    pdl_wait();
    pdl_launch_dependents();
    Vector16 v[UNITS];
    float found = 0, x_scale = 1;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = i * 32 * WARPS + threadIdx.x;
        v[i] = {0, 0, 0, 0};
        if (D / 8 % (32 * WARPS) == 0 || unit < D / 8) v[i] = load_row(x + t * (2 * D) + unit * 16);
        found = fmaxf(found, max_abs(v[i]));
    }
    if (ACT) {
#pragma unroll
        for (int m = 16; m; m /= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, m));
        if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = found;
        __syncthreads();
        x_scale = scale_of(max_abs(most));
        if (threadIdx.x == 0) row_scales[t] = x_scale;
    }
    const float inverse = 1 / x_scale;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        const int unit = i * 32 * WARPS + threadIdx.x;
        if (D / 8 % (32 * WARPS) == 0 || unit < D / 8)
            store_quantized(rows + t * (D * BYTES), unit, v[i], x_scale, inverse);
    }
}

// h [T * A, F] in bfloat16 by pair; the program of an expert's first pair computes all of its pairs.
extern "C" __global__ void __launch_bounds__(32 * WARPS, UP_BLOCKS)
gate_up(const u8* rows, const float* row_scales, const int* experts, const u8* codes, const float* scales, u16* h,
        int num_pairs) {
    __shared__ float part[WARPS][ROWS][17];  // of each warp: 8 rows of gate, 8 of up
    __shared__ int pairs[MANY ? 256 : 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const int p = blockIdx.y;
    const int expert = experts[p];  // written by the kernel before the previous one, which has ended
    int count = 1, first = p;
    if (MANY) {
        count = 0, first = -1;
        for (int start = 0; start < num_pairs; start += 32) {
            const bool same = start + lane < num_pairs && experts[start + lane] == expert;
            const u32 found = __ballot_sync(~0u, same);
            if (found && first < 0) first = start + __ffs(found) - 1;
            if (first < p && first >= 0) return;
            if (same && warp == 0) pairs[count + __popc(found & ((1u << lane) - 1))] = start + lane;
            count += __popc(found);
        }
    } else if (threadIdx.x == 0) {
        pairs[0] = p;
    }
    const int f = 8 * blockIdx.x + group, start = warp * A_WARP;
    const u8* const at = codes + ((u64)expert * (2 * F) + f) * (D / 2) + quarter * 16;
    const float* const scale_at = scales + ((u64)expert * (2 * F) + f) * UP_SCALES;
    for (int begin = 0; begin < count; begin += ROWS) {
        const int columns = min(count - begin, ROWS);
        Vector16 w[A_WARP][2];
        float scale[GROUP ? A_WARP : 1][2];
#pragma unroll
        for (int i = 0; i < A_WARP; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (CHUNKS % WARPS == 0 || start + i < CHUNKS)
                    w[i][r] = load_no_allocate(at + (u64)r * F * (D / 2) + (start + i) * (CHUNK / 2));
#pragma unroll
        for (int i = 0; i < (GROUP ? A_WARP : 1); ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (!GROUP || CHUNKS % WARPS == 0 || start + i < CHUNKS)
                    scale[i][r] = load_scale(scale_at + r * F * UP_SCALES + group_of(start + i));
        if (begin == 0) {
            pdl_wait();
            pdl_launch_dependents();
        }
        __syncthreads();  // pairs are stored, and the last parts have been read
        // A warp loads the part of the rows that it multiplies.
        constexpr int PIECES = A_WARP * CHUNK * BYTES / 16;
        for (int c = 0; c < columns; ++c) {
            const int offset = start * (CHUNK * BYTES);
            const u8* const from = rows + (u64)(pairs[begin + c] / A) * (D * BYTES) + offset;
#pragma unroll
            for (int i = lane; i < PIECES; i += 32)
                if (CHUNKS % WARPS == 0 || offset + i * 16 < D * BYTES)
                    cp_async(memory + c * PITCH + offset + i * 16, from + i * 16);
        }
        cp_async_wait();
        __syncwarp();

        float total[4] = {};
        Sum sum[4] = {};
#pragma unroll
        for (int i = 0; i < A_WARP; ++i) {
            if (CHUNKS % WARPS && start + i >= CHUNKS) break;
            const Inputs in(memory + group * PITCH, start + i, quarter, group < columns);
#pragma unroll
            for (int j = 0; j < 4; ++j) add_word(sum, w[i][0].x[j], w[i][1].x[j], in.x[j]);
            if (GROUP) add_scaled(total, sum, scale[i]);
        }
        if (!GROUP) add_scaled(total, sum, scale[0]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int column = 2 * quarter + k % 2;
            if (column < columns) part[warp][column][k / 2 * 8 + group] = total[k];
        }
        __syncthreads();
        if (threadIdx.x < 8 * columns) {
            const int row = threadIdx.x % 8, c = threadIdx.x / 8;
            float gate = 0, up = 0, x_scale = 1;
#pragma unroll
            for (int k = 0; k < WARPS; ++k) gate += part[k][c][row], up += part[k][c][8 + row];
            if (ACT) x_scale = row_scales[pairs[begin + c] / A];
            gate *= x_scale * UNIT, up *= x_scale * UNIT;
            h[(u64)pairs[begin + c] * F + 8 * blockIdx.x + row] = to_bfloat16(gate / (1 + __expf(-gate)) * up);
        }
        if (!MANY) return;
    }
}

// out [T, D] in bfloat16, `plus` added if there is one: a warp for each choice of a token.
extern "C" __global__ void __launch_bounds__(32 * A, DOWN_BLOCKS)
down(const u8* h, const int* experts, const float* weights, const u8* codes, const float* scales, const u16* plus,
     u16* out) {
    __shared__ __align__(16) u8 rows[A][F * BYTES];
    __shared__ float part[A][16 * TILES];
    const int a = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quarter = lane % 4;
    const u64 pair = (u64)blockIdx.x * A + a;
    const int expert = experts[pair];
    const int d = blockIdx.y * (16 * TILES);
    const u8* const at = codes + ((u64)expert * D + d + group) * (F / 2) + quarter * 16;
    const float* const scale_at = scales + ((u64)expert * D + d + group) * DOWN_SCALES;
    Vector16 w[TILES][DOWN_CHUNKS][2];
    float scale[TILES][GROUP ? DOWN_CHUNKS : 1][2];
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < DOWN_CHUNKS; ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r) w[n][i][r] = load_no_allocate(at + (16 * n + 8 * r) * (F / 2) + i * (CHUNK / 2));
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < (GROUP ? DOWN_CHUNKS : 1); ++i)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                scale[n][i][r] = load_scale(scale_at + (16 * n + 8 * r) * DOWN_SCALES + group_of(i));
    const float share = weights[pair];
    pdl_wait();
    pdl_launch_dependents();
    const u64 result = (u64)blockIdx.x * D + d + threadIdx.x;
    const u32 added = plus && threadIdx.x < 16 * TILES ? plus[result] : 0;
    constexpr int UNITS = (F / 8 + 31) / 32;
    Vector16 x[UNITS];
    float found = 0;
#pragma unroll
    for (int i = 0; i < UNITS; ++i) {
        x[i] = {0, 0, 0, 0};
        if (F / 8 % 32 == 0 || 32 * i + lane < F / 8) x[i] = load_row(h + pair * (2 * F) + (32 * i + lane) * 16);
        found = fmaxf(found, max_abs(x[i]));
    }
    float h_scale = 1;
    if (ACT) {
#pragma unroll
        for (int m = 16; m; m /= 2) found = fmaxf(found, __shfl_xor_sync(~0u, found, m));
        h_scale = scale_of(found);
    }
    const float inverse = 1 / h_scale;
#pragma unroll
    for (int i = 0; i < UNITS; ++i)
        if (F / 8 % 32 == 0 || 32 * i + lane < F / 8) store_quantized(rows[a], 32 * i + lane, x[i], h_scale, inverse);
    __syncwarp();

    float total[TILES][4] = {};
    Sum sum[TILES][4] = {};
#pragma unroll
    for (int i = 0; i < DOWN_CHUNKS; ++i) {
        const Inputs in(rows[a], i, quarter, group == 0);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
#pragma unroll
            for (int j = 0; j < 4; ++j) add_word(sum[n], w[n][i][0].x[j], w[n][i][1].x[j], in.x[j]);
            if (GROUP) add_scaled(total[n], sum[n], scale[n][i]);
        }
    }
    if (quarter == 0) {
        const float by = share * h_scale * UNIT;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            if (!GROUP) add_scaled(total[n], sum[n], scale[n][0]);
            part[a][16 * n + group] = total[n][0] * by;
            part[a][16 * n + 8 + group] = total[n][2] * by;
        }
    }
    __syncthreads();
    if (threadIdx.x < 16 * TILES) {
        float y = 0;
#pragma unroll
        for (int i = 0; i < A; ++i) y += part[i][threadIdx.x];
        out[result] = plus ? to_bfloat16(low_of(to_bfloat16(y)) + low_of(added)) : to_bfloat16(y);
    }
}
