"""The keys of a step: a `KVView` over rows of many sequences, in static shapes.

Each row has its sequence (a row of `table_BP`) and its position. A padding row attends to no key, and writes to the
dump page.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from glm5.common.rounding import next_power_of_two
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.inputs.slot_state import SlotState
from glm5.kernels.cpu_layer import HostKeys, HostStep
from glm5.kernels.groups import FewQueries, few_queries
from glm5.kernels.invariant import Impl, impl_on
from glm5.kernels.step_rows import StepRows
from glm5.kernels.store_rows.in_place import Where
from glm5.model.seams import Selection
from glm5.parallel.table import Shard


@dataclass(slots=True)
class StepView:
    """`group_T` int32: row of the page table `table_BP`; `end_T` int32: number of keys that each token attends to;
    `slot_mapping_T`: the row of the pool for its own key. No token attends to more than `max_end` keys. `invariant`:
    results do not depend on the rest of the batch, bit for bit; every token then selects keys, however few there are.

    `first_T` int32: if all rows are those of full prompts, the row at which each token's prompt begins; for padding, a
    row after its own.

    `num_shares`: number of shards of the step's rows, of which this view is one.
    """

    cache: KVCache
    table_BP: Tensor
    positions_T: Tensor
    group_T: Tensor
    end_T: Tensor
    slot_mapping_T: Tensor
    max_end: int
    invariant: bool
    first_T: Tensor | None = None
    num_shares: int = 1
    _where: Where | None = None
    _planned: FewQueries | None = None
    _is_few: dict[int, bool] = field(default_factory=dict[int, bool])
    _host_keys: HostKeys | None = None

    @classmethod
    def of(
        cls,
        cache: KVCache,
        slots: SlotState,
        *,
        slot_B: Tensor,
        group_T: Tensor,
        slot_T: Tensor,
        positions_T: Tensor,
        live_T: Tensor,
        max_end: int,
        invariant: bool,
    ) -> "StepView":
        """A view of tokens at these positions of the sequences in these slots. Rows that are not live are padding."""
        size = cache.page_size
        # Few widths, for few shapes.
        num_pages = min(next_power_of_two(-(-max_end // size)), slots.num_columns)
        if positions_T.is_cpu:
            table_BP, end_T, where = _on_host(cache, slots, slot_B, slot_T, positions_T, live_T)
            table_BP, slot_mapping_T = table_BP[:, :num_pages], torch.from_numpy(where[0] * size + where[1])
            return cls(
                cache, table_BP, positions_T, group_T.int(), end_T, slot_mapping_T, max_end, invariant, _where=where
            )
        column_T = (positions_T // size).clamp_max_(slots.num_columns - 1)
        page_T = torch.where(live_T > 0, slots.table_YP[slot_T, column_T].long(), cache.dump_page)
        return cls(
            cache=cache,
            table_BP=slots.table_YP[:, :num_pages].index_select(0, slot_B),
            positions_T=positions_T,
            group_T=group_T.int(),
            end_T=((positions_T + 1) * live_T).int(),
            slot_mapping_T=page_T * size + positions_T % size,
            max_end=max_end,
            invariant=invariant,
        )

    @classmethod
    def at(
        cls, cache: KVCache, slots: SlotState, rows: StepRows, *, slot_B: Tensor, group_T: Tensor, max_end: int
    ) -> "StepView":
        """A view of rows whose places are computed already; `group_T` is int32."""
        num_pages = min(next_power_of_two(-(-max_end // cache.page_size)), slots.num_columns)
        table_BP = slots.table_YP[:, :num_pages].index_select(0, slot_B)
        return cls(cache, table_BP, rows.position_T, group_T, rows.end_T, rows.slot_mapping_T, max_end, invariant=False)

    def parts(self, num_rows: int) -> Iterator["StepView"]:
        """Views of `num_rows` tokens each, to be run in order. The number of tokens must be a multiple."""
        for first in range(0, len(self.positions_T), num_rows):
            span = slice(first, first + num_rows)
            yield replace(
                self,
                positions_T=self.positions_T[span],
                group_T=self.group_T[span],
                end_T=self.end_T[span],
                slot_mapping_T=self.slot_mapping_T[span],
                first_T=None,
                _where=None,
                _planned=None,
                _is_few={},
                _host_keys=None,
            )

    def share(self, shard: Shard) -> "StepView":
        """A view of one rank's shard of the rows."""
        if shard.size == 1:
            return self
        parts = self.parts(len(self.positions_T) // shard.size)
        return replace(next(islice(parts, shard.rank, None)), num_shares=shard.size)

    @property
    def reads_all(self) -> bool:
        """False: the cache needs index keys for later tokens."""
        return False

    def append_latent(self, layer_idx: int, latent_TL: Tensor) -> None:
        self.cache.append_latent(layer_idx, self.slot_mapping_T, latent_TL, self._where)

    def append_index_key(self, layer_idx: int, key_TI: Tensor) -> None:
        self.cache.append_index_key(layer_idx, self.slot_mapping_T, key_TI, self._where)

    def selects(self, top_k: int) -> bool:
        """Whether any token may have more visible keys than it selects."""
        return self.max_end > top_k or self.invariant

    def select(
        self,
        layer_idx: int,
        q_TJI: Tensor,
        w_TJ: Tensor,
        top_k: int,
        scale: float,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Selection:
        """`rotation`: (cos, sin) for the first dimensions of queries, if they are not rotated yet."""
        # (With `invariant` a selection always has the same width: otherwise the order of sums would change.)
        if not self.selects(top_k):
            return Selection(None)
        where = (self.table_BP, self.group_T, self.end_T)
        few = self._few(q_TJI.shape[1])
        return Selection(
            self.cache.select_keys(
                layer_idx,
                q_TJI,
                w_TJ,
                *where,
                top_k=top_k,
                scale=scale,
                rotation=rotation,
                impl=self.impl,
                few=few,
                num_shares=self.num_shares,
            )
        )

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        where = (self.table_BP, self.group_T, self.end_T)
        keys_TK, few = selection.keys_TK, self._few(q_THL.shape[1])
        return self.cache.attend(
            layer_idx, q_THL, keys_TK, *where, scale=scale, value_dim=value_dim, impl=self.impl, few=few
        )

    def attend_expanded(
        self, layer_idx: int, q_THX: Tensor, w_k_HNC: Tensor, w_v_HVC: Tensor, selection: Selection, *, scale: float
    ) -> None:
        """None: the cache holds latents. (Full prompts on a GPU: fused_model.py.)"""

    def host_keys(self) -> HostKeys | None:
        """Where the keys lie, if in float32 in host memory, for native code (runner/native.py); else None."""
        pools = self.cache.host_pools
        if self._host_keys is None and pools is not None and not self.invariant:
            step = HostStep(self.table_BP, self.group_T, self.end_T, self.slot_mapping_T, self.cache.page_size)
            self._host_keys = HostKeys(step, pools, sees_few=self.max_end <= self.cache.cfg.index_topk)
        return self._host_keys

    def _few(self, num_heads: int) -> FewQueries | None:
        """On a CPU with few queries, their plan, which all layers share."""
        if num_heads not in self._is_few:
            self._is_few[num_heads] = not self.invariant and few_queries(
                self.table_BP, self.end_T, num_heads, self.max_end
            )
        if not self._is_few[num_heads]:
            return None
        if self._planned is None:
            self._planned = FewQueries(self.table_BP, self.group_T, self.end_T, self.cache.page_size)
        return self._planned

    @property
    def impl(self) -> Impl:
        """Of the kernels that select and read keys."""
        return impl_on(self.cache.device, self.cache.dtype) if self.invariant else "auto"


def _on_host(
    cache: KVCache, slots: SlotState, slot_B: Tensor, slot_T: Tensor, positions_T: Tensor, live_T: Tensor
) -> tuple[Tensor, Tensor, Where]:
    """(table_BP of all columns, end_T, pages and offsets of slot_mapping_T) by NumPy, in a fraction of torch's time."""
    positions, table_YP = positions_T.numpy(), slots.table_YP.numpy()
    column, offset = np.divmod(positions, cache.page_size)
    page = table_YP[slot_T.numpy(), np.minimum(column, slots.num_columns - 1)].astype(np.int64)
    end = (positions + 1).astype(np.int32)
    if not (live := live_T.numpy()).all():
        page[live == 0], end[live == 0] = cache.dump_page, 0
    return torch.from_numpy(table_YP[slot_B.numpy()]), torch.from_numpy(end), (page, offset)
