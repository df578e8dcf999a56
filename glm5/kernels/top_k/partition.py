"""top_k on a CPU: NumPy's vectorised partition finds each row's k best, which are sorted; ties are resolved by a mask.

torch.topk on rows of hundreds of keys takes four times as long, and leaves the indices to be sorted.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.kernels.top_k.reference import top_k as _reference

Floats = NDArray[np.floating[Any]]


def top_k(score_TS: Tensor, k: int) -> Tensor:
    """As `reference.top_k`. Raises ValueError for scores that are not in host memory."""
    if score_TS.device.type != "cpu":
        raise ValueError(f"top_k[partition] needs scores in host memory, got {score_TS.device}; use impl='reference'")
    num_rows, num_keys = score_TS.shape
    if score_TS.dtype != torch.float32 or score_TS.requires_grad:  # NumPy has no bfloat16
        score_TS = score_TS.detach().to(torch.promote_types(score_TS.dtype, torch.float32))
    scores = score_TS.numpy()
    if k >= num_keys:
        return torch.from_numpy(_filled(scores != -np.inf, k))
    keys = scores.argpartition(num_keys - k, axis=1)[:, num_keys - k :]  # the first of them has the k-th score
    kth_T1 = scores[np.arange(num_rows)[:, None], keys[:, :1]]
    if _are_all(scores, kth_T1, k):
        keys.sort(axis=1)
        return torch.from_numpy(keys.astype(np.int32))
    return _with_ties(score_TS, scores, kth_T1, k)


def _are_all(scores: Floats, kth_T1: Floats, k: int) -> bool:
    """Whether exactly k scores of each row are at least its k-th, and all of them are above -inf."""
    if len(scores) == 1:
        return bool(kth_T1[0, 0] != -np.inf) and np.count_nonzero(scores >= kth_T1) == k
    return bool((np.add.reduce(scores >= kth_T1, axis=1) == k).all()) and not (kth_T1 == -np.inf).any()


def _with_ties(score_TS: Tensor, scores: Floats, kth_T1: Floats, k: int) -> Tensor:
    """The same where a k-th score is shared, or a row has fewer than k scores."""
    chosen = (scores >= kth_T1) & (scores != -np.inf)
    surplus_T = np.count_nonzero(chosen, axis=1) - k
    if (kth_T1[surplus_T < 0] != -np.inf).any():  # a NaN: it equals nothing, not even itself
        return _reference(score_TS, k)
    for row in np.flatnonzero(surplus_T > 0):
        chosen[row, np.flatnonzero(scores[row] == kth_T1[row])[-surplus_T[row] :]] = False
    return torch.from_numpy(_filled(chosen, k))


def _filled(chosen: NDArray[np.bool_], k: int) -> NDArray[np.int32]:
    """Columns of the chosen, at most k a row, and -1 behind them."""
    keys = np.full((len(chosen), k), -1, dtype=np.int32)
    keys[np.arange(k) < np.count_nonzero(chosen, axis=1)[:, None]] = np.flatnonzero(chosen) % chosen.shape[1]
    return keys
