// CUDA C++ on a CPU, for kernels that use only what this file defines. Each thread of a program is a fiber; a warp-wide
// operation completes when its last thread arrives. Programs of a cluster run concurrently if all of their shared
// memory is dynamic. Products of tensor cores are computed by loops.
//
// Included before the kernel's source, which leaves out its own inline assembly under ON_CPU.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#define ON_CPU
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __expf expf

using std::max;
using std::min;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

struct Index { u32 x, y, z; };
struct __align__(16) Vector16 { u32 x[4]; };

constexpr int MAX_PEERS = 4, MAX_THREADS = MAX_PEERS * 1024, MAX_WORDS = 8;
static Index threadIdx, blockIdx, gridDim;
static unsigned char memories[MAX_PEERS][1 << 18] __attribute__((aligned(1024)));
static unsigned char* memory;  // of the running program

static int current, own, living[MAX_PEERS];  // thread, program in its cluster
static ucontext_t scheduler, fibers[MAX_THREADS];
static bool ended[MAX_THREADS];
static std::vector<char> stacks[MAX_THREADS];

struct Barrier {
    int count, phase;
    void arrive_and_wait(int of) {
        const int arrived_in = phase;
        if (++count >= of) {
            count = 0, ++phase;
            return;
        }
        while (phase == arrived_in) swapcontext(&fibers[current], &scheduler);
    }
};

static Barrier of_block[MAX_PEERS], of_warp[MAX_THREADS / 32];
static u32 words[2][MAX_THREADS / 32][32][MAX_WORDS];

static void __syncthreads() { of_block[own].arrive_and_wait(living[own]); }
static void __syncwarp() { of_warp[current / 32].arrive_and_wait(32); }

// What every lane of the warp brought, [32][MOST_WORDS]; valid until the warp meets twice more.
static u32 (*warp_exchange(const u32* own_words, int count))[MAX_WORDS] {
    const int warp = current / 32, phase = of_warp[warp].phase % 2;
    memcpy(words[phase][warp][current % 32], own_words, 4 * count);
    __syncwarp();
    return words[phase][warp];
}

static float __uint_as_float(u32 x) {
    float y;
    memcpy(&y, &x, 4);
    return y;
}

static u32 __float_as_uint(float x) {
    u32 y;
    memcpy(&y, &x, 4);
    return y;
}

static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(u32 x) { return __builtin_ffs(x); }

static float __shfl_xor_sync(u32, float x, int across) {
    const u32 own_words = __float_as_uint(x);
    return __uint_as_float(warp_exchange(&own_words, 1)[current % 32 ^ across][0]);
}

static int __shfl_up_sync(u32, int x, int by) {
    const u32 own_words = x;
    return warp_exchange(&own_words, 1)[max(current % 32 - by, 0)][0];
}

static u32 __match_any_sync(u32, int x) {
    const u32 own_words = x;
    u32(*all)[MAX_WORDS] = warp_exchange(&own_words, 1), found = 0;
    for (int i = 0; i < 32; ++i) found |= (u32)(all[i][0] == own_words) << i;
    return found;
}

static int atomicAdd(int* at, int more) { return (*at += more) - more; }

static int __reduce_max_sync(u32, int x) {
    const u32 own_words = x;
    u32(*all)[MAX_WORDS] = warp_exchange(&own_words, 1);
    for (int i = 0; i < 32; ++i) x = max(x, (int)all[i][0]);
    return x;
}

static int __reduce_min_sync(u32, int x) { return -__reduce_max_sync(~0u, -x); }

static u32 __ballot_sync(u32, bool is) {
    const u32 own_words = is;
    u32(*all)[MAX_WORDS] = warp_exchange(&own_words, 1), found = 0;
    for (int i = 0; i < 32; ++i) found |= all[i][0] << i;
    return found;
}

static u32 byte_perm(u32 a, u32 b, u32 which) {
    const u64 both = (u64)b << 32 | a;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= (u32)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

static Vector16 load_no_allocate(const u8* at) {
    if ((u64)at % 16) abort();
    return *(const Vector16*)at;
}

static Vector16 load_row(const u8* at) { return load_no_allocate(at); }
static float load_scale(const float* at) { return *at; }

static void cp_async(u8* to, const u8* at) {
    if ((u64)to % 16 || (u64)at % 16) abort();
    memcpy(to, at, 16);
}

static void cp_async_wait() {}
static void pdl_wait() {}
static void pdl_launch_dependents() {}
static u32 mask_xor(u32 a, u32 mask, u32 bits) { return (a & mask) ^ bits; }

static float of_bfloat16(u16 x) { return __uint_as_float((u32)x << 16); }

static u16 to_bfloat16(float x) {
    const u32 bits = __float_as_uint(x);
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16;
}

static float of_float16(u16 x) {
    _Float16 y;
    memcpy(&y, &x, 2);
    return y;
}

static u16 float16_of(float x) {
    const _Float16 y = x;
    u16 bits;
    memcpy(&bits, &y, 2);
    return bits;
}

static u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    const u16 low = to_bfloat16(of_bfloat16(a) * of_bfloat16(b) + of_bfloat16(c));
    return low | (u32)to_bfloat16(of_bfloat16(a >> 16) * of_bfloat16(b >> 16) + of_bfloat16(c >> 16)) << 16;
}

static u32 fma_f16x2(u32 a, u32 b, u32 c) {
    const u16 low = float16_of(of_float16(a) * of_float16(b) + of_float16(c));
    return low | (u32)float16_of(of_float16(a >> 16) * of_float16(b >> 16) + of_float16(c >> 16)) << 16;
}

