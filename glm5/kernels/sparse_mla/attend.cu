// Attention of one query over a share of its keys, on Hopper: what sparse_mla/triton.py computes in `_attend`, for few
// heads (8 or 16) and latents in bfloat16 or, with FP8, rows of codes, scales and a rotated part (kernels/fp8_pool.py).
//
// Four warps fetch: blocks of 64 latents are under way or being read at any time. Eight warps compute. Keys are the rows
// of the matrix units' tile and heads its columns, so 8 heads are not padded:
//
//     logits[n, h] = latent[n] . q[h]       warp w: keys 16 (w % 4).., half w / 4 of the dimensions
//     out[c, h] = sum_n latent[n, c] p[n, h]     warp w: c in C / 8 (w..w+1)
//
// Each of the eight has the softmax of all 64 keys, so one barrier a block is enough.
//
// Codes are multiplied as they are, in float16, which holds each of them: a group's scale is multiplied to its part of a
// logit, and to p of its values. Products take 16 inputs in any order that both sides have: of codes, a lane has four
// that lie together, or two by two of a pair of keys.
//
// `scale` is a float's bits: of logits, by the logarithm of 2.
//
// Compiled with H, C, R, Z (slots of a page), FP8, STAGES; C a multiple of 128 (of 512 with FP8), C + R of 64.

#include "hopper.cuh"

constexpr int L = C + R, KEYS = 64, WARPS = 8, FETCHING = 4, TILES = H / 8;
constexpr int ROW = FP8 ? C + C / 32 + 2 * R : 2 * L;   // bytes in memory
constexpr int PITCH = ROW + (ROW / 16 % 2 ? 0 : 16);    // between rows here: those read together lie in other banks
constexpr int STAGE = KEYS * PITCH;
constexpr int LOGITS = H + 4;                 // floats between keys' logits, for the same reason
constexpr int HALF = KEYS * LOGITS;
constexpr int STEPS = L / 32;                 // of 16 dimensions, in half of them
constexpr int CODES = FP8 ? C / 32 : 0;       // of these, of codes
constexpr int GROUPS = FP8 ? C / 256 : 2;     // of 128 codes with a scale, in half of them; else chains of products
constexpr int ROWS = C / (16 * WARPS);        // tiles of 16 values of a warp
constexpr float UNIT = FP8 ? 256 : 1;         // of p times a scale, so that float16 has all that matters of it

#ifndef ON_CPU
static __device__ void load4(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

static __device__ void load4_transposed(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

#define ADD_PRODUCT(type)                                                                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, "            \
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                             \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool F16> static __device__ void add_product_of(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (F16)
        ADD_PRODUCT("f16");
    else
        ADD_PRODUCT("bf16");
}

static __device__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ u32 as_halves(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The two lower codes of four, and the two upper ones.
static __device__ void widen(u32 codes, u32& low, u32& high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high) : "r"(codes));
}

// 16 bytes, or as many zeros.
static __device__ void fetch_or_clear(u32 to, const u8* from, bool is) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(is ? 16 : 0) : "memory");
}
#endif

// Of two numbers in bfloat16.
static __device__ u32 in_float16(u32 pair) {
    return as_halves(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000));
}

struct Keys {
    const int *keys, *pages;
    int num_keys, end;

    // The key at `place`, -1 for none.
    __device__ int at(int place) const {
        if (place >= num_keys) return -1;
        const int key = keys ? keys[place] : place;
        return key < end ? key : -1;
    }
};

// Blocks start..stop-1 to shared memory, one after the other, as places there become free; zeros for keys that are none.
// Eight threads have a row, 16 bytes of each of its lines; a thread has rows of four.
static __device__ void fetch(const Keys& k, const u8* latent, u32 page_stride, u32 row_stride, int start, int stop,
                             u32 data, int* seen, u32 full, u32 empty) {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const int row = (threadIdx.x / 32 - WARPS) * 16 + lane / 8;
    int key[STAGES][4], next[STAGES][4];
    u64 offset[STAGES][4];
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) key[s][r] = k.at((start + s) * KEYS + row + 4 * r);
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int some = max(key[s][r], 0);
            offset[s][r] = (u64)k.pages[some / Z] * page_stride + (u64)(some % Z) * row_stride;
            next[s][r] = k.at((start + STAGES + s) * KEYS + row + 4 * r);
        }
    u32 parity = 1;
    for (int first = start; first < stop; first += STAGES, parity ^= 1) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            if (first + s >= stop) break;
            wait(empty + 8 * s, parity);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (chunk == 0) seen[s * KEYS + row + 4 * r] = key[s][r] >= 0;
                const u32 to = data + s * STAGE + (row + 4 * r) * PITCH + 16 * chunk;
                const u8* from = latent + offset[s][r] + 16 * chunk;
