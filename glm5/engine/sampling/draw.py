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
from glm5.kernels.sampled_logprobs import bits_of, divisor

ONE = 2.0**40  # the mass of the likeliest token; 2**18 of them still fit 63 bits
_ALL = torch.iinfo(torch.int64).max
_HEAD = 1024  # tokens of a row that a CPU sorts before it sorts all

Numbers = Callable[[str], Tensor]  # of each row, by name (`SlotTables.numbers_of`)


class Best(NamedTuple):
    """Per row the largest value and its token id, the smallest of equals."""

    value_T: Tensor
    token_T: Tensor


@dataclass(frozen=True)
class Vocabulary:
    """Token ids whose logits this process has, `size` from `first` on: all. (`parts.VocabShard`: a rank's part.)"""

    first: int
    size: int

    def best(self, values_TW: Tensor) -> Best:
        """See `Best`. Rows of NaN or of -inf alone give any token, the same on every rank."""
        return Best(*values_TW.max(dim=-1))

    def keep_head(self, z_TW: Tensor, top_k_T: Tensor, top_p_T: Tensor) -> None:
        """z is -inf for the tokens that top_k and then top_p leave out."""
        z_TW.masked_fill_(_dropped(z_TW, top_k_T, top_p_T), -torch.inf)

    def kept_bits(self, z_TW: Tensor) -> Tensor:
        """Which token ids have a z that is not -inf, as bits (`bits_of`)."""
        return bits_of(z_TW != -torch.inf)

    def logprobs(self, logits_TW: Tensor, token_T: Tensor, drawn_from_TW: Tensor | None, num_logprobs: int) -> Logprobs:
        return logprobs(logits_TW, token_T, drawn_from_TW, num_logprobs)


def kept(logits_TW: Tensor, best: Best, numbers: Numbers, features: int, vocabulary: Vocabulary) -> Tensor:
    """z of what is kept, -inf elsewhere. Cuts that are not among `features`, as no row has them, are skipped."""
    z_TW = logits_TW - best.value_T[:, None]
    z_TW /= divisor(numbers("temperature"), z_TW.dtype)[:, None]
    if features & Feature.MIN_P:
        z_TW.masked_fill_(z_TW < numbers("min_p")[:, None], -torch.inf)
    if features & Feature.HEAD:
        vocabulary.keep_head(z_TW, numbers("top_k"), numbers("top_p"))
    return z_TW


def race(z_TW: Tensor, best: Best, position_T: Tensor, numbers: Numbers, vocabulary: Vocabulary) -> Tensor:
    """Token ids [T] out of z, which is overwritten."""
    z_TW -= log_exponential(numbers("seed"), position_T, vocabulary.size, vocabulary.first)
    return torch.where(numbers("temperature") == 0, best.token_T, vocabulary.best(z_TW).token_T)


def drawn_from(logits_TW: Tensor, temperature_T: Tensor, z_TW: Tensor | None) -> Tensor:
    """Logits of the distribution that tokens come from: edited ones at the temperature, -inf where `kept` left a token
    out. A greedy row leaves out none."""
    scaled_TW = logits_TW / divisor(temperature_T, logits_TW.dtype)[:, None]
    if z_TW is None:
        return scaled_TW
    return scaled_TW.masked_fill_((z_TW == -torch.inf) & (temperature_T != 0)[:, None], -torch.inf)


def _dropped(z_TW: Tensor, top_k_T: Tensor, top_p_T: Tensor) -> Tensor:
    """Mask [T, W] of the tokens that top_k and then top_p leave out."""
    vocab_size = z_TW.shape[1]
    rank_T = torch.where(top_k_T > 0, top_k_T, vocab_size).clamp_max_(vocab_size)
    limited_T = (rank_T < vocab_size) | (top_p_T < 1)
    # The largest z is 0, so its probability is one over the sum of all exp(z).
    mass_T = (ONE / z_TW.softmax(dim=-1).amax(dim=-1).double()).long()
    cut: _Cut | None = None
    if z_TW.device.type == "cpu" and vocab_size > _HEAD:
        cut = _find_cut(z_TW.topk(_HEAD, dim=-1).values, rank_T, top_p_T, mass_T, vocab_size)
        cut = cut if (cut.certain_T | ~limited_T).all() else None
    if cut is None:
        cut = _find_cut(_descending(z_TW), rank_T, top_p_T, mass_T, vocab_size)
    last_T1 = torch.where(limited_T, cut.last_T, -torch.inf)[:, None]
    num_ties_T1 = torch.where(limited_T, cut.num_ties_T, vocab_size)[:, None]
    tied_TW = z_TW == last_T1
    return (z_TW < last_T1) | (tied_TW & (tied_TW.cumsum(dim=-1, dtype=torch.int32) > num_ties_T1))


class _Cut(NamedTuple):
    """Per row: the smallest value kept, how many of those equal to it are kept, and whether that is certain."""

    last_T: Tensor
    num_ties_T: Tensor
    certain_T: Tensor


def _find_cut(z_TU: Tensor, rank_T: Tensor, top_p_T: Tensor, mass_T: Tensor, vocab_size: int) -> _Cut:
    """The cut of rows of which z_TU are the U largest values, descending, and `mass_T` the mass of all."""
    num_sorted = z_TU.shape[1]
    heads_TU = (z_TU.exp() * ONE).long().cumsum(dim=-1)
    ranked_T = heads_TU.gather(1, (rank_T.clamp_max(num_sorted) - 1)[:, None])[:, 0]
    mass_T = torch.where(rank_T < vocab_size, ranked_T, mass_T)
    # top_p 1 keeps all: rounding may bring the sum to the whole before the last token.
    target_T = torch.where(top_p_T < 1, (top_p_T.double() * mass_T).ceil().long(), _ALL)
    rank_U = torch.arange(num_sorted, device=z_TU.device)
    dropped_TU = (rank_U[1:] >= rank_T[:, None]) | (heads_TU[:, :-1] >= target_T[:, None])
    num_kept_T = num_sorted - dropped_TU.sum(dim=-1)
    last_T1 = z_TU.gather(1, (num_kept_T - 1)[:, None])
    num_ties_T = num_kept_T - (z_TU > last_T1).sum(dim=-1)
    certain_T = torch.where(rank_T < vocab_size, rank_T <= num_sorted, heads_TU[:, -1] >= target_T)
    return _Cut(last_T1[:, 0], num_ties_T, certain_T)


def _descending(z_TW: Tensor) -> Tensor:
    """Values of each row, largest first."""
    if z_TW.device.type != "cpu":
        return z_TW.sort(dim=-1, descending=True).values
    # The order of equal values does not matter here, and NumPy's vector sort of values is 25 times faster.
    return torch.from_numpy(np.sort(-z_TW.numpy(), axis=-1)).neg_()
