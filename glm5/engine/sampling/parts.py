"""Sampling where every rank has the logits of its own token ids: the vocabulary is never gathered.

    argmax      each rank's best (value, id), then the best of those
    draw        the same race as `draw`: noise depends on the token id alone; the largest logit is all ranks' largest
    top_k/p     the last value kept is found bit by bit: ranks add up how many tokens, and how much mass, lie above it
    logprobs    ranks' maxima and sums give the whole's; the likeliest are the likeliest of each rank's

Every rank finds the same. Shapes are static, and nothing waits for the device.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from glm5.engine.sampling.draw import ONE, Best, Vocabulary
from glm5.engine.sampling.logprobs import Logprobs
from glm5.kernels.sampled_logprobs import bits_of
from glm5.kernels.top_k import top_k

_BITS, _BINS = 8, 256  # of each of four passes over the 31 bits of a magnitude
_NO_CUT = torch.iinfo(torch.int64).max
# Logits among which cuts are sought at a time: a search takes SEARCH_BYTES for each.
MAX_SEARCHED, SEARCH_BYTES = 1 << 22, 92


class Exchange(Protocol):
    """What sampling asks of the ranks."""

    def all_gather(self, part: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class VocabShard(Vocabulary):
    """This rank's token ids, the rank-th part of all."""

    exchange: Exchange
    rank: int

    def best(self, values_TW: Tensor) -> Best:
        local = values_TW.max(dim=-1)
        pairs_2T = torch.stack([local.values.double(), (local.indices + self.first).double()])
        value_by_rank, token_by_rank = self.exchange.all_gather(pairs_2T).unbind(dim=1)
        value_T = value_by_rank.amax(dim=0)
        token_T = token_by_rank.masked_fill(value_by_rank != value_T, torch.inf).amin(dim=0)
        return Best(value_T.float(), token_T.masked_fill(token_T.isinf(), 0).long())

    def total(self, part: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self.exchange.all_gather(part).sum(dim=0)

    def keep_head(self, z_TW: Tensor, top_k_T: Tensor, top_p_T: Tensor) -> None:
        num_rows = max(1, MAX_SEARCHED // self.size)
        for rows in (slice(first, first + num_rows) for first in range(0, len(z_TW), num_rows)):
            z_TW[rows].masked_fill_(_dropped(z_TW[rows], top_k_T[rows], top_p_T[rows], self), -torch.inf)

    def kept_bits(self, z_TW: Tensor) -> Tensor:
        return bits_of(self.exchange.all_gather(z_TW != -torch.inf).transpose(0, 1).flatten(1))

    def logprobs(self, logits_TW: Tensor, token_T: Tensor, drawn_from_TW: Tensor | None, num_logprobs: int) -> Logprobs:
        logits_TW = logits_TW.float()
        drawn_from_TW = logits_TW if drawn_from_TW is None else drawn_from_TW
        place_T = token_T - self.first
        is_local_T = (place_T >= 0) & (place_T < self.size)
        rows: list[Tensor] = []
        for each_TW in (logits_TW, drawn_from_TW):
            local_logit_T = each_TW.gather(1, place_T.clamp(0, self.size - 1)[:, None])[:, 0]
            rows += [torch.where(is_local_T, local_logit_T, 0.0), *_max_and_exp_sum(each_TW)]
        gathered_bins = self.exchange.all_gather(torch.stack([row.double() for row in rows]))
        chosen_T, drawn_T = gathered_bins[:, 0].sum(dim=0).float(), gathered_bins[:, 3].sum(dim=0).float()
        whole_T, tempered_T = _log_sum(gathered_bins[:, 1:3]), _log_sum(gathered_bins[:, 4:6])
        logprob_TW = logits_TW - whole_T[:, None]
        logprob_T = chosen_T - whole_T
        num_above_T = (logprob_TW > logprob_T[:, None]).sum(dim=-1)
        count = min(num_logprobs, self.size)
        columns = [num_above_T[:, None]]
        if count:
            chosen_TU = top_k(logprob_TW, count).long().clamp_min_(0)
            tempered_TU = drawn_from_TW.gather(1, chosen_TU) - tempered_T[:, None]
            columns += [logprob_TW.gather(1, chosen_TU), chosen_TU + self.first, tempered_TU]
        bins_by_rank = self.exchange.all_gather(torch.cat([column.double() for column in columns], dim=1))
        rank_T = bins_by_rank[..., 0].sum(dim=0).long() + 1
        # Ranks' ids ascend, and so do each rank's: a stable sort leaves equals in the order of their ids.
        values_TU, ids_TU, tempered_TU = (
            bins_by_rank[..., 1 + k * count : 1 + (k + 1) * count].transpose(0, 1).flatten(1).float() for k in range(3)
        )
        best = values_TU.sort(dim=-1, descending=True, stable=True)
        first_TU = best.indices[:, :num_logprobs]
        return Logprobs(
            logprob_T,
            drawn_T - tempered_T,
            rank_T,
            ids_TU.gather(1, first_TU).long(),
            values_TU.gather(1, first_TU),
            tempered_TU.gather(1, first_TU),
        )


class _Cut(NamedTuple):
    """Per row: magnitude of the last value kept, how many of those equal to it are kept; the mass of all kept."""

    last_T: Tensor
    num_ties_T: Tensor
    mass_T: Tensor


def _dropped(z_TW: Tensor, top_k_T: Tensor, top_p_T: Tensor, part: VocabShard) -> Tensor:
    """Mask [T, W] of this rank's tokens that top_k and then top_p leave out."""
    # No z is above 0, so the larger it is the smaller are its bits without the sign.
    size_TW = (z_TW.view(torch.int32) & 0x7FFFFFFF).long()
    mass_TW = (z_TW.exp() * ONE).long()
    count_T = torch.where(top_k_T > 0, top_k_T, _NO_CUT)
    by_count = _find_cut(size_TW, mass_TW, count_T, part, by_mass=False)
    wanted_T = (top_p_T.double() * by_count.mass_T.double()).ceil().long().clamp_min(1)
    by_mass = _find_cut(size_TW, mass_TW, torch.where(top_p_T < 1, wanted_T, _NO_CUT), part, by_mass=True)
    last_T = torch.minimum(by_count.last_T, by_mass.last_T)
    ties = [torch.where(cut.last_T == last_T, cut.num_ties_T, _NO_CUT) for cut in (by_count, by_mass)]
    tied_TW = size_TW == last_T[:, None]
    num_tied_by_rank = part.exchange.all_gather(tied_TW.sum(dim=-1))
    left_T = torch.minimum(*ties) - num_tied_by_rank[: part.rank].sum(dim=0)
    return (size_TW > last_T[:, None]) | (tied_TW & (tied_TW.cumsum(dim=-1) > left_T[:, None]))


def _find_cut(size_TW: Tensor, mass_TW: Tensor, wanted_T: Tensor, part: VocabShard, *, by_mass: bool) -> _Cut:
    """The cut behind which `wanted_T` tokens, or so much mass, are kept; all, if there are not so many."""
    num_rows = len(size_TW)
    prefix_T1 = torch.zeros_like(wanted_T)[:, None]
    above_T2 = torch.zeros(num_rows, 2, dtype=torch.int64, device=size_TW.device)  # tokens, mass
    each_TW2 = torch.stack([torch.ones_like(mass_TW), mass_TW], dim=-1)
    here_T2 = above_T2
    for shift in (24, 16, 8, 0):
        digit_TW = (size_TW >> shift) & (_BINS - 1)
        is_live_TW = (size_TW >> (shift + _BITS)) == prefix_T1
        bins_T = torch.zeros(num_rows, _BINS, 2, dtype=torch.int64, device=size_TW.device)
        live_TW2 = each_TW2 * is_live_TW[..., None]
        bins_T.scatter_add_(1, digit_TW[..., None].expand(-1, -1, 2), live_TW2)
        bins_T = part.total(bins_T)
        sums_T = above_T2[:, None] + bins_T.cumsum(dim=1)
        # Without so much in all bins: the last bin that holds any.
        last_T1 = (bins_T[..., 0] > 0).long().mul(torch.arange(_BINS, device=size_TW.device)).amax(1, keepdim=True)
        chosen_T1 = (sums_T[..., int(by_mass)] < wanted_T[:, None]).sum(dim=1, keepdim=True).minimum(last_T1)
        pick_T12 = chosen_T1[..., None].expand(-1, -1, 2)
        here_T2 = bins_T.gather(1, pick_T12)[:, 0]
        above_T2 = sums_T.gather(1, pick_T12)[:, 0] - here_T2
        prefix_T1 = (prefix_T1 << _BITS) | chosen_T1
    num_here_T, mass_here_T = here_T2.unbind(dim=1)
    mass_each_T = (mass_here_T // num_here_T.clamp_min(1)).clamp_min(1)
    missing_T = wanted_T - above_T2[:, int(by_mass)]
    # As many as are missing, rounded up; not by adding first, which overflows where there is no cut.
    num_ties_T = (missing_T - 1) // mass_each_T + 1 if by_mass else missing_T
    num_ties_T = num_ties_T.minimum(num_here_T)
    return _Cut(prefix_T1[:, 0], num_ties_T, above_T2[:, 1] + num_ties_T * mass_each_T)


def _max_and_exp_sum(logits_TW: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, and the sum of exponentials relative to it."""
    # Of a part, all tokens may be left out; their sum is 0 then, relative to anything.
    largest_T = logits_TW.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
    return largest_T, (logits_TW - largest_T[:, None]).exp().sum(dim=-1)


def _log_sum(log_sum_by_rank: Tensor) -> Tensor:
    """log of all ranks' sums of exponentials."""
    largest_by_rank, sum_by_rank = log_sum_by_rank.unbind(dim=1)
    largest_T = largest_by_rank.amax(dim=0)
    return ((sum_by_rank * (largest_by_rank - largest_T).exp()).sum(dim=0).log() + largest_T).float()
