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
    """Of each row's token: float32 [T], its rank (1: likeliest) int64 [T]; then the N likeliest, likeliest first, and
    their `tempered`, -inf for those that could not be drawn.

    Equals rank by smaller token id. N is the maximum of the rows' numbers: each row uses the first of them.
    """

    logprob_T: Tensor
    tempered_T: Tensor
    rank_T: Tensor
    top_token_TU: Tensor
    top_logprob_TU: Tensor
    top_tempered_TU: Tensor

    @classmethod
    def joined(cls, parts: Sequence["Logprobs"]) -> "Logprobs":
        """The rows of all parts, in order."""
        columns = zip(*(vars(part).values() for part in parts), strict=True)
        return cls(*(torch.cat(column) for column in columns))


def logprobs(logits_TW: Tensor, token_T: Tensor, drawn_from_TW: Tensor | None, num_logprobs: int) -> Logprobs:
    """See `Logprobs`. `drawn_from_TW`: None where that is the model's own distribution in every row."""
    token_T1 = token_T[:, None]
    logits_TW = logits_TW.float()
    logprob_TW = logits_TW.log_softmax(dim=-1)
    logprob_T1 = logprob_TW.gather(1, token_T1)
    tempered_TW = logprob_TW if drawn_from_TW is None else drawn_from_TW.log_softmax(dim=-1)
    tempered_T1 = tempered_TW.gather(1, token_T1)
    rank_T = (logprob_TW > logprob_T1).sum(dim=-1) + 1
    if num_logprobs == 0:
        none = token_T1[:, :0]
        return Logprobs(logprob_T1[:, 0], tempered_T1[:, 0], rank_T, none, none.float(), none.float())
    chosen_TU = top_k(logprob_TW, num_logprobs).long().clamp_min_(0)
    # Ascending ids before a stable sort: equals stay in the order of their ids.
    best = logprob_TW.gather(1, chosen_TU).sort(dim=-1, descending=True, stable=True)
    top_token_TU = chosen_TU.gather(1, best.indices)
    tempered_TU = tempered_TW.gather(1, top_token_TU)
    return Logprobs(logprob_T1[:, 0], tempered_T1[:, 0], rank_T, top_token_TU, best.values, tempered_TU)
