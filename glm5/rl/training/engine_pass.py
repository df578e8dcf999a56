"""Packed sequences through a deterministic engine's own prompt pass: the same layers, kernels and shapes.

What a row of a deterministic engine is does not depend on the rows beside it (docs/numerics.md), so a pass over whole
sequences gives each token the bits that it had when the engine drew it, whatever the engine had batched, cached and
guessed. The input of every layer is kept, and what layers chose: selected keys and experts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glm5.engine.arithmetic import arithmetic_of, runs_native
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.forward.routing import RoutingRecord
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.engine.runner.graphs.passes import can_capture
from glm5.engine.runner.inputs.view import StepView
from glm5.engine.runner.native import NativeLayer
from glm5.kernels.invariant import pass_rows
from glm5.kernels.upload import upload
from glm5.model.glm5 import Glm5
from glm5.model.lowering import rows_are_alone, use_invariant
from glm5.model.moe import MoE
from glm5.model.seams import Selection
from glm5.rl.training.captured_pass import CapturedPasses, Trace
from glm5.rl.training.prefixes import Index, Prefixes

_MOST_ROWS = 2**15  # at once: a GPU's grid has at most 65,535 tiles of rows


class EnginePass:
    """`model`: an engine's, over weights that do not learn; it is changed in place. `fused`: the form of the model for
    GPUs, by default on a GPU, as in an engine."""

    def __init__(self, model: Glm5, fused: bool | None = None):
        fused = model.device.type == "cuda" if fused is None else fused
        self.model, self.is_native = model, not fused and runs_native(model, by_layer=True)
        if not self.is_native:
            use_invariant(model)
        form = FusedModel(model, model.cfg.max_position_embeddings) if fused else None
        # All rows at once, where a row does not depend on how many there are.
        is_whole = self.is_native or rows_are_alone(model)
        self.passes = Passes(model, None if is_whole else pass_rows(model.device), form)
        self._pass_rows = pass_rows(model.device)
        self.arithmetic = arithmetic_of(model, is_native=self.is_native)
        self._layers = list(model.model.layers)[: model.cfg.num_hidden_layers]
        self._streams, self._keys = list[Tensor](), list[Tensor | None]()
        self._observe()
        self._routing = None if self.is_native else RoutingRecord(self.passes)
        self._captures = fused and is_whole and can_capture(model)
        self._captured: CapturedPasses | None = None

    def weights_changed(self) -> None:
        """The model's weights have other values."""
        if self.is_native:
            runs_native(self.model, by_layer=True)
        self.passes.weights_changed()

    @torch.no_grad()
    def run(self, ids_T: Tensor, lengths: list[int], prefixes: Prefixes) -> Trace:
        """The trace of sequences of these lengths, one after another in `ids_T`, each from position 0 on."""
        cache, table_BP = self._pages(lengths)
        row_T = np.repeat(np.arange(len(lengths)), lengths)
        position_T = np.concatenate([np.arange(length) for length in lengths])
        is_first_T = position_T >= prefixes.shared_B[row_T]
        traces, places = list[Trace](), list[Index]()
        for wave in prefixes.waves:
            _share(cache, table_BP, prefixes, wave)
            rows = (is_first_T & np.isin(row_T, wave)).nonzero()[0]
            for first in range(0, len(rows), _MOST_ROWS):  # none where all of it is shared
                place_T = rows[first : first + _MOST_ROWS]
                view = self._view(cache, table_BP, row_T[place_T], position_T[place_T], max(lengths))
                traces.append(self._trace(ids_T[upload(place_T, ids_T.device)], view))
                places.append(place_T)
        number_U = prefixes.number_T[np.concatenate(places)]
        trace = traces[0] if len(traces) == 1 else _joined(traces)
        is_sorted = bool((number_U[1:] > number_U[:-1]).all())
        return trace if is_sorted else trace.rows(upload(np.argsort(number_U), ids_T.device))

    def _trace(self, ids_T: Tensor, view: StepView) -> Trace:
        """Of the rows of a view, which may be followed by padding."""
        if self._captured is not None:
            return self._captured(ids_T, view)
        count = len(ids_T)
        ids_T = torch.nn.functional.pad(ids_T, (0, len(view.positions_T) - count))
        return self._compute(ids_T, view).rows(slice(0, count))

    def _compute(self, ids_T: Tensor, view: StepView) -> Trace:
        """Of all rows of a view."""
        self._clear()
        hidden_TD = self.passes.hidden(ids_T, view)
        streams, keys, step = self._streams, self._keys, len(self._layers) + 1
        # Pass after pass, layer after layer.
        stream_LTD = torch.stack([_cat(streams[index::step]) for index in range(step)])
        reads_all = view.max_end <= self.model.cfg.index_topk
        selected = [None if reads_all else _selected(keys[index::step]) for index in range(step - 1)]
        trace = Trace(stream_LTD, hidden_TD, selected, self._experts())
        self._clear()
        return trace

    def head(self, hidden_GD: Tensor) -> Tensor:
        """Logits [G, W] of hidden states."""
        count = len(hidden_GD)
        missing = self._round_up(count) - count
        return self.passes.logits(torch.nn.functional.pad(hidden_GD, (0, 0, 0, missing)))[:count]

    def _pages(self, lengths: list[int]) -> tuple[KVCache, Index]:
        """A cache in which each sequence has pages of its own, in order, and the page table [B, P]."""
        pages = -(-np.array(lengths) // PAGE_SIZE)
        first_B = np.cumsum(pages) - pages
        cache, columns = self._cache(int(pages.sum())), np.arange(pages.max())
        return cache, np.where(columns < pages[:, None], first_B[:, None] + columns, cache.dump_page)

    def _cache(self, num_pages: int) -> KVCache:
        """One of at least so many pages; graphs keep theirs until more are needed."""
        if self._captured is not None and self._captured.cache.num_pages >= num_pages:
            return self._captured.cache
        self._captured = None
        size = 1 << (num_pages - 1).bit_length() if self._captures else num_pages
        cache = KVCache(self.model.cfg, size, dtype=self.model.dtype, device=self.model.device)
        if self._captures:
            self._captured = CapturedPasses(self.passes, cache, self._compute)
        return cache

    def _view(self, cache: KVCache, table_BP: Index, row_T: Index, position_T: Index, max_end: int) -> StepView:
        """Of these rows of sequences, and padding."""
        device = self.model.device
        missing = (0, self._round_up(len(row_T)) - len(row_T))
        place_T = table_BP[row_T, position_T // PAGE_SIZE] * PAGE_SIZE + position_T % PAGE_SIZE
        return StepView(
            cache=cache,
            table_BP=upload(table_BP.astype(np.int32), device),
            positions_T=upload(np.pad(position_T, missing), device),
            group_T=upload(np.pad(row_T, missing).astype(np.int32), device),
            end_T=upload(np.pad(position_T + 1, missing).astype(np.int32), device),
            slot_mapping_T=upload(np.pad(place_T, missing, constant_values=cache.dump_page * PAGE_SIZE), device),
            max_end=max_end,
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
            num_rows = sum(map(len, self._streams[:: len(self._layers) + 1]))
            return torch.zeros(num_rows, 0, 0, dtype=torch.int16, device=self.model.device)
        if self._routing is not None:
            return self._routing.experts()
        return torch.cat([torch.cat(layer.recorded or []) for layer in self._native_layers()], dim=1)


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _selected(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The keys of all parts; None if they see all."""
    found = [part for part in parts if part is not None]
    return _cat(found) if len(found) == len(parts) else None


def _share(cache: KVCache, table_BP: Index, prefixes: Prefixes, wave: Index) -> None:
    """Let sequences begin with keys of earlier ones: whole pages are theirs, the rest is copied."""
    copied = list[tuple[int, int]]()
    for number, source, count in zip(wave, prefixes.source_B[wave], prefixes.shared_B[wave], strict=True):
        whole = count // PAGE_SIZE
        table_BP[number, :whole] = table_BP[source, :whole]
        if count % PAGE_SIZE:
            copied.append((int(table_BP[source, whole]), int(table_BP[number, whole])))
    cache.copy_pages(copied)


def _joined(traces: Sequence[Trace]) -> Trace:
    """The traces of all waves, one after another."""
    keys = [_selected(parts) for parts in zip(*(trace.keys for trace in traces), strict=True)]
    stream_LUD = torch.cat([trace.stream_LUD for trace in traces], dim=1)
    hidden_UD = torch.cat([trace.hidden_UD for trace in traces])
    return Trace(stream_LUD, hidden_UD, keys, torch.cat([trace.expert_ULA for trace in traces]))
