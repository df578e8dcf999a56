"""Sequences computed by hand over a page pool, so many tokens at a time: no scheduler, no sampler."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache, Layout
from glm5.engine.runner.inputs.view import StepView
from glm5.model.glm5 import Glm5


def view_of(cache: KVCache, spans: Sequence[tuple[list[int], int, int]], *, num_padding: int = 0) -> StepView:
    """A view of tokens `start` to `end` of sequences with these pages, and rows of padding behind them."""
    device, max_end = cache.device, max(end for _, _, end in spans)
    width = -(-max_end // PAGE_SIZE)
    # A row of the table may be longer than its sequence: what lies behind points at the dump page.
    table_BP = torch.tensor([(pages + [cache.dump_page] * width)[:width] for pages, _, _ in spans], dtype=torch.int32)
    positions_T = torch.cat([torch.arange(start, end) for _, start, end in spans])
    group_T = torch.repeat_interleave(torch.tensor([end - start for _, start, end in spans]))
    slot_mapping_T = table_BP[group_T, positions_T // PAGE_SIZE].long() * PAGE_SIZE + positions_T % PAGE_SIZE
    dump = torch.full((num_padding,), cache.dump_page * PAGE_SIZE)
    none = torch.zeros(num_padding, dtype=torch.int64)
    return StepView(
        cache=cache,
        table_BP=table_BP.to(device),
        positions_T=torch.cat([positions_T, none]).to(device),
        group_T=torch.cat([group_T, none]).int().to(device),
        end_T=torch.cat([positions_T + 1, none]).int().to(device),
        slot_mapping_T=torch.cat([slot_mapping_T, dump]).to(device),
        max_end=max_end,
        invariant=False,
    )


class CachedRun:
    """Sequences in one pool, advanced by hand. Their pages are interleaved, so no request's are contiguous.

    `logits[i]` and `selected[i][layer_idx]` (sets of keys, one a token) grow as sequence i is computed.
    """

    def __init__(self, model: Glm5, sequences: Sequence[Sequence[int]], layout: Layout = "auto"):
        self.model, self.sequences = model, [list(ids) for ids in sequences]
        each = -(-max(map(len, sequences)) // PAGE_SIZE)
        num_pages = each * len(sequences)
        self.cache = KVCache(model.cfg, num_pages, dtype=model.dtype, device=model.device, layout=layout, mtp=False)
        order = [(7 * i + 3) % num_pages if num_pages % 7 else num_pages - 1 - i for i in range(num_pages)]
        self.pages = [order[i :: len(sequences)] for i in range(len(sequences))]
        self._step: list[int] = []
        self.restart()
        select = self.cache.select_keys

        def recorded(layer_idx: int, *args, **kwargs) -> Tensor:
            keys_TK = select(layer_idx, *args, **kwargs)
            for i, keys in zip(self._step, keys_TK.tolist(), strict=False):
                self.selected[i].setdefault(layer_idx, []).append(set(keys) - {-1})
            return keys_TK

        self.cache.select_keys = recorded

    def restart(self) -> None:
        """Nothing is computed yet."""
        self.done = [0] * len(self.sequences)
        self._logits: list[list[Tensor]] = [[] for _ in self.sequences]
        self.selected: list[dict[int, list[set[int]]]] = [{} for _ in self.sequences]

    def advance(self, counts: dict[int, int], *, num_padding: int = 0) -> None:
        """Compute `counts[i]` more tokens of sequence i, all in one pass, in the order of the dict."""
        spans = [(self.pages[i], self.done[i], self.done[i] + n) for i, n in counts.items()]
        ids = [t for i, (_, start, end) in zip(counts, spans, strict=True) for t in self.sequences[i][start:end]]
        self._step = [i for i, n in counts.items() for _ in range(n)]
        view = view_of(self.cache, spans, num_padding=num_padding)
        with torch.inference_mode():
            ids_T = torch.tensor(ids + [0] * num_padding, device=self.cache.device)
            logits = self.model.head(self.model(ids_T, view))[: len(ids)].cpu()
        for (i, n), part in zip(counts.items(), logits.split(list(counts.values())), strict=True):
            self.done[i] += n
            self._logits[i].append(part)

    def finish(self, chunk: int | None = None) -> "CachedRun":
        """All that is left, all sequences at once, up to `chunk` tokens of each in a pass."""
        while left := {i: len(ids) - self.done[i] for i, ids in enumerate(self.sequences) if len(ids) > self.done[i]}:
            self.advance({i: min(n, chunk or n) for i, n in left.items()})
        return self

    def logits(self, i: int = 0) -> Tensor:
        return torch.cat(self._logits[i])
