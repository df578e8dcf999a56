// Causal attention within prompts on Hopper, with expanded keys and values of 256 in bfloat16.
//
// A program has 128 queries of a head, half of them per warp group, and reads their keys in blocks of 64. One thread issues
// loads of blocks of keys and values into a ring, in the order of use. While wgmma multiplies p by values, a warp group
// computes the next p, and the other group's products overlap with both.
//
//     logits[t, s] = q[t] . [k[s], rope[s]]      out[t] = sum_s p[t, s] v[s]
//
// With SHARES 2 each program of a cluster of two has half of the blocks. At the end the first one merges both results for
// the first group's queries, the second one for the second group's.
//
// `scale` has the bits of a float: the scale of logits times log2(e). With QUANTIZE the result is act_quant of the values
// rounded to bfloat16.

#include "hopper.cuh"

constexpr int GROUPS = 2, QUERIES = 64, KEYS = 64, PARTS = 4, SLOTS = 5;  // of a group, of a block; 128 bytes each
constexpr int BOX = 64 * 128, TILE = PARTS * BOX, CONSUMERS = 128 * GROUPS, THREADS = CONSUMERS + 128, VALUES = 256;
constexpr int NOPE_PARTS = 3;  // of a key; the rotated part is the last

struct SharedStorage {
    u64 full[SLOTS], empty[SLOTS], q_full;
    int least[4], most[4];
};
static_assert(sizeof(SharedStorage) <= SHARED_STORAGE, "cuda.py counts less");

#ifndef ON_CPU
#define TO127                                                                                                     \
    TO63 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
         "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "     \
         "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
         "%120, %121, %122, %123, %124, %125, %126, %127"

// wgmma of 64 rows by 64 columns over 16 bfloat16 values; `more`: added to d.
static __device__ void add_logits(float (&d)[32], u64 q, u64 k, int more) {
    asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TO31 "}, %32, %33, more, 1, 1, 0, 0;\n}"
                 : R16(0), R16(16) : "l"(q), "l"(k), "r"(more));
}

// wgmma of 64 rows of 16 values of p, from registers in the layout of logits, by 16 rows of 256.
static __device__ void add_values(float (&d)[128], const u32* p, u64 v) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" TO127 "}, {%128, %129, %130, %131}, %132, "
                 "1, 1, 1, 1;"
                 : R16(0), R16(16), R16(32), R16(48), R16(64), R16(80), R16(96), R16(112)
                 : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));
}

// Forces a sum, which is not negative, to be computed before later instructions: the assembler would delay it until the
// products have ended.
static __device__ void compute_now(float sum, u32 at) {
    asm volatile("{\n.reg .pred is;\nsetp.lt.f32 is, %0, 0f00000000;\n@is st.volatile.shared.f32 [%1], %0;\n}"
                 ::"f"(sum), "r"(at) : "memory");
}

template <int N> static __device__ void warpgroup_fence_registers(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
#endif

// wgmma descriptor of 16 rows of values, in consecutive boxes of 64 columns.
static __device__ u64 values_descriptor(u32 at) {
    return (u64)(at >> 4 & 0x3FFF) | (u64)(BOX / 16) << 16 | 64ull << 32 | 1ull << 62;
}

static __device__ void begin_logits(float (&s)[32], u32 q, u32 k) {
    warpgroup_fence_operand(s);
    warpgroup_arrive();
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            add_logits(s, matrix_descriptor(q + part * BOX) + 2 * i, matrix_descriptor(k + part * BOX) + 2 * i, part + i);
    warpgroup_commit_batch();
}

static __device__ void begin_values(float (&out)[128], u32 (&p)[16], u32 v) {
    warpgroup_fence_operand(out);
    warpgroup_fence_registers(p);
    warpgroup_arrive();
#pragma unroll
    for (int i = 0; i < 4; ++i) add_values(out, p + 4 * i, values_descriptor(v + 16 * 128 * i));
    warpgroup_commit_batch();
}

static __device__ float infinity() { return __int_as_float(0x7F800000); }

// Of a thread's two rows: the largest logit, the sum of its exponentials.
struct Softmax {
    float top[2], sum[2], rescale[2];
    int t[2], first[2];

    // Replaces logits s by p; `rescale` is the factor of earlier sums.
    template <bool MASKED> __device__ void update(float (&s)[32], int block, float scale) {
        const int key = block * KEYS + threadIdx.x % 4 * 2;
        float most[2] = {-infinity(), -infinity()}, base[2];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int other = key + i / 4 * 8 + i % 2, r = i % 4 / 2;
            if (MASKED && (other > t[r] || other < first[r])) s[i] = -infinity();
            most[r] = fmaxf(most[r], s[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            most[r] = fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 1));
            most[r] = fmaxf(fmaxf(most[r], __shfl_xor_sync(~0u, most[r], 2)), top[r]);
            base[r] = MASKED && most[r] == -infinity() ? 0 : most[r] * scale;
            rescale[r] = exp2_approx(top[r] * scale - base[r]);
            top[r] = most[r], sum[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            s[i] = exp2_approx(s[i] * scale - base[i % 4 / 2]);
            sum[i % 4 / 2] += s[i];
        }
    }
};

static __device__ void round_p(const float (&s)[32], u32 (&p)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) p[i] = to_bf16x2(s[2 * i], s[2 * i + 1]);
}