// 3 bits of fraction, or below 2^-6 multiples of 2^-9.
static float rounded_to_e4m3(float x) {
    int exponent;
    frexpf(x, &exponent);
    const float step = ldexpf(1, max(exponent - 1, -6) - 3);
    return std::clamp(nearbyintf(x / step) * step, -448.0f, 448.0f);
}

static u32 through_e4m3x2(float low, float high) {
    return float16_of(rounded_to_e4m3(low)) | (u32)float16_of(rounded_to_e4m3(high)) << 16;
}

// mma.m16n8k16 of float16 or bfloat16: lane 4 g + t has of a rows g and g + 8, inputs 2 t, 2 t + 1, and those
// 8 behind; of b column g, the same inputs; of d rows g and g + 8, columns 2 t and 2 t + 1.
template <bool F16> static void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const auto number = [](u32 pair, int k) {
        const u16 half = k % 2 ? pair >> 16 : pair;
        return F16 ? of_float16(half) : of_bfloat16(half);
    };
    const u32 own_words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    u32(*all)[MAX_WORDS] = warp_exchange(own_words, 6);
    for (int i = 0; i < 4; ++i) {
        const int row = current % 32 / 4 + i / 2 * 8, column = current % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int lane = k % 8 / 2;
            d[i] += number(all[row % 8 * 4 + lane][row / 8 + 2 * (k / 8)], k) *
                    number(all[column * 4 + lane][4 + k / 8], k);
        }
    }
}

#ifdef ACT
static void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_m16n8k16<ACT == 2>(d, a, b0, b1); }

// mma.m16n8k32 of int8: likewise, with inputs 4 t and on, and those 16 behind.
static void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const auto number = [](u32 four, int k) { return (int)(signed char)(four >> 8 * (k % 4)); };
    const u32 own_words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    u32(*all)[MAX_WORDS] = warp_exchange(own_words, 6);
    for (int i = 0; i < 4; ++i) {
        const int row = current % 32 / 4 + i / 2 * 8, column = current % 4 * 2 + i % 2;
        for (int k = 0; k < 32; ++k) {
            const int lane = k % 16 / 4;
            d[i] += number(all[row % 8 * 4 + lane][row / 8 + 2 * (k / 16)], k) *
                    number(all[column * 4 + lane][4 + k / 16], k);
        }
    }
}

#endif

// A kernel ignores words beyond its parameters.
typedef void Kernel(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64,
                    u64, u64, u64, u64);
static Kernel* running_kernel;
static u64 given[24];
constexpr int MAX_ROUNDS = 1 << 18;  // of a thread: with more, it waits for something that never happens

static void fiber() {
    const u64* g = given;
    running_kernel(g[0], g[1], g[2], g[3], g[4], g[5], g[6], g[7], g[8], g[9], g[10], g[11], g[12], g[13], g[14],
                   g[15], g[16], g[17], g[18], g[19], g[20], g[21], g[22], g[23]);
    ended[current] = true;
    --living[own];
    swapcontext(&fibers[current], &scheduler);
}

// Stalls warps for some hundred rounds at random, which exposes missing waits.
struct Stalls {
    u32 state;  // of a generator; 0: no stalls
    int until[MAX_THREADS / 32];

    u32 random() { return state ^= state << 13, state ^= state >> 17, state ^= state << 5; }

    bool holds(int thread, int phase) {
        int& stalled_until = until[thread / 32];
        if (state && thread % 32 == 0 && stalled_until <= phase && random() % 400 == 0)
            stalled_until = phase + random() % 300;
        return stalled_until > phase;
    }
};

// A grid of programs, one cluster after the other; arguments are pointers and ints, 24 at most. Shared memory begins as
// NaN. `stalls`: seed of stalled warps, or 0.
extern "C" void launch(Kernel* what, int columns, int rows, int num_threads, int cluster, const u64* arguments,
                       u32 stalls) {
    if (cluster > MAX_PEERS || columns % cluster) abort();
    running_kernel = what;
    memcpy(given, arguments, sizeof given);
    gridDim = {(u32)columns, (u32)rows, 1};
    for (int first = 0; first < columns * rows; first += cluster) {
        memset(memories, 0xFF, sizeof memories);
        memset(of_block, 0, sizeof of_block);
        memset(of_warp, 0, sizeof of_warp);
        for (int peer = 0; peer < MAX_PEERS; ++peer) living[peer] = peer < cluster ? num_threads : 0;
        for (int i = 0; i < cluster * num_threads; ++i) {
            ended[i] = false;
            stacks[i].resize(1 << 16);
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = stacks[i].data();
            fibers[i].uc_stack.ss_size = stacks[i].size();
            makecontext(&fibers[i], fiber, 0);
        }
        Stalls stalled = {stalls + first * (stalls != 0), {}};
        for (int phase = 0; *std::max_element(living, living + cluster); ++phase) {
            if (phase > MAX_ROUNDS) abort();
            for (current = 0; current < cluster * num_threads; ++current) {
                if (ended[current] || stalled.holds(current, phase)) continue;
                own = current / num_threads, memory = memories[own];
                threadIdx = {(u32)(current % num_threads), 0, 0};
                blockIdx = {(u32)((first + own) % columns), (u32)((first + own) / columns), 0};
                swapcontext(&scheduler, &fibers[current]);
            }
        }
    }
}
