// Which rows each expert has, found by the threads of one program. For experts.cu.

struct alignas(16) Tile { int expert, first, count, unused; };  // expert -1: the shared one

// Tiles of up to ROWS rows, the shared expert's first, and the pairs in the order of experts, ascending within one.
// `seen`: [warps + 1][E] ints.
static __device__ int make_plan(const int* expert, int T, Tile* tiles, int* order, int* seen, int num_threads) {
    const int warps = num_threads / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = T * A;
    const int share = (pairs + 32 * warps - 1) / (32 * warps) * 32, begin = warp * share;
    const int end = min(begin + share, pairs);
    int* const mine = seen + warp * E;
    int* const first = seen + warps * E;
    __shared__ int totals[2][32];
    for (int e = threadIdx.x; e < warps * E; e += num_threads) seen[e] = 0;
    __syncthreads();
    for (int j = begin; j < end; j += 32) {
        const int e = j + lane < end ? expert[j + lane] : -1;
        const u32 alike = __match_any_sync(~0u, e);
        if (e >= 0 && lane == __ffs(alike) - 1) mine[e] += __popc(alike);
        __syncwarp();
    }
    __syncthreads();
    const int e = threadIdx.x;  // E <= num_threads
    int count = 0, pieces = 0;
    if (e < E) {
        for (int w = 0; w < warps; ++w) {
            const int some = seen[w * E + e];
            seen[w * E + e] = count;
            count += some;
        }
        pieces = (count + ROWS - 1) / ROWS;
    }
    int before = count, tiles_before = pieces;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int a = __shfl_up_sync(~0u, before, step), b = __shfl_up_sync(~0u, tiles_before, step);
        if (lane >= step) before += a, tiles_before += b;
    }
    if (lane == 31) totals[0][warp] = before, totals[1][warp] = tiles_before;
    __syncthreads();
    const int shared_tiles = SHARED * ((T + ROWS - 1) / ROWS);
    int all_tiles = shared_tiles;
    for (int w = 0; w < warps; ++w) {
        if (w < warp) before += totals[0][w], tiles_before += totals[1][w];
        all_tiles += totals[1][w];
    }
    before -= count, tiles_before -= pieces;
    if (e < E) {
        first[e] = before;
        const int most = pieces ? min(ROWS, ((count + pieces - 1) / pieces + 7) / 8 * 8) : 0;
        for (int i = 0; i < pieces; ++i)
            tiles[shared_tiles + tiles_before + i] = {e, before + i * most, min(most, count - i * most), 0};
    }
    for (int i = threadIdx.x; i < shared_tiles; i += num_threads)
        tiles[i] = {-1, T * A + i * ROWS, min(ROWS, T - i * ROWS), 0};
    __syncthreads();
    for (int j = begin; j < end; j += 32) {
        const int mine_e = j + lane < end ? expert[j + lane] : -1;
        const u32 alike = __match_any_sync(~0u, mine_e);
        int place = 0;
        if (mine_e >= 0) place = first[mine_e] + mine[mine_e] + __popc(alike & ((1u << lane) - 1));
        __syncwarp();
        if (mine_e >= 0) {
            order[place] = j + lane;
            if (lane == __ffs(alike) - 1) mine[mine_e] += __popc(alike);
        }
        __syncwarp();
    }
    __syncthreads();
    return all_tiles;
}
