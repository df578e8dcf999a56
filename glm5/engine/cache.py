"""Keys of all running requests in pages of one pool, and the view of them that one forward pass gets.

A page holds `page_size` tokens of one request: their latent rows of every layer, and their index keys of the layers
that have an indexer. One page id space for both, so they cannot diverge. Logical key s of a request lies in its page
number s // page_size, slot s % page_size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.kernels.index_score import index_score
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.top_k import top_k as top_k_keys
from glm5.model.seams import Selection

PAGE_SIZE = 64


class PagedCache:
    """A pool of `num_pages` pages, all free at first. Pages are handed out and taken back by their numbers.

    `mtp` keeps keys for the MTP layer too (layer index `num_hidden_layers`).
    """

    def __init__(
        self,
        cfg: ModelConfig,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        page_size: int = PAGE_SIZE,
        mtp: bool = False,
    ):
        num_layers = _num_layers(cfg, mtp)
        self.page_size, self.num_pages, self.device = page_size, num_pages, torch.device(device)
        # Zeros, not empty: a masked key has weight 0, and 0 times a stray NaN would still be NaN.
        self.latent_PZL = [
            torch.zeros(num_pages, page_size, _latent_dim(cfg), dtype=dtype, device=device) for _ in range(num_layers)
        ]
        self.index_key_PZI = {
            layer_idx: torch.zeros(num_pages, page_size, cfg.index_head_dim, dtype=dtype, device=device)
            for layer_idx in range(num_layers)
            if cfg.has_indexer(layer_idx)
        }
        self._free = list(range(num_pages - 1, -1, -1))

    @staticmethod
    def bytes_per_page(cfg: ModelConfig, dtype: torch.dtype, *, page_size: int = PAGE_SIZE, mtp: bool = False) -> int:
        """Memory of one page over all layers."""
        layers = range(_num_layers(cfg, mtp))
        width = sum(_latent_dim(cfg) + cfg.index_head_dim * cfg.has_indexer(layer_idx) for layer_idx in layers)
        return width * page_size * dtype.itemsize

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, now the caller's until `release`. Asking for more than `num_free` is a bug of the caller."""
        assert count <= len(self._free), f"{count=} {self.num_free=}"
        return [self._free.pop() for _ in range(count)]

    def release(self, pages: Sequence[int]) -> None:
        assert not set(pages) & set(self._free), f"released twice: {sorted(set(pages) & set(self._free))}"
        self._free.extend(pages)


@dataclass(frozen=True)
class Span:
    """Tokens of one request in a forward pass: `num_new` of them after `num_computed` that the cache holds."""

    pages: Sequence[int]
    num_computed: int
    num_new: int

    @property
    def end(self) -> int:
        return self.num_computed + self.num_new


class PagedView:
    """A `KVView` over a batch of spans of a cache, their tokens packed in order. Lives for one forward pass."""

    def __init__(self, cache: PagedCache, spans: Sequence[Span]):
        assert min((span.num_new for span in spans), default=0) >= 1, f"{spans=}"
        size, device = cache.page_size, cache.device
        self.cache = cache
        self.max_context = max(span.end for span in spans)
        width = cache.pages_for(self.max_context)
        # Padding points at page 0: any valid page will do, since no query sees a key past its own end.
        table = [[*span.pages[: cache.pages_for(span.end)]] for span in spans]
        padded = [row + [0] * (width - len(row)) for row in table]
        self.page_table_BN = torch.tensor(padded, dtype=torch.int32, device=device)
        positions_T = torch.cat([torch.arange(span.num_computed, span.end) for span in spans])
        rows_T = torch.repeat_interleave(torch.tensor([span.num_new for span in spans]))
        self.positions_T = positions_T.to(device)
        self.row_T = rows_T.int().to(device)
        self.end_T = (self.positions_T + 1).int()
        page_T = self.page_table_BN[self.row_T.long(), self.positions_T // size]
        self._slot_T = page_T.long() * size + self.positions_T % size

    def append_latent(self, layer_idx: int, latent_TL: Tensor) -> None:
        self.cache.latent_PZL[layer_idx].flatten(0, 1).index_copy_(0, self._slot_T, latent_TL)

    def append_index_key(self, layer_idx: int, key_TI: Tensor) -> None:
        self.cache.index_key_PZI[layer_idx].flatten(0, 1).index_copy_(0, self._slot_T, key_TI)

    def select(self, layer_idx: int, q_TJI: Tensor, w_TJ: Tensor, top_k: int, scale: float) -> Selection:
        if self.max_context <= top_k:  # every query would select all that it sees
            return Selection(None)
        key_PZI = self.cache.index_key_PZI[layer_idx]
        score_TS = index_score(q_TJI, key_PZI, w_TJ, self.page_table_BN, self.row_T, self.end_T, scale=scale)
        return Selection(top_k_keys(score_TS, top_k))

    def attend(self, layer_idx: int, q_THL: Tensor, selection: Selection, *, scale: float, value_dim: int) -> Tensor:
        latent_PZL, where = self.cache.latent_PZL[layer_idx], (self.page_table_BN, self.row_T, self.end_T)
        out_THC, _ = sparse_mla(q_THL, latent_PZL, selection.keys_TK, *where, scale=scale, value_dim=value_dim)
        return out_THC


def _num_layers(cfg: ModelConfig, mtp: bool) -> int:
    return cfg.num_layers_with_mtp if mtp else cfg.num_hidden_layers


def _latent_dim(cfg: ModelConfig) -> int:
    return cfg.kv_lora_rank + cfg.qk_rope_head_dim
