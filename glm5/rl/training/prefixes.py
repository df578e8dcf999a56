"""Packed sequences that begin alike: each distinct prefix is computed once.

What is computed of a token depends on the tokens up to it alone. So where sequences share a prefix (a group's prompt, a
tree's trunk), the first of them owns its tokens, and the others read what was computed of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.model.packed import PackedView
from glm5.model.seams import Selection

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Prefixes:
    """Of B packed sequences with T tokens, U of which end a prefix that none before has.

    place_U: where in the batch they are, those of a sequence in order, and sequences by how many they own: attention
    joins runs of equal length. number_T: for each token, which of them ends the same prefix.
    shared_B: the tokens at the start of each sequence that belong to earlier ones; source_B: an earlier sequence that
    begins with all of these, -1 where there are none.
    """

    place_U: Index
    number_T: Index
    shared_B: Index
    source_B: Index

    @classmethod
    def of(cls, ids_T: Index, lengths: Sequence[int]) -> "Prefixes":
        """Token by token from the start, as long as two sequences are equal: time grows with what is shared."""
        length_B = np.array(lengths)
        start_B = np.cumsum(length_B) - length_B
        owner_T, width = np.arange(len(ids_T)), int(ids_T.max()) + 1
        shared_B, source_B = np.zeros_like(length_B), np.full_like(length_B, -1)
        # Those that share what they have so far with another, and the number of what they have.
        alike, prefix, depth = np.arange(len(length_B)), np.zeros(len(length_B), np.int64), 0
        while len(alike) > 1:
            goes_on = length_B[alike] > depth
            alike, prefix = alike[goes_on], prefix[goes_on]
            longer = prefix * width + ids_T[start_B[alike] + depth]
            _, first, prefix, count = np.unique(longer, return_index=True, return_inverse=True, return_counts=True)
            owner = alike[first][prefix]
            owner_T[start_B[alike] + depth] = start_B[owner] + depth
            depth += 1
            follows = owner < alike
            shared_B[alike[follows]], source_B[alike[follows]] = depth, owner[follows]
            is_shared = count[prefix] > 1
            alike, prefix = alike[is_shared], prefix[is_shared]
        place_U = (owner_T == np.arange(len(ids_T))).nonzero()[0]
        if len(place_U) == len(ids_T):
            return cls.none(lengths)
        num_own_U = np.repeat(length_B - shared_B, length_B)[place_U]
        place_U = place_U[np.argsort(num_own_U, kind="stable")]
        number_T = np.zeros_like(owner_T)
        number_T[place_U] = np.arange(len(place_U))
        return cls(place_U, number_T[owner_T], shared_B, source_B)

    @classmethod
    def none(cls, lengths: Sequence[int]) -> "Prefixes":
        """Nothing is shared, whatever sequences of these lengths have in common; rows are in the batch's order."""
        place_T, count = np.arange(sum(lengths)), len(lengths)
        return cls(place_T, place_T, np.zeros(count, np.int64), np.full(count, -1))

    @property
    def num_saved(self) -> int:
        """Tokens that need not be computed."""
        return len(self.number_T) - len(self.place_U)

    @cached_property
    def waves(self) -> list[Index]:
        """Sequences in the order in which they can be computed: those of a wave read from earlier waves alone."""
        wave_B = np.zeros_like(self.source_B)
        for number, source in enumerate(self.source_B):
            wave_B[number] = 0 if source < 0 else wave_B[source] + 1
        return [(wave_B == wave).nonzero()[0] for wave in range(wave_B.max() + 1)]


class SharedView(PackedView):
    """The view of a forward pass over the U distinct rows: every sequence reads its keys among them."""

    def __init__(self, lengths: list[int], prefixes: Prefixes, device: torch.device):
        super().__init__(lengths, device)
        self._place_U = torch.from_numpy(prefixes.place_U).to(device)
        self._number_T = torch.from_numpy(prefixes.number_T).to(device)
        self._is_all = prefixes.num_saved == 0
        self.positions_T, self.row_T, self.end_T = map(self.first, (self.positions_T, self.row_T, self.end_T))

    def first(self, rows_TX: Tensor) -> Tensor:
        """Of rows of all tokens, the distinct ones."""
        return rows_TX if self._is_all else rows_TX.index_select(0, self._place_U)

    def spread(self, rows_UX: Tensor) -> Tensor:
        """Distinct rows as rows of all tokens."""
        return rows_UX if self._is_all else rows_UX.index_select(0, self._number_T)

    def append_latent(self, layer_idx: int, latent_TL: Tensor) -> None:
        super().append_latent(layer_idx, self.spread(latent_TL))

    def attend_expanded(
        self, layer_idx: int, q_THX: Tensor, w_k_HNC: Tensor, w_v_HVC: Tensor, selection: Selection, *, scale: float
    ) -> Tensor | None:
        given = self.spread(q_THX), w_k_HNC, w_v_HVC, selection
        out_THV = super().attend_expanded(layer_idx, *given, scale=scale)
        return None if out_THV is None else self.first(out_THV)
