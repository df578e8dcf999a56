"""The pool of pages that holds the keys of all sequences: one page id for latents and index keys of every layer.

A page holds `PAGE_SIZE` tokens of one sequence. Logical key s of a sequence lies in its page number s // PAGE_SIZE, at
offset s % PAGE_SIZE; the slot of a row in the pool is page * PAGE_SIZE + offset. Which page is whose is the scheduler's
business. The pool has one page more than the scheduler knows of: rows that belong nowhere are written there.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.kernels.index_score import index_score
from glm5.kernels.sparse_mla import sparse_mla

PAGE_SIZE = 64

Layout = Literal["auto", "fp8_key", "fp8"]


class KVCache:
    """`num_pages` pages and a dump page. `mtp`: keep keys of the MTP layer too (layer index `num_hidden_layers`)."""

    page_size = PAGE_SIZE

    def __init__(
        self,
        cfg: ModelConfig,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: Layout = "auto",
        mtp: bool = False,
    ):
        self.cfg, self.num_pages, self.dump_page, self.mtp = cfg, num_pages, num_pages, mtp
        self.dtype, self.device, self.layout = dtype, torch.device(device), layout
        self._latent_PZL: list[Tensor] = []
        self._index_key_PZI: dict[int, Tensor] = {}
        self.restore_memory()

    @staticmethod
    def bytes_per_page(cfg: ModelConfig, dtype: torch.dtype, layout: Layout = "auto", *, mtp: bool = False) -> int:
        """Memory of one page over all layers."""
        layers = range(_num_layers(cfg, mtp))
        width = sum(_latent_dim(cfg) + cfg.index_head_dim * cfg.has_indexer(layer_idx) for layer_idx in layers)
        return width * PAGE_SIZE * dtype.itemsize

    def append_latent(self, layer_idx: int, slot_T: Tensor, latent_TL: Tensor) -> None:
        """Write one latent row per token. Where several tokens have one slot (of the dump page), any may win."""
        self._latent_PZL[layer_idx].flatten(0, 1).index_copy_(0, slot_T, latent_TL)

    def append_index_key(self, layer_idx: int, slot_T: Tensor, key_TI: Tensor) -> None:
        self._index_key_PZI[layer_idx].flatten(0, 1).index_copy_(0, slot_T, key_TI)

    def scores(
        self,
        layer_idx: int,
        q_TJI: Tensor,
        w_TJ: Tensor,
        table_BN: Tensor,
        row_T: Tensor,
        end_T: Tensor,
        *,
        scale: float,
        impl: Literal["auto", "invariant"] = "auto",
    ) -> Tensor:
        """`kernels.index_score` over the index keys of a layer."""
        key_PZI = self._index_key_PZI[layer_idx]
        return index_score(q_TJI, key_PZI, w_TJ, table_BN, row_T, end_T, scale=scale, impl=impl)

    def attend(
        self,
        layer_idx: int,
        q_THL: Tensor,
        keys_TK: Tensor | None,
        table_BN: Tensor,
        row_T: Tensor,
        end_T: Tensor,
        *,
        scale: float,
        value_dim: int,
        impl: Literal["auto", "invariant"] = "auto",
    ) -> Tensor:
        """`kernels.sparse_mla` over the latents of a layer, [T, H, value_dim]."""
        latent_PZL, where = self._latent_PZL[layer_idx], (table_BN, row_T, end_T)
        return sparse_mla(q_THL, latent_PZL, keys_TK, *where, scale=scale, value_dim=value_dim, impl=impl)[0]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (source, target) each, in order."""
        for source, target in pairs:
            for part in self.parts().values():
                part[target].copy_(part[source])

    def parts(self) -> dict[str, Tensor]:
        """Every part of the pages, [P, Z, ...] each, by name: what the tiers behind this pool move."""
        latents = {f"latent.{layer_idx}": part for layer_idx, part in enumerate(self._latent_PZL)}
        return latents | {f"index_key.{layer_idx}": part for layer_idx, part in self._index_key_PZI.items()}

    def release_memory(self) -> int:
        """Give the pool's memory back, and say how many bytes. Nothing may be read or written until it is restored."""
        freed = sum(part.numel() * part.element_size() for part in self.parts().values())
        self._latent_PZL, self._index_key_PZI = [], {}
        return freed

    def restore_memory(self) -> None:
        """Take the memory; what pages hold then is nobody's."""
        shape = {"dtype": self.dtype, "device": self.device}
        num_layers = _num_layers(self.cfg, self.mtp)
        # Zeros, not empty: a masked key has weight 0, and 0 times a stray NaN would still be NaN.
        self._latent_PZL = [
            torch.zeros(self.num_pages + 1, PAGE_SIZE, _latent_dim(self.cfg), **shape) for _ in range(num_layers)
        ]
        self._index_key_PZI = {
            layer_idx: torch.zeros(self.num_pages + 1, PAGE_SIZE, self.cfg.index_head_dim, **shape)
            for layer_idx in range(num_layers)
            if self.cfg.has_indexer(layer_idx)
        }


def _num_layers(cfg: ModelConfig, mtp: bool) -> int:
    return cfg.num_layers_with_mtp if mtp else cfg.num_hidden_layers


def _latent_dim(cfg: ModelConfig) -> int:
    return cfg.kv_lora_rank + cfg.qk_rope_head_dim
