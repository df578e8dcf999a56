// Common parts of attend.cu and attend_fp8.cu: loads of latents, reads of tiles, products of a warp. Compiled with Z
// (slots of a page) and STAGES.

#include "hopper.cuh"

constexpr int KEYS = 64, COMPUTING = 256, FETCHING = 4;  // of a block; threads, and warps behind them

#ifndef ON_CPU
static __device__ void ldmatrix_x4(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

static __device__ void ldmatrix_x4_transposed(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at) : "memory");
}

#define ADD_PRODUCT(type)                                                                                    \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, "            \
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                             \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool F16> static __device__ void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (F16)
        ADD_PRODUCT("f16");
    else
        ADD_PRODUCT("bf16");
}

// Copies 16 bytes, or writes zeros.
static __device__ void cp_async_or_zero(u32 to, const u8* from, bool is) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(from), "r"(is ? 16 : 0) : "memory");
}
#endif

struct Keys {
    const int *keys, *pages;
    int num_keys, end;

    __device__ int at(int place) const { return place >= num_keys ? -1 : keys ? keys[place] : place; }
    __device__ bool is(int key) const { return key >= 0 && key < end; }
    __device__ int page(int key) const { return pages[is(key) ? key / Z : 0]; }
};

// Loads blocks start..stop-1 to shared memory as stages become free; zeros for invalid keys. Eight threads load a row, 16
// bytes of each of its 128-byte lines; a thread loads parts of four rows. `copy` takes (stage, row in it, index of the 16
// bytes, source, whether the key is valid).
template <int STAGE, class Copy>
static __device__ void fetch(const Keys& k, const u8* latent, u32 page_stride, u32 row_stride, int start, int stop,
                             u32 data, int* seen, u32 full, u32 empty, const Copy& copy) {
    const int lane = threadIdx.x % 32, chunk = lane % 8;
    const int row = (threadIdx.x - COMPUTING) / 32 * 16 + lane / 8;
    int key[STAGES][4], next[STAGES][4], page[STAGES][4];
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) key[s][r] = start + s < stop ? k.at((start + s) * KEYS + row + 4 * r) : -1;
#pragma unroll
    for (int s = 0; s < STAGES; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) page[s][r] = k.page(key[s][r]);
    u32 parity = 1;
    for (int first = start; first < stop; first += STAGES, parity ^= 1) {
#pragma unroll
        for (int s = 0; s < STAGES; ++s) {
            if (first + s >= stop) break;
            mbarrier_wait(empty + 8 * s, parity);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const bool is = k.is(key[s][r]);
                if (chunk == 0) seen[s * KEYS + row + 4 * r] = is;
                const u32 slot = is ? key[s][r] % Z : 0;
                const u8* const from = latent + (u64)page[s][r] * page_stride + slot * row_stride + 16 * chunk;
                copy(data + s * STAGE, row + 4 * r, chunk, from, is);
            }
            cp_async_mbarrier_arrive(full + 8 * s);
            __syncwarp();
            if (lane == 0) mbarrier_arrive(full + 8 * s);  // after writes to `seen`, too
            // Prefetch: keys of the next block of this stage, and pages of the next block of the previous stage.
            const int before = (s + STAGES - 1) % STAGES, ahead = first + STAGES + s;
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (s || first > start) key[before][r] = next[before][r], page[before][r] = k.page(next[before][r]);
                next[s][r] = ahead < stop ? k.at(ahead * KEYS + row + 4 * r) : -1;
            }
        }
    }
    cp_async_wait_all();
}
