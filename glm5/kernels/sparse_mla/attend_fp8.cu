// Attention of one query over a split of its keys on Hopper, for 8 or 16 heads and FP8 latents: rows of 512 codes, four
// scales and a rotated part of 64 values in bfloat16 (kernels/fp8_pool.py).
//
// Four warps load blocks of 64 keys ahead. Two teams of four warps compute alternate blocks, each with its own softmax and
// sums:
//
//     logits[n, h] = latent[n] . q[h]            keys are rows, 16 a warp
//     out[c, h] = sum_n latent[n, c] p[n, h]     values are rows, 128 a warp: those of one scale
//
// Logits are FP8 products of the stored codes: q is split into two codes of four significant bits each, which together have
// those of bfloat16, and both are columns of one product. For out, codes are converted exactly to float16, and p of a key
// is multiplied by its scale.
//
// The splits of a query are a cluster of programs, each of which sums some values over all programs, in order.
//
// `scale` has the bits of a float: the scale of logits times log2(e).
//
// Compiled with H, Z (slots of a page), STAGES and SHARED_STORAGE, the bytes of shared memory besides the stages.

#include "sparse_mla/attend.cuh"

constexpr int C = 512, R = 64, L = C + R, TEAMS = 2, WARPS = 4, GROUPS = C / 128, TILES = H / 8;
constexpr int THREADS = COMPUTING + 32 * FETCHING;
static_assert(COMPUTING == 32 * TEAMS * WARPS);
constexpr int CODES = 128 * KEYS, ROPE = GROUPS * CODES;  // of a group; where the rotated part begins
constexpr int SCALES = ROPE + 2 * R * KEYS, STAGE = SCALES + 4 * GROUPS * KEYS;
constexpr int QUERY = 2 * H * 128;          // of a group of q: its upper codes, then the lower ones
constexpr int WEIGHTS = TILES * KEYS * 16;  // of p times the scales of a group
constexpr int PITCH = C + 8;                // of heads' sums, padded to avoid bank conflicts
constexpr float UNIT = 256;                 // factor of p times a scale, to use the range of float16
constexpr float LOWEST = -1e30f;

// Shared memory besides the stages.
struct SharedStorage {
    u8 query[GROUPS * QUERY], weights[TEAMS * GROUPS * WEIGHTS];
    float4 found[TEAMS * H];              // the largest logit and the sum of exponentials
    float shares[H * 2 * 16];             // factors of the teams' sums
    float top[TEAMS * WARPS * H], sum[TEAMS * WARPS * H], q_scale[H];
    int seen[STAGES * KEYS];
    u64 barriers[2 * STAGES];
};
static_assert(sizeof(SharedStorage) <= SHARED_STORAGE, "cuda.py counts less");

#ifndef ON_CPU
static __device__ u32 to_f16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The two lower codes of four, and the two upper ones.
static __device__ void widen(u32 codes, u32& low, u32& high) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high) : "r"(codes));
}

static __device__ float2 from_f16x2(u32 pair) {
    float2 two;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(two.x), "=f"(two.y) : "r"(pair));
    return two;
}
#endif

// Of lanes that are a multiple of APART apart: 1, all of the warp; 4, those of a column of products.
template <int APART> static __device__ float max_of(float x) {
#pragma unroll
    for (int across = 16; across >= APART; across /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, across));
    return x;
}

template <int APART> static __device__ float sum_of(float x) {
#pragma unroll
    for (int across = 16; across >= APART; across /= 2) x += __shfl_xor_sync(~0u, x, across);
    return x;
}

// Byte of the 16-byte part `part` of a row of 128 bytes, as matrix units read it.
static __device__ u32 part_at(int row, int part) { return 128 * row + 16 * (part ^ row % 8); }

