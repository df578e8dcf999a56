// x W^T in FP8 for decoding on Hopper, as `_tiles` in triton.py.
//
// Weights are the rows of the MMA tile, 128 per program, and rows of x its columns, COLS of them. A cluster of programs
// splits the columns of W; each then sums some rows over all programs, in an order that does not depend on the number
// of rows. Weights are requested before the kernel waits for its input.
//
// Compiled with COLS (16, 32, 64 or 128, as many as rows of x or more) and STAGES; D is a multiple of 128.

#include "hopper.cuh"

constexpr int COMPUTING = 256, THREADS = 320;
constexpr int OUTPUTS = 128;
constexpr int WEIGHTS = OUTPUTS * 128, ROWS = COLS * 128;
constexpr int SCALES = WEIGHTS + ROWS;
constexpr int STAGE = (SCALES + 4 * (COLS + 1) + 1023) / 1024 * 1024;
constexpr int PITCH = OUTPUTS + 4;  // of a row's sums, padded to avoid bank conflicts

static __device__ void fetch(const TensorMap* w, const TensorMap* x, int first, int count, u32 data, u32 full,
                             u32 empty) {
    const int output = blockIdx.y * OUTPUTS, ahead = min(count, STAGES);
    for (int k = 0; k < ahead; ++k) {
        mbarrier_arrive_expect_tx(full + 8 * k, WEIGHTS + ROWS);
        tma_load_evict_first(data + k * STAGE, w, 128 * (first + k), output, full + 8 * k);
    }
    pdl_wait();
    for (int k = 0; k < count; ++k) {
        const int stage = k % STAGES;
        const u32 at = data + stage * STAGE, barrier = full + 8 * stage;
        if (k >= ahead) {
            mbarrier_wait(empty + 8 * stage, k / STAGES % 2 ^ 1);
            mbarrier_arrive_expect_tx(barrier, WEIGHTS + ROWS);
            tma_load_evict_first(at, w, 128 * (first + k), output, barrier);
        }
        tma_load(at + WEIGHTS, x, 128 * (first + k), 0, barrier);
    }
}

// By one warp.
static __device__ void fetch_scales(const float* x_scale, const float* scale, int count, int T, u32 data, u32 full,
                                    u32 empty) {
    const int lane = threadIdx.x % 32;
    pdl_wait();
    for (int k = 0; k < count; ++k) {
        const int stage = k % STAGES;
        const u32 at = data + stage * STAGE + SCALES;
        mbarrier_wait(empty + 8 * stage, k / STAGES % 2 ^ 1);
#pragma unroll
        for (int t = lane; t < COLS; t += 32)
            if (t < T) cp_async_4(at + 4 * t, x_scale + k * T + t);
        if (lane == 0) cp_async_4(at + 4 * COLS, scale + k);
        cp_async_mbarrier_arrive(full + 8 * stage);
    }
    cp_async_wait_all();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
linear(const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, const float* x_scale, const float* scale,
       u16* y, int T, int O, int D) {
    u8* const memory = shared_memory + (-shared_at(shared_memory) & 1023);
    const u32 data = shared_at(memory), full = data + STAGES * STAGE, empty = full + 8 * STAGES;
    if (threadIdx.x < 2 * STAGES)
        mbarrier_init(full + 8 * threadIdx.x, threadIdx.x < STAGES ? 1 + 32 : COMPUTING / 32);
    __syncthreads();
    pdl_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = blockIdx.x, shares = gridDim.x;
    const int blocks = D / 128, first = share * blocks / shares, count = (share + 1) * blocks / shares - first;
    float* const sums = (float*)memory;  // reuses the stages: [COLS][PITCH]
    float sum[COLS / 2];
    if (warp == COMPUTING / 32) {
        if (lane == 0) fetch(&w, &x, first, count, data, full, empty);
        __syncwarp();
    } else if (warp > COMPUTING / 32) {
        fetch_scales(x_scale + first * T, scale + blockIdx.y * blocks + first, count, T, data, full, empty);
    } else {
#pragma unroll
        for (int i = 0; i < COLS / 2; ++i) sum[i] = 0;
        const auto begin = [&](int k, float(&part)[COLS / 2]) {
            const u32 at = data + k % STAGES * STAGE;
            mbarrier_wait(full + 8 * (k % STAGES), k / STAGES % 2);
            multiply<COLS>(part, at + warp / 4 * (WEIGHTS / 2), at + WEIGHTS);
        };
        const auto scaled = [&](int k, const float(&part)[COLS / 2]) {
            const float* const scales = (const float*)(memory + k % STAGES * STAGE + SCALES);
            add_scaled<COLS>(sum, part, scales, scales[COLS]);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(empty + 8 * (k % STAGES));
        };
        float part[COLS / 2];
        int k = 0;
        if constexpr (COLS <= 64) {  // two products at a time, if registers suffice
            float other[COLS / 2];
            for (; k + 1 < count; k += 2) {
                begin(k, part);
                begin(k + 1, other);
                finish<1>(part);
                scaled(k, part);
                finish<0>(other);
                scaled(k + 1, other);
            }
        }
        for (; k < count; ++k) {
            begin(k, part);
            finish<0>(part);
            scaled(k, part);
        }
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
    const int columns = 4 * lane, o = blockIdx.y * OUTPUTS + columns;
    for (int t = share + shares * warp; t < T; t += shares * (THREADS / 32)) {
        const u32 at = data + 4 * (t * PITCH + columns);
        float4 total = load_peer_float4(at, 0);
        for (int peer = 1; peer < shares; ++peer) {
            const float4 more = load_peer_float4(at, peer);
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        if (o < O) *(uint2*)(y + (u64)t * O + o) = make_uint2(to_bf16x2(total.x, total.y), to_bf16x2(total.z, total.w));
    }
    cluster_sync_relaxed();
}
