"""rope as one complex multiplication: pairs are read and written in place, 20 times as fast as even and odd slices.

Only where torch has complex numbers of the dtype: float32 and float64.
"""

from functools import lru_cache

import torch
from torch import Tensor

from glm5.kernels.rope.reference import rope_table

_CAPACITY = 1 << 12  # minimum number of cached positions


def rope(x: Tensor, cos_TR2: Tensor, sin_TR2: Tensor, cis_TR2: Tensor | None = None) -> Tensor:
    """As `reference.rope`. `cis_TR2`: cos + i sin. Raises ValueError for other dtypes than float32 and float64."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"rope[complex] needs float32 or float64, got {x.dtype}; use impl='reference'")
    if cis_TR2 is None:
        cis_TR2 = torch.complex(cos_TR2, sin_TR2)
    if x.dim() == 3:
        cis_TR2 = cis_TR2.unsqueeze(1)
    if not fits(x):  # clone, because contiguous() does not copy a slice of one row
        x = x.clone(memory_format=torch.contiguous_format)
    if torch.is_grad_enabled():
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * cis_TR2).flatten(-2)
    return (x.view(cis_TR2.dtype) * cis_TR2).view(x.dtype)


def fits(x: Tensor) -> bool:
    """Whether x can be viewed as complex: pairs are contiguous, at even offsets."""
    strides = x.stride()
    even = strides[0] % 2 == 0 and strides[-2] % 2 == 0 and x.storage_offset() % 2 == 0
    return even and strides[-1] == 1


def freqs_cis_at(positions_T: Tensor, dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """cos + i sin of positions on a CPU, [T, dim/2], looked up: faster for few positions, such as a decoding step's."""
    capacity = max(_CAPACITY, 1 << int(positions_T.numpy().max(initial=0)).bit_length())
    return _freqs_cis_table(dim, theta, dtype, capacity).index_select(0, positions_T)


@lru_cache(maxsize=8)
def _freqs_cis_table(dim: int, theta: float, dtype: torch.dtype, capacity: int) -> Tensor:
    """Of all positions below `capacity`."""
    with torch.inference_mode(mode=False):
        return torch.complex(*rope_table(torch.arange(capacity), dim, theta, dtype))
