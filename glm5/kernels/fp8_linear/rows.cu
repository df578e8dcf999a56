// x W^T in FP8 for many rows on Hopper, for a row-parallel weight with a reduce-scatter of the result. Row t belongs to
// rank t / share: it is sent to a buffer there while other rows are computed, and only this rank's rows are stored in y
// (all_reduce/triton_sharded.py sums the received rows).
//
// A program computes tiles of 128 rows of x by 128 outputs. A cluster of two has the same rows, and each loads half of
// them for both. One thread issues loads, up to STAGES blocks of 128 columns ahead of the eight computing warps, also
// across tiles. A warp group has half of the rows; the next product runs while it scales one.
//
// Compiled with BLOCKS of 128 columns, and GROUP, an even divisor of it: an unrolled group, within which the compiler
// keeps products in flight.

#include "hopper.cuh"

constexpr int PEERS = 2, COMPUTING = 256, THREADS = 384;
constexpr int ROWS = 128, OUTPUTS = 128;
constexpr int HALF = ROWS / 2 * 128, WEIGHTS = OUTPUTS * 128, STAGE = 2 * HALF + WEIGHTS;  // bytes: rows, then weights
constexpr int STAGES = 6;
constexpr int PITCH = 2 * OUTPUTS + 16;  // of a row in shared memory, padded to avoid bank conflicts
constexpr int AT_RESULT = STAGES * STAGE, RESULT = 16 * PITCH;  // of a warp
constexpr int AT_BARRIER = AT_RESULT + COMPUTING / 32 * RESULT;
static_assert(AT_BARRIER + 16 * STAGES == SHARED_BYTES, "cuda_rows.py counts others");

// Destination of rows: `y`, or a slot of this rank in the buffers of other ranks.
struct Ranks {
    const u64* buffers;
    int rank, words, share;

    // Of 16 rows of one owner.
    __device__ u16* place(u16* y, int t, int width, int slot) const {
        const int owner = t / share;
        if (owner == rank) return y + (u64)t * width;
        return (u16*)(buffers[owner] + 4ull * slot * words) + (u64)(rank * share + t - owner * share) * width;
    }
};

struct Tile { int row, output; };

// Order of tiles: all rows for some outputs, then for others, so that weights are read once. Rows of other ranks come
// first, round robin; this rank's own rows are computed while the link sends the rest.
struct Tiles {
    int sent, own, outputs;  // tiles of other ranks' rows and of this rank's (or of all, if a tile may have several owners)
    int owners, rank, share;

    __device__ Tiles(int T, int O, int rank, int share) : outputs(O / (PEERS * OUTPUTS)), rank(rank), share(share) {
        owners = share % ROWS ? 1 : T / share;
        own = owners > 1 ? share / ROWS : (T + ROWS - 1) / ROWS, sent = (owners - 1) * own;
    }

    __device__ int count() const { return (sent + own) * outputs; }

    __device__ Tile at(int i) const {
        const bool is_sent = i < sent * outputs;
        const int rows = is_sent ? sent : own, left = is_sent ? i : i - sent * outputs, row = left % rows;
        const int owner = owners == 1 ? 0 : is_sent ? (rank + 1 + row % (owners - 1)) % owners : rank;
        const int output = left / rows * PEERS + blockIdx.x % PEERS;
        return {owner * share + (is_sent ? row / (owners - 1) : row) * ROWS, output * OUTPUTS};
    }
};

