"""Device functions of Triton kernels that gather rows of keys, and scatter their gradients.

Imported by `triton.py` files only, as Triton may be missing. Rows are split into GROUPS pieces of BLOCK_C values,
because a product of 512 would not fit in registers.
"""

import triton
import triton.language as tl


@triton.jit
def rows(ptr, row, known, C, BLOCK_C: tl.constexpr, GROUPS: tl.constexpr):
    """Rows at `ptr` + `row`, C values each, in GROUPS pieces; zeros for invalid rows."""
    c, pieces = tl.arange(0, BLOCK_C)[None, :], ()
    for g in tl.static_range(GROUPS):
        mask = known[:, None] & (g * BLOCK_C + c < C)
        pieces = pieces + (tl.load(ptr + row[:, None] + (g * BLOCK_C + c), mask=mask, other=0.0),)
    return pieces


@triton.jit
def products(a_GHC, b_GNC, out_HN, GROUPS: tl.constexpr):
    """out + a . b"""
    for g in tl.static_range(GROUPS):
        out_HN = tl.dot(a_GHC[g], tl.trans(b_GNC[g]), out_HN, input_precision="ieee")
    return out_HN


@triton.jit
def give(grad_ptr, row_N, known_N, grad_NC, c, C, ATOMIC: tl.constexpr):
    mask = known_N[:, None] & (c < C)[None, :]
    at = grad_ptr + row_N[:, None] + c[None, :]
    if ATOMIC:
        tl.atomic_add(at, grad_NC, mask=mask, sem="relaxed")
    else:
        tl.store(at, grad_NC, mask=mask)


@triton.jit
def store(ptr, row_H, real_H, x_HC, c, C):
    tl.store(ptr + row_H[:, None] + c[None, :], x_HC.to(ptr.dtype.element_ty), mask=real_H[:, None] & (c < C)[None, :])
