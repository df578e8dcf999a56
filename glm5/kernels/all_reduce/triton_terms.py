"""What experts make of each token, added up on its way to the rank that keeps the row (triton_dealt.py): read once, and
no sums are written and read again."""

import triton
import triton.language as tl

from glm5.kernels.all_reduce.triton_buffers import NUM_BUFFERS, Buffers, buffer, empty_last, sendable
from glm5.kernels.grouped_experts.terms import Terms
from glm5.kernels.grouped_experts.triton_few import sum_of_terms
from glm5.kernels.triton_fp8 import let_later_begin, wait_for_earlier
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _send_terms(
    pointers,
    state,
    y_ptr,
    rank,
    num_words,
    first,
    share,
    count,
    T,
    D,
    SIZE: tl.constexpr,
    A: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row `first` + i of a rank's share, i the program's number over SIZE; neighbouring programs have different ranks'.
    This rank's own go the same way, so that who adds them up need not wait for this kernel's end."""
    wait_for_earlier(PDL)
    call = tl.load(state)
    let_later_begin(PDL)
    slot = (call % NUM).to(tl.int64)
    i = (tl.program_id(0) // SIZE).to(tl.int64)
    peer = ((rank + 1 + tl.program_id(0) % SIZE) % SIZE).to(tl.int64)
    t = peer * share + first + i
    d = tl.arange(0, BLOCK_D)
    x = sum_of_terms(y_ptr, t, d, T, D, A, SHARED).to(y_ptr.dtype.element_ty)
    tl.store(buffer(pointers, peer, slot, num_words, y_ptr) + rank * count + i * D + d, sendable(x), mask=d < D)
    empty_last(pointers, state, rank, call, num_words, BLOCK_D, NUM)


def send_terms(buffers: Buffers, terms: Terms, rows: slice, *, num_warps: int = 8) -> None:
    """`rows` of each rank's share of the sums go there."""
    num_tokens, width = terms.shape
    num_rows = rows.stop - rows.start
    _send_terms[(num_rows * buffers.size,)](
        buffers.pointers,
        buffers.state,
        terms.y,
        buffers.rank,
        buffers.num_words,
        rows.start,
        num_tokens // buffers.size,
        num_rows * width,
        num_tokens,
        width,
        SIZE=buffers.size,
        A=terms.active,
        SHARED=terms.has_shared,
        BLOCK_D=max(128, triton.next_power_of_2(width)),
        NUM=NUM_BUFFERS,
        num_warps=num_warps,
        **dependent_launch(terms.y.device),
    )
