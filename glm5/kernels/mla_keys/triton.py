"""mla_keys in one launch. A token has one program each for query, latent and index key, and one per index head
weight."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.block_scaled import BLOCK
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.mla_keys.index_keys import IndexKeys, PlainLatents
from glm5.kernels.row_codes import Kind, empty_codes
from glm5.kernels.store_rows.triton import PoolTensors, kind_of, put_fp8_key, put_fp8_latent, put_plain
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_rows import put_codes
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _rms_normed(x, weight, eps, WIDTH: tl.constexpr):
    """`rms_norm` of a row of WIDTH values padded with zeros, in x's dtype."""
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def _rotated(x, cos_ptr, sin_ptr, t, HALF: tl.constexpr):
    """A row whose first 2 HALF dimensions are rotated, rounded to x's dtype where `rope` rounds."""
    PAIRS: tl.constexpr = x.shape[0] // 2
    j = tl.arange(0, PAIRS)
    cos = tl.load(cos_ptr + t * HALF + j, mask=j < HALF, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + t * HALF + j, mask=j < HALF, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(x.to(tl.float32), [PAIRS, 2]))
    first = (a * cos).to(x.dtype).to(tl.float32) - (b * sin).to(x.dtype).to(tl.float32)
    second = (b * cos).to(x.dtype).to(tl.float32) + (a * sin).to(x.dtype).to(tl.float32)
    return tl.reshape(tl.join(first, second), [2 * PAIRS]).to(x.dtype)


@triton.jit
def _put_query(
    qkv, weight_ptr, out_ptr, codes_ptr, scale_ptr, t, eps, stride_b, Q: tl.constexpr, QUANTIZE: tl.constexpr
):
    BLOCK_Q: tl.constexpr = triton.next_power_of_2(max(Q, 128))
    i = tl.arange(0, BLOCK_Q)
    x = tl.load(qkv + i, mask=i < Q, other=0.0)
    out = _rms_normed(x, tl.load(weight_ptr + i, mask=i < Q, other=0.0), eps, Q)
    tl.store(out_ptr + t * Q + i, out, mask=i < Q)
    if QUANTIZE:
        put_codes(out, t, i, Q, codes_ptr, scale_ptr, stride_b)


@triton.jit
def _put_latent(
    qkv,
    weight_ptr,
    rotation,
    parts,
    plain,
    t,
    page,
    slot,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    KIND: tl.constexpr,
    PLAIN: tl.constexpr,
):
    BLOCK_C: tl.constexpr = triton.next_power_of_2(max(C, 128))
    BLOCK_R: tl.constexpr = triton.next_power_of_2(R)
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    x = tl.load(qkv + c, mask=c < C, other=0.0)
    values = _rms_normed(x, tl.load(weight_ptr + c, mask=c < C, other=0.0), eps, C)
    rope = _rotated(tl.load(qkv + C + r, mask=r < R, other=0.0), *rotation, t, R // 2)
    if PLAIN:
        kv_ptr, rope_ptr = plain
        tl.store(kv_ptr + t * C + c, values, mask=c < C)
        tl.store(rope_ptr + t * R + r, rope, mask=r < R)
    if KIND == "plain":
        put_plain(values, c, parts, page, slot, C)
        put_plain(rope, C + r, parts, page, slot, C + R)
    else:
        put_fp8_latent(values.to(tl.float32), c, rope, r, parts, page, slot, C, R)


@triton.jit
def _put_key(
    x_ptr,
    weight_ptr,
    bias_ptr,
    rotation,
    parts,
    t,
    page,
    slot,
    eps,
    I: tl.constexpr,
    R: tl.constexpr,
    KIND: tl.constexpr,
):
    BLOCK_I: tl.constexpr = triton.next_power_of_2(I)
    i = tl.arange(0, BLOCK_I)
    x = tl.load(x_ptr + i, mask=i < I, other=0.0)
    wide = x.to(tl.float32)
    off = tl.where(i < I, wide - tl.sum(wide, 0) / I, 0.0)
    weight = tl.load(weight_ptr + i, mask=i < I, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + i, mask=i < I, other=0.0).to(tl.float32)
    normed = off * tl.rsqrt(tl.sum(off * off, 0) / I + eps) * weight + bias
    row = _rotated(normed.to(x.dtype), *rotation, t, R // 2)
    if KIND == "plain":
        put_plain(row, i, parts, page, slot, I)
    else:
        put_fp8_key(row.to(tl.float32), i, parts, page, slot, I)


@triton.jit
def _put_head_weight(x_ptr, weight_ptr, out_ptr, t, j, stride, J: tl.constexpr, D: tl.constexpr):
    BLOCK_D: tl.constexpr = 2048 if D > 2048 else triton.next_power_of_2(D)
    d = tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_D], tl.float32)
    for start in tl.static_range(0, D, BLOCK_D):
        x = tl.load(x_ptr + t * stride + start + d, mask=start + d < D, other=0.0).to(tl.float32)
        sums += x * tl.load(weight_ptr + j * D + start + d, mask=start + d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * J + j, tl.sum(sums, 0).to(out_ptr.dtype.element_ty))


