// Experts of many tokens on Hopper with FP8 activations and weights, over the tiles of plan.cu; as triton_rows.py.
//
//     h[p] = silu(gate x) * up x, quantized    up: a task is a tile of rows of an expert and 128 values of h
//     y[p] = down(h[p]) * weight               down: a tile and 256 outputs
//
// Persistent, warp-specialized programs. One thread claims the next task, publishes it in the program, and loads
// weights by TMA, 128 x 128 per copy; three warps load rows. They run up to STAGES blocks ahead of the eight computing
// warps, also across tasks.
//
// Tasks of `up` are few and long, so programs finish them at different times, and then begin with `down` of the first
// tiles. `progress`: the number of claimed tasks, of finished `up` tasks, and of finished `up` tasks of each tile, for
// which `down` waits. These were claimed earlier by running programs that wait for nothing, so there is no deadlock.
//
// Weights are the rows of the MMA tile and tokens its columns, 32 to 96 of them. A block of 128 inputs is multiplied,
// then scaled in registers. Rows of a tile, of h and of y are positions in the sorted pairs; T * A + t for the shared
// expert, whose tiles come first.
//
// Compiled with A, D, F and SHARED_BYTES; D is a multiple of 256, F of 128.

#include "hopper.cuh"

constexpr int COMPUTING = 256, FETCHING = 96, THREADS = 384;
constexpr int ROWS = 96;  // of a tile
constexpr int DB = D / 128, FB = F / 128, SLICES = D / 256;
constexpr int STAGES = 4, WEIGHTS = 256 * 128, STAGE = WEIGHTS + ROWS * 128;  // bytes: weights, then rows
constexpr int CLAIMS = 4;  // tasks between the fastest and the slowest warp
constexpr int MAX_OVERLAPPED_ROWS = 80;  // rows up to which two products in flight fit in registers
constexpr int PITCH = 144, OUTPUT_PITCH = 256;  // row pitch of h and of outputs in shared memory
constexpr int AT_SCALES = STAGES * STAGE, SCALES = 4 * (ROWS + 4);  // of a stage's rows, then of weights
constexpr int AT_BARRIER = AT_SCALES + STAGES * SCALES;
constexpr int AT_CLAIMS = AT_BARRIER + 16 * STAGES;
constexpr int AT_RESULT = (AT_CLAIMS + 48 * CLAIMS + 127) / 128 * 128;  // outputs, or
constexpr int AT_AMAX = AT_RESULT, AT_COLUMN = AT_AMAX + 32 * ROWS, AT_H = AT_COLUMN + 8 * ROWS;
static_assert(1024 + AT_RESULT + 2 * ROWS * OUTPUT_PITCH == SHARED_BYTES &&
              AT_H + ROWS * PITCH <= AT_RESULT + 2 * ROWS * OUTPUT_PITCH);

struct Tile { int expert, first, count; };  // expert -1: the shared one; first: position of the first row

struct Tiles {
    const int* planned;  // [room, 3], then how many there are
    int max_tiles, T, shared;

    __device__ int count() const { return shared + planned[3 * max_tiles]; }

    __device__ Tile at(int i) const {
        if (i < shared) return {-1, T * A + i * ROWS, min(ROWS, T - i * ROWS)};
        const int* const tile = planned + 3 * (i - shared);
        return {tile[0], tile[1], tile[2]};
    }
};

enum Kind { UP, DOWN, NONE };

struct alignas(16) Task {
    Tile tile;
    Kind kind;
    int index, slice;  // of its tile, and of what is made of it

    __device__ Task() {}
    __device__ Task(const Tiles& tiles, int i) {
        const int count = tiles.count();
        const bool up = i < count * FB;
        if (!up) i -= count * FB;
        kind = up ? UP : i < count * SLICES ? DOWN : NONE;
        index = up ? i / FB : i / SLICES, slice = up ? i % FB : i % SLICES;
        if (kind != NONE) tile = tiles.at(index);
    }
};

static_assert(16 + sizeof(Task) == 48);  // bytes of a claim: two barriers and the task

// A role's position in the ring of tasks that this program has claimed.
struct Claims {
    Task* const tasks;
    const u32 published, consumed;  // barriers: the task is published; all have read it
    int n = 0;

    __device__ void publish(const Task& task) {
        const int slot = n % CLAIMS;
        mbarrier_wait(consumed + 8 * slot, (n++ / CLAIMS & 1) ^ 1);
        tasks[slot] = task;
        mbarrier_arrive(published + 8 * slot);
    }

    __device__ Task next() {
        const int slot = n % CLAIMS;
        mbarrier_wait(published + 8 * slot, n++ / CLAIMS & 1);
        const Task task = tasks[slot];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(consumed + 8 * slot);
        return task;
    }
};

