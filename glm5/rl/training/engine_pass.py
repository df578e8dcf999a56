"""Packed sequences through a deterministic engine's own prompt pass: the same layers, kernels and shapes.

What a row of a deterministic engine is does not depend on the rows beside it (docs/numerics.md), so a pass over whole
sequences gives each token the bits that it had when the engine drew it, whatever the engine had batched, cached and
guessed. The input of every layer is kept, and what layers chose: selected keys and experts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.engine.arithmetic import arithmetic_of, runs_native
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.forward.routing import RoutingRecord
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.engine.runner.inputs.view import StepView
from glm5.engine.runner.native import NativeLayer
from glm5.kernels.invariant import pass_rows
from glm5.kernels.upload import upload
from glm5.model.glm5 import Glm5
from glm5.model.lowering import rows_are_alone, use_invariant
from glm5.model.moe import MoE
from glm5.model.seams import Selection

MOST_ROWS = 2**15
"""Rows that go through the model at once: kernels have a program for each, and a grid at most 65,535 of them."""


@dataclass
class Trace:
    """Of packed sequences: the input of each layer and the output of the last one, [T, D] each; the hidden states
    behind the final norm; of each layer the keys that its rows read, int32 [T, index_topk] or None for all that they
    see; and experts int16 [T, MoE layers, A]."""

    streams: list[Tensor]
    hidden_TD: Tensor
    keys: list[Tensor | None]
    expert_TLA: Tensor


class EnginePass:
    """`model`: an engine's, over weights that do not learn; it is changed in place. `fused`: the form of the model for
    GPUs, by default on a GPU, as in an engine."""

    def __init__(self, model: Glm5, fused: bool | None = None):
        fused = model.device.type == "cuda" if fused is None else fused
        self.model, self.is_native = model, not fused and runs_native(model, by_layer=True)
        if not self.is_native:
            use_invariant(model)
        form = FusedModel(model, model.cfg.max_position_embeddings) if fused else None
        # As many rows as possible, where a row does not depend on how many there are.
        is_whole = self.is_native or rows_are_alone(model)
        self.passes = Passes(model, MOST_ROWS if is_whole else pass_rows(model.device), form)
        self._pass_rows = pass_rows(model.device)
        self.arithmetic = arithmetic_of(model, is_native=self.is_native)
        self._layers = list(model.model.layers)[: model.cfg.num_hidden_layers]
        self._streams, self._keys = list[Tensor](), list[Tensor | None]()
        self._observe()
        self._routing = None if self.is_native else RoutingRecord(self.passes)

    def weights_changed(self) -> None:
        """The model's weights have other values."""
        if self.is_native:
            runs_native(self.model, by_layer=True)
        self.passes.weights_changed()

    @torch.no_grad()
    def run(self, ids_T: Tensor, lengths: list[int]) -> Trace:
        """The trace of sequences of these lengths, one after another in `ids_T`, each from position 0 on."""
        count = len(ids_T)
        padded = self._round_up(count)
        view = self._view(lengths, padded)
        self._clear()
        hidden_TD = self.passes.hidden(torch.nn.functional.pad(ids_T, (0, padded - count)), view)
        streams, keys, num_layers = self._streams, self._keys, len(self._layers)
        # Pass after pass, layer after layer.
        traced = [torch.cat(streams[index :: num_layers + 1])[:count] for index in range(num_layers + 1)]
        selected = [_joined(keys[index :: num_layers + 1], count) for index in range(num_layers)]
        trace = Trace(traced, hidden_TD[:count], selected, self._experts()[:count])
        self._clear()
        return trace

    def head(self, hidden_GD: Tensor) -> Tensor:
        """Logits [G, W] of hidden states."""
        count = len(hidden_GD)
        missing = self._round_up(count) - count
        return self.passes.logits(torch.nn.functional.pad(hidden_GD, (0, 0, 0, missing)))[:count]

    def _view(self, lengths: list[int], num_rows: int) -> StepView:
        """Each sequence has pages of its own, in order; rows beyond the last are padding."""
        model = self.model
        pages = -(-np.array(lengths) // PAGE_SIZE)
        first_B = np.cumsum(pages) - pages
        cache = KVCache(model.cfg, int(pages.sum()), dtype=model.dtype, device=model.device)
        columns = np.arange(pages.max())
        table_BP = np.where(columns < pages[:, None], first_B[:, None] + columns, cache.dump_page)
        group_T = np.repeat(np.arange(len(lengths)), lengths)
        position_T = np.concatenate([np.arange(length) for length in lengths])
        place_T = first_B[group_T] * PAGE_SIZE + position_T
        missing = (0, num_rows - len(group_T))
        return StepView(
            cache=cache,
            table_BP=upload(table_BP.astype(np.int32), model.device),
            positions_T=upload(np.pad(position_T, missing), model.device),
            group_T=upload(np.pad(group_T, missing).astype(np.int32), model.device),
            end_T=upload(np.pad(position_T + 1, missing).astype(np.int32), model.device),
            slot_mapping_T=upload(np.pad(place_T, missing, constant_values=cache.dump_page * PAGE_SIZE), model.device),
            max_end=max(lengths),
            invariant=not self.is_native,
        )

    def _round_up(self, count: int) -> int:
        """To whole passes, of which kernels know the sizes."""
        return count if self.is_native else -(-count // self._pass_rows) * self._pass_rows

    def _observe(self) -> None:
        """Let each pass append its residual streams and selections."""
        if self.passes.fused is not None:
            self.passes.fused.observe = self._see
            return
        for layer in self._layers:
            layer.register_forward_hook(lambda _layer, given, made: self._see(given[0], made[1]))
        self.model.model.norm.register_forward_pre_hook(lambda _norm, given: self._see(given[0], None))

    def _see(self, x_TD: Tensor, selection: Selection | None) -> None:
        self._streams.append(x_TD)
        self._keys.append(None if selection is None else selection.keys_TK)

    def _clear(self) -> None:
        self._streams, self._keys = [], []
        if self._routing is not None:
            self._routing.clear()
        for layer in self._native_layers():
            layer.recorded = []

    def _native_layers(self) -> list[NativeLayer]:
        """Those with experts."""
        found: list[Any] = [layer.impl for layer in self._layers if isinstance(layer.mlp, MoE)]
        return found if self.is_native else []

    def _experts(self) -> Tensor:
        """int16 [T, MoE layers, A]."""
        if not self.model.cfg.has_experts:
            return torch.zeros(sum(map(len, self._streams[:1])), 0, 0, dtype=torch.int16)
        if self._routing is not None:
            return self._routing.experts()
        return torch.cat([torch.cat(layer.recorded or []) for layer in self._native_layers()], dim=1)


def _joined(parts: list[Tensor | None], count: int) -> Tensor | None:
    """The first rows of all parts; None if they see all keys."""
    found = [part for part in parts if part is not None]
    return torch.cat(found)[:count] if found else None
