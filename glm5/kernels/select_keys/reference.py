"""keys[t] = top_k(index_score[t]), some queries at a time.

A chunk of 2,048 queries in a context of 64k tokens has 512 MB of scores. With pieces of 16 MB, scores, a copy and the
search take less than 64 MB.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from glm5.kernels.dispatch import without_gradient
from glm5.kernels.fp8_pool import Pool
from glm5.kernels.index_score.reference import index_score as reference_score
from glm5.kernels.rope import rope_part
from glm5.kernels.top_k import top_k as best_keys

# Scores of a piece: 16 MB in float32 on a CPU, 256 MB elsewhere, where launches cost more.
_SCORES_CPU, _SCORES = 1 << 22, 1 << 26


@without_gradient
def select_in_pieces(
    index_score: Callable[..., Tensor],
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
    """int32 [T, top_k], ascending, then -1 if a query sees fewer keys. Results do not depend on `num_shares`."""
    del num_shares
    q_TJI = rotated(q_TJI, rotation)
    on_cpu, page_size = q_TJI.device.type == "cpu", key_PZI.shape[1]
    if on_cpu and len(end_T):  # skip keys that no query sees; on a GPU this would need a synchronization
        page_table_BN = page_table_BN[:, : -(-int(end_T.max()) // page_size)]
    num_keys = page_table_BN.shape[1] * page_size
    step = max(1, (_SCORES_CPU if on_cpu else _SCORES) // max(1, num_keys))
    pieces = zip(*(t.split(step) for t in (q_TJI, w_TJ, row_T, end_T)), strict=True)
    return torch.cat(
        [
            best_keys(index_score(q, key_PZI, w, page_table_BN, row, end, scale=scale), top_k)
            for q, w, row, end in pieces
        ]
    )


def rotated(q_TJI: Tensor, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
    """Queries with their first dimensions rotated by `rotation`, if given. May mutate q."""
    return q_TJI if rotation is None else rope_part(q_TJI, *rotation, None, 0, 2 * rotation[0].shape[1])


select_keys = partial(select_in_pieces, reference_score)
