// Experts of many tokens on Hopper, FP8 on both sides: what triton_rows.py computes, from a plan's tiles.
//
//     h[p] = silu(gate x) * up x, quantized    `up`: a task is a tile of rows of an expert, and 128 values of h
//     y[p] = down(h[p]) * weight               `down`: a tile, and 256 outputs
//
// A program stays on its multiprocessor and does every so-manieth task, so that programs read neighbouring weights at a
// time. One thread fetches weights, 128 x 128 by one copy, three warps fetch rows; they run ahead of the eight warps that
// compute by STAGES blocks, across tasks.
//
// Weights are the rows of the matrix units' tile and tokens its columns, as many as there are (32 to 96). A block of
// 128 columns of weights is multiplied, then scaled in registers. Rows of a tile are positions in the order of experts;
// those of y are pairs, and T * A + t for the shared expert, whose tiles come first.
//
// Compiled with A, D, F, STAGES and IS_UP (1 or 0: which of the two); D is a multiple of 256, F of 128.

#include "hopper.cuh"

constexpr int COMPUTING = 256, FETCHING = 96, THREADS = 384;
constexpr int ROWS = 96;  // of a tile
constexpr int DB = D / 128, FB = F / 128, SLICES = D / 256;
constexpr int WEIGHTS = 256 * 128;  // bytes of a stage, then rows, scales of rows, of weights
constexpr int SCALES = WEIGHTS + ROWS * 128;
constexpr int STAGE = (SCALES + 4 * (ROWS + 2) + 1023) / 1024 * 1024;
constexpr int MOST_TOGETHER = 80;  // rows of two products under way: registers
constexpr int PITCH = 144, WIDE = 272;  // of h and of terms on their way to memory: 8 rows in 8 banks
constexpr int AT_BARRIER = STAGES * STAGE;
constexpr int AT_COLUMN = AT_BARRIER + 16 * STAGES;
constexpr int AT_AMAX = AT_COLUMN + 8 * ROWS;
constexpr int AT_RESULT = AT_AMAX + 32 * ROWS;

struct Tile { int expert, first, count; };  // -1: the shared expert; position of its first row

struct Tiles {
    const int* planned;  // [room, 3], then how many there are
    int room, T, shared;

    __device__ int count() const { return shared + planned[3 * room]; }

    __device__ Tile at(int i) const {
        if (i < shared) return {-1, T * A + i * ROWS, min(ROWS, T - i * ROWS)};
        const int* const tile = planned + 3 * (i - shared);
        return {tile[0], tile[1], tile[2]};
    }
};

// A program's tasks.
template <int SLICES_> struct Tasks {
    const Tiles& tiles;
    int i, end;
    Tile tile;

    __device__ Tasks(const Tiles& all) : tiles(all), i(blockIdx.x), end(all.count() * SLICES_) {
        if (i < end) tile = tiles.at(i / SLICES_);
    }
    __device__ bool left() const { return i < end; }
    __device__ int slice() const { return i % SLICES_; }

    __device__ void next() {
        i += gridDim.x;
        if (i < end) tile = tiles.at(i / SLICES_);
    }
};

// What a task reads: two boxes of 128 rows of weights, their scales, rows and theirs.
struct Source {
    const Map *map, *shared_map, *other_shared_map;
    const float *scale, *shared_scale, *other_shared_scale;
    const u8* x;
    const float* x_scale;
    int rows;  // of x
};

template <bool UP> struct Work {
    static constexpr int slices = UP ? FB : SLICES, steps = UP ? DB : FB, width = UP ? D : F;

    // The row of weights where the first or second box begins, and their row of scales.
    static __device__ int box(const Tile& tile, int slice, int second) {
        const int expert = max(tile.expert, 0);
        if (!UP) return expert * D + slice * 256 + second * 128;
        return tile.expert < 0 ? slice * 128 : (expert * 2 + second) * F + slice * 128;
    }

    static __device__ const Map* map(const Source& from, const Tile& tile, int second) {
        return tile.expert >= 0 ? from.map : second ? from.other_shared_map : from.shared_map;
    }

    static __device__ const float* scales(const Source& from, const Tile& tile, int slice, int second) {
        const float* const all = tile.expert >= 0 ? from.scale : second ? from.other_shared_scale : from.shared_scale;
        return all + box(tile, slice, second) / 128 * steps;
    }

    // The row of x at a position in the order of experts.
    static __device__ int row(const Tile& tile, const int* order, int place, int T) {
        if (!UP) return place;
        return tile.expert < 0 ? place - T * A : order[place] / A;
    }
};

