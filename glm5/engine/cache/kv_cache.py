"""The KV-cache pages of all sequences: one page id for latents and index keys of every layer.

A page holds `PAGE_SIZE` tokens of one sequence. Key s of a sequence is in its page number s // PAGE_SIZE, at offset
s % PAGE_SIZE; the slot of a row in the pool is page * PAGE_SIZE + offset. The scheduler assigns pages to sequences.
The pool has one more page that the scheduler does not use, the dump page: padding rows are written there.

    layout      latent row                        index key            bytes a token and layer (GLM-5, bfloat16)
    auto        model's dtype                     model's dtype        1152 + 256
    fp8_key     model's dtype                     FP8, one scale       1152 + 132
    fp8         FP8, a scale for 128 values,      FP8, one scale        656 + 132
                rope part in bfloat16

The FP8 formats are defined in `kernels/fp8_pool.py`, for any dtype of the model. Layers that reuse another layer's
selection have no index keys; the MTP layer is one more layer. A page is contiguous, layer after layer.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.engine.cache.memory import Memory, restoring
from glm5.kernels.block_scaled import FP8
from glm5.kernels.cpu_layer import HostPools
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool
from glm5.kernels.groups import FewQueries
from glm5.kernels.invariant import Impl
from glm5.kernels.paging import EveryRow
from glm5.kernels.rope import rope_part
from glm5.kernels.select_keys import select_keys
from glm5.kernels.select_keys.grouped import select_few
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.sparse_mla.grouped import attend_few
from glm5.kernels.store_rows import store_rows
from glm5.kernels.store_rows.in_place import Where, as_array, write_rows
from glm5.kernels.upload import upload

PAGE_SIZE = 64
_COPIED_BYTES = 64 << 20  # of pages at once: they are in memory twice meanwhile

Layout = Literal["auto", "fp8_key", "fp8"]

_ALIGNMENT = 16  # bytes, of every part of a page: the widest load of a GPU thread


class KVCache:
    """`num_pages` pages and a dump page. `mtp`: also for keys of the MTP layer (layer index `num_hidden_layers`)."""

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
        self.dtype, self.device = dtype, torch.device(device)
        self.layout: Layout = layout
        # Zeros: a masked key has weight 0, but 0 times a NaN in uninitialized memory would be NaN.
        num_bytes = (num_pages + 1) * self.bytes_per_page(cfg, dtype, layout, mtp=mtp)
        self._memory = Memory(num_bytes, self.device)
        self._page_bytes = self._memory.bytes.view(num_pages + 1, -1)
        self._lay_out()

    @staticmethod
    def bytes_per_page(cfg: ModelConfig, dtype: torch.dtype, layout: Layout = "auto", *, mtp: bool = False) -> int:
        """Bytes of one page over all layers."""
        return sum(part.num_bytes for part in _parts(cfg, dtype, layout, mtp))

    def append_latent(
        self, layer_idx: int, slot_mapping_T: Tensor, latent_TL: Tensor, where: Where | None = None
    ) -> None:
        """Write one latent row per token. If several tokens have the same slot (in the dump page), any of them is kept.
        `where`: on a CPU, the slots of `slot_mapping_T` as NumPy arrays."""
        if where is not None and (array := self._latent_arrays[layer_idx]) is not None:
            write_rows(array, where, latent_TL)
        else:
            store_rows(self._latent_PZL[layer_idx], slot_mapping_T, latent_TL)

    def append_index_key(
        self, layer_idx: int, slot_mapping_T: Tensor, key_TI: Tensor, where: Where | None = None
    ) -> None:
        """Write one index key per token; likewise."""
        if where is not None and (array := self._index_key_arrays[layer_idx]) is not None:
            write_rows(array, where, key_TI)
        else:
            store_rows(self._index_key_PZI[layer_idx], slot_mapping_T, key_TI)

    def latents(self, layer_idx: int) -> Pool:
        """The latents of a layer, for kernels that write them."""
        return self._latent_PZL[layer_idx]

    def index_keys(self, layer_idx: int) -> Pool:
        """The index keys of a layer, likewise."""
        return self._index_key_PZI[layer_idx]

    @property
    def place(self) -> int:
        """The pool's address, which captured graphs contain."""
        return self._page_bytes.data_ptr()

    def select_keys(
        self,
        layer_idx: int,
        q_TJI: Tensor,
        w_TJ: Tensor,
        table_BP: Tensor,
        row_T: Tensor,
        end_T: Tensor,
        *,
        top_k: int,
        scale: float,
        rotation: tuple[Tensor, Tensor] | None = None,
        impl: Impl = "auto",
        few: FewQueries | None = None,
        num_shares: int = 1,
    ) -> Tensor:
        """`kernels.select_keys` over the index keys of a layer: int32 [T, top_k]. `few`: the plan for few queries."""
        key_PZI = self._index_key_PZI[layer_idx]
        if few is not None:
            if rotation is not None:
                q_TJI = rope_part(q_TJI, *rotation, None, 0, 2 * rotation[0].shape[1])
            return select_few(few, q_TJI, key_PZI, w_TJ, top_k=top_k, scale=scale)
        where = table_BP, row_T, end_T
        return select_keys(
            q_TJI,
            key_PZI,
            w_TJ,
            *where,
            top_k=top_k,
            scale=scale,
            rotation=rotation,
            num_shares=num_shares,
            impl=impl,
        )

    def attend(
        self,
        layer_idx: int,
        q_THL: Tensor,
        keys_TK: Tensor | None,
        table_BP: Tensor,
        row_T: Tensor,
        end_T: Tensor,
        *,
        scale: float,
        value_dim: int,
        impl: Impl = "auto",
        few: FewQueries | None = None,
    ) -> Tensor:
        """`kernels.sparse_mla` over the latents of a layer, [T, H, value_dim]; likewise."""
        if few is not None:
            latent_PZL, every = self._latent_PZL[layer_idx], self._latent_rows[layer_idx]
            return attend_few(few, q_THL, latent_PZL, keys_TK, scale=scale, value_dim=value_dim, every=every)
        latent_PZL, where = self._latent_PZL[layer_idx], (table_BP, row_T, end_T)
        return sparse_mla(q_THL, latent_PZL, keys_TK, *where, scale=scale, value_dim=value_dim, impl=impl)[0]

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages, (source, target) each, in order."""
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        if len(pairs) > 1 and len({*sources, *targets}) == len({*sources}) + len(targets):  # in any order: at once
            at_once = max(1, _COPIED_BYTES // self._page_bytes.shape[1])
            for pair_2N in upload(np.array([sources, targets]), self.device).split(at_once, dim=1):
                self._page_bytes.index_copy_(0, pair_2N[1], self._page_bytes.index_select(0, pair_2N[0]))
            return
        for source, target in pairs:
            self._page_bytes[target].copy_(self._page_bytes[source])

    def page(self, page: int) -> Tensor:
        """The bytes of a page over all layers, contiguous."""
        return self._page_bytes[page]

    def parts(self) -> dict[str, Tensor]:
        """Every part of the pages, [P, Z, ...] each, by name, in their order within a page; the lower tiers copy them.
        These views stay valid through `release_memory` and `restore_memory`.
        """
        return dict(self._part_views())

    def release_memory(self) -> int:
        """Release the pool's memory. Returns the freed bytes: on a CPU, those of pages that were ever written to.
        Nothing may be read or written until it is restored."""
        self._latent_PZL, self._index_key_PZI = [], {}
        return self._memory.release()

    def restore_memory(self) -> None:
        """Allocate the memory again, filled with zeros. GlmError if there is not enough: it then stays released."""
        assert not self._latent_PZL, "nothing was released"
        with restoring("the cache", self._memory.release):
            self._memory.restore()
        self._lay_out()

    def _lay_out(self) -> None:
        parts = self.parts()
        layers = range(_num_layers(self.cfg, self.mtp))
        form = _latent_format(self.cfg)
        latents = [parts[f"latent.{i}"] for i in layers]
        self._latent_PZL: list[Pool] = [Fp8Latents(part, form) if self.layout == "fp8" else part for part in latents]
        self._latent_rows = [EveryRow.of(pool) if isinstance(pool, Tensor) else None for pool in self._latent_PZL]
        self._index_key_PZI: dict[int, Pool] = {
            i: parts[f"index_key.{i}"]
            if self.layout == "auto"
            else Fp8Keys(parts[f"index_key.{i}"], parts[f"index_scale.{i}"])
            for i in layers
            if self.cfg.has_indexer(i)
        }
        self._latent_arrays = [_array(pool) for pool in self._latent_PZL]
        self._index_key_arrays = {i: _array(pool) for i, pool in self._index_key_PZI.items()}
        # For native code, if they are float32 in host memory.
        is_host = self.device.type == "cpu" and self.layout == "auto" and self.dtype == torch.float32
        self.host_pools = HostPools(latents, [parts.get(f"index_key.{i}") for i in layers]) if is_host else None

    def _part_views(self) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for part in _parts(self.cfg, self.dtype, self.layout, self.mtp):
            assert start % _ALIGNMENT == 0, f"{part=} {start=}"
            page_rows = self._page_bytes[:, start : start + part.num_bytes]
            yield part.name, page_rows.view(part.dtype).unflatten(1, part.shape)
            start += part.num_bytes


def _array(pool: Pool) -> NDArray[Any] | None:
    """A plain pool in host memory as a NumPy array; None for any other pool."""
    return as_array(pool) if isinstance(pool, Tensor) and pool.is_cpu else None


class _PageField(NamedTuple):
    """One part of a page, such as a layer's latents: `shape` [Z, ...]."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _parts(cfg: ModelConfig, dtype: torch.dtype, layout: Layout, mtp: bool) -> Iterator[_PageField]:
    form = _latent_format(cfg)
    for i in range(_num_layers(cfg, mtp)):
        if layout == "fp8":
            yield _PageField(f"latent.{i}", (PAGE_SIZE, form.num_bytes), torch.uint8)
        else:
            yield _PageField(f"latent.{i}", (PAGE_SIZE, form.num_values + form.rope_dim), dtype)
        if not cfg.has_indexer(i):
            continue
        yield _PageField(f"index_key.{i}", (PAGE_SIZE, cfg.index_head_dim), dtype if layout == "auto" else FP8)
        if layout != "auto":
            yield _PageField(f"index_scale.{i}", (PAGE_SIZE,), torch.float32)


def _num_layers(cfg: ModelConfig, mtp: bool) -> int:
    return cfg.num_layers_with_mtp if mtp else cfg.num_hidden_layers


def _latent_format(cfg: ModelConfig) -> LatentFormat:
    return LatentFormat(cfg.kv_lora_rank, cfg.qk_rope_head_dim)