// Order of blocks in the ring: keys 0, keys 1, values 0, keys 2, values 1, .., of `count` blocks.
struct Ring {
    u32 data, full, empty;
    int count;

    static __device__ int of_keys(int j) { return j ? 2 * j - 1 : 0; }
    __device__ int of_values(int j) const { return j < count - 1 ? 2 * j + 2 : 2 * count - 1; }

    __device__ u32 wait_for(int item) const {
        mbarrier_wait(full + 8 * (item % SLOTS), item / SLOTS % 2);
        return data + item % SLOTS * TILE;
    }
    __device__ void release(int item) const {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * (item % SLOTS));
    }
};

static __device__ void fetch(const Ring& ring, const TensorMap* k, const TensorMap* rope, const TensorMap* v, int from,
                             int head) {
    for (int item = 0; item < 2 * ring.count; ++item) {
        const bool last = item == 2 * ring.count - 1, is_keys = item == 0 || item % 2 && !last;
        const int row = KEYS * (from + (is_keys ? (item + 1) / 2 : last ? ring.count - 1 : item / 2 - 1));
        const u32 at = ring.data + item % SLOTS * TILE, full = ring.full + 8 * (item % SLOTS);
        mbarrier_wait(ring.empty + 8 * (item % SLOTS), item / SLOTS % 2 ^ 1);
        mbarrier_arrive_expect_tx(full, TILE);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            if (is_keys && part == NOPE_PARTS)
                tma_load_3d(at + part * BOX, rope, 0, row, 0, full);
            else
                tma_load_3d(at + part * BOX, is_keys ? k : v, 128 * part, row, head, full);
    }
}

// Logits and p of block j, and meanwhile the values of the block before.
template <bool MASKED>
static __device__ void add_block(const Ring& ring, u32 q, int from, int j, float scale, Softmax& softmax, float (&s)[32],
                                 u32 (&p)[16], float (&out)[128]) {
    begin_logits(s, q, ring.wait_for(ring.of_keys(j)));
    begin_values(out, p, ring.wait_for(ring.of_values(j - 1)));
    finish<1>(s);
    ring.release(ring.of_keys(j));
    softmax.update<MASKED>(s, from + j, scale);
    compute_now(softmax.sum[0] + softmax.sum[1], ring.data);
    finish<0>(out);
    warpgroup_fence_registers(p);
    ring.release(ring.of_values(j - 1));
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] *= softmax.rescale[i % 4 / 2];
    round_p(s, p);
}

// Softmax and sums over `count` blocks from `from` on; those from `whole` to `diagonal` need no mask.
static __device__ void add_up(const Ring& ring, u32 q, int from, int count, int whole, int diagonal, float scale,
                              Softmax& softmax, float (&out)[128]) {
    float s[32];
    u32 p[16];
    begin_logits(s, q, ring.wait_for(0));
    finish<0>(s);
    ring.release(0);
    softmax.update<true>(s, from, scale);
    round_p(s, p);
    int j = 1;
    for (; j < count && from + j < whole; ++j) add_block<true>(ring, q, from, j, scale, softmax, s, p, out);
    for (; j < count && from + j < diagonal; ++j) add_block<false>(ring, q, from, j, scale, softmax, s, p, out);
    for (; j < count; ++j) add_block<true>(ring, q, from, j, scale, softmax, s, p, out);
    begin_values(out, p, ring.wait_for(ring.of_values(count - 1)));
    finish<0>(out);
    warpgroup_fence_registers(p);
}

// Stores the results of a group's queries, 16 rows per warp, through shared memory.
static __device__ void store(const float (&out)[128], const float (&factor)[2], u8* memory, u16* to, int t0, int num_tokens,
                             u64 step) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = lane / 4;
    u8* const own = memory + warp * 16 * 128;
#pragma unroll
    for (int i = 0; i < 128; i += 2) {
        const int r = i % 4 / 2, column = i / 4;  // eight values
        *(u32*)(own + column / 8 * BOX + (row + 8 * r) * 128 + (column % 8 ^ row) * 16 + lane % 4 * 4) =
            to_bf16x2(out[i] * factor[r], out[i + 1] * factor[r]);
    }
    __syncwarp();