// By one thread.
template <bool UP>
static __device__ void fetch_weights(const Source& from, const Tiles& tiles, u32 data, u32 full, u32 empty) {
    using Its = Work<UP>;
    int stage = 0;
    u32 parity = 1;
    for (Tasks<Its::slices> task(tiles); task.left(); task.next()) {
        const Map *first = Its::map(from, task.tile, 0), *second = Its::map(from, task.tile, 1);
        const int row = Its::box(task.tile, task.slice(), 0), other = Its::box(task.tile, task.slice(), 1);
        for (int k = 0; k < Its::steps; ++k) {
            wait(empty + 8 * stage, parity);
            const u32 at = data + stage * STAGE, barrier = full + 8 * stage;
            arrive_with(barrier, WEIGHTS);
            fetch_shared_box(at, first, 128 * k, row, barrier);
            fetch_shared_box(at + WEIGHTS / 2, second, 128 * k, other, barrier);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Rows and all scales, by FETCHING threads: eight have a row, 16 bytes each, in the order that the matrix units expect.
template <bool UP>
static __device__ void fetch_rows(const Source& from, const Tiles& tiles, const int* order, u32 data, u32 full,
                                  u32 empty) {
    using Its = Work<UP>;
    constexpr int AT_ONCE = FETCHING / 8, PASSES = ROWS / AT_ONCE, UNDER_WAY = STAGES - 2;
    static_assert(FETCHING == ROWS);  // of which each has a scale to fetch
    const int me = threadIdx.x - (THREADS - FETCHING), chunk = me % 8;
    int stage = 0, count = 0;
    u32 parity = 1;
    const auto has_come = [&](int k) {
        for_engines();
        arrive(full + 8 * (k % STAGES));
    };
    u32 offset[PASSES];
    for (Tasks<Its::slices> task(tiles); task.left(); task.next()) {
        const Tile& tile = task.tile;
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int r = min(me / 8 + AT_ONCE * p, tile.count - 1);
            offset[p] = Its::row(tile, order, tile.first + r, tiles.T) * Its::width + 16 * chunk;
        }
        const float* const scale = from.x_scale + Its::row(tile, order, tile.first + min(me, tile.count - 1), tiles.T);
        const float* const weight_scale = Its::scales(from, tile, task.slice(), me & 1);
        for (int k = 0; k < Its::steps; ++k) {
            wait(empty + 8 * stage, parity);
            const u32 at = data + stage * STAGE;
#pragma unroll
            for (int p = 0; p < PASSES; ++p) {
                const int r = me / 8 + AT_ONCE * p;
                const u32 to = at + WEIGHTS + r * 128 + ((chunk ^ (r & 7)) << 4);
                if (r < tile.count) fetch_16(to, from.x + offset[p] + 128 * k);
            }
            if (me < tile.count) fetch_4(at + SCALES + 4 * me, scale + k * from.rows);
            if (me < 2) fetch_4(at + SCALES + 4 * (ROWS + me), weight_scale + k);
            end_group_of_copies();
            wait_for_copies<UNDER_WAY>();
            if (++count > UNDER_WAY) has_come(count - 1 - UNDER_WAY);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
    end_copies();
    for (int k = max(count - UNDER_WAY, 0); k < count; ++k) has_come(k);
}

struct Pipe {
    u8* memory;
    u32 data, full, empty;
    int stage;
    u32 parity;
};

// Where a stage lies; it has come. The next one is the pipe's then.
static __device__ u32 await_stage(Pipe& pipe) {
    const int stage = pipe.stage;
    wait(pipe.full + 8 * stage, pipe.parity);
    if (++pipe.stage == STAGES) pipe.stage = 0, pipe.parity ^= 1;
    return stage;
}

// 64 rows of a stage's first weights and 64 of its second, by N rows, over STEPS stages. While one product is scaled the
// next is under way, but at the end of a group of stages; there are registers for that up to MOST_TOGETHER rows.
template <int N, int STEPS>
static __device__ void accumulate(Pipe& pipe, float (&first)[N / 2], float (&second)[N / 2]) {
    constexpr bool TOGETHER = N <= MOST_TOGETHER;
    constexpr int GROUP = !TOGETHER ? 1 : STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : 1;
    const u32 half = threadIdx.x / 128 * (WEIGHTS / 4);
    const auto scales = [&](int stage) { return (const float*)(pipe.memory + stage * STAGE + SCALES); };
    const auto leave = [&](int stage) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(pipe.empty + 8 * stage);
    };
#pragma unroll
    for (int i = 0; i < N / 2; ++i) first[i] = second[i] = 0;
    for (int k = 0; k < STEPS; k += GROUP) {
        float part[N / 2], other[N / 2];
        int before = 0;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const int stage = await_stage(pipe);
            const u32 w = pipe.data + stage * STAGE + half, x = pipe.data + stage * STAGE + WEIGHTS;
            multiply<N>(part, w, x);
            if (j > 0) {
                finish<1>(other);
                add_scaled<N>(second, other, scales(before), scales(before)[ROWS + 1]);
                leave(before);
            }
            if constexpr (TOGETHER) {
                multiply<N>(other, w + WEIGHTS / 2, x);
                finish<1>(part);
                add_scaled<N>(first, part, scales(stage), scales(stage)[ROWS]);
            } else {
                finish<0>(part);
                add_scaled<N>(first, part, scales(stage), scales(stage)[ROWS]);
                multiply<N>(other, w + WEIGHTS / 2, x);
            }
            before = stage;
        }
        finish<0>(other);
        add_scaled<N>(second, other, scales(before), scales(before)[ROWS + 1]);
        leave(before);
    }
}

static __device__ void together() { meet(1, COMPUTING); }

static __device__ float quotient(float x, float scale, float inverse) {
    float near = x * inverse;
    near = fmaf(fmaf(-near, scale, x), inverse, near);
    return fminf(fmaxf(near, -448.0f), 448.0f);
}

// 128 values of h of a tile's rows, in FP8. Their scale carries the row's weight, which nobody asks for then.
template <int N>
static __device__ void make_h(Pipe& pipe, const Tile& tile, int slice, const int* order, const float* weight, u8* h,
                              float* h_scale, int T) {
    float value[N / 2], up[N / 2];
    accumulate<N, DB>(pipe, value, up);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    float* const amax = (float*)(pipe.memory + AT_AMAX);
    float2* const column = (float2*)(pipe.memory + AT_COLUMN);
    u8* const result = pipe.memory + AT_RESULT;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float most = 0;
#pragma unroll
            for (int i = 4 * j + c; i < 4 * j + 4; i += 2) {
                value[i] = value[i] / (1 + __expf(-value[i])) * up[i];
                most = fmaxf(most, fabsf(value[i]));
            }
#pragma unroll
            for (int step = 4; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
            if (lane < 4) amax[warp * ROWS + 8 * j + 2 * lane + c] = most;
        }
    together();
    if (threadIdx.x < N) {
        float most = 1e-4f;
#pragma unroll
        for (int w = 0; w < 8; ++w) most = fmaxf(most, amax[w * ROWS + threadIdx.x]);
        const float scale = most / 448.0f;
        column[threadIdx.x] = make_float2(scale, 1.0f / scale);
        if (threadIdx.x < tile.count) {
            const int place = tile.first + threadIdx.x;
            const float share = tile.expert < 0 ? 1.0f : weight[order[place]];
            h_scale[slice * (T * A + T) + place] = scale * share;
        }
    }
    together();
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const int n = 8 * j + lane % 4 * 2;
        const float2 one = column[n], two = column[n + 1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = quotient(value[4 * j + 2 * i], one.x, one.y);
            const float high = quotient(value[4 * j + 2 * i + 1], two.x, two.y);
            const u16 codes = as_codes(low, high);
            result[n * PITCH + row + 8 * i] = (u8)codes;
            result[(n + 1) * PITCH + row + 8 * i] = (u8)(codes >> 8);
        }
    }
    together();
    for (int i = threadIdx.x; i < 8 * tile.count; i += COMPUTING)
        *(uint4*)(h + (u64)(tile.first + i / 8) * F + slice * 128 + 16 * (i % 8)) =
            *(const uint4*)(result + i / 8 * PITCH + 16 * (i % 8));
}

// 256 outputs of a tile's rows; `row`: where those go that this thread stores.
template <int N>
static __device__ void make_terms(Pipe& pipe, int count, int slice, const int (&row)[ROWS / 8], u16* y) {
    const int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, me = threadIdx.x % 128;
    float first[N / 2], second[N / 2];
    accumulate<N, FB>(pipe, first, second);
    u8* const result = pipe.memory + AT_RESULT + half * ROWS * WIDE;
    const u32 mine = shared_at(result) + lane % 8 * WIDE + 32 * warp + lane / 8 % 2 * 16;
    meet(2 + half, 128);  // the task before has left
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        store_turned(mine + 8 * j * WIDE, as_pair(first[4 * j], first[4 * j + 1]),
                     as_pair(first[4 * j + 2], first[4 * j + 3]));
        store_turned(mine + 8 * j * WIDE + 128, as_pair(second[4 * j], second[4 * j + 1]),
                     as_pair(second[4 * j + 2], second[4 * j + 3]));
    }
    meet(2 + half, 128);
    u16* const to = y + slice * 256 + 128 * (me / 8 % 2) + 64 * half + 8 * (me % 8);
#pragma unroll
    for (int p = 0; p < N / 8; ++p) {
        const int r = me / 16 + 8 * p;
        if (r < count) *(uint4*)(to + (u64)row[p] * D) = *(const uint4*)(result + r * WIDE + 16 * (me % 16));
    }
}

