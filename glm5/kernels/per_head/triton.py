"""per_head on a GPU, in Triton: a program has some output values of a head, for a tile of tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.triton_fp8 import let_later_begin, wait_for_earlier
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def product(x, known, w, o, O: tl.constexpr, I: tl.constexpr, BLOCK_I: tl.constexpr):
    """float32 rows at `x`, where known, by a matrix [I, O] at `w`, its columns `o`. Every load comes before the sum."""
    i, xs, ws = tl.arange(0, BLOCK_I), (), ()
    for start in tl.static_range(0, I, BLOCK_I):
        at = w + (start + i)[:, None] * O + o[None, :]
        ws = ws + (tl.load(at, mask=(start + i < I)[:, None] & (o < O)[None, :], other=0.0),)
        known_TI = known[:, None] & (start + i < I)[None, :]
        xs = xs + (tl.load(x[:, None] + (start + i)[None, :], mask=known_TI, other=0.0),)
    out = tl.zeros([x.shape[0], o.shape[0]], tl.float32)
    for piece in tl.static_range(len(xs)):
        out = tl.dot(xs[piece], ws[piece], out, input_precision="ieee")
    return out


@triton.jit
def _per_head(
    x_ptr,
    w_ptr,
    out_ptr,
    num_tokens,
    x_stride,
    x_head,
    H: tl.constexpr,
    I: tl.constexpr,
    O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):
    h, o = tl.program_id(1), tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    t = (tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    known = t < num_tokens
    wait_for_earlier(PDL)
    let_later_begin(PDL)
    out = product(x_ptr + t * x_stride + h * x_head, known, w_ptr + h * I * O, o, O, I, BLOCK_I)
    at = out_ptr + (t * H + h)[:, None] * O + o[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=known[:, None] & (o < O)[None, :])


def per_head(x_THI: Tensor, w_HIO: Tensor, block_o: int = 64) -> Tensor:
    """As `reference.per_head`, contiguous. Rows of x must lie in one piece each, and w as a whole."""
    (num_tokens, H, I), O = x_THI.shape, w_HIO.shape[2]
    x_THI = x_THI if x_THI.stride(-1) == 1 else x_THI.contiguous()
    out_THO = torch.empty(num_tokens, H, O, dtype=x_THI.dtype, device=x_THI.device)
    if num_tokens:
        block_t = max(16, min(64, triton.next_power_of_2(num_tokens)))
        _per_head[(triton.cdiv(O, block_o), H, triton.cdiv(num_tokens, block_t))](
            x_THI,
            w_HIO.contiguous(),
            out_THO,
            num_tokens,
            x_THI.stride(0),
            x_THI.stride(1),
            H=H,
            I=I,
            O=O,
            BLOCK_T=block_t,
            BLOCK_I=max(16, min(128, I & -I)),
            BLOCK_O=block_o,
            num_warps=4,
            **dependent_launch(x_THI.device),
        )
    return out_THO
