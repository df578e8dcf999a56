// Sorts (token, choice) pairs by expert, and splits them into tiles of up to ROWS pairs of one expert. One cluster of
// PROGRAMS computes what triton_plan.py does in two launches.
//
// A warp counts its consecutive pairs by expert; one thread per expert then sums the counts of earlier warps and
// programs. So the sort is stable and deterministic.
//
// Compiled with E, the number of experts (up to 1024), ROWS and PROGRAMS.

#include "hopper.cuh"

constexpr int WARPS = 32, THREADS = 32 * WARPS;
static_assert(E <= THREADS);

// Exclusive prefix sum over threads. `of_warp`: scratch of WARPS ints.
static __device__ int sum_before(int own_index, int* of_warp) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = own_index;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warp; ++w) sum += of_warp[w];
    return sum - own_index;
}

// order [num_pairs]: sorted pairs; places: position of each pair; tiles [room + 1, 3]: expert, first position, rows (0
// if unused), and in the last entry the number of used tiles. Clears `num_counters` of `counters`.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
plan(const int* expert, int* order, int* places, int* tiles, int* counters, int num_pairs, int max_tiles,
     int num_counters) {
    int* const count = (int*)shared_memory;  // [WARPS, E]: a warp's number of pairs, then the position of its next one
    int* const own = count + WARPS * E, *const of_warp = own + E;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, program = blockIdx.x;
    const int rounds = (num_pairs + PROGRAMS * THREADS - 1) / (PROGRAMS * THREADS);
    const int begin = (program * WARPS + warp) * rounds * 32 + lane;
    for (int i = threadIdx.x; i < WARPS * E; i += THREADS) count[i] = 0;
    __syncthreads();
    pdl_wait();
    pdl_launch_dependents();
    for (int k = 0, j = begin; k < rounds; ++k, j += 32)
        if (j < num_pairs) atomicAdd(count + warp * E + expert[j], 1);
    const int own_index = program * THREADS + threadIdx.x;
    for (int i = own_index; i < num_counters; i += PROGRAMS * THREADS) counters[i] = 0;
    for (int i = own_index; i < max_tiles; i += PROGRAMS * THREADS) tiles[3 * i + 2] = 0;
    __syncthreads();

    const int e = threadIdx.x;
    int sum = 0;
    if (e < E) {
        for (int w = 0; w < WARPS; ++w) {
            const int found = count[w * E + e];
            count[w * E + e] = sum;
            sum += found;
        }
        own[e] = sum;
    }
    cluster_sync();
    int total = 0, earlier = 0;
    if (e < E)
        for (int p = 0; p < PROGRAMS; ++p) {
            const int found = load_peer_int(shared_at(own + e), p);
            total += found;
            if (p < program) earlier += found;
        }
    const int first = sum_before(total, of_warp), num_tiles = (total + ROWS - 1) / ROWS;
    const int before = sum_before(num_tiles, of_warp + WARPS);
    if (e < E) {
        for (int w = 0; w < WARPS; ++w) count[w * E + e] += first + earlier;
        if (program == 0) {
            for (int i = 0; i < num_tiles; ++i) {
                int* const tile = tiles + 3 * (before + i);
                tile[0] = e, tile[1] = first + i * ROWS, tile[2] = min(ROWS, total - i * ROWS);
            }
            if (e == E - 1) tiles[3 * max_tiles] = before + num_tiles;
        }
    }
    __syncthreads();
    for (int k = 0, j = begin; k < rounds; ++k, j += 32) {
        const int found = j < num_pairs ? expert[j] : E;
        const u32 peers = __match_any_sync(~0u, found), lower = peers & (1u << lane) - 1;
        const int place = found < E ? count[warp * E + found] + __popc(lower) : 0;
        __syncwarp();
        if (found < E) order[place] = j, places[j] = place;
        if (found < E && lower == 0) count[warp * E + found] += __popc(peers);
        __syncwarp();
    }
    cluster_sync_relaxed();
}
