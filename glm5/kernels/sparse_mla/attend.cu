// Attention of one query over a split of its keys on Hopper, as `_attend` in sparse_mla/triton.py, for 8 or 16 heads and
// latents in bfloat16.
//
// Four warps load blocks of 64 latents ahead, eight warps compute. Keys are the rows of the MMA tile and heads its columns,
// so 8 heads need no padding:
//
//     logits[n, h] = latent[n] . q[h]       warp w: keys 16 (w % 4).., half w / 4 of the dimensions
//     out[c, h] = sum_n latent[n, c] p[n, h]     warp w: c in C / 8 (w..w+1)
//
// Each of the eight warps computes the softmax of all 64 keys, so one barrier per block is enough.
//
// `scale` has the bits of a float: the scale of logits times log2(e).
//
// Compiled with H, C, R, Z (slots of a page), STAGES; C a multiple of 128, C + R of 64.

#include "sparse_mla/attend.cuh"

constexpr int L = C + R, WARPS = COMPUTING / 32, TILES = H / 8;
constexpr int ROW = 2 * L;                              // bytes
constexpr int PITCH = ROW + (ROW / 16 % 2 ? 0 : 16);    // of rows in shared memory, padded to avoid bank conflicts
constexpr int STAGE = KEYS * PITCH;
constexpr int LOGITS = H + 4;                 // floats between keys' logits, for the same reason
constexpr int HALF = KEYS * LOGITS;
constexpr int STEPS = L / 32;                 // of 16 dimensions, in half of them
constexpr int CHAINS = 2;                     // independent chains of products, to hide latency
constexpr int ROWS = C / (16 * WARPS);        // tiles of 16 values of a warp

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
        mbarrier_init(full + 8 * threadIdx.x, threadIdx.x < STAGES ? 33 * FETCHING : WARPS);
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();

    const int last = end[t];
    const int count = keys ? num_keys : last;
    const int blocks = last > 0 ? (count + KEYS - 1) / KEYS : 0;
    const int share_len = (blocks + num_shares - 1) / num_shares;
    const int start = min(share * share_len, blocks), stop = min(start + share_len, blocks);
    if (warp >= WARPS) {
        if (start < stop) {
            const int* own = keys ? keys + (u64)t * num_keys : nullptr;
            const Keys k = {own, table + (u64)row[t] * num_columns, count, last};
            const auto copy = [](u32 to, int row, int chunk, const u8* from, bool is) {
#pragma unroll
                for (int line = 0; line < (ROW + 127) / 128; ++line)
                    if (128 * line + 16 * chunk < ROW)
                        cp_async_or_zero(to + row * PITCH + 16 * chunk + 128 * line, from + 128 * line, is);
            };
            fetch<STAGE>(k, latent, page_stride, row_stride, start, stop, data, seen, full, empty, copy);
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
            const u16* const at = q + ((u64)t * H + 8 * n + group) * L + 16 * (half * STEPS + k) + pair;
            q_part[k][n][0] = *(const u32*)at, q_part[k][n][1] = *(const u32*)(at + 8);
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
    // Addresses for ldmatrix of a tile of 16 keys by 16 dimensions, and of a transposed one.
    const u32 here = (16 * tile + lane % 16) * PITCH + lane / 16 * 16 + 32 * half * STEPS;
    const u32 across = (lane % 8 + lane / 16 * 8) * PITCH + 2 * (C / WARPS * warp + lane / 8 % 2 * 8);

    for (int block = start; block < stop; ++block) {
        const int index = block - start, stage = index % STAGES;
        const u32 at = data + stage * STAGE;
        float* const block_logits = logits + index % 2 * (2 * HALF);
        mbarrier_wait(full + 8 * stage, index / STAGES % 2);
        float part[CHAINS][TILES][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            u32 a[4];
            ldmatrix_x4(a, at + here + 32 * k);
#pragma unroll
            for (int n = 0; n < TILES; ++n)
                mma_m16n8k16<false>(part[k % CHAINS][n], a, q_part[k][n][0], q_part[k][n][1]);
        }
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float* const to = block_logits + half * HALF + (16 * tile + group) * LOGITS + 8 * n + pair;
            float all[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int g = 0; g < CHAINS; ++g) all[i] += part[g][n][i];
            *(float2*)to = make_float2(all[0], all[1]);
            *(float2*)(to + 8 * LOGITS) = make_float2(all[2], all[3]);
        }
        named_barrier_sync(1, 32 * WARPS);

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
                    const float* from = block_logits + key * LOGITS + 8 * n + group;
                    const float logit = (from[0] + from[HALF]) * __int_as_float(scale);
                    p[k][i] = seen[stage * KEYS + key] ? logit : -1e30f;
                    most = fmaxf(most, p[k][i]);
                }
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            const float now = fmaxf(top[n], most), rescale = exp2_approx(top[n] - now);
            top[n] = now;
            sum[n] *= rescale;
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    p[k][i] = p[k][i] > -1e30f ? exp2_approx(p[k][i] - now) : 0.0f;
                    sum[n] += p[k][i];
                }
                p_part[k][n][0] = to_bf16x2(p[k][0], p[k][1]), p_part[k][n][1] = to_bf16x2(p[k][2], p[k][3]);
            }
            const float first = __shfl_sync(~0u, rescale, 4 * pair), second = __shfl_sync(~0u, rescale, 4 * pair + 4);
#pragma unroll
            for (int m = 0; m < ROWS; ++m) {
                total[m][n][0] *= first, total[m][n][1] *= second;
                total[m][n][2] *= first, total[m][n][3] *= second;
            }
        }
#pragma unroll
        for (int m = 0; m < ROWS; ++m)
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k) {
                u32 a[4];
                ldmatrix_x4_transposed(a, at + across + 16 * k * PITCH + 32 * m);
#pragma unroll
                for (int n = 0; n < TILES; ++n) mma_m16n8k16<false>(total[m][n], a, p_part[k][n][0], p_part[k][n][1]);
            }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + 8 * stage);
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
                const u64 to = (place + 8 * n + pair + i % 2) * C + C / WARPS * warp + 16 * m + group + i / 2 * 8;
                const float value = total[m][n][i] / (i % 2 ? second : first);
                if (num_shares == 1)
                    ((u16*)out)[to] = (u16)to_bf16x2(value, 0);
                else
                    ((float*)out)[to] = value;
            }
    }
}
