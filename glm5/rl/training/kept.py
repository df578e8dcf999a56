"""Kept vocabularies: the tokens that top_k, top_p and min_p left when a token was drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """Of G drawn tokens, in host memory: `id_U` int64, the kept token ids of one after those of another, and `count_G`
    int64, how many each has; 0: the whole vocabulary."""

    id_U: Tensor
    count_G: Tensor

    @classmethod
    def of(cls, sets: Sequence[Sequence[int] | None]) -> "Kept":
        """From one list a token; None or an empty list: the whole vocabulary."""
        ids = [token_id for one in sets for token_id in one or ()]
        counts = [len(one or ()) for one in sets]
        return cls(torch.tensor(ids, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64))

    def dropped(self, rows: slice, vocab_size: int, device: torch.device) -> Tensor:
        """Mask [rows, W] of what could not be drawn."""
        count_G = self.count_G[rows]
        first = int(self.count_G[: rows.start].sum())
        id_U = self.id_U[first : first + int(count_G.sum())]
        row_U = torch.repeat_interleave(count_G)
        dropped_GW = (count_G > 0).to(device)[:, None].repeat(1, vocab_size)
        dropped_GW[row_U.to(device), id_U.to(device)] = False
        return dropped_GW
