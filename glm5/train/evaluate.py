"""How well a model predicts rows it has not been trained on: cross-entropy and accuracy of the tokens that count."""

from collections.abc import Sequence

import torch

from glm5.common.errors import TrainingError
from glm5.model.glm5 import Glm5
from glm5.train.batch import Batch
from glm5.train.step import Phase

CHUNK = 4096


@torch.no_grad()
def held_out(model: Glm5, batches: Sequence[Batch], phase: Phase) -> dict[str, float]:
    """{"held-out loss", "held-out accuracy"}: weighted means over targets; accuracy is the share of likeliest tokens
    that are right."""
    loss = right = total = 0.0
    for batch in batches:
        hidden_TD = model(batch.ids_T, phase.view(batch))
        position_G, target_G, weight_G = batch.targets(1)
        for at in range(0, len(position_G), CHUNK):
            part = slice(at, at + CHUNK)
            logprob_GW = model.head(hidden_TD[position_G[part]]).float().log_softmax(-1)
            chosen_G = logprob_GW.gather(1, target_G[part, None]).squeeze(1)
            loss -= (chosen_G * weight_G[part]).sum().item()
            right += ((logprob_GW.argmax(-1) == target_G[part]) * weight_G[part]).sum().item()
        total += weight_G.sum().item()
    if not total:
        raise TrainingError("nothing is asked in the held-out rows: no token has a weight and another before it")
    return {"held-out loss": loss / total, "held-out accuracy": right / total}
