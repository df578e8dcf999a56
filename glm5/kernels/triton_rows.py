"""Device functions of Triton kernels that quantize a row in registers. Imported by `triton.py` files only, as Triton
may be missing."""

import triton
import triton.language as tl

from glm5.kernels.triton_fp8 import quantized_row, quotient


@triton.jit
def row_scale(x, KIND: tl.constexpr):
    """The scale [1] of a float32 row [K]; 1 for zeros. KIND: int8 or fp8."""
    amax = tl.zeros([1], tl.float32) + tl.max(tl.abs(x), 0)
    found = tl.div_rn(amax, tl.full([1], 448.0 if KIND == "fp8" else 127.0, tl.float32))
    return tl.where(found == 0, tl.full([1], 1.0, tl.float32), found)


@triton.jit
def row_codes(x, scale, KIND: tl.constexpr):
    """The codes of x with one scale [1]; for KIND none, x itself."""
    if KIND == "fp8":
        inverse = tl.div_rn(tl.full([1], 1.0, tl.float32), scale)
        x = quotient(x, tl.broadcast_to(scale, x.shape), tl.broadcast_to(inverse, x.shape))
    elif KIND == "int8":
        near = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        # Adding 1.5 * 2^23 rounds to nearest even.
        x = tl.clamp((near + 12582912.0) - 12582912.0, -127.0, 127.0).to(tl.int8)
    return x


@triton.jit
def put_codes(x, t, d, D, codes_ptr, scale_ptr, stride_b):
    """Quantize and store row `t` of D values, padded with zeros, to `row_codes.empty_codes`: in blocks for e4m3 codes,
    else with one scale."""
    x = x.to(tl.float32)
    if codes_ptr.dtype.element_ty == tl.int8:
        scale = row_scale(x, "int8")
        tl.store(codes_ptr + t * D + d, row_codes(x, scale, "int8"), mask=d < D)
        tl.store(scale_ptr + t + tl.arange(0, 1), scale)
    else:
        b = tl.arange(0, d.shape[0] // 128)
        codes, scale = quantized_row(x)
        tl.store(codes_ptr + t * D + d, codes, mask=d < D)
        tl.store(scale_ptr + t + b * stride_b, scale, mask=b * 128 < D)