static __device__ void fetch(const TensorMap* x, const TensorMap* w, const Tiles& tiles, int T, u32 data, u32 full,
                             u32 empty) {
    const int step = gridDim.x / PEERS, begin = blockIdx.x / PEERS, half = blockIdx.x % PEERS;
    const auto fetch_weights = [&](int k, int output, int stage) {
        mbarrier_arrive_expect_tx(full + 8 * stage, STAGE);
        tma_load(data + stage * STAGE + 2 * HALF, w, 128 * k, output, full + 8 * stage);
    };
    const int ahead = min(STAGES, BLOCKS);
    for (int k = 0; k < ahead; ++k) fetch_weights(k, tiles.at(begin).output, k);
    pdl_wait();
    int stage = 0, parity = 1;
    bool has_weights = true;  // up to `ahead`
    for (int i = begin; i < tiles.count(); i += step) {
        const Tile tile = tiles.at(i);
        const int row = min(tile.row + half * (ROWS / 2), T - 1);
        for (int k = 0; k < BLOCKS; ++k) {
            if (k == ahead) has_weights = false;
            mbarrier_wait(empty + 8 * stage, parity);
            if (!has_weights) fetch_weights(k, tile.output, stage);
            tma_load_multicast(data + stage * STAGE + half * HALF, x, 128 * k, row, full + 8 * stage, (1 << PEERS) - 1);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        has_weights = false;
    }
}

// Scales of a block of 128 columns: of a thread's two rows, and of the weights.
struct Scales {
    float upper, lower, weight;

    __device__ void load(const float* x_scale, const int (&rows)[2], const float* scale) {
        upper = x_scale[rows[0]], lower = x_scale[rows[1]], weight = *scale;
    }
};

// Output of a warp, 16 rows of 128 outputs in shared memory. A few rows are stored at a time while the next tile is
// computed; if all programs stored at once, the link would be congested and delay loads.
struct OutputStore {
    static constexpr int MAX_EVERY = BLOCKS >= 32 ? 8 : 4, EVERY = GROUP < MAX_EVERY ? GROUP : MAX_EVERY;
    static constexpr int NUM_ISSUES = BLOCKS / EVERY;
    static constexpr int ROWS_AT_ONCE = (16 + NUM_ISSUES - 1) / NUM_ISSUES;
    u8* const staged;
    u16* to = nullptr;
    int rows = 0, issued = 0;

    __device__ void stage_rows(const float (&sum)[64], u16* place, int count) {
        const int lane = threadIdx.x % 32;
        bulk_wait_group_read();  // the previous tile's rows
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 64; i += 2)
            *(u32*)(staged + (lane / 4 + i % 4 / 2 * 8) * PITCH + i / 4 * 16 + lane % 4 * 4) =
                without_negative_zero(to_bf16x2(sum[i], sum[i + 1]));
        fence_proxy_async();
        __syncwarp();
        to = place, rows = min(count, 16), issued = 0;
    }

    __device__ void issue(int most, int O) {
        const int row = issued + threadIdx.x % 32;
        if (row < min(issued + most, rows)) bulk_store(to + (u64)row * O, shared_at(staged + row * PITCH), OUTPUTS * 2);
        bulk_commit_group();
        issued += most;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
rows(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, const float* x_scale, const float* scale,
     u16* y, const u64* buffers, const int* slot_ptr, int rank, int num_words, int share, int T, int O) {
    u8* const memory = aligned_memory;
    const u32 data = shared_at(memory), full = data + AT_BARRIER, empty = full + 8 * STAGES;
    if (threadIdx.x < 2 * STAGES)
        mbarrier_init(full + 8 * threadIdx.x, threadIdx.x < STAGES ? 1 : PEERS * COMPUTING / 32);
    cluster_sync();
    pdl_launch_dependents();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Tiles tiles(T, O, rank, share);
    if (warp >= COMPUTING / 32) {
        set_max_registers<24>();
        if (warp == COMPUTING / 32 && lane == 0) fetch(&x, &w, tiles, T, data, full, empty);
        __syncwarp();
    } else {
        set_max_registers<240>();
        pdl_wait();
        const Ranks ranks = {buffers, rank, num_words, share};
        const int slot = slot_ptr ? *slot_ptr : 0, group = warp / 4, step = gridDim.x / PEERS;
        const int own_row = group * (ROWS / 2) + warp % 4 * 16;
        OutputStore store = {memory + AT_RESULT + warp * RESULT};
        int stage = 0, parity = 0, ended = 0;  // stages
        const auto begin = [&](float(&part)[64]) {
            const u32 from = data + stage * STAGE;
            mbarrier_wait(full + 8 * stage, parity);
            multiply<OUTPUTS>(part, from + group * HALF, from + 2 * HALF);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        };
        const auto release = [&] {
            __syncwarp();
            if (lane < PEERS) mbarrier_arrive_at_peer(empty + 8 * ended, lane);
            if (++ended == STAGES) ended = 0;
        };
        const auto add = [&](float(&sum)[64], const float(&part)[64], const Scales& scales) {
            release();
            add_rows<OUTPUTS>(sum, part, scales.upper * scales.weight, scales.lower * scales.weight);
        };
        float sum[64], part[64], other[64];
        for (int i = blockIdx.x / PEERS; i < tiles.count(); i += step) {
            const Tile tile = tiles.at(i);
            const int t0 = tile.row + own_row, output = tile.output;
            const int at[2] = {min(t0 + lane / 4, T - 1), min(t0 + lane / 4 + 8, T - 1)};
            const float *scales = x_scale, *weights = scale + output / 128 * BLOCKS;
            Scales even, odd;
            even.load(scales, at, weights);
#pragma unroll
            for (int r = 0; r < 64; ++r) sum[r] = 0;
            for (int k = 0; k < BLOCKS; k += GROUP) {
                begin(part);
#pragma unroll
                for (int j = 0; j < GROUP; j += 2) {
                    odd.load(scales + T, at, weights + 1);
                    begin(other);
                    finish<1>(part);
                    add(sum, part, even);
                    if (k + j + 2 < BLOCKS) scales += 2 * T, weights += 2;
                    even.load(scales, at, weights);
                    if (j + 2 < GROUP) {
                        begin(part);
                        finish<1>(other);
                    } else {
                        finish<0>(other);
                    }
                    add(sum, other, odd);
                    if (j % OutputStore::EVERY == 0) store.issue(OutputStore::ROWS_AT_ONCE, O);
                }
            }
            store.stage_rows(sum, t0 < T ? ranks.place(y, t0, O, slot) + output : nullptr, T - t0);
        }
        store.issue(16, O);
        bulk_wait_group();
    }
    cluster_sync();  // a program must not exit while its peer still sends to it
}
