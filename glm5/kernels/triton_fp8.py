"""Device functions of Triton kernels with FP8 weights. Imported by `triton.py` files only, as Triton may be missing."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = tl.constexpr(128)  # rows and columns of a scale
# Triton's interpreter truncates instead of rounding to e4m3.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until earlier kernels have ended (triton_support.dependent_launch)."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to start and load its weights."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines at these pointers to L2."""
    if not _INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def experts_of(expert_ptr, p, num_pairs, PAIRS: tl.constexpr):
    """(experts of all pairs, the expert of pair p, its number of pairs, or 0 if p is not the first of them)."""
    j = tl.arange(0, PAIRS)
    experts, expert = tl.load(expert_ptr + j, mask=j < num_pairs, other=-1), tl.load(expert_ptr + p)
    same = (experts == expert).to(tl.int32)
    return experts, expert, tl.where(tl.sum(tl.where(j < p, same, 0)) > 0, 0, tl.sum(same))


@triton.jit
def pairs_of(experts, expert, tile, ROWS: tl.constexpr):
    """The `tile`-th ROWS places, in order, where `experts` is `expert`; 0 behind the last."""
    j = tl.arange(0, experts.shape[0])
    same = (experts == expert).to(tl.int32)
    wanted = tile * ROWS + tl.arange(0, ROWS)
    chosen = (tl.cumsum(same) - 1 == wanted[:, None]) & (same[None, :] > 0)
    return tl.sum(tl.where(chosen, j[None, :], 0), 1)


@triton.jit
def upcast(w, x):
    """e4m3 weights as x's dtype, exactly.

    By way of float32: straight to bfloat16 the compiler takes an instruction with a quarter of the rate.
    """
    return w.to(tl.float32).to(x.dtype)


@triton.jit
def materialize(x):
    """x of 16 or 32 bits, materialized here: the compiler may not recompute it for each use in another layout."""
    if not _INTERPRETED:
        PACK: tl.constexpr = 32 // x.dtype.primitive_bitwidth
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=PACK)
    return x


@triton.jit
def last_to_arrive(arrivals_ptr, tile, count):
    """Whether this is the last of `count` programs that come here for `tile`, which then sees what the others stored.

    The counter is zero before and after a launch.
    """
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    arrived = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu")
    last = arrived == count - 1
    if last:
        tl.store(arrivals_ptr + tile, 0)
    return last


@triton.jit
def split_by_16(x):
    """A row [K] in float32, as [K / 16, 16]: what a thread has of it, beside its 16 bytes of weights."""
    return tl.reshape(x.to(tl.float32), [x.shape[0] // 16, 16])


@triton.jit
def repeat_8(scale):
    """Scales [G] of 128 values as those of 16, [8 G]."""
    return tl.reshape(tl.broadcast_to(scale[:, None], [scale.shape[0], 8]), [scale.shape[0] * 8])


@triton.jit
def scale_of(amax):
    """(scale, 1 / scale) of values up to amax."""
    scale = tl.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 448.0, tl.float32))
    return scale, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)


@triton.jit
def quotient(x, scale, inverse):
    """x / scale in e4m3, all three of one shape: the quotient is rounded correctly, without a division of its own."""
    near = x * inverse
    near = tl.fma(tl.fma(-near, scale, x), inverse, near)
    near = tl.clamp(near, -448.0, 448.0)
    if _INTERPRETED:
        # 3 bits of fraction, or below 2^-6 multiples of 2^-9, which are the last bits beside 1.5 * 2^14.
        bits = near.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        near = tl.where(tl.abs(near) < 0.015625, (near + 24576.0) - 24576.0, normal)
    return near.to(tl.float8e4nv)


@triton.jit
def quantized_row(x):
    """A row [K] in float32 as e4m3 [K] and a scale for 128 values, [K / 128]. A thread has 16 values or more."""
    K: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [K // 16, 16])
    amax = tl.max(tl.reshape(tl.max(tl.abs(x), 1), [K // 128, 8]), 1)
    scale, inverse = scale_of(amax)
    wide = tl.broadcast_to(repeat_8(scale)[:, None], [K // 16, 16])
    inverse = tl.broadcast_to(repeat_8(inverse)[:, None], [K // 16, 16])
    return tl.reshape(quotient(x, wide, inverse), [K]), scale


@triton.jit
def partial_products(w, x):
    """Of rows [R, K] in e4m3 and x [K / 16, 16]: sums of 16 products, [R, K / 16], each by one thread."""
    R: tl.constexpr = w.shape[0]
    return tl.sum(tl.reshape(w.to(tl.float32), [R, x.shape[0], 16]) * x[None], 2)