#pragma unroll
                for (int line = 0; line < (ROW + 127) / 128; ++line)
                    if (128 * line + 16 * chunk < ROW)
                        fetch_or_clear(to + 128 * line, from + 128 * line, key[s][r] >= 0);
            }
            arrive_with_copies(full + 8 * s);
            __syncwarp();
            if (lane == 0) arrive(full + 8 * s);  // what was written to `seen`, too
            // Known long before they are needed: the pages of the block after next, and the keys of the one behind.
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                key[s][r] = next[s][r];
                const int some = max(next[s][r], 0);
                offset[s][r] = (u64)k.pages[some / Z] * page_stride + (u64)(some % Z) * row_stride;
                next[s][r] = k.at((first + 2 * STAGES + s) * KEYS + row + 4 * r);
            }
        }
    }
    end_copies();
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + FETCHING), 1)
attend(const u16* q, const int* keys, const u8* latent, const int* table, const int* row, const int* end, void* out,
       float* lse, int num_columns, int num_keys, int page_stride, int row_stride, int scale) {
    __shared__ u64 barriers[2 * STAGES];
    __shared__ int seen[STAGES * KEYS];
    float* const logits = (float*)(shared_memory + STAGES * STAGE);
    const u32 data = shared_at(shared_memory), full = shared_at(barriers), empty = full + 8 * STAGES;
    const int share = blockIdx.x, num_shares = gridDim.x, t = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < 2 * STAGES)
        make_barrier(full + 8 * threadIdx.x, threadIdx.x < STAGES ? 33 * FETCHING : WARPS);
    __syncthreads();
    wait_for_earlier();
    let_later_begin();

    const int last = end[t];
    const int count = keys ? num_keys : last;
    const int blocks = last > 0 ? (count + KEYS - 1) / KEYS : 0;
    const int a_share = (blocks + num_shares - 1) / num_shares;
    const int start = min(share * a_share, blocks), stop = min(start + a_share, blocks);
    if (warp >= WARPS) {
        if (start < stop) {
            const int* own = keys ? keys + (u64)t * num_keys : nullptr;
            const Keys k = {own, table + (u64)row[t] * num_columns, count, last};
            fetch(k, latent, page_stride, row_stride, start, stop, data, seen, full, empty);
        }
        return;
    }

    const int group = lane / 4, pair = 2 * (lane % 4);  // of a product's columns; of its rows' values
    const int tile = warp % 4, half = warp / 4;
    u32 q_part[STEPS][TILES][2];
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const u16* const its = q + ((u64)t * H + 8 * n + group) * L;
            if (k < CODES) {
                const u32* const at = (const u32*)(its + half * C / 2 + 16 * k + 2 * pair);
                q_part[k][n][0] = in_float16(at[0]), q_part[k][n][1] = in_float16(at[1]);
            } else {
                const u16* const at = its + (FP8 ? C + half * R / 2 : 16 * half * STEPS) + 16 * (k - CODES) + pair;
                q_part[k][n][0] = *(const u32*)at, q_part[k][n][1] = *(const u32*)(at + 8);
            }
        }
    float top[TILES], sum[TILES], total[ROWS][TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        top[n] = -1e30f, sum[n] = 0;
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[m][n][i] = 0;
    }
    // What a lane reads of a tile of 16 keys by 32 bytes; of one that is transposed, of 16 keys by 16 dimensions or 32 by
    // 16 codes.
    const u32 here = (16 * tile + lane % 16) * PITCH + lane / 16 * 16;
    const u32 rotated = here + (FP8 ? C + C / 32 + half * R : 32 * half * STEPS);
    const u32 across = FP8 ? lane * PITCH + C / WARPS * warp
                           : (lane % 8 + lane / 16 * 8) * PITCH + 2 * (C / WARPS * warp + lane / 8 % 2 * 8);

    for (int block = start; block < stop; ++block) {
        const int index = block - start, stage = index % STAGES;
        const u32 at = data + stage * STAGE;
        float* const mine = logits + index % 2 * (2 * HALF);
        wait(full + 8 * stage, index / STAGES % 2);
        float part[GROUPS][TILES][4] = {};  // chains of products, which take turns
#pragma unroll
        for (int two = 0; two < CODES / 2; ++two) {
            const int g = two % GROUPS, k = 2 * (g * (CODES / 2 / GROUPS) + two / GROUPS);
            u32 codes[4], a[2][4];
            load4(codes, at + here + half * C / 2 + 16 * k);
            widen(codes[0], a[0][0], a[0][2]), widen(codes[1], a[0][1], a[0][3]);
            widen(codes[2], a[1][0], a[1][2]), widen(codes[3], a[1][1], a[1][3]);
#pragma unroll
            for (int n = 0; n < TILES; ++n) {
                add_product_of<true>(part[g][n], a[0], q_part[k][n][0], q_part[k][n][1]);
                add_product_of<true>(part[g][n], a[1], q_part[k + 1][n][0], q_part[k + 1][n][1]);
            }
        }
        if constexpr (FP8)
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // of keys `group` and 8 further
                const u8* const its = shared_memory + stage * STAGE + (16 * tile + group + 8 * i) * PITCH + C;
                const float* const scales = (const float*)its + half * GROUPS;
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                    for (int n = 0; n < TILES; ++n) part[g][n][2 * i] *= scales[g], part[g][n][2 * i + 1] *= scales[g];
            }
#pragma unroll
        for (int k = CODES; k < STEPS; ++k) {
            u32 a[4];
            load4(a, at + rotated + 32 * (k - CODES));
#pragma unroll
            for (int n = 0; n < TILES; ++n)
                add_product_of<false>(part[k % GROUPS][n], a, q_part[k][n][0], q_part[k][n][1]);
        }
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float* const to = mine + half * HALF + (16 * tile + group) * LOGITS + 8 * n + pair;
            float all[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) all[i] += part[g][n][i];
            *(float2*)to = make_float2(all[0], all[1]);
            *(float2*)(to + 8 * LOGITS) = make_float2(all[2], all[3]);
        }
        meet(1, 32 * WARPS);

        // Keys 16 k + pair + {0, 1, 8, 9} of head `group`.
        u32 p_part[KEYS / 16][TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float p[KEYS / 16][4], most = -1e30f;
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = 16 * k + pair + i % 2 + i / 2 * 8;
                    const float* from = mine + key * LOGITS + 8 * n + group;
                    const float logit = (from[0] + from[HALF]) * __int_as_float(scale);
                    p[k][i] = seen[stage * KEYS + key] ? logit : -1e30f;
                    most = fmaxf(most, p[k][i]);
                }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float now = fmaxf(top[n], most), shrink = exp2_of(top[n] - now);
            top[n] = now;
            sum[n] *= shrink;
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    p[k][i] = p[k][i] > -1e30f ? exp2_of(p[k][i] - now) : 0.0f;
                    sum[n] += p[k][i];
                }
                if constexpr (FP8) {
                    const u8* const its = shared_memory + stage * STAGE + (16 * k + pair) * PITCH + C + C / WARPS * warp / 128 * 4;
#pragma unroll
                    for (int i = 0; i < 4; ++i) p[k][i] *= UNIT * *(const float*)(its + (i % 2 + i / 2 * 8) * PITCH);
                    p_part[k][n][0] = as_halves(p[k][0], p[k][1]), p_part[k][n][1] = as_halves(p[k][2], p[k][3]);
                } else
                    p_part[k][n][0] = as_pair(p[k][0], p[k][1]), p_part[k][n][1] = as_pair(p[k][2], p[k][3]);
            }
            const float first = __shfl_sync(~0u, shrink, 4 * pair), second = __shfl_sync(~0u, shrink, 4 * pair + 4);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                total[m][n][0] *= first, total[m][n][1] *= second;
                total[m][n][2] *= first, total[m][n][3] *= second;
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int k = 0; k < KEYS / 16; k += 1 + FP8) {
                u32 a[1 + FP8][4];
                if constexpr (FP8) {
                    u32 codes[4];
                    load4_transposed(codes, at + across + 16 * k * PITCH + 16 * m);
#pragma unroll
                    for (int i = 0; i < 4; ++i)  // of a pair of keys: values of even places, then those of odd ones
                        widen(__byte_perm(codes[i], 0, 0x3120), a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
                } else
                    load4_transposed(a[0], at + across + 16 * k * PITCH + 32 * m);
#pragma unroll
                for (int i = 0; i < 1 + FP8; ++i)
#pragma unroll
                    for (int n = 0; n < TILES; ++n)
                        add_product_of<FP8>(total[m][n], a[i], p_part[k + i][n][0], p_part[k + i][n][1]);
            }
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
    }

    const u64 place = ((u64)t * num_shares + share) * H;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        float divisor = sum[n];
        divisor += __shfl_xor_sync(~0u, divisor, 1);
        divisor += __shfl_xor_sync(~0u, divisor, 2);
        const bool any = divisor > 0;
        divisor = any ? divisor : 1;
        const float unit = num_shares == 1 ? 0.6931471805599453f : 1;  // of one share, base e
        const float found = any ? (top[n] + log2f(divisor)) * unit : -__int_as_float(0x7f800000);
        if (warp == 0 && lane % 4 == 0) lse[place + 8 * n + group] = found;
        const float first = __shfl_sync(~0u, divisor, 4 * pair), second = __shfl_sync(~0u, divisor, 4 * pair + 4);
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u64 to = (place + 8 * n + pair + i % 2) * C + C / WARPS * warp + 16 * m +
                               (FP8 ? 2 * group + i / 2 : group + i / 2 * 8);
                const float value = total[m][n][i] / (UNIT * (i % 2 ? second : first));
                if (num_shares == 1)
                    ((u16*)out)[to] = (u16)as_pair(value, 0);
                else
                    ((float*)out)[to] = value;
            }
    }
}
