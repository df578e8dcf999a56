"""Evaluation on held-out rows: cross-entropy and accuracy of the tokens with a loss weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.common.errors import TrainingError
from glm5.model.glm5 import Glm5
from glm5.train.batch import Batch
from glm5.train.step import Phase

CHUNK = 4096


@torch.no_grad()
def held_out(model: Glm5, batches: Sequence[Batch], phase: Phase) -> dict[str, float]:
    """{"held-out loss", "held-out accuracy"}: weighted means over targets. Raises TrainingError without targets."""
    counted = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        counted += count(model, model(batch.ids_T, phase.view(batch)), batch)
    return means(counted)


def means(sums: Tensor) -> dict[str, float]:
    """The result of `held_out` from a sum of `count`s."""
    loss, right, total = sums.tolist()
    if not total:
        raise TrainingError("nothing is asked in the held-out rows: no token has a weight and another before it")
    return {"held-out loss": loss / total, "held-out accuracy": right / total}


def count(model: Glm5, hidden_TD: Tensor, batch: Batch) -> Tensor:
    """[weighted sum of losses, weight of correct predictions, total weight] of a batch, float64 on the host."""
    loss = right = 0.0
    position_G, target_G, weight_G = batch.targets(1)
    for at in range(0, len(position_G), CHUNK):
        part = slice(at, at + CHUNK)
        logprob_GW = model.head(hidden_TD[position_G[part]]).float().log_softmax(-1)
        chosen_G = logprob_GW.gather(1, target_G[part, None]).squeeze(1)
        loss -= (chosen_G * weight_G[part]).sum().item()
        right += ((logprob_GW.argmax(-1) == target_G[part]) * weight_G[part]).sum().item()
    return torch.tensor([loss, right, weight_G.sum().item()], dtype=torch.float64)
