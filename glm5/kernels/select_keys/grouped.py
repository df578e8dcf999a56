"""Selection for few queries of each of many requests, on a CPU (groups.py): scores of a group, then its best keys."""

import torch
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.groups import Group, plan_groups
from glm5.kernels.tiles import dense_logits
from glm5.kernels.top_k import top_k as best_keys


@torch.no_grad()
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
) -> Tensor:
    """As `reference.select_keys`. Raises ValueError for tensors that are not in host memory."""
    if q_TJI.device.type != "cpu":
        raise ValueError(f"select_keys[grouped] needs tensors in host memory, got {q_TJI.device}; use impl='tiled'")
    groups = plan_groups(row_T, end_T, key_PZI.shape[1], q_TJI.shape[1])
    parts = [best_keys(_scores(q_TJI, key_PZI, w_TJ, page_table_BN, end_T, scale, group), top_k) for group in groups]
    if len(groups) == 1 and groups[0].whole:
        return parts[0]
    keys_TK = torch.full((len(row_T), top_k), -1, dtype=torch.int32)
    for group, part in zip(groups, parts, strict=True):
        keys_TK.numpy()[group.query_X] = part.numpy()
    return keys_TK


def _scores(
    q_TJI: Tensor, key_PZI: Pool, w_TJ: Tensor, page_table_BN: Tensor, end_T: Tensor, scale: float, group: Group
) -> Tensor:
    """index_score of a group's queries, [X, S]."""
    wide = torch.promote_types(q_TJI.dtype, torch.float32)
    key_GSI = group.keys(key_PZI, page_table_BN).to(wide)
    hits_XJS = dense_logits(group.of(q_TJI).to(wide), key_GSI, scale).relu_()
    score_XS = torch.bmm(group.of(w_TJ).to(wide).unsqueeze(1), hits_XJS).squeeze(1)
    hidden_XS = torch.arange(key_GSI.shape[1], dtype=end_T.dtype) >= group.of(end_T)[:, None]
    return score_XS.masked_fill_(hidden_XS, float("-inf"))
