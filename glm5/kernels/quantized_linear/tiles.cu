// x W^T of int8 codes with one scale per row of each, for decoding on Hopper.
//
// Weights are the rows of the MMA tile, 128 per program, and tokens its columns, COLS of them. A cluster of programs splits
// the inputs; each then sums some tokens over all programs, exactly. The first STAGES blocks of weights are requested
// before the kernel waits for the one that quantizes the tokens.
//
// Compiled with COLS (32, 64 or 128, as many as tokens or more) and STAGES; D is a multiple of 128, O one of 4.

#include "hopper.cuh"

constexpr int COMPUTING = 256, THREADS = 288;
constexpr int OUTPUTS = 128;
constexpr int WEIGHTS = OUTPUTS * 128, ROWS = COLS * 128, STAGE = WEIGHTS + ROWS;
constexpr int PITCH = OUTPUTS + 4;  // of a token's sums, padded to avoid bank conflicts

#ifndef ON_CPU
// wgmma of 64 rows by N columns over 32 int8 codes, added to d.
template <int N> struct IntegerWgmma;

#define I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define I16(i) I4(i), I4(i + 4), I4(i + 8), I4(i + 12)
#define INTEGER_WGMMA(n, places, w_at, x_at, more_at, ...)                                               \
    template <> struct IntegerWgmma<n> {                                                                 \
        static __device__ void run(int (&d)[n / 2], u64 w, u64 x) {                                        \
            asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " more_at ", 0;\n"                        \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.s8 {" places "}, " w_at ", " x_at \
                         ", more;\n}"                                                                      \
                         : __VA_ARGS__ : "l"(w), "l"(x), "r"(1));                                          \
        }                                                                                                  \
    };
INTEGER_WGMMA(32, TO15, "%16", "%17", "%18", I16(0))
INTEGER_WGMMA(64, TO31, "%32", "%33", "%34", I16(0), I16(16))
INTEGER_WGMMA(128, TO63, "%64", "%65", "%66", I16(0), I16(16), I16(32), I16(48))

template <int N> static __device__ void warpgroup_fence_operand(int (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
#endif

static __device__ void fetch(const TensorMap* w, const TensorMap* x, int first, int count, u32 data, u32 full,
                             u32 empty) {
    const int output = blockIdx.y * OUTPUTS, ahead = min(count, STAGES);
    for (int k = 0; k < ahead; ++k) {
        mbarrier_arrive_expect_tx(full + 8 * k, STAGE);
        tma_load_evict_first(data + k * STAGE, w, 128 * (first + k), output, full + 8 * k);
    }
    pdl_wait();
    for (int k = 0; k < count; ++k) {
        const int stage = k % STAGES;
        const u32 at = data + stage * STAGE, barrier = full + 8 * stage;
        if (k >= ahead) {
            mbarrier_wait(empty + 8 * stage, k / STAGES % 2 ^ 1);
            mbarrier_arrive_expect_tx(barrier, STAGE);
            tma_load_evict_first(at, w, 128 * (first + k), output, barrier);
        }
        tma_load(at + WEIGHTS, x, 128 * (first + k), 0, barrier);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
tiles(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const float* x_scale, const float* scale,
      u16* y, int T, int O, int D) {
    u8* const memory = shared_memory + (-shared_at(shared_memory) & 1023);
    const u32 data = shared_at(memory), full = data + STAGES * STAGE, empty = full + 8 * STAGES;
    if (threadIdx.x < 2 * STAGES)
        mbarrier_init(full + 8 * threadIdx.x, threadIdx.x < STAGES ? 1 : COMPUTING / 32);
    __syncthreads();
    pdl_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = blockIdx.x, shares = gridDim.x;
    const int blocks = D / 128, first = share * blocks / shares, count = (share + 1) * blocks / shares - first;
    const int columns = 4 * lane, o = blockIdx.y * OUTPUTS + columns;
    int* const sums = (int*)memory;  // reuses the stages: [COLS][PITCH]
    int sum[COLS / 2];
    float scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = scale[min(o + i, O - 1)];
    if (warp == COMPUTING / 32) {
        if (lane == 0) fetch(&w, &x, first, count, data, full, empty);
        __syncwarp();
    } else {
#pragma unroll
        for (int i = 0; i < COLS / 2; ++i) sum[i] = 0;
        for (int k = 0; k < count; ++k) {
            const int stage = k % STAGES;
            const u64 weights = matrix_descriptor(data + stage * STAGE + warp / 4 * (WEIGHTS / 2));
            const u64 rows = matrix_descriptor(data + stage * STAGE + WEIGHTS);
            mbarrier_wait(full + 8 * stage, k / STAGES % 2);
            warpgroup_fence_operand(sum);
            warpgroup_arrive();
#pragma unroll
            for (int i = 0; i < 4; ++i) IntegerWgmma<COLS>::run(sum, weights + 2 * i, rows + 2 * i);
            warpgroup_commit_batch();
            if (k == 0) continue;
            warpgroup_wait<1>();
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty + 8 * ((k - 1) % STAGES));
        }
        warpgroup_wait<0>();
        warpgroup_fence_operand(sum);
    }
    __syncthreads();
    if (warp < COMPUTING / 32) {
        const int output = 16 * warp + lane / 4;
#pragma unroll
        for (int j = 0; j < COLS / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[(8 * j + lane % 4 * 2 + i % 2) * PITCH + output + i / 2 * 8] = sum[4 * j + i];
    }
    pdl_wait();  // an earlier kernel may read y
    cluster_sync();
    for (int t = share + shares * warp; t < T; t += shares * (THREADS / 32)) {
        const u32 at = data + 4 * (t * PITCH + columns);
        int total[4] = {};
        for (int peer = 0; peer < shares; ++peer) {
            const float4 bits = load_peer_float4(at, peer);
            total[0] += (int)__float_as_uint(bits.x), total[1] += (int)__float_as_uint(bits.y);
            total[2] += (int)__float_as_uint(bits.z), total[3] += (int)__float_as_uint(bits.w);
        }
        const float by = x_scale[t];
        float values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = (float)total[i] * scales[i] * by;
        if (o < O)
            *(uint2*)(y + (u64)t * O + o) = make_uint2(to_bf16x2(values[0], values[1]), to_bf16x2(values[2], values[3]));
    }
    cluster_sync_relaxed();
}
