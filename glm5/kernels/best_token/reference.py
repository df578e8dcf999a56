"""token = argmax of a row; no valid token where the largest value is not finite."""

from torch import Tensor


def best_token(logits_TW: Tensor) -> tuple[Tensor, Tensor]:
    best = logits_TW.max(dim=-1)  # of equal ones the first
    return best.indices, best.values.isfinite().logical_not_()
