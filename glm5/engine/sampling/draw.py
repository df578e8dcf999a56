"""One token a row out of its edited logits.

    z     = (logits - max) / temperature
    keep  = z >= log(min_p), then the top_k largest, then the shortest head of those with mass >= top_p
    token = argmax over kept w of  z[w] - log(e[w])        (exponential race, see `noise`)

Equal values rank by smaller token id. Masses are integers, exp(z) * 2**40: their sums are the same in any order, so a
row keeps the same tokens whether its head or the whole of it was sorted, on any device and in any batch. A row is
greedy where its temperature is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from glm5.engine.sampling.logprobs import Logprobs, logprobs
from glm5.engine.sampling.noise import log_exponential
from glm5.engine.sampling.params import Feature

ONE = 2.0**40  # the mass of the likeliest token; 2**18 of them still fit 63 bits
_ALL = torch.iinfo(torch.int64).max
_HEAD = 1024  # tokens of a row that a CPU sorts before it sorts all

Numbers = Callable[[str], Tensor]  # of each row, by name (`SlotTables.numbers_of`)


class Best(NamedTuple):
    """Per row the largest value and its token id, the smallest of equals."""

    value_R: Tensor
    token_R: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Token ids whose logits this process has, `size` from `first` on: all. (`parts.VocabShard`: a rank's part.)"""

    first: int
    size: int

    def best(self, values_RW: Tensor) -> Best:
        """See `Best`. Rows of NaN or of -inf alone give any token, the same on every rank."""
        return Best(*values_RW.max(dim=-1))

    def keep_head(self, z_RW: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> None:
        """z is -inf for the tokens that top_k and then top_p leave out."""
        z_RW.masked_fill_(_dropped(z_RW, top_k_R, top_p_R), -torch.inf)

    def logprobs(
        self, logits_RW: Tensor, token_R: Tensor, drawn_from_RW: Tensor | None, num_likeliest: int
    ) -> Logprobs:
        return logprobs(logits_RW, token_R, drawn_from_RW, num_likeliest)


def kept(logits_RW: Tensor, best: Best, numbers: Numbers, features: int, vocabulary: Vocabulary) -> Tensor:
    """z of what is kept, -inf elsewhere. Cuts that are not among `features`, as no row has them, are skipped."""
    z_RW = logits_RW - best.value_R[:, None]
    z_RW /= divisor(numbers("temperature"))[:, None]
    if features & Feature.MIN_P:
        z_RW.masked_fill_(z_RW < numbers("min_p")[:, None], -torch.inf)
    if features & Feature.HEAD:
        vocabulary.keep_head(z_RW, numbers("top_k"), numbers("top_p"))
    return z_RW


def race(z_RW: Tensor, best: Best, position_R: Tensor, numbers: Numbers, vocabulary: Vocabulary) -> Tensor:
    """Token ids [R] out of z, which is overwritten."""
    z_RW -= log_exponential(numbers("seed"), position_R, vocabulary.size, vocabulary.first)
    return torch.where(numbers("temperature") == 0, best.token_R, vocabulary.best(z_RW).token_R)


def divisor(temperature_R: Tensor) -> Tensor:
    """What logits are divided by: nothing where a row is greedy."""
    return torch.where(temperature_R == 0, 1.0, temperature_R)


def drawn_from(logits_RW: Tensor, temperature_R: Tensor, z_RW: Tensor | None) -> Tensor:
    """Logits of the distribution that tokens come from: edited ones at the temperature, -inf where `kept` left a token
    out. A greedy row leaves out none."""
    scaled_RW = logits_RW / divisor(temperature_R)[:, None]
    if z_RW is None:
        return scaled_RW
    return scaled_RW.masked_fill_((z_RW == -torch.inf) & (temperature_R != 0)[:, None], -torch.inf)


def _dropped(z_RW: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Mask [R, W] of the tokens that top_k and then top_p leave out."""
    vocab_size = z_RW.shape[1]
    rank_R = torch.where(top_k_R > 0, top_k_R, vocab_size).clamp_max_(vocab_size)
    limited_R = (rank_R < vocab_size) | (top_p_R < 1)
    # The largest z is 0, so its probability is one over the sum of all exp(z).
    mass_R = (ONE / z_RW.softmax(dim=-1).amax(dim=-1).double()).long()
    cut: _Cut | None = None
    if z_RW.device.type == "cpu" and vocab_size > _HEAD:
        cut = _find_cut(z_RW.topk(_HEAD, dim=-1).values, rank_R, top_p_R, mass_R, vocab_size)
        cut = cut if (cut.certain_R | ~limited_R).all() else None
    if cut is None:
        cut = _find_cut(_descending(z_RW), rank_R, top_p_R, mass_R, vocab_size)
    last_R1 = torch.where(limited_R, cut.last_R, -torch.inf)[:, None]
    num_ties_R1 = torch.where(limited_R, cut.num_ties_R, vocab_size)[:, None]
    tied_RW = z_RW == last_R1
    return (z_RW < last_R1) | (tied_RW & (tied_RW.cumsum(dim=-1, dtype=torch.int32) > num_ties_R1))


class _Cut(NamedTuple):
    """Per row: the smallest value kept, how many of those equal to it are kept, and whether that is certain."""

    last_R: Tensor
    num_ties_R: Tensor
    certain_R: Tensor


def _find_cut(z_RU: Tensor, rank_R: Tensor, top_p_R: Tensor, mass_R: Tensor, vocab_size: int) -> _Cut:
    """The cut of rows of which z_RU are the U largest values, descending, and `mass_R` the mass of all."""
    num_sorted = z_RU.shape[1]
    heads_RU = (z_RU.exp() * ONE).long().cumsum(dim=-1)
    ranked_R = heads_RU.gather(1, (rank_R.clamp_max(num_sorted) - 1)[:, None])[:, 0]
    mass_R = torch.where(rank_R < vocab_size, ranked_R, mass_R)
    # top_p 1 keeps all: rounding may bring the sum to the whole before the last token.
    target_R = torch.where(top_p_R < 1, (top_p_R.double() * mass_R).ceil().long(), _ALL)
    rank_U = torch.arange(num_sorted, device=z_RU.device)
    dropped_RU = (rank_U[1:] >= rank_R[:, None]) | (heads_RU[:, :-1] >= target_R[:, None])
    num_kept_R = num_sorted - dropped_RU.sum(dim=-1)
    last_R1 = z_RU.gather(1, (num_kept_R - 1)[:, None])
    num_ties_R = num_kept_R - (z_RU > last_R1).sum(dim=-1)
    certain_R = torch.where(rank_R < vocab_size, rank_R <= num_sorted, heads_RU[:, -1] >= target_R)
    return _Cut(last_R1[:, 0], num_ties_R, certain_R)


def _descending(z_RW: Tensor) -> Tensor:
    """Values of each row, largest first."""
    if z_RW.device.type != "cpu":
        return z_RW.sort(dim=-1, descending=True).values
    # Which of equals comes first is nobody's business here, and NumPy's vector sort of values is 25 times faster.
    return torch.from_numpy(np.sort(-z_RW.numpy(), axis=-1)).neg_()