// Codes of a head's query, by a warp: 16 neighbours a lane. What the upper four bits leave goes to the lower ones.
static __device__ void split_query(const u16* q, int head, u8* query, float* q_scale) {
    const int lane = threadIdx.x % 32;
    u32 pairs[8];
    float x[16], most = 0;
    *(uint4*)pairs = ((const uint4*)q)[2 * lane], *(uint4*)(pairs + 4) = ((const uint4*)q)[2 * lane + 1];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        x[i] = i % 2 ? high_of(pairs[i / 2]) : low_of(pairs[i / 2]);
        most = fmaxf(most, fabsf(x[i]));
    }
    most = max_of<1>(most);
    const float inverse = most > 1e-30f ? 448 / most : 1;  // smaller ones do not affect logits
    u32 upper[4], lower[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float* const values = x + 4 * i;
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] *= inverse;
        upper[i] = to_e4m3x2(values[0], values[1]) | (u32)to_e4m3x2(values[2], values[3]) << 16;
        u32 low, high;
        widen(upper[i], low, high);
        const float2 a = from_f16x2(low), b = from_f16x2(high);
        lower[i] = to_e4m3x2(values[0] - a.x, values[1] - a.y) | (u32)to_e4m3x2(values[2] - b.x, values[3] - b.y) << 16;
    }
    u8* const to = query + lane / 8 * QUERY;
    *(uint4*)(to + part_at(head, lane % 8)) = *(const uint4*)upper;
    *(uint4*)(to + part_at(H + head, lane % 8)) = *(const uint4*)lower;
    if (lane == 0) q_scale[head] = 1 / inverse;
}

// Softmax and sums of a team over blocks start + team, start + team + 2, ..
static __device__ void add_up(const u16* q, int start, int stop, float scale, u8* memory, SharedStorage& storage,
                              u32 full, u32 empty) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, team = warp / WARPS, tile = warp % WARPS;
    const int group = lane / 4, pair = 2 * (lane % 4);  // of a product's columns; of its rows' values
    const u32 data = shared_at(memory), query = shared_at(storage.query);
    u8* const weights = storage.weights + team * GROUPS * WEIGHTS;
    u32 q_part[R / 16][TILES][2];
#pragma unroll
    for (int k = 0; k < R / 16; ++k)
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const u16* const at = q + (8 * n + group) * L + C + 16 * k + pair;
            q_part[k][n][0] = *(const u32*)at, q_part[k][n][1] = *(const u32*)(at + 8);
        }
    float top[TILES][2], sum[TILES][2], q_scale[TILES][2], total[8][TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
            top[n][j] = LOWEST, sum[n][j] = 0, q_scale[n][j] = storage.q_scale[8 * n + pair + j];
#pragma unroll
        for (int m = 0; m < 8; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[m][n][i] = 0;
    }
    for (int block = start + team; block < stop; block += TEAMS) {
        const int index = block - start, stage = index % STAGES, key = 16 * tile + group;  // and 8 further
        const u32 at = data + stage * STAGE;
        mbarrier_wait(full + 8 * stage, index / STAGES % 2);
        fence_proxy_async();
        float part[GROUPS][H], rope_logits[TILES][4] = {};
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) multiply<2 * H>(part[g], at + g * CODES, query + g * QUERY);
#pragma unroll
        for (int k = 0; k < R / 16; ++k) {
            u32 a[4];
            ldmatrix_x4(a, at + ROPE + part_at(16 * tile + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int n = 0; n < TILES; ++n) mma_m16n8k16<false>(rope_logits[n], a, q_part[k][n][0], q_part[k][n][1]);
        }
        const float* const scales = (const float*)(memory + stage * STAGE + SCALES) + GROUPS * key;
        const float4 key_scales[2] = {*(const float4*)scales, *(const float4*)(scales + 8 * GROUPS)};
        const float of_group[GROUPS][2] = {{key_scales[0].x, key_scales[1].x}, {key_scales[0].y, key_scales[1].y},
                                           {key_scales[0].z, key_scales[1].z}, {key_scales[0].w, key_scales[1].w}};
        const bool is[2] = {storage.seen[stage * KEYS + key] != 0, storage.seen[stage * KEYS + key + 8] != 0};
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) finish<0>(part[g]);

        float p[TILES][4], rescale[TILES][2];
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = 0;
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    x += (part[g][4 * n + i] + part[g][4 * (TILES + n) + i]) * of_group[g][i / 2];
                p[n][i] = is[i / 2] ? (x * q_scale[n][i % 2] + rope_logits[n][i]) * scale : LOWEST;
            }
            const float2 most = {max_of<4>(fmaxf(p[n][0], p[n][2])), max_of<4>(fmaxf(p[n][1], p[n][3]))};
            if (group == 0) *(float2*)(storage.top + warp * H + 8 * n + pair) = most;
        }
        named_barrier_sync(1 + team, 32 * WARPS);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            float2 now = {top[n][0], top[n][1]};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float2 most = *(const float2*)(storage.top + (team * WARPS + w) * H + 8 * n + pair);
                now.x = fmaxf(now.x, most.x), now.y = fmaxf(now.y, most.y);
            }
            rescale[n][0] = exp2_approx(top[n][0] - now.x), rescale[n][1] = exp2_approx(top[n][1] - now.y);
            top[n][0] = now.x, top[n][1] = now.y;
