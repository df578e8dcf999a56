// The functions of hopper.cuh on a CPU: asynchronous copies and products are executed where they are issued.

#include "cuda_on_cpu.h"

#include <map>

#define __grid_constant__

struct alignas(16) uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Matrix { const u8* place; u64 rows, cols, tile_rows; };
struct TensorMap { const Matrix* matrix; };

static u8 *&shared_memory = memory, *&aligned_memory = memory;

static float __int_as_float(int x) { return __uint_as_float(x); }
static float exp2_approx(float x) { return exp2f(x); }
static float __shfl_sync(u32, float x, int lane) {
    const u32 own_words = __float_as_uint(x);
    return __uint_as_float(warp_exchange(&own_words, 1)[lane][0]);
}

static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static u32 shared_at(const void* p) { return (const u8*)p - memory; }
static void yield_fiber() { swapcontext(&fibers[current], &scheduler); }

static Barrier named[MAX_PEERS][16], of_cluster;
static void named_barrier_sync(int barrier, int count) { named[own][barrier].arrive_and_wait(count); }

struct Arrivals {
    int wanted, missing, bytes;
    u32 phase;
    void check() {
        if (missing < 0) abort();
        if (missing == 0 && bytes == 0) missing = wanted, phase ^= 1;
    }
};

static std::map<u32, Arrivals> arrivals_of[MAX_PEERS];
#define arrivals arrivals_of[own]

static void mbarrier_init(u32 at, int count) { arrivals[at] = {count, count, 0, 0}; }

static void mbarrier_wait(u32 barrier, u32 parity) {
    while (arrivals[barrier].phase == parity) yield_fiber();
}

static void mbarrier_arrive_expect_tx(u32 barrier, int bytes) {
    arrivals[barrier].bytes += bytes, --arrivals[barrier].missing;
    arrivals[barrier].check();
}

static void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect_tx(barrier, 0); }
static void cp_async_mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

static void add_release(int* count) { ++*count; }
static int load_acquire(const int* count) { return *count; }

static void wait_for_count(const int* count, int wanted) {
    while (*count < wanted) yield_fiber();
}

// Place of a byte in a matrix of rows of 128 bytes at a multiple of 1024.
static u32 place_of(u32 byte) { return byte ^ byte / 128 % 8 * 16; }

// Rows behind the last are zeros.
static void tma_load_evict_first(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    const Matrix& from = *map->matrix;
    if (to % 1024 || row < 0 || row >= (int)from.rows || column + 128 > (int)from.cols) abort();
    for (int i = 0; i < 128 * (int)from.tile_rows; ++i) {
        const u64 its_row = row + i / 128;
        memory[to + place_of(i)] = its_row < from.rows ? from.place[its_row * from.cols + column + i % 128] : 0;
    }
    arrivals[barrier].bytes -= 128 * from.tile_rows;
    arrivals[barrier].check();
}

static void tma_load(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    tma_load_evict_first(to, map, column, row, barrier);
}

static void switch_to_peer(int peer) { own = peer, memory = memories[peer]; }

static void tma_load_multicast(u32 to, const TensorMap* map, int column, int row, u32 barrier, u16 peers) {
    const int caller = own;
    for (int peer = 0; peer < MAX_PEERS; ++peer) {
        if (!(peers >> peer & 1)) continue;
        switch_to_peer(peer);
        tma_load_evict_first(to, map, column, row, barrier);
    }
    switch_to_peer(caller);
}

static void mbarrier_arrive_at_peer(u32 barrier, int peer) {
    const int caller = own;
    switch_to_peer(peer);
    mbarrier_arrive(barrier);
    switch_to_peer(caller);
}

// Matrices of heads, zeros behind the last row of each.
struct Heads { const u8* place; u64 width, rows, heads, row_step, head_step, tile_rows; };

static void tma_load_3d(u32 to, const TensorMap* map, int column, int row, int head, u32 barrier) {
    const Heads& from = *(const Heads*)map->matrix;
    if (to % 1024 || row < 0 || head < 0 || head >= (int)from.heads || column + 128 > (int)from.width) abort();
    for (int i = 0; i < 128 * (int)from.tile_rows; ++i) {
        const u64 its_row = row + i / 128, at = head * from.head_step + its_row * from.row_step + column + i % 128;
        memory[to + place_of(i)] = its_row < from.rows ? from.place[at] : 0;
    }
    arrivals[barrier].bytes -= 128 * from.tile_rows;
    arrivals[barrier].check();
}

