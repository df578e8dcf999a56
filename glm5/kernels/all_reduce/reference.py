"""The definition of a sum over ranks, from all parts:

sum = part_0 + part_1 + ... in the order of ranks, in float32 (float64 stays float64), rounded once to the parts' dtype
"""

import torch
from torch import Tensor


def all_reduce_reference(parts: Tensor) -> Tensor:
    """[ranks, ...] to [...]."""
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


def is_transposed(part: Tensor) -> bool:
    """Whether [O, Y] has contiguous columns, which gathering then preserves."""
    return part.dim() == 2 and part.stride(0) == 1
