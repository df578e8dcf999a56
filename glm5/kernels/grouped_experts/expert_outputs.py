"""What each token's experts make of it, before it is added up: by whoever reads it, where that saves a pass."""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.triton_support import dependent_launch

FEW_TOKENS = 32  # up to here products in FP8 take rows as they are, and terms are another way's
_BLOCK = 1024


@dataclass
class ExpertOutputs:
    """`y` [T * A + T, D]: row t * A + a of the a-th choice of token t, weighted; row T * A + t of the shared expert,
    read only if there is one. With `places` [T * A] the a-th choice's is row places[t * A + a]. Their sum over a token
    runs in float32, in this order, and is rounded to y's dtype.

    They are A times as much memory as their sums: who has read them for the last time calls `release`, for others up
    the stack may still know of them.
    """

    y: Tensor
    num_tokens: int
    active: int
    has_shared: bool
    places: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(T, D), of the sums."""
        return self.num_tokens, self.y.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the sums."""
        return self.y.dtype

    def release(self) -> None:
        """Let go of the memory."""
        del self.y

    def summed(self) -> Tensor:
        """[T, D] in y's dtype, on a GPU."""
        out_TD = torch.empty(self.shape, dtype=self.y.dtype, device=self.y.device)
        combine(self.y, out_TD, self.active, has_shared=self.has_shared, places=self.places)
        return out_TD


def combine(y: Tensor, out_TD: Tensor, active: int, *, has_shared: bool, places: Tensor | None = None) -> None:
    """Writes what terms `y` [T * A + T, D] of each token are together; `places`: as of `ExpertOutputs`."""
    from glm5.kernels.grouped_experts.triton_few import combine as kernel

    kernel[(len(out_TD), -(-out_TD.shape[1] // _BLOCK))](
        y,
        out_TD,
        *out_TD.shape,
        A=active,
        SHARED=has_shared,
        BLOCK_D=_BLOCK,
        place_ptr=places,
        **dependent_launch(out_TD.device),
    )
