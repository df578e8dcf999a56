"""mla_queries in one launch: programs for values of a head, one for its rotated part.

For many tokens, the values are computed by torch.bmm, which writes them in place.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels import tuned
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _product(x, valid, w, o, O: tl.constexpr, I: tl.constexpr, BLOCK_I: tl.constexpr):
    """Valid rows at `x` times columns `o` of a matrix [I, O] at `w`, in float32. All loads are issued before the
    sum."""
    i, xs, ws = tl.arange(0, BLOCK_I), (), ()
    for start in tl.static_range(0, I, BLOCK_I):
        at = w + (start + i)[:, None] * O + o[None, :]
        ws = ws + (tl.load(at, mask=(start + i < I)[:, None] & (o < O)[None, :], other=0.0),)
        valid_TI = valid[:, None] & (start + i < I)[None, :]
        xs = xs + (tl.load(x[:, None] + (start + i)[None, :], mask=valid_TI, other=0.0),)
    out = tl.zeros([x.shape[0], o.shape[0]], tl.float32)
    for piece in tl.static_range(len(xs)):
        out = tl.dot(xs[piece], ws[piece], out, input_precision="ieee")
    return out


@triton.jit
def _rotate(x, valid, out, cos, sin, HALF: tl.constexpr):
    """Rotate valid rows at `x` by the tables' rows at `cos` and `sin`, and store them at `out`."""
    PAIRS: tl.constexpr = triton.next_power_of_2(HALF)
    r, j = tl.arange(0, 2 * PAIRS)[None, :], tl.arange(0, PAIRS)[None, :]
    row = tl.load(x[:, None] + r, mask=valid[:, None] & (r < 2 * HALF), other=0.0)
    cos = tl.load(cos[:, None] + j, mask=valid[:, None] & (j < HALF), other=0.0).to(tl.float32)
    sin = tl.load(sin[:, None] + j, mask=valid[:, None] & (j < HALF), other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(row.to(tl.float32), [row.shape[0], PAIRS, 2]))
    first = (a * cos).to(row.dtype).to(tl.float32) - (b * sin).to(row.dtype).to(tl.float32)
    second = (b * cos).to(row.dtype).to(tl.float32) + (a * sin).to(row.dtype).to(tl.float32)
    rotated = tl.reshape(tl.join(first, second), [row.shape[0], 2 * PAIRS]).to(row.dtype)
    tl.store(out[:, None] + r, rotated, mask=valid[:, None] & (r < 2 * HALF))


@triton.jit
def _mla_queries(
    q_ptr,
    w_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_tokens,
    q_stride,
    q_head,
    H: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """program_id(0): blocks of C of each head, then rotated parts of heads; (1): tile of tokens.

    EARLY: runs concurrently with the previous kernel, but does not end before it.
    """
    job = tl.program_id(0)
    t = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    valid = t < num_tokens
    if not EARLY:
        pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    q, out = q_ptr + t * q_stride, out_ptr + t * (H * (C + 2 * HALF))
    q_rope, out_rope = q + N, out + C
    cos, sin = cos_ptr + t * HALF, sin_ptr + t * HALF
    if BLOCK_O:
        BLOCKS: tl.constexpr = (C + BLOCK_O - 1) // BLOCK_O
        if job < H * BLOCKS:
            h, o = job // BLOCKS, (job % BLOCKS) * BLOCK_O + tl.arange(0, BLOCK_O)
            values = _product(q + h * q_head, valid, w_ptr + h * N * C, o, C, N, BLOCK_I)
            at = (out + h * (C + 2 * HALF))[:, None] + o[None, :]
            tl.store(at, values.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (o < C)[None, :])
        else:
            h = job - H * BLOCKS
            _rotate(q_rope + h * q_head, valid, out_rope + h * (C + 2 * HALF), cos, sin, HALF)
    else:
        _rotate(q_rope + job * q_head, valid, out_rope + job * (C + 2 * HALF), cos, sin, HALF)
    if EARLY:
        pdl_wait(PDL)


class Tiling(NamedTuple):
    """Tokens and outputs of a program, and its warps. With 0 outputs, torch.bmm computes the product."""

    tokens: int
    outputs: int
    warps: int = 4


def tiling_for(num_tokens: int) -> Tiling:
    """Without an entry in `kernels/tuned`: what was fastest on an H200 (docs/performance-kernels.md)."""
    return Tiling(max(16, min(64, triton.next_power_of_2(num_tokens))), 64 if num_tokens < 512 else 0)


def mla_queries(
    q_THX: Tensor,
    w_HNC: Tensor,
    cos_TR2: Tensor,
    sin_TR2: Tensor,
    tiling: Tiling | None = None,
    early: Tensor | None = None,
) -> Tensor:
    """As `reference.mla_queries`; `early` as in `glm5.kernels.mla_queries`."""
    (num_tokens, H, _), (_, N, C), half = q_THX.shape, w_HNC.shape, cos_TR2.shape[1]
    q_THX = q_THX if q_THX.stride(-1) == 1 else q_THX.contiguous()
    out_THL = q_THX.new_empty(num_tokens, H, C + 2 * half) if early is None else early
    if num_tokens:
        tiling = tiling or tuned.find(Tiling, "mla_queries", f"H={H} N={N} C={C}", num_tokens, q_THX.device)
        cut = tiling or tiling_for(num_tokens)
        if q_THX.element_size() > 2:  # products of float32 take registers where others take matrix units
            cut = Tiling(16, 32)
        if not cut.outputs:
            torch.bmm(q_THX[..., :N].transpose(0, 1), w_HNC, out=out_THL[..., :C].transpose(0, 1))
        blocks = triton.cdiv(C, cut.outputs) if cut.outputs else 0
        _mla_queries[(H * blocks + H, triton.cdiv(num_tokens, cut.tokens))](
            q_THX,
            w_HNC.contiguous(),
            cos_TR2.contiguous(),
            sin_TR2.contiguous(),
            out_THL,
            num_tokens,
            q_THX.stride(0),
            q_THX.stride(1),
            H=H,
            N=N,
            C=C,
            HALF=half,
            BLOCK_T=cut.tokens,
            BLOCK_I=max(16, min(128, N & -N)),
            BLOCK_O=cut.outputs,
            EARLY=early is not None,
            num_warps=cut.warps,
            enable_fp_fusion=False,  # would skip a rounding
            **dependent_launch(q_THX.device),
        )
    return out_THL
