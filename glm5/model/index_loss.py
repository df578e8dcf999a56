"""How the indexer learns: KL from the attention that it selects for (training notes: DSA warm-up and joint stage).

    P[t, s] = mean over heads and served layers of attention[h, t, s], detached
    loss    = mean over t of KL( P[t, :] || softmax(score[t, :]) )

over every visible key in warm-up, over the selected keys in the joint stage. Its gradient is softmax(score) - P and
reaches the indexer only, whose inputs are detached. A layer that shares an earlier selection (IndexShare) counts
towards the target of the indexer that made it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.kernels.index_kl import Served, index_kl


@dataclass
class IndexRecord:
    """Queries, keys and weights of one indexer, what it selected (None: every visible key), and whom it served."""

    q_TJI: Tensor
    key_PZI: Tensor
    w_TJ: Tensor
    keys_TK: Tensor | None
    where: tuple[Tensor, Tensor, Tensor]
    index_scale: float
    whole: bool
    """Whether queries are all tokens of their sequences, in order."""
    _served: list[Served] = field(default_factory=list)
    _scale: float = 0.0
    _loss: Tensor | None = None

    def add(self, layer: Served, scale: float) -> None:
        """One more layer that read the selection: its queries, latents and log-sum-exps, detached."""
        assert self._loss is None, "a layer after the loss was taken"
        self._served.append(layer)
        self._scale = scale

    def settle(self) -> Tensor:
        """The loss, summed over queries; from then on the layers' tensors are not held."""
        if self._loss is None:
            assert self._served, "select without attend"
            scales = {"index_scale": self.index_scale, "scale": self._scale}
            # It may be taken within a later layer whose activations are computed again, or lie in host memory; this
            # loss's own are to be kept as they are.
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                of = (self.q_TJI, self.key_PZI, self.w_TJ, self._served, self.keys_TK, *self.where)
                in_tiles = self.whole or self.keys_TK is not None  # what a GPU's tiles ask for
                self._loss = index_kl(*of, **scales, impl="auto" if in_tiles else "streamed")
            self._served = []
        return self._loss


def index_loss(records: list[IndexRecord]) -> Tensor:
    """Mean over records of the mean KL per query, in nats (float32 or float64)."""
    if not records:
        raise ValueError("no indexer was recorded: pass learn_index=True to the view before the forward pass")
    return torch.stack([record.settle() / len(record.q_TJI) for record in records]).mean()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