// Inputs of a task: two boxes of 128 rows of weights with scales, and rows with scales.
struct Source {
    const TensorMap *map, *shared_map, *other_shared_map;
    const float *scale, *shared_scale, *other_shared_scale;
    const u8* x;
    const float* x_scale;
    int rows;  // of x
};

template <bool UP> struct Work {
    static constexpr int steps = UP ? DB : FB, width = UP ? D : F;

    // The first row of weights of either box, and its row of scales.
    static __device__ int box(const Tile& tile, int slice, int second) {
        const int expert = max(tile.expert, 0);
        if (!UP) return expert * D + slice * 256 + second * 128;
        return tile.expert < 0 ? slice * 128 : (expert * 2 + second) * F + slice * 128;
    }

    static __device__ const TensorMap* map(const Source& from, const Tile& tile, int second) {
        return tile.expert >= 0 ? from.map : second ? from.other_shared_map : from.shared_map;
    }

    static __device__ const float* scales(const Source& from, const Tile& tile, int slice, int second) {
        const float* const all = tile.expert >= 0 ? from.scale : second ? from.other_shared_scale : from.shared_scale;
        return all + box(tile, slice, second) / 128 * steps;
    }

    // The row of x of a position in the sorted pairs.
    static __device__ int row(const Tile& tile, const int* order, int place, int T) {
        if (!UP) return place;
        return tile.expert < 0 ? place - T * A : order[place] / A;
    }
};

// A role's position in the ring of stages.
struct Ring {
    u8* memory;
    u32 data, full, empty;
    int stage;
    u32 parity;

    __device__ u32 at() const { return data + stage * STAGE; }
    __device__ u32 scales() const { return data + AT_SCALES + stage * SCALES; }

    __device__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// By one thread, which claims tasks.
template <bool UP> static __device__ void fetch_weights(const Source& from, const Task& task, Ring& ring) {
    using Inputs = Work<UP>;
    const TensorMap *first = Inputs::map(from, task.tile, 0), *second = Inputs::map(from, task.tile, 1);
    const int row = Inputs::box(task.tile, task.slice, 0), other = Inputs::box(task.tile, task.slice, 1);
    for (int k = 0; k < Inputs::steps; ++k, ring.next()) {
        mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
        const u32 barrier = ring.full + 8 * ring.stage;
        mbarrier_arrive_expect_tx(barrier, WEIGHTS);
        tma_load(ring.at(), first, 128 * k, row, barrier);
        tma_load(ring.at() + WEIGHTS / 2, second, 128 * k, other, barrier);
    }
}

static __device__ void claim_tasks(const Source& up_source, const Source& down_source, const Tiles& tiles,
                                   Claims& claims, int* claimed, Ring& ring) {
    Task task(tiles, atomicAdd(claimed, 1));
    int after = atomicAdd(claimed, 1);
    while (true) {
        const Task next(tiles, after);  // loaded while this task's weights are, as is the number of the one after
        after = atomicAdd(claimed, 1);
        claims.publish(task);
        if (task.kind == NONE) return;
        if (task.kind == UP)
            fetch_weights<true>(up_source, task, ring);
        else
            fetch_weights<false>(down_source, task, ring);
        task = next;
    }
}

// Loads rows and all scales with FETCHING threads: eight threads per row, 16 bytes each, in the swizzled layout of
// wgmma.
struct Rows {
    static constexpr int ROWS_AT_ONCE = FETCHING / 8, PASSES = ROWS / ROWS_AT_ONCE, IN_FLIGHT = STAGES - 2;
    static_assert(FETCHING == ROWS);  // of which each has a scale to fetch
    const Tiles& tiles;
    const int *order, *done;  // how much of `up`, then of each tile
    Ring ring;
    int issued = 0, published = 0;  // stages

    __device__ void publish() {
        fence_proxy_async();
        mbarrier_arrive(ring.full + 8 * (published++ % STAGES));
    }

    __device__ void publish_all() {
        cp_async_wait_all();
        while (published < issued) publish();
    }

