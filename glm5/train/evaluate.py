"""Evaluation on held-out rows: cross-entropy and accuracy of the tokens with a loss weight.

    bits per byte = sum of w_t CE(t) / (ln 2  sum of w_t bytes(t))

over tokens that stand for text; named tokens, such as those of roles, have no bytes. Unlike the loss it does not depend
on the tokenizer.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.chat.tokenizer import Tokenizer
from glm5.common.errors import TrainingError
from glm5.model.glm5 import Glm5
from glm5.train.batch import Batch
from glm5.train.step import Phase

CHUNK = 4096
COUNTS = 5
"""Numbers of a `count`."""


def byte_lengths(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """The number of bytes of text that each token stands for, [vocab_size]."""
    ids = range(min(vocab_size, tokenizer.vocab_size))
    lengths = [0 if token_id in tokenizer.added_ids else len(tokenizer.bytes_of(token_id)) for token_id in ids]
    return torch.tensor(lengths + [0] * (vocab_size - len(lengths)))


@torch.no_grad()
def held_out(model: Glm5, batches: Sequence[Batch], phase: Phase, bytes_W: Tensor | None = None) -> dict[str, float]:
    """{"held-out loss", "held-out accuracy"}: weighted means over targets; with `byte_lengths` and where some target is
    text, "bits per byte", too. Raises TrainingError without targets."""
    counted = torch.zeros(COUNTS, dtype=torch.float64)
    for batch in batches:
        counted += count(model, model(batch.ids_T, phase.view(batch)), batch, bytes_W)
    return means(counted)


def means(sums: Tensor) -> dict[str, float]:
    """The result of `held_out` from a sum of `count`s."""
    loss, right, total, text_loss, num_bytes = sums.tolist()
    if not total:
        raise TrainingError("nothing is asked in the held-out rows: no token has a weight and another before it")
    metrics = {"held-out loss": loss / total, "held-out accuracy": right / total}
    return metrics | ({"bits per byte": text_loss / math.log(2) / num_bytes} if num_bytes else {})


def count(model: Glm5, hidden_TD: Tensor, batch: Batch, bytes_W: Tensor | None) -> Tensor:
    """Weighted sums over a batch, float64 on the host: [losses, correct predictions, 1; losses of text, its bytes]."""
    counted = torch.zeros(COUNTS, dtype=torch.float64)
    position_G, target_G, weight_G = batch.targets(1)
    for at in range(0, len(position_G), CHUNK):
        part = slice(at, at + CHUNK)
        logprob_GW = model.head(hidden_TD[position_G[part]]).float().log_softmax(-1)
        loss_G = -logprob_GW.gather(1, target_G[part, None]).squeeze(1) * weight_G[part]
        right_G = (logprob_GW.argmax(-1) == target_G[part]) * weight_G[part]
        bytes_G = torch.zeros_like(target_G[part]) if bytes_W is None else bytes_W[target_G[part]]
        sums = (loss_G, right_G, weight_G[part], loss_G * (bytes_G > 0), bytes_G * weight_G[part])
        counted += torch.stack([one.sum().double() for one in sums]).cpu()
    return counted
