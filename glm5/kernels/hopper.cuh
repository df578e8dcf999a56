// Wrappers of Hopper's instructions: asynchronous copies (TMA), mbarriers, and products of a warp group (wgmma). For
// CPU tests, tests/support/hopper_on_cpu.h defines these functions.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifndef ON_CPU
struct alignas(64) TensorMap { u64 words[16]; };  // CUtensorMap

extern __shared__ u8 shared_memory[];
extern __shared__ __align__(1024) u8 aligned_memory[];  // the same, where products' and copies' tiles may begin

static __device__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }

static __device__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
static __device__ void pdl_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Synchronizes `count` threads of this program at the named barrier `barrier`.
static __device__ void named_barrier_sync(int barrier, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

static __device__ void mbarrier_init(u32 at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ void mbarrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

static __device__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

static __device__ void mbarrier_arrive_expect_tx(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the barrier when this thread's copies so far have finished; waiters read them with ordinary loads.
static __device__ void cp_async_mbarrier_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// A box of rows of 128 bytes, with L2 evict-first.
static __device__ void tma_load_evict_first(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(0x12F0000000000000ull) : "memory");
}

// The same for data that other programs read, too.
static __device__ void tma_load(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

// Multicast to the same address in each program of the cluster with a bit in `peers`, arriving at its barrier there.
static __device__ void tma_load_multicast(u32 to, const TensorMap* map, int column, int row, u32 barrier, u16 peers) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(peers) : "memory");
}

// A box of rows of 128 bytes of one head, from a map of all heads.
static __device__ void tma_load_3d(u32 to, const TensorMap* map, int column, int row, int head, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(head), "r"(barrier) : "memory");
}

// Asynchronous copy from shared to global memory, multiples of 16 bytes, after `fence_proxy_async`. Copies up to
// `bulk_commit_group` form one group.
static __device__ void bulk_store(void* to, u32 from, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

static __device__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until sources of this thread's copies may be overwritten; until the copies have finished.
static __device__ void bulk_wait_group_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
static __device__ void bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

static __device__ void cp_async_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ void cp_async_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

static __device__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
static __device__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT> static __device__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma and TMA (proxy fence).
static __device__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A counter of programs in global memory, with release and acquire semantics.
static __device__ void add_release(int* count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

static __device__ int load_acquire(const int* count) {
    int found;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
    return found;
}

static __device__ void wait_for_count(const int* count, int wanted) {
    while (load_acquire(count) < wanted) __nanosleep(100);
}

static __device__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Conversion to the bits of bfloat16, and to e4m3 codes.
static __device__ u32 to_bf16x2(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// A bfloat16 pair with minus zero replaced by zero, because minus zero marks empty buffers (triton_buffers.py).
static __device__ u32 without_negative_zero(u32 pair) {
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x3F803F80), "r"(0));
    return pair;
}

static __device__ u16 to_e4m3x2(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// Stores two 8 x 8 matrices transposed; a lane has row lane / 4 and columns 2 (lane % 4) and the next. Lanes 0..7 give
// the addresses of the first matrix, 8..15 of the second.
static __device__ void stmatrix_transposed(u32 at, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"r"(at), "r"(first), "r"(second) : "memory");
}

// wgmma of 64 rows by N columns over 32 e4m3 inputs; `more`: added to d.
template <int N> struct Wgmma;

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define TO7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TO15 TO7 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TO31 TO15 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TO39 TO31 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TO47 TO39 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TO63 TO47 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA(n, places, w_at, x_at, more_at, ...)                                                             \
    template <> struct Wgmma<n> {                                                                              \
        static __device__ void run(float (&d)[n / 2], u64 w, u64 x, int more) {                                  \
            asm volatile("{\n.reg .pred more;\nsetp.ne.b32 more, " more_at ", 0;\n"                              \
                         "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" places "}, " w_at ", " x_at \
                         ", more, 1, 1;\n}"                                                                      \
                         : __VA_ARGS__ : "l"(w), "l"(x), "r"(more));                                             \
        }                                                                                                        \
    };
WGMMA(16, TO7, "%8", "%9", "%10", R4(0), R4(4))
WGMMA(32, TO15, "%16", "%17", "%18", R16(0))
WGMMA(64, TO31, "%32", "%33", "%34", R16(0), R16(16))
WGMMA(80, TO39, "%40", "%41", "%42", R16(0), R16(16), R4(32), R4(36))
WGMMA(96, TO47, "%48", "%49", "%50", R16(0), R16(16), R16(32))
WGMMA(128, TO63, "%64", "%65", "%66", R16(0), R16(16), R16(32), R16(48))

template <int N> static __device__ void warpgroup_fence_operand(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

static __device__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ void warpgroup_commit_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int LEFT> static __device__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Cluster barrier, after which writes to shared memory are visible to peers. Threads of the program synchronize first,
// because tools do not know that a cluster barrier does so, too.
static __device__ void cluster_sync() {
    __syncthreads();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same for programs that only read peers' memory, before they exit.
static __device__ void cluster_sync_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

static __device__ u32 map_to_peer(u32 at, int peer) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(peer));
    return there;
}

// Arrives at a peer's barrier after reads, without release semantics for writes.
static __device__ void mbarrier_arrive_at_peer(u32 barrier, int peer) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_to_peer(barrier, peer)) : "memory");
}

