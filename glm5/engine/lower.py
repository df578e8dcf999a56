"""The model in its inference form: the same weights, run by fused kernels, rule by rule.

    residual add, norm (and quantization)      one kernel: `add_rms_norm`, handed from layer to layer (between.py)
    index key, query and key products of x     one product: a `Stack` of wk, q_a, kv_a; two where wk is of another kind
    norms, rotation, both writes to the cache  one kernel: `mla_keys`
    queries of attention and indexer           one product, absorbed and rotated by one kernel: `mla_queries`
    every visible key is read                  the indexer's queries are not computed
    prompts that begin in this pass            heads' keys and values expanded: `prompt_attention`; of ranks that share
                                               a model, in two halves (halves.py)
    routed and shared experts                  one sum: `grouped_experts` with `shared`, or terms, added up later
    gate and up of dense layers                one product, and one kernel for the gated unit
    what products of codes or FP8 read         quantized by whoever makes it
    angles of positions                        looked up

Rules change how sums are rounded, never what is computed; tests/unit/engine/test_lower.py holds each to the model's own
modules. lower_layer.py has the layers, `Lowered` the calls of `Glm5` that a runner makes. What it derives from weights
it derives again in `refresh`; everything else are views.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from glm5.engine.between import Between, between_of
from glm5.engine.halves import in_halves, suits_halves
from glm5.engine.lower_layer import LoweredLayer, LoweredMoE
from glm5.engine.view import StepView
from glm5.kernels.grouped_experts import Terms
from glm5.kernels.rope import rope_table
from glm5.model.block import DecoderLayer
from glm5.model.glm5 import Glm5
from glm5.model.norm import RMSNorm
from glm5.model.seams import Rope, Selection
from glm5.parallel.group import ALONE, Group


def _kind(layer: LoweredLayer) -> tuple[object, ...]:
    """What the kernels of a layer follow from: which weights there are, their shapes and types."""
    return tuple((name, weight.shape, weight.dtype) for name, weight in layer.module.state_dict(keep_vars=True).items())


def _last(new: Tensor | Terms | None, residual_OD: Tensor, norm: RMSNorm, between: Between) -> Tensor:
    """The stream behind the last layer, normed, all rows of it."""
    if new is None:
        return between.whole(norm(residual_OD))
    return between.whole(between.join(new, residual_OD, norm, None)[0].x_TD)


class Lowered:
    """The inference form of `model`, which stays the owner of its weights. `max_len`: positions that are asked for."""

    def __init__(self, model: Glm5, max_len: int, group: Group = ALONE):
        cfg, trunk = model.cfg, model.model
        self.model, self.group = model, group
        decoders = [layer for layer in trunk.layers if isinstance(layer, DecoderLayer)]
        self.layers = [LoweredLayer(layer) for layer in decoders]
        self._run: Sequence[int] = range(cfg.num_hidden_layers)
        positions = torch.arange(max_len, device=model.device)
        self._cos_NR2, self._sin_NR2 = rope_table(positions, cfg.qk_rope_head_dim, cfg.rope_theta, model.dtype)

    @property
    def place(self) -> tuple[int, ...]:
        """Where the weights lie: what a captured graph depends on."""
        tensors = (tensor.data_ptr() for tensor in self.model.state_dict(keep_vars=True).values())
        return tuple(tensors)

    def refresh(self) -> None:
        """Other weights lie in the model, perhaps elsewhere."""
        for layer in self.layers:
            for stack in (*layer.attention.stacks, *layer.mlp.stacks):
                stack.join()
            layer.attention.refresh()

    def record_routing(self) -> list[list[Tensor]]:
        """From now on, lists that get the experts of each pass, one a MoE layer; the MTP layer's are not."""
        heard: list[list[Tensor]] = []
        for layer in islice(self.layers, self.model.cfg.num_hidden_layers):
            if isinstance(layer.mlp, LoweredMoE):
                layer.mlp.heard = []
                heard.append(layer.mlp.heard)
        return heard

    def stop_recording(self) -> None:
        for layer in self.layers:
            if isinstance(layer.mlp, LoweredMoE):
                layer.mlp.heard = None

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Meanwhile `hidden` runs one decoder layer of each kind: all kernels that there are, no results."""
        kinds = {
            _kind(layer): layer_idx for layer_idx, layer in reversed(list(enumerate(self.layers[: len(self._run)])))
        }
        whole, self._run = self._run, sorted(kinds.values())
        try:
            yield
        finally:
            self._run = whole

    def hidden(self, ids_T: Tensor, view: StepView) -> Tensor:
        """`Glm5.forward`."""
        cfg, rope, between = self.model.cfg, self._rope(view.positions_T), between_of(self.group, len(ids_T))
        x_TD = self.model.model.embed_tokens(ids_T)
        if suits_halves(between, view, cfg.index_topk):
            layers = [self.layers[layer_idx] for layer_idx in self._run]
            return in_halves(layers, self.model.model.norm, x_TD, rope, view, between)
        new, residual_OD, selection = None, between.mine(x_TD), None
        for layer_idx in self._run:
            inherited = None if cfg.has_indexer(layer_idx) else selection
            layer = self.layers[layer_idx]
            new, residual_OD, selection = layer(new, residual_OD, rope, view, inherited, between)
        return _last(new, residual_OD, self.model.model.norm, between)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """`Glm5.head`."""
        return self.model.head(hidden_TD)

    def draft(
        self, next_ids_T: Tensor, hidden_TD: Tensor, view: StepView, selection: Selection | None = None
    ) -> tuple[Tensor, Selection]:
        """`Glm5.draft`."""
        layer, mtp = self.layers[self.model.cfg.num_hidden_layers], self.model.mtp
        between, rope = between_of(self.group, len(next_ids_T)), self._rope(view.positions_T)
        merged_OD = between.mine(mtp.merge(self.model.model.embed_tokens(next_ids_T), hidden_TD))
        new, residual_OD, used = layer(None, merged_OD, rope, view, selection, between)
        return mtp.handed_on(_last(new, residual_OD, mtp.shared_head.norm, between)), used

    def _rope(self, positions_T: Tensor) -> Rope:
        # Rows that are nobody's may lie beyond.
        place_T = positions_T.clamp_max(len(self._cos_NR2) - 1)
        return Rope(self._cos_NR2.index_select(0, place_T), self._sin_NR2.index_select(0, place_T), None)
