"""Log-probabilities of tokens and of the likeliest ones, under the model's own softmax: nothing edited, nothing cut.

    logprob  = log softmax(logits)[token]                 tempered = log softmax(logits / temperature)[token]

`tempered` is what a policy gradient of a sampled token needs; where temperature is 0 or 1 the two are equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.top_k import top_k


@dataclass
class Logprobs:
    """Of each row's token: float32 [R], its rank (1: likeliest) int64 [R]; then the N likeliest, likeliest first.

    Equals rank by smaller token id. N is the most that any row asked for: a row's own are the first of them.
    """

    logprob_R: Tensor
    tempered_R: Tensor
    rank_R: Tensor
    likeliest_RN: Tensor
    likeliest_logprob_RN: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        """The rows of all parts, in order."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


def logprobs(logits_RW: Tensor, token_R: Tensor, temperature_R: Tensor | None, num_likeliest: int) -> Logprobs:
    """See `Logprobs`. `temperature_R`: None where every row's is 0 or 1."""
    token_R1 = token_R[:, None]
    logits_RW = logits_RW.float()
    logprob_RW = logits_RW.log_softmax(dim=-1)
    logprob_R1 = logprob_RW.gather(1, token_R1)
    tempered_R1 = logprob_R1
    if temperature_R is not None:
        divisor_R1 = torch.where(temperature_R == 0, 1.0, temperature_R)[:, None]
        tempered_R1 = (logits_RW / divisor_R1).log_softmax(dim=-1).gather(1, token_R1)
    rank_R = (logprob_RW > logprob_R1).sum(dim=-1) + 1
    if num_likeliest == 0:
        none = token_R1[:, :0]
        return Logprobs(logprob_R1[:, 0], tempered_R1[:, 0], rank_R, none, none.float())
    chosen_RN = top_k(logprob_RW, num_likeliest).long().clamp_min_(0)
    # Ascending ids before a stable sort: equals stay in the order of their ids.
    best = logprob_RW.gather(1, chosen_RN).sort(dim=-1, descending=True, stable=True)
    return Logprobs(logprob_R1[:, 0], tempered_R1[:, 0], rank_R, chosen_RN.gather(1, best.indices), best.values)