static void cluster_sync() {
    int all = 0;
    for (int peer = 0; peer < MAX_PEERS; ++peer) all += living[peer];
    of_cluster.arrive_and_wait(all);
}

static void cluster_sync_relaxed() { cluster_sync(); }

static int load_peer_int(u32 at, int peer) { return *(const int*)(memories[peer] + at); }
static float4 load_peer_float4(u32 at, int peer) { return *(const float4*)(memories[peer] + at); }

static void bulk_store(void* to, u32 from, int bytes) {
    if ((u64)to % 16 || from % 16 || bytes % 16) abort();
    memcpy(to, memory + from, bytes);
}

static void bulk_commit_group() {}
static void bulk_wait_group_read() {}
static void bulk_wait_group() {}

static void cp_async_16(u32 to, const void* from) {
    if (to % 16 || (u64)from % 16) abort();
    memcpy(memory + to, from, 16);
}

static void cp_async_4(u32 to, const void* from) { memcpy(memory + to, from, 4); }
static void cp_async_wait_all() {}
static void cp_async_commit_group() {}
template <int LEFT> static void cp_async_wait_group() {}
static void fence_proxy_async() {}

static u32 to_bf16x2(float low, float high) { return to_bfloat16(low) | (u32)to_bfloat16(high) << 16; }

static u32 without_negative_zero(u32 pair) { return fma_bf16x2(pair, 0x3F803F80, 0); }

static float of_e4m3(u8 code) {
    static const std::vector<float> numbers = [] {
        std::vector<float> some(256);
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            const float size = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
            some[code] = (code & 127) == 127 ? NAN : code & 128 ? -size : size;
        }
        return some;
    }();
    return numbers[code];
}

static u8 e4m3_of(float x) {
    const float size = fabsf(rounded_to_e4m3(x));
    for (int code = 0; code < 127; ++code)
        if (of_e4m3(code) == size) return code | (x < 0) << 7;
    return 127;
}

static u16 to_e4m3x2(float low, float high) { return e4m3_of(low) | e4m3_of(high) << 8; }

static void stmatrix_transposed(u32 at, u32 first, u32 second) {
    const int lane = current % 32;
    if (lane < 16 && at % 16) abort();
    u32(*all)[MAX_WORDS] = warp_exchange(&at, 1);
    for (int i = 0; i < 4; ++i) {
        const u16 value = (i / 2 ? second : first) >> 16 * (i % 2);
        memcpy(memory + all[i / 2 * 8 + lane % 4 * 2 + i % 2][0] + 2 * (lane / 4), &value, 2);
    }
    __syncwarp();
}

// Warp w has rows 16 w and on; a lane of them lane / 4 and 8 further, of every eight columns 2 (lane % 4) and the next.
template <int N> struct Wgmma {
    static void run(float (&d)[N / 2], u64 w, u64 x, int more) {
        if (w >> 62 != 1 || (w >> 32 & 0x3FFF) != 64 || x >> 32 != w >> 32) abort();
        const auto number = [](u64 matrix, int row, int k) {
            const u32 at = (matrix & 0x3FFF) << 4, start = at & ~1023u;
            return of_e4m3(memory[start + place_of(at - start + 128 * row + k)]);
        };
        for (int i = 0; i < N / 2; ++i) {
            const int row = current % 128 / 32 * 16 + current % 32 / 4 + i % 4 / 2 * 8;
            const int column = i / 4 * 8 + current % 4 * 2 + i % 2;
            if (!more) d[i] = 0;
            for (int k = 0; k < 32; ++k) d[i] += number(w, row, k) * number(x, column, k);
        }
    }
};

template <int N> static void warpgroup_fence_operand(float (&)[N]) {}
static void warpgroup_arrive() {}
static void warpgroup_commit_batch() {}
template <int LEFT> static void warpgroup_wait() {}
template <int COUNT> static void set_max_registers() {}
