// Loads of kernels for few tokens. All weights are requested before the previous kernel, whose result they multiply,
// has ended. For CPU tests, tests/support/cuda_on_cpu.h defines these functions.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

#ifndef ON_CPU
extern __shared__ __align__(128) unsigned char memory[];

struct __align__(16) Vector16 { u32 x[4]; };

// Not ld.global.nc, here and for scales: the assembler moves those loads to their first use, even across barriers.
static __device__ Vector16 load_no_allocate(const u8* at) {
    Vector16 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x[0]), "=r"(v.x[1]), "=r"(v.x[2]), "=r"(v.x[3]) : "l"(at) : "memory");
    return v;
}

static __device__ float load_scale(const float* at) {
    float v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(at) : "memory");
    return v;
}

static __device__ void cp_async(u8* to, const u8* at) {
    const u32 place = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(place), "l"(at) : "memory");
}

static __device__ void cp_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
static __device__ void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
static __device__ void pdl_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif
