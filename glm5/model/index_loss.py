"""How the indexer learns: KL from the attention that it selects for (training notes: DSA warm-up and joint stage).

    P[t, s] = mean over heads and served layers of attention[h, t, s], detached
    loss    = mean over t of KL( P[t, :] || softmax(score[t, :]) )

over every visible key in warm-up, over the selected keys in the joint stage. Its gradient is softmax(score) - P and
reaches the indexer only, whose inputs are detached. A layer that shares an earlier selection (IndexShare) counts
towards the target of the indexer that made it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class IndexRecord:
    """Scores [T, S] of one indexer, the keys it selected (None: all), and the attention of the layers it served."""

    score_TS: Tensor
    keys_TK: Tensor | None
    target: Tensor | None = None
    num_served: int = 0

    def add(self, probs: Tensor) -> None:
        """Add one layer's head-averaged attention, [T, S] or, with selected keys, [T, K]."""
        self.target = probs if self.target is None else self.target + probs
        self.num_served += 1


def index_loss(records: list[IndexRecord]) -> Tensor:
    """Mean over records of the mean KL per query, in nats (float32 or float64)."""
    if not records:
        raise ValueError("no indexer was recorded: pass learn_index=True to the view before the forward pass")
    return torch.stack([_kl(record) for record in records]).mean()


def _kl(record: IndexRecord) -> Tensor:
    score = record.score_TS
    hidden = score == float("-inf")
    if record.keys_TK is not None:
        hidden = record.keys_TK < 0
        score = score.gather(1, record.keys_TK.clamp_min(0).long())
    assert record.target is not None, "select without attend"
    target = record.target.to(score.dtype) / record.num_served
    log_q = score.masked_fill(hidden, float("-inf")).log_softmax(dim=-1).masked_fill(hidden, 0.0)
    return (torch.special.xlogy(target, target) - target * log_q).sum(dim=-1).mean()
