"""Sums of tensors by which their bits are compared: sum over elements i of (2 i + 1) x bits[i], modulo 2**64.

A tensor in which one element differs has another sum. They are fast where the tensor is, and no secret depends on them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**24  # elements at a time, widened to 64 bits


def digests(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """By name, 16 hexadecimal digits."""
    return {name: f"{_sum(weight) % 2**64:016x}" for name, weight in weights.items()}


@torch.no_grad()
def _sum(weight: Tensor) -> int:
    bits_N = weight.detach().reshape(-1).contiguous().view(_BITS[weight.element_size()])
    total = 0
    for start in range(0, len(bits_N), _CHUNK):
        part_N = bits_N[start : start + _CHUNK].long()
        odd_N = torch.arange(2 * start + 1, 2 * (start + len(part_N)), 2, device=part_N.device)
        total += int((part_N * odd_N).sum())
    return total