#define OF_SIZE(count, call)                                                                                      \
    if (count <= 32) { constexpr int N = 32; call; }                                                              \
    else if (count <= 64) { constexpr int N = 64; call; }                                                         \
    else if (count <= 80) { constexpr int N = 80; call; }                                                         \
    else { constexpr int N = ROWS; call; }

// Sets the barriers up and tells everybody apart: fetches where it is for that, else gives the pipe to compute with.
template <bool UP>
static __device__ bool computes(Pipe& pipe, const Source& from, const Tiles& tiles, const int* order) {
    u8* const memory = shared_memory + (-shared_at(shared_memory) & 1023);
    const u32 data = shared_at(memory), full = data + AT_BARRIER, empty = full + 8 * STAGES;
    if (threadIdx.x < 2 * STAGES)
        make_barrier(full + 8 * threadIdx.x, threadIdx.x < STAGES ? 1 + FETCHING : COMPUTING / 32);
    __syncthreads();
    wait_for_earlier();
    const int warp = threadIdx.x / 32;
    if (warp < COMPUTING / 32) {
        keep_registers<216>();
        pipe = {memory, data, full, empty, 0, 0};
        return true;
    }
    keep_registers<72>();
    if (warp > COMPUTING / 32)
        fetch_rows<UP>(from, tiles, order, data, full, empty);
    else if (threadIdx.x % 32 == 0)
        fetch_weights<UP>(from, tiles, data, full, empty);
    return false;
}