#pragma unroll
    for (int part = 0; part < 16; part += 8) {
        uint4 rows[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            rows[i] = *(const uint4*)(own + lane / 8 * BOX + (part + i) * 128 + (lane % 8 ^ i) * 16);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = t0 + 16 * warp + part + i;
            if (t < num_tokens) ((uint4*)(to + t * step))[lane] = rows[i];
        }
    }
}

// The same in e4m3 with a scale per 128 values.
static __device__ void store_codes(const float (&out)[128], const float (&factor)[2], u8* memory, u8* to, float* scales,
                                   int t0, int num_tokens, u64 step) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, row = lane / 4;
    u8* const own = memory + warp * 16 * 128;
    float scale[4];  // of two halves of two rows
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const int half = part / 2, r = part % 2, t = t0 + 16 * warp + row + 8 * r;
        float most = 0;
#pragma unroll
        for (int i = 64 * half + 2 * r; i < 64 * half + 64; i += 4)
            most = fmaxf(most, fmaxf(fabsf(out[i]), fabsf(out[i + 1])));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
        scale[part] = fmaxf(low_of(to_bf16x2(most * factor[r], 0)), 1e-4f) / 448.0f;
        if (lane % 4 == 0 && t < num_tokens) scales[(u64)half * num_tokens + t] = scale[part];
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const int half = part / 2, r = part % 2;
        const float inverse = 1.0f / scale[part];
#pragma unroll
        for (int i = 64 * half + 2 * r; i < 64 * half + 64; i += 4) {
            const u32 pair = to_bf16x2(out[i] * factor[r], out[i + 1] * factor[r]);
            const int column = i / 4 % 16;  // eight codes
            *(u16*)(own + half * BOX + (row + 8 * r) * 128 + (column / 2 ^ row) * 16 + column % 2 * 8 + lane % 4 * 2) =
                to_e4m3x2(quotient(low_of(pair), scale[part], inverse), quotient(high_of(pair), scale[part], inverse));
        }
    }
    __syncwarp();
    uint4 rows[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int r = 2 * i + lane / 16;
        rows[i] = *(const uint4*)(own + lane / 8 % 2 * BOX + r * 128 + (lane % 8 ^ r % 8) * 16);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = t0 + 16 * warp + 2 * i + lane / 16;
        if (t < num_tokens) ((uint4*)(to + t * step))[lane % 16] = rows[i];
    }
}