    template <bool UP> __device__ void fetch(const Source& from, const Task& task) {
        using Inputs = Work<UP>;
        const int thread = threadIdx.x - (THREADS - FETCHING), chunk = thread % 8;
        const Tile& tile = task.tile;
        u32 offset[PASSES];
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int r = min(thread / 8 + ROWS_AT_ONCE * p, tile.count - 1);
            offset[p] = Inputs::row(tile, order, tile.first + r, tiles.T) * Inputs::width + 16 * chunk;
        }
        const int first_row = Inputs::row(tile, order, tile.first + min(thread, tile.count - 1), tiles.T);
        const float* const scale = from.x_scale + first_row;
        const float* const weight_scale = Inputs::scales(from, tile, task.slice, thread & 1);
        for (int k = 0; k < Inputs::steps; ++k, ring.next()) {
            mbarrier_wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
#pragma unroll
            for (int p = 0; p < PASSES; ++p) {
                const int r = thread / 8 + ROWS_AT_ONCE * p;
                const u32 to = ring.at() + WEIGHTS + r * 128 + ((chunk ^ (r & 7)) << 4);
                if (r < tile.count) cp_async_16(to, from.x + offset[p] + 128 * k);
            }
            if (thread < tile.count) cp_async_4(ring.scales() + 4 * thread, scale + k * from.rows);
            if (thread < 2) cp_async_4(ring.scales() + 4 * (ROWS + thread), weight_scale + k);
            cp_async_commit_group();
            cp_async_wait_group<IN_FLIGHT>();
            if (++issued - published > IN_FLIGHT) publish();
        }
    }

    __device__ void all(const Source& up_source, const Source& down_source, Claims& claims) {
        bool has_all = false;
        while (true) {
            const Task task = claims.next();
            if (task.kind == NONE) return publish_all();
            if (task.kind == UP) {
                fetch<true>(up_source, task);
                continue;
            }
            if (!has_all) has_all = load_acquire(done) == tiles.count() * FB;
            if (!has_all && load_acquire(done + 1 + task.index) < FB) {
                publish_all();  // other programs may wait for this one
                wait_for_count(done + 1 + task.index, FB);
            }
            fetch<false>(down_source, task);
        }
    }
};

// 64 rows of a stage's first weights and 64 of its second, by N rows, over STEPS stages. The next product runs while
// one is scaled, except at the end of a group of stages; registers suffice for that up to MOST_TOGETHER rows.
template <int N, int STEPS>
static __device__ void accumulate(Ring& ring, float (&first)[N / 2], float (&second)[N / 2]) {
    constexpr bool OVERLAPPED = N <= MAX_OVERLAPPED_ROWS;
    constexpr int GROUP = OVERLAPPED && STEPS % 2 == 0 ? 2 : 1;
    const u32 half = threadIdx.x / 128 * (WEIGHTS / 4);
    const auto scales = [&](int stage) { return (const float*)(ring.memory + AT_SCALES + stage * SCALES); };
    const auto release = [&](int stage) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty + 8 * stage);
    };
#pragma unroll
    for (int i = 0; i < N / 2; ++i) first[i] = second[i] = 0;
    for (int k = 0; k < STEPS; k += GROUP) {
        float part[N / 2], other[N / 2];
        int before = 0;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const int stage = ring.stage;
            const u32 w = ring.at() + half, x = ring.at() + WEIGHTS;
            mbarrier_wait(ring.full + 8 * stage, ring.parity);
            ring.next();
            multiply<N>(part, w, x);
            if (j > 0) {
                finish<1>(other);
                add_scaled<N>(second, other, scales(before), scales(before)[ROWS + 1]);
                release(before);
            }
            if constexpr (OVERLAPPED) {
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
        release(before);
    }
}

static __device__ void sync_consumers() { named_barrier_sync(1, COMPUTING); }

// 128 values of h of a tile's rows, in FP8. The routing weight is multiplied into their scale.
template <int N>
static __device__ void compute_h(Ring& ring, const Tile& tile, int slice, const int* order, const float* weight, u8* h,
                              float* h_scale, int T) {
    float value[N / 2], up[N / 2];
    accumulate<N, DB>(ring, value, up);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * 16 + lane / 4;
    float* const amax = (float*)(ring.memory + AT_AMAX);
    float2* const column = (float2*)(ring.memory + AT_COLUMN);
    u8* const result = ring.memory + AT_H;
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
    sync_consumers();
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
    sync_consumers();
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const int n = 8 * j + lane % 4 * 2;
        const float2 one = column[n], two = column[n + 1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float low = quotient(value[4 * j + 2 * i], one.x, one.y);
            const float high = quotient(value[4 * j + 2 * i + 1], two.x, two.y);
            const u16 codes = to_e4m3x2(low, high);
            result[n * PITCH + row + 8 * i] = (u8)codes;
            result[(n + 1) * PITCH + row + 8 * i] = (u8)(codes >> 8);
        }
    }
    sync_consumers();
    for (int i = threadIdx.x; i < 8 * tile.count; i += COMPUTING)
        *(uint4*)(h + (u64)(tile.first + i / 8) * F + slice * 128 + 16 * (i % 8)) =
            *(const uint4*)(result + i / 8 * PITCH + 16 * (i % 8));
    sync_consumers();  // all is stored, so `down` may overwrite the buffer
}

