"""Copies between pages on the device and blocks in host memory.

`PageIO` is the interface that the copy queue uses; `page_io` builds it over the cache's tensors. A part of a page is
row `page_id` of one tensor [P, ...]; a block has the parts in the order of the mapping.
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from glm5.engine.tiers.layout import PageLayout


class PageIO(Protocol):
    """Copies pages. `block` is uint8 [num_bytes] in host memory. Every method is called from several threads."""

    def fence(self) -> Any:
        """A mark after all work on pages that the calling thread (the engine's) has launched so far."""
        ...

    def read_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        """Copy the page to `block`, after the work before `fence` is done. Returns when the copy is complete."""
        ...

    def write_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        """Copy `block` to the page, under the same conditions."""
        ...


def layout_of(parts: Mapping[str, Tensor], info: Mapping[str, object]) -> PageLayout:
    """Layout of the pages of tensors [P, Z, ...]. `info` as for `PageLayout.of`; dtypes and shapes are added."""
    sizes = {name: part[0].numel() * part.element_size() for name, part in parts.items()}
    shapes = {name: [str(part.dtype), *part.shape[1:]] for name, part in parts.items()}
    page_sizes = {part.shape[1] for part in parts.values()}
    assert len(page_sizes) == 1, f"{page_sizes=}"
    return PageLayout.of(page_sizes.pop(), sizes, {**info, "tensors": shapes})


def page_io(parts: Mapping[str, Tensor]) -> PageIO:
    """Pages of tensors [P, Z, ...], all on one device, whose rows are contiguous."""
    device = next(iter(parts.values())).device
    rows = _joined([part.view(part.shape[0], -1).view(torch.uint8) for part in parts.values()])
    return _CudaPages(rows, device) if device.type == "cuda" else _HostPages(rows)


def _joined(rows: list[Tensor]) -> list[Tensor]:
    """Merge parts that are adjacent in memory: a cache with contiguous pages then needs one copy a page."""
    joined = rows[:1]
    for row in rows[1:]:
        last = joined[-1]
        end = last.data_ptr() + last.shape[1]
        if end == row.data_ptr() and last.stride(0) == row.stride(0) >= last.shape[1] + row.shape[1]:
            joined[-1] = last.as_strided((last.shape[0], last.shape[1] + row.shape[1]), last.stride())
        else:
            joined.append(row)
    return joined


class _HostPages:
    """Pages in host memory, where steps are synchronous: there is nothing to wait for.

    NumPy copies them, since it neither holds the interpreter lock nor uses further threads.
    """

    def __init__(self, rows: list[Tensor]):
        self._rows = [part.numpy() for part in rows]

    def fence(self) -> None:
        return None

    def read_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        into, start = block.numpy(), 0
        for part in self._rows:
            end = start + part.shape[1]
            np.copyto(into[start:end], part[page_id])
            start = end

    def write_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        content, start = block.numpy(), 0
        for part in self._rows:
            end = start + part.shape[1]
            np.copyto(part[page_id], content[start:end])
            start = end


class _CudaPages:
    """Pages on a GPU. Each thread has a stream, and a staging block on the device if pages have several parts.

    Launches hold the interpreter lock, so each part also delays the engine's thread. A page of 4 MB on an H200, four
    threads: 1.0 ms in 158 parts, 0.4 ms if contiguous.
    """

    def __init__(self, rows: list[Tensor], device: torch.device):
        self._rows, self._device = rows, device
        self._sizes = [part.shape[1] for part in rows]
        self._local = threading.local()

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @torch.inference_mode()
    def read_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        with torch.cuda.stream(self._stream()):
            self._stream().wait_event(fence)
            parts = [part[page_id] for part in self._rows]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, out=self._staging())
            block.copy_(whole, non_blocking=True)
        self._stream().synchronize()

    @torch.inference_mode()
    def write_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        with torch.cuda.stream(self._stream()):
            self._stream().wait_event(fence)
            parts = [part[page_id] for part in self._rows]
            if len(parts) == 1:
                parts[0].copy_(block, non_blocking=True)
            else:
                whole = self._staging().copy_(block, non_blocking=True)
                # One launch for all parts; a loop takes twice as long. torch has no public name for it.
                foreach_copy = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                foreach_copy(parts, whole.split(self._sizes))
        self._stream().synchronize()

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        return self._local.stream

    def _staging(self) -> Tensor:
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(sum(self._sizes), dtype=torch.uint8, device=self._device)
        return self._local.staging
