"""A stack of matrices in chunks, so that what is computed on the way fits a cache, or a card.

Rows of a matrix never meet in the functions that use this: how the stack is cut changes no bit of a result.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_MOST = {"cpu": 1 << 16, "cuda": 1 << 27}  # elements; on a CPU, of each core: what stays in its second cache


def elements_at_once(device: torch.device, most: dict[str, int]) -> int:
    """Elements that are worked on at a time, of a table by device; "cpu" is for each of torch's threads."""
    return most.get(device.type, most["cpu"] * torch.get_num_threads())


def stacked(x: Tensor) -> Tensor:
    """[..., O, I] as [B, O, I]."""
    return x.reshape(-1, *x.shape[-2:])


def chunks(x: Tensor, rows: int = 1) -> Iterator[tuple[slice, slice]]:
    """Slices of [B, O, I] along B and O that cover it, each of whole matrices or a multiple of `rows` rows."""
    batch, height, width = x.shape
    most = elements_at_once(x.device, _MOST)
    if (at_once := most // max(1, height * width)) >= 1:
        for start in range(0, batch, at_once):
            yield slice(start, start + at_once), slice(0, height)
        return
    step = max(1, most // (width * rows)) * rows
    for idx in range(batch):
        for row in range(0, height, step):
            yield slice(idx, idx + 1), slice(row, min(row + step, height))


def wide(x: Tensor) -> Tensor:
    """float64 as it is, anything narrower in float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
