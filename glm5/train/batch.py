"""What a pass trains on: sequences one after the other, and how much each token counts as something to predict."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Token ids [T], the weight [T] of predicting each of them (0: context only), and the sequences' lengths.

    `on_host`: the same in host memory, where what depends on values is found without waiting for a GPU.
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
        """Positions p whose token p + distance counts and is of the same sequence; these tokens; their weights."""
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
        """The token at p + distance of each position p, [T]; past the end of its sequence, the sequence's last."""
        if self.on_host is not None:
            return _moved(self.on_host.ids_after(distance), self.ids_T.device)
        position_T, end_T = self._places()
        return self.ids_T[torch.minimum(position_T + distance, end_T - 1)]

    def _places(self) -> tuple[Tensor, Tensor]:
        """Each position, and where its sequence ends."""
        lengths_B = torch.tensor(self.lengths, device=self.ids_T.device)
        end_T = torch.repeat_interleave(lengths_B.cumsum(0), lengths_B)
        return torch.arange(len(self.ids_T), device=self.ids_T.device), end_T


def _moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Where copying from pageable memory would wait for what a GPU does, it goes through pinned memory."""
    if tensor.is_cpu and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
