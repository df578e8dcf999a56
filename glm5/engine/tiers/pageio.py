"""Between pages on the device and blocks in host memory.

`PageIO` is what the copy queue asks of the owner of the cache; `page_io` builds it over the cache's tensors. A part
of a page is row `page_id` of one tensor [P, ...]; the parts lie in a block in the order of the mapping.
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from glm5.engine.tiers.layout import PageLayout


class PageIO(Protocol):
    """Copies whole pages. `block` is uint8 [num_bytes] in host memory. Every method is called from several threads."""

    def fence(self) -> Any:
        """A mark behind all work on pages that was launched so far by the calling thread (the engine's)."""
        ...

    def read_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        """Copy the page to `block`, not before the work ahead of `fence` is done. Returns when the copy is complete."""
        ...

    def write_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        """Copy `block` to the page, under the same conditions."""
        ...


def layout_of(parts: Mapping[str, Tensor], facts: Mapping[str, object]) -> PageLayout:
    """Layout of the pages of tensors [P, Z, ...]. `facts` as for `PageLayout.of`; dtypes and shapes are added."""
    sizes = {name: part[0].numel() * part.element_size() for name, part in parts.items()}
    shapes = {name: [str(part.dtype), *part.shape[1:]] for name, part in parts.items()}
    page_sizes = {part.shape[1] for part in parts.values()}
    assert len(page_sizes) == 1, f"{page_sizes=}"
    return PageLayout.of(page_sizes.pop(), sizes, {**facts, "tensors": shapes})


def page_io(parts: Mapping[str, Tensor]) -> PageIO:
    """Pages of tensors [P, Z, ...], all on one device, whose rows are contiguous."""
    device = next(iter(parts.values())).device
    rows = [part.view(part.shape[0], -1).view(torch.uint8) for part in parts.values()]
    return _CudaPages(rows, device) if device.type == "cuda" else _HostPages(rows)


class _HostPages:
    """Pages in host memory, where a step has done its work when it returns: nothing to wait for.

    Copied by numpy, which holds neither the interpreter lock nor a team of threads for it.
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
    """Pages on a GPU. Each thread has a stream and a block on the device: one copy crosses the bus per page."""

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
        stream, staging = self._own()
        with torch.cuda.stream(stream):
            stream.wait_event(fence)
            torch.cat([part[page_id] for part in self._rows], out=staging)
            block.copy_(staging, non_blocking=True)
        stream.synchronize()

    @torch.inference_mode()
    def write_page(self, page_id: int, block: Tensor, fence: Any) -> None:
        stream, staging = self._own()
        with torch.cuda.stream(stream):
            staging.copy_(block, non_blocking=True)
            stream.wait_event(fence)
            for part, content in zip(self._rows, staging.split(self._sizes), strict=True):
                part[page_id].copy_(content)
        stream.synchronize()

    def _own(self) -> tuple[torch.cuda.Stream, Tensor]:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
            self._local.staging = torch.empty(sum(self._sizes), dtype=torch.uint8, device=self._device)
        return self._local.stream, self._local.staging
