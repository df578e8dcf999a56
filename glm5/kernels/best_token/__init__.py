"""The likeliest token of each row of logits."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(__name__, triton=Impl("two launches", on="triton", gradient=False), reference=Impl("the definition"))


def best_token(logits_TW: Tensor, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """(token [T] int64, the first among equals; no_valid_token [T] bool: all logits are -inf, or one is NaN)."""
    return TABLE.module(impl, logits_TW).best_token(logits_TW)
