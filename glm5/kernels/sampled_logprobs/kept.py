"""The vocabularies that top_k, top_p and min_p left to each row, as one list."""

from typing import NamedTuple

import torch
from torch import Tensor


class Kept(NamedTuple):
    """`ids_N`: the token ids (int64) of all rows, one row after the other. `count_T`: of each row (int64), 0 for all
    tokens."""

    ids_N: Tensor
    count_T: Tensor

    def take(self, row_G: Tensor) -> "Kept":
        """The vocabularies of some rows (int64 [G], on the device of the ids)."""
        count_G = self.count_T[row_G]
        start_G = (self.count_T.cumsum(0) - self.count_T)[row_G]
        offset_N = torch.arange(int(count_G.sum()), device=row_G.device)
        first_G = count_G.cumsum(0) - count_G
        return Kept(self.ids_N[offset_N + torch.repeat_interleave(start_G - first_G, count_G)], count_G)

    def rows(self, start: int, stop: int) -> "Kept":
        """The vocabularies of consecutive rows."""
        skipped, taken = int(self.count_T[:start].sum()), int(self.count_T[start:stop].sum())
        return Kept(self.ids_N[skipped : skipped + taken], self.count_T[start:stop])

    def dropped(self, vocab_size: int) -> Tensor:
        """Mask [T, W] of the tokens that a row does not have."""
        num_rows = len(self.count_T)
        row_N = torch.repeat_interleave(torch.arange(num_rows, device=self.count_T.device), self.count_T)
        dropped_TW = (self.count_T > 0)[:, None].expand(num_rows, vocab_size).clone()
        dropped_TW[row_N, self.ids_N] = False
        return dropped_TW
