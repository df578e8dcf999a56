"""Multi-token prediction: one more decoder layer that guesses the token after the next (model spec, section 3.10).

    z_p = Weh [ norm_e(embed(t_{p+1})) ; norm_h(H_p) ]    H'_p = norm(layer(z_p))    logits = head(H'_p) -> t_{p+2}

H is the target's hidden state after its final norm. To draft further, the same layer is applied again with the
drafted token, its own H' and the next position; embedding and head are the main model's.
"""

import torch
from torch import Tensor, nn

from glm5.config.model import ModelConfig
from glm5.model.block import DecoderLayer
from glm5.model.linear import Linear
from glm5.model.norm import RMSNorm
from glm5.model.seams import KVView, Rope, Selection


class SharedHead(nn.Module):
    """Holds `shared_head.norm`; the projection itself is the main model's lm_head."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)


class Rotation(nn.Module):
    """x times `weight` [D, D]."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class MTPLayer(DecoderLayer):
    """Layer `num_hidden_layers` of the checkpoint: a decoder layer behind a merge of embedding and hidden state.

    Where quantization has rotated the residual stream, the target's hidden state lacks the final norm's weight and has
    another basis. `hidden_rotation` makes of it what this layer reads, `chained_rotation` makes of H' what the target
    would have handed on: so drafts of drafts are drafts like any, and the main model's head is right for both.
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__(cfg, cfg.num_hidden_layers)
        self.enorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hnorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.eh_proj = Linear(2 * cfg.hidden_size, cfg.hidden_size)
        self.shared_head = SharedHead(cfg)
        self.hidden_rotation: Rotation | None = None
        self.chained_rotation: Rotation | None = None

    def merge(self, embed_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """[T, D]."""
        return self.eh_proj(self.side_by_side(embed_TD, hidden_TD))

    def side_by_side(self, embed_TD: Tensor, hidden_TD: Tensor) -> Tensor:
        """Both normed, embedding first, hidden state second: [T, 2D]."""
        if self.hidden_rotation is not None:
            hidden_TD = self.hidden_rotation(hidden_TD)
        return torch.cat([self.enorm(embed_TD), self.hnorm(hidden_TD)], dim=-1)

    def draft(
        self, embed_TD: Tensor, hidden_TD: Tensor, rope: Rope, view: KVView, selection: Selection | None
    ) -> tuple[Tensor, Selection]:
        """H' [T, D] and the selection used. A given selection is reused and the indexer not run."""
        # Not through hooks: FSDP's are around this method; run inside it too, torch 2.11 frees what is merged with.
        x_TD, used = self.forward(self.merge(embed_TD, hidden_TD), rope, view, selection)
        return self.handed_on(self.shared_head.norm(x_TD)), used

    def handed_on(self, normed_TD: Tensor) -> Tensor:
        """H' as the head and a next draft read it."""
        return normed_TD if self.chained_rotation is None else self.chained_rotation(normed_TD)

    def add_rotations(self) -> None:
        """Give it both rotations, uninitialised, on its device."""
        width, device = self.enorm.weight.shape[0], self.enorm.weight.device
        with torch.device(device):
            self.hidden_rotation, self.chained_rotation = Rotation(width), Rotation(width)
