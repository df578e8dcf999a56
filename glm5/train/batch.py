"""A batch of packed sequences: token ids, the loss weight of each token, and further columns for other losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.kernels.sampled_logprobs import Kept


@dataclass(frozen=True)
class Targets:
    """Tokens that are predicted: the positions that predict them (of hidden states), their ids, the numbers of their
    sequences in the batch, all int64 [G]; and their entries in the batch's columns of one number a token, [G] each.

    `index_G`: where they are in the columns of the whole batch, in host memory.
    """

    position_G: Tensor
    id_G: Tensor
    sequence_G: Tensor
    columns: Mapping[str, Tensor]
    kept: Kept | None
    index_G: Tensor

    def take(self, chosen_N: Tensor) -> "Targets":
        """Those of the given numbers, int64 [N] on the device."""
        columns = {name: column[chosen_N] for name, column in self.columns.items()}
        kept = None if self.kept is None else self.kept.take(chosen_N)
        indices = (self.position_G[chosen_N], self.id_G[chosen_N], self.sequence_G[chosen_N])
        return Targets(*indices, columns, kept, self.index_G[chosen_N.to(self.index_G.device)])


@dataclass(frozen=True)
class Batch:
    """Token ids [T], the loss weight [T] of predicting each of them (0: context only), and the sequences' lengths.

    `columns`: further values of each token by name, [T, ...] in host memory; like a weight, entry t is about the
    prediction of token t. `kept`: the vocabulary from which each token was sampled, in host memory, if recorded.
    `on_host`: the same batch in host memory, where results that depend on values need no GPU synchronisation.
    """

    ids_T: Tensor
    weight_T: Tensor
    lengths: list[int]
    on_host: "Batch | None" = None
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    kept: Kept | None = None

    def __post_init__(self) -> None:
        if not len(self.ids_T) == len(self.weight_T) == sum(self.lengths) or min(self.lengths, default=0) < 1:
            raise ValueError(f"a batch of {len(self.ids_T)} ids, {len(self.weight_T)} weights, {self.lengths=}")
        sizes = {name: len(column) for name, column in self.columns.items()}
        sizes |= {} if self.kept is None else {"kept": len(self.kept.count_T)}
        if wrong := {name: size for name, size in sizes.items() if size != len(self.ids_T)}:
            raise ValueError(f"a batch of {len(self.ids_T)} ids has columns of other lengths: {wrong}")

    def to(self, device: torch.device | str) -> "Batch":
        moved = (_moved(self.ids_T, device), _moved(self.weight_T, device))
        on_host = self if self.ids_T.is_cpu and moved[0].is_cuda else self.on_host
        return Batch(*moved, self.lengths, on_host, self.columns, self.kept)

    def targets(self, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        """(positions p, targets, weights), each [G]: targets are the tokens p + distance of the same sequence whose
        weight is not 0."""
        if self.on_host is not None:
            position_G, target_G, weight_G = self.on_host.targets(distance)
            device = self.ids_T.device
            return _moved(position_G, device), _moved(target_G, device), _moved(weight_G, device)
        position_T, end_T = self._places()
        chosen_T = (position_T + distance < end_T) & (self.weight_T.roll(-distance) != 0)
        position_G = position_T[chosen_T]
        return position_G, self.ids_T[position_G + distance], self.weight_T[position_G + distance]

    def targets_of(self, names: Sequence[str]) -> Targets:
        """The tokens that are not 0 in one of these columns, predicted from the token before. Columns that the batch
        does not have are 0; the first token of a sequence is never predicted."""
        row_T = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        chosen_T = torch.zeros(len(row_T), dtype=torch.bool)
        for name in names:
            if name in self.columns:
                chosen_T |= self.columns[name] != 0
        chosen_T[0] = False
        chosen_T[1:] &= row_T[1:] == row_T[:-1]
        index_G, device = chosen_T.nonzero()[:, 0], self.ids_T.device
        kept = None if self.kept is None else self.kept.take(index_G)
        return Targets(
            _moved(index_G - 1, device),
            self.ids_T[_moved(index_G, device)],
            _moved(row_T[index_G], device),
            {name: _moved(column[index_G], device) for name, column in self.columns.items() if column.dim() == 1},
            None if kept is None else Kept(*(_moved(one, device) for one in kept)),
            index_G,
        )

    def weight_of_targets(self, distance: int) -> float:
        """The sum of the weights of `targets`."""
        return (self.on_host or self).targets(distance)[2].sum().item()

    def ids_after(self, distance: int) -> Tensor:
        """The token p + distance for each position p, [T]; beyond the end of the sequence, its last token."""
        if self.on_host is not None:
            return _moved(self.on_host.ids_after(distance), self.ids_T.device)
        position_T, end_T = self._places()
        return self.ids_T[torch.minimum(position_T + distance, end_T - 1)]

    def _places(self) -> tuple[Tensor, Tensor]:
        """Positions 0 .. T - 1, and the end of each position's sequence, [T] each."""
        lengths_B = torch.tensor(self.lengths, device=self.ids_T.device)
        end_T = torch.repeat_interleave(lengths_B.cumsum(0), lengths_B)
        return torch.arange(len(self.ids_T), device=self.ids_T.device), end_T


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor.to(device)`, through pinned memory for a GPU: a copy from pageable memory would wait for it."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