#pragma unroll
            for (int i = 0; i < 4; ++i) p[n][i] = is[i / 2] ? exp2_approx(p[n][i] - top[n][i % 2]) : 0;
#pragma unroll
            for (int j = 0; j < 2; ++j) sum[n][j] = sum[n][j] * rescale[n][j] + p[n][j] + p[n][j + 2];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const float unit = of_group[g][i] * UNIT;
                    *(u32*)(weights + g * WEIGHTS + (n * KEYS + key + 8 * i) * 16 + 2 * pair) =
                        to_f16x2(p[n][2 * i] * unit, p[n][2 * i + 1] * unit);
                }
#pragma unroll
            for (int m = 0; m < 8; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) total[m][n][i] *= rescale[n][i % 2];
        }
        named_barrier_sync(1 + team, 32 * WARPS);
#pragma unroll
        for (int k = 0; k < KEYS / 32; ++k) {
            u32 b[TILES][4];
#pragma unroll
            for (int n = 0; n < TILES; ++n)
                ldmatrix_x4_transposed(b[n], shared_at(weights) + tile * WEIGHTS + (n * KEYS + 32 * k + lane) * 16);
#pragma unroll
            for (int m = 0; m < 8; ++m) {
                u32 codes[4], a[2][4];
                ldmatrix_x4_transposed(codes, at + tile * CODES + part_at(32 * k + lane, m));
#pragma unroll
                for (int i = 0; i < 4; ++i)  // of a pair of keys: values of even places, then those of odd ones
                    widen(__byte_perm(codes[i], 0, 0x3120), a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1]);
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int n = 0; n < TILES; ++n) mma_m16n8k16<true>(total[m][n], a[i], b[n][2 * i], b[n][2 * i + 1]);
            }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty + 8 * stage);
    }

    __syncthreads();  // the stages have been read and are reused: [team][head][PITCH]
    float* const sums = (float*)memory + team * H * PITCH;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
        const float2 all = {sum_of<4>(sum[n][0]), sum_of<4>(sum[n][1])};
        if (group == 0) {
            *(float2*)(storage.sum + warp * H + 8 * n + pair) = all;
            *(float2*)(storage.top + warp * H + 8 * n + pair) = {top[n][0], top[n][1]};
        }
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            float* const to = sums + (8 * n + pair) * PITCH + 128 * tile + 16 * m + 2 * group;
            *(float2*)to = {total[m][n][0], total[m][n][2]};
            *(float2*)(to + PITCH) = {total[m][n][1], total[m][n][3]};
        }
    }
    __syncthreads();
    if (threadIdx.x < TEAMS * H) {
        const int of_team = threadIdx.x / H, head = threadIdx.x % H;
        float all = 0;
        for (int w = 0; w < WARPS; ++w) all += storage.sum[(of_team * WARPS + w) * H + head];
        storage.found[threadIdx.x] = {storage.top[of_team * WARPS * H + head], all, 0, 0};
    }
}