// Merges the two programs' results; each warp group merges those of its queries.
static __device__ void merge(Softmax& softmax, float (&out)[128], u8* buffer, int group, int share) {
    named_barrier_sync(1, CONSUMERS);  // all slots of the ring have been read
    if (group != share) {
#pragma unroll
        for (int i = 0; i < 128; i += 4)
            *(float4*)(buffer + 512 * i) = make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]);
        *(float4*)(buffer + 512 * 128) = make_float4(softmax.top[0], softmax.top[1], softmax.sum[0], softmax.sum[1]);
    }
    cluster_sync();
    if (group == share) {
        const float4 found = load_peer_float4(shared_at(buffer + 512 * 128), 1 - share);
        const float tops[2] = {found.x, found.y}, sums[2] = {found.z, found.w};
        float own[2], other[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float top = fmaxf(softmax.top[r], tops[r]), base = top == -infinity() ? 0 : top;
            own[r] = exp2_approx(softmax.top[r] - base), other[r] = exp2_approx(tops[r] - base);
            softmax.top[r] = top, softmax.sum[r] = softmax.sum[r] * own[r] + sums[r] * other[r];
        }
#pragma unroll
        for (int part = 0; part < 128; part += 32) {
            float4 peer_sums[8];  // all loads are issued before the first is used
#pragma unroll
            for (int i = 0; i < 8; ++i)
                peer_sums[i] = load_peer_float4(shared_at(buffer + 512 * (part + 4 * i)), 1 - share);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float* const sum = out + part + 4 * i;
                sum[0] = sum[0] * own[0] + peer_sums[i].x * other[0];
                sum[1] = sum[1] * own[0] + peer_sums[i].y * other[0];
                sum[2] = sum[2] * own[1] + peer_sums[i].z * other[1];
                sum[3] = sum[3] * own[1] + peer_sums[i].w * other[1];
            }
        }
    }
    cluster_sync_relaxed();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend_prompt(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
              const __grid_constant__ TensorMap rope, const __grid_constant__ TensorMap v, const int* firsts, u8* to, float* scales, float* lse,
              int num_tokens, int num_heads, int scale_bits) {
    u8* const memory = shared_memory + (-shared_at(shared_memory) & 1023);
    SharedStorage& storage = *(SharedStorage*)(memory + (GROUPS + SLOTS) * TILE);
    const int head = blockIdx.x / SHARES, share = blockIdx.x % SHARES, t0 = (gridDim.y - 1 - blockIdx.y) * GROUPS * QUERIES;
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // tells the compiler that it is uniform in a warp
    const u32 data = shared_at(memory), q_full = shared_at(&storage.q_full);
    if (threadIdx.x == 0) {
        mbarrier_init(q_full, 1);
#pragma unroll
        for (int s = 0; s < SLOTS; ++s)
            mbarrier_init(shared_at(storage.full + s), 1), mbarrier_init(shared_at(storage.empty + s), 4 * GROUPS);
    }
    pdl_wait();
    pdl_launch_dependents();
    if (group == 0) {
        const int t = t0 + thread, first = t < num_tokens ? firsts[t] : num_tokens;
        const int least = __reduce_min_sync(~0u, first <= t ? first : num_tokens);
        const int most = __reduce_max_sync(~0u, first <= t ? first : 0);
        if (lane == 0) storage.least[thread / 32] = least, storage.most[thread / 32] = most;
    }
    __syncthreads();
    const int least = min(min(storage.least[0], storage.least[1]), min(storage.least[2], storage.least[3]));
    const int most = max(max(storage.most[0], storage.most[1]), max(storage.most[2], storage.most[3]));
    const int stop = (min(t0 + GROUPS * QUERIES, num_tokens) + KEYS - 1) / KEYS, start = min(least / KEYS, stop);
    const int each = (stop - start + SHARES - 1) / SHARES, from = start + share * each;
    const Ring ring = {data + GROUPS * TILE, shared_at(storage.full), shared_at(storage.empty),
                       max(min(each, stop - from), 0)};
    if (group == GROUPS) {
        set_max_registers<24>();
        if (thread == 0 && ring.count) {
            mbarrier_arrive_expect_tx(q_full, GROUPS * TILE);
            for (int i = 0; i < GROUPS * PARTS; ++i)
                tma_load_3d(data + i * BOX, &q, 128 * (i % PARTS), t0 + i / PARTS * QUERIES, head, q_full);
            fetch(ring, &k, &rope, &v, from, head);
        }
        if constexpr (SHARES == 2) {
            __syncwarp();
            cluster_sync();
            cluster_sync_relaxed();
        }
        return;
    }
    set_max_registers<240>();
    const float scale = __int_as_float(scale_bits);
    const int diagonal = t0 / KEYS + group, count = min(ring.count, diagonal + 1 - from);
    float out[128];
    Softmax softmax;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        softmax.t[r] = t0 + QUERIES * group + thread / 32 * 16 + lane / 4 + 8 * r;
        softmax.first[r] = softmax.t[r] < num_tokens ? firsts[softmax.t[r]] : num_tokens;
        softmax.top[r] = -infinity(), softmax.sum[r] = 0;
    }
#pragma unroll
    for (int i = 0; i < 128; ++i) out[i] = 0;
    if (count > 0) {
        mbarrier_wait(q_full, 0);
        add_up(ring, data + group * TILE, from, count, (most + KEYS - 1) / KEYS, diagonal, scale, softmax, out);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        softmax.sum[r] += __shfl_xor_sync(~0u, softmax.sum[r], 1);
        softmax.sum[r] += __shfl_xor_sync(~0u, softmax.sum[r], 2);
        softmax.top[r] *= scale;
    }
    if constexpr (SHARES == 2) {
        merge(softmax, out, memory + GROUPS * TILE + 16 * thread, group, share);
        if (group != share) return;
    }
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const bool has_keys = softmax.first[r] <= softmax.t[r];
        factor[r] = has_keys ? 1 / softmax.sum[r] : 0;
        if (lane % 4 == 0 && softmax.t[r] < num_tokens)
            lse[(u64)softmax.t[r] * num_heads + head] =
                has_keys ? (softmax.top[r] + log2f(softmax.sum[r])) * 0.69314718f : -infinity();
    }
    u8* const buffer = memory + group * TILE;
    const int first_row = t0 + group * QUERIES;
    if constexpr (QUANTIZE)
        store_codes(out, factor, buffer, to + head * VALUES, scales + (u64)head * (VALUES / 128) * num_tokens, first_row,
                    num_tokens, (u64)num_heads * VALUES);
    else
        store(out, factor, buffer, (u16*)to + head * VALUES, first_row, num_tokens, (u64)num_heads * VALUES);
}
