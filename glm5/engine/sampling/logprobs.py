"""Log-probabilities of tokens and of the likeliest ones.

    logprob  = log softmax(logits)[token]         the model's own: nothing edited, nothing cut
    tempered = log softmax(drawn_from)[token]     of the distribution that the token was drawn from (`draw.drawn_from`):
                                                  penalties, biases, grammar; temperature; top_k, top_p, min_p

`tempered` is what a policy gradient of a sampled token needs. A prompt's tokens were not drawn: theirs is at the
temperature, and of all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.kernels.top_k import top_k


@dataclass
class Logprobs:
    """Of each row's token: float32 [R], its rank (1: likeliest) int64 [R]; then the N likeliest, likeliest first, and
    their `tempered`, -inf for those that could not be drawn.

    Equals rank by smaller token id. N is the most that any row asked for: a row's own are the first of them.
    """

    logprob_R: Tensor
    tempered_R: Tensor
    rank_R: Tensor
    likeliest_RN: Tensor
    likeliest_logprob_RN: Tensor
    likeliest_tempered_RN: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        """The rows of all parts, in order."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


def logprobs(logits_RW: Tensor, token_R: Tensor, drawn_from_RW: Tensor | None, num_likeliest: int) -> Logprobs:
    """See `Logprobs`. `drawn_from_RW`: None where that is the model's own distribution in every row."""
    token_R1 = token_R[:, None]
    logits_RW = logits_RW.float()
    logprob_RW = logits_RW.log_softmax(dim=-1)
    logprob_R1 = logprob_RW.gather(1, token_R1)
    tempered_RW = logprob_RW if drawn_from_RW is None else drawn_from_RW.log_softmax(dim=-1)
    tempered_R1 = tempered_RW.gather(1, token_R1)
    rank_R = (logprob_RW > logprob_R1).sum(dim=-1) + 1
    if num_likeliest == 0:
        none = token_R1[:, :0]
        return Logprobs(logprob_R1[:, 0], tempered_R1[:, 0], rank_R, none, none.float(), none.float())
    chosen_RN = top_k(logprob_RW, num_likeliest).long().clamp_min_(0)
    # Ascending ids before a stable sort: equals stay in the order of their ids.
    best = logprob_RW.gather(1, chosen_RN).sort(dim=-1, descending=True, stable=True)
    likeliest_RN = chosen_RN.gather(1, best.indices)
    tempered_RN = tempered_RW.gather(1, likeliest_RN)
    return Logprobs(logprob_R1[:, 0], tempered_R1[:, 0], rank_R, likeliest_RN, best.values, tempered_RN)