// Sums this program's part of the results over teams and programs of the cluster.
static __device__ void merge(u32 data, SharedStorage& storage, int share, int num_shares, u16* out, float* lse) {
    const int lane = threadIdx.x % 32, parts = TEAMS * num_shares;
    for (int head = threadIdx.x / 32; head < H; head += THREADS / 32) {
        float4 found = {LOWEST, 0, 0, 0};
        if (lane < parts) found = load_peer_float4(shared_at(storage.found + lane % TEAMS * H + head), lane / TEAMS);
        const float top = max_of<1>(found.x), weight = exp2_approx(found.x - top), sum = sum_of<1>(weight * found.y);
        if (lane < parts) storage.shares[head * 32 + lane] = sum > 0 ? weight / (UNIT * sum) : 0;
        if (lane == 0 && share == 0) lse[head] = sum > 0 ? (top + log2f(sum)) * 0.6931471805599453f : -__int_as_float(0x7f800000);
    }
    __syncthreads();
    constexpr int FOURS = H * C / 4;
    const int count = (FOURS + num_shares - 1) / num_shares, last = min(FOURS, (share + 1) * count);
    for (int four = share * count + threadIdx.x; four < last; four += THREADS) {
        const int head = four / (C / 4), c = four % (C / 4) * 4;
        float4 all = {0, 0, 0, 0};
#pragma unroll 8
        for (int part = 0; part < parts; ++part) {
            const float4 x = load_peer_float4(data + 4 * ((part % TEAMS * H + head) * PITCH + c), part / TEAMS);
            const float weight = storage.shares[head * 32 + part];
            all.x += x.x * weight, all.y += x.y * weight, all.z += x.z * weight, all.w += x.w * weight;
        }
        *(uint2*)(out + head * C + c) = make_uint2(to_bf16x2(all.x, all.y), to_bf16x2(all.z, all.w));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_fp8(const u16* q, const int* keys, const u8* latent, const int* table, const int* row, const int* end, u16* out,
           float* lse, int num_columns, int num_keys, int page_stride, int row_stride, int scale) {
    u8* const memory = shared_memory + (-shared_at(shared_memory) & 1023);
    SharedStorage& storage = *(SharedStorage*)(memory + STAGES * STAGE);
    const u32 full = shared_at(storage.barriers), empty = full + 8 * STAGES;
    const int share = blockIdx.x, num_shares = gridDim.x, t = blockIdx.y;
    if (threadIdx.x < 2 * STAGES)
        mbarrier_init(full + 8 * threadIdx.x, threadIdx.x < STAGES ? 33 * FETCHING : WARPS);
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();

    const int last = end[t], count = keys ? num_keys : last;
    const int blocks = (count + KEYS - 1) / KEYS, share_len = (blocks + num_shares - 1) / num_shares;
    const int start = min(share * share_len, blocks), stop = min(start + share_len, blocks);
    if (threadIdx.x >= COMPUTING) {
        set_max_registers<104>();
        const Keys k = {keys ? keys + (u64)t * num_keys : nullptr, table + (u64)row[t] * num_columns, count, last};
        const auto copy = [](u32 to, int row, int chunk, const u8* from, bool is) {
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) cp_async_or_zero(to + g * CODES + part_at(row, chunk), from + 128 * g, is);
            cp_async_or_zero(to + (chunk ? ROPE + part_at(row, chunk - 1) : SCALES + 16 * row), from + C, is);
            if (chunk == 0) cp_async_or_zero(to + ROPE + part_at(row, 7), from + C + 128, is);
        };
        fetch<STAGE>(k, latent, page_stride, row_stride, start, stop, shared_at(memory), storage.seen, full, empty, copy);
        __syncthreads(), __syncthreads();  // as `add_up` does
    } else {
        set_max_registers<200>();
        const u16* const query = q + (u64)t * H * L;
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            const int head = 8 * n + threadIdx.x / 32;
            split_query(query + head * L, head, storage.query, storage.q_scale);
        }
        fence_proxy_async();
        named_barrier_sync(3, COMPUTING);
        add_up(query, start, stop, __int_as_float(scale), memory, storage, full, empty);
    }
    cluster_sync();
    merge(shared_at(memory), storage, share, num_shares, out + (u64)t * H * C, lse + (u64)t * H);
    cluster_sync_relaxed();
}
