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
from glm5.kernels.top_k import top_k

_BITS, _BINS = 8, 256  # of each of four passes over the 31 bits of a magnitude
_NO_CUT = torch.iinfo(torch.int64).max
# Logits among which cuts are sought at a time: a search takes SEARCH_BYTES for each.
MOST_SOUGHT, SEARCH_BYTES = 1 << 22, 92


class Exchange(Protocol):
    """What sampling asks of the ranks."""

    def all_gather(self, part: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class VocabShard(Vocabulary):
    """This rank's token ids, the rank-th part of all."""

    exchange: Exchange
    rank: int

    def best(self, values_RW: Tensor) -> Best:
        mine = values_RW.max(dim=-1)
        pairs_2R = torch.stack([mine.values.double(), (mine.indices + self.first).double()])
        value_NR, token_NR = self.exchange.all_gather(pairs_2R).unbind(dim=1)
        value_R = value_NR.amax(dim=0)
        token_R = token_NR.masked_fill(value_NR != value_R, torch.inf).amin(dim=0)
        return Best(value_R.float(), token_R.masked_fill(token_R.isinf(), 0).long())

    def total(self, part: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self.exchange.all_gather(part).sum(dim=0)

    def keep_head(self, z_RW: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> None:
        num_rows = max(1, MOST_SOUGHT // self.size)
        for rows in (slice(first, first + num_rows) for first in range(0, len(z_RW), num_rows)):
            z_RW[rows].masked_fill_(_dropped(z_RW[rows], top_k_R[rows], top_p_R[rows], self), -torch.inf)

    def logprobs(
        self, logits_RW: Tensor, token_R: Tensor, drawn_from_RW: Tensor | None, num_likeliest: int
    ) -> Logprobs:
        logits_RW = logits_RW.float()
        drawn_from_RW = logits_RW if drawn_from_RW is None else drawn_from_RW
        place_R = token_R - self.first
        is_mine_R = (place_R >= 0) & (place_R < self.size)
        rows: list[Tensor] = []
        for each_RW in (logits_RW, drawn_from_RW):
            mine_R = each_RW.gather(1, place_R.clamp(0, self.size - 1)[:, None])[:, 0]
            rows += [torch.where(is_mine_R, mine_R, 0.0), *_spread(each_RW)]
        said_NXR = self.exchange.all_gather(torch.stack([row.double() for row in rows]))
        chosen_R, drawn_R = said_NXR[:, 0].sum(dim=0).float(), said_NXR[:, 3].sum(dim=0).float()
        whole_R, tempered_R = _log_sum(said_NXR[:, 1:3]), _log_sum(said_NXR[:, 4:6])
        logprob_RW = logits_RW - whole_R[:, None]
        logprob_R = chosen_R - whole_R
        num_above_R = (logprob_RW > logprob_R[:, None]).sum(dim=-1)
        count = min(num_likeliest, self.size)
        columns = [num_above_R[:, None]]
        if count:
            chosen_RN = top_k(logprob_RW, count).long().clamp_min_(0)
            tempered_RN = drawn_from_RW.gather(1, chosen_RN) - tempered_R[:, None]
            columns += [logprob_RW.gather(1, chosen_RN), chosen_RN + self.first, tempered_RN]
        said_NRX = self.exchange.all_gather(torch.cat([column.double() for column in columns], dim=1))
        rank_R = said_NRX[..., 0].sum(dim=0).long() + 1
        # Ranks' ids ascend, and so do each rank's: a stable sort leaves equals in the order of their ids.
        values_RN, ids_RN, tempered_RN = (
            said_NRX[..., 1 + k * count : 1 + (k + 1) * count].transpose(0, 1).flatten(1).float() for k in range(3)
        )
        best = values_RN.sort(dim=-1, descending=True, stable=True)
        first_RN = best.indices[:, :num_likeliest]
        return Logprobs(
            logprob_R,
            drawn_R - tempered_R,
            rank_R,
            ids_RN.gather(1, first_RN).long(),
            values_RN.gather(1, first_RN),
            tempered_RN.gather(1, first_RN),
        )


class _Cut(NamedTuple):
    """Per row: magnitude of the last value kept, how many of those equal to it are kept; the mass of all kept."""

    last_R: Tensor
    num_ties_R: Tensor
    mass_R: Tensor


def _dropped(z_RW: Tensor, top_k_R: Tensor, top_p_R: Tensor, part: VocabShard) -> Tensor:
    """Mask [R, W] of this rank's tokens that top_k and then top_p leave out."""
    # No z is above 0, so the larger it is the smaller are its bits without the sign.
    size_RW = (z_RW.view(torch.int32) & 0x7FFFFFFF).long()
    mass_RW = (z_RW.exp() * ONE).long()
    count_R = torch.where(top_k_R > 0, top_k_R, _NO_CUT)
    by_count = _find_cut(size_RW, mass_RW, count_R, part, by_mass=False)
    wanted_R = (top_p_R.double() * by_count.mass_R.double()).ceil().long().clamp_min(1)
    by_mass = _find_cut(size_RW, mass_RW, torch.where(top_p_R < 1, wanted_R, _NO_CUT), part, by_mass=True)
    last_R = torch.minimum(by_count.last_R, by_mass.last_R)
    ties = [torch.where(cut.last_R == last_R, cut.num_ties_R, _NO_CUT) for cut in (by_count, by_mass)]
    tied_RW = size_RW == last_R[:, None]
    num_tied_NR = part.exchange.all_gather(tied_RW.sum(dim=-1))
    left_R = torch.minimum(*ties) - num_tied_NR[: part.rank].sum(dim=0)
    return (size_RW > last_R[:, None]) | (tied_RW & (tied_RW.cumsum(dim=-1) > left_R[:, None]))


def _find_cut(size_RW: Tensor, mass_RW: Tensor, wanted_R: Tensor, part: VocabShard, *, by_mass: bool) -> _Cut:
    """The cut behind which `wanted_R` tokens, or so much mass, are kept; all, if there are not so many."""
    num_rows = len(size_RW)
    prefix_R1 = torch.zeros_like(wanted_R)[:, None]
    above_R2 = torch.zeros(num_rows, 2, dtype=torch.int64, device=size_RW.device)  # tokens, mass
    each_RW2 = torch.stack([torch.ones_like(mass_RW), mass_RW], dim=-1)
    here_R2 = above_R2
    for shift in (24, 16, 8, 0):
        digit_RW = (size_RW >> shift) & (_BINS - 1)
        is_live_RW = (size_RW >> (shift + _BITS)) == prefix_R1
        bins_RX2 = torch.zeros(num_rows, _BINS, 2, dtype=torch.int64, device=size_RW.device)
        live_RW2 = each_RW2 * is_live_RW[..., None]
        bins_RX2.scatter_add_(1, digit_RW[..., None].expand(-1, -1, 2), live_RW2)
        bins_RX2 = part.total(bins_RX2)
        sums_RX2 = above_R2[:, None] + bins_RX2.cumsum(dim=1)
        # Without so much in all bins: the last bin that holds any.
        last_R1 = (bins_RX2[..., 0] > 0).long().mul(torch.arange(_BINS, device=size_RW.device)).amax(1, keepdim=True)
        chosen_R1 = (sums_RX2[..., int(by_mass)] < wanted_R[:, None]).sum(dim=1, keepdim=True).minimum(last_R1)
        pick_R12 = chosen_R1[..., None].expand(-1, -1, 2)
        here_R2 = bins_RX2.gather(1, pick_R12)[:, 0]
        above_R2 = sums_RX2.gather(1, pick_R12)[:, 0] - here_R2
        prefix_R1 = (prefix_R1 << _BITS) | chosen_R1
    num_here_R, mass_here_R = here_R2.unbind(dim=1)
    mass_each_R = (mass_here_R // num_here_R.clamp_min(1)).clamp_min(1)
    missing_R = wanted_R - above_R2[:, int(by_mass)]
    # As many as are missing, rounded up; not by adding first, which overflows where there is no cut.
    num_ties_R = (missing_R - 1) // mass_each_R + 1 if by_mass else missing_R
    num_ties_R = num_ties_R.minimum(num_here_R)
    return _Cut(prefix_R1[:, 0], num_ties_R, above_R2[:, 1] + num_ties_R * mass_each_R)


def _spread(logits_RW: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row, and the sum of exponentials relative to it."""
    # Of a part, all tokens may be left out; their sum is 0 then, relative to anything.
    largest_R = logits_RW.amax(dim=-1).clamp_min(torch.finfo(torch.float32).min)
    return largest_R, (logits_RW - largest_R[:, None]).exp().sum(dim=-1)


def _log_sum(spread_N2R: Tensor) -> Tensor:
    """log of all ranks' sums of exponentials."""
    largest_NR, sum_NR = spread_N2R.unbind(dim=1)
    largest_R = largest_NR.amax(dim=0)
    return ((sum_NR * (largest_NR - largest_R).exp()).sum(dim=0).log() + largest_R).float()
