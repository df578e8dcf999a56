// The sum over a token's experts, from quantized rows to rows, in one launch on Hopper: what triton_tiles.py and
// `combine` compute in three.
//
//     h[p]      = silu(gate x) * up x, quantized       a task: a tile of rows of an expert, 128 values of h
//     y[p]      = down(h[p]) * weight                  a task: the same tile, 256 outputs
//     out[t]    = sum of y over t's terms, in order    a task: 8 or 16 tokens, 256 outputs
//
// A program stays on its multiprocessor and does every so-manieth task of that list, outputs slice by slice. One thread
// fetches weights (128 x 128 bytes by one copy), three warps fetch rows; they run ahead of the eight warps that compute
// by STAGES blocks, across tasks: weights of the second product are on their way while the first ends. Tasks wait for
// earlier tasks alone, so programs never wait for each other in a circle. Terms of `ring` slices lie in memory at a
// time, so that they stay in the cache.
//
// Weights are the rows of the matrix units' tile and tokens its columns, as many as there are (8 to ROWS). A block of
// 128 columns of weights is multiplied, then scaled in registers. Rows of a tile are positions in the order of experts;
// y has those of pairs: T * A + t for the shared expert.
//
// Compiled with A, D, F, E, ROWS (of a tile, 32 or 96), STAGES, SHARED (0 or 1), PLANNED (whether a launch of `plan`
// came before); D is a multiple of 256, F of 128.

#include "hopper.cuh"
#include "grouped_experts/plan.cuh"

constexpr int COMPUTING = 256, FETCHING = 96, THREADS = 384;
constexpr int DB = D / 128, FB = F / 128, SLICES = D / 256;
constexpr int WEIGHTS = 256 * 128;                      // bytes of a stage, then rows, scales of rows, of weights
constexpr int SCALES = WEIGHTS + ROWS * 128;
constexpr int STAGE = (SCALES + 4 * (ROWS + 2) + 1023) / 1024 * 1024;
constexpr int PITCH = 144;                              // of results on their way to memory: 8 rows in 8 banks
constexpr int TOGETHER = ROWS > 32 ? 16 : 8;            // tokens of a task that adds up
constexpr int MOST_PAIRS = 2048, MOST_TILES = E + (MOST_PAIRS + MOST_PAIRS / A) / 32;  // without a plan

constexpr int AT_RESULT = STAGES * STAGE;
constexpr int AT_AMAX = AT_RESULT + 2 * ROWS * PITCH;
constexpr int AT_COLUMN = AT_AMAX + 8 * ROWS * 4;
constexpr int AT_BARRIER = AT_COLUMN + 2 * ROWS * 4;
constexpr int AT_TILES = AT_BARRIER + 16 * STAGES + 16;
constexpr int AT_ORDER = AT_TILES + 16 * MOST_TILES;

static __device__ void together() { meet(1, COMPUTING); }

// What other programs wrote before they said so is seen by the warp behind this.
static __device__ void wait_for(const int* counter, int wanted) {
    if (threadIdx.x % 32 == 0)
        while (counted(counter) < wanted) rest();
    __syncwarp();
}

// planned: how many tiles, 3 ints of nothing, room for `room` tiles, the order. One program.
extern "C" __global__ void __launch_bounds__(1024, 1) plan(const int* expert, int* planned, int T, int room) {
    wait_for_earlier();
    let_later_begin();
    const int count = make_plan(expert, T, (Tile*)(planned + 4), planned + 4 + 4 * room, (int*)shared_memory, 1024);
    if (threadIdx.x == 0) planned[0] = count;
}

// ---- tasks ---------------------------------------------------------------------------------------------------------

enum Kind { UP, DOWN, SUM, NOTHING };

struct Task {
    Kind kind;
    int tile;   // SUM: which tokens
    int slice;  // of outputs; UP: of h
};

struct Tasks {
    int tiles, sums;

    __device__ int count() const { return tiles * FB + tiles + (SLICES - 1) * (tiles + sums) + sums; }

    __device__ Task at(int i) const {
        if (i < tiles * FB) return {UP, i / FB, i % FB};
        i -= tiles * FB;
        if (i < tiles) return {DOWN, i, 0};
        i -= tiles;
        const int slice = i / (tiles + sums), rest = i % (tiles + sums);
        if (slice == SLICES - 1) return {SUM, rest, slice};
        if (rest < tiles) return {DOWN, rest, slice + 1};
        return {SUM, rest - tiles, slice};
    }
};

struct Counters {
    int *left, *all_h, *terms, *sums, *h;  // programs that are through; tasks: all, by slice, by slice, by tile
    int size;

