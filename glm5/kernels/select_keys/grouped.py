"""Selection for few queries of each of many requests, on a CPU (groups.py): scores of a group, then its best keys."""

import numpy as np
import torch
from torch import Tensor

from glm5.kernels.dispatch import without_gradient
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import FewQueries, Group
from glm5.kernels.select_keys.reference import rotated
from glm5.kernels.top_k import top_k as best_keys


@without_gradient
def select_keys(
    q_TJI: Tensor,
    key_PZI: Pool,
    w_TJ: Tensor,
    page_table_BN: Tensor,
    row_T: Tensor,
    end_T: Tensor,
    *,
    top_k: int,
    scale: float,
    rotation: tuple[Tensor, Tensor] | None = None,
    num_shares: int = 1,
) -> Tensor:
    """As `reference.select_keys`. Raises ValueError for tensors that are not in host memory."""
    if q_TJI.device.type != "cpu":
        raise ValueError(f"select_keys[grouped] needs tensors in host memory, got {q_TJI.device}; use impl='tiled'")
    del num_shares
    q_TJI = rotated(q_TJI, rotation)
    few = FewQueries(page_table_BN, row_T, end_T, key_PZI.shape[1])
    return select_few(few, q_TJI, key_PZI, w_TJ, top_k=top_k, scale=scale)


def select_few(few: FewQueries, q_TJI: Tensor, key_PZI: Pool, w_TJ: Tensor, *, top_k: int, scale: float) -> Tensor:
    """The same for queries that are already grouped. No gradient may be required."""
    wide = torch.promote_types(q_TJI.dtype, torch.float32)
    # relu(a scale) w = relu(a) (w scale), and w is smaller by far.
    if q_TJI.dtype != wide or w_TJ.dtype != wide:
        q_TJI, w_TJ = q_TJI.to(wide), w_TJ.to(wide)
    w_TJ = w_TJ * scale
    groups = few.groups(q_TJI.shape[1])
    if len(groups) == 1 and groups[0].whole:
        keys_TK = best_keys(_scores(q_TJI, key_PZI, w_TJ, groups[0]), top_k)
        if groups[0].num_seen >= top_k:
            few.note_all_seen(keys_TK)
        return keys_TK
    keys = np.full((len(few), top_k), -1, dtype=np.int32)
    for group in groups:
        keys[group.query_X] = best_keys(_scores(q_TJI, key_PZI, w_TJ, group), top_k).numpy()
    return torch.from_numpy(keys)


def _scores(q_TJI: Tensor, key_PZI: Pool, w_TJ: Tensor, group: Group) -> Tensor:
    """index_score of a group's queries, [X, S]."""
    key_GSI = group.keys(key_PZI).to(q_TJI.dtype)
    q_XJI, w_XJ = group.of(q_TJI), group.of(w_TJ)
    hits_GYS = torch.bmm(q_XJI.reshape(len(key_GSI), -1, q_XJI.shape[-1]), key_GSI.mT).relu_()
    score_XS = torch.bmm(w_XJ.unsqueeze(1), hits_GYS.view(*q_XJI.shape[:2], -1)).squeeze(1)
    if (hidden_XS := group.hidden) is not None:
        np.copyto(score_XS.numpy(), -np.inf, where=hidden_XS)
    return score_XS
