"""select_keys on a GPU: scores of what each query sees, then the best of them, in two launches (four for long rows)
and bounded memory."""

import torch
import triton
from torch import Tensor

from glm5.kernels.fp8_pool import Pool
from glm5.kernels.index_score.triton import Tiling, score_visible, tiling_of
from glm5.kernels.top_k.triton import GROUPS, LONGEST, best_of, group_size

_SCORES = 1 << 26  # of a piece of the queries: 256 MB


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
    longest: int = LONGEST,
    num_groups: int = GROUPS,
    rotation: tuple[Tensor, Tensor] | None = None,
    num_shares: int = 1,
    tiling: Tiling | None = None,
) -> Tensor:
    """As `reference.select_keys`. Rows of more than `longest` keys go through groups of them (`top_k/triton.py`).

    `tiling`: of the scores; by default that for all queries of all shares.
    """
    tiling = tiling or tiling_of(q_TJI, key_PZI, page_table_BN, num_shares)
    num_keys = page_table_BN.shape[1] * key_PZI.shape[1]
    group = group_size(num_keys, num_groups) if num_keys > longest else 1
    step = max(1, _SCORES // max(1, num_keys))
    parts = []
    for first in range(0, max(1, len(q_TJI)), step):
        q, w, row, end = (x[first : first + step] for x in (q_TJI, w_TJ, row_T, end_T))
        angles = None if rotation is None else (rotation[0][first : first + step], rotation[1][first : first + step])
        score_TS = q.new_empty(len(q), num_keys, dtype=torch.float32)
        group_TG = q.new_empty(len(q), triton.cdiv(num_keys, group), dtype=torch.float32) if group > 1 else None
        score_visible(
            q,
            key_PZI,
            w,
            page_table_BN,
            row,
            end,
            score_TS,
            group_TG,
            scale=scale,
            group=group,
            rotation=angles,
            tiling=tiling,
        )
        parts.append(best_of(score_TS, group_TG, end, group, top_k))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