    __device__ Counters(int* at, int tiles)
        : left(at), all_h(at + 1), terms(at + 2), sums(terms + SLICES), h(sums + SLICES),
          size(2 + 2 * SLICES + tiles) {}
};

struct Weights {
    const Map *gate_up, *down, *shared_gate, *shared_up, *shared_down;
    const float *gate_up_scale, *down_scale, *shared_gate_scale, *shared_up_scale, *shared_down_scale;
};

// ---- fetching ------------------------------------------------------------------------------------------------------

// By one thread.
static __device__ void fetch_weights(const Weights& w, const Tile* tiles, Tasks tasks, u32 data, u32 full, u32 empty) {
    int stage = 0;
    u32 parity = 1;
    for (int i = blockIdx.x; i < tasks.count(); i += gridDim.x) {
        const Task task = tasks.at(i);
        if (task.kind >= SUM) continue;
        const int expert = tiles[task.tile].expert;
        const Map *first = w.gate_up, *second = w.gate_up;
        int row = expert * 2 * F + task.slice * 128, other = row + F, steps = DB;
        if (task.kind == UP && expert < 0) first = w.shared_gate, second = w.shared_up, row = other = task.slice * 128;
        if (task.kind == DOWN) {
            first = second = expert < 0 ? w.shared_down : w.down;
            row = max(expert, 0) * D + task.slice * 256, other = row + 128, steps = FB;
        }
        for (int k = 0; k < steps; ++k) {
            wait(empty + 8 * stage, parity);
            const u32 at = data + stage * STAGE, barrier = full + 8 * stage;
            arrive_with(barrier, WEIGHTS);
            fetch_box(at, first, 128 * k, row, barrier);
            fetch_box(at + WEIGHTS / 2, second, 128 * k, other, barrier);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}

// Rows and all scales, by FETCHING threads: eight have a row, 16 bytes each, in the order that the matrix units expect.
static __device__ void fetch_rows(const Weights& w, const Tile* tiles, const int* order, Tasks tasks, Counters counters,
                                  const u8* x, const float* x_scale, const u8* h, const float* h_scale, int T, u32 data,
                                  u32 full, u32 empty) {
    constexpr int AT_ONCE = FETCHING / 8, PASSES = (ROWS + AT_ONCE - 1) / AT_ONCE;
    const int me = threadIdx.x - (THREADS - FETCHING), chunk = me % 8, rows = T * A + T;
    int stage = 0;
    u32 parity = 1;
    bool all_made = false;
    for (int i = blockIdx.x; i < tasks.count(); i += gridDim.x) {
        const Task task = tasks.at(i);
        if (task.kind >= SUM) continue;
        const Tile tile = tiles[task.tile];
        const bool up = task.kind == UP;
        const int steps = up ? DB : FB, stride = up ? T : rows;
        u32 offset[PASSES];
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int r = min(me / 8 + AT_ONCE * p, tile.count - 1), place = tile.first + r;
            if (!up)
                offset[p] = place * F;
            else
                offset[p] = (tile.expert < 0 ? place - T * A : order[place] / A) * D;
        }
        const u8* const from = (up ? x : h) + 16 * chunk;
        const float* scale = nullptr;  // of row `me`
        if (me < tile.count) {
            const int place = tile.first + me;
            scale = up ? x_scale + (tile.expert < 0 ? place - T * A : order[place] / A) : h_scale + place;
        }
        const float* weight_scale = nullptr;  // of the first or the second 128 rows of weights
        if (me < 2) {
            const int e = max(tile.expert, 0);
            if (!up)
                weight_scale =
                    (tile.expert < 0 ? w.shared_down_scale : w.down_scale) + (e * DB + 2 * task.slice + me) * FB;
            else if (tile.expert < 0)
                weight_scale = (me ? w.shared_up_scale : w.shared_gate_scale) + task.slice * DB;
            else
                weight_scale = w.gate_up_scale + ((e * 2 + me) * FB + task.slice) * DB;
        }
        if (!up && task.slice == 0)
            wait_for(counters.h + task.tile, FB);
        else if (!up && !all_made)
            wait_for(counters.all_h, tasks.tiles * FB), all_made = true;
        for (int k = 0; k < steps; ++k) {
            wait(empty + 8 * stage, parity);
            const u32 at = data + stage * STAGE;
#pragma unroll
            for (int p = 0; p < PASSES; ++p) {
                const int r = me / 8 + AT_ONCE * p;
                const u32 to = at + WEIGHTS + r * 128 + ((chunk ^ (r & 7)) << 4);
                if (r < tile.count) fetch_16(to, from + offset[p] + 128 * k);
            }
            if (scale) fetch_4(at + SCALES + 4 * me, scale + k * stride);
            if (weight_scale) fetch_4(at + SCALES + 4 * (ROWS + me), weight_scale + k);
            arrive_with_copies(full + 8 * stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
    end_copies();
}

// ---- products ------------------------------------------------------------------------------------------------------

struct Pipe {
    u8* memory;
    u32 data, full, empty;
    int stage;
    u32 parity;
};

// 64 rows of a stage's first weights and 64 of its second, by N rows, over `steps` stages.
template <int N>
static __device__ void accumulate(Pipe& pipe, int steps, float (&first)[N / 2], float (&second)[N / 2]) {
    const int half = threadIdx.x / 128;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) first[i] = second[i] = 0;
    for (int k = 0; k < steps; ++k) {
        const u32 at = pipe.data + pipe.stage * STAGE, w = at + half * (WEIGHTS / 4), x = at + WEIGHTS;
        const float* const scales = (const float*)(pipe.memory + pipe.stage * STAGE + SCALES);
        wait(pipe.full + 8 * pipe.stage, pipe.parity);
        for_engines();
        float part[N / 2];
        multiply<N>(part, w, x);
        if constexpr (N <= 64) {
            float other[N / 2];
            multiply<N>(other, w + WEIGHTS / 2, x);
            finish<1>(part);
            add_scaled<N>(first, part, scales, scales[ROWS]);
            finish<0>(other);
            add_scaled<N>(second, other, scales, scales[ROWS + 1]);
        } else {
            finish<0>(part);
            add_scaled<N>(first, part, scales, scales[ROWS]);
            multiply<N>(part, w + WEIGHTS / 2, x);
            finish<0>(part);
            add_scaled<N>(second, part, scales, scales[ROWS + 1]);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(pipe.empty + 8 * pipe.stage);
        if (++pipe.stage == STAGES) pipe.stage = 0, pipe.parity ^= 1;
    }
}

// ---- results -------------------------------------------------------------------------------------------------------

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
    accumulate<N>(pipe, DB, value, up);
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

// 256 outputs of a tile's rows, to a slice's place.
template <int N>
static __device__ void make_terms(Pipe& pipe, const Tile& tile, const int* order, u16* terms) {
    constexpr int PASSES = (N + 15) / 16;
    const int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, me = threadIdx.x % 128;
    int row[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        const int place = tile.first + min(me / 8 + 16 * p, tile.count - 1);
        row[p] = tile.expert < 0 ? place : order[place];
    }
    float first[N / 2], second[N / 2];
    accumulate<N>(pipe, FB, first, second);
    u8* const result = pipe.memory + AT_RESULT + half * ROWS * PITCH;
    const u32 mine = shared_at(result) + lane % 8 * PITCH + 32 * warp + lane / 8 % 2 * 16;
#pragma unroll
    for (int box = 0; box < 2; ++box) {
        const float(&found)[N / 2] = box ? second : first;
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            store_turned(mine + 8 * j * PITCH, as_pair(found[4 * j], found[4 * j + 1]),
                         as_pair(found[4 * j + 2], found[4 * j + 3]));
        meet(2 + half, 128);
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int r = me / 8 + 16 * p;
            if (r < tile.count)
                *(uint4*)(terms + (u64)row[p] * 256 + 128 * box + 64 * half + 8 * (me % 8)) =
                    *(const uint4*)(result + r * PITCH + 16 * (me % 8));
        }
        if (box == 0) meet(2 + half, 128);
    }
}

// out of TOGETHER tokens, 256 of it: their terms in the order of their choices, then the shared expert's.
static __device__ void add_up(const u16* terms, u16* out, int first, int slice, int T) {
#pragma unroll
    for (int p = 0; p < TOGETHER / 8; ++p) {
        const int t = first + 8 * p + threadIdx.x / 32, d = threadIdx.x % 32 * 8;
        if (t >= T) continue;
        uint4 term[A + SHARED];
#pragma unroll
        for (int a = 0; a < A; ++a) term[a] = __ldcg((const uint4*)(terms + ((u64)t * A + a) * 256 + d));
        if constexpr (SHARED) term[A] = __ldcg((const uint4*)(terms + ((u64)T * A + t) * 256 + d));
        float sum[8] = {};
#pragma unroll
        for (int a = 0; a < A + SHARED; ++a) {
            const u32 pair[4] = {term[a].x, term[a].y, term[a].z, term[a].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[2 * i] += __uint_as_float(pair[i] << 16);
                sum[2 * i + 1] += __uint_as_float(pair[i] & 0xFFFF0000u);
            }
        }
        *(uint4*)(out + (u64)t * D + slice * 256 + d) = make_uint4(
            as_pair(sum[0], sum[1]), as_pair(sum[2], sum[3]), as_pair(sum[4], sum[5]), as_pair(sum[6], sum[7]));
    }
}

#define OF_SIZE(call)                                                                                             \
    if constexpr (ROWS <= 32) {                                                                                   \
        if (tile.count <= 8) { constexpr int N = 8; call; }                                                       \
        else if (tile.count <= 16) { constexpr int N = 16; call; }                                                \
        else { constexpr int N = 32; call; }                                                                      \
    } else {                                                                                                      \
        if (tile.count <= 32) { constexpr int N = 32; call; }                                                     \
        else if (tile.count <= 64) { constexpr int N = 64; call; }                                                \
        else { constexpr int N = ROWS <= 32 ? 32 : 96; call; }                                                    \
    }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const u8* x, const float* x_scale, const int* expert, const float* weight, const __grid_constant__ Map gate_up,
        const __grid_constant__ Map down, const __grid_constant__ Map shared_gate,
        const __grid_constant__ Map shared_up, const __grid_constant__ Map shared_down, const float* gate_up_scale,
        const float* down_scale, const float* shared_gate_scale, const float* shared_up_scale,
        const float* shared_down_scale, const int* planned, u8* h, float* h_scale, u16* y, u16* out, int* counters_at,
        int T, int room, int ring) {
    u8* const memory = shared_memory + (-shared_at(shared_memory) & 1023);
    const u32 data = shared_at(memory), full = data + AT_BARRIER, empty = full + 8 * STAGES;
    if (threadIdx.x < 2 * STAGES) {
        const int count = threadIdx.x < STAGES ? 1 + FETCHING : COMPUTING / 32;
        make_barrier(full + 8 * threadIdx.x, count);
    }
    wait_for_earlier();
    let_later_begin();
    const Tile* tiles;
    const int* order;
    int num_tiles;
    if constexpr (PLANNED) {
        num_tiles = planned[0], tiles = (const Tile*)(planned + 4), order = planned + 4 + 4 * room;
        __syncthreads();
    } else {
        Tile* const own = (Tile*)(memory + AT_TILES);
        int* const sorted = (int*)(memory + AT_ORDER);
        num_tiles = make_plan(expert, T, own, sorted, (int*)memory, THREADS);
        tiles = own, order = sorted;
        for_engines();  // the copy engine writes where the plan was made
        __syncthreads();
    }
    const Tasks tasks = {num_tiles, (T + TOGETHER - 1) / TOGETHER};
    const Counters counters(counters_at, num_tiles);
    const Weights weights = {&gate_up, &down, &shared_gate, &shared_up, &shared_down, gate_up_scale, down_scale,
                             shared_gate_scale, shared_up_scale, shared_down_scale};
    const int warp = threadIdx.x / 32, rows = T * A + T;
    if (warp >= COMPUTING / 32) {
        keep_registers<(ROWS > 32 ? 72 : 168)>();
        if (warp > COMPUTING / 32)
            fetch_rows(weights, tiles, order, tasks, counters, x, x_scale, h, h_scale, T, data, full, empty);
        else if (threadIdx.x % 32 == 0)
            fetch_weights(weights, tiles, tasks, data, full, empty);
        __syncwarp();
    } else {
        keep_registers<(ROWS > 32 ? 216 : 168)>();
        Pipe pipe = {memory, data, full, empty, 0, 0};
        int free = ring;  // slices before this one may be written
        for (int i = blockIdx.x; i < tasks.count(); i += gridDim.x) {
            const Task task = tasks.at(i);
            u16* const terms = y + (u64)(task.slice % ring) * rows * 256;
            int *done = counters.sums + task.slice, *also = nullptr;
            if (task.kind == SUM) {
                wait_for(counters.terms + task.slice, num_tiles);
                add_up(terms, out, task.tile * TOGETHER, task.slice, T);
            } else {
                const Tile tile = tiles[task.tile];
                if (task.kind == UP) {
                    OF_SIZE((make_h<N>(pipe, tile, task.slice, order, weight, h, h_scale, T)))
                    done = counters.h + task.tile, also = counters.all_h;
                } else {
                    if (task.slice >= free) wait_for(done - ring, tasks.sums), free = task.slice + 1;
                    OF_SIZE((make_terms<N>(pipe, tile, order, terms)))
                    done = counters.terms + task.slice;
                }
            }
            together();
            if (threadIdx.x == 0) say(done, also);
        }
    }
    // Whoever is last leaves zeros.
    __shared__ int last;
    __syncthreads();
    if (threadIdx.x == 0) {
        last = one_more(counters.left) == (int)gridDim.x;
    }
    __syncthreads();
    if (last)
        for (int i = threadIdx.x; i < counters.size; i += THREADS) counters_at[i] = 0;
}
