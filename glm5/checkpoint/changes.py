"""What has changed between two versions of a tensor, as elements and the gaps between them.

    gaps     uint8 [n]: elements from the one before, less one; the first one from the beginning
    values   [n] of the tensor's dtype, flat; or the whole tensor, without gaps, where that takes fewer bytes

Elements are compared by their bits. Every 256th is always among them, so that a gap fits a byte.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import cast
from glm5.common.errors import CheckpointError
from glm5.parallel.table import Span

_STRIDE = 256
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changed(old: Tensor, new: Tensor) -> tuple[Tensor | None, Tensor] | None:
    """Gaps and values of two tensors of one shape and dtype; None where no bit differs."""
    bits = _WORDS[new.element_size()]
    differs = old.reshape(-1).view(bits) != new.reshape(-1).view(bits)
    if not differs.any():
        return None
    differs[::_STRIDE] = True
    at = differs.nonzero().flatten()
    if len(at) * (1 + new.element_size()) >= new.nbytes:
        return None, new
    gaps = at.diff(prepend=at.new_tensor([-1])) - 1
    return gaps.to(torch.uint8), new.reshape(-1)[at]


@dataclass(frozen=True)
class Change:
    """New elements of a tensor of `shape`, on the host. `span`: the part of it that a rank holds, None: all.

    Raises CheckpointError where the elements are not in the tensor."""

    gaps: Tensor | None
    values: Tensor
    shape: tuple[int, ...]
    span: Span | None

    def __post_init__(self) -> None:
        count = torch.Size(self.shape).numel()
        if self.gaps is None:
            fits = tuple(self.values.shape) == self.shape
        else:
            fits = self.gaps.shape == self.values.shape and int(self.gaps.sum()) + len(self.gaps) <= count
        if not fits:
            raise CheckpointError(f"{list(self.values.shape)} new elements do not fit a tensor of {list(self.shape)}")

    @torch.no_grad()
    def write_into(self, held: Tensor) -> None:
        """Replace them in the rank's part, contiguous, which may have another dtype and device."""
        if self.gaps is None:
            part = self.values
            if self.span is not None:
                part = part.narrow(self.span.dim, self.span.start, self.span.stop - self.span.start)
            held.copy_(cast(part, held.dtype))
            return
        at, values = (self.gaps.to(held.device).long() + 1).cumsum(0) - 1, self.values.to(held.device)
        if self.span is not None:
            size = self.shape[self.span.dim]
            inner = torch.Size(self.shape[self.span.dim + 1 :]).numel()  # elements of one index of that dimension
            index = at // inner % size
            inside = (index >= self.span.start) & (index < self.span.stop)
            at, values, index = at[inside], values[inside], index[inside]
            outer, width = at // (inner * size), self.span.stop - self.span.start
            at = (outer * width + index - self.span.start) * inner + at % inner
        held.view(-1)[at] = cast(values, held.dtype)
