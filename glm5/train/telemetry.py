"""What is watched beside the losses: attention logits of every head, and how far each matrix moves.

Large attention logits come before divergence; Muon Split is there to keep them small without clipping (GLM-5 report),
and heads whose updates starve show in the root mean square of an update.
"""

import torch
from torch import Tensor

from glm5.kernels.tiles import TileReader, dense_logits, plan_tiles
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView, Stage
from glm5.model.seams import Selection
from glm5.train.batch import Batch
from glm5.train.optim.build import Optimizers
from glm5.train.step import Phase


class LogitView(PackedView):
    """A view that also notes the largest logit of each head over the keys it reads: `largest[layer_idx]` is [H]."""

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu", *, stage: Stage = "sparse"):
        super().__init__(lengths, device, stage=stage)
        self.largest: dict[int, Tensor] = {}

    def attend_expanded(self, *_args: object, **_kwargs: object) -> None:
        """Never: the logits of absorbed queries are looked at here."""

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        reader = TileReader(self.page_table_BN, self._latent_PZL.shape[1])
        largest_H = q_THL.new_full((q_THL.shape[1],), float("-inf"), dtype=torch.float32)
        for tile in plan_tiles(self.row_T, self.end_T, q_THL.shape[1]):
            part = tile.queries
            logits_THS = dense_logits(q_THL[part].float(), reader.read(self._latent_PZL, tile).float(), scale)
            if selection.keys_TK is None:
                keys = torch.arange(tile.num_keys, device=q_THL.device)
            else:
                keys = selection.keys_TK[part].long()
                inside = keys.clamp(0, tile.num_keys - 1).unsqueeze(1).expand(-1, q_THL.shape[1], -1)
                logits_THS = logits_THS.gather(2, inside)
            hidden_TK = (keys < 0) | (keys >= self.end_T[part, None])
            tile_H = logits_THS.masked_fill(hidden_TK.unsqueeze(1), float("-inf")).amax(dim=(0, 2))
            largest_H = torch.maximum(largest_H, tile_H)
        self.largest[layer_idx] = largest_H
        return super().attend(layer_idx, q_THL, selection, scale=scale, value_dim=value_dim)


@torch.no_grad()
def attention_logits(model: Glm5, batch: Batch, phase: Phase) -> dict[int, list[float]]:
    """The largest attention logit of each head, by layer, over a batch. A pass of its own, for every so many steps."""
    view = LogitView(batch.lengths, batch.ids_T.device, stage=phase.keys)
    model(batch.ids_T, view)
    return {layer_idx: largest_H.tolist() for layer_idx, largest_H in view.largest.items()}


def update_rms(optimizers: Optimizers) -> dict[str, float]:
    """Root mean square of the last update of each of Muon's parameters at learning rate 1; {} unless it is watched.

    Full matrices move by about 0.19: rms times the mean singular value that the polynomials leave.
    """
    if optimizers.muon is None:
        return {}
    seen = optimizers.muon.update_rms
    return {name: seen[weight].item() for name, weight in optimizers.named.items() if weight in seen}