@triton.jit
def _mla_keys(
    qkv_ptr,
    q_weight_ptr,
    kv_weight_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    latent,
    index,
    key,
    heads,
    plain,
    out_ptr,
    codes_ptr,
    scale_ptr,
    eps,
    qkv_stride,
    stride_b,
    Q: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    I: tl.constexpr,
    Z: tl.constexpr,
    J: tl.constexpr,
    D: tl.constexpr,
    LATENT: tl.constexpr,
    KEY: tl.constexpr,
    QUANTIZE: tl.constexpr,
    PLAIN: tl.constexpr,
    PDL: tl.constexpr,
):
    """latent, key: parts and strides of the pools; index: x, weight, bias, eps and x's stride; heads: x, weight, out
    and x's stride; plain: latents and rotated keys."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    slot = tl.load(slot_ptr + t).to(tl.int64)
    qkv, rotation = qkv_ptr + t * qkv_stride, (cos_ptr, sin_ptr)
    if part == 0:
        _put_query(qkv, q_weight_ptr, out_ptr, codes_ptr, scale_ptr, t, eps, stride_b, Q, QUANTIZE)
    elif part == 1:
        where = latent, plain, t, slot // Z, slot % Z, eps
        _put_latent(qkv + Q, kv_weight_ptr, rotation, *where, C, R, LATENT, PLAIN)
    elif part > 2:
        x_ptr, weight_ptr, w_out_ptr, stride = heads
        _put_head_weight(x_ptr, weight_ptr, w_out_ptr, t, part - 3, stride, J, D)
    else:
        x_ptr, weight_ptr, bias_ptr, key_eps, stride = index
        where = rotation, key, t, slot // Z, slot % Z, key_eps
        _put_key(x_ptr + t * stride, weight_ptr, bias_ptr, *where, I, R, KEY)


def mla_keys(
    qkv_TY: Tensor,
    q_weight_Q: Tensor,
    kv_weight_C: Tensor,
    eps: float,
    cos_TR2: Tensor,
    sin_TR2: Tensor,
    slot_T: Tensor,
    latent_PZL: Pool,
    index: IndexKeys | None = None,
    *,
    plain: PlainLatents | None = None,
    kind: Kind | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.mla_keys`; codes and scale are empty if `kind` is None."""
    num_tokens, device = len(qkv_TY), qkv_TY.device
    qkv_TY = qkv_TY if qkv_TY.stride(-1) == 1 else qkv_TY.contiguous()
    Q, C, R = len(q_weight_Q), len(kv_weight_C), 2 * cos_TR2.shape[1]
    out_TQ = torch.empty(num_tokens, Q, dtype=qkv_TY.dtype, device=device)
    codes_TQ, scale = empty_codes(num_tokens, Q, kind, device)
    latents = PoolTensors.of(latent_PZL)
    keys, key_kind = (latents, "plain") if index is None else (PoolTensors.of(index.pool_PZI), kind_of(index.pool_PZI))
    x = qkv_TY if index is None else index.x_TI if index.x_TI.stride(-1) == 1 else index.x_TI.contiguous()
    heads = None if index is None else index.heads
    if heads is not None and not (heads.weight_JD.is_contiguous() and heads.out_TJ.is_contiguous()):
        raise ValueError("mla_keys[triton] needs weights of index heads, and their place, in one piece")
    J, D = (1, BLOCK) if heads is None else heads.weight_JD.shape
    if num_tokens:
        _mla_keys[(num_tokens, 2 if index is None else 3 if heads is None else 3 + J)](
            qkv_TY,
            q_weight_Q,
            kv_weight_C,
            cos_TR2.contiguous(),
            sin_TR2.contiguous(),
            slot_T,
            (*latents, *latents.strides()),
            (x, q_weight_Q, q_weight_Q, 0.0, 0) if index is None else (x, *index[1:4], x.stride(0)),
            (*keys, *keys.strides()),
            (x, q_weight_Q, out_TQ, 0) if heads is None else (*heads, heads.x_TD.stride(0)),
            (out_TQ, out_TQ) if plain is None else tuple(plain),
            out_TQ,
            codes_TQ,
            scale,
            eps,
            qkv_TY.stride(0),
            scale.stride(-1),
            Q=Q,
            C=C,
            R=R,
            I=BLOCK if index is None else x.shape[1],
            Z=latent_PZL.shape[1],
            J=J,
            D=D,
            LATENT=kind_of(latent_PZL),
            KEY=key_kind,
            QUANTIZE=kind is not None,
            PLAIN=plain is not None,
            num_warps=4,
            enable_fp_fusion=False,  # would skip a rounding
            **dependent_launch(device),
        )
    return out_TQ, codes_TQ, scale