#if IS_UP
extern "C" __global__ void __launch_bounds__(THREADS, 1)
up(const u8* x, const float* x_scale, const int* order, const int* planned, const float* weight,
   const __grid_constant__ Map gate_up, const __grid_constant__ Map shared_gate,
   const __grid_constant__ Map shared_up, const float* gate_up_scale, const float* shared_gate_scale,
   const float* shared_up_scale, u8* h, float* h_scale, int T, int room, int shared_tiles) {
    const Source from = {&gate_up, &shared_gate, &shared_up, gate_up_scale, shared_gate_scale, shared_up_scale,
                         x, x_scale, T};
    const Tiles tiles = {planned, room, T, shared_tiles};
    Pipe pipe;
    if (!computes<true>(pipe, from, tiles, order)) return;
    for (Tasks<FB> task(tiles); task.left(); task.next())
        OF_SIZE(task.tile.count, (make_h<N>(pipe, task.tile, task.slice(), order, weight, h, h_scale, T)))
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1)
down(const u8* h, const float* h_scale, const int* order, const int* planned, const __grid_constant__ Map w,
     const __grid_constant__ Map shared, const float* scale, const float* shared_scale, u16* y, int T, int room,
     int shared_tiles) {
    const Source from = {&w, &shared, &shared, scale, shared_scale, shared_scale, h, h_scale, T * A + T};
    const Tiles tiles = {planned, room, T, shared_tiles};
    Pipe pipe;
    if (!computes<false>(pipe, from, tiles, order)) return;
    int row[ROWS / 8];
    for (Tasks<SLICES> task(tiles); task.left(); task.next()) {
        const Tile& tile = task.tile;
#pragma unroll
        for (int p = 0; p < ROWS / 8; ++p) {
            const int place = tile.first + min((int)threadIdx.x % 128 / 16 + 8 * p, tile.count - 1);
            row[p] = tile.expert < 0 ? place : order[place];
        }
        OF_SIZE(tile.count, (make_terms<N>(pipe, tile.count, task.slice(), row, y)))
    }
}
#endif