// 256 outputs of a tile's rows.
template <int N>
static __device__ void compute_outputs(Ring& ring, const Tile& tile, int slice, u16* y) {
    const int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int thread = threadIdx.x % 128;
    float first[N / 2], second[N / 2];
    accumulate<N, FB>(ring, first, second);
    u8* const result = ring.memory + AT_RESULT + half * ROWS * OUTPUT_PITCH;
    // 16-byte parts, swizzled to avoid bank conflicts
    const u32 own_rows = shared_at(result) + lane % 8 * OUTPUT_PITCH;
    const auto part = [&](int i) { return (2 * warp + lane / 8 % 2 + i ^ lane % 8) * 16; };
    named_barrier_sync(2 + half, 128);  // the previous task's copies have finished
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        stmatrix_transposed(own_rows + 8 * j * OUTPUT_PITCH + part(0), to_bf16x2(first[4 * j], first[4 * j + 1]),
                     to_bf16x2(first[4 * j + 2], first[4 * j + 3]));
        stmatrix_transposed(own_rows + 8 * j * OUTPUT_PITCH + part(8), to_bf16x2(second[4 * j], second[4 * j + 1]),
                     to_bf16x2(second[4 * j + 2], second[4 * j + 3]));
    }
    named_barrier_sync(2 + half, 128);
    u16* const to = y + (u64)tile.first * D + slice * 256 + 128 * (thread / 8 % 2) + 64 * half + 8 * (thread % 8);
#pragma unroll
    for (int p = 0; p < N / 8; ++p) {
        const int r = thread / 16 + 8 * p;
        if (r < tile.count)
            *(uint4*)(to + r * D) = *(const uint4*)(result + r * OUTPUT_PITCH + 16 * (thread % 16 ^ r % 8));
    }
}

#define WITH_ROWS(count, call)                                                                                      \
    if (count <= 32) { constexpr int N = 32; call; }                                                              \
    else if (count <= 64) { constexpr int N = 64; call; }                                                         \
    else if (count <= 80) { constexpr int N = 80; call; }                                                         \
    else { constexpr int N = ROWS; call; }

extern "C" __global__ void __launch_bounds__(THREADS, 1)
experts(const u8* x, const float* x_scale, const int* order, const int* planned, int* progress, const float* weight,
        const __grid_constant__ TensorMap gate_up, const __grid_constant__ TensorMap shared_gate,
        const __grid_constant__ TensorMap shared_up, const __grid_constant__ TensorMap w_down,
        const __grid_constant__ TensorMap shared_down, const float* gate_up_scale, const float* shared_gate_scale,
        const float* shared_up_scale, const float* down_scale, const float* shared_down_scale, u8* h, float* h_scale,
        u16* y, int T, int max_tiles, int shared_tiles) {
    const Source up_source = {&gate_up, &shared_gate, &shared_up, gate_up_scale, shared_gate_scale, shared_up_scale,
                          x, x_scale, T};
    const Source down_source = {&w_down, &shared_down, &shared_down, down_scale, shared_down_scale, shared_down_scale,
                            h, h_scale, T * A + T};
    const Tiles tiles = {planned, max_tiles, T, shared_tiles};
    u8* const memory = shared_memory + (-shared_at(shared_memory) & 1023);
    const u32 data = shared_at(memory), full = data + AT_BARRIER, published = data + AT_CLAIMS;
    Ring ring = {memory, data, full, full + 8 * STAGES, 0, 0};
    Claims claims = {(Task*)(memory + AT_CLAIMS + 16 * CLAIMS), published, published + 8 * CLAIMS};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0 && lane < 2 * STAGES) mbarrier_init(full + 8 * lane, lane < STAGES ? 1 + FETCHING : COMPUTING / 32);
    if (warp == 1 && lane < 2 * CLAIMS)
        mbarrier_init(published + 8 * lane, lane < CLAIMS ? 1 : (COMPUTING + FETCHING) / 32);
    __syncthreads();
    pdl_wait();
    if (warp >= COMPUTING / 32) {
        set_max_registers<72>();
        if (warp > COMPUTING / 32) {
            Rows rows = {tiles, order, progress + 1, ring};
            rows.all(up_source, down_source, claims);
        } else if (lane == 0) {
            claim_tasks(up_source, down_source, tiles, claims, progress, ring);
        }
        return;
    }
    set_max_registers<216>();
    while (true) {
        const Task task = claims.next();
        const Tile& tile = task.tile;
        if (task.kind == NONE) return;
        if (task.kind == UP) {
            WITH_ROWS(tile.count, (compute_h<N>(ring, tile, task.slice, order, weight, h, h_scale, T)))
            if (threadIdx.x == 0) add_release(progress + 2 + task.index), add_release(progress + 1);
        } else {
            WITH_ROWS(tile.count, (compute_outputs<N>(ring, tile, task.slice, y)))
        }
    }
}
