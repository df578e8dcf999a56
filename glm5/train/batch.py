"""A batch of packed sequences: token ids, and the loss weight of each token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Token ids [T], the loss weight [T] of predicting each of them (0: context only), and the sequences' lengths.

    `on_host`: the same batch in host memory, where results that depend on values need no GPU synchronisation.
    """

    ids_T: Tensor
    weight_T: Tensor
    lengths: list[int]
    on_host: "Batch | None" = None

    def __post_init__(self) -> None:
        if not len(self.ids_T) == len(self.weight_T) == sum(self.lengths) or min(self.lengths, default=0) < 1:
            raise ValueError(f"a batch of {len(self.ids_T)} ids, {len(self.weight_T)} weights, {self.lengths=}")

    def to(self, device: torch.device | str) -> "Batch":
        moved = (_moved(self.ids_T, device), _moved(self.weight_T, device))
        return Batch(*moved, self.lengths, self if self.ids_T.is_cpu and moved[0].is_cuda else self.on_host)

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
