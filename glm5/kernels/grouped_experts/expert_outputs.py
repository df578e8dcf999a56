"""Unsummed outputs of each token's experts, which the reader sums to save a pass over memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.triton_support import dependent_launch

FEW_TOKENS = 32  # up to which x is not quantized and other kernels are used
_BLOCK = 1024


@dataclass
class ExpertOutputs:
    """`y` [T * A + T, D]: row t * A + a is the weighted output of token t's a-th expert, or row places[t * A + a] with
    `places` [T * A]; row T * A + t is the shared expert's, valid only with `has_shared`. The sum over a token runs in
    float32, in this order, and is rounded to y's dtype.

    y takes A times the memory of the sums. The last reader calls `release`, because callers up the stack may still hold
    a reference.
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
        """Free the memory."""
        del self.y

    def summed(self) -> Tensor:
        """[T, D] in y's dtype, on a GPU."""
        out_TD = torch.empty(self.shape, dtype=self.y.dtype, device=self.y.device)
        combine(self.y, out_TD, self.active, has_shared=self.has_shared, places=self.places)
        return out_TD


def combine(y: Tensor, out_TD: Tensor, active: int, *, has_shared: bool, places: Tensor | None = None) -> None:
    """Write the sums of `y` [T * A + T, D] over each token to `out_TD`. `places`: as in `ExpertOutputs`."""
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