static __device__ int load_peer_int(u32 at, int peer) {
    int found;
    asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(found) : "r"(map_to_peer(at, peer)) : "memory");
    return found;
}

static __device__ float4 load_peer_float4(u32 at, int peer) {
    float4 found;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(found.x), "=f"(found.y), "=f"(found.z), "=f"(found.w) : "r"(map_to_peer(at, peer)) : "memory");
    return found;
}

// Sets the registers per thread of a warp group, a multiple of 8; initially 168.
template <int COUNT> static __device__ void set_max_registers() {
    if constexpr (COUNT > 168)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif

// Two floats of a bfloat16 pair.
static __device__ float low_of(u32 pair) { return __int_as_float(pair << 16); }
static __device__ float high_of(u32 pair) { return __int_as_float(pair & 0xFFFF0000); }

// x / scale, rounded correctly, without a division of its own.
static __device__ float quotient(float x, float scale, float inverse) {
    const float near = x * inverse;
    return fmaf(fmaf(-near, scale, x), inverse, near);
}

// wgmma descriptor of a matrix with rows of 128 bytes in TMA's 128-byte swizzle.
static __device__ u64 matrix_descriptor(u32 at) {
    return (u64)(at >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// 64 rows of w by N rows of x over 128 columns. `part` may be read after `finish`, which leaves LEFT products running.
template <int N> static __device__ void multiply(float (&part)[N / 2], u32 w, u32 x) {
    warpgroup_fence_operand(part);
    warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < 4; ++k) Wgmma<N>::run(part, matrix_descriptor(w) + 2 * k, matrix_descriptor(x) + 2 * k, k);
    warpgroup_commit_batch();
}

template <int LEFT, int N> static __device__ void finish(float (&part)[N]) {
    warpgroup_wait<LEFT>();
    warpgroup_fence_operand(part);
}

// Adds the product of a block of 128 columns times the `scales` of N rows of x and the scale of the block of w.
template <int N>
static __device__ void add_scaled(float (&sum)[N / 2], const float (&part)[N / 2], const float* scales, float scale) {
    const float* const own_scales = scales + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        const float2 two = *(const float2*)(own_scales + 8 * j);
        const float a = two.x * scale, b = two.y * scale;
        sum[4 * j] += part[4 * j] * a, sum[4 * j + 1] += part[4 * j + 1] * b;
        sum[4 * j + 2] += part[4 * j + 2] * a, sum[4 * j + 3] += part[4 * j + 3] * b;
    }
}

// The same with rows of x as rows of the product: a thread has scales of two rows.
template <int N>
static __device__ void add_rows(float (&sum)[N / 2], const float (&part)[N / 2], float upper, float lower) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum[i] += part[i] * (i % 4 < 2 ? upper : lower);
}
