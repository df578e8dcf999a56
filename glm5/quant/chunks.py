"""Splits a stack of matrices into chunks, so that temporaries fit a CPU's cache or a GPU's memory.

For functions that treat the rows of a matrix independently: results do not depend on the chunks, bit for bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

_MAX_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 27}  # of a chunk; on a CPU per core, so that it stays in its L2 cache


def elements_at_once(device: torch.device, limit: dict[str, int]) -> int:
    """Number of elements to process at a time. `limit` is by device type; "cpu" is per torch thread."""
    return limit.get(device.type, limit["cpu"] * torch.get_num_threads())


def stacked(x: Tensor) -> Tensor:
    """[..., O, I] as [b, O, I]."""
    return x.reshape(-1, *x.shape[-2:])


def chunks(x: Tensor, rows: int = 1) -> Iterator[tuple[slice, slice]]:
    """Slices of [b, O, I] along b and O that cover it, each of whole matrices or a multiple of `rows` rows."""
    batch, height, width = x.shape
    limit = elements_at_once(x.device, _MAX_ELEMENTS)
    if (at_once := limit // max(1, height * width)) >= 1:
        for start in range(0, batch, at_once):
            yield slice(start, start + at_once), slice(0, height)
        return
    step = max(1, limit // (width * rows)) * rows
    for idx in range(batch):
        for row in range(0, height, step):
            yield slice(idx, idx + 1), slice(row, min(row + step, height))


def wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
