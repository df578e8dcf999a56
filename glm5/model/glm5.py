"""The whole model: embedding, decoder layers, final norm, head, and the MTP layer behind them."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.common.errors import RequestError
from glm5.config.model import ModelConfig
from glm5.model.block import DecoderLayer
from glm5.model.linear import Linear
from glm5.model.mtp import MTPLayer
from glm5.model.norm import RMSNorm
from glm5.model.packed import PackedView
from glm5.model.seams import HiddenImpl, KVView, Rope, Selection, TrunkImpl


class Embedding(nn.Module):
    """Rows of `weight` [W, D] by token id."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)


class Trunk(nn.Module):
    """Everything under `model.` in the checkpoint. `layers[num_hidden_layers]` is the MTP layer, if there is one."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.embed_tokens = Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(cfg, i) for i in range(cfg.num_hidden_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        if cfg.num_nextn_predict_layers:
            self.layers.append(MTPLayer(cfg))


class Glm5(nn.Module):
    """A GLM-5 model on one device. Parameters are named as in the checkpoint, experts stacked."""

    impl: HiddenImpl | None = None
    """Another way to compute `forward`."""
    trunk: TrunkImpl | None = None
    """Another way to compute layers one after the other, where it can."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.model = Trunk(cfg)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)
        self.value_head: Linear | None = Linear(cfg.hidden_size, 1) if cfg.value_head else None

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations; weights may be stored in fewer bits."""
        return self.model.norm.weight.dtype

    def forward(self, ids_T: Tensor, view: KVView) -> Tensor:
        """Hidden states [T, D] after the final norm, for packed token ids [T]; the view's keys grow by T."""
        if self.impl is not None:
            return self.impl(ids_T, view)
        x_TD = self.model.embed_tokens(ids_T)
        return self.model.norm(self.through(x_TD, view, range(self.cfg.num_hidden_layers)))

    def through(self, x_TD: Tensor, view: KVView, layers: range) -> Tensor:
        """The residual stream [T, D] behind some consecutive layers, of which the first has an indexer."""
        rope, selection = self._rope(view), None
        if self.trunk is not None and (done := self.trunk(x_TD, rope, view, layers)) is not None:
            return done
        for layer_idx, layer in enumerate(islice(self.model.layers, layers.start, layers.stop), layers.start):
            inherited = None if self.cfg.has_indexer(layer_idx) else selection
            x_TD, selection = layer(x_TD, rope, view, inherited)
        return x_TD

    def head(self, hidden_TD: Tensor) -> Tensor:
        """Logits [T, W] in the model's dtype, of hidden states that `forward` or `draft` returned."""
        return self.lm_head(hidden_TD)

    @torch.no_grad()
    def add_value_head(self) -> None:
        """Give the model a value head, of zeros, where it has none: a scalar of each position's hidden state, such as a
        value or a reward. It is saved and loaded with the checkpoint."""
        if self.value_head is None:
            self.cfg = self.cfg.replace(value_head=True)
            self.value_head = Linear(self.cfg.hidden_size, 1).to(self.model.norm.weight)
            self.value_head.weight.zero_()

    def draft(
        self, next_ids_T: Tensor, hidden_TD: Tensor, view: KVView, selection: Selection | None = None
    ) -> tuple[Tensor, Selection]:
        """One MTP pass at the view's positions p: token ids at p+1 and hidden states at p give H' [T, D].

        `head` of H' predicts the token at p+2. For chained drafts call again, one position on, with the drafted token
        and H'. With `index_share_for_mtp_iteration` the selection of the first pass is handed to the later ones.
        """
        return self.mtp.draft(self.model.embed_tokens(next_ids_T), hidden_TD, self._rope(view), view, selection)

    @property
    def mtp(self) -> MTPLayer:
        """The MTP layer; `ValueError` when the config has none."""
        if not self.cfg.num_nextn_predict_layers:
            raise ValueError("this model has no MTP layer (num_nextn_predict_layers is 0), so it cannot draft")
        layer = self.model.layers[self.cfg.num_hidden_layers]
        assert isinstance(layer, MTPLayer), f"{type(layer)=}"
        return layer

    def logits(self, token_ids: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
        """Logits [..., T, W] for token ids [T] or [B, T]: a list, equally long nested lists, or a tensor."""
        ids = _as_ids(token_ids, self.cfg.vocab_size).to(self.device)
        rows_BT = ids if ids.dim() == 2 else ids.unsqueeze(0)
        view = PackedView([rows_BT.shape[1]] * rows_BT.shape[0], self.device)
        with torch.inference_mode():
            logits_TW = self.head(self(rows_BT.flatten(), view))
        return logits_TW.unflatten(0, ids.shape)

    def _rope(self, view: KVView) -> Rope:
        cfg = self.cfg
        return Rope.at(view.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta, self.model.norm.weight)


def _as_ids(token_ids: Sequence[int] | Sequence[Sequence[int]] | Tensor, vocab_size: int) -> Tensor:
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"token ids must be integers in a list, in equally long nested lists or in a tensor: {error}"
        ) from None
    if ids.dim() not in (1, 2) or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise RequestError(f"token ids must be integers [T] or [B, T], not {ids.dtype} of shape {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RequestError(f"token ids must be in 0..{vocab_size - 1}, got {ids.min().item()}..{ids.max().item()}")
    return ids.long()
