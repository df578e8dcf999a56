"""Passes of deterministic mode as CUDA graphs. All have the same number of rows, so one graph for each context bucket
(decode.py) serves any batch, and one more the draft layer.

Each row has its own row of the page table, so the grouping of rows into sequences is not part of the shape either.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.forward.passes import Passes
from glm5.engine.runner.forward.routing import RoutingRecord
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.engine.runner.graphs.captured import Graphs, Piece
from glm5.engine.runner.graphs.decode import context_bucket_of
from glm5.engine.runner.inputs.view import StepView
from glm5.kernels import triton_support
from glm5.model.experts import BlockScaledExperts, Experts
from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE
from glm5.model.seams import Selection


def can_capture(model: Glm5) -> bool:
    """Whether a pass never synchronizes: some implementations of experts have a loop on the host."""
    is_static = all(_is_static(one.experts) for one in model.modules() if isinstance(one, MoE))
    return is_static and model.device.type == "cuda" and triton_support.chosen(model.model.norm.weight.detach())


def _is_static(experts: nn.Module) -> bool:
    return isinstance(experts, BlockScaledExperts | Experts) and experts.impl == "invariant_triton"


class PassRows:
    """Inputs and outputs of passes of one context bucket. `id_T`: token ids of the rows or, for the draft layer, of the
    tokens after them. `key_TK`: keys that the draft layer selected, or should read."""

    def __init__(self, cache: KVCache, num_rows: int, context_bucket: int, hidden_2TD: Tensor, key_TK: Tensor):
        device = cache.device
        self.id_T, position_T, place_R = torch.zeros(3, num_rows, dtype=torch.int64, device=device)
        group_T = torch.arange(num_rows, dtype=torch.int32, device=device)
        table_TP = torch.zeros(num_rows, -(-context_bucket // cache.page_size), dtype=torch.int32, device=device)
        end_T = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.view = StepView(cache, table_TP, position_T, group_T, end_T, place_R, context_bucket, invariant=True)
        self.hidden_TD, self.extended_TD = hidden_2TD
        self.key_TK = key_TK
        self.expert_ids_T: Tensor | None = None

    def load(self, ids_T: Tensor, view: StepView) -> None:
        """Copy the rows of `view`. Kernels do not read further columns of the page table."""
        own, columns = self.view, min(self.view.table_BP.shape[1], view.table_BP.shape[1])
        self.id_T.copy_(ids_T)
        own.table_BP[:, :columns].copy_(view.table_BP[:, :columns].index_select(0, view.group_T))
        own.positions_T.copy_(view.positions_T)
        own.end_T.copy_(view.end_T)
        own.slot_mapping_T.copy_(view.slot_mapping_T)

    def load_padding(self) -> None:
        for tensor in (self.id_T, self.view.positions_T, self.view.end_T):
            tensor.zero_()
        self.view.slot_mapping_T.fill_(self.view.cache.dump_page * self.view.cache.page_size)


class PassGraphs:
    """Runs passes of `num_rows` rows by `graphs`, which are captured where they are missing."""

    def __init__(
        self,
        passes: Passes,
        cache: KVCache,
        graphs: Graphs,
        context_buckets: Sequence[int],
        routing: RoutingRecord | None = None,
    ):
        assert passes.fused is not None
        assert passes.num_rows is not None
        self.fused: FusedModel = passes.fused
        self.cache, self.graphs, self.context_buckets, self.routing = cache, graphs, context_buckets, routing
        like_D, cfg = passes.model.model.norm.weight.detach(), passes.model.cfg
        hidden_2TD = like_D.new_zeros(2, passes.num_rows, len(like_D))
        key_TK = torch.zeros(passes.num_rows, cfg.index_topk, dtype=torch.int32, device=like_D.device)
        self._new = partial(PassRows, cache, passes.num_rows, hidden_2TD=hidden_2TD, key_TK=key_TK)
        self._rows: dict[int, PassRows] = {}
        self._shares_selection = cfg.index_share_for_mtp_iteration

    def hidden(self, ids_T: Tensor, view: StepView) -> Tensor:
        """`Glm5.forward` of one pass."""
        rows = self._loaded(ids_T, view)
        self._run(("target", rows.view.max_end), partial(self._target, rows))
        if self.routing is not None:
            assert rows.expert_ids_T is not None
            self.routing.add(rows.expert_ids_T.clone())
        return rows.hidden_TD.clone()

    def draft(
        self, next_ids_T: Tensor, hidden_TD: Tensor, view: StepView, selection: Selection | None
    ) -> tuple[Tensor, Selection]:
        """`Glm5.draft` of one pass."""
        rows = self._loaded(next_ids_T, view)
        rows.hidden_TD.copy_(hidden_TD)
        if selection is not None:
            assert selection.keys_TK is not None
            rows.key_TK.copy_(selection.keys_TK)
        selects = selection is None
        self._run(("draft", rows.view.max_end, selects), partial(self._draft, rows, selects=selects))
        return rows.extended_TD.clone(), Selection(rows.key_TK.clone())

    def capture_all(self, *, drafts: bool) -> Iterator[tuple[int, int]]:
        """Capture all graphs, the largest context bucket first; yields (done, all)."""
        self.graphs.forget_if_moved()
        for done, context_bucket in enumerate(reversed(self.context_buckets), start=1):
            rows = self._of(context_bucket)
            rows.load_padding()
            self._capture(("target", context_bucket), partial(self._target, rows))
            for selects in (True, False)[: drafts * (1 + self._shares_selection)]:
                self._capture(("draft", context_bucket, selects), partial(self._draft, rows, selects=selects))
            yield done, len(self.context_buckets)

    def _loaded(self, ids_T: Tensor, view: StepView) -> PassRows:
        self.graphs.forget_if_moved()
        rows = self._of(context_bucket_of(view.table_BP.shape[1] * self.cache.page_size, self.context_buckets))
        rows.load(ids_T, view)
        return rows

    def _of(self, context_bucket: int) -> PassRows:
        if context_bucket not in self._rows:
            self._rows[context_bucket] = self._new(context_bucket=context_bucket)
        return self._rows[context_bucket]

    def _run(self, key: tuple[object, ...], piece: Piece) -> None:
        # The warm-up run changes nothing: the piece writes the same keys again.
        if self.graphs.captures and not self.graphs.has(key):
            self._capture(key, piece)
        self.graphs.run(key, piece)

    def _capture(self, key: tuple[object, ...], piece: Piece) -> None:
        self.graphs.capture(key, piece, warm=True)

    def _target(self, rows: PassRows) -> None:
        if self.routing is not None:
            self.routing.pass_begins()
        rows.hidden_TD.copy_(self.fused.hidden(rows.id_T, rows.view))
        if self.routing is not None:
            expert_ids_T = self.routing.pass_ended()
            if rows.expert_ids_T is None:
                rows.expert_ids_T = torch.empty_like(expert_ids_T)
            rows.expert_ids_T.copy_(expert_ids_T)

    def _draft(self, rows: PassRows, *, selects: bool) -> None:
        given = None if selects else Selection(rows.key_TK)
        extended_TD, used = self.fused.draft(rows.id_T, rows.hidden_TD, rows.view, given)
        rows.extended_TD.copy_(extended_TD)
        if selects:
            assert used.keys_TK is not None
            rows.key_TK.copy_(used.keys_TK)
