"""commit_tokens in one launch: one program per slot, which searches all rows for those of its slot."""

import triton
import triton.language as tl
from torch import Tensor

from glm5.kernels.commit_tokens.reference import CommittedTokens
from glm5.kernels.triton_fp8 import pdl_launch_dependents, pdl_wait
from glm5.kernels.triton_support import dependent_launch


@triton.jit
def _commit_tokens(
    token_ptr,
    slot_ptr,
    offset_ptr,
    position_ptr,
    draft_ptr,
    sampling_slot_ptr,
    token_out_ptr,
    len_ptr,
    drawn_ptr,
    count_ptr,
    assumed_ptr,
    num_rows,
    num_sampling,
    token_out_stride,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    s, r, c = tl.program_id(0), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    of_slot = tl.load(slot_ptr + r, mask=r < num_rows, other=-1) == s
    token = tl.load(token_ptr + r, mask=of_slot, other=0)
    offset = tl.load(offset_ptr + r, mask=of_slot, other=-1)
    position = tl.load(position_ptr + r, mask=of_slot, other=0)
    tl.store(token_out_ptr + s.to(tl.int64) * token_out_stride + position, token, mask=of_slot)
    is_sampling = tl.load(sampling_slot_ptr + c, mask=c < num_sampling, other=-1) == s
    accepted = s < tl.num_programs(0) - 1
    count = tl.zeros([], tl.int64)
    for j in tl.static_range(K + 1):
        at_offset = of_slot & (offset == j)
        accepted = accepted & (tl.max(at_offset.to(tl.int32), 0) > 0)
        count += accepted.to(tl.int64)
        drawn = tl.sum(tl.where(at_offset, token, 0), 0)
        tl.store(drawn_ptr + c * (K + 1) + j, drawn, mask=is_sampling)
        if j < K:
            draft = tl.load(draft_ptr + s * K + j)
            tl.store(assumed_ptr + c * K + j, draft, mask=is_sampling)
            accepted = accepted & (drawn == draft)
    tl.store(count_ptr + c, count, mask=is_sampling)
    tl.store(len_ptr + s, tl.load(len_ptr + s) + count)


def commit_tokens(
    token_T: Tensor,
    slot_T: Tensor,
    offset_T: Tensor,
    position_T: Tensor,
    drafts_Y: Tensor,
    sampling_slot_B: Tensor,
    token_YS: Tensor,
    len_Y: Tensor,
    committed: CommittedTokens,
) -> None:
    """As `reference.commit_tokens`."""
    (num_slots, depth), num_sampling = drafts_Y.shape, len(sampling_slot_B)
    _commit_tokens[(num_slots,)](
        token_T.contiguous(),
        slot_T.contiguous(),
        offset_T.contiguous(),
        position_T.contiguous(),
        drafts_Y.contiguous(),
        sampling_slot_B.contiguous(),
        token_YS,
        len_Y,
        *committed,
        len(token_T),
        num_sampling,
        token_YS.stride(0),
        K=depth,
        BLOCK_R=max(32, triton.next_power_of_2(len(token_T))),
        BLOCK_C=max(32, triton.next_power_of_2(num_sampling)),
        num_warps=4,
        **dependent_launch(token_T.device),
    )
